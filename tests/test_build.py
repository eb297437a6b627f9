"""A wheel builds in isolation, without torch, and says clearly what it needs to run."""

from __future__ import annotations

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
    # With CUDA it takes minutes; the tests themselves run on such a build (see test_cuda_build.py).
    environment = os.environ | {"FASTREDUCE_CUDA": "0"}
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
@pytest.mark.parametrize("names", ["sm_90", "native", "999"])
def test_architectures_that_are_none_are_refused(tmp_path, names):
    run("cp", "-r", *(ROOT / name for name in ["setup.py", "csrc", "fastreduce"]), tmp_path)
    environment = os.environ | {"FASTREDUCE_CUDA_ARCHS": names}
    done = run(
        sys.executable,
        "-c",
        "import runpy, sys; sys.argv[1:] = ['--version']; scope = runpy.run_path('setup.py');"
        "scope['cuda_targets']('nvcc')",
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 1 and "FASTREDUCE_CUDA_ARCHS: expected" in done.stderr


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512"])
def test_instruction_set_can_be_lowered(isa):
    code = "import fastreduce; print(fastreduce.instruction_set())"
    done = run("env", f"FASTREDUCE_ISA={isa}", sys.executable, "-c", code)
    order = ["baseline", "avx2", "avx512"]
    best = fastreduce.instruction_set()
    assert done.stdout.strip() == order[min(order.index(isa), order.index(best))]
