"""Collectives by size, dtype and operation, beside every peer that the run has."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import peers
from benchmarks.case import Case, Maker, Setting
from benchmarks.ranks import Rank
from fastreduce import bench, policy, terminal
from fastreduce.bench import Call, Op
from fastreduce.timing import Method

KIB, MIB = policy.KIB, policy.MIB
BOUND, OURS, STAGED = "bound", "fastreduce", "fastreduce staged"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SIZES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB, 25 * MIB, 64 * MIB, 256 * MIB]
QUICK = [KIB, 64 * KIB, MIB, 25 * MIB]


def all_reduce(setting: Setting) -> list[Case]:
    """All-reduce by algorithm, size and dtype: sums, and means, which cost others a second pass."""
    kinds: list[tuple[str, Op]] = [("float32", "sum"), ("bfloat16", "sum"), ("float32", "mean")]
    cases = []
    for dtype, op in kinds[: 2 if setting.quick else 3]:
        for nbytes in QUICK if setting.quick else SIZES:
            cases.append(_all_reduce_case(setting, nbytes, dtype, op))
    return cases


def _all_reduce_case(setting: Setting, nbytes: int, dtype: str, op: Op) -> Case:
    kind = DTYPES[dtype]
    on_gpus = setting.device == "cuda"
    group = bench.group_name(torch.device(setting.device))
    names = ["one_shot", "two_shot", "ring"]
    if nbytes > (policy.GPU_SLOT_BYTES if on_gpus else policy.SLOT_BYTES):
        names.remove("one_shot")
    if on_gpus:
        names += ["low_latency", "multimem"]
    makers: dict[str, Maker] = {}
    for name in [OURS, *names, group]:
        makers[name] = partial(named, name, nbytes, kind, op)
    if on_gpus:
        if op == "sum":
            makers |= peers.on_gpus(nbytes, kind)
    else:
        makers[STAGED] = partial(staged, nbytes, kind, op)
        makers["mpi"] = partial(peers.mpi_all_reduce, nbytes, kind, op)
        makers[BOUND] = partial(_bound, nbytes)
    return Case(
        "all_reduce",
        {"dtype": dtype, "op": op, "size": terminal.size(nbytes)},
        base=group if on_gpus else BOUND,
        methods=makers,
        nbytes=nbytes,
        rounds=5 if nbytes > 32 * MIB else 15,
        repeats=1 if nbytes >= MIB or on_gpus else 8,
    )


def named(name: str, nbytes: int, dtype: torch.dtype, op: Op, rank: Rank) -> Method | None:
    call = bench.all_reduce_calls(rank.communicator, nbytes, rank.device, op).get(name)
    if call is None:
        return None
    reached = name != bench.group_name(rank.device)
    return _method(call, nbytes, dtype, op, reached, rank)


def _method(
    call: Call, nbytes: int, dtype: torch.dtype, op: Op, reached: bool, rank: Rank
) -> Method:
    communicator, device = rank.communicator, rank.device
    buffers = bench.buffers_for(communicator, nbytes, dtype, device, reached=reached)
    return bench.method_of(communicator, call, buffers, op)


def staged(nbytes: int, dtype: torch.dtype, op: Op, rank: Rank) -> Method | None:
    """A tensor in private memory, that no peer can map."""
    if not rank.communicator.topology.shared_memory:
        return None
    call = bench.all_reduce_calls(rank.communicator, nbytes, rank.device, op)[OURS]
    return _method(call, nbytes, dtype, op, False, rank)


def _bound(nbytes: int, rank: Rank) -> Method | None:
    return rank.bound([nbytes])


# -- the other collectives ------------------------------------------------------------------------

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# On the larger tensor, and on a rank's part of it.
Collective = Callable[[Rank, Tensor, Tensor], object]


def others(setting: Setting) -> list[Case]:
    """Reduce-scatter, all-gather and broadcast of float32."""
    group = bench.group_name(torch.device(setting.device))
    ours: dict[str, Collective] = {
        "reduce_scatter": lambda rank, whole, part: rank.communicator.reduce_scatter(
            part, whole, "sum"
        ),
        "all_gather": lambda rank, whole, part: rank.communicator.all_gather(whole, part),
        "broadcast": lambda rank, whole, part: rank.communicator.broadcast(whole, 0),
    }
    theirs: dict[str, Collective] = {
        "reduce_scatter": lambda rank, whole, part: reduce_scatter(part, whole),
        "all_gather": lambda rank, whole, part: all_gather(whole, part),
        "broadcast": lambda rank, whole, part: dist.broadcast(whole, 0),
    }
    return [
        Case(
            "collectives",
            {"collective": name, "dtype": "float32", "size": terminal.size(nbytes)},
            base=group,
            methods={
                group: partial(_collective, theirs[name], nbytes, False),
                OURS: partial(_collective, ours[name], nbytes, True),
            },
            nbytes=nbytes,
            repeats=1 if nbytes >= MIB else 8,
            seconds=0.5,
        )
        for name in ours
        for nbytes in ([MIB] if setting.quick else [4 * KIB, MIB, 25 * MIB])
    ]


def _collective(call: Collective, nbytes: int, reached: bool, rank: Rank) -> Method:
    """``reached``: in memory that the peers map."""
    count = nbytes // 4 // rank.world_size * rank.world_size

    def buffer(count: int) -> Tensor:
        if reached:
            return rank.communicator.empty(count, device=rank.device)
        return torch.empty(count, device=rank.device)

    whole, part = buffer(count), buffer(count // rank.world_size)
    fresh = torch.randn(count, device=rank.device)

    def prepare() -> None:
        whole.copy_(fresh)
        part.copy_(fresh[: part.numel()])

    return Method(lambda: call(rank, whole, part), prepare)
