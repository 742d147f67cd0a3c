"""Shards to leaves under transforms: every transform gives what plain torch gives on whole leaves."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

import funcshard as fs
from funcshard.core.flat_buffer import LeavesToShard
from tests.ranks import run_ranks, run_simulated

# The first use of forward-mode AD makes torch import a file that calls a deprecated function of
# torch.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

SHAPES = {"a": (2, 3), "b": (), "c": (0, 3), "d": (5,), "unused": (3, 2)}
WORLDS = [1, 2, 3, {"replicate": 2, "shard": 2}]
close = torch.testing.assert_close


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def params(seed: int, *batch: int) -> dict[str, torch.Tensor]:
    return {name: random(seed + i, *batch, *shape) for i, (name, shape) in enumerate(SHAPES.items())}


def loss_of(leaves: Any) -> torch.Tensor:
    product = leaves["a"] @ leaves["a"].sin().mT  # the gradient of ``a`` has the strides of a transposed tensor
    return product.sum() + leaves["b"] ** 3 + leaves["c"].sum() + leaves["d"].cos().square().sum()


def setup(mesh: fs.Mesh) -> tuple[Any, Any, Any]:
    """Return the loss on a shard, a function that cuts a tree or a stack of trees, and the plan."""
    plan = fs.make_plan(params(0), mesh)
    f = fs.unshard(loss_of, plan.units[""], mesh)

    def cut(tree: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        batch = tree["b"].shape
        if not batch:
            return fs.shard(tree, plan, mesh)[""]
        each = [cut({name: leaf[i] for name, leaf in tree.items()}) for i in range(batch[0])]
        return {key: torch.stack([one[key] for one in each]) for key in each[0]}

    return f, cut, plan


grad = torch.func.grad
# Each transform of a loss gives a tree like the parameters; W ranks add W equal gradients.
TRANSFORMS = {
    "grad": (lambda f, x, v: grad(f)(x), ()),
    "hvp": (lambda f, x, v: torch.func.jvp(grad(f), (x,), (v,))[1], ()),
    "vmap of grad": (lambda f, x, v: torch.vmap(grad(f))(x), (4,)),
    "vmap over the last dim": (
        lambda f, x, v: torch.vmap(grad(f), in_dims=-1, out_dims=-1)({k: t.movedim(0, -1) for k, t in x.items()}),
        (4,),
    ),
    "vmap of vmap": (lambda f, x, v: torch.vmap(torch.vmap(grad(f)))(x), (2, 3)),
    "grad of vmap": (lambda f, x, v: grad(lambda x: torch.vmap(f)(x).sum())(x), (4,)),
    "hvp of vmap": (lambda f, x, v: torch.func.jvp(torch.vmap(grad(f)), (x,), (v,))[1], (4,)),
    "autograd of vmap": (lambda f, x, v: by_autograd(lambda x: torch.vmap(f)(x).sum(), x), (4,)),
}


def by_autograd(f: Any, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    x = {key: leaf.detach().requires_grad_() for key, leaf in x.items()}
    found = torch.autograd.grad(f(x), [*x.values()], allow_unused=True)
    return {k: torch.zeros_like(t) if g is None else g for (k, t), g in zip(x.items(), found, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize(("transform", "batch"), TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_give_what_plain_torch_gives(transform: Any, batch: tuple[int, ...], world: Any) -> None:
    x, v = params(0, *batch), params(50, *batch)
    whole = transform(loss_of, x, v)

    def main(mesh: fs.Mesh) -> None:
        f, cut, _ = setup(mesh)
        found, wanted = transform(f, cut(x), cut(v)), whole
        if transform is TRANSFORMS["vmap over the last dim"][0]:
            wanted = {name: leaf.movedim(-1, 0) for name, leaf in whole.items()}
            found = {key: local.movedim(-1, 0) for key, local in found.items()}
        close(found, {key: local * mesh.world_size for key, local in cut(wanted).items()})

    fs.simulate(main, world)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_leaves_without_a_gradient_and_leaves_outside_vmap_count(world: int) -> None:
    def main(mesh: fs.Mesh) -> None:
        _, cut, plan = setup(mesh)
        f = fs.unshard(loss_of, plan.units[""], mesh)
        buffer, comm = plan.units[""].buffers[0], f.comms[0]
        given = params(0)
        stacked = random(9, 4, 5)

        def reduce(d: torch.Tensor) -> torch.Tensor:
            leaves = [given["a"], None, None, d, None]
            by_name = dict(zip(SHAPES, leaves, strict=True))
            return LeavesToShard.apply(buffer, comm, mesh.device, *[by_name[leaf.path] for leaf in buffer.leaves])

        zeros = {name: torch.zeros_like(leaf) for name, leaf in given.items()}
        found = torch.vmap(reduce)(stacked)
        for row, d in zip(found, stacked, strict=True):
            whole = zeros | {"a": given["a"], "d": d}
            close(row, mesh.world_size * cut(whole)[buffer.key])

    fs.simulate(main, world)


WIDTH = 120  # a stack of 3 weights takes 170 kB: so large that ranks share its gathered memory
KINDS = {
    "grad": lambda f, shard: torch.func.grad_and_value(lambda s: (lambda out: (out.sum(), out))(f(s)), has_aux=True)(shard)[
        1
    ][1],
    "vmap": lambda f, shard: torch.vmap(f)({key: torch.stack([local] * 3) for key, local in shard.items()}),
}


def write(mesh: fs.Mesh, kind: str, name: str) -> str:
    tree = {"weight": torch.ones(WIDTH, WIDTH), "bias": torch.ones(WIDTH)}
    plan = fs.make_plan(tree, mesh)

    def apply(leaves: Any) -> torch.Tensor:
        leaves[name].detach().mul_(2.0)
        return leaves["weight"] @ leaves["bias"]

    with pytest.raises(RuntimeError) as raised:
        KINDS[kind](fs.unshard(apply, plan.units[""], mesh), fs.shard(tree, plan, mesh)[""])
    return str(raised.value)


@pytest.mark.parametrize("name", ["weight", "bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_leaf_that_forward_modifies_is_named(kind: str, name: str) -> None:
    for message in run_simulated(write, 2, kind, name):
        assert message.startswith("the forward of unit '(root)' modified a leaf in place, one of buffer 'float32'")


def give_out(mesh: fs.Mesh, kind: str) -> tuple[bool, bool]:
    if type(mesh.shard).__name__ == "TorchGroup":
        mesh = fs.init_mesh(mesh.shape, device="cpu")
    tree = {"weight": torch.ones(WIDTH, WIDTH)}
    plan = fs.make_plan(tree, mesh)
    shard = fs.shard(tree, plan, mesh)[""]
    same = []
    for apply in (lambda leaves: leaves["weight"], lambda leaves: leaves["weight"].t()):
        f = fs.unshard(apply, plan.units[""], mesh)
        out = KINDS[kind](f, shard)
        if mesh.rank == 0:
            with torch.no_grad():
                out.detach().zero_()
        fs.psum(torch.ones(1), mesh)  # rank 1 compares after rank 0 has written
        same.append(mesh.rank == 0 or bool((out == 1).all()))
    return same[0], same[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "run",
    [run_simulated, pytest.param(run_ranks, marks=pytest.mark.skipif(sys.platform != "linux", reason="shared memory"))],
)
def test_a_returned_leaf_may_be_written_to(run: Any, kind: str) -> None:
    assert run(give_out, 2, kind) == [(True, True)] * 2
