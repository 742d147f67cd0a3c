"""One node makes the leaves of a buffer: every derivative and every transform gives what plain torch gives."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import funcshard as fs
from tests.core.units import by_hand, close, forward_mode, random
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_simulated
from tests.storages import Log

pytestmark = forward_mode

PARAMS = {"w": torch.linspace(-1, 1, 12).double().view(3, 4), "b": torch.linspace(0, 1, 3).double()}
STRATEGIES = pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
WORLDS = pytest.mark.parametrize("world", [1, 2])


def layer(leaves, x):
    return torch.tanh(leaves["w"] @ x + leaves["b"])


def setup(mesh, strategy="full_shard", f=layer):
    _, run, shards = by_hand(mesh, PARAMS, f, how=fs.reshard, strategy=strategy)
    x = torch.linspace(0, 1 + mesh.rank, 4).double()
    return lambda shard: run({"float64": shard}, x), shards[""]["float64"]


def twice_and_again(mesh, strategy):
    run, shard = setup(mesh, strategy)
    shard.requires_grad_()
    loss = run(shard).square().sum()
    grads = [torch.autograd.grad(loss, shard, retain_graph=keep)[0] for keep in (True, True, False)]
    (first,) = torch.autograd.grad(run(shard).square().sum(), shard, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), shard)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(loss, shard)

    def of(f):
        return torch.func.grad(lambda s: f(s).square().sum())

    close([*grads, first.detach()], [of(run)(shard.detach())] * 4)
    close(second, of(of(run))(shard.detach()))


@STRATEGIES
def test_backward_runs_several_times_and_twice_over(strategy):
    run_simulated(twice_and_again, 2, strategy)


@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_backward_runs_in_anomaly_mode():
    # Why around all ranks: the mode is the process's, and the rank that leaves it last would leave it on.
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        run_simulated(twice_and_again, 2, "full_shard")


@STRATEGIES
def test_forward_mode_outside_torch_func(strategy):
    run, shard = setup(fs.Mesh(), strategy)
    v = shard.flip(0)
    _, slope = torch.func.jvp(run, (shard,), (v,))
    _, product = torch.func.jvp(torch.func.grad(lambda s: run(s).square().sum()), (shard,), (v,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(shard.clone().requires_grad_(), v)
        out = run(dual)
        (grad,) = torch.autograd.grad(out.square().sum(), dual, create_graph=True)
        close([forward_ad.unpack_dual(each).tangent.detach() for each in (out, grad)], [slope, product])


@pytest.mark.usefixtures("without_garbage_collection")
@on_ranks(2)
def test_the_graph_of_a_gradient_is_freed_when_nothing_refers_to_it(mesh):
    log = Log()

    def f(leaves, x):
        log(leaves["w"])
        return layer(leaves, x)

    run, shard = setup(mesh, f=f)
    (first,) = torch.autograd.grad(run(shard.requires_grad_()).square().sum(), shard, create_graph=True)
    torch.autograd.grad(first.sum(), shard)
    del first
    assert (len(log), log.alive()) == (1, 0)


@WORLDS
@on_ranks()
def test_torchs_older_vmap_is_refused_on_several_ranks_and_what_to_use_works(mesh, world):
    run, shard = setup(mesh)
    out, eye = run(shard.requires_grad_()), torch.eye(3).double()
    ask = lambda: torch.autograd.grad(out, shard, eye, is_grads_batched=True, retain_graph=True)[0]  # noqa: E731
    rows = torch.stack([torch.autograd.grad(out, shard, row, retain_graph=True)[0] for row in eye])
    if mesh.world_size == 1:
        close(ask(), rows)
    else:
        words = re.escape("cannot batch the collectives of unit '(root)' on 2 ranks: use torch.vmap over the cotangents")
        with pytest.raises(RuntimeError, match=words):
            ask()
    pullback = torch.func.vjp(run, shard.detach())[1]
    close(torch.vmap(pullback)(eye)[0], rows)
    close(torch.func.jacrev(run)(shard.detach()), rows)


# --- transforms of stacks of shards ---------------------------------------------------------------

SHAPES = {"a": (2, 3), "b": (), "c": (0, 3), "d": (5,), "unused": (3, 2)}


def params(seed: int, *batch: int) -> dict[str, torch.Tensor]:
    return {name: random(seed + i, *batch, *shape) for i, (name, shape) in enumerate(SHAPES.items())}


def loss_of(leaves: Any) -> torch.Tensor:
    product = leaves["a"] @ leaves["a"].sin().mT  # the gradient of ``a`` has the strides of a transposed tensor
    return product.sum() + leaves["b"] ** 3 + leaves["c"].sum() + leaves["d"].cos().square().sum()


def stacks_on(mesh: fs.Mesh, precision: Any = None) -> tuple[Any, Any, Any]:
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
    f, cut, _ = stacks_on(mesh, precision)
    found, whole = run(f, cut(x), cut(v)), wanted
    if transform == "vmap over the last dim":
        whole = {name: leaf.movedim(-1, 0) for name, leaf in whole.items()}
        found = {key: local.movedim(-1, 0) for key, local in found.items()}
    torch.testing.assert_close(found, {key: local * mesh.world_size for key, local in cut(whole).items()}, **exact)
