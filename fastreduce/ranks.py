"""The ranks of a command: processes that it starts, or those of torchrun."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from fastreduce import cuda
from fastreduce.communicator import Communicator
from fastreduce.options import CommandError, UsageError

T = TypeVar("T")
Device = Literal["cpu", "cuda"]

_TIMEOUT = timedelta(seconds=120)


def collective(
    function: Callable[[Communicator, torch.device], T], ranks: int | None, device: Device
) -> T | None:
    """Calls ``function(communicator, place)`` on all ranks: on those that torchrun has started, or
    on processes that this starts. What it gives on rank 0; None on torchrun's others.

    Args:
        function: and what it gives: can be pickled.
        ranks: how many to start; None for 2, or one for each GPU.
        device: of ``place``, which is another one for each rank of a host with GPUs.

    Raises:
        UsageError: there cannot be such ranks.
        CommandError: some rank failed.
    """
    found: T | str | None
    if device == "cuda" and (reason := cuda.problem()):
        raise UsageError(f"--device: cuda cannot be used: {reason}")
    if "WORLD_SIZE" in os.environ:
        if ranks is not None:
            raise UsageError("--ranks: not under torchrun, which has started them")
        rank, world_size = torchrun_number("RANK"), torchrun_number("WORLD_SIZE")
        local_rank = torchrun_number("LOCAL_RANK")
        found = _member(function, rank, world_size, local_rank, device, "env://")
    else:
        world_size = ranks or 2 if device == "cpu" else _one_for_each_gpu(ranks)
        # What has asked the driver for GPUs must not fork.
        start: Literal["spawn", "fork"] = "spawn" if device == "cuda" else "fork"
        with tempfile.TemporaryDirectory(prefix="fastreduce-") as folder:
            run_ranks(_started, world_size, world_size, function, device, folder, start=start)
            found = pickle.loads(Path(folder, "found").read_bytes())
    if isinstance(found, str):
        raise CommandError(found)
    return found


def _one_for_each_gpu(ranks: int | None) -> int:
    there = torch.cuda.device_count()
    if ranks is not None and not 2 <= ranks <= there:
        raise UsageError(f"--ranks: expected 2 to {there}, one for each GPU at most, got {ranks}")
    return ranks or there


def _started(
    rank: int,
    ranks: int,
    function: Callable[[Communicator, torch.device], Any],
    device: Device,
    folder: str,
) -> None:
    """The process of a rank; rank 0 leaves in ``folder`` what came of it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    found = _member(function, rank, ranks, rank, device, f"file://{folder}/store")
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))


def _member(
    function: Callable[[Communicator, torch.device], T],
    rank: int,
    ranks: int,
    local_rank: int,
    device: Device,
    meeting: str,
) -> T | str | None:
    """What came of it on rank 0, or why nothing did."""
    torch.set_num_threads(1)  # others would not survive a fork
    place, backend = torch.device("cpu"), "gloo"
    try:
        if device == "cuda":
            place = torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))
            torch.cuda.set_device(place)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, init_method=meeting, rank=rank, world_size=ranks, timeout=_TIMEOUT
        )
        with Communicator(timeout=_TIMEOUT) as communicator:
            found = function(communicator, place)
    except (OSError, RuntimeError) as error:
        return str(error) if rank == 0 else None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return found if rank == 0 else None


def run_ranks(
    function: Callable[..., None],
    ranks: int,
    *arguments: Any,
    start: Literal["spawn", "fork"] = "spawn",
) -> None:
    """Calls ``function(rank, *arguments)`` in a process for each rank and waits for all.

    No process is left when this returns or raises, whatever the reason.

    Args:
        start: ``fork`` spares the ranks the import of torch; only from a process that has neither
            computed anything nor used a GPU.

    Raises:
        torch.multiprocessing.spawn.ProcessException: a rank failed; the others were ended.
    """
    # A rank that is still importing would answer Ctrl-C with a traceback: it inherits that the
    # signal is ignored until its function begins. This process ends it.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        context = start_processes(
            _interruptible,
            (function, *arguments),
            nprocs=ranks,
            join=False,
            daemon=True,
            start_method=start,
        )
    finally:
        signal.signal(signal.SIGINT, previous)
    try:
        while not context.join(grace_period=1.0):
            pass
    finally:
        for process in context.processes:
            process.kill()
        for process in context.processes:
            process.join()
        for file in context.error_files:  # torch leaves the file of a rank that failed
            Path(file).unlink(missing_ok=True)


def _interruptible(rank: int, function: Callable[..., None], *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    function(rank, *arguments)


def torchrun_number(name: str) -> int:
    """A variable of torchrun's, where that has set WORLD_SIZE. Raises UsageError."""
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise UsageError(
            "WORLD_SIZE is set, so torchrun's other variables are expected too: "
            f"{name}: expected a number from 0 on, got {value!r}"
        )
    return int(value)
