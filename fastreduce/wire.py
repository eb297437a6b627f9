"""Wire formats as users name them, and which parameter travels in which when."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch

Format = Literal[
    "fp32",
    "bf16",
    "fp16",
    "fp8_e4m3",
    "fp8_e5m2",
    "int8",
    "int4",
    "onebit",
    "topk",
    "randomk",
    "threshold",
    "lowrank",
]

SMALL_BYTES = 64 << 10

_LOSSLESS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_ROUNDED = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4")
SELECTED = ("topk", "randomk", "threshold")
_OPTIONS = {
    "block": ("fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit"),
    "k": SELECTED,
    "threshold": ("threshold",),
    "rank": ("lowrank",),
}


@dataclass(frozen=True)
class Wire:
    """How a gradient is encoded between ranks.

    Attributes:
        format: ``fp32`` (as it is), ``bf16``, ``fp16`` (clipped, not overflowing), ``fp8_e4m3``,
            ``fp8_e5m2`` (Micikevicius et al. 2022), ``int8``, ``int4``, or ``onebit`` (the sign,
            Seide et al. 2014). The last five have a scale of 4 bytes for every ``block`` elements:
            the largest magnitude over the format's largest; onebit's is the mean magnitude.
            ``topk`` sends some elements only, in 8 bytes each, to every rank: of each bucket the
            ``k`` largest, ties by index (Stich et al. 2018); ``randomk`` the same ``k`` of all
            ranks, by chance; ``threshold`` the ``k`` largest of those not below ``threshold``.
            ``lowrank`` sends two factors of a matrix (PowerSGD, Vogels et al. 2019); a parameter of
            fewer than two dimensions, or not larger than its factors, stays fp32.
        block: elements that share a scale, 32 to 1024, a multiple of 32. Blocks begin with a
            parameter.
        rounding: ``nearest`` (ties to even) or ``stochastic`` (not for fp32 and onebit), by a
            counter-based generator: the same bits in every run.
        k: elements of a bucket: a number, or a fraction of it.
        threshold: a magnitude.
        rank: of the factors.
        feedback: whether what the encoding loses is kept and added to the next step's gradient
            (error feedback: Karimireddy et al. 2019). By default where something is lost.
    """

    format: Format = "fp32"
    block: int = 128
    rounding: Literal["nearest", "stochastic"] = "nearest"
    feedback: bool = True
    k: float = 0.01
    threshold: float = 0.0
    rank: int = 2

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            allowed = ", ".join(get_args(Format))
            raise ValueError(f"wire: expected one of {allowed}, got {self.format!r}")
        if not isinstance(self.block, int) or self.block % 32 or not 32 <= self.block <= 1024:
            raise ValueError(f"block: expected a multiple of 32 from 32 to 1024, got {self.block}")
        if self.rounding not in ("nearest", "stochastic"):
            raise ValueError(f'rounding: expected "nearest" or "stochastic", got {self.rounding!r}')
        if self.rounding == "stochastic" and self.format not in _ROUNDED:
            raise ValueError(f"rounding: {self.format} is not rounded")
        for option, formats in _OPTIONS.items():
            if self.format not in formats and getattr(self, option) != getattr(Wire, option):
                raise ValueError(f"{option}: {self.format} has none, only {', '.join(formats)}")
        whole = isinstance(self.k, int) and not isinstance(self.k, bool)
        if not self.k > 0 or (not whole and (self.k > 1 or not isinstance(self.k, float))):
            raise ValueError(f"k: expected a fraction up to 1.0 or a whole number, got {self.k}")
        if not self.threshold >= 0:
            raise ValueError(f"threshold: expected 0 or more, got {self.threshold}")
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank: expected 1 or more, got {self.rank}")

    def loses(self, dtype: torch.dtype) -> bool:
        """Whether gradients of this dtype can change on their way."""
        return self.format != "fp32" and _LOSSLESS.get(self.format) != dtype

    def chosen(self, count: int) -> int:
        """How many of ``count`` elements are sent, at most: a float is a fraction."""
        k = self.k * count if isinstance(self.k, float) else self.k
        return min(count, max(1, round(k)))


FP32 = Wire()
# Of gradients that travel as they are.
NATIVE = {
    torch.float32: FP32,
    torch.float16: Wire("fp16", feedback=False),
    torch.bfloat16: Wire("bf16", feedback=False),
}

# One for all parameters, or what a parameter's name and shape say; and that by the step from which
# on it holds.
Choice = str | Wire | Callable[[str, torch.Size], "str | Wire"]
Schedule = Choice | Mapping[int, Choice]


def key_of(name: str) -> int:
    """32 bits that stand for a parameter in the kernels."""
    return zlib.crc32(name.encode())


def part_of(count: int, block: int, key: int, ranks: int, rank: int) -> tuple[int, int, int]:
    """The block, and the first and the one after the last of a parameter's ``count`` elements that
    ``rank`` reduces: csrc/wire.h's runs_of()."""
    each, longer = divmod(-(-count // block), ranks)
    turned = (rank + key) % ranks
    first = turned * each + min(turned, longer)
    end = first + each + (turned < longer)
    return block, min(first * block, count), min(end * block, count)


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
        if not schedule or any(not isinstance(step, int) or step < 0 for step in schedule):
            raise ValueError(f"wire: expected steps of 0 or more as keys, got {sorted(schedule)}")
        self._from = [
            (step + warmup_steps, choice if callable(choice) else _wire(choice))
            for step, choice in sorted(schedule.items(), key=lambda item: item[0])
        ]
        self._small_bytes = small_bytes
        self._known: dict[tuple[int, str], Wire] = {}
        self._fingerprints: dict[int, int] = {}

    @property
    def compresses(self) -> bool:
        """Whether there is anything but fp32."""
        return any(choice != FP32 for _, choice in self._from)

    def phase(self, step: int) -> int:
        """A number that stays the same as long as no parameter's wire changes."""
        return sum(step >= first for first, _ in self._from)

    def may_lose(self, step: int) -> bool:
        """Whether some parameter may be compressed in that step."""
        phase = self.phase(step)
        return phase > 0 and self._from[phase - 1][1] != FP32

    def fingerprint(self, shapes: Mapping[str, torch.Size], step: int) -> int:
        """By which ranks can tell whether they choose alike in that step."""
        phase = self.phase(step)
        if phase not in self._fingerprints:
            said = [
                (name, tuple(shape), self.of(name, shape, step)) for name, shape in shapes.items()
            ]
            self._fingerprints[phase] = zlib.crc32(repr((said, self._small_bytes)).encode())
        return self._fingerprints[phase]

    def fingerprints(self, shapes: Mapping[str, torch.Size]) -> list[int]:
        """Those of all steps."""
        return [self.fingerprint(shapes, step) for step, _ in self._from]

    def wires(self, shapes: Mapping[str, torch.Size]) -> set[Wire]:
        """All that these parameters ever have."""
        steps = [first for first, _ in self._from]
        return {self.of(name, shape, step) for step in steps for name, shape in shapes.items()}

    def of(self, name: str, shape: torch.Size, step: int) -> Wire:
        """The parameter's wire in that step."""
        phase = self.phase(step)
        found = self._known.get((phase, name))
        if found is None:
            choice = self._from[phase - 1][1] if phase else FP32
            found = choice if isinstance(choice, Wire) else self._ask(choice, name, shape)
            self._known[phase, name] = found
        return found

    def _ask(self, choice: Callable[..., str | Wire], name: str, shape: torch.Size) -> Wire:
        try:
            return _wire(choice(name, shape))
        except Exception as error:
            raise ValueError(f"wire: of the parameter {name}: {error!r}") from error

    def stays_uncompressed(self, nbytes: int) -> bool:
        """Whether so many bytes of one wire are too few."""
        return nbytes < self._small_bytes
