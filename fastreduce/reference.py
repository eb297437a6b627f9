"""What the kernels compute, in plain torch: the same bits, one line per idea, no speed.

Every function takes the tensors of all ranks, in rank order, and returns what each rank gets.
This module imports nothing of fastreduce.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ACCUMULATOR = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int32: torch.int64,
    torch.int64: torch.int64,
    torch.uint8: torch.int32,
}

Combine = Callable[[Tensor, Tensor], Tensor]


def _minimum(a: Tensor, b: Tensor) -> Tensor:
    """A NaN on either side wins; of two equal values (-0.0 and 0.0) the first stays."""
    return torch.where((b < a) | torch.isnan(b), b, a)


def _maximum(a: Tensor, b: Tensor) -> Tensor:
    return torch.where((b > a) | torch.isnan(b), b, a)


COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "mean": torch.add,
    "min": _minimum,
    "max": _maximum,
}


def tree(values: Sequence[Tensor], combine: Combine = torch.add) -> Tensor:
    """Neighbours pairwise, level by level, an odd one out carried up."""
    level = list(values)
    while len(level) > 1:
        pairs = [combine(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


Scales = float | Sequence[float]


def _load(inputs: Sequence[Tensor], scale: Scales) -> list[Tensor]:
    """A factor of 0 drops an input, whatever it holds."""
    scales = [scale] * len(inputs) if isinstance(scale, (int, float)) else scale
    loaded = []
    for tensor, factor in zip(inputs, scales, strict=True):
        accumulator = tensor.to(ACCUMULATOR[tensor.dtype])
        if factor == 0:
            accumulator = torch.zeros_like(accumulator)
        elif tensor.dtype.is_floating_point:
            accumulator = accumulator * torch.tensor(factor, dtype=accumulator.dtype)
        loaded.append(accumulator)
    return loaded


def _store(total: Tensor, op: str, weights: Sequence[float], dtype: torch.dtype) -> Tensor:
    """The mean in the accumulator, then the one rounding."""
    divisor = tree([torch.tensor(float(weight), dtype=torch.float64) for weight in weights])
    if op == "mean" and dtype.is_floating_point:
        total = total * (1 / divisor if divisor != 0 else divisor).to(total.dtype)
    elif op == "mean":
        total = torch.div(total, int(divisor), rounding_mode="trunc")
    return total.to(dtype)


def all_reduce(
    inputs: Sequence[Tensor],
    op: str = "mean",
    scale: Scales = 1.0,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """The result of one_shot and two_shot on every rank.

    Args:
        inputs: one tensor per rank, equal shapes and dtypes.
        op: ``sum``, ``mean``, ``min`` or ``max``.
        scale: factor on every input, or one for each, in the accumulator.
        weights: each rank's part of the divisor of a mean, 1 by default.
    """
    total = tree(_load(inputs, scale), COMBINE[op])
    return _store(total, op, weights or [1.0] * len(inputs), inputs[0].dtype)


def chunk_of(count: int, world_size: int, rank: int, item_bytes: int) -> slice:
    """The elements of a flat buffer that ``rank`` reduces: cut on cache lines of 64 bytes, the
    first chunks the longer ones."""
    grain = 64 // item_bytes
    each, longer = divmod(-(-count // grain), world_size)
    first = rank * each + min(rank, longer)
    last = first + each + (rank < longer)
    return slice(min(first * grain, count), min(last * grain, count))


def ring_all_reduce(
    inputs: Sequence[Tensor],
    op: str = "mean",
    scale: Scales = 1.0,
    weights: Sequence[float] | None = None,
) -> Tensor:
    """The result of ring on every rank: chunk c begins at rank c + 1 and goes round to c."""
    world_size = len(inputs)
    flat = _load([x.reshape(-1) for x in inputs], scale)
    result = torch.empty_like(inputs[0]).reshape(-1)
    for chunk in range(world_size):
        part = chunk_of(result.numel(), world_size, chunk, result.element_size())
        order = [(chunk + 1 + hop) % world_size for hop in range(world_size)]
        total = flat[order[0]][part]
        for rank in order[1:]:
            total = COMBINE[op](total, flat[rank][part])
        result[part] = _store(total, op, weights or [1.0] * world_size, result.dtype)
    return result.reshape(inputs[0].shape)


def reduce_scatter(inputs: Sequence[Tensor], op: str = "mean", scale: Scales = 1.0) -> list[Tensor]:
    """Rank r gets the r-th of ``world_size`` equal parts (along dim 0) of the reduction."""
    return list(all_reduce(inputs, op, scale).chunk(len(inputs)))


def all_gather(inputs: Sequence[Tensor]) -> Tensor:
    """All ranks' tensors, in rank order, along dim 0."""
    return torch.cat(list(inputs))


def convert(tensor: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Cast and scale as pack and unpack do: in float64 if either side is float64, else in
    float32, rounded once (through float32 between float64 and a 16-bit type)."""
    if tensor.dtype == dtype and scale == 1.0:
        return tensor.clone()
    wide = torch.float64 if torch.float64 in (tensor.dtype, dtype) else torch.float32
    scaled = tensor.to(wide) * torch.tensor(scale, dtype=wide)
    return scaled.to(torch.float32).to(dtype) if dtype.itemsize == 2 else scaled.to(dtype)
