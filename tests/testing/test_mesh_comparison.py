"""``same_on_every_mesh`` names planted mistakes, and right programs are the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import funcshard as fs
from funcshard.testing import same_on_every_mesh
from tests import slices
from tests.core.units import of_module

ROWS, WIDTH, HIDDEN = 8, 4, 12


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


X, Y, W, V = (torch.randn(4 * ROWS, HIDDEN, generator=seed(i), dtype=torch.float64) for i in range(4))
X, Y, KEEP = X[:, :WIDTH], Y[:, :WIDTH], X[:, WIDTH : 2 * WIDTH] > -0.4
WHOLE = {"up": W[:HIDDEN, :WIDTH], "down": V[:WIDTH], "bias": W[0, :WIDTH]}
EXPERTS = {"router": W[:4, :WIDTH], "experts": V[:16, :WIDTH].reshape(4, WIDTH, WIDTH)}


def index(mesh: fs.Mesh) -> tuple[int, int]:
    sizes, place = mesh.shape, mesh.position
    return place["replicate"] * sizes["shard"] + place["shard"], sizes["replicate"] * sizes["shard"]


def rows(mesh: fs.Mesh, x: torch.Tensor) -> torch.Tensor:
    return x[:ROWS].chunk(index(mesh)[1])[index(mesh)[0]]


def both(cut: Callable[..., Any]) -> Callable[..., Any]:
    # ``cut(x, this rank's index, number of ranks, mesh)``
    return lambda mesh: (cut(X, *index(mesh), mesh), cut(Y, *index(mesh), mesh))


def cut_along(axis: str) -> Callable[..., Any]:
    return both(lambda x, r, n, m: rows(m, x).chunk(m.shape.get(axis, 1))[m.position.get(axis, 0)])


def total(y: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
    return fs.psum(y, mesh, axis="tensor") if "tensor" in mesh.shape else y


def hidden(leaves: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ leaves["up"].T)


def mse(out: torch.Tensor, y: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
    return (out - y).square().mean()


def mean(loss: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
    return fs.pmean(loss, mesh, axis=tuple(mesh.shape))


def gradient(loss_fn: Callable[..., Any], shards: Any, mesh: fs.Mesh) -> Any:
    return fs.value_and_grad(loss_fn, mesh=mesh)(shards)


def scaled(grads: Any, factor: Any) -> Any:
    return {unit: {key: factor * grad for key, grad in of_unit.items()} for unit, of_unit in grads.items()}


def mlp(leaves: Any, x: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
    return x + total(hidden(leaves, x) @ leaves["down"].T, mesh) + leaves["bias"]


@dataclasses.dataclass(frozen=True)
class Program:
    """Training of a model with a tensor axis; a mistake replaces a part of it."""

    batch: Callable[..., Any] = both(lambda x, r, n, m: rows(m, x))  # noqa: RUF009
    model: Callable[..., Any] = mlp
    loss: Callable[..., Any] = mse
    gradient: Callable[..., Any] = gradient
    report: Callable[..., Any] = mean
    update: Callable[..., Any] = lambda s, g, m, step: fs.axpy(-0.1, g, s)
    steps: int = 1
    params: tuple[Any, Any] = (WHOLE, {"up": {"tensor": 0}, "down": {"tensor": 1}})  # whole, and how axes cut it

    def __call__(self, mesh: fs.Mesh) -> Any:
        mine, local = dict(self.params[0]), {}
        for name, cuts in self.params[1].items():
            local |= {name: cuts} if cuts.keys() <= mesh.shape.keys() else {}
            for axis, dim in local.get(name, {}).items():
                mine[name] = mine[name].chunk(mesh.shape[axis], dim)[mesh.position[axis]]
        plan = fs.make_plan(mine, mesh, local=local)
        shards, found = fs.shard(mine, plan, mesh), []
        f = fs.unshard(lambda leaves, x: self.model(leaves, x, mesh), plan.units[""], mesh)
        for step in range(self.steps):
            x, y = self.batch(mesh)
            loss, grads = self.gradient(lambda s, x=x, y=y: self.loss(f(s[""], x), y, mesh), shards, mesh)
            shards = self.update(shards, grads, mesh, step)
            found.append({"loss": self.report(loss, mesh), "grads": grads, "shards": shards, "plan": plan})
        return found


def by_hand(reduce: Callable[..., Any]) -> Callable[..., Any]:
    def main(mesh: fs.Mesh) -> Any:
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in WHOLE.items()}
        loss = mse(mlp(leaves, rows(mesh, X), mesh), rows(mesh, Y), mesh)
        grads = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
        grads = {name: reduce(grad, mesh) for name, grad in grads.items()}
        return {"grads": grads, "new": {name: leaf - 0.1 * grads[name] for name, leaf in leaves.items()}}

    return main


class Sum(torch.autograd.Function):
    """A sum along the tensor axis whose backward passes the cotangent on, as in Megatron's g."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, mesh: fs.Mesh) -> torch.Tensor:
        return total(y.detach(), mesh)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def mask(number: int, *shape: int) -> torch.Tensor:
    return (torch.rand(shape, generator=seed(number)) > 0.5).double()


def dropped(draw: Callable[..., torch.Tensor]) -> Program:
    return Program(model=lambda p, x, m: (lambda y: y * draw(y, m))(mlp(p, x, m)))


def metric(value: Callable[..., Any]) -> Callable[..., Any]:
    return lambda mesh: {"metric": value((rows(mesh, X) - rows(mesh, Y)).abs(), mesh)}


def temperature(mesh: fs.Mesh) -> Any:
    loss_fn = lambda t: mse(t * rows(mesh, X), rows(mesh, Y), mesh)  # noqa: E731
    return fs.value_and_grad(loss_fn, mesh=mesh)(torch.ones((), dtype=torch.float64))[1]


def after(change: Callable[..., Any]) -> Program:
    return Program(gradient=lambda f, s, m: (lambda v, g: (v, change(g, m)))(*gradient(f, s, m)))


def mixed(change: Callable[..., Any]) -> Program:
    return Program(model=lambda p, x, m: x + change(hidden(p, x) @ p["down"].T, m) + p["bias"])


def lookup(p: Any, x: torch.Tensor, m: fs.Mesh) -> torch.Tensor:
    ids = rows(m, torch.arange(ROWS) * 5 % HIDDEN) - len(p["up"]) * m.position.get("tensor", 0)
    inside = (ids >= 0) & (ids < len(p["up"]))
    return x + p["up"][torch.where(inside, ids, 0)] * inside[:, None]


def router_z_loss(p: Any, x: torch.Tensor, m: fs.Mesh) -> Any:
    logits, first = x @ p["router"].T, m.position.get("expert", 0) * len(p["experts"])
    weights, z = logits.softmax(-1), logits.logsumexp(-1).square().mean()
    terms = [torch.tanh(x @ w) * weights[:, first + i, None] for i, w in enumerate(p["experts"])]
    out = sum(terms)
    return (x + fs.psum(out, m, axis="expert"), fs.psum(z, m, axis="expert")) if "expert" in m.shape else (x + out, z)


def penalty(factor: Callable[[fs.Mesh], float]) -> Program:
    return Program(gradient=lambda f, s, m: gradient(lambda s: factor(m) * s[""]["float64"].square().sum(), s, m))


# {(meshes, cause, axes on the last mesh): {the mistake: the program}}.
MISTAKES: dict[tuple[str, str, str], dict[str, Any]] = {
    ("data", "data", "data"): {
        "all ranks take the first rows": Program(batch=both(lambda x, r, n, m: x[: ROWS // n])),
        "inputs alone are cut by rank": Program(batch=lambda m: (rows(m, X), Y[: ROWS // index(m)[1]])),
        "a last row is repeated": metric(lambda e, m: fs.psum(torch.cat([e, e[-1:]]).sum(), m)),
    },
    ("data", "data", "replicate"): {
        "replicas take the same rows": Program(batch=both(lambda x, r, n, m: x[:ROWS].chunk(n)[m.position["shard"]])),
    },
    ("shard", "data", "shard"): {
        "rows overlap": Program(batch=both(lambda x, r, n, m: x[r : r + ROWS // n])),
    },
    ("tensor", "data", "tensor"): {"other rows along tensor": Program(batch=cut_along("tensor"))},
    ("data", "randomness", "data"): {
        "shuffled by the rank": Program(batch=both(lambda x, r, n, m: rows(m, x[torch.randperm(ROWS, generator=seed(r))]))),
        "dropout with one seed": dropped(lambda y, m: mask(0, *y.shape)),
        "dropout with seeds by rank": dropped(lambda y, m: mask(m.rank, *y.shape)),
        "noise by the place in a batch": Program(
            batch=both(lambda x, r, n, m: rows(m, x) + torch.stack([mask(i, WIDTH) for i in range(ROWS // n)]))
        ),
    },
    ("shard", "randomness", "shard"): {
        "noise of one seed on shards": Program(
            update=lambda s, g, m, i: {"": {k: v + mask(i, *v.shape) for k, v in s[""].items()}}
        ),
    },
    ("tensor", "randomness", "both"): {
        "one mask for all slices": Program(
            model=lambda p, x, m: total((hidden(p, x) * mask(0, 1, len(p["up"]))) @ p["down"].T, m)
        ),
    },
    ("data", "scale", "data"): {
        "a sum over samples": Program(loss=lambda out, y, m: (out - y).square().sum()),
        "autograd's sum": Program(gradient=lambda f, s, m: (f(s).detach(), fs.value_and_grad(f, divisor=1)(s)[1])),
        "a sum of gradients": by_hand(fs.psum),
        "divided by one rank's count": metric(lambda e, m: fs.psum(e.sum(), m) / e.numel()),
        "a rate by the ranks": Program(update=lambda s, g, m, i: fs.axpy(-0.1, scaled(g, m.world_size), s)),
    },
    ("data", "scale", "shard"): {"divided by one axis": by_hand(lambda g, m: fs.psum(g, m) / m.shape["replicate"])},
    ("shard", "scale", "shard"): {"a penalty on shards": penalty(lambda m: 1.0)},
    ("tensor", "scale", "tensor"): {
        "psum of a whole loss": Program(report=lambda v, m: total(mean(v, m), m)),
        "two psums": mixed(lambda y, m: total(total(y, m), m)),
        "a pmean in place of a psum": mixed(lambda y, m: fs.pmean(y, m, axis="tensor")),
        "a backward that isn't the adjoint": mixed(Sum.apply),
    },
    ("data", "not averaged", "data"): {
        "each rank's own loss": Program(report=lambda v, m: v),
        "no reduction": by_hand(lambda g, m: g),
        "a mean of roots": metric(lambda e, m: mean(e.square().mean().sqrt(), m)),
    },
    ("data", "not averaged", "replicate"): {
        "the loss averaged along shard": Program(report=lambda v, m: fs.pmean(v, m, axis="shard")),
    },
    ("data", "not added", "data"): {
        "a count that isn't added": metric(lambda e, m: (e > 1).sum().item()),
        "a temperature beside the shards": temperature,
    },
    ("tensor", "not added", "tensor"): {
        "no psum in the forward": mixed(lambda y, m: y),
        "no psum after a lookup in parts": Program(model=lookup),
        "a nonlinearity before the psum": mixed(lambda y, m: total(torch.tanh(y), m)),
    },
    ("data", "weights", "data"): {
        "means of unequal counts": Program(loss=lambda out, y, m: (out - y)[rows(m, KEEP)].square().mean()),
    },
    ("data", "one rank", "data"): {
        "zero on rank 0 alone": lambda m: {"zero": np.full(2, m.rank / 3)},
    },
    ("data", "norm", "data"): {"a ratio of norms": metric(lambda e, m: e[:, :2].norm() / e[:, 2:].norm())},
    ("data", "max", "data"): {"each rank's maximum": metric(lambda e, m: e.max())},
    ("shard", "norm", "shard"): {
        "each rank's norm": Program(report=lambda v, m: v, gradient=lambda f, s, m: (s[""]["float64"].norm(), s)),
        "clipped by it": after(lambda g, m: scaled(g, 1 / g[""]["float64"].norm())),
    },
    ("data", "value", ""): {
        "beside an infinity": lambda m: {"a": {"inf": X[0] / 0, "x": X[0] * m.world_size**0.3}},
        "decay from step 3 on": Program(update=lambda s, g, m, i: scaled(s, 1 - i // 2 * 0.01 * m.world_size), steps=4),
    },
    ("expert", "scale", "expert"): {
        "a z loss that is added": Program(
            model=router_z_loss,
            loss=lambda out, y, m: mse(out[0], y, m) + 0.1 * out[1],
            params=(EXPERTS, {"experts": {"expert": 0}}),
        ),
    },
    ("tensor", "value", ""): {"a psum along shard": mixed(lambda y, m: fs.psum(y, m))},
}  # fmt: skip
MESHES: dict[str, list[Any]] = {
    "shard": [2, 4], "data": [2, {"replicate": 2, "shard": 2}], "tensor": [2, {"shard": 2, "tensor": 2}],
    "expert": [2, {"expert": 2}, {"shard": 2, "expert": 2}], "slices": [{"expert": 2, "tensor": 2}],
}  # fmt: skip
AXES = {"data": ("replicate", "shard"), "both": ("shard", "tensor"), "": None}
CASES = {name: (program, *expected) for expected, programs in MISTAKES.items() for name, program in programs.items()}


@pytest.mark.nightly(one_in=6)
@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named_with_its_axes(name: str) -> None:
    program, meshes, cause, axes = CASES[name]
    found = same_on_every_mesh(program, MESHES[meshes])
    assert not found
    first = next(d for d in found.differences if d.mesh == MESHES[meshes][-1])
    assert (first.cause, axes and first.axes) == (cause, axes and AXES.get(axes, (axes,))), found
    assert first.step == (2 if "step 3" in name else 0 if isinstance(program, Program) else None)


def sequence_parallel(p: Any, x: torch.Tensor, m: fs.Mesh) -> torch.Tensor:
    whole = fs.all_gather(x, m, axis="tensor", tiled=True)
    return x + fs.psum_scatter(hidden(p, whole) @ p["down"].T, m, axis="tensor", tiled=True) + p["bias"]


def mixture(p: Any, x: torch.Tensor, m: fs.Mesh) -> torch.Tensor:
    tokens, first = fs.all_gather(x, m, axis="expert", tiled=True), fs.axis_index(m, axis="expert") * len(p["experts"])
    weight, choice = (tokens @ p["router"].T).softmax(-1).max(-1)
    terms = [torch.tanh(tokens @ w) * (weight * (choice == first + i))[:, None] for i, w in enumerate(p["experts"])]
    return x + fs.psum_scatter(sum(terms), m, axis="expert", tiled=True)


def counted(out: torch.Tensor, y: torch.Tensor, mesh: fs.Mesh) -> Any:
    return (out - y)[rows(mesh, KEEP)].square().mean(), rows(mesh, KEEP).sum()


def sliced(mesh: fs.Mesh) -> Any:
    plan, shards, loss_fn = slices.setup(mesh)
    loss, grads = fs.value_and_grad(loss_fn)(shards, slices.batch(mesh.position, mesh.shape))
    return mean(loss, mesh), grads, fs.global_norm(grads, plan, mesh), plan


def stepped(mesh: fs.Mesh) -> Any:
    plan, sharded, shards = of_module(mesh, torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64))
    adamw, states = fs.torch_optimizer(torch.optim.AdamW, lr=0.1), []
    step = fs.make_train_step(lambda s, b, x: sharded(s, b, x).square().mean(), adamw, plan, mesh, max_norm=0.1)
    state = step.init(shards, {})
    for _ in range(3):
        state, metrics = step(state, rows(mesh, X))
        states.append((fs.copy(state), metrics["loss"], metrics["grad_norm"], plan))
    return states


RIGHT: dict[str, tuple[str, Any]] = {
    "tensor parallel": ("tensor", Program(steps=3)),
    "hybrid": ("data", Program(steps=3)),
    "by hand": ("data", by_hand(fs.pmean)),
    "rows in turns": ("data", Program(batch=both(lambda x, r, n, m: x[r:ROWS:n]))),
    "clipped": ("shard", after(lambda g, m: scaled(g, 1 / fs.psum(g[""]["float64"].norm() ** 2, m).sqrt()))),
    "weighted": ("data", Program(loss=counted, gradient=lambda f, s, m: fs.value_and_grad(f, weighted=True)(s))),
    "dropout": ("data", dropped(lambda y, m: rows(m, mask(0, ROWS, WIDTH)))),
    "penalty": ("shard", penalty(lambda m: m.world_size)),
    "sequence parallel": ("tensor", Program(batch=cut_along("tensor"), model=sequence_parallel)),
    "mixture of experts": ("expert", Program(cut_along("expert"), mixture, params=(EXPERTS, {"experts": {"expert": 0}}))),
    "experts and slices": ("slices", sliced),
    "a train step": ("data", stepped),
    "no numbers": ("shard", lambda m: {"a": "b", "n": 1, "none": None, "is": True, "mask": KEEP}),
    "nothing but zeros": ("shard", lambda m: {"zero": torch.zeros(2), "rows": X[:0], "array": np.zeros(2)}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_the_same(name: str) -> None:
    meshes, program = RIGHT[name]
    found = same_on_every_mesh(program, MESHES[meshes])
    assert found, found
    assert found.rounding < 1e-12


def test_a_difference_says_that_its_recording_failed() -> None:
    ranks = []

    def main(mesh: fs.Mesh) -> float:
        ranks.append(mesh.rank)
        assert len(ranks) < 4, "run once"
        return mesh.world_size**0.5

    (found,) = same_on_every_mesh(main, [2]).differences
    assert found.cause == "value"
    assert "recording it raised AssertionError: run once" in found.text


def test_other_entries_and_errors_name_the_mesh() -> None:
    (found,) = same_on_every_mesh(lambda mesh: {"ab"[mesh.world_size - 1]: 1.0}, [2]).differences
    assert (found.cause, found.path) == ("form", "a")
    with pytest.raises(ZeroDivisionError) as error:
        same_on_every_mesh(lambda mesh: 1 / (2 - mesh.world_size), [2])
    assert "the mesh 2 of same_on_every_mesh" in str(error.value.__notes__)
