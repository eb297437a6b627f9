"""Lint, format and types: the same checks for everybody, in the suite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CPP = sorted(
    str(path.relative_to(ROOT))
    for folder in ["csrc", "tests", "benchmarks"]
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".h", ".cpp", ".cu"}
)


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check", "."],
        ["ruff", "format", "--check", "."],
        ["mypy"],
        ["clang-format", "--dry-run", "--Werror", *CPP],
    ],
    ids=["ruff check", "ruff format", "mypy", "clang-format"],
)
def test_style(command):
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run(
        [program, *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
