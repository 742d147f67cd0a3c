"""remat: the same results under every transform, computed again from the inputs alone."""

from __future__ import annotations

import collections
import functools
import re
import types

import optree
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

import funcshard as fs
from tests.core.units import each_by_hand, forward_mode, of_module, random
from tests.module.law import Runs
from tests.ranks import run_simulated
from tests.storages import Log

pytestmark = forward_mode

UNITS = 4
CAPTURED = "a function under fs.remat captured a tensor that a torch.func transform differentiates or maps over"


PARAMS = {f"u{i}": {"w": random(i, 4, 4) / 2, "b": random(10 + i, 4)} for i in range(UNITS)}
TANGENTS = optree.tree_map(lambda leaf: leaf.flip(0), PARAMS)
X = random(20, 6, 4)


def layer(leaves, x):
    return torch.tanh(x @ leaves["w"] + leaves["b"])


def chain(how, f=layer):
    """Return a loss of a chain of layers, each of them ``how(f)``."""

    def loss(params, x):
        for name in sorted(params):
            x = how(f)(params[name], x)
        return x.square().sum()

    return loss


def same(found, expected, tolerance=1e-12):
    optree.tree_map(lambda a, b: torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance), found, expected)


def inner(one, other):
    return sum((a * b).sum() for a, b in zip(optree.tree_leaves(one), optree.tree_leaves(other), strict=True))


def double_backward(f):
    leaves, spec = optree.tree_flatten(PARAMS)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    first = torch.autograd.grad(f(optree.tree_unflatten(spec, leaves), X), leaves, create_graph=True)
    return first, torch.autograd.grad(sum(g.square().sum() for g in first), leaves)


TRANSFORMS = {
    "vjp": lambda f: vjp(f, PARAMS, X)[1](torch.ones((), dtype=torch.float64)),
    "jvp": lambda f: jvp(f, (PARAMS, X), (TANGENTS, X)),
    "forward over reverse": lambda f: jvp(lambda p: grad(f)(p, X), (PARAMS,), (TANGENTS,)),
    "reverse over reverse": lambda f: grad(lambda p: inner(grad(f)(p, X), TANGENTS))(PARAMS),
    "vmap of grad": lambda f: vmap(grad(f), (None, 0))(PARAMS, X),
    "grad of vmap": lambda f: grad(lambda p: vmap(f, (None, 0))(p, X).sum())(PARAMS),
    "vmap of forward over reverse": lambda f: vmap(lambda x: jvp(lambda p: grad(f)(p, x), (PARAMS,), (TANGENTS,))[1])(X[:2]),
    "jacrev of jacrev": lambda f: jacrev(jacrev(lambda x: f(PARAMS, x)))(X[:2]),
    "jacfwd of jacfwd": lambda f: jacfwd(jacfwd(lambda x: f(PARAMS, x)))(X[:2]),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(lambda x: f(PARAMS, x)))(X[:2]),
    "third derivative": lambda f: grad(lambda y: inner(grad(lambda z: inner(grad(f, 1)(PARAMS, z), z))(y), y))(X),
    "double backward": double_backward,
}
WAYS = {"one": fs.remat, "nested": lambda f: fs.remat(fs.remat(f))}


@pytest.mark.slow
@pytest.mark.parametrize(("way", "transform"), [*(("one", name) for name in TRANSFORMS), ("nested", "third derivative")])
def test_every_transform_gives_what_it_gives_without(way, transform):
    same(TRANSFORMS[transform](chain(WAYS[way])), TRANSFORMS[transform](chain(lambda f: f)))


MAKES = {"unshard": lambda f: f, "remat of reshard": lambda f: fs.remat(fs.reshard(f))}


def sharded_chain(mesh, how, derivative):
    """Return the gathered gradient of a chain of units, and the largest number of gathered buffers alive."""
    log, most = Log(), [0]

    def watched(leaves, x):
        log(leaves["w"])
        most[0] = max(most[0], log.alive())
        return layer(leaves, F.dropout(x, 0.25))

    plan, runs, shards = each_by_hand(mesh, PARAMS, dict.fromkeys(PARAMS, watched), how=MAKES[how])

    def loss(shards, x):
        for name, run in runs.items():
            x = run(shards[name], x)
        return x.square().mean()

    grads = DERIVATIVES[derivative](loss, shards, X.chunk(mesh.world_size)[mesh.rank].clone().requires_grad_())
    assert log.alive() == 0
    return fs.gather(grads, plan, mesh), most[0]


def of_squares(loss, x):
    """Return the squared norm of the gradient of a loss, as a function of shards."""
    return lambda shards: inner(*[grad(loss)(shards, x.detach())] * 2)


DERIVATIVES = {
    "grad": lambda loss, shards, x: grad(loss)(shards, x.detach()),
    "value_and_grad": lambda loss, shards, x: fs.value_and_grad(loss)(shards, x)[1],
    "value_and_grad of grad": lambda loss, shards, x: fs.value_and_grad(of_squares(loss, x))(shards)[1],
    "grad of grad": lambda loss, shards, x: grad(of_squares(loss, x))(shards),
    "jvp of grad": lambda loss, shards, x: jvp(lambda s: grad(loss)(s, x.detach()), (shards,), (shards,))[1],
}


@pytest.mark.slow
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_one_unit_is_gathered_at_a_time_whatever_differentiates(derivative):
    expected, found = (run_simulated(sharded_chain, 2, make, derivative) for make in MAKES)
    for (grads, most), (wanted, before) in zip(found, expected, strict=True):
        same(grads, wanted, 1e-12 if "of" in derivative else 0)
        # If its input needs no gradient, the first unit does not keep its weight.
        assert (most, before) == (1, UNITS if derivative == "value_and_grad" else UNITS - 1)


@pytest.mark.parametrize("mutable", [False, True])
def test_a_units_buffers_are_read_and_written_once_under_transforms(mutable):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Linear(4, 1)).double()
    apply, params, buffers = fs.make_functional(net, mutable=mutable)

    def main(mesh, remat):
        _, sharded, shards = of_module(mesh, (apply, params, buffers), ["0"], how={"remat": remat})

        def loss(shards):
            out, new = sharded(shards, buffers, X) if mutable else (sharded(shards, buffers, X), {})
            return out.square().mean(), new

        return grad(loss, has_aux=True)(shards)

    found, expected = (fs.simulate(lambda mesh, remat=remat: main(mesh, remat), 2) for remat in (["0"], []))
    same(found, expected)
    assert {int(new["0.1.num_batches_tracked"]) for _, new in found if mutable} == ({1} if mutable else set())


ALL_UNITS = {f"blocks.{number}" for number in range(UNITS)}
GLOBS = [  # options, and the units, or None for an error
    (["blocks.0", "**"], ALL_UNITS), ("blocks.1", {"blocks.1"}), (True, ALL_UNITS), (False, set()), (["blocks.9"], None),
    ([""], None), ("blocks", None),
]  # fmt: skip


@pytest.mark.parametrize(("remat", "expected"), GLOBS, ids=range(len(GLOBS)))
def test_globs_name_the_units_that_are_computed_again(remat, expected):
    net = nn.ModuleDict({"blocks": nn.Sequential(*(nn.Linear(4, 4) for _ in range(UNITS)))})
    make = lambda: of_module(fs.Mesh(), net, ["blocks.*"], how={"remat": remat})  # noqa: E731
    if expected is None:
        words = r"remat must name units of the plan, not the root; found .* its units are \['bl"
        with pytest.raises(ValueError, match=words):
            make()
    else:
        assert {name for name, members in make()[1].units.items() if any(each.remat for each in members)} == expected


def test_pytrees_constants_integers_and_repeated_outputs_come_through():
    seen = []

    def f(tree, flag, *, scale):
        seen.append((flag, tree["name"]))
        x = tree["x"]
        y = x * scale
        return {"y": y, "again": [y, None], "same": x, "index": x.argmax(), "flag": flag, "view": y[1:]}

    def loss(x, g):
        out = g({"x": x, "name": "a", "number": torch.tensor(3)}, True, scale=2.0)
        assert out["flag"] is True
        assert out["again"][0] is out["y"]
        assert out["again"][1] is None
        assert out["index"].dtype == torch.int64
        return (out["y"] + out["again"][0] * out["same"]).sum() + out["view"].square().sum()

    same(grad(loss)(X, fs.remat(f)), grad(loss)(X, f))
    same(jvp(lambda x: loss(x, fs.remat(f)), (X,), (X,)), jvp(lambda x: loss(x, f), (X,), (X,)))
    assert set(seen) == {(True, "a")}


def test_a_captured_tensor_has_its_gradient_outside_torch_func():
    weight = X.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(fs.remat(lambda x: (x * weight).sum())(X), weight)[0], X)


def holder(weight):
    return Runs(lambda module, x: (x * module.weight).sum(), weight=weight)


V = random(30, 4)
CAPTURES = {
    "grad": lambda: grad(lambda w: fs.remat(lambda x: (x * w).sum())(V))(V),
    "jvp": lambda: jvp(lambda w: fs.remat(lambda x: (x * w).sum())(w), (V,), (V,)),
    "vmap": lambda: vmap(lambda w: fs.remat(lambda x: x * w)(w))(V),
    "a list in a list": lambda: grad(lambda w: fs.remat(functools.partial(of_a_list, [{"w": w}]))(V))(V),
    "a module's attribute": lambda: grad(lambda w: fs.remat(holder(w))(V))(V),
    "a function inside": lambda: grad(lambda w: fs.remat(lambda x: grad(lambda y: (y * w).sum())(x).sum())(V))(V),
    "requires a gradient": lambda: grad(fs.remat(holder(nn.Parameter(V.clone()))))(V),
}


def of_a_list(held, x):
    return (x * held[0]["w"]).sum()


@pytest.mark.parametrize("case", CAPTURES)
def test_a_captured_tensor_is_refused_under_torch_func(case):
    with pytest.raises(ValueError, match=re.escape(CAPTURED)):
        CAPTURES[case]()


def test_a_function_runs_again_with_the_lists_of_its_call():
    """A list that it fills, or that grows after the call, as DenseNet's.

    tests/module/test_fully_sharded_checkpointing.py has objects.
    """
    x, w = random(0, 4, 4).requires_grad_(), random(1, 4, 4).requires_grad_()

    def f(features, w):
        features["seen"].append(w.detach())
        return torch.tanh(torch.cat(features["all"] + features["seen"]) @ w)

    grads = []
    for run in (f, fs.remat(f)):
        features = collections.defaultdict(list, all=[x])
        for _ in range(3):
            features["all"].append(run(features, w))
        grads.append(torch.autograd.grad(features["all"][-1].square().sum(), (x, w)))
        assert len(features["seen"]) == 3
    assert all(map(torch.equal, *grads))


WRITES = {
    "a list": lambda features, x: features["all"].append(x.sin()),
    "a dictionary": lambda features, x: features.update(out=x.sin()),
    "an object": lambda features, x: setattr(features["object"], "out", x.sin()),
    "an object in an object": lambda features, x: features["object"].caches.append(types.SimpleNamespace(keys=x.sin())),
}


@pytest.mark.parametrize("place", WRITES)
def test_a_tensor_put_into_an_argument_is_an_error_under_torch_func(place):
    """It would have no gradient, or be lost with a copy of the list."""

    def loss(x):
        features = {"all": [x], "object": types.SimpleNamespace(caches=[], calls=0)}
        return fs.remat(lambda features, x: (WRITES[place](features, x), x.sum())[1])(features, x)

    loss(X.clone().requires_grad_()).backward()
    with pytest.raises(ValueError, match="changed a list, dictionary or object in its arguments"):
        grad(loss)(X)


def test_a_failure_in_backward_says_where_the_function_ran_again():
    w, keys = random(0, 4, 4).requires_grad_(), []

    def f(w):  # as attention with keys that it captured
        keys.append(w.detach())
        return (w @ torch.cat(keys).view(4, 4)).sum()

    with pytest.raises(RuntimeError, match="invalid for input") as info:
        fs.remat(f)(w).backward()
    assert any("pass use_cache=False" in note for note in info.value.__notes__)


def test_a_function_may_turn_exceptions_into_its_own():
    """As einx does: a checkpoint ends its second run by an exception, once it has what backward needs."""

    def f(x, w):
        try:
            return torch.tanh(x @ w) @ w
        except Exception as error:
            raise ValueError("my operation failed") from error

    w = random(0, 4, 4).requires_grad_()
    grads = [torch.autograd.grad(run(X[:4, :4], w).sum(), w)[0] for run in (f, fs.remat(f))]
    assert torch.equal(*grads)


def test_autocast_is_the_same_the_second_time():
    dtypes = []

    @fs.remat
    def f(x, w):
        out = x @ w
        dtypes.append(out.dtype)
        return out.float()

    grad(lambda w: torch.autocast("cpu", dtype=torch.bfloat16)(f)(X.float(), w).square().sum())(torch.eye(4))
    assert dtypes == [torch.bfloat16] * 2


CHANGED = "a tensor in the arguments of a function under fs.remat was modified in place, or got other data"


@pytest.mark.parametrize("place", ["in a tree", "by keyword"])
@pytest.mark.parametrize(
    "change", [lambda w: w.detach().mul_(2), lambda w: setattr(w, "data", w * 2)], ids=["write", "data"]
)
def test_an_argument_that_changes_between_forward_and_backward_is_an_error(place, change):
    w, x = random(0, 4, 4).requires_grad_(), random(1, 6, 4)
    f = fs.remat(lambda tree=None, w=None: torch.tanh(x @ (w if tree is None else tree["w"][0])).sum())
    loss = f({"w": [w]}) if place == "in a tree" else f(w=w)
    change(w)
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


DRAWING = {
    "jvp": lambda f: jvp(f, (X,), (X,)),
    "hvp": lambda f: jvp(grad(f), (X,), (X,)),
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (X,))[1])(X),
    "jvp by another argument": lambda f: jvp(lambda scale: scale * f(X), (torch.ones(()),), (torch.ones(()),)),
}


@pytest.mark.parametrize("transform", DRAWING)
def test_dropout_draws_what_it_draws_without_remat_and_goes_on(transform):
    def derivative(how):
        torch.manual_seed(1)
        drop = how(lambda x: F.dropout(x, 0.5).sin())
        return DRAWING[transform](lambda x: (drop(x) * drop(x)).sum()), torch.rand(1)

    same(derivative(fs.remat), derivative(lambda f: f))
