"""Choices that depend only on numbers: which algorithm, how many threads, how to wait.

Everything here is pure: the same arguments give the same answer on every rank.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1 << 10

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
    return "one_shot" if nbytes <= one_shot_limit(world_size, topology) else "two_shot"


def one_shot_limit(world_size: int, topology: Topology) -> int:
    """The largest number of bytes for which one_shot is the faster one.

    A one-shot call copies into a slot and every rank reads every slot; a two-shot call splits
    the work, for one more flag. Measured (2 cores): 8 KiB for 2 ranks; 64 KiB for 4 ranks,
    which share the cores, so that a flag costs a change of process. Above 2 ranks with a core
    each the value is an estimate: the work that is split grows with the ranks.
    """
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
