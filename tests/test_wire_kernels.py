"""The GPU's kernels of the wire formats, and of norms, without a GPU: their templates over warps
whose lanes take turns in one thread, beside the reference or the host's kernels, bit for bit. (With
one: tests/gpu.)"""

from __future__ import annotations

import ctypes
import shlex
import shutil
import subprocess

import pytest
import torch
from selections import SELECTIONS, SelectingWarps, compare_selected
from test_protocols import FLAGS, ROOT
from wires import (
    CASES,
    FAULTS,
    Group,
    Warps,
    compare,
    same_bits,
)

from fastreduce import _C, enums
from fastreduce.errors import FORMATS
from fastreduce.wire import Wire, part_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    path = tmp_path_factory.mktemp("warps") / "warps.so"
    flags = f"{FLAGS} -O1 -fvisibility=default -Werror -shared -iquote csrc"
    source = ROOT / "tests" / "cpp" / "warps.cpp"
    command = ["g++", *shlex.split(flags), str(source), "-o", str(path)]
    subprocess.run(command, cwd=ROOT, check=True)
    return path


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_bits_of_the_reference(library, format, dtype, stochastic):
    compare(format, dtype, stochastic, Warps(library))


@pytest.mark.parametrize("ranks", [4, 6, 7, 9, 13, 16, 21])
@pytest.mark.parametrize("format", ["bf16", "int4"])
def test_any_number_of_ranks(library, format, ranks):
    """The other kernel, too, which has the ranks one after the other."""
    cases = [(ranks, 32, [33, 64, 5])]
    compare(format, torch.float32, False, Warps(library, few=False), cases)
    if ranks <= 8:
        compare(format, torch.float32, False, Warps(library), cases)


@pytest.mark.parametrize("warps", [1, 2, 64])
def test_any_number_of_warps(library, warps):
    compare("int8", torch.float32, False, Warps(library, warps=warps), CASES[:3])


def test_factors_in_memory(library):
    compare("fp8_e4m3", torch.bfloat16, True, Warps(library, factor_at=True), CASES[:3])


def test_residuals_in_bfloat16(library):
    gradients = [[torch.randn(1000)] for _ in range(2)]

    def reduced(target, dtype):
        residuals = [[[torch.zeros(1000, dtype=dtype)] for _ in range(2)] for _ in range(2)]
        group = Group("int8", [1000], 2, target=target)
        for _ in range(2):
            outputs, finite = group.reduce(gradients, *residuals)
        assert finite
        return [outputs[0][0], residuals[0][0][0], residuals[0][1][0]]

    narrow = torch.bfloat16
    for got, want in zip(reduced(Warps(library), narrow), reduced(None, narrow), strict=True):
        assert same_bits(got, want)


def test_what_is_not_finite_is_told(library):
    group = Group("int4", [500], 3, target=Warps(library))
    gradients = [[torch.randn(500)] for _ in range(3)]
    assert group.reduce(gradients)[1]
    gradients[1][0][301] = torch.inf
    assert not group.reduce(gradients)[1]


@pytest.mark.parametrize(
    ("format", "fault"), [("int8", "no_sync"), ("onebit", "no_sync"), ("onebit", "other_order")]
)
def test_fault_is_noticed(library, format, fault):
    """What a lane reads without having waited for who writes it; sums in another order."""
    with pytest.raises(AssertionError, match="ranks 2, step"):
        compare(format, torch.float32, False, Warps(library, fault=fault), CASES[1:2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("wire", SELECTIONS, ids=str)
def test_selections_have_the_bits_of_the_reference(library, wire, dtype):
    target = SelectingWarps(library)
    with target.played():
        compare_selected(wire, dtype, target)


@pytest.mark.parametrize(("ranks", "warps"), [(2, 1), (5, 2), (9, 64), (40, 5)])
def test_selections_of_any_number_of_ranks_and_warps(library, ranks, warps):
    target = SelectingWarps(library, warps=warps)
    with target.played():
        compare_selected(Wire("topk", k=0.05), torch.float32, target, ranks)


def test_fault_in_a_selection_is_noticed(library):
    target = SelectingWarps(library, fault="no_sync")
    with target.played(), pytest.raises(AssertionError):
        compare_selected(Wire("topk", k=0.05), torch.float32, target)


def norms_of_warps(library, tensor, ends, parts, warps, fault="none"):
    """Of a tensor of which so many ranks have measured a part each."""
    measure = ctypes.CDLL(str(library)).measure
    counts = _C.Norms(ends)
    for rank in range(parts):
        table = torch.zeros(len(ends), _C.NORM_BYTES // 8, dtype=torch.int64)
        _C.Norms(ends).save(table.data_ptr())  # as an empty count is
        _, begin, end = part_of(tensor.numel(), 1024, 0, parts, rank)
        found = torch.tensor(ends)
        address, word = ctypes.c_void_p, ctypes.c_uint64
        measure.argtypes = [ctypes.c_int, address, word, word, address, word, address]
        measure.argtypes += [ctypes.c_int, ctypes.c_int]
        measure(
            enums.DTYPE[tensor.dtype],
            tensor.data_ptr(),
            begin,
            end,
            found.data_ptr(),
            len(ends),
            table.data_ptr(),
            warps,
            FAULTS.index(fault),
        )
        counts.add(table.data_ptr())
    return counts.values()


def norms_of_the_host(tensor, ends):
    counts = _C.Norms(ends)
    counts.measure(0, 1, enums.DTYPE[tensor.dtype], tensor.data_ptr(), tensor.numel())
    return counts.values()


def of_all_sizes(count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    spread = 200 if dtype in (torch.float32, torch.float64) else 12
    sizes = torch.randint(-spread // 2, spread // 4, (count,), generator=generator).double().exp2()
    values = torch.randn(count, generator=generator, dtype=torch.float64) * sizes
    values[::7] = 0.0
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_norms_have_the_bits_of_the_host(library, dtype):
    cases = [(1, [1]), (31, [31]), (1024, [1000, 1024]), (5003, [0, 3, 1030, 1030, 4999, 5003])]
    cases += [(40_000, [2**63 - 1]), (9000, list(range(50, 9001, 50)))]
    for number, (count, ends) in enumerate(cases):
        values = of_all_sizes(count, dtype, number)
        for spoilt in (False, True):
            if spoilt:
                values[count // 2] = torch.inf
                values[count // 3] = torch.nan
            want = repr(norms_of_the_host(values, ends))
            for parts, warps in ((1, 1), (1, 5), (3, 2), (4, 64)):
                got = norms_of_warps(library, values, ends, parts, warps)
                assert repr(got) == want, (count, parts, warps, spoilt)
    large = torch.full((3000,), torch.finfo(dtype).max, dtype=dtype)
    want = [row[3:] for row in norms_of_the_host(large, [3000])]
    assert [row[3:] for row in norms_of_warps(library, large, [3000], 2, 3)] == want


def test_another_order_of_norms_is_noticed(library):
    values = of_all_sizes(9000, torch.float32, 1)
    got = norms_of_warps(library, values, [9000], 1, 2, "other_order")
    assert repr(got) != repr(norms_of_the_host(values, [9000]))
