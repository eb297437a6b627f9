"""Wire formats as users name them, and which parameter travels in which when."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from fastreduce.errors import FORMATS

Format = Literal["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit"]

assert get_args(Format) == FORMATS

SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Wire:
    """How a gradient is encoded between ranks.

    Attributes:
        format: ``fp32`` (as it is), ``bf16``, ``fp16`` (clipped, not overflowing), ``fp8_e4m3``,
            ``fp8_e5m2`` (Micikevicius et al. 2022), ``int8``, ``int4``, or ``onebit`` (the sign,
            Seide et al. 2014). The last five have a scale of 4 bytes for every ``block`` elements:
            the largest magnitude over the format's largest; onebit's is the mean magnitude.
        block: elements that share a scale, 32 to 1024, a multiple of 32. Blocks begin with a
            parameter.
        rounding: ``nearest`` (ties to even) or ``stochastic`` (not for fp32 and onebit), by a
            counter-based generator: the same bits in every run.
        feedback: whether what the encoding loses is kept and added to the next step's gradient
            (error feedback: Karimireddy et al. 2019). By default where something is lost.
    """

    format: Format = "fp32"
    block: int = 128
    rounding: Literal["nearest", "stochastic"] = "nearest"
    feedback: bool = True

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"wire: expected one of {', '.join(FORMATS)}, got {self.format!r}")
        if not isinstance(self.block, int) or self.block % 32 or not 32 <= self.block <= 1024:
            raise ValueError(f"block: expected a multiple of 32 from 32 to 1024, got {self.block}")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(
                f'rounding: expected "nearest" or "stochastic", got {self.rounding!r}'
            )
        if self.rounding == "stochastic" and self.format in ("fp32", "onebit"):
            raise ValueError(f"rounding: {self.format} is not rounded")

    def loses(self, dtype: torch.dtype) -> bool:
        """Whether gradients of this dtype can change on their way."""
        return self.format != "fp32" and _LOSSLESS.get(self.format) != dtype

    def bytes_of(self, count: int) -> int:
        """What ``count`` elements of a parameter are encoded in, one way."""
        whole, rest = divmod(count, self.block)
        return whole * self._record(self.block) + (self._record(rest) if rest else 0)

    def _record(self, count: int) -> int:
        bits = _BITS[self.format]
        scale = 4 if bits <= 8 else 0
        return scale + -(-count * bits // 32) * 4


FP32 = Wire()

_LOSSLESS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BITS = dict(zip(FORMATS, (32, 16, 16, 8, 8, 8, 4, 1), strict=True))

# One for all parameters, or what a parameter's name and shape say; and that by the step from which
# on it holds.
Choice = str | Wire | Callable[[str, torch.Size], "str | Wire"]
Schedule = Choice | Mapping[int, Choice]


def key_of(name: str) -> int:
    """32 bits that stand for a parameter in the kernels."""
    return zlib.crc32(name.encode())


def _wire(choice: str | Wire) -> Wire:
    return choice if isinstance(choice, Wire) else Wire(choice)  # type: ignore[arg-type]


class Policy:
    """Which wire a parameter has in which step.

    Args:
        wire: a format's name, a :class:`Wire`, a function of a parameter's name and shape that
            gives one of these, or a mapping from the step from which on one of all these holds;
            before the first, fp32.
        warmup_steps: steps in fp32 before all that, which counts from then on.
        small_bytes: what has less bytes in a bucket, all parameters of one wire together, stays
            uncompressed.
    """

    def __init__(self, wire: Schedule, warmup_steps: int, small_bytes: int) -> None:
        if warmup_steps < 0 or small_bytes < 0:
            raise ValueError(
                "warmup_steps and wire_min_bytes: expected 0 or more, got "
                f"{warmup_steps} and {small_bytes}"
            )
        schedule = dict(wire) if isinstance(wire, Mapping) else {0: wire}
        if any(not isinstance(step, int) or step < 0 for step in schedule):
            raise ValueError(f"wire: expected steps of 0 or more as keys, got {sorted(schedule)}")
        self._from = [
            (step + warmup_steps, choice if callable(choice) else _wire(choice))
            for step, choice in sorted(schedule.items(), key=lambda item: item[0])
        ]
        self._small_bytes = small_bytes
        self._known: dict[tuple[int, str], Wire] = {}

    def phase(self, step: int) -> int:
        """A number that stays the same as long as no parameter's wire changes."""
        return sum(step >= first for first, _ in self._from)

    def of(self, name: str, shape: torch.Size, step: int) -> Wire:
        """The parameter's wire in that step."""
        phase = self.phase(step)
        found = self._known.get((phase, name))
        if found is None:
            choice = self._from[phase - 1][1] if phase else FP32
            found = choice if isinstance(choice, Wire) else _wire(choice(name, shape))
            self._known[phase, name] = found
        return found

    def stays_uncompressed(self, nbytes: int) -> bool:
        """Whether so many bytes of one wire are too few."""
        return nbytes < self._small_bytes
