"""Everything that users of DistributedDataParallel do, with the hook and without: on two ranks the
gradients have the same bits, since halves are exact."""

from __future__ import annotations

import copy
import io
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist
from conftest import same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fastreduce

TIMEOUT = 60.0


class Setting:
    """Makes DDP models that average with the hook, or as DDP does; keeps what they came to."""

    def __init__(self, hook: bool) -> None:
        self.hook = hook
        self.states: list[fastreduce.HookState] = []
        self.seen: list[torch.Tensor | None] = []

    def wrap(self, model: nn.Module, attach: bool = True, **options) -> DistributedDataParallel:
        ddp = DistributedDataParallel(model, **options)
        if attach:
            self.attach(ddp)
        return ddp

    def attach(self, ddp: DistributedDataParallel) -> None:
        if self.hook:
            self.states.append(fastreduce.attach(ddp, timeout=TIMEOUT))

    def keep(self, model: nn.Module) -> None:
        """All gradients, in a form that compares."""
        for parameter in model.parameters():
            grad = parameter.grad
            if grad is not None:
                grad = grad.detach().to_dense() if grad.is_sparse else grad.detach().clone()
                grad = torch.view_as_real(grad) if grad.is_complex() else grad
            self.seen.append(grad)


def data(step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(*shape, generator=generator)


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width, following in itertools.pairwise(widths):
        layers += [nn.Linear(width, following), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def backward(ddp: nn.Module, step: int, width: int = 10, **options) -> None:
    ddp(data(step, 4, width)).square().mean().backward(**options)


def steps(setting: Setting, ddp: DistributedDataParallel, count: int) -> None:
    """So many, each with gradients of its own."""
    for step in range(count):
        ddp.zero_grad()
        backward(ddp, step)
        setting.keep(ddp.module)


def plain(setting: Setting) -> None:
    for options in (
        {},
        {"bucket_cap_mb": 0.001},
        {"bucket_cap_mb": 1000},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
        {"static_graph": True},
        {"find_unused_parameters": True},
    ):
        model = mlp(10, 70, 80, 5)
        ddp = setting.wrap(model, **options)
        steps(setting, ddp, 4)


def no_sync(setting: Setting) -> None:
    """Before, after and between synchronised passes; around forward alone, and around both."""
    for views in (False, True):
        model = mlp(10, 30, 5)
        ddp = setting.wrap(model, gradient_as_bucket_view=views)
        for pattern in ("nns", "sn", "nsns", "n", "s", "Fs", "nFs"):
            ddp.zero_grad()
            for step, kind in enumerate(pattern):
                if kind == "s":
                    backward(ddp, step)
                elif kind == "n":
                    with ddp.no_sync():
                        backward(ddp, step)
                else:
                    with ddp.no_sync():
                        loss = ddp(data(step, 4, 10)).square().mean()
                    loss.backward()
            setting.keep(model)


def repeated_backward(setting: Setting) -> None:
    """A second synchronised pass averages what has been averaged: the ranks' own second gradients
    are added to the mean of the first."""
    model = mlp(10, 30, 5)
    ddp = setting.wrap(model)
    for step in range(4):
        backward(ddp, step)
        setting.keep(model)


def create_graph(setting: Setting) -> None:
    """With one parameter: of more in a bucket, DDP raises by itself."""
    model = nn.Linear(10, 1, bias=False)
    ddp = setting.wrap(model)
    for step in range(6):
        loss = ddp(data(step, 4, 10)).pow(3).mean()
        loss.backward(create_graph=True)
        setting.keep(model)
    model.weight.grad = None


def complex_parameters(setting: Setting) -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Linear(10, 20)
            self.phase = nn.Parameter(torch.randn(20, 7, dtype=torch.complex64))
            self.wide = nn.Parameter(torch.randn(7, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((self.real(x).to(torch.complex64) @ self.phase) * self.wide).abs()

    model = Wave()
    ddp = setting.wrap(model)
    steps(setting, ddp, 3)


def channels_last(setting: Setting) -> None:
    for views in (False, True):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 3))
        model = model.to(memory_format=torch.channels_last)
        ddp = setting.wrap(model, gradient_as_bucket_view=views)
        for step in range(3):
            ddp.zero_grad()
            x = data(step, 2, 3, 8, 8).to(memory_format=torch.channels_last)
            ddp(x).square().mean().backward()
            setting.keep(model)


def mixed_precision(setting: Setting) -> None:
    """autocast and a GradScaler, one of whose steps overflows."""
    model = mlp(10, 30, 5)
    ddp = setting.wrap(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(data(step, 4, 10)).float().square().mean()
        if step == 2 and dist.get_rank() == 1:
            loss = loss * float("inf")  # on one rank; all must skip the step
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        setting.keep(model)
        scaler.step(optimizer)
        scaler.update()
        setting.seen += [p.detach().clone() for p in model.parameters()]
        setting.seen.append(torch.tensor(scaler.get_scale()))


def checkpointing(setting: Setting) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.parts = nn.ModuleList([mlp(10, 30, 10), mlp(10, 40, 10), mlp(10, 5)])
            self.reentrant = reentrant

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            for part in self.parts:
                x = checkpoint(part, x, use_reentrant=self.reentrant)
            return x

    for reentrant, options in ((False, {}), (True, {"static_graph": True})):
        model = Checkpointed(reentrant)
        ddp = setting.wrap(model, bucket_cap_mb=0.002, **options)
        steps(setting, ddp, 4)


def frozen_midway(setting: Setting) -> None:
    """DDP wants a new wrapper for another set of parameters; the old one's state is closed."""
    model = mlp(10, 30, 30, 5)
    for frozen in (False, True, False):
        model[0].requires_grad_(not frozen)
        ddp = setting.wrap(model)
        steps(setting, ddp, 2)
        if setting.hook:
            setting.states.pop().close()
        del ddp


def odd_models(setting: Setting) -> None:
    """One parameter; 2,000 tiny ones; some that need no gradient; empty ones."""

    class Many(nn.Module):
        def __init__(self, count: int) -> None:
            super().__init__()
            self.all = nn.ParameterList(nn.Parameter(torch.randn(10)) for _ in range(count))
            self.fixed = nn.Parameter(torch.ones(10), requires_grad=False)
            self.empty = nn.Parameter(torch.ones(0, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            product = torch.stack([p * (i % 7) for i, p in enumerate(self.all)]).sum(0)
            return x * product * self.fixed + self.empty.sum()

    for model in (nn.Linear(10, 1, bias=False), Many(1), Many(2000)):
        ddp = setting.wrap(model)
        steps(setting, ddp, 3)


def two_models(setting: Setting) -> None:
    """In one process, one after the other and one in the other's graph; hooks of one communicator
    too."""
    first, second = mlp(10, 30, 10), mlp(10, 20, 5)
    a, b = setting.wrap(first), setting.wrap(second, attach=False)
    if setting.hook:
        shared = fastreduce.HookState(setting.states[-1].communicator)
        b.register_comm_hook(shared, fastreduce.all_reduce_hook)
    for step in range(3):
        for ddp in (a, b):
            ddp.zero_grad()
        b(a(data(step, 4, 10))).square().mean().backward()
        setting.keep(first)
        setting.keep(second)
        backward(b, step)
        setting.keep(second)


def attached_late(setting: Setting) -> None:
    """After steps without a hook: buckets have been rebuilt."""
    for views in (False, True):
        model = mlp(10, 300, 300, 5)
        ddp = setting.wrap(model, attach=False, bucket_cap_mb=0.1, gradient_as_bucket_view=views)
        for step in range(5):
            if step == 3:
                setting.attach(ddp)
            ddp.zero_grad()
            backward(ddp, step)
            setting.keep(model)


def sparse_gradients(setting: Setting) -> None:
    """Rows that one rank has, that both have, that a rank has twice, and none at all. gloo adds
    sparse tensors, and DDP without a hook divides them."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 6, sparse=True)
            self.bag = nn.EmbeddingBag(30, 6, mode="sum", sparse=True)
            self.last = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.words(x) + self.bag(x % 30, torch.arange(len(x))))

    model = Words()
    ddp = setting.wrap(model)
    for step in range(4):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp.zero_grad()
        x = torch.randint(0, 50 if step < 3 else 1, (5,), generator=generator)
        if step == 1:
            x = x[:0]
        ddp(x).square().sum().backward()
        if setting.hook:
            assert model.words.weight.grad.is_sparse and model.words.weight.grad.is_coalesced()
            assert len(model.words.weight.grad.indices()[0].unique()) == len(
                model.words.weight.grad.indices()[0]
            )
        setting.keep(model)


def both_ways(scenario) -> None:
    kept = []
    for hook in (False, True):
        torch.manual_seed(0)
        setting = Setting(hook)
        scenario(setting)
        kept.append(setting.seen)
        for state in setting.states:
            state.close()
    without, with_hook = kept
    assert len(without) == len(with_hook) > 0
    for number, (want, got) in enumerate(zip(without, with_hook, strict=True)):
        assert (want is None) == (got is None), number
        assert want is None or same_bits(got, want), number


@pytest.mark.parametrize(
    "scenario",
    [
        plain,
        no_sync,
        repeated_backward,
        create_graph,
        complex_parameters,
        channels_last,
        mixed_precision,
        checkpointing,
        frozen_midway,
        odd_models,
        two_models,
        attached_late,
        sparse_gradients,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_as_without_a_hook(ranks, scenario):
    ranks(2).run(both_ways, scenario)


def no_gradients():
    """DDP itself refuses a model without any parameter that needs a gradient."""
    with pytest.raises(RuntimeError, match="requires a gradient"):
        DistributedDataParallel(nn.Linear(2, 2).requires_grad_(False))


def test_nothing_to_average(ranks):
    ranks(2).run(no_gradients)


def copies():
    """A copy would have lost its hook: it is refused, and the model inside can be copied."""
    model = mlp(10, 30, 5)
    ddp = DistributedDataParallel(model)
    state = fastreduce.attach(ddp, timeout=TIMEOUT)
    for copying in (copy.deepcopy, pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
        with pytest.raises(TypeError, match="copy or save the module inside"):
            copying(ddp)
    again = DistributedDataParallel(copy.deepcopy(ddp.module))
    with fastreduce.attach(again, timeout=TIMEOUT):
        for each in (ddp, again):
            backward(each, 0)
        for a, b in zip(ddp.parameters(), again.parameters(), strict=True):
            assert same_bits(a.grad, b.grad)
    state.close()


def test_copies_are_refused(ranks):
    ranks(2).run(copies)


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(600, 600) for _ in range(3)])
        self.unused = nn.Linear(3, 3)  # outside of the graph

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def compiled(mode):
    """The graph is split at buckets, or the reducer, in Python, is part of it."""
    from torch._dynamo import config, lookup_backend

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    config.optimize_ddp = mode
    config.compiled_autograd = mode == "python_reducer"
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Deep()
    alone = copy.deepcopy(model)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1.5, find_unused_parameters=True)
    state = fastreduce.attach(ddp, timeout=TIMEOUT, record=True)
    step_of = torch.compile(ddp, backend=backend)
    for step in range(4):
        ddp.zero_grad()
        weights = (1.0, 3.0) if step == 2 else (5.0, 1.0)
        if step >= 2:
            state.weight(weights[rank])
        step_of(data(step, 4, 600)).square().mean().backward()
        gradients = []
        for r in range(2):
            alone.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + r)
            x = torch.randn(4, 600, generator=generator)
            alone(x).square().mean().backward()
            gradients.append([p.grad.clone() for p in alone.layers.parameters()])
        n = weights if step >= 2 else (1.0, 1.0)
        for got, a, b in zip(model.layers.parameters(), *gradients, strict=True):
            want = (n[0] * a + n[1] * b) / sum(n)
            torch.testing.assert_close(got.grad, want, rtol=1e-3, atol=1e-6)
        state.check_synchronized()
    state.close()
    return len(graphs), len(state.stats())


@pytest.mark.parametrize("mode", ["ddp_optimizer", "python_reducer"])
def test_compiled(ranks, mode):
    for graphs, steps in ranks(2).run(compiled, mode):
        assert graphs >= (2 if mode == "ddp_optimizer" else 1)  # at least two parts
        # A reducer in Python calls an operator for every parameter, which is not recorded.
        assert steps == (4 if mode == "ddp_optimizer" else 0)
