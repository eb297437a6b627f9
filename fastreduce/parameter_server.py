"""The parameter server: some ranks, or all of them, serve parts of the parameters and of the
optimizer's state; all hold weights and gradients."""

from __future__ import annotations

import contextlib
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fastreduce import norms, server_state, weights
from fastreduce.accumulation import NARROW, Shards, TreeAccumulator, shaped, shards_of
from fastreduce.communicator import Algorithm, Communicator, said_by_all
from fastreduce.compression import Compression, Step
from fastreduce.errors import CommunicatorError, UnsynchronizedError
from fastreduce.grad_norm import GradientNorm, agree, check_norm_type, clip_factor
from fastreduce.norms import UNIT, Norms
from fastreduce.process_group import fail, failing
from fastreduce.rules import rule_of
from fastreduce.served import Bucket, Dealing, Memory, Piece, buckets_of
from fastreduce.shard import Shard, Update, options_of
from fastreduce.shares import Shares as Ranges
from fastreduce.wire import SMALL_BYTES, Policy, Schedule

if TYPE_CHECKING:
    from types import TracebackType

    from torch.distributed import ProcessGroup

    from fastreduce.grad_scaler import GradScaler

BUCKET_BYTES = 25 << 20
_FUSED_BYTES = 1 << 20  # of fewer a loop of its own costs nothing
_WHOLE = "Parameters and optimizer state are those of before this step."
_DONE = (
    "This rank has come to the end of the step: its parameters and its part of the optimizer state "
    "are those of after it."
)
_HALF = (
    "What this rank keeps is that of after this step, other parameters are those of before: save "
    "shard_state_dict() on every rank that is left, and merge them."
)
_TORN = (
    "Parameters and optimizer state are partly of before that step and partly new: load a "
    "checkpoint into a new server."
)


@dataclass
class _Pass:
    """What has become of the gradients since zero_grad().

    Attributes:
        launched: buckets whose reduction has begun, in order.
        begun: some has, so that nothing may be accumulated any more.
        scale, weight: of this rank's gradients.
        wired: of what is compressed, until it has ended.
        shards_weight: of logical shards that have come to their end.
        clip: what gradients are multiplied by.
        grad_norm: once it has been asked for.
    """

    launched: int = 0
    begun: bool = False
    scale: float = 1.0
    weight: weights.Weight | None = None
    wired: Step | None = None
    shards_weight: float | None = None
    clip: float | None = None
    grad_norm: GradientNorm | None = None


class ParameterServer(Optimizer):
    """An optimizer whose state is kept, and whose parameters are updated, by those ranks that serve
    them: all of N ranks 1/N each, or some ranks everything. All ranks have all parameters after
    ``step()``. A rank needs memory for weights and gradients, and for the state that it keeps.

    ::

        server = fastreduce.ParameterServer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        for inputs, targets in batches:  # each rank's own
            server.zero_grad()
            loss(model(inputs), targets).backward()
            server.step()

    The model is a plain module, the same on all ranks, or a ``DistributedDataParallel`` one (pass
    it as ``ddp``, too); its parameters become rank 0's. While ``backward()`` goes on, each server
    gets the mean over all ranks of those gradients that it serves (reduce-scatter); ``step()``
    updates them and sends the new parameters to all (all-gather). Afterwards a ``.grad`` holds the
    mean only where this rank serves.

    SGD, Adam and AdamW are updated in one loop over memory (SGD in the bits of torch's, see
    :class:`fastreduce.rules.Rule` for the others), 16-bit parameters from a copy in float32. Any
    other class of torch.optim that works element by element steps this rank's pieces, which it sees
    flat.

    Args:
        params: parameters, named or not, or parameter groups, as for any optimizer; dense and on
            the CPU.
        optimizer_class: of torch.optim.
        ddp: a DDP model without a communication hook, of whose gradients this becomes the
            communication. Of its buckets they are then; accumulate under ``ddp.no_sync()``.
        servers: "sharded", or the ranks that serve (numbers within the group).
        workers: the ranks that compute gradients, all by default: the mean is over them. The others
            call ``zero_grad()`` and ``step()`` alike, without a backward pass. Not with ``ddp``.
        replicas: what a rank serves, the next rank keeps and updates, too: nothing is lost with
            one rank. Costs the memory and the time of another shard.
        wire: in which format gradients travel to the servers, as for :class:`HookState`, of those
            that encode every element.
        warmup_steps, wire_min_bytes, wire_seed: likewise.
        parameter_wire: "fp32", or "bf16": float32 parameters are sent, and are everywhere, rounded
            to bfloat16, and their servers keep them in float32.
        group: the process group of the ranks; None for the default one, or ``ddp``'s.
        timeout: seconds that any one wait for a peer may take.
        bucket_bytes: of parameters that are reduced together; not with ``ddp``.
        kwargs: for ``optimizer_class``.

    Raises:
        ValueError: parameters are complex, sparse, or not on the CPU; the ranks have different
            ones, or other arguments; or the optimizer does not work element by element.
    """

    on_gpus = False  # for GradScaler

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        *,
        ddp: DistributedDataParallel | None = None,
        servers: Literal["sharded"] | Sequence[int] = "sharded",
        workers: Sequence[int] | None = None,
        replicas: bool = False,
        wire: Schedule = "fp32",
        warmup_steps: int = 0,
        wire_min_bytes: int = SMALL_BYTES,
        wire_seed: int = 0,
        parameter_wire: Literal["fp32", "bf16"] = "fp32",
        group: ProcessGroup | None = None,
        timeout: float | timedelta = 600.0,
        bucket_bytes: int = BUCKET_BYTES,
        **kwargs: Any,
    ) -> None:
        template = optimizer_class(params, **kwargs)
        self._built = self._closed = False
        super().__init__(template.param_groups, template.defaults)
        self._class, self._ddp = optimizer_class, ddp is not None
        for each in self.param_groups:
            rule_of(optimizer_class, each)  # raises what cannot be
        self._list_parameters(ddp)
        if parameter_wire not in ("fp32", "bf16"):
            raise ValueError(f'parameter_wire: expected "fp32" or "bf16", got {parameter_wire!r}')
        if ddp is not None:
            if workers is not None:
                raise ValueError("workers: expected None with ddp, whose ranks all compute")
            self._check_model(ddp)
            group = ddp.process_group if group is None else group
        policy = Policy(wire, warmup_steps, wire_min_bytes)
        self._communicator = Communicator(group, timeout)
        rank, ranks = self._communicator.rank, self._communicator.world_size
        self._handles: list[RemovableHandle] = []
        self._compression: Compression | None = None
        try:
            serving = _ranks("servers", None if servers == "sharded" else servers, ranks)
            working = _ranks("workers", workers, ranks)
            shapes = {self._names[i]: self._parameters[i].shape for i in sorted(self._trained)}
            wires = policy.fingerprints(shapes), wire_seed
            self._compare(wires, serving, working, replicas, parameter_wire, bucket_bytes)
            if policy.compresses:
                dealt = serving, UNIT
                self._compression = Compression(policy, wire_seed, torch.float32, servers=dealt)
                self._compression.connect(self._communicator, shapes)
            self._works, self._all_work = rank in working, len(working) == ranks
            self._dealing = Dealing(serving, self._names, self._parameters)
            self._memory = self._fill(torch.bfloat16 if parameter_wire == "bf16" else None)
            self._flats = self._memory.flats
            self._lay_out(bucket_bytes)
            self._replicas = replicas and ranks > 1
            own = self._keep()
            self._shard = Shard(optimizer_class, kwargs, self.param_groups, self._group_of, own)
            self._open()
            if ddp is not None:
                ddp.register_comm_hook(self, served_hook)
        except BaseException:
            self.close()
            raise
        self._built = True

    def _open(self) -> None:
        """For the first step."""
        self._token = self._communicator._group.all_gather_object(uuid.uuid4().hex)[0]
        self._ballot = self._communicator.ballot()
        self._places = [(each.data_ptr(), each.stride()) for each in self._parameters]
        self._arrived = 0  # the shard's generation of which all parameters are
        self._broken = ""  # a step has failed in the middle, and what that means
        self._given = weights.Given()
        self._spares: dict[nn.Parameter, list[Tensor]] = {}  # memory of the shards' sums
        self._scaler: GradScaler | None = None
        self._pass = _Pass()
        self._passes = 0  # how often zero_grad() was called
        self._loss_scaled = 1.0  # in which units the wire's residuals are
        self._synchronises = True
        self._shards: Shards | None = None  # under way
        # Weak: the model holds its hooks.
        server = weakref.ref(self)
        self._handles += [
            self._parameters[index].register_post_accumulate_grad_hook(_noting(server, index))
            for index in sorted(self._trained)
        ]
        self.zero_grad()

    def _list_parameters(self, ddp: DistributedDataParallel | None) -> None:
        groups = self.param_groups
        self._parameters = [each for group in groups for each in group["params"]]
        self._group_of = [number for number, group in enumerate(groups) for _ in group["params"]]
        self._numbers = {id(each): index for index, each in enumerate(self._parameters)}
        self._trained = {i for i, each in enumerate(self._parameters) if each.requires_grad}
        for index in sorted(self._trained):
            each = self._parameters[index]
            if each.is_complex() or each.layout is not torch.strided or not each.is_cpu:
                raise ValueError(
                    "params: expected real dense parameters on the CPU, got one of "
                    f"{each.dtype}, {each.layout}, on {each.device}"
                )
        self._names = self._named(ddp)
        # Which have been used; and whether something is not finite.
        self._used = torch.zeros(len(self._parameters) + 1, dtype=torch.uint8)

    def _lay_out(self, bucket_bytes: int) -> None:
        """Where gradients lie. With DDP its buckets say so, pass by pass."""
        self._buckets: list[Bucket] = []
        self._bucket_of: dict[int, Bucket] = {}
        self._seen: dict[tuple[int, ...], Ranges] = {}  # of DDP's, by the parameters in them
        self._gradients: dict[int, Tensor] = {}  # of each parameter, flat
        for flat in [] if self._ddp else self._flats:
            assert flat.gradients is not None
            ranks = self._communicator.world_size
            buckets, by_index = buckets_of(flat, self._dealing, ranks, bucket_bytes)
            self._buckets += buckets
            self._bucket_of |= by_index
            self._gradients |= {index: flat.of(flat.gradients, index) for index in flat.offsets}
        self._views = {
            index: shaped(flat, self._parameters[index]) for index, flat in self._gradients.items()
        }

    def _check_model(self, ddp: DistributedDataParallel) -> None:
        if ddp._comm_hooks:
            raise ValueError("ddp: expected a model without a communication hook")
        ignored = ddp.parameters_to_ignore
        of_model = {
            id(each)
            for name, each in ddp.module.named_parameters()
            if each.requires_grad and name not in ignored
        }
        mine = {id(self._parameters[index]) for index in self._trained}
        if of_model != mine:
            raise ValueError(
                "params: expected all trained parameters of ddp, and no others: "
                f"{len(of_model - mine)} are missing, {len(mine - of_model)} are not its own"
            )

    def _named(self, ddp: DistributedDataParallel | None) -> list[str]:
        """A name of each parameter that is the same on all ranks."""
        names: list[str] = []
        for group in self.param_groups:
            first = len(names)
            numbers = [str(first + k) for k in range(len(group["params"]))]
            names += group.get("param_names", numbers)
        if len({*names}) < len(names):  # groups of several modules
            names = [f"{number}.{name}" for number, name in zip(self._group_of, names, strict=True)]
        if ddp is None:
            return names
        of_model = {id(each): name for name, each in ddp.module.named_parameters()}
        return [
            of_model.get(id(each), name) for each, name in zip(self._parameters, names, strict=True)
        ]

    def _compare(self, *arguments: Any) -> None:
        """All ranks have the same parameters, in the same groups, and arguments."""
        own = [
            (tuple(each.shape), each.stride(), str(each.dtype), each.requires_grad)
            for each in self._parameters
        ]
        sizes = [len(group["params"]) for group in self.param_groups]
        options = [options_of(group) for group in self.param_groups]
        said = repr((own, sizes, options, self._names, self._class, arguments))
        every = said_by_all(self._communicator, zlib.crc32(said.encode()))
        for rank, found in enumerate(every):
            if found != every[0]:
                raise ValueError(
                    f"params: rank {rank} has other shapes, dtypes, names, groups or arguments, or "
                    "another optimizer than rank 0"
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

    @torch.no_grad()
    def _fill(self, narrow: torch.dtype | None) -> Memory:
        """Moves parameters where peers see them, in about the order in which gradients are
        computed, and makes them rank 0's."""
        members: dict[torch.dtype, list[tuple[int, nn.Parameter]]] = {}
        for index, each in reversed(list(enumerate(self._parameters))):
            if index in self._trained and each.numel():
                members.setdefault(each.dtype, []).append((index, each))
            elif not each.requires_grad:  # the same everywhere, and left alone
                value = each.detach().contiguous()
                self._communicator.broadcast(value)
                if not torch.equal(each, value):
                    each.copy_(value)
        memory = Memory(self._communicator, members, self._dealing, not self._ddp, narrow)
        for flat in memory.flats:
            self._communicator.broadcast(flat.weights)
        return memory

    @torch.no_grad()
    def _keep(self) -> list[Piece]:
        """What this rank serves, and what it mirrors."""
        rank, ranks = self._communicator.rank, self._communicator.world_size
        owners = [rank, (rank - 1) % ranks] if self._replicas else [rank]
        pieces = []
        for flat in self._flats:
            for owner in owners:
                for index, parameter in flat.members:
                    place = self._dealing.range_of(index, owner)
                    if place[0] < place[1]:
                        memory = flat.of(flat.weights, index)
                        number = self._group_of[index]
                        mirrors = owner != rank
                        pieces.append(
                            Piece(index, number, parameter, memory, place, flat.narrow, mirrors)
                        )
            flat.round()
        for piece in pieces:
            if piece.mirrors:
                piece.weights.copy_(piece.memory)
            piece.leave()
        return pieces

    # -- gradients ----------------------------------------------------------------------------

    @torch.no_grad()
    def note(self, index: int, parameter: nn.Parameter) -> None:
        """A gradient has been accumulated."""
        self._used[index] = 1
        if self._ddp or self._shards is not None or index not in self._bucket_of:
            return
        bucket = self._bucket_of[index]
        if bucket.work is not None or (self._pass.begun and index not in bucket.waiting):
            raise RuntimeError(
                "another backward pass after a synchronised one: gradients have been averaged "
                "already, and are spoilt now; call zero_grad(), and accumulate under no_sync()"
            )
        gradient = self._views[index]
        assert parameter.grad is not None
        if parameter.grad.is_sparse or parameter.grad.data_ptr() != gradient.data_ptr():
            found = parameter.grad.detach()  # somebody has set it to None before
            gradient.copy_(found.to_dense() if found.is_sparse else found)
            parameter.grad = gradient
        if not self._synchronises:
            return
        self._pass.begun = True
        bucket.waiting.discard(index)
        # In the same order on all ranks, in whatever order they compute.
        while (
            self._pass.launched < len(self._buckets)
            and not self._buckets[self._pass.launched].waiting
        ):
            self._launch()

    def _launch(self, here: bool = False) -> None:
        """The next bucket's gradients go to those who serve them."""
        bucket = self._buckets[self._pass.launched]
        self._pass.begun = True
        self._drop(bucket)
        bucket.work = self._reduce(bucket, first=not self._pass.launched, here=here)
        self._pass.launched += 1

    def _drop(self, bucket: Bucket) -> None:
        """Gradients that somebody has set to None since they were accumulated."""
        for index, parameter in bucket.members:
            if self._used[index] and parameter.grad is None:
                self._views[index].zero_()
                self._used[index] = 0
                parameter.grad = self._views[index]

    def _reduce(
        self, bucket: Bucket, *, first: bool, move: bool = False, here: bool = False
    ) -> Future[Tensor]:
        """``first``: of a pass."""
        if first:
            self._pass.scale, self._pass.weight = self._factors()
        if self._compression is not None:
            if first:
                self._begin_wire(self._compression)
            assert self._pass.wired is not None
            named = [(self._names[index], parameter) for index, parameter in bucket.members]
            layout = self._compression.layout(self._pass.wired, named, bucket.gradients.dtype)
            if layout is not None:
                unused = {self._names[i] for i, _ in bucket.members if not self._used[i]}
                return self._compression.all_reduce(
                    self._pass.wired,
                    layout,
                    bucket.gradients,
                    absent=unused,
                    scale=self._pass.scale,
                    weight=self._pass.weight,
                    here=here,
                    done=None,
                )
        return self._communicator.reduce_scatter_v(
            bucket.gradients,
            bucket.shares,
            scale=self._pass.scale,
            weight=self._pass.weight,
            move=move,
            here=here,
        )

    def _begin_wire(self, compression: Compression) -> None:
        scale = self._loss_scale()
        if scale != self._loss_scaled:  # what has been kept back is of scaled gradients, too
            compression.rescale(scale / self._loss_scaled)
            self._loss_scaled = scale
        self._pass.wired = compression.begin(weighted=self._pass.weight is not None)

    def _end_wire(self, discard: bool) -> None:
        """Whether what the encoding has lost in this pass counts: on all ranks alike."""
        if self._compression is not None and self._pass.wired is not None:
            self._compression.end(self._pass.wired, discard=discard)
            self._pass.wired = None

    def _factors(self) -> tuple[float, weights.Weight | None]:
        """Of this rank's gradients in this step, and its part of the divisor."""
        if not self._works:
            return 0.0, 0.0
        if self._pass.shards_weight is not None:
            return 1.0, self._pass.shards_weight
        if self._given.ever:
            return self._given.factors()
        return 1.0, None if self._all_work else 1.0

    def average(self, bucket: Any) -> Future[Tensor]:
        """Of a bucket of DDP's; see :func:`served_hook`."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        if self._closed:
            raise RuntimeError("the parameter server of this DDP model is closed")
        if buffer.is_sparse:
            raise RuntimeError("ParameterServer: expected dense gradients of a DDP model")
        members = [(self._numbers[id(each)], each) for each in parameters]
        key = tuple(index for index, _ in members)
        offsets, end = {}, 0
        for index, each in members:
            offsets[index] = end
            end += each.numel()
        if key not in self._seen:
            self._seen[key] = self._dealing.shares(offsets, self._communicator.world_size, 0, end)
        if any(index in self._gradients for index in key):
            raise RuntimeError(
                "another backward pass after a synchronised one: gradients have been averaged "
                "already, and are spoilt now; call zero_grad(), and accumulate under ddp.no_sync()"
            )
        for index, each in members:
            self._gradients[index] = buffer[offsets[index] : offsets[index] + each.numel()]
        found = Bucket(buffer, self._seen[key], members)
        found.work = self._reduce(found, first=not self._pass.begun, move=True)
        self._pass.begun = True
        self._buckets.append(found)
        return found.work

    def weight(self, n: float, reduction: weights.Reduction = "mean") -> None:
        """How many samples (tokens ...) the next backward pass is over: gradients become the mean
        over all ranks' samples, as with :meth:`HookState.weight`. On all workers before every
        backward pass, or never; weights of accumulated passes add up until ``zero_grad()``."""
        if not self._all_work:
            raise RuntimeError("weight: expected all ranks to be workers")
        self._given.forwards = 1
        self._given.add(float(n), reduction)
        if self._shards is not None:
            self._shards.weigh(float(n), reduction)

    def shards(self, count: int) -> Iterator[int]:
        """The numbers of this rank's logical shards of a step, as with :meth:`HookState.shards`:
        training gives the same bits on 1, 2, 4 ... ranks::

            server.zero_grad()
            for shard in server.shards(8):
                loss(model(inputs[shard]), targets[shard]).backward()
            server.step()

        Args:
            count: logical shards of the global batch: a power of two that the number of ranks
                divides.

        Raises:
            ValueError: the count does not fit.
            RuntimeError: with a DDP model, a wire, servers that compute nothing, through a process
                group, or for 16-bit parameters; or after a backward pass since ``zero_grad()``.
        """
        self._refuse_broken()
        first, own = shards_of(count, self._communicator.rank, self._communicator.world_size)
        if self._ddp or self._compression is not None or not self._all_work:
            raise RuntimeError("shards: expected no ddp, no wire, and all ranks to be workers")
        if not self._communicator.shared_memory and self._communicator.world_size > 1:
            raise RuntimeError("shards: a process group does not promise an order of summation")
        if any(flat.weights.dtype in NARROW for flat in self._flats):
            raise RuntimeError("shards: expected float32 or float64 parameters")
        if self._shards is not None or bool(self._used.any()):
            raise RuntimeError("shards: call zero_grad() first, and leave no loop before its end")
        return self._run_shards(first, own)

    def _run_shards(self, first: int, own: int) -> Iterator[int]:
        parameters = [self._parameters[index] for index in self._views]
        for parameter in parameters:
            parameter.grad = None
        accumulator = TreeAccumulator(parameters, own, self._spares)
        shards = self._shards = Shards(accumulator, self._communicator)
        try:
            for shard in accumulator.shards():
                yield first + shard
                if shard == own - 1:
                    self._pass.shards_weight = shards.total(self._given.ever)
                shards.end(self._given.ever)
            with torch.no_grad():
                for index, view in self._views.items():
                    parameter = self._parameters[index]
                    total, _ = accumulator.finish(parameter)
                    if total is None:
                        view.zero_()
                    else:
                        view.copy_(total.to_dense() if total.is_sparse else total)
                    parameter.grad = view
        finally:
            self._shards = None
            accumulator.close()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside only accumulate. (With DDP: ``ddp.no_sync()``.)"""
        if self._ddp:
            raise RuntimeError("no_sync: use ddp.no_sync()")
        before, self._synchronises = self._synchronises, False
        try:
            yield
        finally:
            self._synchronises = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients become zero, and stay where they are, whatever ``set_to_none`` (which counts
        with DDP only). Collective where a step is left out after a synchronised backward pass.

        Raises:
            RuntimeError: parameters have been moved (by ``model.to()``, say) or frozen or unfrozen
                since the server was made; or a step has failed in the middle.
        """
        self._refuse_broken()
        self._check_parameters()
        if self._pass.begun:  # of a step that was left out: on all ranks alike
            self._finish()
            self._end_wire(discard=True)
        if self._ddp:
            super().zero_grad(set_to_none)
            self._buckets, self._gradients = [], {}
        else:
            for flat in self._flats:
                assert flat.gradients is not None
                flat.gradients.zero_()
            for bucket in self._buckets:
                bucket.work = None
                bucket.waiting = {index for index, _ in bucket.members}
            for index, view in self._views.items():
                self._parameters[index].grad = view
        self._pass = _Pass()
        self._passes += 1
        self._used.zero_()
        self._given.sum = None

    def _check_parameters(self) -> None:
        for index, parameter in enumerate(self._parameters):
            if parameter.requires_grad != (index in self._trained):
                raise RuntimeError(
                    f"parameter {index} was frozen or unfrozen after the ParameterServer was made: "
                    "make a new one"
                )
            place = parameter.data_ptr(), parameter.stride()
            if index in self._trained and place != self._places[index]:
                raise RuntimeError(
                    f"parameter {index} lies elsewhere than the ParameterServer has put it (by "
                    "model.to(), or an assignment to .data?): make a new one, or copy into it "
                    "under torch.no_grad()"
                )

    def _check_pass(self) -> None:
        """With DDP nothing can be made up for."""
        if self._ddp and len(self._gradients) < sum(len(flat.members) for flat in self._flats):
            raise UnsynchronizedError(
                "no whole synchronised backward pass of the DDP model since zero_grad()"
            )

    def _finish(self) -> None:
        """All that is to be reduced has been."""
        while self._pass.launched < len(self._buckets) and not self._ddp:
            self._launch(here=True)
        for bucket in self._buckets:
            assert bucket.work is not None
            bucket.work.wait()

    # -- what is said of them ---------------------------------------------------------------------

    @property
    def grad_norm(self) -> GradientNorm:
        """The norm of the mean gradients of all ranks, as they were before :meth:`clip_grad_norm`.
        Collective the first time after a backward pass."""
        if self._pass.grad_norm is None:
            self._check_pass()
            self._finish()
            counted = Norms()
            for piece in self._shard.own():
                counted.measure(self._gradient(piece), 0, 1)
            told = self._loss_scale()
            agree(self._communicator.sum_norms(counted, told=told))
            found = norms.total_of([counted])
            self._pass.grad_norm = GradientNorm(
                found.norm / told, found.largest / told, found.nonfinite
            )
        return self._pass.grad_norm

    def _gradient(self, piece: Piece) -> Tensor:
        return self._gradients[piece.index][piece.begin : piece.end]

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
        if self._pass.clip is not None:
            raise RuntimeError("the gradients of this step are clipped already")
        total, self._pass.clip = clip_factor(
            self.grad_norm, max_norm, norm_type, error_if_nonfinite
        )
        return total

    def unscale_by(self, scaler: GradScaler) -> None:
        """From now on gradients are divided by a loss scale as they are used; see
        :class:`GradScaler`, which calls this."""
        self._scaler = scaler

    def averages(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter is served."""
        return self._numbers.get(id(parameter)) in self._trained

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
            CommunicatorError: a peer has died, or does not come. Its text says of which step
                parameters and optimizer state are. Where they are of both, the server refuses all
                but :meth:`shard_state_dict`. (Through a process group the backend's own error.)
        """
        self._refuse_broken()
        self._check_parameters()
        self._shard.check_rules()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        fused = self._fuses()
        if not fused:
            self._check_pass()
        try:
            if fused:
                for bucket in self._buckets:
                    self._drop(bucket)
            else:
                self._finish()
            used = self._agree()
            update, failure = self._commit(used)
            failure = self._update(update, fused) or failure
        except Exception as error:
            _add(error, self._broken or _WHOLE)
            raise
        failure = self._spread(failure)
        changed = [each for each, flag in zip(self._parameters, used, strict=True) if flag]
        torch.autograd.graph.increment_version(changed)
        for piece in self._shard.pieces:
            piece.leave()
        if failure is not None:
            raise failure
        return loss

    def _fuses(self) -> bool:
        """What has only been accumulated is averaged and updated in one loop. Else ranks that have
        used other parameters have not launched as many buckets: all do before anything else."""
        return (
            not (self._pass.begun or self._ddp or self._replicas)
            and self._all_work
            and self._compression is None
            and self._shard.fuses
            and len(self._flats) == 1
            and self._flats[0].weights.nbytes >= _FUSED_BYTES
            and bool(self._used.any())
        )

    def _agree(self) -> list[int]:
        """Which parameters some rank has used. Nobody changes anything before all have come here;
        who mirrors another one's pieces has their gradients then."""
        if self._pass.wired is not None:
            plain = (self._gradient(each).isfinite().all() for each in self._shard.own())
            self._used[-1] = not (self._pass.wired.finite and all(plain))
        self._communicator.all_reduce(self._used, "max")
        *used, spoilt = self._used.tolist()
        self._end_wire(discard=bool(spoilt))
        if self._replicas:
            for bucket in self._buckets:
                self._communicator.all_gather_v(bucket.gradients, bucket.shares, (1,))
        return used

    def _commit(self, used: list[int]) -> tuple[Update, Exception | None]:
        """Whoever passes goes forward, and has all that it needs for that. The exception is raised
        at the end: a rank has died, but another one has passed, so this one goes, too. (Between
        hosts nobody knows whether another one has.)"""
        problem = update = failure = None
        try:
            update = self._shard.prepare(used, self._gradients, self._factor())
        except Exception as error:
            problem = error
        self._ballot.fill_(problem is not None)
        algorithm: Algorithm = "two_shot" if self._communicator.shared_memory else "auto"
        try:
            self._communicator.all_reduce(self._ballot, "max", algorithm)
        except CommunicatorError as error:
            # Who has passed has said so before it writes into anybody's ballot.
            if error.intact or problem is not None:
                raise
            failure = error
        if problem is not None:
            raise problem
        assert update is not None
        if failure is None and self._ballot.any():
            raise RuntimeError("another rank could not prepare its step, and says why.")
        return update, failure

    def _update(self, update: Update, fused: bool) -> Exception | None:
        """Of what this rank keeps."""
        failure = self._reduce_and_update(update) if fused else None
        self._broken = _TORN
        self._shard.run(update, kernels=not fused)
        self._broken = ""
        return failure

    def _reduce_and_update(self, update: Update) -> Exception | None:
        [flat] = self._flats
        assert flat.gradients is not None
        scale, weight = self._factors()
        failure: Exception | None = None
        try:
            self._communicator.reduce_scatter_v(
                flat.gradients,
                flat.shares,
                scale=scale,
                weight=weight,
                update=update.kernels.get(flat.gradients.dtype),
                here=True,
            )
        except CommunicatorError as error:
            if not error.ran:
                raise
            failure = error  # the own part has been done
        self._pass.begun, self._pass.launched = True, len(self._buckets)
        for bucket in self._buckets:
            bucket.work = torch.futures.Future()
            bucket.work.set_result(bucket.gradients)
        return failure

    def _spread(self, failure: Exception | None) -> Exception | None:
        """Everybody gets what others have updated; or says of which step everything is."""
        self._broken = _HALF
        complete = self._dealing.servers == [self._communicator.rank]
        if failure is None:
            try:
                self._memory.spread(self._shard.own())
                complete = True
            except Exception as error:
                failure = error
                # Who has begun takes what it needs out of all ranks' memory, also a dead one's.
                complete = complete or (isinstance(error, CommunicatorError) and error.ran)
        if complete:
            self._arrived = self._shard.generation
        if complete or not self._shard.pieces:
            self._broken = ""
        if failure is not None:
            _add(failure, self._broken or (_DONE if complete else _WHOLE))
        return failure

    def _factor(self) -> float:
        """Of the gradients, as they are used."""
        return (1.0 if self._pass.clip is None else self._pass.clip) / self._loss_scale()

    def _refuse_broken(self) -> None:
        if self._closed:
            raise RuntimeError("the server is closed")
        if self._broken:
            raise RuntimeError(f"an earlier step failed. {self._broken}")

    # -- saving -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The ordinary state dict of ``optimizer_class`` for all parameters, on every rank:
        collective. It can be loaded by that class, and on another number of ranks or servers. Of
        parameters that are narrower than what is updated it also holds that, as ``master``."""
        self._refuse_broken()
        return server_state.whole(self, super().state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over an ordinary state dict of ``optimizer_class``, the same on all ranks.

        Raises:
            ValueError: it is of other groups or parameters; nothing has been changed.
        """
        self._refuse_broken()
        saved = server_state.validated(self, state_dict)
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        self._shard.regroup(self.param_groups)
        server_state.restore(self, saved)

    def shard_state_dict(self) -> dict[str, Any]:
        """What this rank keeps, and all parameters as they are here: not collective, so that it can
        be had when other ranks have died. :func:`merge_shards` makes of all that are left what a
        new run begins with.

        Returns:
            Beside what that needs ``pieces``: of each part of a parameter that is kept here the
            parameter's ``index``, ``begin`` and ``end`` in its elements, ``weights``, and the
            optimizer's ``state``, copied.

        Raises:
            RuntimeError: a step has failed within the update itself.
        """
        if self._broken == _TORN:
            raise RuntimeError(f"an earlier step failed. {_TORN}")
        return server_state.of_rank(self, super().state_dict())

    def wire_state_dict(self, *, merge: bool = False) -> dict[str, Any] | None:
        """What lossy wire formats have kept back on this rank, as :meth:`HookState.state_dict` has
        it; with ``merge``, collectively, for any number of ranks. None without a wire."""
        if self._compression is None:
            return None
        saved = self._compression.state_dict(self._by_name(), merge=merge)
        return saved | {"loss_scale": self._loss_scaled}

    def load_wire_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Takes over this rank's own, a merged one, or those of all ranks of any number."""
        if self._compression is None:
            raise RuntimeError("load_wire_state_dict: this server has no wire")
        states = [state] if isinstance(state, Mapping) else list(state)
        [scale] = {each["loss_scale"] for each in states}
        self._compression.load_state_dict(states, self._by_name())
        self._loss_scaled = scale

    def _by_name(self) -> dict[str, nn.Parameter]:
        return {self._names[index]: self._parameters[index] for index in sorted(self._trained)}

    # -- lifetime ---------------------------------------------------------------------------------

    @property
    def communicator(self) -> Communicator:
        """Over which all goes."""
        return self._communicator

    def close(self) -> None:
        """Ends it. Parameters stay as they are, and gradients belong to the user again; a DDP model
        keeps its hook, and has to be made anew."""
        self._end()
        self._communicator.close()

    def _end(self) -> None:
        self._closed = True
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        self._communicator.__exit__(kind, error, trace)


def served_hook(
    server: ParameterServer,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """The communication hook of a DDP model whose gradients go to a parameter server, which
    registers it. Never raises: what goes wrong travels through the Future."""
    try:
        return server.average(bucket)
    except Exception as error:
        averaged: Future[Tensor] = Future()
        fail(averaged, error, server.communicator._errors)
        return failing(averaged)


# DDP checks them, and here annotations are texts.
served_hook.__annotations__ |= {
    "bucket": dist.GradBucket,  # type: ignore[attr-defined]
    "return": torch.futures.Future[torch.Tensor],
}


def _add(error: Exception, text: str) -> None:
    said = str(error)
    error.args = (f"{said}{'' if said.endswith('.') else '.'} {text}",)


def _ranks(name: str, ranks: Sequence[int] | None, world_size: int) -> list[int]:
    """In ascending order; all for None."""
    if ranks is None:
        return [*range(world_size)]
    found = sorted({*ranks})
    if isinstance(ranks, str) or not found or len(found) != len(ranks):
        raise ValueError(f"{name}: expected ranks, each once, got {ranks!r}")
    if not 0 <= found[0] <= found[-1] < world_size:
        raise ValueError(f"{name}: expected 0 to {world_size - 1}, got {ranks!r}")
    return found


def _noting(server: weakref.ref[ParameterServer], index: int) -> Callable[[Any], None]:
    """For every gradient of a parameter."""

    def note(parameter: nn.Parameter) -> None:
        found = server()
        if found is not None:
            found.note(index, parameter)

    return note
