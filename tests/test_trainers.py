"""Trainers that wrap the model in DDP themselves, and torchrun's restarts: scripts as users write
them, on two ranks, each in processes of its own."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from conftest import same_bits
from scripts import TORCHRUN, run_command
from trainers import problem

from fastreduce import reference

SCRIPTS = Path(__file__).parent / "trainers"
EXAMPLES = Path(__file__).parents[1] / "examples"
RANKS = 2


def torchrun(folder: Path, *arguments: str, **environment: str) -> None:
    options = ["--standalone", "--nproc-per-node", str(RANKS)]
    run_command([*TORCHRUN, *options, *arguments], folder, **environment)


def results(folder: Path, name: str = "{}.pt") -> list:
    return [torch.load(folder / name.format(rank)) for rank in range(RANKS)]


def check_run(all_runs: list[dict], way: str, accumulate: int) -> None:
    runs = [each[way, accumulate] for each in all_runs]
    for run in runs:
        assert run["passes"] == len(run["steps"]) == problem.BATCHES // accumulate
    # Every step's gradients are the reference's mean of what the ranks compute alone.
    for steps in zip(*[run["steps"] for run in runs], strict=True):
        for i, alone in enumerate(zip(*[step["alone"] for step in steps], strict=True)):
            assert not same_bits(*alone)  # the ranks have different samples
            mean = reference.all_reduce(list(alone))
            assert all(same_bits(step["gradients"][i], mean) for step in steps)
    plain = all_runs[0]["none", accumulate]["parameters"]
    initial = problem.make_model().parameters()
    for before, *after, without in zip(
        initial, *[run["parameters"] for run in runs], plain, strict=True
    ):
        assert same_bits(*after)
        assert not torch.allclose(after[0], before)
        torch.testing.assert_close(after[0], without)


def skip_without(package: str) -> None:
    """What pytest.importorskip does, without the seconds of an import that only the ranks need."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"no {package}")


def run_with(package: str, script: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    skip_without(package)
    folder = tmp_path_factory.mktemp(package)
    # The examples' own callback is what is tried.
    paths = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    torchrun(folder, str(SCRIPTS / script), str(folder), PYTHONPATH=os.pathsep.join(paths))
    return results(folder)


@pytest.fixture(scope="module")
def with_lightning(tmp_path_factory) -> list[dict]:
    return run_with("pytorch_lightning", "with_lightning.py", tmp_path_factory)


@pytest.fixture(scope="module")
def with_accelerate(tmp_path_factory) -> list[dict]:
    return run_with("accelerate", "with_accelerate.py", tmp_path_factory)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("way", ["official", "attached"])
def test_lightning(with_lightning, way, accumulate):
    check_run(with_lightning, way, accumulate)


def test_lightning_registers_no_hook_on_the_cpu(with_lightning):
    """If this fails, Lightning has changed, and the README can say so."""
    assert [runs["skipped", 1]["passes"] for runs in with_lightning] == [0, 0]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_accelerate(with_accelerate, accumulate):
    check_run(with_accelerate, "attached", accumulate)
    for runs in with_accelerate:
        assert runs["attached", accumulate]["passes loaded"] == problem.BATCHES // accumulate


def restarts(folder: Path, kill_at: int) -> list[list[torch.Tensor]]:
    folder.mkdir()
    script = [str(SCRIPTS / "restarts.py"), str(folder), str(kill_at)]
    # Else torch keeps its store over a restart, and gloo may find in it the addresses of ranks that
    # are gone: https://github.com/pytorch/pytorch/issues/135712
    torchrun(folder, "--max-restarts", "2", *script, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    return results(folder, "parameters-{}.pt")


def test_torchrun_restarts(tmp_path):
    """Rank 1 dies between the two micro-batches of a step; the ranks that are started anew go on
    from there and end with the same bits."""
    expected = restarts(tmp_path / "whole", -1)
    got = restarts(tmp_path / "killed", 5)
    starts = [path.read_text() for path in sorted((tmp_path / "killed").glob("started-*"))]
    assert starts == ["0", "0", "5", "5"]  # of two incarnations, two ranks each
    assert len(list((tmp_path / "whole").glob("started-*"))) == RANKS
    for i, parameter in enumerate(expected[0]):
        assert all(same_bits(each[i], parameter) for each in (*expected, *got))
