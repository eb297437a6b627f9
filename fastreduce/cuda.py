"""GPUs that map each other's memory: what of a communicator runs in this library's CUDA kernels.

Peers' memory and multicast addresses come from torch's symmetric memory. Calls are launched on the
current stream and never wait for the device; what goes wrong in a kernel is raised by the next
call.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

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

_NUMBERS = {getattr(torch, name): number for number, name in enumerate(errors.DTYPES)}
_KINDS = {name: number for number, name in enumerate(errors.KINDS)}
_OPS = {name: number for number, name in enumerate(errors.OPS)}
_ALGORITHMS = {name: number for number, name in enumerate(errors.ALGORITHMS)}

# Those whose kernels reach into all ranks' tensors.
_DIRECT = ("two_shot", "multimem")

_STAGING = 0  # the segment through which tensors go that peers cannot reach
_PROBE_BYTES = 16 * policy.MIB
_HEARTBEAT_SECONDS = 1.0
# Of a peer on another host, whose process cannot be watched.
_SILENCE_SECONDS = 30.0


def problem() -> str:
    """Why CUDA tensors cannot go through this library's kernels on this machine, or ""."""
    if _cuda is None:
        return "fastreduce was built without CUDA: at its installation there was no nvcc"
    if reason := _cuda.problem():
        return f"CUDA does not work on this machine: {reason}"
    return ""


class Work:
    """An asynchronous call on a stream of its own."""

    def __init__(self, done: torch.cuda.Event, check: Callable[[], None]) -> None:
        self._done = done
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
        self._done.wait()
        self._check()

    def is_completed(self) -> bool:
        return bool(self._done.query())


class CallOrder:
    """Kernels of one communicator run one after the other, also when their callers' streams differ.

    Calls that are captured into a graph are ordered among themselves; where they run against other
    calls, at replay, is for whoever replays the graph to say.
    """

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None

    def enter(self, stream: torch.cuda.Stream) -> None:
        """Before a launch on ``stream``, which is the current one."""
        last, self._last = self._last, stream
        if last is None or last == stream:
            return
        with torch.cuda.stream(last):
            before = torch.cuda.is_current_stream_capturing()
        if before == torch.cuda.is_current_stream_capturing():
            stream.wait_stream(last)


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


def allocate(nbytes: int, device: torch.device, group: ProcessGroup) -> SymmetricMemory:
    """Collective. torch says no with whatever exception it likes."""
    from torch.distributed import _symmetric_memory as symmetric

    local = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(local, group)

    def peer(rank: int, begin: int, size: int) -> Tensor:
        part: Tensor = handle.get_buffer(rank, (size,), torch.uint8, begin)
        return part

    return SymmetricMemory(
        local, [int(at) for at in handle.buffer_ptrs], int(handle.multicast_ptr), peer
    )


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
            tensor.record_stream(stream)
        with torch.cuda.stream(stream):
            yield stream

    def work(self) -> Work:
        """For what has been launched on the current stream."""
        done = torch.cuda.Event()
        done.record()
        return Work(done, self._core.check)

    # -- collectives --------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: str, algorithm: str, scale: float, shape: int) -> None:
        flat = tensor.detach().view(-1)
        plan = self._plan("all_reduce", tensor.dtype, op, algorithm, shape)
        if algorithm not in _DIRECT:
            self._launch(plan, flat, flat, flat.numel(), algorithm, scale=scale)
            return
        # In pieces on every rank alike, though only some may need the staging.
        step = self._staging.numel() // tensor.element_size()
        for begin in range(0, flat.numel(), step):
            piece = flat[begin : begin + step]
            with self._reachable(piece, write_back=True, multicast=algorithm == "multimem") as at:
                self._launch(plan, at, at, at.numel(), algorithm, scale=scale)

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
        for begin in range(0, out.numel(), step):
            end = min(begin + step, out.numel())
            part = whole[:, begin:end]
            with self._reachable(part, stage=algorithm != "one_shot") as at:
                self._launch(plan, at, out[begin:end], end - begin, algorithm, scale=scale)

    def all_gather(self, output: Tensor, input: Tensor, shape: int) -> None:
        mine = _bytes(input)
        whole = _bytes(output).view(self.world_size, -1)
        algorithm = self._moving(mine.numel())
        plan = self._plan("all_gather", torch.uint8, "sum", algorithm, shape)
        step = max(mine.numel(), 1) if algorithm == "one_shot" else self._staging.numel()
        for begin in range(0, mine.numel(), step):
            end = min(begin + step, mine.numel())
            out = whole[:, begin:end]
            target = out if out.is_contiguous() else torch.empty_like(out)
            with self._reachable(mine[begin:end], stage=algorithm != "one_shot") as at:
                self._launch(plan, at, target, end - begin, algorithm)
            if target is not out:
                out.copy_(target)

    def broadcast(self, tensor: Tensor, root: int, shape: int) -> None:
        flat = _bytes(tensor)
        algorithm = self._moving(flat.numel())
        plan = self._plan("broadcast", torch.uint8, "sum", algorithm, shape)
        step = max(flat.numel(), 1) if algorithm == "one_shot" else self._staging.numel()
        for begin in range(0, flat.numel(), step):
            piece = flat[begin : begin + step]
            with self._reachable(piece, stage=algorithm != "one_shot") as at:
                # Every rank's own is the target; the root's is the source.
                self._launch(plan, at, piece, piece.numel(), algorithm, root=root)

    def barrier(self) -> None:
        """Of the ranks' current streams."""
        plan = self._plan("barrier", torch.uint8, "sum", "one_shot", 0)
        self._order.enter(torch.cuda.current_stream(self.device))
        self._core.run(plan, 0, 0, 0, 0, 1.0, 1, self._handle())

    # -- memory -------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Collective: an uninitialised tensor that peers reach."""
        count = torch.Size(shape).numel()
        freed = [n for n, storage in self._segments.items() if storage.expired()]
        # A segment's number is free for the next once its tensor is gone on every rank.
        everywhere = set.intersection(*(set(each) for each in self._exchange(freed)))
        for number in everywhere:
            self._core.remove_segment(number)
            del self._segments[number]
        number = next(n for n in range(1, 1 << 30) if n not in self._segments)
        nbytes = max(-(-count * dtype.itemsize // 16) * 16, 16)
        memory = allocate(nbytes, self.device, self._group)
        self._core.add_segment(number, memory.pointers, memory.multicast, nbytes)
        self._segments[number] = StorageWeakRef(memory.local.untyped_storage())
        return memory.local[: count * dtype.itemsize].view(dtype).view(shape)

    def close(self, *, drain: bool) -> None:
        self._core.close(drain)

    # -- launches -----------------------------------------------------------------------------

    def _moving(self, nbytes: int) -> str:
        return "one_shot" if nbytes <= policy.GPU_SLOT_BYTES else "two_shot"

    def _plan(self, kind: str, dtype: torch.dtype, op: str, algorithm: str, shape: int) -> int:
        return _C.plan(_KINDS[kind], _NUMBERS[dtype], _OPS[op], _ALGORITHMS[algorithm], shape)

    def _handle(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

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
        self._order.enter(torch.cuda.current_stream(self.device))
        self._core.run(
            plan,
            source.data_ptr(),
            target.data_ptr(),
            count,
            root,
            scale,
            blocks,
            self._handle(),
        )

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
        at = self._core.find(tensor.data_ptr(), tensor.nbytes, multicast)
        living = at == _STAGING or (at in self._segments and not self._segments[at].expired())
        if living and tensor.is_contiguous():
            yield tensor
            return
        copy = self._staging[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        self._order.enter(torch.cuda.current_stream(self.device))
        copy.copy_(tensor)
        yield copy
        if write_back:
            tensor.copy_(copy)


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
    problem: str
    blocks: int = 0
    limits: tuple[tuple[str, int | None], ...] = ()


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
    reason = problem()
    blocks = 0
    if not reason:
        with torch.cuda.device(device):
            blocks = min(_cuda.resident_blocks(), 32)
    here = _Gpu(
        host=_boot_id(),
        processes=os.readlink("/proc/self/ns/pid"),
        process=os.getpid(),
        problem=reason,
        blocks=blocks,
        limits=limits,
    )
    ranks = group.all_gather_object(here)
    for p, each in enumerate(ranks):
        if each.problem:
            return None, f"on rank {p}, {each.problem}"
    blocks = min(each.blocks for each in ranks)

    layout = (blocks, policy.GPU_SLOT_BYTES, policy.GPU_STAGE_BYTES, policy.GPU_INBOX_BYTES)
    staging = -(-_cuda.area_bytes(len(ranks), *layout) // 4096) * 4096
    memory: SymmetricMemory | None = None
    try:
        memory = allocate(staging + policy.GPU_PIECE_BYTES, device, process_group)
        memory.local.zero_()
        torch.cuda.synchronize(device)
    except Exception as error:
        reason = f"rank {rank} could not map its peers' memory: {error}"
    if reason := _first(group.all_gather_object(reason)):
        return None, reason
    assert memory is not None

    reason = probe(memory, rank, lambda: _first(group.all_gather_object("")), staging)
    if reason := _first(group.all_gather_object(reason)):
        return None, reason
    pair = min(group.all_gather_object(pair_bandwidth(memory, rank, staging)))
    topology = policy.topology_of(
        pair_bandwidth=pair,
        world_size=len(ranks),
        multicast=memory.multicast != 0,
        hosts=len({each.host for each in ranks}),
        limits=ranks[0].limits,
    )

    core: Any = None
    try:
        with torch.cuda.device(device):
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
    except Exception as error:
        reason = f"rank {rank}: {error}"
    if reason := _first(group.all_gather_object(reason)):
        return None, reason
    transport = CudaTransport(
        core, memory, staging, topology, blocks, group.all_gather_object, process_group
    )
    watched = {
        p: each.process
        for p, each in enumerate(ranks)
        if p != rank and each.host == here.host and each.processes == here.processes
    }
    others = [p for p in range(len(ranks)) if p != rank and p not in watched]
    store = _store_of(process_group) if others else None
    watch = PeerWatch(core, rank, watched, others, store)
    watch.start()
    weakref.finalize(transport, _end, core, watch, memory)
    return transport, ""


def _end(core: _cuda.CudaCommunicator, watch: PeerWatch, memory: SymmetricMemory) -> None:
    """The core first: until it is closed, it looks into the memory."""
    watch.stop()
    core.close(drain=False)
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

    def pattern(writer: int, reader: int) -> Tensor:
        numbers = torch.arange(size, device=device) * 31 + writer * 7 + reader * 101 + 1
        return (numbers % 251).to(torch.uint8)

    wrong = ""
    own = memory.local[begin : begin + (1 + world_size) * size]
    own[:size] = pattern(rank, rank)
    _settle(device)
    meet()
    for peer in range(world_size):
        seen = memory.peer(peer, begin, size) + 0  # by loads of a kernel, not by a copy engine
        if not torch.equal(seen, pattern(peer, peer)):
            wrong = wrong or f"rank {rank} reads wrong values from rank {peer}'s memory"
        place = memory.peer(peer, begin + (1 + rank) * size, size)
        torch.add(pattern(rank, peer), 0, out=place)
    _settle(device)
    meet()
    for peer in range(world_size):
        seen = own[(1 + peer) * size :][:size]
        if not torch.equal(seen, pattern(peer, rank)):
            wrong = wrong or f"what rank {peer} writes into rank {rank}'s memory does not arrive"
    meet()
    own.zero_()
    _settle(device)
    meet()
    if wrong:
        wrong += ": peer access between these GPUs is broken (an IOMMU, or virtualisation?)"
    return wrong


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


class PeerWatch(threading.Thread):
    """Tells the kernels which peers' processes have ended, so that nobody waits for them.

    Args:
        core: has ``lose(rank)``.
        processes: rank -> process id, of peers whose process this one can see.
        others: further ranks, which are heard of through ``store`` only.
    """

    def __init__(
        self,
        core: Any,
        rank: int,
        processes: dict[int, int],
        others: list[int],
        store: Any | None,
        *,
        heartbeat: float = _HEARTBEAT_SECONDS,
        silence: float = _SILENCE_SECONDS,
    ) -> None:
        super().__init__(name="fastreduce-peers", daemon=True)
        self._core = core
        self._rank = rank
        self._others = {p: ("", time.monotonic()) for p in others}
        self._store = store
        self._heartbeat = heartbeat
        self._silence = silence
        self._beats = 0
        self._poll = select.poll()
        self._wake, self._waker = os.pipe()
        self._poll.register(self._wake, select.POLLIN)
        self._fds: dict[int, int] = {}
        for p, process in processes.items():
            try:
                fd = os.pidfd_open(process)
            except ProcessLookupError:
                core.lose(p)
                continue
            self._fds[fd] = p
            self._poll.register(fd, select.POLLIN)
        self._beat()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._waker)
        if self.is_alive() and threading.current_thread() is not self:
            self.join()

    def run(self) -> None:
        try:
            while self._look():
                pass
        finally:
            for fd in [*self._fds, self._wake]:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _look(self) -> bool:
        """False: there is nothing more to watch, or stop() was called."""
        limit = self._heartbeat * 1e3 if self._others else None
        for fd, _ in self._poll.poll(limit):
            if fd == self._wake:
                return False
            self._poll.unregister(fd)
            os.close(fd)
            self._core.lose(self._fds.pop(fd))
        self._beat()
        return True

    def _beat(self) -> None:
        if not self._others or self._store is None:
            return
        now = time.monotonic()
        try:
            self._beats += 1
            self._store.set(f"fastreduce-beat-{self._rank}", str(self._beats))
            for p, (beat, since) in list(self._others.items()):
                key = f"fastreduce-beat-{p}"
                heard = str(self._store.get(key)) if self._store.check([key]) else ""
                if heard != beat:
                    self._others[p] = (heard, now)
                elif now - since > self._silence:
                    self._core.lose(p)
                    del self._others[p]
        except Exception:
            # The store has gone, and with it what could be heard: the waits' own timeout is left.
            self._others.clear()


def _first(reasons: list[str]) -> str:
    return next((reason for reason in reasons if reason), "")


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _store_of(process_group: ProcessGroup) -> Any:
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    return distributed_c10d.PrefixStore(f"fastreduce/{process_group.group_name}", store)
