"""Wire formats: the kernels beside the reference, byte for byte, and what the formats promise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastreduce import _C, enums, reference
from fastreduce.errors import FORMATS

SCALED = ("fp8_e4m3", "fp8_e5m2", "int8", "int4", "onebit")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Bytes of an element, without what tails are padded with, in runs of 128.
NOMINAL = {
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "fp8_e4m3": 1 + 4 / 128,
    "fp8_e5m2": 1 + 4 / 128,
    "int8": 1 + 4 / 128,
    "int4": 1 / 2 + 4 / 128,
    "onebit": 1 / 8 + 4 / 128,
}
TINY = 2.0**-149
HUGE = torch.finfo(torch.float32).max


class Group:
    """Ranks of one process that reduce one buffer of several parameters, message by message."""

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
    ) -> None:
        self.format, self.counts, self.ranks, self.run = format, counts, ranks, run
        self.stochastic, self.misaligned, self.gap = stochastic, misaligned, gap
        self.keys = keys or [7 * n + 3 for n in range(len(counts))]
        self.offsets = [sum(counts[:n]) + gap * n for n in range(len(counts))]
        self.plan = _C.WirePlan(
            ranks,
            [
                (offset, count, key, enums.FORMAT[format], stochastic, run)
                for offset, count, key in zip(self.offsets, counts, self.keys, strict=True)
            ],
        )

    def reduce(
        self,
        parameters: list[list[torch.Tensor]],
        sent: list[list[torch.Tensor]] | None = None,
        reduced: list[list[torch.Tensor]] | None = None,
        *,
        factors: list[float] | None = None,
        absent: list[list[bool]] | None = None,
        step: int = 5,
    ) -> tuple[list[list[torch.Tensor]], bool]:
        """Of parameters[rank][n]; the gradients of every rank, and whether all are finite. With
        residuals, float32 or bfloat16, their new values replace the old ones."""
        buffers, codings, kept = [], [], []
        for rank, gradients in enumerate(parameters):
            size = self.misaligned + sum(self.counts) + self.gap * len(self.counts)
            buffer = torch.full((size,), 77.0, dtype=gradients[0].dtype)[self.misaligned :]
            for offset, count, gradient in zip(self.offsets, self.counts, gradients, strict=True):
                buffer[offset : offset + count] = gradient
            addresses, residual_dtype = 0, torch.float32
            if sent is not None and reduced is not None:
                news = [
                    [torch.full_like(each, math.nan) for each in own[rank]]
                    for own in (sent, reduced)
                ]
                rows = zip(sent[rank], news[0], reduced[rank], news[1], strict=True)
                pointers = torch.tensor([[each.data_ptr() for each in row] for row in rows])
                kept.append((pointers, news))
                addresses, residual_dtype = pointers.data_ptr(), sent[rank][0].dtype
            flags = torch.tensor(absent[rank] if absent else [False], dtype=torch.uint8)
            codings.append(
                _C.WireCoding(
                    self.plan,
                    buffer.data_ptr(),
                    enums.DTYPE[buffer.dtype],
                    rank,
                    factors[rank] if factors else 1.0,
                    addresses,
                    enums.DTYPE[residual_dtype],
                    flags.data_ptr() if absent else 0,
                    1234567890123,
                    step,
                )
            )
            buffers.append(buffer)
        sizes = [self.plan.message_bytes(chunk) for chunk in range(self.ranks)]
        messages = [[torch.full((n + 8,), 99, dtype=torch.uint8) for n in sizes] for _ in codings]
        results = [torch.full((n + 8,), 99, dtype=torch.uint8) for n in sizes]
        for coding, own in zip(codings, messages, strict=True):
            for chunk, message in enumerate(own):
                coding.encode(chunk, message.data_ptr())
        for rank, coding in enumerate(codings):
            coding.reduce([own[rank].data_ptr() for own in messages], results[rank].data_ptr())
        for coding in codings:
            for chunk, message in enumerate(results):
                coding.decode(chunk, message.data_ptr())
        for message in [*results, *(message for own in messages for message in own)]:
            assert (message[-8:] == 99).all(), "more was written than a message has bytes"
        if sent is not None and reduced is not None:
            for rank, (_, (new_sent, new_reduced)) in enumerate(kept):
                sent[rank], reduced[rank] = new_sent, new_reduced
        outputs = []
        for buffer in buffers:
            own = [buffer[o : o + c] for o, c in zip(self.offsets, self.counts, strict=True)]
            outputs.append(own)
            for offset, count in zip(self.offsets, self.counts, strict=True):
                assert (buffer[offset + count :][: self.gap] == 77).all(), "a gap was written to"
        assert len({coding.finite for coding in codings}) == 1
        return outputs, codings[0].finite


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Of which NaN comes out, nothing is promised."""
    whole = {2: torch.int16, 4: torch.int32}[a.element_size()]
    a, b = (torch.where(each.isnan(), math.nan, each) for each in (a, b))
    return a.dtype == b.dtype and torch.equal(a.view(whole), b.view(whole))


def reduced_of(group: Group, reduced: list[list[torch.Tensor]], n: int) -> torch.Tensor:
    """Of one parameter, out of what the ranks that reduce its runs hold."""
    owners = reference._owners(-(-group.counts[n] // group.run), group.ranks, group.keys[n])
    parts = [
        reduced[owner][n][run * group.run : (run + 1) * group.run]
        for run, owner in enumerate(owners)
    ]
    return torch.cat(parts)


def special(count: int, generator: torch.Generator) -> torch.Tensor:
    """Zeros of both signs, subnormals, values that are rounded half way, huge ones."""
    pool = torch.tensor(
        [
            0.0,
            -0.0,
            TINY,
            -3 * TINY,
            1e-40,
            -1e-40,
            2.0 ** (-126),
            65504.0,
            -65519.0,
            1e30,
            -HUGE / 8,
            0.5,
            1.5,
            -2.5,
            1 + 2.0 ** (-11),
            1 + 3 * 2.0 ** (-9),
            448.0,
            57344.0,
            2.0 ** (-24),
            2.0 ** (-17),
        ]
    )
    return pool[torch.randint(len(pool), (count,), generator=generator)]


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_of_the_reference(format, dtype, stochastic):
    """Several steps with residuals: tails, more ranks than runs, runs of several lengths, factors,
    absent ranks, misaligned buffers, special values."""
    generator = torch.Generator().manual_seed(FORMATS.index(format) + 10 * stochastic)
    for ranks, run, counts in (
        (1, 128, [300]),
        (2, 128, [1, 7, 128, 129, 1000]),
        (3, 32, [33, 64, 5]),
        (5, 1024, [1023, 1025, 3000]),
        (8, 128, [640, 17]),
    ):
        group = Group(
            format, counts, ranks, run=run, stochastic=stochastic, misaligned=ranks % 3, gap=3
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
                [
                    (step == 1 and (rank + n) % 3 == 0) or (step == 1 and n == 0)
                    for n in range(len(counts))
                ]
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


@pytest.mark.parametrize("format", FORMATS)
def test_bytes(format):
    count = 128 * 1000
    plan = _C.WirePlan(4, [(0, count, 0, enums.FORMAT[format], False, 128)])
    total = sum(plan.message_bytes(chunk) for chunk in range(4))
    assert total == NOMINAL[format] * count


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_so_on_all_ranks(format, value, dtype):
    group = Group(format, [500], 3)
    gradients = [[torch.randn(500).to(dtype)] for _ in range(3)]
    outputs, finite = group.reduce(gradients)
    assert finite
    assert outputs[0][0].isfinite().all()
    gradients[1][0][301] = value
    outputs, finite = group.reduce(gradients)
    assert not finite
    for own in outputs:
        assert not own[0][301].isfinite()
        assert same_bits(own[0], outputs[0][0])
        assert own[0][:200].isfinite().all()  # other runs


@pytest.mark.parametrize("format", SCALED)
def test_scales_stay_sane(format):
    """Zeros, subnormals, one huge value, and all 65504: within a step of the format."""
    steps = {"fp8_e4m3": 1 / 16, "fp8_e5m2": 1 / 8, "int8": 1 / 127, "int4": 1 / 7, "onebit": 1.0}
    plain = torch.linspace(-1, 1, 128)
    for scale in (0.0, 1e-40, 1.0, 65504.0, HUGE):
        values = plain * scale
        record = reference.encode_run(values, format)
        back = reference.decode_run(record, format, 128)
        assert back.isfinite().all()
        # A scale of a few units of the smallest float is rounded itself.
        allowed = 0.5 if scale == 1e-40 else 0.0
        assert (back - values).abs().max() <= max(steps[format], allowed) * scale
    one = torch.full((128,), 1e-3)
    one[5] = 1e38
    back = reference.decode_run(reference.encode_run(one, format), format, 128)
    assert back.isfinite().all()
    assert format == "onebit" or back[5] == pytest.approx(1e38, rel=1e-5)
    full = torch.full((128,), HUGE)
    assert reference.decode_run(reference.encode_run(full, format), format, 128).isfinite().all()


def test_fp16_is_clipped_and_scaled_before_the_cast():
    group = Group("fp16", [8], 2)
    [[out], _], finite = group.reduce([[torch.full((8,), 1e5)], [torch.full((8,), -7e4)]])
    assert finite
    assert out.tolist() == [0.0] * 8  # 65504 and -65504
    [[out], _], _ = group.reduce([[torch.full((8,), 98304.0)]] * 2, factors=[0.25, 0.25])
    assert out.tolist() == [24576.0] * 8


@pytest.mark.parametrize("format", ["bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8", "int4"])
def test_stochastic_rounding_is_unbiased_and_reproducible(format):
    values = torch.randn(128, generator=torch.Generator().manual_seed(1))

    def rounded(step: int | None) -> torch.Tensor:
        words = None if step is None else reference.noise(5, 6, step, 0, 128)
        return reference.decode_run(reference.encode_run(values, format, words), format, 128)

    steps = [rounded(step) for step in range(400)]
    assert same_bits(rounded(7), steps[7])
    assert not same_bits(steps[7], steps[8])
    nearest = (rounded(None) - values).norm()
    assert (steps[0] - values).norm() > 1.2 * nearest
    # The mean of 400 is off by a twentieth of one's error.
    assert (torch.stack(steps).double().mean(0) - values).norm() < 0.15 * nearest


def test_philox_is_the_published_one():
    """Known answers of the paper's authors' Random123 library for philox4x32, 10 rounds."""
    ones = 0xFFFFFFFF
    words = reference.philox((ones, ones), (ones, ones, ones, ones))
    assert [int(w) for w in words] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    words = reference.philox((0, 0), (0, 0, 0, 0))
    assert [int(w) for w in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_record_is_as_in_torch(data):
    """fp8 and fp16 beside torch's own casts, bf16 too."""
    values = torch.tensor(
        data.draw(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
    )
    for format, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        top = torch.finfo(dtype).max
        clipped = torch.where(values.isinf(), values, values.clamp(-top, top))
        record = reference.encode_run(values, format)
        assert same_bits(
            reference.decode_run(record, format, len(values)), clipped.to(dtype).float()
        )
    for format, dtype in (("fp8_e4m3", torch.float8_e4m3fn), ("fp8_e5m2", torch.float8_e5m2)):
        top = torch.finfo(dtype).max
        inside = values[values.isfinite()]
        if len(inside) == 0:
            continue
        scale = reference._scale(inside, format)
        if scale > 0:
            cast = (inside / scale).clamp(-top, top).to(dtype).float() * scale
            back = reference.decode_run(reference.encode_run(inside, format), format, len(inside))
            assert same_bits(back, cast)


def test_residuals_in_bfloat16():
    """Kept in half the memory: as float32 ones, rounded."""
    group = Group("int8", [1000], 2)
    gradients = [[torch.randn(1000)] for _ in range(2)]
    wide = [[[torch.zeros(1000)] for _ in range(2)] for _ in range(2)]
    narrow = [[[torch.zeros(1000, dtype=torch.bfloat16)] for _ in range(2)] for _ in range(2)]
    a, _ = group.reduce(gradients, *wide)
    b, _ = group.reduce(gradients, *narrow)
    assert same_bits(a[0][0], b[0][0])
    for rank in range(2):
        assert same_bits(narrow[0][rank][0], wide[0][rank][0].to(torch.bfloat16))
