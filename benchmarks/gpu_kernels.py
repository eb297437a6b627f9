"""The kernels on one GPU, beside the bandwidth of its own copies and beside torch's own operations.

    python -m benchmarks.gpu_kernels

- pack, cast, scale and unpack of 160 tensors, against a device-to-device copy of the same bytes and
  against what torch does for it (cat, to, mul_, split, copy_);
- an all-reduce of ranks in one process (see in_process.py), all bytes counted, against that copy.

Sources and targets take turns among enough buffers that no cache holds them; the methods take turns
within a case; figures are medians of times by CUDA events. What one GPU cannot show: the order of
accesses over NVLink, multicast, the links' bandwidth.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fastreduce
from fastreduce import cuda

MIB = 1 << 20
TENSORS = 160
SIZES = [1 * MIB, 25 * MIB, 100 * MIB, 256 * MIB]
COLD_BYTES = 512 * MIB  # more than any cache holds
ROUNDS = 25

Method = Callable[[int], None]


def medians(methods: dict[str, Method]) -> dict[str, float]:
    """Median seconds of every method; its argument is the number of the round."""
    times: dict[str, list[float]] = {name: [] for name in methods}
    for turn in range(ROUNDS + 3):
        for name, run in methods.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run(turn)
            end.record()
            end.synchronize()
            if turn >= 3:
                times[name].append(float(start.elapsed_time(end)) / 1e3)
    return {name: statistics.median(each) for name, each in times.items()}


def list_of(nbytes: int, dtype: torch.dtype) -> list[Tensor]:
    """160 tensors of about ``nbytes`` together, of sizes as different as a model's."""
    count = nbytes // dtype.itemsize
    weights = [1 + (i * 37) % 101 for i in range(TENSORS)]
    sizes = [max(8, count * w // sum(weights) // 8 * 8) for w in weights]
    return [torch.randn(n, device="cuda").to(dtype) for n in sizes]


def buckets(nbytes: int, tensor_dtype: torch.dtype, flat_dtype: torch.dtype, scale: float) -> Any:
    """One case: figures for pack and unpack."""
    copies = max(2, -(-COLD_BYTES // nbytes))
    lists = [list_of(nbytes, tensor_dtype) for _ in range(copies)]
    plan = fastreduce.BucketPlan(lists[0])
    flats = [torch.empty(plan.numel, dtype=flat_dtype, device="cuda") for _ in range(copies)]
    moved = plan.numel * (tensor_dtype.itemsize + flat_dtype.itemsize)
    half = [torch.empty(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(2 * copies)]

    def torch_pack(i: int) -> None:
        flat = torch._utils._flatten_dense_tensors(lists[i % copies])
        flats[i % copies].copy_(flat.mul_(scale) if scale != 1.0 else flat)

    def torch_unpack(i: int) -> None:
        flat = flats[i % copies]
        wide = flat.to(tensor_dtype)
        wide = wide.mul_(scale) if scale != 1.0 and wide is not flat else wide
        parts = torch._utils._unflatten_dense_tensors(wide, lists[i % copies])
        torch._foreach_copy_(lists[i % copies], list(parts))

    seconds = medians(
        {
            "copy": lambda i: void(half[2 * (i % copies)].copy_(half[2 * (i % copies) + 1])),
            "pack": lambda i: plan.pack(lists[i % copies], flats[i % copies], scale),
            "unpack": lambda i: plan.unpack(flats[i % copies], lists[i % copies], scale),
            "torch pack": torch_pack,
            "torch unpack": torch_unpack,
        }
    )
    names = (str(dtype).removeprefix("torch.") for dtype in (tensor_dtype, flat_dtype))
    return {
        "case": " -> ".join(names) + (f" x {scale}" if scale != 1.0 else ""),
        "bytes": nbytes,
        "moved": moved,
        "seconds": seconds,
    }


def void(_: object) -> None:
    pass


def all_reduce(world_size: int, nbytes: int, algorithm: str) -> Any:
    """Every rank's buffer is read once and written once: 2 N S bytes."""
    from benchmarks.in_process import Group  # which needs a build with nvcc

    group = Group(world_size)
    count = nbytes // 4
    # Two sets of buffers in the segments, in turns.
    tensors = [
        [group.place(rank, torch.randn(count, device="cuda"), at) for rank in range(world_size)]
        for at in (0, -(-nbytes // 4096) * 4096)
    ]
    moved = 2 * world_size * nbytes
    half = [torch.empty(moved // 2, dtype=torch.uint8, device="cuda") for _ in range(4)]
    here = torch.cuda.current_stream()

    def run(turn: int) -> None:
        for rank, stream in enumerate(group.streams):
            stream.wait_stream(here)
            tensor = tensors[turn % 2][rank]
            group.launch(rank, "all_reduce", tensor, tensor, count, algorithm=algorithm, op="mean")
        for stream in group.streams:
            here.wait_stream(stream)

    seconds = medians(
        {
            "copy": lambda i: void(half[2 * (i % 2)].copy_(half[2 * (i % 2) + 1])),
            algorithm: run,
        }
    )
    group.close()
    return {
        "case": f"all_reduce of {world_size} ranks in process, {algorithm}",
        "bytes": nbytes,
        "moved": moved,
        "seconds": seconds,
    }


def show(result: Any) -> None:
    copy = result["seconds"]["copy"]
    print(f"{result['case']}, {result['bytes'] / MIB:g} MiB ({result['moved'] / 1e6:.1f} MB moved)")
    for name, seconds in result["seconds"].items():
        print(
            f"    {name:<14} {seconds * 1e6:10.2f} us {result['moved'] / seconds / 1e9:9.1f} GB/s "
            f"{copy / seconds:6.1%} of the copy's bandwidth",
            flush=True,
        )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="write the results there")
    arguments = parser.parse_args(argv)
    if reason := cuda.problem():
        raise SystemExit(f"this benchmark needs a GPU: {reason}")
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    results = []
    f32, bf16 = torch.float32, torch.bfloat16
    for nbytes in SIZES:
        for kinds in ((f32, f32, 1.0), (f32, f32, 0.5), (f32, bf16, 1.0), (bf16, bf16, 0.5)):
            results.append(buckets(nbytes, *kinds))
            show(results[-1])
    for world_size in (2, 4, 8):
        for nbytes in (64 << 10, 25 * MIB):
            names = (
                ("low_latency", "one_shot", "two_shot") if nbytes < MIB else ("two_shot", "ring")
            )
            for name in names:
                results.append(all_reduce(world_size, nbytes, name))
                show(results[-1])
    if arguments.json:
        content = {"machine": about, "results": results}
        Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
