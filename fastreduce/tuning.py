"""Measuring, between the GPUs at hand, which algorithm is the fastest for which size.

What was measured is kept in one file of the user's cache directory
(``$XDG_CACHE_HOME/fastreduce``, by default ``~/.cache/fastreduce``), by kind of machine; deleting
it forgets.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastreduce import policy

Limits = tuple[tuple[str, int | None], ...]

SIZES = tuple(policy.KIB << n for n in range(17))  # to 64 MiB
_WARM_UP = 3
_ROUNDS = 15


def measure(
    run: Callable[[str, Tensor], None],
    buffer: Tensor,
    world_size: int,
    topology: policy.GpuTopology,
    sizes: Sequence[int],
) -> dict[str, dict[int, float]]:
    """Algorithm -> bytes -> median seconds of a call of ``run(algorithm, float32 tensor)``.

    The algorithms take turns within a size, so that a change of the machine's clock meets all.
    """
    times: dict[str, dict[int, float]] = {}
    for size in sizes:
        tensor = buffer[:size].view(torch.float32).zero_()
        able = policy.candidates(size, world_size, topology)
        seconds: dict[str, list[float]] = {name: [] for name in able}
        for turn in range(_WARM_UP + _ROUNDS):
            for name in able:
                taken = _timed(run, name, tensor)
                if turn >= _WARM_UP:
                    seconds[name].append(taken)
        for name in able:
            times.setdefault(name, {})[size] = statistics.median(seconds[name])
    return times


def _timed(run: Callable[[str, Tensor], None], name: str, tensor: Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run(name, tensor)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def machine(ranks: int, gpu: str) -> str:
    """What measured limits hold for: so many GPUs of this name, and torch's CUDA."""
    return f"{ranks} x {gpu}, CUDA {torch.version.cuda}"


def _file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fastreduce" / "tuned.json"


def _known() -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # RuntimeError: there is no home
        known = json.loads(_file().read_text())
        if isinstance(known, dict):
            return known
    return {}


def recall(machine: str) -> Limits:
    """What was measured on such a machine: GpuTopology.limits, empty where nothing (or nothing that
    makes sense) was."""
    entries = _known().get(machine)
    limits: list[tuple[str, int | None]] = []
    for entry in entries if isinstance(entries, list) else []:
        match entry:
            case [str(name), (int() | None) as size] if (
                name in policy.GPU_ALGORITHMS and not isinstance(size, bool)
            ):
                limits.append((name, size))
            case _:
                return ()
    return tuple(limits)


def remember(machine: str, limits: Limits) -> None:
    """Replaces what is known of such a machine; other processes see the old file or the new one."""
    known: dict[str, object] = {**_known(), machine: [list(each) for each in limits]}
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as written:
        json.dump(known, written, indent=1)
    try:
        os.replace(written.name, file)
    except OSError:
        os.unlink(written.name)
        raise
