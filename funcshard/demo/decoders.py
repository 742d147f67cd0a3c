"""Decoder-only language models in plain PyTorch, and the sizes of well-known ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from funcshard.demo.gpt import GPT, GPTConfig


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of multi-head latent attention; the defaults are those of DeepSeek-V3.

    Attributes:
        key_value: size of the vector behind the keys and values of all heads.
        rotary: size of the rotated part of a query or key, which heads share in keys; even.
        plain: size of the other part of a head's query or key.
    """

    query: int = 1536
    key_value: int = 512
    rotary: int = 64
    plain: int = 128
    value: int = 128


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of a mixture of experts.

    Attributes:
        per_token: number of experts that compute each token.
        shared: number of experts for every token, as one MLP that's so many times as wide.
        dense_layers: number of blocks at the start with an ordinary MLP.
        scores: ``"softmax"``, or ``"sigmoid"`` with a bias for each expert that only changes the
            choice.
    """

    count: int
    per_token: int
    hidden: int
    shared: int = 0
    dense_layers: int = 0
    scores: str = "softmax"


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes of a decoder with RMSNorm, rotary positions and SwiGLU; ``decoder`` builds the model.

    Attributes:
        dim: size of a token's vector.
        heads: number of attention heads; divides ``dim``.
        hidden: size of the hidden layer of an ordinary MLP.
        kv_heads: number of heads of keys and values; divides ``heads``, its default.
        context: number of positions in training; the model takes any.
        tied: whether the head uses the weight of the token embedding.
    """

    dim: int
    layers: int
    heads: int
    vocabulary: int
    hidden: int
    kv_heads: int | None = None
    context: int = 4096
    tied: bool = False
    latent: LatentSizes | None = None
    experts: ExpertSizes | None = None
    rotary_base: float = 10_000.0
    eps: float = 1e-5


def _mpt(width: int, layers: int, heads: int) -> GPTConfig:
    return GPTConfig(width, layers, heads, context=2048, vocabulary=50368)


# Sizes as in the published config.json of each model at huggingface.co; llama3-1.8b is that of
# github.com/foundation-model-stack/fms-fsdp, MPT is scripts/train/yamls/pretrain of
# github.com/mosaicml/llm-foundry, and mingpt-175b is §5.4 of https://arxiv.org/abs/2304.11277.
DECODERS: Mapping[str, DecoderConfig | GPTConfig] = MappingProxyType(
    {
        "llama2-7b": DecoderConfig(4096, 32, 32, 32000, 11008),
        "llama2-13b": DecoderConfig(5120, 40, 40, 32000, 13824),
        "llama2-34b": DecoderConfig(8192, 48, 64, 32000, 22016, 8, 16384, rotary_base=1e6),
        "llama2-70b": DecoderConfig(8192, 80, 64, 32000, 28672, 8),
        "llama3-1.8b": DecoderConfig(2048, 24, 16, 128256, 7168, 8, 8192, rotary_base=5e5),
        "llama3-8b": DecoderConfig(4096, 32, 32, 128256, 14336, 8, 8192, rotary_base=5e5),
        "llama3-70b": DecoderConfig(8192, 80, 64, 128256, 28672, 8, 8192, rotary_base=5e5),
        "llama3-405b": DecoderConfig(16384, 126, 128, 128256, 53248, 8, 131072, rotary_base=5e5),
        "llama3.2-3b": DecoderConfig(3072, 28, 24, 128256, 8192, 8, 131072, tied=True, rotary_base=5e5),
        "mixtral-8x7b": DecoderConfig(
            4096, 32, 32, 32000, 14336, 8, 32768, experts=ExpertSizes(8, 2, 14336), rotary_base=1e6
        ),
        "deepseek-v3": DecoderConfig(
            7168, 61, 128, 129280, 18432, latent=LatentSizes(), eps=1e-6,
            experts=ExpertSizes(256, 8, 2048, shared=1, dense_layers=3, scores="sigmoid"),
        ),
        "mpt-125m": _mpt(768, 12, 12),
        "mpt-350m": _mpt(1024, 24, 16),
        "mpt-760m": _mpt(1536, 24, 12),
        "mpt-1b": _mpt(2048, 24, 16),
        "mpt-3b": _mpt(2560, 32, 20),
        "mpt-7b": _mpt(4096, 32, 32),
        "mpt-13b": _mpt(5120, 40, 40),
        "mpt-30b": _mpt(7168, 48, 56),
        "mpt-70b": _mpt(8192, 80, 64),
        "mingpt-175b": GPTConfig(12288, 96, 96, context=2048, vocabulary=50000, tied=False),
    }
)  # fmt: skip


def decoder(config: str | DecoderConfig | GPTConfig, **changes: Any) -> Decoder | GPT:
    """Build a decoder-only language model without trained weights.

    On the meta device it takes no memory, however large it is.

    A mixture of experts gives each expert ``tokens · per_token / count`` rows, rounded up, as if
    its router spread tokens evenly. Further copies of a token are dropped, so train a mixture with
    its own model.

    Arguments:
        config: a name in ``DECODERS``, a ``DecoderConfig``, or a ``GPTConfig``.
        changes: attributes of the configuration to replace, such as ``context=8192``.

    Returns:
        A ``Decoder`` with ``embed``, ``blocks``, ``norm`` and ``head``, or the demo's ``GPT``. It
        takes tokens, int64 of shape ``[batch, length]``, and returns logits ``[batch, length,
        vocabulary]``.

    Raises:
        ValueError: no configuration has this name.
        TypeError: ``config`` is neither a name nor a configuration, or lacks an attribute.

    Example:
        >>> import torch
        >>> from funcshard.demo import decoder
        >>> with torch.device("meta"):
        ...     model = decoder("llama3-405b")
        >>> sum(parameter.numel() for parameter in model.parameters())
        405853388800

    Source: Touvron et al. (2023), https://arxiv.org/abs/2302.13971; DeepSeek-AI (2024),
    https://arxiv.org/abs/2412.19437; the operations are those of torchtitan's models.
    """
    if isinstance(config, str):
        if config not in DECODERS:
            raise ValueError(
                f"no decoder has the name {config!r}; the names are {', '.join(DECODERS)}"
            )
        config = DECODERS[config]
    if isinstance(config, GPTConfig):
        return GPT(dataclasses.replace(config, **changes))
    if isinstance(config, DecoderConfig):
        return Decoder(dataclasses.replace(config, **changes))
    raise TypeError(
        f"decoder takes a name or a DecoderConfig; found {type(config).__name__}"
    )


class Decoder(nn.Module):
    """The model that ``decoder`` builds of a ``DecoderConfig``."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = _Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.norm = RMSNorm(config.dim, config.eps)
        self.head = _Linear(config.dim, config.vocabulary)
        if config.tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        config = self.config
        x = self.embed(tokens)
        rotary_size = config.latent.rotary if config.latent else config.dim // config.heads
        # Computed once for all blocks, as torchtitan does.
        turns = rotations(tokens.shape[1], rotary_size, config.rotary_base, tokens.device)
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


class Block(nn.Module):
    """Attention, then an MLP or a mixture of experts, each after a norm and with a residual."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.eps)
        self.mlp_norm = RMSNorm(config.dim, config.eps)
        # Why this scale: the blocks add to one sum, whose variance then does not grow with layers.
        std = 0.02 / math.sqrt(2 * config.layers)
        attention_class = LatentAttention if config.latent else GroupedAttention
        self.attention = attention_class(config, std)
        self.mlp: nn.Module
        if config.experts is not None and layer >= config.experts.dense_layers:
            self.mlp = Experts(config, std)
        else:
            self.mlp = SwiGLU(config.dim, config.hidden, std)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        return x + self.mlp(self.mlp_norm(x))


# --- attention ------------------------------------------------------------------------------------


class GroupedAttention(nn.Module):
    """Causal attention with rotary positions, in which groups of heads share keys and values."""

    def __init__(self, config: DecoderConfig, std: float) -> None:
        super().__init__()
        kv_heads = config.kv_heads or config.heads
        self.head_dim, self.repeats = config.dim // config.heads, config.heads // kv_heads
        self.wq = _Linear(config.dim, config.dim)
        self.wk = _Linear(config.dim, kv_heads * self.head_dim)
        self.wv = _Linear(config.dim, kv_heads * self.head_dim)
        self.wo = _Linear(config.dim, config.dim, std=std)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv)
        )
        q, k = rotate(q, turns), rotate(k, turns)
        return self.wo(attend(q, self.repeated(k), self.repeated(v)))

    def repeated(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` with every head repeated for its queries."""
        if self.repeats == 1:
            return x
        return x.unsqueeze(3).expand(-1, -1, -1, self.repeats, -1).flatten(2, 3)


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are computed from one small vector for each token."""

    def __init__(self, config: DecoderConfig, std: float) -> None:
        super().__init__()
        assert config.latent is not None, "Block checks this"
        self.heads, self.sizes = config.heads, config.latent
        sizes = config.latent
        self.wq_a = _Linear(config.dim, sizes.query)
        self.q_norm = RMSNorm(sizes.query, config.eps)
        self.wq_b = _Linear(sizes.query, config.heads * (sizes.plain + sizes.rotary))
        self.wkv_a = _Linear(config.dim, sizes.key_value + sizes.rotary)
        self.kv_norm = RMSNorm(sizes.key_value, config.eps)
        self.wkv_b = _Linear(sizes.key_value, config.heads * (sizes.plain + sizes.value))
        self.wo = _Linear(config.heads * sizes.value, config.dim, std=std)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        sizes = self.sizes
        q = self.wq_b(self.q_norm(self.wq_a(x))).unflatten(-1, (self.heads, -1))
        q_plain, q_turned = q.split([sizes.plain, sizes.rotary], dim=-1)
        q = torch.cat([q_plain, rotate(q_turned, turns)], dim=-1)
        kv, k_turned = self.wkv_a(x).split([sizes.key_value, sizes.rotary], dim=-1)
        # All heads share the rotated part of a key.
        k_turned = rotate(k_turned.unsqueeze(2), turns)
        kv = self.wkv_b(self.kv_norm(kv)).unflatten(-1, (self.heads, -1))
        k_plain, v = kv.split([sizes.plain, sizes.value], dim=-1)
        k = torch.cat([k_plain, k_turned.expand(-1, -1, self.heads, -1)], dim=-1)
        return self.wo(attend(q, k, v))


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of ``[batch, length, heads, size]``, with the heads joined."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
    )
    return out.transpose(1, 2).flatten(2)


def rotations(length: int, size: int, base: float, device: torch.device) -> torch.Tensor:
    """Return the complex number that turns each pair of a head, for all positions."""
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    turn_angles = torch.outer(
        torch.arange(length, dtype=torch.float32, device=device), base**-exponents
    )
    return torch.polar(torch.ones_like(turn_angles), turn_angles)


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return ``[batch, length, heads, size]`` with each pair turned, computed in float32."""
    float_pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(float_pairs * turns[:, None]).flatten(3).type_as(x)


# --- MLPs -----------------------------------------------------------------------------------------


class SwiGLU(nn.Module):
    """Two linear layers side by side, one of them through SiLU; a third one takes their product."""

    def __init__(self, dim: int, hidden: int, std: float) -> None:
        super().__init__()
        self.w1 = _Linear(dim, hidden)
        self.w2 = _Linear(hidden, dim, std=std)
        self.w3 = _Linear(dim, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Experts(nn.Module):
    """A mixture whose experts compute equal numbers of rows each; see ``decoder``."""

    def __init__(self, config: DecoderConfig, std: float) -> None:
        super().__init__()
        assert config.experts is not None, "Block checks this"
        self.sizes = sizes = config.experts
        self.router = Router(config)
        self.experts = nn.ModuleList(
            SwiGLU(config.dim, sizes.hidden, std) for _ in range(sizes.count)
        )
        self.shared = None
        if sizes.shared:
            self.shared = SwiGLU(config.dim, sizes.shared * sizes.hidden, std)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count, per_token = self.sizes.count, self.sizes.per_token
        # An expert sees tokens, whatever sequence they are of.
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens)
        copies, is_filled = _balanced(chosen, count)
        token_index = copies // per_token
        expert_inputs = (
            tokens.index_select(0, token_index).unflatten(0, (count, -1)).unbind()
        )
        expert_outputs = torch.cat(
            [
                expert(expert_rows)
                for expert, expert_rows in zip(self.experts, expert_inputs, strict=True)
            ]
        )
        # Note: a row that no token fills holds a copy of the first token, and counts nothing.
        row_weights = weights.flatten().index_select(0, copies) * is_filled
        weighted_outputs = expert_outputs * row_weights.type_as(expert_outputs)[:, None]
        out = weighted_outputs.new_zeros(tokens.shape).index_add(
            0, token_index, weighted_outputs
        )
        if self.shared is not None:
            out = out + self.shared(tokens)
        return out.view_as(x)


class Router(nn.Module):
    """The layer that chooses the experts of each token, and their weights, which add to one."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        assert config.experts is not None, "Block checks this"
        self.per_token = config.experts.per_token
        self.gate = _Linear(config.dim, config.experts.count)
        self.bias = None
        if config.experts.scores == "sigmoid":
            # Why a parameter: published counts include it. Gradients do not reach it.
            self.bias = nn.Parameter(torch.zeros(config.experts.count))

    def reset_parameters(self) -> None:
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gate(tokens).float()
        if self.bias is None:
            expert_scores = biased_scores = logits.softmax(-1)
        else:  # the bias changes the choice alone
            expert_scores = logits.sigmoid()
            biased_scores = expert_scores + self.bias
        chosen_experts = biased_scores.topk(self.per_token).indices
        weights = expert_scores.gather(-1, chosen_experts)
        return weights / weights.sum(-1, keepdim=True), chosen_experts


def _balanced(chosen: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token copy of each row, expert by expert, and whether there is one.

    A copy's number is ``token · per_token`` and more, or 0.

    Arguments:
        chosen: the experts of each token, of shape ``[tokens, per_token]``.
    """
    flat_chosen = chosen.flatten()
    num_rows = -(-flat_chosen.numel() // experts)
    # Copies of one expert follow one another, in the order of tokens.
    sorted_experts, sorted_order = flat_chosen.sort(stable=True)
    first_place = torch.searchsorted(
        sorted_experts, torch.arange(experts, device=flat_chosen.device)
    )
    row_of_expert = (
        torch.arange(flat_chosen.numel(), device=flat_chosen.device)
        - first_place[sorted_experts]
    )
    # Why one more place: all copies beyond an expert's rows are written there, and cut off.
    row_place = torch.where(
        row_of_expert < num_rows,
        sorted_experts * num_rows + row_of_expert,
        experts * num_rows,
    )
    token_copies = torch.full(
        (experts * num_rows + 1,), -1, device=flat_chosen.device
    ).scatter(0, row_place, sorted_order)[:-1]
    return token_copies.clamp(min=0), token_copies >= 0


# --- layers with weights --------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """Divide by the root mean square, in float32, by the same operations as in torchtitan."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean_square = wide.pow(2).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + self.eps)).type_as(x) * self.weight


class _Linear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, *, std: float = 0.02) -> None:
        self.std = std
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        # Why not on meta: the models there have up to 45,000 weights, and none holds any data.
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=self.std)


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            nn.init.normal_(self.weight, std=0.02)
