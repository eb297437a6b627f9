"""``fastreduce doctor``: facts of this machine, or of all ranks under torchrun, and what a
communicator of them comes to. :mod:`fastreduce.machine` finds facts, :mod:`fastreduce.diagnosis`
judges them, :mod:`fastreduce.doctor_text` writes them down."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import timedelta
from logging.handlers import BufferingHandler
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.multiprocessing.spawn import ProcessException, ProcessExitedException
from tqdm import tqdm

from fastreduce import diagnosis, doctor_text, machine, policy, terminal
from fastreduce.communicator import Communicator
from fastreduce.machine import Facts
from fastreduce.options import checked, positive, whole
from fastreduce.ranks import run_ranks, torchrun_number

# Of the JSON: another number where a key changes its meaning or goes.
FORMAT = 1
# One that fits into a slot, and one that does not.
TRIED_BYTES = (policy.KIB, policy.MIB)


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
    one = {"rank": 0, "machine": machine.describe(), "check": check}
    return _tell([one], [], options.json, together=False)


def report(ranks: list[Facts], missing: list[Facts], *, together: bool) -> Facts:
    """All that is known, as JSON has it.

    Args:
        ranks: in order: ``rank``, ``machine``, ``check``.
        missing: findings about ranks of which there are no facts.
        together: the ranks are torchrun's.
    """
    ranks = json.loads(json.dumps(ranks))
    found = [*missing, *diagnosis.findings(ranks)]
    return {
        "format": FORMAT,
        "together": together,
        "ranks": ranks,
        "paths": diagnosis.paths(ranks),
        "findings": found,
        "status": 1 if found else 0,
    }


def _tell(ranks: list[Facts], missing: list[Facts], as_json: bool, *, together: bool) -> int:
    told = report(ranks, missing, together=together)
    colours = terminal.colours(sys.stdout)
    print(json.dumps(told, indent=1) if as_json else doctor_text.text(told, colours), flush=True)
    return int(told["status"])


# -- trying ---------------------------------------------------------------------------------------


def unknown(world_size: int, device: int | None = None, error: str = "") -> Facts:
    """What came of a communicator of which nothing is known yet."""
    return {
        "world_size": world_size,
        "host": asdict(policy.Topology(False, 0, world_size)),  # as the ranks have found it
        "threads": 1,  # that move large buffers
        "device": device,  # this rank's GPU, or None where only the CPU was tried
        "gpus": None,  # policy.GpuTopology, as the ranks have found it, if they are connected
        "said": [],  # what the log says of ways not taken
        "error": error,  # what went wrong, or ""
    }


def try_out(
    store: Store, rank: int, world_size: int, timeout: float, device: int | None = None
) -> Facts:
    """Collective: what comes of a communicator of ranks that have no process group yet.

    Args:
        timeout: seconds of every wait.
        device: this rank's GPU, if its tensors are to be tried too.
    """
    check = unknown(world_size, device)
    nccl = device is not None and dist.is_nccl_available()
    places = [torch.device("cpu"), *([] if device is None else [torch.device("cuda", device)])]
    log, logger = BufferingHandler(capacity=1 << 20), logging.getLogger("fastreduce")
    logger.addHandler(log)
    steps = len(places) * len(TRIED_BYTES)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if nccl else "gloo",
            store=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        with (
            Communicator(timeout=timeout) as communicator,
            terminal.progress(steps, "doctor: sums", shown=rank == 0) as bar,
        ):
            check |= {"host": asdict(communicator.topology), "threads": communicator.threads}
            for place in places:
                if place.type == "cuda":
                    torch.cuda.set_device(place)
                    gpus = communicator._gpu_on(place)
                    check["gpus"] = None if gpus is None else asdict(gpus.topology)
                _check_sums(communicator, place, bar)
    except Exception as error:  # whatever torch, or the driver, likes to raise
        check["error"] = f"trying failed: {type(error).__name__}: {error}"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        logger.removeHandler(log)
    lines = (re.sub(r"^rank \d+: ", "", record.getMessage()) for record in log.buffer)
    return check | {"said": list(dict.fromkeys(lines))}


def _check_sums(communicator: Communicator, device: torch.device, bar: tqdm[None]) -> None:
    """Small integers, whose sums are exact in any order; moved into shared memory as a DDP bucket
    is."""
    ranks = communicator.world_size
    for nbytes in TRIED_BYTES:
        numbers = torch.arange(nbytes // 4, device=device).remainder(13).float()
        tensor = numbers * (communicator.rank + 1)
        communicator.all_reduce(tensor, "sum", move=True)
        if not torch.equal(tensor, numbers * (ranks * (ranks + 1) // 2)):
            raise RuntimeError(f"an all-reduce of {nbytes} bytes on {device} gave a wrong sum")
        terminal.step(bar)


def _try_here(ranks: int, timeout: float) -> Facts:
    """With processes forked from this one, which need not import torch again."""
    try:
        with tempfile.TemporaryDirectory(prefix="fastreduce-doctor-") as folder:
            run_ranks(_started, ranks, ranks, timeout, folder, start="fork")
            checks = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
    except ProcessExitedException as error:
        late = error.signal_name == "SIGALRM"
        why = f"rank {error.error_index} has not answered within {2 * timeout:g} s"
        return unknown(ranks, error=f"trying failed: {why if late else error}")
    except (OSError, ProcessException) as error:  # no folder, no process
        return unknown(ranks, error=f"trying failed: {error}")
    return next((each for each in checks if each["error"]), checks[0])


def _started(rank: int, ranks: int, timeout: float, folder: str) -> None:
    # It ends a rank that hangs; one whose own wait has ended tells more.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, min(2 * timeout, 1e9))  # more is refused
    torch.set_num_threads(1)  # others would not survive a fork
    check = try_out(FileStore(f"{folder}/store", ranks), rank, ranks, timeout)
    Path(folder, str(rank)).write_text(json.dumps(check))


# -- under torchrun -------------------------------------------------------------------------------


def _together(as_json: bool, timeout: float) -> int:
    """Every rank tells its facts through the store, which also serves those whose group does not
    come about. Rank 0 judges, prints, and alone has a status: torchrun ends all ranks, and prints a
    screen of its own, when one ends with an error."""
    rank, world_size = torchrun_number("RANK"), torchrun_number("WORLD_SIZE")
    own: Facts = {"rank": rank, "machine": machine.describe(), "check": None}
    try:
        meeting = _Meeting(rank, world_size, timeout)
        meeting.tell("facts", own)
        facts, missing = meeting.hear("facts", "did not come")
        if 0 not in facts:
            raise RuntimeError("{what}. {todo}".format(**missing[0]))
        if not missing:
            check = try_out(meeting.store, rank, world_size, timeout, _device(facts))
            meeting.tell("check", check)
            if rank == 0:
                checks, missing = meeting.hear("check", "came, but did not end its part")
                for number, found in checks.items():
                    facts[number]["check"] = found
    except RuntimeError as error:  # the store's too
        print(f"fastreduce doctor: rank {rank}: {error}", file=sys.stderr)
        return 1
    if rank > 0:
        return 0
    return _tell([facts[each] for each in sorted(facts)], missing, as_json, together=True)


def _device(facts: dict[int, Facts]) -> int | None:
    """This rank's GPU, if every rank sees one."""
    if not all(each["machine"]["gpus"]["devices"] for each in facts.values()):
        return None
    return torchrun_number("LOCAL_RANK") % torch.cuda.device_count()


class _Meeting:
    """The store at which torchrun's ranks leave what they know."""

    def __init__(self, rank: int, world_size: int, timeout: float) -> None:
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        host, port = os.environ.get("MASTER_ADDR", "localhost"), torchrun_number("MASTER_PORT")
        self._address = f"{host}:{port}"
        # torchrun's agent serves one already, unless it was told not to share it.
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                host,
                port,
                is_master=rank == 0 and not served,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            who = "torchrun" if served else "rank 0"
            raise RuntimeError(
                f"there is no store at {self._address}, where {who} should have one: {error}"
            ) from error
        # It outlives a restart.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.store = PrefixStore(f"fastreduce-doctor-{restart}", store)

    def tell(self, what: str, value: Facts) -> None:
        self.store.set(f"{what}-{self._rank}", json.dumps(value))

    def hear(self, what: str, failing: str) -> tuple[dict[int, Facts], list[Facts]]:
        """Every rank's, and who has not told in time."""
        told: dict[int, Facts] = {}
        until = time.monotonic() + self._timeout
        shown = self._rank == 0
        with terminal.progress(self._world_size, f"doctor: ranks' {what}", shown=shown) as bar:
            for rank in range(self._world_size):
                key, left = f"{what}-{rank}", max(until - time.monotonic(), 1e-3)
                with contextlib.suppress(RuntimeError):
                    self.store.wait([key], timedelta(seconds=left))
                    told[rank] = json.loads(self.store.get(key))
                    terminal.step(bar)
        if not (absent := sorted(set(range(self._world_size)) - set(told))):
            return told, []
        what = f"{diagnosis.numbered(absent)} {failing} within {self._timeout:g} s"
        todo = (
            f"Look whether it runs, what it prints, and whether its host reaches {self._address}."
        )
        return told, [{"kind": "wrong", "what": what, "todo": todo, "ranks": []}]
