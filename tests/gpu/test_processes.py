"""Communicators of several processes that share one GPU, over torch's symmetric memory.

Needs TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 in the environment (set here) and a gloo group.
"""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from conftest import Lines, Ranks, make_inputs, needs_gpu, same_bits
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce import reference

pytestmark = needs_gpu()

os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"


def reduce_all(algorithms: list[str]) -> list[tuple[str, int, bool]] | list[str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    lines = Lines()
    torch.cuda.set_device(0)
    wrong = []
    with fastreduce.Communicator() as communicator:
        if not communicator.connect("cuda"):
            return lines.lines
        for algorithm in algorithms:
            for count in (1, 999, 40000, 3 << 20):
                if count * 4 > 256 << 10 and algorithm in ("low_latency", "one_shot"):
                    continue
                inputs = make_inputs(count, world_size, count, torch.float32)
                expected = (
                    reference.ring_all_reduce(inputs)
                    if algorithm == "ring"
                    else reference.all_reduce(inputs)
                )
                staged = inputs[rank].cuda()
                symmetric = communicator.empty(count, device="cuda").copy_(inputs[rank])
                for name, tensor in (("staged", staged), ("symmetric", symmetric)):
                    communicator.all_reduce(tensor, algorithm=algorithm)
                    if not same_bits(tensor.cpu(), expected):
                        wrong.append((f"{algorithm} {name}", count, False))
                work = communicator.all_reduce(staged.copy_(inputs[rank]), async_op=True)
                work.wait()
                if algorithm != "ring" and not same_bits(
                    staged.cpu(), reference.all_reduce(inputs)
                ):
                    wrong.append(("async", count, False))
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_reduce(ranks, world_size):
    algorithms = ["low_latency", "one_shot", "two_shot", "ring", "auto"]
    results = ranks(world_size).run(reduce_all, algorithms)
    if results[0] and isinstance(results[0][0], str):
        pytest.skip(f"no symmetric memory here: {results[0]}")
    assert results == [[]] * world_size


def train(attached: bool) -> list[torch.Tensor]:
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)
    ).cuda()
    ddp = DistributedDataParallel(model, device_ids=[0])
    state = fastreduce.attach(ddp) if attached else None
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for step in range(4):
        torch.manual_seed(step * 10 + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(16, 64, device="cuda")).square().mean().backward()
        optimizer.step()
    parameters = [p.detach().cpu() for p in ddp.parameters()]
    if state is not None:
        state.close()
    return parameters


def test_ddp_trains_as_without_the_hook(ranks):
    with_hook = ranks(2).run(train, True)
    without = ranks(2).run(train, False)
    for a, b, c in zip(with_hook[0], with_hook[1], without[0], strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c)


def wait_for_the_dead(victim: int) -> tuple[str, float]:
    torch.cuda.set_device(0)
    communicator = fastreduce.Communicator(timeout=60)
    tensor = torch.ones(1000, device="cuda")
    communicator.all_reduce(tensor)
    torch.cuda.synchronize()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    try:
        communicator.all_reduce(tensor)
        torch.cuda.synchronize()
        communicator.all_reduce(tensor)
    except fastreduce.CommunicatorError as error:
        return type(error).__name__, time.monotonic() - begin
    return "nothing", time.monotonic() - begin


def test_a_killed_peer_is_noticed(ranks):
    group: Ranks = ranks(2)
    group.failed = True
    for rank in range(2):
        group.start(rank, wait_for_the_dead, 1)
    name, seconds = group.result(0)
    assert name == "PeerLostError" and seconds < 5
