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
    run("benchmarks.ddp_step", "--batches", 4, "--steps", 3, "--json", figures)
    (result,) = json.loads(figures.read_text())["results"]
    assert set(result["seconds"]) == {"no communication", "gloo", "fastreduce"}


def test_pytest_benchmark():
    assert " passed" in run("pytest", "-q", "benchmarks", "-p", "no:cacheprovider")
