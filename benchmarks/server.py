"""Averaging and update with Adam: the sharded parameter server beside what it replaces.

Every rank has the same parameters and its own gradients, written afresh before each step. Timed is
all from there to the updated parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import fastreduce
from benchmarks.case import Case, Setting, Target
from benchmarks.ranks import Rank
from fastreduce.timing import Method

SERVER, FUSED, GLOO, ZERO = "server", "all-reduce, fused Adam", "gloo, Adam", "gloo, ZeRO"
ELEMENTS = 10_000_000
BUCKET_BYTES = 25 << 20
RATE = 1e-3


def cases(setting: Setting) -> list[Case]:
    """Averaging and Adam: the sharded parameter server beside what it replaces."""
    if setting.device == "cuda":
        return []
    return [
        Case(
            "server",
            {"parameters": ELEMENTS},
            base=SERVER,
            methods={
                SERVER: _server,
                FUSED: _fused,
                GLOO: partial(_gloo, zero=False),
                ZERO: partial(_gloo, zero=True),
            },
            targets=(Target(SERVER, GLOO, 0.6), Target(SERVER, FUSED, 0.85)),
            rounds=25,
            seconds=0.0,
        )
    ]


def _parameters() -> list[nn.Parameter]:
    """Matrices of a million elements, and what is left."""
    side = 1 << 20
    torch.manual_seed(0)
    sizes = [side] * (ELEMENTS // side) + [ELEMENTS % side]
    return [nn.Parameter(torch.randn(size)) for size in sizes]


def _method(gradients: Sequence[Tensor], step: Callable[[], object]) -> Method:
    """``gradients`` are where a rank writes its own."""
    fresh = torch.randn(max(gradient.numel() for gradient in gradients))

    def prepare() -> None:
        for gradient in gradients:
            gradient.view(-1).copy_(fresh[: gradient.numel()])

    return Method(step, prepare)


def _server(rank: Rank) -> Method:
    """reduce-scatter, fused update, all-gather."""
    parameters = _parameters()
    served = fastreduce.ParameterServer(
        parameters, torch.optim.Adam, lr=RATE, bucket_bytes=BUCKET_BYTES
    )

    def step() -> None:
        served._used.fill_(1)
        served.step()
        for bucket in served._buckets:  # as zero_grad(), but for the zeros
            bucket.work = None
        served._pass = type(served._pass)()

    return _method([each.grad for each in parameters if each.grad is not None], step)


def _flat_gradients(parameters: list[nn.Parameter], make: Callable[[int], Tensor]) -> list[Tensor]:
    """Buckets, of which the parameters' gradients are views."""
    buckets: list[Tensor] = []
    members: list[nn.Parameter] = []
    for each in [*parameters, None]:
        if each is None or sum(m.nbytes for m in members) + each.nbytes > BUCKET_BYTES:
            buckets.append(make(sum(m.numel() for m in members)))
            parts = buckets[-1].split([m.numel() for m in members])
            for member, part in zip(members, parts, strict=True):
                member.grad = part
            members = []
        if each is not None:
            members.append(each)
    return buckets


def _fused(rank: Rank) -> Method:
    """fastreduce's all-reduce, then torch's fused Adam on every rank."""
    parameters = _parameters()
    buckets = _flat_gradients(parameters, rank.communicator.empty)
    optimizer = torch.optim.Adam(parameters, lr=RATE, fused=True)

    def step() -> None:
        for bucket in buckets:
            rank.communicator.all_reduce(bucket)
        optimizer.step()

    return _method(buckets, step)


def _gloo(rank: Rank, *, zero: bool) -> Method:
    """gloo's all-reduce of DDP's buckets, then torch's Adam on every rank, or in shards."""
    parameters = _parameters()
    buckets = _flat_gradients(parameters, torch.empty)
    optimizer: torch.optim.Optimizer
    if zero:
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=RATE, foreach=True)
    else:
        optimizer = torch.optim.Adam(parameters, lr=RATE, foreach=True)

    def step() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        for bucket in buckets:
            bucket.div_(rank.world_size)
        optimizer.step()

    return _method(buckets, step)
