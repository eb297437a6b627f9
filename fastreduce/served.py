"""What a rank keeps of which parameter, and where all ranks' parameters and gradients lie."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.futures import Future

from fastreduce.accumulation import NARROW, shaped
from fastreduce.communicator import Communicator
from fastreduce.errors import CommunicatorError
from fastreduce.norms import UNIT
from fastreduce.shares import Shares
from fastreduce.wire import key_of, part_of

_ALIGNED = 64  # bytes

Member = tuple[int, nn.Parameter]


class Dealing:
    """Which ranks serve, and what of a parameter: it depends neither on buckets nor on the rest.

    Args:
        servers: ranks, in ascending order.
        names: of the parameters.
        parameters: likewise.
    """

    def __init__(
        self, servers: Sequence[int], names: Sequence[str], parameters: Sequence[nn.Parameter]
    ) -> None:
        self.servers = list(servers)
        self._place = {rank: place for place, rank in enumerate(servers)}
        self._keys = [key_of(name) for name in names]
        self._counts = [parameter.numel() for parameter in parameters]

    def range_of(self, index: int, rank: int) -> tuple[int, int]:
        """A rank's elements of a parameter, in the order of its memory: whole units of its norm."""
        if rank not in self._place:
            return 0, 0
        count, place = self._counts[index], self._place[rank]
        _, begin, end = part_of(count, UNIT, self._keys[index], len(self.servers), place)
        return begin, end

    def shares(self, offsets: dict[int, int], ranks: int, begin: int, end: int) -> Shares:
        """Of a stretch of a buffer in which parameters begin at ``offsets``, in ascending order."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
        for rank in self.servers:
            for index, offset in offsets.items():
                first, last = self.range_of(index, rank)
                if first < last:
                    rows[rank].append((offset - begin + first, offset - begin + last))
        return Shares(end - begin, rows)


class Piece:
    """What a rank keeps of a parameter.

    Attributes:
        index: of the parameter, in the order of all groups.
        group: number of its group.
        begin, end: elements, in the order of the parameter's memory.
        memory: of the parameter, these elements.
        weights: these elements: the parameter itself, or a copy where another rank serves them.
        master: in float32, where the parameter, or what of it is sent, is narrower.
        moments: the optimizer's state by name.

    Args:
        memory: the parameter, flat.
        narrow: what parameters are rounded to as they are sent, if to anything.
        mirrors: it is another rank's.
    """

    def __init__(
        self,
        index: int,
        group: int,
        parameter: nn.Parameter,
        memory: Tensor,
        place: tuple[int, int],
        narrow: torch.dtype | None,
        mirrors: bool,
    ) -> None:
        self.index, self.group, self.parameter = index, group, parameter
        self.begin, self.end = place
        self.memory = memory[self.begin : self.end]
        self.weights = self.memory.clone() if mirrors else self.memory
        self.mirrors = mirrors
        self._narrow = narrow
        self.master = None if narrow is None else self.weights.to(torch.float32, copy=True)
        self.moments: dict[str, Tensor] = {}
        self._version = -1  # of the parameter, as the last step has left it

    @property
    def exact(self) -> Tensor:
        """What is updated."""
        return self.weights if self.master is None else self.master

    def rounded(self) -> Tensor:
        """What is updated, as the parameter will be."""
        if self.master is None:
            return self.weights
        assert self._narrow is not None
        return self.master.to(self._narrow).to(self.weights.dtype)

    def take(self, master: Tensor | None) -> None:
        """The exact values of the whole parameter have been loaded; None: they are its own."""
        if self.mirrors:
            self.weights.copy_(self.memory)
        if self.master is not None:
            whole = self.parameter.detach() if master is None else master
            self.master.copy_(self.part(whole))
        self._version = -1  # whether these are of the same training as the parameter, is seen later

    def adopt(self) -> None:
        """Where somebody else has changed the parameter, so become the copies."""
        if self._version == self.parameter._version:
            return
        if self.mirrors:
            self.weights.copy_(self.memory)
        if self.master is not None:
            others = self.weights != self.rounded()
            self.master[others] = self.weights[others].float()

    def leave(self) -> None:
        """What is done to the parameter from now on, somebody else does."""
        self._version = self.parameter._version

    def moment(self, name: str) -> Tensor:
        """The state of that name; zeros at first."""
        if name not in self.moments:
            self.moments[name] = torch.zeros_like(self.exact)
        return self.moments[name]

    def part(self, whole: Tensor) -> Tensor:
        """These elements of something of the parameter's shape."""
        memory = torch.empty(self.parameter.numel(), dtype=whole.dtype)
        shaped(memory, self.parameter).copy_(whole)
        return memory[self.begin : self.end]

    def addresses(self, gradient: Tensor, names: Sequence[str]) -> tuple[int, ...]:
        """Of a row of ``_C.Update``; ``gradient`` is the parameter's, flat."""
        at = gradient.data_ptr() + self.begin * gradient.element_size()
        state = [self.moment(name).data_ptr() for name in names] + [0] * (2 - len(names))
        if self.master is None or self.weights.dtype == self.master.dtype:
            return at, self.exact.data_ptr(), 0, *state
        return at, self.weights.data_ptr(), self.master.data_ptr(), *state


class Flat:
    """Parameters of one dtype one after the other, and their gradients likewise.

    Attributes:
        weights: parameters.
        sent: what of them is sent: themselves, or something narrower.
        narrow: to what parameters are rounded from what is updated, if to anything.

    Args:
        communicator: of the ranks.
        members: numbers and parameters, which are moved there, in about the order in which their
            gradients are computed.
        dealing: who serves what.
        gradients: whether these have such memory, too.
        sent: memory that peers can map.
    """

    def __init__(
        self,
        communicator: Communicator,
        members: list[Member],
        dealing: Dealing,
        gradients: bool,
        sent: Tensor,
    ) -> None:
        dtype = members[0][1].dtype
        self.members = members
        self.offsets: dict[int, int] = {}
        self._places: dict[int, slice] = {}
        count = 0
        for index, parameter in members:
            self.offsets[index] = count
            self._places[index] = slice(count, count + parameter.numel())
            count += parameter.numel()
        self.sent = sent
        self.weights = sent if sent.dtype == dtype else torch.empty(count, dtype=dtype)
        for index, parameter in members:
            data = shaped(self.of(self.weights, index), parameter)
            data.copy_(parameter.detach())
            parameter.data = data
        self.gradients = communicator.empty(count, dtype=dtype).zero_() if gradients else None
        self.narrow = sent.dtype if sent.dtype in NARROW else None
        self.shares = dealing.shares(self.offsets, communicator.world_size, 0, count)

    def of(self, flat: Tensor, index: int) -> Tensor:
        """A parameter's part of something like this."""
        return flat[self._places[index]]

    def round(self) -> None:
        """Parameters become what they are once they have been sent."""
        if self.sent is not self.weights:
            self.weights.copy_(self.sent.copy_(self.weights))


class Memory:
    """All parameters that are served, dtype by dtype, sent at once: all arrive, or none.

    Args:
        communicator, dealing, gradients: as for :class:`Flat`.
        members: likewise, by dtype.
        narrow: as what float32 parameters are sent, if not as they are.
    """

    def __init__(
        self,
        communicator: Communicator,
        members: Mapping[torch.dtype, list[Member]],
        dealing: Dealing,
        gradients: bool,
        narrow: torch.dtype | None,
    ) -> None:
        self._communicator = communicator
        end = 0
        places = []
        for dtype, own in members.items():
            sent = narrow if narrow is not None and dtype == torch.float32 else dtype
            begin = -(-end // _ALIGNED) * _ALIGNED
            end = begin + sum(parameter.numel() for _, parameter in own) * sent.itemsize
            places.append((own, sent, begin, end))
        self._bytes = communicator.empty(end, dtype=torch.uint8)
        rows: list[list[tuple[int, int]]] = [[] for _ in range(communicator.world_size)]
        self.flats: list[Flat] = []
        for own, sent, begin, after in places:
            memory = self._bytes[begin:after].view(sent)
            flat = Flat(communicator, own, dealing, gradients, memory)
            for row, ranges in zip(rows, flat.shares.ranges, strict=True):
                row += [(begin + a * sent.itemsize, begin + b * sent.itemsize) for a, b in ranges]
            self.flats.append(flat)
        self._shares = Shares(end, rows)

    def spread(self, pieces: Iterable[Piece]) -> None:
        """Everybody gets what others have updated. ``pieces``: this rank's own."""
        apart = [flat for flat in self.flats if flat.sent is not flat.weights]
        for piece in pieces:
            for flat in apart:
                if piece.index in flat.offsets:
                    flat.of(flat.sent, piece.index)[piece.begin : piece.end] = piece.exact
        failure = None
        try:
            self._communicator.all_gather_v(self._bytes, self._shares)
        except CommunicatorError as error:
            if not error.ran:
                raise
            failure = error  # others' memory has been read, also that of a rank that dies
        for flat in apart:
            flat.weights.copy_(flat.sent)
        if failure is not None:
            raise failure


@dataclass
class Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        gradients: flat.
        members: numbers and parameters, in order.
        waiting: numbers of those whose gradients are not there yet.
        work: the reduction, once it has begun.
    """

    gradients: Tensor
    shares: Shares
    members: list[Member]
    waiting: set[int] = field(default_factory=set)
    work: Future[Tensor] | None = None


def buckets_of(
    flat: Flat, dealing: Dealing, ranks: int, nbytes: int
) -> tuple[list[Bucket], dict[int, Bucket]]:
    """A flat buffer's gradients cut into buckets of about so many bytes; and by parameter."""
    assert flat.gradients is not None
    buckets: list[Bucket] = []
    members: list[Member] = []
    for member in [*flat.members, None]:
        size = sum(parameter.nbytes for _, parameter in members)
        if members and (member is None or size + member[1].nbytes > nbytes):
            begin = flat.offsets[members[0][0]]
            end = flat.offsets[members[-1][0]] + members[-1][1].numel()
            offsets = {index: flat.offsets[index] for index, _ in members}
            shares = dealing.shares(offsets, ranks, begin, end)
            buckets.append(Bucket(flat.gradients[begin:end], shares, members))
            members = []
        if member is not None:
            members.append(member)
    return buckets, {index: bucket for bucket in buckets for index, _ in bucket.members}
