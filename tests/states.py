"""States to save and to replan: a small model, several optimizers, and further values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import optree
import torch
import torchopt
from torch import nn

import funcshard as fs

__all__ = ["MESHES", "OPTIMIZERS", "Plans", "equal", "make_plan", "train"]

torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.BatchNorm1d(3))
NET[2].bias.requires_grad_(False)
NET.append(nn.Linear(3, 2))
APPLY, PARAMS, BUFFERS = fs.make_functional(NET, mutable=True)

Plans = tuple[int | Mapping[str, int], list[str], str]

MESHES: dict[str, Plans] = {
    "one rank": (1, [], "full_shard"),
    "4 ranks, every layer": (4, ["*"], "full_shard"),
    "3 ranks, one unit": (3, ["0"], "full_shard"),
    "2 ranks, the root alone": (2, [], "shard_grad_op"),
    "2 x 2 ranks": ({"replicate": 2, "shard": 2}, ["2", "0"], "full_shard"),
    "3 ranks, not sharded": (3, ["*"], "no_shard"),
}


def called_before(optimizer: Any) -> Any:
    """Call an optimizer once, and return it.

    TorchOpt's momentum does not decay in its first call, and the optimizer remembers outside of its
    state whether it was called. So a resumed run would differ from an uninterrupted one.
    """
    nothing = {"w": torch.zeros(1)}
    optimizer.update(nothing, optimizer.init(nothing), params=nothing, inplace=False)
    return optimizer


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "AdamW": lambda: fs.torch_optimizer(torch.optim.AdamW, lr=1e-2),
    "plain SGD": lambda: fs.torch_optimizer(torch.optim.SGD, lr=1e-2),
    "TorchOpt's AdamW": lambda: torchopt.adamw(1e-2),
    "TorchOpt's SGD": lambda: called_before(torchopt.sgd(1e-2, momentum=0.9)),
}


def make_plan(which: str) -> fs.Plan:
    mesh, units, strategy = MESHES[which]
    return fs.make_plan(PARAMS, mesh, units=units, strategy=strategy)


def train(mesh: fs.Mesh, plan: fs.Plan, optimizer: Any, steps: int, state: Any = None) -> tuple[Any, list[float]]:
    """Train on the same samples on every rank; return a state of many kinds, and the losses."""
    sharded = fs.fully_shard(APPLY, plan, mesh)
    data = torch.randn(12, 5, generator=torch.Generator().manual_seed(7))

    def loss_fn(shards: Any, buffers: Any, x: torch.Tensor) -> Any:
        out, new = sharded(shards, buffers, x)
        return out.square().mean(), new

    step = fs.make_train_step(loss_fn, optimizer, plan, mesh, mutable=True)
    if state is None:
        shards = fs.shard(PARAMS, plan, mesh)
        ema = {name: {key: shard.double() for key, shard in unit.items()} for name, unit in shards.items()}
        state = {"train": step.init(shards, dict(BUFFERS)), "ema": ema, "name": "run", "best": 0.1 + 0.2, "no": None}
    now, losses = state["train"], []
    for _ in range(steps):
        # BatchNorm's statistics are of a rank's own samples, so every rank gets the same samples
        now, metrics = step(now, data[: 12 // 3] * (1 + now.step / 10))
        losses.append(metrics["loss"].item())
    own = fs.PerRank({"rng": torch.get_rng_state(), "position": mesh.rank + 100})
    return {**state, "train": now, "own": own}, losses


def equal(one: Any, other: Any) -> bool:
    """Return whether two trees are equal to the bit, NaN included, with equal dtypes, devices and types of nodes."""
    if optree.tree_structure(one) != optree.tree_structure(other):
        return False
    return all(map(_equal, optree.tree_leaves(one), optree.tree_leaves(other)))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, fs.PerRank):
        return isinstance(other, fs.PerRank) and equal(one.value, other.value)
    if isinstance(one, torch.Tensor):
        alike = isinstance(other, torch.Tensor) and (one.dtype, one.device) == (other.dtype, other.device)
        return alike and (torch.equal(one, other) or (one.shape == other.shape and _same_bits(one, other)))  # NaN
    return type(one) is type(other) and one == other


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(*(x.detach().flatten().view(torch.uint8) for x in (one, other)))
