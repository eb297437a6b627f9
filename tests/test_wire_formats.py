"""Wire formats: the kernels beside the reference, byte for byte, and what the formats promise."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from wires import Group, Host, compare, same_bits

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
HUGE = torch.finfo(torch.float32).max


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_of_the_reference(format, dtype, stochastic):
    compare(format, dtype, stochastic, Host())


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
        back = reference.decode_run(record, format, len(values))
        assert same_bits(back, clipped.to(dtype).float())
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
