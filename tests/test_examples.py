"""The examples, each run as its docstring begins, and what they print."""

from __future__ import annotations

import ast
import os
import re
import shlex
import socket
import sys
from pathlib import Path

import pytest
from scripts import TORCHRUN, run_command

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
PROGRAMS = {"torchrun": TORCHRUN, "python": [sys.executable]}


@pytest.fixture
def folder(tmp_path):
    """Where examples run: beside them, and nothing else is there afterwards."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    yield tmp_path
    assert os.listdir(tmp_path) == ["examples"]


def run_example(folder: Path, name: str, *options: str) -> str:
    """By the command that its docstring begins with."""
    text = ast.get_docstring(ast.parse((EXAMPLES / name).read_text()))
    program, *words = shlex.split(text.splitlines()[0])
    assert words[-1] == f"examples/{name}"
    return run_command([*PROGRAMS[program], *words, *options], folder)


def run_alone(folder: Path, name: str) -> str:
    """As the only rank, without torchrun."""
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    return run_command([sys.executable, f"examples/{name}"], folder, **environment)


def line_of(pattern: str, output: str) -> re.Match[str]:
    """The only line, but for what other libraries print."""
    [found] = re.finditer(rf"^{pattern}$", output, re.MULTILINE)
    return found


ACCURACY = r"test accuracy (?P<accuracy>\S+)%"


def check_accuracy(found: re.Match[str]) -> None:
    assert 90 < float(found["accuracy"]) <= 100


def test_ddp(folder):
    found = line_of(ACCURACY, run_example(folder, "train_digits.py"))
    assert float(found["accuracy"]) > 95


def test_the_same_bits_on_any_number_of_ranks(folder):
    line = rf"{ACCURACY}, parameters (?P<bits>[0-9a-f]{{16}})"
    two = line_of(line, run_example(folder, "train_digits_any_ranks.py"))
    one = line_of(line, run_alone(folder, "train_digits_any_ranks.py"))
    check_accuracy(two)
    assert one[0] == two[0]


def test_weighted(folder):
    line = rf"{ACCURACY}, parameters at most (?P<apart>\S+) from one process's"
    found = line_of(line, run_example(folder, "train_digits_weighted.py"))
    check_accuracy(found)
    assert 0 < float(found["apart"]) < 1e-5  # 0 would mean that it is compared with itself


def test_parameter_server(folder):
    output = run_example(folder, "train_digits_server.py")
    kept = {}
    for servers in ("sharded", "[0]"):
        line = rf"servers={re.escape(servers)}: {ACCURACY}, bytes of state by rank: \[(.*), (.*)\]"
        found = line_of(line, output)
        check_accuracy(found)
        kept[servers] = [int(found[2]), int(found[3])]
    whole, nothing = kept["[0]"]
    elements = 64 * 256 + 256 + 256 * 10 + 10
    assert (whole, nothing) == (8 * elements + 4 * 4, 0)  # two moments; a step of 4 parameters
    assert all(each == pytest.approx(whole / 2, rel=0.1) for each in kept["sharded"])
    assert line_of("the same bits: (.*)", output)[1] == "True"


def test_lightning(folder):
    line = rf"{ACCURACY}, averaged (?P<steps>\d+) steps by (?P<algorithm>\w+)"
    found = line_of(line, run_example(folder, "train_digits_lightning.py"))
    check_accuracy(found)
    batches = -(-1437 // 96)
    assert int(found["steps"]) == 5 * batches
    assert found["algorithm"] in ("one_shot", "two_shot")


def test_accelerate(folder, tmp_path_factory):
    saved = tmp_path_factory.mktemp("saved")
    line = rf"{ACCURACY}, averaged (?P<averaged>\d+) of (?P<synchronised>\d+) steps"
    output = run_example(folder, "train_digits_accelerate.py", "--save", str(saved))
    found = line_of(line, output)
    check_accuracy(found)
    steps = -(-1437 // 96)  # the last one is of a single batch
    assert int(found["averaged"]) == int(found["synchronised"]) == 5 * steps
    assert (saved / "custom_checkpoint_0.pkl").is_file()  # what Accelerate calls the state's


SRUN = """#!/bin/bash
# A job of two nodes, with a task on each: both are this one.
while [[ $1 == --* ]]; do shift; done
for node in 0 1; do SLURM_NODEID=$node "$@" & tasks+=($!); done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit $status
"""
SCONTROL = """#!/bin/bash
[[ $* == 'show hostnames node[1-2]' ]] && printf '127.0.0.1\\nno-such-host\\n'
"""


def free_job() -> int:
    """The number of a job whose port nobody listens at."""
    for job in range(os.getpid(), os.getpid() + 1000):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", 10000 + job % 20000)) != 0:
                return job
    raise AssertionError("all ports are taken")


def test_slurm_and_arrays(folder, tmp_path_factory):
    """Two torchruns with a rank each, on two nodes, find the same centres as one process."""
    programs = tmp_path_factory.mktemp("programs")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    script = "cluster_digits_cupy.py"
    output = run_command(
        ["bash", "examples/slurm.sbatch", f"examples/{script}", "--clusters", "10"],
        folder,
        PATH=f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        RANKS_PER_NODE="1",
        SLURM_JOB_ID=str(free_job()),
        SLURM_JOB_NODELIST="node[1-2]",
        SLURM_NNODES="2",
        SLURM_CPUS_PER_TASK="1",
    )
    line = r"\w+.*, (\d+) ranks: (\S+)% are of their cluster's usual digit, centres (\w+)"
    nodes = line_of(line, output)
    alone = line_of(line, run_alone(folder, script))
    assert (nodes[1], alone[1]) == ("2", "1")
    assert 70 < float(nodes[2]) < 100
    assert nodes.group(2, 3) == alone.group(2, 3)


def test_the_table_has_every_example():
    table = re.findall(r"^\| \[`\S+`\]\((\S+)\)", (EXAMPLES / "README.md").read_text(), re.M)
    there = {path.name for path in EXAMPLES.iterdir() if path.name != "__pycache__"}
    assert {"README.md", *table} == there
