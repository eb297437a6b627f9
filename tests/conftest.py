"""Ranks for tests: processes with a gloo group on loopback that run a test's function."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import logging
import multiprocessing
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fastreduce
from fastreduce import cuda

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# Ranks start from a server that has imported torch once, and what DDP's constructor imports.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", "fastreduce", "fastreduce.demo", "conftest"]
)

TIMEOUT = 90.0


def needs_gpu() -> list[pytest.MarkDecorator]:
    """For ``pytestmark`` of a file. Not decided before: to ask for GPUs is to use the driver, which
    the server of forked ranks must not."""
    reason = cuda.problem() or ("" if torch.cuda.is_available() else "this torch has no CUDA")
    return [pytest.mark.cuda, pytest.mark.skipif(bool(reason), reason=f"no GPU: {reason}")]


def join_group(rank: int, world_size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )


def _rank_main(pipe: Connection, rank: int, world_size: int, folder: str, loop: bool) -> None:
    # What the server has imported is no garbage: to look through it would copy all its pages, which
    # is most of what a rank costs.
    gc.freeze()
    join_group(rank, world_size, folder)
    state: dict[str, Any] = {}
    try:
        while (task := pipe.recv()) is not None:
            function, arguments = task
            try:
                pipe.send((True, function(*arguments) if not loop else function(state, *arguments)))
            except BaseException as error:
                pipe.send((False, f"rank {rank}: {error!r}\n{traceback.format_exc()}"))
    except EOFError:
        pass
    for value in state.values():
        if isinstance(value, fastreduce.Communicator):
            value.close()
    # What is left of models holds the group, whose threads must end before the interpreter.
    state.clear()
    gc.collect()
    dist.destroy_process_group()


class Ranks:
    """Processes 0 to world_size - 1 of a fresh gloo group.

    ``run(f, *args)`` calls ``f(*args)`` (with ``loop``: ``f(state, *args)``, a dict that lives
    as long as the rank) on every rank and returns the results in rank order.
    """

    def __init__(self, world_size: int, *, loop: bool = False) -> None:
        self.world_size = world_size
        self.folder = tempfile.mkdtemp(prefix="fastreduce-test-")
        self.pipes: list[Connection] = []
        self.failed = False
        self.processes = []
        for rank in range(world_size):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_rank_main, args=(there, rank, world_size, self.folder, loop), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, rank: int, function: Callable[..., Any], *arguments: Any) -> None:
        self.pipes[rank].send((function, arguments))

    def result(self, rank: int, timeout: float = TIMEOUT) -> Any:
        """What the started function returned; fails the test if it raised or its rank died."""
        if not self.pipes[rank].poll(timeout):
            self.kill()
            pytest.fail(f"rank {rank} hangs")
        try:
            good, value = self.pipes[rank].recv()
        except EOFError:
            self.kill()
            pytest.fail(f"rank {rank} died: exit code {self.processes[rank].exitcode}")
        if not good:
            self.failed = True
            pytest.fail(value)
        return value

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        for rank in range(self.world_size):
            self.start(rank, function, *arguments)
        results: dict[int, Any] = {}
        while len(results) < self.world_size:
            waiting = [p for rank, p in enumerate(self.pipes) if rank not in results]
            ready = wait(waiting, TIMEOUT)
            if not ready:
                self.kill()
                pytest.fail(f"ranks {set(range(self.world_size)) - set(results)} hang")
            # Whoever fails first knows best.
            for pipe in ready:
                rank = self.pipes.index(pipe)
                results[rank] = self.result(rank)
        return [results[rank] for rank in range(self.world_size)]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        # After a failure the others may wait for the one that failed.
        deadline = time.monotonic() + (2 if self.failed else 30)
        for process in self.processes:
            process.join(max(0.1, deadline - time.monotonic()))
        stuck = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        assert self.failed or not stuck, f"ranks {stuck} did not end"


def shared_files() -> set[str]:
    """What lies in /dev/shm, but for what other processes that still live have made there (torch
    names each file after its maker)."""

    def foreign(name: str) -> bool:
        made = re.match(r"torch_(\d+)_", name)
        return made is not None and int(made[1]) != os.getpid() and Path("/proc", made[1]).exists()

    # Those of benchmarks/ have a test of their own, and other runs of it may go on.
    names = {name for name in os.listdir("/dev/shm") if not name.startswith("fastreduce-bench")}
    return {name for name in names if not foreign(name)}


def nothing_left(before: set[str]) -> bool:
    """Nothing has come to /dev/shm to stay. (Other processes' semaphores come and go, and do not
    tell whose they are.)"""
    deadline = time.monotonic() + 5
    while not shared_files() <= before and time.monotonic() < deadline:
        time.sleep(0.05)
    return shared_files() <= before


@pytest.fixture
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Makes fresh ranks; afterwards no process and nothing in /dev/shm is left."""
    before = shared_files()
    made: list[Ranks] = []

    def make(world_size: int) -> Ranks:
        made.append(Ranks(world_size))
        return made[-1]

    yield make
    for group in made:
        group.close()
    assert nothing_left(before)


@pytest.fixture(scope="session")
def pool() -> Iterator[Callable[[int], Ranks]]:
    """Ranks that live through the session, for tests that only compute."""
    before = shared_files()
    pools: dict[int, Ranks] = {}

    def get(world_size: int) -> Ranks:
        group = pools.get(world_size)
        if group is not None and group.failed:  # ranks of which some still answer the last test
            group.close()
            group = None
        if group is None or not all(p.is_alive() for p in group.processes):
            group = pools[world_size] = Ranks(world_size, loop=True)
        return group

    yield get
    for group in pools.values():
        group.close()
    assert nothing_left(before)


class Lines(logging.Handler):
    """What the library has logged since."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("fastreduce").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def on_every_instruction_set(code: str) -> dict[str, Any]:
    """What Python code prints last, as JSON, by the instruction set that its process has used."""
    code += "\nfrom fastreduce import instruction_set\nprint(instruction_set())"
    said = {}
    for name in ("baseline", "avx2", "avx512"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"FASTREDUCE_ISA": name},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        *_, found, used = done.stdout.splitlines()
        said[used] = json.loads(found)
    return said


def on_terminal(
    command: list[str],
    environment: dict[str, str] | None = None,
    *,
    watch: Callable[[subprocess.Popen[str], str], None] | None = None,
    stdout: bool = False,
) -> tuple[int, str, str]:
    """Runs a command whose stderr (and ``stdout``) is a terminal: its status, what it printed, and
    what the terminal was sent, of which ``watch`` is told as it comes."""
    terminal, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    process = subprocess.Popen(
        command,
        stdout=its if stdout else subprocess.PIPE,
        stderr=its,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    os.close(its)
    sent = b""
    try:
        while True:
            assert select.select([terminal], [], [], TIMEOUT)[0], f"{command} hangs: {sent!r}"
            try:
                more = os.read(terminal, 1 << 16)
            except OSError:  # nobody has it open any more
                break
            sent += more
            if watch is not None:
                watch(process, sent.decode(errors="replace"))
        printed, _ = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return process.returncode, printed or "", sent.decode()


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Equal in every bit, but for which NaN a NaN is."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return False
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integer[got.dtype.itemsize]
    equal = got.contiguous().view(kind) == want.contiguous().view(kind)
    if got.dtype.is_floating_point:
        equal |= got.isnan() & want.isnan()
    return bool(equal.all())


SPECIAL = [0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-45, -1e-40, 6e-8, 65504.0, 3e38]


def make_inputs(
    seed: int, world_size: int, count: int, dtype: torch.dtype, special: bool = False
) -> list[torch.Tensor]:
    """Every rank's input, different per rank and call, the same wherever it is made."""
    inputs = []
    for rank in range(world_size):
        generator = torch.Generator().manual_seed(seed * 64 + rank)
        if dtype.is_floating_point:
            x = torch.randn(count, generator=generator, dtype=torch.float64) * 3
            if special:
                at = torch.randint(0, 4, (count,), generator=generator) == 0
                values = torch.tensor(SPECIAL, dtype=torch.float64)
                pick = values[torch.randint(0, len(SPECIAL), (count,), generator=generator)]
                x = torch.where(at, pick, x)
            inputs.append(x.to(torch.float32).to(dtype) if dtype.itemsize == 2 else x.to(dtype))
        else:
            info = torch.iinfo(dtype)
            low, high = (info.min, info.max) if special else (max(info.min, -100), 100)
            inputs.append(torch.randint(low, high, (count,), generator=generator, dtype=dtype))
    return inputs


OBJECTS = pytest.StashKey[Path]()


@pytest.fixture(scope="session")
def objects(request: pytest.FixtureRequest) -> Path:
    """A folder for what the tests compile, in which the processes that share a run share it."""
    return request.config.stash[OBJECTS]


def pytest_configure(config: pytest.Config) -> None:
    run = getattr(config, "workerinput", {}).get("objects")
    config.stash[OBJECTS] = Path(run or tempfile.mkdtemp(prefix="fastreduce-objects-"))
    # What `tune` has remembered of this machine is not what the tests are about.
    os.environ["XDG_CACHE_HOME"] = str(config.stash[OBJECTS] / "cache")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(config.stash[OBJECTS], ignore_errors=True)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist makes a process that runs tests."""
    node.workerinput["objects"] = str(node.config.stash[OBJECTS])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests that wait for each other leave time to compile what others need."""
    if getattr(session.config, "workerinput", {}).get("workerid", "gw0") != "gw0":
        return
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    for module in modules:
        start = getattr(module, "start_building", None)
        if start is not None and len(modules) > 1:
            start(session.config.stash[OBJECTS])
