"""Choices that depend only on numbers: which algorithm, how many threads, how to wait.

Everything here is pure: the same arguments give the same answer on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10

# A one-shot call copies into a slot and every rank reads every slot; a two-shot call needs one
# flag round trip more, but splits the work. Measured with benchmarks/all_reduce.py.
ONE_SHOT_LIMIT = {2: 32 * KIB, 4: 16 * KIB, 8: 8 * KIB}

# The largest payload that a slot holds: what algorithm="one_shot" accepts at most.
SLOT_BYTES = 256 * KIB
# Staging of one thread for tensors that peers cannot map.
STAGE_BYTES = 1024 * KIB
# Calls from this size on are moved by all threads of a rank.
THREADED_BYTES = 1024 * KIB


@dataclass(frozen=True)
class Topology:
    """What the ranks of a group run on.

    Attributes:
        shared_memory: all ranks can map each other's memory.
        cores: processor cores that the ranks of the host may use together.
        ranks: ranks of the group on this host.
    """

    shared_memory: bool
    cores: int
    ranks: int


@dataclass(frozen=True)
class Patience:
    """How long a waiting thread polls, and then yields, before it sleeps; nanoseconds."""

    spin_ns: int
    yield_ns: int


def choose_algorithm(nbytes: int, world_size: int, topology: Topology) -> str:
    """The fastest algorithm for an all-reduce of ``nbytes`` bytes: ``"one_shot"``,
    ``"two_shot"``, or ``"process_group"`` where memory is not shared."""
    if not topology.shared_memory:
        return "process_group"
    return "one_shot" if nbytes <= one_shot_limit(world_size) else "two_shot"


def one_shot_limit(world_size: int) -> int:
    """The largest number of bytes for which one_shot is the faster one."""
    for ranks, limit in ONE_SHOT_LIMIT.items():
        if world_size <= ranks:
            return limit
    return 4 * KIB


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
