"""GPUs that map each other's memory: what of a communicator runs in this library's CUDA kernels.

Peers' memory and multicast addresses come from torch's symmetric memory. Calls are launched on the
current stream and never wait for the device; what goes wrong in a kernel is raised by the next
call.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fastreduce import _C, errors, policy
from fastreduce.process_group import as_timedelta

try:
    from fastreduce import _cuda
except ImportError:
    _cuda = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fastreduce.process_group import ProcessGroupTransport

P = ParamSpec("P")
T = TypeVar("T")

_NUMBERS = {getattr(torch, name): number for number, name in enumerate(errors.DTYPES)}
_KINDS = {name: number for number, name in enumerate(errors.KINDS)}
_OPS = {name: number for number, name in enumerate(errors.OPS)}
_ALGORITHMS = {name: number for number, name in enumerate(errors.ALGORITHMS)}

# Those whose kernels reach into all ranks' tensors.
_DIRECT = ("two_shot", "multimem")

_STAGING = 0  # the segment through which tensors go that peers cannot reach
_PROBE_BYTES = 16 * policy.MIB
# More blocks than these move no more over a GPU's links.
_MOST_BLOCKS = 32
# Of peers on other hosts, whose processes cannot be watched.
_HEARTBEAT_SECONDS = 1.0
_SILENCE_SECONDS = 60.0


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
    if reason := _first(exchange(reason)):
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
    def all_reduce(self, tensor: Tensor, op: str, algorithm: str, scale: float, shape: int) -> None:
        flat = tensor.detach().view(-1)
        plan = self._plan("all_reduce", tensor.dtype, op, algorithm, shape)
        if algorithm not in _DIRECT:
            self._launch(plan, flat, flat, flat.numel(), algorithm, scale=scale)
            return
        # In pieces on every rank alike, though only some may need the staging.
        step = self._staging.numel() // tensor.element_size()
        for begin in range(0, max(flat.numel(), 1), step):
            piece = flat[begin : begin + step]
            with self._reachable(piece, write_back=True, multicast=algorithm == "multimem") as at:
                self._launch(plan, at, at, at.numel(), algorithm, scale=scale)

    @_on_device
    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: str, scale: float, shape: int
    ) -> None:
        out = output.detach().view(-1)
        whole = input.detach().view(self.world_size, -1)
        algorithm = self._moving(input.nbytes)
        plan = self._plan("reduce_scatter", output.dtype, op, algorithm, shape)
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
        plan = self._plan("all_gather", torch.uint8, "sum", algorithm, shape)
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
        plan = self._plan("broadcast", torch.uint8, "sum", algorithm, shape)
        step = max(flat.numel(), 1) if algorithm == "one_shot" else self._staging.numel()
        for begin in range(0, max(flat.numel(), 1), step):
            piece = flat[begin : begin + step]
            with self._reachable(piece, stage=algorithm != "one_shot") as at:
                # Every rank's own is the target; the root's is the source.
                self._launch(plan, at, piece, piece.numel(), algorithm, root=root)

    @_on_device
    def barrier(self) -> None:
        """Of the ranks' current streams."""
        plan = self._plan("barrier", torch.uint8, "sum", "one_shot", 0)
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

    def _plan(self, kind: str, dtype: torch.dtype, op: str, algorithm: str, shape: int) -> int:
        return _C.plan(_KINDS[kind], _NUMBERS[dtype], _OPS[op], _ALGORITHMS[algorithm], shape)

    def _launch(
        self,
        plan: int,
        source: Tensor,
        target: Tensor,
        count: int,
        algorithm: str,
        *,
        root: int = 0,
        scale: float = 1.0,
    ) -> None:
        blocks = policy.blocks(algorithm, source.nbytes, self.world_size, self._most_blocks)
        stream = torch.cuda.current_stream(self.device)
        self._order.enter(stream)
        self._core.run(
            plan,
            source.data_ptr(),
            target.data_ptr(),
            count,
            root,
            scale,
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
            _NUMBERS[sources[0].dtype],
            _NUMBERS[targets[0].dtype],
            scale,
            int(torch.cuda.current_stream(device).cuda_stream),
        )


# -- rendezvous -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gpu:
    """What a rank tells the others before they try to map each other's memory."""

    host: str
    processes: str
    process: int
    blocks: int
    limits: tuple[tuple[str, int | None], ...]


class _Refused(Exception):
    """Some rank cannot; raised on all."""


def connect(
    group: ProcessGroupTransport,
    process_group: ProcessGroup,
    rank: int,
    device: torch.device,
    timeout: timedelta,
    limits: tuple[tuple[str, int | None], ...],
    first_epoch: int = 0,
) -> tuple[CudaTransport | None, str]:
    """Collective: the ranks' GPUs, or None and the reason, the same on all ranks.

    ``limits``: what ``tune`` has measured on this machine; rank 0's counts.
    """

    def together(step: Callable[[], T]) -> list[T]:
        """What the step gives on every rank; where it fails on one, all are refused."""
        mine: tuple[T | None, str]
        try:
            mine = step(), ""
        except Exception as error:
            mine = None, f"on rank {rank}, {error}"
        every = group.all_gather_object(mine)
        if reason := _first([reason for _, reason in every]):
            raise _Refused(reason)
        return [value for value, _ in every]  # type: ignore[misc]

    try:
        ranks = together(lambda: _describe(device, limits))
        with torch.cuda.device(device):
            transport = _connect(
                together, group, process_group, rank, ranks, device, timeout, first_epoch
            )
    except _Refused as refused:
        return None, str(refused)
    return transport, ""


def _describe(device: torch.device, limits: tuple[tuple[str, int | None], ...]) -> _Gpu:
    if reason := problem():
        raise RuntimeError(reason)
    with torch.cuda.device(device):
        # Half of them: a kernel that waits must not keep another one that waits from running.
        blocks = min(_cuda.resident_blocks() // 2, _MOST_BLOCKS)
    if blocks < 1:
        raise RuntimeError("the GPU is too small for the kernels")
    with open("/proc/sys/kernel/random/boot_id") as file:
        host = file.read().strip()
    return _Gpu(host, os.readlink("/proc/self/ns/pid"), os.getpid(), blocks, limits)


def _connect(
    together: Callable[[Callable[[], Any]], list[Any]],
    group: ProcessGroupTransport,
    process_group: ProcessGroup,
    rank: int,
    ranks: list[_Gpu],
    device: torch.device,
    timeout: timedelta,
    first_epoch: int,
) -> CudaTransport:
    exchange = group.all_gather_object
    blocks = min(each.blocks for each in ranks)
    layout = (blocks, policy.GPU_SLOT_BYTES, policy.GPU_STAGE_BYTES, policy.GPU_INBOX_BYTES)
    staging = -(-_cuda.area_bytes(len(ranks), *layout) // 4096) * 4096
    made: list[Any] = []

    def make_memory() -> None:
        nbytes = staging + policy.GPU_PIECE_BYTES
        memory = allocate(nbytes, device, process_group, exchange)
        memory.local.zero_()
        _settle(device)
        made.append(memory)

    def make_core() -> None:
        core = _cuda.CudaCommunicator(
            rank,
            memory.pointers,
            blocks=blocks,
            slot_bytes=policy.GPU_SLOT_BYTES,
            stage_bytes=policy.GPU_STAGE_BYTES,
            inbox_bytes=policy.GPU_INBOX_BYTES,
            timeout=timeout,
            first_epoch=first_epoch,
        )
        made.append(core)
        made.append(CudaTransport(core, memory, staging, topology, blocks, exchange, process_group))

    def refuse(reason: str) -> None:
        if reason:
            raise RuntimeError(reason)

    together(make_memory)
    memory: SymmetricMemory = made[0]
    found = probe(memory, rank, lambda: exchange(None), staging)
    together(lambda: refuse(found))
    topology = policy.topology_of(
        pair_bandwidth=min(together(lambda: pair_bandwidth(memory, rank, staging))),
        world_size=len(ranks),
        multicast=memory.multicast != 0,
        hosts=len({each.host for each in ranks}),
        limits=ranks[0].limits,
    )
    try:
        together(make_core)
        core, transport = made[1], made[2]
        if topology.multicast and not all(together(lambda: adds_up(transport, rank))):
            transport.topology = replace(topology, multicast=False)
        together(core.check)
        here = ranks[rank]
        seen = {
            p: each.process
            for p, each in enumerate(ranks)
            if p != rank and (each.host, each.processes) == (here.host, here.processes)
        }
        others = [p for p in range(len(ranks)) if p != rank and p not in seen]
        together(lambda: core.watch(seen))
        heartbeat = Heartbeat(core, rank, others, _store_of(process_group)) if others else None
    except BaseException:
        # The core first: until it is closed, it looks into the memory.
        if len(made) > 1:
            made[1].close(drain=False)
        raise
    if heartbeat is not None:
        heartbeat.start()
    weakref.finalize(transport, _end, core, heartbeat, memory, device, os.getpid())
    return transport  # type: ignore[no-any-return]


def _end(
    core: _cuda.CudaCommunicator,
    heartbeat: Heartbeat | None,
    memory: SymmetricMemory,
    device: torch.device,
    process: int,
) -> None:
    """What has been launched ends first: its tensors are somebody's."""
    if os.getpid() != process:
        return  # a forked child has neither the threads nor the device
    if heartbeat is not None:
        heartbeat.stop()
    with contextlib.suppress(RuntimeError), torch.cuda.device(device):
        core.close(drain=True)
    del memory


def probe(memory: SymmetricMemory, rank: int, meet: Callable[[], object], begin: int) -> str:
    """Whether loads and stores really reach every peer's memory: "" or what is wrong. An IOMMU or
    a virtual machine can promise peer access and give garbage.

    Collective; uses the memory from byte ``begin`` on, and leaves zeros. ``meet`` returns once all
    ranks have called it.
    """
    world_size = len(memory.pointers)
    size = 4096
    device = memory.local.device
    own = memory.local[begin : begin + (1 + world_size) * size]
    wrong: list[str] = []

    def pattern(writer: int, reader: int) -> Tensor:
        numbers = torch.arange(size, device=device) * 31 + writer * 7 + reader * 101 + 1
        return (numbers % 251).to(torch.uint8)

    def write_own() -> None:
        own[:size] = pattern(rank, rank)

    def visit_peers() -> None:
        for peer in range(world_size):
            seen = memory.peer(peer, begin, size) + 0  # by loads of a kernel, not a copy engine's
            if not torch.equal(seen, pattern(peer, peer)):
                wrong.append(f"rank {rank} reads wrong values from rank {peer}'s memory")
            place = memory.peer(peer, begin + (1 + rank) * size, size)
            torch.add(pattern(rank, peer), 0, out=place)

    def look() -> None:
        for peer in range(world_size):
            if not torch.equal(own[(1 + peer) * size :][:size], pattern(peer, rank)):
                wrong.append(f"what rank {peer} writes into rank {rank}'s memory does not arrive")

    def clear() -> None:
        own.zero_()

    for step in (write_own, visit_peers, look, clear):
        try:
            step()
            _settle(device)
        except RuntimeError as error:
            wrong.append(f"rank {rank}: {error}")
        meet()
    if not wrong:
        return ""
    return f"{wrong[0]}: peer access between these GPUs is broken (an IOMMU, or virtualisation?)"


def pair_bandwidth(memory: SymmetricMemory, rank: int, begin: int) -> float:
    """Bytes/s at which this rank reads its neighbour's memory, while all ranks do the same."""
    source = memory.peer((rank + 1) % len(memory.pointers), begin, _PROBE_BYTES)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.add(source.view(torch.int64), 0, out=target.view(torch.int64))
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3)
    return float(_PROBE_BYTES / min(seconds))


def adds_up(transport: CudaTransport, rank: int) -> bool:
    """Whether the switch does what its multicast address promises. Collective."""
    tensor = torch.full((4096,), 1.0 + rank, device=transport.device)
    transport.all_reduce(tensor, "sum", "multimem", 1.0, 0)
    expected = transport.world_size * (transport.world_size + 1) / 2
    return bool(tensor.eq(expected).all().item())


class Heartbeat(threading.Thread):
    """Tells the kernels which peers on other hosts have fallen silent: nobody waits for them.
    (Processes on this host are watched by the core.)

    Args:
        core: has ``lose(rank)``.
        others: the ranks to listen to.
        store: has ``set``, ``check``, ``get``; a client of its own, for one that waits in another
            thread would keep this one from speaking.
        period, silence: seconds.
    """

    def __init__(
        self,
        core: Any,
        rank: int,
        others: list[int],
        store: Any,
        *,
        period: float = _HEARTBEAT_SECONDS,
        silence: float = _SILENCE_SECONDS,
    ) -> None:
        super().__init__(name="fastreduce-heartbeat", daemon=True)
        self._core = core
        self._rank = rank
        self._others = {p: ("", time.monotonic()) for p in others}
        self._store = store
        self._period = period
        self._silence = silence
        self._beats = 0
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        # Without the store, the waits' own timeout is left.
        with contextlib.suppress(Exception):
            while self._others and not self._stopped.is_set():
                self._beat()
                self._stopped.wait(self._period)

    def _beat(self) -> None:
        self._beats += 1
        self._store.set(f"fastreduce-beat-{self._rank}", str(self._beats))
        for p, (beat, since) in list(self._others.items()):
            key = f"fastreduce-beat-{p}"
            heard = str(self._store.get(key)) if self._store.check([key]) else ""
            now = time.monotonic()
            if heard != beat:
                self._others[p] = (heard, now)
            elif now - since > self._silence:
                self._core.lose(p)
                del self._others[p]


def _first(reasons: list[str]) -> str:
    return next((reason for reason in reasons if reason), "")


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _store_of(process_group: ProcessGroup) -> Any:
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    clone = getattr(store, "clone", None)
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store = clone() if clone is not None else store
    return distributed_c10d.PrefixStore(f"fastreduce/{process_group.group_name}", store)
