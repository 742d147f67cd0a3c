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
from funcshard.demo.gpt import Block
from tests.models import SUBJECTS
from tests.ranks import run_ranks

STEPS, ACCUMULATE, CLIP = 20, 2, 1.0


# --- two models -----------------------------------------------------------------------------------


class CharGPT(nn.Module):
    """A GPT with dropout and a head that is tied to the embedding, which computes its loss inside."""

    BLOCK = Block

    def __init__(self) -> None:
        super().__init__()
        self.gpt = SUBJECTS["gpt"].build(0.2)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.gpt(idx=ids)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @staticmethod
    def batches(rank: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(rank)
        text = torch.arange(4096) * 7 % 19
        while True:
            starts = torch.randint(len(text) - 10, (4,), generator=generator).tolist()
            ids = torch.stack([text[start : start + 10] for start in starts])
            yield ids[:, :-1], ids[:, 1:]

    @staticmethod
    def loss(call: Any, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = call(*batch)[1]
        return loss


class DiT(nn.Module):
    """A diffusion transformer with buffers, which draws numbers in forward, as its loss does."""

    BLOCK = nn.TransformerEncoderLayer
    SIZE, PATCH, CHANNELS, CLASSES, WIDTH = 8, 2, 4, 10, 32

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(self.CHANNELS, self.WIDTH, self.PATCH, self.PATCH)
        self.times = nn.Linear(16, self.WIDTH)
        self.classes = nn.Embedding(self.CLASSES + 1, self.WIDTH)  # the last is for no class
        self.register_buffer("positions", torch.randn(1, (self.SIZE // self.PATCH) ** 2, self.WIDTH) * 0.02)
        layers = (self.BLOCK(self.WIDTH, 4, 4 * self.WIDTH, dropout=0.0, batch_first=True) for _ in range(3))
        self.blocks = nn.ModuleList(layers)
        self.out = nn.Linear(self.WIDTH, self.PATCH**2 * self.CHANNELS)

    def forward(self, x: torch.Tensor, t: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.training:  # for guidance without a classifier
            labels = torch.where(torch.rand(labels.shape) < 0.1, self.CLASSES, labels)
        angles = t[:, None] * torch.exp(-math.log(10000) * torch.arange(8) / 8)
        c = self.times(torch.cat([angles.cos(), angles.sin()], 1)) + self.classes(labels)
        x = self.patches(x).flatten(2).mT + self.positions + c[:, None]
        for block in self.blocks:
            x = block(x)
        return F.fold(self.out(x).mT, (self.SIZE, self.SIZE), self.PATCH, stride=self.PATCH)

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
    plan = fs.make_plan(params, mesh, units=fs.wrap.by_class(script.BLOCK)(module))
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


def compare(mesh: fs.Mesh, name: str) -> None:
    ddp, step, by_hand = (
        with_ddp(mesh, name, False),
        *(ported(mesh, name, False, by_hand=by_hand) for by_hand in (False, True)),
    )
    assert ddp[-1] < 0.98 * ddp[0]  # it trains
    assert step == by_hand == pytest.approx(ddp, rel=4e-7, abs=0)
    ddp, step = with_ddp(mesh, name, True), ported(mesh, name, True, by_hand=False)
    assert step[0] == pytest.approx(ddp[0], rel=4e-7, abs=0)
    assert step == pytest.approx(ddp, rel=2e-3, abs=0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_of_ddp_and_its_ports_have_the_same_losses_also_under_autocast(name: str) -> None:
    run_ranks(compare, 2, name)
