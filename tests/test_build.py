"""A wheel builds in isolation, without torch, and says clearly what it needs to run."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

import fastreduce

ROOT = Path(__file__).resolve().parents[1]


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
        **options,  # type: ignore[call-overload]
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy of the sources, so that no build product of the checkout is found."""
    source = tmp_path_factory.mktemp("source")
    for name in ["setup.py", "pyproject.toml", "README.md", "csrc", "fastreduce"]:
        done = run("cp", "-r", ROOT / name, source)
        assert done.returncode == 0, done.stderr
    for built in (source / "fastreduce").glob("*.so"):
        built.unlink()
    out = tmp_path_factory.mktemp("wheel")
    # With CUDA, and optimised, it takes minutes; the tests themselves run on such a build (see
    # test_cuda_build.py, and test_protocols.py for warnings).
    environment = os.environ | {"FASTREDUCE_CUDA": "0", "CXXFLAGS": "-O0"}
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", out, source]
    done = run(*command, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning:" not in done.stdout + done.stderr
    return next(out.glob("fastreduce-*.whl"))


def test_contents(wheel):
    assert wheel.stat().st_size < 5 << 20
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(archive.read(n).decode() for n in names if n.endswith("METADATA"))
        binary = next(archive.read(n) for n in names if n.startswith("fastreduce/_C"))
    assert "Requires-Dist: torch" not in metadata.replace("; extra", "")
    assert b"libtorch" not in binary and b"libc10" not in binary
    assert "fastreduce/py.typed" in names and "fastreduce/_C.pyi" in names
    assert not any(name.startswith("fastreduce/_cuda.") and name.endswith(".so") for name in names)


def test_without_torch(wheel, tmp_path):
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    done = run(python, "-m", "pip", "install", "--no-index", "--no-deps", wheel)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(python, "-c", "import fastreduce", cwd=tmp_path)
    assert done.returncode == 1 and "fastreduce needs torch 2.6 or newer" in done.stderr


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_architectures_that_are_none_are_refused(monkeypatch):
    # setup.py cannot be imported: it builds, and needs what only a build has.
    names = ("cuda_targets", "CAPABILITIES")
    parts = [
        node
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if getattr(node, "name", "") in names
        or any(getattr(each, "id", "") in names for each in getattr(node, "targets", []))
    ]
    scope: dict[str, object] = {"os": os, "subprocess": subprocess}
    exec(compile(ast.Module(parts, []), "setup.py", "exec"), scope)
    cuda_targets = scope["cuda_targets"]
    assert callable(cuda_targets)
    for wrong in ("sm_90", "native", "999", "90,foo"):
        monkeypatch.setenv("FASTREDUCE_CUDA_ARCHS", wrong)
        with pytest.raises(SystemExit, match="FASTREDUCE_CUDA_ARCHS: expected"):
            cuda_targets("nvcc")
    monkeypatch.setenv("FASTREDUCE_CUDA_ARCHS", "9.0,80")
    assert "code=sm_80 " in cuda_targets("nvcc") and "code=compute_90" in cuda_targets("nvcc")


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_instruction_set_can_be_lowered(isa):
    code = "import fastreduce; print(fastreduce.instruction_set())"
    done = run("env", f"FASTREDUCE_ISA={isa}", sys.executable, "-c", code)
    order = ["baseline", "avx2", "avx512"]
    best = fastreduce.instruction_set()
    assert done.stdout.strip() == order[min(order.index(isa), order.index(best))]
