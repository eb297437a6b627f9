"""``fastreduce bench``, and how times are taken."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import fastreduce
from fastreduce import bench, bench_command, timing
from fastreduce.__main__ import main
from fastreduce.timing import Method, Spread

BENCH = ["-m", "fastreduce", "bench", "--seconds", "0.05"]


def test_spread():
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(2.0, 3.0, 4.0)


def test_ratios_are_those_of_a_round():
    assert timing.ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
    with pytest.raises(ValueError):
        timing.ratios([1.0], [1.0, 2.0])


def turns(_: object) -> tuple[dict[str, list[float]], list[str]]:
    """Of methods that tell their own times, and in which order they ran."""
    order = []
    with fastreduce.Communicator() as communicator:

        def method(name: str, seconds: float) -> Method:
            def run() -> float:
                order.append(name)
                return seconds

            return Method(run, lambda: order.append(f"prepare {name}"), calls=2)

        mine = 2.0 + communicator.rank
        methods = {"a": method("a", mine), "b": method("b", 10 - mine)}
        times = timing.take_turns(communicator, methods, rounds=6, repeats=2, warm_up=1)
    return times, order


def test_methods_take_turns_and_the_slowest_rank_counts(pool):
    (times, order), (other, same_order) = pool(2).run(turns)
    assert order == same_order and times == other
    assert times == {"a": [1.5] * 12, "b": [4.0] * 12}  # of 2 calls
    # A round: each twice in a row, prepared before; the order of the two is not always one.
    rounds = [tuple(order[at : at + 8]) for at in range(0, len(order), 8)]
    a, b = ("prepare a", "a") * 2, ("prepare b", "b") * 2
    assert len(rounds) == 7 and set(rounds) == {a + b, b + a}


def counted(_: object, name: str) -> int:
    """Wrong elements of an all-reduce that leaves out the last one."""
    with fastreduce.Communicator() as communicator:

        def call(tensor: torch.Tensor) -> None:
            communicator.all_reduce(tensor if name == "right" else tensor[:-1], "sum")

        return bench.wrong_elements(communicator, call, torch.empty(100), "sum")


def test_wrong_elements_are_counted_over_all_ranks(pool):
    assert pool(2).run(counted, "right") == [0, 0]
    assert pool(2).run(counted, "last one left out") == [2, 2]


class Alone:
    """A communicator of one rank of many, which sums by itself."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        pass


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [2, 7, 41, 64])
def test_right_elements_are_no_wrong_ones(ranks, dtype):
    """However sums are accumulated and means rounded; and what lacks a rank, or is none, is."""
    parts = []

    def wrong(rank: int, call: bench.Call, op: bench.Op = "sum") -> int:
        buffer = torch.empty(100, dtype=dtype)
        return bench.wrong_elements(Alone(rank, ranks), call, buffer, op)

    for rank in range(ranks):
        wrong(rank, lambda tensor: parts.append(tensor.clone()))
    total = torch.zeros(100, dtype=dtype)
    for part in parts:
        total += part  # rounded each time, as gloo does
    for mean in ((total.float() * (1 / ranks)).to(dtype), total / ranks):
        assert wrong(0, lambda tensor, mean=mean: tensor.copy_(mean), "mean") == 0
    assert wrong(0, lambda tensor: tensor.copy_(total)) == 0
    for part in parts:
        assert wrong(0, lambda tensor, part=part: tensor.copy_(total - part)) >= 80
    assert wrong(0, lambda tensor: tensor.fill_(torch.nan)) == 100


def test_command():
    done = subprocess.run(
        [sys.executable, *BENCH, "--sizes", "1KiB", "512K", "--op", "mean", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    found = json.loads(done.stdout)
    assert (found["ranks"], found["dtype"], found["op"]) == (2, "float32", "mean")
    cases = [(timed["nbytes"], timed["method"]) for timed in found["timed"]]
    both = ["two_shot", "ring", "fastreduce", "gloo"]
    small = [(1024, name) for name in ["one_shot", *both]]
    assert cases == small + [(512 << 10, name) for name in both]
    for timed in found["timed"]:
        assert timed["wrong"] == 0
        assert 0 < timed["seconds"]["low"] <= timed["seconds"]["median"]
        assert timed["method"] != "gloo" or timed["ratio"]["median"] == 1


def test_wrong_results_are_told(monkeypatch, capsys):
    spread = Spread(1e-6, 2e-6, 3e-6)
    timed = bench_command.Timed(4096, "two_shot", spread, Spread(0.5, 0.5, 0.5), wrong=7)
    found = bench_command.Bench("here", 7.5, 2, "float32", "sum", "gloo", [timed])
    monkeypatch.setattr(bench_command, "collective", lambda *_: found)
    assert main(["bench"]) == 1
    out = capsys.readouterr().out
    assert "The machine was busy (load 7.5)" in out
    line = out.splitlines()[-1]
    assert line.split()[-1] == "7" and "1.00 - 3.00" in line and "4 KiB" in line


@pytest.mark.parametrize("size", ["3", "0", "1.5KiB", "-16", "KiB", "17KB"])
def test_sizes_that_are_none(size, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", f"--sizes={size}"])
    assert ended.value.code == 2
    assert f"such as 64KiB or 25MiB, got '{size}'" in capsys.readouterr().err


def test_sizes():
    assert [bench_command.nbytes(text) for text in ("16", "64KiB", "25M", "1 GiB")] == [
        16,
        64 << 10,
        25 << 20,
        1 << 30,
    ]
