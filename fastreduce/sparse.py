"""Means of sparse gradients: the rows that any rank has, summed like dense ones."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from fastreduce.communicator import Communicator


def union(tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The rows that any of some sparse tensors has, and every tensor's values there.

    Args:
        tensors: COO tensors of one shape and ``sparse_dim()``.

    Returns:
        The rows' numbers in row-major order (shape ``(rows,)``, ascending), and for each tensor
        its values, shape ``(rows, ...)``, 0 where it has none.
    """
    coalesced = [tensor.coalesce() for tensor in tensors]
    numbers = [_numbers(tensor) for tensor in coalesced]
    rows = torch.unique(torch.cat(numbers))
    return rows, [
        _spread(tensor, own, rows) for tensor, own in zip(coalesced, numbers, strict=True)
    ]


def assemble(rows: Tensor, values: Tensor, like: Tensor) -> Tensor:
    """The coalesced sparse tensor with these rows, as :func:`union` numbers them."""
    sizes = like.shape[: like.sparse_dim()]
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    indices = torch.stack(
        [rows // stride % size for stride, size in zip(strides, sizes, strict=True)]
    )
    return torch.sparse_coo_tensor(
        indices, values, like.shape, is_coalesced=True, check_invariants=False
    )


def all_reduce(
    communicator: Communicator, tensor: Tensor, reduce: Callable[[Tensor], None]
) -> Tensor:
    """The reduction of the ranks' sparse tensors, coalesced. Collective; blocks.

    The ranks exchange the numbers of their rows; then every rank's rows of the union are reduced as
    a dense tensor, in the same order as anything dense. Moves ``rows x row`` elements, however
    large the tensor is.

    Args:
        tensor: COO, of one shape, dtype and ``sparse_dim()`` on all ranks.
        reduce: all-reduces a dense tensor in place.
    """
    own = tensor.coalesce()
    numbers = _numbers(own)
    counts = torch.zeros(communicator.world_size, dtype=torch.int64, device=tensor.device)
    mine = torch.tensor([len(numbers)], dtype=torch.int64, device=tensor.device)
    communicator.all_gather(counts, mine)
    longest = int(counts.max())
    padded = torch.full((max(longest, 1),), -1, dtype=torch.int64, device=tensor.device)
    padded[: len(numbers)] = numbers
    everyone = torch.empty(communicator.world_size * len(padded), dtype=torch.int64)
    everyone = everyone.to(tensor.device)
    communicator.all_gather(everyone, padded)
    rows = torch.unique(everyone[everyone >= 0])
    values = _spread(own, numbers, rows)
    reduce(values)
    return assemble(rows, values, own)


def _numbers(coalesced: Tensor) -> Tensor:
    """Every row's number in row-major order."""
    indices = coalesced.indices()
    numbers = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    for size, index in zip(coalesced.shape, indices, strict=False):
        numbers = numbers * size + index
    return numbers


def _spread(coalesced: Tensor, numbers: Tensor, rows: Tensor) -> Tensor:
    values = coalesced.values()
    spread = values.new_zeros((len(rows), *values.shape[1:]))
    spread[torch.searchsorted(rows, numbers)] = values
    return spread
