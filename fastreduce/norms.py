"""How large what has been reduced is: its norms, and what of it is not finite, counted as it is
stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fastreduce import _C, cuda, enums
from fastreduce.wire import part_of

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_COLUMNS = _C.NORM_BYTES // 8
UNIT = 1024  # elements that are added up on their own: csrc/norm.h
_EVERYTHING = 2**63 - 1  # elements


@dataclass(frozen=True)
class Norm:
    """What has been counted of some elements.

    Attributes:
        norm: the square root of the sum of the squares; inf or NaN where an element is, and inf
            from 2**450 on. Magnitudes below 2**-450 count as 0.
        largest: the largest magnitude (the infinity norm); NaN where an element is.
        nonfinite: how many elements are inf or NaN.
    """

    norm: float
    largest: float
    nonfinite: int


class Norms:
    """Counts what all-reduces store, in the same pass over memory; see ``norms`` of
    :meth:`Communicator.all_reduce`.

    Squares are added in float64, and the order does not depend on the number of ranks (csrc/norm.h
    tells how): the same bits on 1, 2, 4 ... ranks, for whatever algorithm.

    Args:
        sections: numbers of elements of the parts of a tensor that are to be counted apart; None
            for one count of all.
    """

    def __init__(self, sections: Sequence[int] | None = None, *, _threads: int = _C.MAX_BLOCKS):
        ends, end = [], 0
        for count in sections or ():
            if count < 0:
                raise ValueError(f"sections: expected numbers of elements, got {count}")
            end += count
            ends.append(end)
        self._ends = ends or [_EVERYTHING]
        self._sections = len(self._ends)
        self._counts = _C.Norms(self._ends, _threads)
        self._on_devices: dict[torch.device, cuda.NormTable] = {}
        self._total = _C.Norms(self._ends)  # of all ranks
        self._summed = False  # they are all ranks'
        self._known: list[Norm] | None = None  # what they come to
        self.of_all = False  # this rank has counted all, as has every other one

    def clear(self) -> None:
        """Forgets all."""
        self._counts.clear()
        self._on_devices.clear()
        self._summed = False
        self.of_all = False

    def sections(self) -> list[Norm]:
        """Of each section. Once :meth:`Communicator.sum_norms` has brought the ranks' counts
        together."""
        if not self._summed:
            raise RuntimeError("norms: each rank has counted a part: call sum_norms() first")
        if self._known is None:
            self._known = [_norm_of(*values) for values in self._total.values()]
        return self._known

    @property
    def address(self) -> int:
        """For the kernels; what they count from now on is not yet known."""
        self._summed = False
        return self._counts.address

    def measure(self, tensor: Tensor, rank: int, ranks: int, *, of_all: bool = False) -> None:
        """Counts a rank's part of what has been reduced already. ``of_all``: every rank counts the
        same, and nothing has to be brought together. (Not by several threads at once.)"""
        check(tensor)
        if not tensor.is_contiguous():
            raise ValueError("norms: expected a contiguous tensor")
        self._summed = False
        self.of_all = of_all
        kind, at, count = enums.DTYPE[tensor.dtype], tensor.data_ptr(), tensor.numel()
        if tensor.is_cpu:
            self._counts.measure(rank, ranks, kind, at, count)
            return
        if tensor.device not in self._on_devices:
            self._on_devices[tensor.device] = cuda.NormTable(self._ends, tensor.device)
        _, begin, end = part_of(count, UNIT, 0, ranks, rank)
        self._on_devices[tensor.device].measure(tensor, begin, end)

    def saved(self) -> Tensor:
        """This rank's counts: int64, (sections, columns). Waits for GPUs."""
        own, _ = self.to_be_summed()
        return self._table(own)

    @property
    def nbytes(self) -> int:
        """Of a rank's counts."""
        return self._sections * _C.NORM_BYTES

    def to_be_summed(self) -> tuple[_C.Norms, _C.Norms]:
        """This rank's counts, and what is to become all ranks': :meth:`know`. Waits for GPUs."""
        for table in self._on_devices.values():
            self._counts.add(table.take().data_ptr())
        return self._counts, self._total

    def total(self) -> Tensor:
        """All ranks' counts likewise."""
        self.sections()
        return self._table(self._total)

    def _table(self, counts: _C.Norms) -> Tensor:
        table = torch.empty(self._sections, _COLUMNS, dtype=torch.int64)
        counts.save(table.data_ptr())
        return table

    def settle(self, tables: Iterable[Tensor]) -> None:
        """These are all ranks' counts."""
        self._total.clear()
        for table in tables:
            self._total.add(table.data_ptr())
        self.know()

    def know(self) -> None:
        """All ranks' counts have come together."""
        self._summed, self._known = True, None


def total_of(norms: Iterable[Norms]) -> Norm:
    """Of all sections of all of them."""
    counts = _C.Norms([_EVERYTHING])
    for each in norms:
        for row in each.total():
            counts.add(row.data_ptr())
    [values] = counts.values()
    return _norm_of(*values)


def _norm_of(high: int, middle: int, low: int, top: int, largest: float, nonfinite: int) -> Norm:
    if nonfinite:
        return Norm(largest, largest, nonfinite)
    if top > _C.NORM_HIGHEST:
        return Norm(math.inf, largest, 0)
    bits = _C.NORM_BITS
    parts = ((high << bits) + middle << bits) + low
    return Norm(math.sqrt(math.ldexp(float(parts), bits * (top - 2))), largest, 0)


def check(tensor: Tensor, op: str = "sum") -> None:
    """Raises what cannot be measured."""
    if op not in ("sum", "mean"):
        raise ValueError(f"norms: expected a sum or a mean, got {op}")
    if tensor.dtype not in DTYPES:
        raise TypeError(f"norms: expected a floating dtype, got {tensor.dtype}")
    if tensor.device.type not in ("cpu", "cuda"):
        raise ValueError(f"norms: expected a tensor on a CPU or GPU, got one on {tensor.device}")
