"""The shapes: the model, batches and loss that every peer of a race trains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from funcshard.demo.gpt import GPT, Block, GPTConfig

LEARNING_RATE = 1e-3
BATCHES = 4  # different batches, used in turn


class Residual(nn.Module):
    """One tiny unit: the tanh of a linear layer, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


@dataclass(frozen=True, slots=True)
class Shape:
    """A model to train, and the size of a rank's batch.

    Attributes:
        build: builds the module; its random numbers are those of the current seed.
        unit: class of the modules that are units (FSDP's blocks).
        batch: samples a rank.
        length: tokens of a sample, or elements of a sample that is a vector.
        vocabulary: number of tokens; 0 if samples are vectors.
        heads: number of attention heads, which the shapes of parameters do not show.
    """

    title: str
    build: Callable[[], nn.Module]
    unit: type[nn.Module]
    batch: int
    length: int
    vocabulary: int = 0
    heads: int = 0

    def module(self) -> nn.Module:
        """Build the module, with the same parameters every time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.build()

    def batches(self, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the batches of one rank as (inputs, targets), the same every time."""
        g = torch.Generator().manual_seed(1000 + rank)
        size = (self.batch, self.length)
        if self.vocabulary:
            draw: Any = lambda: torch.randint(self.vocabulary, size, generator=g)  # noqa: E731
        else:
            draw = lambda: torch.randn(size, generator=g)  # noqa: E731
        return [(draw(), draw()) for _ in range(BATCHES)]

    def loss(self, output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over the batch."""
        if self.vocabulary:
            return F.cross_entropy(output.flatten(0, 1), targets.flatten())
        return F.mse_loss(output, targets)


def _gpt(what: str, batch: int, **sizes: int) -> Shape:
    config = GPTConfig(**sizes)
    title = f"{what}: width {config.width}, {config.layers} blocks, vocabulary {config.vocabulary}"
    title += f", {batch} × {config.context} tokens a rank"
    return Shape(title, lambda: GPT(config), Block, batch, config.context, config.vocabulary, config.heads)


def _deep(what: str, units: int, width: int) -> Shape:
    build = lambda: nn.Sequential(*[Residual(width) for _ in range(units)])  # noqa: E731
    return Shape(f"{what}: {units} units of one linear layer {width} × {width}", build, Residual, 4, width)


SHAPES = {
    "demo": _gpt("GPT of the demo", 4),
    "gpt": _gpt("GPT with a tied head", 4, layers=12, vocabulary=8192),
    "wide": _gpt("wide GPT on short samples", 2, width=1024, layers=8, heads=16, context=16),
    "deep": _deep("deep", 100, 16),
    "tiny": _gpt("tiny GPT, for tests", 2, width=8, layers=2, heads=2, context=4, vocabulary=11),
}
