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
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp

import funcshard as fs
from funcshard._utils import torch_private
from funcshard.core import basis, flat_buffer
from tests.core.units import by_hand, each_by_hand, forward_mode
from tests.ranks import on_ranks, run_simulated

pytestmark = forward_mode

WORLD, SIZE = 2, 4  # SIZE: elements of each unit
PARAMS = {name: {"w": torch.linspace(low, low + 1, SIZE).double()} for name, low in (("a", -0.5), ("b", 0.7))}
INPUTS = [torch.linspace(0.5, 1.5, SIZE).double() * (1 + rank) for rank in range(WORLD)]


def layers(a, b, x):
    """Return two outputs."""
    return torch.stack([torch.tanh(a * x) @ b.sin(), (a * x).exp() @ b])


def whole(flat, x):
    return layers(flat[:SIZE], flat[SIZE:], x)


def whole_loss(flat, x):
    return whole(flat, x).sum()


FLAT = torch.cat([PARAMS["a"]["w"], PARAMS["b"]["w"]])


class Rank:
    """One rank's function of its two shards, and slices of matrices of the whole parameters."""

    def __init__(self, mesh, strategy, how):
        self.mesh, self.x = mesh, INPUTS[mesh.rank]
        functions = {"a": lambda leaves: leaves["w"].clone(), "b": lambda leaves, a, x: layers(a, leaves["w"], x)}
        wrap = {"reshard": fs.reshard, "unshard": lambda f: f, "remat": fs.remat}[how]
        _, runs, shards = each_by_hand(mesh, PARAMS, functions, how=wrap, strategy=strategy)
        self.shards = tuple(shards[name]["float64"] for name in functions)
        cut = strategy != "no_shard"
        n = SIZE // mesh.world_size if cut else SIZE
        own = torch.arange(n) + (n * mesh.rank if cut else 0)
        self.own = torch.cat([own, own + SIZE])  # of the elements of FLAT
        self.out = lambda s, x: runs["b"]({"float64": s[1]}, runs["a"]({"float64": s[0]}), x)
        self.loss = lambda s, x: self.out(s, x).sum()

    def columns(self, matrix):
        """Return the columns of this rank's elements, by shard."""
        return matrix[..., self.own].split(len(self.own) // 2, -1)

    def block(self, matrix):
        """Return the rows and columns of this rank's elements, by pair of shards."""
        return tuple(self.columns(rows) for rows in matrix[self.own].split(len(self.own) // 2))


def total(function):
    return sum(function(x) for x in INPUTS)


def whole_vector():
    return torch.linspace(1, 2, 2 * SIZE).double()


def own_vector(w):
    return tuple(part.clone() for part in w.columns(whole_vector()))


def push_along_shards(w, x):
    return jvp(lambda s: w.out(s, x), (w.shards,), (own_vector(w),))[1]


# True objects, which are slices of objects of the whole parameters.


def rows_of_all(w):
    return w.columns(total(lambda x: jacrev(whole)(FLAT, x)))


def second_derivatives(w):
    return w.block(total(lambda x: hessian(whole_loss)(FLAT, x)))


def pushed_by_x(w):
    return jacrev(lambda x: jvp(lambda p: whole(p, x), (FLAT,), (whole_vector(),))[1])(w.x)


def gradient_by_x(w):
    return [rows.t() for rows in w.columns(jacrev(lambda x: grad(whole_loss)(FLAT, x))(w.x).t())]


def gradient_of_rows(w):
    shards = tuple(shard.detach().requires_grad_() for shard in w.shards)
    rows = functional.jacobian(lambda *s: w.out(s, w.x), shards, create_graph=True)
    return torch.autograd.grad(sum(row.square().sum() for row in rows), shards)


def gradient_of_all_rows(w):
    return w.columns(grad(lambda p: total(lambda x: jacrev(whole)(p, x)).square().sum())(FLAT))


# What torch is asked for, and the true object, or None if there is none. tests/promises/test_transforms.py has single
# loops of torch.func; here they loop over each other, over jvp and grad, and inside torch.autograd.functional.
CASES = {
    "jacrev of grad": (lambda w: jacrev(grad(w.loss))(w.shards, w.x), second_derivatives),
    "functional.jacobian": (lambda w: functional.jacobian(lambda *s: w.out(s, w.x), w.shards), rows_of_all),
    "functional.hessian": (lambda w: functional.hessian(lambda *s: w.loss(s, w.x), w.shards), second_derivatives),
    "a gradient of functional.jacobian": (gradient_of_rows, gradient_of_all_rows),
    "functional.jacobian by inputs": (
        lambda w: functional.jacobian(lambda x: w.out(w.shards, x), w.x), lambda w: jacrev(whole, 1)(FLAT, w.x),
    ),
    "functional.hessian by inputs": (
        lambda w: functional.hessian(lambda x: w.loss(w.shards, x), w.x), lambda w: hessian(whole_loss, 1)(FLAT, w.x),
    ),
    "jacrev by inputs of a jvp along shards": (lambda w: jacrev(lambda x: push_along_shards(w, x))(w.x), pushed_by_x),
    "jacfwd by inputs of a jvp along shards": (lambda w: jacfwd(lambda x: push_along_shards(w, x))(w.x), pushed_by_x),
    "jacrev by inputs of a gradient": (lambda w: jacrev(lambda x: grad(w.loss)(w.shards, x))(w.x), gradient_by_x),
    "jacfwd by inputs of a gradient": (lambda w: jacfwd(lambda x: grad(w.loss)(w.shards, x))(w.x), None),
    "jacrev of pmean, by one row": (
        lambda w: jacrev(lambda x: fs.pmean(w.out(w.shards, x), w.mesh), chunk_size=1)(w.x), None,
    ),
}  # fmt: skip

FUNC, LOOP = (
    f"{name}, which hessian uses too, " for name in ("torch.func.jac(rev|fwd)", "torch.autograd.functional.jacobian")
)
MIXED_ROWS = "would mix rows at the gradient of unit '[ab]', cut over 2 ranks"
IF_CUT = {  # the errors of cases where units are cut
    "jacrev of grad": FUNC + MIXED_ROWS,
    "functional.hessian": LOOP + MIXED_ROWS,
    "jacrev by inputs of a gradient": FUNC + MIXED_ROWS,
}
ALWAYS = {  # and where every rank has a copy
    "jacfwd by inputs of a gradient": FUNC + "would mix columns at the gradient of unit '[ab]': the 2 ranks",
    "jacrev of pmean, by one row": FUNC
    + "would mix rows at psum or pmean on 2 ranks: .*take the collective of the transform's result",
}


def check(mesh, strategy, how):
    said = {} if mesh.world_size == 1 else ALWAYS if strategy == "no_shard" else ALWAYS | IF_CUT
    for name, (ask, true) in CASES.items():
        world = Rank(mesh, strategy, how)
        try:
            if name in said:
                with pytest.raises(RuntimeError, match=said[name]):
                    ask(world)
                continue
            found = ask(world)
            if true is not None and mesh.world_size == WORLD:
                wanted = true(world)
                torch.testing.assert_close(found, type(found)(wanted) if isinstance(found, (list, tuple)) else wanted)
        except BaseException as error:
            error.add_note(f"in case {name!r}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("how", ["reshard", "remat"])
@pytest.mark.parametrize(("strategy", "ranks"), [("full_shard", WORLD), ("no_shard", WORLD), ("full_shard", 1)])
def test_a_loop_over_unit_vectors_gives_a_true_object_or_an_error(strategy, ranks, how):
    run_simulated(check, ranks, strategy, how)


def test_errors_say_what_would_have_come_out_and_what_to_do():
    def main(mesh):
        w, said = Rank(mesh, "full_shard", "reshard"), []
        for ask in (hessian(w.loss), CASES["jacrev of grad"][0], CASES["jacrev of pmean, by one row"][0]):
            with pytest.raises(RuntimeError) as caught:
                ask(w) if said else ask(w.shards, w.x)
            said.append(str(caught.value))
        return said

    columns, rows, mean = run_simulated(main, WORLD)[0]
    mixed = "would be the sum of {} of every rank's slice; take torch.func.jvp(torch.func.grad(loss)"
    assert "so column k " + mixed.format("column k") in columns
    assert "so row i " + mixed.format("row i") in rows
    assert "along a basis of the whole parameters, as docs/transforms.md, 'Columns', does" in columns
    assert "the collective would mix the derivatives along them; take the collective of the transform's result" in mean


@on_ranks(WORLD)
def test_vectors_of_ones_own_are_never_refused(mesh):
    w = Rank(mesh, "full_shard", "reshard")
    _, pull = vjp(lambda s: grad(w.loss)(s, w.x), w.shards)
    pulled = torch.vmap(pull)(tuple(torch.stack([part, 2 * part]) for part in own_vector(w)))
    expected = w.columns(total(lambda x: hessian(whole_loss)(FLAT, x)) @ whole_vector())
    for row, factor in ((0, 1), (1, 2)):
        torch.testing.assert_close(tuple(part[row] for part in pulled[0]), tuple(factor * part for part in expected))


@pytest.mark.parametrize("name", ["jacrev of grad", "functional.hessian"])
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
        with pytest.raises(RuntimeError, match=IF_CUT[name]):
            CASES[name][0](Rank(mesh, "full_shard", "unshard"))

    run_simulated(main, WORLD)


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
    ("old", "new", "loop", "known"),
    [
        ("wrapper_fn", "jacobian_fn", "jacrev", True),
        ("wrapper_fn", "jacobian_fn", "jacfwd", True),
        ("push_jvp", "push", "jacfwd", True),
        ("_vjp_with_argnums", "_vjp_of", "jacrev", False),
        ("_jvp_with_argnums", "_jvp_of", "jacfwd", False),
        ("flat_primals", "flat_inputs", "jacfwd", False),
        ("level", "depth", "jacrev", False),
        ("level", "depth", "jacfwd", False),
    ],
)
@pytest.mark.usefixtures("codes_as_before")
def test_a_release_of_torch_with_other_names_gets_an_error_and_no_wrong_numbers(monkeypatch, old, new, loop, known):
    renamed(monkeypatch, old, new)
    unknown = f"torch.func.{loop} .* torch {torch.__version__.split('+')[0]}.* unknown"

    def main(mesh):
        _, f, shards = by_hand(mesh, {"w": torch.arange(4.0)}, lambda leaves: leaves["w"].square().sum())
        with pytest.raises(RuntimeError, match="would mix (rows|columns)" if known else unknown):
            getattr(torch.func, loop)(f if loop == "jacfwd" else torch.func.grad(f))(shards[""])

    fs.simulate(main, 2)
