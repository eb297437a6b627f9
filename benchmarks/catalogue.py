"""All that the suite measures, by name."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks import buckets, codecs, collectives, in_gpu, instructions, norms, server, steps
from benchmarks.case import Case, Setting

BENCHMARKS: dict[str, Callable[[Setting], list[Case]]] = {
    "all_reduce": collectives.all_reduce,
    "collectives": collectives.others,
    "in_gpu": in_gpu.cases,
    "buckets": buckets.cases,
    "ddp_step": steps.ddp_step,
    "hook": steps.hook,
    "wire": steps.wire,
    "accumulation": steps.accumulation,
    "norms": norms.cases,
    "server": server.cases,
    "codecs": codecs.cases,
    "instructions": instructions.cases,
}


def about(name: str) -> str:
    """One line."""
    return (BENCHMARKS[name].__doc__ or "").partition("\n\n")[0].replace("\n    ", " ")


def cases(names: list[str], setting: Setting) -> list[Case]:
    """In the order of the names."""
    return [case for name in names for case in BENCHMARKS[name](setting)]
