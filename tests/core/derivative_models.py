"""The models whose derivatives are compared, of transformers and torch, with a UNet and a mixture of experts."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import SUBJECTS, Batch, Subject, cross_entropy, hugging_face, seeded

__all__ = ["MODELS"]


def llama(dropout: float = 0.0) -> nn.Module:
    model = SUBJECTS["llama"].build(dropout)
    for path, norm in list(model.named_modules()):
        if type(norm).__name__ == "LlamaRMSNorm":  # which computes in float32
            model.set_submodule(path, nn.RMSNorm(12, eps=1e-6))
    return model


class Residual(nn.Module):
    """A block of a UNet: norms, convolutions, the time, and attention over pixels."""

    def __init__(self, width: int, out: int, attends: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(2, width), nn.GroupNorm(2, out)])
        self.convs = nn.ModuleList([nn.Conv2d(width, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)])
        self.time, self.skip = nn.Linear(4, out), nn.Conv2d(width, out, 1)
        self.qkv = nn.Conv2d(out, 3 * out, 1) if attends else None

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.convs[0](F.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        h = self.skip(x) + self.convs[1](F.silu(self.norms[1](h)))
        if self.qkv is None:
            return h
        q, k, v = self.qkv(h).flatten(2).mT[:, None].chunk(3, -1)
        return h + F.scaled_dot_product_attention(q, k, v)[:, 0].mT.unflatten(2, h.shape[2:])


class UNet(nn.Module):
    def __init__(self, _: float) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.down, self.middle, self.up = Residual(4, 6), Residual(6, 6, attends=True), Residual(10, 4)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        time = torch.cat([f(k * time[:, None]) for f in (torch.sin, torch.cos) for k in (1, 3)], 1)
        first = self.first(x)
        low = self.middle(self.down(F.avg_pool2d(first, 2), time), time)
        high = F.interpolate(low, scale_factor=2.0, mode="nearest")
        return self.last(F.silu(self.up(torch.cat([first, high], 1), time))).mean((2, 3))


class Experts(nn.Module):
    """The two best of four experts for each token, as in Mixtral."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(width), nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 9), nn.SiLU(), nn.Linear(9, width)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.norm(x).flatten(0, -2)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(tokens)
        for index, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == index)
            out = out.index_add(0, rows, expert(tokens[rows]) * weights[rows, place, None])
        return x + out.view_as(x)


class Mixture(nn.Module):
    def __init__(self, _: float) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(19, 8), nn.ModuleList([Experts(8), Experts(8)])
        self.head = nn.Linear(8, 19)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def noisy(n: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    inputs = {"x": torch.randn(n, 2, 4, 4, generator=g), "time": torch.rand(n, generator=g)}
    return {"inputs": inputs, "targets": torch.randint(3, (n,), generator=g)}


def pixels(n: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return {"inputs": {"pixel_values": torch.randn(n, 3, 8, 8, generator=g)}, "targets": torch.randint(3, (n,), generator=g)}


def encoder(_: float) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def states(n: int, seed: int) -> Batch:
    g = torch.Generator().manual_seed(seed)
    return {"inputs": {"src": torch.randn(n, 4, 8, generator=g)}, "targets": torch.randint(8, (n, 4), generator=g)}


def texts(n: int, seed: int) -> Batch:
    batch = SUBJECTS["gpt2"].make_batch(n, seed)
    return {"inputs": {"ids": batch["inputs"]["input_ids"]}, "targets": batch["targets"]}


_vit = hugging_face(
    "ViTConfig", "ViTForImageClassification",
    hidden_size=12, num_hidden_layers=2, num_attention_heads=2, intermediate_size=20, image_size=8, patch_size=4,
    num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
)  # fmt: skip

MODELS = {
    "GPT-2": SUBJECTS["gpt2"],
    "Llama": dataclasses.replace(SUBJECTS["llama"], build=llama),
    "ViT": Subject(seeded(_vit), pixels, cross_entropy, ("vit.layers.*",)),
    "UNet": Subject(seeded(UNet), noisy, cross_entropy, ("down", "middle", "up")),
    "TransformerEncoder": Subject(seeded(encoder), states, cross_entropy, ("layers.*",)),
    "MoE": Subject(seeded(Mixture), texts, cross_entropy, ("blocks.*",)),
}
