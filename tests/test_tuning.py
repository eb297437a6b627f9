"""Measured crossovers: taking turns, and the file that remembers them."""

from __future__ import annotations

import torch

from fastreduce import policy, tuning


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


def test_measure_takes_medians_in_turns(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    calls = []

    def run(name: str, tensor: torch.Tensor) -> None:
        assert not tensor.any()
        calls.append((name, tensor.nbytes))
        # Now and then something else runs on the machine.
        outlier = 50.0 if len(calls) % 7 == 0 else 0.0
        base = {"low_latency": 1.0, "one_shot": 2.0, "two_shot": 3.0, "process_group": 4.0}[name]
        Event.now += base + outlier

    topology = policy.GpuTopology("switch")
    buffer = torch.ones(policy.MIB, dtype=torch.uint8)
    times = tuning.measure(run, buffer, 8, topology, [policy.KIB, policy.MIB])
    assert times == {
        "low_latency": {1024: 1e-3},
        "one_shot": {1024: 2e-3},
        "two_shot": {1024: 3e-3, 1 << 20: 3e-3},
        "process_group": {1024: 4e-3, 1 << 20: 4e-3},
    }
    assert [name for name, _ in calls[:5]] == [*times, "low_latency"]


def test_what_was_measured_is_remembered_by_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.recall("8 x H100") == ()
    limits = (("low_latency", 65536), ("multimem", None))
    tuning.remember("8 x H100", limits)
    tuning.remember("2 x L4", (("two_shot", None),))
    assert tuning.recall("8 x H100") == limits
    assert tuning.recall("2 x L4") == (("two_shot", None),)
    assert tuning.recall("4 x H100") == ()
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
