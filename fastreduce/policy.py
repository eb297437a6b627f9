"""Choices that depend only on numbers: which algorithm, how many threads, how to wait.

Everything here is pure: the same arguments give the same answer on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, permutations
from typing import Literal

KIB = 1 << 10
MIB = 1 << 20

# The largest payload that a slot holds: what algorithm="one_shot" accepts at most.
SLOT_BYTES = 256 * KIB
# Staging of one thread for tensors that peers cannot map.
STAGE_BYTES = 1024 * KIB
# Calls from this size on are moved by all threads of a rank.
THREADED_BYTES = 1024 * KIB

# Algorithm -> the largest message, in bytes, that it is the fastest for, in ascending order, None
# for the last; empty where nothing was measured.
Limits = tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class Topology:
    """What the ranks of a group run on.

    Attributes:
        shared_memory: all ranks can map each other's memory.
        cores: processor cores that the ranks of the host may use together.
        ranks: ranks of the group on this host.
        limits: measured by ``tune``; rank 0's.
    """

    shared_memory: bool
    cores: int
    ranks: int
    limits: Limits = ()


@dataclass(frozen=True)
class Patience:
    """How long a waiting thread polls, and then yields, before it sleeps; nanoseconds."""

    spin_ns: int
    yield_ns: int


# What a GPU's memory between the ranks holds, of each kind. See csrc/signal.h: Layout.
GPU_SLOT_BYTES = 512 * KIB
GPU_INBOX_BYTES = 256 * KIB
GPU_STAGE_BYTES = 256 * KIB  # of one block, for ring and wire formats; see gpu_stage_bytes()
# Tensors that peers cannot reach go through memory that they can, in pieces of this size.
GPU_PIECE_BYTES = 32 * MIB

Link = Literal["switch", "mesh", "pcie", "none"]


@dataclass(frozen=True)
class GpuTopology:
    """What the GPUs of a group, one per rank, are connected by.

    Attributes:
        link: how every GPU reaches every other's memory: ``switch`` (NVLink through NVSwitch),
            ``mesh`` (NVLink to each of them), ``pcie``, or ``none`` where some pair cannot.
        multicast: the switch adds and multiplies (NVLink SHARP).
        bandwidth: of one GPU's links in one direction, bytes/s.
        signal: seconds from a store until the peer that polls has seen it.
        memory: of one GPU's own memory, bytes/s.
        hosts: that the ranks run on.
        limits: measured by ``tune``; rank 0's.
    """

    link: Link
    multicast: bool = False
    bandwidth: float = 390e9
    signal: float = 1.0e-6
    memory: float = 3.0e12
    hosts: int = 1
    limits: Limits = ()


# Of a launch within a graph, before anything moves and after the last has: an estimate.
_KERNEL_SECONDS = 2.5e-6
# What a process group's collective costs before anything moves, and the share of the links that it
# gets for large messages: NCCL's on 8 x H100, as published. See docs/gpu.md.
_GROUP_SECONDS = 15.0e-6
_GROUP_SHARE = 0.8
# The share of the links that loads and stores of our kernels get. Estimates, until measured; loads
# over PCIe are answered one by one.
_KERNEL_SHARE = {"switch": 0.8, "mesh": 0.8, "pcie": 0.5, "none": 0.5}
# Above this, the process group runs: NCCL uses fewer multiprocessors for the same bandwidth.
_GROUP_BYTES = 32 * MIB

GPU_ALGORITHMS = ("low_latency", "one_shot", "two_shot", "multimem", "ring", "process_group")


def link_bytes(algorithm: str, nbytes: int, world_size: int, *, multicast: bool = False) -> float:
    """Bytes that one rank's link carries in its busier direction, for an all-reduce of ``nbytes``
    of 32-bit elements. (Of narrower ones ``ring`` sends partial sums as accumulators.)

    See the table at the head of csrc/all_reduce.h. What a process group does is not ours to say:
    with a switch that adds, at best what ``multimem`` does, else what a ring does.
    """
    others = world_size - 1
    split = nbytes / world_size
    return {
        "low_latency": 2 * nbytes * others,  # every 8 bytes travel with 8 that tell of them
        "one_shot": nbytes * others,
        "two_shot": 2 * split * others,  # reads of the own chunk, and the peers' stores
        "multimem": nbytes + split,
        "ring": 2 * split * others,
        "process_group": nbytes + split if multicast else 2 * split * others,
    }[algorithm]


def flags(algorithm: str, world_size: int) -> int:
    """One-way signals, and halves of round trips of loads, one after the other in a call."""
    return {
        "low_latency": 1,
        "one_shot": 1 + 2,
        "two_shot": 1 + 2 + 1,
        "multimem": 1 + 2 + 1,
        "ring": 1 + 2 * (world_size - 1),
        "process_group": 0,  # contained in what a call of it costs
    }[algorithm]


def expected_seconds(algorithm: str, nbytes: int, world_size: int, topology: GpuTopology) -> float:
    """What an all-reduce takes by bytes moved and signals, on paper."""
    moved = link_bytes(algorithm, nbytes, world_size, multicast=topology.multicast)
    if algorithm == "process_group":
        return _GROUP_SECONDS + moved / (_GROUP_SHARE * topology.bandwidth)
    local = 2 * nbytes / topology.memory if algorithm == "one_shot" else 0.0  # fills the slot
    wire = moved / (_KERNEL_SHARE[topology.link] * topology.bandwidth)
    return _KERNEL_SECONDS + flags(algorithm, world_size) * topology.signal + local + wire


def gpu_stage_bytes(world_size: int) -> int:
    """Staging of one block that has room for a piece of wire formats, one run of every rank at
    least: 1,024 elements of float32. See csrc/all_reduce.h: EncodedSlots."""
    return max(GPU_STAGE_BYTES, 5 * (world_size + 1) * 4096)


def reaches_all(topology: GpuTopology) -> bool:
    """Whether our kernels are for these GPUs."""
    return topology.link != "none" and (topology.hosts == 1 or topology.link == "switch")


def candidates(
    nbytes: int, world_size: int, topology: Topology | GpuTopology, *, deterministic: bool = False
) -> list[str]:
    """The algorithms that can do an all-reduce, in ascending order of the messages they are for."""
    if isinstance(topology, Topology):
        if not topology.shared_memory:
            return ["process_group"]
        return ["one_shot", "two_shot"] if nbytes <= SLOT_BYTES else ["two_shot"]
    if not reaches_all(topology):
        return ["process_group"]
    able = []
    if nbytes <= GPU_INBOX_BYTES and world_size <= 8:
        able.append("low_latency")
    if nbytes <= GPU_SLOT_BYTES:
        able.append("one_shot")
    if topology.multicast and nbytes % 16 == 0 and not deterministic:
        able.append("multimem")
    able.append("two_shot")
    if not deterministic:
        able.append("process_group")
    return able


def choose_algorithm(
    nbytes: int,
    world_size: int,
    topology: Topology | GpuTopology,
    *,
    deterministic: bool = False,
) -> str:
    """The fastest algorithm for an all-reduce of ``nbytes`` bytes.

    Args:
        topology: of the host's ranks, or of the GPUs.
        deterministic: only those that keep the order of summation, where there are any.

    Returns:
        ``"one_shot"``, ``"two_shot"``, of GPUs also ``"low_latency"`` or ``"multimem"``, or
        ``"process_group"`` where memory is not shared, and for large messages of GPUs.
    """
    if isinstance(topology, Topology):
        if not topology.shared_memory:
            return "process_group"
        return "one_shot" if nbytes <= one_shot_limit(world_size, topology) else "two_shot"
    able = candidates(nbytes, world_size, topology, deterministic=deterministic)
    for algorithm, limit in topology.limits:
        if algorithm in able and (limit is None or nbytes <= limit):
            return algorithm
    if "process_group" in able and nbytes > _GROUP_BYTES:
        return "process_group"
    return min(able, key=lambda each: expected_seconds(each, nbytes, world_size, topology))


def crossovers(world_size: int, topology: Topology | GpuTopology, largest: int = 1 << 30) -> Limits:
    """What ``choose_algorithm`` gives for messages of multiples of 16 bytes: algorithm, and the
    last size up to which it is taken; None for the one from there to ``largest``. (One that is
    taken for less than a doubling of the size may be missed.)"""

    def choice(nbytes: int) -> str:
        return choose_algorithm(nbytes, world_size, topology)

    found: list[tuple[str, int | None]] = []
    begin = 16
    while begin < largest:
        name, end = choice(begin), begin
        while end < largest and choice(end) == name:
            begin, end = end, min(2 * end, largest)
        if choice(end) == name:
            break
        while end - begin > 16:
            middle = (begin + end) // 32 * 16
            begin, end = (middle, end) if choice(middle) == name else (begin, middle)
        found.append((name, begin))
        begin = end
    return (*found, (choice(largest), None))


def limits_of(times: Mapping[str, Mapping[int, float]]) -> Limits:
    """What measured times come to: algorithm -> bytes -> seconds.

    Each algorithm takes one range of the sizes, or none, in whatever order, so that the product of
    all times is the least: a measurement is no smooth curve, and one size in which an algorithm is
    beaten by a little does not end its range.
    """
    sizes = sorted({size for each in times.values() for size in each})
    if not sizes:
        return ()

    def share(order: tuple[str, ...]) -> tuple[float, tuple[str, ...]]:
        """The product's logarithm, and who takes each size, if they follow in this order."""
        ways: list[tuple[float, tuple[str, ...]]] = [(0.0, ())] * len(order)
        for size in sizes:
            ways = [
                (total + math.log(times[name].get(size, math.inf)), (*taken, name))
                # Each goes on with its own sizes, or after an earlier one's.
                for (total, taken), name in zip(accumulate(ways, min), order, strict=True)
            ]
        return min(ways)

    _, taken = min(map(share, permutations(times)))
    return tuple({**dict(zip(taken, sizes, strict=True)), taken[-1]: None}.items())


def topology_of(
    *,
    pair_bandwidth: float,
    world_size: int,
    multicast: bool,
    hosts: int = 1,
    limits: Limits = (),
) -> GpuTopology:
    """What GPUs are connected by, as told by how fast each reads its neighbour's memory while all
    do, in bytes/s. Through a switch one pair has the whole of both GPUs' links (A100: 300e9, H100:
    450e9), in a mesh only its own (4 x A100: 100e9), and PCIe has at most 64e9 (5.0 x16)."""
    if multicast or pair_bandwidth > 150e9:
        return GpuTopology(
            "switch", multicast=multicast, bandwidth=pair_bandwidth, hosts=hosts, limits=limits
        )
    if pair_bandwidth > 64e9:
        whole = pair_bandwidth * (world_size - 1)
        return GpuTopology("mesh", bandwidth=whole, hosts=hosts, limits=limits)
    return GpuTopology("pcie", bandwidth=pair_bandwidth, signal=2.0e-6, hosts=hosts, limits=limits)


def blocks(algorithm: str, nbytes: int, world_size: int, most: int) -> int:
    """Blocks of a launch, 1 to ``most``: the same on all ranks, for it depends on nothing else.

    So many that each thread has a few packs to move; more would only have more flags to wait for.
    """
    each = 4 * KIB if algorithm in ("low_latency", "one_shot") else 16 * KIB
    share = nbytes / world_size if algorithm in ("two_shot", "multimem", "ring") else nbytes
    return max(1, min(most, int(-(-share // each))))


def one_shot_limit(world_size: int, topology: Topology) -> int:
    """The largest number of bytes for which one_shot is the faster one, at most ``SLOT_BYTES``.

    What ``tune`` has measured, if it has; 1 KiB at least, as it measures no smaller ones. Else: a
    one-shot call copies into a slot and every rank reads every slot; a two-shot call splits
    the work, for one more flag. Measured (2 cores): 8 KiB for 2 ranks; 64 KiB for 4 ranks,
    which share the cores, so that a flag costs a change of process. Above 2 ranks with a core
    each the value is an estimate: the work that is split grows with the ranks.
    """
    if topology.limits:
        limit = dict(topology.limits).get("one_shot", 0)
        return SLOT_BYTES if limit is None else min(max(limit, KIB), SLOT_BYTES)
    if topology.ranks > topology.cores:
        return 64 * KIB
    return 8 * KIB if world_size <= 4 else 4 * KIB


def threads_per_rank(topology: Topology, limit: int) -> int:
    """Threads with which a rank moves a large buffer: its share of the cores, at most 8."""
    return max(1, min(topology.cores // max(topology.ranks, 1), 8, limit))


def patience(topology: Topology, *, background: bool) -> Patience:
    """How a wait begins. A rank alone on its core polls, so that it sees a flag at once. Ranks
    that share cores yield at once: whoever polls keeps the other from coming. The
    communication thread shares its rank's cores with backward: it polls only where the rank
    has a core to spare."""
    if topology.ranks > topology.cores:
        return Patience(0, 200_000 if background else 1_500_000)
    if background and topology.cores < 2 * topology.ranks:
        return Patience(2_000, 50_000)
    return Patience(50_000, 200_000)
