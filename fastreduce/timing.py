"""Times of what all ranks do together: methods take turns, the slowest rank counts, spread is told.

The cores of a shared machine move and its clock changes; what takes turns meets all of that alike,
so ratios within a run hold where times do not.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fastreduce.communicator import Communicator

CPU = torch.device("cpu")


def nothing() -> None:
    """For a method that needs no preparing, or no closing."""


@dataclass(frozen=True)
class Method:
    """What takes turns with others.

    Attributes:
        run: what is timed; collective. Where it returns a float, that is its time, in seconds.
        prepare: what comes before it, untimed: writes anew, as its owner would, what ``run`` reads.
        calls: made by one ``run``; times are those of a single one.
        wrong: elements of a checked call that differ from the exact result, on any rank; None
            where nothing is checked; collective.
        close: lets go of what it holds; collective.
    """

    run: Callable[[], object]
    prepare: Callable[[], object] = nothing
    calls: int = 1
    wrong: Callable[[], int] | None = None
    close: Callable[[], object] = nothing


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))


def seconds_of(communicator: Communicator, method: Method, device: torch.device = CPU) -> float:
    """Collective: what a call takes on this rank, from when all ranks have met."""
    method.prepare()
    if device.type == "cpu":
        communicator.barrier()
        begin = time.perf_counter()
        told = method.run()
        taken = time.perf_counter() - begin
        return (told if isinstance(told, float) else taken) / method.calls
    torch.cuda.synchronize(device)
    communicator.barrier()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    method.run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / method.calls


def take_turns(
    communicator: Communicator,
    methods: Mapping[str, Method],
    *,
    rounds: int = 15,
    seconds: float = 0.0,
    repeats: int = 1,
    warm_up: int = 2,
    device: torch.device = CPU,
) -> dict[str, list[float]]:
    """Collective: seconds of a call of each method on its slowest rank, one after the other; the
    n-th of all methods belong to the same round.

    Args:
        methods: the same names on all ranks. Their order changes from round to round.
        rounds: at least so many.
        seconds: for at least so long, by rank 0's clock.
        repeats: of a method within a round.
        warm_up: rounds before them that do not count.
    """
    times: dict[str, list[float]] = {name: [] for name in methods}
    order, shuffle = list(methods), random.Random(0).shuffle  # the same on all ranks
    until = 0.0
    for turn in itertools.count():
        if turn == warm_up:
            until = time.perf_counter() + seconds
        shuffle(order)
        for name in order:
            for _ in range(repeats):
                taken = seconds_of(communicator, methods[name], device)
                if turn >= warm_up:
                    times[name].append(taken)
        if turn + 1 >= warm_up + rounds:
            enough = torch.tensor([float(time.perf_counter() >= until)])
            communicator.broadcast(enough, 0)
            if enough.item():
                break
    return {name: slowest(communicator, own) for name, own in times.items()}


def slowest(communicator: Communicator, own: Sequence[float]) -> list[float]:
    """Collective: element by element, the most of all ranks."""
    values = torch.tensor(own, dtype=torch.float64)
    communicator.all_reduce(values, "max")
    found: list[float] = values.tolist()
    return found


def ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(times, base, strict=True)]
