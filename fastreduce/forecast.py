"""What will communication cost? Seconds of a step, from links, gradients and the time of backward.

Everything here is pure, and an estimate; docs/plan.md has the formulas.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from fastreduce import _C, enums, lowrank, policy
from fastreduce.encoding import selected_bytes
from fastreduce.footprint import Gradient
from fastreduce.policy import MIB, GpuTopology
from fastreduce.wire import FP32, NATIVE, SELECTED, SMALL_BYTES, Policy, Wire

# DDP's first bucket, which is small so that communication begins early.
FIRST_BUCKET_BYTES = MIB
# Communication counts as hidden while it makes a step longer by less than this share.
NOTICEABLE = 0.05
# Ranks up to which is searched for the end of that.
MOST_RANKS = 4096


@dataclass(frozen=True)
class Link:
    """Between ranks, or between hosts.

    Attributes:
        bandwidth: of one rank, or of one host, in one direction, bytes/s.
        latency: of a message, seconds.
        source: where these two come from.
        topology: of GPUs, for which fastreduce's own estimates hold; else a ring is assumed, which
            gets the whole bandwidth.
    """

    bandwidth: float
    latency: float
    source: str
    topology: GpuTopology | None = None

    def ring(self, nbytes: float, ranks: int) -> float:
        """Seconds of an all-reduce in a ring."""
        moved = policy.link_bytes("ring", nbytes, ranks)  # type: ignore[arg-type]
        return moved / self.bandwidth + policy.flags("ring", ranks) * self.latency

    def call(self, nbytes: float, messages: int) -> float:
        """Seconds of a process group's call that moves so many bytes over it, in so many messages
        one after the other."""
        if self.topology is None:
            return nbytes / self.bandwidth + messages * self.latency
        plain = replace(self.topology, multicast=False)
        # An all-reduce of two ranks moves what it is of.
        return policy.expected_seconds("process_group", round(nbytes), 2, plain)


def _nvlink(bandwidth: float, multicast: bool, source: str) -> Link:
    topology = GpuTopology("switch", multicast=multicast, bandwidth=bandwidth)
    return Link(bandwidth, topology.signal, source, topology)


def _pcie(bandwidth: float, source: str) -> Link:
    topology = GpuTopology("pcie", bandwidth=bandwidth, signal=2.0e-6)
    return Link(bandwidth, topology.signal, source, topology)


def _network(gigabits: float, latency: float) -> Link:
    return Link(gigabits / 8 * 1e9, latency, "nominal rate of the line; latency assumed")


LINKS = {
    "nvlink-h100": _nvlink(390e9, True, "published for copies, docs/gpu.md [7]; signals assumed"),
    "nvlink-a100": _nvlink(300e9, False, "nominal, 12 links of 25 GB/s; signals assumed"),
    "pcie3": _pcie(15.75e9, "nominal, 16 lanes; signals assumed"),
    "pcie4": _pcie(31.5e9, "nominal, 16 lanes; signals assumed"),
    "pcie5": _pcie(63.0e9, "nominal, 16 lanes; signals assumed"),
    "1gbe": _network(1, 50e-6),
    "10gbe": _network(10, 30e-6),
    "25gbe": _network(25, 30e-6),
    "100gbe": _network(100, 30e-6),
    "hdr200": _network(200, 5e-6),
    "ndr400": _network(400, 5e-6),
}


@dataclass(frozen=True)
class Blocks:
    """What the kernels reduce in a wire format.

    Attributes:
        elements: of which residuals are kept.
        payload: bytes of all of it, encoded.
    """

    elements: int
    payload: int

    def sent(self, ranks: int) -> float:
        """Bytes from one rank to all others."""
        return 2 * self.payload * (ranks - 1) / ranks

    def memory(self, ranks: int) -> float:
        """Bytes: residuals in float32, now and next, of what it sends and of what it reduces; three
        messages of everything, and one of its part."""
        return 8 * self.elements * (1 + 1 / ranks) + self.payload * (3 + 1 / ranks)

    def way(self, cluster: Cluster) -> tuple[str, float]:
        """The algorithm, and its seconds."""
        return "all_to_all, all_gather", cluster.exchange(self.payload)


@dataclass(frozen=True)
class Chosen:
    """Some of the elements, from every rank to all.

    Attributes:
        elements: of which residuals are kept.
        message: bytes of a rank's.
    """

    elements: int
    message: int

    def sent(self, ranks: int) -> float:
        """See :class:`Blocks`."""
        return self.message * (ranks - 1)

    def memory(self, ranks: int) -> float:
        """Residuals, and all messages beside the own one."""
        return 8 * self.elements + self.message * (ranks + 1)

    def way(self, cluster: Cluster) -> tuple[str, float]:
        """See :class:`Blocks`."""
        return "all_gather", cluster.gather(self.message * cluster.ranks)


@dataclass(frozen=True)
class Factored:
    """Matrices in low rank, one after the other.

    Attributes:
        elements: of which residuals are kept.
        factors: of each matrix, the left and the right one's elements, of float32.
        rest: what is no matrix, and travels as it is.
    """

    elements: int
    factors: tuple[tuple[int, int], ...]
    rest: Blocks | None

    def sent(self, ranks: int) -> float:
        """See :class:`Blocks`."""
        rest = self.rest.sent(ranks) if self.rest else 0.0
        return rest + sum(lowrank.sent_bytes(*both, ranks) for both in self.factors)

    def memory(self, ranks: int) -> float:
        """Residuals, the right factors of two steps, and the rest's messages."""
        rest = self.rest.memory(ranks) if self.rest else 0.0
        return rest + 8 * (self.elements + sum(right for _, right in self.factors))

    def way(self, cluster: Cluster) -> tuple[str, float]:
        """Both factors are reduced, and the left one is sent out once more: half an all-reduce."""
        seconds = self.rest.way(cluster)[1] if self.rest else 0.0
        for left, right in self.factors:
            seconds += 1.5 * cluster.all_reduce(4 * left)[1] + cluster.all_reduce(4 * right)[1]
        return "factors", seconds


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together.

    Attributes:
        elements, nbytes: of all of them.
        ready: the share of backward after which all are there.
        encoded: in the wire format; None where they travel as they are.
    """

    elements: int
    nbytes: int
    ready: float
    encoded: Blocks | Chosen | Factored | None

    def sent(self, ranks: int) -> float:
        """Bytes from one rank to all others."""
        if self.encoded is None:
            return 2 * self.nbytes * (ranks - 1) / ranks
        return self.encoded.sent(ranks)


def buckets(
    gradients: Sequence[Gradient], cap: int, wire: Wire = FP32, dtype: torch.dtype = torch.float32
) -> list[Bucket]:
    """As DDP makes them: in the order in which gradients are ready, closed as soon as they have
    ``cap`` bytes, the first one earlier. ``dtype`` is the gradients'; ``wire`` is not
    ``threshold``, of which nobody knows what it sends."""
    found: list[Bucket] = []
    part: list[Gradient] = []
    nbytes = 0
    for place, gradient in enumerate(gradients, 1):
        part.append(gradient)
        nbytes += gradient.nbytes
        if nbytes >= (cap if found else min(cap, FIRST_BUCKET_BYTES)) or place == len(gradients):
            elements = sum(each.elements for each in part)
            ready = max(each.ready for each in part)
            found.append(Bucket(elements, nbytes, ready, _encoded(part, wire, dtype)))
            part, nbytes = [], 0
    return found


def _encoded(
    part: Sequence[Gradient], wire: Wire, dtype: torch.dtype
) -> Blocks | Chosen | Factored | None:
    """None, too, where the format loses nothing of ``dtype``, and for small buckets. As
    :class:`fastreduce.compression.Compression` lays them out."""
    if not wire.loses(dtype):
        return None
    factors = [lowrank.factors(each.shape, wire.rank) for each in part]
    lossy = part
    if wire.format == "lowrank":
        lossy = [each for each, both in zip(part, factors, strict=True) if both]
    if Policy(wire, 0, SMALL_BYTES).stays_uncompressed(sum(each.nbytes for each in lossy)):
        return None
    elements = sum(each.elements for each in lossy)
    if wire.format == "lowrank":
        rest = [each.elements for each, both in zip(part, factors, strict=True) if not both]
        native = Blocks(0, _payload(rest, NATIVE[dtype])) if rest else None
        return Factored(elements, tuple(both for both in factors if both), native)
    if wire.format in SELECTED:
        return Chosen(elements, selected_bytes(wire.chosen(elements)))
    return Blocks(elements, _payload([each.elements for each in lossy], wire))


def _payload(counts: Sequence[int], wire: Wire) -> int:
    number = enums.FORMAT[wire.format]
    rows = [(0, count, 0, number, False, wire.block) for count in counts]
    return _C.WirePlan(1, rows).message_bytes(0)


def wire_memory(found: Sequence[Bucket], ranks: int) -> int:
    """Bytes that a wire format keeps on a rank."""
    if ranks == 1:
        return 0
    return round(sum(each.encoded.memory(ranks) for each in found if each.encoded is not None))


@dataclass(frozen=True)
class Cluster:
    """Ranks on hosts, spread evenly.

    Attributes:
        ranks, hosts: how many.
        inside: between the ranks of a host.
        between: a host's link to the others; with one host it does not matter.
    """

    ranks: int
    hosts: int
    inside: Link
    between: Link

    @property
    def ranks_per_host(self) -> int:
        """Of the fullest host."""
        return -(-self.ranks // self.hosts)

    def all_reduce(self, nbytes: int) -> tuple[str, float]:
        """The algorithm, and its seconds. Between hosts: reduce-scatter within each host,
        all-reduce of each part between hosts, all-gather within each host, one after the other."""
        if self.ranks == 1:
            return "none", 0.0
        if self.hosts > 1:
            seconds = self.between.ring(nbytes, self.hosts)
            share = self.ranks_per_host
            if share > 1 and self.inside.topology is not None:
                seconds += policy.expected_seconds(
                    "process_group", nbytes, share, self.inside.topology
                )
            elif share > 1:
                seconds += self.inside.ring(nbytes, share)
            return "hierarchical", seconds
        topology = self.inside.topology
        if topology is None:
            return "ring", self.inside.ring(nbytes, self.ranks)
        algorithm = policy.choose_algorithm(nbytes, self.ranks, topology)
        return algorithm, policy.expected_seconds(algorithm, nbytes, self.ranks, topology)

    def exchange(self, payload: int) -> float:
        """Seconds of an all-reduce in a wire format, without encoding: every rank sends each other
        one its part, and then all gather what has been reduced, in a ring. Between hosts every rank
        sends for itself."""
        part = payload * (self.ranks - 1) / self.ranks
        if self.hosts == 1:
            return self.inside.call(part, 1) + self.gather(payload)
        share = self.ranks_per_host
        seconds = self.between.call(share * payload * (self.hosts - 1) / self.hosts, 1)
        if share > 1:
            seconds += self.inside.call(payload * (share - 1) / self.ranks, 0)
        return seconds + self.gather(payload)

    def gather(self, nbytes: int) -> float:
        """Seconds until all have all of what every rank has a part of, in a ring."""
        if self.hosts == 1:
            return self.inside.call(nbytes * (self.ranks - 1) / self.ranks, self.ranks - 1)
        apart = nbytes * (self.hosts - 1) / self.hosts
        within = self.inside.call(nbytes, 0) if self.ranks_per_host > 1 else 0.0
        return self.between.call(apart, self.ranks - 1) + within

    def star(self, nbytes: int) -> float:
        """Seconds until a server has heard everybody, or all have heard it: what its link takes."""
        link = self.between if self.hosts > 1 else self.inside
        return link.call(self.ranks * nbytes, 1)


@dataclass(frozen=True)
class Compute:
    """A rank's computation in a step.

    Attributes:
        seconds: of forward and backward.
        backward: share of backward.
        passes: in which it is done; gradients travel in the last one.
    """

    seconds: float
    backward: float
    passes: int


def exposed(ready: Sequence[float], seconds: Sequence[float], backward: float) -> float:
    """Seconds of communication that stick out behind backward.

    One bucket travels after the other, each once it is ready: ``end[i] = max(end[i - 1], ready[i])
    + seconds[i]``; what sticks out is ``end[-1] - backward``.

    Args:
        ready: of each bucket, seconds from the beginning of backward.
        seconds: of each bucket's communication.
        backward: its seconds.
    """
    end = 0.0
    for at, takes in zip(ready, seconds, strict=True):
        end = max(end, at) + takes
    return max(0.0, end - backward)


@dataclass(frozen=True)
class Step:
    """Of one layout. Seconds.

    Attributes:
        algorithm: of the largest bucket.
        communication: of all, one after the other.
        sticks_out: of this, what backward does not hide; None where nothing is known of it.
        compute: of the rank; None likewise.
    """

    algorithm: str
    communication: float
    sticks_out: float | None
    compute: float | None

    @property
    def seconds(self) -> float | None:
        """Of the step, without the optimizer's."""
        if self.compute is None or self.sticks_out is None:
            return None
        return self.compute + self.sticks_out


def _step(
    found: Sequence[Bucket],
    seconds: Sequence[float],
    after: float,
    algorithm: str,
    compute: Compute | None,
) -> Step:
    communication = sum(seconds) + after
    if compute is None:
        return Step(algorithm, communication, None, None)
    backward = compute.seconds * compute.backward / compute.passes
    ready = [bucket.ready * backward for bucket in found]
    sticks_out = exposed(ready, seconds, backward) + after
    return Step(algorithm, communication, sticks_out, compute.seconds)


def data_parallel(found: Sequence[Bucket], cluster: Cluster, compute: Compute | None) -> Step:
    """Buckets are all-reduced while backward goes on."""

    @cache
    def way(nbytes: int, encoded: Blocks | Chosen | Factored | None) -> tuple[str, float]:
        if encoded is None or cluster.ranks == 1:
            return cluster.all_reduce(nbytes)
        return encoded.way(cluster)

    seconds = [way(bucket.nbytes, bucket.encoded)[1] for bucket in found]
    largest = max(found, key=lambda bucket: bucket.nbytes)
    algorithm, _ = way(largest.nbytes, largest.encoded)
    return _step(found, seconds, 0.0, algorithm, compute)


def sharded_server(
    found: Sequence[Bucket], cluster: Cluster, compute: Compute | None, weights: int
) -> Step:
    """Buckets are reduce-scattered while backward goes on; then the new weights are all-gathered,
    all at once. Each is half an all-reduce."""
    seconds = [cluster.all_reduce(bucket.nbytes)[1] / 2 for bucket in found]
    after = cluster.all_reduce(weights)[1] / 2
    return _step(found, seconds, after, "reduce_scatter, all_gather", compute)


def textbook_server(
    found: Sequence[Bucket], cluster: Cluster, compute: Compute | None, weights: int
) -> Step:
    """Buckets go to one server while backward goes on; then it sends everybody the new weights."""
    seconds = [cluster.star(bucket.nbytes) for bucket in found]
    return _step(found, seconds, cluster.star(weights), "one server", compute)


def hidden_until(slowdown: Callable[[int], float], ranks_per_host: int, most: int) -> int:
    """The largest number of ranks at which communication is hidden; 1 if it never is.

    Up to a host, the first number that is not hidden ends the search; beyond, only full hosts are
    looked at, and the more there are, the less is hidden.

    Args:
        slowdown: what sticks out, over the computation, of so many ranks.
        most: ranks that are looked at.
    """
    first = min(ranks_per_host, most)
    for ranks in range(2, first + 1):
        if slowdown(ranks) >= NOTICEABLE:
            return ranks - 1
    hosts = range(2, most // ranks_per_host + 1)
    full = bisect_left(
        hosts, True, key=lambda count: slowdown(count * ranks_per_host) >= NOTICEABLE
    )
    return first if full == 0 else hosts[full - 1] * ranks_per_host
