"""Giving up against writing: the order of two stores and two looks, on two real cores."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def program(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("claims") / "claims"
    compiler = os.environ.get("CXX", "c++")
    flags = ["-std=c++17", "-O2", "-pthread", "-Wall", "-Wextra", "-iquote", ROOT / "csrc"]
    subprocess.run([compiler, *flags, ROOT / "tests/cpp/claims.cpp", "-o", out], check=True)
    return out


def run(program: Path, sabotage: str) -> subprocess.CompletedProcess[str]:
    command = [program, sabotage]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def test_nobody_is_deceived(program):
    done = run(program, "none")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("sabotage", ["release", "look_first"])
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_sabotage_is_found(program, sabotage):
    assert run(program, sabotage).returncode == 1
