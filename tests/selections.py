"""Ranks of one process that reduce one buffer of which each sends some elements, over whichever
kernels."""

from __future__ import annotations

import contextlib
import ctypes
import enum
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor
from wires import FAULTS, SEED, Row, RowNumbers, same_bits

from fastreduce import cuda, enums, reference
from fastreduce.wire import Wire


class Selecting(Protocol):
    """One rank's that chooses elements. Messages lie one after the other."""

    @property
    def finite(self) -> Any: ...
    def select(self, random: bool, k: int, threshold: float, message: Tensor) -> None: ...
    def combine(self, k: int, messages: Sequence[Tensor]) -> None: ...


class SelectingWarps:
    """As :class:`Warps`, of cuda.WireCoding itself, for codings that select: to be used within
    :meth:`played`."""

    device = torch.device("cpu")

    def __init__(self, path: Path, *, warps: int = 3, fault: str = "none") -> None:
        library = ctypes.CDLL(str(path))
        address, number, word = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint64
        library.make_plan.restype = address
        library.make_plan.argtypes = [number, address, number]
        library.free_plan.argtypes = [address]
        library.tiles.restype = library.search_bytes.restype = word
        library.tiles.argtypes = [address]
        library.choose.argtypes = [
            *(address, address, number, number, ctypes.c_double, address, address, word),
            *(ctypes.c_uint32, address),
            *(number, number, ctypes.c_bool, word, ctypes.c_float, address, address, address),
            *(number, number),
        ]
        library.choose.restype = None
        self._library = library
        self._last = warps, FAULTS.index(fault)

    @contextlib.contextmanager
    def played(self) -> Iterator[None]:
        """The extension and its streams are those of this class."""
        steps = enum.IntEnum("SelectStep", "count settle tally emit find combine", start=0)
        library, last = self._library, self._last

        class Plan:
            def __init__(self, ranks: int, rows: list[Row]) -> None:
                numbers = (RowNumbers * len(rows))(*rows)
                self.handle = library.make_plan(ranks, numbers, len(rows))

            def image(self) -> bytes:
                return b"tables"

            def place(self, address: int) -> None:
                pass

            def tiles(self) -> int:
                return int(library.tiles(self.handle))

            def __del__(self) -> None:
                library.free_plan(self.handle)

        class Core:
            def __init__(self, plan: Plan, *numbers: Any) -> None:
                gradient, dtype, rank, factor, _, residuals, _, absent, seed, step, finite = numbers
                self._plan = plan
                self._before = gradient, dtype, rank, factor, residuals, absent, seed, step, finite

            def select(self, *arguments: Any) -> None:
                library.choose(self._plan.handle, *self._before, *arguments[:-1], *last)

        module = SimpleNamespace(
            WirePlan=Plan,
            WireCoding=Core,
            SelectStep=steps,
            SEARCH_BYTES=int(library.search_bytes()),
            DIGITS=3,
        )
        stream = SimpleNamespace(cuda_stream=0)
        with (
            mock.patch.object(cuda, "_cuda", module),
            mock.patch.object(cuda, "Flag", bool),
            mock.patch.object(torch.cuda, "current_stream", lambda device: stream),
            mock.patch.object(torch.Tensor, "record_stream", lambda self, stream: None),
        ):
            yield

    def plan(self, ranks: int, rows: list[Row]) -> cuda.WirePlan:
        return cuda.WirePlan(ranks, rows, self.device)

    def coding(self, plan, gradient, rank, factor, residuals, residual_dtype, absent, step):
        at = gradient, rank, factor, residuals, residual_dtype, absent, SEED, step
        return cuda.WireCoding(plan, *at)


SELECTIONS = [
    Wire("topk", k=0.1),
    Wire("topk", k=1),
    Wire("topk", k=10**9),
    Wire("randomk", k=33),
    Wire("threshold", k=0.9, threshold=0.2),
    Wire("threshold", k=5, threshold=0.2),
]


def addresses(old: Tensor, new: Tensor, starts: list[int]) -> Tensor:
    """Of residuals of what was sent, as csrc/wire.h has them."""
    rows = [[old[at:].data_ptr(), new[at:].data_ptr(), 0, 0] for at in starts]
    return torch.tensor(rows)


def compare_selected(
    wire: Wire,
    dtype: torch.dtype,
    target: Any,
    ranks: int = 3,
    counts: Sequence[int] = (1000, 1, 2049, 0, 31),
) -> None:
    """With the reference, several steps with residuals, bit for bit: factors, ties, an absent rank,
    what is not finite. ``target`` has plan() and coding() as a Target, of codings that select."""
    keys, offset = [5 + n for n in range(len(counts))], 2
    starts = [offset + sum(counts[:n]) for n in range(len(counts))]
    rows = [
        (at, count, key, enums.FORMAT["fp32"], False, 128)
        for at, count, key in zip(starts, counts, keys, strict=True)
    ]
    device = target.device
    plan = target.plan(ranks, rows)
    total = sum(counts)
    k = wire.chosen(total)
    threshold = wire.threshold if wire.format == "threshold" else 0.0
    words = None
    sent = [torch.zeros(total) for _ in range(ranks)]
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        gradients = [torch.randn(total, generator=generator).to(dtype) for _ in range(ranks)]
        gradients[0] = gradients[0].round()  # ties
        if step == 3:
            gradients[1][total // 2] = math.inf
        factors = [1.0, 0.5, 0.0, *[0.7] * ranks][:ranks]
        hidden = slice(0, counts[0])  # what rank 1 has not used
        absent = step == 2 and wire.format != "randomk"
        if wire.format == "randomk":
            parts = zip(keys, counts, strict=True)
            words = torch.cat([reference.noise(SEED, key, step, 2**32 - 1, n) for key, n in parts])
        seen, old = [each.clone() for each in gradients], [each.clone() for each in sent]
        if absent:  # zeros, which change no sum
            seen[1][hidden] = old[1][hidden] = 0
        expected, kept = reference.all_reduce_selected(
            seen, k, threshold=threshold, words=words, sent=old, factors=factors
        )
        if absent:
            kept[1][hidden] = sent[1][hidden]
        news = [torch.full((total,), math.nan).to(device) for _ in range(ranks)]
        olds = [each.to(device) for each in sent]
        margin = torch.full((offset,), 77.0, dtype=dtype)
        buffers = [torch.cat([margin, each, margin]).to(device) for each in gradients]
        messages = torch.full((ranks * (8 + 8 * k) + 8,), 99, dtype=torch.uint8).to(device)
        codings: list[Selecting] = []
        for rank, buffer in enumerate(buffers):
            coding = target.coding(
                plan,
                buffer,
                rank,
                factors[rank],
                addresses(olds[rank], news[rank], [at - offset for at in starts]).to(device),
                torch.float32,
                torch.tensor([absent and rank == 1 and n == 0 for n in range(len(counts))])
                .byte()
                .to(device),
                step,
            )
            message = messages[rank * (8 + 8 * k) :][: 8 + 8 * k]
            coding.select(wire.format == "randomk", k, threshold, message)
            count = message[:4].cpu().view(torch.int32).item()
            assert count == k or wire.format == "threshold" or absent
            codings.append(coding)
        assert (messages[-8:] == 99).all(), "more was written than a message has bytes"
        for coding in codings:
            coding.combine(k, messages[:-8].split(8 + 8 * k))
            assert bool(coding.finite) == (step != 3)
        for buffer in buffers:
            assert (buffer[:offset] == 77).all() and (buffer[-offset:] == 77).all()
            assert same_bits(buffer[offset:-offset].cpu(), expected), f"step {step}"
        if step != 3:
            for rank in range(ranks):
                assert same_bits(news[rank].cpu(), kept[rank]), f"step {step}, rank {rank}"
        sent = [each.cpu() for each in news]
