"""How fast one core of the host encodes and decodes gradients in every wire format.

Beside torch's copy of the same float32 gradient on one thread: a ratio of 1 is as fast as a copy,
and what is narrower than float32 can be faster. "encode" and "decode" handle a gradient alone,
"with feedback" encodes gradient plus residual and writes the new one: three times the bytes of
plain encoding. "reduce" adds up two ranks' messages and encodes the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from benchmarks.case import Case, Setting, Target
from benchmarks.ranks import Rank
from fastreduce import _C, enums
from fastreduce.errors import FORMATS
from fastreduce.timing import Method

COPY, ENCODE, DECODE = "copy", "encode", "decode"
WAYS = (COPY, ENCODE, DECODE, "with feedback", "reduce")
ELEMENTS = 8 << 20
# What encoding and decoding alone should take at most, of a copy.
TARGETS = {"bf16": 1 / 0.5, "fp16": 1 / 0.5, "int8": 1 / 0.5, "int4": 1 / 0.3}


def cases(setting: Setting) -> list[Case]:
    """Wire formats: how fast one core of every rank encodes and decodes, beside a copy."""
    if setting.device == "cuda":
        return []
    formats = ["bf16", "int8"] if setting.quick else FORMATS
    found = []
    for stochastic in (False,) if setting.quick else (False, True):
        for format in formats:
            if stochastic and format in ("fp32", "onebit"):
                continue
            most = None if stochastic else TARGETS.get(format)
            targets = () if most is None else (ENCODE, DECODE)
            found.append(
                Case(
                    "codecs",
                    {"format": f"{format} stochastic" if stochastic else format},
                    base=COPY,
                    methods={
                        way: partial(method, way, format, stochastic, ELEMENTS) for way in WAYS
                    },
                    nbytes=4 * ELEMENTS,
                    targets=tuple(Target(way, COPY, most or 0.0) for way in targets),
                    seconds=0.0,
                )
            )
    return found


def method(way: str, format: str, stochastic: bool, elements: int, rank: Rank) -> Method:
    gradient = torch.randn(elements)
    if way == COPY:
        target = torch.empty_like(gradient)
        return Method(lambda: target.copy_(gradient))
    residuals = [torch.zeros(elements) for _ in range(4)]
    pointers = torch.tensor([each.data_ptr() for each in residuals])
    plan = _C.WirePlan(2, [(0, elements, 0, enums.FORMAT[format], stochastic, 128)])
    sizes = [plan.message_bytes(chunk) for chunk in range(2)]
    messages = [torch.zeros(size, dtype=torch.uint8) for size in (*sizes, sizes[0])]
    addresses = pointers.data_ptr() if way == "with feedback" else 0
    coding = _C.WireCoding(plan, gradient.data_ptr(), 0, 0, 1.0, addresses, 0, 0, 1, 1)
    alive = gradient, residuals, pointers, messages

    def encode() -> None:
        for chunk in range(2):
            coding.encode(chunk, messages[chunk].data_ptr())

    def decode() -> None:
        for chunk in range(2):
            coding.decode(chunk, messages[chunk].data_ptr())

    def reduce() -> None:  # twice: a rank reduces half of the buffer
        for _ in range(2):
            coding.reduce([messages[0].data_ptr()] * 2, messages[2].data_ptr())

    encode()  # what is decoded is a message
    calls: dict[str, Callable[[], None]] = {
        ENCODE: encode,
        "with feedback": encode,
        DECODE: decode,
        "reduce": reduce,
    }
    call = calls[way]

    def run() -> None:
        assert alive  # whose addresses the coding knows
        call()

    return Method(run)
