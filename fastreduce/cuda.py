"""GPUs that map each other's memory: what of a communicator runs in this library's CUDA kernels.

Peers' memory and multicast addresses come from torch's symmetric memory. Calls are launched on the
current stream and never wait for the device; what goes wrong in a kernel is raised by the next
call.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fastreduce import _C, enums, policy, weights
from fastreduce.process_group import as_timedelta

try:
    from fastreduce import _cuda
except ImportError:
    _cuda = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


P = ParamSpec("P")
T = TypeVar("T")

# Those whose kernels reach into all ranks' tensors.
_DIRECT = ("two_shot", "multimem")

_STAGING = 0  # the segment through which tensors go that peers cannot reach


def problem() -> str:
    """Why CUDA tensors cannot go through this library's kernels on this machine, or ""."""
    if _cuda is None:
        return (
            "fastreduce was built without CUDA: at its installation there was no nvcc, or "
            "FASTREDUCE_CUDA=0"
        )
    if reason := _cuda.problem():
        return f"CUDA does not work on this machine: {reason}"
    return ""


class Work:
    """An asynchronous call on a stream of its own."""

    def __init__(
        self, done: torch.cuda.Event, device: torch.device, check: Callable[[], None]
    ) -> None:
        self._done = done
        self._device = device
        self._check = check

    def wait(self, timeout: float | timedelta | None = None) -> None:
        """Lets the current stream wait. With a timeout, blocks this thread until the call has
        completed or the time, in seconds, has passed (TimeoutError)."""
        if timeout is not None:
            limit = as_timedelta(timeout).total_seconds()
            end = time.monotonic() + limit
            while not self._done.query():
                if time.monotonic() >= end:
                    raise TimeoutError(f"the call has not completed after {limit} s")
                time.sleep(1e-4)
        self._done.wait(torch.cuda.current_stream(self._device))
        self._check()

    def is_completed(self) -> bool:
        return bool(self._done.query())


class CallOrder:
    """Calls of one communicator run one after the other, also when their callers' streams differ.

    Calls that are captured into a graph are ordered among themselves; where they run against other
    calls, at replay, is for whoever replays the graph to say.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None
        self._captured = False
        self._done: torch.cuda.Event | None = None

    def enter(self, stream: torch.cuda.Stream) -> None:
        """Before a launch on ``stream``, which is the current one."""
        last = self._last
        if last is None or last == stream:
            return
        capturing = torch.cuda.is_current_stream_capturing()
        if not capturing and not self._captured and self._done is not None:
            stream.wait_event(self._done)  # the other stream itself may be gone by now
        elif capturing and self._captured:
            with torch.cuda.stream(last):
                together = torch.cuda.is_current_stream_capturing()
            if together:
                stream.wait_stream(last)

    def leave(self, stream: torch.cuda.Stream) -> None:
        """After it."""
        self._last = stream
        self._captured = torch.cuda.is_current_stream_capturing()
        if not self._captured:
            if self._done is None:
                self._done = torch.cuda.Event()
            self._done.record(stream)


@dataclass
class SymmetricMemory:
    """One allocation of every rank, mapped by all.

    Attributes:
        local: this rank's, one-dimensional, uint8.
        pointers: of every rank's, as mapped here.
        multicast: where all of them are accessed at once, or 0.
        peer: (rank, first byte, bytes) -> a part of a rank's, as a tensor.
    """

    local: Tensor
    pointers: list[int]
    multicast: int
    peer: Callable[[int, int, int], Tensor]


def allocate(
    nbytes: int,
    device: torch.device,
    group: ProcessGroup,
    exchange: Callable[[str], list[str]],
) -> SymmetricMemory:
    """Collective. RuntimeError, on all ranks, if one of them has no such memory."""
    reason = ""
    try:
        from torch.distributed import _symmetric_memory as symmetric

        # What symmetric.empty() does, without a memory pool that the user's allocator may not know.
        allocator: Any = symmetric
        local = allocator._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    except Exception as error:  # torch says no with whatever exception it likes
        reason = f"there is no symmetric memory of {nbytes} bytes on {device}: {error}"
    # Who is alone in the rendezvous would wait in vain.
    if reason := first_reason(exchange(reason)):
        raise RuntimeError(reason)
    handle = symmetric.rendezvous(local, group)
    if int(handle.buffer_ptrs[handle.rank]) != local.data_ptr():
        raise RuntimeError("symmetric memory that does not begin where its tensor does")

    def peer(rank: int, begin: int, size: int) -> Tensor:
        part: Tensor = handle.get_buffer(rank, (size,), torch.uint8, begin)
        return part

    return SymmetricMemory(
        local, [int(at) for at in handle.buffer_ptrs], int(handle.multicast_ptr), peer
    )


def _on_device(method: Callable[P, T]) -> Callable[P, T]:
    """With the transport's device as the current one: it need not be its caller's."""

    @functools.wraps(method)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
        transport: Any = args[0]
        with torch.cuda.device(transport.device):
            return method(*args, **kwargs)

    return guarded


class CudaTransport:
    """Same arguments, same meaning as the methods of Communicator, already checked there; on the
    current stream. All tensors are on ``device``."""

    def __init__(
        self,
        core: _cuda.CudaCommunicator,
        memory: SymmetricMemory,
        staging_begin: int,
        topology: policy.GpuTopology,
        most_blocks: int,
        exchange: Callable[[Any], list[Any]],
        group: ProcessGroup,
    ) -> None:
        self.topology = topology
        self.device = memory.local.device
        self.world_size = len(memory.pointers)
        self._core = core
        self._memory = memory  # the flags lie in it
        self._most_blocks = most_blocks
        self._exchange = exchange
        self._group = group
        self._order = CallOrder()
        self._stream: torch.cuda.Stream | None = None
        self._segments: dict[int, StorageWeakRef] = {}
        self._staging = memory.local[staging_begin:]
        core.add_segment(
            _STAGING,
            [at + staging_begin for at in memory.pointers],
            memory.multicast + staging_begin if memory.multicast else 0,
            self._staging.numel(),
        )

    @property
    def stream(self) -> torch.cuda.Stream:
        """For calls beside what the caller computes."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device, priority=-1)
        return self._stream

    @contextlib.contextmanager
    def aside(self, *tensors: Tensor) -> Iterator[torch.cuda.Stream]:
        """On this transport's own stream, after what the current one has been given so far."""
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        for tensor in tensors:
            # Symmetric memory is not the caching allocator's, and not given back while calls run.
            if not self._finds(tensor, False):
                tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            yield stream

    def work(self) -> Work:
        """For what has been launched on the current stream."""
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.device))
        return Work(done, self.device, self._core.check)

    # -- collectives --------------------------------------------------------------------------

    @_on_device
    def all_reduce(
        self,
        tensor: Tensor,
        op: str,
        algorithm: str,
        scale: float,
        shape: int,
        weight: float = weights.ORDINARY,
    ) -> None:
        flat = tensor.detach().view(-1)
        plan = enums.plan("all_reduce", tensor.dtype, op, algorithm, shape)
        if algorithm not in _DIRECT:
            self._launch(plan, flat, flat, flat.numel(), algorithm, scale=scale, weight=weight)
            return
        # In pieces on every rank alike, though only some may need the staging.
        step = self._staging.numel() // tensor.element_size()
        for begin in range(0, max(flat.numel(), 1), step):
            piece = flat[begin : begin + step]
            with self._reachable(piece, write_back=True, multicast=algorithm == "multimem") as at:
                self._launch(plan, at, at, at.numel(), algorithm, scale=scale, weight=weight)

    @_on_device
    def all_reduce_encoded(
        self,
        tensor: Tensor,
        coding: WireCoding,
        scale: float,
        shape: int,
        weight: float = weights.ORDINARY,
    ) -> None:
        """The mean, in wire formats. ``coding`` is of the tensor, with any factor; ``shape`` tells
        its layout from others."""
        flat = tensor.detach().view(-1)
        plan = enums.plan("all_reduce", tensor.dtype, "mean", "encoded", shape)

        def launch(address: int) -> None:
            self._launch(
                plan, flat, flat, flat.numel(), "encoded", address, scale=scale, weight=weight
            )

        coding.all_reduce(launch)

    @_on_device
    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: str, scale: float, shape: int
    ) -> None:
        out = output.detach().view(-1)
        whole = input.detach().view(self.world_size, -1)
        algorithm = self._moving(input.nbytes)
        plan = enums.plan("reduce_scatter", output.dtype, op, algorithm, shape)
        step = self._staging.numel() // self.world_size // 16 * 16 // output.element_size()
        if algorithm == "one_shot":
            step = max(out.numel(), 1)
        for begin in range(0, max(out.numel(), 1), step):
            end = min(begin + step, out.numel())
            part = whole[:, begin:end]
            with self._reachable(part, stage=algorithm != "one_shot") as at:
                self._launch(plan, at, out[begin:end], end - begin, algorithm, scale=scale)

    @_on_device
    def all_gather(self, output: Tensor, input: Tensor, shape: int) -> None:
        mine = _bytes(input)
        whole = _bytes(output).view(self.world_size, -1)
        algorithm = self._moving(mine.numel())
        plan = enums.plan("all_gather", torch.uint8, "sum", algorithm, shape)
        step = max(mine.numel(), 1) if algorithm == "one_shot" else self._staging.numel()
        for begin in range(0, max(mine.numel(), 1), step):
            end = min(begin + step, mine.numel())
            out = whole[:, begin:end]
            target = out if out.is_contiguous() else torch.empty_like(out)
            with self._reachable(mine[begin:end], stage=algorithm != "one_shot") as at:
                self._launch(plan, at, target, end - begin, algorithm)
            if target is not out:
                out.copy_(target)

    @_on_device
    def broadcast(self, tensor: Tensor, root: int, shape: int) -> None:
        flat = _bytes(tensor)
        algorithm = self._moving(flat.numel())
        plan = enums.plan("broadcast", torch.uint8, "sum", algorithm, shape)
        step = max(flat.numel(), 1) if algorithm == "one_shot" else self._staging.numel()
        for begin in range(0, max(flat.numel(), 1), step):
            piece = flat[begin : begin + step]
            with self._reachable(piece, stage=algorithm != "one_shot") as at:
                # Every rank's own is the target; the root's is the source.
                self._launch(plan, at, piece, piece.numel(), algorithm, root=root)

    @_on_device
    def barrier(self) -> None:
        """Of the ranks' current streams."""
        plan = enums.plan("barrier", torch.uint8, "sum", "one_shot", 0)
        nothing = self._staging[:0]
        self._launch(plan, nothing, nothing, 0, "one_shot")

    # -- memory -------------------------------------------------------------------------------

    @_on_device
    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Collective: an uninitialised tensor that peers reach."""
        count = torch.Size(shape).numel()
        freed = [n for n, storage in self._segments.items() if storage.expired()]
        # A segment's number is free for the next once its tensor is gone on every rank.
        for number in set.intersection(*(set(each) for each in self._exchange(freed))):
            self._core.remove_segment(number)
            del self._segments[number]
        number = next(n for n in range(1, 1 << 30) if n not in self._segments)
        nbytes = max(-(-count * dtype.itemsize // 16) * 16, 16)
        memory = allocate(nbytes, self.device, self._group, self._exchange)
        self._core.add_segment(number, memory.pointers, memory.multicast, nbytes)
        self._segments[number] = StorageWeakRef(memory.local.untyped_storage())
        return memory.local[: count * dtype.itemsize].view(dtype).view(shape)

    @_on_device
    def close(self, *, drain: bool) -> None:
        self._core.close(drain)

    # -- launches -----------------------------------------------------------------------------

    def _moving(self, nbytes: int) -> str:
        return "one_shot" if nbytes <= policy.GPU_SLOT_BYTES else "two_shot"

    def _launch(
        self,
        plan: int,
        source: Tensor,
        target: Tensor,
        count: int,
        algorithm: str,
        address: int = 0,
        *,
        root: int = 0,
        scale: float = 1.0,
        weight: float = weights.ORDINARY,
    ) -> None:
        """``address``: what the core is given in place of the source's."""
        blocks = policy.blocks(algorithm, source.nbytes, self.world_size, self._most_blocks)
        stream = torch.cuda.current_stream(self.device)
        self._order.enter(stream)
        self._core.run(
            plan,
            address or source.data_ptr(),
            target.data_ptr(),
            count,
            root,
            scale,
            weight,
            blocks,
            int(stream.cuda_stream),
        )
        self._order.leave(stream)

    @contextlib.contextmanager
    def _reachable(
        self,
        tensor: Tensor,
        *,
        stage: bool = True,
        write_back: bool = False,
        multicast: bool = False,
    ) -> Iterator[Tensor]:
        """The tensor, contiguous and where peers reach it: itself, or a copy in the staging, which
        afterwards, with ``write_back``, is copied back. The kernel that works on a copy ends only
        when no peer reads it any more, so that the next one may come."""
        if not stage:
            yield tensor.contiguous()
            return
        if tensor.is_contiguous() and self._finds(tensor, multicast):
            yield tensor
            return
        copy = self._staging[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        stream = torch.cuda.current_stream(self.device)
        self._order.enter(stream)
        copy.copy_(tensor)
        self._order.leave(stream)
        yield copy
        if write_back:
            tensor.copy_(copy)
            self._order.leave(stream)

    def _finds(self, tensor: Tensor, multicast: bool) -> bool:
        """Whether peers reach it. Other memory can have come to where a tensor was that is gone."""
        while True:
            at = self._core.find(tensor.data_ptr(), tensor.nbytes, multicast)
            if at < 0 or at == _STAGING or not self._segments[at].expired():
                return at >= 0
            self._core.remove_segment(at)  # its number stays taken until it is gone on all ranks


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


def convert(
    sources: list[Tensor], targets: list[Tensor], scale: float, device: torch.device
) -> None:
    """Every target becomes its source, cast and scaled, in one launch on the current stream."""
    if _cuda is None:
        raise RuntimeError(problem())
    if not sources:
        return
    with torch.cuda.device(device):
        _cuda.convert(
            [tensor.data_ptr() for tensor in sources],
            [tensor.data_ptr() for tensor in targets],
            [tensor.numel() for tensor in sources],
            enums.DTYPE[sources[0].dtype],
            enums.DTYPE[targets[0].dtype],
            scale,
            int(torch.cuda.current_stream(device).cuda_stream),
        )


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy of what lies in the CPU's memory, on the current stream; does not wait for it."""
    if device.type == "cpu":
        return values.clone()
    return values.pin_memory().to(device, non_blocking=True)


class Flag:
    """What the device finds to hold, or not, once it has done what the current stream has been
    given so far. Asking waits until it is known.

    Args:
        found: one element, on the device.
    """

    def __init__(self, found: Tensor) -> None:
        self._told = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        self._told.copy_(found, non_blocking=True)
        self._known = torch.cuda.Event()
        self._known.record(torch.cuda.current_stream(found.device))

    def __bool__(self) -> bool:
        self._known.synchronize()
        return bool(self._told)


class NormTable:
    """What has been measured on one device and not yet been taken from there: csrc/device_norm.h.

    Args:
        ends: of the sections, in elements.
        device: whose tensors are measured.
    """

    def __init__(self, ends: Sequence[int], device: torch.device) -> None:
        if reason := problem():
            raise RuntimeError(f"norms: gradients on GPUs cannot be measured: {reason}")
        self._device = device
        self._ends = on_device(torch.tensor(ends, dtype=torch.int64), device)
        words = _cuda.NORM_WORDS
        self._bins = torch.zeros(len(ends), words, dtype=torch.int64, device=device)
        self._last = torch.cuda.Event()
        self._last.record(torch.cuda.current_stream(device))

    def measure(self, tensor: Tensor, begin: int, end: int) -> None:
        """Elements of a contiguous tensor, from a unit's first on, on the current stream."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(self._last)
        for each in (self._ends, self._bins):
            each.record_stream(stream)
        with torch.cuda.device(self._device):
            _cuda.norm(
                enums.DTYPE[tensor.dtype],
                tensor.data_ptr(),
                begin,
                end,
                self._ends.data_ptr(),
                self._ends.numel(),
                self._bins.data_ptr(),
                int(stream.cuda_stream),
            )
        self._last.record(stream)

    def take(self) -> Tensor:
        """The counts, int64, (sections, columns), on the CPU; then it is empty. Waits for the
        device."""
        self._last.synchronize()
        found = self._bins.cpu()
        self._bins.zero_()
        self._last.record(torch.cuda.current_stream(self._device))
        columns = _C.NORM_BYTES // 8
        table = torch.empty(len(found), columns, dtype=torch.int64)
        _cuda.norms_of(found.data_ptr(), len(found), table.data_ptr())
        return table


class WirePlan:
    """_C.WirePlan, with its tables on a device."""

    def __init__(
        self,
        world_size: int,
        rows: Sequence[tuple[int, int, int, int, bool, int]],
        device: torch.device,
    ) -> None:
        if _cuda is None:
            raise RuntimeError(problem())
        self.core = _cuda.WirePlan(world_size, rows)
        image = torch.frombuffer(bytearray(self.core.image()), dtype=torch.uint8)
        self.tables = on_device(image, device)
        self.core.place(self.tables.data_ptr())

    def message_bytes(self, chunk: int) -> int:
        return self.core.message_bytes(chunk)


class WireCoding:
    """_C.WireCoding: how this rank encodes one buffer in one step. Launches are on the current
    stream, the same for all of them, on which what it is given has been made, or waited for.

    Args:
        factor: a number, or one float32 on the device.
        residuals: 4 addresses for every span, int64, on the device.
        absent: a byte for every span, on the device.

    Attributes:
        finite: whether all of the result is; from the last launch on.
    """

    def __init__(
        self,
        plan: WirePlan,
        gradient: Tensor,
        rank: int,
        factor: float | Tensor,
        residuals: Tensor,
        residual_dtype: torch.dtype,
        absent: Tensor | None,
        seed: int,
        step: int,
    ) -> None:
        assert _cuda is not None
        self.finite: Flag | None = None
        self._plan = plan
        self._device = gradient.device
        self._found = torch.ones(1, dtype=torch.int32, device=self._device)
        self._held: Any = factor, residuals, absent  # until all has been launched
        # The tables may have been made on another stream, to which their memory would go back.
        plan.tables.record_stream(torch.cuda.current_stream(self._device))
        self._core = _cuda.WireCoding(
            plan.core,
            gradient.data_ptr(),
            enums.DTYPE[gradient.dtype],
            rank,
            1.0 if isinstance(factor, Tensor) else factor,
            factor.data_ptr() if isinstance(factor, Tensor) else 0,
            residuals.data_ptr(),
            enums.DTYPE[residual_dtype],
            0 if absent is None else absent.data_ptr(),
            seed,
            step,
            self._found.data_ptr(),
        )

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def encode(self, sent: Tensor) -> None:
        """All messages, one after the other."""
        self._core.encode(sent.data_ptr(), self._stream())

    def reduce(self, arrived: Tensor, result: Tensor) -> None:
        """This rank's part, of the ranks' messages, one after the other."""
        self._core.reduce(arrived.data_ptr(), result.data_ptr(), self._stream())

    def decode(self, results: Tensor, stride: int) -> None:
        """All ranks' parts, each so many bytes after the one before."""
        self._core.decode(results.data_ptr(), stride, self._stream())
        self._end()

    def all_reduce(self, launch: Callable[[int], None]) -> None:
        """All of it at once: ``launch`` is given the core's address."""
        launch(self._core.address)
        self._end()

    def select(self, random: bool, k: int, threshold: float, message: Tensor) -> None:
        """This rank's message, of at most ``k`` elements."""
        assert _cuda is not None
        steps, tiles = _cuda.SelectStep, self._plan.core.tiles()
        search = torch.zeros(_cuda.SEARCH_BYTES, dtype=torch.uint8, device=self._device)
        counts = torch.empty(2, tiles, dtype=torch.int32, device=self._device)

        def launch(step: _cuda.SelectStep, table: Tensor, digit: int = 0) -> None:
            addresses = search.data_ptr(), table.data_ptr(), message.data_ptr()
            self._core.select(step, digit, random, k, threshold, *addresses, self._stream())

        for digit in range(_cuda.DIGITS):
            launch(steps.count, counts, digit)
            launch(steps.settle, counts, digit)
        launch(steps.tally, counts)
        launch(steps.emit, counts.cumsum(1, dtype=torch.int32))

    def combine(self, k: int, messages: Sequence[Tensor]) -> None:
        """The gradient, of the ranks' messages, which lie one after the other."""
        assert _cuda is not None
        rows = self._plan.core.tiles() + 1
        table = torch.empty(rows, len(messages), dtype=torch.int32, device=self._device)
        for step in (_cuda.SelectStep.find, _cuda.SelectStep.combine):
            addresses = 0, table.data_ptr(), messages[0].data_ptr()
            self._core.select(step, 0, False, k, 0.0, *addresses, self._stream())
        self._end()

    def _end(self) -> None:
        self.finite = Flag(self._found)
        self._held = None


def first_reason(reasons: list[str]) -> str:
    return next((reason for reason in reasons if reason), "")
