"""What has moved between two runs, beyond their noise.

Compared are ratios to a case's base, which hold on a shared machine where times do not, and numbers
of instructions. One has moved where its quartiles do not touch those of before and its median
differs by more than a threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.results import FORMAT, Record, case_name

# A tenth: less than that a machine changes by itself from run to run.
THRESHOLD = 1.1


@dataclass(frozen=True)
class Change:
    """Of one method of one case: its ratio to the case's base, or its instructions."""

    case: str
    method: str
    unit: str
    before: float
    now: float

    @property
    def factor(self) -> float:
        """Above 1: it takes longer than it did."""
        return self.now / self.before if self.before else math.inf

    def __str__(self) -> str:
        word = "slower" if self.factor > 1 else "faster"
        return (
            f"{word}: {self.case}: {self.method}: {self.before:,.5g} -> {self.now:,.5g} "
            f"{self.unit} ({self.factor - 1:+.1%})"
        )


@dataclass(frozen=True)
class Comparison:
    """Attributes:
    changes: what has moved, the worst first.
    same: how many methods have not.
    added, missing: cases and methods that only this run has; that only the other one has, of the
        benchmarks that this one has run on as many ranks.
    """

    changes: list[Change]
    same: int
    added: list[str]
    missing: list[str]

    @property
    def slower(self) -> list[Change]:
        return [change for change in self.changes if change.factor > 1]


def compare(
    old: dict[str, Any], new: Sequence[Record], *, threshold: float = THRESHOLD
) -> Comparison:
    """Args:
        old: a results.json of another run.
        new: this run's records.
        threshold: a smaller factor than this counts as the same.

    Raises:
        ValueError: ``old`` is of another format.
    """
    if old.get("format") != FORMAT:
        raise ValueError(f"expected results of format {FORMAT}, got {old.get('format')!r}")
    before = {case_name(record): record for record in old["results"]}
    changes, same = [], 0
    added: list[str] = []
    names = {case_name(record) for record in new}
    ran = {(record["benchmark"], record["case"]["ranks"]) for record in new}
    missing = [
        name
        for name, record in before.items()
        if name not in names and (record["benchmark"], record["case"]["ranks"]) in ran
    ]
    for record in new:
        name = case_name(record)
        earlier = before.get(name)
        if earlier is None or earlier["base"] != record["base"]:
            added.append(name)
            continue
        gone = [method for method in earlier["methods"] if method not in record["methods"]]
        missing += [f"{name}: {method}" for method in gone]
        counted = record["unit"] == "instructions"
        key, unit = ("value", record["unit"]) if counted else ("ratio", f"of {record['base']}")
        for method, figures in record["methods"].items():
            if method == record["base"] and not counted:
                continue
            if method not in earlier["methods"]:
                added.append(f"{name}: {method}")
                continue
            old_spread, new_spread = earlier["methods"][method][key], figures[key]
            if _moved(old_spread, new_spread, threshold):
                medians = old_spread["median"], new_spread["median"]
                changes.append(Change(name, method, unit, *medians))
            else:
                same += 1
    changes.sort(key=lambda change: -change.factor)
    return Comparison(changes, same, added, missing)


def _moved(before: dict[str, float], now: dict[str, float], threshold: float) -> bool:
    apart = now["low"] > before["high"] or now["high"] < before["low"]
    less, more = sorted((before["median"], now["median"]))
    return apart and more > threshold * less


def text(found: Comparison, old: dict[str, Any], about: dict[str, Any]) -> str:
    """What is printed."""
    lines = [
        f"compared with the run of {old['date']}: {found.same} figures have not moved, "
        f"{len(found.slower)} slower, {len(found.changes) - len(found.slower)} faster"
    ]
    differing = sorted(
        key
        for key in about.keys() | old["machine"].keys()
        if about.get(key) != old["machine"].get(key)
    )
    if differing:
        lines.append(
            "not the same machine: "
            + "; ".join(f"{key} {old['machine'].get(key)} -> {about.get(key)}" for key in differing)
        )
    lines += [f"  {change}" for change in found.changes]
    for when, names in (("now", found.added), ("then", found.missing)):
        if names:
            lines.append(f"  only {when}: {'; '.join(names)}")
    return "\n".join(lines)
