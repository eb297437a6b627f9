"""The norm of a model's averaged gradients, pass by pass, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fastreduce.communicator import Communicator
from fastreduce.norms import Norm, Norms, total_of

Counting = bool | Literal["parameters"]


@dataclass(frozen=True)
class GradientNorm(Norm):
    """The :class:`Norm` of the averaged gradients of one pass, all together.

    Attributes:
        norm, largest, nonfinite: as there.
        parameters: the norm of each, by name, if that was asked for.
    """

    parameters: dict[str, Norm] = field(default_factory=dict)


class PassNorms:
    """The norms of one pass, bucket by bucket.

    Args:
        communicator: over which the pass is averaged.
        by_parameter: count each parameter apart.
    """

    def __init__(self, communicator: Communicator, by_parameter: bool) -> None:
        self._communicator = communicator
        self._by_parameter = by_parameter
        # Each bucket has counts of its own: several threads complete buckets.
        self._buckets: list[tuple[list[str], Norms]] = []
        self._uncounted: dict[int, Norms] = {}  # by a bucket's address
        self._unsummed: float | None = None  # the loss scale, see sum()

    def enter(self, bucket: Tensor, parameters: Sequence[tuple[str, int]]) -> None:
        """A bucket is going to be averaged: its parameters' names and elements, in order."""
        sections = [count for _, count in parameters] if self._by_parameter else None
        norms = Norms(sections, _threads=self._communicator.threads)
        self._buckets.append(([name for name, _ in parameters], norms))
        self._uncounted[_address(bucket)] = norms

    def take(self, bucket: Tensor) -> Norms | None:
        """In which its reduction counts a bucket."""
        return self._uncounted.pop(_address(bucket), None)

    def count(self, bucket: Tensor) -> None:
        """Counts a bucket that has been averaged, if its reduction has not."""
        norms = self.take(bucket)
        if norms is None:
            return
        communicator = self._communicator
        values = bucket._values() if bucket.is_sparse else bucket
        if communicator.shared_memory:
            norms.measure(values, communicator.rank, communicator.world_size)
        else:
            norms.measure(values, 0, 1, of_all=True)

    def sum(self, loss_scale: float, *, later: bool = False) -> None:
        """Brings the ranks' counts together; collective where they share memory. ``later``: when
        the result is asked for, which then waits for GPUs, and is collective everywhere.

        Raises:
            RuntimeError: the ranks have unscaled by different loss scales.
        """
        if later:
            self._unsummed = loss_scale
            return
        counted = [norms for _, norms in self._buckets]
        told = self._communicator.sum_norms(*counted, told=loss_scale)
        if self._unsummed is not None and not self._communicator.shared_memory:
            told = self._communicator._group.all_gather_object(loss_scale)
        self._unsummed = None
        agree(told)

    def result(self) -> GradientNorm:
        """After :meth:`sum`."""
        if self._unsummed is not None:
            self.sum(self._unsummed)
        parameters: dict[str, Norm] = {}
        for names, norms in self._buckets if self._by_parameter else ():
            parameters |= dict(zip(names, norms.sections(), strict=True))
        total = total_of(norms for _, norms in self._buckets)
        return GradientNorm(total.norm, total.largest, total.nonfinite, parameters)


def agree(loss_scales: Sequence[float]) -> None:
    """Raises if the ranks' loss scales, in rank order, are not all the same. NaN is of a rank that
    has joined, and has none."""
    told = [(rank, scale) for rank, scale in enumerate(loss_scales) if not math.isnan(scale)]
    for rank, scale in told:
        if scale != told[0][1]:
            raise RuntimeError(
                f"the loss scale differs between the ranks: {told[0][1]} on rank {told[0][0]}, "
                f"{scale} on rank {rank}; have all the same GradScaler, and do all step and update "
                "it?"
            )


def check_norm_type(norm_type: float) -> None:
    """Raises one that is not counted."""
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type: expected 2 or inf, got {norm_type}")


def clip_factor(
    found: Norm, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> tuple[Tensor, float]:
    """The norm that is meant, and by what gradients are multiplied, as
    ``torch.nn.utils.clip_grad_norm_`` does: 1 where they are short enough."""
    total = found.norm if norm_type == 2.0 else found.largest
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(f"the norm of the gradients is {total}")
    factor = max_norm / (total + 1e-6)
    return torch.tensor(total), factor if not factor >= 1.0 else 1.0  # a NaN stays


class GradientNorms:
    """Of a model's passes, of which the last one can be asked for.

    Args:
        counting: True, or "parameters" for each one apart.
    """

    def __init__(self, counting: Counting) -> None:
        if counting not in (True, "parameters"):
            raise ValueError(f'norms: expected a bool or "parameters", got {counting!r}')
        self._by_parameter = counting == "parameters"
        self._last: PassNorms | None = None
        self._known: GradientNorm | None = None
        self._clipped = False

    def begin(self, communicator: Communicator) -> PassNorms:
        """A pass begins."""
        return PassNorms(communicator, self._by_parameter)

    def end(self, counted: PassNorms) -> None:
        """A pass has been averaged."""
        self._last, self._known, self._clipped = counted, None, False

    def value(self) -> GradientNorm:
        """Of the last pass."""
        if self._last is None:
            raise RuntimeError("no synchronised pass has been counted yet")
        if self._known is None:
            self._known = self._last.result()
        return self._known

    @torch.no_grad()
    def clip(
        self,
        gradients: Iterable[Tensor],
        max_norm: float,
        norm_type: float,
        error_if_nonfinite: bool,
    ) -> Tensor:
        """See :meth:`HookState.clip_grad_norm`."""
        gradients = list(gradients)
        check_norm_type(norm_type)
        if norm_type == math.inf and any(each.is_complex() for each in gradients):
            raise ValueError("norm_type: expected 2 for complex gradients, which count as pairs")
        found = self.value()
        if self._clipped:
            raise RuntimeError("the gradients of the last synchronised pass are clipped already")
        total, factor = clip_factor(found, max_norm, norm_type, error_if_nonfinite)
        self._clipped = True
        if gradients and factor != 1.0:
            torch._foreach_mul_(
                [each._values() if each.is_sparse else each for each in gradients], factor
            )
        return total


def _address(bucket: Tensor) -> int:
    """A number for a bucket; sparse ones come one at a time."""
    return 0 if bucket.is_sparse else bucket.data_ptr()
