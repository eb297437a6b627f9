"""The suite's methods for pytest-benchmark: ``pytest benchmarks --benchmark-only``.

Two CPU ranks, one of which is this process; the other answers call for call. A round prepares,
meets the peer at a barrier, and times one run on this rank.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks import catalogue, ranks
from benchmarks.case import Case, Setting
from fastreduce.timing import Method

ROUNDS = 10
CASES = catalogue.cases(list(catalogue.BENCHMARKS), Setting(world_size=2, quick=True))
METHODS = [(number, name) for number, case in enumerate(CASES) for name in case.methods]


def join(rank: int, folder: str) -> ranks.Rank:
    ranks.join_group(rank, 2, Path(folder))
    return ranks.Rank(ranks.CPU, Path(folder))


def answer(pipe: Connection, folder: str) -> None:
    """Does as the measured rank does until it is told to end."""
    rank = join(1, folder)
    while (task := pipe.recv()) is not None:
        number, name, rounds = task
        method = CASES[number].methods[name](rank)
        if method is None:
            continue
        for _ in range(rounds):
            prepare(rank, method)
            method.run()
        if method.wrong:
            method.wrong()
        method.close()
    rank.communicator.close()
    ranks.leave_group()


def prepare(rank: ranks.Rank, method: Method) -> None:
    method.prepare()
    rank.communicator.barrier()


@pytest.fixture(scope="module")
def peer() -> Iterator[tuple[ranks.Rank, Connection]]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        process = context.Process(target=answer, args=(there, folder), daemon=True)
        process.start()
        rank = join(0, folder)
        yield rank, here
        here.send(None)
        rank.communicator.close()
        ranks.leave_group()
        process.join(30)
        assert process.exitcode == 0


def title(value: object) -> str:
    return CASES[value].name if isinstance(value, int) else str(value)


@pytest.mark.parametrize(("number", "name"), METHODS, ids=title)
def test_method(
    benchmark: BenchmarkFixture, peer: tuple[ranks.Rank, Connection], number: int, name: str
) -> None:
    rank, pipe = peer
    case: Case = CASES[number]
    rounds = ROUNDS if benchmark.enabled else 1
    pipe.send((number, name, rounds))
    method = case.methods[name](rank)
    if method is None:
        pytest.skip("this run has no such peer")
    benchmark.group = case.name
    benchmark.pedantic(method.run, setup=lambda: prepare(rank, method), rounds=rounds)
    wrong = method.wrong() if method.wrong else 0
    method.close()
    assert wrong == 0
