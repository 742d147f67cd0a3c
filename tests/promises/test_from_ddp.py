"""Two training scripts as users of DDP write them, and their ports: the losses are DDP's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import funcshard as fs
from tests.ranks import run_ranks

STEPS, ACCUMULATE, CLIP = 20, 2, 1.0


# --- a GPT of characters, which computes its loss inside ------------------------------------------


class CausalAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        return F.dropout(self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention = CausalAttention(width, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False),
            nn.GELU(),
            nn.Linear(4 * width, width, bias=False),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CharGPT(nn.Module):
    VOCABULARY, CONTEXT, WIDTH, LAYERS = 65, 16, 32, 3

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.VOCABULARY, self.WIDTH)
        self.positions = nn.Embedding(self.CONTEXT, self.WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(self.WIDTH, 4, dropout) for _ in range(self.LAYERS))
        self.norm = nn.LayerNorm(self.WIDTH, bias=False)
        self.head = nn.Linear(self.WIDTH, self.VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.apply(self.reset)
        for name, parameter in self.named_parameters():
            if name.endswith("out.weight"):
                nn.init.normal_(parameter, 0.0, 0.02 / math.sqrt(2 * self.LAYERS))

    @staticmethod
    def reset(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, 0.0, 0.02)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> tuple[torch.Tensor, Any]:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @staticmethod
    def batches(rank: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(rank)
        text = torch.arange(4096) * 7 % 65
        while True:
            starts = torch.randint(len(text) - 17, (4,), generator=generator).tolist()
            ids = torch.stack([text[start : start + 17] for start in starts])
            yield ids[:, :-1], ids[:, 1:]

    @staticmethod
    def loss(call: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = call(*batch)[1]
        return loss


# --- a diffusion transformer ----------------------------------------------------------------------


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * (1 + scale[:, None]) + shift[:, None]


class DiTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c).chunk(6, 1)
        y = modulate(self.norm1(x), shift1, scale1)
        x = x + gate1[:, None] * self.attention(y, y, y, need_weights=False)[0]
        return x + gate2[:, None] * self.mlp(modulate(self.norm2(x), shift2, scale2))


class DiT(nn.Module):
    SIZE, PATCH, CHANNELS, CLASSES, WIDTH = 8, 2, 4, 10, 32

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(self.CHANNELS, self.WIDTH, self.PATCH, self.PATCH)
        self.times = nn.Sequential(nn.Linear(16, self.WIDTH), nn.SiLU(), nn.Linear(self.WIDTH, self.WIDTH))
        self.classes = nn.Embedding(self.CLASSES + 1, self.WIDTH)  # the last is for no class
        self.register_buffer("positions", torch.randn(1, (self.SIZE // self.PATCH) ** 2, self.WIDTH) * 0.02)
        self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0))
        self.blocks = nn.ModuleList(DiTBlock(self.WIDTH, 4) for _ in range(3))
        self.norm = nn.LayerNorm(self.WIDTH, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(self.WIDTH, 2 * self.WIDTH))
        self.out = nn.Linear(self.WIDTH, self.PATCH**2 * self.CHANNELS)

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:  # for guidance without a classifier
            labels = torch.where(torch.rand(labels.shape) < 0.1, self.CLASSES, labels)
        angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(8) / 8)
        c = self.times(torch.cat([angles.cos(), angles.sin()], 1)) + self.classes(labels)
        x = self.patches(x).flatten(2).mT + self.positions
        for block in self.blocks:
            x = block(x, c)
        x = self.out(modulate(self.norm(x), *self.modulation(c).chunk(2, 1)))
        return F.fold(x.mT, (self.SIZE, self.SIZE), self.PATCH, stride=self.PATCH)

    @classmethod
    def batches(cls, rank: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(rank)
        while True:
            yield (
                torch.randn(4, cls.CHANNELS, cls.SIZE, cls.SIZE, generator=generator),
                torch.randint(cls.CLASSES, (4,), generator=generator),
            )

    @staticmethod
    def loss(call: Any, batch: Any) -> torch.Tensor:
        images, labels = batch
        t, noise = torch.randint(1000, (len(images),)), torch.randn_like(images)
        alpha = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)[t, None, None, None]
        return F.mse_loss(call(alpha.sqrt() * images + (1 - alpha).sqrt() * noise, t, labels), noise)


# --- the script of DDP, and its ports -------------------------------------------------------------

SCRIPTS: dict[str, Any] = {"gpt": CharGPT, "dit": DiT}


def rate(step: int) -> float:
    """Return the learning rate: warm-up, then half a cosine."""
    return 1e-3 * min((step + 1) / 5, 0.55 + 0.45 * math.cos(math.pi * step / STEPS))


def autocast(on: bool) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if on else contextlib.nullcontext()


def build(name: str) -> nn.Module:
    torch.manual_seed(1337)  # the same parameters on every rank
    module: nn.Module = SCRIPTS[name]()
    return module


def with_ddp(mesh: fs.Mesh, name: str, cast: bool) -> list[float]:
    script, module = SCRIPTS[name], build(name)
    model = DistributedDataParallel(module)
    decayed = [p for p in module.parameters() if p.ndim >= 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in module.parameters() if p.ndim < 2]}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    batches, losses = script.batches(mesh.rank), []
    torch.manual_seed(1337 + mesh.rank)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        total = 0.0
        for micro in range(ACCUMULATE):
            with contextlib.nullcontext() if micro + 1 == ACCUMULATE else model.no_sync():
                with autocast(cast):
                    loss = script.loss(model, next(batches)) / ACCUMULATE
                loss.backward()
                total += loss.item()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses


def ported(mesh: fs.Mesh, name: str, cast: bool, *, by_hand: bool) -> list[float]:
    script, module = SCRIPTS[name], build(name)
    apply, params, buffers = fs.make_functional(module)
    plan = fs.make_plan(params, mesh, units=fs.wrap.by_class(Block, DiTBlock)(module))
    sharded = fs.fully_shard(apply, plan, mesh)

    def loss_fn(shards: Any, buffers: Any, batch: Any) -> torch.Tensor:
        with autocast(cast):
            loss: torch.Tensor = script.loss(lambda *args: sharded(shards, buffers, *args), batch)
            return loss

    vectors = [{"paths": [path for path, p in params.items() if p.ndim < 2], "weight_decay": 0.0}]
    optimizer = fs.torch_optimizer(
        torch.optim.AdamW, lr=rate, betas=(0.9, 0.95), weight_decay=0.1, groups=vectors, plan=plan, mesh=mesh
    )
    shards, batches, losses = fs.shard(params, plan, mesh), script.batches(mesh.rank), []
    torch.manual_seed(1337 + mesh.rank)
    if by_hand:
        evaluate, state = fs.accumulate(loss_fn, ACCUMULATE, reduce="once"), optimizer.init(shards)
        for _ in range(STEPS):
            loss, grads = evaluate(shards, buffers, batches)
            grads, _ = fs.clip_by_global_norm(grads, plan, mesh, CLIP)
            shards, state = optimizer.step(grads, state, shards)
            losses.append(loss.item())
        return losses
    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, max_norm=CLIP, accumulate=ACCUMULATE, reduce="once")
    train = step.init(shards, buffers)
    for _ in range(STEPS):
        train, metrics = step(train, batches)
        losses.append(metrics["local_loss"].item())
    return losses


def three_ways(mesh: fs.Mesh, name: str) -> list[list[float]]:
    return [with_ddp(mesh, name, False), *(ported(mesh, name, False, by_hand=by_hand) for by_hand in (False, True))]


def two_ways_cast(mesh: fs.Mesh, name: str) -> list[list[float]]:
    return [with_ddp(mesh, name, True), ported(mesh, name, True, by_hand=False)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_ddp_and_its_ports_have_the_same_losses(name: str) -> None:
    for ddp, step, by_hand in run_ranks(three_ways, 2, name):
        assert ddp[-1] < 0.98 * ddp[0]  # it trains
        assert step == by_hand
        assert step == pytest.approx(ddp, rel=4e-7, abs=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_under_autocast_the_losses_are_those_of_ddp_under_autocast(name: str) -> None:
    for ddp, step in run_ranks(two_ways_cast, 2, name):
        assert step[0] == pytest.approx(ddp[0], rel=4e-7, abs=0)
        assert step == pytest.approx(ddp, rel=2e-3, abs=0)
