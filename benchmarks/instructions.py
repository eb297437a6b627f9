"""Instructions of short calls: the same on a busy machine, so that a test can compare them.

They hold for one compiler, one Python and one instruction set; and tell nothing of memory.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks import buckets, codecs, collectives, norms
from benchmarks.case import Case, Maker, Setting
from benchmarks.collectives import DTYPES, OURS, STAGED
from fastreduce import terminal

ELEMENTS = 1024
SIZE = 4 * ELEMENTS
TENSORS = 2


def cases(setting: Setting) -> list[Case]:
    """Instructions of short calls, which are the same on a busy machine; on the CPU."""
    if setting.device == "cuda":
        return []
    groups: dict[str, dict[str, Maker]] = {
        f"all_reduce {dtype}": {
            OURS: partial(collectives.named, OURS, SIZE, kind, "sum"),
            "one_shot": partial(collectives.named, "one_shot", SIZE, kind, "sum"),
            "ring": partial(collectives.named, "ring", SIZE, kind, "sum"),
            STAGED: partial(collectives.staged, SIZE, kind, "sum"),
        }
        for dtype, kind in DTYPES.items()
    }
    groups["norms"] = {
        name: partial(norms.method, norms.CALLS[name], torch.float32, SIZE)
        for name in (norms.AVERAGE, norms.COUNTED)
    }
    groups["buckets"] = {
        way: partial(buckets.method, way, TENSORS, SIZE, torch.float32, torch.bfloat16, 0.5)
        for way in ("pack", "unpack")
    }
    for format in ["int8"] if setting.quick else ["bf16", "fp8_e4m3", "int8", "int4", "onebit"]:
        groups[f"codecs {format}"] = {
            way: partial(codecs.method, way, format, False, ELEMENTS)
            for way in codecs.WAYS
            if way != codecs.COPY
        }
    return [
        Case(
            "instructions",
            {"of": name, "size": terminal.size(SIZE)},
            base=next(iter(makers)),
            methods=makers,
            nbytes=SIZE,
            counted=True,
            rounds=3,
        )
        for name, makers in groups.items()
    ]
