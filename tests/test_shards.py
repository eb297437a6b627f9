"""Logical shards: the same bits on 1, 2, 4 and 8 ranks."""

from __future__ import annotations

import gc
import hashlib
import io
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce import demo
from fastreduce.accumulation import TreeAccumulator

TIMEOUT = 60.0
SHARDS = 8
PER_SHARD = 6


def digest(tensors) -> str:
    """Of all bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        found.update(dense.contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def optimizer_of(name: str, ddp: nn.Module) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(ddp.parameters(), lr=1e-3)
    return torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)


def train_digits(digits, optimizer_name, steps, options, checkpoint=None, hook=True):
    """Steps of the demo's network. Every rank takes its shards of the same global batches. Returns
    a hash of the parameters after every step, and a checkpoint from half way."""
    first, last = steps
    model = demo.build_model(seed=0)
    ddp = DistributedDataParallel(model, **options)
    optimizer = optimizer_of(optimizer_name, ddp)
    state = fastreduce.attach(ddp, timeout=TIMEOUT) if hook else None
    if checkpoint is not None:
        checkpoint = torch.load(io.BytesIO(checkpoint))
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        state.load_state_dict(checkpoint["hook"])
    rank, own = dist.get_rank(), SHARDS // dist.get_world_size()
    hashes, saved = [], None
    for step in range(first, last):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randperm(len(digits.train_labels), generator=generator)
        parts = batch[: SHARDS * PER_SHARD].split(PER_SHARD)
        optimizer.zero_grad()
        numbers = state.shards(SHARDS) if hook else range(rank * own, (rank + 1) * own)
        for shard in numbers:
            if not hook:
                ddp.require_backward_grad_sync = shard == (rank + 1) * own - 1
            part = parts[shard]
            scores = ddp(digits.train_images[part])
            nn.functional.cross_entropy(scores, digits.train_labels[part]).backward()
        if not hook:
            for parameter in model.parameters():
                parameter.grad.div_(own)
        optimizer.step()
        hashes.append(digest(model.parameters()))
        if hook and step == last // 2 - 1:
            file = io.BytesIO()
            parts = {"model": model, "optimizer": optimizer, "hook": state}
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)
            saved = file.getvalue()
    if state is not None:
        state.close()
    return hashes, saved


@pytest.fixture(scope="module")
def digits():
    return demo.load_digits()


# Whatever the buckets are like.
OPTIONS = {
    1: {},
    2: {"bucket_cap_mb": 0.001},
    4: {"gradient_as_bucket_view": True},
    8: {"bucket_cap_mb": 0.2, "static_graph": True},  # which accumulates only later, see below
}


@pytest.mark.parametrize(("optimizer", "steps"), [("momentum", 40), ("adam", 200)])
def test_training_has_the_same_bits_on_any_number_of_ranks(ranks, digits, optimizer, steps):
    every, saved = {}, {}
    for world_size, options in OPTIONS.items():
        results = ranks(world_size).run(train_digits, digits, optimizer, (0, steps), options)
        every[world_size], saved[world_size] = results[0]
        assert all(hashes == results[0][0] for hashes, _ in results)
    assert len(every[1]) == steps
    assert all(hashes == every[1] for hashes in every.values())
    # It goes on with another number of ranks.
    half = steps // 2
    for before, after in [(8, 1), (1, 4)]:
        hashes, _ = ranks(after).run(
            train_digits, digits, optimizer, (half, steps), {}, saved[before]
        )[0]
        assert hashes == every[1][half:]


def test_ddp_over_gloo_has_other_bits(ranks, digits):
    """The control: the same shards, plainly accumulated."""
    steps = (0, 20)
    hashes = {
        world_size: ranks(world_size).run(train_digits, digits, "momentum", steps, {}, None, False)[
            0
        ][0]
        for world_size in (1, 2, 4)
    }
    assert len({each[-1] for each in hashes.values()}) == 3


class Everything(nn.Module):
    """Sparse gradients, two dtypes, complex parameters, and a layer that some shards use."""

    def __init__(self, narrow: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, sparse=True)
        self.first = nn.Linear(8, 33)
        self.phase = nn.Parameter(torch.randn(33, dtype=torch.complex64))
        self.second = nn.Linear(33, 40).to(narrow)
        self.some = nn.Linear(40, 5).to(narrow)
        self.last = nn.Linear(40, 5).to(narrow)
        self.never = nn.Linear(40, 5)

    def forward(self, x: torch.Tensor, use: bool) -> torch.Tensor:
        h = torch.relu(self.first(self.words(x)))
        h = (h * self.phase).real + (h * self.phase).imag
        h = torch.relu(self.second(h.to(self.second.weight.dtype)))
        y = self.last(h)
        return (y + self.some(h) if use else y).float()


SIZES = [3, 0, 2, 5, 1, 4, 7, 2]


def train_everything(narrow, weighted, options):
    """Hashes of gradients and parameters after every step."""
    torch.manual_seed(0)
    model = Everything(narrow)
    ddp = DistributedDataParallel(model, find_unused_parameters=True, **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    hashes = []
    with fastreduce.attach(ddp, timeout=TIMEOUT) as state:
        for step in range(5):
            optimizer.zero_grad()
            for shard in state.shards(SHARDS):
                generator = torch.Generator().manual_seed(1000 * step + shard)
                x = torch.randint(0, 20, (6,), generator=generator)
                y = torch.randint(0, 5, (6,), generator=generator)
                if weighted:
                    state.weight(SIZES[(shard + step) % SHARDS], weighted)
                scores = ddp(x, (shard + step) % 3 == 0)
                reduction = weighted or "mean"
                nn.functional.cross_entropy(scores, y, reduction=reduction).backward()
            optimizer.step()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            assert len(grads) == len(list(model.parameters())) - 2
            hashes.append(digest([*grads, *model.parameters()]))
    return hashes


@pytest.mark.parametrize(
    "narrow, weighted, options",
    [
        (torch.bfloat16, None, {}),
        (torch.float16, "mean", {"bucket_cap_mb": 0.001}),
        (torch.float32, "sum", {"gradient_as_bucket_view": True}),
        (torch.float64, None, {"gradient_as_bucket_view": True}),
    ],
    ids=["bfloat16", "float16, weighted", "float32, sums", "float64"],
)
def test_every_kind_of_gradient(ranks, narrow, weighted, options):
    results = {
        world_size: ranks(world_size).run(train_everything, narrow, weighted, options)
        for world_size in (1, 2, 4, 8)
    }
    for every in results.values():
        assert all(hashes == results[1][0] for hashes in every)


def the_mean():
    """What the bits are of: the mean over all shards, weighted or not; one synchronisation."""
    rank = dist.get_rank()
    model = nn.Linear(3, 1, bias=False)
    ddp = DistributedDataParallel(model)
    with fastreduce.attach(ddp, timeout=TIMEOUT, record=True) as state:
        for weights in (None, [1, 0, 3, 2]):
            ddp.zero_grad()
            seen = []
            for shard in state.shards(4):
                seen.append(shard)
                if weights:
                    state.weight(weights[shard])
                ddp(torch.full((1, 3), float(shard + 1))).sum().backward()
            assert seen == [2 * rank, 2 * rank + 1]
            want = 10 / 4 if weights is None else (1 + 9 + 8) / 6
            assert model.weight.grad[0].tolist() == pytest.approx([want] * 3)
        assert [len(step.buckets) for step in state.stats()] == [1, 1]


def test_gradients_are_the_mean_over_the_shards(ranks):
    ranks(2).run(the_mean)


@pytest.mark.parametrize("shards", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory(shards, dtype):
    """Beside .grad at most one copy for every power of two from 2 to half of the shards; of 16-bit
    gradients, in float32, from 1 on and one for the sum. From step to step it does not grow."""
    parameter = nn.Parameter(torch.zeros(1000, dtype=dtype))
    spares: dict[nn.Parameter, list[torch.Tensor]] = {}
    most = 0
    for _ in range(3):
        parameter.grad = None
        accumulator = TreeAccumulator([parameter], shards, spares)
        leaves = torch.randn(shards, 1000).to(dtype)
        for shard in accumulator.shards():
            (parameter * leaves[shard]).sum().backward()
            held = {each.data_ptr() for level in accumulator._levels for each in level.values()}
            held |= {each.data_ptr() for each in spares.get(parameter, [])}
            held |= {each.data_ptr() for each in accumulator._sums.values() if each is not None}
            most = max(most, len(held - {parameter.grad.data_ptr()}))
        total, in_place = accumulator.finish(parameter)
        level = list(leaves.float())
        while len(level) > 1:
            level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
        assert in_place == (dtype == torch.float32) and torch.equal(total, level[0])
        accumulator.close()
    levels = shards.bit_length() - 1
    assert most <= (max(levels - 1, 0) if dtype == torch.float32 else levels + 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("used", [[0], [1], [2], [3], [0, 1], [1, 2], [0, 2, 3], [0, 1, 2, 3]])
def test_a_missing_gradient_is_a_zero(used, dtype):
    """As it is on a rank whose bucket holds zeros: -0.0 + 0.0 is 0.0."""
    parameter = nn.Parameter(torch.zeros(3, dtype=dtype))
    accumulator = TreeAccumulator([parameter], 4)
    minus = torch.full((3,), complex(-0.0, -0.0) if dtype.is_complex else -0.0, dtype=dtype)
    for shard in accumulator.shards():
        if shard in used:
            torch.autograd.backward(parameter, minus)
    total, _ = accumulator.finish(parameter)
    accumulator.close()
    a, b, c, d = (minus if shard in used else torch.zeros_like(minus) for shard in range(4))
    want = (a + b) + (c + d)
    assert digest([total.to(dtype)]) == digest([want])


def static_graph():
    """DDP cannot accumulate before its first synchronised pass."""
    model = nn.Linear(3, 1, bias=False)
    ddp = DistributedDataParallel(model, static_graph=True)
    with fastreduce.attach(ddp, timeout=TIMEOUT) as state:
        with pytest.raises(RuntimeError, match="make one step without shards first"):
            state.shards(8)
        for step in range(5):
            ddp.zero_grad()
            for shard in state.shards(8) if step else [0]:
                ddp(torch.full((1, 3), float(shard))).sum().backward()
            assert model.weight.grad[0].tolist() == [3.5 if step else 0.0] * 3


def test_static_graph(ranks):
    ranks(2).run(static_graph)


class Gaps(nn.Module):
    """A parameter whose elements do not lie side by side."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(3, dtype=dtype))
        self.gaps = nn.Parameter(torch.ones(4, 8, dtype=dtype)[:, :3])
        self.turned = nn.Parameter(torch.ones(5, 3, dtype=dtype).t())
        self.after = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (x * self.gaps).sum(0) * self.before + (x[:3, :1] * self.turned).sum(1)
        return y * self.after


def with_gaps(dtype, weighted):
    ddp = DistributedDataParallel(Gaps(dtype))
    with fastreduce.attach(ddp, timeout=TIMEOUT) as state:
        for shard in state.shards(4):
            if weighted:
                state.weight(2)
            ddp(torch.arange(12.0).view(4, 3).to(dtype) + shard).sum().backward()
        shards = [p.grad.clone() for p in ddp.parameters()]
        alone = Gaps(dtype).double()
        for shard in range(4):
            alone(torch.arange(12.0).view(4, 3).double() + shard).sum().div(4).backward()
        for got, want in zip(shards, alone.parameters(), strict=True):
            torch.testing.assert_close(got.double(), want.grad, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_with_gaps(ranks, dtype, weighted):
    ranks(2).run(with_gaps, dtype, weighted)


def interrupted():
    """A loop that is left before its end leaves nothing behind but gradients of a part."""
    model = nn.Linear(3, 1, bias=False)
    ddp = DistributedDataParallel(model)
    with fastreduce.attach(ddp, timeout=TIMEOUT) as state:
        x = torch.full((1, 3), 1.0)
        for wrong in (0, 1, 3, 6, -4):
            with pytest.raises(ValueError, match="power of two that the number of ranks, 2"):
                state.shards(wrong)
        for shard in state.shards(8):
            ddp(x).sum().backward()
            if shard % 4 == 2:
                with pytest.raises(RuntimeError, match="under way"):
                    state.shards(8)
                break
        with pytest.raises(ValueError, match=r"weight has a gradient.*zero_grad"):
            state.shards(8)
        ddp.zero_grad()
        # Two loops made before either begins; two passes in one shard; none in the last one.
        with pytest.raises(RuntimeError, match="under way"):
            list(zip(state.shards(8), state.shards(8), strict=True))
        assert ddp.require_backward_grad_sync
        with pytest.raises(RuntimeError, match="two gradients of one parameter in one shard"):
            for _ in state.shards(8):
                ddp(x).sum().backward()
                ddp(x).sum().backward()
        ddp.zero_grad()
        with pytest.raises(fastreduce.UnsynchronizedError, match="last shard"):
            for shard in state.shards(8):
                if shard % 4 < 3:
                    ddp(x).sum().backward()
        ddp.zero_grad()
        for _ in state.shards(8):
            with pytest.raises(RuntimeError, match="under way"):
                state.state_dict()
            break
        ddp.zero_grad()
        with pytest.raises(RuntimeError, match=r"zero_grad.* belongs before the loop"):
            for _ in state.shards(8):
                ddp.zero_grad()
                ddp(x).sum().backward()
        ddp.zero_grad()
        for _ in state.shards(8):
            ddp(x).sum().backward()
        assert model.weight.grad.tolist() == [[1.0] * 3]
        # And DDP is as it was.
        ddp.zero_grad(set_to_none=False)
        ddp(x * (dist.get_rank() + 1)).sum().backward()
        assert model.weight.grad.tolist() == [[1.5] * 3]
        ddp.zero_grad()
        state.weight(1)
        with pytest.raises(ValueError, match="not for this one"):
            for _ in state.shards(8):
                ddp(x).sum().backward()
    gone = weakref.ref(ddp)
    del ddp, model, state
    gc.collect()
    assert gone() is None


def test_loops_that_do_not_end(ranks):
    ranks(2).run(interrupted)
