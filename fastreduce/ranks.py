"""The ranks of a command: processes that it starts, or those of torchrun."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch.multiprocessing.spawn import start_processes

from fastreduce.options import UsageError


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
