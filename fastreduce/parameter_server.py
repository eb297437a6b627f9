"""The parameter server, sharded: every rank serves a part of the parameters and of the optimizer's
state, and holds weights and gradients of all."""

from __future__ import annotations

import contextlib
import copy
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fastreduce import _C, enums, norms, weights
from fastreduce.accumulation import shaped
from fastreduce.communicator import Communicator, Op, said_by_all
from fastreduce.errors import CommunicatorError, UnsynchronizedError
from fastreduce.grad_norm import GradientNorm, agree, check_norm_type, clip_factor
from fastreduce.norms import Norms
from fastreduce.rules import Rule, rule_of
from fastreduce.served import Bucket, Piece

if TYPE_CHECKING:
    from types import TracebackType

    from torch.distributed import ProcessGroup

    from fastreduce.grad_scaler import GradScaler

BUCKET_BYTES = 25 << 20
MASTER = "master"
_WHOLE = "Parameters and optimizer state are those of before this step."
_TORN = (
    "Parameters and optimizer state are partly of before that step and partly new: load a "
    "checkpoint into a new server."
)


class ParameterServer(Optimizer):
    """An optimizer whose state is shared out: each of N ranks keeps 1/N of it, updates 1/N of the
    parameters, and all have all of them after ``step()``. A rank needs memory for weights and
    gradients, and 1/N of the optimizer's state.

    ::

        server = fastreduce.ParameterServer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        for inputs, targets in batches:  # each rank's own
            server.zero_grad()
            loss(model(inputs), targets).backward()
            server.step()

    The model is a plain module, the same on all ranks; its parameters become rank 0's. While
    ``backward()`` goes on, each rank gets the mean over all ranks of those gradients that it serves
    (reduce-scatter); ``step()`` updates them and sends the new parameters to all (all-gather),
    bucket by bucket. Afterwards a ``.grad`` holds the mean only where this rank serves.

    SGD, Adam and AdamW are updated in one loop over memory (SGD in the bits of torch's, see
    :class:`fastreduce.rules.Rule` for the others), 16-bit parameters from a copy in float32. Any
    other class of torch.optim that works element by element steps this rank's pieces, which it sees
    flat.

    Args:
        params: parameters or parameter groups, as for any optimizer; dense and on the CPU.
        optimizer_class: of torch.optim.
        group: the process group of the ranks; None for the default one.
        timeout: seconds that any one wait for a peer may take.
        bucket_bytes: of parameters that are reduced and sent together.
        kwargs: for ``optimizer_class``.

    Raises:
        ValueError: parameters are complex, sparse, or not on the CPU; the ranks have different
            ones; or the optimizer does not work element by element.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        *,
        group: ProcessGroup | None = None,
        timeout: float | timedelta = 600.0,
        bucket_bytes: int = BUCKET_BYTES,
        **kwargs: Any,
    ) -> None:
        template = optimizer_class(params, **kwargs)
        self._built = False
        super().__init__(template.param_groups, template.defaults)
        self._class, self._options = optimizer_class, kwargs
        self._parameters = [each for group in self.param_groups for each in group["params"]]
        self._rules = [rule_of(optimizer_class, each) for each in self.param_groups]
        trained = [each for each in self._parameters if each.requires_grad]
        for each in trained:
            if each.is_complex() or each.layout is not torch.strided or not each.is_cpu:
                raise ValueError(
                    "params: expected real dense parameters on the CPU, got one of "
                    f"{each.dtype}, {each.layout}, on {each.device}"
                )
        self._known = {id(each) for each in trained}
        self._communicator = Communicator(group, timeout)
        self._compare()
        self._steps = [0] * len(self._parameters)
        self._remembers = [False] * len(self._parameters)  # what the steps before have left
        self._used = torch.zeros(len(self._parameters), dtype=torch.uint8)
        self._buckets = self._fill(bucket_bytes)
        self._bucket_of = {i: b for b in self._buckets for i, _ in b.members}
        self._inner = self._make_inner()
        self._launched = 0  # buckets, in order
        self._op: Op = "mean"
        self._scale = 1.0
        self._given = weights.Given()
        self._synchronises = True
        self._begun = False  # a synchronised pass
        self._passes = 0  # since zero_grad() was called
        self._clip: float | None = None
        self._torn = False  # a step has failed in the middle
        self._grad_norm: GradientNorm | None = None
        self._scaler: GradScaler | None = None
        with torch.no_grad():
            for bucket in self._buckets:
                self._communicator.broadcast(bucket.weights)
                if bucket.master is not None:
                    bucket.master.copy_(bucket.own_weights)
            for each in self._parameters:
                if not each.requires_grad:  # the same everywhere, and left alone
                    value = each.detach().contiguous()
                    self._communicator.broadcast(value)
                    each.copy_(value)
        # Weak: the model holds its hooks.
        server = weakref.ref(self)
        self._handles: list[RemovableHandle] = [
            each.register_post_accumulate_grad_hook(_noting(server, index))
            for index, each in enumerate(self._parameters)
            if each.requires_grad
        ]
        self._built = True
        self.zero_grad()

    def _compare(self) -> None:
        """All ranks have the same parameters, in the same groups."""
        own = [
            (tuple(each.shape), each.stride(), str(each.dtype), each.requires_grad)
            for each in self._parameters
        ]
        sizes = [len(group["params"]) for group in self.param_groups]
        mine = zlib.crc32(repr((own, sizes, self._class)).encode())
        every = said_by_all(self._communicator, mine)
        for rank, found in enumerate(every):
            if found != every[0]:
                self._communicator.close()
                raise ValueError(
                    f"params: rank {rank} has other shapes, dtypes, groups or another optimizer "
                    "than rank 0"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only when it is made: what serves whom is settled then."""
        if self._built:
            raise RuntimeError("add_param_group: make a new ParameterServer")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ParameterServer holds connections to other processes and cannot be pickled or "
            "deep-copied: save its state_dict()"
        )

    def _fill(self, bucket_bytes: int) -> list[Bucket]:
        """In about the order in which gradients are computed."""
        buckets: list[Bucket] = []
        last = len(self._parameters)
        for number, group in reversed(list(enumerate(self.param_groups))):
            last -= len(group["params"])
            members: dict[torch.dtype, list[tuple[int, nn.Parameter]]] = {}
            filled: dict[torch.dtype, int] = {}
            for index, each in reversed(list(enumerate(group["params"], last))):
                dtype = each.dtype
                if not each.requires_grad:
                    continue
                if filled.get(dtype, 0) and filled[dtype] + each.nbytes > bucket_bytes:
                    buckets.append(Bucket(self._communicator, number, members.pop(dtype)))
                    filled[dtype] = 0
                members.setdefault(dtype, []).append((index, each))
                filled[dtype] = filled.get(dtype, 0) + each.nbytes
            buckets += [Bucket(self._communicator, number, each) for each in members.values()]
        return buckets

    # -- gradients ----------------------------------------------------------------------------

    @torch.no_grad()
    def note(self, index: int, parameter: nn.Parameter) -> None:
        """A gradient has been accumulated."""
        bucket = self._bucket_of[index]
        if bucket.reduced or (self._begun and index not in bucket.waiting):
            raise RuntimeError(
                "another backward pass after a synchronised one: gradients have been averaged "
                "already, and are spoilt now; call zero_grad(), and accumulate under no_sync()"
            )
        gradient = bucket.view(bucket.gradients, index, parameter)
        assert parameter.grad is not None
        if parameter.grad.is_sparse or parameter.grad.data_ptr() != gradient.data_ptr():
            found = parameter.grad.detach()  # somebody has set it to None before
            gradient.copy_(found.to_dense() if found.is_sparse else found)
            parameter.grad = gradient
        self._used[index] = 1
        if not self._synchronises:
            return
        self._begun = True
        bucket.waiting.discard(index)
        # In the same order on all ranks, in whatever order they compute.
        while self._launched < len(self._buckets) and not self._buckets[self._launched].waiting:
            self._launch(async_op=True)

    def _launch(self, async_op: bool, update: _C.Update | None = None) -> None:
        """The next bucket's gradients go to those who serve them."""
        bucket = self._buckets[self._launched]
        if not self._launched:
            self._op, self._scale = self._factors()
        bucket.reduced = True
        bucket.work = self._communicator.reduce_scatter(
            bucket.own_gradients,
            bucket.gradients,
            self._op,
            async_op,
            scale=self._scale,
            _update=update,
        )
        self._launched += 1

    def _factors(self) -> tuple[Op, float]:
        """Of this rank's gradients in this step. Collective where weights are given."""
        if not self._given.ever:
            return "mean", 1.0
        own, weight = self._given.factors()
        total = self._communicator.total(weight)
        return "sum", own / total if total else 0.0

    def weight(self, n: float, reduction: weights.Reduction = "mean") -> None:
        """How many samples (tokens ...) the next backward pass is over: gradients become the mean
        over all ranks' samples, as with :meth:`HookState.weight`. On all ranks before every
        backward pass, or never; weights of accumulated passes add up until ``zero_grad()``."""
        self._given.forwards = 1
        self._given.add(float(n), reduction)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate."""
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients become zero, and stay where they are, whatever ``set_to_none``. Collective
        where a step is left out after a synchronised backward pass.

        Raises:
            RuntimeError: parameters have been moved (by ``model.to()``, say) or frozen or unfrozen
                since the server was made.
        """
        self._check_parameters()
        if self._begun:  # of a step that was left out: on all ranks alike
            self._finish()
        for bucket in self._buckets:
            bucket.gradients.zero_()
            bucket.reduced = False
            bucket.waiting = {index for index, _ in bucket.members}
            for index, parameter in bucket.members:
                parameter.grad = bucket.view(bucket.gradients, index, parameter)
        self._launched = 0
        self._begun = False
        self._passes += 1
        self._clip = None
        self._grad_norm = None
        self._used.zero_()
        self._given.sum = None

    def _check_parameters(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad != (id(parameter) in self._known):
                raise RuntimeError(
                    f"parameter {index} was frozen or unfrozen after the ParameterServer was made: "
                    "make a new one"
                )
        for bucket in self._buckets:
            for index, parameter in bucket.members:
                view = bucket.view(bucket.weights, index, parameter)
                if parameter.data_ptr() != view.data_ptr() or parameter.stride() != view.stride():
                    raise RuntimeError(
                        f"parameter {index} lies elsewhere than the ParameterServer has put it (by "
                        "model.to(), or an assignment to .data?): make a new one, or copy into it"
                    )

    def _check_rules(self) -> None:
        rules = [rule_of(self._class, group) for group in self.param_groups]
        if [rule is None for rule in rules] != [rule is None for rule in self._rules]:
            raise RuntimeError(
                "param_groups: options that the kernels do not know (amsgrad ...) cannot be "
                "switched: make a new ParameterServer"
            )
        self._rules = rules

    def _finish(self) -> None:
        """All that is to be reduced has been."""
        while self._launched < len(self._buckets):
            self._launch(async_op=False)
        for bucket in self._buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    # -- what is said of them ---------------------------------------------------------------------

    @property
    def grad_norm(self) -> GradientNorm:
        """The norm of the mean gradients of all ranks, as they were before :meth:`clip_grad_norm`.
        Collective the first time after a backward pass."""
        if self._grad_norm is None:
            self._finish()
            counted = Norms()
            for bucket in self._buckets:
                counted.measure(bucket.own_gradients, 0, 1)
            told = self._loss_scale()
            agree(self._communicator.sum_norms(counted, told=told))
            found = norms.total_of([counted])
            self._grad_norm = GradientNorm(found.norm / told, found.largest / told, found.nonfinite)
        return self._grad_norm

    def _loss_scale(self) -> float:
        """By which gradients are too large; 16-bit ones could not hold less."""
        return 1.0 if self._scaler is None else self._scaler.get_scale()

    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """What ``torch.nn.utils.clip_grad_norm_`` does to the mean gradients of all parameters:
        ``step()`` multiplies them as it reads them. Collective.

        Returns:
            The norm before: float32, no dimension.
        """
        check_norm_type(norm_type)
        if self._clip is not None:
            raise RuntimeError("the gradients of this step are clipped already")
        total, self._clip = clip_factor(self.grad_norm, max_norm, norm_type, error_if_nonfinite)
        return total

    def unscale_by(self, scaler: GradScaler) -> None:
        """From now on gradients are divided by a loss scale as they are used; see
        :class:`GradScaler`, which calls this."""
        self._scaler = scaler

    def averages(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is served."""
        return id(parameter) in self._known

    def newer_than(self, passes: int) -> int:
        """How often gradients have been set to zero; raises if it is not more than that."""
        if self._passes == passes:
            raise UnsynchronizedError("no zero_grad() and backward pass since the last step")
        return self._passes

    # -- the update -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates what this rank serves, and gets from the others what they serve. Collective.

        Parameters that no rank has used since ``zero_grad()`` are left as they are.

        Raises:
            CommunicatorError: a peer has died, or does not come. Its text says whether parameters
                are those of before. Where some are not, the server refuses further steps, and to
                be saved.
        """
        self._refuse_torn()
        self._check_parameters()
        self._check_rules()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        updating = False
        # What has only been accumulated is averaged and updated in one loop. Else ranks that have
        # used other parameters have not launched as many buckets: all do before anything else.
        accumulated = not self._begun and bool(self._used.any())
        try:
            if not accumulated:
                self._finish()
            # Who has used what; and nobody changes anything before all have come here.
            self._communicator.all_reduce(self._used, "max")
            updating = True
            self._update(self._used.tolist())
        except BaseException as error:
            self._torn = updating
            if isinstance(error, CommunicatorError):
                error.args = (f"{error} {_TORN if updating else _WHOLE}",)
            raise
        return loss

    def _update(self, used: list[int]) -> None:
        """Of all parameters, and everywhere."""
        for index, flag in enumerate(used):
            self._steps[index] += flag
        for number, bucket in enumerate(self._buckets):
            bucket.adopt()
            rule = self._rules[bucket.group]
            update = None if rule is None else self._update_of(bucket, rule, used)
            if number == self._launched:
                self._launch(async_op=False, update=update)
            elif update is not None:
                at = bucket.own_gradients
                update.run(enums.DTYPE[at.dtype], at.data_ptr(), at.numel())
        if self._inner is not None:
            self._step_inner(used)
        for bucket in self._buckets:
            self._communicator.all_gather(bucket.weights, bucket.own_weights)
        torch.autograd.graph.increment_version(self._parameters)
        for bucket in self._buckets:
            bucket.leave()

    def _update_of(self, bucket: Bucket, rule: Rule, used: list[int]) -> _C.Update:
        """Of this rank's shard, in as few runs as there are numbers of steps."""
        group = self.param_groups[bucket.group]
        names = rule.moments(group)
        runs: list[tuple[int, int, int, bool]] = []  # begin, end, number of the step, the first one
        for piece in bucket.pieces:
            if used[piece.index]:
                step, first = self._steps[piece.index], not self._remembers[piece.index]
                begin, end = piece.place.start, piece.place.stop
                if runs and runs[-1][1:] == (begin, step, first):
                    begin = runs.pop()[0]
                runs.append((begin, end, step, first))
        for index, _ in bucket.members:
            if used[index]:
                self._remembers[index] = bool(names)
        state = [bucket.own_weights, bucket.master, *(bucket.moment(name) for name in names)]
        at = [0 if each is None else each.data_ptr() for each in state] + [0] * (2 - len(names))
        factor = self._factor()
        rows = []
        for begin, end, step, first in runs:
            rows.append((begin, end, rule.rates(group, step, first, factor)))
        return _C.Update(rows, *at)

    def _factor(self) -> float:
        """Of the gradients, as they are used."""
        return (1.0 if self._clip is None else self._clip) / self._loss_scale()

    def _make_inner(self) -> Optimizer | None:
        """The optimizer itself, of those pieces that the kernels do not step, if any."""
        if None not in self._rules:
            return None
        groups = []
        for number, group in enumerate(self.param_groups):
            pieces: list[nn.Parameter] = []
            if self._rules[number] is None:
                for bucket in self._buckets:
                    if bucket.group == number:
                        whole = bucket.own_weights if bucket.master is None else bucket.master
                        pieces += [nn.Parameter(whole[each.place]) for each in bucket.pieces]
            options = {key: value for key, value in group.items() if key != "params"}
            groups.append({**options, "params": pieces})
        return self._class(groups, **self._options)

    def _pieces(self) -> Iterator[tuple[Bucket, Piece, nn.Parameter]]:
        """Of the inner optimizer, each with what that steps."""
        assert self._inner is not None
        for number, group in enumerate(self._inner.param_groups):
            found = iter(group["params"])
            if self._rules[number] is None:
                for bucket in self._buckets:
                    if bucket.group == number:
                        for piece in bucket.pieces:
                            yield bucket, piece, next(found)

    def _step_inner(self, used: list[int]) -> None:
        assert self._inner is not None
        for inner, group in zip(self._inner.param_groups, self.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})
        factor = self._factor()
        for bucket, piece, parameter in self._pieces():
            parameter.grad = None
            if used[piece.index]:
                gradient = bucket.own_gradients[piece.place].to(parameter.dtype)
                parameter.grad = gradient if factor == 1.0 else gradient * factor
        self._inner.step()
        for bucket, piece, parameter in self._pieces():
            parameter.grad = None
            if bucket.master is not None:
                bucket.own_weights[piece.place] = parameter.detach()

    def _refuse_torn(self) -> None:
        if self._torn:
            raise RuntimeError(f"an earlier step failed. {_TORN}")

    # -- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The ordinary state dict of ``optimizer_class`` for all parameters, on every rank:
        collective. It can be loaded by that class, and on another number of ranks. Of 16-bit
        parameters it also holds the float32 copy, as ``master``."""
        self._refuse_torn()
        packed = super().state_dict()
        state: dict[int, dict[str, Any]] = {}
        for bucket in self._buckets:
            rule = self._rules[bucket.group]
            if rule is not None:
                names = rule.moments(self.param_groups[bucket.group])
                shards = {name: bucket.moment(name) for name in names}
                scalars: dict[int, dict[str, Any]] = {
                    index: {"step": torch.tensor(float(self._steps[index]))}
                    if rule.counts_steps
                    else {}
                    for index, _ in bucket.members
                    if self._steps[index]
                }
            else:
                shards, scalars = self._inner_state(bucket)
            if bucket.master is not None:
                shards[MASTER] = bucket.master
            for name in sorted(shards):
                every = torch.empty(bucket.weights.numel(), dtype=shards[name].dtype)
                self._communicator.all_gather(every, shards[name])
                for index, parameter in bucket.members:
                    if index in scalars:
                        scalars[index][name] = bucket.view(every, index, parameter).clone()
            state |= {index: values for index, values in scalars.items() if values}
        packed["state"] = {index: state[index] for index in sorted(state)}
        return packed

    def _inner_state(self, bucket: Bucket) -> tuple[dict[str, Tensor], dict[int, dict[str, Any]]]:
        """What the inner optimizer keeps: shards by name; and what is no shard, by parameter, of
        all that have a state."""
        assert self._inner is not None
        shards: dict[str, Tensor] = {}
        scalars: dict[int, dict[str, Any]] = {}
        for owner, piece, parameter in self._pieces():
            if owner is not bucket:
                continue
            if self._inner.state[parameter]:
                scalars.setdefault(piece.index, {})
            for name, value in self._inner.state[parameter].items():
                if name != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                    if name not in shards:
                        shards[name] = torch.zeros(bucket.count, dtype=value.dtype)
                    shards[name][piece.place] = value
                else:
                    scalars[piece.index][name] = value
        told = self._communicator._group.all_gather_object(
            ({name: shard.dtype for name, shard in shards.items()}, scalars)
        )
        for names, others in told:
            for name, dtype in names.items():
                if name not in shards:
                    shards[name] = torch.zeros(bucket.count, dtype=dtype)
            scalars = {**others, **scalars}
        return shards, scalars

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over an ordinary state dict of ``optimizer_class``, the same on all ranks.

        Raises:
            ValueError: it is of other groups or parameters; nothing has been changed.
        """
        saved = self._validated(state_dict)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._rules = [rule_of(self._class, each) for each in self.param_groups]
        self._inner = self._make_inner()
        for bucket in self._buckets:
            bucket.moments.clear()
            for index, _ in bucket.members:
                values = saved.get(index, {})
                # SGD counts none.
                kept = any(value is not None for value in values.values())
                self._steps[index] = int(values["step"]) if "step" in values else int(kept)
                self._remembers[index] = kept
        for bucket in self._buckets:
            if bucket.master is not None:
                for piece in bucket.pieces:
                    whole = saved.get(piece.index, {}).get(MASTER)
                    if whole is None:
                        whole = self._parameters[piece.index].detach().float()
                    bucket.master[piece.place] = self._part(bucket, piece, whole)
            rule = self._rules[bucket.group]
            if rule is None:
                continue
            names = rule.moments(self.param_groups[bucket.group])
            for name in names:
                shard = bucket.moment(name)
                for piece in bucket.pieces:
                    value = saved.get(piece.index, {}).get(name)
                    if value is not None:
                        shard[piece.place] = self._part(bucket, piece, value)
        if self._inner is not None:
            for bucket, piece, parameter in self._pieces():
                shape = self._parameters[piece.index].shape
                self._inner.state[parameter] = {
                    name: self._part(bucket, piece, value).to(parameter.dtype)
                    if _is_whole(name, value, shape)
                    else copy.deepcopy(value)
                    for name, value in saved.get(piece.index, {}).items()
                    if name != MASTER
                }

    def _validated(self, state_dict: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
        """What is saved of each parameter, by its number here; raises if that does not fit."""
        groups = state_dict["param_groups"]
        sizes = [len(group["params"]) for group in groups]
        if sizes != [len(group["params"]) for group in self.param_groups]:
            raise ValueError(
                f"param_groups: expected {[len(each['params']) for each in self.param_groups]} "
                f"parameters, got {sizes}"
            )
        for number, (given, own) in enumerate(zip(groups, self.param_groups, strict=True)):
            if missing := sorted(self.defaults.keys() & own.keys() - given.keys()):
                raise ValueError(f"param_groups: group {number} lacks {missing}")
        numbers = [number for group in groups for number in group["params"]]
        index_of = {number: index for index, number in enumerate(numbers)}
        saved: dict[int, dict[str, Any]] = {}
        for number, values in state_dict["state"].items():
            if number not in index_of:
                raise ValueError(f"state: parameter {number} is in no group")
            index = index_of[number]
            shape = self._parameters[index].shape
            for name, value in values.items():
                if _is_whole(name, value, shape) and value.shape != shape:
                    raise ValueError(
                        f"state of parameter {number}: expected {name} of shape {tuple(shape)}, "
                        f"got {tuple(value.shape)}"
                    )
            bucket = self._bucket_of.get(index)
            rule = None if bucket is None else self._rules[bucket.group]
            if bucket is not None and rule is not None and rule.counts_steps:
                names = {"step", *rule.moments(self.param_groups[bucket.group])}
                if missing := sorted(names - values.keys()):
                    raise ValueError(f"state of parameter {number}: {missing} are missing")
            saved[index] = values
        return saved

    def _part(self, bucket: Bucket, piece: Piece, whole: Tensor) -> Tensor:
        """This rank's part of something of a parameter's shape."""
        parameter = self._parameters[piece.index]
        memory = torch.empty(parameter.numel(), dtype=whole.dtype)
        shaped(memory, parameter).copy_(whole)
        return memory[piece.begin : piece.end]

    # -- lifetime ---------------------------------------------------------------------------------

    @property
    def communicator(self) -> Communicator:
        """Over which all goes."""
        return self._communicator

    def close(self) -> None:
        """Ends it. Parameters stay as they are, and gradients belong to the user again."""
        for handle in self._handles:
            handle.remove()
        self._communicator.close()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._communicator.__exit__(kind, error, trace)


def _is_whole(name: str, value: Any, shape: torch.Size) -> bool:
    """Whether an entry of a parameter's state has an element for each of the parameter's."""
    if not isinstance(value, Tensor) or name == "step":
        return False
    return value.dim() > 0 or not shape


def _noting(server: weakref.ref[ParameterServer], index: int) -> Callable[[Any], None]:
    """For every gradient of a parameter."""

    def note(parameter: nn.Parameter) -> None:
        found = server()
        if found is not None:
            found.note(index, parameter)

    return note
