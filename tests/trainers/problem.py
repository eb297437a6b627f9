"""What the scripts beside this file train, and what they record for the test to check."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

BATCH = 6
BATCHES = 8  # of each of two ranks


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 5))


def make_samples(count: int = 2 * BATCHES * BATCH) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 20, generator=generator)
    y = torch.randint(0, 5, (count,), generator=generator)
    return list(zip(x, y, strict=True))


def make_optimizer(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


class Record:
    """Of every step of one rank: the gradients that it computes alone, and those with which the
    step ended."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[Tensor]]] = []
        self.batches: list[tuple[Tensor, Tensor]] = []

    def batch(self, x: Tensor, y: Tensor) -> None:
        self.batches.append((x.clone(), y.clone()))

    def step(self, model: nn.Module) -> None:
        """Between a step's last backward pass and the optimizer."""
        alone = copy.deepcopy(model)
        alone.zero_grad()
        with torch.enable_grad():
            for x, y in self.batches:
                (loss(alone(x), y) / len(self.batches)).backward()
        self.steps.append(
            {
                "alone": [p.grad for p in alone.parameters()],
                "gradients": [p.grad.clone() for p in model.parameters()],
            }
        )
        self.batches = []
