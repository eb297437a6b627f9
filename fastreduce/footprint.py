"""What a training step of a model holds and computes, found without a GPU and without its memory.

The model is built and run, forward and backward, on PyTorch's fake tensors: they have shapes,
dtypes and autograd's graph as on the CPU, and storages as on the meta device, of which only the
size exists. A model that needs values on its way (``.item()``, shapes that depend on data) runs on
the CPU instead, with two small batches, and all that depends on the batch is continued in a line.
"""

from __future__ import annotations

import math
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

# Batches of a model that has to run for real: of one sample, batch normalisation refuses some.
_SMALL = (2, 4)

# Of what CUDA's autocast computes in float32, the operations that the CPU's does not, by their
# Python names ("Autocast Op Reference" of PyTorch's documentation).
_FLOAT32 = (
    *("cross_entropy", "cumprod", "cumsum", "exp", "group_norm", "layer_norm", "log"),
    *("log_softmax", "mse_loss", "nll_loss", "norm", "pow", "prod", "rsqrt", "smooth_l1_loss"),
    *("softmax", "softplus", "sum"),
)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> int:
    count: int = sdpa_flop_count(query.shape, key.shape, value.shape)
    return count


def _attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
) -> int:
    count: int = sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape)
    return count


# What counts the operations of which call. torch does not know of the CPU's fused attention.
_FORMULAS = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


@dataclass(frozen=True)
class Sample:
    """One input of a model, of one sample: its shape without the batch, and its dtype; None for the
    model's own."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def batch(self, size: int, dtype: torch.dtype) -> Tensor:
        """Zeros."""
        return torch.zeros(size, *self.shape, dtype=self.dtype or dtype)


@dataclass(frozen=True)
class Pass:
    """One forward and one backward pass. Bytes, and operations; a multiply-add is two.

    Attributes:
        samples: of the batch.
        saved: activations: all that autograd has saved when forward ends, every storage once;
            parameters, gradients, buffers and inputs are left out.
        temporary: beside all these, at the moment at which most is held: outputs, gradients of
            activations, results on their way.
        inputs: the batch.
        outputs: of the layers that have parameters, added up; the usual estimate of a model summary
            is twice that.
        forward, backward: floating-point operations of matrix products, convolutions and attention.
    """

    samples: float
    saved: float
    temporary: float
    inputs: float
    outputs: float
    forward: float
    backward: float


@dataclass(frozen=True)
class Gradient:
    """A parameter's, in the order in which backward finishes them.

    Attributes:
        ready: the share of backward's operations that have been done by then, 0 to 1.
    """

    shape: tuple[int, ...]
    nbytes: int
    ready: float

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Footprint:
    """A model, and two passes of it.

    Attributes:
        elements: of all parameters.
        weights, buffers: bytes.
        gradients: of the parameters that are trained.
        passes: of two different batches.
        ran: why the model had to run on the CPU, with small batches; None if it did not.
    """

    elements: int
    weights: int
    buffers: int
    gradients: tuple[Gradient, ...]
    passes: tuple[Pass, Pass]
    ran: str | None

    def at(self, samples: int) -> Pass:
        """A pass of another batch, on the line through the two."""
        a, b = self.passes
        share = (samples - a.samples) / (b.samples - a.samples)
        values = {
            field.name: getattr(a, field.name)
            + share * (getattr(b, field.name) - getattr(a, field.name))
            for field in fields(Pass)
        }
        return Pass(**values)


class _Meter(TorchDispatchMode):
    """Counts operations, and the bytes of all storages that are alive, apart from those ``known``
    before."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.now = self.most = self.operations = 0

    def knows(self, tensor: Tensor) -> bool:
        """Whether its storage is one of those."""
        return tensor.untyped_storage()._cdata in self._known

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # FlopCounterMode has these formulas, too, but keeps tensors alive.
        count = _FORMULAS.get(func.overloadpacket)
        if count is not None:
            self.operations += count(*args, **kwargs, out_val=result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._meet(tensor)
        return result

    def _meet(self, tensor: Tensor) -> None:
        if tensor.layout != torch.strided:  # a sparse gradient has no storage of its own
            return
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive:
            return

        def forget(_: object) -> None:
            del self._alive[key]
            self.now -= nbytes

        self._alive[key] = weakref.ref(storage, forget)
        self.now += nbytes
        self.most = max(self.most, self.now)


class _AsOnGpu(TorchFunctionMode):
    """Where PyTorch's CPU way saves other tensors than its CUDA way: there dropout keeps a mask of
    one byte an element, fused attention none, and autocast computes more in float32."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs = {**kwargs, "dropout_p": 0.0}
        if func is functional.multi_head_attention_forward and not kwargs.get("need_weights", True):
            kwargs = {**kwargs, "training": False}  # of which nothing but its dropout depends
        if getattr(func, "__name__", "") in _FLOAT32 and torch.is_autocast_enabled("cpu"):
            narrow = torch.get_autocast_dtype("cpu")
            widen = partial(_widened, narrow)
            args, kwargs = tree_map_only(Tensor, widen, (args, kwargs))
        return func(*args, **kwargs)


def _widened(narrow: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == narrow else tensor


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or not 0 < p < 1:
        return functional.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _summed(outputs: list[Tensor]) -> Tensor:
    return torch.stack([output.sum() for output in outputs]).sum()


def _cross_entropy(outputs: list[Tensor]) -> Tensor:
    scores = outputs[0].flatten(0, -2)
    return functional.cross_entropy(scores, scores.new_zeros(len(scores), dtype=torch.int64))


# The scalar of which the gradient is taken, of a model's floating-point outputs.
LOSSES: Mapping[str, Callable[[list[Tensor]], Tensor]] = {
    "sum": _summed,
    "cross_entropy": _cross_entropy,
}


def run_pass(
    model: nn.Module,
    inputs: Sequence[Tensor],
    *,
    loss: str = "sum",
    autocast: torch.dtype | None = None,
) -> tuple[Pass, tuple[Gradient, ...]]:
    """One pass, on whatever tensors the model and the inputs, (batch, ...), are.

    Gradients are there beforehand, as they are with accumulation or in DDP's buckets, so that
    backward adds to them.

    Args:
        loss: one of :data:`LOSSES`: the sum of all outputs, or the cross entropy of the first
            output's last dimension.
        autocast: the narrower dtype.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError("model: expected parameters that require gradients, got none")
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    known = [*model.parameters(), *(p.grad for p in parameters), *model.buffers(), *inputs]
    meter = _Meter(tensor for tensor in known if tensor is not None)
    saved: dict[int, weakref.ref[torch.UntypedStorage]] = {}
    layers: list[int] = []
    order: dict[Tensor, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not meter.knows(tensor):
            storage = tensor.untyped_storage()
            saved[storage._cdata] = weakref.ref(storage)
        return tensor

    def finish(parameter: Tensor) -> None:
        order[parameter] = meter.operations

    def measure(module: nn.Module, arguments: object, outputs: object) -> None:
        layers.append(sum(tensor.nbytes for tensor in _tensors(outputs)))

    hooks = [parameter.register_post_accumulate_grad_hook(finish) for parameter in parameters]
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            hooks.append(module.register_forward_hook(measure))
    try:
        with ExitStack() as stack:
            stack.enter_context(meter)
            # With the first operation in a mode torch imports modules, and the frames from which it
            # does so stay for a while: they had better not be the model's.
            torch.empty(0)
            stack.enter_context(_AsOnGpu())
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                with torch.autocast("cpu", autocast, enabled=autocast is not None):
                    result = model(*inputs)  # which a training loop holds to the end
                    value = _loss(result, loss)
                storages = [storage for each in saved.values() if (storage := each()) is not None]
                activations = sum(storage.nbytes() for storage in storages)
                del storages
            forward, outputs = meter.operations, sum(layers)
            _backward(value)
    finally:
        for hook in hooks:
            hook.remove()
    backward = meter.operations - forward
    found = Pass(
        samples=len(inputs[0]),
        saved=activations,
        temporary=meter.most - activations,
        inputs=sum(tensor.nbytes for tensor in inputs),
        outputs=outputs,
        forward=forward,
        backward=backward,
    )
    unused = [parameter for parameter in parameters if parameter not in order]
    gradients = []
    for place, each in enumerate([*order, *unused], 1):
        ready = place / len(parameters)
        if backward:
            ready = (order.get(each, forward + backward) - forward) / backward
        gradients.append(Gradient(tuple(each.shape), each.nbytes, ready))
    return found, tuple(gradients)


def _backward(value: Tensor) -> None:
    """Without ``Tensor.backward()``, which would go through _AsOnGpu and leave it meanwhile: what
    is computed anew needs it."""
    torch.autograd.graph._engine_run_backward(
        (value,),
        (torch.ones_like(value),),
        False,  # keep the graph
        False,  # create one of backward
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _loss(result: object, loss: str) -> Tensor:
    outputs = [tensor for tensor in _tensors(result) if tensor.requires_grad]
    if not outputs:
        raise ValueError("model: expected an output that requires a gradient, got none")
    return LOSSES[loss](outputs)


def checkpoint_modules(model: nn.Module, pattern: str) -> None:
    """From now on the modules whose class or name matches are computed anew in backward.

    Args:
        pattern: as in a shell: ``BasicBlock``, ``layers.*``. A module within another one that
            matches is left alone.

    Raises:
        ValueError: none matches.
    """
    chosen: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in chosen)
        matches = fnmatchcase(type(module).__name__, pattern) or fnmatchcase(name, pattern)
        if name and matches and not inside:
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
            chosen.append(name)
    if not chosen:
        classes = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"checkpoint: expected the class or the name of a module, got {pattern!r}; classes "
            f"are {', '.join(classes)}"
        )


def _faked(build: Callable[[], nn.Module], dtype: torch.dtype, fake: FakeTensorMode) -> nn.Module:
    """The model, of fake tensors. It is built where it takes no memory: of such tensors, or, as
    some initial values cannot be drawn then, on the meta device; and for real where both fail."""
    ways: list[Any] = [fake, torch.device("meta"), nullcontext()]
    while True:
        try:
            with ways.pop(0):
                model = build()
            break
        except Exception:
            if not ways:
                raise
    faked: dict[Tensor, Tensor] = {}
    for module in model.modules():
        tensors: list[tuple[str, Tensor]] = [
            *module.named_parameters(recurse=False, remove_duplicate=False),
            *module.named_buffers(recurse=False, remove_duplicate=False),
        ]
        for name, tensor in tensors:
            if tensor not in faked:
                kind = dtype if tensor.is_floating_point() else tensor.dtype
                with fake:
                    like = torch.empty_like(tensor, dtype=kind, device="cpu")
                trained = isinstance(tensor, nn.Parameter)
                faked[tensor] = nn.Parameter(like, tensor.requires_grad) if trained else like
            setattr(module, name, faked[tensor])
    return model


def footprint(
    build: Callable[[], nn.Module],
    samples: Sequence[Sample],
    batches: tuple[int, int],
    *,
    dtype: torch.dtype = torch.float32,
    autocast: torch.dtype | None = None,
    recompute: str | None = None,
    loss: str = "sum",
    progress: Callable[[str], object] = lambda _: None,
) -> Footprint:
    """Builds the model and finds what two passes of it take.

    Args:
        build: gives a new model.
        samples: the model's inputs, in order.
        batches: two different ones.
        dtype: of parameters, and of inputs that name none.
        autocast: see :func:`run_pass`; and so for ``loss``.
        recompute: see :func:`checkpoint_modules`.
        progress: is told what goes on.

    Raises:
        ValueError: the model can be run neither way, or ``recompute`` names none of its modules.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    ways: list[tuple[Any, tuple[int, int]]] = [(fake, batches), (nullcontext(), _SMALL)]
    reasons: list[str] = []
    needed = 0
    for mode, sizes in ways:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > free:
            reasons.append(f"{needed} bytes of memory are needed, and {free} are free")
            break
        with warnings.catch_warnings():
            # What modules that copy themselves say of fake parameters.
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            progress("building the model")
            try:
                model = _faked(build, dtype, fake) if mode is fake else build().to(dtype)
            except Exception as error:
                reasons.append(_reason(error))
                continue
        with mode:
            model.train()
            parameters = list(model.parameters())
            weights = sum(parameter.nbytes for parameter in parameters)
            needed = 2 * weights  # and gradients
            if recompute is not None:
                checkpoint_modules(model, recompute)
            passes = []
            try:
                for size in sizes:
                    progress(f"a batch of {size}")
                    batch = [each.batch(size, dtype) for each in samples]
                    passes.append(run_pass(model, batch, loss=loss, autocast=autocast))
            except Exception as error:
                reasons.append(_reason(error))
                continue
        (first, gradients), (second, _) = passes
        return Footprint(
            elements=sum(parameter.numel() for parameter in parameters),
            weights=weights,
            buffers=sum(buffer.nbytes for buffer in model.buffers()),
            gradients=gradients,
            passes=(first, second),
            ran=reasons[0] if reasons else None,
        )
    raise ValueError(
        f"model: it cannot be run: with fake tensors, {reasons[0]}; on the CPU, {reasons[1]}"
    )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def optimizer_bytes(
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    shapes: Iterable[Sequence[int]],
    dtype: torch.dtype,
) -> int:
    """Bytes of an optimizer's state after a step, found on the meta device; single numbers (the
    number of steps) are left out.

    Args:
        shapes: of the parameters.
        dtype: of the parameters that it is given.

    Raises:
        ValueError: it cannot step without values.
    """
    parameters = []
    for shape in shapes:
        parameter = nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"))
        parameter.grad = torch.empty_like(parameter)
        parameters.append(parameter)
    stepped = optimizer(parameters)
    try:
        stepped.step()
    except Exception as error:
        raise ValueError(
            f"optimizer: {type(stepped).__name__} cannot be measured without values: {error}"
        ) from error
    return sum(
        value.nbytes
        for state in stepped.state.values()
        for value in _tensors(state)
        if value.dim() > 0
    )
