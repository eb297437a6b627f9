"""What gradient averaging adds to a DDP training step on CPU ranks of one host.

    python -m benchmarks.ddp_step                      # digits, mlp and resnet
    python -m benchmarks.ddp_step --models tiny        # what a hook itself costs
    python -m benchmarks.ddp_step --models accumulate  # several micro-batches per step

Copies of a model train side by side in the same processes and take turns, one step each per
round, in an order that changes from round to round: with a hook that communicates nothing, with
DDP's own all-reduce over gloo, and with fastreduce. A step's time is that of the slowest rank.
What a variant adds is the median over the rounds of its time less that of the hook without
communication in the same round.

The bound takes its turn, too: for every bucket of the model's step the same bytes moved by plain
loops, without waiting and with nothing else going on, as in all_reduce.py; its time is the sum.

``accumulate`` compares plain gradient accumulation with HookState.shards(), which sums in a fixed
order.

``tiny`` has 2,000 parameters of 10 elements. Its peer is torch's own allreduce_hook over a process
group that does nothing. Beside the steps it times the hooks themselves, from the call to the
completion of the Future, on the rank where that takes least: the others have waited for it.
With ``--ranks 1``, fastreduce has no peer to reach either.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.all_reduce import BOUND, MIB, Rank, join_group, machine
from benchmarks.models import WORKLOADS
from benchmarks.variants import (
    BASE,
    GLOO,
    OURS,
    RECORDED,
    SHARDS,
    Bound,
    Training,
    Variant,
    variants_of,
)

# What fastreduce adds to a step should be at most this much of what gloo adds, or the bound takes.
TARGETS = {GLOO: 0.35, BOUND: 1.5}

# What a step with one of our options should take at most, of one without.
OPTIONS = {SHARDS: 1.05, RECORDED: 1.01}

WARM_UP = 5  # rounds in which buckets are rebuilt and moved
LARGEST = 64 * MIB  # more than any model's gradients


def over_ranks(rank: Rank, own: list[float], op: Literal["min", "max"]) -> list[float]:
    """Element by element. (Not over gloo: torch's thread that drops a finished call's tensors
    aborts if that is the last thing that happens before the interpreter ends.)"""
    values = torch.tensor(own, dtype=torch.float64)
    rank.communicator.all_reduce(values, op)
    found: list[float] = values.tolist()
    return found


def take_turns(rank: Rank, variants: dict[str, Variant], rounds: int) -> dict[str, list[float]]:
    """Seconds of every round's step of each variant on its slowest rank."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    shuffle = random.Random(0).shuffle  # the same on all ranks
    order = list(variants)
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            times[name].append(variants[name].step())
    return {name: over_ranks(rank, own, "max") for name, own in times.items()}


def measure(
    rank: Rank, model: str, batch: int, bucket_cap_mb: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The figures of one model, in seconds; the same on all ranks."""
    variants = variants_of(model, rank, batch, bucket_cap_mb, arguments.micro_batches)
    take_turns(rank, variants, WARM_UP)
    trips = [rank.round_trip()] if rank.world_size > 1 else []
    times = take_turns(rank, variants, arguments.steps)
    trips += [rank.round_trip()] if rank.world_size > 1 else []
    result = {
        "model": model,
        "ranks": rank.world_size,
        "batch": batch,
        "bucket_cap_mb": bucket_cap_mb,
        "steps": arguments.steps,
        "round_trip_ns": trips,
        "seconds": {name: statistics.median(own) for name, own in times.items()},
        "added_seconds": {
            name: statistics.median(t - base for t, base in zip(own, times[BASE], strict=True))
            for name, own in times.items()
            if name not in (BASE, BOUND, RECORDED)
        },
    }
    if model == "accumulate":
        result["micro_batches"] = arguments.micro_batches
    # What our own options cost, as a part of the step without them.
    result["of_plain"] = {
        name: statistics.median(t / plain for t, plain in zip(own, times[OURS], strict=True))
        for name, own in times.items()
        if name in OPTIONS
    }
    hooks, buckets = {}, []
    for name, variant in variants.items():
        if isinstance(variant, Bound):
            buckets = [buffer.nbytes for buffer, _, _ in variant.buckets]
        elif model == "tiny" and isinstance(variant, Training):
            own = variant.hook_seconds[-arguments.steps :]
            hooks[name] = statistics.median(over_ranks(rank, own, "min"))
        variant.close()
    return result | {"hook_seconds": hooks, "bucket_bytes": buckets}


def line(result: dict[str, Any]) -> str:
    """What is printed of a result."""
    seconds, added = result["seconds"], result["added_seconds"]
    about = f"{result['model']:<10} {result['ranks']} ranks, batch {result['batch']}, "
    if "micro_batches" in result:
        about += f"{result['micro_batches']} micro-batches, "
    parts = [f"{BASE} {seconds[BASE] * 1e3:.2f} ms"]
    parts += [f"{name} + {more * 1e3:.3f} ms" for name, more in added.items()]
    if result["hook_seconds"]:
        hooks = (f"{name} {own * 1e6:.1f}" for name, own in result["hook_seconds"].items())
        parts.append(f"hook alone in us: {', '.join(hooks)}")
    for name, ratio in result["of_plain"].items():
        parts.append(f"{name} {ratio:.3f} of plain (target <= {OPTIONS[name]})")
    peers = added | {BOUND: seconds[BOUND]} if BOUND in seconds else {}
    for name, target in TARGETS.items():
        if name in peers:
            ratio = added[OURS] / peers[name]
            parts.append(f"{ratio:.2f} of {name}'s {peers[name] * 1e3:.3f} ms (target <= {target})")
    return about + f"buckets {result['bucket_cap_mb']:g} MB: " + ", ".join(parts)


def rank_main(number: int, world_size: int, folder: str, arguments: argparse.Namespace) -> None:
    """One rank's run; rank 0 prints and writes the results."""
    join_group(number, world_size, Path(folder))
    rank = Rank(number, world_size, Path(folder), LARGEST)
    results = []
    for model in arguments.models:
        for bucket_cap_mb in arguments.bucket_cap_mb:
            for batch in arguments.batches or [WORKLOADS[model].batch]:
                result = measure(rank, model, batch, bucket_cap_mb, arguments)
                results.append(result)
                if number == 0:
                    print(line(result), flush=True)
    rank.communicator.close()
    dist.destroy_process_group()
    if number == 0:
        Path(folder, "results").write_text(json.dumps(results))


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument(
        "--models", nargs="+", choices=WORKLOADS, default=["digits", "mlp", "resnet"]
    )
    parser.add_argument("--batches", type=int, nargs="+", help="per rank; default: the model's own")
    parser.add_argument("--micro-batches", type=int, default=4, help="per step of accumulate")
    parser.add_argument("--bucket-cap-mb", type=float, nargs="+", default=[25.0])
    parser.add_argument("--steps", type=int, default=40, help="of each variant")
    parser.add_argument("--json", help="write the results there")
    arguments = parser.parse_args(argv)
    about = machine()
    print("  ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    results: list[dict[str, Any]] = []
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # the bound's buffers lie there
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory(prefix="fastreduce-benchmark-", dir=memory) as folder:
            spawn(rank_main, (world_size, folder, arguments), nprocs=world_size)
            results += json.loads(Path(folder, "results").read_text())
    if arguments.json:
        text = json.dumps({"machine": about, "results": results}, indent=1)
        Path(arguments.json).write_text(text + "\n")
    return results


if __name__ == "__main__":
    main()
