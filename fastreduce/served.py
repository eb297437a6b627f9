"""Which parameters lie in one bucket of a parameter server, and what of them a rank serves."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastreduce.accumulation import NARROW, shaped
from fastreduce.communicator import Communicator, Work

UNIT = 1024  # elements: what a rank serves begins with one of norm.h's units


@dataclass
class Piece:
    """What a rank serves of a parameter: elements in the order of its memory.

    Attributes:
        index: of the parameter, in the order of all groups.
        begin, end: of the parameter's elements.
        offset: of the first one in the rank's shard of the bucket.
    """

    index: int
    begin: int
    end: int
    offset: int

    @property
    def place(self) -> slice:
        """In the shard."""
        return slice(self.offset, self.offset + self.end - self.begin)


class Bucket:
    """Parameters of one group and dtype, one after the other, and their gradients likewise.

    Args:
        communicator: of the ranks, which serve equal parts.
        group: the group's number.
        members: numbers and parameters. Parameters are moved into the bucket's memory.
    """

    def __init__(
        self, communicator: Communicator, group: int, members: list[tuple[int, nn.Parameter]]
    ) -> None:
        ranks, rank = communicator.world_size, communicator.rank
        dtype = members[0][1].dtype
        total = sum(parameter.numel() for _, parameter in members)
        self.group = group
        self.members = members
        self.count = -(-total // (UNIT * ranks)) * UNIT  # elements that a rank serves
        self.weights = communicator.empty(self.count * ranks, dtype=dtype)
        self.gradients = communicator.empty(self.count * ranks, dtype=dtype)
        self.weights[total:] = 0
        self.gradients.zero_()
        first = rank * self.count
        self.own_weights = self.weights[first : first + self.count]
        self.own_gradients = self.gradients[first : first + self.count]
        narrow = dtype in NARROW
        self.offsets: dict[int, int] = {}
        self.pieces: list[Piece] = []
        offset = 0
        for index, parameter in members:
            self.offsets[index] = offset
            data = self.view(self.weights, index, parameter)
            data.copy_(parameter.detach())
            parameter.data = data
            begin = max(first, offset) - offset
            end = min(first + self.count, offset + parameter.numel()) - offset
            if begin < end:
                self.pieces.append(Piece(index, begin, end, offset + begin - first))
            offset += parameter.numel()
        self.master = self.own_weights.float() if narrow else None
        self.versions: list[int] = []  # of the parameters, as the last step has left them
        self.moments: dict[str, Tensor] = {}
        self.waiting: set[int] = set()
        self.work: Work | None = None
        self.reduced = False

    def view(self, flat: Tensor, index: int, parameter: nn.Parameter) -> Tensor:
        """A parameter's part of something like the bucket, in its shape."""
        begin = self.offsets[index]
        return shaped(flat[begin : begin + parameter.numel()], parameter)

    def adopt(self) -> None:
        """Where somebody has changed 16-bit parameters, so becomes the copy in float32."""
        if self.master is not None and self.versions != self._versions():
            others = self.own_weights != self.master.to(self.own_weights.dtype)
            self.master[others] = self.own_weights[others].float()

    def leave(self) -> None:
        """What is done to parameters from now on, somebody else does."""
        if self.master is not None:
            self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [parameter._version for _, parameter in self.members]

    def moment(self, name: str) -> Tensor:
        """The shard's state of that name; zeros at first."""
        if name not in self.moments:
            dtype = torch.float32 if self.master is not None else self.weights.dtype
            self.moments[name] = torch.zeros(self.count, dtype=dtype)
        return self.moments[name]
