"""What ``import fastreduce`` adds to ``import torch``.

    python -m benchmarks.import_time

Every time is that of a new process, which has imported torch; they share bytecode, which one before
them has written where there was none. The target is 50 ms. Where the time goes:

    python -X importtime -c "import torch, fastreduce"
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from benchmarks.results import headline, machine

TARGET_MS = 50
CODE = """
import time, torch
begin = time.perf_counter()
import fastreduce
print(time.perf_counter() - begin)
"""


def measure(processes: int) -> list[float]:
    """Milliseconds, of each process."""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-c", CODE]
    times = [
        1e3
        * float(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(processes + 1)
    ]
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=15)
    processes = parser.parse_args().processes
    if processes < 1:
        parser.error(f"--processes: expected at least 1, got {processes}")
    times = measure(processes)
    middle = statistics.median(times)
    print(headline(machine()))
    print(
        f"{middle:.1f} ms, median of {len(times)} processes ({min(times):.1f} to "
        f"{max(times):.1f}); target < {TARGET_MS}: "
        f"{'reached' if middle < TARGET_MS else 'NOT reached'}"
    )


if __name__ == "__main__":
    main()
