"""What takes turns in ddp_step.py: a DDP model and a way to average its gradients, or the bound.

To add one, write a class with the two methods of Variant and name it in ``variants_of``.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _distributed_c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from benchmarks.all_reduce import BOUND, Rank
from benchmarks.models import WORKLOADS, Workload

BASE, GLOO, OURS, TORCH = "no communication", "gloo", "fastreduce", "torch's hook"
SHARDS, RECORDED = "fastreduce's shards", "fastreduce, recorded"

Hook = Callable[[Any, Any], Future[Tensor]]
# Gives the state and the hook of a DDP model; None for what DDP does without a hook.
Averaging = Callable[[DistributedDataParallel], tuple[Any, Hook] | None]


# DDP reads the annotations: no postponed ones in this file.
def no_communication(_: None, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    future: Future[Tensor] = Future()
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


def nothing(_: DistributedDataParallel) -> tuple[Any, Hook]:
    return None, no_communication


def gloo(_: DistributedDataParallel) -> None:
    return None


def torch_hook(_: DistributedDataParallel) -> tuple[Any, Hook]:
    return NoOpGroup(dist.get_rank(), dist.get_world_size()), default_hooks.allreduce_hook


def ours(model: DistributedDataParallel) -> tuple[Any, Hook]:
    return fastreduce.HookState(model, timeout=120), fastreduce.all_reduce_hook


def recorded(model: DistributedDataParallel) -> tuple[Any, Hook]:
    return fastreduce.HookState(model, timeout=120, record=True), fastreduce.all_reduce_hook


class Variant(Protocol):
    """What takes turns with others."""

    def step(self) -> float:
        """Lets the ranks meet, takes a step, and returns its seconds on this rank."""

    def close(self) -> None: ...


def timed_by(seconds: list[float], hook: Hook) -> Hook:
    """The hook; ``seconds[-1]`` grows by its time from the call to its Future's completion.
    (A hook that held its model would keep it for ever.)"""

    # No annotations: DDP would compare them with its own types.
    def timed_hook(state, bucket):  # type: ignore[no-untyped-def]
        def stop(done):  # type: ignore[no-untyped-def]
            seconds[-1] += time.perf_counter() - begin
            return done.value()

        begin = time.perf_counter()
        return hook(state, bucket).then(stop)

    return timed_hook


class Training:
    """A model, its optimizer, a batch, and how the gradients are averaged.

    Args:
        averaging: gives the hook.
        timed: the hook is timed from its call to the completion of its Future.
    """

    def __init__(
        self,
        rank: Rank,
        workload: Workload,
        batch: int,
        bucket_cap_mb: float,
        averaging: Averaging,
        *,
        timed: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.model = DistributedDataParallel(workload.build(), bucket_cap_mb=bucket_cap_mb)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, foreach=True)
        self.x, self.y = workload.data(batch)
        self.state: Any = None
        self.hook_seconds: list[float] = []  # of every step, if the hook is timed
        found = averaging(self.model)
        if found is not None:
            self.state, hook = found
            self.model.register_comm_hook(
                self.state, timed_by(self.hook_seconds, hook) if timed else hook
            )

    def step(self) -> float:
        self.hook_seconds.append(0.0)
        self.rank.communicator.barrier()
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()
        return time.perf_counter() - begin

    def backward(self) -> None:
        """Leaves the averaged gradients in the parameters."""
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()

    def close(self) -> None:
        if isinstance(self.state, fastreduce.HookState):
            self.state.close()


class Accumulation(Training):
    """A step of several micro-batches, as DDP's documentation shows it: ``no_sync()`` for all
    but the last."""

    def __init__(self, *args: Any, micro_batches: int) -> None:
        super().__init__(*args)
        self.micro_batches = micro_batches

    def backward(self) -> None:
        with self.model.no_sync():
            for _ in range(self.micro_batches - 1):
                super().backward()
        super().backward()


class Sharding(Accumulation):
    """The same in logical shards, so that the bits do not depend on the number of ranks."""

    def backward(self) -> None:
        for _ in self.state.shards(self.micro_batches * self.rank.world_size):
            Training.backward(self)


class Bound:
    """The bytes of a step's buckets, moved bucket by bucket by plain loops."""

    def __init__(self, rank: Rank, sizes: list[int]) -> None:
        self.rank = rank
        own = rank.arena[rank.rank]
        self.buckets = [
            (own[:size].view(torch.float32), torch.randn(size // 4), rank.bound_method(size))
            for size in sizes
        ]

    def step(self) -> float:
        seconds = 0.0
        for buffer, fresh, move_bytes in self.buckets:
            self.rank.communicator.barrier()  # the peers are done with the bucket before
            buffer.copy_(fresh)  # as a gradient is: by its owner
            self.rank.communicator.barrier()
            begin = time.perf_counter()
            move_bytes()
            seconds += time.perf_counter() - begin
        return seconds

    def close(self) -> None:
        pass


def bucket_sizes(training: Callable[[Averaging], Training]) -> list[int]:
    """Bytes of the buckets that a step averages, in their order."""
    sizes: list[int] = []

    def record(state, bucket):  # type: ignore[no-untyped-def]
        sizes.append(bucket.buffer().nbytes)
        return no_communication(state, bucket)

    model = training(lambda _: (None, record))
    for _ in range(3):  # DDP rebuilds its buckets after the first step
        sizes.clear()
        model.step()
    return sizes


def variants_of(
    model: str, rank: Rank, batch: int, bucket_cap_mb: float, micro_batches: int
) -> dict[str, Variant]:
    """What takes turns for a model of WORKLOADS; the first is what the others are compared with."""
    setting = (rank, WORKLOADS[model], batch, bucket_cap_mb)
    if model == "tiny":
        train = partial(Training, *setting, timed=True)
        return {BASE: train(nothing), TORCH: train(torch_hook), OURS: train(ours)}
    if model == "accumulate":
        return {
            BASE: Accumulation(*setting, nothing, micro_batches=micro_batches),
            OURS: Accumulation(*setting, ours, micro_batches=micro_batches),
            SHARDS: Sharding(*setting, ours, micro_batches=micro_batches),
        }
    train = partial(Training, *setting)
    bound = Bound(rank, bucket_sizes(train))
    return {
        BASE: train(nothing),
        GLOO: train(gloo),
        OURS: train(ours),
        RECORDED: train(recorded),
        BOUND: bound,
    }
