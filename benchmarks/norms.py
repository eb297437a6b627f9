"""What the norm of a gradient costs where it is counted as the average is stored."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

import fastreduce
from benchmarks.case import Case, Setting, Target
from benchmarks.collectives import DTYPES, MIB
from benchmarks.ranks import Rank
from fastreduce import Norms, terminal
from fastreduce.timing import Method

PARTS = 100
AVERAGE, COUNTED, APART, TORCH = "average", "counted", "by parameter", "torch"


def cases(setting: Setting) -> list[Case]:
    """Norms counted as the average is stored, beside the average alone and torch's norms behind it.

    Counted are L2, largest magnitude and non-finite elements, of all or of 100 parts of the buffer.
    """
    return [
        Case(
            "norms",
            {"dtype": dtype, "size": terminal.size(nbytes)},
            base=AVERAGE,
            methods={
                name: partial(method, call, DTYPES[dtype], nbytes) for name, call in CALLS.items()
            },
            nbytes=nbytes,
            targets=(Target(COUNTED, AVERAGE, 1.03),),
            rounds=40,
            seconds=0.5,
        )
        for dtype in DTYPES
        for nbytes in ([25 * MIB] if setting.quick else [25 * MIB, 100 * MIB])
    ]


def _counted(communicator: fastreduce.Communicator, buffer: Tensor, norms: Norms) -> None:
    norms.clear()
    communicator.all_reduce(buffer, norms=norms)
    communicator.sum_norms(norms)


def _torchs(communicator: fastreduce.Communicator, buffer: Tensor) -> None:
    communicator.all_reduce(buffer)
    torch.linalg.vector_norm(buffer)
    torch.isfinite(buffer).all()


def _counting(communicator: fastreduce.Communicator, buffer: Tensor) -> Callable[[], object]:
    return partial(_counted, communicator, buffer, Norms())


def _counting_apart(communicator: fastreduce.Communicator, buffer: Tensor) -> Callable[[], object]:
    part = buffer.numel() // PARTS
    counts = [part] * (PARTS - 1) + [buffer.numel() - part * (PARTS - 1)]
    return partial(_counted, communicator, buffer, Norms(counts))


# Gives the call that is timed.
CALLS: dict[str, Callable[[fastreduce.Communicator, Tensor], Callable[[], object]]] = {
    AVERAGE: lambda communicator, buffer: lambda: communicator.all_reduce(buffer),
    COUNTED: _counting,
    APART: _counting_apart,
    TORCH: lambda communicator, buffer: partial(_torchs, communicator, buffer),
}


def method(
    call: Callable[[fastreduce.Communicator, Tensor], Callable[[], object]],
    dtype: torch.dtype,
    nbytes: int,
    rank: Rank,
) -> Method:
    count = nbytes // dtype.itemsize
    buffer = rank.communicator.empty(count, dtype=dtype, device=rank.device)
    fresh = torch.randn(count, device=rank.device).to(dtype)
    return Method(call(rank.communicator, buffer), lambda: buffer.copy_(fresh))
