"""What ``import fastreduce`` loads beside what torch has loaded: how long it takes comes of that.
(benchmarks/import_time.py measures it.)"""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys, torch
before = set(sys.modules)
import fastreduce
print(*sorted(set(sys.modules) - before))
"""


def test_import_loads_nothing_that_can_wait():
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True
    )
    names = done.stdout.split()
    assert [name for name in names if name.partition(".")[0] != "fastreduce"] == []
    commands = {"demo", "doctor", "machine", "diagnosis", "plan"}
    assert not {f"fastreduce.{name}" for name in (*commands, "compiled")} & set(names)
