"""The benchmark suite: fastreduce beside its peers and the bound.

Measures what the machine has: GPUs where there are any, else CPU ranks; every peer that is found
(gloo, NCCL, torch's symmetric memory, MPI through mpi4py, NCCL through CuPy) in the same processes,
taking turns. Prints a summary and writes a directory: results.json, a PNG for each benchmark, and
index.html with all in it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from benchmarks import compare, page, ranks, results
from benchmarks.case import Setting, measure
from benchmarks.catalogue import BENCHMARKS, about, cases
from benchmarks.counting import UntraceableError
from fastreduce import terminal

EXAMPLES = """examples:
  python -m benchmarks                                 # all, some minutes
  python -m benchmarks --quick all_reduce ddp_step     # a coarse look at two of them
  python -m benchmarks --compare old/results.json      # what moved; exit status 1 if slower
  python -m benchmarks --compare old/results.json --results new/results.json   # without a run
  torchrun --nproc-per-node 8 -m benchmarks            # on ranks that torchrun starts

benchmarks:
"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    names = "\n".join(f"  {name:<14}{about(name)}" for name in BENCHMARKS)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        epilog=EXAMPLES + names,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of benchmarks (default: all)")
    parser.add_argument(
        "--ranks",
        type=int,
        nargs="+",
        help="numbers of ranks to run on, one after the other (default: 2, or as many as GPUs)",
    )
    parser.add_argument("--quick", action="store_true", help="few cases, short")
    parser.add_argument("--cpu", action="store_true", help="on CPU ranks, even with GPUs")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmark-results"), help="directory (%(default)s)"
    )
    parser.add_argument(
        "--mpiexec", default=ranks.find_mpiexec(), help='starts the ranks; "" for none'
    )
    parser.add_argument("--compare", type=Path, metavar="OLD", help="results.json of another run")
    parser.add_argument("--results", type=Path, metavar="NEW", help="compare these; no run")
    parser.add_argument(
        "--threshold",
        type=float,
        default=compare.THRESHOLD,
        help="a ratio that changed by a smaller factor has not moved (%(default)s)",
    )
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if unknown := [name for name in arguments.names if name not in BENCHMARKS]:
        parser.error(f"expected names out of {', '.join(BENCHMARKS)}, got {', '.join(unknown)}")
    arguments.names = arguments.names or list(BENCHMARKS)
    if arguments.results and not arguments.compare:
        parser.error("--results: needs --compare")
    if not arguments.threshold >= 1:
        parser.error(f"--threshold: expected 1 or more, got {arguments.threshold}")
    if arguments.ranks and min(arguments.ranks) < 1:
        parser.error(f"--ranks: expected 1 or more, got {min(arguments.ranks)}")
    return arguments


def run_cases(rank: ranks.Rank, arguments: argparse.Namespace) -> list[results.Record]:
    """Collective: all cases; rank 0 prints as it goes."""
    device = "cuda" if rank.device.type == "cuda" else "cpu"
    setting = Setting(rank.world_size, device, arguments.quick)  # type: ignore[arg-type]
    found = []
    todo = cases(arguments.names, setting)
    leads = rank.rank == 0
    # On a terminal only.
    with tqdm(todo, unit="case", disable=None if leads else True, leave=False) as bar:
        for case in bar:
            bar.set_description(case.name)
            try:
                found.append(measure(case, rank, quick=arguments.quick))
                said = results.text(found[-1])
            except UntraceableError as error:
                said = f"{case.name}: left out: {error}"
            if leads:
                tqdm.write(f"{said}\n")
                sys.stdout.flush()
    return found


def measure_all(arguments: argparse.Namespace) -> list[results.Record]:
    """On ranks that are started here."""
    on_gpus = torch.cuda.device_count() and not arguments.cpu
    records: list[results.Record] = []
    for world_size in arguments.ranks or [torch.cuda.device_count() if on_gpus else 2]:
        with ranks.scratch() as folder:
            command = [sys.executable, "-m", "benchmarks", *arguments.names]
            command += ["--worker", str(folder)]
            command += [f"--{name}" for name in ("quick", "cpu") if getattr(arguments, name)]
            mpiexec = None if on_gpus or world_size == 1 else arguments.mpiexec
            ranks.start(command, world_size, mpiexec)
            records += ranks.load(folder)
    return records


def work(arguments: argparse.Namespace) -> None:
    """One rank's run; rank 0 leaves the results."""
    for end in (signal.SIGINT, signal.SIGTERM):
        signal.signal(end, signal.SIG_DFL)  # a wait for other ranks would hold a handler up
    with ranks.joined(arguments.worker, cpu=arguments.cpu) as rank:
        found = run_cases(rank, arguments)
    if rank.rank == 0:
        (arguments.worker / "results").write_text(json.dumps(found))


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 1 if a method was wrong, or is slower than in --compare."""
    arguments = parse(argv)
    if arguments.worker:
        work(arguments)
        return 0
    if ranks.under_torchrun() and arguments.ranks:
        raise SystemExit("--ranks: not under torchrun, which has started them")
    old: dict[str, Any] | None = None
    if arguments.compare:
        old = read(arguments.compare)
    leads = not ranks.under_torchrun() or os.environ["RANK"] == "0"
    run: dict[str, Any] = {
        "format": results.FORMAT,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": results.machine(),
        "quick": arguments.quick,
        "load": os.getloadavg()[0],
        "results": [],
    }
    if arguments.results:
        run = read(arguments.results)
    elif leads:
        try:  # before hours of work, not after
            arguments.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=arguments.out):
                pass
        except OSError as error:
            raise SystemExit(f"--out: nothing can be written there: {error}") from None
        print(results.headline(run["machine"]) + "\n", flush=True)
        for line in terminal.busy(run["load"]):
            print(line + "\n", flush=True)
    if not arguments.results:
        if ranks.under_torchrun():
            with ranks.joined(None, cpu=arguments.cpu) as rank:
                run["results"] = run_cases(rank, arguments)
        else:
            run["results"] = measure_all(arguments)
    return report(run, old, arguments) if leads else 0


def read(path: Path) -> dict[str, Any]:
    """A results.json."""
    try:
        found = json.loads(path.read_text())
        if found["format"] != results.FORMAT:
            raise ValueError(f"expected format {results.FORMAT}, got {found['format']!r}")
        compare.text(compare.compare(found, found["results"]), found, found["machine"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else error
        raise SystemExit(f"{path}: no results of this suite: {why}") from None
    return dict(found)


def report(run: dict[str, Any], old: dict[str, Any] | None, arguments: argparse.Namespace) -> int:
    """Prints the end of a run and writes the directory."""
    status = 0
    for line in results.wrong(run["results"]):
        print(line)
        status = 1
    if old is not None:
        found = compare.compare(old, run["results"], threshold=arguments.threshold)
        run["compared"] = compare.text(found, old, run["machine"])
        print(run["compared"])
        status = max(status, int(bool(found.slower)))
    if not arguments.results:
        (arguments.out / "results.json").write_text(json.dumps(run, indent=1) + "\n")
        page.write(run, {name: about(name) for name in BENCHMARKS}, arguments.out)
        print(f"written: {arguments.out}/index.html, results.json")
    return status


if __name__ == "__main__":
    # Whoever ends this ends the ranks, too, and what they have in /dev/shm.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
