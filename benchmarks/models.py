"""The models that ddp_step.py trains: what their gradients weigh matters, not what they learn.

All take a batch of inputs to the scores of ten classes, but for resnet18, which is there for
``fastreduce plan``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fastreduce import demo

CLASSES = 10


@dataclass(frozen=True)
class Workload:
    """A model, the shape of one of its inputs, and how many make the batch of a rank."""

    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    batch: int

    def data(self, batch: int) -> tuple[Tensor, Tensor]:
        """Random inputs and labels."""
        return torch.randn(batch, *self.input_shape), torch.randint(0, CLASSES, (batch,))


def digits() -> nn.Module:
    """The demo's network of 151,306 parameters, for images of 8 x 8."""
    return demo.build_model(seed=0)


def mlp() -> nn.Module:
    """A multilayer perceptron of 10.5 million parameters."""
    return nn.Sequential(
        nn.Linear(1024, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, 2048),
        nn.ReLU(),
        nn.Linear(2048, CLASSES),
    )


def norm(channels: int) -> nn.Module:
    """Without running statistics, which DDP would broadcast before every step."""
    return nn.BatchNorm2d(channels, track_running_stats=False)


class Residual(nn.Module):
    """Two convolutions beside a short cut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            norm(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            norm(channels),
        )
        self.short_cut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.short_cut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), norm(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.short_cut(x))


def _stages() -> list[nn.Module]:
    """What follows the first layers of ResNet-18, up to the average of 512 channels."""
    layers: list[nn.Module] = []
    channels_in = 64
    for channels, stride in [(64, 1), (128, 2), (256, 2), (512, 2)]:
        layers += [Residual(channels_in, channels, stride), Residual(channels, channels, 1)]
        channels_in = channels
    return [*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()]


def resnet() -> nn.Module:
    """ResNet-18 as it is used for images of 32 x 32: 11.2 million parameters in 62 tensors."""
    first = [nn.Conv2d(3, 64, 3, padding=1, bias=False), norm(64), nn.ReLU(inplace=True)]
    return nn.Sequential(*first, *_stages(), nn.Linear(512, CLASSES))


def resnet18() -> nn.Module:
    """ResNet-18 (He et al. 2015) for images of 224 x 224: 11,689,512 parameters, 1,000 classes."""
    first = [
        nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False),
        norm(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    return nn.Sequential(*first, *_stages(), nn.Linear(512, 1000))


class Tiny(nn.Module):
    """2,000 parameters of 10 elements each, used by as few operations as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(torch.randn(CLASSES) for _ in range(2000))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.stack(list(self.rows))


WORKLOADS = {
    "digits": Workload(digits, (1, 8, 8), batch=48),
    "mlp": Workload(mlp, (1024,), batch=16),
    "resnet": Workload(resnet, (3, 32, 32), batch=2),
    "tiny": Workload(Tiny, (2000,), batch=1),
    "accumulate": Workload(mlp, (1024,), batch=16),
}
