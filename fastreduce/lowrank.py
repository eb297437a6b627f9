"""Low-rank gradients: the mean over the ranks of a matrix, as the product of two factors (PowerSGD,
Vogels et al. 2019, arXiv:1905.13727)."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fastreduce import cuda

if TYPE_CHECKING:
    from fastreduce.communicator import Communicator


def factors(shape: Sequence[int], rank: int) -> tuple[int, int] | None:
    """Elements of the left and the right factor of a parameter; None where it is no matrix, or not
    larger than both."""
    count = math.prod(shape)
    if len(shape) < 2 or not count:
        return None
    left, right = rank * shape[0], rank * (count // shape[0])
    return (left, right) if left + right < count else None


def sent_bytes(left: int, right: int, ranks: int) -> int:
    """What a rank sends of such factors in a step: both are reduced, and one rank sends the left
    one out once more."""
    return 4 * (2 * (left + right) * (ranks - 1) // ranks + left)


def all_reduce(
    communicator: Communicator, gradient: Tensor, rank: int, start: Tensor | None, name: str
) -> tuple[Tensor, Tensor]:
    """One step of power iteration on the mean over the ranks. Does not wait for a GPU.

    Args:
        gradient: this rank's, float32, (n, ...), seen as n rows.
        rank: of the factors.
        start: the right factor of the step before: (columns, rank); None for a random one.
        name: the parameter's, of which the random one depends.

    Returns:
        The approximated mean, with the same bits on all ranks and in the shape of ``gradient``; and
        the start for the next step.
    """
    matrix = gradient.reshape(gradient.shape[0], -1)
    if start is None:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        drawn = torch.randn(matrix.shape[1], rank, generator=generator)
        start = cuda.on_device(drawn, matrix.device)
    left = matrix @ start
    communicator.all_reduce(left, "mean")
    finite = left.isfinite().all()
    # Which bits come out of a decomposition or a product may depend on the processor: one rank
    # decomposes for all, and the last product is written out.
    left = torch.linalg.qr(torch.where(finite, left, 0.0)).Q.contiguous()
    communicator.broadcast(left)
    right = matrix.mT @ left
    communicator.all_reduce(right, "mean")
    mean = left[:, :1] * right[:, 0]
    for r in range(1, left.shape[1]):
        mean = mean + left[:, r : r + 1] * right[:, r]
    finite = finite & right.isfinite().all()
    # No later step could leave a factor of zeros.
    usable = finite & right.norm(dim=0).gt(0).all()
    mean = torch.where(finite, mean, math.nan)
    return mean.view(gradient.shape), torch.where(usable, right, start)
