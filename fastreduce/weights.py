"""What a rank says of its weight in a mean, and what the ranks' words come to."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

# What a rank can announce instead of a weight: it counts as 1, as all do; or it has nothing to
# contribute, and counts as 0 where others give weights and as 1 where they do not. The kernels'
# numbers: csrc/signal.h.
WORDS = {"ordinary": -1.0, "absent": -2.0}
ORDINARY = WORDS["ordinary"]
Weight = float | Literal["ordinary", "absent"]


def check(name: str, value: float) -> None:
    """Any accumulator holds it and its reciprocal."""
    if value != 0 and not 1e-30 <= value <= 1e30:
        raise ValueError(f"{name}: expected 0, or 1e-30 to 1e30, got {value}")


def announcement(weight: Weight | None) -> list[float]:
    """What a rank tells of its weight, to be summed over the ranks for :func:`total_of`."""
    if isinstance(weight, (int, float)):
        return [float(weight), 1.0, 0.0, 0.0]
    return [0.0, 0.0, 0.0, 1.0] if weight == "absent" else [0.0, 0.0, 1.0, 0.0]


def total_of(announced: Tensor) -> Tensor:
    """The divisor of a mean, float64. NaN where some ranks gave a weight and others did not."""
    weights, given, ordinary, absent = announced.unbind()
    mixed = torch.where(ordinary > 0, torch.full_like(weights, torch.nan), weights)
    return torch.where(given > 0, mixed, ordinary + absent)


def agreed(announced: Tensor) -> float:
    """:func:`total_of`, on the CPU.

    Raises:
        RuntimeError: not all ranks say alike whether they give weights.
    """
    total = float(total_of(announced))
    if math.isnan(total):
        raise RuntimeError("some ranks gave a weight, and others did not")
    return total
