"""``fastreduce doctor``: facts of this machine, or of all ranks under torchrun, and what a
communicator of them comes to. :mod:`fastreduce.machine` finds facts, :mod:`fastreduce.diagnosis`
judges them, :mod:`fastreduce.doctor_text` writes them down."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from fastreduce import diagnosis, doctor_text, machine, policy, terminal
from fastreduce.communicator import Communicator
from fastreduce.diagnosis import Facts
from fastreduce.options import checked, positive, whole
from fastreduce.ranks import torchrun_number

# Of the JSON: another number where a key changes its meaning or goes.
FORMAT = 1
# One that fits into a slot, and one that does not.
TRIED_BYTES = (policy.KIB, policy.MIB)
# How long a rank that has told what came of it may take to end.
_ENDING_SECONDS = 5.0


@dataclass
class Check:
    """What came of a communicator.

    Attributes:
        host: policy.Topology, as the ranks have found it.
        threads: that move large buffers.
        device: this rank's GPU, or None where only the CPU was tried.
        gpus: policy.GpuTopology, as the ranks have found it; None if they are not connected.
        said: what the log says of ways not taken.
        error: what went wrong, or "".
    """

    world_size: int
    host: Facts
    threads: int = 1
    device: int | None = None
    gpus: Facts | None = None
    said: list[str] = field(default_factory=list)
    error: str = ""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options."""
    parser.epilog = """\
examples:
  fastreduce doctor
  torchrun --nproc-per-node 8 -m fastreduce doctor --json > report.json

Under torchrun, rank 0 prints one report for all ranks and hosts.

exit status: 0 all is right, 1 something was found that does not work or is slow, 2 wrong arguments,
130 interrupted"""
    parser.add_argument("--json", action="store_true", help="print all facts, as JSON")
    parser.add_argument(
        "--ranks",
        type=whole(),
        default=2,
        help="processes to try with, where torchrun has started none (2)",
    )
    parser.add_argument(
        "--timeout",
        type=checked(positive),
        default=60.0,
        help="seconds that ranks wait for each other (60)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the report and returns the exit status: 0, or 1 if something was found.

    Raises:
        UsageError: torchrun's variables are there in part.
    """
    if "WORLD_SIZE" in os.environ:
        return _together(options.json, options.timeout)
    # Before the GPUs are asked about, which a forked process must not inherit.
    check = _try_here(options.ranks, options.timeout)
    one = {"rank": 0, "machine": asdict(machine.describe()), "check": asdict(check)}
    return _tell([one], [], options.json, together=False)


def report(ranks: list[Facts], missing: list[diagnosis.Finding], *, together: bool) -> Facts:
    """All that is known, as JSON has it.

    Args:
        ranks: in order: ``rank``, ``machine``, ``check``.
        missing: what has been found out about ranks of which there are no facts.
        together: the ranks are torchrun's.
    """
    ranks = json.loads(json.dumps(ranks))
    found = [*missing, *diagnosis.findings(ranks)]
    return {
        "format": FORMAT,
        "together": together,
        "ranks": ranks,
        "paths": [asdict(path) for path in diagnosis.paths(ranks)],
        "findings": [asdict(finding) for finding in found],
        "status": 1 if found else 0,
    }


def _tell(
    ranks: list[Facts], missing: list[diagnosis.Finding], as_json: bool, *, together: bool
) -> int:
    told = report(ranks, missing, together=together)
    colours = terminal.colours(sys.stdout)
    print(json.dumps(told, indent=1) if as_json else doctor_text.text(told, colours), flush=True)
    return int(told["status"])


# -- trying ---------------------------------------------------------------------------------------


class _Said(logging.Handler):
    """What the library logs, without who says it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = re.sub(r"^rank \d+: ", "", record.getMessage())
        if line not in self.lines:
            self.lines.append(line)


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    said, logger = _Said(), logging.getLogger("fastreduce")
    logger.addHandler(said)
    try:
        yield said.lines
    finally:
        logger.removeHandler(said)


def try_out(
    store: Store, rank: int, world_size: int, timeout: float, device: int | None = None
) -> Check:
    """Collective: what comes of a communicator of ranks that have no process group yet.

    Args:
        timeout: seconds of every wait.
        device: this rank's GPU, if its tensors are to be tried too.
    """
    check = Check(world_size, asdict(policy.Topology(False, 0, world_size)), device=device)
    nccl = device is not None and dist.is_nccl_available()
    backend = "cpu:gloo,cuda:nccl" if nccl else "gloo"
    with _listening() as check.said:
        try:
            limit = timedelta(seconds=timeout)
            dist.init_process_group(
                backend, store=store, rank=rank, world_size=world_size, timeout=limit
            )
            with Communicator(timeout=timeout) as communicator:
                check.host, check.threads = asdict(communicator.topology), communicator.threads
                _check_sums(communicator, torch.device("cpu"))
                if device is not None:
                    place = torch.device("cuda", device)
                    torch.cuda.set_device(place)
                    gpus = communicator._gpu_on(place)
                    check.gpus = None if gpus is None else asdict(gpus.topology)
                    _check_sums(communicator, place)
        except Exception as error:  # whatever torch, or the driver, likes to raise
            check.error = f"trying failed: {type(error).__name__}: {error}"
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
    return check


def _check_sums(communicator: Communicator, device: torch.device) -> None:
    """Small integers, whose sums are exact in any order; moved into shared memory as a DDP bucket
    is."""
    ranks = communicator.world_size
    for nbytes in TRIED_BYTES:
        numbers = torch.arange(nbytes // 4, device=device).remainder(13).float()
        tensor = numbers * (communicator.rank + 1)
        communicator.all_reduce(tensor, "sum", move=True)
        if not torch.equal(tensor, numbers * (ranks * (ranks + 1) // 2)):
            raise RuntimeError(f"an all-reduce of {nbytes} bytes on {device} gave a wrong sum")


def _try_here(ranks: int, timeout: float) -> Check:
    """With processes forked from this one, which need not import torch again."""
    context = multiprocessing.get_context("fork")
    patience = 2 * timeout  # a rank whose own wait has ended tells more
    deadline = time.monotonic() + patience
    children: list[tuple[Any, Connection]] = []
    lost = Check(ranks, asdict(policy.Topology(False, 0, ranks)))
    first: Check | None = None
    try:
        with tempfile.TemporaryDirectory(prefix="fastreduce-doctor-") as folder:
            for rank in range(ranks):
                here, there = context.Pipe(duplex=False)
                process = context.Process(
                    target=_child, args=(there, f"{folder}/store", rank, ranks, timeout)
                )
                process.start()
                there.close()
                children.append((process, here))
            with terminal.progress(ranks, "doctor: ranks that have tried") as bar:
                for rank, (_, pipe) in enumerate(children):
                    lost.error = (
                        f"trying failed: rank {rank} has not answered within {patience:g} s"
                    )
                    if not pipe.poll(max(0.0, deadline - time.monotonic())):
                        return lost
                    lost.error = f"trying failed: rank {rank} ended by itself"
                    check: Check = pipe.recv()
                    if check.error:
                        return check
                    first = first or check
                    terminal.step(bar)
    except (OSError, EOFError) as error:  # no folder, no process, one that died
        lost.error = lost.error or f"trying failed: {error}"
        return lost
    finally:
        for process, pipe in children:
            if first is not None:
                process.join(_ENDING_SECONDS)
            process.kill()
            process.join()
            pipe.close()
    assert first is not None
    return first


def _child(pipe: Connection, store: str, rank: int, ranks: int, timeout: float) -> None:
    torch.set_num_threads(1)  # others would not survive a fork
    pipe.send(try_out(FileStore(store, ranks), rank, ranks, timeout))


# -- under torchrun -------------------------------------------------------------------------------


def _together(as_json: bool, timeout: float) -> int:
    """Every rank tells its facts through the store, which also serves those whose group does not
    come about. Rank 0 judges, prints, and alone has a status: torchrun ends all ranks, and prints a
    screen of its own, when one ends with an error."""
    rank, world_size = torchrun_number("RANK"), torchrun_number("WORLD_SIZE")
    own: Facts = {"rank": rank, "machine": asdict(machine.describe()), "check": None}
    try:
        meeting = _Meeting(rank, world_size, timeout)
        meeting.tell("facts", own)
        facts, missing = meeting.hear("facts", "did not come")
        if not missing:
            check = try_out(meeting.store, rank, world_size, timeout, _device(facts))
            meeting.tell("check", asdict(check))
            if rank == 0:
                checks, missing = meeting.hear("check", "came, but did not end its part")
                for number, found in checks.items():
                    facts[number]["check"] = found
        if rank == 0:
            return _tell([facts[each] for each in sorted(facts)], missing, as_json, together=True)
        if 0 not in facts:
            raise RuntimeError(f"{missing[0].what}. {missing[0].todo}")
    except RuntimeError as error:  # the store's too
        print(f"fastreduce doctor: rank {rank}: {error}", file=sys.stderr)
        return 1
    return 0


def _device(facts: dict[int, Facts]) -> int | None:
    """This rank's GPU, if every rank sees one."""
    if not all(each["machine"]["gpus"]["devices"] for each in facts.values()):
        return None
    return torchrun_number("LOCAL_RANK") % torch.cuda.device_count()


class _Meeting:
    """The store at which torchrun's ranks leave what they know."""

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self._address = os.environ.get("MASTER_ADDR", "localhost"), torchrun_number("MASTER_PORT")
        # torchrun's agent serves one already, unless it was told not to share it.
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                *self._address,
                is_master=rank == 0 and not served,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            host, port = self._address
            who = "torchrun" if served else "rank 0"
            raise RuntimeError(
                f"there is no store at {host}:{port}, where {who} should have one: {error}"
            ) from error
        # It outlives a restart.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"fastreduce-doctor-{restart}", store)
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout

    def tell(self, what: str, value: Facts) -> None:
        self.store.set(f"{what}-{self._rank}", json.dumps(value))

    def hear(self, what: str, failing: str) -> tuple[dict[int, Facts], list[diagnosis.Finding]]:
        """Every rank's, and who has not told in time."""
        keys = {rank: f"{what}-{rank}" for rank in range(self._world_size)}
        until = time.monotonic() + self._timeout
        shown = self._rank == 0
        with (
            terminal.progress(len(keys), f"doctor: ranks' {what}", shown=shown) as bar,
            contextlib.suppress(RuntimeError),
        ):
            for key in keys.values():
                self.store.wait([key], timedelta(seconds=max(until - time.monotonic(), 1e-3)))
                terminal.step(bar)
        there = [rank for rank, key in keys.items() if self.store.check([key])]
        told = {rank: json.loads(self.store.get(keys[rank])) for rank in there}
        absent = sorted(set(keys) - set(there))
        if not absent:
            return told, []
        finding = diagnosis.Finding(
            "wrong",
            f"{diagnosis.numbered(absent)} {failing} within {self._timeout:g} s",
            "Look whether it runs, what it prints, and whether its host reaches {}:{}.".format(
                *self._address
            ),
        )
        return told, [finding]
