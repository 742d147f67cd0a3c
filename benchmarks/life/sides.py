"""The two sides of most cases: a GPT that funcshard shards, and the same one that FSDP2 shards.

Libraries are imported when they are needed, because a fresh rank loads no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.life.case import Place
from benchmarks.shapes import Shape
from funcshard.demo.gpt import GPT, Block, GPTConfig

_SIZES = {  # parameters in millions -> sizes; the head is tied to the embedding
    98: {"width": 768, "layers": 12, "heads": 12, "vocabulary": 16384},
    51: {"width": 640, "layers": 9, "heads": 10, "vocabulary": 10240},
    24: {"width": 384, "layers": 12, "heads": 6, "vocabulary": 8192},
    11: {"width": 384, "layers": 6, "heads": 6, "vocabulary": 256},
}
_TINY = {"width": 16, "layers": 2, "heads": 2, "vocabulary": 32, "context": 8}


def gpt(place: Place, millions: int = 11, *, batch: int = 4, **sizes: int) -> Shape:
    """Return a GPT with a number of parameters, or a tiny one, with batches for a rank."""
    config = GPTConfig(**(_TINY if place.tiny else {**_SIZES[millions], "context": 128, **sizes}))
    return Shape("GPT", lambda: GPT(config), Block, batch, config.context, config.vocabulary, config.heads)


def on_meta(shape: Shape) -> nn.Module:
    """Return a module without values."""
    with torch.device("meta"):
        return shape.build()


def over_ranks(part: Any) -> float:
    """Return the sum of all ranks' parts."""
    total = torch.as_tensor(part, dtype=torch.float64).clone()
    dist.all_reduce(total)
    return total.item()


def _random_grads(module: nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(p.shape, generator=generator) / 100 for name, p in module.named_parameters()}


class Ours:
    """A model that funcshard shards."""

    def __init__(self, shape: Shape, strategy: Any = "full_shard") -> None:
        import funcshard as fs

        module = shape.module()
        self.shape, self.mesh = shape, fs.init_mesh(device="cpu")
        apply, params, self.buffers = fs.make_functional(module)
        self.plan = fs.make_plan(params, self.mesh, units=["blocks.*"], strategy=strategy)
        self.sharded = fs.fully_shard(apply, self.plan, self.mesh)
        self.shards = fs.shard(params, self.plan, self.mesh)
        self.optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-3, fused=True)

    def loss(self, shards: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.shape.loss(self.sharded(shards, self.buffers, inputs), targets)

    def random_grads(self) -> Any:
        """Return random gradients, the same as those of ``Theirs``."""
        import funcshard as fs

        return fs.from_state_dict(_random_grads(self.shape.module()), self.plan, self.mesh)

    def prepare(self, *, ones: bool = False, **options: Any) -> None:
        """Make the training step and its state, after an update with gradients of one if ``ones``."""
        import funcshard as fs

        self.step = fs.make_train_step(
            lambda shards, _, batch: self.loss(shards, *batch), self.optimizer, self.plan, self.mesh, **options
        )
        self.state = self.step.init(self.shards, self.buffers)
        if ones:
            shards, opt_state = self.state.shards, self.state.opt_state
            grads = {unit: {key: torch.ones_like(flat) for key, flat in own.items()} for unit, own in shards.items()}
            shards, opt_state = self.optimizer.step(grads, opt_state, shards)
            self.state = self.state._replace(shards=shards, opt_state=opt_state)
        del self.shards  # the state holds them

    def train(self, batch: Any) -> torch.Tensor:
        self.state, metrics = self.step(self.state, batch)
        return metrics["local_loss"]

    def sum(self, shards: Any) -> float:
        """Return the sum of all elements of the whole tree."""
        return over_ranks(sum(leaf.double().sum() for leaf in leaves(shards)))


def leaves(shards: Any) -> list[torch.Tensor]:
    """Return the shards of a tree."""
    return [leaf for unit in shards.values() for leaf in unit.values()]


class Theirs:
    """The same model, sharded by FSDP2, with torch's fused AdamW."""

    def __init__(self, shape: Shape, module: nn.Module | None = None, *, reshard: bool = True) -> None:
        from benchmarks.peers import sharded_by_fsdp2

        self.shape = shape
        self.module: Any = sharded_by_fsdp2(module or shape.module(), shape.unit, reshard)
        self.params: list[Any] = list(self.module.parameters())
        self.optimizer = self.new_optimizer()

    def new_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.params, lr=1e-3, fused=True)

    def set_random_grads(self) -> None:
        """Give every parameter a random gradient."""
        from torch.distributed.tensor import distribute_tensor

        grads = _random_grads(self.shape.module())
        for name, p in self.module.named_parameters():
            p.grad = distribute_tensor(grads[name], p.device_mesh, p.placements)

    def update_with_ones(self) -> None:
        """Update with gradients of one."""
        for p in self.params:
            p.grad = torch.ones_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, batch: Any, max_norm: float | None = None) -> torch.Tensor:
        loss = self.shape.loss(self.module(batch[0]), batch[1])
        loss.backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.params, max_norm, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def sum(self, tensors: Iterable[Any]) -> float:
        return over_ranks(sum(each.detach().to_local().double().sum() for each in tensors))
