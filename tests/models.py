"""The models that tests train: small and seeded, each with its loss and batches."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from funcshard.demo.gpt import GPT, GPTConfig

__all__ = ["SUBJECTS", "Batch", "Subject", "cast", "cross_entropy", "hugging_face", "part", "seeded"]

Batch = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model to train.

    Attributes:
        build: builds the module, with the same parameters every time; its argument is the dropout.
        make_batch: ``make_batch(n, seed)`` returns ``{"inputs": keyword arguments, "targets":
            tensor or None}``.
        loss: ``loss(output, batch)`` returns the mean over the batch.
        units: globs of the units.
        batch_statistics: whether the output for a sample depends on the rest of the batch.
    """

    build: Callable[..., nn.Module]
    make_batch: Callable[[int, int], Batch]
    loss: Callable[[Any, Batch], torch.Tensor]
    units: tuple[str, ...]
    batch_statistics: bool = False


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """Return ``batch`` with its floating-point tensors in ``dtype``."""
    if isinstance(batch, dict):
        return {key: cast(value, dtype) for key, value in batch.items()}
    return batch.to(dtype) if isinstance(batch, torch.Tensor) and batch.is_floating_point() else batch


def part(batch: Any, rank: int, world_size: int) -> Any:
    """Return the samples of one rank: the batch is split into ``world_size`` equal parts."""
    if isinstance(batch, dict):
        return {key: part(value, rank, world_size) for key, value in batch.items()}
    return batch.chunk(world_size)[rank] if isinstance(batch, torch.Tensor) else batch


class ConvNet(nn.Module):
    """Two convolutions with BatchNorm, a dropout and a linear layer."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(5, 7, 3, stride=2), nn.BatchNorm2d(7), nn.ReLU())
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.dropout(self.second(self.first(x)).mean((2, 3))))


class MLP(nn.Module):
    """Three linear layers of odd sizes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Dropout(dropout), nn.Linear(17, 11), nn.Tanh())
        self.head = nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x))


def seeded(build: Callable[[float], nn.Module]) -> Callable[..., nn.Module]:
    def seeded(dropout: float = 0.0) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return build(dropout).train()

    return seeded


def _gpt(dropout: float) -> nn.Module:
    assert not dropout, "the demo's GPT has none"
    return GPT(GPTConfig(width=12, layers=2, heads=2, context=9, vocabulary=19))


def hugging_face(config: str, model: str, **options: Any) -> Callable[[float], nn.Module]:
    def build(dropout: float) -> nn.Module:
        assert not dropout, "these configs have it switched off"
        transformers = importlib.import_module("transformers")  # imported here because it takes seconds
        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + seed)


def _vectors(n: int, seed: int) -> Batch:
    g = _generator(seed)
    return {"inputs": {"x": torch.randn(n, 6, generator=g)}, "targets": torch.randint(3, (n,), generator=g)}


def _images(n: int, seed: int) -> Batch:
    g = _generator(seed)
    return {"inputs": {"x": torch.randn(n, 2, 7, 7, generator=g)}, "targets": torch.randint(3, (n,), generator=g)}


def _tokens(name: str) -> Callable[[int, int], Batch]:
    def make_batch(n: int, seed: int) -> Batch:
        g = _generator(seed)
        return {"inputs": {name: torch.randint(19, (n, 8), generator=g)}, "targets": torch.randint(19, (n, 8), generator=g)}

    return make_batch


def cross_entropy(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), batch["targets"].flatten())


def _cross_entropy_of_logits(output: Any, batch: Batch) -> torch.Tensor:
    return cross_entropy(output.logits, batch)


_bert = hugging_face(
    "BertConfig", "BertForMaskedLM",
    vocab_size=19, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20,
    max_position_embeddings=8, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip
_llama = hugging_face(
    "LlamaConfig", "LlamaForCausalLM",
    vocab_size=19, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=20, max_position_embeddings=8, use_cache=False,
)  # fmt: skip
_gpt2 = hugging_face(
    "GPT2Config", "GPT2LMHeadModel",
    vocab_size=19, n_embd=12, n_layer=2, n_head=2, n_positions=8, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    bos_token_id=0, eos_token_id=0, use_cache=False,
)  # fmt: skip

SUBJECTS: dict[str, Subject] = {
    "mlp": Subject(seeded(MLP), _vectors, cross_entropy, ("layers.0", "layers.3")),
    "gpt": Subject(seeded(_gpt), _tokens("idx"), cross_entropy, ("blocks.*",)),
    "convnet": Subject(seeded(ConvNet), _images, cross_entropy, ("first", "second"), batch_statistics=True),
    "bert": Subject(seeded(_bert), _tokens("input_ids"), _cross_entropy_of_logits, ("bert.encoder.layer.*",)),
    "llama": Subject(
        seeded(_llama), _tokens("input_ids"), _cross_entropy_of_logits, ("model.layers.*",)
    ),
    "gpt2": Subject(seeded(_gpt2), _tokens("input_ids"), _cross_entropy_of_logits, ("transformer.h.*",)),
}  # fmt: skip
