"""A run as pictures, and as one page that needs nothing else.

Needs matplotlib for pictures; without it the page has tables alone.
"""

from __future__ import annotations

import base64
import importlib.util
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment  # torch needs it, too

from benchmarks import results
from benchmarks.results import Record

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>fastreduce: benchmarks of {{ run.date }}</title>
<style>
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff; }
table { border-collapse: collapse; margin: .5em 0 1em; font-variant-numeric: tabular-nums; }
th, td { padding: .15em .8em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.ours { font-weight: 600; }
.missed, .wrong { color: #b00020; font-weight: 600; }
.note { color: #555; }
img { max-width: 100%; }
nav a { margin-right: 1em; }
</style>
</head>
<body>
<h1>fastreduce: benchmarks</h1>
<p>{{ run.date }}, load {{ "%.1f" % run.load }}. Methods of a case take turns; a time is that of the
slowest rank, the median with its quartiles. Ratios are of the same round: they hold on a shared
machine, where times do not.</p>
<table>
{% for key, value in run.machine.items() if value is not none %}
<tr><td>{{ key }}</td><td style="text-align: left">{{ value }}</td></tr>
{% endfor %}
</table>
{% if run.compared %}
<h2>Compared</h2>
<pre>{{ run.compared }}</pre>
{% endif %}
<nav>{% for name in groups %}<a href="#{{ name }}">{{ name }}</a>{% endfor %}</nav>
{% for name, records in groups.items() %}
<h2 id="{{ name }}">{{ name }}</h2>
<p>{{ abouts[name] }}</p>
{% if name in pictures %}<img alt="{{ name }}" src="data:image/png;base64,{{ pictures[name] }}">
{% endif %}
{% for record in records %}
<h3>{{ case_name(record) }}</h3>
{% set table = rows(record) | list %}
<table>
<tr>{% for column in table[0] %}<th>{{ column }}</th>{% endfor %}</tr>
{% for row in table %}
<tr{% if row.method.startswith("fastreduce") %} class="ours"{% endif %}>
{% for column, cell in row.items() %}
<td{% if column == "wrong" and cell not in ("-", "0") %} class="wrong"{% endif %}>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</table>
{% for verdict in verdicts(record) %}
<p{% if "NOT" in verdict %} class="missed"{% endif %}>{{ verdict }}</p>
{% endfor %}
{% if record.round_trip_ns or record.missing %}
<p class="note">{% if record.round_trip_ns %}Flag round trip before and after:
{% for trip in record.round_trip_ns %}{{ "%.0f" % trip }} {% endfor %}ns.{% endif %}
{% if record.missing %}Not in this run: {{ record.missing | join(", ") }}.{% endif %}</p>
{% endif %}
{% endfor %}
{% endfor %}
</body>
</html>
"""


def write(run: dict[str, Any], abouts: dict[str, str], folder: Path) -> None:
    """``index.html`` with all in it, and a PNG for each benchmark beside it.

    Args:
        run: what results.json has.
        abouts: what each benchmark is.
    """
    groups = results.by_benchmark(run["results"])
    pictures = {}
    if importlib.util.find_spec("matplotlib"):
        for name, records in groups.items():
            picture = draw(name, records)
            (folder / f"{name}.png").write_bytes(picture)
            pictures[name] = base64.b64encode(picture).decode()
    template = Environment(autoescape=True, trim_blocks=True).from_string(_PAGE)
    page = template.render(
        run=run,
        groups=groups,
        abouts=abouts,
        pictures=pictures,
        case_name=results.case_name,
        rows=results.rows,
        verdicts=results.verdicts,
    )
    (folder / "index.html").write_text(page, "utf-8")


def draw(name: str, records: Sequence[Record]) -> bytes:
    """A PNG: times over sizes where a benchmark has those of all-reduce, else ratios as bars."""
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    if name == "all_reduce":
        _curves(figure, records)
    else:
        _bars(figure, records)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=110)
    return stream.getvalue()


def _panels(records: Sequence[Record], *without: str) -> dict[str, list[Record]]:
    """Records that differ only by labels ``without``, by the others."""
    found: dict[str, list[Record]] = {}
    for record in records:
        labels = (f"{k} {v}" for k, v in record["case"].items() if k not in without)
        found.setdefault(", ".join(labels), []).append(record)
    return found


def _colours(records: Sequence[Record]) -> dict[str, str]:
    """The same for a method in all panels; black for the bound."""
    names = list(dict.fromkeys(name for record in records for name in record["methods"]))
    coloured = [name for name in names if name != "bound"]
    return {"bound": "black"} | {name: f"C{i % 10}" for i, name in enumerate(coloured)}


def _curves(figure: Any, records: Sequence[Record]) -> None:
    panels = _panels(records, "size")
    colours = _colours(records)
    figure.set_size_inches(5.2 * len(panels), 4.4)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axis, (title, own) in zip(axes, panels.items(), strict=True):
        for name, colour in colours.items():
            timed = [record for record in own if name in record["methods"]]
            if not timed:
                continue
            spreads = [record["methods"][name]["value"] for record in timed]
            sizes = [record["bytes"] for record in timed]
            style = "--" if name == "bound" else "o-"
            medians = [1e6 * spread["median"] for spread in spreads]
            axis.loglog(sizes, medians, style, color=colour, label=name, markersize=3)
            low, high = ([1e6 * spread[side] for spread in spreads] for side in ("low", "high"))
            axis.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("size of the tensor, bytes")
        axis.grid(True, alpha=0.3)
        axis.legend(fontsize=8)
    axes[0].set_ylabel("time of a call, microseconds")


def _bars(figure: Any, records: Sequence[Record]) -> None:
    colours = _colours(records)
    bars = sum(len(record["methods"]) for record in records)
    figure.set_size_inches(9, 1.2 + 0.22 * (bars + len(records)))
    axis = figure.subplots()
    axis.set_ylim(-0.6, bars + len(records) - 0.4)
    place, ticks = 0, []
    for record in records:
        title = ", ".join(f"{k} {v}" for k, v in record["case"].items())
        axis.text(0.01, place, title, fontsize=8, va="center", transform=axis.get_yaxis_transform())
        for name, figures in record["methods"].items():
            place += 1
            ratio = figures["ratio"]
            errors = [[ratio["median"] - ratio["low"]], [ratio["high"] - ratio["median"]]]
            axis.barh(place, ratio["median"], xerr=errors, color=colours[name], height=0.8)
            ticks.append((place, name))
        place += 1
    axis.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1, color="black", linewidth=0.8)
    bases = sorted({record["base"] for record in records})
    axis.set_xlabel(f"time / time of {', '.join(bases)} (median and quartiles)")
    if max(f["ratio"]["median"] for r in records for f in r["methods"].values()) > 20:
        axis.set_xscale("log")
    axis.grid(True, axis="x", alpha=0.3)
