"""What all commands have in common: help, errors, progress, colours, imports."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import on_terminal

from fastreduce import options, terminal
from fastreduce.__main__ import _COMMANDS, _parser, main

FASTREDUCE = [sys.executable, "-m", "fastreduce"]
PLAN = ["plan", "--model", "test_plan:blocks", "--input", "16x32", "--batch", "8"]


@pytest.fixture(autouse=True)
def where_test_plan_is(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(Path(__file__).parent)]))


def test_a_command_is_imported_when_it_is_asked_for():
    code = (
        "import sys, fastreduce.__main__ as m; m._parser().format_help(); "
        "print([n for n, _ in m._COMMANDS.values() if f'fastreduce.{n}' in sys.modules], "
        "[n for n in ('matplotlib', 'fastreduce.forecast') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[] []"


@pytest.mark.parametrize("command", _COMMANDS)
def test_help(capsys, command):
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    text = capsys.readouterr().out
    assert exit.value.code == 0
    assert re.search(rf"^examples:\n  fastreduce {command}\b", text, re.M)
    assert re.search(r"^exit status: 0 .*, 2 wrong arguments,\s130 interrupted$", text, re.M)
    assert " ".join(_COMMANDS[command][1].split()[1:]) in " ".join(text.split())
    # Each example is one that can be parsed.
    [examples] = re.findall(r"^examples:\n(.*?)\n\n", text, re.S | re.M)
    for line in examples.replace("\\\n", " ").splitlines():
        words = line.partition("#")[0].partition(">")[0].split()
        words = words[words.index("fastreduce") + 1 :]
        assert _parser().parse_args(words).command == command


def test_help_of_all_names_each(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {command} +\w", text, re.M) for command in _COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["tuna"], "invalid choice: 'tuna' (choose from"),
        (["tune", "--rnks", "3"], "unrecognized arguments: --rnks 3 (did you mean --ranks?)"),
        (["plan", "--params", "1", "--betch=3"], "--betch=3 (did you mean --batch?)"),
        (["demo", "3"], "unrecognized arguments: 3\nsee fastreduce demo --help"),
        (["tune", "--ranks", "1"], "--ranks: expected a whole number from 2 to 64, got '1'"),
        (["tune", "--forget", "--dry-run"], "not allowed with argument --forget"),
    ],
)
def test_wrong_arguments(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("2", 2), ("2e1", 20), ("12.0", 12), ("1", None), ("2.5", None), ("1e999", None)),
        *(("1.2.3", None), ("-4", None), ("", None), ("nan", None), ("two", None)),
    ],
)
def test_whole_numbers(text, value):
    if value is not None:
        assert options.whole(2)(text) == value
    else:
        with pytest.raises(Exception, match=f"a whole number of 2 or more, got '{text}'"):
            options.whole(2)(text)


def test_who_reads_no_further_is_no_error():
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [*FASTREDUCE, "plan", "--params", "1000"],
        stdout=writes,
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


# -- progress -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        (PLAN, ["1/5 .*building the model", "3/5 .*a batch of 1", "5/5 .*the time of a step"]),
        (["plan", "--params", "1000"], ["1/2 .*the optimizer's state", "2/2"]),
        (["tune", "--dry-run"], ["1/9 .*1 KiB", "9/9 .*256 KiB"]),
        (["doctor"], ["0/2", "2/2"]),
    ],
)
def test_progress_is_for_terminals(arguments, steps):
    status, printed, shown = on_terminal([*FASTREDUCE, *arguments])
    assert printed and (status == 0 or arguments == ["doctor"])
    assert re.search(rf"\r{arguments[0]}: ", shown)
    for step in steps:
        assert re.search(step, shown), (step, shown)
    assert shown.rstrip(" \r") == shown.rstrip(" \r\n")  # the bar is gone, and no line is left
    done = subprocess.run(
        [*FASTREDUCE, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr == "" and "\r" not in done.stdout and done.stdout


# -- colours --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert terminal.colours(Terminal()) and not terminal.colours(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not terminal.colours(Terminal())
    monkeypatch.setenv("NO_COLOR", "")  # as good as not set: no-color.org
    assert terminal.colours(Terminal())
    assert terminal.painted("x", "red", True) == "\x1b[1;31mx\x1b[0m"
    assert terminal.painted("x", "red", False) == "x"


@pytest.mark.parametrize("arguments", [["tune", "--dry-run"], ["doctor"], PLAN])
def test_commands_use_colours_on_a_terminal(arguments):
    def colours(environment: dict[str, str]) -> bool:
        _, _, shown = on_terminal([*FASTREDUCE, *arguments], environment, stdout=True)
        return re.search(r"\x1b\[[\d;]+m", shown) is not None

    assert colours({"NO_COLOR": ""})
    assert not colours({"NO_COLOR": "1"})
