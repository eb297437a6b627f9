"""All-reduce under torchrun: every algorithm beside the process group and torch's own, in one run.

    torchrun --nproc-per-node 8 -m benchmarks.all_reduce

Columns: size, time, algbw = size / time, busbw = algbw x 2 (N - 1) / N, the wrong elements of a
checked call, and what is expected on paper (see docs/gpu.md). On GPUs, calls are timed in CUDA
graphs of ten, each on another buffer, so that no cache holds what a call reads; where a method
cannot be captured, it is timed as it is and marked. A time is the slowest rank's median; methods
take turns.
Without GPUs it runs over CPUs, beside gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastreduce
from benchmarks import all_reduce as common
from fastreduce import policy

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB, 8 * KIB, 16 * KIB, 72 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 32 * MIB, 64 * MIB]
SIZES += [256 * MIB]
CALLS = 10  # of a graph
ROUNDS = 20
COLD_BYTES = 256 * MIB

Call = Callable[[Tensor], object]


class Bench:
    """This rank's part of the run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.communicator = fastreduce.Communicator(timeout=60)
        self.backend = "nccl" if device.type == "cuda" else "gloo"
        gpu = self.communicator._gpu_on(device) if device.type == "cuda" else None
        self.topology = gpu.topology if gpu is not None else None

    def methods(self, nbytes: int, dtype: torch.dtype) -> dict[str, Call]:
        """Name -> what reduces a tensor of that size, in place or not."""
        found: dict[str, Call] = {}
        if self.topology is not None:
            able = policy.candidates(nbytes, self.world_size, self.topology)
            for name in [*(each for each in able if each != "process_group"), "ring"]:
                found[name] = lambda x, name=name: self.communicator.all_reduce(  # type: ignore[misc]
                    x, "sum", name
                )
            found |= self.torch_methods(nbytes, dtype)
        elif self.device.type == "cpu":
            for name in ("one_shot", "two_shot", "ring"):
                if name != "one_shot" or nbytes <= policy.SLOT_BYTES:
                    found[name] = lambda x, name=name: self.communicator.all_reduce(  # type: ignore[misc]
                        x, "sum", name
                    )
        found["fastreduce"] = lambda x: self.communicator.all_reduce(x, "sum")
        found[self.backend] = dist.all_reduce
        return found

    def torch_methods(self, nbytes: int, dtype: torch.dtype) -> dict[str, Call]:
        """torch's symmetric-memory operations, on what empty() gives."""
        group = self.communicator._group.group.group_name
        ops = torch.ops.symm_mem
        found: dict[str, Call] = {
            "torch one_shot": lambda x: ops.one_shot_all_reduce(x, "sum", group),
            "torch two_shot": lambda x: ops.two_shot_all_reduce_(x, "sum", group),
        }
        if self.topology is not None and self.topology.multicast:
            found["torch multimem"] = lambda x: ops.multimem_all_reduce_(x, "sum", group)
        if nbytes > MIB:
            del found["torch one_shot"]
        if dtype not in (torch.float32, torch.bfloat16):
            return {}
        return found

    def wrong(self, call: Call, buffer: Tensor) -> int | None:
        """Elements that differ from the exact result, on any rank; None: it does not run."""
        pattern = torch.arange(buffer.numel(), device=self.device) % 7
        buffer.copy_(pattern + self.rank)
        result = None
        failed = 0
        try:
            result = call(buffer)
        except (RuntimeError, ValueError, AttributeError) as error:
            failed = 1
            if self.rank == 0:
                print(f"    does not run: {str(error).splitlines()[0]}")
        got = result if isinstance(result, Tensor) else buffer
        exact = pattern * self.world_size + sum(range(self.world_size))
        different = int((got != exact.to(got.dtype)).sum())
        total = torch.tensor([different, failed], device=self.device)
        dist.all_reduce(total)
        return None if total[1].item() else int(total[0].item())

    def case(self, nbytes: int, dtype: torch.dtype) -> dict[str, Any]:
        count = nbytes // dtype.itemsize
        copies = min(CALLS, max(2, -(-COLD_BYTES // nbytes)))
        buffers = [
            self.communicator.empty(count, dtype=dtype, device=self.device) for _ in range(copies)
        ]
        wrong: dict[str, int | None] = {}
        runs: dict[str, Callable[[], float]] = {}
        graphed = {}
        for name, call in self.methods(nbytes, dtype).items():
            wrong[name] = self.wrong(call, buffers[0])
            if wrong[name] is not None:
                for buffer in buffers:
                    buffer.zero_()
                runs[name], graphed[name] = self.timer(call, buffers)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(ROUNDS if nbytes <= 64 * MIB else 5):
            for name, run in runs.items():
                self.meet()
                times[name].append(run())
        seconds = {}
        for name, own in times.items():
            every = torch.tensor(own, dtype=torch.float64, device=self.device)
            dist.all_reduce(every, dist.ReduceOp.MAX)
            seconds[name] = statistics.median(every.tolist())
        return {
            "bytes": nbytes,
            "dtype": str(dtype).removeprefix("torch."),
            "op": "sum",
            "ranks": self.world_size,
            "seconds": seconds,
            "wrong": wrong,
            "graph": graphed,
            "expected": self.expected(nbytes, seconds),
        }

    def expected(self, nbytes: int, names: dict[str, float]) -> dict[str, float]:
        if self.topology is None:
            return {}
        paper = {"nccl": "process_group"} | {name: name for name in policy.GPU_ALGORITHMS}
        return {
            name: policy.expected_seconds(paper[name], nbytes, self.world_size, self.topology)
            for name in names
            if name in paper
        }

    def meet(self) -> None:
        self.communicator.barrier()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            dist.barrier()

    def timer(self, call: Call, buffers: list[Tensor]) -> tuple[Callable[[], float], bool]:
        """What gives the seconds of one call, and whether within a graph."""

        def several() -> None:
            for i in range(CALLS):
                call(buffers[i % len(buffers)])

        if self.device.type == "cpu":

            def on_cpu() -> float:
                begin = time.perf_counter()
                several()
                return (time.perf_counter() - begin) / CALLS

            return on_cpu, False
        several()
        torch.cuda.synchronize()
        run, graphed = several, False
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                several()
            run, graphed = graph.replay, True
        except RuntimeError:
            torch.cuda.synchronize()

        def on_gpu() -> float:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            return float(start.elapsed_time(end)) / 1e3 / CALLS

        return on_gpu, graphed


HEADER = (
    f"{'size':>9} {'method':<16} {'time us':>10} {'algbw GB/s':>11} {'busbw GB/s':>11} "
    f"{'wrong':>6} {'expected us':>12}"
)


def table(result: dict[str, Any]) -> str:
    lines = []
    nbytes, ranks = result["bytes"], result["ranks"]
    for name, seconds in result["seconds"].items():
        algbw = nbytes / seconds / 1e9
        expected = result["expected"].get(name)
        mark = "" if result["graph"][name] or not result["expected"] else "  not in a graph"
        lines.append(
            f"{common.human(nbytes):>9} {name:<16} {seconds * 1e6:10.2f} {algbw:11.3f} "
            f"{algbw * 2 * (ranks - 1) / ranks:11.3f} {result['wrong'][name]:>6} "
            f"{'-' if expected is None else format(expected * 1e6, '.2f'):>12}{mark}"
        )
    return "\n".join(lines)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes", default=SIZES)
    parser.add_argument(
        "--dtypes", nargs="+", choices=common.DTYPES, default=["float32", "bfloat16"]
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: a GPU if there is one")
    parser.add_argument("--tune", action="store_true", help="measure the crossovers first")
    parser.add_argument("--json", default="all_reduce.json", help="write the results there")
    parser.add_argument("--plot", default="all_reduce.png", help="write a PNG there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    device = (
        torch.device(kind, int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if kind == "cuda"
        else torch.device("cpu")
    )
    if kind == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    bench = Bench(device)
    about = common.machine()
    if kind == "cuda":
        about |= {"gpu": torch.cuda.get_device_name(device), "topology": str(bench.topology)}
        if arguments.tune:
            bench.communicator.tune(device)
    leads = bench.rank == 0
    if leads:
        print("  ".join(f"{key} {value}" for key, value in about.items()))
    results = []
    for name in arguments.dtypes:
        if leads:
            print(f"\n{bench.world_size} ranks, {name}, sum\n{HEADER}", flush=True)
        for nbytes in arguments.sizes:
            results.append(bench.case(nbytes, common.DTYPES[name]))
            if leads:
                print(table(results[-1]), flush=True)
    bench.communicator.close()
    dist.destroy_process_group()
    if not leads:
        return
    Path(arguments.json).write_text(
        json.dumps({"machine": about, "results": results}, indent=1) + "\n"
    )
    try:
        common.plot(results, arguments.plot)
    except ImportError:
        print(f"no plot: matplotlib is not installed. The figures are in {arguments.json}")
    if any(wrong for result in results for wrong in result["wrong"].values()):
        raise SystemExit("some method gave wrong elements")
