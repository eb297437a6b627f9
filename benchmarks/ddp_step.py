"""What gradient averaging adds to a DDP training step on CPU ranks of one host.

    python -m benchmarks.ddp_step

Three copies of a model train side by side in the same processes and take turns step by step:
with a hook that communicates nothing, with DDP's own all-reduce over gloo, and with fastreduce.
A step's time is that of the slowest rank; figures are medians. What a variant adds is its time
less that of the hook without communication.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from benchmarks.all_reduce import join_group, machine

VARIANTS = ("no communication", "gloo", "fastreduce")


def mlp() -> nn.Module:
    """10.5 million parameters."""
    return nn.Sequential(
        nn.Linear(1024, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 10),
    )


# DDP reads the annotations: no postponed ones in this file.
def no_communication(_: None, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


class Variant:
    """A model, its optimizer, and how its gradients are averaged."""

    def __init__(self, name: str, bucket_cap_mb: float) -> None:
        torch.manual_seed(0)
        self.model = DistributedDataParallel(mlp(), bucket_cap_mb=bucket_cap_mb)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.state = None
        if name == "no communication":
            self.model.register_comm_hook(None, no_communication)
        elif name == "fastreduce":
            self.state = fastreduce.attach(self.model, timeout=120)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def close(self) -> None:
        if self.state is not None:
            self.state.close()


def measure(world_size: int, batch: int, steps: int, bucket_cap_mb: float) -> dict[str, Any]:
    """Median seconds per step of each variant; the same on all ranks."""
    variants = {name: Variant(name, bucket_cap_mb) for name in VARIANTS}
    times: dict[str, list[float]] = {name: [] for name in variants}
    x, y = torch.randn(batch, 1024), torch.randint(0, 10, (batch,))
    order = list(variants)
    for step in range(steps + 5):
        order = order[1:] + order[:1]  # nobody always follows the same neighbour
        for name in order:
            dist.barrier()
            begin = time.perf_counter()
            variants[name].step(x, y)
            if step >= 5:  # buckets are rebuilt and moved before that
                times[name].append(time.perf_counter() - begin)
    medians = {}
    for name, own in times.items():
        slowest = torch.tensor(own, dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        medians[name] = statistics.median(slowest.tolist())
    for variant in variants.values():
        variant.close()
    return {
        "ranks": world_size,
        "batch": batch,
        "bucket_cap_mb": bucket_cap_mb,
        "steps": steps,
        "seconds": medians,
    }


def rank_main(rank: int, world_size: int, folder: str, arguments: argparse.Namespace) -> None:
    join_group(rank, world_size, Path(folder))
    results = []
    for bucket_cap_mb in arguments.bucket_cap_mb:
        for batch in arguments.batches:
            result = measure(world_size, batch, arguments.steps, bucket_cap_mb)
            results.append(result)
            if rank == 0:
                print(line(result), flush=True)
    dist.destroy_process_group()
    if rank == 0:
        Path(folder, "results").write_text(json.dumps(results))


def line(result: dict[str, Any]) -> str:
    seconds = result["seconds"]
    base = seconds["no communication"]
    gloo, ours = seconds["gloo"] - base, seconds["fastreduce"] - base
    return (
        f"{result['ranks']} ranks, batch {result['batch']:4d}, "
        f"buckets {result['bucket_cap_mb']:g} MB: no communication {base * 1e3:.1f} ms, "
        f"gloo + {gloo * 1e3:.1f} ms, fastreduce + {ours * 1e3:.1f} ms "
        f"({ours / gloo:.2f} of gloo's)"
    )


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--bucket-cap-mb", type=float, nargs="+", default=[25.0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", help="write the results there")
    arguments = parser.parse_args(argv)
    about = machine()
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    results: list[dict[str, Any]] = []
    for world_size in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            spawn(rank_main, (world_size, folder, arguments), nprocs=world_size)
            results += json.loads(Path(folder, "results").read_text())
    if arguments.json:
        text = json.dumps({"machine": about, "results": results}, indent=1)
        Path(arguments.json).write_text(text + "\n")
    return results


if __name__ == "__main__":
    main()
