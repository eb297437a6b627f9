"""``fastreduce bench``: all-reduce by size and algorithm, beside the process group's own, between
ranks that it starts or that torchrun has started."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import asdict, astuple, dataclass
from functools import partial

import torch

from fastreduce import _C, bench, policy, terminal, timing
from fastreduce.bench import Op
from fastreduce.communicator import Communicator
from fastreduce.options import EXIT_STATUS, checked, positive, whole
from fastreduce.ranks import collective
from fastreduce.timing import Spread

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SIZES = [policy.KIB, 64 * policy.KIB, policy.MIB, 25 * policy.MIB]
_UNITS = {"": 1, "K": policy.KIB, "M": policy.MIB, "G": 1 << 30}


@dataclass(frozen=True)
class Timed:
    """An all-reduce of some size by some method.

    Attributes:
        seconds: of the slowest rank.
        ratio: to the process group's, round by round.
        wrong: elements of a checked call that are not the exact result, see
            :func:`fastreduce.bench.wrong_elements`.
    """

    nbytes: int
    method: str
    seconds: Spread
    ratio: Spread
    wrong: int


@dataclass(frozen=True)
class Bench:
    """What came of it.

    Attributes:
        machine: as ``tune`` calls it.
        load: of the minute before.
    """

    machine: str
    load: float
    ranks: int
    dtype: str
    op: Op
    group: str
    timed: list[Timed]


def nbytes(text: str) -> int:
    """A size in bytes, such as 4096, 64KiB or 25M; a multiple of 16."""
    found = re.fullmatch(r"([0-9]+) ?([KMG]?)(iB)?", text)
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    if size < 16 or size % 16:
        raise ValueError(f"expected a multiple of 16 bytes, such as 64KiB or 25MiB, got {text!r}")
    return size


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = f"""\
Every buffer is written by its owner before each call, as a gradient is; the slowest rank counts;
methods take turns; times are medians, with their quartiles. Let nothing else run meanwhile.

examples:
  fastreduce bench                          # 2 ranks on the CPU, which it starts
  fastreduce bench --sizes 4KiB 100MiB --dtype bfloat16 --op mean
  fastreduce bench --device cuda            # one rank for each GPU
  torchrun --nproc-per-node 8 -m fastreduce bench --device cuda --json > figures.json

More, beside other libraries, DDP's steps included: python -m benchmarks, in a checkout.

{EXIT_STATUS}"""
    parser.add_argument(
        "--ranks",
        type=whole(1, _C.MAX_RANKS),
        help="processes to start (2; with --device cuda one for each GPU)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(cpu)")
    parser.add_argument(
        "--sizes",
        type=checked(nbytes),
        nargs="+",
        default=_SIZES,
        metavar="SIZE",
        help="of the tensor (1KiB 64KiB 1MiB 25MiB)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(float32)")
    parser.add_argument("--op", choices=("sum", "mean"), default="sum", help="(sum)")
    parser.add_argument(
        "--seconds", type=checked(positive), default=1.0, help="for each size, at least (1)"
    )
    parser.add_argument("--json", action="store_true", help="print bytes and seconds, as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Measures, prints, and returns the exit status: 1 if some method was wrong."""
    measure = partial(
        _measured,
        sizes=options.sizes,
        dtype=options.dtype,
        op=options.op,
        seconds=options.seconds,
    )
    found = collective(measure, options.ranks, options.device)
    if found is None:
        return 0
    print(json.dumps(asdict(found), indent=1) if options.json else text(found))
    return int(any(timed.wrong for timed in found.timed))


def _measured(
    communicator: Communicator,
    place: torch.device,
    *,
    sizes: list[int],
    dtype: str,
    op: Op,
    seconds: float,
) -> Bench:
    group, load = bench.group_name(place), os.getloadavg()[0]
    timed = []
    shown = communicator.rank == 0
    with terminal.progress(len(sizes), "bench", shown=shown) as bar:
        for size in sizes:
            methods = bench.all_reduce_methods(communicator, size, DTYPES[dtype], place, op)
            wrong = {name: method.wrong() for name, method in methods.items() if method.wrong}
            # What comes after another method finds no cache as it would leave it.
            repeats = 8 if size < policy.MIB and place.type == "cpu" else 1
            times = timing.take_turns(
                communicator, methods, seconds=seconds, repeats=repeats, device=place
            )
            timed += [
                Timed(
                    size,
                    name,
                    Spread.of(own),
                    Spread.of(timing.ratios(own, times[group])),
                    wrong[name],
                )
                for name, own in times.items()
            ]
            terminal.step(bar, terminal.size(size))
    machine = communicator._machine(place)
    return Bench(machine, load, communicator.world_size, dtype, op, group, timed)


def text(found: Bench) -> str:
    """As a table; busbw is what links carry: algbw x 2 (N - 1) / N."""
    lines = [
        found.machine,
        *terminal.busy(found.load),
        f"all-reduce, {found.op} of {found.dtype}, {found.ranks} ranks; slowest rank, medians and "
        "quartiles",
        f"wrong: elements of a checked call; of {found.group}: median of the ratios, round by "
        "round; busbw: what links carry",
        "",
        f"{'size':>10}  {'method':<14}{'us':>10}{'quartiles':>22}{'algbw GB/s':>12}"
        f"{'busbw GB/s':>12}{f'of {found.group}':>10}{'wrong':>7}",
    ]
    last = 0
    for each in found.timed:
        low, median, high = (1e6 * value for value in astuple(each.seconds))
        algorithm = each.nbytes / each.seconds.median / 1e9
        size = terminal.size(each.nbytes) if each.nbytes != last else ""
        last = each.nbytes
        lines.append(
            f"{size:>10}  {each.method:<14}{median:>10.2f}{f'{low:.2f} - {high:.2f}':>22}"
            f"{algorithm:>12.3f}{algorithm * 2 * (found.ranks - 1) / found.ranks:>12.3f}"
            f"{each.ratio.median:>10.3f}{each.wrong:>7}"
        )
    return "\n".join(lines)
