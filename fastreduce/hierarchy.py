"""All-reduce over several hosts: sums inside each by our kernels, between them through gloo.

A tensor passes in pieces through three steps, which overlap from piece to piece:

1. inside: every host adds up its ranks' tensors, each rank a share of them (reduce-scatter);
2. between: ranks that have the same share exchange theirs, each pair of hosts over connections of
   its own, and reduce a part of it each (reduce-scatter and all-gather);
3. inside: every rank gets its mates' shares (all-gather).

A host sends 2 (H - 1) / H of the tensor's bytes, for H hosts, however many ranks it has.

Sums run over the same tree of ranks as on one host where the hosts' ranks are neighbours, as many
on each host, a power of two; on the last one there may be fewer. Otherwise over the ranks of each
host, and then over the hosts.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.futures import Future

from fastreduce import policy
from fastreduce.exchange import EXIT_SECONDS, Lane, abort, connect_gloo, end
from fastreduce.process_group import Done, ProcessGroupTransport, as_timedelta, fail
from fastreduce.shares import Shares
from fastreduce.weights import Weight, agreed, announcement

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fastreduce.communicator import Communicator

# Small enough for steps to overlap, large enough for a link to be busy.
PIECE_BYTES = 2 * policy.MIB
_ALIGNED = 64  # elements: shares begin at cache lines


@dataclass(frozen=True)
class Hosts:
    """Which ranks run on which host. ``members``: of each host, in ascending order."""

    members: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, keys: Sequence[object]) -> Hosts:
        """Out of what tells every rank's host from others."""
        found: dict[object, list[int]] = {}
        for rank, key in enumerate(keys):
            found.setdefault(key, []).append(rank)
        return cls(tuple(tuple(ranks) for ranks in found.values()))

    def host_of(self, rank: int) -> int:
        return next(host for host, ranks in enumerate(self.members) if rank in ranks)

    @property
    def columns(self) -> int:
        """Shares of a piece: as many as the largest host has ranks."""
        return max(map(len, self.members))

    def owner(self, host: int, column: int) -> int:
        """The rank of the host that has that share."""
        ranks = self.members[host]
        return ranks[column % len(ranks)]

    @property
    def keep_order(self) -> bool:
        """Whether sums inside hosts, and then over hosts, are the tree's over all ranks."""
        first = len(self.members[0])
        following = [rank for ranks in self.members for rank in ranks]
        return (
            following == list(range(len(following)))
            and first & (first - 1) == 0
            and all(len(ranks) == first for ranks in self.members[:-1])
            and len(self.members[-1]) <= first
        )


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Neighbours pairwise, level by level, an odd one carried up; in place of the first ones."""
    level = list(parts)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        level = [one.add_(other) for one, other in pairs] + level[len(level) & ~1 :]
    return level[0]


def split(count: int, parts: int) -> list[tuple[int, int]]:
    """First and last bounds of so many nearly equal, aligned parts of ``count`` elements."""
    each = -(-count // parts // _ALIGNED) * _ALIGNED
    return [(min(part * each, count), min((part + 1) * each, count)) for part in range(parts)]


class _Piece:
    """What of a piece of ``count`` elements is whose.

    Attributes:
        shares: of the ranks of this host.
        columns: begin and end of every share.
    """

    def __init__(self, count: int, hosts: Hosts, host: int) -> None:
        self.columns = split(count, hosts.columns)
        own = hosts.members[host]
        self.shares = Shares(
            count,
            [
                [each for c, each in enumerate(self.columns) if hosts.owner(host, c) == rank]
                for rank in own
            ],
        )


class HierarchicalTransport(ProcessGroupTransport):
    """A process group over several hosts, whose all-reduces of floating tensors on CPUs take the
    three steps; all else goes through its backend. Creating one is collective.

    Args:
        hosts: of all ranks.
        inside: communicators of this host's ranks, one for each of the steps inside.
    """

    def __init__(
        self,
        group: ProcessGroup | None,
        rank: int,
        hosts: Hosts,
        inside: tuple[Communicator, Communicator],
        timeout: timedelta,
    ) -> None:
        super().__init__(group)
        self.hosts = hosts
        self._rank = rank
        self._host = hosts.host_of(rank)
        self._inside, self._gathers = inside
        token = self.all_gather_object(uuid.uuid4().hex)[0]
        groups = [connect_gloo(f"fastreduce-{token}", rank, self._world_size, timeout)]
        lanes = [Lane(f"fastreduce-{name}") for name in ("inside", "between", "gather")]
        self._groups, self._lanes = groups, lanes
        self._pieces: dict[int, _Piece] = {}
        self._memory: dict[tuple[int, int, torch.dtype], list[Tensor]] = {}
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._last = weakref.finalize(self, end, groups, lanes, EXIT_SECONDS)

    @cached_property
    def _columns(self) -> list[int]:
        """Whose shares this rank has."""
        return [
            column
            for column in range(self.hosts.columns)
            if self.hosts.owner(self._host, column) == self._rank
        ]

    def takes(self, tensor: Tensor, op: str) -> bool:
        """Whether an all-reduce of it goes by hosts."""
        return tensor.is_cpu and tensor.is_floating_point() and op in ("sum", "mean")

    def algorithm(self, tensor: Tensor, op: str) -> str:
        return "hierarchical" if self.takes(tensor, op) else super().algorithm(tensor, op)

    def keeps_order(self, tensor: Tensor, op: str) -> bool:
        return self.takes(tensor, op) and self.hosts.keep_order

    def close(self, *, drain: bool = True) -> None:
        super().close()
        if self._last.detach() is None:
            return
        if drain:
            end(self._groups, self._lanes)
        for communicator in (self._inside, self._gathers):
            communicator._close(drain=drain)
        if not drain and abort(self._groups):
            end(self._groups, self._lanes)

    # -- calls --------------------------------------------------------------------------------

    def all_reduce(
        self,
        tensor: Tensor,
        op: str,
        async_op: bool,
        scale: float,
        weight: Weight | None = None,
    ) -> Any:
        if not self.takes(tensor, op):
            return super().all_reduce(tensor, op, async_op, scale, weight)
        future: Future[Tensor] = Future()
        self._begin(future, tensor, op, scale, weight, [], None)
        if async_op:
            return _Promised(future)
        future.wait()
        return None

    def all_reduce_future(
        self,
        future: Future[Tensor],
        tensor: Tensor,
        op: str,
        scale: float,
        weight: Weight | None,
        errors: list[Exception],
        done: Done | None = None,
    ) -> None:
        if not self.takes(tensor, op):
            super().all_reduce_future(future, tensor, op, scale, weight, errors, done)
            return
        self._begin(future, tensor, op, scale, weight, errors, done)

    def _begin(
        self,
        future: Future[Tensor],
        tensor: Tensor,
        op: str,
        scale: float,
        weight: Weight | None,
        errors: list[Exception],
        done: Done | None,
    ) -> None:
        """Queues all pieces; the last one completes the Future."""
        _ = self._group  # raises if this is closed
        guarded = partial(self._guarded, future, errors)
        call = _Call(self, tensor.detach(), op, weight)
        inside, between, gather = self._lanes
        flat, count = call.flat, call.flat.numel()
        each = PIECE_BYTES // flat.element_size()
        begins = range(0, max(count, 1), each)

        def finish() -> None:
            call.finish()
            if done is not None:
                done(call.total, None)
            future.set_result(tensor)

        def step(begin: int) -> None:
            piece = flat[begin : begin + each]
            last = begin == begins[-1]
            if piece.numel():
                self._reduce_inside(piece, scale)
            between.put(guarded(lambda: exchange(piece, last)))

        def exchange(piece: Tensor, last: bool) -> None:
            if piece.numel():
                self._reduce_between(piece, call.factor)
            gather.put(guarded(lambda: spread(piece, last)))

        def spread(piece: Tensor, last: bool) -> None:
            if piece.numel():
                self._gather_inside(piece)
            if last:
                finish()

        between.put(guarded(call.prepare))
        for begin in begins:
            inside.put(guarded(partial(step, begin)))

    def _guarded(
        self, future: Future[Tensor], errors: list[Exception], step: Callable[[], None]
    ) -> Callable[[], None]:
        """After an error all steps end with it, those of other calls too."""

        def run() -> None:
            try:
                if self._error is not None:
                    raise RuntimeError(f"an earlier call has failed: {self._error}")
                step()
            except Exception as error:
                with self._lock:  # steps of one call can fail on several threads
                    self._error = self._error or error
                    if not future.done():
                        fail(future, error, errors)

        return run

    # -- steps --------------------------------------------------------------------------------

    def _piece(self, count: int) -> _Piece:
        found = self._pieces.get(count)
        if found is None:
            found = self._pieces[count] = _Piece(count, self.hosts, self._host)
        return found

    def _reduce_inside(self, piece: Tensor, scale: float) -> None:
        shares = self._piece(piece.numel()).shares
        self._inside.reduce_scatter_v(piece, shares, op="sum", scale=scale, here=True)

    def _gather_inside(self, piece: Tensor) -> None:
        self._gathers.all_gather_v(piece, self._piece(piece.numel()).shares)

    def _reduce_between(self, piece: Tensor, factor: float) -> None:
        """Of every share that this rank has, it reduces one host's part: receives come first, as in
        Exchange."""
        columns = self._piece(piece.numel()).columns
        hosts = len(self.hosts.members)
        group = self._groups[0]
        out: list[Any] = []
        back: list[Any] = []
        tasks = []
        for column in self._columns:
            begin, last = columns[column]
            share = piece[begin:last]
            parts = [share[a:b] for a, b in split(share.numel(), hosts)]
            arrived = self._room(parts[self._host], hosts, column)
            tasks.append((column, parts, arrived))
        for column, parts, arrived in tasks:
            for host in self._others():
                peer = self.hosts.owner(host, column)
                out += _receive(group, arrived[host], peer, 2 * column)
                # Over what is sent: it comes once the peer has that.
                back += _receive(group, parts[host], peer, 2 * column + 1)
        for column, parts, _ in tasks:
            for host in self._others():
                out += _send(group, parts[host], self.hosts.owner(host, column), 2 * column)
        for work in out:
            work.wait()
        for column, parts, arrived in tasks:
            own = parts[self._host]
            terms = [own if host == self._host else arrived[host] for host in range(hosts)]
            torch.mul(tree_sum(terms), factor, out=own)
            for host in self._others():
                peer = self.hosts.owner(host, column)
                back += _send(group, own, peer, 2 * column + 1)
        for work in back:
            work.wait()

    def _sum_of(self, weight: Weight) -> float:
        parts = torch.tensor(announcement(weight), dtype=torch.float64)
        self._groups[0].allreduce([parts]).wait()
        return agreed(parts)

    def _others(self) -> list[int]:
        """Hosts; each begins with another one."""
        hosts = len(self.hosts.members)
        return [(self._host + hop) % hosts for hop in range(1, hosts)]

    def _room(self, like: Tensor, number: int, column: int) -> list[Tensor]:
        """Kept for the next piece of that size."""
        key = (column, like.numel(), like.dtype)
        found = self._memory.get(key)
        if found is None:
            found = self._memory[key] = [torch.empty_like(like) for _ in range(number)]
        return found


def _receive(group: Any, tensor: Tensor, peer: int, tag: int) -> list[Any]:
    return [group.recv([tensor], peer, tag)] if tensor.numel() else []


def _send(group: Any, tensor: Tensor, peer: int, tag: int) -> list[Any]:
    return [group.send([tensor], peer, tag)] if tensor.numel() else []


class _Call:
    """One all-reduce: what is passed through the steps, and what it comes to."""

    def __init__(
        self,
        transport: HierarchicalTransport,
        tensor: Tensor,
        op: str,
        weight: Weight | None,
    ) -> None:
        self._transport = transport
        self._tensor = tensor
        self._op, self._weight = op, weight
        # 16-bit floats are summed in float32, and rounded once.
        narrow = tensor.dtype in (torch.float16, torch.bfloat16)
        self.flat = (tensor.float() if narrow else tensor).view(-1)
        self.total = float(transport._world_size)
        self.factor = 1.0

    def prepare(self) -> None:
        """Between the hosts: what the sum is multiplied by."""
        if self._weight is not None:
            self.total = self._transport._sum_of(self._weight)
        if self._op == "mean":
            self.factor = 1 / self.total if self.total else 0.0

    def finish(self) -> None:
        if self.flat.dtype != self._tensor.dtype:
            self._tensor.view(-1).copy_(self.flat)


class _Promised:
    """The work of a call that has a Future."""

    def __init__(self, future: Future[Tensor]) -> None:
        self._future = future

    def wait(self, timeout: float | timedelta | None = None) -> None:
        if timeout is not None and not self.is_completed():
            ended = threading.Event()
            self._future.add_done_callback(lambda _: ended.set())
            seconds = as_timedelta(timeout).total_seconds()
            if not ended.wait(seconds):
                raise TimeoutError(f"the call has not completed after {seconds} s")
        self._future.wait()

    def is_completed(self) -> bool:
        return self._future.done()
