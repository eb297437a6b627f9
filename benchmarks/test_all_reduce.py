"""The same calls for pytest-benchmark: ``pytest benchmarks --benchmark-enable``.

Two ranks, one of which is this process; the other answers call for call. A round writes the
buffer afresh, meets the peer at a barrier, and times one all-reduce on this rank.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

import fastreduce
from benchmarks.all_reduce import DTYPES, QUICK, human, join_group

ROUNDS = 30


def answer(pipe: Connection, folder: str) -> None:
    """Makes the same calls as the measured rank until it is told to end."""
    join_group(1, 2, Path(folder))
    communicator = fastreduce.Communicator(timeout=60)
    while (task := pipe.recv()) is not None:
        rounds, count, dtype = task
        buffer, fresh = communicator.empty(count, dtype=dtype), torch.ones(count, dtype=dtype)
        for _ in range(rounds):
            buffer.copy_(fresh)
            communicator.barrier()
            communicator.all_reduce(buffer)
    communicator.close()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def peer() -> Iterator[tuple[fastreduce.Communicator, Connection]]:
    context = get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=answer, args=(there, folder), daemon=True)
        process.start()
        join_group(0, 2, Path(folder))
        communicator = fastreduce.Communicator(timeout=60)
        yield communicator, here
        here.send(None)
        communicator.close()
        dist.destroy_process_group()
        process.join(30)
        assert process.exitcode == 0


@pytest.mark.parametrize("nbytes", QUICK, ids=human)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce(
    benchmark: BenchmarkFixture,
    peer: tuple[fastreduce.Communicator, Connection],
    dtype: str,
    nbytes: int,
) -> None:
    communicator, pipe = peer
    count = nbytes // DTYPES[dtype].itemsize
    buffer = communicator.empty(count, dtype=DTYPES[dtype])
    fresh = torch.full_like(buffer, 3)
    rounds = ROUNDS if benchmark.enabled else 1
    pipe.send((rounds, count, DTYPES[dtype]))

    def setup() -> None:
        buffer.copy_(fresh)
        communicator.barrier()

    benchmark.pedantic(lambda: communicator.all_reduce(buffer), setup=setup, rounds=rounds)
    assert bool((buffer == 2).all())
