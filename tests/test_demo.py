"""The command line and the demo, as a user runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import on_terminal
from torch.futures import Future
from torch.multiprocessing.spawn import ProcessRaisedException

from fastreduce import demo
from fastreduce.__main__ import main
from fastreduce.ranks import run_ranks

EPOCHS = 4
COMMAND = [sys.executable, "-m", "fastreduce", "demo", "--epochs"]


def left_in(folder: Path) -> list[str]:
    """What is left in a directory for temporary files, apart from torch's own: its cache, and what
    older releases make when they are imported and remove only if the process ends in peace."""

    def is_torchs(path: Path) -> bool:
        if path.name.startswith("tmp"):
            return all("_remote_module" in each.name for each in path.iterdir())
        return path.name.startswith("torchinductor")

    return [path.name for path in folder.iterdir() if not is_torchs(path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def output(folder):
    """What a short run prints."""
    ended = subprocess.run(
        [*COMMAND, str(EPOCHS)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "TMPDIR": str(folder)},
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def row(output: str, way: str) -> list[str]:
    [line] = [li for li in output.splitlines() if li.startswith(way)]
    return line.removeprefix(way).split()


def percent(text: str) -> float:
    assert text.endswith("%")
    return float(text[:-1])


def test_all_ways_show_their_progress_on_a_terminal():
    status, _, shown = on_terminal([*COMMAND, str(EPOCHS)])
    assert status == 0
    for way in (demo.ONE, demo.GLOO, demo.FAST):
        seen = re.findall(rf"{way} *: [^\r]*? (\d)/{EPOCHS} [^\r]*?loss ([\d.]+), test", shown)
        assert [int(epoch) for epoch, _ in seen] == list(range(1, EPOCHS + 1))
        assert float(seen[-1][1]) < float(seen[0][1])


def test_elsewhere_there_is_none(output):
    assert "epoch" not in output and "loss" not in output
    assert output.count("\n") < 20


def test_one_process_is_what_the_others_are_compared_with(output):
    accuracy, difference, communication, seconds = row(output, demo.ONE)
    assert 85 < percent(accuracy) <= 100
    assert (difference, communication) == ("-", "-")
    assert float(seconds) > 0


@pytest.mark.parametrize("way", [demo.GLOO, demo.FAST])
def test_ranks_reach_what_one_process_reaches(output, way):
    accuracy, difference, communication, seconds = row(output, way)
    assert abs(percent(accuracy) - percent(row(output, demo.ONE)[0])) < 1
    assert 0 < float(difference) < 1e-4  # 0 would mean that something was compared with itself
    assert float(communication) > 0
    assert float(seconds) > 0


def test_mean_of_the_parts_is_the_mean_of_the_batch(output):
    found = re.search(r"differ by at most (\S+), (\S+) of the largest gradient", output)
    assert float(found[1]) < 1e-6
    assert float(found[2]) < 1e-5


def test_no_file_is_left(output, folder):
    assert left_in(folder) == []


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("0", "expected a whole number of 1 or more, got '0'"),
        ("5", "expected a divisor of the batch of 96 digits, got 5"),
        ("two", "expected a whole number of 1 or more, got 'two'"),
    ],
)
def test_ranks_that_cannot_share_a_batch(capsys, ranks, message):
    with pytest.raises(SystemExit) as exit:
        main(["demo", "--ranks", ranks])
    assert exit.value.code == 2
    assert f"argument --ranks: {message}" in capsys.readouterr().err


def test_without_scikit_learn(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert main(["demo"]) == 2
    assert "pip install scikit-learn" in capsys.readouterr().err


def test_interrupt_ends_all_processes(tmp_path):
    # A shell's background processes, and what they start, would ignore it.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    shown = ""

    def interrupt(process: subprocess.Popen[str], text: str) -> None:
        nonlocal shown
        if demo.GLOO in text and demo.GLOO not in shown:  # the ranks run
            process.send_signal(signal.SIGINT)
        shown = text

    try:
        # Returns once no process has the terminal any more.
        status, _, errors = on_terminal(
            [*COMMAND, "15"], {"TMPDIR": str(tmp_path)}, watch=interrupt
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert status == 130
    assert errors.endswith("\r\ninterrupted\r\n") and "Traceback" not in errors
    assert left_in(tmp_path) == []


def fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ArithmeticError("as the test wants")
    signal.pause()


def test_failing_rank_ends_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ProcessRaisedException, match="ArithmeticError: as the test wants"):
        run_ranks(fail_on_rank_1, 2)
    assert left_in(tmp_path) == []


def test_clock_counts_overlapping_calls_once(monkeypatch):
    times = iter([1.0, 5.0, 20.0, 22.0])
    monkeypatch.setattr(demo.time, "perf_counter", lambda: next(times))
    clock = demo.Clock()
    for change in (clock.start, clock.start, clock.stop, clock.stop, clock.start, clock.stop):
        change()
    assert clock.seconds == 4.0 + 2.0


def test_timed_hook_ends_with_the_future():
    clock, future = demo.Clock(), Future()
    timed = demo.timed(lambda state, bucket: future, clock)(None, None)
    assert clock.seconds == 0
    future.set_result(torch.ones(1))
    assert timed.wait().item() == 1
    assert clock.seconds > 0


def test_batches_are_whole_and_repeatable():
    settings = demo.Settings(ranks=2, epochs=2, seed=3)
    epochs = demo.global_batches(500, settings)
    assert [len(batches) for batches in epochs] == [500 // demo.BATCH] * 2
    for batches in epochs:
        drawn = torch.cat(batches)
        assert all(len(batch) == demo.BATCH for batch in batches)
        assert len(drawn.unique()) == len(drawn)
    assert not torch.equal(epochs[0][0], epochs[1][0])
    assert torch.equal(demo.global_batches(500, settings)[1][2], epochs[1][2])
