"""Other libraries' all-reduce, in the same processes: MPI, torch's symmetric memory, CuPy's NCCL.

A peer that is not installed, or cannot do what is asked, is left out and named in the report.
"""

from __future__ import annotations

import importlib.util
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.case import Maker
from benchmarks.ranks import Rank
from fastreduce import bench
from fastreduce.bench import Call, Op
from fastreduce.policy import MIB
from fastreduce.timing import Method


def mpi_all_reduce(nbytes: int, dtype: torch.dtype, op: Op, rank: Rank) -> Method | None:
    """MPI's in-place Allreduce, through mpi4py; it knows no bfloat16."""
    if rank.mpi is None or dtype is not torch.float32:
        return None
    world, in_place = rank.mpi.COMM_WORLD, rank.mpi.IN_PLACE
    buffer = torch.empty(nbytes // dtype.itemsize, dtype=dtype)
    array = buffer.numpy()

    def call(tensor: Tensor) -> None:
        world.Allreduce(in_place, array)
        if op == "mean":
            tensor.mul_(1 / rank.world_size)

    return bench.method_of(rank.communicator, call, [buffer], op)


def on_gpus(nbytes: int, dtype: torch.dtype) -> dict[str, Maker]:
    """Sums on GPUs."""
    makers: dict[str, Maker] = {
        f"torch {name}": partial(_symmetric, name, nbytes, dtype)
        for name in ("one_shot", "two_shot", "multimem")
        if name != "one_shot" or nbytes <= MIB
    }
    makers["cupy nccl"] = partial(_cupy, nbytes, dtype)
    return makers


def _symmetric(name: str, nbytes: int, dtype: torch.dtype, rank: Rank) -> Method | None:
    """torch.ops.symm_mem, on what ``Communicator.empty`` gives, which is torch's own."""
    gpu = rank.communicator._gpu_on(rank.device)
    if gpu is None or (name == "multimem" and not gpu.topology.multicast):
        return None
    group = rank.communicator._group.group.group_name
    ops = torch.ops.symm_mem
    call: Call = {
        "one_shot": lambda x: ops.one_shot_all_reduce(x, "sum", group),
        "two_shot": lambda x: ops.two_shot_all_reduce_(x, "sum", group),
        "multimem": lambda x: ops.multimem_all_reduce_(x, "sum", group),
    }[name]
    return _if_it_runs(call, bench.buffers_for(rank.communicator, nbytes, dtype, rank.device), rank)


@cache
def _cupy_communicator(world_size: int, number: int) -> Any:
    """CuPy's NCCL communicator of all ranks; collective."""
    from cupy.cuda import nccl

    told = [nccl.get_unique_id() if number == 0 else None]
    dist.broadcast_object_list(told, 0)
    return nccl.NcclCommunicator(world_size, told[0], number)


def _cupy(nbytes: int, dtype: torch.dtype, rank: Rank) -> Method | None:
    if importlib.util.find_spec("cupy") is None or dtype is not torch.float32:
        return None
    from cupy.cuda import nccl

    communicator = _cupy_communicator(rank.world_size, rank.rank)

    def call(tensor: Tensor) -> None:
        address, count = tensor.data_ptr(), tensor.numel()
        stream = torch.cuda.current_stream().cuda_stream
        communicator.allReduce(address, address, count, nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream)

    buffers = [torch.empty(nbytes // 4, device=rank.device) for _ in range(2)]
    return _if_it_runs(call, buffers, rank)


def _if_it_runs(call: Call, buffers: list[Tensor], rank: Rank) -> Method | None:
    """None where some rank's first call fails; collective."""
    failed = torch.zeros(1)
    try:
        call(buffers[0].zero_())
        torch.cuda.synchronize(rank.device)
    except (RuntimeError, ValueError, AttributeError) as error:
        failed.fill_(1)
        if rank.rank == 0:
            print(f"left out: {str(error).splitlines()[0]}", flush=True)
    rank.communicator.all_reduce(failed, "max")
    if failed.item():
        return None
    return bench.method_of(rank.communicator, call, buffers, "sum")
