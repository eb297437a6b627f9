"""Measured crossovers: taking turns, the file that remembers them, and who uses them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import fastreduce
from fastreduce import cuda, policy, rendezvous, timing, tune_command, tuning
from fastreduce.__main__ import main
from fastreduce.policy import KIB


class Event:
    """torch.cuda.Event over a clock of our own, in milliseconds."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = -1.0

    def record(self) -> None:
        self.at = Event.now

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


class Alone:
    """A communicator of eight ranks, of which all others do as this one does."""

    world_size = 8

    def __init__(self) -> None:
        self.meetings = 0

    def barrier(self) -> None:
        self.meetings += 1

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        assert root == 0

    def all_reduce(self, tensor: torch.Tensor, op: str) -> None:
        assert op == "max"


class OnGpu(torch.Tensor):
    """Says that it lies on one."""

    device = torch.device("cuda", 0)


def test_measure_takes_medians_in_turns(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    calls, alone = [], Alone()

    def run(name: str, tensor: torch.Tensor) -> None:
        assert not tensor.any() and alone.meetings == len(calls) + 1
        calls.append((name, tensor.nbytes))
        # Now and then something else runs on the machine.
        outlier = 50.0 if len(calls) % 7 == 0 else 0.0
        base = {"low_latency": 1.0, "one_shot": 2.0, "two_shot": 3.0, "process_group": 4.0}[name]
        Event.now += base + outlier

    topology = policy.GpuTopology("switch")
    buffer = torch.ones(policy.MIB, dtype=torch.uint8).as_subclass(OnGpu)
    sizes, seen = [policy.KIB, policy.MIB], []
    found = tuning.measure(alone, run, buffer, topology, sizes, seen.append)
    assert seen == sizes
    expected = {
        "low_latency": {1024: 1e-3},
        "one_shot": {1024: 2e-3},
        "two_shot": {1024: 3e-3, 1 << 20: 3e-3},
        "process_group": {1024: 4e-3, 1 << 20: 4e-3},
    }
    assert found.keys() == expected.keys()
    assert all(found[name] == pytest.approx(expected[name]) for name in found)
    assert len({name for name, _ in calls[:4]}) == 4  # in turns
    assert len(calls) == (4 + 2) * (tuning.GPU_ROUNDS + tuning.GPU_ROUNDS // 5)


def test_calls_on_the_host_begin_together_with_fresh_numbers(monkeypatch):
    clock, done, alone = iter(range(10_000)), [], Alone()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(clock)))

    def run(name: str, tensor: torch.Tensor) -> None:
        assert alone.meetings == len(done) + 1
        done.append((name, tensor.clone()))
        tensor.mul_(2)

    buffer = torch.empty(2048, dtype=torch.uint8)
    topology = policy.Topology(True, 2, 2)
    found = tuning.measure(alone, run, buffer, topology, [1024, 2048])
    assert found == {name: {1024: 1.0, 2048: 1.0} for name in ("one_shot", "two_shot")}
    assert {name for name, _ in done[:2]} == set(found)
    assert len(done) == 2 * 2 * (tuning.HOST_ROUNDS + tuning.HOST_ROUNDS // 5)
    assert all(torch.equal(numbers, done[0][1]) for _, numbers in done[: len(done) // 2])
    assert done[0][1].unique().numel() > 1


def no_room(*_: object, **__: object) -> None:
    raise OSError("no room")


def test_what_was_measured_is_remembered_by_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.recall("8 x H100") == ()
    limits = (("low_latency", 65536), ("multimem", None))
    tuning.remember("8 x H100", limits)
    tuning.remember("2 x L4", (("two_shot", None),))
    tuning.remember("9 x L4", (("two_shot", None),))
    tuning.remember("9 x L4", ())
    assert "9 x L4" not in tuning.file().read_text()
    assert tuning.recall("8 x H100") == limits
    assert tuning.recall("2 x L4") == (("two_shot", None),)
    assert tuning.recall("4 x H100") == ()
    with monkeypatch.context() as patched, pytest.raises(OSError, match="no room"):
        patched.setattr(tuning.json, "dump", no_room)
        tuning.remember("2 x L4", limits)
    assert tuning.recall("2 x L4") == (("two_shot", None),)
    assert [file.name for file in (tmp_path / "fastreduce").iterdir()] == ["tuned.json"]


def test_a_file_that_is_no_good_is_as_none(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "fastreduce" / "tuned.json"
    file.parent.mkdir()
    for text in (
        "",
        "[]",
        "{",
        '{"8 x H100": null}',
        '{"8 x H100": [["two_shot", true]]}',
        '{"8 x H100": [["warp_drive", 1]]}',
        '{"8 x H100": [[1, 2]]}',
    ):
        file.write_text(text)
        assert tuning.recall("8 x H100") == ()
    tuning.remember("8 x H100", (("two_shot", None),))
    assert tuning.recall("8 x H100") == (("two_shot", None),)


def test_the_processor_is_named(tmp_path):
    (tmp_path / "proc").mkdir()
    place = tmp_path / "proc/cpuinfo"
    place.write_text("processor\t: 0\nmodel name\t: A CPU @ 2 GHz \n\nprocessor\t: 1\n")
    assert tuning.processor(tmp_path) == "A CPU @ 2 GHz"
    place.write_text("processor\t: 0\nBogoMIPS\t: 50\n\nmodel name : no longer the first\n")
    assert tuning.processor(tmp_path) == os.uname().machine


# -- between ranks --------------------------------------------------------------------------------


def use_file_of_own(folder: Path) -> Path:
    """On a rank: what it remembers is not what the others do. Its file."""
    os.environ["XDG_CACHE_HOME"] = str(folder / f"rank {dist.get_rank()}")
    return tuning.file()


def tune(folder: Path) -> tuple[dict, policy.Topology, str, dict | None]:
    """Measures little, for it is not about the times. What is then known."""
    place = use_file_of_own(folder)
    tuning.HOST_SIZES, tuning.HOST_ROUNDS = (KIB, 16 * KIB), 5
    with fastreduce.Communicator(timeout=60) as communicator:
        tensor = torch.arange(KIB) * 0.1 * (communicator.rank + 1)
        before = communicator.topology
        summed = tensor.clone()
        communicator.all_reduce(summed)
        communicator.tune("cpu", remember=False)
        assert communicator.topology.limits and not place.exists()
        with pytest.raises(ValueError, match=r"sizes: expected multiples of 16 bytes, got \[8\]"):
            communicator.tune("cpu", sizes=[8])
        communicator.tune("cpu", sizes=[512 * KIB])
        assert communicator.topology.limits == (("two_shot", None),) and not place.exists()
        # What has been planned is planned anew, and has the same bits.
        assert communicator.algorithm(tensor) == "two_shot"
        again = tensor.clone()
        communicator.all_reduce(again)
        assert torch.equal(again, summed)
        _, _, two_shot = communicator._plans[tensor.dtype, tensor.shape, "mean", "auto"]
        assert two_shot
        seen: list[int] = []
        times = communicator.tune("cpu", progress=seen.append)
        assert seen == [KIB, 16 * KIB]
    with fastreduce.Communicator(timeout=60) as later:
        assert later.topology == communicator.topology != before
    written = json.loads(place.read_text()) if place.exists() else None
    return times, later.topology, tuning.host(before), written


def test_ranks_measure_and_remember(ranks, tmp_path):
    first, second = ranks(2).run(tune, tmp_path)
    times, topology, machine, written = first
    assert second == (times, topology, machine, None)
    assert re.fullmatch(rf"2 ranks on {len(os.sched_getaffinity(0))} cores of .+", machine)
    assert {name: list(each) for name, each in times.items()} == {
        "one_shot": [KIB, 16 * KIB],
        "two_shot": [KIB, 16 * KIB],
    }
    assert topology.limits == policy.limits_of(times)
    assert written == {machine: [list(each) for each in topology.limits]}


def choose(folder: Path, size: int) -> tuple[policy.Topology, str]:
    """With a file of this rank's own, in which only its number decides."""
    use_file_of_own(folder)
    cores = len(os.sched_getaffinity(0))
    machine = tuning.host(policy.Topology(True, cores, dist.get_world_size()))
    limits = (("one_shot", (32 if dist.get_rank() == 0 else 4) * KIB), ("two_shot", None))
    tuning.remember(machine, limits)
    with fastreduce.Communicator(timeout=60) as communicator:
        tensor = torch.full((size // 4,), 1.0 + communicator.rank)
        name = communicator.algorithm(tensor)
        communicator.all_reduce(tensor, "sum")  # ranks that chose differently would not agree
        assert tensor.eq(3).all()
        return communicator.topology, name


def test_rank_0s_file_counts(ranks, tmp_path):
    group = ranks(2)
    first, second = group.run(choose, tmp_path, 16 * KIB)
    assert first == second
    assert first[0].limits == (("one_shot", 32 * KIB), ("two_shot", None))
    assert first[1] == "one_shot"
    assert [name for _, name in group.run(choose, tmp_path, 33 * KIB)] == ["two_shot"] * 2


def refuse(folder: Path) -> None:
    use_file_of_own(folder)
    with fastreduce.Communicator(timeout=60) as communicator:
        if communicator.world_size == 1:
            reason = "tune: expected 2 ranks or more, got 1"
        else:
            reason = "tune: tensors on cpu go through the process group"
        with pytest.raises(RuntimeError, match=reason):
            communicator.tune("cpu")


def refuse_apart(folder: Path) -> None:
    boot = rendezvous._boot_id
    rendezvous._boot_id = lambda: f"host {dist.get_rank()}"
    try:
        refuse(folder)
    finally:
        rendezvous._boot_id = boot


def test_what_cannot_be_tuned(ranks, tmp_path):
    ranks(1).run(refuse, tmp_path)
    ranks(2).run(refuse_apart, tmp_path)


# -- the command ----------------------------------------------------------------------------------

FASTREDUCE = ["-m", "fastreduce", "tune"]


def command(cache: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_command_measures_remembers_and_forgets(tmp_path):
    found = json.loads(command(tmp_path, *FASTREDUCE, "--json"))
    place = tmp_path / "fastreduce" / "tuned.json"
    assert found["file"] == str(place)
    [(machine, limits)] = json.loads(place.read_text()).items()
    assert machine == found["machine"]
    times = {
        name: {int(size): seconds for size, seconds in each.items()}
        for name, each in found["seconds"].items()
    }
    assert list(times["one_shot"]) == list(times["two_shot"]) == list(tuning.HOST_SIZES)
    assert limits == [list(each) for each in policy.limits_of(times)]
    cores = len(os.sched_getaffinity(0))
    for said, known in (("before", ()), ("after", tuple(map(tuple, limits)))):
        topology = policy.Topology(True, cores, 2, known)
        assert found[said] == [list(each) for each in policy.crossovers(2, topology)]

    # Nor does measuring again change anything, where it is to change nothing.
    under = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    again = json.loads(command(tmp_path, *under, *FASTREDUCE, "--dry-run", "--json"))
    assert again["before"] == found["after"] and again["machine"] == machine
    assert json.loads(place.read_text()) == {machine: limits}

    text = command(tmp_path, *FASTREDUCE, "--forget")
    assert json.loads(place.read_text()) == {}
    assert "Nothing is remembered of it any more." in text and "us" not in text.split()


def test_what_the_command_says():
    found = tune_command.Tuned(
        machine="2 ranks on 2 cores of A CPU",
        load=0.1,
        seconds={"one_shot": {1024: 1e-6, 2048: 9e-6}, "two_shot": {1024: 2e-6, 2048: 8e-6}},
        before=(("one_shot", 8192), ("two_shot", None)),
        after=(("two_shot", None),),
        file=None,
    )
    lines = [" ".join(line.split()) for line in tune_command.text(found).splitlines()]
    assert lines[3:6] == [
        "size one_shot two_shot the fastest",
        "1 KiB 1.00 2.00 one_shot",
        "2 KiB 9.00 8.00 two_shot",
    ]
    assert "before: one_shot up to 8 KiB, two_shot above" in lines
    assert "now: two_shot for all sizes" in lines and lines[-1] == "Not remembered."
    coloured = tune_command.text(found, colours=True)
    assert coloured.count("\x1b[1;32m") == 2
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == tune_command.text(found)


def test_what_cannot_be_written_is_said(tmp_path):
    """A file is where the folder should be."""
    (tmp_path / "fastreduce").write_text("")
    done = subprocess.run(
        [sys.executable, *FASTREDUCE, "--forget"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("fastreduce tune: [Errno ") and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("environment", "arguments", "message"),
    [
        ({"WORLD_SIZE": "2"}, ["--ranks", "2"], "--ranks: not under torchrun"),
        ({"WORLD_SIZE": "2"}, [], "RANK: expected a number from 0 on, got ''"),
        ({}, ["--device", "cuda"], "--device: cuda cannot be used: "),
    ],
)
def test_what_the_command_refuses(capsys, monkeypatch, environment, arguments, message):
    monkeypatch.setattr(cuda, "problem", lambda: "there is none")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert main(["tune", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_command_on_gpus_wants_one_for_each_rank(capsys, monkeypatch):
    monkeypatch.setattr(cuda, "problem", str)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert main(["tune", "--device", "cuda", "--ranks", "3"]) == 2
    assert "--ranks: expected 2 to 2, one for each GPU at most, got 3" in capsys.readouterr().err
