"""All-reduce on CPU ranks of one host: fastreduce beside gloo, MPI and the bound, in one run.

    python -m benchmarks.all_reduce            # all sizes, a few minutes
    python -m benchmarks.all_reduce --quick    # a coarse look

Under torchrun it is another benchmark, of GPUs: see gpu_all_reduce.py.

Every buffer is written afresh by its owner before each call, as a gradient is. The ranks then
meet at a barrier, and a call's time is that of the slowest rank. Methods take turns within a
case, so that all of them see the same placement of the cores; the flag round trip is measured
before and after every case. Figures are medians.

Columns: size, time, algbw = size / time, busbw = algbw x 2 (N - 1) / N, and the number of wrong
elements of a checked call.

The bound moves the same bytes with plain loops in the same processes, without any waiting:
every buffer is read once and written once. MPI is measured if mpi4py is installed and an
``mpiexec`` is found beside this Python or on PATH; then it also starts the ranks.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fastreduce

KIB, MIB = 1 << 10, 1 << 20
SIZES = [KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB, 25 * MIB, 64 * MIB, 256 * MIB]
QUICK = [KIB, 64 * KIB, MIB, 25 * MIB]
BOUND = "bound"
COLOURS = {BOUND: "black", "fastreduce": "C0", "fastreduce staged": "C1", "gloo": "C2", "mpi": "C3"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Set in processes that an mpiexec has started.
MPI_RUN = "FASTREDUCE_BENCHMARK_MPI"
# What makes MPI libraries fast, or lets them run, in this setting; the caller's values win. The
# allocator's keep their temporaries from being paged in anew by every call.
MPI_SETTINGS = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "I_MPI_FABRICS": "shm",
    "I_MPI_THREAD_YIELD": "2",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}

# Elements that are checked at a time: a multiple of the pattern's seven.
CHECKED = 7 << 17

Method = Callable[[], None]


def build_bound() -> ctypes.CDLL:
    """Compiles bound.cpp for this machine."""
    folder = Path(tempfile.mkdtemp(prefix="fastreduce-bound-"))
    library = folder / "bound.so"
    source = Path(__file__).with_name("bound.cpp")
    flags = ["-O3", "-march=native", "-shared", "-fPIC"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    shutil.rmtree(folder)
    loaded.round_trip.restype = ctypes.c_double
    return loaded


def join_group(rank: int, world_size: int, folder: Path) -> None:
    """This process becomes a rank of a gloo group that meets in ``folder``, on one thread."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=300),
    )


class Rank:
    """One rank of the run: its communicator, its peers' libraries, its measurements."""

    def __init__(self, rank: int, world_size: int, folder: Path, largest: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.communicator = fastreduce.Communicator(timeout=120)
        self.bound = build_bound()
        # Memory of all ranks, mapped by all, for the bound alone.
        self.arena = [map_file(folder / f"arena{r}", largest) for r in range(world_size)]
        self.flags = map_file(folder / "flags", 4096)
        self.rounds = 0
        self.mpi = import_mpi()

    def round_trip(self) -> float:
        """Nanoseconds of a flag round trip between ranks 0 and 1, as the cores lie now."""
        self.communicator.barrier()
        rounds = 2000 if self.world_size <= len(os.sched_getaffinity(0)) else 50
        ns: float = self.bound.round_trip(
            ctypes.c_void_p(self.flags.data_ptr()), self.rank, self.rounds, rounds
        )
        self.rounds += rounds
        self.communicator.barrier()
        return ns

    def methods(self, nbytes: int, dtype: torch.dtype, op: str) -> dict[str, tuple[Tensor, Method]]:
        """Name -> buffer and the call that reduces it."""
        count = nbytes // dtype.itemsize
        shared = self.communicator.empty(count, dtype=dtype)
        private = torch.empty(count, dtype=dtype)
        private_gloo = torch.empty(count, dtype=dtype)
        found: dict[str, tuple[Tensor, Method]] = {
            "fastreduce": (shared, lambda: void(self.communicator.all_reduce(shared, op))),  # type: ignore[arg-type]
            "fastreduce staged": (
                private,
                lambda: void(self.communicator.all_reduce(private, op)),  # type: ignore[arg-type]
            ),
            "gloo": (private_gloo, lambda: gloo(private_gloo, op, self.world_size)),
        }
        if self.mpi is not None and dtype is torch.float32:
            private_mpi = torch.empty(count, dtype=dtype)
            found["mpi"] = (private_mpi, self.mpi_method(private_mpi, op))
        found[BOUND] = (self.arena[self.rank][:nbytes].view(dtype), self.bound_method(nbytes))
        return found

    def mpi_method(self, tensor: Tensor, op: str) -> Method:
        world, in_place = self.mpi.COMM_WORLD, self.mpi.IN_PLACE
        array = tensor.numpy()

        def run() -> None:
            world.Allreduce(in_place, array)
            if op == "mean":
                tensor.mul_(1 / self.world_size)

        return run

    def bound_method(self, nbytes: int) -> Method:
        floats = nbytes // 4
        each = -(-floats // self.world_size // 16) * 16
        begin, end = min(self.rank * each, floats), min((self.rank + 1) * each, floats)
        pointers = (ctypes.c_void_p * self.world_size)(*(a.data_ptr() for a in self.arena))
        arguments = (pointers, self.world_size, ctypes.c_size_t(begin), ctypes.c_size_t(end))
        return lambda: self.bound.move_bytes(*arguments)

    def case(self, nbytes: int, dtype: torch.dtype, op: str, seconds: float) -> dict[str, Any]:
        """Times every method on one size; the same figures on all ranks."""
        methods = self.methods(nbytes, dtype, op)
        fresh = torch.randn(nbytes // dtype.itemsize).to(dtype)
        wrong = {name: self.wrong(name, buffer, run, op) for name, (buffer, run) in methods.items()}
        before = self.round_trip()
        times: dict[str, list[float]] = {name: [] for name in methods}
        until = time.perf_counter() + seconds
        least = 5 if nbytes > 32 * MIB else 15
        while True:
            for name, (buffer, run) in methods.items():
                repeats = 1 if nbytes >= MIB else 8
                for _ in range(repeats):
                    buffer.copy_(fresh)
                    self.communicator.barrier()
                    begin = time.perf_counter()
                    run()
                    times[name].append(time.perf_counter() - begin)
            enough = time.perf_counter() > until and len(times[BOUND]) >= least
            vote = torch.tensor([int(enough)])
            dist.broadcast(vote, 0)
            if vote.item():
                break
        after = self.round_trip()
        slowest = {}
        for name, own in times.items():
            all_times = torch.tensor(own, dtype=torch.float64)
            dist.all_reduce(all_times, dist.ReduceOp.MAX)
            slowest[name] = statistics.median(all_times.tolist())
        return {
            "bytes": nbytes,
            "dtype": str(dtype).removeprefix("torch."),
            "op": op,
            "ranks": self.world_size,
            "repeats": {name: len(own) for name, own in times.items()},
            "round_trip_ns": [before, after],
            "seconds": slowest,
            "wrong": wrong,
        }

    def wrong(self, name: str, buffer: Tensor, run: Method, op: str) -> int | None:
        """Elements of one call that differ from the exact result, on any rank. The inputs are
        small integers, whose sums every method represents exactly."""
        if name == BOUND:
            return None
        pattern = torch.arange(CHECKED) % 7
        exact = pattern * self.world_size + sum(range(self.world_size))
        expected = (exact / self.world_size if op == "mean" else exact).to(buffer.dtype)
        for part in buffer.split(CHECKED):
            part.copy_(pattern[: part.numel()] + self.rank)
        run()
        parts = buffer.split(CHECKED)
        count = torch.tensor(sum(int((p != expected[: p.numel()]).sum()) for p in parts))
        dist.all_reduce(count)
        return int(count.item())


def void(_: object) -> None:
    pass


def gloo(tensor: Tensor, op: str, world_size: int) -> None:
    dist.all_reduce(tensor)
    if op == "mean":
        tensor.div_(world_size)


def map_file(path: Path, nbytes: int) -> Tensor:
    """Shared bytes, zero at first."""
    with open(path, "ab") as file:
        file.truncate(nbytes)
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def import_mpi() -> Any:
    """mpi4py's MPI in a process that an mpiexec has started, else None."""
    if MPI_RUN not in os.environ:
        return None
    from mpi4py import MPI

    return MPI


def find_mpiexec() -> str | None:
    """An mpiexec that goes with mpi4py, if that is installed."""
    if importlib.util.find_spec("mpi4py") is None:
        return None
    beside = str(Path(sys.executable).parent)
    path = os.pathsep.join([beside, os.environ.get("PATH", "")])
    return shutil.which("mpiexec.hydra", path=path) or shutil.which("mpiexec", path=path)


def work(folder: Path) -> None:
    """One rank's run; rank 0 prints and writes the results."""
    arguments = argparse.Namespace(**json.loads((folder / "arguments").read_text()))
    mpi = import_mpi()
    if mpi is None:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    else:
        rank, world_size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        if rank == 0:
            print(mpi.Get_library_version().partition("\n")[0])
    join_group(rank, world_size, folder)
    here = Rank(rank, world_size, folder, max(arguments.sizes))
    results = []
    for dtype in arguments.dtypes:
        for op in arguments.ops:
            if rank == 0:
                print(f"\n{world_size} ranks, {dtype}, {op}\n{HEADER}", flush=True)
            for nbytes in arguments.sizes:
                result = here.case(nbytes, DTYPES[dtype], op, arguments.seconds)
                results.append(result)
                if rank == 0:
                    print(table(result), flush=True)
    here.communicator.close()
    dist.destroy_process_group()
    if rank == 0:
        (folder / "results").write_text(json.dumps(results))


HEADER = (
    f"{'size':>9} {'method':<18} {'time us':>11} {'algbw GB/s':>11} {'busbw GB/s':>11} "
    f"{'x bound':>8} {'wrong':>6}   round trip ns"
)


def table(result: dict[str, Any]) -> str:
    """The lines of one case."""
    lines = []
    nbytes, ranks = result["bytes"], result["ranks"]
    trips = "/".join(f"{t:.0f}" for t in result["round_trip_ns"])
    for name, seconds in result["seconds"].items():
        algbw = nbytes / seconds / 1e9
        wrong = result["wrong"][name]
        lines.append(
            f"{human(nbytes):>9} {name:<18} {seconds * 1e6:11.2f} {algbw:11.3f} "
            f"{algbw * 2 * (ranks - 1) / ranks:11.3f} "
            f"{seconds / result['seconds'][BOUND]:8.2f} {'-' if wrong is None else wrong:>6}   "
            f"{trips}"
        )
    return "\n".join(lines)


def human(nbytes: int) -> str:
    return f"{nbytes // MIB} MiB" if nbytes >= MIB else f"{nbytes // KIB} KiB"


def plot(results: list[dict[str, Any]], path: str) -> None:
    """Time over size, one panel per number of ranks, dtype and op."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = sorted({(r["ranks"], r["dtype"], r["op"]) for r in results})
    figure, axes = pyplot.subplots(
        1, len(cases), figsize=(5 * len(cases), 4.2), sharey=True, squeeze=False
    )
    for axis, case in zip(axes[0], cases, strict=True):
        rows = [r for r in results if (r["ranks"], r["dtype"], r["op"]) == case]
        names = list(dict.fromkeys(name for row in rows for name in row["seconds"]))
        others = [name for name in names if name not in COLOURS]
        for name in names:
            colour = COLOURS.get(name) or f"C{(4 + others.index(name)) % 10}"
            style = "--" if name == BOUND else "o-"
            timed = [r for r in rows if name in r["seconds"]]
            axis.loglog(
                [r["bytes"] for r in timed],
                [r["seconds"][name] * 1e6 for r in timed],
                style,
                color=colour,
                base=10,
                label=name,
                markersize=3,
            )
        axis.set_title("{} ranks, {}, {}".format(*case))
        axis.set_xlabel("bytes")
        axis.grid(True, alpha=0.3)
        axis.legend()
    axes[0][0].set_ylabel("microseconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def wait_for(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Returns when all have ended; ends all if one fails, or if this is interrupted."""
    try:
        while any(rank.poll() is None for rank in ranks):
            if any(rank.poll() for rank in ranks):
                break
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.terminate()
            rank.wait()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"a rank failed: exit codes {[rank.returncode for rank in ranks]}")


def measure(world_size: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Runs all cases on ``world_size`` ranks and returns their results."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    command = [sys.executable, "-m", "benchmarks.all_reduce", "--worker"]
    with tempfile.TemporaryDirectory(prefix="fastreduce-benchmark-", dir=memory) as folder:
        Path(folder, "arguments").write_text(json.dumps(vars(arguments)))
        command.append(folder)
        if arguments.mpiexec:
            started = [[arguments.mpiexec, "-n", str(world_size), *command]]
            environments = [MPI_SETTINGS | {MPI_RUN: "1"} | dict(os.environ)]
        else:
            started = [command] * world_size
            environments = [
                dict(os.environ) | {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
                for rank in range(world_size)
            ]
        processes = [
            subprocess.Popen(words, env=environment)
            for words, environment in zip(started, environments, strict=True)
        ]
        wait_for(processes)
        results: list[dict[str, Any]] = json.loads(Path(folder, "results").read_text())
    return results


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "fastreduce": fastreduce.__version__,
        "instruction_set": fastreduce.instruction_set(),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes", default=SIZES)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--ops", nargs="+", choices=["sum", "mean"], default=["sum", "mean"])
    parser.add_argument("--seconds", type=float, default=1.0, help="per case, at least")
    parser.add_argument("--quick", action="store_true", help="few sizes, short")
    parser.add_argument("--json", help="write the results there")
    parser.add_argument("--plot", help="write a PNG there")
    parser.add_argument("--mpiexec", default=find_mpiexec(), help='"" for none')
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.sizes, arguments.seconds = QUICK, 0.3
    return arguments


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from benchmarks import gpu_all_reduce

        gpu_all_reduce.main(argv)
        return []
    arguments = parse(argv)
    if arguments.worker:
        work(Path(arguments.worker))
        return []
    about = machine()
    print("  ".join(f"{key} {value}" for key, value in about.items()))
    results = []
    for world_size in arguments.ranks:
        results += measure(world_size, arguments)
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"machine": about, "results": results}, indent=1) + "\n"
        )
    if arguments.plot:
        plot(results, arguments.plot)
    return results


if __name__ == "__main__":
    main()
