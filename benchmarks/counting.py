"""How many instructions a call takes on rank 0."""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from benchmarks.ranks import Rank, build
from fastreduce.timing import Method


class UntraceableError(RuntimeError):
    """This machine lets no process trace another."""


@cache
def _counter() -> ctypes.CDLL:
    loaded = build("instructions.cpp")
    loaded.count_instructions.restype = ctypes.c_long
    return loaded


def count(rank: Rank, method: Method, repeats: int) -> list[float]:
    """Collective: instructions of a run on rank 0, less those of an empty one, so many times. The
    other ranks, which nobody slows down, always come first: rank 0 never waits in a loop.

    Raises:
        UntraceableError: on all ranks.
    """
    counter = _counter()
    callback = ctypes.CFUNCTYPE(None)
    found = []
    method.prepare()
    rank.communicator.barrier()
    method.run()  # the first one is another: what it finds is kept
    for _ in range(repeats):
        method.prepare()
        rank.communicator.barrier()
        told = torch.zeros(2, dtype=torch.float64)
        if rank.rank == 0:
            told[0] = counter.count_instructions(callback(lambda: None))
            told[1] = counter.count_instructions(callback(lambda: method.run() and None))
        else:
            method.run()
        rank.communicator.broadcast(told, 0)
        if told[0] < 0:
            raise UntraceableError("this machine lets no process trace another")
        found.append(float(told[1] - told[0]))
    return found
