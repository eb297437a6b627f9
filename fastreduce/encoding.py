"""How the parameters of a bucket are encoded: which travel in one message, and by which kernels."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fastreduce import cuda, enums, lowrank
from fastreduce.exchange import Layout
from fastreduce.residual import Residual
from fastreduce.wire import Wire, key_of


@dataclass
class Section:
    """A parameter in a bucket, in one phase.

    Attributes:
        place: which of its elements this rank reduces, see :meth:`Residual.move`.
        plain: it travels as it is.
        keeps: there will be a residual after the step.
        factors: elements of both, in low rank.
    """

    name: str
    parameter: nn.Parameter
    offset: int
    count: int
    wire: Wire
    plain: bool = False
    keeps: bool = False
    residual: Residual | None = None
    place: tuple[int, int, int] = (0, 0, 0)
    factors: tuple[int, int] | None = None


class Part(Layout):
    """Parameters of a bucket that travel in one message."""

    def __init__(
        self,
        sections: list[Section],
        world_size: int,
        servers: tuple[Sequence[int], int] = ((), 0),
    ) -> None:
        rows = []
        for each in sections:
            number = enums.FORMAT.get(each.wire.format, 0)
            stochastic = each.wire.rounding == "stochastic"
            key = key_of(each.name)
            rows.append((each.offset, each.count, key, number, stochastic, each.wire.block))
        super().__init__(world_size, rows, sections[0].parameter.device, servers)
        self.sections = sections
        self._addresses: dict[tuple[Any, ...], Tensor] = {}

    def residuals(self) -> Tensor:
        """The addresses of all residuals, as they are now: int64, 4 for every section. On a GPU
        made on the current stream, on which the residuals then are used."""
        turned: tuple[Any, ...] = tuple(
            (each.residual.now, each.residual.version) if each.residual else None
            for each in self.sections
        )
        if self.device.type == "cuda":
            turned = (*turned, torch.cuda.current_stream(self.device).cuda_stream)
        if turned not in self._addresses:
            rows = [e.residual.addresses() if e.residual else (0, 0, 0, 0) for e in self.sections]
            if len(self._addresses) > 3:
                self._addresses.clear()
            table = torch.tensor(rows, dtype=torch.int64)
            if self.device.type == "cuda":
                table = cuda.on_device(table, self.device)
                for each in self.sections:
                    if each.residual is not None:
                        each.residual.record_stream(torch.cuda.current_stream(self.device))
            self._addresses[turned] = table
        return self._addresses[turned]

    def sent_bytes(self, rank: int) -> int:
        """What a rank sends to others in a step."""
        return sum(self.sizes) + (len(self.sizes) - 2) * self.sizes[rank]

    def rehearse(self, coding: Any, rank: int) -> None:
        """What a rank computes in a step, alone."""
        if isinstance(coding, cuda.WireCoding):
            longest = max(self.sizes)
            room = [len(self.sizes) * longest, longest]
            everything, result = self.memory("rehearsed", room)
            coding.encode(everything)
            coding.reduce(everything, result)
            coding.decode(everything, longest)
            return
        messages = self.memory("rehearsed", self.sizes)
        for chunk, message in enumerate(messages):
            coding.encode(chunk, message.data_ptr())
        own = messages[rank].data_ptr()
        coding.reduce([own] * len(self.sizes), own)
        for chunk, message in enumerate(messages):
            coding.decode(chunk, message.data_ptr())


def selected_bytes(k: int) -> int:
    """Of a rank's message of so many elements: their number, and of each index and value."""
    return 8 + 8 * k


class Selected(Part):
    """Parameters of which a few elements are sent."""

    def __init__(self, sections: list[Section], world_size: int) -> None:
        super().__init__(sections, world_size)
        wire = sections[0].wire
        count = sum(each.count for each in sections)
        if count >= 2**32:
            raise ValueError(f"{wire.format}: expected less than 2^32 elements in a bucket")
        self.k = wire.chosen(count)
        self.checksum ^= zlib.crc32(repr((wire, self.k)).encode())
        self.message_bytes = selected_bytes(self.k)
        self._expected = 0  # by which the kernel begins to look; its choice does not depend on it

    def select(self, coding: Any, message: Tensor) -> None:
        """Writes this rank's."""
        wire = self.sections[0].wire
        threshold = wire.threshold if wire.format == "threshold" else 0.0
        random = wire.format == "randomk"
        if isinstance(coding, cuda.WireCoding):
            coding.select(random, self.k, threshold, message)
            return
        at = message.data_ptr()
        self._expected = coding.select(random, self.k, threshold, self._expected, at)

    def combine(self, coding: Any, messages: list[Tensor]) -> None:
        """The gradient, of all ranks' messages: on a GPU of those that lie one after the other."""
        if isinstance(coding, cuda.WireCoding):
            coding.combine(self.k, messages)
        else:
            coding.combine(self.k, [each.data_ptr() for each in messages])

    def sent_bytes(self, rank: int) -> int:
        return (len(self.sizes) - 1) * self.message_bytes

    def rehearse(self, coding: Any, rank: int) -> None:
        messages = self.memory("rehearsed", [self.message_bytes] * len(self.sizes))
        self.select(coding, messages[rank])
        for each in messages:
            if each is not messages[rank]:
                each.copy_(messages[rank])
        self.combine(coding, messages)


@dataclass
class Bucket:
    """How a bucket's parameters are encoded, in one phase. The same on all ranks."""

    ranks: int
    encoded: Part | None
    selected: list[Selected]
    factored: list[Section]
    step: int = 0  # the last one that used it

    def parts(self) -> list[Part]:
        """What the kernels encode."""
        return [self.encoded, *self.selected] if self.encoded else [*self.selected]

    def sections(self) -> list[Section]:
        """All parameters."""
        return [*(each for part in self.parts() for each in part.sections), *self.factored]

    def release(self) -> None:
        """Frees the memory of its messages."""
        for part in self.parts():
            part.release()

    def formats(self) -> tuple[str, ...]:
        """The wire formats, by name."""
        return tuple(sorted({each.wire.format for each in self.sections() if not each.plain}))

    def sent_bytes(self, rank: int) -> int:
        """What a rank sends to others in a step."""
        factors = [each.factors for each in self.factored if each.factors]
        return sum(part.sent_bytes(rank) for part in self.parts()) + sum(
            lowrank.sent_bytes(left, right, self.ranks) for left, right in factors
        )
