"""Trains one small network on handwritten digits in three ways that should give one result.

In one process; with DistributedDataParallel over gloo; with DistributedDataParallel and
fastreduce. All start from the same weights and see the same global batches in the same order,
of which each rank takes an equal part. The network has neither batch normalisation nor dropout,
so only rounding can tell the three apart; and it is smooth, so training does not magnify that.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import pickle
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # after a group exists it would hold that for ever
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

import fastreduce
from fastreduce import terminal
from fastreduce.options import EXIT_STATUS, UsageError, checked, whole
from fastreduce.ranks import run_ranks

# Digits of a step, over all ranks: a number with many divisors.
BATCH = 96
TRAIN = 1437
LEARNING_RATE = 0.1
MOMENTUM = 0.9
# Ranks that share cores can be far apart when they start.
TIMEOUT_SECONDS = 120.0

ONE, GLOO, FAST = "one process", "DDP over gloo", "DDP with fastreduce"

Hook = Callable[[Any, Any], "Future[Tensor]"]


@dataclass(frozen=True)
class Digits:
    """Images of shape (n, 1, 8, 8) with values 0 to 1, and the digits they show."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


@dataclass(frozen=True)
class Settings:
    """What all ways have in common."""

    ranks: int
    epochs: int
    seed: int


@dataclass(frozen=True)
class Result:
    """What a way of training came to; ``all_reduce_seconds`` is None for one process."""

    way: str
    accuracy: float
    parameters: Tensor
    all_reduce_seconds: float | None
    training_seconds: float


@dataclass(frozen=True)
class GradientCheck:
    """The largest difference between two gradients of a batch, and the largest gradient."""

    difference: float
    largest: float


class Clock:
    """Seconds during which at least one all-reduce is under way on this rank."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._under_way = 0
        self._since = 0.0
        self._lock = threading.Lock()  # a hook's future completes on another thread

    def start(self) -> None:
        """An all-reduce begins."""
        with self._lock:
            if self._under_way == 0:
                self._since = time.perf_counter()
            self._under_way += 1

    def stop(self) -> None:
        """An all-reduce has ended."""
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self.seconds += time.perf_counter() - self._since


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``fastreduce demo``."""
    parser.epilog = f"""\
examples:
  fastreduce demo
  fastreduce demo --ranks 4 --epochs 5

{EXIT_STATUS}"""
    parser.add_argument(
        "--ranks", type=checked(_ranks), default=2, help="processes that share the work (2)"
    )
    parser.add_argument("--epochs", type=whole(), default=15, help="passes over the digits (15)")
    parser.add_argument(
        "--seed", type=whole(0, 2**63 - 1), default=0, help="of weights and order (0)"
    )
    parser.set_defaults(run=run)


def _ranks(text: str) -> int:
    """Ranks can only take equal parts of a batch."""
    ranks = whole()(text)
    if BATCH % ranks:
        raise ValueError(f"expected a divisor of the batch of {BATCH} digits, got {ranks}")
    return ranks


def load_digits() -> Digits:
    """scikit-learn's 1,797 digits, always split alike: 1,437 to train with, 360 to test."""
    from sklearn.datasets import load_digits as load

    data = load()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(data.images, dtype=torch.float32)[order].unsqueeze(1) / 16
    labels = torch.tensor(data.target, dtype=torch.int64)[order]
    return Digits(images[:TRAIN], labels[:TRAIN], images[TRAIN:], labels[TRAIN:])


def build_model(seed: int) -> nn.Module:
    """A convolutional network of 151,306 parameters, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 128),
        nn.Tanh(),
        nn.Linear(128, 10),
    )


def global_batches(count: int, settings: Settings) -> list[list[Tensor]]:
    """The indices of every batch of every epoch. An incomplete last batch is dropped, so that
    all ranks' parts are equal."""
    generator = torch.Generator().manual_seed(settings.seed)
    return [
        list(order[: count - count % BATCH].view(-1, BATCH).unbind())
        for order in (torch.randperm(count, generator=generator) for _ in range(settings.epochs))
    ]


def mean_loss(model: nn.Module, digits: Digits, part: Tensor) -> Tensor:
    """The mean cross-entropy of the training digits with these indices."""
    return functional.cross_entropy(model(digits.train_images[part]), digits.train_labels[part])


def gradient(model: nn.Module, digits: Digits, part: Tensor) -> Tensor:
    """The gradient of :func:`mean_loss` as one vector; the model stays as it is."""
    loss = mean_loss(model, digits, part)
    return parameters_to_vector(torch.autograd.grad(loss, list(model.parameters())))


@torch.no_grad()
def accuracy(model: nn.Module, digits: Digits) -> float:
    """The share of the test digits that the model recognises."""
    right = model(digits.test_images).argmax(1) == digits.test_labels
    return float(right.float().mean())


def mean_over_ranks(value: float) -> float:
    """The mean of the ranks' values, which also makes the ranks wait for each other."""
    if not dist.is_initialized():
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def train(
    way: str,
    model: nn.Module,
    digits: Digits,
    settings: Settings,
    *,
    rank: int = 0,
    clock: Clock | None = None,
) -> Result:
    """Trains on this rank's part of every batch; without a clock, on the whole batches.

    Args:
        way: what the result is called.
        model: a DistributedDataParallel model, or the plain one.
        digits: the same on every rank.
        settings: the same on every rank.
        rank: this rank; rank 0 shows the progress.
        clock: the one that the model's communication hook runs.
    """
    parts = 1 if clock is None else settings.ranks
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    epochs = global_batches(len(digits.train_labels), settings)
    gradient(plain, digits, epochs[0][0].chunk(parts)[rank])  # the first pass prepares kernels
    mean_over_ranks(0.0)

    seconds = 0.0
    with terminal.progress(settings.epochs, f"{way:<19}", shown=rank == 0) as bar:
        for batches in epochs:
            losses = []
            start = time.perf_counter()
            for batch in batches:
                optimizer.zero_grad()
                loss = mean_loss(model, digits, batch.chunk(parts)[rank])
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            seconds += time.perf_counter() - start
            # Every rank tests, so that none comes late to the next step.
            reached = accuracy(plain, digits)
            mean = mean_over_ranks(torch.stack(losses).mean().item())
            terminal.step(bar, f"loss {mean:.4f}, test accuracy {reached:.2%}")
    return Result(
        way=way,
        accuracy=reached,
        parameters=parameters_to_vector(plain.parameters()).detach(),
        all_reduce_seconds=None if clock is None else mean_over_ranks(clock.seconds),
        training_seconds=seconds,
    )


def timed(hook: Hook, clock: Clock) -> Hook:
    """The hook, with ``clock`` running from its call until its future is complete."""

    def stop(done: Future[Tensor]) -> Tensor:
        clock.stop()
        return done.value()

    # No annotations: DDP compares them with types, and here they are strings.
    def timed_hook(state, bucket):  # type: ignore[no-untyped-def]
        clock.start()
        return hook(state, bucket).then(stop)

    return timed_hook


def train_over_gloo(digits: Digits, settings: Settings, rank: int) -> Result:
    """DDP as it is without a hook; torch's own allreduce_hook does the same and can be timed."""
    clock = Clock()
    ddp = DistributedDataParallel(build_model(settings.seed))
    ddp.register_comm_hook(dist.group.WORLD, timed(default_hooks.allreduce_hook, clock))
    return train(GLOO, ddp, digits, settings, rank=rank, clock=clock)


def train_with_fastreduce(
    digits: Digits, settings: Settings, rank: int, communicator: fastreduce.Communicator
) -> Result:
    """DDP with fastreduce's hook: what fastreduce.attach(ddp) registers, but timed."""
    clock = Clock()
    ddp = DistributedDataParallel(build_model(settings.seed))
    state = fastreduce.HookState(communicator)
    ddp.register_comm_hook(state, timed(fastreduce.all_reduce_hook, clock))
    return train(FAST, ddp, digits, settings, rank=rank, clock=clock)


def check_gradient(
    digits: Digits, settings: Settings, rank: int, communicator: fastreduce.Communicator
) -> GradientCheck:
    """Compares, at the initial weights, the mean over the ranks of their parts' gradients with
    the gradient of the whole first batch."""
    model = build_model(settings.seed)
    batch = global_batches(len(digits.train_labels), settings)[0][0]
    mean = gradient(model, digits, batch.chunk(settings.ranks)[rank])
    communicator.all_reduce(mean, "mean")
    whole = gradient(model, digits, batch)
    return GradientCheck(
        difference=(mean - whole).abs().max().item(), largest=whole.abs().max().item()
    )


def train_rank(rank: int, digits: Digits, settings: Settings, folder: str) -> None:
    """The process of one rank: both ways with DDP, one after the other, in one process group.
    Rank 0 leaves the results in ``folder``."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    try:
        gloo = train_over_gloo(digits, settings, rank)
        with fastreduce.Communicator(timeout=TIMEOUT_SECONDS) as communicator:
            check = check_gradient(digits, settings, rank, communicator)
            fast = train_with_fastreduce(digits, settings, rank, communicator)
        if rank == 0:
            Path(folder, "results").write_bytes(pickle.dumps(([gloo, fast], check)))
    finally:
        # Models are in cycles and hold the group, whose threads must end before the interpreter.
        gc.collect()
        dist.destroy_process_group()


def train_in_ranks(digits: Digits, settings: Settings) -> tuple[list[Result], GradientCheck]:
    """The two ways with DDP, in new processes."""
    with tempfile.TemporaryDirectory(prefix="fastreduce-demo-") as folder:
        run_ranks(train_rank, settings.ranks, digits, settings, folder)
        results: tuple[list[Result], GradientCheck] = pickle.loads(
            Path(folder, "results").read_bytes()
        )
    return results


def train_in_one_process(digits: Digits, settings: Settings) -> Result:
    """The reference: this process, on the whole batches, with one thread as every rank."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return train(ONE, build_model(settings.seed), digits, settings)
    finally:
        torch.set_num_threads(threads)


def table(results: Sequence[Result]) -> str:
    """One row for each result; the first one is what the others' parameters are compared with."""
    rows = [
        ("", "test", "parameters differ", "seconds in", "seconds of"),
        ("", "accuracy", "by at most", "all-reduce", "training"),
    ]
    for result in results:
        difference = (result.parameters - results[0].parameters).abs().max().item()
        communication = result.all_reduce_seconds
        rows.append(
            (
                result.way,
                f"{result.accuracy:.2%}",
                "-" if result is results[0] else f"{difference:.1e}",
                "-" if communication is None else f"{communication:.3f}",
                f"{result.training_seconds:.3f}",
            )
        )
    return "\n".join(f"{a:<19}  {b:>8}  {c:>17}  {d:>10}  {e:>10}" for a, b, c, d, e in rows)


def notes(check: GradientCheck, settings: Settings) -> str:
    """What the columns mean, and what averaging does not change."""
    relative = check.difference / check.largest
    parts = "1 part" if settings.ranks == 1 else f"{settings.ranks} parts"
    return "\n".join(
        [
            "Parameters are compared with those of the one process. An all-reduce lasts from",
            "its launch to the completion of the hook's future, waiting for slower ranks",
            "included: mean over the ranks.",
            "",
            "What averaging does not change: the mean of equal parts' means is the mean of the",
            f"whole batch. Measured for one batch of {BATCH} in {parts}, at the initial weights,",
            "in float32: the mean of the parts' gradients and the gradient of the whole batch",
            f"differ by at most {check.difference:.1e}, {relative:.1e} of the largest gradient.",
        ]
    )


def run(options: argparse.Namespace) -> int:
    """Trains in the three ways, prints the table and returns the exit status."""
    if importlib.util.find_spec("sklearn") is None:
        raise UsageError("needs scikit-learn: pip install scikit-learn")
    settings = Settings(options.ranks, options.epochs, options.seed)
    digits = load_digits()
    print(
        f"{len(digits.train_labels)} digits to train with, {len(digits.test_labels)} to test; "
        f"batches of {BATCH}; ranks: {settings.ranks}",
        flush=True,
    )
    one = train_in_one_process(digits, settings)
    results, check = train_in_ranks(digits, settings)
    print(f"\n{table([one, *results])}\n\n{notes(check, settings)}")
    return 0
