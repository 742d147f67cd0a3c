"""A byte-level GPT in plain PyTorch, without any code for sharding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT; the default has 10.8 million parameters.

    Attributes:
        width: size of a token's vector.
        heads: number of attention heads; divides ``width``.
        vocabulary: number of tokens, which is 256 for bytes.
        tied: whether the head uses the weight of the token embedding.
    """

    width: int = 384
    layers: int = 6
    heads: int = 6
    context: int = 128
    vocabulary: int = 256
    tied: bool = True

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(
                f"width must be a multiple of heads; found width {self.width} and {self.heads} "
                "heads"
            )


class Attention(nn.Module):
    """Causal self-attention with several heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv_parts = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv_parts
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, 4 * config.width)
        self.out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and MLP, each after a norm and with a residual connection."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Embedding):
    """A table of vectors that draws nothing on the meta device."""

    def reset_parameters(self) -> None:
        # Why not on meta: for that draw torch imports Dynamo, which takes two seconds.
        if not self.weight.is_meta:
            super().reset_parameters()


class GPT(nn.Module):
    """A model from tokens, which may be bytes, to the logits of the next token."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        self.config = config = config or GPTConfig()
        self.token = Embedding(config.vocabulary, config.width)
        self.position = Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        # One tensor under two names, which the plan stores once.
        if config.tied:
            self.head.weight = self.token.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights as GPT-2 does: smaller in the layers that add to the residual stream."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)) and not module.weight.is_meta:
                std = 0.02
                # The blocks add to one sum, whose variance then does not grow with layers.
                if name.endswith(".out"):
                    std /= math.sqrt(2 * self.config.layers)
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        length = idx.shape[1]
        if length > self.config.context:
            raise ValueError(
                f"tokens hold {length} positions, and the model has {self.config.context}: build "
                f"it with context={length}"
            )
        x = self.token(idx) + self.position(torch.arange(length, device=idx.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
