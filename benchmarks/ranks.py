"""The ranks that a benchmark runs on: how they are started, what each has, how they meet."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # what DDP imports, which after a group exists would hold that for ever
from torch import Tensor

import fastreduce
from fastreduce.timing import Method

# Set in processes that an mpiexec has started.
MPI_RUN = "FASTREDUCE_BENCHMARK_MPI"
# What makes MPI libraries fast, or lets them run, in this setting; the caller's values win. The
# allocator's keep their temporaries from being paged in anew by every call.
MPI_SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "I_MPI_FABRICS": "shm",
    "I_MPI_THREAD_YIELD": "2",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
TIMEOUT = 300.0
CPU = torch.device("cpu")


def join_group(rank: int, world_size: int, folder: Path) -> None:
    """This process becomes a rank of a gloo group that meets in ``folder``, on one thread."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT),
    )


def leave_group() -> None:
    """Models are in cycles and hold the group, whose threads must end before the interpreter."""
    gc.collect()
    dist.destroy_process_group()


def build(source: str) -> ctypes.CDLL:
    """A file beside this one, compiled for this machine."""
    with tempfile.TemporaryDirectory(prefix="fastreduce-build-") as folder:
        library = Path(folder, "built.so")
        compiler = os.environ.get("CXX", "c++").split()
        flags = ["-O3", "-march=native", "-shared", "-fPIC", "-o", str(library)]
        subprocess.run([*compiler, *flags, Path(__file__).with_name(source)], check=True)
        return ctypes.CDLL(str(library))


class Rank:
    """This process's part of a run, within a process group that is there already.

    Attributes:
        device: of the tensors that are measured.
        folder: where all ranks of the host see the same files, which should lie in memory.
        mpi: mpi4py's MPI, where an mpiexec has started the ranks, else None.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.communicator = fastreduce.Communicator(timeout=120)
        self.mpi = import_mpi()
        self._trips = 0
        self._arenas = 0

    @cached_property
    def _bound(self) -> ctypes.CDLL:
        loaded = build("bound.cpp")
        loaded.round_trip.restype = ctypes.c_double
        return loaded

    @cached_property
    def _flags(self) -> Tensor:
        return _map_file(self.folder / "flags", 4096)

    def round_trip(self) -> float | None:
        """Nanoseconds of a flag round trip between ranks 0 and 1, as the cores lie now; None with
        one rank, on GPUs, and where ranks share no memory. Collective."""
        shared = self.communicator.topology.shared_memory
        if self.world_size == 1 or self.device.type == "cuda" or not shared:
            return None
        flags, bound = self._flags, self._bound
        self.communicator.barrier()
        rounds = 2000 if self.world_size <= len(os.sched_getaffinity(0)) else 50
        ns: float = bound.round_trip(
            ctypes.c_void_p(flags.data_ptr()), self.rank, self._trips, rounds
        )
        self._trips += rounds
        self.communicator.barrier()
        return ns

    def bound(self, sizes: Sequence[int]) -> Method | None:
        """The bytes of all-reduces of these sizes, moved one after the other by plain loops over
        memory that all ranks map, without waiting: every byte read once and written once.
        None where ranks share no memory. Collective."""
        if not self.communicator.topology.shared_memory:
            return None
        self._arenas += 1
        ends = [0]
        for size in sizes:
            ends.append(ends[-1] + -(-size // 4096) * 4096)
        paths = [self.folder / f"arena{self._arenas}-{rank}" for rank in range(self.world_size)]
        self.communicator.barrier()
        arenas = [_map_file(path, max(ends[-1], 4096)) for path in paths]
        self.communicator.barrier()
        if self.rank == 0:
            for path in paths:
                path.unlink()
        own, fresh = arenas[self.rank].view(torch.float32), torch.randn(max(sizes) // 4)
        parts = []
        calls = []
        for begin, size in zip(ends, sizes, strict=False):
            floats = size // 4
            parts.append(own[begin // 4 : begin // 4 + floats])
            each = -(-floats // self.world_size // 16) * 16
            first, last = (min(rank * each, floats) for rank in (self.rank, self.rank + 1))
            pointers = (ctypes.c_void_p * self.world_size)(
                *(arena.data_ptr() + begin for arena in arenas)
            )
            calls.append((pointers, self.world_size, ctypes.c_size_t(first), ctypes.c_size_t(last)))
        move_bytes = self._bound.move_bytes

        def prepare() -> None:
            for part in parts:
                part.copy_(fresh[: part.numel()])

        def run() -> None:
            assert arenas  # whose addresses are in calls
            for arguments in calls:
                move_bytes(*arguments)

        return Method(run, prepare)


def _map_file(path: Path, nbytes: int) -> Tensor:
    """Shared bytes, zero at first."""
    with open(path, "ab") as file:
        file.truncate(nbytes)
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def import_mpi() -> Any:
    """mpi4py's MPI in a process that an mpiexec has started, else None."""
    if MPI_RUN not in os.environ:
        return None
    from mpi4py import MPI

    return MPI


def find_mpiexec() -> str | None:
    """An mpiexec that goes with mpi4py, if that is installed."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    return shutil.which("mpiexec.hydra", path=path) or shutil.which("mpiexec", path=path)


def under_torchrun() -> bool:
    """Whether this process is one of ranks that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory, where there is one."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="fastreduce-benchmark-", dir=memory) as folder:
        yield Path(folder)


@contextmanager
def joined(folder: Path | None, *, cpu: bool) -> Iterator[Rank]:
    """This process as a rank, which :func:`start` has started and which meets the others in
    ``folder``, or, with None, torchrun. On GPUs where there are any, unless ``cpu``."""
    mpi = import_mpi()
    if mpi is not None:
        world = mpi.COMM_WORLD
        os.environ |= {"RANK": str(world.Get_rank()), "WORLD_SIZE": str(world.Get_size())}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = CPU
    torch.set_num_threads(1)
    if torch.cuda.is_available() and not cpu:
        local = int(os.environ.get("LOCAL_RANK", rank))
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method="env://" if folder is None else f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT),
        device_id=device if device.type == "cuda" else None,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(leave_group)
        if folder is None:
            told = [str(stack.enter_context(scratch())) if rank == 0 else ""]
            dist.broadcast_object_list(told, 0)
            folder = Path(told[0])
        here = Rank(device, folder)
        yield here
        here.communicator.close()


def start(command: Sequence[str], world_size: int, mpiexec: str | None = None) -> None:
    """Runs the command once for each rank, which finds RANK and WORLD_SIZE in its environment, or
    by ``mpiexec``; ends all if one fails.

    Raises:
        SystemExit: a rank failed.
    """
    if mpiexec:
        started = [[mpiexec, "-n", str(world_size), *command]]
        environments = [MPI_SETTINGS | {MPI_RUN: "1"} | dict(os.environ)]
    else:
        started = [list(command)] * world_size
        environments = [
            dict(os.environ) | {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
            for rank in range(world_size)
        ]
    wait_for(
        subprocess.Popen(words, env=environment)
        for words, environment in zip(started, environments, strict=True)
    )


@contextmanager
def _deferred(*signals: signal.Signals) -> Iterator[None]:
    """What comes meanwhile comes at the end: a process that is being started is not lost."""
    came: list[int] = []
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in signals}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
        for number in came[:1]:
            os.kill(os.getpid(), number)


def wait_for(starting: Iterable[subprocess.Popen[bytes]]) -> None:
    """Starts processes and returns when all have ended; ends all if one fails, or if this is
    interrupted."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with _deferred(signal.SIGINT, signal.SIGTERM):
            ranks.extend(starting)
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.terminate()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: exit codes {[rank.returncode for rank in ranks]}")


def load(folder: Path) -> Any:
    """What rank 0 has left there."""
    return json.loads((folder / "results").read_text())
