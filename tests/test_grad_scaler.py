"""Loss scaling whose unscaling and overflow check ride along with the averaging."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import same_bits
from test_norms import WAYS, attach
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "fused": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, fused=True),
}


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 300), nn.Tanh(), nn.Linear(300, 4)).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, blow: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(6, 20, generator=generator).to(next(model.parameters()).dtype)
    loss: torch.Tensor = model(x).float().square().mean()
    return loss * math.inf if blow else loss


def like_torchs(
    _: dict[str, Any], way: str, optimizer: str, how: dict[str, Any]
) -> tuple[list[float], list[torch.Tensor]]:
    """Step by step beside torch's GradScaler over fastreduce without norms: overflows on one rank,
    accumulation, clipping, with and without unscale_()."""
    rank = dist.get_rank()
    mine, other = (DistributedDataParallel(build(), bucket_cap_mb=0.01) for _ in range(2))
    state, plain = attach(way, mine, **how), attach(way, other)
    scaling = {"init_scale": 2.0**10, "growth_interval": 3}
    scaler = fastreduce.GradScaler(state, **scaling)
    torchs = torch.amp.GradScaler("cpu", **scaling)
    steps, others = (OPTIMIZERS[optimizer](each.parameters()) for each in (mine, other))
    scales = []
    for step in range(8):
        blow = step in (2, 6) and rank == 1
        for ddp, stepper, scaling_by in ((mine, steps, scaler), (other, others, torchs)):
            stepper.zero_grad()
            if step == 4:
                with ddp.no_sync():
                    scaling_by.scale(loss_of(ddp, 40, rank)).backward()
            scaling_by.scale(loss_of(ddp, step, rank, blow)).backward()
            if ddp is mine and step not in (2, 6):  # at once, before anything unscales
                wanted = torch.nn.utils.get_total_norm([p.grad for p in ddp.parameters()])
                assert state.grad_norm.norm == pytest.approx(wanted.item(), rel=1e-6)
                assert wanted < 100
            if step in (1, 5):
                scaling_by.unscale_(stepper)
                if ddp is mine:
                    state.clip_grad_norm(0.05)
                else:
                    torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
            before = copy.deepcopy([p.detach() for p in ddp.parameters()])
            scaling_by.step(stepper)
            scaling_by.update()
            same = all(same_bits(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
            assert same == (step in (2, 6))
        assert scaler.get_scale() == torchs.get_scale()
        scales.append(scaler.get_scale())
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), f"step {step}"
            if step == 0:
                assert same_bits(a, b)
    state.close()
    plain.close()
    return scales, [p.detach().clone() for p in mine.parameters()]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("optimizer", "how"),
    [("sgd", {}), ("adam", {"norms": "parameters"}), ("fused", {})],
    ids=["sgd", "adam", "fused"],
)
def test_it_trains_like_torchs(pool, way, optimizer, how):
    (scales, first), *others = pool(2).run(like_torchs, way, optimizer, how)
    assert any(b > a for a, b in itertools.pairwise(scales)) and min(scales) < scales[0]
    for found, parameters in others:
        assert found == scales
        assert all(same_bits(a, b) for a, b in zip(parameters, first, strict=True))


def with_a_wire(_: dict[str, Any], way: str) -> None:
    """Residuals are of unscaled gradients: a scale that changes does not touch them."""
    rank = dist.get_rank()
    mine, other = (DistributedDataParallel(build()) for _ in range(2))
    state = attach(way, mine, wire="int4", wire_min_bytes=0)
    plain = attach(way, other, wire="int4", wire_min_bytes=0)
    scaler = fastreduce.GradScaler(state, init_scale=2.0**8, growth_interval=1)
    for step in range(5):
        for ddp, scaling_by in ((mine, scaler.scale), (other, lambda loss: loss)):
            ddp.zero_grad()
            scaling_by(loss_of(ddp, step, rank, step == 2 and rank == 1)).backward()
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert same_bits(a.grad, b.grad), f"step {step}"
        assert (state.grad_norm.nonfinite > 0) == (step == 2)
        scaler.step(torch.optim.SGD(mine.parameters(), lr=0.0))
        scaler.update()
    assert scaler.get_scale() != 2.0**8
    kept = [each.state_dict()["compression"]["residuals"] for each in (state, plain)]
    for name in kept[0]:
        assert same_bits(kept[0][name]["sent"], kept[1][name]["sent"])
    state.close()
    plain.close()


@pytest.mark.parametrize("way", WAYS)
def test_residuals_are_unscaled(pool, way):
    pool(2).run(with_a_wire, way)


def half(_: dict[str, Any]) -> None:
    """What is unscaled would be rounded to float16, and so to 0."""
    ddp = DistributedDataParallel(build(torch.float16))
    state = fastreduce.attach(ddp, timeout=60)
    with state, pytest.raises(ValueError, match="no float16 parameters"):
        fastreduce.GradScaler(state)


def test_float16_parameters_are_refused(pool):
    pool(2).run(half)


def joined_and_rolled_back(_: dict[str, Any]) -> None:
    rank = dist.get_rank()
    ddp = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with fastreduce.attach(ddp, timeout=60) as state:
        scaler = fastreduce.GradScaler(state, init_scale=2.0**8, growth_interval=1)

        def step(number: int) -> None:
            optimizer.zero_grad()
            scaler.scale(loss_of(ddp, number, rank)).backward()
            scaler.step(optimizer)
            scaler.update()

        with ddp.join():
            for number in range(2 + 2 * rank):  # rank 0 ends before; its scale stays
                step(number)
        assert scaler.get_scale() == 2.0 ** (8 + 2 + 2 * rank)
        scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0**8})
        saved = state.state_dict()
        step(5)
        state.load_state_dict(saved)  # one step back, and on
        step(5)


def test_ranks_that_have_joined_and_steps_taken_back(pool):
    pool(2).run(joined_and_rolled_back)


def differing(way: str) -> str:
    """One rank's scale is another one's half: an error on all, and no step."""
    ddp = DistributedDataParallel(build())
    state = attach(way, ddp)
    scaler = fastreduce.GradScaler(state, init_scale=2.0 ** (10 - dist.get_rank()))
    with pytest.raises(RuntimeError, match=r"the loss scale differs .* 1024.0 on rank 0, 512.0"):
        scaler.scale(loss_of(ddp, 0, dist.get_rank())).backward()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    with pytest.raises(fastreduce.UnsynchronizedError):
        scaler.step(optimizer)
    state.__exit__(RuntimeError, None, None)
    return "told"


@pytest.mark.parametrize("way", WAYS)
def test_a_scale_that_differs_is_found(ranks, way):
    assert ranks(2).run(differing, way) == ["told"] * 2


def misused(_: dict[str, Any]) -> None:
    ddp = DistributedDataParallel(build())
    with fastreduce.attach(ddp, timeout=60) as state:
        scaler = fastreduce.GradScaler(state)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        other = build()
        foreign = torch.optim.SGD([*ddp.parameters(), *other.parameters()], lr=0.1)
        (scaler.scale(loss_of(ddp, 0, 0)) + loss_of(other, 0, 0)).backward()
        with pytest.raises(ValueError, match=r"4 of its parameters .* not averaged"):
            scaler.step(foreign)
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        with ddp.no_sync():
            scaler.scale(loss_of(ddp, 1, 0)).backward()
        with pytest.raises(fastreduce.UnsynchronizedError):
            scaler.step(optimizer)
    ddp = DistributedDataParallel(build())
    with fastreduce.attach(ddp, timeout=60) as state:
        off = fastreduce.GradScaler(state, enabled=False)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        off.scale(loss_of(ddp, 0, 0)).backward()
        off.step(optimizer)
        off.update()


def test_what_cannot_be_is_refused(pool):
    pool(2).run(misused)
