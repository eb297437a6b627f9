"""``fastreduce tune``: measures the crossovers of this machine, between ranks that it starts or
that torchrun has started."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from fastreduce import _C, cuda, policy, terminal, tuning
from fastreduce.communicator import Communicator
from fastreduce.options import EXIT_STATUS, UsageError, whole
from fastreduce.policy import Limits
from fastreduce.ranks import run_ranks, torchrun_number

_TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Tuned:
    """What came of it.

    Attributes:
        machine: what it holds for.
        seconds: algorithm -> bytes -> of a call; empty where nothing was measured.
        before, after: :func:`fastreduce.policy.crossovers`.
        file: where it is remembered, None where it is not.
    """

    machine: str
    seconds: tuning.Times
    before: Limits
    after: Limits
    file: str | None


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = f"""\
Measures all-reduces of float32 between ranks of one host, in shared memory or between their GPUs.
Every later communicator of as many ranks on this kind of machine then chooses by it; results do not
change. Let nothing else run meanwhile.

examples:
  fastreduce tune                         # 2 ranks on the CPU, which it starts
  fastreduce tune --ranks 4 --dry-run
  fastreduce tune --device cuda           # one rank for each GPU
  torchrun --nproc-per-node 8 -m fastreduce tune --device cuda
  fastreduce tune --ranks 4 --forget

{EXIT_STATUS}"""
    parser.add_argument(
        "--ranks",
        type=whole(2, _C.MAX_RANKS),
        help="processes to start (2; with --device cuda one for each GPU)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    parser.add_argument("--json", action="store_true", help="print bytes and seconds, as JSON")
    kept = parser.add_mutually_exclusive_group()
    kept.add_argument("--dry-run", action="store_true", help="measure, but remember nothing")
    kept.add_argument(
        "--forget", action="store_true", help="delete what is remembered, and measure nothing"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Tunes, and says what came of it; returns the exit status."""
    if "WORLD_SIZE" in os.environ:
        if options.ranks is not None:
            raise UsageError("--ranks: not under torchrun, which has started them")
        rank, ranks = torchrun_number("RANK"), torchrun_number("WORLD_SIZE")
        found = _tune(options, rank, ranks, torchrun_number("LOCAL_RANK"), "env://")
    else:
        ranks = _ranks(options)
        # What has asked the driver for GPUs must not fork.
        start: Literal["spawn", "fork"] = "spawn" if options.device == "cuda" else "fork"
        with tempfile.TemporaryDirectory(prefix="fastreduce-tune-") as folder:
            plain = argparse.Namespace(**{**vars(options), "run": None})
            run_ranks(_rank, ranks, ranks, plain, folder, start=start)
            found = pickle.loads(Path(folder, "found").read_bytes())
    if isinstance(found, str):
        print(f"fastreduce tune: {found}", file=sys.stderr)
        return 1
    if found is not None:
        colours = terminal.colours(sys.stdout)
        print(json.dumps(asdict(found), indent=1) if options.json else text(found, colours))
    return 0


def _ranks(options: argparse.Namespace) -> int:
    if options.device == "cpu":
        return options.ranks or 2
    if reason := cuda.problem():
        raise UsageError(f"--device: cuda cannot be tuned: {reason}")
    there = torch.cuda.device_count()
    ranks: int = options.ranks or there
    if not 2 <= ranks <= there:
        raise UsageError(f"--ranks: expected 2 to {there}, one for each GPU at most, got {ranks}")
    return ranks


def _rank(rank: int, ranks: int, options: argparse.Namespace, folder: str) -> None:
    """The process of a rank that the command has started; rank 0 leaves in ``folder`` what came of
    it."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    found = _tune(options, rank, ranks, rank, f"file://{folder}/store")
    if rank == 0:
        Path(folder, "found").write_bytes(pickle.dumps(found))


def _tune(
    options: argparse.Namespace, rank: int, ranks: int, local_rank: int, meeting: str
) -> Tuned | str | None:
    """Collective. What came of it, or why nothing did; rank 0's."""
    torch.set_num_threads(1)  # others would not survive a fork
    place, backend = torch.device("cpu"), "gloo"
    if options.device == "cuda":
        place = torch.device("cuda", local_rank % max(torch.cuda.device_count(), 1))
        torch.cuda.set_device(place)
        backend = "cpu:gloo,cuda:nccl"
    try:
        dist.init_process_group(
            backend, init_method=meeting, rank=rank, world_size=ranks, timeout=_TIMEOUT
        )
        with Communicator(timeout=_TIMEOUT) as communicator:
            found = _tuned(communicator, place, options)
    except RuntimeError as error:
        return str(error) if rank == 0 else None
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return found if rank == 0 else None


def _tuned(communicator: Communicator, place: torch.device, options: argparse.Namespace) -> Tuned:
    ranks, leads = communicator.world_size, communicator.rank == 0
    before = communicator._topology_on(place)
    machine = communicator._machine(place)
    times: tuning.Times = {}
    if options.forget:
        after = replace(before, limits=())
        if leads:
            tuning.remember(machine, ())
    else:
        sizes = tuning.HOST_SIZES if place.type == "cpu" else tuning.GPU_SIZES
        with terminal.progress(len(sizes), "tune", shown=leads) as bar:
            times = communicator.tune(
                place,
                remember=not options.dry_run,
                progress=lambda size: terminal.step(bar, terminal.size(size)),
            )
        after = communicator._topology_on(place)
    return Tuned(
        machine=machine,
        seconds=times,
        before=policy.crossovers(ranks, before),
        after=policy.crossovers(ranks, after),
        file=str(tuning.file()) if tuning.recall(machine) == after.limits != () else None,
    )


def text(found: Tuned, colours: bool = False) -> str:
    """As a table of microseconds, and what it changes."""
    lines = [found.machine]
    if found.seconds:
        names = list(found.seconds)
        sizes = sorted({size for each in found.seconds.values() for size in each})
        lines += ["float32 sums; microseconds of the slowest rank, medians", ""]
        lines.append("".join(f"{head:>15}" for head in ("size", *names, "the fastest")))
        for size in sizes:
            row = {name: found.seconds[name].get(size) for name in names}
            cells = ["-" if each is None else f"{each * 1e6:.2f}" for each in row.values()]
            fastest = min((each, name) for name, each in row.items() if each is not None)[1]
            cells = [
                terminal.painted(f"{cell:>15}", "green", colours and name == fastest)
                for cell, name in zip(cells, names, strict=True)
            ]
            lines.append(f"{terminal.size(size):>15}{''.join(cells)}{fastest:>15}")
        lines.append("")
    lines += [f"before: {_in_words(found.before)}", f"now:    {_in_words(found.after)}", ""]
    if found.file is not None:
        lines.append(f"Remembered in {found.file}; --forget deletes it.")
    else:
        lines.append(
            "Not remembered." if found.seconds else "Nothing is remembered of it any more."
        )
    return "\n".join(lines)


def _in_words(crossovers: Limits) -> str:
    *small, (last, _) = crossovers
    parts = [f"{name} up to {terminal.size(limit or 0)}" for name, limit in small]
    return ", ".join([*parts, f"{last} above" if parts else f"{last} for all sizes"])
