"""The benchmarks run, check themselves and write what they promise."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripts import marked

import fastreduce
from benchmarks import __main__ as suite
from benchmarks import case, compare, network, results
from fastreduce import timing

ROOT = Path(__file__).resolve().parents[1]


# What of the suite is run as such; the rest of its methods run in test_pytest_benchmark.
TIMED = ["all_reduce", "hook"]


def run(*arguments: object, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_suite(tmp_path):
    """All of it, over CPUs; what is measured of GPUs needs them."""
    text = run("benchmarks", "--quick", "--cpu", "--out", tmp_path, *TIMED)
    book = json.loads((tmp_path / "results.json").read_text())
    assert book["machine"]["cores"] == len(os.sched_getaffinity(0))
    records = {results.case_name(record): record for record in book["results"]}
    assert len(records) == len(book["results"])
    assert {record["benchmark"] for record in book["results"]} == set(TIMED)
    for record in book["results"]:
        assert record["methods"][record["base"]]["ratio"]["median"] == 1
        for name, figures in record["methods"].items():
            assert 0 < figures["value"]["low"] <= figures["value"]["median"]
            assert figures["value"]["median"] <= figures["value"]["high"]
            assert figures["rounds"] >= 5
            checked = record["benchmark"] == "all_reduce" and name != "bound"
            assert figures.get("wrong") == (0 if checked else None)
        assert results.text(record) in text
    expected = {"fastreduce", "fastreduce staged", "two_shot", "ring", "gloo", "bound"}
    sizes = [record for record in book["results"] if record["benchmark"] == "all_reduce"]
    assert {r["bytes"] for r in sizes} == {1 << 10, 1 << 16, 1 << 20, 25 << 20}
    for record in sizes:
        small = {"one_shot"} if record["bytes"] <= 256 << 10 else set()
        assert set(record["methods"]) - {"mpi"} == expected | small
    page = (tmp_path / "index.html").read_text("utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)  # nothing from elsewhere
    for name in TIMED:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert f'<h2 id="{name}">' in page
    assert page.count("data:image/png;base64,") == len(TIMED)


def test_suite_under_torchrun(tmp_path):
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    text = run(*command, "-m", "benchmarks", "--quick", "--cpu", "--out", tmp_path, "collectives")
    book = json.loads((tmp_path / "results.json").read_text())
    kinds = {record["case"]["collective"] for record in book["results"]}
    assert kinds == {"reduce_scatter", "all_gather", "broadcast"}
    assert text.count("written: ") == 1


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, 1)]
)
def test_ended_suite_leaves_nothing(tmp_path, sent, status):
    """Neither ranks nor what they have in memory; SIGKILL is for one of the ranks."""
    mark = f"{tmp_path};"
    options = ["--quick", "--cpu", "--mpiexec", "", "--out", str(tmp_path), "ddp_step"]
    # What a shell starts in the background ignores it, and so would all below.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *options],
        cwd=ROOT,
        env=os.environ | {"FASTREDUCE_TEST_MARK": mark},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as suite:
        try:
            deadline = time.monotonic() + 100
            while len(started := set(marked(mark)) - {suite.pid}) < 2:
                assert time.monotonic() < deadline and suite.poll() is None
                time.sleep(0.1)
            words = Path(f"/proc/{min(started)}/cmdline").read_text().split("\0")
            folder = Path(words[words.index("--worker") + 1])
            assert folder.is_dir()
            os.kill(min(started) if sent == signal.SIGKILL else suite.pid, sent)
            _, errors = suite.communicate(timeout=60)
        finally:
            signal.signal(signal.SIGINT, before)
            suite.kill()
        assert suite.returncode == status and "Traceback" not in errors, errors
    assert not marked(mark) and not folder.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nonsense"], "expected names out of all_reduce, "),
        (["--ranks", "0"], "--ranks: expected 1 or more, got 0"),
        (["--threshold", "0.5"], "--threshold: expected 1 or more, got 0.5"),
        (["--results", "x.json"], "--results: needs --compare"),
        (["--compare", f"{ROOT}/README.md"], "no results of this suite"),
        (["--out", f"{ROOT}/README.md"], "--out: nothing can be written there: "),
    ],
)
def test_wrong_options(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        suite.main(words)
    assert said in (capsys.readouterr().err or str(ended.value))


def test_a_run_without_the_base():
    """Ranks that share no memory have no bound: the first method is what others are compared to."""
    nothing = SimpleNamespace(**dict.fromkeys(("barrier", "broadcast", "all_reduce"), lambda *_: 0))
    alone = SimpleNamespace(
        world_size=1, device=torch.device("cpu"), round_trip=lambda: None, communicator=nothing
    )
    makers = {
        "ours": lambda _: timing.Method(lambda: 2.0),
        "bound": lambda _: None,
        "theirs": lambda _: timing.Method(lambda: 3.0),
    }
    found = case.measure(case.Case("all_reduce", {}, "bound", makers, seconds=0.0), alone)
    assert (found["base"], found["missing"]) == ("ours", ["bound"])
    assert found["methods"]["theirs"]["ratio"]["median"] == 1.5
    assert "x ours" in results.text(found)


# -- comparing ------------------------------------------------------------------------------------


def record(median: float, spread: float = 0.01, unit: str = "s") -> dict[str, Any]:
    """Of a method that takes ``median`` of its base."""

    def figures(value: float) -> dict[str, Any]:
        three = {"low": value * (1 - spread), "median": value, "high": value * (1 + spread)}
        return {"value": three, "ratio": three, "rounds": 5}

    return {
        "benchmark": "all_reduce",
        "case": {"size": "1 KiB", "ranks": 2},
        "base": "bound",
        "unit": unit,
        "methods": {"bound": figures(1.0), "fastreduce": figures(median)},
    }


def compared(before: dict[str, Any], now: dict[str, Any], **options: Any) -> compare.Comparison:
    old = {"format": results.FORMAT, "date": "then", "machine": {}, "results": [before]}
    return compare.compare(old, [now], **options)


def test_compare_finds_what_moved():
    assert compared(record(2.0), record(2.1)).same == 1  # less than a tenth
    assert compared(record(2.0, 0.3), record(2.5, 0.3)).same == 1  # more, but within the noise
    [change] = compared(record(2.0), record(3.0)).slower
    assert change.factor == 1.5 and "slower" in str(change) and "2 -> 3 of bound" in str(change)
    found = compared(record(3.0), record(2.0))
    assert not found.slower and "faster" in str(found.changes[0])
    assert not compared(record(2.0), record(3.0), threshold=2).changes


def test_compare_what_was_nothing():
    [change] = compared(record(0.0), record(3.0)).slower
    assert "0 -> 3 of bound" in str(change)
    [change] = compared(record(3.0), record(0.0)).changes
    assert str(change).startswith("faster")
    assert compared(record(0.0), record(0.0)).same == 1


def test_bandwidth_of_the_bus():
    """As nccl-tests counts it: bytes in the time, times what a rank's links carry of them."""
    for collective, factor in (
        *(("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 0.75), ("broadcast", 1)),
    ):
        kept = record(2.0) | {"benchmark": "collectives", "bytes": 10**9}
        kept["case"] = {"collective": collective, "ranks": 4}
        [row, _] = results.rows(kept)
        assert row["algbw GB/s"] == "1.000" and float(row["busbw GB/s"]) == factor
    plain = record(2.0) | {"benchmark": "norms", "bytes": 10**9}
    assert all("busbw GB/s" not in row for row in results.rows(plain))


def test_compare_instructions_by_their_number():
    """The base's, too."""
    before, now = record(2.0, 0, "instructions"), record(2.0, 0, "instructions")
    now["methods"]["bound"]["value"] = {"low": 1.5, "median": 1.5, "high": 1.5}
    [change] = compared(before, now).slower
    assert change.method == "bound" and "instructions" in str(change)


def test_compare_names_what_only_one_has():
    before, now = record(2.0), record(2.0)
    now["case"]["size"] = "2 KiB"
    found = compared(before, now)
    assert found.added == ["all_reduce: size 2 KiB, ranks 2"]
    assert found.missing == ["all_reduce: size 1 KiB, ranks 2"]
    now = record(2.0)
    now["methods"]["ours"] = now["methods"].pop("fastreduce")
    found = compared(before, now)
    assert found.added == ["all_reduce: size 1 KiB, ranks 2: ours"]
    assert found.missing == ["all_reduce: size 1 KiB, ranks 2: fastreduce"]
    said = compare.text(found, {"date": "then", "machine": {}}, {})
    assert "only now: " in said and "only then: " in said
    now["benchmark"] = "norms"  # all_reduce has not been run
    assert not compared(before, now).missing
    with pytest.raises(ValueError, match="expected results of format"):
        compare.compare({"format": 0}, [])


def test_instructions_are_those_of_before(tmp_path):
    """A busy machine leaves them as they are; another compiler or another Python does not."""
    kept = ROOT / "benchmarks" / "results" / "instructions.json"
    known, here = json.loads(kept.read_text())["machine"], results.machine()
    for key in ("compiler", "python", "torch"):
        if known[key] != here[key]:
            pytest.skip(f"counted with {key} {known[key]}, not {here[key]}")
    if here["instruction_set"] == "baseline":
        pytest.skip("counted with AVX2")
    options = ["--quick", "--cpu", "--mpiexec", "", "--out", tmp_path, "--compare", kept]
    text = run("benchmarks", "instructions", *options, FASTREDUCE_ISA="avx2")
    if not json.loads((tmp_path / "results.json").read_text())["results"]:
        pytest.skip("this machine lets no process trace another")
    assert "16 figures have not moved" in text


def needs_hosts() -> None:
    """Not asked before a test runs: it takes a process, and a namespace."""
    if reason := network.problem():
        pytest.skip(f"no hosts on this machine: {reason}")


def test_hosts(tmp_path):
    needs_hosts()
    figures = tmp_path / "figures.json"
    ours = {"fastreduce": 4, "fastreduce-bf16": 2, "fastreduce-int8": 1 + 4 / 128}
    ours |= {"fastreduce-int4": 1 / 2 + 4 / 128}
    peers = {"gloo": 4, "torch-bf16": 2, "torch-fp16": 2}
    variants = [*ours, "torch-bf16", "torch-fp16", "torch-powersgd-1"]
    options = ["--rates", "100mbit", "--model", "digits", "--steps", 2, "--json", figures]
    text = run("benchmarks.hosts", "--variants", *variants, *options)
    assert "of gloo" in text and "payload" in text
    (result,) = json.loads(figures.read_text())["results"]
    assert set(result["seconds"]) == {"no communication", "gloo", *variants}
    assert all(seconds > 0 for seconds in result["seconds"].values())
    # The limit holds, both ways at once, and the bytes are those of the formats.
    assert 0.2 * 100e6 < 8 * result["link_bytes_per_second"] < 100e6
    assert result["seconds"]["gloo"] > 4 * 151_306 * 8 / 100e6 - 0.01  # but for a burst
    for name, nbytes in (peers | ours).items():
        payload = result["payload_bytes_per_element"][name]
        assert result["nominal_bytes_per_element"][name] == nbytes
        assert nbytes <= payload < 1.02 * nbytes
        assert 1.02 * payload < result["wire_bytes_per_element"][name] < 1.15 * payload
    # Ranks with data of their own drift apart only where nothing is averaged.
    assert result["same_bits"] == {name: name != "no communication" for name in result["seconds"]}


def test_hosts_leave_nothing():
    """However the process ends that has made them."""
    needs_hosts()
    lines = [
        "from benchmarks import network",
        "hosts = network.Network(2, '1gbit')",
        "hosts.start(1, ['sleep', 'infinity'])",
        "print(*(process.pid for process in hosts.processes), flush=True)",
        "input()",
    ]
    command = network.as_root([sys.executable, "-c", "\n".join(lines)])
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as made:
        numbers = made.stdout.readline().split()
        held = [Path("/proc", number, "ns", "net") for number in numbers]  # while they live
        assert len(held) == 4 and all(namespace.exists() for namespace in held)
        made.kill()
    deadline = time.monotonic() + 10
    while any(namespace.exists() for namespace in held) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(namespace.exists() for namespace in held)


def test_hosts_where_there_can_be_none():
    command = [sys.executable, "-m", "benchmarks.hosts", "--model", "digits"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.startswith("no hosts on this machine: ") and done.stderr.count("\n") == 1


def test_convergence(tmp_path):
    formats = ["fp32", "fastreduce", "torch_bf16", "torch_powersgd"]
    ours = ["int8", "onebit"] if hasattr(fastreduce, "Wire") else []
    options = ["--ranks", 2, "--seeds", 2, "--steps", 4, "--out", tmp_path / "figures"]
    options += ["--formats", *formats, *ours, "--workloads", "digits", "characters"]
    text = run("benchmarks.convergence", *options)
    book = json.loads((tmp_path / "figures.json").read_text())
    variants = formats + [name + more for name in ours for more in ("", ", no feedback")]
    losses = {(r["settings"], r["variant"], r["seed"]): r["loss"] for r in book["runs"]}
    assert len(losses) == len(book["runs"]) == 2 * len(variants) * 2
    # With torch's PowerSGD each rank decomposes for itself, and not always to the same bits.
    assert {r["variant"] for r in book["runs"] if not r["ranks_agree"]} <= {"torch_powersgd"}
    for (settings, variant, seed), loss in losses.items():
        difference = abs(loss - losses[settings, "fp32", seed])
        assert difference < (1e-4 if variant == "fastreduce" else 0.5)
        assert difference > 0 or variant != "torch_powersgd"
    assert (tmp_path / "figures.md").read_text("utf-8") in text
    for variant in variants:
        assert text.count(f"| {variant} |") == 2
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")
    # What is there already is not repeated.
    assert "seed 1 " in text and "seed 1 " not in run("benchmarks.convergence", *options)


def test_federated(tmp_path):
    options = ["--seeds", 1, "--rounds", 2, "--steps", 5, "--out", tmp_path / "figures"]
    text = run("benchmarks.federated", *options)
    table = (tmp_path / "figures.md").read_text("utf-8")
    assert table in text and table.count("| 100 | ") == table.count("| 0.1 | ") == 4
    reached = dict(re.findall(r"seed 0  (\w+) .*alpha 100.* test accuracy (.*)%", text))
    assert float(reached["FedAvg"]) > 60  # of a guess's 10, with what data parallelism does nothing
    assert (tmp_path / "figures.png").read_bytes().startswith(b"\x89PNG")


def test_pytest_benchmark():
    """Every method that no other test here runs, once."""
    others = " and ".join(f"not {name}" for name in [*TIMED, "collectives", "instructions"])
    options = ["-q", "-p", "no:cacheprovider", "-n", 0, "--benchmark-disable", "-k", others]
    text = run("pytest", "benchmarks", *options)
    assert " passed" in text and " skipped" not in text
