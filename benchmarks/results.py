"""Results as they are kept: what was measured, on which machine; and as text."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import fastreduce
from fastreduce import machine as facts

# Of the JSON: another number where a key changes its meaning or goes.
FORMAT = 1

Record = dict[str, Any]  # what case.measure() gives


def machine() -> dict[str, Any]:
    """What figures depend on, without the machine's name."""
    cpu, software = facts.cpu_of(), facts.software_of()
    found: dict[str, Any] = {
        "processor": cpu["model"],
        "cores": len(cpu["usable"]),
        "caches": ", ".join(
            f"L{each['level']} {each['nbytes'] >> 10} KiB of {len(each['cores'])}"
            for each in cpu["caches"]
        ),
        "instruction_set": cpu["instruction_set"],
        "compiler": facts.build_of()["compiler"],
        "kernel": ".".join(platform.release().split("-")[0].split(".")[:2]),
        "python": software["python"],
        "torch": software["torch"],
        "fastreduce": fastreduce.__version__,
    }
    if torch.cuda.is_available():
        found |= {
            "gpus": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}",
            "cuda": software["torch_cuda"],
            "nccl": software["nccl"],
            "driver": software["driver"],
        }
    return found


def headline(about: dict[str, Any]) -> str:
    """The machine in one line."""
    return "  ".join(f"{key} {value}" for key, value in about.items() if value is not None)


def case_name(record: Record) -> str:
    """What tells a record from all others of a run."""
    labels = (f"{key} {value}" for key, value in record["case"].items())
    return f"{record['benchmark']}: {', '.join(labels)}"


def by_benchmark(records: Iterable[Record]) -> dict[str, list[Record]]:
    """In the order of their first."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["benchmark"], []).append(record)
    return found


def seconds(value: float) -> str:
    """Three digits, in a unit that fits."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value / 1e-6:.2f} us"


def instructions(value: float) -> str:
    """All digits: they are exact."""
    return f"{value:,.0f}"


# What each rank's links carry at least, of the bytes that a collective is of, with N ranks.
CARRIED: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
}


# A column: its name, and what stands there; "" where there is nothing.
Row = dict[str, str]


def rows(record: Record) -> Iterator[Row]:
    """A row for each method of a case."""
    nbytes, ranks = record["bytes"], record["case"]["ranks"]
    carried = CARRIED.get(record["case"].get("collective", record["benchmark"]))
    what, written = ("time", seconds) if record["unit"] == "s" else ("instructions", instructions)
    for name, figures in record["methods"].items():
        median, low, high = (figures["value"][key] for key in ("median", "low", "high"))
        row = {
            "method": name,
            what: written(median),
            "quartiles": f"{written(low)} - {written(high)}",
            f"x {record['base']}": f"{figures['ratio']['median']:.3f}",
            "its quartiles": f"{figures['ratio']['low']:.3f} - {figures['ratio']['high']:.3f}",
        }
        if "added" in figures:
            row["adds"] = seconds(figures["added"]["median"])
        if carried is not None:
            algorithm = nbytes / median / 1e9
            row["algbw GB/s"] = f"{algorithm:.3f}"
            row["busbw GB/s"] = f"{algorithm * carried(ranks):.3f}"
            wrong = figures.get("wrong")
            row["wrong"] = "-" if wrong is None else str(wrong)
        yield row


def verdicts(record: Record) -> list[str]:
    """A line for each target."""
    return [
        f"{target['method']}: {target['measured']:.3f} of {target['of']} "
        f"(target <= {target['at_most']:.3g}): "
        + ("reached" if target["measured"] <= target["at_most"] else "NOT reached")
        for target in record["targets"]
    ]


def text(record: Record) -> str:
    """What is printed of a case."""
    lines = [case_name(record)]
    if trips := record["round_trip_ns"]:
        lines[0] += f"   (flag round trip {'/'.join(f'{trip:.0f}' for trip in trips)} ns)"
    found = list(rows(record))
    columns = list(found[0])
    widths = [max(len(column), *(len(row[column]) for row in found)) for column in columns]

    def line(cells: Iterable[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return f"  {first[0]:<{first[1]}}" + "".join(f"  {c:>{w}}" for c, w in others)

    lines += [line(columns), *(line(row.values()) for row in found)]
    lines += [f"  {verdict}" for verdict in verdicts(record)]
    if record["missing"]:
        lines.append(f"  not in this run: {', '.join(record['missing'])}")
    return "\n".join(lines)


def wrong(records: Iterable[Record]) -> list[str]:
    """Methods that gave wrong elements."""
    return [
        f"{case_name(record)}: {name}: {figures['wrong']} wrong elements"
        for record in records
        for name, figures in record["methods"].items()
        if figures.get("wrong")
    ]
