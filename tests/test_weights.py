"""Weighted means: sum(n x gradient) / sum(n), whatever each rank's n is."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from conftest import same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce import reference

TIMEOUT = 60.0
SHARDS = 8


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 7))


def samples(step: int, rank: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(count, 12, generator=generator)
    return x, torch.randint(0, 7, (count,), generator=generator)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def loss(model, x, y, reduction):
    return nn.functional.cross_entropy(model(x), y, reduction=reduction)


def local(model: nn.Module, step: int, counts, reduction):
    """Every rank's own gradients, by parameter."""
    alone = copy.deepcopy(model)
    ranks = []
    for rank, count in enumerate(counts):
        alone.zero_grad()
        loss(alone, *samples(step, rank, count), reduction).backward()
        ranks.append(gradients(alone))
    return list(zip(*ranks, strict=True))


def whole(model: nn.Module, step: int, counts):
    """One process on all samples."""
    alone = copy.deepcopy(model).double()
    alone.zero_grad()
    parts = [samples(step, rank, count) for rank, count in enumerate(counts)]
    x, y = (torch.cat(each) for each in zip(*parts, strict=True))
    loss(alone, x.double(), y, "mean").backward()
    return gradients(alone)


def weighted(counts, reduction, options):
    rank = dist.get_rank()
    model = build()
    ddp = DistributedDataParallel(model, **options)
    with fastreduce.attach(ddp, timeout=TIMEOUT) as state:
        for step in range(4):
            mine = counts[step % len(counts)]
            ddp.zero_grad()
            state.weight(mine[rank], reduction)
            loss(ddp, *samples(step, rank, mine[rank]), reduction).backward()
            # The mean over no samples is NaN: it must not count.
            scales = mine if reduction == "mean" else [float(n > 0) for n in mine]
            expected = [
                reference.all_reduce(each, "mean", scales, [float(n) for n in mine])
                for each in local(model, step, mine, reduction)
            ]
            for got, want, exact in zip(
                gradients(model), expected, whole(model, step, mine), strict=True
            ):
                assert same_bits(got, want), step
                torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(
    "options", [{}, {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True}], ids=["", "views"]
)
def test_weighted_mean(ranks, reduction, options):
    counts = [(1, 3, 2), (5, 5, 1), (4, 0, 3), (0, 0, 2)]
    ranks(3).run(weighted, counts, reduction, options)


def exactly_one_process():
    """One and three samples; all sums of small integers, so that no order of sums can matter: the
    bits are those of one process on four."""
    rank = dist.get_rank()
    x = torch.tensor([[1.0, -2, 3], [4, 0, -6], [2, 5, -1], [-3, 1, 8]])
    mine = x[:1] if rank == 0 else x[1:]
    model = nn.Linear(3, 2)
    alone = copy.deepcopy(model)
    alone(x).sum().div(4).backward()
    ddp = DistributedDataParallel(model)
    with fastreduce.attach(ddp, timeout=TIMEOUT) as state:
        state.weight(len(mine), "sum")
        ddp(mine).sum().backward()
        for got, want in zip(gradients(model), gradients(alone), strict=True):
            assert same_bits(got, want)
        # What trainers get wrong: the mean of the ranks' means is another one.
        ddp.zero_grad()
        state.weight(1)
        ddp(mine).sum().div(len(mine)).backward()
        assert not torch.equal(model.weight.grad, alone.weight.grad)


def test_one_and_three_samples_are_four(ranks):
    ranks(2).run(exactly_one_process)


def accumulated(reduction):
    """Micro-batches of other sizes on every rank: weights add up under no_sync()."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sizes = [[2, 5, 1], [4, 0, 3]] if reduction == "sum" else [[3, 3, 3], [5, 5, 5]]
    model = build()
    ddp = DistributedDataParallel(model)
    with fastreduce.attach(ddp, timeout=TIMEOUT) as state:
        for _ in range(2):
            ddp.zero_grad()
            for micro, n in enumerate(sizes[rank]):
                state.weight(n, reduction)
                ddp.require_backward_grad_sync = micro == 2
                part = loss(ddp, *samples(micro, rank, n), reduction)
                # For means, the accumulated gradient has to be the mean over the rank's samples.
                (part if reduction == "sum" else part / 3).backward()
            alone = build()
            parts = [samples(m, r, sizes[r][m]) for r in range(world_size) for m in range(3)]
            x, y = (torch.cat(each) for each in zip(*parts, strict=True))
            loss(alone, x, y, "mean").backward()
            for got, want in zip(gradients(model), gradients(alone), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights_add_up_under_no_sync(ranks, reduction):
    ranks(2).run(accumulated, reduction)


def joined(weighted, options):
    """Uneven inputs: rank r has r + 1 batches. Joined ranks do not count, or, if DDP's user asks
    for the initial world size, as zeros."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = nn.Linear(3, 1, bias=False)
    nn.init.ones_(model.weight)
    ddp = DistributedDataParallel(model)
    seen = []
    with fastreduce.attach(ddp, timeout=TIMEOUT) as state, ddp.join(**options):
        for _ in range(rank + 1):
            ddp.zero_grad()
            if weighted:
                state.weight(2.0 * rank + 1)
            ddp(torch.full((1, 3), float(rank + 1))).sum().backward()
            seen.append(model.weight.grad[0, 0].item())
    for step, got in enumerate(seen):
        active = range(step, world_size)
        if weighted:
            want = sum((2 * r + 1) * (r + 1) for r in active) / sum(2 * r + 1 for r in active)
        else:
            divisor = world_size if options.get("divide_by_initial_world_size", True) else None
            want = sum(r + 1 for r in active) / (divisor or len(active))
        assert got == pytest.approx(want, rel=1e-6), (step, seen)
    return seen


@pytest.mark.parametrize("options", [{}, {"divide_by_initial_world_size": False}], ids=str)
@pytest.mark.parametrize("weighted", [False, True])
def test_join(ranks, weighted, options):
    ranks(3).run(joined, weighted, options)


def joined_at_once(weighted, count_unused, shards):
    """The first rank has no batch at all, so that it never says what its weights are like."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    state = fastreduce.attach(ddp, timeout=TIMEOUT, count_unused=count_unused)
    with ddp.join():
        for step in range(2 if rank else 0):
            ddp.zero_grad()
            for _ in state.shards(SHARDS) if shards else [0]:
                if weighted:
                    state.weight(rank)
                # Only the last rank uses the layer.
                ddp(torch.full((1, 3), rank + 1.0 + step), rank == world_size - 1).sum().backward()
            n = [r if weighted else float(r > 0) for r in range(world_size)]
            own = [(r + 1 + step) for r in range(world_size)]
            # Joined ranks count as zeros, unless weights or shards say how many there are.
            total = sum(n) if weighted or shards or not count_unused else world_size
            both = sum(n[r] * own[r] for r in range(world_size)) / total
            some = n[-1] * own[-1] / (total if count_unused else n[-1])
            assert model.both.weight.grad[0, 0].item() == pytest.approx(both)
            assert model.some.weight.grad[0, 0].item() == pytest.approx(some)
    state.close()


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("count_unused", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_join_without_any_batch(ranks, weighted, count_unused, shards):
    # Shards want a power of two.
    ranks(4 if shards else 3).run(joined_at_once, weighted, count_unused, shards)


def like_gloo_under_join(options):
    seen = []
    for hook in (False, True):
        model = nn.Linear(3, 1, bias=False)
        nn.init.ones_(model.weight)
        ddp = DistributedDataParallel(model)
        state = fastreduce.attach(ddp, timeout=TIMEOUT) if hook else None
        with ddp.join(**options):
            for step in range(2 * dist.get_rank() + 1):
                ddp.zero_grad()
                ddp(torch.full((1, 3), 1.5 * step + dist.get_rank())).sum().backward()
                seen.append((hook, model.weight.grad.tolist()))
        if state is not None:
            state.close()
    plain = [grad for hook, grad in seen if not hook]
    assert plain == [grad for hook, grad in seen if hook]


@pytest.mark.parametrize("options", [{}, {"divide_by_initial_world_size": False}], ids=str)
def test_join_is_as_without_a_hook(ranks, options):
    ranks(2).run(like_gloo_under_join, options)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Linear(3, 1, bias=False)
        self.some = nn.Linear(3, 1, bias=False)
        self.none = nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        y = self.both(x)
        return y + self.some(x) if use else y


def unused(count_unused, weighted):
    """Only the last rank uses a layer."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    last = world_size - 1
    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    with fastreduce.attach(ddp, timeout=TIMEOUT, count_unused=count_unused) as state:
        for step in range(3):
            ddp.zero_grad()
            if weighted:
                state.weight(rank + 1)
            # This is no use of it.
            torch.autograd.grad(model(torch.ones(1, 3), True).sum(), model.some.weight)
            ddp(torch.full((1, 3), float(step + rank)), rank == last).sum().backward()
            n = [rank + 1 if weighted else 1 for rank in range(world_size)]
            both = sum(n[r] * (step + r) for r in range(world_size)) / sum(n)
            some = n[last] * (step + last) / (sum(n) if count_unused else n[last])
            assert model.both.weight.grad[0, 0].item() == pytest.approx(both)
            assert model.some.weight.grad[0, 0].item() == pytest.approx(some)
            assert model.none.weight.grad is None


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("count_unused", [False, True])
def test_unused_parameters(ranks, count_unused, weighted):
    ranks(3).run(unused, count_unused, weighted)


def unused_accumulated():
    """A layer that one rank uses in one micro-batch: that micro-batch's samples count for it."""
    rank = dist.get_rank()
    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    with fastreduce.attach(ddp, timeout=TIMEOUT, count_unused=False) as state:
        for micro, n in enumerate([2, 3]):
            state.weight(n, "sum")
            ddp.require_backward_grad_sync = micro == 1
            ddp(torch.full((n, 3), 1.0), rank == 1 and micro == 1).sum().backward()
        assert model.some.weight.grad[0].tolist() == [1.0] * 3  # 3 samples of 1, over 3
        assert model.both.weight.grad[0].tolist() == [1.0] * 3


def test_unused_parameters_under_no_sync(ranks):
    ranks(2).run(unused_accumulated)


def unused_in_shards(weighted):
    """A shard counts for the parameters that it uses."""
    rank = dist.get_rank()
    model = Branches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    with fastreduce.attach(ddp, timeout=TIMEOUT, count_unused=False) as state:
        for _ in range(2):
            ddp.zero_grad()
            for shard in state.shards(SHARDS):
                if weighted:
                    state.weight(shard + 1)
                ddp(torch.full((1, 3), 2.0 * shard), shard in (1, 6)).sum().backward()
            n = [shard + 1 if weighted else 1 for shard in range(SHARDS)]
            both = sum(n[s] * 2 * s for s in range(SHARDS)) / sum(n)
            some = (n[1] * 2 + n[6] * 12) / (n[1] + n[6])
            assert model.both.weight.grad[0, 0].item() == pytest.approx(both), rank
            assert model.some.weight.grad[0, 0].item() == pytest.approx(some), rank


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_unused_parameters_in_shards(ranks, world_size, weighted):
    ranks(world_size).run(unused_in_shards, weighted)


def empty(none_if_empty, options):
    """No rank has a sample: gradients are 0 although the means are NaN, or None."""
    model = build()
    ddp = DistributedDataParallel(model, **options)
    state = fastreduce.attach(ddp, timeout=TIMEOUT, none_if_empty=none_if_empty)
    for count in (0, 2, 0):
        ddp.zero_grad()
        state.weight(count)
        loss(ddp, *samples(0, dist.get_rank(), count), "mean").backward()
        for p in model.parameters():
            if count:
                assert p.grad.any()
            elif none_if_empty:
                assert p.grad is None
            else:
                assert p.grad.eq(0).all()
    state.close()


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["", "views"])
@pytest.mark.parametrize("none_if_empty", [False, True])
def test_no_samples_at_all(ranks, none_if_empty, options):
    ranks(2).run(empty, none_if_empty, options)


def wrong():
    ddp = DistributedDataParallel(build())
    with fastreduce.attach(ddp, timeout=TIMEOUT) as state:
        for n in (-1, math.nan, math.inf, 1e-40, 1e38):
            with pytest.raises(ValueError, match="expected 0, or 1e-30 to 1e30"):
                state.weight(n)
        with pytest.raises(ValueError, match="reduction"):
            state.weight(1, "max")
        batch = samples(0, 0, 2)
        state.weight(2, "mean")  # replaced, since no forward pass comes before the next one
        state.weight(2, "sum")
        with ddp.no_sync():
            loss(ddp, *batch, "sum").backward()
        with pytest.raises(ValueError, match="micro-batches before"):
            state.weight(2, "mean")
        state.weight(2, "sum")
        loss(ddp, *batch, "sum").backward()
        # Forgotten: an error, and not the mean of the ranks.
        with pytest.raises(RuntimeError, match="but not for this one"):
            loss(ddp, *batch, "sum").backward()


def forgotten():
    """By one rank, always: an error on both, with nothing averaged."""
    ddp = DistributedDataParallel(build())
    with fastreduce.attach(ddp, timeout=TIMEOUT) as state:
        if dist.get_rank() == 0:
            state.weight(2)
        with pytest.raises(RuntimeError, match="rank 1 gives no weight, others do otherwise"):
            loss(ddp, *samples(0, 0, 2), "mean").backward()
        assert isinstance(state.communicator.error, fastreduce.MismatchError)
        assert state.communicator.error.intact


def test_a_rank_that_gives_no_weight(ranks):
    ranks(2).run(forgotten)


def skipped():
    """Batches that fail, or are skipped, leave no weight behind."""
    rank = dist.get_rank()
    model = nn.Linear(3, 1, bias=False)
    ddp = DistributedDataParallel(model)
    with fastreduce.attach(ddp, timeout=TIMEOUT) as state:
        for batch in range(3):
            ddp.zero_grad()
            state.weight(100 * (rank + 1))
            if batch == 1:
                with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
                    ddp(torch.ones(1, 99))
            if batch == 2:
                ddp(torch.ones(1, 3))  # whose loss, say, is NaN: no backward pass
                state.discard_weight()
            state.weight(1)
            ddp(torch.full((1, 3), float(rank))).sum().backward()
            assert model.weight.grad[0].tolist() == [0.5] * 3


def test_batches_that_are_skipped(ranks):
    ranks(2).run(skipped)


def test_wrong_weights(ranks):
    ranks(2).run(wrong)
