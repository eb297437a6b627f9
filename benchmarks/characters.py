"""A small transformer that learns the next character of Python's own sources.

The text is six modules of the standard library, one after the other, so it is the same wherever
the Python is; nine tenths of each are for training and its last tenth is held out.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.models import Block

MODULES = ["argparse", "difflib", "doctest", "subprocess", "tarfile", "typing"]
CONTEXT = 64
WIDTH, LAYERS, HEADS = 64, 2, 2


@dataclass(frozen=True)
class Text:
    """Characters as indices below ``kinds``, and a digest of all of them."""

    train: Tensor
    test: Tensor
    kinds: int
    digest: str


def load_text() -> Text:
    """About 600,000 characters of some hundred kinds; which ones depends on Python's version."""
    folder = Path(sysconfig.get_path("stdlib"))
    sources = [(folder / f"{name}.py").read_text("utf-8") for name in MODULES]
    cuts = [len(source) * 9 // 10 for source in sources]
    train = "".join(source[:cut] for source, cut in zip(sources, cuts, strict=True))
    test = "".join(source[cut:] for source, cut in zip(sources, cuts, strict=True))
    index = {character: number for number, character in enumerate(sorted(set(train + test)))}
    return Text(
        train=torch.tensor([index[character] for character in train]),
        test=torch.tensor([index[character] for character in test]),
        kinds=len(index),
        digest=hashlib.sha256((train + test).encode()).hexdigest()[:16],
    )


def windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The characters from each start on, and those that follow them."""
    found = text[starts[:, None] + torch.arange(CONTEXT + 1)]
    return found[:, :-1], found[:, 1:]


def bigram_loss(text: Text) -> float:
    """The held-out loss of a table of pairs of characters, counted in the training part."""
    pairs = text.train[:-1] * text.kinds + text.train[1:]
    counts = torch.bincount(pairs, minlength=text.kinds**2).view(text.kinds, -1) + 1.0
    scores = counts.log()[text.test[:-1]]
    return functional.cross_entropy(scores, text.test[1:]).item()


class Transformer(nn.Module):
    """About 117,000 parameters: CONTEXT characters to the scores of each one's successor."""

    def __init__(self, kinds: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(kinds, WIDTH)
        self.positions = nn.Parameter(torch.empty(CONTEXT, WIDTH))
        self.layers = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))
        self.scores = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, kinds))
        # Positions as large as that are soon told apart: with the usual 0.02, a training of some
        # hundred steps hardly leaves the table of pairs.
        for embedding in (self.characters.weight, self.positions):
            nn.init.normal_(embedding, std=0.3)

    def forward(self, characters: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.layers(self.characters(characters) + self.positions))
        return scores
