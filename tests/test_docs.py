"""What the pages say holds: their code runs, the options of their commands exist, their links lead
somewhere, and what they quote or name is in the sources. And ``help()`` tells of every public name.

In a page, a comment ``<!-- test`` up to ``-->`` is code that readers do not see: it prepares what
the blocks after it need, or checks what those before it, or the text, claim. A block of Python is
only compiled behind ``<!-- compiled only: REASON -->``, with a reason of COMPILED_ONLY.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import inspect
import io
import os
import re
import runpy
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import test_protocols

import fastreduce
from fastreduce import _C, errors

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").glob("*.md"),
    ]
)
COMPILED_ONLY = ("needs a GPU",)
MOST_COMPILED_ONLY = 4
RANKS = 2

# What every page's code finds: a model that each rank has alike, and a global batch of 8 shards.
PRELUDE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce

rank, world_size = dist.get_rank(), dist.get_world_size()
loss = nn.functional.mse_loss


def Model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 1000), nn.Tanh(), nn.Linear(1000, 16))


torch.manual_seed(1)
inputs, targets = torch.randn(8, 4, 16), torch.randn(8, 4, 16)
model = Model()
"""


@dataclass(frozen=True)
class Block:
    """A fenced block, or a hidden one (``kind`` is "test"), and the number of its first line."""

    kind: str
    line: int
    code: str
    compiled_only: str = ""


def blocks_of(text: str) -> Iterator[Block]:
    lines = text.splitlines()
    number, reason = 0, ""
    while number < len(lines):
        line = lines[number].strip()
        fence = re.fullmatch(r"(`{3,}|~{3,})([^`]*)", line)
        hidden = line == "<!-- test"
        if marked := re.fullmatch(r"<!-- compiled only: (.*) -->", line):
            reason = marked[1]
        elif fence or hidden:
            end = fence[1] if fence else "-->"
            first = number + 1
            number = first
            while lines[number].strip() != end:
                number += 1
            code = textwrap.dedent("\n".join(lines[first:number]))
            yield Block(fence[2] if fence else "test", first + 1, code, reason)
            reason = ""
        elif line and reason:
            raise AssertionError(f"line {number + 1}: no block behind 'compiled only: {reason}'")
        number += 1


def prose_of(text: str) -> str:
    """Without blocks and comments."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    return re.sub(r"^ *(`{3,}|~{3,})[^`\n]*\n.*?^ *\1$", "", text, flags=re.S | re.M)


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def run_blocks(state: dict[str, Any], page: str, blocks: list[Block], folder: Path) -> None:
    """On a rank: runs a page's blocks in one namespace, in a folder of all ranks."""
    names: dict[str, Any] = {"__name__": "page"}
    before = os.getcwd()
    os.chdir(folder)
    try:
        exec(PRELUDE, names)
        for block in blocks:
            # A traceback then tells the page's own lines.
            code = compile("\n" * (block.line - 1) + block.code, page, "exec")
            if not block.compiled_only:
                exec(code, names)
    finally:
        os.chdir(before)
        for value in list(names.values()):
            if isinstance(
                value, (fastreduce.HookState, fastreduce.Communicator, fastreduce.ParameterServer)
            ):
                value.close()
        names.clear()
        gc.collect()


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(pool, page, tmp_path):
    blocks = list(blocks_of(text_of(page)))
    # What is of no kind, or of another one, would not run.
    assert {each.kind for each in blocks} <= {"python", "test", "sh", "text"}
    code = [each for each in blocks if each.kind in ("python", "test")]
    if code:
        pool(RANKS).run(run_blocks, page, code, tmp_path)


def test_few_blocks_are_compiled_only():
    marked = [each for page in PAGES for each in blocks_of(text_of(page)) if each.compiled_only]
    assert len(marked) <= MOST_COMPILED_ONLY
    assert {each.compiled_only for each in marked} <= set(COMPILED_ONLY)


BROKEN = """
```python
comm = fastreduce.Communicator()
```

```python
comm.all_reduce(torch.ones(4), algorithm="no_such")
```
"""


def test_broken_code_is_noticed(ranks, tmp_path):
    with pytest.raises(pytest.fail.Exception, match=r"(?s)page\.md.*line 7.*no_such"):
        ranks(1).run(run_blocks, {}, "page.md", list(blocks_of(BROKEN)), tmp_path)


# -- commands -------------------------------------------------------------------------------------

# Programs whose options are not ours.
FOREIGN = (
    *("export", "cd", "pip", "pytest", "ruff", "mypy", "clang-format"),
    *("taskset", "nvidia-smi", "sbatch"),
)


@dataclass(frozen=True)
class Command:
    """One of our programs, as a page calls it."""

    module: str
    words: tuple[str, ...]
    torchrun: bool


def commands_in(code: str) -> Iterator[Command]:
    """Raises for what cannot be read, an unknown program, and files that are not there."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words:
            end = next((k for k, word in enumerate(words) if word in ("&&", "|", ";")), len(words))
            yield from command_of(words[:end])
            words = words[end + 1 :]


def command_of(words: list[str]) -> Iterator[Command]:
    while re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    program, words = Path(words[0]).name, words[1:]
    for word in words:
        path = word.partition("::")[0]
        if re.fullmatch(r"(csrc|docs|examples|benchmarks|tests|fastreduce)/\S*", path):
            assert (ROOT / path).exists(), path
    if program == "fastreduce":
        yield Command("fastreduce", tuple(words), False)
    elif program in ("python", "python3", "torchrun"):
        torchrun = program == "torchrun"
        if "-m" in words:
            at = words.index("-m") + 1
            if words[at].partition(".")[0] in ("fastreduce", "benchmarks"):
                yield Command(words[at], tuple(words[at + 1 :]), torchrun)
        else:
            assert any((ROOT / word).is_file() for word in words), words
    else:
        assert program in FOREIGN or program.endswith(".sh"), f"an unknown program: {program}"


def help_of(state: dict[str, Any], command: Command) -> str:
    """On a rank, which has imported what our programs need."""
    subcommand = [word for word in command.words[:1] if not word.startswith("-")]
    said, before = io.StringIO(), (sys.argv, dict(os.environ))
    sys.argv = [command.module, *subcommand, "--help"]
    if command.torchrun:
        os.environ["TORCHELASTIC_RUN_ID"] = "none"
    try:
        with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
            runpy.run_module(command.module, run_name="__main__", alter_sys=True)
    finally:
        sys.argv = before[0]
        os.environ.clear()
        os.environ.update(before[1])
    return said.getvalue()


def unknown_options(command: Command, text: str) -> list[str]:
    options = [word.partition("=")[0] for word in command.words if word.startswith("-")]
    return [each for each in options if not re.search(rf"(?<![\w-]){each}(?![\w-])", text)]


def test_commands_exist(pool):
    """All in one rank: each program is imported once."""
    for page in PAGES:
        for block in blocks_of(text_of(page)):
            for command in commands_in(block.code) if block.kind == "sh" else ():
                [said] = pool(1).run(help_of, command)
                assert said.startswith("usage:"), f"{page}: {command}"
                assert not unknown_options(command, said), f"{page}: {command}"


def test_wrong_commands_are_noticed(pool):
    [command] = commands_in("A=1 .venv/bin/fastreduce demo --ranks 4 --no-such=1  # --comment")
    [said] = pool(1).run(help_of, command)
    assert unknown_options(command, said) == ["--no-such"]
    for line in ("no-such-program -h", "pytest tests/no_such.py", "python no_such.py", "pip '"):
        with pytest.raises((AssertionError, ValueError)):
            list(commands_in(line))


# -- links, messages, names -----------------------------------------------------------------------


def slugs_of(text: str) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(text), flags=re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in headings]
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in plain}


def broken_links(page: str, text: str) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(text)):
        if re.match(r"https?:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path
        there = file.read_text() if path.endswith(".md") and file.exists() else text
        if not file.exists() or (anchor and anchor not in slugs_of(there)):
            yield target


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    assert list(broken_links(page, text_of(page))) == []


def test_every_page_can_be_reached():
    found, new = set[str](), {"README.md"}
    while new:
        page = new.pop()
        found.add(page)
        for target in re.findall(r"\]\(([^)\s#]+\.md)", prose_of(text_of(page))):
            path = os.path.relpath((ROOT / page).parent / target, ROOT)
            new |= {path} - found
    assert set(PAGES) <= found


def test_broken_links_are_noticed():
    text = "[a](no_such.md) [b](README.md#no-such) [c](#here) [d](CHANGELOG.md)\n\n## Here\n"
    assert list(broken_links("README.md", text)) == ["no_such.md", "README.md#no-such"]


def literals() -> Iterator[str]:
    """All strings of the sources; of Python's f-strings what is fixed, with ``...`` between."""
    for path in (ROOT / "fastreduce").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    str(each.value) if isinstance(each, ast.Constant) else "..."
                    for each in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value
    for path in (ROOT / "csrc").iterdir():
        text = re.sub(r'"\s*\n\s*"', "", path.read_text())
        yield from (each.replace('\\"', '"') for each in re.findall(r'"((?:[^"\\\n]|\\.)*)"', text))


def messages_of(text: str) -> list[str]:
    """What the rows of a page's tables quote."""
    return re.findall(r"^\| `([^`]+)` \|", text, flags=re.M)


def unknown_messages(messages: Iterable[str]) -> list[str]:
    """Those of which some part between two ``...`` is in no string of the sources."""
    known = "\n".join(literals())
    return [
        message
        for message in messages
        if not all(part.strip() in known for part in message.split("...") if part.strip())
    ]


def test_messages_are_those_of_the_sources():
    messages = messages_of(text_of("docs/errors.md"))
    assert len(messages) > 40
    assert all(max(map(len, each.split("..."))) >= 10 for each in messages)
    assert unknown_messages(messages) == []
    assert unknown_messages(["rank ... did not arrive before breakfast"])


def test_every_exception_is_told_of():
    headings = re.findall(r"^### `(\w+)`$", text_of("docs/errors.md"), flags=re.M)
    exported = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    ]
    assert set(headings) >= set(exported) and len(headings) == len(set(headings))
    assert all(hasattr(fastreduce, name) for name in exported)


def undocumented(names: Mapping[str, Any]) -> Iterator[str]:
    """What ``help()`` has nothing to say about, but for the signature that pybind11 begins with;
    of classes also the public methods and properties."""
    for name, value in names.items():
        if not re.sub(r"\A\w+\(.*\) -> \w+\s*", "", inspect.getdoc(value) or ""):
            yield name
        if isinstance(value, type):
            public = {key: each for key, each in vars(value).items() if not key.startswith("_")}
            kinds = (FunctionType, property, classmethod, staticmethod)
            members = {key: each for key, each in public.items() if isinstance(each, kinds)}
            yield from (f"{name}.{each}" for each in undocumented(members))


def test_public_names_have_docstrings():
    names = {name: getattr(fastreduce, name) for name in fastreduce.__all__}
    assert list(undocumented(names)) == []


class Silent:
    def method(self) -> None: ...


def test_missing_docstrings_are_noticed():
    found = undocumented({"Silent": Silent, "plan": _C.plan})
    assert list(found) == ["Silent", "Silent.method", "plan"]


def absent_names(text: str) -> Iterator[str]:
    """An item that begins with a file and a colon names what is in it."""
    for item in re.findall(r"^ *(?:-|\d+\.) (.*(?:\n(?! *(?:-|\d+\.) |\n|#).*)*)", text, re.M):
        begin = re.match(r"((?:`[\w./]+`(?:, | and )?)+):", item)
        if begin is None:
            continue
        files = [ROOT / each for each in re.findall(r"`([^`]+)`", begin[0])]
        yield from (str(each.relative_to(ROOT)) for each in files if not each.is_file())
        there = "\n".join(each.read_text() for each in files if each.is_file())
        for name in re.findall(r"`([^`]+)`", item[begin.end() :]):
            words = re.findall(r"[A-Za-z_]\w+", name)
            if "/" in name:
                found = (ROOT / name).exists()
            else:
                found = all(re.search(rf"\b{each}\b", there) for each in words)
            if not found:
                yield f"{begin[0]} {name}"


@pytest.mark.parametrize("page", PAGES)
def test_names_are_in_the_files_that_are_named(page):
    assert list(absent_names(text_of(page))) == []


def test_names_are_many_and_absent_ones_are_noticed():
    text = text_of("docs/extending.md")
    assert len(re.findall(r"^ *(?:-|\d+\.) `[\w./]+`.*:", text, re.M)) > 20
    text = "1. `csrc/signal.h`: `Algorithm`, `no_such` and\n   `tests/no_such.py`.\n- `no.h`: x\n"
    names = ["`csrc/signal.h`: no_such", "`csrc/signal.h`: tests/no_such.py", "no.h"]
    assert list(absent_names(text)) == names


def test_every_environment_variable_is_told_of():
    sources = [ROOT / "setup.py", *(ROOT / "fastreduce").glob("*.py"), *(ROOT / "csrc").iterdir()]
    read = r"(?:environ(?:\.get\(|\[)|getenv\()\"(\w+)\""
    names = {name for path in sources for name in re.findall(read, path.read_text())}
    names = {name for name in names if not name.startswith("TORCHELASTIC_")}
    assert "FASTREDUCE_ISA" in names
    told = set(re.findall(r"^\| `(\w+)", text_of("docs/tuning.md"), flags=re.M))
    assert names - {"PATH"} - told == set()


def test_every_negative_control_is_told_of():
    told = set(re.findall(r"`(\w+)`", text_of("docs/protocol.md")))
    assert {name for _, name in test_protocols.pairs(test_protocols.SABOTAGES)} <= told
    assert {name for _, name in test_protocols.FAULTS} <= told


def test_readme_measures_what_performance_does():
    """Its rows are some of the page's."""
    rows = re.findall(r"^\| \d+ [KM]iB \|.*$", text_of("README.md"), flags=re.M)
    assert rows and set(rows) <= set(text_of("docs/performance.md").splitlines())
