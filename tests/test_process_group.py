"""Ranks that cannot share memory go through the process group, and the log says why, once."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from conftest import Lines
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce import rendezvous as module

TIMEOUT = 60.0


def on_two_hosts(action):
    """Makes rank 1 look like another host."""
    real = module._boot_id
    if dist.get_rank() == 1:
        module._boot_id = lambda: "another boot"
    try:
        return action()
    finally:
        module._boot_id = real


def everything():
    lines = Lines()
    comm = on_two_hosts(lambda: fastreduce.Communicator(timeout=TIMEOUT))
    n, rank = comm.world_size, comm.rank
    assert "process group" in repr(comm)
    for async_op in [False, True]:

        def wait(work, async_op=async_op):
            assert (work is not None) == async_op
            if work is not None:
                work.wait()
                assert work.is_completed()

        tensor = torch.full((5,), rank + 1.0)
        wait(comm.all_reduce(tensor, "mean", async_op=async_op))
        assert tensor.tolist() == [1.5] * 5
        wait(comm.all_reduce(tensor, "sum", async_op=async_op, scale=2.0))
        assert tensor.tolist() == [6.0] * 5
        least = torch.tensor([rank], dtype=torch.int32)
        wait(comm.all_reduce(least, "max", async_op=async_op))
        assert least.item() == n - 1
        mean = torch.tensor([3 * rank + 1])
        wait(comm.all_reduce(mean, "mean", async_op=async_op))
        assert mean.item() == 2
        part = torch.empty(2)
        wait(comm.reduce_scatter(part, torch.arange(4.0), async_op=async_op))
        assert part.tolist() == [2.0 * rank, 2.0 * rank + 1]
        whole = torch.empty(2 * n)
        wait(comm.all_gather(whole, torch.full((2,), float(rank)), async_op=async_op))
        assert whole.tolist() == [0, 0, 1, 1]
        wait(comm.broadcast(tensor.fill_(rank), 1, async_op))
        assert tensor.tolist() == [1.0] * 5
        wait(comm.barrier(async_op))
    assert comm.empty(3, 2).shape == (3, 2)
    with pytest.raises(ValueError, match="algorithm"):
        comm.all_reduce(tensor, "sum", "two_shot")
    with pytest.raises(RuntimeError, match="deterministic"):
        on_two_hosts(lambda: fastreduce.Communicator(timeout=TIMEOUT, deterministic=True))
    comm.close()
    return lines.lines


def test_collectives(ranks):
    for lines in ranks(2).run(everything):
        assert len(lines) == 1
        assert "using the process group, because rank 1 runs on another host" in lines[0]


def means():
    """As in shared memory: the value counts, not what a sum in the tensor's own type could hold."""
    comm = on_two_hosts(lambda: fastreduce.Communicator(timeout=TIMEOUT))
    for value, dtype in [
        (60000, torch.float16),
        (200, torch.uint8),
        (2**30 + 5, torch.int32),
        (-(2**30) - 5, torch.int32),
    ]:
        large = torch.full((4,), value, dtype=dtype)
        comm.all_reduce(large, "mean")
        assert large.tolist() == [value] * 4
        comm.all_reduce(large, "mean", async_op=True).wait()
        assert large.tolist() == [value] * 4
        half = torch.empty(2, dtype=dtype)
        comm.reduce_scatter(half, large, "mean")
        assert half.tolist() == [value] * 2
        assert comm.all_reduce_future(large).wait().tolist() == [value] * 4
    # 1 + 1/256 lies between two bfloat16, and would become 1 before it is multiplied.
    tensor = torch.full((2,), 2.0**-8 if comm.rank else 1.0, dtype=torch.bfloat16)
    comm.all_reduce(tensor, "sum", scale=1.5)
    once = torch.tensor((1 + 2.0**-8) * 1.5, dtype=torch.bfloat16).item()
    assert tensor.tolist() == [once] * 2 and once != 1.5
    # Weights; what has none does not count, whatever it holds.
    for dtype in (torch.float32, torch.bfloat16):
        own, weight = (2.0, 1.0) if comm.rank else (float("nan"), 0.0)
        tensor = torch.full((3,), own, dtype=dtype)
        comm.all_reduce(tensor, scale=weight, weight=weight)
        assert tensor.tolist() == [2.0] * 3
        tensor = torch.full((3,), 4.0 * comm.rank, dtype=dtype)
        future = comm.all_reduce_future(tensor, scale=comm.rank + 1.0, weight=comm.rank + 1.0)
        assert future.wait().tolist() == torch.full((3,), 8 / 3, dtype=dtype).tolist()
        tensor.fill_(float("nan"))
        comm.all_reduce(tensor, scale=0.0, weight=0.0)
        assert tensor.tolist() == [0.0] * 3
    comm.close()


def test_means_do_not_overflow(ranks):
    ranks(2).run(means)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, 3, sparse=True)
        self.some = nn.Linear(3, 1, bias=False)
        self.last = nn.Linear(3, 1, bias=False)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        h = self.words(x)
        return self.last(h) + (self.some(h) if use else 0)


def hooks():
    """Weights, sparse gradients and unused parameters, as over shared memory."""
    rank = dist.get_rank()
    results = []
    for two_hosts in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(Words(), find_unused_parameters=True)
        options = {"timeout": TIMEOUT, "count_unused": False, "none_if_empty": True}
        make = lambda: fastreduce.attach(ddp, **options)  # noqa: B023, E731
        state = on_two_hosts(make) if two_hosts else make()
        seen = []
        for step in range(3):
            ddp.zero_grad()
            n = 0 if step == 2 else rank + 1
            state.weight(n)
            ddp(torch.tensor([step, 3 + rank, 3 + rank]), rank == 1).sum().backward()
            grads = [p.grad for p in ddp.parameters()]
            assert all((grad is None) == (step == 2) for grad in grads)
            seen += [g.to_dense() if g.is_sparse else g.clone() for g in grads if g is not None]
        results.append(seen)
        if two_hosts:
            with pytest.raises(RuntimeError, match="does not promise an order of summation"):
                for _ in state.shards(2):
                    state.weight(1)
                    ddp(torch.tensor([1]), True).sum().backward()
        state.close()
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_hook_with_everything(ranks):
    ranks(2).run(hooks)


def joined_at_once():
    """A rank without any batch takes part in the exchange of weights."""
    rank = dist.get_rank()
    for weighted in (False, True):
        model = nn.Linear(3, 1, bias=False)
        ddp = DistributedDataParallel(model)
        state = on_two_hosts(lambda: fastreduce.attach(ddp, timeout=TIMEOUT))  # noqa: B023
        with ddp.join():
            for _ in range(rank):
                if weighted:
                    state.weight(3)
                ddp(torch.full((1, 3), 4.0)).sum().backward()
        if rank:
            assert model.weight.grad[0].tolist() == [4.0 if weighted else 2.0] * 3
        state.close()


def test_join_without_any_batch(ranks):
    ranks(2).run(joined_at_once)


def refused():
    """What the kernels refuse is refused here too, and elements are matched by index."""
    comm = on_two_hosts(lambda: fastreduce.Communicator(timeout=TIMEOUT))
    for error, bad, op in [
        (ValueError, torch.eye(3).to_sparse(), "sum"),
        (TypeError, torch.ones(2, dtype=torch.complex64), "mean"),
        (TypeError, torch.ones(2, dtype=torch.bool), "sum"),
        (ValueError, torch.ones(2), "median"),
        (ValueError, torch.ones(3, 2).t(), "sum"),
    ]:
        with pytest.raises(error):
            comm.all_reduce_future(bad, op).wait()
    values = torch.arange(6.0).view(2, 3).t()
    tensor = values.contiguous() if comm.rank else values.clone(memory_format=torch.preserve_format)
    comm.all_reduce(tensor, "sum")
    assert torch.equal(tensor, values + values)
    with pytest.raises(ValueError, match="contiguous"):
        comm.all_reduce(torch.ones(3, 2).t(), async_op=True)
    comm.close()


def test_refused(ranks):
    ranks(2).run(refused)


def late():
    comm = on_two_hosts(lambda: fastreduce.Communicator(timeout=TIMEOUT))
    tensor = torch.ones(4)
    if comm.rank == 1:
        time.sleep(1.5)
    work = comm.all_reduce(tensor, "sum", async_op=True)
    if comm.rank == 0:
        for limit in (0.2, 0):
            with pytest.raises(TimeoutError, match="has not completed"):
                work.wait(limit)
    work.wait(float("inf"))
    assert tensor.tolist() == [2.0] * 4
    comm.close()


def test_wait_with_timeout(ranks):
    ranks(2).run(late)


def hook():
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    state = on_two_hosts(lambda: fastreduce.attach(ddp, timeout=TIMEOUT))
    ddp(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
    state.close()
    return ddp.module.weight.grad[0, 0].item()


def test_hook(ranks):
    assert ranks(2).run(hook) == [0.5, 0.5]


def no_memory():
    """A rank that cannot share memory tells the others; they do not wait for it."""
    lines = Lines()
    real = module._C.HostCommunicator

    def refuse(*args, **kwargs):
        raise module._C.CannotShareError("no descriptors left")

    if dist.get_rank() == 1:
        module._C.HostCommunicator = refuse
    module._CONNECT_SECONDS = 3.0
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    module._C.HostCommunicator = real
    tensor = torch.ones(2)
    comm.all_reduce(tensor, "sum")
    assert tensor.tolist() == [2, 2]
    return lines.lines


def test_a_rank_without_memory(ranks):
    for lines in ranks(2).run(no_memory):
        assert len(lines) == 1 and "using the process group, because rank" in lines[0]
