"""What a wire format gains or costs on this machine, and what it does to the gradients."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fastreduce.communicator import Communicator
from fastreduce.weights import Weight

logger = logging.getLogger("fastreduce")

# A difference below this share is none.
_NOTICEABLE = 0.05


@dataclass
class BucketMeasure:
    """One bucket, over the passes measured. Seconds are of the slowest rank, from a moment at which
    all were there; of each list the median counts.

    Attributes:
        elements: of the bucket.
        plain_bytes, wire_bytes: that this rank sends to others in a step.
        plain_seconds: of an uncompressed all-reduce.
        wire_seconds: of the one in the wire format, encoding included.
        encode_seconds: of this, what encoding, adding up and decoding take (not of ``lowrank``).
        error: of the averaged gradient: the norm of the difference over that of the mean.
        residual: the norm of what this rank keeps back, over that of its gradient.
    """

    elements: int
    plain_bytes: int
    wire_bytes: int
    plain_seconds: list[float] = field(default_factory=list)
    wire_seconds: list[float] = field(default_factory=list)
    encode_seconds: list[float] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)


class Measurement:
    """Averages each bucket in both ways, for so many passes, and tells what came of it.

    Args:
        passes: to be measured.

    Attributes:
        passes: that are still to be measured.
        buckets: of the last pass, by the names of their parameters.
    """

    def __init__(self, passes: int) -> None:
        if passes < 1:
            raise ValueError(f"measure: expected 1 or more passes, got {passes}")
        self.passes = passes
        self.buckets: dict[tuple[str, ...], BucketMeasure] = {}
        self._memory: dict[tuple[str, ...], Tensor] = {}
        self._pass: list[tuple[str, ...]] = []  # the one under way
        self._rank = 0

    def compare(
        self,
        names: tuple[str, ...],
        communicator: Communicator,
        buffer: Tensor,
        *,
        scale: float,
        weight: Weight | None,
        wire_bytes: int,
        encode: Callable[[Tensor], None],
        average: Callable[[], object],
        kept: Callable[[], float],
    ) -> None:
        """Of one bucket in one pass; collective.

        Args:
            names: of its parameters.
            buffer: this rank's gradients; afterwards what ``average`` makes of them.
            scale, weight: as for :meth:`Communicator.all_reduce`.
            wire_bytes: that this rank sends.
            encode: does, of a buffer, what a rank computes.
            average: the all-reduce in the wire format, to its end.
            kept: the norm of what this rank will keep back.
        """
        ranks, self._rank = communicator.world_size, communicator.rank
        sent = 2 * (ranks - 1) * buffer.nbytes // ranks
        found = self.buckets.setdefault(names, BucketMeasure(buffer.numel(), sent, wire_bytes))
        found.wire_bytes = wire_bytes
        self._pass.append(names)
        if names not in self._memory:  # as a bucket itself, memory that peers can map
            self._memory[names] = communicator.empty(
                buffer.numel(), dtype=buffer.dtype, device=buffer.device
            )
        copy = self._memory[names].copy_(buffer)
        norm = float(buffer.float().norm())
        encode(copy)
        copy.copy_(buffer)
        encoding = _seconds(lambda: encode(copy), buffer.device)
        copy.copy_(buffer)
        communicator.barrier()
        plain = _seconds(
            lambda: communicator.all_reduce(copy, scale=scale, weight=weight), buffer.device
        )
        communicator.barrier()
        wire = _seconds(average, buffer.device)
        times = torch.tensor([plain, wire, encoding], dtype=torch.float64, device=buffer.device)
        communicator.all_reduce(times, "max")  # all ranks come to one verdict
        lists = found.plain_seconds, found.wire_seconds, found.encode_seconds
        for each, taken in zip(lists, times.tolist(), strict=True):
            each.append(taken)
        mean = float(copy.float().norm())
        difference = float((buffer.float() - copy.float()).norm())
        if math.isfinite(difference):
            found.error.append(difference / mean if mean else 0.0)
            found.residual.append(kept() / norm if norm else 0.0)

    def end_pass(self) -> None:
        """One has been measured. After the last the log has the verdict, and memory is freed."""
        if not self._pass:
            return  # nothing was compressed in it
        self.passes -= 1
        self.buckets = {names: self.buckets[names] for names in self._pass}  # DDP rebuilds them
        self._pass = []
        if self.passes == 0:
            self._memory.clear()
            logger.warning("rank %d: %s", self._rank, self.verdict)

    def seconds(self) -> tuple[float, float]:
        """Of all buckets of a step: uncompressed, and in the wire formats."""
        import statistics  # not above: with what it needs, a tenth of the time to import fastreduce

        return (
            sum(statistics.median(each.plain_seconds) for each in self.buckets.values()),
            sum(statistics.median(each.wire_seconds) for each in self.buckets.values()),
        )

    @property
    def verdict(self) -> str:
        """In one sentence."""
        if not self.buckets:
            return "Nothing has been compressed: every bucket travels as it is."
        plain, wire = self.seconds()
        ratio = wire / plain
        what = (
            f"averaging takes {wire * 1e3:.3g} ms of a step in the wire formats and "
            f"{plain * 1e3:.3g} ms uncompressed"
        )
        if ratio > 1 + _NOTICEABLE:
            return f"Do not compress on this machine: {what} ({ratio:.2f} times as long)."
        if ratio > 1 - _NOTICEABLE:
            return f"Do not compress on this machine: {what}, which is no gain."
        return (
            f"Compressing pays on this machine if its error does no harm: {what} ({ratio:.2f} of "
            "the time); less where backward hides it."
        )

    def __str__(self) -> str:
        import statistics

        lines = [
            f"{'elements':>10} {'bytes':>11} {'as wire':>11} {'plain ms':>9} {'wire ms':>9} "
            f"{'encode ms':>9} {'error':>9} {'residual':>9}"
        ]
        for each in self.buckets.values():
            seconds = each.plain_seconds, each.wire_seconds, each.encode_seconds
            times = [f"{statistics.median(values) * 1e3:9.3f}" for values in seconds]
            errors = [
                f"{statistics.median(values or [math.nan]):9.2e}"
                for values in (each.error, each.residual)
            ]
            numbers = f"{each.elements:>10} {each.plain_bytes:>11} {each.wire_bytes:>11}"
            lines.append(" ".join([numbers, *times, *errors]))
        return "\n".join([*lines, self.verdict])


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    def settle() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    settle()
    begin = time.perf_counter()
    action()
    settle()
    return time.perf_counter() - begin


def norm_of(tensors: list[Tensor]) -> float:
    """Of all together."""
    if not tensors:
        return 0.0
    return float(torch.stack([each.float().norm() for each in tensors]).norm())
