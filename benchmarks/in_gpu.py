"""An all-reduce of several ranks within one GPU (see in_process.py), all bytes counted, beside a
copy of as many bytes. What one GPU cannot show: the order of accesses over NVLink, multicast, the
links' bandwidth."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.case import Case, Setting
from benchmarks.collectives import KIB, MIB
from benchmarks.ranks import Rank
from fastreduce import terminal
from fastreduce.timing import Method

COPY = "copy"


def cases(setting: Setting) -> list[Case]:
    """All-reduce of several ranks within one GPU, beside a copy of as many bytes."""
    if setting.device == "cpu" or setting.world_size > 1:
        return []
    found = []
    for ranks in (2, 4, 8):
        for nbytes in (64 * KIB, 25 * MIB):
            names = (
                ["two_shot", "ring"] if nbytes >= MIB else ["low_latency", "one_shot", "two_shot"]
            )
            found.append(
                Case(
                    "in_gpu",
                    {"ranks in it": ranks, "size": terminal.size(nbytes)},
                    base=COPY,
                    methods={COPY: partial(_copy, ranks, nbytes)}
                    | {name: partial(_all_reduce, name, ranks, nbytes) for name in names},
                    nbytes=nbytes,
                    rounds=25,
                    seconds=0.0,
                )
            )
    return found


def _copy(ranks: int, nbytes: int, rank: Rank) -> Method:
    half = [torch.empty(ranks * nbytes, dtype=torch.uint8, device=rank.device) for _ in range(4)]
    turn = iter(range(1 << 62))

    def run() -> None:
        which = 2 * (next(turn) % 2)
        half[which].copy_(half[which + 1])

    return Method(run)


def _all_reduce(algorithm: str, ranks: int, nbytes: int, rank: Rank) -> Method:
    """Every rank's buffer is read once and written once: 2 N S bytes."""
    from benchmarks.in_process import Group  # which needs a build with nvcc

    group: Any = Group(ranks)
    count = nbytes // 4
    # Two sets of buffers in the segments, in turns.
    tensors = [
        [group.place(each, torch.randn(count, device=rank.device), at) for each in range(ranks)]
        for at in (0, -(-nbytes // 4096) * 4096)
    ]
    here = torch.cuda.current_stream()
    turn = iter(range(1 << 62))

    def run() -> None:
        which = tensors[next(turn) % 2]
        for each, stream in enumerate(group.streams):
            stream.wait_stream(here)
            tensor = which[each]
            group.launch(each, "all_reduce", tensor, tensor, count, algorithm=algorithm, op="mean")
        for stream in group.streams:
            here.wait_stream(stream)

    return Method(run, close=group.close)
