"""``same_on_every_mesh`` names further mistakes, in programs of researchers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.testing import same_on_every_mesh
from tests.testing.test_mesh_comparison import (
    AXES,
    EXPERTS,
    HIDDEN,
    KEEP,
    MESHES,
    ROWS,
    WIDTH,
    Program,
    V,
    W,
    X,
    Y,
    after,
    both,
    cut_along,
    hidden,
    index,
    mask,
    metric,
    mlp,
    mse,
    rows,
    scaled,
    seed,
    total,
)  # fmt: skip

HEAD = 3
S = torch.randn(4 * ROWS, 4, WIDTH, generator=seed(7), dtype=torch.float64)  # samples, positions, features
IDS = torch.randint(HIDDEN, (4 * ROWS,), generator=seed(8))
ATTENTION = {"q": W[:12, :4], "k": V[:12, :4], "v": W[12:24, :4], "o": V[12:16], "bias": W[0, :4]}
CUTS = {"q": {"tensor": 0}, "k": {"tensor": 0}, "v": {"tensor": 0}, "o": {"tensor": 1}}


def place(mesh: fs.Mesh, axis: str) -> tuple[int, int]:
    return mesh.position.get(axis, 0), mesh.shape.get(axis, 1)


def part(x: torch.Tensor, mesh: fs.Mesh, axis: str, dim: int = 0) -> torch.Tensor:
    return x.chunk(place(mesh, axis)[1], dim)[place(mesh, axis)[0]]


def gathered(x: torch.Tensor, mesh: fs.Mesh, axis: Any, dim: int = 0) -> torch.Tensor:
    is_missing = isinstance(axis, str) and axis not in mesh.shape
    return x if is_missing else fs.all_gather(x, mesh, axis=axis, dim=dim, tiled=True)


def attention(
    out: Callable[..., Any] = lambda y, p, m: total(y @ p["o"].T, m) + p["bias"],
    scores: Callable[..., Any] = lambda q, k, m: q @ k.mT / HEAD**0.5,
) -> Program:
    """Heads along tensor."""

    def model(p: Any, x: torch.Tensor, m: fs.Mesh) -> torch.Tensor:
        q, k, v = ((x @ p[name].T).unflatten(-1, (-1, HEAD)).transpose(1, 2) for name in "qkv")
        return x + out((scores(q, k, m).softmax(-1) @ v).transpose(1, 2).flatten(2), p, m)

    return Program(lambda m: (rows(m, S), rows(m, S.flip(1))), model, params=(ATTENTION, CUTS))


def context(
    attend: Callable[..., Any],
    positions: Callable[..., Any] = lambda n, m: torch.arange(n) + n * place(m, "tensor")[0],
) -> Program:
    """Positions along tensor; one head."""

    def model(p: Any, x: torch.Tensor, m: fs.Mesh) -> torch.Tensor:
        i = positions(x.shape[1], m)
        x = x + torch.stack([(i / 4).sin(), (i / 4).cos()] * 2, -1).double()
        q, k, v = (x @ p[name].T for name in "qkv")
        return attend(q, k, v, i, m) @ p["o"].T

    cut = lambda m, x: part(rows(m, x), m, "tensor", 1)  # noqa: E731
    return Program(lambda m: (cut(m, S), cut(m, S.flip(1))), model, params=(ATTENTION, {}))


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, i: torch.Tensor, m: fs.Mesh) -> torch.Tensor:
    k, v, j = gathered(k, m, "tensor", 1), gathered(v, m, "tensor", 1), gathered(i, m, "tensor")
    return (q @ k.mT).masked_fill(i[:, None] < j, -1e9).softmax(-1) @ v


def vocabulary(
    top: Callable[..., Any] = lambda z, m: fs.pmax(z.detach().amax(-1), m, axis="tensor"),
    normalizer: Callable[..., Any] = lambda z, top, m: total((z - top[:, None]).exp().sum(-1), m).log() + top,
    first: Callable[..., Any] = lambda n, m: n * place(m, "tensor")[0],
    target: Callable[..., Any] = lambda picked, inside, m: total(picked * inside, m),
) -> Program:
    """Cross entropy over logits whose classes are cut along tensor."""

    def loss(z: torch.Tensor, ids: torch.Tensor, m: fs.Mesh) -> torch.Tensor:
        at = ids - first(z.shape[-1], m)
        inside = (at >= 0) & (at < z.shape[-1])
        picked = z.gather(-1, at.clamp(0, z.shape[-1] - 1)[:, None])[:, 0]
        highest = top(z, m) if "tensor" in m.shape else z.detach().amax(-1)
        smoothing = 0.1 / HIDDEN * total(z.sum(-1), m)
        return (normalizer(z, highest, m) - 0.9 * target(picked, inside, m) - smoothing).mean()

    return Program(lambda m: (rows(m, X), rows(m, IDS)), lambda p, x, m: x @ p["up"].T, loss)


def experts(
    gate: Callable[..., Any] = lambda x, p, first, m: (x @ p["router"].T).softmax(-1),
    combine: Callable[..., Any] = lambda y, m: fs.psum(y, m, axis="expert") if "expert" in m.shape else y,
) -> Program:
    """One expert a token; experts along their axis, all tokens of a data rank on each of them."""

    def model(p: Any, x: torch.Tensor, m: fs.Mesh) -> torch.Tensor:
        start = len(p["experts"]) * place(m, "expert")[0]
        weight, choice = gate(x, p, start, m).max(-1)
        terms = [(choice == start + i)[:, None] * (x @ w) for i, w in enumerate(p["experts"])]
        return x + combine(weight[:, None] * sum(terms), m)

    return Program(model=model, params=(EXPERTS, {"experts": {"expert": 0}}))


def updated(update: Callable[..., Any], steps: int = 1) -> Program:
    return Program(update=lambda s, g, m, i: {"": {k: update(v, g[""][k], m, i) for k, v in s[""].items()}}, steps=steps)


def leafwise(update: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer over whole leaves by hand, with slices along tensor."""

    def main(mesh: fs.Mesh) -> Any:
        cuts = {"up": 0, "down": 1}
        whole = {"up": W[:HIDDEN, :WIDTH], "down": V[:WIDTH], "bias": W[0, :WIDTH]}
        mine = {k: part(v, mesh, "tensor", cuts[k]) if k in cuts else v for k, v in whole.items()}
        local = {k: {"tensor": d} for k, d in cuts.items()} if "tensor" in mesh.shape else {}
        plan = fs.make_plan(mine, mesh, local=local)
        f = fs.unshard(lambda p, x: mlp(p, x, mesh), plan.units[""], mesh)
        shards = fs.shard(mine, plan, mesh)
        _, grads = fs.value_and_grad(lambda s: mse(f(s[""], rows(mesh, X)), rows(mesh, Y), mesh))(shards)
        grads = fs.gather(grads, plan, mesh)
        return {"new": fs.shard({k: update(k, v, grads[k], mesh) for k, v in mine.items()}, plan, mesh), "plan": plan}

    return main


def after_steps(change: Callable[..., Any]) -> Callable[..., Any]:
    """A list of three states that rank by rank code maintains: each ``change(state, mean gradient, mesh, step)``."""

    def main(mesh: fs.Mesh) -> Any:
        state, states = W[:WIDTH, :WIDTH], []
        for step in range(3):
            grad = fs.pmean(rows(mesh, X).T @ rows(mesh, Y) / rows(mesh, X).shape[0] + 0.1 * step, mesh)
            state = change(state, grad, mesh, step)
            states.append({"state": state})
        return states

    return main


def loader(cut: Callable[..., Any]) -> Program:
    """A batch of each of three steps: ``cut(data, step, this rank's index, number of ranks, mesh)``."""
    calls: list[fs.Mesh] = []  # holds meshes, whose ids others would have otherwise

    def batch(m: fs.Mesh) -> Any:
        step = sum(mesh is m for mesh in calls)
        calls.append(m)
        return cut(X, step, *index(m), m), cut(Y, step, *index(m), m)

    return Program(batch=batch, steps=3)


def accumulated(combine: Callable[..., Any]) -> Callable[..., Any]:
    """Micro-batches of two rows: ``combine(sums of squares, counts, mesh)`` is the loss reported."""

    def main(mesh: fs.Mesh) -> Any:
        error, keep = (rows(mesh, X) - rows(mesh, Y)).square().sum(-1), rows(mesh, KEEP[:, 0]).double()
        return {"loss": combine((error * keep).split(2), keep.split(2), mesh)}

    return main


def norm(x: torch.Tensor, m: fs.Mesh) -> torch.Tensor:
    return fs.psum(x.square().sum(), m).sqrt()


def normalized(statistics: Callable[..., Any]) -> Program:
    return Program(model=lambda p, x, m: (lambda c: (mlp(p, x, m) - c[0]) / (c[1] + 0.1).sqrt())(statistics(x, m)))


SOURCE = Path(__file__).read_text().splitlines()
LINE = "line"  # any cause will do whose text names the mistake's line

# Note: the rules were improved with these in view, unlike ``FRESH``.
HELD_OUT: dict[tuple[str, str, str], dict[str, Any]] = {
    # attention and MLPs along tensor
    ("tensor", "not added", "tensor"): {
        "a normalizer of local classes": vocabulary(
            normalizer=lambda z, top, m: (z - top[:, None]).exp().sum(-1).log() + top
        ),
        "a target logit of one rank": vocabulary(target=lambda picked, inside, m: picked * inside),
        "weight decay of a slice": Program(
            model=lambda p, x, m: (mlp(p, x, m), p["up"].square().sum()), loss=lambda o, y, m: mse(o[0], y, m) + 0.1 * o[1]
        ),
        "bias before the psum": attention(out=lambda y, p, m: total(y @ p["o"].T + p["bias"], m)),
        "scattered without a sum": Program(
            cut_along("tensor"),
            lambda p, x, m: x + part(hidden(p, gathered(x, m, "tensor")) @ p["down"].T, m, "tensor"),
        ),
    },
    ("tensor", "max", "tensor"): {
        "a maximum of local classes": vocabulary(top=lambda z, m: z.detach().amax(-1)),
    },
    ("tensor", "scale", "tensor"): {
        "the loss divided by tensor": Program(loss=lambda o, y, m: mse(o, y, m) / place(m, "tensor")[1]),
        "a batch counted along tensor": Program(
            report=lambda v, m: fs.psum(v * ROWS / index(m)[1], m, axis=tuple(m.shape)) / ROWS
        ),
    },
    ("tensor", LINE, ""): {
        "scores by local width": attention(scores=lambda q, k, m: q @ k.mT / (q.shape[1] * HEAD) ** 0.5),
        "classes by the world's rank": vocabulary(first=lambda n, m: n * m.rank),
        "attention to local positions": context(
            lambda q, k, v, i, m: (q @ k.mT).masked_fill(i[:, None] < i, -1e9).softmax(-1) @ v
        ),
    },
    ("tensor", "data", "both"): {
        "rows by the tensor index": Program(batch=both(lambda x, r, n, m: x[:ROWS].chunk(n)[m.rank % n])),
    },
    ("tensor", "data", "tensor"): {
        "positions from zero": context(causal, positions=lambda n, m: torch.arange(n)),
    },
    ("tensor", "not averaged", "tensor"): {
        "a loss of local positions": Program(
            cut_along("tensor"), lambda p, x, m: x + p["bias"], report=lambda v, m: fs.pmean(v, m)
        ),
    },
    ("tensor", "randomness", "tensor"): {
        "dropout by tensor rank": Program(
            model=lambda p, x, m: mlp(p, x, m) * rows(m, mask(place(m, "tensor")[0], ROWS, WIDTH))
        ),
    },
    # experts
    ("expert", "not added", "expert"): {"experts aren't added": experts(combine=lambda y, m: y)},
    ("expert", "scale", "expert"): {
        "experts are averaged": experts(combine=lambda y, m: fs.pmean(y, m, axis="expert") if "expert" in m.shape else y)
    },
    ("expert", LINE, ""): {
        "a gate over local experts": experts(
            gate=lambda x, p, first, m: (x @ p["router"][first : first + len(p["experts"])].T).softmax(-1)
        ),
    },
    # statistics and losses on data ranks
    ("data", "not averaged", "data"): {
        "batch statistics aren't synced": normalized(lambda x, m: (x.mean(0), x.var(0, unbiased=False))),
        "a balance loss": metric(lambda e, m: fs.pmean(((e > 1).double().mean(0) * e.mean(0)).sum(), m)),
        "advantages by local moments": Program(
            loss=lambda o, y, m: (lambda a: (o * (a - a.mean()) / a.std(unbiased=False)).mean())(y.sum(-1, keepdim=True))
        ),
    },
    ("data", "scale", "data"): {
        "divided twice": Program(
            loss=lambda o, y, m: (o - y).square().sum() / fs.psum(torch.tensor(float(o.numel())), m),
            report=lambda v, m: fs.psum(v, m),
        ),
        "micro-batches aren't divided by ranks": accumulated(
            lambda sums, counts, m: fs.psum(sum(s.mean() for s in sums), m) / len(sums)
        ),
        "unbiased variance by local counts": metric(
            lambda e, m: fs.psum((e - fs.pmean(e.mean(), m)).square().sum(), m) / (e.numel() - 1)
        ),
    },
    ("data", "max", "data"): {
        "normalized by the batch's maximum": Program(loss=lambda o, y, m: mse(o / o.abs().max().detach(), y, m)),
    },
    ("data", "weights", "data"): {
        "accuracies of unequal counts": metric(lambda e, m: fs.pmean((e > 1)[rows(m, KEEP)].double().mean(), m)),
        "micro-batches of unequal counts": accumulated(
            lambda sums, counts, m: fs.pmean(sum(sums).sum() / sum(counts).sum(), m)
        ),
    },
    ("data", "randomness", "data"): {
        "mixup inside of a rank": Program(
            batch=both(lambda x, r, n, m: rows(m, x) + rows(m, x)[torch.randperm(ROWS // n, generator=seed(1))])
        ),
        "weights by the rank's seed": lambda m: {"w": torch.randn(3, 4, generator=seed(m.rank))},
    },
    ("data", "one rank", "data"): {
        "an EMA on rank 0": after_steps(lambda s, g, m, i: 0.9 * s + 0.1 * g if m.rank == 0 else s),
        "loaded on rank 0": lambda m: {"w": W[:2] if m.rank == 0 else torch.zeros_like(W[:2])},
    },
    ("data", "data", "data"): {
        "the last rows are dropped": metric(
            lambda e, m: fs.pmean((X - Y).abs()[: 7 // index(m)[1] * index(m)[1]].chunk(index(m)[1])[index(m)[0]].mean(), m)
        ),
        "batches overlap": loader(lambda x, i, r, n, m: x[i * ROWS // n :][:ROWS].chunk(n)[r]),
        "sharded twice": Program(batch=both(lambda x, r, n, m: x[:ROWS][r::n][: ROWS // n // n])),
        "chosen and rejected are cut by rank": (
            lambda m: {
                "margin": (lambda z: fs.pmean((z[: len(z) // 2] - z[len(z) // 2 :]).sigmoid().mean(), m))(
                    torch.cat([X[:ROWS], Y[:ROWS]]).chunk(index(m)[1])[index(m)[0]]
                )
            }
        ),
        "predictions in another order": (
            lambda m: {"out": gathered(X[:ROWS][index(m)[0] :: index(m)[1]].tanh(), m, tuple(m.shape))}
        ),
    },
    ("data", LINE, ""): {
        "negatives of one rank": Program(loss=lambda o, y, m: -(o @ y.T).log_softmax(-1).diag().mean()),
        "an EMA by the ranks": after_steps(lambda s, g, m, i: 0.9**m.world_size * s + (1 - 0.9**m.world_size) * g),
    },
    # optimizers on shards
    ("shard", "norm", "shard"): {
        "a trust ratio": updated(lambda v, g, m, i: v - 0.1 * g * v.norm() / g.norm()),
    },
    ("shard", "max", "shard"): {
        "clipped by the local maximum": after(lambda g, m: scaled(g, 1 / g[""]["float64"].abs().max())),
    },
    ("shard", "not averaged", "shard"): {
        "second moments of a shard": updated(lambda v, g, m, i: v - 0.1 * g / g.square().mean().sqrt()),
    },
    ("tensor", "scale", "both"): {
        "decay on replicas": leafwise(
            lambda k, v, g, m: v - 0.1 * g - (0.01 * v if k != "bias" else fs.psum(0.01 * v, m, axis=tuple(m.shape)))
        ),
    },
    ("data", "not added", "data"): {
        "a histogram of one rank": metric(lambda e, m: torch.histc(e, 4, 0, 4)),
    },
}


def sliced(change: Callable[..., Any]) -> Program:
    """Hidden units along tensor, changed before they're projected back."""
    return Program(model=lambda p, x, m: x + total(change(hidden(p, x), p, m) @ p["down"].T, m))


FRESH: dict[tuple[str, str, str], dict[str, Any]] = {
    ("data", "weights", "data"): {
        "uneven last batches": (
            lambda m: {"e": fs.pmean((X - Y)[:7].abs().tensor_split(index(m)[1])[index(m)[0]].mean(), m)}
        ),
    },
    ("data", "not averaged", "data"): {
        "a mean of squared means": metric(lambda e, m: fs.pmean(e.mean() ** 2, m)),
        "a mean of medians": metric(lambda e, m: fs.pmean(e.median(), m)),
        "class weights of one rank": Program(
            loss=lambda o, y, m: ((o - y).square() / (y > 0).double().mean(0).clamp(0.1)).mean()
        ),
    },
    ("data", "not added", "data"): {
        "positives counted on one rank": metric(lambda e, m: fs.psum(e.sum(), m) / (e > 1.2).sum()),
    },
    ("data", "randomness", "data"): {
        "replayed with one seed": Program(
            batch=both(lambda x, r, n, m: x[torch.randint(len(x), (ROWS // n,), generator=seed(0))])
        ),
        "times drawn by the rank": Program(
            batch=lambda m: (
                rows(m, X) * (t := torch.rand(ROWS // index(m)[1], 1, generator=seed(m.rank)).double()),
                rows(m, Y) * t,
            )
        ),
    },
    ("data", "data", "data"): {"teachers in another order": Program(batch=lambda m: (rows(m, X), rows(m, Y).flip(0)))},
    ("tensor", "norm", "tensor"): {
        "weights normalized by slices": Program(
            model=lambda p, x, m: x + total(torch.tanh(x @ (p["up"] / p["up"].norm(dim=0)).T) @ p["down"].T, m)
        ),
    },
    ("tensor", "not averaged", "tensor"): {
        "an RMS of local units": sliced(lambda h, p, m: h / h.square().mean(-1, keepdim=True).sqrt()),
    },
    ("tensor", "max", "tensor"): {
        "scaled by the largest local unit": sliced(lambda h, p, m: h / h.abs().amax(-1, keepdim=True)),
    },
    ("tensor", "not added", "tensor"): {
        "an adapter that isn't added": Program(model=lambda p, x, m: mlp(p, x, m) + (x @ p["up"].T) @ p["down"].T),
    },
    ("tensor", LINE, ""): {
        "the best of local classes": (
            lambda m: {"hits": float((part(X[:, :WIDTH] @ W[:HIDDEN, :WIDTH].T, m, "tensor", 1).argmax(-1) == IDS).sum())}
        ),
        "the top of local units": sliced(lambda h, p, m: h * (h >= h.topk(2, -1).values[:, -1:])),
        "the first heads' bias": sliced(lambda h, p, m: h + W[0, : h.shape[1]]),
    },
}
RIGHT: dict[str, tuple[str, Any]] = {
    "attention": ("tensor", attention()),
    "context": ("tensor", context(causal)),
    "vocabulary": ("tensor", vocabulary()),
    "experts": ("expert", experts()),
    "synced statistics": (
        ("data", normalized(lambda x, m: (mu := fs.pmean(x.mean(0), m), fs.pmean((x - mu).square().mean(0), m))))
    ),
    "EMA": ("data", after_steps(lambda s, g, m, i: 0.9 * s + 0.1 * g)),
    "loader": ("data", loader(lambda x, i, r, n, m: x[i * ROWS :][:ROWS].chunk(n)[r])),
    "token mean": (
        ("data", accumulated(lambda sums, counts, m: fs.psum(sum(s.sum() for s in sums), m)
            / fs.psum(sum(c.sum() for c in counts), m)))
    ),
    "whole leaves": ("tensor", leafwise(lambda k, v, g, m: v - 0.1 * (g + 0.1 * v))),
    "trust ratio": ("shard", updated(lambda v, g, m, i: v - 0.1 * g * norm(v, m) / norm(g, m))),
    "negatives of all ranks": (
        ("data", Program(loss=lambda o, y, m: -(o @ gathered(y, m, tuple(m.shape)).T)
            .log_softmax(-1)[:, len(o) * index(m)[0] :].diag().mean()))
    ),
    "mixup of the batch": (
        ("data", Program(batch=both(lambda x, r, n, m: rows(m, x[:ROWS] + x[torch.randperm(ROWS, generator=seed(1))]))))
    ),
    "RMS of all units": (
        ("tensor", sliced(lambda h, p, m: h / (total(h.square().sum(-1, keepdim=True), m) / HIDDEN).sqrt()))
    ),
}  # fmt: skip
CASES = {
    name: (program, *expected)
    for expected, programs in (*HELD_OUT.items(), *FRESH.items())
    for name, program in programs.items()
}

UNNAMED = {
    "classes by the world's rank", "scattered without a sum", "rows by the tensor index",
    "unbiased variance by local counts", "chosen and rejected are cut by rank", "predictions in another order",
    "a mean of medians", "the best of local classes",
}  # fmt: skip


def is_named(name: str) -> bool:
    program, meshes, cause, axes = CASES[name]
    comparison = same_on_every_mesh(program, MESHES[meshes])
    first = next(d for d in comparison.differences if d.mesh == MESHES[meshes][-1])
    if cause == LINE:
        start = next(n for n, line in enumerate(SOURCE, 1) if line.lstrip().startswith(f'"{name}":'))
        return any(f"in line {n} of" in first.text for n in range(start, start + 4))
    return (first.cause, first.axes) == (cause, AXES.get(axes, (axes,)))


@pytest.mark.nightly(one_in=12)
@pytest.mark.parametrize("name", [name for name in CASES if name not in UNNAMED])
def test_a_further_mistake_is_named(name: str) -> None:
    assert is_named(name), same_on_every_mesh(CASES[name][0], MESHES[CASES[name][1]])


@pytest.mark.nightly(one_in=7)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_of_researchers_is_the_same(name: str) -> None:
    meshes, program = RIGHT[name]
    comparison = same_on_every_mesh(program, MESHES[meshes])
    assert comparison, comparison
