"""When training goes wrong: one rank fails in the middle of a step, the others are told, and all
that are left form a new group and end where an undisturbed run ends, bit for bit.

Ranks in which nobody dies serve one test after the other: what is left of one test's failure
would show in the next.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import Ranks, join_group, nothing_left, same_bits, shared_files
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce

LONG = 60.0  # who is told only by this timeout is told too late
SHORT = 3.0  # for those that nobody tells
AT_ONCE = 2.0

STEPS = 6
FAILED = 3  # not one of the first two: DDP itself talks to its peers there
SHARDS = 4
MORE_SHARDS = 8  # four of a rank: the last one completes sums of others
ABSURD = 1 << 60  # elements

DISCARDED = re.compile(
    r"Of this step's gradients (\d+) elements had been averaged before: discard them all; "
    r"parameters and optimizer are as they were"
)


class Fault(Exception):
    """What goes wrong on a rank."""


class Raising(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Fault("in backward")


class Trap(nn.Module):
    """Passes on what it is given, unless it is to fail."""

    where = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "in forward":
            raise Fault(self.where)
        if self.where == "out of memory":
            torch.empty(ABSURD)
        return Raising.apply(x) if self.where == "in backward" else x


class Net(nn.Module):
    """Its buckets are small ones, and one so large that it is moved into shared memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 256)
        self.norm = nn.BatchNorm1d(256)
        self.trap = Trap()
        self.wide = nn.Linear(256, 300)
        self.last = nn.Linear(300, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.trap(torch.relu(self.norm(self.first(x))))
        return self.last(torch.relu(self.wide(h)))


def loss_of(model: nn.Module, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + part)
    x = torch.randn(8, 20, generator=generator)
    y = torch.randint(0, 5, (8,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [each["momentum_buffer"] for each in optimizer.state.values()]


def digest(tensors: Any) -> str:
    bits = hashlib.sha256()
    for tensor in tensors:
        bits.update(tensor.detach().numpy().tobytes())
    return bits.hexdigest()


class Run:
    """A rank's training: all that is made anew after a failure."""

    def __init__(self, timeout: float, saved: dict[str, Any] | None = None) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        if saved is not None:
            self.net.load_state_dict(saved["net"])
            self.optimizer.load_state_dict(saved["optimizer"])
        # Views, so that .grad shows what has been averaged also where the step then fails.
        self.ddp = DistributedDataParallel(
            self.net, bucket_cap_mb=0.01, broadcast_buffers=False, gradient_as_bucket_view=True
        )
        self.state = fastreduce.attach(self.ddp, timeout=timeout)
        self.state.check(self.optimizer)

    def save(self) -> dict[str, Any]:
        return copy.deepcopy(
            {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
        )

    def bits(self) -> dict[str, str]:
        return {
            "parameters": digest(self.net.parameters()),
            "momentum": digest(moments(self.optimizer)),
            "buffers": digest(self.net.buffers()),
        }

    def backward(self, step: int, where: str = "") -> None:
        self.net.trap.where = where
        self.optimizer.zero_grad()
        if where == "before forward":
            raise Fault(where)
        loss = loss_of(self.ddp, step, dist.get_rank())
        if where == "before backward":
            raise Fault(where)
        if where == "in a gradient's hook":
            self.net.first.weight.register_hook(raising)
        loss.backward()

    def backward_of_shards(self, step: int, count: int = SHARDS) -> None:
        self.optimizer.zero_grad()
        for shard in self.state.shards(count):
            loss_of(self.ddp, step, shard).backward()

    def train(self, begin: int, end: int, *, shards: bool = False) -> None:
        for step in range(begin, end):
            if shards:
                self.backward_of_shards(step)
            else:
                self.backward(step)
            self.optimizer.step()

    def end(self) -> None:
        """Down to a process as it was before there was a group."""
        self.state.close()
        dist.destroy_process_group()
        assert not [t.name for t in threading.enumerate() if t.name.startswith("fastreduce")]


def raising(grad: torch.Tensor) -> None:
    raise Fault("in a gradient's hook")


def wait_for(path: str) -> None:
    deadline = time.monotonic() + LONG
    while not Path(path).exists():
        assert time.monotonic() < deadline, f"nobody has made {path}"
        time.sleep(0.01)


def gradients_of(saved: dict[str, Any], step: int, part: int) -> list[torch.Tensor]:
    alone = Net()
    alone.load_state_dict(saved["net"])
    loss_of(alone, step, part).backward()
    return [parameter.grad for parameter in alone.parameters()]


def tree_sum(parts: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    """In the order of fastreduce's sums; of a power of two."""
    while len(parts) > 1:
        parts = [
            [a + b for a, b in zip(left, right, strict=True)]
            for left, right in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


def check_as_before(run: Run, saved: dict[str, Any]) -> None:
    """The failed step has changed neither a parameter nor the optimizer's state."""
    for name, parameter in run.net.named_parameters():
        assert same_bits(parameter.detach(), saved["net"][name]), name
    kept = [each["momentum_buffer"] for each in saved["optimizer"]["state"].values()]
    for now, before in zip(moments(run.optimizer), kept, strict=True):
        assert same_bits(now, before)


def check_buffers(run: Run, saved: dict[str, Any], step: int, parts: list[int]) -> None:
    """Nobody has written those that are not broadcast but this rank's own forward passes."""
    alone = Net()
    alone.load_state_dict(saved["net"])
    for part in parts:
        loss_of(alone, step, part)
    for now, expected in zip(run.net.buffers(), alone.buffers(), strict=True):
        assert same_bits(now, expected)


def check_averaged(run: Run, saved: dict[str, Any], step: int, parts: int, told: int) -> None:
    """Gradients are averaged, or what they were: as many of each as the error says. ``parts``: of
    the global batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = [gradients_of(saved, step, part) for part in range(parts)]
    mine = tree_sum(every[rank * parts // ranks : (rank + 1) * parts // ranks])
    averaged = 0
    for grad, own, total in zip(run.net.parameters(), mine, tree_sum(every), strict=True):
        mean = total / parts  # exact: a power of two
        assert not same_bits(own, mean)
        if same_bits(grad.grad, mean):
            averaged += mean.numel()
        else:
            assert same_bits(grad.grad, own)
    assert averaged == told


def survive(
    run: Run, saved: dict[str, Any], step: int, backward: Callable[[], None], parts: int
) -> dict[str, Any]:
    """A step that fails because of another rank: what its error says, which has to be true."""
    began = time.monotonic()
    with pytest.raises(RuntimeError) as raised:
        backward()
    ended = time.monotonic()
    error = run.state.communicator.error
    assert isinstance(error, fastreduce.CommunicatorError)
    # The same words from backward(), which C++ has passed on.
    assert str(error) in str(raised.value) and type(error).__name__ in str(raised.value)
    told = DISCARDED.search(str(error))
    assert told is not None, str(error)
    assert len(DISCARDED.findall(str(error))) == 1
    assert error.intact
    check_as_before(run, saved)
    own = parts // dist.get_world_size()
    check_buffers(run, saved, step, [dist.get_rank() * own + part for part in range(own)])
    check_averaged(run, saved, step, parts, int(told[1]))
    # The old communicator is of no more use, and says so in bounded time.
    with pytest.raises(fastreduce.CommunicatorError):
        run.state.communicator.barrier()
    return {
        "type": type(error).__name__,
        "peer": error.peer,
        "averaged": int(told[1]),
        "seconds": ended - began,
        "ended": ended,
    }


# -- ranks, and what they should end with -----------------------------------------------------


@pytest.fixture(scope="module")
def living() -> Iterator[Callable[[int], Ranks]]:
    """Ranks that live through this file; afterwards no process and nothing in /dev/shm is left."""
    before = shared_files()
    made: dict[int, Ranks] = {}
    ended: list[Ranks] = []

    def get(world_size: int) -> Ranks:
        group = made.get(world_size)
        if group is None or group.failed or not all(p.is_alive() for p in group.processes):
            if group is not None:
                ended.append(group)
            group = made[world_size] = Ranks(world_size)
        return group

    yield get
    for group in [*ended, *made.values()]:
        group.close()
    assert nothing_left(before)


def undisturbed(shards: bool) -> dict[str, str]:
    run = Run(LONG)
    run.train(0, STEPS, shards=shards)
    run.state.close()
    return run.bits()


@pytest.fixture(scope="module")
def expected(living) -> Callable[..., list[dict[str, str]]]:
    """What every rank of a run in which nothing fails ends with."""
    known: dict[tuple[int, bool], list[dict[str, str]]] = {}

    def get(world_size: int, *, shards: bool = False) -> list[dict[str, str]]:
        key = world_size, shards
        if key not in known:
            results = living(world_size).run(undisturbed, shards)
            assert len({result["parameters"] for result in results}) == 1
            known[key] = results
        return known[key]

    return get


def test_checked_training(living, expected):
    """check() lets through what has been averaged, and shards sum what ranks sum."""
    [first, second] = expected(2)
    assert first["momentum"] == second["momentum"] and first["buffers"] != second["buffers"]
    two, four = expected(2, shards=True), expected(4, shards=True)
    assert two[0]["parameters"] == four[0]["parameters"] != first["parameters"]


# -- a rank fails and lives -------------------------------------------------------------------

WHERE = [
    "before forward",
    "in forward",
    "out of memory",
    "before backward",
    "in backward",
    "in a gradient's hook",
]


def fault_of(where: str) -> Any:
    if where == "out of memory":
        return pytest.raises(RuntimeError, match="can't allocate memory")
    return pytest.raises(Fault, match=where)


def disturbed(folder: str, where: str, how: str, faulty: int) -> tuple[Any, dict[str, str]]:
    """Trains, fails, begins anew and ends."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Run(SHORT if how == "idles" else LONG)
    run.train(0, FAILED)
    saved = run.save()
    told = None
    if rank == faulty:
        with fault_of(where), run.state if how == "leaves" else contextlib.nullcontext():
            run.backward(FAILED, where)
        # It lives on: whoever is told is told by the state it has left, or by nobody.
        for peer in set(range(ranks)) - {rank}:
            wait_for(f"{folder}/told-{peer}")
        check_as_before(run, saved)
    else:
        told = survive(run, saved, FAILED, lambda: run.backward(FAILED), ranks)
        Path(folder, f"told-{rank}").touch()
    return told, begin_anew(run, folder, rank, ranks, saved, FAILED)


def begin_anew(
    run: Run, folder: str, rank: int, ranks: int, saved: dict[str, Any], step: int, **how: bool
) -> dict[str, str]:
    """In the same process: a new group, a new model, the parameters of the last good step."""
    run.end()
    join_group(rank, ranks, folder)
    again = Run(LONG, saved)
    again.train(step, STEPS, **how)
    again.state.close()
    return again.bits()


def total_elements() -> int:
    return sum(parameter.numel() for parameter in Net().parameters())


@pytest.mark.parametrize("how", ["leaves", "idles"])
@pytest.mark.parametrize("where", WHERE)
def test_rank_that_fails(living, expected, tmp_path, where, how):
    want = expected(2)
    faulty = WHERE.index(where) % 2
    results = living(2).run(disturbed, str(tmp_path), where, how, faulty)
    told = results[1 - faulty][0]
    check_told(told, how, faulty, where)
    assert [result for _, result in results] == want


@pytest.mark.parametrize("how", ["leaves", "idles"])
def test_one_of_four_fails(living, expected, tmp_path, how):
    """All survivors name the rank that failed, not one that gave up because of it."""
    want = expected(4)
    results = living(4).run(disturbed, str(tmp_path), "in backward", how, 2)
    for rank in (0, 1, 3):
        check_told(results[rank][0], how, 2, "in backward")
    assert [result for _, result in results] == want


def check_told(told: dict[str, Any], how: str, faulty: int, where: str) -> None:
    if how == "leaves":
        assert told["type"] == "PeerClosedError"
        assert told["seconds"] < AT_ONCE
    else:
        assert told["type"] == "CommunicatorTimeoutError"
        assert SHORT / 2 < told["seconds"] < SHORT + AT_ONCE  # not once for every bucket
    assert told["peer"] == faulty
    last = sum(parameter.numel() for parameter in Net().last.parameters())
    if where not in ("in backward", "in a gradient's hook"):
        assert told["averaged"] == 0
    elif how == "idles":  # who leaves gives up what it has in its queue
        assert last <= told["averaged"] < total_elements()


# -- a rank is killed -------------------------------------------------------------------------


def killed_run(folder: str, victims: list[int], moment: str) -> tuple[Any, dict[str, str]]:
    """Shards, so that fewer ranks end with the same bits."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = Run(LONG)
    run.train(0, FAILED, shards=True)
    saved = run.save()
    if rank in victims:
        die_in_backward(run, folder, moment)
    told = survive(run, saved, FAILED, lambda: run.backward_of_shards(FAILED), SHARDS)
    died = [float(Path(folder, f"died-{victim}").read_text() or "inf") for victim in victims]
    told["seconds"] = told["ended"] - min(died)
    survivors = [peer for peer in range(ranks) if peer not in victims]
    result = begin_anew(
        run, folder, survivors.index(rank), len(survivors), saved, FAILED, shards=True
    )
    return told, result


def die_in_backward(run: Run, folder: str, moment: str) -> None:
    """Before any bucket has been averaged, or when all but those of the first layers have been."""
    average, futures = run.state.average, []

    def noted(bucket):
        futures.append(average(bucket))
        return futures[-1]

    def die(grad):
        if run.ddp.require_backward_grad_sync:  # the rank's last shard
            while not all(future.done() for future in futures):
                time.sleep(0.001)
            Path(folder, f"died-{dist.get_rank()}").write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

    run.state.average = noted
    layer = run.net.last if moment == "first bucket" else run.net.first
    layer.weight.register_hook(die)
    run.backward_of_shards(FAILED)


@pytest.mark.parametrize("moment", ["first bucket", "later"])
@pytest.mark.parametrize("world_size, victims", [(2, [0]), (4, [1, 2])])
def test_killed_between_buckets(ranks, expected, tmp_path, world_size, victims, moment):
    want = expected(world_size, shards=True)[0]
    group = ranks(world_size)
    for rank in range(world_size):
        for victim in victims:
            (tmp_path / f"died-{victim}").touch()
        group.start(rank, killed_run, str(tmp_path), victims, moment)
    for rank in set(range(world_size)) - set(victims):
        told, result = group.result(rank)
        assert told["type"] == "PeerLostError" and told["peer"] in victims
        assert 0 < told["seconds"] < AT_ONCE
        if moment == "first bucket":
            assert told["averaged"] == 0
        else:
            later = [*Net().wide.parameters(), *Net().last.parameters()]
            assert sum(p.numel() for p in later) <= told["averaged"] < total_elements()
        # Not the buffers: which shards a rank sees depends on how many there are.
        assert result["parameters"] == want["parameters"]
        assert result["momentum"] == want["momentum"]


# -- ranks that do not do the same ------------------------------------------------------------


def skipping(folder: str, skipped: int) -> tuple[Any, dict[str, str]]:
    """One rank leaves out a batch, and is at its end while the other waits in its last step."""
    rank = dist.get_rank()
    run = Run(LONG)
    run.train(0, skipped)
    good = run.save()
    told = None
    if rank == 1:
        run.train(skipped + 1, STEPS)
        run.state.close()
    else:
        run.train(skipped, STEPS - 1)
        saved = run.save()
        told = survive(run, saved, STEPS - 1, lambda: run.backward(STEPS - 1), 2)
    # From before the batch was left out: since then, ranks averaged gradients of different steps.
    return told, begin_anew(run, folder, rank, 2, good, skipped)


def test_skipped_batch(living, expected, tmp_path):
    want = expected(2)
    (told, first), (_, second) = living(2).run(skipping, str(tmp_path), FAILED)
    check_told(told, "leaves", 1, "before forward")
    assert [first, second] == want


def measuring_alone(folder: str, who: int, between: str) -> tuple[Any, dict[str, str]]:
    """A metric over all ranks, by the communicator of the gradients; but one rank alone wants it.
    The others' first bucket meets it."""
    rank = dist.get_rank()
    run = Run(LONG)
    run.train(0, FAILED)
    saved = run.save()
    if rank == who:
        if between == "forward and backward":
            loss_of(run.ddp, FAILED, rank)
        metric = torch.arange(3.0) + rank
        with pytest.raises(fastreduce.MismatchError) as raised:
            run.state.communicator.all_reduce(metric)
        assert metric.tolist() == [rank, rank + 1, rank + 2] and raised.value.intact
        check_as_before(run, saved)
        told = {"type": type(raised.value).__name__, "peer": raised.value.peer, "averaged": 0}
    else:
        told = survive(run, saved, FAILED, lambda: run.backward(FAILED), 2)
    return told, begin_anew(run, folder, rank, 2, saved, FAILED)


@pytest.mark.parametrize("between", ["steps", "forward and backward"])
@pytest.mark.parametrize("who", [0, 1])
def test_metric_of_one_rank(living, expected, tmp_path, who, between):
    want = expected(2)
    results = living(2).run(measuring_alone, str(tmp_path), who, between)
    for told, _ in results:
        assert told["type"] == "MismatchError" and told["peer"] == 1 and told["averaged"] == 0
    assert [result for _, result in results] == want


def measuring() -> dict[str, str]:
    run = Run(LONG)
    for step in range(STEPS):
        run.optimizer.zero_grad()
        loss = loss_of(run.ddp, step, dist.get_rank())
        metric = torch.stack([loss.detach(), torch.tensor(float(dist.get_rank()))])
        run.state.communicator.all_reduce(metric)
        assert metric[1] == 0.5
        loss.backward()
        run.optimizer.step()
        run.state.communicator.all_reduce(metric, "max")
    run.state.close()
    return run.bits()


def test_metric_of_all_ranks(living, expected):
    assert living(2).run(measuring) == expected(2)


def unaveraged(run: Run, how: str) -> None:
    run.optimizer.zero_grad()
    rank = dist.get_rank()
    if how == "unwrapped":
        loss_of(run.net, FAILED, rank).backward()
    else:
        for _ in range(2):
            with run.ddp.no_sync():
                loss_of(run.ddp, FAILED, rank).backward()
    with pytest.raises(fastreduce.UnsynchronizedError):
        run.state.check_synchronized()
    run.optimizer.step()


def unsynchronized(folder: str, who: list[int], how: str) -> tuple[Any, dict[str, str]]:
    """Gradients that have not been averaged never reach the parameters."""
    rank = dist.get_rank()
    run = Run(LONG)
    run.train(0, FAILED)
    saved = run.save()
    refused = pytest.raises(fastreduce.UnsynchronizedError, match="have not been averaged")
    if len(who) == 2:
        # Nobody waits for anybody: all can put it right, without a new group.
        with refused:
            unaveraged(run, how)
        check_as_before(run, saved)
        run.net.load_state_dict(saved["net"])  # buffers, which forward has changed
        run.train(FAILED, STEPS)
        run.state.close()
        return None, run.bits()
    told = None
    if rank in who:
        with refused, run.state:
            unaveraged(run, how)
        check_as_before(run, saved)
    else:
        told = survive(run, saved, FAILED, lambda: run.backward(FAILED), 2)
    return told, begin_anew(run, folder, rank, 2, saved, FAILED)


@pytest.mark.parametrize("how", ["unwrapped", "no_sync"])
@pytest.mark.parametrize("who", [[0], [1], [0, 1]])
def test_unsynchronized_step(living, expected, tmp_path, who, how):
    want = expected(2)
    results = living(2).run(unsynchronized, str(tmp_path), who, how)
    if len(who) == 1:
        check_told(results[1 - who[0]][0], "leaves", who[0], "before forward")
    assert [result for _, result in results] == want


# -- what an error says -----------------------------------------------------------------------


def stepping_all_the_same(folder: str) -> str:
    """A script that goes on to the optimizer after a backward pass that has failed."""
    rank = dist.get_rank()
    run = Run(LONG)
    run.train(0, FAILED)
    saved = run.save()
    if rank == 1:
        run.state.close()
        told = "refused"
    else:
        survive(run, saved, FAILED, lambda: run.backward(FAILED), 2)
        try:
            run.optimizer.step()
            told = "stepped"
        except fastreduce.UnsynchronizedError:
            check_as_before(run, saved)
            told = "refused"
    begin_anew(run, folder, rank, 2, saved, FAILED)
    return told


def test_failed_step_is_not_synchronized(living, tmp_path):
    assert living(2).run(stepping_all_the_same, str(tmp_path)) == ["refused"] * 2


class Rows(nn.Module):
    """Two buckets, one of them of a sparse gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(10, 20, sparse=True)
        self.last = nn.Linear(20, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.rows(x.argmax(1)))


MODES: dict[str, dict[str, Any]] = {
    "weights": {"weight": True},
    "record": {"state": {"record": True}},
    "none_if_empty": {"weight": True, "state": {"none_if_empty": True}},
    "static graph": {"ddp": {"static_graph": True}},
    "counted use": {
        "ddp": {"find_unused_parameters": True},
        "state": {"count_unused": False},
    },
    "sparse": {"module": Rows},
    "bfloat16 shards": {"dtype": torch.bfloat16, "shards": True},
}


def failing_in(mode: str, folder: str) -> list[str]:
    """What a survivor is told when a peer closes before the step, in the Future and in error."""
    how, rank = MODES[mode], dist.get_rank()
    dtype = how.get("dtype", torch.float32)
    net = how.get("module", Net)().to(dtype)
    ddp = DistributedDataParallel(
        net, bucket_cap_mb=0.01, broadcast_buffers=False, **how.get("ddp", {})
    )
    state = fastreduce.attach(ddp, timeout=LONG, **how.get("state", {}))

    def backward() -> None:
        ddp.zero_grad()
        for _ in state.shards(SHARDS) if how.get("shards") else [0]:
            if how.get("weight"):
                state.weight(8)
            ddp(torch.ones(8, 20, dtype=dtype)).sum().backward()

    for _ in range(3):  # DDP itself talks to its peers until it has settled its buckets
        backward()
    told = []
    if rank == 0:
        with pytest.raises(RuntimeError) as raised:
            backward()
        assert isinstance(state.communicator.error, fastreduce.PeerClosedError)
        told = [str(raised.value), str(state.communicator.error)]
    state.close()
    dist.destroy_process_group()
    join_group(rank, 2, folder)
    return told


@pytest.mark.parametrize("mode", MODES)
def test_error_tells_of_the_step(living, tmp_path, mode):
    texts, _ = living(2).run(failing_in, mode, str(tmp_path))
    for text in texts:
        found = DISCARDED.findall(text)
        assert found == ["0"], text


def last_bucket_differs(folder: str) -> tuple[int, int]:
    """The last bucket fails on the thread of backward(), while another thread still completes the
    Futures of those before: here it is held up, so that it is always the later one."""
    rank = dist.get_rank()
    run = Run(LONG)
    run.train(0, FAILED)
    saved = run.save()
    told = 0, 0
    if rank == 0:
        settle = fastreduce.HookState._settle

        def late(*args):
            if threading.current_thread() is not threading.main_thread():
                time.sleep(0.1)
            return settle(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fastreduce.HookState, "_settle", late)
            survived = survive(run, saved, FAILED, lambda: run.backward(FAILED), 2)
        told = survived["averaged"], total_elements()
        assert survived["type"] == "MismatchError"
    else:
        average = run.state.average

        def other(bucket):
            if bucket.is_last():
                run.state.communicator.all_reduce(torch.ones(3))
            return average(bucket)

        run.state.average = other
        with pytest.raises(RuntimeError, match="ranks disagree"):
            run.backward(FAILED)
    begin_anew(run, folder, rank, 2, saved, FAILED)
    return told


def test_error_of_the_last_bucket_counts_those_before(living, tmp_path):
    [(averaged, total), _] = living(2).run(last_bucket_differs, str(tmp_path))
    assert 0 < averaged < total


def tells_of_buffers(folder: str) -> str:
    rank = dist.get_rank()
    run = Run(LONG)
    run.train(0, FAILED)
    saved = run.save()
    before = digest(run.net.buffers())
    text = ""
    if rank == 1:
        run.state.close()
    else:
        survive(run, saved, FAILED, lambda: run.backward(FAILED), 2)
        text = str(run.state.communicator.error)
        assert digest(run.net.buffers()) != before
    begin_anew(run, folder, rank, 2, saved, FAILED)
    return text


def test_error_tells_of_buffers(living, tmp_path):
    """BatchNorm's statistics are of the failed step's forward pass: the one thing that is not as
    it was."""
    assert "buffers" in living(2).run(tells_of_buffers, str(tmp_path))[0]


# -- without a new group ----------------------------------------------------------------------


def retrying(where: str) -> dict[str, str]:
    """A rank that fails before it has sent anything does its step again; its peer waits."""
    run = Run(LONG)
    run.train(0, FAILED)
    saved = run.save()
    if dist.get_rank() == 1:
        with fault_of(where):
            run.backward(FAILED, where)
        check_as_before(run, saved)
        run.net.load_state_dict(saved["net"])  # buffers, which forward may have changed
    run.train(FAILED, STEPS)
    run.state.close()
    return run.bits()


@pytest.mark.parametrize("where", WHERE[:4])
def test_step_is_done_again(living, expected, where):
    assert living(2).run(retrying, where) == expected(2)


def loop_over_shards(state: fastreduce.HookState, ddp: nn.Module, fail: bool) -> None:
    own = MORE_SHARDS // dist.get_world_size()
    shards = state.shards(MORE_SHARDS)
    for shard in shards:
        if fail and shard % own == own - 1:
            raise Fault("in the last shard")
        loss_of(ddp, 0, shard).backward()


def failing_shards() -> bool:
    """The loop over shards fails, and its exception is kept, with the frame that holds the loop. A
    new state for the same module does not see the old one's sums."""
    torch.manual_seed(0)
    net = nn.Linear(20, 5)
    parts = []
    for shard in range(MORE_SHARDS):
        net.zero_grad()
        loss_of(net, 0, shard).backward()
        parts.append([parameter.grad for parameter in net.parameters()])
    net.zero_grad()
    ddp = DistributedDataParallel(net)
    state = fastreduce.attach(ddp, timeout=LONG)
    with pytest.raises(Fault) as kept:
        loop_over_shards(state, ddp, True)
    state.close()
    net.zero_grad()
    again = DistributedDataParallel(net)
    state = fastreduce.attach(again, timeout=LONG)
    loop_over_shards(state, again, False)
    state.close()
    assert kept.tb is not None
    return all(
        same_bits(parameter.grad, total / MORE_SHARDS)
        for parameter, total in zip(net.parameters(), tree_sum(parts), strict=True)
    )


def test_shards_that_fail_leave_nothing(living):
    assert living(2).run(failing_shards) == [True, True]
