"""What encoding has lost of one parameter's gradients, and where that lies in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Residual:
    """What encoding has lost of one parameter's gradients on this rank and has not made up for yet:
    of what it ``sent``, and of what it ``reduced`` for all. In units of the mean's sum over the
    ranks: the update that is missing is the mean of all ranks' ``sent`` plus the sum of all ranks'
    ``reduced``. New values are written beside the old ones, and count once :meth:`turn` is called.

    Args:
        count: elements, in the order of the parameter's memory.
        dtype: float32 or bfloat16.
        device: the gradient's.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._sent = [torch.zeros(count, dtype=dtype, device=device) for _ in range(2)]
        self._reduced = [self._sent[0][:0]] * 2
        self.place = (0, 0, 0)  # see move()
        self.now = 0
        self.holds = False  # something, on whichever rank
        self.version = 0  # of the memory

    @property
    def sent(self) -> Tensor:
        return self._sent[self.now]

    @property
    def next(self) -> Tensor:
        """What ``sent`` will be."""
        return self._sent[1 - self.now]

    @property
    def reduced(self) -> Tensor:
        """Of all elements; a copy."""
        _, begin, end = self.place
        whole = torch.zeros_like(self.sent)
        whole[begin:end] = self._reduced[self.now]
        return whole

    def move(self, place: tuple[int, int, int], world_size: int) -> None:
        """From now on this rank reduces other elements, in other runs: ``place`` is the block, the
        first element, and the one after the last; none with 0, 0, 0. What it has kept back of those
        before, it will send."""
        _, first, last = self.place
        # Nothing is changed in its memory: until the step counts, all can be taken back.
        if first != last:
            self._sent[self.now] = self.sent.clone()
            self.sent[first:last] += self._reduced[self.now] * world_size
        _, begin, end = self.place = place
        self._reduced = [torch.zeros_like(self.sent[begin:end]) for _ in range(2)]
        self.version += 1

    def saved(self) -> tuple[Any, ...]:
        """All that :meth:`move` and :meth:`turn` change."""
        return (*self._sent, *self._reduced), self.place, self.now, self.holds

    def restore(self, saved: tuple[Any, ...]) -> None:
        """Becomes what it was when it was saved, if that was in the last step."""
        tensors, self.place, self.now, self.holds = saved
        self._sent, self._reduced = [*tensors[:2]], [*tensors[2:]]
        self.version += 1

    def set(self, sent: Tensor, reduced: Tensor, place: tuple[int, int, int]) -> None:
        """Takes over what was saved, of all elements; ``place`` as for :meth:`move`."""
        self.sent.copy_(sent)
        self.place = place
        _, begin, end = place
        self._reduced = [reduced[begin:end].to(self.sent).clone() for _ in range(2)]
        self.holds = True
        self.version += 1

    def tensors(self) -> tuple[Tensor, ...]:
        """All its memory."""
        return (*self._sent, *self._reduced)

    def addresses(self) -> tuple[int, int, int, int]:
        """As csrc/wire.h's Residuals: of the first element, whether or not this rank has it."""
        old, new = self.now, 1 - self.now
        before = self.place[1] * self.sent.element_size()
        return (
            self._sent[old].data_ptr(),
            self._sent[new].data_ptr(),
            self._reduced[old].data_ptr() - before,
            self._reduced[new].data_ptr() - before,
        )

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """It is used there, too, as long as it lives."""
        for each in self.tensors():
            each.record_stream(stream)

    def turn(self) -> None:
        """What is new becomes what is; what was is kept until the next step."""
        self.now = 1 - self.now
        self.holds = True

    def drain(self) -> None:
        """All of it has been sent, by every rank. Nothing is kept back any more, the rounding of
        the last mean to 16 bits neither."""
        self.holds = False
        self._reduced[self.now].zero_()
