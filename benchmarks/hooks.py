"""Ways to average the gradients of a DDP model: none, DDP's own, torch's hooks, fastreduce.

To add one, give :data:`AVERAGINGS` a function that registers a hook.
"""

# DDP reads the annotations of hooks: no postponed ones in this file.
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import fastreduce

BASE, BUILT_IN, OURS, TORCH = "no communication", "DDP's own", "fastreduce", "torch's hook, alone"
RECORDED, NORMS = "fastreduce, recorded", "fastreduce, norms"
POWER_SGD_START = 2  # the first step in which it does not send all

# Registers a hook. What it gives, where it gives anything, has to be closed.
Attach = Callable[[DistributedDataParallel], fastreduce.HookState | None]


def no_communication(_: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    future: Future[Tensor] = Future()
    if torch.cuda.is_available() and bucket.buffer().is_cuda:
        future = Future(devices=[bucket.buffer().device])
    future.set_result(bucket.buffer())
    return future


class NoOpGroup(dist.ProcessGroup):
    """Every all-reduce is complete at once and leaves the tensors as they are. (The Futures of
    torch's own "fake" backend hold no tensors, which allreduce_hook needs.)"""

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]

    def allreduce(self, *args: Any, **_: Any) -> Any:
        future: Future[list[Tensor]] = Future()
        future.set_result(args[0])
        return _distributed_c10d._create_work_from_future(future)  # type: ignore[attr-defined]


def no_op_group() -> NoOpGroup:
    return NoOpGroup(dist.get_rank(), dist.get_world_size())


def nothing(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, no_communication)


def built_in(_: DistributedDataParallel) -> None:
    """What DDP does without a hook."""


def torch_fp16(model: DistributedDataParallel) -> None:
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)


def torch_bf16(model: DistributedDataParallel) -> None:
    # DDP refuses the hook without NCCL, which it knows by its name. Gloo sums bfloat16, too.
    def hook(state, bucket):  # type: ignore[no-untyped-def]
        return default_hooks.bf16_compress_hook(state, bucket)

    model.register_comm_hook(None, hook)


def power_sgd(rank: int) -> Attach:
    def attach(model: DistributedDataParallel) -> None:
        # Bucket by bucket: the hook's callbacks begin collectives, and with two buckets under way
        # not in the same order on all ranks, at which gloo aborts.
        def hook(state, bucket):  # type: ignore[no-untyped-def]
            averaged = powerSGD_hook.powerSGD_hook(state, bucket)
            averaged.wait()
            return averaged

        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=rank, start_powerSGD_iter=POWER_SGD_START
        )
        model.register_comm_hook(state, hook)

    return attach


def ours(**options: Any) -> Attach:
    return partial(fastreduce.attach, **options)


AVERAGINGS: dict[str, Attach] = {
    BASE: nothing,
    BUILT_IN: built_in,
    "torch bf16": torch_bf16,
    "torch fp16": torch_fp16,
    OURS: ours(),
    RECORDED: ours(record=True),
    NORMS: ours(norms=True),
    f"{OURS} bf16": ours(wire="bf16"),
    f"{OURS} int8": ours(wire="int8"),
}
