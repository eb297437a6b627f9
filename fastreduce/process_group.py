"""The collectives through a process group's own backend (gloo, NCCL): between hosts, and for
tensors that do not lie in a CPU's memory. The backend decides the order of summation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fastreduce.weights import Weight, announcement, total_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from fastreduce.shares import Shares

Object = TypeVar("Object")

# torch has renamed these two; older releases know the other name only.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# What is told of a call that has succeeded: the sum of the ranks' weights, and its times.
Account = tuple[int, int, int, int, int]
Done = Callable[[float, "Account | None"], None]

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


def _wide(tensor: Tensor, op: str, scaled: bool) -> torch.dtype:
    """What a backend must sum in to give what the kernels give: sums of 16-bit floats are rounded
    once, and a mean cannot overflow where its value does not. (NCCL does that by itself, but for
    what has been multiplied before.)"""
    if op not in ("sum", "mean") or (tensor.device.type != "cpu" and not scaled):
        return tensor.dtype
    if tensor.dtype in (torch.float16, torch.bfloat16):
        return torch.float32
    if op == "mean" and tensor.dtype in (torch.uint8, torch.int32):
        return torch.int64
    return tensor.dtype


def _staged(
    tensor: Tensor, op: str, scale: float, *, in_place: bool, weighted: bool = False
) -> Tensor:
    """What the backend is given for ``tensor``: itself, or a wider or scaled copy."""
    if scale == 0.0:
        dropped = tensor.detach().zero_() if in_place else torch.zeros_like(tensor)
        return dropped.to(_wide(tensor, op, True))
    if scale != 1.0 and tensor.is_cuda:
        from fastreduce import cuda

        if not cuda.problem():
            flat = tensor.detach()
            wide = _wide(flat, op, True)
            alike = in_place and wide == flat.dtype
            scaled = flat if alike else torch.empty_like(flat, dtype=wide)
            cuda.convert([flat], [scaled], scale, tensor.device)
            return scaled
    with torch.no_grad():
        given = tensor.detach().to(_wide(tensor, op, weighted or scale != 1.0))
        if scale == 1.0:
            return given
        return given.mul_(scale) if in_place or given.dtype != tensor.dtype else given * scale


def as_timedelta(seconds: float | timedelta) -> timedelta:
    """At most ten years: longer ones, infinity too, do not fit into a clock's nanoseconds."""
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    return timedelta(seconds=min(seconds, 10 * 365 * 86400))


def fail(future: Future[Tensor], error: Exception, errors: list[Exception]) -> None:
    """Completes ``future`` with ``error``, which also becomes the first of ``errors`` if none is.
    Without its traceback, whose frames hold the Future: nothing would ever free the two."""
    error = error.with_traceback(None)
    if not errors:
        errors.append(error)
    future.set_exception(error)  # type: ignore[arg-type]


def failing(future: Future[Tensor]) -> Future[Tensor]:
    """A Future whose exception DDP can read: in C++, which knows one only if a callback has raised
    it."""
    return future.then(value_of)


def value_of(future: Future[Tensor]) -> Tensor:
    """For a callback: a Future's value, or its exception."""
    try:
        return future.value()
    finally:
        del future  # which holds the exception that would hold this frame


def _nothing() -> None:
    """What is left to do after a transfer."""


class _Work:
    """A backend's work, and what is left to do once it has ended."""

    def __init__(self, work: Any, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish = finish
        self._waited = False

    def wait(self, timeout: float | timedelta | None = None) -> None:
        if timeout is not None and not self.is_completed():
            limit = as_timedelta(timeout)
            try:
                # To a backend, 0 ms would mean for ever.
                self._work.wait(max(limit, timedelta(milliseconds=1)))
            except RuntimeError as error:
                if not self._work.is_completed():
                    seconds = limit.total_seconds()
                    raise TimeoutError(f"the call has not completed after {seconds} s") from error
        if not self._waited:
            self._work.wait()
            self._waited = True
            self._finish()

    def is_completed(self) -> bool:
        # Not every backend's work knows that it has been waited for.
        return self._waited or bool(self._work.is_completed())


class _Total:
    """The sum of the ranks' weights, under way beside the tensor's own all-reduce: a backend sums
    one tensor in one way."""

    def __init__(self, weight: Weight, device: torch.device, group: ProcessGroup | None) -> None:
        self._parts = torch.tensor(announcement(weight), dtype=torch.float64, device=device)
        self._work: Any = dist.all_reduce(self._parts, group=group, async_op=True)

    def value(self) -> Tensor:
        """On the device."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._parts.is_cuda:  # made on one stream, read on another
            self._parts.record_stream(torch.cuda.current_stream(self._parts.device))
        return total_of(self._parts)


class ProcessGroupTransport:
    """Same arguments, same meaning as the methods of Communicator, already checked there.

    Args:
        members: the ranks of the group that objects are gathered of, None for all; all other calls
            are the whole group's.
    """

    def __init__(self, group: ProcessGroup | None, members: Sequence[int] | None = None) -> None:
        self._open_group = group
        self._members = range(dist.get_world_size(group)) if members is None else members
        self._world_size = len(self._members)
        self._averages = "nccl" in dist.get_backend_config(group)
        self._closed = False

    def close(self, *, drain: bool = True) -> None:
        """Later calls raise. ``drain``: what is under way ends before."""
        self._closed = True

    def algorithm(self, tensor: Tensor, op: str) -> str:
        """Which one an all-reduce takes."""
        return "process_group"

    def keeps_order(self, tensor: Tensor, op: str) -> bool:
        """Whether an all-reduce sums over the tree of ranks."""
        return False

    @property
    def group(self) -> ProcessGroup:
        """The process group itself, also where it is the default one."""
        return self._open_group or dist.distributed_c10d._get_default_group()

    @property
    def _group(self) -> ProcessGroup | None:
        if self._closed:
            raise RuntimeError("the communicator is closed")
        return self._open_group

    def all_gather_object(self, value: Object) -> list[Object]:
        """Every member's; collective among all of the group."""
        values: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(values, value, group=self._group)
        return [values[member] for member in self._members]

    def all_reduce(
        self,
        tensor: Tensor,
        op: str,
        async_op: bool,
        scale: float,
        weight: Weight | None = None,
    ) -> _Work | None:
        group = self._group
        total = self._total_of(weight, tensor)
        summed = _staged(tensor, op, scale, in_place=True, weighted=weight is not None)
        how = self._operation(summed, op, total)
        work = dist.all_reduce(summed, how, group=group, async_op=async_op)
        return self._finish(work, lambda: self._settle(tensor, summed, op, how, total))

    def _total_of(self, weight: Weight | None, tensor: Tensor) -> _Total | None:
        return None if weight is None else _Total(weight, tensor.device, self._group)

    def all_reduce_future(
        self,
        future: Future[Tensor],
        tensor: Tensor,
        op: str,
        scale: float,
        weight: Weight | None,
        errors: list[Exception],
        done: Done | None = None,
    ) -> None:
        """``future`` is completed with ``tensor``; an exception is also added to ``errors``."""
        group = self._group
        total = self._total_of(weight, tensor)
        summed = _staged(tensor, op, scale, in_place=True, weighted=weight is not None)
        how = self._operation(summed, op, total)
        work = dist.all_reduce(summed, how, group=group, async_op=True)

        def finish(ended: Future[list[Tensor]]) -> None:
            try:
                ended.value()
                self._settle(tensor, summed, op, how, total)
                if done is not None and tensor.is_cpu:
                    done(self._world_size if total is None else float(total.value()), None)
            except Exception as error:
                fail(future, error, errors)
            else:
                future.set_result(tensor)

        work.get_future().add_done_callback(finish)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, op: str, async_op: bool, scale: float
    ) -> _Work | None:
        group = self._group
        whole = _staged(input, op, scale, in_place=False)
        summed = (
            output if whole.dtype == output.dtype else torch.empty_like(output, dtype=whole.dtype)
        )
        how = self._operation(summed, op)
        work = _reduce_scatter(summed, whole, how, group=group, async_op=async_op)
        return self._finish(work, lambda: self._settle(output, summed, op, how))

    def reduce_scatter_v(
        self,
        future: Future[Tensor],
        tensor: Tensor,
        shares: Shares,
        rank: int,
        scale: float,
        weight: Weight | None,
        errors: list[Exception],
    ) -> None:
        """``future`` is completed with ``tensor``; an exception is also added to ``errors``."""
        group = self._group
        total = self._total_of(weight, tensor)
        whole = _staged(tensor, "mean", scale, in_place=False, weighted=weight is not None)
        # One by one: gloo's reduce-scatter is an all-reduce, and takes equal parts.
        parts = [shares.taken(whole, p) for p in range(self._world_size)]
        summed = parts[rank]
        how = self._operation(summed, "mean", total)
        works = [
            dist.reduce(part, self._global(p), how, group=group, async_op=True)
            for p, part in enumerate(parts)
            if part.numel()
        ]

        def finish(ended: Future[list[Any]]) -> None:
            try:
                for each in ended.value():
                    each.value()
                self._settle(summed, summed, "mean", how, total)
                shares.put(tensor, rank, summed)
            except Exception as error:
                fail(future, error, errors)
            else:
                future.set_result(tensor)

        futures = [work.get_future() for work in works]
        torch.futures.collect_all(futures).add_done_callback(finish)

    def all_gather_v(
        self, tensor: Tensor, shares: Shares, rank: int, distances: Sequence[int]
    ) -> None:
        ranks = self._world_size
        sources = [(rank - distance) % ranks for distance in distances]
        targets = [(rank + distance) % ranks for distance in distances]
        arrived = {p: tensor.new_empty(shares.size(p)) for p in sources if shares.size(p)}
        own = shares.taken(tensor, rank).view(torch.uint8)
        # Receives come first: see Exchange.
        works = [
            dist.irecv(each.view(torch.uint8), self._global(p), group=self._group)
            for p, each in arrived.items()
        ]
        if own.numel():
            works += [dist.isend(own, self._global(p), group=self._group) for p in targets]
        for work in works:
            if work is not None:
                work.wait()
        for p, values in arrived.items():
            shares.put(tensor, p, values)

    def all_gather(self, output: Tensor, input: Tensor, async_op: bool) -> _Work | None:
        work = _all_gather(output, input, group=self._group, async_op=async_op)
        return self._finish(work, _nothing)

    def broadcast(self, tensor: Tensor, root: int, async_op: bool) -> _Work | None:
        work = dist.broadcast(tensor, self._global(root), group=self._group, async_op=async_op)
        return self._finish(work, _nothing)

    def _global(self, rank: int) -> int:
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def barrier(self, async_op: bool) -> _Work | None:
        work = dist.barrier(group=self._group, async_op=async_op)
        return self._finish(work, _nothing)

    def _finish(self, work: Any, finish: Callable[[], None]) -> _Work | None:
        if work is None:
            finish()
            return None
        return _Work(work, finish)

    def _operation(self, tensor: Tensor, op: str, total: _Total | None = None) -> Any:
        """NCCL averages in the collective; the others give the sum."""
        if (
            total is None
            and op == "mean"
            and tensor.is_cuda
            and tensor.is_floating_point()
            and self._averages
        ):
            return dist.ReduceOp.AVG
        return _OPS[op]

    def _settle(
        self, tensor: Tensor, summed: Tensor, op: str, how: Any, total: _Total | None = None
    ) -> None:
        """``tensor`` becomes what was asked for, out of what the backend gave."""
        with torch.no_grad():
            if how == dist.ReduceOp.AVG:
                pass
            elif total is not None:
                divisor = total.value()
                if divisor.is_cpu and divisor.isnan():
                    raise RuntimeError("some ranks gave a weight, and others did not")
                summed.mul_(torch.where(divisor == 0, divisor, 1 / divisor).to(summed.dtype))
            elif op == "mean" and summed.is_floating_point():
                summed.mul_(1 / self._world_size)
            elif op == "mean":
                summed.div_(self._world_size, rounding_mode="trunc")
            if summed.dtype != tensor.dtype:
                tensor.copy_(summed)
