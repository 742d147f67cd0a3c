"""The small models whose memory is measured: a GPT, a Llama, a mixture of experts, a convnet.

Parameters and activations take about as much memory as each other, so that an error in either one
shows. Every model has four equal blocks, which are the units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs
from funcshard.demo import DecoderConfig
from funcshard.demo.decoders import Decoder
from funcshard.demo.gpt import GPT, GPTConfig

BLOCKS, WIDTH, CONTEXT, VOCABULARY = 4, 64, 32, 256
HEADS, HIDDEN = 4, 172
EXPERTS = 8


def token_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean over all tokens."""
    return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


def tokens(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and targets."""
    return torch.zeros(samples, CONTEXT, dtype=torch.long), torch.zeros(samples, CONTEXT, dtype=torch.long)


@dataclass(frozen=True, slots=True)
class Model:
    """A model to measure.

    Attributes:
        build: ``build(mesh)`` returns the module.
        batch: ``batch(samples)`` returns inputs and targets.
        loss: ``loss(output, targets)`` returns the mean over the batch.
        local: the leaves of a block that each rank keeps for itself.
        mutable: whether forward changes buffers.
    """

    build: Callable[[fs.Mesh], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]] = tokens
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = token_loss
    local: tuple[str, ...] = ()
    mutable: bool = False


class _Experts(nn.Module):
    """A mixture of experts in which each expert chooses its tokens, and lives on one rank."""

    def __init__(self, mesh: fs.Mesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        own = EXPERTS // mesh.world_size
        self.experts = nn.ParameterDict({
            "up": nn.Parameter(torch.randn(own, WIDTH, HIDDEN) / 8),
            "down": nn.Parameter(torch.randn(own, HIDDEN, WIDTH) / 8),
        })  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).flatten(0, 1)
        weights = self.router(y).softmax(-1)
        weight, tokens = weights.topk(2 * len(y) // EXPERTS, dim=0)  # [place, expert]
        sent = y[tokens.T]  # [expert, place, width]
        if self.mesh.world_size > 1:
            sent = fs.all_to_all(sent, self.mesh, split_dim=0, concat_dim=1, tiled=True)
        found = torch.bmm(F.gelu(torch.bmm(sent, self.experts["up"])), self.experts["down"])
        if self.mesh.world_size > 1:
            found = fs.all_to_all(found, self.mesh, split_dim=1, concat_dim=0, tiled=True)
        out = torch.zeros_like(y).index_add(0, tokens.T.flatten(), (found * weight.T.unsqueeze(-1)).flatten(0, 1))
        return x + out.view_as(x)


class _ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class _Stack(nn.Module):
    """A stem, blocks, a norm, and a head that is not tied to the stem."""

    def __init__(self, stem: nn.Module, block: Callable[[], nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(block() for _ in range(BLOCKS)), head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


def _moe(mesh: fs.Mesh) -> nn.Module:
    head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))
    return _Stack(nn.Embedding(VOCABULARY, WIDTH), lambda: _Experts(mesh), head)


def _convnet(mesh: fs.Mesh, width: int = 48) -> nn.Module:
    """Return a residual net with BatchNorm."""
    head = nn.Sequential(_Mean(), nn.Linear(width, 10))
    return _Stack(nn.Conv2d(3, width, 3, padding=1), lambda: _ConvBlock(width), head)


def _images(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(samples, 3, 16, 16), torch.zeros(samples, dtype=torch.long)


def _class_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float(), targets)


_GPT_SIZES = GPTConfig(width=WIDTH, layers=BLOCKS, heads=HEADS, context=CONTEXT, vocabulary=VOCABULARY)
_LLAMA_SIZES = DecoderConfig(WIDTH, BLOCKS, HEADS, VOCABULARY, HIDDEN, kv_heads=HEADS // 2, context=CONTEXT)
MODELS = {
    "gpt": Model(lambda mesh: GPT(_GPT_SIZES)),
    "llama": Model(lambda mesh: Decoder(_LLAMA_SIZES)),
    "moe": Model(_moe, local=("experts",)),
    "convnet": Model(_convnet, _images, _class_loss, mutable=True),
}
