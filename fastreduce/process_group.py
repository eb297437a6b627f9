"""The collectives through a process group's own backend (gloo, NCCL): between hosts, and for
tensors that do not lie in a CPU's memory. The backend decides the order of summation."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Object = TypeVar("Object")

# torch has renamed these two; older releases know the other name only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class _Work:
    """A backend's work, and what is left to do once it has ended."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish = finish
        self._waited = False

    def wait(self, timeout: float | timedelta | None = None) -> None:
        if timeout is None:
            self._work.wait()
        else:
            limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
            self._work.wait(limit)
        if not self._waited:
            self._waited = True
            self._finish()

    def is_completed(self) -> bool:
        # Not every backend's work knows that it has been waited for.
        return self._waited or bool(self._work.is_completed())


class ProcessGroupTransport:
    """Same arguments, same meaning as the methods of Communicator, already checked there."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._open_group = group
        self._world_size = dist.get_world_size(group)
        self._closed = False

    def close(self) -> None:
        """Later calls raise."""
        self._closed = True

    @property
    def _group(self) -> ProcessGroup | None:
        if self._closed:
            raise RuntimeError("the communicator is closed")
        return self._open_group

    def all_gather_object(self, value: Object) -> list[Object]:
        values: list[Any] = [None] * self._world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all_reduce(self, tensor: Tensor, op: str, async_op: bool, scale: float) -> _Work | None:
        group = self._group
        self._premultiply(tensor, scale)
        work = dist.all_reduce(tensor, _OPS[op], group=group, async_op=async_op)
        return self._finish(work, tensor, op)

    def all_reduce_future(
        self, future: Future[Tensor], tensor: Tensor, op: str, scale: float
    ) -> None:
        """``future`` is completed with ``tensor``."""
        group = self._group
        self._premultiply(tensor, scale)
        work = dist.all_reduce(tensor, _OPS[op], group=group, async_op=True)

        def done(ended: Future[list[Tensor]]) -> None:
            try:
                ended.value()
                self._divide(tensor, op)
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(tensor)

        work.get_future().add_done_callback(done)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: str, async_op: bool, scale: float
    ) -> _Work | None:
        if scale != 1.0:
            input = input * scale
        work = _reduce_scatter(output, input, _OPS[op], group=self._group, async_op=async_op)
        return self._finish(work, output, op)

    def all_gather(self, output: Tensor, input: Tensor, async_op: bool) -> _Work | None:
        work = _all_gather(output, input, group=self._group, async_op=async_op)
        return self._finish(work, output, "sum")

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> _Work | None:
        source = root if self._group is None else dist.get_global_rank(self._group, root)
        work = dist.broadcast(tensor, source, group=self._group, async_op=async_op)
        return self._finish(work, tensor, "sum")

    def barrier(self, async_op: bool) -> _Work | None:
        work = dist.barrier(group=self._group, async_op=async_op)
        return None if work is None else _Work(work, lambda: None)

    def _finish(self, work: Any, tensor: Tensor, op: str) -> _Work | None:
        if work is None:
            self._divide(tensor, op)
            return None
        return _Work(work, lambda: self._divide(tensor, op))

    def _divide(self, tensor: Tensor, op: str) -> None:
        if op != "mean":
            return
        if tensor.is_floating_point():
            tensor.detach().mul_(1 / self._world_size)
        else:
            tensor.detach().div_(self._world_size, rounding_mode="trunc")

    @staticmethod
    def _premultiply(tensor: Tensor, scale: float) -> None:
        if scale != 1.0:
            with torch.no_grad():
                tensor.mul_(scale)
