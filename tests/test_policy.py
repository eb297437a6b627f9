"""Choices over a table of machines, and the reference's own arithmetic."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fastreduce import policy, reference
from fastreduce.policy import KIB, MIB, GpuTopology, Topology


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


@pytest.mark.parametrize("ranks", [2, 5, 8])
@pytest.mark.parametrize(
    "topology",
    [
        Topology(True, 64, 8),
        Topology(True, 2, 8),
        Topology(False, 0, 8),
        Topology(True, 64, 8, limits=(("one_shot", 48 * KIB), ("two_shot", None))),
        Topology(True, 64, 8, limits=(("one_shot", None),)),
        GpuTopology("switch", multicast=True),
        GpuTopology("mesh", bandwidth=300e9),
        GpuTopology("pcie", bandwidth=20e9, signal=2e-6),
        GpuTopology("none"),
        GpuTopology("switch", limits=(("low_latency", 48), ("two_shot", None))),
    ],
)
def test_crossovers_are_where_the_choice_changes(ranks, topology):
    found = policy.crossovers(ranks, topology)
    assert [limit for _, limit in found][-1] is None
    begin = 16
    for name, limit in found:
        end = limit or 1 << 30
        sizes = [begin, end, *(16 << n for n in range(27) if begin <= 16 << n <= end)]
        assert {policy.choose_algorithm(size, ranks, topology) for size in sizes} == {name}
        begin = end + 16
        if limit is not None:
            assert policy.choose_algorithm(begin, ranks, topology) != name


def test_a_slot_holds_what_one_shot_is_chosen_for():
    for cores in [1, 2, 64]:
        for ranks in range(1, 65):
            limit = policy.one_shot_limit(ranks, Topology(True, cores, ranks))
            assert limit <= policy.SLOT_BYTES


@pytest.mark.parametrize(
    "limits, limit",
    [
        ((("one_shot", 32 * KIB), ("two_shot", None)), 32 * KIB),
        ((("two_shot", None),), KIB),  # what is smaller was not measured
        ((("one_shot", None),), policy.SLOT_BYTES),
        ((("one_shot", MIB), ("two_shot", None)), policy.SLOT_BYTES),  # somebody's own file
        ((("multimem", -1),), KIB),
    ],
)
def test_measured_limits_of_the_host(limits, limit):
    topology = Topology(True, 64, 8, limits=limits)
    assert policy.one_shot_limit(8, topology) == limit
    assert policy.choose_algorithm(limit, 8, topology) == "one_shot"
    assert policy.choose_algorithm(limit + 1, 8, topology) == "two_shot"


def test_candidates_of_the_host():
    assert policy.candidates(policy.SLOT_BYTES, 2, Topology(True, 2, 2)) == ["one_shot", "two_shot"]
    assert policy.candidates(policy.SLOT_BYTES + 16, 2, Topology(True, 2, 2)) == ["two_shot"]
    assert policy.candidates(16, 2, Topology(False, 0, 2)) == ["process_group"]


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


# -- GPUs ---------------------------------------------------------------------------------------

GIB_S = 1e9
MACHINES = {
    "8 x A100, NVSwitch": (GpuTopology("switch", bandwidth=270 * GIB_S), 8),
    "8 x H100": (GpuTopology("switch", True, 400 * GIB_S), 8),
    "8 x H200": (GpuTopology("switch", True, 400 * GIB_S), 8),
    "4 x A100, NVLink mesh": (GpuTopology("mesh", bandwidth=270 * GIB_S), 4),
    "4 x A100, PCIe": (GpuTopology("pcie", bandwidth=24 * GIB_S, signal=2e-6), 4),
    "2 x RTX 4090, no peer access": (GpuTopology("none"), 2),
    "2 x GH200, two hosts": (GpuTopology("none", hosts=2), 2),
    "GB200 NVL72": (GpuTopology("switch", True, 800 * GIB_S, hosts=18), 72),
    "16 x H100, two hosts": (GpuTopology("none", hosts=2), 16),
    "2 x H100 NVL, bridge": (GpuTopology("mesh", bandwidth=280 * GIB_S), 2),
}
CHOICES = [
    ("8 x A100, NVSwitch", 8 * KIB, "low_latency"),
    ("8 x A100, NVSwitch", 1 * MIB, "two_shot"),
    ("8 x A100, NVSwitch", 16 * MIB, "two_shot"),
    ("8 x A100, NVSwitch", 64 * MIB, "process_group"),
    ("8 x H100", 8 * KIB, "low_latency"),
    ("8 x H100", 64 * KIB, "low_latency"),
    ("8 x H100", 128 * KIB, "multimem"),
    ("8 x H100", 1 * MIB, "multimem"),
    ("8 x H100", 1 * MIB + 4, "two_shot"),  # the switch adds whole packs
    ("8 x H100", 32 * MIB, "multimem"),
    ("8 x H100", 64 * MIB, "process_group"),
    ("8 x H200", 16 * MIB, "multimem"),
    ("4 x A100, NVLink mesh", 4 * KIB, "low_latency"),
    ("4 x A100, NVLink mesh", 4 * MIB, "two_shot"),
    ("4 x A100, PCIe", 1 * KIB, "low_latency"),
    ("4 x A100, PCIe", 4 * MIB, "process_group"),
    ("2 x RTX 4090, no peer access", 1 * KIB, "process_group"),
    ("2 x RTX 4090, no peer access", 64 * MIB, "process_group"),
    ("2 x GH200, two hosts", 1 * MIB, "process_group"),
    ("GB200 NVL72", 1 * MIB, "multimem"),
    ("16 x H100, two hosts", 8 * KIB, "process_group"),
    ("2 x H100 NVL, bridge", 72 * KIB, "low_latency"),
    ("2 x H100 NVL, bridge", 8 * MIB, "two_shot"),
]


@pytest.mark.parametrize("machine, nbytes, algorithm", CHOICES)
def test_choose_algorithm_of_gpus(machine, nbytes, algorithm):
    topology, world_size = MACHINES[machine]
    assert policy.choose_algorithm(nbytes, world_size, topology) == algorithm


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_chosen_can_do_it(machine):
    topology, world_size = MACHINES[machine]
    for nbytes in [0, 1, 16, 1000, *(KIB << n for n in range(20)), (1 << 30) + 1]:
        for deterministic in (False, True):
            name = policy.choose_algorithm(
                nbytes, world_size, topology, deterministic=deterministic
            )
            assert name in policy.GPU_ALGORITHMS
            if name == "low_latency":
                assert nbytes <= policy.GPU_INBOX_BYTES and world_size <= 8
            if name == "one_shot":
                assert nbytes <= policy.GPU_SLOT_BYTES
            if name == "multimem":
                assert topology.multicast and nbytes % 16 == 0 and not deterministic
            if topology.link == "none":
                assert name == "process_group"
            elif deterministic:
                assert name in ("low_latency", "one_shot", "two_shot")


def test_measured_limits_decide():
    limits = (
        ("one_shot", 8 * KIB),
        ("multimem", MIB),
        ("two_shot", 4 * MIB),
        ("process_group", None),
    )
    topology = GpuTopology("switch", True, limits=limits)

    def choose(nbytes, **kwargs):
        return policy.choose_algorithm(nbytes, 8, topology, **kwargs)

    assert choose(8 * KIB) == "one_shot"
    assert choose(9 * KIB) == "multimem"
    assert choose(9 * KIB + 4) == "two_shot"  # which multimem cannot
    assert choose(9 * KIB, deterministic=True) == "two_shot"
    assert choose(5 * MIB) == "process_group"
    # Of those measured none is allowed: what is expected decides.
    assert choose(5 * MIB, deterministic=True) == "two_shot"


def test_limits_of_measured_times():
    times = {
        "low_latency": {1: 3.0, 2: 4.0, 4: 9.0},
        "two_shot": {1: 6.0, 2: 6.0, 4: 6.0, 8: 7.0, 16: 20.0},
        "process_group": {1: 9.0, 2: 9.0, 4: 9.0, 8: 9.5, 16: 15.0},
    }
    assert policy.limits_of(times) == (("low_latency", 2), ("two_shot", 8), ("process_group", None))
    times["low_latency"] |= {4: 7.0, 8: 5.0}  # beaten once in between: stays
    assert policy.limits_of(times) == (("low_latency", 8), ("process_group", None))
    times["two_shot"][2] = 3.5  # so does what is beaten before
    assert policy.limits_of(times) == (("low_latency", 8), ("process_group", None))
    assert policy.limits_of({}) == ()
    assert policy.limits_of({"b": {1: 2.0, 2: 1.0}, "a": {1: 3.0}}) == (("b", None),)
    for nbytes, name in [(1, "low_latency"), (7, "low_latency"), (9, "process_group")]:
        topology = GpuTopology("switch", limits=policy.limits_of(times))
        assert policy.choose_algorithm(nbytes, 2, topology) == name


@pytest.mark.parametrize(
    "bandwidth, multicast, world_size, link, total",
    [
        (400e9, True, 8, "switch", 400e9),
        (270e9, False, 8, "switch", 270e9),
        (90e9, False, 4, "mesh", 270e9),
        (55e9, False, 8, "pcie", 55e9),
        (12e9, False, 2, "pcie", 12e9),
    ],
)
def test_topology_of(bandwidth, multicast, world_size, link, total):
    topology = policy.topology_of(
        pair_bandwidth=bandwidth, world_size=world_size, multicast=multicast
    )
    assert (topology.link, topology.bandwidth) == (link, total)


def test_bytes_on_a_link():
    """2 (N - 1) / N is the least without a switch that adds, 1 + 1 / N with one."""
    for world_size in (2, 4, 8):
        for name in ("two_shot", "ring"):
            moved = policy.link_bytes(name, 1 << 20, world_size)
            assert moved == 2 * (world_size - 1) / world_size * (1 << 20)
        assert policy.link_bytes("multimem", 1 << 20, world_size) == (1 + 1 / world_size) * (
            1 << 20
        )
        assert policy.link_bytes("one_shot", 1 << 20, world_size) == (world_size - 1) << 20


def test_expected_seconds_grow_with_size_and_shrink_with_bandwidth():
    slow, fast = GpuTopology("switch", bandwidth=100e9), GpuTopology("switch", bandwidth=900e9)
    for name in policy.GPU_ALGORITHMS:
        times = [policy.expected_seconds(name, KIB << n, 8, slow) for n in range(0, 20, 4)]
        assert times == sorted(times)
        assert policy.expected_seconds(name, MIB, 8, fast) < times[-1]


def test_the_documented_expectations():
    """The table in docs/gpu.md is what policy says of 8 x H100."""
    text = (Path(__file__).parents[1] / "docs" / "gpu.md").read_text()
    rows = re.findall(r"^\| (\d+) (KiB|MiB) \|((?: [\d.]+ \|){6}) ", text, flags=re.M)
    assert [(int(n), unit) for n, unit, _ in rows] == [
        (8, "KiB"), (72, "KiB"), (1, "MiB"), (16, "MiB"), (64, "MiB")
    ]  # fmt: skip
    h100 = GpuTopology("switch", True)
    for number, unit, cells in rows:
        nbytes = int(number) * {"KiB": KIB, "MiB": MIB}[unit]
        expected = [
            f"{policy.expected_seconds(name, nbytes, 8, h100) * 1e6:.1f}"
            for name in policy.GPU_ALGORITHMS
        ]
        assert re.findall(r"[\d.]+", cells) == expected


def test_blocks():
    for name in policy.GPU_ALGORITHMS[:-1]:
        counts = [policy.blocks(name, nbytes, 8, 32) for nbytes in (0, 1, 64 * KIB, MIB, 64 * MIB)]
        assert counts == sorted(counts) and counts[0] == 1 and counts[-1] == 32
