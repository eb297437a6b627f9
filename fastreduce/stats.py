"""What a hook saw of its steps: bytes, time, and for whom it waited."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class BucketStats:
    """A bucket of gradients in one step. Seconds; instants are of ``time.monotonic()``.

    Attributes:
        index: in the order of the step.
        nbytes: of its gradients.
        algorithm: that averaged them.
        formats: wire formats in which some of them travelled.
        wire_bytes: what this rank sent in these to all others together.
        submitted, began, ended: the hook was called; the communication thread began with the
            bucket (before that, others were under way); it was done. None of the last two where
            the bucket did not go through shared memory.
        waiting: of the time from ``began`` to ``ended``, for peers.
        latest: the rank for whose beginning this one waited the longest, None if for nobody.
        latest_wait: and how long.
    """

    index: int
    nbytes: int
    algorithm: str
    submitted: float
    began: float | None = None
    ended: float | None = None
    waiting: float = 0.0
    latest: int | None = None
    latest_wait: float = 0.0
    formats: tuple[str, ...] = ()
    wire_bytes: int = 0

    def note(self, account: tuple[int, int, int, int, int]) -> None:
        """Takes over what the communication thread has noted, in ns."""
        began, ended, waited, latest, latest_wait = account
        self.began, self.ended, self.waiting = began / 1e9, ended / 1e9, waited / 1e9
        self.latest = latest if latest >= 0 else None
        self.latest_wait = latest_wait / 1e9

    @property
    def moving(self) -> float:
        """Seconds in which bytes were moved and added."""
        return self._seconds() - self.waiting

    def hidden(self, backward_ended: float | None) -> float:
        """Seconds that went by while backward was still computing."""
        if self.began is None or self.ended is None or backward_ended is None:
            return 0.0
        return max(0.0, min(self.ended, backward_ended) - self.began)

    def _seconds(self) -> float:
        return 0.0 if self.began is None or self.ended is None else self.ended - self.began


@dataclass
class StepStats:
    """A synchronised backward pass.

    Attributes:
        buckets: in order.
        backward_ended: instant at which the last gradient of this rank was computed.
    """

    buckets: list[BucketStats] = field(default_factory=list)
    backward_ended: float | None = None

    def end_backward(self) -> None:
        """Now."""
        self.backward_ended = time.monotonic()

    @property
    def nbytes(self) -> int:
        """Of all gradients."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def wire_bytes(self) -> int:
        """What this rank sent in wire formats."""
        return sum(bucket.wire_bytes for bucket in self.buckets)

    @property
    def waiting(self) -> float:
        """Seconds of waiting for peers."""
        return sum(bucket.waiting for bucket in self.buckets)

    @property
    def moving(self) -> float:
        """Seconds of moving and adding bytes."""
        return sum(bucket.moving for bucket in self.buckets)

    @property
    def hidden(self) -> float:
        """Seconds of ``waiting + moving`` that backward computation hid."""
        return sum(bucket.hidden(self.backward_ended) for bucket in self.buckets)

    @property
    def straggler(self) -> int | None:
        """The rank for whose beginning of a bucket this one waited the longest."""
        late = [bucket for bucket in self.buckets if bucket.latest is not None]
        return max(late, key=lambda bucket: bucket.latest_wait).latest if late else None


def summary(steps: Sequence[StepStats]) -> str:
    """One line."""
    if not steps:
        return "no synchronised step"
    count = len(steps)
    busy = sum(step.waiting + step.moving for step in steps)
    algorithms = Counter(bucket.algorithm for step in steps for bucket in step.buckets)
    waits: Counter[int] = Counter()
    for step in steps:
        for bucket in step.buckets:
            if bucket.latest is not None:
                waits[bucket.latest] += bucket.latest_wait  # type: ignore[assignment]
    mebi = sum(step.nbytes for step in steps) / count / 2**20
    text = (
        f"{count} steps of {mebi:.3g} MiB in {sum(algorithms.values()) / count:.3g} buckets "
        f"({', '.join(f'{name} {n}' for name, n in algorithms.most_common())}); per step "
        f"{sum(step.waiting for step in steps) / count * 1e3:.3g} ms waiting for peers, "
        f"{sum(step.moving for step in steps) / count * 1e3:.3g} ms moving bytes"
    )
    formats = sorted({name for step in steps for each in step.buckets for name in each.formats})
    if formats:
        sent = sum(step.wire_bytes for step in steps) / count / 2**20
        text += f"; {sent:.3g} MiB sent as {', '.join(formats)}"
    if busy > 0:
        text += f", {sum(step.hidden for step in steps) / busy:.0%} of both behind backward"
    if waits:
        rank, seconds = waits.most_common(1)[0]
        text += f"; most waited for: rank {rank}, {seconds / count * 1e3:.3g} ms per step"
    return text
