"""A small model whose layers are cut along model axes, whole and in slices, for tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.ranks import run_simulated

__all__ = [
    "CUTS", "WHOLE", "batch", "cuts_on", "forward", "loss_of", "make_params", "meshes", "plan_on", "ranks", "setup",
    "slice_of", "slices_at", "whole", "whole_forward",
]  # fmt: skip

WIDTH, HIDDEN = 4, 8
# By leaf of a block: the dimension that each axis cuts. The rest is the same along every model axis.
CUTS: dict[str, dict[str, int]] = {
    "up": {"tensor": 0},
    "bias": {"tensor": 0},
    "down": {"tensor": 1},
    "experts": {"expert": 0, "tensor": 0},
}

WHOLE = {"shard": 1}  # one rank, which holds the whole model
_MESHES: dict[str, dict[str, int]] = {
    "shard 2, tensor 2": {"shard": 2, "tensor": 2},
    "replicate 2, shard 2, tensor 2": {"replicate": 2, "shard": 2, "tensor": 2},
    "expert 2, tensor 2": {"expert": 2, "tensor": 2},
    "one rank of tensor": {"shard": 3, "tensor": 1},
}
meshes = pytest.mark.parametrize("shape", _MESHES.values(), ids=_MESHES)  # runs a test on each of these meshes


def make_params() -> dict[str, Any]:
    """Return the whole parameters of two blocks, the same every time."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def block() -> dict[str, torch.Tensor]:
        return {
            "up": draw(HIDDEN, WIDTH),
            "bias": draw(HIDDEN),
            "down": draw(WIDTH, HIDDEN),
            "scale": draw(WIDTH),
            "experts": draw(HIDDEN, 3, WIDTH),
        }

    return {"blocks": [block() for _ in range(2)], "head": draw(1, WIDTH)}


def cuts_on(shape: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Return the option ``local`` for a mesh of this shape."""
    found = {f"blocks.*.{name}": {axis: dim for axis, dim in cuts.items() if axis in shape} for name, cuts in CUTS.items()}
    return {glob: cuts for glob, cuts in found.items() if cuts}


def slice_of(name: str, whole: torch.Tensor, position: Mapping[str, int], shape: Mapping[str, int]) -> torch.Tensor:
    """Return the slice of a whole leaf that a rank holds."""
    for axis, dim in CUTS.get(name.rpartition(".")[2], {}).items():
        if axis in shape:
            whole = whole.chunk(shape[axis], dim)[position[axis]]
    return whole


def slices_at(params: dict[str, Any], position: Mapping[str, int], shape: Mapping[str, int]) -> dict[str, Any]:
    """Return the parameters that one rank passes to ``shard``."""
    blocks = [{name: slice_of(name, leaf, position, shape) for name, leaf in block.items()} for block in params["blocks"]]
    return {**params, "blocks": blocks}


def plan_on(shape: Mapping[str, int], params: dict[str, Any], **options: Any) -> fs.Plan:
    """Return the plan of a mesh for the whole ``params``."""
    first = slices_at(params, dict.fromkeys(shape, 0), shape)
    return fs.make_plan(first, shape, **{"units": ["blocks.*"], "local": cuts_on(shape), **options})


def _block(leaves: dict[str, torch.Tensor], x: torch.Tensor, total: Callable[..., torch.Tensor]) -> torch.Tensor:
    hidden = torch.tanh(x @ leaves["up"].T + leaves["bias"])
    y = total(hidden @ leaves["down"].T, "tensor") * leaves["scale"]
    mixed = torch.einsum("...c,hkc->...", torch.sin(x), torch.tanh(leaves["experts"]))
    return torch.tanh(x + y) * (1 + 0.1 * total(mixed, "expert", "tensor").unsqueeze(-1))


def whole_forward(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Run the model on its whole parameters, by path."""
    for number in range(2):
        leaves = {name: params[f"blocks.{number}.{name}"] for name in ("up", "bias", "down", "scale", "experts")}
        x = _block(leaves, x, lambda y, *_: y)
    return x @ params["head"].T


def forward(plan: fs.Plan, mesh: fs.Mesh, shards: fs.TrainState | Any, x: torch.Tensor) -> torch.Tensor:
    """Run the model on this rank's shards."""
    axes = tuple(axis for axis in ("expert", "tensor") if axis in mesh.shape)

    def total(y: torch.Tensor, *names: str) -> torch.Tensor:
        along = tuple(axis for axis in names if axis in axes)
        return fs.psum(y, mesh, axis=along) if along else y

    for name in plan.units:
        if name:
            run = lambda leaves, x: _block(leaves, x, total)  # noqa: E731
            x = fs.reshard(fs.unshard(run, plan.units[name], mesh))(shards[name], x)
    head = lambda leaves, x: x @ leaves["head"].T  # noqa: E731
    return fs.unshard(head, plan.units[""], mesh)(shards[""], x)


def loss_of(y: torch.Tensor) -> torch.Tensor:
    """Return the loss of outputs, a mean over samples."""
    return y.square().mean()


def batch(position: Mapping[str, int], shape: Mapping[str, int]) -> torch.Tensor:
    """Return the samples of a rank: ranks along a model axis have the same."""
    sizes = {axis: shape.get(axis, 1) for axis in ("replicate", "shard")}
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    index = position.get("replicate", 0) * sizes["shard"] + position.get("shard", 0)
    return x.chunk(math.prod(sizes.values()))[index]


def ranks(fn: Callable[..., Any], shape: Mapping[str, int], *args: Any) -> list[Any]:
    """Run ``fn(mesh, *args)`` on simulated ranks in a mesh of this shape."""
    return run_simulated(fn, math.prod(shape.values()), *args, shape=shape)


def setup(mesh: fs.Mesh, strategy: str = "full_shard") -> tuple[fs.Plan, Any, Any]:
    """Return the plan, this rank's shards, and the loss of its samples."""
    params = make_params()
    plan = plan_on(mesh.shape, params, strategy=strategy)
    shards = fs.shard(slices_at(params, mesh.position, mesh.shape), plan, mesh)
    return plan, shards, lambda shards, x: loss_of(forward(plan, mesh, shards, x))


def whole(params: Any, plan: fs.Plan, mesh: fs.Mesh) -> dict[str, torch.Tensor]:
    """Return the whole tensor of every leaf of ``params``, by path."""
    return fs.to_state_dict(params, plan, mesh)
