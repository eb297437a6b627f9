"""How the ranks of a group find out what they can share: the memory of their host, or of their
GPUs. What one rank finds missing, all are told, so that they go the same way."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from fastreduce import _C, policy, tuning
from fastreduce.cuda import CudaTransport, SymmetricMemory, allocate, first_reason, problem

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fastreduce._cuda import CudaCommunicator
    from fastreduce.process_group import ProcessGroupTransport

T = TypeVar("T")

# How long the ranks of a host may take to find each other once all have entered the constructor.
_CONNECT_SECONDS = 20.0

_PROBE_BYTES = 16 * policy.MIB
# More blocks than these move no more over a GPU's links.
_MOST_BLOCKS = 32
# Of peers on other hosts, whose processes cannot be watched.
_HEARTBEAT_SECONDS = 1.0
_SILENCE_SECONDS = 60.0


def _boot_id() -> str:
    """The same for all processes of a running host, and for those of no other."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


# -- a host's memory --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Host:
    """What a rank tells the others before they try to share memory."""

    boot: str
    network: str
    processes: str
    process: int
    address: bytes
    cores: frozenset[int]
    threads: int | None
    token: bytes
    problem: str


def share_memory(
    group: ProcessGroupTransport,
    rank: int,
    world_size: int,
    timeout: timedelta,
    threads: int | None,
    first_epoch: int,
) -> tuple[_C.HostCommunicator | None, policy.Topology, str]:
    """Collective: the shared-memory core, or None and the reason, the same on all ranks; and what
    the ranks run on, with what ``tune`` has measured there."""
    listener: _C.Listener | None = None
    problem = ""
    try:
        listener = _C.Listener()
    except (OSError, RuntimeError) as error:
        problem = str(error)
    boot, network = host()
    here = _Host(
        boot=boot,
        network=network,
        processes=os.readlink("/proc/self/ns/pid"),
        process=os.getpid(),
        address=b"" if listener is None else listener.address,
        cores=frozenset(os.sched_getaffinity(0)),
        threads=threads,
        token=uuid.uuid4().hex.encode(),
        problem=problem,
    )
    hosts = group.all_gather_object(here)
    topology = policy.Topology(shared_memory=False, cores=0, ranks=world_size)
    problem = _apart(hosts)
    core: _C.HostCommunicator | None = None
    if not problem:
        assert listener is not None
        topology = policy.Topology(
            shared_memory=True,
            cores=len(frozenset().union(*(host.cores for host in hosts))),
            ranks=world_size,
        )
        default = policy.threads_per_rank(topology, _C.MAX_BLOCKS)
        foreground = policy.patience(topology, background=False)
        background = policy.patience(topology, background=True)
        try:
            core = _C.HostCommunicator(
                listener,
                rank,
                [host.address for host in hosts],
                [host.process if host.processes == here.processes else 0 for host in hosts],
                hosts[0].token,
                timeout=timeout,
                connect_timeout=min(timeout, timedelta(seconds=_CONNECT_SECONDS)),
                blocks=min(host.threads or default for host in hosts),
                slot_bytes=policy.SLOT_BYTES,
                stage_bytes=policy.STAGE_BYTES,
                block_bytes=policy.THREADED_BYTES,
                foreground_ns=(foreground.spin_ns, foreground.yield_ns),
                background_ns=(background.spin_ns, background.yield_ns),
                first_epoch=first_epoch,
            )
        except _C.CannotShareError as error:
            problem = f"rank {rank} could not share memory: {error}"
    # Files of ranks may differ: all take what rank 0 knows.
    known = tuning.recall(tuning.host(topology)) if rank == 0 else ()
    problems, limits = zip(*group.all_gather_object((problem, known)), strict=True)
    topology = replace(topology, limits=limits[0])
    # A rank that waited for another has a worse reason than the one that was waited for.
    first = min(
        (p for p in problems if p),
        key=lambda p: "timed out" in p or "left while" in p,
        default="",
    )
    if not first:
        return core, topology, ""
    if core is not None:
        core.close(drain=False)
    return None, topology, first


def _apart(hosts: Sequence[_Host]) -> str:
    """Why such ranks cannot share memory, or ""."""
    for r, host in enumerate(hosts):
        if host.boot != hosts[0].boot:
            return f"rank {r} runs on another host than rank 0"
        if host.network != hosts[0].network:
            return f"rank {r} runs in another network namespace than rank 0"
        if host.problem:
            return f"rank {r} could not open a socket: {host.problem}"
    if len(hosts) > _C.MAX_RANKS:
        return f"there are {len(hosts)} ranks, more than {_C.MAX_RANKS}"
    return ""


def host() -> tuple[str, str]:
    """The same for processes that may share memory, and for no others."""
    return _boot_id(), os.readlink("/proc/self/ns/net")


# -- GPUs' memory ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gpu:
    """What a rank tells the others before they try to map each other's memory."""

    host: str
    processes: str
    process: int
    blocks: int
    limits: policy.Limits


class _Refused(Exception):
    """Some rank cannot; raised on all."""


def connect_gpus(
    group: ProcessGroupTransport,
    process_group: ProcessGroup,
    rank: int,
    device: torch.device,
    timeout: timedelta,
    limits: policy.Limits,
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
        if reason := first_reason([reason for _, reason in every]):
            raise _Refused(reason)
        return [value for value, _ in every]  # type: ignore[misc]

    try:
        ranks = together(lambda: describe_gpu(device, limits))
        with torch.cuda.device(device):
            transport = _connect(
                together, group, process_group, rank, ranks, device, timeout, first_epoch
            )
    except _Refused as refused:
        return None, str(refused)
    return transport, ""


def describe_gpu(device: torch.device, limits: policy.Limits) -> _Gpu:
    """Raises RuntimeError where the kernels cannot run."""
    if reason := problem():
        raise RuntimeError(reason)
    from fastreduce import _cuda

    with torch.cuda.device(device):
        # Half of them: a kernel that waits must not keep another one that waits from running.
        blocks = min(_cuda.resident_blocks() // 2, _MOST_BLOCKS)
    if blocks < 1:
        raise RuntimeError("the GPU is too small for the kernels")
    return _Gpu(_boot_id(), os.readlink("/proc/self/ns/pid"), os.getpid(), blocks, limits)


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
    from fastreduce import _cuda

    exchange = group.all_gather_object
    blocks = min(each.blocks for each in ranks)
    stage = policy.gpu_stage_bytes(len(ranks))
    layout = (blocks, policy.GPU_SLOT_BYTES, stage, policy.GPU_INBOX_BYTES)
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
            stage_bytes=stage,
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
    core: CudaCommunicator,
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
