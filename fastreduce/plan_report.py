"""What ``fastreduce plan`` says: the plan, in words and tables, as JSON, as a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from fastreduce import forecast, plan
from fastreduce.footprint import Footprint
from fastreduce.forecast import Compute, Step
from fastreduce.plan import Layout, Memory, Shape, State
from fastreduce.terminal import painted

NOT_COUNTED = (
    "Not counted: the CUDA context, workspaces of libraries, fragmentation and rounding of the "
    "allocator, temporaries of the optimizer's step (foreach: up to a copy of the weights, when "
    "activations are gone), DDP's own buckets unless gradient_as_bucket_view=True (another copy of "
    "the gradients); the time of the optimizer's step, of encoding, of loading data."
)


@dataclass(frozen=True)
class Scaling:
    """Up to how many ranks communication is hidden: :func:`fastreduce.forecast.hidden_until`.

    Attributes:
        fixed: what does not change with the ranks.
        ranks: 1 where it is never hidden.
        searched: ranks that were looked at.
    """

    fixed: str
    ranks: int
    searched: int


@dataclass(frozen=True)
class Plan:
    """All that is said; see the classes of the parts.

    Attributes:
        model: its name.
        elements: parameters.
        batch: None where it is not known.
        training: how: options by name.
        sources: of each kind of figure: whether it was counted, measured, given or estimated.
        enough_ranks, enough_passes: the smallest number of data-parallel ranks, and of passes of
            these ranks, with which there is room, None where no number does.
        shapes: smallest groups that have room, by what they do; None for those of which none has.
    """

    model: str
    elements: int
    batch: int | None
    training: dict[str, str]
    ranks: int
    hosts: int
    layers: int
    capacity: int
    state: State
    layouts: list[Layout]
    footprint: Footprint | None
    enough_ranks: int | None
    enough_passes: int | None
    shapes: dict[str, Shape | None]
    steps: dict[str, Step]
    compute: Compute | None
    scaling: list[Scaling]
    sources: dict[str, str]

    @property
    def fits(self) -> bool:
        """Whether data parallelism has room, on these ranks."""
        return self.layouts[1].memory.total <= self.capacity


def _scaled(value: float, unit: str, prefixes: Sequence[str], first: int) -> str:
    at = first
    while abs(value) >= 999.95 and at < len(prefixes) - 1:
        value, at = value / 1000, at + 1
    while 0 < abs(value) < 0.99995 and at > 0:
        value, at = value * 1000, at - 1
    digits = max(0, 3 - len(str(int(abs(value)))) + (unit == "B"))
    return f"{value:.{digits}f} {prefixes[at]}{unit}"


def amount(nbytes: float) -> str:
    """Bytes in words, with four digits: ``46.76 MB``."""
    return _scaled(nbytes, "B", ["", "k", "M", "G", "T", "P"], 0)


def duration(seconds: float | None) -> str:
    """Seconds in words, with three digits: ``12.3 ms``."""
    return "-" if seconds is None else _scaled(seconds, "s", ["n", "u", "m", ""], 3)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _cell(nbytes: int) -> str:
    return amount(nbytes) if nbytes else "-"


def _memory_row(name: str, samples: str, memory: Memory, unit: int, capacity: int) -> list[str]:
    return [
        name,
        samples,
        _cell(memory.weights),
        _cell(memory.gradients),
        _cell(memory.optimizer),
        f"{amount(memory.parameters)} = {memory.parameters / unit:.3g}m",
        _cell(memory.wire),
        _cell(memory.activations),
        _cell(memory.inputs),
        _cell(memory.temporary),
        _cell(memory.total),
        f"{memory.total / capacity:.0%} " + ("fits" if memory.total <= capacity else "no  "),
    ]


def _memory_table(found: Plan, rows: Sequence[tuple[str, str, Memory]]) -> str:
    heads = "samples weights gradients optimizer parameters wire activations inputs temporary total"
    table = [["", *heads.split(), f"of {amount(found.capacity)}"]]
    unit = found.state.weights
    table += [_memory_row(*row, unit, found.capacity) for row in rows]
    empty = [all(row[at] == "-" for row in table[1:]) for at in range(len(table[0]))]
    return _table(
        [[cell for cell, gone in zip(row, empty, strict=True) if not gone] for row in table]
    )


def text(found: Plan, colours: bool = False) -> str:
    """The whole plan, in words and tables."""

    def samples(count: int) -> str:
        return str(count) if found.batch is not None and count else "-"

    training = ", ".join(f"{name} {each}" for name, each in found.training.items())
    rows = [
        (
            f"{each.ranks} x {each.name}" if each.ranks > 1 else each.name,
            samples(each.samples),
            each.memory,
        )
        for each in found.layouts
    ]
    parts = [
        f"{found.model}: {found.elements:,} parameters, m = {amount(found.state.weights)} of "
        f"weights\n{training}",
        f"Memory of a GPU\n{_memory_table(found, rows)}",
        *_about_activations(found),
        painted(_verdict(found), "green" if found.fits else "red", colours),
    ]
    shapes = [
        (
            f"{each.gpus} = {each.data} data x {each.tensor} tensor x {each.pipeline} pipeline: "
            f"{what}",
            samples(1),
            each.memory,
        )
        for what, each in found.shapes.items()
        if each is not None
    ]
    if shapes:
        table = _memory_table(found, shapes)
        parts.append(f"Smallest groups of GPUs that have room, of their kind\n{table}")
    if found.steps:
        parts += _about_time(found)
    sources = [f"  {what}: {source}" for what, source in found.sources.items()]
    parts.append("\n".join(["Where figures come from", *sources]))
    return "\n\n".join([*parts, _wrapped(NOT_COUNTED)])


def _wrapped(words: str) -> str:
    return textwrap.fill(words, 100)


def _about_activations(found: Plan) -> list[str]:
    if found.footprint is None:
        return []
    layout = found.layouts[0]
    each = found.footprint.at(layout.samples)
    summary = 2 * each.outputs
    everything = summary + each.inputs + found.state.total
    return [
        _wrapped(
            f"Activations of {layout.samples} samples: autograd saves {amount(each.saved)}, every "
            f"storage once. A layer summary's estimate, twice the outputs of the layers that have "
            f"parameters: {amount(summary)}; with inputs and parameter memory {amount(everything)}."
        )
    ]


def _verdict(found: Plan) -> str:
    capacity, state = amount(found.capacity), found.state
    if found.fits:
        known = any(each.memory.activations for each in found.layouts) or found.footprint
        without = "" if known else ", activations not counted"
        return f"Data parallelism fits: {found.ranks} GPUs of {capacity}{without}."
    lines = []
    if found.enough_ranks is not None:
        lines.append(f"Data parallelism fits on {found.enough_ranks} GPUs of {capacity} or more.")
    if found.enough_passes is not None:
        lines.append(
            f"With --accumulation {found.enough_passes} or more it fits on {found.ranks} of them."
        )
    if lines:
        return " ".join(lines)
    why = (
        f"parameter memory alone is {amount(state.total)} on each"
        if state.total > found.capacity
        else "not even with one sample on each"
    )
    lines = [f"Data parallelism alone cannot fit, on any number of GPUs of {capacity}: {why}."]
    least = state.weights + state.gradients
    if found.layouts[2].memory.total <= found.capacity:
        lines.append("It fits where the ranks share the optimizer's state (server, sharded).")
    elif least > found.capacity:
        lines.append(
            "Nor can a parameter server, or sharing out the optimizer's state: weights and "
            f"gradients alone are {amount(least)}."
        )
    missing = [what for what, shape in found.shapes.items() if shape is None]
    if missing:
        lines.append(f"On no number of GPUs up to {plan.MOST_GPUS}: {'; '.join(missing)}.")
    if missing and found.layers == 1:
        lines.append("--layers lets stages of a pipeline, and what is sharded, be single layers.")
    return "\n".join(map(_wrapped, lines))


def _about_time(found: Plan) -> list[str]:
    rows = [["", "by", "communication", "sticks out", "step", "computing"]]
    for name, step in found.steps.items():
        computing = f"{step.compute / step.seconds:.0%}" if step.compute and step.seconds else "-"
        seconds = step.communication, step.sticks_out, step.seconds
        rows.append([name, step.algorithm, *map(duration, seconds), computing])
    hosts = "one host" if found.hosts == 1 else f"{found.hosts} hosts"
    lines = []
    for each in found.scaling:
        end = "" if each.ranks < each.searched else ", the most that was looked at"
        lines.append(
            f"With {each.fixed}, what sticks out stays below {forecast.NOTICEABLE:.0%} of the "
            "computation "
            + (f"up to {each.ranks} GPUs{end}." if each.ranks > 1 else "on no number of GPUs.")
        )
    if not found.scaling:
        lines.append(
            "What sticks out behind backward needs --step-seconds, or --model and --flops."
        )
    table = f"A step of {found.ranks} GPUs on {hosts}\n{_table(rows)}"
    return [table, "\n".join(map(_wrapped, lines))]


def plain(value: Any) -> Any:
    """A plan as JSON has it: fields and properties."""
    if is_dataclass(value):
        names = [field.name for field in fields(value)]
        names += [name for name, each in vars(type(value)).items() if isinstance(each, property)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def draw(found: Plan, path: Path) -> None:
    """The memory of a GPU as a picture, a bar for each layout: all, and of parameters alone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    everything, parameters = figure.subplots(1, 2)
    parts = [field.name for field in fields(Memory)]
    _bars(everything, found, parts, "memory of a GPU")
    _bars(parameters, found, ["weights", "gradients", "optimizer"], "parameter memory alone")
    highest = max(each.memory.total for each in found.layouts)
    if found.capacity < 2 * highest:
        everything.axhline(found.capacity / 1e9, color="black", linestyle="--", label="there is")
    everything.legend()
    figure.suptitle(f"{found.model}, {found.elements:,} parameters")
    figure.savefig(path, dpi=120)


def _bars(axes: Any, found: Plan, parts: Sequence[str], title: str) -> None:
    names = [each.name.replace(", ", ",\n").replace(": ", ":\n") for each in found.layouts]
    bottom = [0] * len(names)
    for place, part in enumerate(parts):
        heights = [getattr(each.memory, part) for each in found.layouts]
        if any(heights):
            low, high = ([value / 1e9 for value in values] for values in (bottom, heights))
            axes.bar(names, high, bottom=low, label=part, color=f"C{place}")
            bottom = [sum(both) for both in zip(bottom, heights, strict=True)]
    for place, total in enumerate(bottom):
        axes.annotate(amount(total), (place, total / 1e9), ha="center", va="bottom")
    axes.margins(y=0.1)
    axes.set_ylabel("GB (10$^9$ bytes)")
    axes.set_title(title)
    axes.tick_params(axis="x", labelsize="small")
