"""Norms that are counted while gradients are averaged: the reference's bits, whoever counts what,
and what torch finds."""

from __future__ import annotations

import copy
import json
import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import make_inputs, on_every_instruction_set, same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce import Norm, Norms, reference, rendezvous
from fastreduce.norms import total_of

TIMEOUT = 60.0
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
# Around lanes, units and chunks; the last one goes through two_shot.
COUNTS = [0, 1, 31, 33, 1023, 1024, 1025, 5000, 300_007]
WAYS = ["shared memory", "hosts"]


def same_norm(a: Norm, b: tuple[float, float, int]) -> bool:
    """Bit for bit, and NaN like NaN."""
    return repr((a.norm, a.largest, a.nonfinite)) == repr(b)


def values(kind: str, count: int, seed: int) -> torch.Tensor:
    """float64, which every dtype rounds."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(count, generator=generator, dtype=torch.float64)
    if kind == "spread":  # magnitudes of all kinds, far apart
        exponents = torch.randint(-140, 120, (count,), generator=generator)
        return torch.ldexp(normal, exponents.to(torch.float64))
    if kind == "zeros":
        return normal * 0
    if kind == "special" and count > 3:
        places = torch.randint(count, (3,), generator=generator)
        normal[places] = torch.tensor([math.inf, -math.inf, 1.0], dtype=torch.float64)
        if seed % 2:
            normal[places[2]] = math.nan
    return normal


# -- the count itself ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "spread", "zeros", "special"])
def test_counts_are_those_of_the_reference(kind, dtype):
    for count in COUNTS:
        for seed in range(2):
            tensor = values(kind, count, seed).to(dtype)
            for ranks in (1, 3):
                shares = [Norms() for _ in range(ranks)]
                for rank, norms in enumerate(shares):
                    norms.measure(tensor, rank, ranks)
                shares[0].settle([each.saved() for each in shares])
                [found] = shares[0].sections()
                [expected] = reference.norm(tensor)
                assert same_norm(found, expected), (count, seed, ranks)


def test_sections_are_counted_apart():
    counts = [5, 0, 1019, 1, 1024, 3000, 7]
    tensor = values("normal", sum(counts), 0).float()
    norms = Norms(counts)
    norms.measure(tensor, 0, 1)
    norms.settle([norms.saved()])
    assert len(norms.sections()) == len(counts)
    for found, expected in zip(norms.sections(), reference.norm(tensor, counts), strict=True):
        assert same_norm(found, expected)
    for found, part in zip(norms.sections(), tensor.split(counts), strict=True):
        assert found.norm == pytest.approx(part.double().norm().item(), rel=1e-14)
    assert total_of([norms]).norm == pytest.approx(tensor.double().norm().item(), rel=1e-14)
    norms.clear()
    norms.settle([norms.saved()])
    assert all(each == Norm(0.0, 0.0, 0) for each in norms.sections())


def test_order_does_not_matter():
    """Sums of 30,000 units of very different sizes, in any order and grouping: one and the same."""
    generator = torch.Generator().manual_seed(0)
    parts = [values("spread", 2000, seed).float() for seed in range(30)]
    found = set()
    for _ in range(10):
        groups = [Norms(), Norms(), Norms()]
        for index in torch.randperm(len(parts), generator=generator).tolist():
            group = int(torch.randint(3, (1,), generator=generator))
            groups[group].measure(parts[index], 0, 1)
        order = torch.randperm(3, generator=generator).tolist()
        groups[0].settle([groups[i].saved() for i in order])
        found.add(groups[0].sections()[0])
    assert len(found) == 1
    # A sum in float64 alone does depend on it.
    squares = torch.cat(parts).double().square()
    forwards, backwards = (sum(each.tolist()) for each in (squares, squares.flip(0)))
    assert forwards != backwards


def test_counts_may_be_brought_together_again():
    tensor = torch.full((100,), 0.5)
    norms = Norms()
    for calls in (1, 2):
        norms.measure(tensor, 0, 1)
        for _ in range(2):
            norms.settle([norms.saved()] * 2)
            assert norms.sections()[0].norm == pytest.approx(math.sqrt(2 * 25 * calls))
            assert total_of([norms]).norm == norms.sections()[0].norm


def test_what_is_beyond_double():
    tensor = torch.tensor([1e200, 1.0], dtype=torch.float64)
    norms = Norms()
    norms.measure(tensor, 0, 1)
    norms.settle([norms.saved()])
    assert norms.sections() == [Norm(math.inf, 1e200, 0)]


SCRIPT = """
import json, sys, torch
from fastreduce import Norms
found = []
for seed in range(3):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(5000, generator=g)
    if seed == 2: x[77] = float("inf")
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        norms = Norms([1, 2000, 2999])
        norms.measure(x.to(dtype), 0, 1)
        found.append(norms.saved().tolist())
print(json.dumps(found))
"""


def test_every_instruction_set_counts_alike():
    said = on_every_instruction_set(SCRIPT)
    assert len({json.dumps(found) for found in said.values()}) == 1
    assert "baseline" in said


def test_what_cannot_be_counted_is_refused():
    with pytest.raises(TypeError, match="norms: expected a floating dtype"):
        Norms().measure(torch.ones(3, dtype=torch.int32), 0, 1)
    with pytest.raises(ValueError, match="sections"):
        Norms([3, -1])
    with pytest.raises(ValueError, match="contiguous"):
        Norms().measure(torch.ones(1).expand(5), 0, 1)
    with pytest.raises(RuntimeError, match="sum_norms"):
        Norms().sections()


# -- in a reduction --------------------------------------------------------------------------


def reduced(state: dict[str, Any], dtype: torch.dtype, kind: str) -> None:
    """Every algorithm and placement, several calls in one count, weights and threads."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for threads in (1, 3):
        comm = state.setdefault(threads, fastreduce.Communicator(timeout=60, threads=threads))
        for count in COUNTS:
            inputs = [values(kind, count, 10 * r + count).to(dtype) for r in range(ranks)]
            for algorithm in ("one_shot", "two_shot", "ring"):
                if algorithm == "one_shot" and count * dtype.itemsize > 256 << 10:
                    continue
                for weighted in (False, True):
                    norms = Norms()
                    outputs = []
                    for shared in (True, False):
                        tensor = inputs[rank].clone()
                        if shared:
                            tensor = comm.empty(count, dtype=dtype)
                            tensor.copy_(inputs[rank])
                        how = {"scale": rank + 1.0, "weight": rank + 1.0} if weighted else {}
                        comm.all_reduce(tensor, algorithm=algorithm, norms=norms, **how)
                        outputs.append(tensor)
                    comm.sum_norms(norms)
                    expected = Norms()
                    for tensor in outputs:
                        expected.measure(tensor, 0, 1)
                    expected.settle([expected.saved()])
                    where = (threads, count, algorithm, weighted)
                    assert repr(norms.sections()) == repr(expected.sections()), where
                    # What is counted does not change what is stored.
                    again = inputs[rank].clone()
                    comm.all_reduce(again, algorithm=algorithm, **how)
                    assert same_bits(again, outputs[1]), where


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_a_reduction_counts_what_it_stores(pool, world, dtype):
    for kind in ("normal", "special") if world < 4 else ("spread",):
        pool(world).run(reduced, dtype, kind)


def asynchronous(state: dict[str, Any]) -> None:
    """A count lives as long as its call, whoever drops it."""
    comm = state.setdefault("asynchronous", fastreduce.Communicator(timeout=60))
    mine = make_inputs(1, 2, 70_001, torch.float32)[dist.get_rank()]
    expected = mine.clone()
    comm.all_reduce(expected)
    norms = Norms()
    first, second = mine.clone(), mine.clone()
    work = comm.all_reduce(first, async_op=True, norms=norms)
    future = comm.all_reduce_future(second, norms=norms)
    dropped = comm.all_reduce(mine.clone(), async_op=True, norms=Norms())
    work.wait()
    future.wait()
    dropped.wait()
    comm.sum_norms(norms)
    assert norms.sections()[0].norm == pytest.approx(
        math.sqrt(2) * expected.double().norm().item(), rel=1e-14
    )
    strided = torch.zeros(50, 20).t()
    strided.fill_(2.0)
    norms.clear()
    comm.all_reduce(strided, norms=norms)
    comm.sum_norms(norms)
    assert norms.sections() == [Norm(math.sqrt(4000), 2.0, 0)]
    with pytest.raises(TypeError, match="floating"):
        comm.all_reduce(torch.ones(3, dtype=torch.int64), "sum", norms=norms)
    with pytest.raises(ValueError, match="a sum or a mean, got max"):
        comm.all_reduce(torch.ones(3), "max", norms=norms)


def test_asynchronous_calls_count(pool):
    pool(2).run(asynchronous)


# -- in the hook -----------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 33)
        self.first = nn.Linear(33, 700)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(700, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(torch.tanh(self.first(self.embedding(x))))
        return out


def attach(way: str, ddp: DistributedDataParallel, **how: Any) -> fastreduce.HookState:
    real = rendezvous._boot_id
    if way == "hosts" and dist.get_rank() == 1:
        rendezvous._boot_id = lambda: "another boot"
    try:
        return fastreduce.attach(ddp, timeout=TIMEOUT, **how)
    finally:
        rendezvous._boot_id = real


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    out: torch.Tensor = model(torch.randint(40, (6,), generator=generator))
    return out.float().square().sum()


def in_the_hook(_: dict[str, Any], way: str, dtype: torch.dtype, how: dict[str, Any]) -> list[Any]:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Net().to(dtype), bucket_cap_mb=0.02, find_unused_parameters=True)
    state = attach(way, ddp, norms="parameters", **how)
    with pytest.raises(RuntimeError, match="no synchronised pass"):
        state.grad_norm  # noqa: B018
    seen = []
    for step in range(4):
        ddp.zero_grad()
        if step == 2:
            with ddp.no_sync():
                loss_of(ddp, 50, dist.get_rank()).backward()
        loss_of(ddp, step, dist.get_rank()).backward()
        found = state.grad_norm
        used = {n: p.grad for n, p in ddp.module.named_parameters() if p.grad is not None}
        assert set(found.parameters) == {n for n, _ in ddp.module.named_parameters()}
        for name, gradient in used.items():
            assert found.parameters[name].norm == pytest.approx(
                gradient.double().norm().item(), rel=1e-12, abs=0
            )
            assert found.parameters[name].largest == gradient.abs().max().item()
        assert found.parameters["unused.weight"] == Norm(0.0, 0.0, 0)
        total = torch.nn.utils.get_total_norm([g.double() for g in used.values()]).item()
        assert found.norm == pytest.approx(total, rel=1e-12)
        assert found.nonfinite == 0
        # Clipping, beside torch's.
        twin = copy.deepcopy(ddp.module)
        for mine, other in zip(ddp.module.parameters(), twin.parameters(), strict=True):
            other.grad = None if mine.grad is None else mine.grad.clone()
        for limit in [(2 * total, total / 3, total, 0.0)[step]]:
            kind = math.inf if step == 3 else 2.0
            wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), limit, kind)
            got = state.clip_grad_norm(limit, kind)
            assert got.shape == () and got.dtype == torch.float32
            assert got.item() == pytest.approx(
                wanted.item(), rel=1e-2 if dtype != torch.float32 else 1e-6
            )
        with pytest.raises(RuntimeError, match="clipped already"):
            state.clip_grad_norm(1.0)
        close = 1e-6 if dtype == torch.float32 else 1e-2
        for mine, other in zip(ddp.module.parameters(), twin.parameters(), strict=True):
            if mine.grad is not None:
                assert torch.allclose(mine.grad, other.grad, rtol=close, atol=1e-30)
        assert state.grad_norm is found  # as it was before
        seen.append((found.norm, found.largest))
    state.close()
    return seen


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        (torch.float32, {}),
        (torch.bfloat16, {}),
        (torch.float32, {"wire": "int8", "wire_min_bytes": 0}),
    ],
    ids=["float32", "bfloat16", "int8"],
)
def test_the_hook_counts_and_clips(pool, way, dtype, how):
    first, *others = pool(3).run(in_the_hook, way, dtype, how)
    assert all(other == first for other in others)


def in_shards(_: dict[str, Any], dtype: torch.dtype) -> list[float]:
    """A step's norm before each of several clipped steps."""
    torch.manual_seed(0)
    model = Net().to(dtype)
    del model.unused
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    seen = []
    with fastreduce.attach(ddp, timeout=TIMEOUT, norms=True) as state:
        for step in range(4):
            optimizer.zero_grad()
            for shard in state.shards(4):
                loss_of(ddp, step, shard).backward()
            state.clip_grad_norm(0.1)
            optimizer.step()
            seen.append(state.grad_norm.norm)
            gradients = [p.grad for p in model.parameters()]
            scale = min(1.0, 0.1 / (seen[-1] + 1e-6))
            now = math.sqrt(sum(g.double().square().sum().item() for g in gradients))
            close = 1e-5 if dtype == torch.float32 else 1e-2
            assert now == pytest.approx(seen[-1] * scale, rel=close)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_norm_does_not_depend_on_the_number_of_ranks(pool, dtype):
    found = {repr(each) for world in (1, 2, 4) for each in pool(world).run(in_shards, dtype)}
    assert len(found) == 1


def overflowed(_: dict[str, Any], way: str) -> list[str]:
    """An inf on one rank: all find it."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    state = attach(way, ddp, norms=True)
    for bad in (math.inf, math.nan):
        ddp.zero_grad()
        x = torch.ones(2, 40)
        if dist.get_rank() == 1:
            x[0, 3] = bad
        ddp(x).sum().backward()
        assert state.grad_norm.nonfinite == 40
        with pytest.raises(RuntimeError, match="the norm of the gradients is"):
            state.clip_grad_norm(1.0, error_if_nonfinite=True)
        wanted = torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()]).item()
        assert repr(state.grad_norm.norm) == repr(wanted)
    state.close()
    return [repr(state.grad_norm)]


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_finite_is_counted(pool, way):
    first, *others = pool(2).run(overflowed, way)
    assert all(other == first for other in others)


def sparse_and_late(_: dict[str, Any]) -> None:
    """Sparse gradients, ranks that have joined, a state that is bound late; a pass without."""

    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(30, 4, sparse=True)
            self.dense = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.dense(self.rows(x)).square().sum()
            return out

    torch.manual_seed(0)
    rank = dist.get_rank()
    ddp = DistributedDataParallel(Sparse())
    with fastreduce.HookState(norms=True, timeout=TIMEOUT) as state:
        ddp.register_comm_hook(state, fastreduce.all_reduce_hook)
        for step in range(2):
            ddp.zero_grad()
            ddp(torch.tensor([step, 3 + rank])).backward()
            gradients = [p.grad.to_dense().double() for p in ddp.parameters()]
            wanted = math.sqrt(sum(g.square().sum().item() for g in gradients))
            assert state.grad_norm.norm == pytest.approx(wanted, rel=1e-12)
            state.clip_grad_norm(wanted / 2)
            now = math.sqrt(sum(p.grad.to_dense().square().sum().item() for p in ddp.parameters()))
            assert now == pytest.approx(wanted / 2, rel=1e-5)
    uneven = DistributedDataParallel(nn.Linear(4, 4))
    with fastreduce.attach(uneven, norms=True) as state, uneven.join():
        for _ in range(2 + rank):
            uneven.zero_grad()
            uneven(torch.ones(2, 4)).sum().backward()
            gradients = [p.grad.double() for p in uneven.parameters()]
            wanted = torch.nn.utils.get_total_norm(gradients).item()
            assert state.grad_norm.norm == pytest.approx(wanted, rel=1e-12)
    frozen = DistributedDataParallel(Net(), find_unused_parameters=True)
    frozen.module.first.bias.requires_grad_(False)
    with fastreduce.attach(frozen, norms="parameters") as state:
        assert state.clip_grad_norm is not None
        loss_of(frozen, 0, rank).backward()
        assert "first.bias" in state.grad_norm.parameters
        frozen.zero_grad()
        state.clip_grad_norm(0.0)  # of nothing
    with fastreduce.attach(DistributedDataParallel(nn.Linear(4, 4))) as state:
        with pytest.raises(RuntimeError, match="norms=True"):
            state.grad_norm  # noqa: B018
        with pytest.raises(RuntimeError, match="norms=True"):
            state.clip_grad_norm(1.0)
    with pytest.raises(ValueError, match="norms: expected"):
        fastreduce.attach(DistributedDataParallel(nn.Linear(4, 4)), norms="all")
    with pytest.raises(ValueError, match="count_unused"):
        fastreduce.attach(DistributedDataParallel(nn.Linear(4, 4)), norms=True, count_unused=False)


def test_other_ways_through_the_hook(pool):
    pool(2).run(sparse_and_late)


def dies_before_the_end() -> str:
    ddp = DistributedDataParallel(nn.Linear(40, 40), init_sync=False)
    state = fastreduce.attach(ddp, timeout=TIMEOUT, norms=True)
    for _ in range(2):  # DDP rebuilds its buckets by the group
        ddp(torch.ones(2, 40)).sum().backward()
    before = state.grad_norm
    if dist.get_rank() == 1:
        os._exit(9)
    with pytest.raises(RuntimeError, match="rank 1"):
        ddp(torch.ones(2, 40)).sum().backward()
    assert state.grad_norm is before  # that of the last pass that was averaged
    assert isinstance(state.communicator.error, fastreduce.CommunicatorError)
    state.__exit__(RuntimeError, None, None)
    return "told"


def test_a_lost_peer_leaves_the_norm_of_before(ranks):
    group = ranks(2)
    for rank in range(2):
        group.start(rank, dies_before_the_end)
    assert group.result(0) == "told"
