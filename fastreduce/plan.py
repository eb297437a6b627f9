"""Does a training step fit? The memory of a rank, for the usual ways to share the work.

Bytes in, bytes out: nothing is measured here, and nothing depends on a machine. docs/plan.md has
the formulas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Literal

# GPUs of the largest group that is searched for.
MOST_GPUS = 1 << 16

Sharding = Literal["none", "optimizer", "all"]


@dataclass(frozen=True)
class State:
    """What training keeps of a whole model. Bytes.

    Attributes:
        weights: of all parameters.
        gradients: of those that are trained.
        optimizer: its state, and the float32 copy of narrower weights, where it steps one.
        served: the same as a parameter server keeps it, which always has that copy.
    """

    weights: int
    gradients: int
    optimizer: int
    served: int

    @property
    def total(self) -> int:
        """Of a rank that keeps all of it."""
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Work:
    """What a batch adds while it is computed. Bytes; see :class:`fastreduce.footprint.Pass`."""

    activations: int = 0
    inputs: int = 0
    temporary: int = 0


@dataclass(frozen=True)
class Memory:
    """Of one rank. Bytes; ``wire`` is what a wire format keeps: residuals and messages."""

    weights: int
    gradients: int
    optimizer: int
    wire: int = 0
    activations: int = 0
    inputs: int = 0
    temporary: int = 0

    @property
    def parameters(self) -> int:
        """Parameter memory: weights, gradients, the optimizer's state."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of it."""
        return self.parameters + self.wire + self.activations + self.inputs + self.temporary


@dataclass(frozen=True)
class Layout:
    """One way to share the work: how many ranks are alike, and what each of them does.

    Attributes:
        samples: that a rank computes at once; 0 where it computes nothing.
        memory: of one of these ranks.
    """

    name: str
    ranks: int
    samples: int
    memory: Memory


def micro_batch(batch: int, ranks: int, accumulation: int = 1) -> int:
    """Samples of the fullest rank at once."""
    return _divided(batch, ranks * accumulation)


def layouts(
    state: State,
    work: Callable[[int], Work],
    ranks: int,
    batch: int,
    *,
    accumulation: int = 1,
    wire: int = 0,
) -> list[Layout]:
    """One GPU; data parallel; the parameter server, shared out; and that of the textbooks, a worker
    and the server.

    Args:
        work: of so many samples at once.
        ranks: that compute; the textbook's server is one more.
        batch: samples of a step, over all ranks.
        accumulation: passes in which a rank computes its part of the batch.
        wire: bytes of a wire format on a data-parallel rank.
    """

    def layout(name: str, alike: int, optimizer: int, sharing: int, wire: int = 0) -> Layout:
        samples = micro_batch(batch, sharing, accumulation) if sharing else 0
        extra = work(samples) if sharing else Work()
        memory = Memory(state.weights, state.gradients, optimizer, wire, **vars(extra))
        return Layout(name, alike, samples, memory)

    return [
        layout("one GPU", 1, state.optimizer, 1),
        layout("data parallel", ranks, state.optimizer, ranks, wire),
        layout("server, sharded", ranks, _divided(state.served, ranks), ranks),
        layout("server, textbook: worker", ranks, 0, ranks),
        layout("server, textbook: server", 1, state.served, 0),
    ]


def enough_ranks(
    state: State, work: Callable[[int], Work], capacity: int, batch: int, accumulation: int = 1
) -> int | None:
    """The smallest number of data-parallel ranks, each with at least a sample, that have room."""
    ranks = range(1, batch // accumulation + 1)
    return _first(
        ranks, capacity, lambda count: _memory(state, work(micro_batch(batch, count, accumulation)))
    )


def enough_passes(
    state: State, work: Callable[[int], Work], capacity: int, batch: int, ranks: int
) -> int | None:
    """The smallest number of passes in which so many data-parallel ranks have room."""
    passes = range(1, batch // ranks + 1)
    return _first(
        passes, capacity, lambda count: _memory(state, work(micro_batch(batch, ranks, count)))
    )


def _memory(state: State, work: Work) -> Memory:
    return Memory(state.weights, state.gradients, state.optimizer, **vars(work))


def _first(counts: range, capacity: int, memory: Callable[[int], Memory]) -> int | None:
    """With which there is room; the larger the count, the less memory it takes."""
    at = bisect_left(counts, True, key=lambda count: memory(count).total <= capacity)
    return counts[at] if at < len(counts) else None


@dataclass(frozen=True)
class Shape:
    """A group of GPUs: ``data`` replicas, each of ``pipeline`` stages of ``tensor`` GPUs.

    Attributes:
        sharding: what the replicas share out among them: nothing, the optimizer's state (ZeRO 1),
            or everything (ZeRO 3, fully sharded).
        memory: of the fullest GPU.
    """

    data: int
    tensor: int
    pipeline: int
    sharding: Sharding
    memory: Memory

    @property
    def gpus(self) -> int:
        """Of the group."""
        return self.data * self.tensor * self.pipeline


def shape_memory(
    state: State,
    work: Work,
    layers: int,
    tensor: int,
    pipeline: int,
    sharding: Sharding,
    data: int,
) -> Memory:
    """Of the fullest GPU of a group.

    A stage has whole layers, all alike, of which tensor parallelism splits everything, activations
    too (as sequence parallelism does). Where everything is sharded, a GPU has the weights of two
    layers whole, one at work and the next one, and the gradients of one. A stage keeps the
    activations of as many passes as the pipeline has stages (1F1B): together, those of the whole
    model.
    """
    stage = _divided(layers, pipeline) / layers / tensor
    weights, gradients, optimizer = (
        part * stage for part in (state.weights, state.gradients, state.optimizer)
    )
    if sharding != "none":
        optimizer /= data
    if sharding == "all":
        layer = 1 / layers / tensor
        weights = min(weights, weights / data + min(layers, 2) * layer * state.weights)
        gradients = min(gradients, gradients / data + layer * state.gradients)
    return Memory(
        weights=round(weights),
        gradients=round(gradients),
        optimizer=round(optimizer),
        activations=round(work.activations / tensor),
        inputs=work.inputs,
        temporary=round(work.temporary / tensor),
    )


def smallest_shape(
    state: State,
    work: Work,
    capacity: int,
    batch: int,
    *,
    layers: int = 1,
    gpus_per_host: int = 8,
    shardings: Sequence[Sharding] = ("none", "optimizer", "all"),
    split: bool = True,
) -> Shape | None:
    """The smallest group whose GPUs have room, None if there is none of at most ``MOST_GPUS``.

    A group fills hosts or is part of one; tensor parallelism stays within a host and divides it; a
    pipeline has at most as many stages as layers, and each replica at least a sample for every
    stage. Of two of the same size the one with fewer stages is taken, then the one that splits
    fewer tensors, then the one that shards less.

    Args:
        work: of one sample, which is what a replica computes at once.
        capacity: bytes of a GPU.
        batch: samples of a step, over all replicas.
        shardings: that are tried.
        split: also by tensors and by stages.
    """
    best: Shape | None = None
    tensors = [n for n in range(1, gpus_per_host + 1) if gpus_per_host % n == 0]
    replicas = product(range(1, layers + 1), tensors) if split else [(1, 1)]
    for (pipeline, tensor), sharding in product(replicas, shardings):
        replica = pipeline * tensor
        most = min(batch // pipeline, (best.gpus - 1 if best else MOST_GPUS) // replica)
        memory = partial(shape_memory, state, work, layers, tensor, pipeline, sharding)
        counts = range(1 if sharding == "none" else 2, most + 1)
        first = _first(counts, capacity, memory)
        for data in range(first, most + 1) if first is not None else ():
            if data * replica <= gpus_per_host or data * replica % gpus_per_host == 0:
                best = Shape(data, tensor, pipeline, sharding, memory(data))
                break
    return best


def _divided(count: int, parts: int) -> int:
    return -(-count // parts)
