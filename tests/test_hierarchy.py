"""Sums by hosts: the bits of one host's ranks, other layouts, failures. (Real cables between hosts:
benchmarks/hosts.py.)"""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Lines, same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce import hierarchy, reference, rendezvous
from fastreduce.hierarchy import Hosts

TIMEOUT = 60.0
EVEN, LAST_SMALLER, MIXED = "aabb", "aaaabb", "abba"


def placed(layout: str, **options: Any) -> fastreduce.Communicator:
    """A communicator of ranks that run on the hosts of these names."""
    real = rendezvous._boot_id
    rendezvous._boot_id = lambda: layout[dist.get_rank()]
    try:
        return fastreduce.Communicator(timeout=TIMEOUT, **options)
    finally:
        rendezvous._boot_id = real


# -- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        ("aabb", True),
        ("aabbcc", True),
        ("aaaabbb", True),
        ("aaaab", True),
        ("ab", True),
        ("aaabbb", False),
        ("abb", False),
        ("abab", False),
        ("abba", False),
        ("aabbbb", False),
        ("aabcc", False),
    ],
)
def test_order_is_kept_where_hosts_are_parts_of_the_tree(layout, kept):
    hosts = Hosts.of(layout)
    assert hosts.keep_order == kept

    # What is claimed: terms of the tree, as text.
    def combine(one: str, other: str) -> str:
        return f"({one}{other})"

    def tree(values: list[str]) -> str:
        while len(values) > 1:
            paired = [combine(*values[i : i + 2]) for i in range(0, len(values) - 1, 2)]
            values = paired + values[len(values) & ~1 :]
        return values[0]

    by_hosts = tree([tree([f"{rank}." for rank in ranks]) for ranks in hosts.members])
    assert (by_hosts == tree([f"{rank}." for rank in range(len(layout))])) == kept


@pytest.mark.parametrize("count", [0, 1, 63, 64, 1000, 4096])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_split_covers_all_once(count, parts):
    bounds = hierarchy.split(count, parts)
    assert len(bounds) == parts and bounds[0][0] == 0 and bounds[-1][1] == count
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))


def test_every_share_has_one_owner_on_each_host():
    hosts = Hosts.of("aaab")
    assert hosts.columns == 3
    assert [hosts.owner(0, column) for column in range(3)] == [0, 1, 2]
    assert [hosts.owner(1, column) for column in range(3)] == [3, 3, 3]


# -- results --------------------------------------------------------------------------------------

PIECE = hierarchy.PIECE_BYTES // 4
CASES = [
    (dtype, op, count)
    for dtype in (torch.float32, torch.bfloat16, torch.float64)
    for op, count in [("sum", 1), ("mean", 1000), ("mean", PIECE + 77), ("sum", 3 * PIECE)]
]


def values(rank: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + count)
    return torch.randn(count, generator=generator).mul_(10.0 ** (rank - 2)).to(dtype)


def results(_: object, layout: str) -> list[torch.Tensor]:
    rank = dist.get_rank()
    found = []
    with placed(layout) as communicator:
        assert not communicator.shared_memory
        for number, (dtype, op, count) in enumerate(CASES):
            tensor = values(rank, dtype, count)
            if number % 3 == 0:
                communicator.all_reduce(tensor, op)
            elif number % 3 == 1:
                work = communicator.all_reduce(tensor, op, async_op=True)
                work.wait(TIMEOUT)
                assert work.is_completed()
            else:
                assert communicator.all_reduce_future(tensor, op).wait() is tensor
            found.append(tensor)
        weighted = values(rank, torch.float32, 5000)
        communicator.all_reduce(weighted, "mean", scale=float(rank), weight=float(rank))
        found.append(weighted)
        ints = torch.arange(10) * (rank + 1)
        communicator.all_reduce(ints, "sum")  # through the backend
        found.append(ints)
    return found


def expected(world_size: int) -> list[torch.Tensor]:
    ranks = range(world_size)
    found = [
        reference.all_reduce([values(rank, dtype, count) for rank in ranks], op)
        for dtype, op, count in CASES
    ]
    inputs = [values(rank, torch.float32, 5000) for rank in ranks]
    factors = [float(rank) for rank in ranks]
    found.append(reference.all_reduce(inputs, "mean", factors, factors))
    found.append(torch.arange(10) * sum(rank + 1 for rank in ranks))
    return found


@pytest.mark.parametrize("layout", [EVEN, LAST_SMALLER])
def test_the_bits_of_one_host(pool, layout):
    every = pool(len(layout)).run(results, layout)
    for rank, found in enumerate(every):
        for number, (got, want) in enumerate(zip(found, expected(len(layout)), strict=True)):
            assert same_bits(got, want), (rank, number)


@pytest.mark.parametrize("layout", [MIXED, "aaab"])
def test_any_layout(pool, layout):
    """The same bits on all ranks, and the sums, rounded elsewhere."""
    every = pool(len(layout)).run(results, layout)
    for got, want in zip(every[0], expected(len(layout)), strict=True):
        torch.testing.assert_close(
            got, want, rtol=1e-2 if got.dtype == torch.bfloat16 else 1e-4, atol=1e-3
        )
    for found in every[1:]:
        assert all(same_bits(got, want) for got, want in zip(found, every[0], strict=True))


def told(_: object) -> tuple[list[str], list[str]]:
    lines = Lines()
    errors = []
    placed(EVEN).close()
    placed(EVEN, deterministic=True).close()
    placed("abcd").close()  # no host has two
    for layout in (MIXED, "abcd"):
        try:
            placed(layout, deterministic=True)
        except RuntimeError as error:
            errors.append(str(error))
    return lines.lines, errors


def test_what_is_said(pool):
    for lines, errors in pool(4).run(told):
        assert [line.partition(": ")[2].partition(",")[0] for line in lines] == [
            "sums by hosts",
            "sums by hosts",
            "using the process group",
        ]
        assert len(errors) == 2 and all("order of summation" in error for error in errors)


def trained(_: object, layout: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 8)))
    real = rendezvous._boot_id
    rendezvous._boot_id = lambda: layout[dist.get_rank()]
    try:
        state = fastreduce.attach(model, norms=True)
    finally:
        rendezvous._boot_id = real
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + dist.get_rank())
    norms = []
    for _step in range(4):
        optimizer.zero_grad()
        state.weight(float(1 + dist.get_rank()))
        model(torch.randn(16, 64)).square().mean().backward()
        norms.append(state.clip_grad_norm(0.5))
        optimizer.step()
    state.close()
    return [*norms, *(p.detach() for p in model.parameters())]


def test_ddp_trains_as_on_one_host(pool):
    by_hosts = pool(4).run(trained, EVEN)
    [one_host, *_] = pool(4).run(trained, "aaaa")
    for found in by_hosts:
        assert all(same_bits(got, want) for got, want in zip(found, one_host, strict=True))


def sharded(_: object, layout: str) -> list[torch.Tensor]:
    """Gradients of a batch in eight logical shards."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 8)))
    real = rendezvous._boot_id
    rendezvous._boot_id = lambda: layout[dist.get_rank()]
    try:
        state = fastreduce.attach(model)
    finally:
        rendezvous._boot_id = real
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).chunk(8)
    for shard in state.shards(8):
        model(batch[shard]).square().mean().backward()
    state.close()
    return [p.grad.clone() for p in model.parameters()]


def test_logical_shards_keep_their_bits_over_hosts(pool):
    for found in pool(4).run(sharded, EVEN):
        for got, want in zip(found, pool(2).run(sharded, "aa")[0], strict=True):
            assert same_bits(got, want)


# -- failures -------------------------------------------------------------------------------------


def dies(_: object, layout: str, victim: int) -> str:
    communicator = placed(layout)
    tensor = torch.ones(8 * PIECE)
    communicator.all_reduce(tensor)
    dist.barrier()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises((RuntimeError, fastreduce.CommunicatorError)):
        for _call in range(3):
            communicator.all_reduce(tensor)
    with pytest.raises(RuntimeError, match="an earlier call has failed"):
        communicator.all_reduce(tensor)
    communicator._close(drain=False)
    return f"{time.monotonic() - begin:.1f}"


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_dies_is_an_error_on_all_others(ranks, victim):
    group = ranks(4)
    for rank in range(4):
        group.start(rank, dies, None, EVEN, victim)
    for rank in range(4):
        if rank != victim:
            assert float(group.result(rank)) < TIMEOUT
    group.kill()
