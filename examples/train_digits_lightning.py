"""python examples/train_digits_lightning.py

Lightning's Trainer, whose gradients fastreduce averages. Prints how many steps it did, and how: on
the CPU Lightning takes a communication hook as an argument and, without a word, never registers it.
"""

import argparse
from typing import Any

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset, random_split

import fastreduce


class FastReduce(pl.Callback):
    """Averages gradients with fastreduce, on any device. Takes what ``fastreduce.attach`` takes."""

    state: fastreduce.HookState

    def __init__(self, **options: Any) -> None:
        self.options = options

    def on_fit_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.state = fastreduce.attach(trainer.strategy.model, **self.options)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self.state.check_synchronized()  # raises where gradients have not been averaged

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.state.close()


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.model(images), labels)

    def configure_optimizers(self) -> Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2, help="processes, which Lightning starts")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()

    pl.seed_everything(0)
    pixels, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    train, test = random_split(TensorDataset(pixels.float() / 16, labels), [1437, 360])

    module, fast = Digits(), FastReduce(record=True)
    trainer = pl.Trainer(
        devices=options.ranks,
        strategy="ddp",
        max_epochs=options.epochs,
        callbacks=[fast],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, DataLoader(train, batch_size=96 // options.ranks, shuffle=True))

    if trainer.is_global_zero:
        images, labels = test[:]
        accuracy = (module.model(images).argmax(1) == labels).float().mean()
        steps = fast.state.stats()
        algorithm = steps[-1].buckets[0].algorithm
        print(f"test accuracy {accuracy:.2%}, averaged {len(steps)} steps by {algorithm}")


if __name__ == "__main__":
    main()
