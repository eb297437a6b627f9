"""The DistributedDataParallel communication hook and its state."""

from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fastreduce.communicator import Communicator
from fastreduce.process_group import fail


class HookState:
    """What :func:`all_reduce_hook` needs: the communicator of the model's process group.

    Args:
        source: a :class:`Communicator`, which stays the caller's to close, or a DDP model, for
            whose process group one is created (collectively) and owned.
        kwargs: for a DDP model, passed on to :class:`Communicator`.
    """

    def __init__(self, source: Communicator | DistributedDataParallel, **kwargs: Any) -> None:
        if isinstance(source, DistributedDataParallel):
            self.communicator = Communicator(source.process_group, **kwargs)
            self._owned = True
        elif isinstance(source, Communicator):
            if kwargs:
                raise TypeError(f"expected no {sorted(kwargs)} beside a communicator")
            self.communicator = source
            self._owned = False
        else:
            raise TypeError(
                "source: expected a Communicator or a DistributedDataParallel model, "
                f"got {type(source).__name__}"
            )

    def close(self) -> None:
        """Closes the communicator if this state created it."""
        if self._owned:
            self.communicator.close()

    def __enter__(self) -> "HookState":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._owned:
            self.communicator.__exit__(kind, error, trace)

    def __getstate__(self) -> None:
        raise TypeError(
            "a HookState holds connections to other processes and cannot be pickled or "
            "deep-copied: copy or save the module inside the DDP model"
        )


def all_reduce_hook(
    state: HookState | Communicator,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks, while backward goes on.

    ``ddp.register_comm_hook(state, fastreduce.all_reduce_hook)``. The first time a bucket is
    seen, its buffer is moved into shared memory in place, so that peers read and write it where
    it lies. Gradients are the mean over the ranks: what DDP gives without a hook, in a fixed
    order of summation. The bucket holds the accumulated gradient: a second synchronised backward
    pass without ``zero_grad`` averages what has been averaged, as without this hook.

    Never raises: what goes wrong travels through the Future, and ``backward()`` raises it as a
    RuntimeError (``communicator.error`` is the exception itself). Sparse gradients are refused
    that way. ``state`` may be the :class:`Communicator` alone.
    """
    try:
        communicator = state if isinstance(state, Communicator) else state.communicator
        averaged = communicator.all_reduce_future(bucket.buffer(), move=True)
    except Exception as error:
        averaged = torch.futures.Future()
        fail(averaged, error, [])
    # DDP reads the Future in C++, which knows an exception only if a callback has raised it.
    return averaged.then(_value)


def _value(future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
    try:
        return future.value()
    finally:
        del future  # which holds the exception that would hold this frame


def attach(
    ddp: DistributedDataParallel, *, timeout: float | timedelta = 600.0, **kwargs: Any
) -> HookState:
    """Registers :func:`all_reduce_hook` on a DDP model, over the model's own process group.

    Collective among the ranks of that group. Returns the state; ``state.close()``, leaving it as
    a context manager, or the end of the process frees what it holds.

    Args:
        ddp: a model without a communication hook.
        timeout: seconds that any one wait for a peer may take.
        kwargs: passed on to :class:`Communicator`.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"ddp: expected a DistributedDataParallel model, got {type(ddp).__name__}")
    state = HookState(ddp, timeout=timeout, **kwargs)
    try:
        # Else the first bucket would do that, in the middle of backward.
        devices = {p.device for p in ddp.parameters() if p.is_cuda and p.requires_grad}
        for device in sorted(devices, key=str):
            state.communicator.connect(device)
        ddp.register_comm_hook(state, all_reduce_hook)
    except BaseException:
        state.close()
        raise
    return state
