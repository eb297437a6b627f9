"""Ranks of one process that reduce one buffer in a wire format, message by message, over whichever
kernels: the host's, the GPU's on threads of this machine, or a GPU's own."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fastreduce import _C, enums, reference
from fastreduce.errors import FORMATS

SEED = 1234567890123
TINY = 2.0**-149
HUGE = torch.finfo(torch.float32).max
# Offset, count, key, format, stochastic, run.
Row = tuple[int, int, int, int, bool, int]


class Plan(Protocol):
    def message_bytes(self, chunk: int, /) -> int: ...


class Coding(Protocol):
    """One rank's. Messages lie one after the other, results in equal parts."""

    finite: bool

    def encode(self, sent: Tensor) -> None: ...
    def reduce(self, arrived: Tensor, result: Tensor) -> None: ...
    def decode(self, results: Tensor) -> None: ...


class Target(Protocol):
    """Whose kernels they are."""

    device: torch.device

    def plan(self, ranks: int, rows: list[Row]) -> Plan: ...
    def coding(
        self,
        plan: Any,
        gradient: Tensor,
        rank: int,
        factor: float,
        residuals: Tensor,
        residual_dtype: torch.dtype,
        absent: Tensor | None,
        step: int,
    ) -> Coding: ...


class HostCoding:
    def __init__(self, plan: _C.WirePlan, ranks: int, *arguments: Any) -> None:
        self._core = _C.WireCoding(plan, *arguments)
        self._sizes = [plan.message_bytes(chunk) for chunk in range(ranks)]

    @property
    def finite(self) -> bool:
        return self._core.finite

    def encode(self, sent: Tensor) -> None:
        at = sent.data_ptr()
        for chunk, size in enumerate(self._sizes):
            self._core.encode(chunk, at)
            at += size

    def reduce(self, arrived: Tensor, result: Tensor) -> None:
        parts = arrived.view(len(self._sizes), -1)
        self._core.reduce([each.data_ptr() for each in parts], result.data_ptr())

    def decode(self, results: Tensor) -> None:
        for chunk, each in enumerate(results.view(len(self._sizes), -1)):
            self._core.decode(chunk, each.data_ptr())

    def select(self, random: bool, k: int, threshold: float, message: Tensor) -> None:
        # A wrong guess costs time only.
        self._core.select(random, k, threshold, 1 << 30, message.data_ptr())

    def combine(self, k: int, messages: Sequence[Tensor]) -> None:
        self._core.combine(k, [each.data_ptr() for each in messages])


class Host:
    device = torch.device("cpu")

    def plan(self, ranks: int, rows: list[Row]) -> _C.WirePlan:
        self._ranks = ranks
        return _C.WirePlan(ranks, rows)

    def coding(self, plan, gradient, rank, factor, residuals, residual_dtype, absent, step):
        return HostCoding(
            plan,
            self._ranks,
            gradient.data_ptr(),
            enums.DTYPE[gradient.dtype],
            rank,
            factor,
            residuals.data_ptr(),
            enums.DTYPE[residual_dtype],
            0 if absent is None else absent.data_ptr(),
            SEED,
            step,
        )


class RowNumbers(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("offset", "count", "key", "format", "stochastic", "run")
    ]


FAULTS = ("none", "no_sync", "other_order")


class _WarpPlan:
    def __init__(self, library: Any, ranks: int, rows: list[Row]) -> None:
        self._library = library
        numbers = (RowNumbers * len(rows))(*rows)
        self.handle = library.make_plan(ranks, numbers, len(rows))

    def message_bytes(self, chunk: int) -> int:
        return int(self._library.message_bytes(self.handle, chunk))

    def __del__(self) -> None:
        self._library.free_plan(self.handle)


class _WarpCoding:
    def __init__(self, launch: Callable[..., None], rank: int, ranks: int, tensors: Any) -> None:
        self._launch = launch
        self._ranks = ranks
        self._flag = torch.ones(1, dtype=torch.int32)
        self._tensors = tensors  # whose addresses the launch knows

    @property
    def finite(self) -> bool:
        return bool(self._flag)

    def encode(self, sent: Tensor) -> None:
        self._launch(self._flag.data_ptr(), 0, 0, 0, sent.data_ptr())

    def reduce(self, arrived: Tensor, result: Tensor) -> None:
        stride = arrived.numel() // self._ranks
        self._launch(self._flag.data_ptr(), 1, arrived.data_ptr(), stride, result.data_ptr())

    def decode(self, results: Tensor) -> None:
        stride = results.numel() // self._ranks
        self._launch(self._flag.data_ptr(), 2, results.data_ptr(), stride, 0)


class Warps:
    """The GPU's kernels, as tests/cpp/warps.cpp runs them.

    Args:
        path: the compiled library.
        warps: that share the runs.
        few: whether the kernel for few ranks reduces, where there are few.
        fault: what is broken.
        factor_at: whether factors are in memory, as they are where the ranks' weights make them.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        path: Path,
        *,
        warps: int = 3,
        few: bool = True,
        fault: str = "none",
        factor_at: bool = False,
    ) -> None:
        library = ctypes.CDLL(str(path))
        address, number = ctypes.c_void_p, ctypes.c_int
        library.make_plan.restype = address
        library.make_plan.argtypes = [number, address, number]
        library.free_plan.argtypes = [address]
        library.message_bytes.restype = ctypes.c_uint64
        library.message_bytes.argtypes = [address, number]
        library.launch.argtypes = [
            *(address, address, number, number, ctypes.c_double, address, address, number, address),
            *(ctypes.c_uint64, ctypes.c_uint32),
            *(address, number, address, ctypes.c_uint64, address),
            *(number, ctypes.c_bool, number),
        ]
        library.launch.restype = None
        self._library = library
        self._warps, self._few, self._fault = warps, few, FAULTS.index(fault)
        self._factor_at = factor_at

    def plan(self, ranks: int, rows: list[Row]) -> _WarpPlan:
        self._ranks = ranks
        return _WarpPlan(self._library, ranks, rows)

    def coding(self, plan, gradient, rank, factor, residuals, residual_dtype, absent, step):
        factor_at = torch.tensor(factor, dtype=torch.float32)

        def launch(finite, what, source, stride, to):
            self._library.launch(
                plan.handle,
                gradient.data_ptr(),
                enums.DTYPE[gradient.dtype],
                rank,
                math.nan if self._factor_at else factor,
                factor_at.data_ptr() if self._factor_at else 0,
                residuals.data_ptr(),
                enums.DTYPE[residual_dtype],
                0 if absent is None else absent.data_ptr(),
                SEED,
                step,
                finite,
                what,
                source,
                stride,
                to,
                self._warps,
                self._few and self._ranks <= 8,
                self._fault,
            )

        return _WarpCoding(launch, rank, self._ranks, (gradient, residuals, absent))


class Group:
    """Ranks that reduce one buffer of several parameters."""

    def __init__(
        self,
        format: str,
        counts: list[int],
        ranks: int,
        *,
        run: int = 128,
        stochastic: bool = False,
        keys: list[int] | None = None,
        misaligned: int = 0,
        gap: int = 0,
        target: Target | None = None,
    ) -> None:
        self.format, self.counts, self.ranks, self.run = format, counts, ranks, run
        self.stochastic, self.misaligned, self.gap = stochastic, misaligned, gap
        self.keys = keys or [7 * n + 3 for n in range(len(counts))]
        self.offsets = [sum(counts[:n]) + gap * n for n in range(len(counts))]
        self.target: Target = target or Host()
        self.plan = self.target.plan(
            ranks,
            [
                (offset, count, key, enums.FORMAT[format], stochastic, run)
                for offset, count, key in zip(self.offsets, counts, self.keys, strict=True)
            ],
        )

    def reduce(
        self,
        parameters: list[list[Tensor]],
        sent: list[list[Tensor]] | None = None,
        reduced: list[list[Tensor]] | None = None,
        *,
        factors: list[float] | None = None,
        absent: list[list[bool]] | None = None,
        step: int = 5,
    ) -> tuple[list[list[Tensor]], bool]:
        """Of parameters[rank][n], on the CPU; the gradients of every rank, and whether all are
        finite. With residuals, float32 or bfloat16, their new values replace the old ones."""
        device = self.target.device
        buffers, codings, kept = [], [], []
        for rank, gradients in enumerate(parameters):
            size = self.misaligned + sum(self.counts) + self.gap * len(self.counts)
            whole = torch.full((size,), 77.0, dtype=gradients[0].dtype, device=device)
            buffer = whole[self.misaligned :]
            for offset, count, gradient in zip(self.offsets, self.counts, gradients, strict=True):
                buffer[offset : offset + count] = gradient
            pointers = torch.zeros(len(self.counts), 4, dtype=torch.int64)
            residual_dtype = torch.float32
            if sent is not None and reduced is not None:
                olds = [[each.to(device) for each in own[rank]] for own in (sent, reduced)]
                news = [[torch.full_like(each, math.nan) for each in own] for own in olds]
                rows = zip(olds[0], news[0], olds[1], news[1], strict=True)
                pointers = torch.tensor([[each.data_ptr() for each in row] for row in rows])
                kept.append((olds, news))
                residual_dtype = olds[0][0].dtype
            flags = torch.tensor(absent[rank], dtype=torch.uint8).to(device) if absent else None
            codings.append(
                self.target.coding(
                    self.plan,
                    buffer,
                    rank,
                    factors[rank] if factors else 1.0,
                    pointers.to(device),
                    residual_dtype,
                    flags,
                    step,
                )
            )
            buffers.append(buffer)
        self._exchange(codings)
        if sent is not None and reduced is not None:
            for rank, (_, news) in enumerate(kept):
                sent[rank], reduced[rank] = ([each.cpu() for each in own] for own in news)
        outputs = []
        for buffer in (each.cpu() for each in buffers):
            spans = zip(self.offsets, self.counts, strict=True)
            outputs.append([buffer[offset : offset + count] for offset, count in spans])
            for offset, count in zip(self.offsets, self.counts, strict=True):
                assert (buffer[offset + count :][: self.gap] == 77).all(), "a gap was written to"
        assert len({coding.finite for coding in codings}) == 1
        return outputs, codings[0].finite

    def _exchange(self, codings: Sequence[Coding]) -> None:
        def room(nbytes: int) -> Tensor:
            """So many bytes, and what must not be written to."""
            return torch.full((nbytes + 8,), 99, dtype=torch.uint8, device=self.target.device)

        sizes = [self.plan.message_bytes(chunk) for chunk in range(self.ranks)]
        longest = max(sizes)
        messages = [room(sum(sizes)) for _ in codings]
        results = [room(size) for size in sizes]
        for coding, own in zip(codings, messages, strict=True):
            coding.encode(own[:-8])
        for rank, coding in enumerate(codings):
            parts = [own[:-8].split(sizes)[rank] for own in messages]
            coding.reduce(torch.cat(parts), results[rank][:-8])
        for each in [*results, *messages]:
            assert (each[-8:] == 99).all(), "more was written than a message has bytes"
        pad = torch.nn.functional.pad
        equal = torch.cat([pad(each[:-8], (0, longest + 8 - len(each))) for each in results])
        for coding in codings:
            coding.decode(equal)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of which NaN comes out, nothing is promised."""
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    a, b = (torch.where(each.isnan(), math.nan, each) for each in (a, b))
    return a.dtype == b.dtype and torch.equal(a.view(whole), b.view(whole))


def reduced_of(group: Group, reduced: list[list[Tensor]], n: int) -> Tensor:
    """Of one parameter, out of what the ranks that reduce its runs hold."""
    owners = reference._owners(-(-group.counts[n] // group.run), group.ranks, group.keys[n])
    parts = [
        reduced[owner][n][run * group.run : (run + 1) * group.run]
        for run, owner in enumerate(owners)
    ]
    return torch.cat(parts)


def special(count: int, generator: torch.Generator) -> torch.Tensor:
    """Zeros of both signs, subnormals, values that are rounded half way, huge ones."""
    small = [0.0, -0.0, TINY, -3 * TINY, 1e-40, -1e-40, 2.0**-126, 2.0**-24, 2.0**-17]
    halfway = [0.5, 1.5, -2.5, 1 + 2.0**-11, 1 + 3 * 2.0**-9]
    large = [448.0, 57344.0, 65504.0, -65519.0, 1e30, -HUGE / 8]
    pool = torch.tensor([*small, *halfway, *large])
    return pool[torch.randint(len(pool), (count,), generator=generator)]


# Ranks, elements of a run, and of the parameters: tails, more ranks than runs, several lengths.
CASES = [
    (1, 128, [300]),
    (2, 128, [1, 7, 128, 129, 1000]),
    (3, 32, [33, 64, 5]),
    (5, 1024, [1023, 1025, 3000]),
    (8, 128, [640, 17]),
]


def compare(
    format: str,
    dtype: torch.dtype,
    stochastic: bool,
    target: Target,
    cases: Sequence[tuple[int, int, list[int]]] = CASES,
    make: type[Group] = Group,
) -> None:
    """With the reference, several steps with residuals, bit for bit: factors, absent ranks,
    misaligned buffers, special values."""
    generator = torch.Generator().manual_seed(FORMATS.index(format) + 10 * stochastic)
    for ranks, run, counts in cases:
        group = make(
            format,
            counts,
            ranks,
            run=run,
            stochastic=stochastic,
            misaligned=ranks % 3,
            gap=3,
            target=target,
        )
        zeros = [[torch.zeros(n) for n in counts] for _ in range(ranks)]
        sent, reduced = zeros, [[torch.zeros(n) for n in counts] for _ in range(ranks)]
        factors = [1.0] * ranks
        for step in range(3):
            values = special if step == 2 else lambda n, g: torch.randn(n, generator=g) * 1e-2
            gradients = [[values(n, generator).to(dtype) for n in counts] for _ in range(ranks)]
            if step == 1 and ranks > 1:
                factors = [0.0, *(0.3 + rank for rank in range(1, ranks))]
                gradients[0] = [torch.full_like(each, math.nan) for each in gradients[0]]
            absent = [
                [step == 1 and (n == 0 or (rank + n) % 3 == 0) for n in range(len(counts))]
                for rank in range(ranks)
            ]
            expected = [
                reference.all_reduce_encoded(
                    [own[n] for own in gradients],
                    format,
                    run=run,
                    sent=[own[n] for own in sent],
                    reduced=reduced_of(group, reduced, n),
                    factors=factors,
                    absent=[own[n] for own in absent],
                    seed=1234567890123 if stochastic else None,
                    key=group.keys[n],
                    step=step,
                )
                for n in range(len(counts))
            ]
            outputs, _ = group.reduce(
                gradients, sent, reduced, factors=factors, absent=absent, step=step
            )
            for n, wanted in enumerate(expected):
                where = f"ranks {ranks}, step {step}, parameter {n}"
                for rank in range(ranks):
                    assert same_bits(outputs[rank][n], wanted.gradient), where
                    assert same_bits(sent[rank][n], wanted.sent[rank]), where
                assert same_bits(reduced_of(group, reduced, n), wanted.reduced), where
