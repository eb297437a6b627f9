"""The models that steps are timed of: what their gradients weigh matters, not what they learn.

All take a batch of inputs, or of their tokens, to the scores of some classes.
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
    """A model, the shape of one of its inputs, and how many make the batch of a rank.

    Attributes:
        classes: that the model scores.
        tokens: inputs are indices of classes, each of which has a label.
    """

    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    batch: int
    classes: int = CLASSES
    tokens: bool = False

    def data(self, batch: int) -> tuple[Tensor, Tensor]:
        """Random inputs and labels."""
        if self.tokens:
            drawn = torch.randint(0, self.classes, (2, batch, *self.input_shape))
            return drawn[0], drawn[1]
        return torch.randn(batch, *self.input_shape), torch.randint(0, self.classes, (batch,))


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


class Block(nn.Module):
    """Causal attention and a feed-forward network, each behind its norm and beside a short cut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = self.queries_keys_values(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        queries, keys, values = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).flatten(2))
        out: Tensor = x + self.feed_forward(x)
        return out


class Transformer(nn.Module):
    """A decoder in the manner of GPT-2: tokens to the scores of each one's successor."""

    def __init__(self, kinds: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(kinds, width)
        self.positions = nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, kinds))

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.blocks(self.tokens(tokens) + self.positions))
        return scores


def transformer() -> nn.Module:
    """3.7 million parameters, for 64 tokens of 1,000 kinds."""
    return Transformer(1000, length=64, width=256, layers=4, heads=4)


def gpt2() -> nn.Module:
    """The shape of GPT-2 (Radford et al. 2019), its smallest, with scores of their own: 163 million
    parameters, for 1,024 tokens."""
    return Transformer(50257, length=1024, width=768, layers=12, heads=12)


WORKLOADS = {
    "digits": Workload(digits, (1, 8, 8), batch=48),
    "mlp": Workload(mlp, (1024,), batch=16),
    "resnet": Workload(resnet, (3, 32, 32), batch=2),
    "transformer": Workload(transformer, (64,), batch=4, classes=1000, tokens=True),
}
# As they fit on one GPU of 16 GB or more.
GPU_WORKLOADS = {
    "mlp": Workload(mlp, (1024,), batch=256),
    "resnet18": Workload(resnet18, (3, 224, 224), batch=64, classes=1000),
    "transformer": Workload(gpt2, (1024,), batch=2, classes=50257, tokens=True),
}
