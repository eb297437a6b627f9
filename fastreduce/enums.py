"""The numbers by which the kernels know kinds, dtypes, operations and algorithms: csrc/signal.h."""

from __future__ import annotations

import torch

from fastreduce import _C, errors

KIND = {name: number for number, name in enumerate(errors.KINDS)}
DTYPE: dict[torch.dtype, int] = {
    getattr(torch, name): number for number, name in enumerate(errors.DTYPES)
}
OP = {name: number for number, name in enumerate(errors.OPS)}
FORMAT = {name: number for number, name in enumerate(errors.FORMATS)}
ALGORITHM = {name: number for number, name in enumerate(errors.ALGORITHMS)}


def plan(kind: str, dtype: torch.dtype, op: str, algorithm: str, shape: int) -> int:
    """What stays the same in calls alike, for ``run`` and ``submit``; ``shape`` is a checksum."""
    return _C.plan(KIND[kind], DTYPE[dtype], OP[op], ALGORITHM[algorithm], shape)
