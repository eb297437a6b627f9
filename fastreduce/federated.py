"""Federated averaging: clients train alone, and what they have trained is averaged.

Clients are numbered from 0. Each rank is the home of a run of them, and keeps their state. Sums
over clients run over a fixed binary tree of their numbers, of which a rank's run is a branch on 1,
2, 4 or 8 ranks: where these share memory, results have the same bits however many there are, if the
sums of weights are exact (those of whole numbers are). On other numbers of ranks, and through the
process group, they are equal within the rounding of float32.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, TypeVar

import numpy
import torch
from torch import Tensor, nn

from fastreduce import weights
from fastreduce.bucket import BucketPlan
from fastreduce.communicator import Communicator, said_by_all

Batch = TypeVar("Batch")
IntegerBuffers = Literal["max", "first", "keep"]

_SPLITS = 1000


# -- who the clients are --------------------------------------------------------------------------


def sample(clients: int, count: int, *, seed: int, round: int) -> list[int]:
    """The clients that take part in a round, ascending: ``count`` of ``clients``, uniformly and
    without repetition. The same wherever it is called with the same arguments."""
    if not 1 <= count <= clients:
        raise ValueError(f"count: expected 1 to {clients}, the number of clients, got {count}")
    return sorted(random.Random(f"{seed} {round}").sample(range(clients), count))


def home(client: int, clients: int, parts: int) -> int:
    """The rank of a client, or its part where all clients are cut into so many runs. Their lengths
    differ by 1 at most; cutting each in two gives those of twice as many parts."""
    return ((client + 1) * parts - 1) // clients


def dirichlet_split(labels: Tensor, clients: int, alpha: float, *, seed: int) -> list[Tensor]:
    """Shares samples out so that clients have different labels: of each label, the clients get
    parts drawn from Dirichlet(alpha, ..., alpha), as Yurochkin et al. (2019, arXiv:1905.12022) do.
    With a large ``alpha`` all have all labels alike, with a small one a few each.

    Args:
        labels: of shape (n,), any type.
        alpha: more than 0.

    Returns:
        For each client the indices of its samples, ascending, int64. Each sample is one client's,
        and every client has one at least: parts are drawn again until that is so.

    Raises:
        ValueError: that cannot be, or has not come about in 1,000 draws.
    """
    if not 1 <= clients <= len(labels):
        raise ValueError(f"clients: expected 1 to {len(labels)}, the samples, got {clients}")
    if not alpha > 0:
        raise ValueError(f"alpha: expected more than 0, got {alpha}")
    draw = numpy.random.default_rng(seed)
    known = labels.numpy(force=True)
    for _ in range(_SPLITS):
        owner = numpy.empty(len(known), dtype=numpy.int64)
        for label in numpy.unique(known):
            its = draw.permutation(numpy.flatnonzero(known == label))
            ends = draw.dirichlet([alpha] * clients).cumsum() * len(its)
            owner[its] = numpy.searchsorted(ends[:-1], numpy.arange(len(its)), side="right")
        parts = [torch.from_numpy(numpy.flatnonzero(owner == each)) for each in range(clients)]
        if all(len(part) for part in parts):
            return parts
    raise ValueError(
        f"alpha: expected one with which {clients} clients get a sample each, got {alpha}: in "
        f"{_SPLITS} draws some client had none"
    )


# -- what they have in common ---------------------------------------------------------------------


class Average:
    """Weighted means and sums over clients of a list of tensors, in one all-reduce for each dtype.

    A rank adds its clients one after the other, in ascending order; then all ranks call
    :meth:`mean` or :meth:`sum`. Who has added none takes part with weight 0. Sums are made in
    float32 (of float64 tensors, in float64), and divided in the all-reduce's accumulator, before it
    rounds.

    Memory: a buffer of the tensors' elements and, while a rank adds M clients, up to log2(M) + 2
    more.

    Args:
        tensors: the tensors, or others of the same shapes and dtypes; of floating types, on one
            device; the same on all ranks. Those of :meth:`add` are contiguous.
        clients: how many there are, on all ranks together.
    """

    def __init__(self, communicator: Communicator, tensors: Sequence[Tensor], clients: int) -> None:
        if clients < 1:
            raise ValueError(f"clients: expected 1 or more, got {clients}")
        for tensor in tensors:
            if not tensor.is_floating_point():
                raise TypeError(f"tensors: expected floating types, got {tensor.dtype}")
        self.clients = clients
        self._communicator = communicator
        kinds = list(dict.fromkeys(tensor.dtype for tensor in tensors))
        self._members = [[n for n, t in enumerate(tensors) if t.dtype == kind] for kind in kinds]
        self._plans = [BucketPlan([tensors[n] for n in its]) for its in self._members]
        self._flats = [
            communicator.empty(
                plan.numel,
                dtype=torch.promote_types(kind, torch.float32),
                device=tensors[its[0]].device,
            )
            for kind, plan, its in zip(kinds, self._plans, self._members, strict=True)
        ]
        self._count = len(tensors)
        self.clear()

    def clear(self) -> None:
        """Drops what has been added."""
        # Branches of the tree, from left to right: the last client of each, and its sums.
        self._branches: list[tuple[int, list[Tensor]]] = []
        self._weight = 0.0
        self._last = -1

    def add(self, client: int, tensors: Sequence[Tensor], weight: float = 1.0) -> None:
        """Adds ``weight`` x the client's tensors: 0, whatever they hold, or 1e-30 to 1e30."""
        if not self._last < client < self.clients:
            raise ValueError(
                f"client: expected {self._last + 1} to {self.clients - 1}, in ascending order, "
                f"got {client}"
            )
        if home(client, self.clients, self._communicator.world_size) != self._communicator.rank:
            raise ValueError(
                f"client: expected one of rank {self._communicator.rank}'s, got {client}"
            )
        if len(tensors) != self._count:
            raise ValueError(f"tensors: expected {self._count}, got {len(tensors)}")
        weights.check("weight", weight)
        self._last = client
        if weight == 0:
            return
        leaf = [torch.empty_like(flat) for flat in self._flats]
        for plan, its, flat in zip(self._plans, self._members, leaf, strict=True):
            plan.pack([tensors[n].detach() for n in its], flat, weight)
        # A branch is whole once the next client is beyond the two that it would join.
        while len(self._branches) > 1 and self._depth(-2, self._branches[-1][0]) > self._depth(
            -1, client
        ):
            self._join()
        self._branches.append((client, leaf))
        self._weight += weight

    def mean(self) -> list[Tensor]:
        """sum(weight x tensor) / sum(weight) over the clients that all ranks have added; 0 where
        that is 0 / 0. Collective.

        Returns:
            In float32, or float64, of the tensors' shapes; they lie in memory that the next call
            overwrites.
        """
        return self._reduce(self._weight)

    def sum(self, denominator: float = 1.0) -> list[Tensor]:
        """sum(weight x tensor) / denominator, else as :meth:`mean`."""
        if not denominator > 0:
            raise ValueError(f"denominator: expected more than 0, got {denominator}")
        return self._reduce(denominator if self._communicator.rank == 0 else 0.0)

    def _reduce(self, divisor: float) -> list[Tensor]:
        while len(self._branches) > 1:
            self._join()
        own = self._branches[0][1] if self._branches else None
        self.clear()
        results: list[Tensor] = [torch.empty(0)] * self._count
        for number, (flat, plan) in enumerate(zip(self._flats, self._plans, strict=True)):
            if own is None:
                flat.zero_()
            else:
                # No -0.0: a rank without clients would make it 0.0, and bits depend on ranks.
                torch.add(own[number], 0.0, out=flat)
            self._communicator.all_reduce(
                flat, "mean", scale=0.0 if own is None else 1.0, weight=divisor
            )
            parts = flat.split([shape.numel() for shape in plan.shapes])
            for n, part, shape in zip(self._members[number], parts, plan.shapes, strict=True):
                results[n] = part.view(shape)
        return results

    def _join(self) -> None:
        last, right = self._branches.pop()
        _, left = self._branches.pop()
        torch._foreach_add_(left, right)
        self._branches.append((last, left))

    def _depth(self, branch: int, client: int) -> int:
        """How often all clients can be halved until that branch and the client are in two parts."""
        depth, other = 0, self._branches[branch][0]
        while home(other, self.clients, 2 << depth) == home(client, self.clients, 2 << depth):
            depth += 1
        return depth


class Snapshot:
    """Copies of tensors as they are now; put back where an error leaves its ``with``."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self.values = [tensor.clone() for tensor in self._tensors]

    def restore(self) -> None:
        """The tensors become what they were."""
        for tensor, value in zip(self._tensors, self.values, strict=True):
            tensor.copy_(value)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.restore()


class ClientState:
    """Tensors that a client keeps from round to round, each on its client's rank; zeros at first.

    Args:
        like: tensors of the shapes, dtypes and devices.
        clients: how many there are.
    """

    def __init__(self, communicator: Communicator, like: Sequence[Tensor], clients: int) -> None:
        self.clients = clients
        self._communicator, self._like = communicator, list(like)
        self._values: dict[int, list[Tensor]] = {}
        self._owners: set[int] = set()  # those that have some, on any rank

    def __getitem__(self, client: int) -> list[Tensor]:
        found = self._values.get(client)
        return [torch.zeros_like(each) for each in self._like] if found is None else found

    def update(self, values: Mapping[int, list[Tensor]], owners: Iterable[int]) -> None:
        """Replaces what this rank's clients keep; ``owners`` are those of all ranks."""
        self._values.update(values)
        self._owners.update(owners)

    def state_dict(self) -> dict[str, Any]:
        """What this rank's clients keep, by client."""
        return {"owners": sorted(self._owners), "clients": dict(self._values)}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Takes this rank's clients out of what all ranks have saved, however many they were.

        Raises:
            ValueError: a client of this rank had some that is not there.
        """
        owners = {client for state in states for client in state["owners"]}
        saved = {each: value for state in states for each, value in state["clients"].items()}
        own = [each for each in sorted(owners) if self._is_here(each)]
        if missing := [each for each in own if each not in saved]:
            raise ValueError(
                f"states: expected those of all ranks that saved, got none of clients {missing}"
            )
        self._owners = owners
        self._values = {
            client: [
                value.to(like, copy=True)
                for value, like in zip(saved[client], self._like, strict=True)
            ]
            for client in own
        }

    def _is_here(self, client: int) -> bool:
        at = home(client, self.clients, self._communicator.world_size)
        return at == self._communicator.rank


# -- algorithms -----------------------------------------------------------------------------------


class FedAvg(Generic[Batch]):
    """Federated averaging (McMahan et al., 2017, arXiv:1602.05629).

    A round, of sampled clients S with nₖ samples each and parameters x::

        yₖ ← x, then for each of its batches    yₖ ← yₖ - η g(yₖ)
        x ← Σ nₖ yₖ / Σ nₖ                      over k in S

    With one batch each, of all that a client has, that is data parallelism: a step of SGD on the
    mean over all samples.

    Parameters that need no gradient stay as they are. Buffers of floating types (batch
    normalisation's running statistics) are averaged with the parameters, likewise.

    Args:
        communicator: of ranks that have the same model; not closed here.
        model: a plain module, contiguous; becomes rank 0's. Between rounds it holds x.
        loss: ``loss(model, batch)``, the mean over the batch, to be differentiated.
        sizes: nₖ of every client, the same on all ranks.
        lr: η; may be set between rounds.
        integer_buffers: what becomes of buffers of other types (``num_batches_tracked``): ``max``
            over the sampled clients and the round's start, what the ``first`` sampled client has,
            or ``keep`` the round's start.

    Attributes:
        rounds: that have been completed.
    """

    def __init__(
        self,
        communicator: Communicator,
        model: nn.Module,
        loss: Callable[[nn.Module, Batch], Tensor],
        sizes: Sequence[float],
        *,
        lr: float,
        integer_buffers: IntegerBuffers = "max",
    ) -> None:
        if not sizes:
            raise ValueError("sizes: expected one for each client, got none")
        for size in sizes:
            weights.check("sizes", size)
        if integer_buffers not in ("max", "first", "keep"):
            raise ValueError(
                f'integer_buffers: expected "max", "first" or "keep", got {integer_buffers!r}'
            )
        self.communicator, self.model, self.loss = communicator, model, loss
        self.sizes, self.lr, self.integer_buffers = list(sizes), lr, integer_buffers
        self.rounds = 0
        self._parameters: list[Tensor] = [each for each in model.parameters() if each.requires_grad]
        if not self._parameters:
            raise ValueError("model: expected parameters that need a gradient, got none")
        buffers = list(model.buffers())
        if any(each.is_complex() for each in buffers):
            raise TypeError("model: expected no complex buffers")
        self._floating = [each for each in buffers if each.is_floating_point()]
        self._integers = [each for each in buffers if not each.is_floating_point()]
        self._average = Average(communicator, self._like(), len(self.sizes))
        for tensor in [*model.parameters(), *buffers]:
            communicator.broadcast(tensor.detach())

    def mine(self, sampled: Iterable[int]) -> list[int]:
        """Those of the clients whose home is this rank."""
        ranks, here = self.communicator.world_size, self.communicator.rank
        return [each for each in sampled if home(each, len(self.sizes), ranks) == here]

    @torch.no_grad()
    def round(
        self, batches: Callable[[int], Iterable[Batch]], sampled: Sequence[int] | None = None
    ) -> None:
        """Trains the sampled clients, and averages. Collective.

        Where it raises, model, state and ``rounds`` are those of the round's start. If a client's
        training has raised, all ranks do, and can go on with another round.

        Args:
            batches: what a client trains on in this round, a batch at least; called for this
                rank's clients, in ascending order.
            sampled: clients, ascending, the same on all ranks (see :func:`sample`); None for all.

        Raises:
            ValueError: ``sampled`` is not that; a client has no batch.
            RuntimeError: the training of another rank's client failed.
            CommunicatorError: see :mod:`fastreduce.errors`.
        """
        taking_part = self._checked(sampled)
        self._average.clear()
        changes: dict[int, list[Tensor]] = {}  # of the clients' state
        with Snapshot([*self._parameters, *self._floating, *self._integers]) as start:
            x = start.values[: len(self._parameters)]
            counts = self._counts()
            client = -1
            try:
                for client in self.mine(taking_part):
                    start.restore()
                    steps = self._train(client, batches(client), x)
                    message, changes[client] = self._finish(client, steps, x)
                    self._average.add(client, [*message, *self._floating], self._weight(client))
                    if self.integer_buffers == "max":
                        counts = torch.maximum(counts, self._counts())
                    elif self.integer_buffers == "first" and client == taking_part[0]:
                        counts = self._counts()
            except Exception:
                said_by_all(self.communicator, -1.0 - client)
                raise
            self._agree(taking_part)
            means = self._average.mean()
            self._share_counts(counts, taking_part[0])
            own = len(means) - len(self._floating)
            for buffer, mean in zip(self._floating, means[own:], strict=True):
                buffer.copy_(mean)
            for buffer, count in zip(
                self._integers, counts.split([b.numel() for b in self._integers]), strict=True
            ):
                buffer.copy_(count.view(buffer.shape))
            self._apply(x, means[:own], taking_part, changes)
        self.rounds += 1

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs beside the model's own ``state_dict()``, of this rank."""
        return {"rounds": self.rounds}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """Takes what all ranks have saved, one state for each; they need not be as many."""
        rounds = {state["rounds"] for state in states}
        if len(rounds) != 1:
            raise ValueError(f"states: expected those of one round, got rounds {sorted(rounds)}")
        [self.rounds] = rounds

    # -- what the algorithms differ in ------------------------------------------------------------

    def _like(self) -> list[Tensor]:
        """What a client sends is of these shapes and dtypes."""
        return [*self._parameters, *self._floating]

    def _weight(self, client: int) -> float:
        return self.sizes[client]

    def _direction(self, client: int, gradients: list[Tensor], x: list[Tensor]) -> list[Tensor]:
        """What a local step goes along."""
        return gradients

    def _finish(
        self, client: int, steps: int, x: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """After so many local steps: what a client sends, but for buffers, and what it keeps."""
        return list(self._parameters), []

    def _apply(
        self,
        x: list[Tensor],
        means: list[Tensor],
        sampled: Sequence[int],
        changes: Mapping[int, list[Tensor]],
    ) -> None:
        """The global step, out of the means of what clients have sent."""
        for parameter, mean in zip(self._parameters, means, strict=True):
            parameter.copy_(mean)

    # -- a round's parts --------------------------------------------------------------------------

    def _checked(self, sampled: Sequence[int] | None) -> list[int]:
        clients = len(self.sizes)
        given = list(range(clients) if sampled is None else sampled)
        if not given or given != sorted({*given} & {*range(clients)}):
            raise ValueError(
                f"sampled: expected some of 0 to {clients - 1}, in ascending order, got {given}"
            )
        if not any(self._weight(client) for client in given):
            raise ValueError(f"sampled: expected a client with samples, got {given}")
        return given

    def _train(self, client: int, batches: Iterable[Batch], x: list[Tensor]) -> int:
        """Local steps, of which it returns the number."""
        steps = 0
        for batch in batches:
            with torch.enable_grad():
                loss = self.loss(self.model, batch)
            gradients = torch.autograd.grad(
                loss, self._parameters, allow_unused=True, materialize_grads=True
            )
            direction = self._direction(client, list(gradients), x)
            torch._foreach_add_(self._parameters, direction, alpha=-self.lr)
            steps += 1
        if not steps:
            raise ValueError(f"batches: expected one at least, got none for client {client}")
        return steps

    def _counts(self) -> Tensor:
        """All integer buffers in one."""
        counts = [each.reshape(-1).to(torch.int64) for each in self._integers]
        return torch.cat(counts) if counts else torch.empty(0, dtype=torch.int64)

    def _share_counts(self, counts: Tensor, first: int) -> None:
        if not self._integers:
            return
        if self.integer_buffers == "max":
            self.communicator.all_reduce(counts, "max")
        elif self.integer_buffers == "first":
            root = home(first, len(self.sizes), self.communicator.world_size)
            self.communicator.broadcast(counts, root)

    def _agree(self, sampled: list[int]) -> None:
        """All ranks have trained their clients, and of the same sample."""
        said = said_by_all(self.communicator, zlib.crc32(repr((self.rounds, sampled)).encode()))
        for rank, number in enumerate(said):
            if number < 0:
                raise RuntimeError(
                    f"round {self.rounds}: training client {int(-1 - number)} failed on rank "
                    f"{rank}; the model is that of the round's start"
                )
        if len(set(said)) > 1:
            raise ValueError(
                f"sampled: expected the same clients on all ranks, which others than {sampled} "
                f"(in round {self.rounds}) have been given"
            )


class FedProx(FedAvg[Batch]):
    """FedAvg whose clients are drawn to the round's start (Li et al., 2020, arXiv:1812.06127)::

        y ← y - η (g(y) + μ (y - x))

    the gradient of the loss + μ/2 |y - x|². With μ = 0 it is FedAvg.

    Args:
        mu: μ, 0 or more.
        others: as for :class:`FedAvg`.
    """

    def __init__(self, *arguments: Any, mu: float, **others: Any) -> None:
        if not mu >= 0:
            raise ValueError(f"mu: expected 0 or more, got {mu}")
        super().__init__(*arguments, **others)
        self.mu = mu

    def _direction(self, client: int, gradients: list[Tensor], x: list[Tensor]) -> list[Tensor]:
        return [
            gradient + self.mu * (y - start)
            for gradient, y, start in zip(gradients, self._parameters, x, strict=True)
        ]


class Scaffold(FedAvg[Batch]):
    """SCAFFOLD (Karimireddy et al., 2020, arXiv:1910.06378): control variates correct the clients'
    drift, c for all and cᵢ for each client, zeros at first. With K batches of client i::

        y ← x, then for each batch    y ← y - η (g(y) - cᵢ + c)
        cᵢ⁺ = cᵢ - c + (x - y) / (K η)                     (the paper's option II)
        x ← x + η_g mean(y - x),  c ← c + 1/N Σ (cᵢ⁺ - cᵢ)    over S, of N clients in all

    The mean is one over clients, whatever their sizes. Twice FedAvg's bytes. c is the mean of all
    clients' cᵢ, whoever took part.

    Args:
        global_lr: η_g.
        others: as for :class:`FedAvg`.
    """

    def __init__(self, *arguments: Any, global_lr: float = 1.0, **others: Any) -> None:
        super().__init__(*arguments, **others)
        self.global_lr = global_lr
        self.c = [torch.zeros_like(each, requires_grad=False) for each in self._parameters]
        self.clients = ClientState(self.communicator, self.c, len(self.sizes))

    def state_dict(self) -> dict[str, Any]:
        """As FedAvg's, with c and what this rank's clients keep."""
        return {**super().state_dict(), "c": self.c, "clients": self.clients.state_dict()}

    def load_state_dict(self, *states: Mapping[str, Any]) -> None:
        """As FedAvg's. Raises ValueError: some rank's state is missing."""
        super().load_state_dict(*states)
        self.clients.load_state_dict(*(state["clients"] for state in states))
        for c, saved in zip(self.c, states[0]["c"], strict=True):
            c.copy_(saved)

    def _like(self) -> list[Tensor]:
        return [*self._parameters, *self._parameters, *self._floating]

    def _weight(self, client: int) -> float:
        return 1.0

    def _direction(self, client: int, gradients: list[Tensor], x: list[Tensor]) -> list[Tensor]:
        own = self.clients[client]
        return [g - ci + c for g, ci, c in zip(gradients, own, self.c, strict=True)]

    def _finish(
        self, client: int, steps: int, x: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        own = self.clients[client]
        moved = [y - start for y, start in zip(self._parameters, x, strict=True)]
        new = [
            ci - c - dy / (steps * self.lr) for ci, c, dy in zip(own, self.c, moved, strict=True)
        ]
        return [*moved, *(each - ci for each, ci in zip(new, own, strict=True))], new

    def _apply(
        self,
        x: list[Tensor],
        means: list[Tensor],
        sampled: Sequence[int],
        changes: Mapping[int, list[Tensor]],
    ) -> None:
        share = len(sampled) / len(self.sizes)  # of the mean over S in 1/N of the sum
        count = len(x)
        for y, start, dy in zip(self._parameters, x, means[:count], strict=True):
            y.copy_(start + self.global_lr * dy)
        for c, dc in zip(self.c, means[count:], strict=True):
            c.add_(dc, alpha=share)
        self.clients.update(changes, sampled)
