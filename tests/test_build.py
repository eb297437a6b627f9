"""The sdist holds what git has. It builds in isolation, without torch, for this Python and for
another one; what is installed runs, and says clearly what it needs."""

from __future__ import annotations

import ast
import glob
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fastreduce

ROOT = Path(__file__).resolve().parents[1]
NAME = f"fastreduce-{fastreduce.__version__}"
# With CUDA, and optimised, it takes minutes; the tests themselves run on such a build (see
# test_cuda_build.py, and test_protocols.py for warnings).
QUICK = os.environ | {"FASTREDUCE_CUDA": "0", "CXXFLAGS": "-O0"}
# A checkout on PYTHONPATH would hide what is installed.
OUTSIDE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def said(*command: object, **options: object) -> str:
    """What a command that succeeds has printed."""
    done = run(*command, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def sources() -> list[str]:
    """What git has, or would have."""
    done = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if done.returncode != 0:
        pytest.skip(f"needs a checkout, whose git says what belongs to it: {done.stderr}")
    return [name for name in done.stdout.splitlines() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def sdist(sources: list[str], tmp_path_factory) -> Path:
    """Of a copy: a build leaves files, for a time, beside the sources."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    built = ["build/host.o", "csrc/host.o", "fastreduce/_C.so", "tests/__pycache__/conftest.pyc"]
    for name in [*sources, *built]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if name in built:
            (source / name).touch()
        else:
            shutil.copy(ROOT / name, source / name)
    said(sys.executable, "-m", "build", "--sdist", "--outdir", out, source)
    return out / f"{NAME}.tar.gz"


def test_sdist_holds_what_git_has(sdist, sources):
    with tarfile.open(sdist) as archive:
        names = {each.name.removeprefix(f"{NAME}/") for each in archive if each.isfile()}
    made = {name for name in names if name.startswith("fastreduce.egg-info/")}
    assert names - made == {*sources, "PKG-INFO", "setup.cfg"}


class Installed(NamedTuple):
    programs: Path
    unpacked: Path  # the sdist, with what building it has left there


@pytest.fixture(scope="module")
def installed(sdist: Path, tmp_path_factory) -> Installed:
    """The sdist, in an environment that has what it requires and nothing else."""
    folder, temporary = tmp_path_factory.mktemp("environment"), tmp_path_factory.mktemp("pip")
    venv.create(folder)
    pip = [sys.executable, "-m", "pip", "--python", folder]
    environment = QUICK | {"TMPDIR": str(temporary)}
    said(*pip, "install", "--no-compile", "--no-clean", sdist, env=environment)
    return Installed(folder / "bin", next(temporary.rglob("csrc")).parent)


def test_build_deletes_nobody_elses(tmp_path):
    """Only what is in the folder that setuptools itself has chosen."""
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("csrc", "fastreduce"):
        (tmp_path / name).mkdir()
        shutil.copy(next((ROOT / name).glob("*.[hp]*")), tmp_path / name)
    shutil.copy(ROOT / "fastreduce" / "__init__.py", tmp_path / "fastreduce")
    theirs = tmp_path / "site" / "theirs.py"
    theirs.parent.mkdir()
    theirs.touch()
    # What would compile fails at once.
    environment = QUICK | {"CXX": "false"}
    build = [sys.executable, "setup.py", "build", "--build-lib", theirs.parent]
    assert run(*build, env=environment, cwd=tmp_path).returncode != 0
    assert (theirs.parent / "fastreduce").is_dir() and theirs.exists()


def test_contents(installed, sources):
    [site] = installed.programs.parent.glob("lib/*/site-packages")
    lines = (site / f"{NAME}.dist-info" / "RECORD").read_text().splitlines()
    [binary] = (site / "fastreduce").glob("*.so")
    names = {line.split(",")[0] for line in lines if "__pycache__" not in line}
    assert {name for name in names if not name.startswith(NAME)} == {
        *(name for name in sources if name.startswith("fastreduce/")),
        f"fastreduce/{binary.name}",
        "../../../bin/fastreduce",
    }
    assert binary.stat().st_size < 10 << 20
    assert b"libtorch" not in binary.read_bytes() and b"libc10" not in binary.read_bytes()
    assert "Requires-Dist: torch" not in (site / f"{NAME}.dist-info" / "METADATA").read_text()


def test_without_torch(installed, tmp_path):
    done = run(installed.programs / "python", "-c", "import fastreduce", env=OUTSIDE, cwd=tmp_path)
    assert done.returncode == 1 and "fastreduce needs torch 2.6 or newer" in done.stderr


def test_with_torch(installed, tmp_path):
    """torch is the one here, by links: not some hundred megabytes once more."""
    there = Path(torch.__file__).parents[1]
    for name in ("torch", "torchgen", "functorch", "typing_extensions.py", "nvidia"):
        if (there / name).exists():
            (tmp_path / name).symlink_to(there / name)
    options = {"env": OUTSIDE | {"PYTHONPATH": str(tmp_path)}, "cwd": tmp_path}
    program = installed.programs / "fastreduce"
    version = said(program, "--version", **options)
    assert version == f"fastreduce {fastreduce.__version__} (without CUDA kernels)\n"
    report = run(program, "doctor", **options).stdout  # what it finds wrong is of the machine
    assert f"{fastreduce.__version__} in {installed.programs.parent}" in report
    assert "2 ranks here: shared memory, sums right" in report


def other_python() -> Path | None:
    """The newest that differs, on PATH or of pyenv, whose commands answer only for chosen ones."""
    folders = [*os.get_exec_path(), *glob.glob(os.path.expanduser("~/.pyenv/versions/*/bin"))]
    header = "import ensurepip, sysconfig; open(sysconfig.get_path('include') + '/Python.h')"
    for minor in (14, 13, 12, 11, 10):
        for folder in folders if minor != sys.version_info.minor else ():
            python = Path(folder, f"python3.{minor}")
            if python.exists() and run(python, "-c", header).returncode == 0:
                return python
    return None


def test_wheel_for_another_python(installed, sources, tmp_path):
    """Out of the folder in which it was built for this one."""
    python = other_python()
    if python is None:
        pytest.skip("there is no other CPython 3.10 to 3.14 with headers, on PATH or of pyenv")
    number = python.name.removeprefix("python").replace(".", "")
    gone = f"build/lib.linux-{platform.machine()}-cpython-{number}/fastreduce/gone.py"
    (installed.unpacked / gone).parent.mkdir(parents=True)
    (installed.unpacked / gone).touch()
    said(python, "-m", "venv", tmp_path)
    pip = [tmp_path / "bin" / "python", "-m", "pip"]
    objects = list(installed.unpacked.glob("build/*/*.o"))
    before = {path: path.stat().st_mtime_ns for path in objects}
    said(*pip, "wheel", "--no-deps", "-w", tmp_path, installed.unpacked, env=QUICK)
    # What knows Python is compiled anew, nothing else is.
    assert [each.name for each in objects if each.stat().st_mtime_ns != before[each]] == [
        "bindings.o"
    ]
    wheel = tmp_path / f"{NAME}-cp{number}-cp{number}-linux_{platform.machine()}.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if not name.startswith(NAME)} == {
            *(name for name in sources if name.startswith("fastreduce/")),
            f"fastreduce/_C.cpython-{number}-{platform.machine()}-linux-gnu.so",
        }
    said(*pip, "install", "--no-index", "--no-deps", wheel)
    said(tmp_path / "bin" / "python", ROOT / "tests" / "core_alone.py", env=OUTSIDE, cwd=tmp_path)


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
