"""What a rank says of its weight in a mean, and what the ranks' words come to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

# What a rank can announce instead of a weight: it counts as 1, as all do; or it has nothing to
# contribute, and counts as 0 where others give weights and as 1 where they do not. The kernels'
# numbers: csrc/signal.h.
WORDS = {"ordinary": -1.0, "absent": -2.0}
ORDINARY = WORDS["ordinary"]
Weight = float | Literal["ordinary", "absent"]
Reduction = Literal["mean", "sum"]

NO_WEIGHT = "weight(n) was called for other backward passes, but not for this one"


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


class Given:
    """What a rank has said of its samples since the last synchronised pass.

    Attributes:
        sum: of the weights of its micro-batches; None where none was given.
        latest: the last one.
        reduction: what its ``.grad`` is, see :meth:`HookState.weight`.
        ever: some weight has been given at some time.
        forwards: forward passes that have been completed since the last one was given.
    """

    def __init__(self) -> None:
        self.sum: float | None = None
        self.latest = 1.0
        self.reduction: Reduction = "mean"
        self.ever = False
        self.forwards = 0

    def add(self, n: float, reduction: Reduction) -> None:
        """The next backward pass is over n samples."""
        check("n", n)
        if reduction not in ("mean", "sum"):
            raise ValueError(f'reduction: expected "mean" or "sum", got {reduction!r}')
        if not self.forwards:
            self.sum = None  # no forward pass has come after the last one: it failed
        if self.sum is not None and reduction != self.reduction:
            raise ValueError(
                f"reduction: expected {self.reduction!r} as in the micro-batches before, "
                f"got {reduction!r}"
            )
        self.ever, self.forwards = True, 0
        self.latest, self.reduction = n, reduction
        self.sum = (self.sum or 0.0) + n

    def factors(self) -> tuple[float, float]:
        """The scale and the weight of its gradients."""
        if self.sum is None:
            raise ValueError(NO_WEIGHT)
        return (self.sum if self.reduction == "mean" else float(self.sum > 0)), self.sum

    def saved(self) -> dict[str, float | str | bool | None]:
        """For a checkpoint."""
        return {"weight": self.sum, "reduction": self.reduction, "weighted": self.ever}

    def load(self, saved: Mapping[str, Any]) -> None:
        """What :meth:`saved` gave."""
        self.sum, self.reduction = saved["weight"], saved["reduction"]
        self.ever, self.forwards = saved["weighted"], 1
