"""Measuring, between the ranks or the GPUs at hand, which algorithm is the fastest for which size.

What was measured is kept in one file of the user's cache directory
(``$XDG_CACHE_HOME/fastreduce``, by default ``~/.cache/fastreduce``), by kind of machine; deleting
it forgets.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastreduce import policy
from fastreduce.policy import Limits

GPU_SIZES = tuple(policy.KIB << n for n in range(17))  # to 64 MiB
HOST_SIZES = tuple(policy.KIB << n for n in range(9))  # to what one_shot can at most
# A call on the host takes microseconds, and now and then a change of processes.
GPU_ROUNDS, HOST_ROUNDS = 15, 200

# An all-reduce by the algorithm of that name, of a float32 tensor.
Run = Callable[[str, Tensor], object]
# Its seconds.
Timed = Callable[[str, Tensor], float]
# Algorithm -> bytes -> seconds: of each call on one rank, and of all ranks' calls.
Calls = dict[str, dict[int, list[float]]]
Times = dict[str, dict[int, float]]


def measure(
    timed: Timed,
    buffer: Tensor,
    world_size: int,
    topology: policy.Topology | policy.GpuTopology,
    sizes: Sequence[int],
    rounds: int,
    progress: Callable[[int], object] | None = None,
) -> Calls:
    """Times every algorithm that is able to.

    The algorithms take turns within a size, so that a change of the machine's clock meets all.

    Args:
        buffer: bytes, of the largest size at least.
        rounds: calls of each; a fifth as many before that do not count.
        progress: called with each size, once it is done.
    """
    calls: Calls = {}
    for size in sizes:
        tensor = buffer[:size].view(torch.float32).zero_()
        able = policy.candidates(size, world_size, topology)
        for turn in range(-(rounds // 5), rounds):
            for name in able:
                seconds = timed(name, tensor)
                if turn >= 0:
                    calls.setdefault(name, {}).setdefault(size, []).append(seconds)
        if progress is not None:
            progress(size)
    return calls


def slowest(every: Sequence[Calls]) -> Times:
    """Of all ranks' calls: the slowest rank is a call's, the median of these a size's."""

    def seconds(name: str, size: int) -> float:
        together = zip(*(calls[name][size] for calls in every), strict=True)
        median: float = statistics.median(max(each) for each in together)
        return median

    return {name: {size: seconds(name, size) for size in sizes} for name, sizes in every[0].items()}


def on_host(run: Run, meet: Callable[[], object], largest: int) -> Timed:
    """Each call works on numbers that its rank has just written, as a gradient's are; ranks begin
    together."""
    fresh = torch.randn(largest // 4)

    def timed(name: str, tensor: Tensor) -> float:
        tensor.copy_(fresh[: tensor.numel()])
        meet()
        begin = time.perf_counter()
        run(name, tensor)
        return time.perf_counter() - begin

    return timed


def on_gpu(run: Run) -> Timed:
    """On the current stream, in its own time."""

    def timed(name: str, tensor: Tensor) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(name, tensor)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return timed


# -- what is known of a machine -------------------------------------------------------------------


def gpus(ranks: int, gpu: str) -> str:
    """What limits measured between GPUs hold for: so many of this name, and torch's CUDA."""
    return f"{ranks} x {gpu}, CUDA {torch.version.cuda}"


def host(topology: policy.Topology) -> str:
    """What limits measured between the ranks of a host hold for."""
    return f"{topology.ranks} ranks on {topology.cores} cores of {processor()}"


def processor(root: Path = Path("/")) -> str:
    """As the kernel names the first one."""
    with contextlib.suppress(OSError), open(root / "proc/cpuinfo") as file:
        for line in file:
            if found := re.match(r"model name\s*:\s*(.*\S)", line):
                return found[1]
            if not line.strip():  # the others are alike, and there can be hundreds
                break
    return platform.machine()


def file() -> Path:
    """Where it is remembered. Raises RuntimeError where there is no home."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "fastreduce" / "tuned.json"


def _known() -> dict[str, object]:
    with contextlib.suppress(OSError, ValueError, RuntimeError):
        known = json.loads(file().read_text())
        if isinstance(known, dict):
            return known
    return {}


def recall(machine: str) -> Limits:
    """What was measured on such a machine; empty where nothing was, or nothing that makes sense."""
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
    """Replaces what is known of such a machine, empty limits by nothing; other processes see the
    old file or the new one. Raises OSError or RuntimeError where that cannot be written."""
    known: dict[str, object] = {**_known(), machine: [list(each) for each in limits]}
    if not limits:
        del known[machine]
    place = file()
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=place.parent, delete=False) as written:
        json.dump(known, written, indent=1)
    try:
        os.replace(written.name, place)
    except OSError:
        os.unlink(written.name)
        raise
