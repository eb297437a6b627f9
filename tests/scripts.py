"""Runs commands as users do, and sees to it that nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import nothing_left, shared_files

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
TIMEOUT = 120.0


def marked(mark: str) -> list[int]:
    """The processes that have this text in their environment, as those that they start."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # ended meanwhile, or not ours
            continue
    return found


def run_command(command: Sequence[str], folder: Path, **environment: str) -> str:
    """What it prints. Afterwards no process and no shared memory is left."""
    before = shared_files()
    mark = f"{folder}:{time.monotonic_ns()};"
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "FASTREDUCE_TEST_MARK": mark,
            **environment,
        },
    )
    try:
        output, errors = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        pytest.fail(f"hangs: {process.communicate(timeout=60)}")
    finally:
        left = marked(mark)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
    assert process.returncode == 0, output + errors
    assert not left
    assert nothing_left(before)
    return output
