"""The sharded parameter server: the same training as all-reduce with torch's own optimizer."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import io
import math
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from fastreduce import ParameterServer, demo, reference, rendezvous

TIMEOUT = 60.0
WAYS = ["shared memory", "hosts"]
# Of torch, what has the arithmetic of the kernels: of SGD all have.
PLAIN = {"foreach": False, "fused": False}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, PLAIN),
    "sgd decay": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01, "maximize": True}, PLAIN),
    "momentum": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 1e-3},
        PLAIN,
    ),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, PLAIN),
    "adam": (torch.optim.Adam, {"lr": 2e-3}, {"fused": True}),
    "adam decay": (
        torch.optim.Adam,
        {"lr": 2e-3, "weight_decay": 0.1, "betas": (0.4, 0.9)},
        {"fused": True},
    ),
    "adamw": (torch.optim.AdamW, {"lr": 2e-3}, {"fused": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}, {"foreach": False}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}, {"foreach": False}),
    "amsgrad": (torch.optim.Adam, {"lr": 2e-3, "amsgrad": True}, PLAIN),
}
# The others take torch's square root, which is not always the nearest float32, or a loop whose last
# elements, which fill no vector, are rounded otherwise than those before.
EXACT = ["sgd", "sgd decay", "momentum", "nesterov"]


def serve(way: str, params: Any, *args: Any, **kwargs: Any) -> ParameterServer:
    """Rank 1 looks like another host, or does not."""
    real = rendezvous._boot_id
    if way == "hosts" and dist.get_rank() == 1:
        rendezvous._boot_id = lambda: "another boot"
    try:
        server = ParameterServer(params, *args, timeout=TIMEOUT, **kwargs)
    finally:
        rendezvous._boot_id = real
    assert server.communicator.shared_memory == (way != "hosts")
    return server


def digits_batches(data: demo.Digits, steps: int) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        batch = torch.randperm(len(data.train_labels), generator=generator)[:8]
        part = batch.chunk(ranks)[rank]
        yield data.train_images[part], data.train_labels[part]


def train_digits(
    state: dict[str, Any], data: demo.Digits, name: str, bucket_bytes: int, steps: int
) -> tuple[int, float]:
    """Steps of the demo's network, with the sharded server and the textbook's, beside DDP over
    fastreduce: the first step with other bits, and the largest difference at the end."""
    kind, options, torchs = OPTIMIZERS[name]
    models = [demo.build_model(seed=0) for _ in range(2)]
    other = DistributedDataParallel(demo.build_model(seed=0))
    if dist.get_rank():
        nn.init.zeros_(next(models[0].parameters()))  # rank 0's are taken
    layouts: list[dict[str, Any]] = [{}, {"servers": [1]}]
    servers = [
        serve(
            "shared memory",
            model.parameters(),
            kind,
            bucket_bytes=bucket_bytes,
            **layout,
            **options,
        )
        for model, layout in zip(models, layouts, strict=True)
    ]
    hook = fastreduce.attach(other, timeout=TIMEOUT)
    optimizer = kind(other.parameters(), **options, **torchs)
    differs = -1
    for step, (inputs, targets) in enumerate(digits_batches(data, steps)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(inputs), targets).backward()
        optimizer.step()
        for mine, server in zip(models, servers, strict=True):
            server.zero_grad()
            nn.functional.cross_entropy(mine(inputs), targets).backward()
            server.step()
        pairs = list(zip(models[0].parameters(), other.parameters(), strict=True))
        if differs < 0 and not all(same_bits(a.detach(), b.detach()) for a, b in pairs):
            differs = step
    worst = max((a - b).abs().max().item() for a, b in pairs)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert same_bits(a.detach(), b.detach())
    for server in servers:
        server.close()
    hook.close()
    return differs, worst


@pytest.fixture(scope="module")
def digits():
    return demo.load_digits()


# What comes with many steps, as Adam's corrections that fade, does not depend on the ranks.
@pytest.mark.parametrize(("world", "steps"), [(2, 200), (4, 200)])
@pytest.mark.parametrize("name", ["sgd", "momentum", "adam", "adamw"])
def test_it_trains_like_all_reduce(pool, digits, name, world, steps):
    first, *others = pool(world).run(train_digits, digits, name, 100_000, steps)
    assert all(other == first for other in others)
    if name in EXACT:
        assert first == (-1, 0.0)
    else:
        # torch's fused loop rounds those elements otherwise that fill no vector.
        differs, worst = first
        assert differs != 0 and worst < 1e-6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.unused = nn.Linear(3, 3)
        self.sometimes = nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.last = nn.Linear(8, 5, bias=False)

    def forward(self, x: torch.Tensor, some: bool) -> torch.Tensor:
        out = self.conv(x).mean((2, 3))
        if some:
            out = self.sometimes(out)
        result: torch.Tensor = self.last(torch.tanh(self.frozen(out)))
        return result


def build(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype).to(memory_format=torch.channels_last)


def loss_of(model: nn.Module, step: int, rank: int, some: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, 3, 6, 6, generator=generator)
    x = x.to(next(model.parameters()).dtype).to(memory_format=torch.channels_last)
    out: torch.Tensor = model(x, some)
    return out.float().square().mean()


def groups_of(model: nn.Module, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Two groups with rates of their own."""
    biases = [p for n, p in model.named_parameters() if "bias" in n]
    others = [p for n, p in model.named_parameters() if "bias" not in n]
    return [{"params": others}, {"params": biases, "lr": options["lr"] / 2}]


def means(model: nn.Module, losses: list[torch.Tensor]) -> None:
    """The gradient over all ranks, as the tree makes it; none where nobody has used it."""
    own = []
    for loss in losses:
        model.zero_grad()
        loss.backward()
        own.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    for parameter, *each in zip(model.parameters(), *own, strict=True):
        if all(grad is None for grad in each):
            parameter.grad = None
            continue
        whole = [torch.zeros_like(parameter) if g is None else g for g in each]
        parameter.grad = reference.all_reduce(whole, "mean")


def in_all_ways(
    _: dict[str, Any], way: str, name: str, layout: dict[str, Any] | None = None
) -> None:
    """Groups, a schedule, unused and frozen parameters, accumulation, clipping, buckets of all
    sizes; beside one process that has all ranks' losses. Then checkpoints()."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind, options, torchs = OPTIMIZERS[name]
    mine, twin = build(), build()
    server = serve(
        way, groups_of(mine, options), kind, bucket_bytes=600, **(layout or {}), **options
    )
    alone = kind(groups_of(twin, options), **options, **torchs)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in (server, alone)]
    exact = name in EXACT and (way == "shared memory" or ranks == 2)

    def compare(where: str) -> None:
        for (n, a), b in zip(mine.named_parameters(), twin.parameters(), strict=True):
            close = torch.allclose(a, b, rtol=1e-4, atol=1e-6)
            assert close and (same_bits(a.detach(), b.detach()) or not exact), f"{where}: {n}"

    for step in range(6):
        server.zero_grad(set_to_none=step % 2 == 0)
        if step == 1:
            mine.zero_grad()  # by the module: None
        some = [step in (2, 3) and p == 1 for p in range(ranks)]
        losses = [loss_of(twin, step, p, some[p]) for p in range(ranks)]
        if step == 4:
            with server.no_sync():
                loss_of(mine, 40, rank).backward()
            losses = [each + loss_of(twin, 40, p) for p, each in enumerate(losses)]
        loss_of(mine, step, rank, some[rank]).backward()
        means(twin, losses)
        if step == 5:
            twin.load_state_dict(mine.state_dict())
        if step in (3, 5):
            wanted = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
            got = server.clip_grad_norm(0.01)
            assert got.item() == pytest.approx(wanted.item(), rel=1e-6)
        server.step()
        alone.step()
        for each in schedules:
            each.step()
        if step < 3:
            compare(f"step {step}")
        for a, b in zip(mine.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-4, atol=1e-6), f"step {step}"
    assert not same_bits(mine.conv.weight.detach(), build().conv.weight.detach())
    assert same_bits(mine.unused.weight.detach(), build().unused.weight.detach())
    assert mine.conv.weight.is_contiguous(memory_format=torch.channels_last)

    checkpoints(server, mine, alone, twin)
    compare("resumed")
    server.close()


def checkpoints(
    server: ParameterServer, mine: nn.Module, alone: torch.optim.Optimizer, twin: nn.Module
) -> None:
    """One goes to torch's own optimizer, and another one comes back; a step after that."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    saved = server.state_dict()
    expected = alone.state_dict()
    assert saved["param_groups"][1]["lr"] == expected["param_groups"][1]["lr"]
    # torch's Adagrad keeps something of frozen ones, too.
    frozen = {i for i, p in enumerate(server._parameters) if not p.requires_grad}
    for index in frozen:
        expected["state"].pop(index, None)
    assert saved["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        assert saved["state"][index].keys() == values.keys()
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                assert saved["state"][index][key].shape == value.shape
                assert torch.allclose(saved["state"][index][key], value, rtol=1e-3, atol=1e-6)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    saved = torch.load(file)
    # To torch's own, and back.
    twin.load_state_dict(mine.state_dict())
    alone.load_state_dict(copy.deepcopy(saved))
    server.load_state_dict(alone.state_dict())
    server.zero_grad()
    loss_of(mine, 7, rank).backward()
    means(twin, [loss_of(twin, 7, p) for p in range(ranks)])
    server.step()
    alone.step()
    with pytest.raises(ValueError, match="param_groups: expected"):
        server.load_state_dict({"state": {}, "param_groups": saved["param_groups"][:1]})
    wrong = copy.deepcopy(saved)
    for values in wrong["state"].values():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim():
                values[key] = torch.zeros(99)
                break
    if any(v.dim() for v in wrong["state"].get(0, {}).values() if isinstance(v, torch.Tensor)):
        with pytest.raises(ValueError, match="of shape"):
            server.load_state_dict(wrong)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_does_all_that_an_optimizer_does(pool, name, way):
    pool(2).run(in_all_ways, way, name)


def test_three_ranks(pool):
    pool(3).run(in_all_ways, "shared memory", "adamw")


def narrow(_: dict[str, Any], dtype: torch.dtype, name: str) -> None:
    """16-bit parameters are the rounded ones of a copy in float32, which checkpoints keep."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kind, options, torchs = OPTIMIZERS[name]
    mine, twin = build(dtype), build(dtype)
    masters = [p.detach().float().requires_grad_(p.requires_grad) for p in twin.parameters()]
    alone = kind(masters, **options, **torchs)
    server = serve("shared memory", mine.parameters(), kind, **options)
    for step in range(5):
        server.zero_grad()
        loss_of(mine, step, rank).backward()
        means(twin, [loss_of(twin, step, p) for p in range(ranks)])
        for master, parameter in zip(masters, twin.parameters(), strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        server.step()
        alone.step()
        with torch.no_grad():
            for master, parameter in zip(masters, twin.parameters(), strict=True):
                parameter.copy_(master)
        for a, b in zip(mine.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-2, atol=1e-3), f"step {step}"
            assert same_bits(a.detach(), b.detach()) or name not in EXACT, f"step {step}"
        if step == 2:
            saved = server.state_dict()
            model = copy.deepcopy(mine.state_dict())
            server.close()
            mine = build(dtype)
            mine.load_state_dict(model)
            server = serve("shared memory", mine.parameters(), kind, bucket_bytes=100, **options)
            server.load_state_dict(saved)
    server.close()


@pytest.mark.parametrize("name", ["adam", "momentum", "rmsprop"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_parameters_have_a_copy_in_float32(pool, dtype, name):
    pool(2).run(narrow, dtype, name)


def resumed(_: dict[str, Any], saved: Any) -> Any:
    """Some steps, from a checkpoint of another number of ranks or from the beginning."""
    model = build()
    server = serve("shared memory", model.parameters(), torch.optim.AdamW, lr=1e-2)
    if saved is not None:
        model.load_state_dict(saved[0])
        server.load_state_dict(saved[1])
    for step in range(3):
        server.zero_grad()
        loss_of(model, step, 0).backward()  # the same on all ranks: so is the mean
        server.step()
    result = copy.deepcopy((model.state_dict(), server.state_dict()))
    server.close()
    return result


def test_another_number_of_ranks(pool):
    results = []
    for first, second in ((1, 2), (2, 4), (4, 1)):
        before = pool(first).run(resumed, None)[0]
        results.append(pool(second).run(resumed, before)[0][0])
    for other in results[1:]:
        for name, value in results[0].items():
            assert same_bits(value, other[name]), name


def scaled(_: dict[str, Any], way: str) -> list[float]:
    """fastreduce's GradScaler: an overflow on one rank skips the step on all."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, twin = build(), build()
    server = serve(way, mine.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    scaler = fastreduce.GradScaler(server, init_scale=2.0**10, growth_interval=2)
    alone = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9, foreach=False)
    scales = []
    for step in range(5):
        server.zero_grad()
        loss = loss_of(mine, step, rank)
        scaler.scale(loss * math.inf if step == 2 and rank == 1 else loss).backward()
        before = copy.deepcopy(mine.state_dict())
        scaler.step(server)
        scaler.update()
        if step == 2:
            assert all(same_bits(v, before[n]) for n, v in mine.state_dict().items())
        else:
            means(twin, [loss_of(twin, step, p) for p in range(ranks)])
            alone.step()
        for a, b in zip(mine.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)
        scales.append(scaler.get_scale())
        with pytest.raises(fastreduce.UnsynchronizedError):
            scaler.step(server)
    server.close()
    return scales


@pytest.mark.parametrize("way", WAYS)
def test_loss_scaling(pool, way):
    first, second = pool(2).run(scaled, way)
    assert first == second and first[2] < first[1]


def refused(_: dict[str, Any]) -> None:
    model = build()
    with serve("shared memory", model.parameters(), torch.optim.SGD, lr=0.1) as server:
        loss_of(model, 0, 0).backward()
        with pytest.raises(RuntimeError, match="accumulate under no_sync"):
            loss_of(model, 1, 0).backward()
        server.zero_grad()
        loss_of(model, 1, 0).backward()
        with pytest.raises(ValueError, match="norm_type"):
            server.clip_grad_norm(1.0, 3.0)
        server.step()
        server.zero_grad()
        before = copy.deepcopy(model.state_dict())
        loss = server.step(lambda: loss_of(model, 2, 0))  # no backward pass: nothing changes
        assert loss.item() > 0
        assert all(same_bits(v, before[n]) for n, v in model.state_dict().items())
        server.zero_grad()
        loss_of(model, 1, 0).backward()
        with server.no_sync(), pytest.raises(RuntimeError, match="spoilt"):
            loss_of(model, 1, 0).backward()
        server.zero_grad()
        loss_of(model, 1, 0).backward()
        server.clip_grad_norm(1.0)
        with pytest.raises(RuntimeError, match="clipped already"):
            server.clip_grad_norm(1.0)
        server.step()
        with pytest.raises(RuntimeError, match="make a new ParameterServer"):
            server.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        with pytest.raises(TypeError, match="cannot be pickled"):
            copy.deepcopy(server)
        model.frozen.requires_grad_(True)
        with pytest.raises(RuntimeError, match="frozen or unfrozen"):
            server.zero_grad()
        model.frozen.requires_grad_(False)
        model.to(memory_format=torch.contiguous_format)
        with pytest.raises(RuntimeError, match="lies elsewhere"):
            server.step()
    loss_of(model, 3, 0).backward()  # its hooks are gone


def refused_at_once(_: dict[str, Any]) -> None:
    server = ParameterServer(build().parameters(), torch.optim.SGD, timeout=TIMEOUT)
    gone = weakref.ref(server)
    del server
    gc.collect()
    assert gone() is None
    with pytest.raises(ValueError, match="does not work element by element"):
        ParameterServer(build().parameters(), torch.optim.LBFGS)
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="rank 1 has other shapes"):
        ParameterServer(nn.Linear(10, 10 + rank).parameters(), torch.optim.SGD)
    with pytest.raises(ValueError, match="real dense parameters"):
        ParameterServer([nn.Parameter(torch.ones(3, dtype=torch.complex64))], torch.optim.SGD)
    with pytest.raises(ValueError, match="learning rate"):
        ParameterServer(build().parameters(), torch.optim.SGD, lr=-1.0)


@pytest.mark.parametrize("what", [refused, refused_at_once])
def test_what_cannot_be_is_refused(pool, what):
    pool(2).run(what)


def resident() -> int:
    """Bytes of this process, of shared memory its part."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/smaps_rollup") as lines:
        [line] = [line for line in lines if line.startswith("Pss:")]
    return int(line.split()[1]) << 10


def memory(way: str, kind: str) -> tuple[int, int]:
    """What weights, gradients and optimizer need after some steps; and what tensors hold of it."""
    needed(way, kind, 80_000)  # what is needed once
    return needed(way, kind, ELEMENTS)


def needed(way: str, kind: str, elements: int) -> tuple[int, int]:
    dist.barrier()
    empty = resident()
    weights = [nn.Parameter(torch.full((elements // 8,), 0.5)) for _ in range(8)]
    cls, options, _ = OPTIMIZERS[kind]
    optimizer: torch.optim.Optimizer
    if way != "plain":
        layout: dict[str, Any] = {"servers": [1]} if way == "textbook" else {}
        optimizer = ParameterServer(weights, cls, timeout=TIMEOUT, **layout, **options)
    else:
        optimizer = cls(weights, **options, fused=True)
    for _ in range(2):
        optimizer.zero_grad(set_to_none=False)
        for each in weights:
            (each * 2.0).sum().backward()
        optimizer.step()
    gc.collect()
    dist.barrier()
    used = resident() - empty
    dist.barrier()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    tensors += [each.grad for each in weights if each.grad is not None]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    if isinstance(optimizer, ParameterServer):
        optimizer.close()
    return used, sum(held.values())


ELEMENTS = 10_000_000


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("way", "kind", "state"),
    [
        ("sharded", "adam", 2),
        ("sharded", "momentum", 1),
        ("textbook", "adam", 2),
        ("plain", "adam", 2),
    ],
    ids=["sharded-adam", "sharded-momentum", "textbook-adam", "plain-adam"],
)
def test_memory_is_that_of_the_formula(ranks, world, way, kind, state):
    """In units of the model: weights and gradients, and what a rank keeps of the state."""
    kept = [state / world if way == "sharded" else state] * world
    if way == "textbook":
        kept = [state if rank == 1 else 0 for rank in range(world)]
    wanted = [4 * ELEMENTS * (2 + each) for each in kept]
    found = ranks(world).run(memory, way, kind)
    for (_, held), expected in zip(found, wanted, strict=True):
        assert held == pytest.approx(expected, rel=0.03)
    assert sum(used for used, _ in found) == pytest.approx(sum(wanted), rel=0.03)


def weighted(_: dict[str, Any], way: str, reduction: str) -> None:
    """The mean over all samples, however many each rank has; none on some rank; accumulated."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = build()
    server = serve(way, model.parameters(), torch.optim.SGD, lr=1.0)
    for step, numbers in enumerate([(1, 3), (0, 2), (5, 5), (0, 0)]):
        server.zero_grad()
        before = copy.deepcopy(model)
        for part in range(2):
            n = numbers[rank] if part else 2 * numbers[rank]
            server.weight(n, reduction)
            loss = loss_of(model, 10 * step + part, rank) * (n if reduction == "sum" else 1)
            with contextlib.nullcontext() if part else server.no_sync():
                loss.backward()
        total = 3 * sum(numbers)
        losses = [torch.zeros(())]
        for p in range(ranks):
            for part in range(2):
                n = numbers[p] if part else 2 * numbers[p]
                # Micro-batches of "mean" are added up as they are.
                factor = n if reduction == "sum" else 3 * numbers[p]
                losses.append(loss_of(before, 10 * step + part, p) * (factor / max(total, 1)))
        sum(losses).backward()  # type: ignore[union-attr]
        server.step()
        for a, b in zip(model.parameters(), before.parameters(), strict=True):
            expected = b.detach() if b.grad is None else b.detach() - b.grad
            assert torch.allclose(a, expected, rtol=1e-5, atol=1e-6), f"step {step}"
    server.zero_grad()
    with pytest.raises(ValueError, match=r"weight\(n\) was called"):
        server.step()
    server.close()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_weights(pool, way, reduction):
    pool(2).run(weighted, way, reduction)


def one(value: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.full((3,), value, dtype=dtype))


def momentum_and_checkpoints(_: dict[str, Any]) -> None:
    """Momentum that is switched on later; a checkpoint with other numbers; what does not fit."""
    mine, other = one(1.0), one(1.0)
    how = {"lr": 1.0, "dampening": 0.5}
    server = ParameterServer([mine], torch.optim.SGD, timeout=TIMEOUT, **how)
    alone = torch.optim.SGD([other], **how)
    for step, momentum in enumerate([0.0, 0.9, 0.9, 0.0, 0.9]):
        for parameter, optimizer in ((mine, server), (other, alone)):
            optimizer.param_groups[0]["momentum"] = momentum
            optimizer.zero_grad()
            (parameter.sum() * (step + 1)).backward()
            optimizer.step()
        assert same_bits(mine.detach(), other.detach()), step
    server.param_groups[0]["differentiable"] = True
    with pytest.raises(RuntimeError, match="cannot be switched"):
        server.step()
    server.param_groups[0]["differentiable"] = False
    server.step()
    server.close()

    pair, twins = [one(1.0), one(2.0)], [one(1.0), one(2.0)]
    server = ParameterServer(pair, torch.optim.SGD, timeout=TIMEOUT, lr=1.0, momentum=0.5)
    alone = torch.optim.SGD(twins, lr=1.0, momentum=0.5)
    saved = alone.state_dict()
    saved["param_groups"][0]["params"] = [1, 0]
    saved["state"] = {i: {"momentum_buffer": torch.full((3,), 1.0 + i)} for i in range(2)}
    for parameters, optimizer in ((pair, server), (twins, alone)):
        optimizer.load_state_dict(copy.deepcopy(saved))
        optimizer.zero_grad()
        (parameters[0].sum() + parameters[1].sum()).backward()
        optimizer.step()
    assert all(same_bits(a.detach(), b.detach()) for a, b in zip(pair, twins, strict=True))
    with pytest.raises(ValueError, match="is in no group"):
        server.load_state_dict({**saved, "state": {7: {}}})
    with pytest.raises(ValueError, match=r"group 0 lacks .*betas"):
        adam = ParameterServer(pair, torch.optim.Adam, timeout=TIMEOUT)
        adam.load_state_dict(saved)
    server.close()


def odd_ones(_: dict[str, Any]) -> None:
    """The state of a parameter without dimensions; a step that is left out, of which one rank has
    used less; sparse gradients."""
    rank = dist.get_rank()
    scalar = nn.Parameter(torch.tensor(1.0))
    server = ParameterServer([scalar], torch.optim.RMSprop, timeout=TIMEOUT)
    for _ in range(2):
        server.zero_grad()
        (scalar * 2).backward()
        server.step()
        server.load_state_dict(server.state_dict())
    server.close()

    model = build()
    server = ParameterServer(
        model.parameters(), torch.optim.SGD, timeout=TIMEOUT, lr=0.1, bucket_bytes=100
    )
    for step in range(3):
        server.zero_grad()
        loss_of(model, step, rank, some=rank == 1).backward()
    server.step()
    server.close()

    rows = nn.Embedding(10, 3, sparse=True)
    server = ParameterServer(rows.parameters(), torch.optim.SGD, timeout=TIMEOUT, lr=1.0)
    before = rows.weight.detach().clone()
    rows.zero_grad()
    rows(torch.tensor([rank, 5])).sum().backward()
    server.step()
    change = (before - rows.weight.detach())[:, 0]
    assert torch.allclose(change[[0, 1, 5]], torch.tensor([0.5, 0.5, 1.0]))
    server.close()


def narrow_ones(_: dict[str, Any]) -> None:
    """Weights that somebody else has changed; small gradients of float16."""
    narrow = one(1.0, torch.bfloat16)
    server = ParameterServer([narrow], torch.optim.SGD, timeout=TIMEOUT, lr=0.0)
    with torch.no_grad():
        narrow[0] = 7.0
    server.zero_grad()
    narrow.sum().backward()
    server.step()
    assert narrow.tolist() == [7.0, 1.0, 1.0]
    server.close()

    half = one(0.0, torch.float16)
    server = ParameterServer([half], torch.optim.SGD, timeout=TIMEOUT, lr=1e4)
    scaler = fastreduce.GradScaler(server)
    server.zero_grad()
    scaler.scale((half.float() * 1e-8).sum()).backward()
    assert server.grad_norm.norm == pytest.approx(1e-8 * math.sqrt(3), rel=1e-3)
    scaler.step(server)
    scaler.update()
    assert half.tolist() == pytest.approx([-1e-4] * 3, rel=1e-2)
    server.close()


@pytest.mark.parametrize("what", [momentum_and_checkpoints, odd_ones, narrow_ones])
def test_nothing_is_lost_on_the_way(pool, what):
    pool(2).run(what)
