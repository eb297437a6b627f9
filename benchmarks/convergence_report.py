"""The runs of convergence.py: the file that keeps them, the table and the plot made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.convergence_variants import FORMATS, FP32, VARIANTS, WITHIN_POINT, Variant

Run = dict[str, Any]
Settings = dict[str, Any]

HEADER = """# Convergence with lossy wire formats

Written by `python -m benchmarks.convergence`, which says what is measured, on:

{machines}

± is the standard deviation over the seeds; *paired*: seed by seed. *1 sd*: the mean differs from
fp32's by no more than fp32's standard deviation. *1 point*: at most 1 % of the answers are lost.
(!): the ranks ended with different parameters.
"""

SECTION = """
## {workload}, {ranks} ranks

{about}.

| format | test accuracy, % | test loss | loss less fp32's, paired | target | seeds | seconds |
| --- | ---: | ---: | ---: | --- | ---: | ---: |
"""


class Book:
    """All runs, in a JSON file. A run names its settings and its machine by their numbers.

    Args:
        path: the file; it need not exist yet.
        settings: those that this program has, one for each workload.
    """

    def __init__(self, path: Path, settings: Sequence[Settings]) -> None:
        self.path = path
        book = json.loads(path.read_text()) if path.exists() else {}
        self.machines: list[Any] = book.get("machines", [])
        self.settings: list[Settings] = book.get("settings", [])
        self.runs: list[Run] = book.get("runs", [])
        self.current = [self.number(self.settings, its) for its in settings]

    @staticmethod
    def number(values: list[Any], value: Any) -> int:
        """Where the value is in the list, to which it is added if need be."""
        if value not in values:
            values.append(value)
        return values.index(value)

    def find(self, **wanted: Any) -> list[Run]:
        """The runs that are as wanted."""
        return [run for run in self.runs if all(run[key] == wanted[key] for key in wanted)]

    def enter(self, key: Run, figures: Run) -> None:
        """Adds a run, in place of one with the same key, and writes the file."""
        self.runs = [run for run in self.runs if any(run[name] != key[name] for name in key)]
        self.runs.append(key | figures)
        parts = {"machines": self.machines, "settings": self.settings, "runs": self.runs}
        texts = []
        for name, values in parts.items():
            lines = ",\n".join(f"  {json.dumps(value, allow_nan=False)}" for value in values)
            texts.append(f' "{name}": [\n{lines}\n ]')
        new = self.path.with_suffix(".new")  # whoever is interrupted leaves the old file
        new.write_text("{\n" + ",\n".join(texts) + "\n}\n")
        new.replace(self.path)


def spread(values: Sequence[float | None], digits: int) -> str:
    """Mean ± standard deviation of those values that are numbers."""
    numbers = [value for value in values if value is not None]
    # Adding zero takes the sign from what is rounded to -0.
    text = f"{round(statistics.mean(numbers), digits) + 0.0:.{digits}f}" if numbers else "-"
    if len(numbers) > 1:
        text += f" ± {statistics.stdev(numbers):.{digits}f}"
    lost = len(values) - len(numbers)
    return f"{text} ({lost} diverged)" if lost else text


def met(target: str, pairs: Sequence[tuple[Run, Run]]) -> str:
    """Whether runs meet their target beside those of fp32 with the same seeds."""
    words = []
    for figure in ["accuracy"] if target == WITHIN_POINT else ["accuracy", "loss"]:
        own, fp32 = zip(*((run[figure], exact[figure]) for run, exact in pairs), strict=True)
        good = None not in own + fp32
        if good:
            more = statistics.mean(own) - statistics.mean(fp32)
            good = -more <= 0.01 if target == WITHIN_POINT else abs(more) <= statistics.stdev(fp32)
        words.append(f"{figure} {'met' if good else 'missed'}")
    return f"{target}: {', '.join(words)}"


def row(variant: Variant, runs: Sequence[Run], exact: Sequence[Run]) -> str:
    """One line of a table; ``exact`` are the runs of fp32."""
    of_seed = {run["seed"]: run for run in exact}
    pairs = [(run, of_seed[run["seed"]]) for run in runs if run["seed"] in of_seed]
    differences = [
        None if None in (run["loss"], fp32["loss"]) else run["loss"] - fp32["loss"]
        for run, fp32 in pairs
    ]
    agree = all(run["ranks_agree"] for run in runs)
    cells = [
        variant.name if agree else f"{variant.name} (!)",
        spread([100 * run["accuracy"] for run in runs], 2),
        spread([run["loss"] for run in runs], 4),
        spread(differences, 4) if variant.format != FP32 and pairs else "",
        # A deviation needs two runs.
        met(variant.target, pairs) if variant.target and len(pairs) > 1 else "",
        str(len(runs)),
        f"{statistics.mean(run['seconds'] for run in runs):.1f}",
    ]
    return f"| {' | '.join(cells)} |\n"


def sections(book: Book) -> Iterator[tuple[Settings, int, list[Run]]]:
    """The runs that stand together: a workload's with its current settings, on so many ranks."""
    for number in book.current:
        runs = book.find(settings=number)
        for ranks in sorted({run["ranks"] for run in runs}):
            yield book.settings[number], ranks, [run for run in runs if run["ranks"] == ranks]


def of_variant(runs: Sequence[Run], variant: Variant | str) -> list[Run]:
    """The runs of one variant."""
    name = variant if isinstance(variant, str) else variant.name
    return [run for run in runs if run["variant"] == name]


def table(book: Book) -> str:
    """All runs with the current settings, in markdown."""
    text, machines = "", set()
    for its, ranks, runs in sections(book):
        machines |= {run["machine"] for run in runs}
        about = "; ".join(f"{key} {value}" for key, value in its.items() if key != "workload")
        text += SECTION.format(workload=its["workload"], ranks=ranks, about=about)
        exact = of_variant(runs, FP32)
        for variant in VARIANTS:
            own = of_variant(runs, variant)
            text += row(variant, own, exact) if own else ""
    lines = (
        "  ".join(f"{key} {value}" for key, value in book.machines[n].items()) for n in machines
    )
    return HEADER.format(machines="\n\n".join(sorted(lines))) + text


def plot(book: Book, path: Path) -> None:
    """The test loss of every run, a panel for each workload and number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    import numpy
    from matplotlib import pyplot

    cases = list(sections(book))
    shown = {run["variant"] for _, _, runs in cases for run in runs}
    formats = {variant.format for variant in VARIANTS if variant.name in shown}
    rows = [name for name in FORMATS if name in formats]
    figure, axes = pyplot.subplots(
        1,
        len(cases),
        figsize=(2 + 3 * len(cases), 1.5 + 0.3 * len(rows)),
        sharey=True,
        squeeze=False,
    )
    looks = {None: ("black", "as it is"), True: ("C0", "with feedback"), False: ("C1", "without")}
    for axis, (its, ranks, runs) in zip(axes[0], cases, strict=True):
        finite = [run["loss"] for run in runs if run["loss"] is not None] or [1.0]
        exact = [run["loss"] for run in of_variant(runs, FP32) if run["loss"] is not None]
        for variant in VARIANTS:
            own = [run["loss"] for run in of_variant(runs, variant)]
            if not own:
                continue
            height = rows.index(variant.format) + (0.3 if variant.feedback is False else 0.0)
            colour, label = looks[variant.feedback]
            losses = [loss for loss in own if loss is not None]
            axis.plot(losses, [height] * len(losses), "o", color=colour, markersize=3, label=label)
            if len(losses) < len(own):
                axis.plot([max(finite)], [height], "x", color=colour, label=f"{label}: diverged")
        if len(exact) > 1:
            mean, deviation = statistics.mean(exact), statistics.stdev(exact)
            axis.axvspan(mean - deviation, mean + deviation, color="black", alpha=0.15)
        ticks = numpy.geomspace(min(finite), max(finite) * 1.0001, 5)
        axis.set_xscale("log")
        axis.set_xticks(ticks, [f"{tick:.3g}" for tick in ticks])
        axis.minorticks_off()
        axis.set_title(f"{its['workload']}, {ranks} ranks")
        axis.set_xlabel("test loss; grey: fp32 ± 1 sd")
        axis.grid(True, alpha=0.3)
    axes[0][0].set_yticks(range(len(rows)), rows)
    axes[0][0].invert_yaxis()
    handles: dict[str, Any] = {}
    for axis in axes[0]:
        marks, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, marks, strict=True))
    figure.legend(list(handles.values()), list(handles), loc="lower center", ncols=5, frameon=False)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
