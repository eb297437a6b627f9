"""The benchmarks run, check themselves and write what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import fastreduce
from benchmarks import network

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_all_reduce(tmp_path):
    figures, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    options = ["--sizes", 1024, 1 << 20, "--seconds", 0.05, "--ranks", 2, 4]
    text = run("benchmarks.all_reduce", *options, "--json", figures, "--plot", picture)
    assert "algbw" in text and "busbw" in text and "wrong" in text
    results = json.loads(figures.read_text())["results"]
    cases = {(r["ranks"], r["dtype"], r["op"], r["bytes"]) for r in results}
    assert len(cases) == len(results) == 2 * 2 * 2 * 2
    for result in results:
        methods = {"fastreduce", "fastreduce staged", "gloo", "bound"}
        assert methods <= set(result["seconds"])
        assert all(wrong in (0, None) for wrong in result["wrong"].values())
        assert all(seconds > 0 for seconds in result["seconds"].values())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_all_reduce_under_torchrun(tmp_path):
    """Over CPUs; what is measured of GPUs needs them."""
    figures, picture = tmp_path / "figures.json", tmp_path / "figures.png"
    command = ["torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    command += ["-m", "benchmarks.all_reduce", "--device", "cpu", "--sizes", 1024, 1 << 20]
    text = run(*command, "--json", figures, "--plot", picture)
    assert "algbw" in text and "busbw" in text and "wrong" in text
    results = json.loads(figures.read_text())["results"]
    assert {(r["dtype"], r["bytes"]) for r in results} == {
        (dtype, size) for dtype in ("float32", "bfloat16") for size in (1024, 1 << 20)
    }
    for result in results:
        assert {"two_shot", "ring", "fastreduce", "gloo"} <= set(result["seconds"])
        assert all(wrong == 0 for wrong in result["wrong"].values())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_ddp_step(tmp_path):
    figures = tmp_path / "figures.json"
    models = ["digits", "resnet", "tiny", "accumulate"]
    options = ["--batches", 2, "--micro-batches", 2, "--steps", 2, "--json", figures]
    text = run("benchmarks.ddp_step", "--models", *models, *options)
    assert "of gloo's" in text and "of bound's" in text and "hook alone" in text
    results = {result["model"]: result for result in json.loads(figures.read_text())["results"]}
    assert list(results) == models
    base, ours = "no communication", "fastreduce"
    for model in ["digits", "resnet"]:
        assert set(results[model]["seconds"]) == {base, "gloo", ours, f"{ours}, recorded", "bound"}
        assert set(results[model]["added_seconds"]) == {"gloo", ours}
    # What the bound moves: all gradients, in float32.
    assert sum(results["digits"]["bucket_bytes"]) == 4 * 151_306
    assert sum(results["resnet"]["bucket_bytes"]) == 4 * 11_173_962
    assert set(results["tiny"]["hook_seconds"]) == {base, "torch's hook", ours}
    assert set(results["accumulate"]["added_seconds"]) == {ours, "fastreduce's shards"}
    assert results["accumulate"]["of_plain"]["fastreduce's shards"] > 0
    for result in results.values():
        assert all(seconds > 0 for seconds in result["seconds"].values())
        assert all(seconds > 0 for seconds in result["hook_seconds"].values())


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


def test_pytest_benchmark():
    assert " passed" in run("pytest", "-q", "benchmarks", "-p", "no:cacheprovider")
