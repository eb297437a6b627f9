"""The benchmarks run, check themselves and write what they promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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


def test_pytest_benchmark():
    assert " passed" in run("pytest", "-q", "benchmarks", "-p", "no:cacheprovider")
