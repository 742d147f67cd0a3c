"""Planted mistakes are named by ``same_on_every_mesh``, and right programs are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.testing import same_on_every_mesh

ROWS, WIDTH, HIDDEN = 8, 4, 12


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, Y, KEEP = draw(4 * ROWS, WIDTH), draw(4 * ROWS, WIDTH, seed=1), draw(4 * ROWS, WIDTH, seed=2) > 0.4
WHOLE = {"up": draw(HIDDEN, WIDTH, seed=3), "down": draw(WIDTH, HIDDEN, seed=4), "bias": draw(WIDTH, seed=5)}
CUTS = {"up": 0, "down": 1}


def index(mesh: fs.Mesh) -> tuple[int, int]:
    """Return this rank's index and the number of ranks along both data axes."""
    sizes, place = mesh.shape, mesh.position
    return place["replicate"] * sizes["shard"] + place["shard"], sizes["replicate"] * sizes["shard"]


def both(cut: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loader that cuts inputs and targets alike: ``cut(x, index, number of ranks, mesh)``."""
    return lambda mesh: (cut(X, *index(mesh), mesh), cut(Y, *index(mesh), mesh))


def rows(mesh: fs.Mesh, x: torch.Tensor) -> torch.Tensor:
    rank, ranks = index(mesh)
    return x[:ROWS].chunk(ranks)[rank]


batch = both(lambda x, rank, ranks, mesh: rows(mesh, x))


def total(y: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
    return fs.psum(y, mesh, axis="tensor") if "tensor" in mesh.shape else y


def mlp(leaves: Any, x: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
    return x + total(torch.tanh(x @ leaves["up"].T) @ leaves["down"].T, mesh) + leaves["bias"]


def mse(out: torch.Tensor, y: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
    return (out - y).square().mean()


def mean(loss: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
    return fs.pmean(loss, mesh, axis=tuple(mesh.shape))


def sgd(shards: Any, grads: Any, mesh: fs.Mesh, step: int) -> Any:
    return fs.axpy(-0.1, grads, shards)


def gradient(loss_fn: Callable[..., Any], shards: Any, mesh: fs.Mesh) -> Any:
    return fs.value_and_grad(loss_fn, mesh=mesh)(shards)


@dataclasses.dataclass(frozen=True)
class Program:
    """A training run of a tensor-parallel MLP; a mistake replaces a part of it."""

    batch: Callable[..., Any] = batch
    model: Callable[..., Any] = mlp
    loss: Callable[..., Any] = mse
    gradient: Callable[..., Any] = gradient
    report: Callable[..., Any] = mean
    update: Callable[..., Any] = sgd
    steps: int = 1

    def __call__(self, mesh: fs.Mesh) -> Any:
        local = {name: {"tensor": dim} for name, dim in CUTS.items() if "tensor" in mesh.shape}
        place, ranks = mesh.position.get("tensor", 0), mesh.shape.get("tensor", 1)
        mine = {name: leaf.chunk(ranks, CUTS[name])[place] if name in CUTS else leaf for name, leaf in WHOLE.items()}
        plan = fs.make_plan(mine, mesh, local=local)
        shards, found = fs.shard(mine, plan, mesh), []
        f = fs.unshard(lambda leaves, x: self.model(leaves, x, mesh), plan.units[""], mesh)
        for step in range(self.steps):
            x, y = self.batch(mesh)
            loss, grads = self.gradient(lambda s, x=x, y=y: self.loss(f(s[""], x), y, mesh), shards, mesh)
            shards = self.update(shards, grads, mesh, step)
            found.append({"loss": self.report(loss, mesh), "grads": grads, "shards": shards, "plan": plan})
        return found


def by_hand(reduce: Callable[..., Any], update: Callable[..., Any] | None = None, **parts: Any) -> Callable[..., Any]:
    """Return data parallelism without a plan: whole leaves on every rank."""

    def main(mesh: fs.Mesh) -> Any:
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in WHOLE.items()}
        x, y = parts.get("batch", batch)(mesh)
        loss = parts.get("loss", mse)(mlp(leaves, x, mesh), y, mesh)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        grads = {name: reduce(grad, mesh) for name, grad in grads.items()}
        new = {name: (update or (lambda leaf, grad: leaf - 0.1 * grad))(leaf, grads[name]) for name, leaf in leaves.items()}
        return {"grads": grads, "new": new}

    return main


def scaled(grads: Any, factor: float) -> Any:
    return {unit: {key: factor * grad for key, grad in of.items()} for unit, of in grads.items()}


class Sum(torch.autograd.Function):
    """A sum along the tensor axis whose backward passes the cotangent on, as in Megatron's g."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
        return total(y.detach(), mesh)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def seeded(seed: int, *shape: int) -> torch.Tensor:
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.5).double()


def tokens_mean(out: torch.Tensor, y: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
    keep = rows(mesh, KEEP)
    return ((out - y).square() * keep).sum() / keep.sum()


def norm_of(grads: Any) -> torch.Tensor:
    return torch.stack([g.norm() for g in grads[""].values()]).norm()


def shuffled(x: torch.Tensor, rank: int, ranks: int, mesh: fs.Mesh) -> torch.Tensor:
    return rows(mesh, x[torch.randperm(ROWS, generator=torch.Generator().manual_seed(rank))])


def adam(leaf: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    return leaf - 0.1 * grad / (grad.abs() + 0.1)


def hidden(leaves: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ leaves["up"].T)


def dropped(mask: Callable[..., torch.Tensor], part: str = "out") -> Callable[..., Any]:
    def model(leaves: Any, x: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
        inside = hidden(leaves, x)
        inside = inside * mask(inside, mesh) if part == "hidden" else inside
        out = total(inside @ leaves["down"].T, mesh) + leaves["bias"]
        return out if part == "hidden" else out * mask(out, mesh)

    return model


def metric(value: Callable[..., Any]) -> Callable[..., Any]:
    """Return a program that evaluates: ``value(errors, mesh)`` of this rank's errors."""
    return lambda mesh: {"metric": value((rows(mesh, X) - rows(mesh, Y)).abs(), mesh)}


def temperature(mesh: fs.Mesh) -> Any:
    x, y = batch(mesh)
    one = torch.ones((), dtype=torch.float64)
    return {"grad": fs.value_and_grad(lambda t: mse(t * x, y, mesh), mesh=mesh)(one)[1]}


def penalised(factor: Callable[[fs.Mesh], float]) -> Callable[..., Any]:
    def loss_and_grad(loss_fn: Any, shards: Any, mesh: fs.Mesh) -> Any:
        return gradient(lambda s: factor(mesh) * 0.5 * s[""]["float64"].square().sum(), shards, mesh)

    return loss_and_grad


def after(change: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``value_and_grad``, and then ``change(loss, grads, mesh)``."""
    return lambda f, shards, mesh: change(*gradient(f, shards, mesh), mesh)


def mixed(change: Callable[..., Any]) -> Program:
    """Return a program whose model is ``x + change(the term of this rank, mesh) + bias``."""
    return Program(model=lambda p, x, m: x + change(hidden(p, x) @ p["down"].T, m) + p["bias"])


def updated(change: Callable[..., Any], **options: Any) -> Program:
    """Return a program with the step ``change(shards, gradients, mesh, number of the step)``."""
    return Program(update=change, **options)


# {(meshes, cause, axes on the last mesh): {the mistake: the program}}.
MISTAKES: dict[tuple[str, str, str], dict[str, Any]] = {
    ("data", "data", "data"): {
        "all ranks take the first rows": Program(batch=both(lambda x, r, n, m: x[: ROWS // n])),
        "inputs alone are cut by rank": Program(batch=lambda m: (rows(m, X), Y[: ROWS // index(m)[1]])),
        "rows are left out": Program(batch=both(lambda x, r, n, m: rows(m, x)[1:])),
        "a last row is repeated": metric(lambda e, m: fs.psum(torch.cat([e, e[-1:]]).sum(), m)),
    },
    ("hybrid", "data", "replicate"): {
        "replicas take the same rows": Program(batch=both(lambda x, r, n, m: x[:ROWS].chunk(n)[m.position["shard"]])),
    },
    ("shard", "data", "shard"): {
        "rows overlap": Program(batch=both(lambda x, r, n, m: x[r : r + ROWS // n])),
        "every rank adds a batch": Program(batch=both(lambda x, r, n, m: x[r * ROWS :][:ROWS])),
    },
    ("tensor", "data", "tensor"): {
        "other rows along tensor": Program(batch=both(lambda x, r, n, m: x[:ROWS].chunk(m.world_size)[m.rank])),
    },
    ("data", "randomness", "data"): {
        "shuffled by the rank's seed": Program(batch=both(shuffled)),
        "dropout with one seed": Program(model=dropped(lambda y, m: seeded(0, *y.shape))),
        "dropout with seeds by rank": Program(model=dropped(lambda y, m: seeded(m.rank, *y.shape))),
        "noise on inputs with one seed": Program(batch=both(lambda x, r, n, m: rows(m, x) + seeded(1, ROWS // n, WIDTH))),
    },
    ("shard", "randomness", "shard"): {
        "noise of one seed on every shard": updated(
            lambda s, g, m, i: {"": {k: v + seeded(i, *v.shape) for k, v in s[""].items()}}
        ),
    },
    ("tensor", "randomness", "tensor"): {
        "other masks of whole activations": Program(
            model=dropped(lambda y, m: rows(m, seeded(m.position.get("tensor", 0), ROWS, WIDTH)))
        ),
    },
    ("tensor", "randomness", "both"): {
        "one mask for all slices": Program(model=dropped(lambda y, m: seeded(0, 1, y.shape[1]), "hidden")),
    },
    ("data", "scale", "data"): {
        "psum of the loss": Program(loss=lambda out, y, m: fs.psum(mse(out, y, m), m)),
        "a sum over samples": Program(loss=lambda out, y, m: (out - y).square().sum()),
        "averaged twice": Program(loss=lambda out, y, m: mse(out, y, m) / index(m)[1]),
        "autograd's sum": Program(gradient=lambda f, s, m: (f(s).detach(), fs.value_and_grad(f, divisor=1)(s)[1])),
        "divided again": Program(gradient=after(lambda v, g, m: (v, scaled(g, 1 / m.world_size)))),
        "a sum of gradients": by_hand(fs.psum),
        "averaged, then divided": by_hand(lambda g, m: fs.pmean(g, m) / m.world_size),
        "a sum of whole metrics": metric(lambda e, m: fs.psum(mean(e.mean(), m), m)),
        "a count of one rank's samples": metric(lambda e, m: fs.psum(e.sum(), m) / e.numel()),
        "a rate that grows with the ranks": updated(lambda s, g, m, i: fs.axpy(-0.1, scaled(g, m.world_size), s)),
    },
    ("hybrid", "scale", "shard"): {
        "divided by the ranks of one axis": by_hand(lambda g, m: fs.psum(g, m) / m.shape["replicate"]),
    },
    ("shard", "scale", "shard"): {
        "a penalty on shards": Program(gradient=penalised(lambda m: 1.0)),
    },
    ("tensor", "scale", "tensor"): {
        "psum of a whole loss": Program(report=lambda v, m: total(mean(v, m), m)),
        "psum of a whole loss, and its gradient": Program(loss=lambda out, y, m: total(mse(out, y, m), m)),
        "two psums": mixed(lambda y, m: total(total(y, m), m)),
        "a pmean in place of a psum": mixed(lambda y, m: fs.pmean(y, m, axis="tensor")),
        "a backward that isn't the adjoint": mixed(Sum.apply),
        "divided by the tensor axis too": Program(
            gradient=after(lambda v, g, m: (v, scaled(g, 1 / m.shape.get("tensor", 1))))
        ),
    },
    ("data", "not averaged", "data"): {
        "each rank's own loss": Program(report=lambda v, m: v),
        "no reduction": by_hand(lambda g, m: g),
        "large leaves alone are reduced": by_hand(lambda g, m: fs.pmean(g, m) if g.ndim > 1 else g),
        "an update by each rank's gradient": by_hand(lambda g, m: g, adam),
    },
    ("hybrid", "not averaged", "replicate"): {
        "the loss averaged along shard": Program(report=lambda v, m: fs.pmean(v, m, axis="shard")),
        "reduced along shard alone": by_hand(lambda g, m: fs.pmean(g, m, axis="shard")),
    },
    ("data", "not added", "data"): {
        "a count that isn't added": metric(lambda e, m: (e > 1).sum().item()),
        "a temperature beside the shards": temperature,
    },
    ("tensor", "not added", "tensor"): {
        "no psum in the forward": mixed(lambda y, m: y),
        "a bias before the psum": Program(model=lambda p, x, m: x + total(hidden(p, x) @ p["down"].T + p["bias"], m)),
        "a nonlinearity before the psum": mixed(lambda y, m: total(torch.tanh(y), m)),
    },
    ("data", "weights", "data"): {
        "a mean of means of unequal counts": Program(loss=tokens_mean),
        "uneven batches": Program(batch=both(lambda x, r, n, m: x[:7].tensor_split(n)[r])),
    },
    ("data", "one rank", "data"): {
        "rank 0 alone evaluates": metric(lambda e, m: (X - Y).abs().mean().item() if m.rank == 0 else 0.0),
    },
    ("data", "max", "data"): {"each rank's maximum": metric(lambda e, m: e.max())},
    ("shard", "norm", "shard"): {
        "each rank's norm": Program(gradient=after(lambda v, g, m: (norm_of(g), g)), report=lambda v, m: v),
        "clipped by each rank's norm": updated(lambda s, g, m, i: fs.axpy(-0.1, scaled(g, 1 / norm_of(g)), s)),
    },
    ("data", "value", ""): {
        "a mean of roots": metric(lambda e, m: mean(e.square().mean().sqrt(), m)),
        "decay that grows from step 3 on": updated(
            lambda s, g, m, i: sgd(scaled(s, 1 - 0.01 * m.world_size) if i == 2 else s, g, m, i), steps=4
        ),
    },
    ("tensor", "value", ""): {
        "a psum along shard in place of tensor": mixed(lambda y, m: fs.psum(y, m)),
    },
}  # fmt: skip
MESHES: dict[str, list[Any]] = {
    "shard": [2, 4],
    "data": [2, {"replicate": 2, "shard": 2}],
    "hybrid": [2, {"replicate": 2, "shard": 2}],
    "tensor": [2, {"shard": 2, "tensor": 2}],
}
AXES = {"data": ("replicate", "shard"), "both": ("shard", "tensor"), "": None}
CASES = {name: (program, *expected) for expected, programs in MISTAKES.items() for name, program in programs.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named_with_its_axes(name: str) -> None:
    program, meshes, cause, axes = CASES[name]
    found = same_on_every_mesh(program, MESHES[meshes])
    assert not found
    named = [(d.cause, d.axes) for d in found.differences if d.mesh == MESHES[meshes][-1]]
    wanted = AXES.get(axes, (axes,))
    assert named[0][0] == cause, found
    assert wanted is None or named[0][1] == wanted, found
