"""What the norm of a gradient costs where it is counted as the average is stored, on CPU ranks.

    python -m benchmarks.norms              # 25 and 100 MiB, float32 and bfloat16, 2 ranks
    python -m benchmarks.norms --ranks 4

Ways, which take turns in every round, each after every rank has written its buffer afresh:

  average         the all-reduce alone: the base of all ratios
  counted         with norms: L2, largest magnitude and non-finite elements, and the ranks' counts
                  brought together
  by parameter    the same, of 100 parts of the buffer, each apart
  torch           the average, then what a training script does: torch.linalg.vector_norm over the
                  buffer and torch.isfinite over it

A time is that of the slowest rank; figures are medians over the rounds, ratios those of a round's
own times. The target is 1.03 for "counted", from 25 MiB on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import fastreduce
from benchmarks.all_reduce import DTYPES, MIB, join_group, machine
from fastreduce import Norms, demo

TARGET = 1.03
PARTS = 100
BASE = "average"


def ways(
    communicator: fastreduce.Communicator, buffer: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """By name, what is timed."""
    whole = Norms()
    part = buffer.numel() // PARTS
    apart = Norms([part] * (PARTS - 1) + [buffer.numel() - part * (PARTS - 1)])

    def counted(norms: Norms) -> None:
        norms.clear()
        communicator.all_reduce(buffer, norms=norms)
        communicator.sum_norms(norms)

    def torchs() -> None:
        communicator.all_reduce(buffer)
        torch.linalg.vector_norm(buffer)
        torch.isfinite(buffer).all()

    return {
        BASE: lambda: communicator.all_reduce(buffer),
        "counted": lambda: counted(whole),
        "by parameter": lambda: counted(apart),
        "torch": torchs,
    }


def measure(nbytes: int, dtype: torch.dtype, rounds: int) -> dict[str, list[float]]:
    """Seconds of every way in every round, of the slowest rank."""
    communicator = fastreduce.Communicator(timeout=120)
    buffer = communicator.empty(nbytes // dtype.itemsize, dtype=dtype)
    fresh = torch.randn(buffer.shape).to(dtype)
    todo = ways(communicator, buffer)
    times: dict[str, list[float]] = {name: [] for name in todo}
    for number in range(rounds + 2):
        for name, action in todo.items():
            buffer.copy_(fresh)
            communicator.barrier()
            begin = time.perf_counter()
            action()
            taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            communicator.all_reduce(taken, "max")
            if number >= 2:
                times[name].append(taken.item())
    communicator.close()
    return times


def rank_main(rank: int, ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    """One rank's process; the first one prints."""
    join_group(rank, ranks, Path(folder))
    results: dict[str, Any] = {}
    for dtype in arguments.dtypes:
        for mib in arguments.mib:
            times = measure(mib * MIB, DTYPES[dtype], arguments.rounds)
            base = times[BASE]
            results[f"{dtype} {mib} MiB"] = figures = {
                name: {
                    "ms": statistics.median(taken) * 1e3,
                    "ratio": statistics.median(
                        one / other for one, other in zip(taken, base, strict=True)
                    ),
                }
                for name, taken in times.items()
            }
            if rank == 0:
                line = "".join(
                    f"  {name} {each['ms']:.2f} ms ({each['ratio']:.3f})"
                    for name, each in figures.items()
                )
                reached = figures["counted"]["ratio"] <= TARGET
                print(f"{dtype} {mib:4} MiB{line}  {'reached' if reached else 'NOT reached'}")
    if rank == 0 and arguments.json is not None:
        found = {"machine": machine(), "ranks": ranks, "results": results}
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, nargs="+", default=[25, 100])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("  ".join(f"{key} {value}" for key, value in machine().items()))
    with tempfile.TemporaryDirectory(prefix="fastreduce-benchmark-") as folder:
        demo.run_ranks(rank_main, arguments.ranks, arguments.ranks, folder, arguments)


if __name__ == "__main__":
    main()
