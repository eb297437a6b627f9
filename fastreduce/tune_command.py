"""``fastreduce tune``: measures the crossovers of this machine, between ranks that it starts or
that torchrun has started."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from fastreduce import _C, policy, terminal, tuning
from fastreduce.communicator import Communicator
from fastreduce.options import EXIT_STATUS, whole
from fastreduce.policy import Limits
from fastreduce.ranks import collective


@dataclass(frozen=True)
class Tuned:
    """What came of it.

    Attributes:
        machine: what it holds for.
        load: of the minute before.
        seconds: algorithm -> bytes -> of a call; empty where nothing was measured.
        before, after: :func:`fastreduce.policy.crossovers`.
        file: where it is remembered, None where it is not.
    """

    machine: str
    load: float
    seconds: tuning.Times
    before: Limits
    after: Limits
    file: str | None


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = f"""\
Measures all-reduces of float32 between ranks of one host, in shared memory or between their GPUs.
Every later communicator of as many ranks on this kind of machine then chooses by it; on the CPU
results stay the same. Let nothing else run meanwhile.

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
    tune = partial(_tuned, forget=options.forget, remember=not options.dry_run)
    found = collective(tune, options.ranks, options.device)
    if found is not None:
        colours = terminal.colours(sys.stdout)
        print(json.dumps(asdict(found), indent=1) if options.json else text(found, colours))
    return 0


def _tuned(
    communicator: Communicator, place: torch.device, *, forget: bool, remember: bool
) -> Tuned:
    ranks, leads = communicator.world_size, communicator.rank == 0
    load = os.getloadavg()[0]
    before = communicator._topology_on(place)
    machine = communicator._machine(place)
    times: tuning.Times = {}
    if forget:
        after = replace(before, limits=())
        if leads:
            tuning.remember(machine, ())
    else:
        sizes = tuning.HOST_SIZES if place.type == "cpu" else tuning.GPU_SIZES
        with terminal.progress(len(sizes), "tune", shown=leads) as bar:
            times = communicator.tune(
                place,
                remember=remember,
                progress=lambda size: terminal.step(bar, terminal.size(size)),
            )
        after = communicator._topology_on(place)
    return Tuned(
        machine=machine,
        load=load,
        seconds=times,
        before=policy.crossovers(ranks, before),
        after=policy.crossovers(ranks, after),
        file=str(tuning.file()) if tuning.recall(machine) == after.limits != () else None,
    )


def text(found: Tuned, colours: bool = False) -> str:
    """As a table of microseconds, and what it changes."""
    lines = [found.machine]
    if found.seconds:
        lines += terminal.busy(found.load)
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
