"""The GPU's kernels of the wire formats without a GPU: their templates over warps whose lanes take
turns in one thread, beside the reference, bit for bit. (With one: tests/gpu.)"""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest
import torch
from test_protocols import FLAGS, ROOT
from wires import CASES, Group, Warps, compare, same_bits

from fastreduce.errors import FORMATS

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
