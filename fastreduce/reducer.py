"""What DDP, its reducer and autograd know but do not tell a hook in public."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel


def models_with(state: object) -> list[DistributedDataParallel]:
    """On which a hook's state is registered. torch does not say of what model a bucket is."""
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), DistributedDataParallel)
        and any(registered is state for _, registered in each._comm_hooks)
    ]


def backward_pass() -> int | None:
    """The number of the backward pass under way, None outside of any."""
    number: int = torch._C._current_graph_task_id()
    return None if number == -1 else number


def may_join(model: DistributedDataParallel) -> bool:
    """Whether it has been within ``join()``, so that some rank may run out of inputs."""
    return bool(model._join_config.enable)


def counts_joined(model: DistributedDataParallel) -> bool:
    """Whether ranks that have joined count in the divisor: ``divide_by_initial_world_size``."""
    # Only a model that has been within join() has it.
    return bool(model.__dict__.get("_divide_by_initial_world_size", True))


def after_backward(finished: Callable[[], None]) -> None:
    """Called by the hook of the last bucket, before DDP queues its own callback, which waits for
    the Futures: ``finished`` runs after that one, if it succeeds."""
    engine = torch.autograd.Variable._execution_engine
    engine.queue_callback(lambda: engine.queue_callback(finished))
