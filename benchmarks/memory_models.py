"""The small models whose memory is measured: a GPT, a Llama, a mixture of experts, a convnet.

Parameters and activations take about as much memory as each other, so that an error in either one
shows. Every model has four equal blocks, which are the units, and calls ``self.run(block, x)``, which
a checkpoint may replace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard.demo.gpt import GPT, GPTConfig

__all__ = ["MODELS", "Model"]

BLOCKS, WIDTH, CONTEXT, VOCABULARY = 4, 64, 32, 256
HEADS, HIDDEN = 4, 172
EXPERTS = 8


@dataclass(frozen=True, slots=True)
class Model:
    """A model to measure.

    Attributes:
        build: ``build(mesh, checkpointed)`` returns the module.
        batch: ``batch(samples)`` returns inputs and targets.
        loss: ``loss(output, targets)`` returns the mean over the batch.
        local: the leaves that each rank keeps for itself.
        mutable: whether forward changes buffers.
    """

    build: Callable[[fs.Mesh, bool], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    local: tuple[str, ...] = ()
    mutable: bool = False


class _Checkpoints(nn.Module):
    """A module that may run its blocks under ``torch.utils.checkpoint``."""

    checkpointed = False

    def run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        out = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        assert isinstance(out, torch.Tensor)
        return out


class _GPT(_Checkpoints, GPT):
    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.token(idx) + self.position(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))


class _LlamaBlock(nn.Module):
    """Attention with rotary positions and shared keys, and a SwiGLU."""

    turn: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.o = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        angles = torch.outer(torch.arange(CONTEXT), 1e4 ** -torch.linspace(0, 1, WIDTH // HEADS // 2))
        self.register_buffer("turn", torch.cat([angles.cos(), angles.sin()], -1), persistent=False)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        q, k = self._turned(q), self._turned(k)
        k, v = (each.repeat_interleave(2, dim=1) for each in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.turn.to(x.dtype).chunk(2, -1)
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


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


class _Decoder(_Checkpoints):
    """Tokens, blocks, and a head that is not tied to the embedding."""

    def __init__(self, block: Callable[[], nn.Module], norm: type[nn.Module]) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.token(idx)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(self.norm(x))


class _ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class _ConvNet(_Checkpoints):
    """A residual net with BatchNorm."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(_ConvBlock(width) for _ in range(BLOCKS))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.run(block, x)
        return self.head(x.mean((2, 3)))


def _with(module: _Checkpoints, checkpointed: bool) -> nn.Module:
    module.checkpointed = checkpointed
    return module


def _tokens(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(samples, CONTEXT, dtype=torch.long), torch.zeros(samples, CONTEXT, dtype=torch.long)


def _images(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(samples, 3, 16, 16), torch.zeros(samples, dtype=torch.long)


def _token_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1).float(), targets.flatten())


def _class_loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.float(), targets)


_GPT_CONFIG = GPTConfig(width=WIDTH, layers=BLOCKS, heads=HEADS, context=CONTEXT, vocabulary=VOCABULARY)

MODELS = {
    "gpt": Model(lambda mesh, c: _with(_GPT(_GPT_CONFIG), c), _tokens, _token_loss),
    "llama": Model(lambda mesh, c: _with(_Decoder(_LlamaBlock, nn.RMSNorm), c), _tokens, _token_loss),
    "moe": Model(
        lambda mesh, c: _with(_Decoder(lambda: _Experts(mesh), nn.LayerNorm), c), _tokens, _token_loss, ("blocks.*.experts",)
    ),
    "convnet": Model(lambda mesh, c: _with(_ConvNet(), c), _images, _class_loss, mutable=True),
}  # fmt: skip
