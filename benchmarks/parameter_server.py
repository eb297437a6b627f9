"""A training step's averaging and update with Adam, on CPU ranks: the sharded parameter server
beside what it replaces.

    python -m benchmarks.parameter_server              # 10 M parameters, 2 ranks
    python -m benchmarks.parameter_server --ranks 4

Every rank has the same parameters and its own gradients, written afresh before each step. Timed is
all from there to the updated parameters, of the slowest rank; variants take turns. Figures are
medians over the rounds, ratios those of a round's own times:

  server          fastreduce.ParameterServer: reduce-scatter, fused update, all-gather
  fused           fastreduce's all-reduce, then torch.optim.Adam(fused=True) on every rank
  gloo            gloo's all-reduce of DDP's buckets, then torch.optim.Adam(foreach=True)
  zero            the same, then torch's ZeroRedundancyOptimizer over Adam(foreach=True)

Targets: the server at most 0.6 of gloo, and at most 0.85 of fused.
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
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer  # imports what must come before a group

import fastreduce
from benchmarks.all_reduce import join_group, machine
from fastreduce import demo

TARGETS = {"gloo": 0.6, "fused": 0.85}
BUCKET_BYTES = 25 << 20
RATE = 1e-3


def parameters_of(count: int) -> list[nn.Parameter]:
    """Matrices of a million elements, and what is left."""
    side = 1 << 20
    sizes = [side] * (count // side) + ([count % side] if count % side else [])
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size)) for size in sizes]


class Variant:
    """A way to average and update. ``gradients`` are where a rank writes its own."""

    def __init__(self, gradients: list[Tensor], step: Callable[[], Any]) -> None:
        self.gradients = gradients
        self.step = step


def server(count: int, ranks: int) -> Variant:
    parameters = parameters_of(count)
    served = fastreduce.ParameterServer(
        parameters, torch.optim.Adam, lr=RATE, bucket_bytes=BUCKET_BYTES
    )

    def step() -> None:
        served._used.fill_(1)
        served.step()
        for bucket in served._buckets:  # as zero_grad(), but for the zeros
            bucket.work = None
        served._pass = type(served._pass)()

    return Variant([each.grad for each in parameters if each.grad is not None], step)


def flat_gradients(parameters: list[nn.Parameter], make: Callable[[int], Tensor]) -> list[Tensor]:
    """Buckets, of which the parameters' gradients are views."""
    buckets: list[Tensor] = []
    members: list[nn.Parameter] = []
    for each in [*parameters, None]:
        if each is None or sum(m.nbytes for m in members) + each.nbytes > BUCKET_BYTES:
            buckets.append(make(sum(m.numel() for m in members)))
            parts = buckets[-1].split([m.numel() for m in members])
            for member, part in zip(members, parts, strict=True):
                member.grad = part
            members = []
        if each is not None:
            members.append(each)
    return buckets


def fused(count: int, ranks: int) -> Variant:
    parameters = parameters_of(count)
    communicator = fastreduce.Communicator()
    buckets = flat_gradients(parameters, communicator.empty)
    optimizer = torch.optim.Adam(parameters, lr=RATE, fused=True)

    def step() -> None:
        for bucket in buckets:
            communicator.all_reduce(bucket)
        optimizer.step()

    return Variant(buckets, step)


def gloo(count: int, ranks: int, zero: bool = False) -> Variant:
    parameters = parameters_of(count)
    buckets = flat_gradients(parameters, torch.empty)
    optimizer: torch.optim.Optimizer
    if zero:
        optimizer = ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=RATE, foreach=True)
    else:
        optimizer = torch.optim.Adam(parameters, lr=RATE, foreach=True)

    def step() -> None:
        for work in [dist.all_reduce(bucket, async_op=True) for bucket in buckets]:
            work.wait()
        for bucket in buckets:
            bucket.div_(ranks)
        optimizer.step()

    return Variant(buckets, step)


VARIANTS: dict[str, Callable[[int, int], Variant]] = {
    "server": server,
    "fused": fused,
    "gloo": gloo,
    "zero": lambda count, ranks: gloo(count, ranks, True),
}


def rank_main(rank: int, ranks: int, folder: str, arguments: argparse.Namespace) -> None:
    """One rank's process; the first one prints."""
    join_group(rank, ranks, Path(folder))
    variants = {name: make(arguments.elements, ranks) for name, make in VARIANTS.items()}
    fresh = torch.randn(max(g.numel() for v in variants.values() for g in v.gradients))
    communicator = fastreduce.Communicator()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(arguments.rounds + 2):
        for name, variant in variants.items():
            for gradient in variant.gradients:
                gradient.view(-1).copy_(fresh[: gradient.numel()])
            communicator.barrier()
            begin = time.perf_counter()
            variant.step()
            taken = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            communicator.all_reduce(taken, "max")
            if number >= 2:
                times[name].append(taken.item())
    if rank == 0:
        figures: dict[str, Any] = {}
        for name, seconds in times.items():
            ratios = [ours / other for ours, other in zip(times["server"], seconds, strict=True)]
            figures[name] = {
                "ms": statistics.median(seconds) * 1e3,
                "server_of_it": statistics.median(ratios),
            }
            line = f"{name:8} {figures[name]['ms']:9.2f} ms"
            if name != "server":
                line += f"   server {figures[name]['server_of_it']:.3f} of it"
            if name in TARGETS:
                reached = figures[name]["server_of_it"] <= TARGETS[name]
                line += f"   target <= {TARGETS[name]}: {'reached' if reached else 'NOT reached'}"
            print(line, flush=True)
        if arguments.json is not None:
            found = {"machine": machine(), "ranks": ranks, "elements": arguments.elements}
            arguments.json.write_text(json.dumps(found | {"results": figures}, indent=1) + "\n")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--elements", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("  ".join(f"{key} {value}" for key, value in machine().items()))
    with tempfile.TemporaryDirectory(prefix="fastreduce-benchmark-") as folder:
        demo.run_ranks(rank_main, arguments.ranks, arguments.ranks, folder, arguments)


if __name__ == "__main__":
    main()
