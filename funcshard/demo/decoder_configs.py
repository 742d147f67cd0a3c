"""Sizes of well-known language models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from funcshard.demo.gpt import GPTConfig, check_sizes


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Sizes of multi-head latent attention; the defaults are those of DeepSeek-V3.

    Attributes:
        key_value: size of the vector behind the keys and values of all heads.
        rotary: size of the rotated part of a query or key, which heads share in keys.
        plain: size of the other part of a head's query or key.
    """

    query: int = 1536
    key_value: int = 512
    rotary: int = 64
    plain: int = 128
    value: int = 128

    def __post_init__(self) -> None:
        check_sizes(self, ("query", "key_value", "rotary", "plain", "value"))
        if self.rotary % 2:
            raise ValueError(
                f"rotary must be even, because rotation turns pairs of numbers; found {self.rotary}"
            )


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

    def __post_init__(self) -> None:
        check_sizes(self, ("count", "per_token", "hidden"))
        check_sizes(self, ("shared", "dense_layers"), least=0)
        if self.per_token > self.count:
            raise ValueError(
                "per_token must be at most count, the number of experts; found per_token "
                f"{self.per_token} and count {self.count}"
            )
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"scores must be 'softmax' or 'sigmoid'; found {self.scores!r}")


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

    Raises:
        ValueError: a size is below 1, or doesn't divide another one.
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

    def __post_init__(self) -> None:
        check_sizes(self, ("dim", "layers", "heads", "vocabulary", "hidden", "context", "kv_heads"))
        # Latent attention has head sizes of its own.
        if self.dim % self.heads and self.latent is None:
            raise ValueError(
                f"dim must be a multiple of heads; found dim {self.dim} and {self.heads} heads"
            )
        if self.heads % self.groups:
            raise ValueError(
                f"heads must be a multiple of kv_heads; found {self.heads} heads and {self.groups} "
                "kv_heads"
            )
        if self.latent is None and self.head_dim % 2:
            raise ValueError(
                "dim / heads must be even, because rotation turns pairs of numbers; found "
                f"{self.head_dim}"
            )
        if self.experts and self.experts.dense_layers > self.layers:
            raise ValueError(
                f"dense_layers must be at most layers, {self.layers}; found "
                f"{self.experts.dense_layers}"
            )

    @property
    def groups(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_dim(self) -> int:
        """Size of a head, or of a key and a value in the mean."""
        # Why the mean: 12 · layers · heads · head_dim · length then counts the FLOPs of attention,
        # which come half from keys and half from values.
        if self.latent is None:
            return self.dim // self.heads
        return (self.latent.rotary + self.latent.plain + self.latent.value) // 2


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
