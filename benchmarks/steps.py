"""What gradient averaging adds to a DDP training step.

Copies of a model train side by side in the same processes and take turns, one step each per round.
What a way of averaging adds is the median over the rounds of its time less that of the hook that
communicates nothing, in the same round. The bound is the bytes of the model's buckets, moved by
plain loops one after the other, without waiting and with nothing else going on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from benchmarks import hooks
from benchmarks.case import Case, Maker, Setting, Target
from benchmarks.collectives import BOUND
from benchmarks.hooks import AVERAGINGS, BASE, BUILT_IN, OURS, RECORDED, TORCH, Attach
from benchmarks.models import GPU_WORKLOADS, WORKLOADS, Workload
from benchmarks.ranks import Rank
from fastreduce.timing import Method

BUCKET_CAP_MB = 25.0
MICRO_BATCHES = 4
SHARDS = "fastreduce's shards"
ROUNDS, WARM_UP = 40, 5  # in which buckets are rebuilt and moved


class Training:
    """A model, its optimizer, a batch, and how the gradients are averaged."""

    def __init__(self, workload: Workload, attach: Attach, rank: Rank) -> None:
        torch.manual_seed(0)
        device = rank.device
        self.model = DistributedDataParallel(
            workload.build().to(device),
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=BUCKET_CAP_MB,
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, foreach=True)
        self.x, self.y = (each.to(device) for each in workload.data(workload.batch))
        self.world_size = rank.world_size
        self.state = attach(self.model)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def backward(self) -> None:
        """Leaves the averaged gradients in the parameters."""
        scores = self.model(self.x)
        nn.functional.cross_entropy(scores.flatten(0, -2), self.y.flatten()).backward()

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


class Accumulation(Training):
    """A step of several micro-batches, as DDP's documentation shows it: ``no_sync()`` for all
    but the last."""

    def backward(self) -> None:
        with self.model.no_sync():
            for _ in range(MICRO_BATCHES - 1):
                super().backward()
        super().backward()


class Sharding(Training):
    """The same in logical shards, so that the bits do not depend on the number of ranks."""

    def backward(self) -> None:
        assert self.state is not None
        for _ in self.state.shards(MICRO_BATCHES * self.world_size):
            super().backward()


def training(
    workload: Workload, attach: Attach, rank: Rank, kind: type[Training] = Training
) -> Method:
    made = kind(workload, attach, rank)
    return Method(made.step, close=made.close)


def bound(workload: Workload, rank: Rank) -> Method | None:
    """None on GPUs."""
    if rank.device.type == "cuda":
        return None
    return rank.bound(bucket_sizes(workload, rank))


def bucket_sizes(workload: Workload, rank: Rank) -> list[int]:
    """Bytes of the buckets that a step averages, in their order. Collective."""
    sizes: list[int] = []

    def attach(model: DistributedDataParallel) -> None:
        def record(state, bucket):  # type: ignore[no-untyped-def]
            sizes.append(bucket.buffer().nbytes)
            return hooks.no_communication(state, bucket)

        model.register_comm_hook(None, record)

    recorded = Training(workload, attach, rank)
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        sizes.clear()
        recorded.step()
    return sizes


def _case(
    benchmark: str,
    labels: Mapping[str, str | int],
    makers: Mapping[str, Maker],
    *targets: Target,
    base: str = BASE,
    rounds: int = ROUNDS,
) -> Case:
    return Case(
        benchmark,
        labels,
        base=base,
        methods=makers,
        targets=targets,
        differences=True,
        rounds=rounds,
        seconds=0.0,
        warm_up=WARM_UP,
    )


def ddp_step(setting: Setting) -> list[Case]:
    """A DDP step of several nets, by every way to average; what averaging adds to it."""
    found = GPU_WORKLOADS if setting.device == "cuda" else WORKLOADS
    names = list(found)[:1] if setting.quick else list(found)
    cases = []
    for name in names:
        workload = found[name]
        makers: dict[str, Maker] = {
            way: partial(training, workload, attach) for way, attach in AVERAGINGS.items()
        }
        makers[BOUND] = partial(bound, workload)
        labels: dict[str, str | int] = {"model": name, "batch": workload.batch}
        cases.append(_case("ddp_step", labels, makers, Target(RECORDED, OURS, 1.01)))
    return cases


def accumulation(setting: Setting) -> list[Case]:
    """Steps of several micro-batches: plain accumulation, and shards in a fixed order of sums."""
    found = GPU_WORKLOADS if setting.device == "cuda" else WORKLOADS
    name = "transformer" if setting.device == "cuda" else "digits" if setting.quick else "mlp"
    workload = found[name]
    makers: dict[str, Maker] = {
        BASE: partial(training, workload, hooks.nothing, kind=Accumulation),
        BUILT_IN: partial(training, workload, hooks.built_in, kind=Accumulation),
        OURS: partial(training, workload, hooks.ours(), kind=Accumulation),
        SHARDS: partial(training, workload, hooks.ours(), kind=Sharding),
    }
    labels: dict[str, str | int] = {
        "model": name,
        "batch": workload.batch,
        "micro-batches": MICRO_BATCHES,
    }
    return [_case("accumulation", labels, makers, Target(SHARDS, OURS, 1.05))]


# -- what a hook itself costs ---------------------------------------------------------------------


class Tiny(nn.Module):
    """2,000 parameters of 10 elements each, used by as few operations as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.randn(10) for _ in range(2000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.stack(list(self.rows))


def hook(setting: Setting) -> list[Case]:
    """What a hook itself costs, with 2,000 parameters, beside torch's own with nothing to reach.

    From its call to the completion of its Future. Torch's is over a group that does nothing. On the
    CPU, whose clock this is.
    """
    if setting.device == "cuda":
        return []
    makers: dict[str, Maker] = {name: partial(_hook, TINY, parts) for name, parts in HOOKS.items()}
    return [_case("hook", {"parameters": 2000}, makers, base=TORCH)]


# Gives a state and a hook.
Parts = Callable[[DistributedDataParallel], tuple[Any, Callable[..., Any]]]


def _ours(model: DistributedDataParallel, **options: Any) -> tuple[Any, Callable[..., Any]]:
    return fastreduce.HookState(model, **options), fastreduce.all_reduce_hook


TINY = Workload(Tiny, (2000,), batch=1)
# Torch's is over a group that does nothing.
HOOKS: dict[str, Parts] = {
    BASE: lambda _: (None, hooks.no_communication),
    TORCH: lambda _: (hooks.no_op_group(), default_hooks.allreduce_hook),
    OURS: _ours,
}


class Matrix(nn.Module):
    """One parameter of 25 MiB, used as little as can be."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2560, 2560))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


MATRIX = Workload(Matrix, (2560,), batch=8, classes=2560)
WIRES: dict[str, str | fastreduce.Wire] = {
    **{name: name for name in ("fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int4", "onebit")},
    "topk 1 %": fastreduce.Wire("topk", k=0.01),
    "lowrank 2": fastreduce.Wire("lowrank", rank=2),
}


def wire(setting: Setting) -> list[Case]:
    """The hook's own time in every wire format, of one parameter of 25 MiB."""
    if setting.device == "cuda":
        return []
    names = ["fp32", "int8"] if setting.quick else list(WIRES)
    makers: dict[str, Maker] = {
        name: partial(_hook, MATRIX, partial(_ours, wire=WIRES[name])) for name in names
    }
    return [_case("wire", {"size": "25 MiB"}, makers, base="fp32", rounds=15)]


def _hook(workload: Workload, parts: Parts, rank: Rank) -> Method:
    """Timed by itself: a step is more than its hook."""
    spent: list[float] = []

    def attach(model: DistributedDataParallel) -> fastreduce.HookState | None:
        state, hook = parts(model)
        model.register_comm_hook(state, _timed(spent, hook))
        return state if isinstance(state, fastreduce.HookState) else None

    made = Training(workload, attach, rank)

    def run() -> float:
        spent.clear()
        made.step()
        return sum(spent)

    return Method(run, close=made.close)


def _timed(spent: list[float], hook: Callable[..., Any]) -> Callable[..., Any]:
    """The hook; its time goes to ``spent``. (One that held its model would keep it for ever.)"""

    # No annotations: DDP would compare them with its own types.
    def timed_hook(state, bucket):  # type: ignore[no-untyped-def]
        def stop(done):  # type: ignore[no-untyped-def]
            spent.append(time.perf_counter() - begin)
            return done.value()

        begin = time.perf_counter()
        return hook(state, bucket).then(stop)

    return timed_hook
