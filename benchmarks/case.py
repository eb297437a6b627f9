"""What is measured: a case is several methods for one thing, which take turns.

To add one, write a function that gives cases (see :mod:`benchmarks.catalogue`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from benchmarks import counting
from benchmarks.ranks import Rank
from fastreduce.timing import Method, Spread, ratios, take_turns

# Makes a method on this rank; collective. None: this run has no such peer, which all ranks know.
Maker = Callable[[Rank], "Method | None"]

QUICK_ROUNDS = 5


@dataclass(frozen=True)
class Target:
    """A method should take at most so much of another."""

    method: str
    of: str
    at_most: float


@dataclass(frozen=True)
class Setting:
    """What cases are made for: ``quick`` is a coarse look."""

    world_size: int
    device: Literal["cpu", "cuda"] = "cpu"
    quick: bool = False


@dataclass(frozen=True)
class Case:
    """Methods that take turns.

    Attributes:
        labels: what tells the case from others of its benchmark.
        base: the method that the others are compared with; the first one of a run that has it not.
        nbytes: of what is reduced, for bandwidths; 0 where that says nothing.
        differences: what a method takes more than the base is told, too.
        counted: instructions of a run are counted, instead of its time being taken.
        rounds, seconds, repeats: see :func:`fastreduce.timing.take_turns`.
    """

    benchmark: str
    labels: Mapping[str, str | int]
    base: str
    methods: Mapping[str, Maker]
    nbytes: int = 0
    targets: tuple[Target, ...] = ()
    differences: bool = False
    counted: bool = False
    rounds: int = 15
    seconds: float = 1.0
    repeats: int = 1
    warm_up: int = 2

    @property
    def name(self) -> str:
        return " ".join([self.benchmark, *map(str, self.labels.values())])


def measure(case: Case, rank: Rank, *, quick: bool = False) -> dict[str, Any]:
    """Collective: the case's record, the same on all ranks, as JSON has it."""
    methods: dict[str, Method] = {}
    missing = []
    for name, make in case.methods.items():
        made = make(rank)
        if made is None:
            missing.append(name)
        else:
            methods[name] = made
    try:
        wrong = {name: method.wrong() for name, method in methods.items() if method.wrong}
        trips = [rank.round_trip()]
        if case.counted:
            repeats = 1 if quick else case.rounds
            values = {
                name: counting.count(rank, method, repeats) for name, method in methods.items()
            }
        else:
            values = take_turns(
                rank.communicator,
                methods,
                rounds=min(case.rounds, QUICK_ROUNDS) if quick else case.rounds,
                seconds=case.seconds / 4 if quick else case.seconds,
                repeats=case.repeats,
                warm_up=case.warm_up,
                device=rank.device,
            )
        trips.append(rank.round_trip())
    finally:
        for method in methods.values():
            method.close()
    methods.clear()
    gc.collect()
    # Ranks that share no memory have no bound.
    base_name = case.base if case.base in values else next(iter(values))
    base = values[base_name]
    figures = {}
    for name, own in values.items():
        figures[name] = {
            "value": asdict(Spread.of(own)),
            "ratio": asdict(Spread.of(ratios(own, base))),
            "rounds": len(own),
        }
        if name in wrong:
            figures[name]["wrong"] = wrong[name]
        if case.differences:
            added = [taken - plain for taken, plain in zip(own, base, strict=True)]
            figures[name]["added"] = asdict(Spread.of(added))
    targets = [
        asdict(target)
        | {"measured": Spread.of(ratios(values[target.method], values[target.of])).median}
        for target in case.targets
        if target.method in values and target.of in values
    ]
    return {
        "benchmark": case.benchmark,
        "case": dict(case.labels) | {"ranks": rank.world_size, "device": rank.device.type},
        "base": base_name,
        "unit": "instructions" if case.counted else "s",
        "bytes": case.nbytes,
        "round_trip_ns": [trip for trip in trips if trip is not None],
        "methods": figures,
        "missing": missing,
        "targets": targets,
    }
