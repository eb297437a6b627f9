"""What lossy wire formats of the gradients do to training: real data, several seeds, CPU ranks.

    python -m benchmarks.convergence                        # all of it, about an hour on 2 cores
    python -m benchmarks.convergence --formats fp32 int8    # some formats
    python -m benchmarks.convergence --seeds 1 --ranks 2    # a coarse look

Three workloads: ``digits``, the demo's network on scikit-learn's digits with its SGD and momentum;
``characters``, a small transformer on Python's own sources, with AdamW (characters.py); and
``characters_long``, the same with six times the steps, for some formats with feedback.

A run trains a fresh model with DDP for a fixed number of steps, then tests it on held-out data:
the mean cross-entropy and the share of right answers. A seed gives the initial weights and the
global batches, whatever the ranks and the format; each rank takes an equal part of every batch.
Every bucket is compressed, however small.

Formats with and without error feedback stand beside fp32 (DDP without a hook), fastreduce in
float32, and torch's hooks. torch refuses its bf16 hook by name where there is no NCCL, so the
same function is registered under another name. PowerSGD compresses from the third step on, the
first that torch admits, with torch's own error feedback.

After each run the results are written to a JSON file; a run that is there already, with the same
settings, is not repeated: after a change of what is measured, say ``--again``. From that file come
a table and, if matplotlib is installed, a plot.

Targets: "1 sd" says that a format's mean over the seeds differs from fp32's by no more than the
standard deviation of fp32 over the seeds; "1 point" that at most 1 % of the answers are lost.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import math
import os
import platform
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from benchmarks import characters
from benchmarks.convergence_report import Book, Run, plot, table
from benchmarks.convergence_variants import FORMATS, LONG, NAMES, VARIANTS, Variant
from benchmarks.ranks import join_group
from benchmarks.results import headline, machine
from fastreduce import demo  # also imports what must come before a group
from fastreduce.ranks import run_ranks

RESULTS = Path(__file__).with_name("results") / "convergence"
DIGITS_EPOCHS = 15
TEXT_STEPS, LONG_STEPS, TEXT_BATCH, TEXT_RATE, TEXT_WARM_UP = 500, 3000, 16, 1e-2, 20

Batch = tuple[Tensor, Tensor]


class Digits:
    """The demo's network, data and optimizer."""

    name = "digits"
    variants = NAMES

    def __init__(self, steps: int | None) -> None:
        self.data = demo.load_digits()
        self.test: Batch = (self.data.test_images, self.data.test_labels)
        self.steps = steps or DIGITS_EPOCHS * (demo.TRAIN // demo.BATCH)
        self.settings = {
            "workload": self.name,
            "steps": self.steps,
            "batch": demo.BATCH,
            "parameters": sum(p.numel() for p in self.build(0).parameters()),
            "optimizer": f"SGD, momentum {demo.MOMENTUM}, learning rate {demo.LEARNING_RATE}",
        }

    def build(self, seed: int) -> nn.Module:
        return demo.build_model(seed)

    def batches(self, seed: int) -> Iterator[Batch]:
        epochs = math.ceil(self.steps / (demo.TRAIN // demo.BATCH))
        order = demo.global_batches(demo.TRAIN, demo.Settings(ranks=1, epochs=epochs, seed=seed))
        for part in [part for epoch in order for part in epoch][: self.steps]:
            yield self.data.train_images[part], self.data.train_labels[part]

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=demo.LEARNING_RATE, momentum=demo.MOMENTUM)

    def rate(self, step: int) -> float:
        """The learning rate of a step, as a part of the highest."""
        return 1.0


class Characters:
    """The transformer of characters.py, with a warm-up and a linear decay of the learning rate."""

    name = "characters"
    variants = NAMES
    default_steps = TEXT_STEPS

    def __init__(self, steps: int | None) -> None:
        self.text = characters.load_text()
        # Every fourth window: 15,000 characters are enough.
        starts = torch.arange(0, len(self.text.test), 4 * characters.CONTEXT)[:-1]
        self.test: Batch = characters.windows(self.text.test, starts)
        self.steps = steps or self.default_steps
        self.settings = {
            "workload": self.name,
            "steps": self.steps,
            "batch": TEXT_BATCH,
            "optimizer": f"AdamW, betas 0.9 and 0.95, learning rate {TEXT_RATE:g}, "
            f"warm-up of {TEXT_WARM_UP} steps, linear decay",
            "parameters": sum(p.numel() for p in self.build(0).parameters()),
            "text": f"sources of Python {platform.python_version()}: {self.text.digest}",
            "bigram_loss": round(characters.bigram_loss(self.text), 4),
        }

    def build(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return characters.Transformer(self.text.kinds)

    def batches(self, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        last = len(self.text.train) - characters.CONTEXT
        for _ in range(self.steps):
            starts = torch.randint(last, (TEXT_BATCH,), generator=generator)
            yield characters.windows(self.text.train, starts)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=TEXT_RATE, betas=(0.9, 0.95), fused=True)

    def rate(self, step: int) -> float:
        """The learning rate of a step, as a part of the highest."""
        return min((step + 1) / TEXT_WARM_UP, 1.0) * (1.0 - step / self.steps)


class LongCharacters(Characters):
    """The same until it hardly learns more."""

    name = "characters_long"
    variants = LONG
    default_steps = LONG_STEPS


Workload = Digits | Characters
WORKLOADS: list[type[Workload]] = [Digits, Characters, LongCharacters]
VARIANTS_OF = {kind.name: kind.variants for kind in WORKLOADS}


def mean_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy of a batch's answers."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


@torch.no_grad()
def evaluate(model: nn.Module, batch: Batch) -> tuple[float, float]:
    """The share of right answers, and the mean cross-entropy."""
    inputs, targets = batch
    scores = model(inputs)
    loss = functional.cross_entropy(scores.flatten(0, -2), targets.flatten())
    return (scores.argmax(-1) == targets).double().mean().item(), loss.item()


@torch.no_grad()
def ranks_agree(model: nn.Module) -> bool:
    """Whether all ranks have the same parameters, bit for bit."""
    bits = nn.utils.parameters_to_vector(model.parameters()).view(torch.int32)
    low, high = bits.clone(), bits.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    return torch.equal(low, high)


def train(workload: Workload, variant: Variant, seed: int) -> Run:
    """The figures of one run, on this rank's part of every batch."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(workload.build(seed))
    state = variant.average(ddp, workload.steps)
    optimizer = workload.optimizer(ddp.parameters())
    schedule = LambdaLR(optimizer, workload.rate)
    begin = time.perf_counter()
    for inputs, targets in workload.batches(seed):
        optimizer.zero_grad()
        mean_loss(ddp, (inputs.chunk(ranks)[rank], targets.chunk(ranks)[rank])).backward()
        optimizer.step()
        schedule.step()
    seconds = time.perf_counter() - begin
    accuracy, loss = evaluate(ddp.module, workload.test)
    figures = {
        "accuracy": round(accuracy, 5),
        "loss": round(loss, 6) if math.isfinite(loss) else None,
        "ranks_agree": ranks_agree(ddp.module),
        "seconds": round(seconds, 2),
    }
    if state is not None:
        state.close()
    return figures


def rank_main(
    rank: int, ranks: int, folder: str, steps: int | None, keys: Sequence[Run], path: Path
) -> None:
    """One rank's process: runs one after the other. Rank 0 prints them and keeps the book."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    join_group(rank, ranks, Path(folder))
    workloads = [kind(steps) for kind in WORKLOADS]
    variants = {variant.name: variant for variant in VARIANTS}
    book = Book(path, [workload.settings for workload in workloads])
    about = {"machine": book.number(book.machines, machine())}
    try:
        for key in keys:
            name = book.settings[key["settings"]]["workload"]
            workload = next(workload for workload in workloads if workload.name == name)
            figures = train(workload, variants[key["variant"]], key["seed"])
            gc.collect()  # models are in cycles, and hold the group
            if rank == 0:
                print(line(name, key, figures), flush=True)
                book.enter(key, figures | about)
    finally:
        gc.collect()
        dist.destroy_process_group()


def line(name: str, key: Run, figures: Run) -> str:
    """What is printed of a run."""
    loss = "diverged" if figures["loss"] is None else f"{figures['loss']:.4f}"
    text = f"{name:<10}  {key['ranks']} ranks  seed {key['seed']}  {key['variant']:<28}"
    text += f"  test accuracy {figures['accuracy']:.2%}  loss {loss}"
    text += f"  {figures['seconds']:.1f} s"
    return text if figures["ranks_agree"] else f"{text}  the ranks' parameters differ"


def missing(book: Book, ranks: int, arguments: argparse.Namespace) -> list[Run]:
    """The keys of the runs that are asked for and not in the book, seed by seed."""
    names = {number: book.settings[number]["workload"] for number in book.current}
    keys = [
        {"settings": number, "ranks": ranks, "variant": variant.name, "seed": seed}
        for number in book.current
        if names[number] in arguments.workloads
        for seed in range(arguments.seeds)
        for variant in VARIANTS
        if variant.format in arguments.formats and variant.name in VARIANTS_OF[names[number]]
    ]
    return [key for key in keys if arguments.again or not book.find(**key)]


def main(argv: list[str] | None = None) -> Book:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on")
    parser.add_argument("--workloads", nargs="+", choices=VARIANTS_OF, default=list(VARIANTS_OF))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--steps", type=int, help="of each run; default: the workload's own")
    parser.add_argument("--again", action="store_true", help="repeat runs that are there already")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the files' common start")
    arguments = parser.parse_args(argv)
    print(headline(machine()), flush=True)
    path = arguments.out.with_suffix(".json")
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = [kind(arguments.steps).settings for kind in WORKLOADS]
    for ranks in arguments.ranks:
        keys = missing(Book(path, settings), ranks, arguments)
        if keys:
            with tempfile.TemporaryDirectory(prefix="fastreduce-benchmark-") as folder:
                run_ranks(rank_main, ranks, ranks, folder, arguments.steps, keys, path)
    book = Book(path, settings)
    text = table(book)
    print(text, end="")
    arguments.out.with_suffix(".md").write_text(text, "utf-8")
    if importlib.util.find_spec("matplotlib"):
        plot(book, arguments.out.with_suffix(".png"))
    return book


if __name__ == "__main__":
    main()
