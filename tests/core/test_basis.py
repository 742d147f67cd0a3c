"""Loops over unit vectors: a true object, or an error that names the unit and the remedy."""

from __future__ import annotations

import re
import threading
import types
from pathlib import Path

import pytest
import torch
import torch.autograd.functional as functional
from torch._functorch import eager_transforms
from torch.func import grad, jacfwd, jacrev, jvp

import funcshard as fs
from funcshard._utils import torch_private, tree
from funcshard.core import basis, flat_buffer
from tests.core.units import by_hand, forward_mode
from tests.promises.test_transforms import World, close
from tests.ranks import on_ranks, run_simulated

pytestmark = forward_mode

# What torch is asked for, of a function of shards or of whole parameters ``p``, with tangents ``v`` like them.
# tests/promises/test_transforms.py has loops by parameters, and single ones by inputs.
CASES = {
    "functional.jacobian": lambda f, p, v, x: functional.jacobian(lambda x: f(p, x), x),
    "functional.hessian": lambda f, p, v, x: functional.hessian(lambda x: f(p, x).square().sum(), x),
    "jacrev of a jvp": lambda f, p, v, x: jacrev(lambda x: jvp(lambda p: f(p, x), (p,), (v,))[1])(x),
    "jacfwd of a jvp": lambda f, p, v, x: jacfwd(lambda x: jvp(lambda p: f(p, x), (p,), (v,))[1])(x),
    "jacrev of a gradient": lambda f, p, v, x: along(jacrev(gradient(f, p), chunk_size=1)(x), v),
    "jacfwd of a gradient": lambda f, p, v, x: along(jacfwd(gradient(f, p))(x), v),
}


def gradient(f, p):
    return lambda x: grad(lambda p: f(p, x).square().sum())(p)


def along(rows, v):
    """Return the sum of the rows of each element of the parameters, times the element of ``v``."""
    return sum(torch.tensordot(b, a, b.dim()) for a, b in zip(tree.leaves(rows), tree.leaves(v), strict=True))


MIXED = r"would be the sum over all slices; take torch.func.jvp\(torch.func.grad\(loss\)"
FUNC = r"torch.func.jac(rev|fwd), which hessian uses too, "
SAID = {  # the errors on two ranks: those where units are cut, and those where every rank has a copy too
    "jacrev of a gradient": (
        FUNC + f"would mix rows at the gradient of unit '[02]', cut over 2 ranks.*so row i {MIXED}",
        None,
    ),
    "jacfwd of a gradient": (FUNC + r"would mix columns at the gradient of unit '[02]': the 2 ranks",) * 2,
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
@on_ranks(2)
def test_a_loop_over_unit_vectors_gives_a_true_object_or_an_error(mesh, strategy, case):
    w = World(mesh, strategy)
    said = SAID.get(case, (None, None))[strategy == "no_shard"]
    ask = lambda: CASES[case](w.out, w.shards, w.v, w.x)  # noqa: E731
    if said is None:
        close(ask(), CASES[case](w.whole, w.params, w.tangents, w.x))
    else:
        with pytest.raises(RuntimeError, match=said):
            ask()


@on_ranks(2)
def test_a_gradient_of_rows_is_that_of_the_sum_over_ranks(mesh):
    w = World(mesh, "full_shard")
    leaves, unflatten = tree.flatten(tree.map(lambda shard: shard.detach().requires_grad_(), w.shards))
    out = lambda *shards: w.out(unflatten(shards), w.x)  # noqa: E731
    rows = functional.jacobian(out, tuple(leaves), create_graph=True)
    found = torch.autograd.grad(sum(row.square().sum() for row in rows), leaves)
    rows_of = lambda p: w.summed(lambda _, x: jacrev(lambda p: w.whole(p, x))(p))  # noqa: E731
    squares = lambda p: sum(row.square().sum() for row in tree.leaves(rows_of(p)))  # noqa: E731
    close(w.gathered(unflatten(found)), grad(squares)(w.params))


@pytest.mark.parametrize("name", ["torch.func", "torch.autograd.functional"])
def test_a_loop_is_noticed_though_backward_cannot_see_the_caller(name, monkeypatch):
    # Why: on CUDA torch runs backward in a thread of its own, whose stack does not hold the caller.
    inside, look = threading.local(), basis.basis_loops

    def hidden(*args, backward=flat_buffer.ShardToLeaves.backward):
        inside.backward = True
        try:
            return backward(*args)
        finally:
            inside.backward = False

    monkeypatch.setattr(basis, "basis_loops", lambda *a, **k: {} if getattr(inside, "backward", False) else look(*a, **k))
    monkeypatch.setattr(flat_buffer.ShardToLeaves, "backward", staticmethod(hidden))

    def main(mesh):
        _, f, shards = by_hand(mesh, {"w": torch.arange(4.0)}, lambda leaves: leaves["w"].pow(3).sum())
        (key, shard), *_ = shards[""].items()
        loops = {
            "torch.func": lambda: jacrev(grad(f))(shards[""]),
            "torch.autograd.functional": lambda: functional.hessian(lambda shard: f({key: shard}), shard),
        }
        with pytest.raises(RuntimeError, match=rf"{name}\..* would mix rows at the gradient of unit '\(root\)', cut over 2"):
            loops[name]()

    run_simulated(main, 2)


def renamed(monkeypatch, old, new):
    """Let ``torch.func`` be that of a release in which a function or a variable inside has another name."""
    source = Path(eager_transforms.__file__).read_text()
    changed, count = re.subn(rf"\b{old}\b", new, source)
    assert count
    module = types.ModuleType("torch._functorch.eager_transforms")
    module.__file__, module.__package__ = eager_transforms.__file__, "torch._functorch"
    exec(compile(changed, eager_transforms.__file__, "exec"), module.__dict__)
    module.JVP_NESTING = 1  # the simulation has opened torch's level of forward mode
    for name in ("jacrev", "jacfwd", "vjp", "hessian"):
        monkeypatch.setattr(torch.func, name, getattr(module, name))
    monkeypatch.setattr(torch_private, "_known_loops", set())
    torch_private._loop_codes.cache_clear()


@pytest.fixture
def codes_as_before():
    yield
    torch_private._loop_codes.cache_clear()


@pytest.mark.parametrize(
    ("old", "loop", "known"),
    [
        ("wrapper_fn", "jacrev", True),
        ("push_jvp", "jacfwd", True),
        ("_vjp_with_argnums", "jacrev", False),
        ("flat_primals", "jacfwd", False),
        ("level", "jacrev", False),
    ],
)
@pytest.mark.usefixtures("codes_as_before")
def test_a_release_of_torch_with_other_names_gets_an_error_and_no_wrong_numbers(monkeypatch, old, loop, known):
    renamed(monkeypatch, old, f"{old}_of_later")
    unknown = f"torch.func.{loop} .* torch {torch.__version__.split('+')[0]}.* unknown"

    def main(mesh):
        _, f, shards = by_hand(mesh, {"w": torch.arange(4.0)}, lambda leaves: leaves["w"].square().sum())
        with pytest.raises(RuntimeError, match="would mix (rows|columns)" if known else unknown):
            getattr(torch.func, loop)(f if loop == "jacfwd" else torch.func.grad(f))(shards[""])

    fs.simulate(main, 2)
