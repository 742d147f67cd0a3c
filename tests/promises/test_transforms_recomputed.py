"""Losses with a transform inside, over units that backward computes again: each against the whole parameters.

A loss such as that of a physics-informed network or of MeanFlow differentiates the model by its inputs, and training
differentiates the loss by the parameters. Backward then computes units again inside transforms of its own.
"""

import functools

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.core.units import forward_mode, of_module, random

pytestmark = forward_mode

HYBRID = {"replicate": 2, "shard": 2}
X, DX = random(1, 2, 3), random(2, 2, 3)


class Block(nn.Module):
    def __init__(self, inside=None):
        super().__init__()
        self.up, self.down, self.inside = nn.Linear(3, 4), nn.Linear(4, 3), inside

    def forward(self, x):
        if self.inside is not None:
            return x + self.inside(self.body, x)
        return x + self.body(x)

    def body(self, x):
        return self.down(torch.tanh(self.up(x)))


def build(inside=None):
    torch.manual_seed(0)
    return nn.Sequential(Block(inside), Block(inside), nn.Linear(3, 3)).double()


NET = build()
PARAMS = {name: p.detach() for name, p in NET.named_parameters()}
TANGENTS = {name: random(i + 3, *p.shape) for i, (name, p) in enumerate(PARAMS.items())}


def square(x):
    return x.square().sum()


def mean_flow(f, p, v, x, dx):
    out, tangent = jvp(lambda x: f(p, x), (x,), (dx,))
    return square(out - (dx - 0.3 * tangent).detach())


def of_both(f, p, v, x, dx):
    out, tangent = jvp(lambda x: f(p, x), (x,), (dx,))
    return square(out - 0.3 * tangent)


def of_parameters(f, p, v, x, dx):
    out, tangent = jvp(lambda p: f(p, x), (p,), (v,))
    return square(out) + square(tangent)


def along(f, dx):
    return lambda x: jvp(f, (x,), (dx,))[1]


# loss(f, params or shards, tangents like them, x, dx)
LOSSES = {
    "jvp": of_both,
    "jvp, the tangent detached": mean_flow,
    "jvp by parameters": of_parameters,
    "vjp": lambda f, p, v, x, dx: square(vjp(lambda x: f(p, x), x)[1](dx)[0]),
    "grad": lambda f, p, v, x, dx: square(grad(lambda x: square(f(p, x)))(x)),
    "vmap": lambda f, p, v, x, dx: square(vmap(lambda x: f(p, x))(x)),
    "jacfwd": lambda f, p, v, x, dx: square(jacfwd(lambda x: f(p, x))(x)),
    "jacrev": lambda f, p, v, x, dx: square(jacrev(lambda x: f(p, x))(x)),
    "hessian": lambda f, p, v, x, dx: square(hessian(lambda x: square(f(p, x)))(x)),
    "jvp of grad": lambda f, p, v, x, dx: square(along(grad(lambda x: square(f(p, x))), dx)(x)),
    "grad of jvp": lambda f, p, v, x, dx: square(grad(along(lambda x: square(f(p, x)), dx))(x)),
    "jvp of jvp": lambda f, p, v, x, dx: square(along(along(lambda x: f(p, x), dx), dx)(x)),
    "vmap of grad": lambda f, p, v, x, dx: square(vmap(grad(lambda x: square(f(p, x))))(x)),
    "vmap of hessian": lambda f, p, v, x, dx: square(vmap(hessian(lambda x: square(f(p, x))))(x)),
}


def expected(loss):
    whole = lambda p, x, dx: loss(lambda p, x: functional_call(NET, p, x), p, TANGENTS, x, dx)  # noqa: E731
    mean = lambda p: (whole(p, X[:1], DX[:1]) + whole(p, X[1:], DX[1:])) / 2  # noqa: E731
    leaves = {name: p.clone().requires_grad_() for name, p in PARAMS.items()}
    found = torch.autograd.grad(mean(leaves), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True))


def gradients(loss_fn, shards, ranks):
    """Yield the mean gradient of ``loss_fn``, asked for in four ways."""
    yield fs.value_and_grad(loss_fn)(shards)[1]
    yield divided(grad(loss_fn)(shards), ranks)
    leaves = {unit: {key: p.clone().requires_grad_() for key, p in own.items()} for unit, own in shards.items()}
    taken = iter(torch.autograd.grad(loss_fn(leaves), [p for own in leaves.values() for p in own.values()]))
    yield divided({unit: {key: next(taken) for key in own} for unit, own in leaves.items()}, ranks)
    loss_fn(leaves).backward()
    yield divided({unit: {key: p.grad for key, p in own.items()} for unit, own in leaves.items()}, ranks)


def divided(tree, ranks):
    return {unit: {key: p / ranks for key, p in own.items()} for unit, own in tree.items()}


def check(mesh, loss, truth, strategy, remat):
    how = {"remat": remat == "fully_shard"}
    plan, sharded, shards = of_module(mesh, build(), ["0", "1"], strategy=strategy, how=how)
    f = lambda shards, x: sharded(shards, {}, x)  # noqa: E731
    f = fs.remat(f) if remat == "fs.remat" else f
    v = fs.shard(TANGENTS, plan, mesh)
    # Every rank has one of the two samples, and a single rank has both.
    numbers = [0, 1] if mesh.world_size == 1 else [mesh.rank % 2]
    rows = [slice(i, i + 1) for i in numbers]
    loss_fn = lambda shards: sum(loss(f, shards, v, X[at], DX[at]) for at in rows) / len(rows)  # noqa: E731
    for found in gradients(loss_fn, shards, mesh.world_size):
        torch.testing.assert_close(dict(fs.gather(found, plan, mesh)), truth, rtol=1e-10, atol=1e-10)


WORLDS = [("full_shard", 2), ("no_shard", 2), ("shard_grad_op", 2), ("full_shard", HYBRID)]
REMATS = ("fully_shard", "fs.remat")
# Every loss on one rank with one way to recompute, and on one of the other worlds with the other way.
CASES = [(loss, REMATS[i % 2], "full_shard", 1) for i, loss in enumerate(LOSSES)]
CASES += [(loss, REMATS[1 - i % 2], *WORLDS[i // 2 % len(WORLDS)]) for i, loss in enumerate(LOSSES)]


@pytest.mark.nightly(one_in=10)
@pytest.mark.parametrize(("loss", "remat", "strategy", "world"), CASES, ids=str)
def test_the_gradient_of_a_loss_with_a_transform_is_right_however_it_is_asked_for(loss, remat, strategy, world):
    truth = expected(LOSSES[loss])
    fs.simulate(lambda mesh: check(mesh, LOSSES[loss], truth, strategy, remat), world)


# --- checkpoints of torch, which know no transform ------------------------------------------------


again = functools.partial(checkpoint, use_reentrant=False)
CAUSES = {
    "in a unit": (again, lambda f: f, of_both,
        r"'1.up.weight' was read .* of unit '1', in backward: torch.utils.checkpoint .*remat"),
    "around a call": (None, lambda f: functools.partial(again, f), of_parameters,
        r"belongs to a torch.func transform that has ended: .*torch.utils.checkpoint.*fs.remat"),
}  # fmt: skip


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch's own checkpoint has no derivative along directions")
@pytest.mark.parametrize(("inside", "around", "loss", "words"), CAUSES.values(), ids=CAUSES)
def test_a_checkpoint_of_torch_under_a_transform_is_named_as_the_cause(inside, around, loss, words):
    def main(mesh):
        plan, sharded, shards = of_module(mesh, build(inside), ["0", "1"])
        f = around(lambda shards, x: sharded(shards, {}, x))
        v = fs.shard(TANGENTS, plan, mesh)
        fs.value_and_grad(lambda shards: loss(f, shards, v, X, DX))(shards)

    with pytest.raises(ValueError, match=words):
        fs.simulate(main, 2)
