"""Norms on a GPU: the bits of the host's kernels, on any streams, and with one rank over NCCL."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from conftest import needs_gpu
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce import norms

pytestmark = needs_gpu()

pytest.importorskip("fastreduce._cuda", reason="built without nvcc")


@pytest.mark.parametrize("dtype", norms.DTYPES, ids=str)
def test_the_bits_of_the_host(dtype):
    generator = torch.Generator().manual_seed(0)
    for count, sections in ((1, None), (5003, [3, 1027, 0, 3973]), (3_000_001, None)):
        values = torch.randn(count, generator=generator).to(dtype)
        for spoilt in (False, True):
            if spoilt:
                values[count // 2] = math.inf
            there = values.cuda()
            for ranks in (1, 3):
                tables = []
                for place in (values, there):
                    every = []
                    for rank in range(ranks):
                        counted = fastreduce.Norms(sections)
                        counted.measure(place, rank, ranks)
                        every.append(counted.saved())
                    counted.settle(every)
                    tables.append(counted.sections())
                assert repr(tables[0]) == repr(tables[1]), (count, ranks, spoilt)


def test_streams_take_turns():
    counted, expected = fastreduce.Norms(), fastreduce.Norms()
    values = torch.randn(100_000)
    for _ in range(20):
        expected.measure(values, 0, 1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            counted.measure(values.cuda(), 0, 1)
    assert torch.equal(counted.saved(), expected.saved())
    assert torch.equal(counted.saved(), expected.saved())  # once


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", rank=0, world_size=1, store=store)
    yield
    dist.destroy_process_group()


def test_training(one_rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200), nn.Tanh(), nn.Linear(200, 3)).cuda()
    ddp = DistributedDataParallel(model)
    state = fastreduce.attach(ddp, norms="parameters")
    scaler = fastreduce.GradScaler(state, init_scale=2.0**10)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 300, device="cuda")).square().mean()
        scaler.scale(loss * math.inf if step == 2 else loss).backward()
        before = [each.detach().clone() for each in model.parameters()]
        if step != 2:
            whole = torch.cat([each.grad.flatten().double() for each in model.parameters()])
            assert state.grad_norm.norm == pytest.approx(whole.norm().item(), rel=1e-6)
            assert len(state.grad_norm.parameters) == 4
            state.clip_grad_norm(0.01)
            whole = torch.cat([each.grad.flatten().double() for each in model.parameters()])
            assert whole.norm().item() == pytest.approx(0.01, rel=1e-3)
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))
        assert same == (step == 2)
    state.close()
