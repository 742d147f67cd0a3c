"""Shards to leaves under transforms: every transform gives what plain torch gives on whole leaves."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.core.units import by_hand, forward_mode, random
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_ranks, run_simulated

pytestmark = forward_mode

SHAPES = {"a": (2, 3), "b": (), "c": (0, 3), "d": (5,), "unused": (3, 2)}
close = torch.testing.assert_close


def params(seed: int, *batch: int) -> dict[str, torch.Tensor]:
    return {name: random(seed + i, *batch, *shape) for i, (name, shape) in enumerate(SHAPES.items())}


def loss_of(leaves: Any) -> torch.Tensor:
    product = leaves["a"] @ leaves["a"].sin().mT  # the gradient of ``a`` has the strides of a transposed tensor
    return product.sum() + leaves["b"] ** 3 + leaves["c"].sum() + leaves["d"].cos().square().sum()


def setup(mesh: fs.Mesh, precision: Any = None) -> tuple[Any, Any, Any]:
    """Return the loss on a shard, a function that cuts a tree or a stack of trees, and the plan."""
    plan, f, _ = by_hand(mesh, params(0), loss_of, precision=precision)

    def cut(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = tree["b"].shape
        if not batch:
            return fs.shard(tree, plan, mesh)[""]
        each = [cut({name: leaf[i] for name, leaf in tree.items()}) for i in range(batch[0])]
        return {key: torch.stack([one[key] for one in each]) for key in each[0]}

    return f, cut, plan


grad = torch.func.grad
# Each transform of a loss gives a tree like the parameters; W ranks add W equal gradients. Those of one tree of shards
# are in tests/promises/test_transforms.py; these are of stacks of trees.
TRANSFORMS = {
    "vmap of grad": (lambda f, x, v: torch.vmap(grad(f))(x), (4,)),
    "vmap over the last dim": (
        lambda f, x, v: torch.vmap(grad(f), in_dims=-1, out_dims=-1)({k: t.movedim(0, -1) for k, t in x.items()}),
        (4,),
    ),
    "vmap of vmap": (lambda f, x, v: torch.vmap(torch.vmap(grad(f)))(x), (2, 3)),
    "grad of vmap": (lambda f, x, v: grad(lambda x: torch.vmap(f)(x).sum())(x), (4,)),
    "hvp of vmap": (lambda f, x, v: torch.func.jvp(torch.vmap(grad(f)), (x,), (v,))[1], (4,)),
    "vmap over a factor": (
        lambda f, x, v: torch.vmap(lambda k: grad(lambda y: k * f(y))(x))(torch.arange(1.0, 4).double()),
        (),
    ),
    "autograd of vmap": (lambda f, x, v: by_autograd(lambda x: torch.vmap(f)(x).sum(), x), (4,)),
}
# In parameters of float64 that are gathered in float32 and reduced in float64: the derivatives of the
# whole model that casts its parameters. They add in other dtypes, so they round differently.
PRECISIONS = {"as it is": None, "wide": fs.MixedPrecision(torch.float32, reduce_dtype=torch.float64)}


def by_autograd(f: Any, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    x = {key: leaf.detach().requires_grad_() for key, leaf in x.items()}
    found = torch.autograd.grad(f(x), [*x.values()], allow_unused=True)
    return {k: torch.zeros_like(t) if g is None else g for (k, t), g in zip(x.items(), found, strict=True)}


@pytest.mark.nightly(one_in=5)
@crossed(transform=list(TRANSFORMS), world=[1, 2, 3, {"replicate": 2, "shard": 2}], precision=PRECISIONS)
@on_ranks()
def test_transforms_give_what_plain_torch_gives(mesh: fs.Mesh, transform: str, world: Any, precision: Any) -> None:
    run, batch = TRANSFORMS[transform]
    x, v = params(0, *batch), params(50, *batch)
    narrow = lambda leaves: {name: leaf.float() for name, leaf in leaves.items()} if precision else leaves  # noqa: E731
    wanted = run(lambda leaves: loss_of(narrow(leaves)), x, v)
    exact = {"rtol": 1e-6, "atol": 1e-6} if precision else {}
    f, cut, _ = setup(mesh, precision)
    found, whole = run(f, cut(x), cut(v)), wanted
    if transform == "vmap over the last dim":
        whole = {name: leaf.movedim(-1, 0) for name, leaf in whole.items()}
        found = {key: local.movedim(-1, 0) for key, local in found.items()}
    close(found, {key: local * mesh.world_size for key, local in cut(whole).items()}, **exact)


WIDTH = 120  # a stack of 3 weights takes 170 kB: so large that ranks share its gathered memory
KINDS = {
    "grad": lambda f, shard: torch.func.grad(lambda s: ((out := f(s)).sum(), out), has_aux=True)(shard)[1],
    "vmap": lambda f, shard: torch.vmap(f)({key: torch.stack([local] * 3) for key, local in shard.items()}),
}


def give_out(mesh: fs.Mesh, kind: str) -> tuple[bool, ...]:
    if type(mesh.shard).__name__ == "TorchGroup":
        mesh = fs.init_mesh(mesh.shape, device="cpu")
    same = []
    for apply in (lambda leaves: leaves["weight"], lambda leaves: leaves["weight"].t()):
        _, f, shards = by_hand(mesh, {"weight": torch.ones(WIDTH, WIDTH)}, apply)
        out = KINDS[kind](f, shards[""])
        if mesh.rank == 0:
            out.detach().zero_()
        fs.psum(torch.ones(1), mesh)  # rank 1 compares after rank 0 has written
        same.append(mesh.rank == 0 or bool((out == 1).all()))
    return tuple(same)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "run",
    [run_simulated, pytest.param(run_ranks, marks=pytest.mark.skipif(sys.platform != "linux", reason="shared memory"))],
)
def test_a_returned_leaf_may_be_written_to(run: Any, kind: str) -> None:
    assert run(give_out, 2, kind) == [(True, True)] * 2
