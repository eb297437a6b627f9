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
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastreduce import policy
from fastreduce.policy import Limits

if TYPE_CHECKING:
    from fastreduce.communicator import Communicator

GPU_SIZES = tuple(policy.KIB << n for n in range(17))  # to 64 MiB
HOST_SIZES = tuple(policy.KIB << n for n in range(9))  # to what one_shot can at most
# A call on the host takes microseconds, and now and then a change of processes.
GPU_ROUNDS, HOST_ROUNDS = 15, 200

# Algorithm -> bytes -> seconds of a call.
Times = dict[str, dict[int, float]]


def measure(
    communicator: Communicator,
    run: Callable[[str, Tensor], object],
    buffer: Tensor,
    topology: policy.Topology | policy.GpuTopology,
    sizes: Sequence[int],
    progress: Callable[[int], object] | None = None,
) -> Times:
    """Collective: medians of the slowest rank, of every algorithm that is able to; the same on all
    ranks. (See :mod:`fastreduce.timing`.)

    Args:
        run: an all-reduce by the algorithm of that name, of a float32 tensor.
        buffer: bytes, of the largest size at least. On the host each call works on numbers that its
            rank has just written, as a gradient's are.
        progress: called with each size, once it is done.
    """
    from fastreduce import timing  # which needs a communicator

    place = buffer.device
    rounds = HOST_ROUNDS if place.type == "cpu" else GPU_ROUNDS
    numbers = torch.zeros(0)
    if place.type == "cpu":
        numbers = torch.randn(max(sizes) // 4)
    times: Times = {}
    for size in sizes:
        tensor = buffer[:size].view(torch.float32).zero_()
        fresh = numbers[: tensor.numel()]
        methods = {
            name: timing.Method(
                partial(run, name, tensor),
                partial(tensor.copy_, fresh) if len(fresh) else timing.nothing,
            )
            for name in policy.candidates(size, communicator.world_size, topology)
        }
        taken = timing.take_turns(
            communicator, methods, rounds=rounds, warm_up=rounds // 5, device=place
        )
        for name, own in taken.items():
            times.setdefault(name, {})[size] = timing.Spread.of(own).median
        if progress is not None:
            progress(size)
    return times


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
        try:
            json.dump(known, written, indent=1)
            written.flush()
            os.replace(written.name, place)
        except BaseException:  # no room, Ctrl-C
            os.unlink(written.name)
            raise
