"""pack and unpack: every pair of dtypes, tails, special values, against the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import make_inputs, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from fastreduce import BucketPlan, reference

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
PAIRS = [
    *itertools.product(FLOATS, FLOATS),
    *((t, t) for t in [torch.int32, torch.int64, torch.uint8]),
]


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(
        st.one_of(st.integers(0, 40), st.sampled_from([511, 512, 513, 5000])), max_size=6
    ),
    pair=st.sampled_from(PAIRS),
    scale=st.sampled_from([1.0, 0.5, 1 / 3, -7.0]),
    seed=st.integers(0, 2**30),
)
def test_pack_and_unpack(counts, pair, scale, seed):
    source, target = pair
    if not source.is_floating_point:
        scale = 1.0
    tensors = [make_inputs(seed + i, 1, n, source, special=True)[0] for i, n in enumerate(counts)]
    plan = BucketPlan(tensors)
    flat = torch.full((plan.numel,), 77, dtype=target)
    plan.pack(tensors, flat, scale)
    expected = [reference.convert(t, target, scale) for t in tensors]
    assert same_bits(flat, torch.cat([*expected, torch.empty(0, dtype=target)]))

    back = [torch.full_like(t, 77) for t in tensors]
    plan.unpack(flat, back, scale)
    for got, packed in zip(back, expected, strict=True):
        assert same_bits(got, reference.convert(packed, source, scale))


def test_every_half_and_bfloat16_survives():
    for dtype in [torch.float16, torch.bfloat16]:
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        plan = BucketPlan([every])
        wide = torch.empty(2**16)
        plan.pack([every], wide)
        assert same_bits(wide, every.float())
        back = torch.empty(2**16, dtype=dtype)
        plan.unpack(wide, [back])
        assert same_bits(back, every)


def test_misaligned_views_and_shapes():
    base = torch.arange(100.0)
    tensors = [base[1:7].view(2, 3), base[9:9], base[11:24]]
    plan = BucketPlan(tensors)
    assert plan.offsets == [0, 6, 6] and plan.numel == 19
    flat = torch.zeros(21)[2:]
    plan.pack(tensors, flat)
    assert flat.tolist() == [*range(1, 7), *range(11, 24)]


@pytest.mark.parametrize(
    "change, error, text",
    [
        (lambda t, f: ([t[0]], f), ValueError, "shapes"),
        (lambda t, f: ([t[0], t[1].double()], f), ValueError, "one dtype"),
        (lambda t, f: (t, f[:-1]), ValueError, "elements"),
        (lambda t, f: (t, f.to(torch.int16)), TypeError, "expected one of"),
        (lambda t, f: (t, f.int()), ValueError, "integers"),
        (lambda t, f: ([torch.ones(4, 2).t(), t[1]], f), ValueError, "contiguous"),
    ],
)
def test_bad_arguments(change, error, text):
    tensors = [torch.ones(2, 4), torch.ones(3)]
    plan = BucketPlan(tensors)
    with pytest.raises(error, match=text):
        plan.pack(*change(tensors, torch.empty(11)))
