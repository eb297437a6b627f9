"""What a hook's state saves, and what it saw."""

from __future__ import annotations

import copy
import gc
import io
import logging
import time

import pytest
import torch
import torch.distributed as dist
from conftest import Lines
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce.stats import BucketStats, StepStats, summary

TIMEOUT = 60.0


class Net(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(40, 40) for name in names})

    def forward(self, x: torch.Tensor, skip: str = "") -> torch.Tensor:
        for name, layer in self.layers.items():
            if name != skip:
                x = torch.tanh(layer(x))
        return x


def in_the_middle():
    """A checkpoint between two micro-batches: what has been accumulated goes on in a new model with
    other buckets, after these have been rebuilt, as if nothing had happened."""
    rank = dist.get_rank()

    def make(cap: float, rebuilt: bool):
        torch.manual_seed(0)
        model = Net("a", "b", "c")
        ddp = DistributedDataParallel(model, bucket_cap_mb=cap, find_unused_parameters=True)
        state = fastreduce.attach(ddp, timeout=TIMEOUT, count_unused=False)
        for _ in range(3 if rebuilt else 0):
            ddp(torch.ones(1, 40)).sum().backward()
            ddp.zero_grad()
        return model, ddp, state

    def micro(ddp, state, number):
        state.weight(rank + 1 + number, "sum")
        x = torch.full((2, 40), float(number + rank))
        ddp(x, "b" if number == 0 or rank == 0 else "").sum().backward()

    model, ddp, state = make(25, rebuilt=False)
    with ddp.no_sync():
        micro(ddp, state, 0)
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    grads = [copy.deepcopy(p.grad) for p in model.parameters()]
    micro(ddp, state, 1)
    expected = [p.grad for p in model.parameters()]
    state.close()

    for cap, rebuilt in [(25, False), (0.001, False), (0.001, True)]:
        again, ddp, state = make(cap, rebuilt)
        state.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
        for parameter, grad in zip(again.parameters(), grads, strict=True):
            parameter.grad = copy.deepcopy(grad)
        micro(ddp, state, 1)
        for parameter, want in zip(again.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, want)
        state.close()


def test_a_checkpoint_in_the_middle_of_accumulation(ranks):
    ranks(2).run(in_the_middle)


def names():
    """Keyed by parameter name; other names are listed, and nothing is changed."""
    models = [DistributedDataParallel(Net(*each)) for each in ("ab", "bc", "ab")]
    first, second, third = (fastreduce.attach(ddp, timeout=TIMEOUT) for ddp in models)
    first.weight(3)
    saved = first.state_dict()
    assert list(saved["parameters"]) == [
        f"layers.{n}.{k}" for n in "ab" for k in ("weight", "bias")
    ]
    before = second.state_dict()
    with pytest.raises(ValueError) as error:
        second.load_state_dict(saved)
    assert "missing ['layers.c.bias', 'layers.c.weight']" in str(error.value)
    assert "unknown to this model ['layers.a.bias', 'layers.a.weight']" in str(error.value)
    with pytest.raises(ValueError, match="format"):
        second.load_state_dict({**before, "format": 99})
    assert second.state_dict() == before
    third.load_state_dict(saved)
    assert third.state_dict() == saved
    with pytest.raises(ValueError, match="world_size: expected 2, got 4"):
        third.load_state_dict({**saved, "world_size": 4})
    third.load_state_dict({**saved, "world_size": 4, "weight": None})  # between two steps
    for state in (first, second, third):
        state.close()
    del models
    gc.collect()
    with pytest.raises(RuntimeError, match="model of this state is gone"):
        first.state_dict()


def test_names(ranks):
    ranks(2).run(names)


def seen():
    """Two ranks, of which the second is late in every step."""
    rank = dist.get_rank()
    lines = Lines()
    logging.getLogger("fastreduce").setLevel(logging.INFO)
    torch.manual_seed(0)
    model = Net(*"abcdefgh")
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    state = fastreduce.attach(ddp, timeout=TIMEOUT, record=True)
    for _ in range(4):
        ddp.zero_grad()
        out = ddp(torch.ones(2, 40))
        dist.barrier()  # on a busy machine rank 0 may be late, too
        if rank == 1:
            time.sleep(0.3)
        out.sum().backward()
    with ddp.no_sync():
        ddp(torch.ones(2, 40)).sum().backward()
    steps = state.stats()
    state.close()
    logging.getLogger("fastreduce").setLevel(logging.WARNING)
    return steps, lines.lines


def test_statistics(ranks):
    (first, lines), (second, _) = ranks(2).run(seen)
    assert len(first) == len(second) == 4
    nbytes = 8 * (40 * 40 + 40) * 4
    for mine, others in zip(first, second, strict=True):
        assert mine.nbytes == others.nbytes == nbytes
        assert [b.nbytes for b in mine.buckets] == [b.nbytes for b in others.buckets]
        assert [b.index for b in mine.buckets] == list(range(len(mine.buckets)))
        assert {b.algorithm for b in mine.buckets} <= {"one_shot", "two_shot"}
        # Rank 0 waited for rank 1, which slept, and not the other way round.
        assert mine.straggler == 1 and mine.buckets[0].latest == 1
        assert mine.buckets[0].latest_wait > 0.08 and mine.waiting > 0.08
        for step in (mine, others):
            assert step.moving > 0 and 0 <= step.hidden <= step.waiting + step.moving
            assert step.backward_ended is not None
            for bucket in step.buckets:
                assert bucket.submitted <= bucket.began <= bucket.ended
    # A busy machine may hold rank 0 up in some step, too.
    assert min(others.waiting for others in second) < 0.08
    assert sum(others.waiting for others in second) < sum(mine.waiting for mine in first)
    assert len(first[-1].buckets) > 1
    (line,) = [line for line in lines if "steps of" in line]
    assert line.startswith("rank 0: 4 steps of 0.05 MiB") and "most waited for: rank 1" in line


def test_what_a_summary_adds_up():
    """Backward ended at 10: the first bucket is hidden, half of the second one is."""

    def bucket(index: int, began: float, ended: float, waiting: float, latest: int | None):
        return BucketStats(index, 2**20, "two_shot", began, began, ended, waiting, latest, waiting)

    step = StepStats([bucket(0, 7, 9, 1.5, 2), bucket(1, 9, 11, 0.5, 1)], backward_ended=10)
    assert (step.waiting, step.moving, step.hidden, step.straggler) == (2, 2, 3, 2)
    text = summary([step])
    assert text.startswith("1 steps of 2 MiB in 2 buckets (two_shot 2); per step 2e+03 ms waiting")
    assert "75% of both behind backward" in text and "rank 2, 1.5e+03 ms" in text
    assert summary([]) == "no synchronised step"


def off():
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    state = fastreduce.attach(ddp, timeout=TIMEOUT)
    with pytest.raises(RuntimeError, match="record=True"):
        state.stats()
    state.close()


def test_nothing_is_recorded_unasked(ranks):
    ranks(2).run(off)


def checked():
    """An optimizer with a closure runs backward within its step: that is when it is checked."""
    model = Net("a")
    ddp = DistributedDataParallel(model)
    x = torch.ones(2, 40)

    def closure(module):
        def run():
            optimizer.zero_grad()
            loss = module(x).square().sum()
            loss.backward()
            return loss

        return run

    with fastreduce.attach(ddp, timeout=TIMEOUT) as state:
        for kind in (torch.optim.SGD, torch.optim.LBFGS):
            optimizer = kind(ddp.parameters(), lr=0.01)
            handle = state.check(optimizer)
            optimizer.step(closure(ddp))
            optimizer.step(closure=closure(ddp))
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises(fastreduce.UnsynchronizedError, match="inner module"):
                optimizer.step(closure(model))
            assert all(map(torch.equal, model.parameters(), before))
            handle.remove()
            optimizer.step(closure(model))  # nobody looks any more
        # Every optimizer looks for itself.
        both = [torch.optim.SGD(ddp.parameters(), lr=0.01) for _ in range(2)]
        for optimizer in both:
            state.check(optimizer)
        for _ in range(2):
            closure(ddp)()
            for optimizer in both:
                optimizer.step()
        with pytest.raises(fastreduce.UnsynchronizedError):
            both[0].step()
        with pytest.raises(TypeError, match=r"expected one of torch's own, got object"):
            state.check(object())


def test_check_with_a_closure(ranks):
    ranks(2).run(checked)
