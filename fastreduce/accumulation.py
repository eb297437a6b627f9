"""Gradient accumulation in one fixed order, however the logical shards are dealt to the ranks.

Sums over ranks run over a binary tree. So do those over a rank's own micro-batches here: a binary
counter holds a sum for every power of two, like the one that adds ranks in the kernels. A rank's
part of the tree is a whole branch of it, so 1, 2, 4 or 8 ranks build the same tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastreduce import sparse
from fastreduce.communicator import Communicator
from fastreduce.weights import NO_WEIGHT

NARROW = (torch.float16, torch.bfloat16)


def elements_of(parameter: nn.Parameter) -> int:
    """In a bucket, where complex ones are pairs."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def parts_of(buffer: Tensor, parameters: list[nn.Parameter]) -> Iterator[Tensor]:
    """Every parameter's part of a flat buffer."""
    return iter(buffer.split([elements_of(parameter) for parameter in parameters]))


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements lie in memory without gaps, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def shape_of(parameter: Tensor) -> tuple[int, ...]:
    """In which its residual is saved: complex ones have a last dimension of 2."""
    return (*parameter.shape, 2) if parameter.is_complex() else tuple(parameter.shape)


def shaped(flat: Tensor, parameter: Tensor) -> Tensor:
    """A view of what lies in the order of the parameter's memory."""
    if not is_dense(parameter):
        return flat.view(shape_of(parameter))
    if parameter.is_complex():
        strides = (*(2 * stride for stride in parameter.stride()), 1)
        return flat.as_strided(shape_of(parameter), strides)
    return flat.as_strided(parameter.shape, parameter.stride())


class TreeAccumulator:
    """Sums the gradients of one rank's shards of one step, in the order of the tree.

    Between backward passes a parameter's sum of two shards is made by autograd itself, in place in
    ``.grad``. 16-bit gradients are summed in float32, as the kernels do.

    Memory: beside ``.grad``, one copy of the gradients for every power of two from 2 up to half the
    number of shards; of 16-bit ones in float32, for every power of two from 1 on, and one for the
    sum. It is kept in ``spares`` for the next step: fresh memory costs as much time as the sums.

    Args:
        parameters: whose ``.grad`` is meant; they hold none.
        shards: of this rank, a power of two.
        spares: memory for sums, by parameter, from the step before.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        shards: int,
        spares: dict[nn.Parameter, list[Tensor]] | None = None,
    ) -> None:
        self._parameters = parameters
        self._shards = shards
        self._spares = {} if spares is None else spares
        self._levels: list[dict[nn.Parameter, Tensor]] = [{} for _ in range(shards.bit_length())]
        self._shard = 0
        # Whose gradients came in this shard, and in the one before.
        self._fired: set[nn.Parameter] = set()
        self._fired_before: set[nn.Parameter] = set()
        self._used: dict[nn.Parameter, int] = {}  # in any shard; sparse dimensions of its gradient
        self._kept: list[nn.Parameter] = []  # in this shard
        self._halves: dict[nn.Parameter, Tensor] = {}  # to which autograd adds this shard's
        self._factor: float | None = None
        # Complete sums that are not in ``.grad``.
        self._sums: dict[nn.Parameter, Tensor | None] = {}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._accumulated)
            for parameter in parameters
        ]

    def close(self) -> None:
        """Takes its hooks off the parameters and frees its sums."""
        for handle in self._handles:
            handle.remove()
        for parameter, total in self._sums.items():
            if total is not None and not total.is_sparse:
                self._spare(parameter, total)
        self._levels = []
        self._sums = {}

    def shards(self) -> Iterator[int]:
        """0 to ``shards - 1``: the caller computes that shard's gradients before the next comes.
        After the last, :meth:`finish` has to be called for every parameter."""
        for shard in range(self._shards):
            self._shard = shard
            self._fired_before, self._fired = self._fired, set()
            if self._is_last:
                for parameter in self._parameters:
                    self._define(parameter)
            yield shard
            if not self._is_last:
                for parameter in self._parameters:
                    if parameter not in self._fired:
                        self._keep(parameter, None)
                # Not before: DDP takes a parameter without .grad for one that was not used.
                for parameter in self._kept:
                    parameter.grad = None
                self._kept.clear()

    def weigh(self, factor: float) -> None:
        """The current shard's gradients are multiplied by ``factor``; 0 drops them. Called before
        its backward pass, for all shards of a step or for none."""
        self._factor = factor

    def finish(self, parameter: nn.Parameter) -> tuple[Tensor | None, bool]:
        """In the last shard, when no gradient of the parameter comes any more: its complete sum
        (None for zero; in float32 for 16 bits), and whether that was in ``.grad`` as soon as its
        gradient had come."""
        if parameter not in self._fired:
            return self._merged(parameter, None, self._adds_in_place(parameter))[0], False
        if parameter in self._sums:
            return self._sums[parameter], False
        return parameter.grad, True

    @property
    def _is_last(self) -> bool:
        return self._shard == self._shards - 1

    def _define(self, parameter: nn.Parameter) -> None:
        """DDP wants a gradient also of what is used in earlier shards only. -0.0 plus anything is
        that."""
        if parameter.grad is not None or parameter not in self._used:
            return
        dims = self._used[parameter]
        if dims == 0:
            value = complex(-0.0, -0.0) if parameter.is_complex() else -0.0
            parameter.grad = torch.full_like(parameter, value)
        else:
            parameter.grad = torch.sparse_coo_tensor(
                torch.empty((dims, 0), dtype=torch.int64, device=parameter.device),
                parameter.new_empty((0, *parameter.shape[dims:])),
                parameter.shape,
                check_invariants=False,
            )

    def _accumulated(self, parameter: nn.Parameter) -> None:
        grad = parameter.grad
        assert grad is not None
        if parameter in self._fired:
            raise RuntimeError(
                "two gradients of one parameter in one shard: expected one backward pass for each "
                "shard (and no reentrant checkpoints that share parameters)"
            )
        self._fired.add(parameter)
        self._used[parameter] = grad.sparse_dim() if grad.is_sparse else 0
        self._keep(parameter, grad)

    def _keep(self, parameter: nn.Parameter, arrived: Tensor | None) -> None:
        """One more leaf: what ``.grad`` holds after backward, or None for a zero."""
        by_autograd = self._adds_in_place(parameter)
        if by_autograd and not self._shard & 1 and not self._is_last:
            # The next shard is added to it. Autograd has made new memory for this one: it goes
            # back at once, where the next gradient finds it in the cache.
            if arrived is not None:
                with torch.no_grad():
                    parameter.grad = self._halves[parameter] = self._moved(parameter, arrived)
            return
        total, level = self._merged(parameter, arrived, by_autograd)
        if not self._is_last:
            self._kept.append(parameter)
            if total is not None:
                self._levels[level][parameter] = total
        elif total is not parameter.grad:
            self._sums[parameter] = total

    def _merged(
        self, parameter: nn.Parameter, arrived: Tensor | None, by_autograd: bool
    ) -> tuple[Tensor | None, int]:
        """The sum of all branches that a leaf completes, and its level."""
        level = 0
        if not by_autograd:
            total = self._leaf(parameter, arrived)
        elif not self._shard & 1:
            total = arrived
        else:
            total, level = parameter.grad, 1
            half = self._halves.pop(parameter, total)
            if arrived is not None and half is not total:
                raise RuntimeError(
                    "a gradient was replaced between two shards: zero_grad() belongs before the "
                    "loop (and create_graph=True does not go with it)"
                )
            # One of the two was a zero: -0.0 + 0.0 is 0.0.
            if total is not None and (arrived is None or parameter not in self._fired_before):
                _add_zero(total)
        while self._shard >> level & 1:
            left = self._levels[level].pop(parameter, None)
            total, spare = _joined(left, total)
            if spare is not None:
                self._spare(parameter, spare)
            level += 1
        return total, level

    def _adds_in_place(self, parameter: nn.Parameter) -> bool:
        """Whether autograd may add this gradient to that of the shard before."""
        grad = parameter.grad
        return (
            self._factor is None
            and parameter.dtype not in NARROW
            and (grad is None or not grad.is_sparse)
            and parameter not in self._levels[0]
        )

    def _leaf(self, parameter: nn.Parameter, arrived: Tensor | None) -> Tensor | None:
        if arrived is None or self._factor == 0:
            return None
        with torch.no_grad():
            leaf = arrived
            if not arrived.is_sparse:
                leaf = self._moved(parameter, arrived)
            if leaf.dtype in NARROW:
                leaf = leaf.float()
            return leaf if self._factor in (None, 1) else leaf.mul_(self._factor)

    def _moved(self, parameter: nn.Parameter, arrived: Tensor) -> Tensor:
        """The gradient, in memory left from another one if there is some."""
        spares = self._spares.get(parameter)
        return spares.pop().copy_(arrived) if spares else arrived

    def _spare(self, parameter: nn.Parameter, memory: Tensor) -> None:
        spares = self._spares.setdefault(parameter, [])
        if len(spares) < len(self._levels):
            spares.append(memory)


def shards_of(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first of a rank's logical shards of a step, and how many it has."""
    if count < 1 or count & (count - 1) or count % ranks:
        raise ValueError(
            f"count: expected a power of two that the number of ranks, {ranks}, divides (so it "
            f"has to be one, too), got {count}"
        )
    return rank * (count // ranks), count // ranks


def _add_zero(total: Tensor) -> None:
    with torch.no_grad():
        (total._values() if total.is_sparse else total).add_(0.0)


def _joined(left: Tensor | None, right: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Their sum, and memory of theirs that is left over. None stands for zeros."""
    if left is None or right is None:
        some = right if left is None else left
        if some is not None:
            _add_zero(some)
        return some, None
    with torch.no_grad():
        if right.is_sparse:
            rows, (a, b) = sparse.union([left, right])
            return sparse.assemble(rows, a + b, right), None
        return right.add_(left), left


class Shards:
    """A rank's shards of one step, and their weights."""

    def __init__(self, accumulator: TreeAccumulator, communicator: Communicator) -> None:
        self.accumulator = accumulator
        self._communicator = communicator
        self._weights: list[float] = []
        self._given: float | None = None

    def weigh(self, n: float, reduction: str) -> None:
        """Of the current shard."""
        self._given = n
        self.accumulator.weigh(n if reduction == "mean" else float(n > 0))

    def end(self, weighted: bool) -> None:
        """The current shard's gradients are there."""
        self._weights.append(self._own(weighted))
        self._given = None

    def _own(self, weighted: bool) -> float:
        if not weighted:
            return 1.0
        if self._given is None:
            raise ValueError(NO_WEIGHT)
        return self._given

    def total(self, weighted: bool) -> float:
        """Of all shards, in the last one."""
        level = [*self._weights, self._own(weighted)]
        while len(level) > 1:
            level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
        return level[0]

    def finish(self, bucket: dist.GradBucket) -> Tensor:  # type: ignore[name-defined]
        """The bucket's complete sums: in its buffer, or, of 16-bit types, in float32."""
        buffer: Tensor = bucket.buffer()
        parameters = bucket.parameters()
        if buffer.is_sparse:
            total, _ = self.accumulator.finish(parameters[0])
            return torch.zeros_like(buffer) if total is None else total
        sums = buffer
        if buffer.dtype in NARROW:
            # A GPU's would be collective to make, and is staged in any case.
            make = torch.empty if buffer.is_cuda else self._communicator.empty
            device = buffer.device if buffer.is_cuda else None
            sums = make(buffer.numel(), dtype=torch.float32, device=device)
        for parameter, part in zip(parameters, parts_of(sums, parameters), strict=True):
            total, in_place = self.accumulator.finish(parameter)
            if in_place:
                continue
            if total is None:
                part.zero_()
                continue
            view = torch.view_as_complex(part.view(-1, 2)) if parameter.is_complex() else part
            # As DDP lays them out.
            dense = is_dense(parameter)
            view = view.as_strided(parameter.shape, parameter.stride()) if dense else view
            view.view_as(parameter).copy_(total)
        return sums
