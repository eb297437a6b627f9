"""Packing 160 tensors into a flat buffer and back, with cast and factor on the way, beside a plain
copy of the same bytes and beside what torch does for it (cat, to, mul_, split, copy_)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

import fastreduce
from benchmarks.case import Case, Setting
from benchmarks.collectives import KIB, MIB
from benchmarks.ranks import Rank
from fastreduce import bench, terminal
from fastreduce.timing import Method

TENSORS = 160
COPY = "copy"
WIDE, NARROW = torch.float32, torch.bfloat16
# Of the tensors, of the flat buffer, and the factor.
KINDS = ((WIDE, WIDE, 1.0), (WIDE, WIDE, 0.5), (WIDE, NARROW, 1.0), (NARROW, NARROW, 0.5))


def cases(setting: Setting) -> list[Case]:
    """Packing 160 tensors into a flat buffer and back, with cast and factor on the way."""
    sizes = [25 * MIB] if setting.quick else [256 * KIB, 25 * MIB, 100 * MIB]
    found = []
    for nbytes in sizes:
        for tensors, flat, scale in KINDS[:1] if setting.quick else KINDS:
            names = [str(dtype).removeprefix("torch.") for dtype in (tensors, flat)]
            found.append(
                Case(
                    "buckets",
                    {
                        "dtypes": " to ".join(names),
                        "scale": str(scale),
                        "size": terminal.size(nbytes),
                    },
                    base=COPY,
                    methods={
                        way: partial(method, way, TENSORS, nbytes, tensors, flat, scale)
                        for way in (COPY, "pack", "unpack", "torch pack", "torch unpack")
                    },
                    nbytes=nbytes,
                    seconds=0.3,
                )
            )
    return found


def _tensors(number: int, nbytes: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Tensors of about ``nbytes`` together, of sizes as different as a model's."""
    count = nbytes // dtype.itemsize
    weights = [1 + (i * 37) % 101 for i in range(number)]
    sizes = [max(8, count * w // sum(weights) // 8 * 8) for w in weights]
    return [torch.randn(n, device=device).to(dtype) for n in sizes]


def method(
    way: str,
    tensors: int,
    nbytes: int,
    dtype: torch.dtype,
    flat_dtype: torch.dtype,
    scale: float,
    rank: Rank,
) -> Method:
    """On a GPU on several copies in turn, so that no cache holds what is read."""
    on_gpu = rank.device.type == "cuda"
    copies = max(2, -(-bench.COLD_BYTES // nbytes)) if on_gpu else 1
    lists = [_tensors(tensors, nbytes, dtype, rank.device) for _ in range(copies)]
    plan = fastreduce.BucketPlan(lists[0])
    flats = [torch.zeros(plan.numel, dtype=flat_dtype, device=rank.device) for _ in range(copies)]
    # A copy reads and writes as much as packing does.
    half = plan.numel * (dtype.itemsize + flat_dtype.itemsize) // 2
    bytes_of = [torch.empty(half, dtype=torch.uint8, device=rank.device) for _ in range(2)]

    def torch_pack(tensors: list[Tensor], flat: Tensor) -> None:
        joined = _flatten_dense_tensors(tensors)
        flat.copy_(joined.mul_(scale) if scale != 1.0 else joined)

    def torch_unpack(tensors: list[Tensor], flat: Tensor) -> None:
        wide = flat.to(dtype)
        wide = wide.mul_(scale) if scale != 1.0 and wide is not flat else wide
        torch._foreach_copy_(tensors, list(_unflatten_dense_tensors(wide, tensors)))

    calls = {
        COPY: lambda tensors, flat: bytes_of[0].copy_(bytes_of[1]),
        "pack": lambda tensors, flat: plan.pack(tensors, flat, scale),
        "unpack": lambda tensors, flat: plan.unpack(flat, tensors, scale),
        "torch pack": torch_pack,
        "torch unpack": torch_unpack,
    }
    call = calls[way]

    def run() -> None:
        for each, flat in zip(lists, flats, strict=True):
            call(each, flat)

    return Method(run, calls=copies)
