"""Gradients that travel to their servers in a wire format and stay there: the reference's bits, for
every format, whoever serves."""

from __future__ import annotations

import pytest
import torch
from conftest import on_every_instruction_set, same_bits

from fastreduce import _C, enums, reference
from fastreduce.errors import FORMATS
from fastreduce.wire import part_of

UNIT = 1024
SEED, KEY, STEP = 77, 5, 9
COUNTS = [127, 2100]


def landed(format, dtype, stochastic, ranks, servers, count):
    """Every rank's gradient and residual, after the servers have reduced; and what was expected."""
    generator = torch.Generator().manual_seed(count + ranks)
    gradients = [torch.randn(count, generator=generator).to(dtype) for _ in range(ranks)]
    sent = [torch.randn(count, generator=generator) * 0.01 for _ in range(ranks)]
    nexts = [torch.full((count,), torch.nan) for _ in range(ranks)]
    row = (0, count, KEY, enums.FORMAT[format], stochastic, 128)
    plan = _C.WirePlan(ranks, [row], servers, UNIT)
    mine = [each.clone() for each in gradients]
    codings, messages = [], []
    for rank in range(ranks):
        addresses = torch.tensor([[sent[rank].data_ptr(), nexts[rank].data_ptr(), 0, 0]])
        coding = _C.WireCoding(
            *(plan, mine[rank].data_ptr(), enums.DTYPE[dtype], rank, 1.0),
            *(addresses.data_ptr(), enums.DTYPE[torch.float32], 0, SEED, STEP, True),
        )
        codings.append(coding)
        messages.append([])
        for chunk in range(ranks):
            size = plan.message_bytes(chunk)
            assert bool(size) <= (chunk in servers)
            message = torch.zeros(size + 1, dtype=torch.uint8)
            coding.encode(chunk, message.data_ptr())
            messages[rank].append(message)
    for rank in servers:
        codings[rank].reduce([each[rank].data_ptr() for each in messages], 0)
        assert codings[rank].finite
    wanted = [each.clone() for each in gradients]
    values = [g.float() + r for g, r in zip(gradients, sent, strict=True)]
    residuals = [each.clone() for each in values]
    words = [
        reference.noise(SEED, KEY, STEP, 2 * rank, count) if stochastic else None
        for rank in range(ranks)
    ]
    mean = torch.empty(count)
    for begin in range(0, count, 128):
        part = slice(begin, min(begin + 128, count))
        n = part.stop - begin
        decoded = []
        for rank in range(ranks):
            own = words[rank]
            own = None if own is None else own[part]
            record = reference.encode_run(values[rank][part], format, own)
            decoded.append(reference.decode_run(record, format, n))
            residuals[rank][part] -= decoded[-1]
        mean[part] = reference.tree(decoded) * torch.tensor(1 / ranks, dtype=torch.float32)
    covered = 0
    for place, rank in enumerate(servers):
        _, begin, end = part_of(count, UNIT, KEY, len(servers), place)
        wanted[rank][begin:end] = mean[begin:end].to(dtype)
        covered += end - begin
        assert begin % UNIT == 0 or begin == end
    assert covered == count
    return mine, nexts, wanted, residuals


def all_formats():
    for format in FORMATS:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for stochastic in (False, True):
                if stochastic and format in ("fp32", "onebit"):
                    continue
                for ranks, servers in ((2, [0, 1]), (5, [0, 3, 4])):
                    for count in COUNTS:
                        case = format, dtype, stochastic, ranks, servers, count
                        mine, nexts, wanted, residuals = landed(*case)
                        for rank in range(ranks):
                            assert same_bits(mine[rank], wanted[rank]), (*case, rank)
                            assert same_bits(nexts[rank], residuals[rank]), (*case, rank)
    return True


def test_bits_of_the_reference():
    code = "import json\nfrom test_landing import all_formats\nprint(json.dumps(all_formats()))"
    assert set(on_every_instruction_set(code).values()) == {True}


def test_what_does_not_fit_is_refused():
    row = (0, 100, 0, enums.FORMAT["int8"], False, 96)
    with pytest.raises(ValueError, match="grain"):
        _C.WirePlan(2, [row], [0], UNIT)
    with pytest.raises(ValueError, match="servers"):
        _C.WirePlan(2, [row], [7], 96)
