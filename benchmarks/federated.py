"""Federated averaging beside data parallelism: accuracy by the bytes that clients send.

    python -m benchmarks.federated                # five seeds, some minutes
    python -m benchmarks.federated --seeds 1      # a coarse look

The demo's network learns scikit-learn's digits, which are shared out over ten clients by
Dirichlet(alpha): all digits alike with alpha = 100, a few each with alpha = 0.1. In a round half of
the clients are sampled; each passes twice over its digits, in batches of 16. Data parallelism makes
a step in each round, on a batch out of all digits, to which all clients contribute; whose digits
these are makes no difference. All steps are plain SGD's, with one learning rate.

Counted is what clients send, one way, in float32: a gradient, or a model, and with SCAFFOLD a
control variate too: as many rounds are twice the bytes. A seed gives the initial weights, the
split, the samples of clients and the batches. mu and SCAFFOLD's global rate are usual values, not
tuned for either alpha.

Writes runs, a table and, if matplotlib is installed, a plot.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fastreduce
from benchmarks.convergence_report import spread
from benchmarks.ranks import join_group, leave_group
from fastreduce import demo, federated
from fastreduce.ranks import run_ranks

RESULTS = Path(__file__).with_name("results") / "federated"
CLIENTS, SAMPLED, BATCH, EPOCHS = 10, 5, 16, 2
LEARNING_RATE, MU = 0.1, 1.0
ALPHAS = (100.0, 0.1)
TARGET = 0.9  # accuracy
PARALLEL = "data parallelism"
FEDERATED = ("FedAvg", "FedProx", "SCAFFOLD")

# Megabytes that have been sent, and the accuracy then.
Curve = list[tuple[float, float]]
Run = dict[str, Any]


def megabytes(model: nn.Module) -> float:
    return sum(each.nbytes for each in model.parameters()) / 1e6


def train_parallel(
    communicator: fastreduce.Communicator, digits: demo.Digits, seed: int, steps: int
) -> Curve:
    """Data parallelism over the ranks, counted as over the clients."""
    ddp = DistributedDataParallel(demo.build_model(seed))
    state = fastreduce.HookState(communicator)
    ddp.register_comm_hook(state, fastreduce.all_reduce_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=LEARNING_RATE)
    settings = demo.Settings(
        communicator.world_size, -(-steps * demo.BATCH // demo.TRAIN) + 1, seed
    )
    epochs = demo.global_batches(demo.TRAIN, settings)
    curve = []
    for step, batch in enumerate([part for epoch in epochs for part in epoch][:steps], 1):
        optimizer.zero_grad()
        own = batch.chunk(communicator.world_size)[communicator.rank]
        demo.mean_loss(ddp, digits, own).backward()
        optimizer.step()
        if step % 5 == 0 or step == steps:
            sent = step * CLIENTS * megabytes(ddp.module)
            curve.append((sent, demo.accuracy(ddp.module, digits)))
    return curve


def train_federated(
    communicator: fastreduce.Communicator,
    digits: demo.Digits,
    name: str,
    alpha: float,
    seed: int,
    rounds: int,
) -> Curve:
    """So many rounds."""
    model = demo.build_model(seed)
    split = federated.dirichlet_split(digits.train_labels, CLIENTS, alpha, seed=seed)
    sizes = [len(part) for part in split]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return demo.mean_loss(model, digits, batch)

    usual = communicator, model, loss, sizes
    algorithm: federated.FedAvg[Tensor]
    if name == "FedAvg":
        algorithm = federated.FedAvg(*usual, lr=LEARNING_RATE)
    elif name == "FedProx":
        algorithm = federated.FedProx(*usual, lr=LEARNING_RATE, mu=MU)
    else:
        algorithm = federated.Scaffold(*usual, lr=LEARNING_RATE)

    def batches(client: int) -> Iterator[Tensor]:
        # The same whatever the algorithm and the ranks.
        order = random.Random(f"{seed} {algorithm.rounds} {client}").getrandbits(63)
        generator = torch.Generator().manual_seed(order)
        for _ in range(EPOCHS):
            shuffled = torch.randperm(sizes[client], generator=generator)
            yield from split[client][shuffled].split(BATCH)

    copies = 2 if name == "SCAFFOLD" else 1
    curve = []
    for number in range(rounds):
        algorithm.round(batches, federated.sample(CLIENTS, SAMPLED, seed=seed, round=number))
        sent = algorithm.rounds * SAMPLED * copies * megabytes(model)
        curve.append((sent, demo.accuracy(model, digits)))
    return curve


def rank_main(rank: int, ranks: int, folder: str, rounds: int, steps: int, seeds: int) -> None:
    """One rank's process; rank 0 leaves the runs in ``folder``."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    join_group(rank, ranks, Path(folder))
    digits = demo.load_digits()
    runs: list[Run] = []
    try:
        with fastreduce.Communicator() as communicator:
            for seed in range(seeds):
                for alpha, name in [(None, PARALLEL), *itertools.product(ALPHAS, FEDERATED)]:
                    if alpha is None:
                        curve = train_parallel(communicator, digits, seed, steps)
                    else:
                        curve = train_federated(communicator, digits, name, alpha, seed, rounds)
                    runs.append({"name": name, "alpha": alpha, "seed": seed, "curve": curve})
                    if rank == 0:
                        print(
                            f"seed {seed}  {name:<16}  alpha {alpha}  {curve[-1][0]:.0f} MB  "
                            f"test accuracy {curve[-1][1]:.2%}",
                            flush=True,
                        )
        if rank == 0:
            Path(folder, "results").write_text(json.dumps(runs))
    finally:
        leave_group()


def within(curve: Curve, budget: float) -> float:
    """The accuracy in percent once no more can be sent."""
    return 100 * next((reached for sent, reached in reversed(curve) if sent <= budget), 0.0)


def until(curve: Curve) -> float | None:
    """Megabytes until the target is met for the first time."""
    return next((sent for sent, reached in curve if reached >= TARGET), None)


def sections(runs: Sequence[Run]) -> Iterator[tuple[float, str, list[Curve]]]:
    """All curves of an algorithm and an alpha, which to data parallelism are all one."""
    for alpha in ALPHAS:
        for name in (PARALLEL, *FEDERATED):
            wanted = (name, None if name == PARALLEL else alpha)
            yield (
                alpha,
                name,
                [run["curve"] for run in runs if (run["name"], run["alpha"]) == wanted],
            )


def table(runs: Sequence[Run]) -> str:
    """In markdown; ± is the standard deviation over the seeds."""
    budget = min(run["curve"][-1][0] for run in runs if run["name"] == "FedAvg")
    text = f"| alpha | | accuracy after {budget:.0f} MB, % | at the end, % | after MB "
    text += f"| MB to {TARGET:.0%} |\n"
    text += "| ---: | --- | ---: | ---: | ---: | ---: |\n"
    for alpha, name, curves in sections(runs):
        needed = [until(curve) for curve in curves]
        met = [each for each in needed if each is not None]
        many = f"{statistics.mean(met):.0f}" if met else "-"
        if met and len(met) < len(needed):
            many += f" ({len(met)} of {len(needed)} seeds)"
        cells = [
            f"{alpha:g}",
            name,
            spread([within(curve, budget) for curve in curves], 1),
            spread([100 * curve[-1][1] for curve in curves], 1),
            f"{curves[0][-1][0]:.0f}",
            many,
        ]
        text += f"| {' | '.join(cells)} |\n"
    return text


def plot(runs: Sequence[Run], path: Path) -> None:
    """Accuracy by megabytes: means over the seeds, and their range."""
    import numpy
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5))
    axes = figure.subplots(1, len(ALPHAS), sharey=True)
    for alpha, name, curves in sections(runs):
        axis = axes[ALPHAS.index(alpha)]
        sent = [point[0] for point in curves[0]]
        reached = 100 * numpy.array([[point[1] for point in curve] for curve in curves])
        axis.plot(sent, reached.mean(0), label=name)
        axis.fill_between(sent, reached.min(0), reached.max(0), alpha=0.2)
        axis.set_xscale("log")
        axis.set_title(f"Dirichlet({alpha:g})")
        axis.set_xlabel("MB sent by all clients")
        axis.grid(True, alpha=0.3)
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(argv: list[str] | None = None) -> list[Run]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=5, help="how many, from 0 on")
    parser.add_argument("--rounds", type=int, default=30, help="of federated averaging")
    parser.add_argument("--steps", type=int, default=200, help="of data parallelism")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the files' common start")
    arguments = parser.parse_args(argv)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fastreduce-benchmark-") as folder:
        settings = arguments.rounds, arguments.steps, arguments.seeds
        run_ranks(rank_main, arguments.ranks, arguments.ranks, folder, *settings)
        runs: list[Run] = json.loads(Path(folder, "results").read_text())
    text = table(runs)
    print(text, end="")
    arguments.out.with_suffix(".md").write_text(text, "utf-8")
    if importlib.util.find_spec("matplotlib"):
        plot(runs, arguments.out.with_suffix(".png"))
    return runs


if __name__ == "__main__":
    main()
