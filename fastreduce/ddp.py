"""The DistributedDataParallel communication hook and its state."""

import contextlib
import copy
import inspect
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fastreduce import reducer, sparse, weights
from fastreduce.accumulation import Shards, TreeAccumulator, elements_of, parts_of, shards_of
from fastreduce.communicator import Communicator, said_by_all
from fastreduce.compression import Compression, Step
from fastreduce.errors import CommunicatorError, UnsynchronizedError
from fastreduce.grad_norm import Counting, GradientNorm, GradientNorms, PassNorms, agree
from fastreduce.grad_scaler import GradScaler
from fastreduce.measure import Measurement
from fastreduce.process_group import Account, Done, fail, failing, value_of
from fastreduce.stats import BucketStats, StepStats, summary
from fastreduce.wire import SMALL_BYTES, Policy, Schedule

logger = logging.getLogger("fastreduce")

_KEPT_STEPS = 1000
_FORMAT = 1
_SAVED = {"passes", "world_size", "weight", "reduction", "weighted", "parameters"}
_OF_THIS_STEP = "Of this step's gradients"


class HookState:
    """What :func:`all_reduce_hook` needs for one DDP model. One state for each model.

    Args:
        source: a DDP model, for whose process group a communicator is created (collectively) and
            owned; or a :class:`Communicator`, which stays the caller's to close; or None, where
            the state is made before the model (Lightning): the first bucket then finds the model
            on which the state is registered, and does as if that had been given.
        count_unused: whether a rank that did not use a parameter counts in the divisor of its mean,
            as in DDP. If not, a parameter's mean is over the ranks that used it (needs
            ``find_unused_parameters=True`` and a state made with its model; one more small call
            for every bucket).
        none_if_empty: gradients become None after a pass whose weights' sum is 0, instead of 0 (on
            the CPU).
        record: keep :meth:`stats`.
        norms: count :attr:`grad_norm` while gradients are averaged: True, or "parameters" for each
            one apart, too.
        wire: in which format gradients of float32, float16 and bfloat16 travel between the ranks:
            the name of one, a :class:`Wire`, a function of a parameter's name and shape that gives
            one of these, or a mapping from the step from which on one of all these holds.
        warmup_steps: steps in fp32 before that.
        wire_min_bytes: what has less bytes in a bucket, all parameters of one wire together, stays
            uncompressed.
        wire_seed: of stochastic rounding; the same on all ranks.
        residual_dtype: of what is kept of the encoding's losses: float32, or bfloat16.
        measure: synchronised passes, from the first on, in which every compressed bucket is
            averaged uncompressed, too, and both are timed; see :attr:`measurement`. The log then
            says whether compressing pays on this machine.
        kwargs: passed on to :class:`Communicator`, where one is created.
    """

    def __init__(
        self,
        source: Communicator | DistributedDataParallel | None = None,
        *,
        count_unused: bool = True,
        none_if_empty: bool = False,
        record: bool = False,
        norms: Counting = False,
        wire: Schedule = "fp32",
        warmup_steps: int = 0,
        wire_min_bytes: int = SMALL_BYTES,
        wire_seed: int = 0,
        residual_dtype: torch.dtype = torch.float32,
        measure: int = 0,
        **kwargs: Any,
    ) -> None:
        # Not above: to register an operator takes a sixth of the time of all other imports.
        from fastreduce import compiled

        # For torch.compile, which can name a number but not hold this.
        self.handle: int = compiled.register(self)
        self._communicator: Communicator | None = None
        # Weak: the model holds this state, where no collector of cycles sees it.
        self._model: weakref.ref[DistributedDataParallel] | None = None
        self._owned = False
        self._arguments = kwargs
        policy = Policy(wire, warmup_steps, wire_min_bytes)
        self._compression = _compression(policy, wire_seed, residual_dtype, measure)
        if self._compression is not None and not count_unused:
            raise ValueError("count_unused=False: expected wire='fp32'")
        self._count_unused = count_unused
        self._notes_use = not count_unused  # which parameters this rank has used matters
        self._none_if_empty = none_if_empty
        self._record = record
        self._norms = GradientNorms(norms) if norms else None
        if self._norms is not None and not count_unused:
            raise ValueError("norms: expected count_unused=True")
        self._scaler: GradScaler | None = None
        self._closed = False
        self._begun = 0  # synchronised passes
        self._names: dict[nn.Parameter, str] = {}
        self._bucket_names: dict[nn.Parameter, str] = {}
        self._unnoted = 0  # a pass that had begun before use could be noted, if any
        self._elements = 0  # of the model's buckets
        self.on_gpus = False  # some parameter is
        self._given = weights.Given()
        self._handles: list[RemovableHandle] = []
        self._watch: RemovableHandle | None = None  # of forward passes
        self._loss_scale = 1.0
        self._used: dict[str, float] = {}  # weights of those that used a parameter, by name
        self._shards: Shards | None = None
        self._spares: dict[nn.Parameter, list[Tensor]] = {}  # memory of the shards' sums
        # The pass under way.
        self._pass = _Pass()
        self._passes = 0  # that have been averaged
        self._fresh = 0  # likewise; never goes back
        self._lock = threading.Lock()
        self._checked = 0
        self._steps: deque[StepStats] = deque(maxlen=_KEPT_STEPS)
        self._algorithms: dict[tuple[int, torch.dtype, bool, bool], str] = {}
        if source is None:
            inspect.signature(Communicator).bind(None, **kwargs)
            return
        if isinstance(source, DistributedDataParallel):
            self._bind(source)
        elif isinstance(source, Communicator):
            if kwargs:
                raise TypeError(f"expected no {sorted(kwargs)} beside a communicator")
            self._communicator = source
            self._start_recording()
        else:
            raise TypeError(
                "source: expected a Communicator, a DistributedDataParallel model or None, "
                f"got {type(source).__name__}"
            )

    # -- its model ----------------------------------------------------------------------------

    @property
    def communicator(self) -> Communicator:
        """The model's communicator."""
        if self._communicator is None:
            raise RuntimeError("this state is not yet registered on a DDP model")
        return self._communicator

    def _bind(self, model: DistributedDataParallel) -> None:
        if self._communicator is None:
            self._communicator = Communicator(model.process_group, **self._arguments)
            self._owned = True
            self._start_recording()
        self._model = weakref.ref(model)
        ignored = model.parameters_to_ignore
        self._names = {
            parameter: name
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in ignored
        }
        self._elements = sum(map(elements_of, self._names))
        self.on_gpus = any(each.is_cuda for each in self._names)
        # Frozen ones, too: DDP's buckets are as they were when it was made.
        self._bucket_names = {each: name for name, each in model.module.named_parameters()}
        if self._compression is not None:
            shapes = {name: each.shape for each, name in self._names.items()}
            device = next((each.device for each in self._names), torch.device("cpu"))
            self._compression.connect(self._communicator, shapes, device)
            self._notes_use |= model.find_unused_parameters or model.static_graph
            if reducer.backward_pass() is not None:
                self._unnoted = self._begun + 1
        if self._notes_use:
            for parameter in self._names:
                # Runs before DDP's own, which calls the hook.
                noting = _noting(weakref.ref(self), self._names[parameter])
                self._handles.append(parameter.register_post_accumulate_grad_hook(noting))

    def _find_model(self) -> DistributedDataParallel:
        """The one on which this state is registered. Raises if there is none, or another one."""
        model = None if self._model is None else self._model()
        if self._model is not None and model is None:
            raise RuntimeError("the DDP model of this state is gone")
        if model is None:
            found = reducer.models_with(self)
            if len(found) != 1:
                raise RuntimeError(
                    f"expected a state registered on one DDP model, this one is on {len(found)}"
                )
            if not self._count_unused and reducer.backward_pass() is not None:
                raise RuntimeError(
                    "count_unused=False: gradients have been computed before this state has met "
                    "its model; make it with the model"
                )
            model = found[0]
            self._bind(model)
        return model

    def _refuse_closed(self) -> None:
        if self._closed:
            raise RuntimeError("this state is closed")

    def _refuse_others(self) -> None:
        model = self._find_model()
        if any(each is not model for each in reducer.models_with(self)):
            raise RuntimeError("this state is registered on another DDP model, too: make one each")

    def note_forward(self) -> None:
        """A forward pass has come to its end."""
        self._given.forwards += 1

    def note_use(self, name: str) -> None:
        """This rank has used a parameter in the pass under way."""
        before = self._used.get(name, 0.0)
        if self._given.ever:
            self._used[name] = before + self._given.latest
        else:
            self._used[name] = 1.0 if self._shards is None else before + 1.0

    def _start_recording(self) -> None:
        core = self.communicator._core
        if self._record and core is not None:
            core.record(True)

    # -- weights ------------------------------------------------------------------------------

    def weight(self, n: float, reduction: weights.Reduction = "mean") -> None:
        """How many samples (tokens ...) the next backward pass is over: gradients become the mean
        over all ranks' samples, whatever each rank's number, instead of the mean of the ranks.

        To be called before every backward pass, or never; weights of passes under ``no_sync()`` add
        up until the next synchronised one.

        Args:
            n: 0, or 1e-30 to 1e30. 0: this rank's gradients do not count, whatever they hold.
                Where the sum over the ranks is 0, gradients are 0 (or None, see
                ``none_if_empty``).
            reduction: what this rank's ``.grad`` is when it is reduced. ``mean``: the mean over its
                n samples; the result is sum(n x grad) / sum(n). ``sum``: the sum over its samples,
                as of a loss with ``reduction="sum"``; the result is sum(grad) / sum(n), right also
                where micro-batches of different sizes are accumulated.
        """
        n = float(n)
        self._given.add(n, reduction)
        if self._watch is None:
            noting = _completed_forward(weakref.ref(self))
            self._watch = self._find_model().register_forward_hook(noting)
            self._handles.append(self._watch)
        if self._shards is not None:
            self._shards.weigh(n, reduction)

    def discard_weight(self) -> None:
        """Forgets what :meth:`weight` was given since the last synchronised pass: of a batch that
        is skipped after its forward pass."""
        self._given.sum = None

    def loss_scale(self, scale: float) -> None:
        """By what the loss of the next pass is multiplied, where that changes: what lossy wire
        formats have kept back of gradients changes with it. With a GradScaler, before every
        backward pass: ``state.loss_scale(scaler.get_scale())``."""
        if not 0 < scale < math.inf:
            raise ValueError(f"scale: expected a positive number, got {scale}")
        if self._compression is not None and scale != self._loss_scale:
            self._compression.rescale(scale / self._loss_scale)
        self._loss_scale = scale

    @property
    def measurement(self) -> Measurement:
        """Of each compressed bucket the bytes, times, errors and residuals, as attributes and as a
        table (``print(state.measurement)``), and a verdict. Of a state made with ``measure``."""
        if self._compression is None or self._compression.measurement is None:
            raise RuntimeError("nothing is measured: create the state with a wire and measure=20")
        return self._compression.measurement

    def discard_step(self) -> None:
        """The gradients of the last synchronised pass are not used. Passes with an inf or a NaN in
        some gradient are discarded by themselves; to be called where the optimizer's step is left
        out for another reason, so that nothing of what lossy wire formats have kept back is lost.
        """
        if self._compression is not None:
            self._compression.discard()

    def unscale_by(self, scaler: GradScaler) -> None:
        """From the next pass on gradients are divided by a loss scale as they are averaged; see
        :class:`GradScaler`, which calls this."""
        if not self._count_unused:
            raise ValueError("GradScaler: expected a state with count_unused=True")
        if any(each.dtype == torch.float16 for each in self._names):
            raise ValueError(
                "GradScaler: expected no float16 parameters, whose unscaled gradients would be "
                "rounded to 0 (ParameterServer updates them in float32)"
            )
        self._scaler = scaler
        self._norms = self._norms or GradientNorms(True)

    def averages(self, parameter: nn.Parameter) -> bool:
        """Whether the parameter's gradient goes through this state."""
        return parameter in self._names

    def _factors(self, joined: bool) -> tuple[float, weights.Weight | None]:
        """Scale and weight of this rank's buckets in a pass."""
        if joined:  # what it has are zeros
            return 1.0, "absent"
        if self._shards is not None:
            return 1.0, self._shards.total(self._given.ever)
        if self._given.ever:
            return self._given.factors()
        model = self._find_model()
        if not reducer.counts_joined(model):
            return 1.0, 1.0
        return 1.0, "ordinary" if reducer.may_join(model) else None

    # -- buckets ------------------------------------------------------------------------------

    def average(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """What :func:`all_reduce_hook` does. May raise."""
        buffer: Tensor = bucket.buffer()
        last = bucket.is_last()
        current = self._enter(buffer.numel(), last)
        if self._none_if_empty and not buffer.is_cpu:
            raise RuntimeError(f"none_if_empty: expected gradients on the CPU, got {buffer.device}")
        note = self._note(current, buffer)
        if current.norms is not None:
            members = bucket.parameters()
            sections = [(self._bucket_names[each], elements_of(each)) for each in members]
            current.norms.enter(buffer, sections)
        if note is not None and current.whole and not current.joined:
            current.stats.end_backward()  # but for what reduces: every gradient is there
            reducer.after_backward(lambda: self._end_pass(current))
        # DDP waits as soon as it has the last bucket's Future: that needs no other thread.
        here = last and buffer.is_cpu and self.communicator.shared_memory
        try:
            if buffer.is_sparse:
                averaged, here = self._average_sparse(bucket, current, note), True
            elif self._shards is None:
                averaged = self._reduce(buffer, current, here, note, bucket)
            else:
                averaged = self._average_shards(bucket, current, here, note)
        except CommunicatorError as error:
            self._explain(error, current, len(current.futures))
            raise
        if not self._count_unused:
            averaged = self._recount(bucket, current, averaged)
        elif here:
            if current.norms is not None:
                current.norms.count(averaged.value())
                if current.whole:
                    self._sum_norms(current, current.norms)
            self._count(current, buffer)
            return averaged
        number = len(current.futures)
        settled: Future[Tensor] = averaged.then(
            lambda future: self._settle(current, future, number)
        )
        current.futures.append(settled)
        if current.norms is not None and current.whole and self.communicator.shared_memory:
            self._sum_norms(current, current.norms)
        return settled

    def _reduce(
        self,
        tensor: Tensor,
        current: "_Pass",
        here: bool,
        note: Done | None,
        bucket: dist.GradBucket | None = None,  # type: ignore[name-defined]
    ) -> Future[Tensor]:
        scale, weight, ordered = current.scale, current.weight, self._shards is not None
        if self._compression is not None and bucket is not None:
            assert current.step is not None
            parameters = [(self._bucket_names[each], each) for each in bucket.parameters()]
            absent = self._unused(parameters, tensor)
            layout = self._compression.layout(current.step, parameters, tensor.dtype)
            if layout is not None:
                if self._record:
                    entry = current.stats.buckets[-1]
                    entry.algorithm, entry.formats = "encoded", layout.formats()
                    entry.wire_bytes = layout.sent_bytes(self.communicator.rank)
                current.encoded.add(tensor.data_ptr())
                return self._compression.all_reduce(
                    current.step,
                    layout,
                    tensor,
                    absent=absent,
                    scale=scale,
                    weight=weight,
                    here=here,
                    done=note,
                )
        if self._record:
            key = (tensor.nbytes, tensor.dtype, weight is not None, ordered)
            if key not in self._algorithms:
                self._algorithms[key] = self.communicator.algorithm(
                    tensor, weighted=weight is not None, deterministic=ordered
                )
            current.stats.buckets[-1].algorithm = self._algorithms[key]
        norms = None
        if current.norms is not None and tensor.is_cpu:  # others are counted as they are settled
            norms = current.norms.take(tensor)
        how: dict[str, Any] = {"move": True, "deterministic": ordered, "norms": norms, "done": note}
        if here:
            self.communicator.all_reduce(tensor, scale=scale, weight=weight, **how)
            return _completed(tensor)
        return self.communicator.all_reduce_future(tensor, scale=scale, weight=weight, **how)

    def _sum_norms(self, current: "_Pass", norms: PassNorms) -> None:
        """Of a pass whose last bucket has been averaged, or fails, as those before may."""
        for earlier in [] if self.on_gpus else current.futures:
            earlier.wait()
        norms.sum(current.loss_scale, later=self.on_gpus)

    def _unused(self, parameters: list[tuple[str, nn.Parameter]], buffer: Tensor) -> set[str]:
        """Of a bucket's parameters those to whose gradient this rank adds nothing."""
        if not self._notes_use:
            return set()
        unused = set()
        parts = parts_of(buffer, [each for _, each in parameters])
        for (name, _), part in zip(parameters, parts, strict=True):
            used = self._used.pop(name, 0.0) or self._begun == self._unnoted
            if not used and not part.any():  # not even of an earlier pass
                unused.add(name)
        return unused

    def _settle(self, current: "_Pass", future: Future[Tensor], number: int) -> Tensor:
        """The gradients of one of the pass's buckets; an error says what became of the step."""
        try:
            gradient: Tensor = future.value()
        except RuntimeError as error:
            # Of a Future that another one's callback has failed, C++ gives the text alone.
            known = error if isinstance(error, CommunicatorError) else self.communicator.error
            if not isinstance(known, CommunicatorError):
                raise
            self._explain(known, current, number)
            # A copy: the communicator keeps the error, and a traceback would keep this frame.
            known.__traceback__ = None
            raise copy.copy(known) from None
        finally:
            del future  # which holds the exception that would hold this frame
        if current.norms is not None:
            current.norms.count(gradient)
        self._count(current, gradient)
        return gradient

    def _explain(self, error: CommunicatorError, current: "_Pass", number: int) -> None:
        """Says in the error, once, what became of the step."""
        # The last bucket fails on another thread than the one that settles those before.
        for earlier in current.futures[:number]:
            with contextlib.suppress(Exception):
                earlier.wait()
        with self._lock:
            if _OF_THIS_STEP not in str(error):
                error.args = (
                    f"{error} {_OF_THIS_STEP} {current.averaged} elements had been averaged "
                    "before: discard them all; parameters and optimizer are as they were, buffers "
                    "as this step's forward passes have left them.",
                )

    def _count(self, current: "_Pass", gradient: Tensor) -> None:
        """A bucket has been averaged. Called by several threads."""
        compression = self._compression
        if compression is not None and (
            gradient.is_sparse or gradient.data_ptr() not in current.encoded
        ):
            assert current.step is not None
            compression.watch(current.step, gradient)
        with self._lock:
            current.averaged += gradient.numel()
            if current.whole and current.averaged == current.elements:
                self._passes += 1
                self._fresh += 1
                if self._norms is not None and current.norms is not None:
                    if not self.communicator.shared_memory:
                        current.norms.sum(current.loss_scale, later=self.on_gpus)
                    self._norms.end(current.norms)
                if compression is not None:
                    assert current.step is not None
                    discard = self._none_if_empty and current.empty
                    compression.end(current.step, discard=discard)

    def average_gradient(self, gradient: Tensor) -> None:
        """The same for one parameter's gradient, at once."""
        if (
            self._shards is not None
            or self._none_if_empty
            or not self._count_unused
            or self._compression is not None
            or self._norms is not None
        ):
            raise RuntimeError(
                "shards(), none_if_empty, count_unused, wire and norms need DDP's own reducer, not "
                "the compiled python_reducer"
            )
        # Not every parameter need be in the graph: each one's backward pass is told by its number.
        task = reducer.backward_pass()
        if self._pass.elements and self._pass.task != task:
            self._pass = _Pass()
        self._pass.task = task
        begins = self._pass.elements == 0
        current = self._enter(gradient.numel(), False, joined=False)
        self.communicator.all_reduce(gradient, scale=current.scale, weight=current.weight)
        if begins:
            self._passes += 1
            self._fresh += 1

    def _enter(self, elements: int, last: bool, joined: bool | None = None) -> "_Pass":
        """The pass to which so many more elements belong."""
        self._refuse_closed()
        if not self._begun:
            self._find_model()
            self._refuse_others()
        current = self._pass
        if joined is None:
            # DDP calls the hook with zeros outside of any backward pass.
            joined = reducer.backward_pass() is None
        if current.elements == 0:
            current.joined = joined
            current.scale, current.weight = self._factors(joined)
            if self._scaler is not None:
                scale = self._scaler.get_scale()
                current.loss_scale = math.nan if joined else scale
                current.scale /= scale
                # Else when the norms are brought together.
                if not (self.communicator.shared_memory or self.on_gpus):
                    agree(said_by_all(self.communicator, current.loss_scale))
            self._given.sum = None
            self._begun += 1
            if self._compression is not None:
                current.step = self._compression.begin(weighted=current.weight is not None)
            if self._norms is not None:
                current.norms = self._norms.begin(self.communicator)
        current.elements += elements
        if last or current.elements >= self._elements:
            self._pass = _Pass()
            current.whole = True
        return current

    def _average_sparse(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        current: "_Pass",
        note: Done | None,
    ) -> Future[Tensor]:
        """Waits for its peers: which rows there are decides what is sent."""
        gradient = bucket.buffer()
        if self._shards is not None:
            gradient = self._shards.finish(bucket)

        def reduce(rows: Tensor) -> None:
            self.communicator.all_reduce_future(
                rows,
                scale=current.scale,
                weight=current.weight,
                deterministic=self._shards is not None,
                done=note,
            ).wait()

        return _completed(sparse.all_reduce(self.communicator, gradient, reduce))

    def _average_shards(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        current: "_Pass",
        here: bool,
        note: Done | None,
    ) -> Future[Tensor]:
        assert self._shards is not None
        buffer: Tensor = bucket.buffer()
        sums = self._shards.finish(bucket)
        averaged = self._reduce(sums, current, here, note)
        if sums is buffer:
            return averaged
        if here:
            return _completed(buffer.copy_(sums))

        def narrow(future: Future[Tensor]) -> Tensor:
            return buffer.copy_(value_of(future))

        return averaged.then(narrow)

    def _recount(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
        current: "_Pass",
        averaged: Future[Tensor],
    ) -> Future[Tensor]:
        """Replaces the divisor of parameters that not all ranks used."""
        parameters = bucket.parameters()
        parts = [self._used.pop(self._names[parameter], 0.0) for parameter in parameters]
        device = "cpu" if self.communicator.shared_memory else bucket.buffer().device
        own = weights.announcement(current.weight)
        counts = torch.tensor([*own, *parts], dtype=torch.float64, device=device)
        counted = self.communicator.all_reduce_future(counts, "sum")

        def correct(result: Tensor, sums: Tensor) -> Tensor:
            everyones, used = sums[: len(own)], sums[len(own) :].tolist()
            total = float(weights.total_of(everyones))
            if result.is_sparse:
                return result * (total / used[0]) if 0 < used[0] != total else result
            for part, view in zip(used, parts_of(result, parameters), strict=True):
                if 0 < part != total:
                    view.mul_(total / part)
            return result

        if bucket.buffer().is_cuda:  # whose Future is complete; the other one is of no device
            return averaged.then(lambda future: correct(value_of(future), counted.wait()))
        both = torch.futures.collect_all([averaged, counted])
        return both.then(lambda futures: correct(*map(value_of, futures.value())))

    # -- the end of a pass --------------------------------------------------------------------

    def _note(self, current: "_Pass", buffer: Tensor) -> Done | None:
        """What is to be remembered of a bucket, if anything is."""
        if not self._record and not self._none_if_empty:
            return None
        entry = None
        if self._record:
            entry = BucketStats(
                index=len(current.stats.buckets),
                nbytes=buffer._values().nbytes if buffer.is_sparse else buffer.nbytes,
                algorithm="sparse",  # see _reduce() for others
                submitted=time.monotonic(),
            )
            current.stats.buckets.append(entry)

        def done(total: float, account: Account | None) -> None:
            current.empty = total == 0
            if entry is not None and account is not None:
                entry.note(account)

        return done

    def _end_pass(self, current: "_Pass") -> None:
        """All buckets have been averaged, and the gradients are in place."""
        if self._record:
            self._steps.append(current.stats)
        if self._none_if_empty and current.empty:
            for parameter in self._names:
                parameter.grad = None

    def stats(self) -> list[StepStats]:
        """The last synchronised passes, at most 1,000, the oldest first. Times are known where the
        ranks share memory."""
        if not self._record:
            raise RuntimeError("nothing is recorded: create the state with record=True")
        return list(self._steps)

    @property
    def grad_norm(self) -> GradientNorm:
        """The norm of the averaged gradients of the last synchronised pass, as they were before
        :meth:`clip_grad_norm`; the same on all ranks. Of a state made with ``norms``."""
        return self._counting().value()

    def _counting(self) -> GradientNorms:
        if self._norms is None:
            raise RuntimeError("nothing is counted: attach(ddp, norms=True)")
        return self._norms

    def clip_grad_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """What ``torch.nn.utils.clip_grad_norm_`` does to the gradients of all parameters of the
        model, with the norm that has been counted while they were averaged. Where it is not above
        ``max_norm``, nothing is touched.

        Args:
            max_norm: a norm.
            norm_type: 2, or ``math.inf`` for the largest magnitude.
            error_if_nonfinite: raise where the norm is inf or NaN.

        Returns:
            The norm before: float32, no dimension.

        Raises:
            RuntimeError: the pass's gradients have been clipped already; or see
                ``error_if_nonfinite``.
        """
        gradients = [each.grad for each in self._names if each.grad is not None]
        return self._counting().clip(gradients, max_norm, norm_type, error_if_nonfinite)

    def check_synchronized(self) -> None:
        """To be called before the optimizer's step.

        Raises:
            UnsynchronizedError: no backward pass since the last check has averaged the gradients:
                the module inside was called instead of the DDP model, or all was under
                ``no_sync()``.
        """
        self._checked = self.newer_than(self._checked)

    def newer_than(self, passes: int) -> int:
        """How many passes have been averaged; raises if it is not more than that."""
        if self._fresh == passes:
            raise UnsynchronizedError(
                "the gradients of this step have not been averaged over the ranks: no backward "
                "pass of the DDP model since the last step was synchronised (was its inner module "
                "called, or every pass under no_sync()?)"
            )
        return self._fresh

    def check(self, optimizer: Optimizer) -> RemovableHandle:
        """Makes every ``optimizer.step()`` call :meth:`check_synchronized` before it changes
        parameters: at its begin or, where it is given a closure, after that.

        Raises:
            TypeError: ``optimizer`` only wraps one (Accelerate's), and has no hooks of its own.
        """

        seen = self._fresh  # by this optimizer

        def look() -> None:
            nonlocal seen
            seen = self._checked = self.newer_than(seen)

        def check(_: Optimizer, arguments: Any, named: dict[str, Any]) -> Any:
            optimizer, *given = arguments
            closure = given[0] if given else named.get("closure")
            if closure is None:
                look()
                return None

            def checked() -> Any:
                loss = closure()
                look()
                return loss

            return (optimizer, checked), {}

        try:
            return optimizer.register_step_pre_hook(check)
        except AttributeError as error:
            raise TypeError(
                f"optimizer: expected one of torch's own, got {type(optimizer).__name__}"
            ) from error

    # -- accumulation -------------------------------------------------------------------------

    def shards(self, count: int) -> Iterator[int]:
        """The numbers of this rank's logical shards of a step, for a loop over them::

            for shard in state.shards(8):
                loss(ddp(inputs[shard]), targets[shard]).backward()
            optimizer.step()

        Gradients are the mean over all shards of all ranks, summed in an order that depends on
        ``count`` alone: training gives the same bits on 1, 2, 4 ... ranks. The step is synchronised
        once, in the last of the rank's shards. With :meth:`weight` before each backward pass the
        mean is weighted by shard. Memory: see :class:`fastreduce.accumulation.TreeAccumulator`.

        Args:
            count: logical shards of the global batch: a power of two that the number of ranks
                divides.

        Raises:
            ValueError: the count does not fit, or gradients are left from before.
            RuntimeError: shards are under way; or the first pass with ``static_graph``. From the
                loop: ``.grad`` was replaced, there were two backward passes in a shard, or no path
                keeps the order of summation.
            UnsynchronizedError: from the loop: there was no backward pass in the last shard.
        """
        model = self._find_model()
        self._refuse_closed()
        if self._compression is not None:
            raise RuntimeError("shards: wire formats other than fp32 depend on the number of ranks")
        first, own = shards_of(count, self.communicator.rank, self.communicator.world_size)
        self._refuse_nested()
        if model.static_graph and not self._begun and own > 1:
            raise RuntimeError(
                "static_graph=True: DDP cannot accumulate before its first synchronised pass; make "
                "one step without shards first"
            )
        for parameter, name in self._names.items():
            grad = parameter.grad
            if grad is not None and bool((grad._values() if grad.is_sparse else grad).any()):
                raise ValueError(f"{name} has a gradient from before: call zero_grad() first")
        return self._run_shards(model, first, own)

    def _refuse_nested(self) -> None:
        if self._shards is not None:
            raise RuntimeError("the shards of another step are under way")

    def _run_shards(self, model: DistributedDataParallel, first: int, own: int) -> Iterator[int]:
        self._refuse_nested()
        begun = self._begun
        for parameter in self._names:
            parameter.grad = None
        accumulator = TreeAccumulator(list(self._names), own, self._spares)
        shards = self._shards = Shards(accumulator, self.communicator)
        try:
            for shard in accumulator.shards():
                last = shard == own - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    yield first + shard
                self._refuse_closed()
                shards.end(self._given.ever)
            if self._begun == begun:
                raise UnsynchronizedError(
                    "the last shard had no synchronised backward pass of the DDP model"
                )
        finally:
            self._shards = None
            self._given.sum = None
            accumulator.close()

    # -- saving -------------------------------------------------------------------------------

    def state_dict(self, *, merge: bool = False) -> dict[str, Any]:
        """What has to be saved with the model and the optimizer to go on exactly: weights given
        and parameters used since the last synchronised pass, and what lossy wire formats have kept
        back, by parameter name. The same keys for every layout of buckets and number of ranks.
        With a lossy wire the values are each rank's own; and between two micro-batches, as is
        ``.grad``, which has to be saved too. (With ``find_unused_parameters``, only between steps:
        which parameters were used before, DDP itself does not save.)

        Args:
            merge: make of what was kept back one that any number of ranks can load: collective,
                and the same on all ranks.

        Raises:
            RuntimeError: shards are under way.
        """
        self._find_model()
        self._refuse_nested()
        return {
            "format": _FORMAT,
            "passes": self._passes,
            "world_size": self.communicator.world_size,
            **self._given.saved(),
            "loss_scale": self._loss_scale,
            "parameters": {
                name: {"used": self._used.get(name, 0.0)} for name in self._names.values()
            },
            "compression": None
            if self._compression is None
            else self._compression.state_dict(self._by_name(), merge=merge),
        }

    def _by_name(self) -> dict[str, nn.Parameter]:
        return {name: parameter for parameter, name in self._names.items()}

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Takes over what :meth:`state_dict` gave, for a model with the same parameters.

        Args:
            state: this rank's own; one that was merged; or those of all ranks of a group of any
                size, in rank order, of which what was kept back is shared out.

        Raises:
            ValueError: names are missing, or unknown, or it was taken between micro-batches on
                another number of ranks, or is another rank's; nothing has been changed.
        """
        self._find_model()
        states = [state] if isinstance(state, Mapping) else list(state)
        if not states:
            raise ValueError("state: expected at least one")
        for each in states:
            if each.get("format") != _FORMAT:
                raise ValueError(f"format: expected {_FORMAT}, got {each.get('format')}")
            if absent := sorted(_SAVED - set(each)):
                raise ValueError(f"state: {absent} are missing")
        # Those of before there were wire formats know nothing of them.
        states = [{"compression": None, "loss_scale": 1.0, **each} for each in states]
        state = states[0]
        compressions = [each["compression"] for each in states]
        if None in compressions and any(compressions):
            raise ValueError("compression: expected it in all states or in none")
        if len({each["loss_scale"] for each in states}) > 1:
            raise ValueError("loss_scale: expected states of one step")
        saved = state["parameters"]
        missing = sorted(set(self._names.values()) - set(saved))
        unknown = sorted(set(saved) - set(self._names.values()))
        if missing or unknown:
            raise ValueError(
                f"parameters: missing {missing or 'none'}, unknown to this model "
                f"{unknown or 'none'}"
            )
        pending = state["weight"] is not None or any(each["used"] for each in saved.values())
        if pending and state["world_size"] != self.communicator.world_size:
            raise ValueError(
                f"world_size: expected {self.communicator.world_size}, got {state['world_size']}, "
                "of a state between two micro-batches"
            )
        if self._compression is None:
            if any(each and each["residuals"] for each in compressions):
                raise ValueError("compression: the state holds residuals, and this one has no wire")
        elif None in compressions:
            self._compression.clear(state["passes"])
        else:
            self._compression.load_state_dict(compressions, self._by_name())
        self._loss_scale = state["loss_scale"]
        self._passes = state["passes"]
        self._checked = self._fresh
        self._given.load(state)
        self._used = {
            name: saved[name]["used"] for name in self._names.values() if saved[name]["used"]
        }

    # -- lifetime -----------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the communicator if this state created it. Later passes raise."""
        self._end()
        if self._owned:
            self.communicator.close()

    def _end(self) -> None:
        if self._record and not self._closed and self._communicator is not None:
            logger.info("rank %d: %s", self.communicator.rank, summary(self._steps))
        self._closed = True
        if self._shards is not None:
            self._shards.accumulator.close()  # whoever holds the loop
        self._spares.clear()
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> "HookState":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()
        if self._owned:
            self.communicator.__exit__(kind, error, trace)

    def __getstate__(self) -> None:
        raise TypeError(
            "a HookState holds connections to other processes and cannot be pickled or "
            "deep-copied: copy or save the module inside the DDP model"
        )


def _compression(
    policy: Policy, seed: int, residual_dtype: torch.dtype, measure: int
) -> Compression | None:
    """None where there is nothing to compress."""
    if not policy.compresses:
        if measure:
            raise ValueError("measure: expected a wire other than fp32")
        return None
    measurement = Measurement(measure) if measure else None
    return Compression(policy, seed, residual_dtype, measurement)


def _completed(tensor: Tensor) -> "Future[Tensor]":
    future: Future[Tensor] = Future(devices=[tensor.device] if tensor.is_cuda else None)
    future.set_result(tensor)
    return future


def _completed_forward(state: "weakref.ref[HookState]") -> Callable[..., None]:
    """For every forward pass that has come to its end."""

    def note(*_: Any) -> None:
        found = state()
        if found is not None:
            found.note_forward()

    return note


def _noting(state: "weakref.ref[HookState]", name: str) -> Callable[[Tensor], None]:
    """For every gradient of a parameter: this rank has used it."""

    def note(_: Tensor) -> None:
        found = state()
        if found is not None:
            found.note_use(name)

    return note


class _Pass:
    """A synchronised backward pass, bucket by bucket."""

    def __init__(self) -> None:
        self.elements = 0  # of the buckets so far
        self.whole = False  # there are no more
        self.averaged = 0
        self.futures: list[Future[Tensor]] = []
        self.joined = False
        self.task: int | None = None  # of a compiled reducer
        self.scale = 1.0
        self.weight: weights.Weight | None = None
        self.empty = False
        self.encoded: set[int] = set()  # addresses of buckets
        self.norms: PassNorms | None = None
        self.loss_scale = 1.0  # by which the reduction divides
        self.step: Step | None = None  # of what is compressed
        self.stats = StepStats()


def all_reduce_hook(
    state: HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks, while backward goes on.

    ``ddp.register_comm_hook(state, fastreduce.all_reduce_hook)``. The first time a bucket is
    seen, its buffer is moved into shared memory in place, so that peers read and write it where
    it lies. Gradients are the mean over the ranks (or over samples, see
    :meth:`HookState.weight`): what DDP gives without a hook, in a fixed order of summation. The
    bucket holds the accumulated gradient: a second synchronised backward pass without
    ``zero_grad`` averages what has been averaged, as without this hook. Sparse gradients are
    averaged row by row, and coalesced.

    Never raises (but for Ctrl-C): what goes wrong travels through the Future, and ``backward()``
    raises it as a RuntimeError (``state.communicator.error`` is the exception itself).
    """
    if isinstance(bucket, tuple):  # of a compiled reducer: a gradient and its parameter
        return torch.ops.fastreduce.average_gradient_(bucket[0], state.handle)  # type: ignore[no-any-return]
    try:
        if not isinstance(state, HookState):
            hint = ": HookState(communicator)" if isinstance(state, Communicator) else ""
            raise TypeError(f"state: expected a HookState, got {type(state).__name__}{hint}")
        return state.average(bucket)
    except Exception as error:
        known = isinstance(state, HookState) and state._communicator is not None
        averaged: Future[Tensor] = Future()
        fail(averaged, error, state.communicator._errors if known else [])
        return failing(averaged)


def attach(
    ddp: DistributedDataParallel, *, timeout: float | timedelta = 600.0, **kwargs: Any
) -> HookState:
    """Registers :func:`all_reduce_hook` on a DDP model, over the model's own process group.

    Collective among the ranks of that group. Returns the state; ``state.close()``, leaving it as
    a context manager, or the end of the process frees what it holds.

    Args:
        ddp: a model without a communication hook.
        timeout: seconds that any one wait for a peer may take.
        kwargs: passed on to :class:`HookState`, and from there to :class:`Communicator`.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"ddp: expected a DistributedDataParallel model, got {type(ddp).__name__}")
    state = HookState(ddp, timeout=timeout, **kwargs)
    try:
        # Else the first bucket would do that, in the middle of backward.
        devices = {p.device for p in ddp.parameters() if p.is_cuda and p.requires_grad}
        for device in sorted(devices, key=str):
            state.communicator.connect(device)
        ddp.register_comm_hook(state, all_reduce_hook)
    except BaseException:
        state.close()
        raise
    return state
