"""The hook under DistributedDataParallel, as it really behaves: gradients are, bit for bit, the
reference's mean of what every rank computes alone."""

from __future__ import annotations

import copy
import inspect
import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from conftest import same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce import reference

TIMEOUT = 60.0


class Mixed(nn.Module):
    """Two dtypes, a layer that is used on demand, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 300)
        self.wide = nn.Linear(300, 30).to(torch.bfloat16)
        self.sometimes = nn.Linear(300, 30)
        self.last = nn.Linear(30, 5)
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        h = torch.relu(self.first(x))
        y = self.wide(h.to(torch.bfloat16)).float()
        if use_all:
            y = y + self.sometimes(h)
        return self.last(torch.relu(y)) * self.frozen


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 10),
    ).to(memory_format=torch.channels_last)


def batch(step: int, rank: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if kind == "conv":
        x = torch.randn(6, 1, 8, 8, generator=generator).to(memory_format=torch.channels_last)
        return x, torch.randint(0, 10, (6,), generator=generator)
    return torch.randn(6, 20, generator=generator), torch.randint(0, 5, (6,), generator=generator)


def local_gradients(model, step, kind, world_size, **forward):
    """For every parameter the gradients of all ranks, each computed alone."""
    per_rank = []
    for rank in range(world_size):
        x, y = batch(step, rank, kind)
        model.zero_grad()
        nn.functional.cross_entropy(model(x, **forward), y).backward()
        per_rank.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    return list(zip(*per_rank, strict=True))


def train(kind, steps, ddp_options, forward_options):
    """Trains a few steps and checks every gradient of every step."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = convolutional() if kind == "conv" else Mixed()
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, **ddp_options)
    state = fastreduce.attach(ddp, timeout=TIMEOUT)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in range(steps):
        options = forward_options[step % len(forward_options)]
        alone.load_state_dict(model.state_dict())
        expected = local_gradients(alone, step, kind, n, **options)
        x, y = batch(step, rank, kind)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x, **options), y).backward()
        for (name, parameter), gradients in zip(ddp.named_parameters(), expected, strict=True):
            if gradients[0] is None:
                # Unused everywhere, or frozen: none, or what is left from before.
                assert parameter.grad is None or not parameter.grad.any(), name
                continue
            assert same_bits(parameter.grad, reference.all_reduce(gradients)), (step, name)
        optimizer.step()
    state.close()
    return [p.detach().clone() for p in ddp.parameters()]


CASES = {
    "plain": ("mlp", {}, [{}]),
    "views": ("mlp", {"gradient_as_bucket_view": True}, [{}]),
    "tiny buckets": ("mlp", {"bucket_cap_mb": 0.001}, [{}]),
    "one bucket": ("mlp", {"bucket_cap_mb": 1000}, [{}]),
    "static graph": ("mlp", {"static_graph": True}, [{}]),
    "unused": (
        "mlp",
        {"find_unused_parameters": True},
        [{"use_all": True}, {"use_all": False}, {"use_all": True}],
    ),
    "channels last": ("conv", {}, [{}]),
    "channels last, views": (
        "conv",
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
        [{}],
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients(ranks, case, world_size):
    kind, ddp_options, forward_options = CASES[case]
    results = ranks(world_size).run(train, kind, 6, ddp_options, forward_options)
    for parameters in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(parameters, results[0], strict=True))


def big_buckets():
    """Buckets big enough to be zero-copy are moved once, also after DDP has rebuilt them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(200, 200) for _ in range(6)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.4, gradient_as_bucket_view=True)
    state = fastreduce.attach(ddp, timeout=TIMEOUT)
    shared = []
    for _ in range(5):
        ddp.zero_grad(set_to_none=False)
        ddp(torch.ones(2, 200) * dist.get_rank()).sum().backward()
        shared.append([p.grad.is_shared() for p in ddp.parameters()])
    segments = len(state.communicator._shared._segments)
    state.close()
    return shared, segments


def test_buckets_are_moved_into_shared_memory(ranks):
    for shared, segments in ranks(2).run(big_buckets):
        assert all(shared[-1])
        assert 2 <= segments <= 6


def accumulate():
    """no_sync: the bucket holds the accumulated gradient, averaged once."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Linear(20, 5)
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model)
    state = fastreduce.attach(ddp, timeout=TIMEOUT)
    sums = []
    for r in range(n):
        alone.zero_grad()
        for step in range(3):
            x, y = batch(step, r, "mlp")
            nn.functional.cross_entropy(alone(x), y).backward()
        sums.append([p.grad.clone() for p in alone.parameters()])
    for step in range(3):
        x, y = batch(step, rank, "mlp")
        if step < 2:
            with ddp.no_sync():
                nn.functional.cross_entropy(ddp(x), y).backward()
        else:
            nn.functional.cross_entropy(ddp(x), y).backward()
    for parameter, gradients in zip(ddp.parameters(), zip(*sums, strict=True), strict=True):
        assert same_bits(parameter.grad, reference.all_reduce(gradients))
    state.close()


def test_no_sync(ranks):
    ranks(2).run(accumulate)


def like_gloo():
    """With equal seeds, training ends where DDP without a hook ends, up to the order of sums."""
    finals = []
    for hook in [False, True]:
        torch.manual_seed(0)
        ddp = DistributedDataParallel(convolutional())
        state = fastreduce.attach(ddp, timeout=TIMEOUT) if hook else None
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        for step in range(10):
            x, y = batch(step, dist.get_rank(), "conv")
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
        finals.append([p.detach().clone() for p in ddp.parameters()])
        if state is not None:
            state.close()
    for a, b in zip(*finals, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_like_ddp_without_a_hook(ranks):
    ranks(2).run(like_gloo)


def subgroup():
    """The group is taken from the DDP model, not from the default group."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False), process_group=pairs[rank // 2])
    state = fastreduce.attach(ddp, timeout=TIMEOUT)
    assert state.communicator.world_size == 2
    ddp(torch.full((1, 3), float(rank))).sum().backward()
    state.close()
    return ddp.module.weight.grad[0, 0].item()


def test_subgroup(ranks):
    assert ranks(4).run(subgroup) == [0.5, 0.5, 2.5, 2.5]


def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False), device_mesh=grid["dp"])
    state = fastreduce.attach(ddp, timeout=TIMEOUT)
    assert state.communicator.world_size == 2
    ddp(torch.full((1, 3), float(dist.get_rank()))).sum().backward()
    state.close()
    return ddp.module.weight.grad[0, 0].item()


def test_device_mesh(ranks):
    assert ranks(4).run(mesh) == [1, 2, 1, 2]


def by_hand():
    """register_comm_hook with a state made by the caller; one communicator, two models."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    models = [DistributedDataParallel(nn.Linear(4, 2)) for _ in range(2)]
    for ddp in models:
        ddp.register_comm_hook(fastreduce.HookState(comm), fastreduce.all_reduce_hook)
    for ddp in models:
        ddp(torch.full((1, 4), float(dist.get_rank()))).sum().backward()
    with pytest.raises(RuntimeError, match="register_comm_hook"):
        fastreduce.attach(models[0], timeout=TIMEOUT)
    comm.close()
    return [ddp.module.weight.grad[0, 0].item() for ddp in models]


def test_state_from_a_communicator(ranks):
    assert ranks(2).run(by_hand) == [[0.5, 0.5]] * 2


def failing():
    """An error travels through the Future: backward raises it, gradients keep their values, and
    the process can go on with a new model."""
    torch.manual_seed(0)
    rank = dist.get_rank()
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    state = fastreduce.attach(ddp, timeout=TIMEOUT)
    ddp(torch.ones(1, 4)).sum().backward()
    if rank == 1:
        state.communicator._close(drain=False)
    with pytest.raises(RuntimeError, match="closed"):
        ddp(torch.ones(1, 4)).sum().backward()
    if rank == 0:
        assert isinstance(state.communicator.error, fastreduce.PeerClosedError)
    state.close()
    again = DistributedDataParallel(nn.Linear(4, 2))
    state = fastreduce.attach(again, timeout=TIMEOUT)
    again(torch.full((1, 4), float(rank))).sum().backward()
    state.close()
    return again.module.weight.grad[0, 0].item()


def test_error_in_backward(ranks):
    assert ranks(2).run(failing) == [0.5, 0.5]


def states():
    """What is no HookState is an error of backward, each time, as is a state of two models."""
    comm = fastreduce.Communicator(timeout=TIMEOUT)
    for wrong in (None, comm):
        ddp = DistributedDataParallel(nn.Linear(4, 2))
        ddp.register_comm_hook(wrong, fastreduce.all_reduce_hook)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="state: expected a HookState, got"):
                ddp(torch.ones(1, 4)).sum().backward()
    models = [DistributedDataParallel(nn.Linear(4, 2)) for _ in range(2)]
    state = fastreduce.HookState(comm)
    for ddp in models:
        ddp.register_comm_hook(state, fastreduce.all_reduce_hook)
    with pytest.raises(RuntimeError, match="on one DDP model, this one is on 2"):
        models[0](torch.ones(1, 4)).sum().backward()
    attached = DistributedDataParallel(nn.Linear(4, 2))
    state = fastreduce.attach(attached, timeout=TIMEOUT)
    other = DistributedDataParallel(nn.Linear(4, 2))
    other.register_comm_hook(state, fastreduce.all_reduce_hook)
    with pytest.raises(RuntimeError, match="registered on another DDP model, too"):
        other(torch.ones(1, 4)).sum().backward()
    state.close()
    comm.close()


def test_wrong_states(ranks):
    ranks(2).run(states)


def made_first():
    """A state made before its model takes the model's group, not the default one."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    state = fastreduce.HookState(timeout=TIMEOUT)
    with pytest.raises(RuntimeError, match="not yet registered"):
        print(state.communicator)
    with pytest.raises(RuntimeError, match="is on 0"):
        state.shards(4)
    ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False), process_group=pairs[rank // 2])
    ddp.register_comm_hook(state, fastreduce.all_reduce_hook)
    ddp(torch.full((1, 3), float(rank))).sum().backward()
    averaged = ddp.module.weight.grad[0, 0].item()
    late = fastreduce.HookState(count_unused=False)
    other = DistributedDataParallel(nn.Linear(3, 1), process_group=pairs[rank // 2])
    other.register_comm_hook(late, fastreduce.all_reduce_hook)
    with pytest.raises(RuntimeError, match="make it with the model"):
        other(torch.ones(1, 3)).sum().backward()
    assert state.communicator.world_size == 2
    state.close()
    with pytest.raises(RuntimeError, match="closed"):
        ddp(torch.full((1, 3), float(rank))).sum().backward()
    return averaged


def test_state_made_before_its_model(ranks):
    assert ranks(4).run(made_first) == [0.5, 0.5, 2.5, 2.5]


def interrupted():
    """Ctrl-C while the last bucket waits for a peer is a KeyboardInterrupt; the peer is told."""
    rank = dist.get_rank()
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    state = fastreduce.attach(ddp, timeout=TIMEOUT)
    for _ in range(3):  # in the first ones, DDP itself waits for its peers
        ddp(torch.ones(1, 4)).sum().backward()
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ddp(torch.ones(1, 4)).sum().backward()
    else:
        time.sleep(1.5)
        with pytest.raises(RuntimeError, match="rank 0 was interrupted"):
            ddp(torch.ones(1, 4)).sum().backward()
    state.close()


def test_interrupt(ranks):
    ranks(2).run(interrupted)


def test_hook_signature():
    parameters = inspect.signature(fastreduce.all_reduce_hook).parameters
    assert list(parameters) == ["state", "bucket"]
    assert parameters["bucket"].annotation is dist.GradBucket
    assert fastreduce.all_reduce_hook.__name__ and fastreduce.all_reduce_hook.__qualname__


def test_wrong_arguments():
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        fastreduce.attach(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="nonsense"):
        fastreduce.HookState(nonsense=3)
    with pytest.raises(TypeError, match="Communicator, a DistributedDataParallel"):
        fastreduce.HookState(nn.Linear(2, 2))
