"""What nvcc made of the kernels, read out of the built extension: machine code for every
architecture, no spills and no stack, registers within the launch bounds; and PTX whose flags have
the scope of the system and whose hot loops move 16 bytes at a time.

Warnings are errors where .ci/run builds it, those of ptxas about spills and local memory too.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastreduce import cuda

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.skipif(cuda._cuda is None, reason="built without nvcc")

# Kernel -> registers that a thread may have at its launch bounds, of 65,536.
REGISTERS = {
    "reduction": 128,
    "ring_reduction": 128,
    "small_reduction": 128,
    "transfer": 128,
    "encoded_reduction": 128,
    "copy_tiles": 64,
    "convert_tiles<float>": 80,
    "convert_tiles<double>": 80,
    "wire_encode": 64,
    "wire_reduce<true>": 80,
    "wire_reduce<false>": 80,
    "wire_decode": 64,
    "select_count": 64,
    "select_settle": 64,
    "select_tally": 64,
    "select_emit": 64,
    "select_find": 64,
    "select_combine": 80,
    "norm_measure": 64,
}
# Functions that loop over packs.
HOT = ["reduce_tables", "copy_dealt", "convert_tiles", "gather_slots"]
WHEEL_BYTES = 20 << 20


def constant(name: str) -> tuple[int, ...]:
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            value = ast.literal_eval(node.value)
            assert isinstance(value, tuple)
            return value
    raise AssertionError(name)


def cuobjdump() -> str:
    found = shutil.which("cuobjdump")
    for folder in sys.path:
        for path in Path(folder).glob("nvidia/*/bin/cuobjdump"):
            found = found or str(path)
    if found is None:
        pytest.skip("there is no cuobjdump")
    return found


def dump(*options: str) -> str:
    assert cuda._cuda is not None and cuda._cuda.__file__ is not None
    command = [cuobjdump(), *options, cuda._cuda.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"cuobjdump does not run here: {done.stderr[-200:]}")
    return done.stdout


def plain(name: str) -> str:
    """A kernel's name out of its mangled or demangled one."""
    demangled = subprocess.run(
        ["c++filt", name], capture_output=True, text=True, check=True
    ).stdout.strip()
    found = re.search(r"(\w+(?:<\w+>)?)\([^()]*\)$", demangled)
    return found[1] if found else demangled


def usage_of(text: str) -> Iterator[tuple[int, str, dict[str, int]]]:
    """(architecture, kernel, resources) for every kernel in a resource dump."""
    architecture = 0
    kernel = ""
    for line in text.splitlines():
        if found := re.match(r"arch = sm_(\d+)", line):
            architecture = int(found[1])
        elif found := re.match(r"\s+Function (\S.*):$", line):
            kernel = plain(found[1])
        elif "REG:" in line:
            yield architecture, kernel, {k: int(v) for k, v in re.findall(r"(\w+):(\d+)", line)}


def wrong_usage(text: str) -> list[str]:
    """What is wrong with a resource dump."""
    wrong = []
    seen: dict[int, set[str]] = {}
    for architecture, kernel, used in usage_of(text):
        seen.setdefault(architecture, set()).add(kernel)
        where = f"{kernel} for sm_{architecture}"
        if used["STACK"] or used["LOCAL"]:
            wrong.append(f"{where} has a stack or spills: {used}")
        if kernel not in REGISTERS:
            wrong.append(f"{where} is not known")
        elif used["REG"] > REGISTERS[kernel]:
            wrong.append(f"{where} uses {used['REG']} registers of {REGISTERS[kernel]}")
    for architecture, kernels in seen.items():
        wrong += [f"{each} is missing for sm_{architecture}" for each in set(REGISTERS) - kernels]
    return wrong


def test_no_kernel_spills_or_has_a_stack():
    text = dump("--dump-resource-usage")
    assert wrong_usage(text) == []


def test_a_spill_is_noticed():
    text = dump("--dump-resource-usage")
    assert "no_such" not in text
    for old, new, complaint in [
        ("STACK:0", "STACK:8", "stack or spills"),
        ("LOCAL:0", "LOCAL:16", "stack or spills"),
        ("REG:", "REG:9", "registers of"),
        ("transfer", "transfers", "not known"),
    ]:
        assert any(complaint in each for each in wrong_usage(text.replace(old, new)))


def test_every_architecture_has_machine_code_and_the_newest_ptx():
    files = dump("--list-elf", "--list-ptx")
    machine = {int(each) for each in re.findall(r"sm_(\d+)\.cubin", files)}
    ptx = {int(each) for each in re.findall(r"sm_(\d+)\.ptx", files)}
    named = os.environ.get("FASTREDUCE_CUDA_ARCHS", "").replace(",", " ").replace(".", "").split()
    wanted = set(map(int, named)) or set(constant("CAPABILITIES"))
    assert machine - {75} <= wanted and ptx == {max(machine)}  # 75: the runtime's own
    newest = subprocess.run(
        ["nvcc", "--list-gpu-arch"], capture_output=True, text=True, check=False
    ).stdout
    known = {int(each) for each in re.findall(r"compute_(\d+)", newest)}
    if wanted <= known:
        assert machine >= wanted, "built for fewer (FASTREDUCE_CUDA_ARCHS?)"


# -- PTX ------------------------------------------------------------------------------------------


def sections(ptx: str) -> dict[str, str]:
    """Function or kernel -> its instructions."""
    found: dict[str, str] = {}
    parts = re.split(r"^\.(?:visible |weak )*(?:entry|func)\b", ptx, flags=re.M)
    for part in parts[1:]:
        head = part.split("{", 1)
        name = re.search(r"(_Z\w+)\(", head[0])
        if name is not None and len(head) == 2:
            found[name[1]] = head[1]
    return found


def wrong_ptx(ptx: str) -> list[str]:
    """What is wrong with the PTX of all kernels."""
    wrong = []
    bodies = sections(ptx)
    for hot in HOT:
        named = [body for name, body in bodies.items() if hot in name]
        if not named:
            wrong.append(f"{hot} is missing")
        for body in named:
            if not re.search(r"\bld\.(global\.)?v4\.[ub]32", body):
                wrong.append(f"{hot} loads no 16 bytes at once")
            if not re.search(r"\bst\.(global\.)?v4\.[ub]32", body):
                wrong.append(f"{hot} stores no 16 bytes at once")
    for line in ptx.splitlines():
        instruction = line.strip()
        scoped = re.match(
            r"(ld|st|fence|multimem\.\w+)\.(acquire|release|relaxed|acq_rel|sc)", line.strip()
        )
        if scoped and ".sys" not in instruction:
            wrong.append(f"not of the system's scope: {instruction}")
        # Addresses outside of a block's own memory have 64 bits, in registers called %rd.
        access = re.match(r"(ld|st|atom|red|multimem)\S*", instruction)
        own = access and re.search(r"\.(shared|param|const|local)\b", access[0])
        if access and not own and re.search(r"\[%r\d", instruction):
            wrong.append(f"a 32-bit address: {instruction}")
    for needed in ("ld.acquire.sys", "st.release.sys", "ld.relaxed.sys.global.v2", "multimem.st"):
        if needed not in ptx:
            wrong.append(f"no {needed}")
    return wrong


@pytest.fixture(scope="module")
def ptx() -> str:
    return dump("--dump-ptx")


def test_flags_are_of_the_systems_scope_and_packs_are_moved_at_once(ptx):
    assert wrong_ptx(ptx) == []


@pytest.mark.parametrize(
    "old, new, complaint",
    [
        ("ld.acquire.sys", "ld.acquire.gpu", "scope"),
        ("st.release.sys", "st.release.gpu", "scope"),
        ("fence.acq_rel.sys", "fence.acq_rel.gpu", "scope"),
        ("st.relaxed.sys", "st.relaxed.cta", "scope"),
        ("ld.v4.u32", "ld.v2.u32", "loads no 16 bytes"),
        ("st.v4.u32", "st.u32", "stores no 16 bytes"),
        ("[%rd", "[%r", "32-bit address"),
        ("multimem.st", "nothing.st", "no multimem.st"),
        ("reduce_tables", "reduce_chairs", "reduce_tables is missing"),
    ],
)
def test_wrong_ptx_is_noticed(ptx, old, new, complaint):
    assert old in ptx
    assert any(complaint in each for each in wrong_ptx(ptx.replace(old, new)))


def test_size():
    assert cuda._cuda is not None and cuda._cuda.__file__ is not None
    assert Path(cuda._cuda.__file__).stat().st_size < WHEEL_BYTES  # before it is compressed
