"""Who has which elements of a flat buffer: of reduce-scatters and all-gathers in place."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fastreduce import _C

Ranges = Sequence[tuple[int, int]]


class Shares:
    """Every rank's elements of a buffer; the same on all ranks.

    Args:
        count: elements of the buffer.
        ranges: of each rank the first elements and those after the last, in ascending order. No two
            ranges share an element, and some elements may be nobody's.
    """

    def __init__(self, count: int, ranges: Sequence[Ranges]) -> None:
        self.count = count
        self.ranges = [[each for each in own if each[0] < each[1]] for own in ranges]
        self.checksum = zlib.crc32(repr((count, self.ranges)).encode())
        self._tables: dict[frozenset[int], _C.Shares] = {}
        every = sorted(each for own in self.ranges for each in own)
        ends = [0, *(end for _, end in every)]
        if any(begin < before for (begin, _), before in zip(every, ends, strict=False)) or (
            ends[-1] > count
        ):
            raise ValueError(f"ranges: expected them apart, in {count} elements, got {ranges}")

    def table(self, ranks: Sequence[int]) -> _C.Shares:
        """For the kernels; of these ranks only."""
        key = frozenset(ranks)
        if key not in self._tables:
            rows = [own if rank in key else [] for rank, own in enumerate(self.ranges)]
            self._tables[key] = _C.Shares(rows)
        return self._tables[key]

    def size(self, rank: int) -> int:
        """How many elements are the rank's."""
        return sum(end - begin for begin, end in self.ranges[rank])

    def taken(self, flat: Tensor, rank: int) -> Tensor:
        """A rank's elements one after the other: a copy."""
        return torch.cat([flat[:0], *(flat[begin:end] for begin, end in self.ranges[rank])])

    def put(self, flat: Tensor, rank: int, values: Tensor) -> None:
        """The other way round."""
        parts = values.split([end - begin for begin, end in self.ranges[rank]])
        for part, (begin, end) in zip(parts, self.ranges[rank], strict=True):
            flat[begin:end] = part
