"""Choices over a table of machines, and the reference's own arithmetic."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from fastreduce import policy, reference
from fastreduce.policy import KIB, Topology


@pytest.mark.parametrize(
    "cores, ranks, nbytes, algorithm",
    [
        (2, 2, 8 * KIB, "one_shot"),
        (2, 2, 8 * KIB + 1, "two_shot"),
        (64, 8, 4 * KIB, "one_shot"),
        (64, 8, 5 * KIB, "two_shot"),
        (2, 4, 64 * KIB, "one_shot"),
        (2, 4, 65 * KIB, "two_shot"),
        (2, 2, 0, "one_shot"),
        (2, 2, 1 << 40, "two_shot"),
    ],
)
def test_choose_algorithm(cores, ranks, nbytes, algorithm):
    assert policy.choose_algorithm(nbytes, ranks, Topology(True, cores, ranks)) == algorithm


def test_a_slot_holds_what_one_shot_is_chosen_for():
    for cores in [1, 2, 64]:
        for ranks in range(1, 65):
            limit = policy.one_shot_limit(ranks, Topology(True, cores, ranks))
            assert limit <= policy.SLOT_BYTES


def test_without_shared_memory():
    assert policy.choose_algorithm(1, 2, Topology(False, 2, 2)) == "process_group"


@pytest.mark.parametrize(
    "cores, ranks, threads", [(2, 2, 1), (2, 4, 1), (16, 2, 8), (64, 2, 8), (6, 2, 3), (1, 8, 1)]
)
def test_threads_per_rank(cores, ranks, threads):
    assert policy.threads_per_rank(Topology(True, cores, ranks), 16) == threads


def test_patience():
    crowded = policy.patience(Topology(True, 2, 4), background=False)
    alone = policy.patience(Topology(True, 2, 2), background=False)
    beside_backward = policy.patience(Topology(True, 2, 2), background=True)
    assert crowded.spin_ns == 0 and alone.spin_ns >= 10_000
    assert beside_backward.spin_ns < alone.spin_ns


@pytest.mark.parametrize("n", range(1, 18))
def test_tree_is_the_documented_one(n):
    """tree(n) = tree(first p) + tree(rest), p the largest power of two below n."""

    def recursive(values):
        if len(values) == 1:
            return values[0]
        p = 1 << (len(values) - 1).bit_length() - 1
        return f"({recursive(values[:p])}+{recursive(values[p:])})"

    names = [str(i) for i in range(n)]
    assert reference.tree(names, lambda a, b: f"({a}+{b})") == recursive(names)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 8])
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000, 4096])
def test_chunks_cover_the_buffer(world_size, count):
    slices = [reference.chunk_of(count, world_size, r, 4) for r in range(world_size)]
    assert slices[0].start == 0 and slices[-1].stop == count
    for left, right in pairwise(slices):
        assert left.stop == right.start and (left.stop % 16 == 0 or left.stop == count)


def test_mean_is_one_rounding():
    """sum x (1/N) in float32 and then one rounding to bfloat16, not a rounded sum divided."""
    inputs = [torch.tensor([x], dtype=torch.bfloat16) for x in [256.0, 1.0, 1.0]]
    once = reference.all_reduce(inputs)
    assert once.item() == (258.0 * (1 / torch.tensor(3.0))).bfloat16().item()
    nan = torch.tensor([math.nan])
    one = torch.tensor([1.0])
    for op in ["min", "max", "sum"]:
        assert (
            reference.all_reduce([nan, one], op).isnan()
            and reference.all_reduce([one, nan], op).isnan()
        )
