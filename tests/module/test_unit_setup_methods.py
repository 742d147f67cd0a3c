"""Methods of a unit's module besides ``forward`` gather the unit if ``fully_shard`` is told their names."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.module.law import Runs, calls_on, check_equal, gathers, outputs_on, plain_call, same_bits, sharded_call, squares
from tests.ranks import run_ranks

WIDTH = 4


class Coder(nn.Module):
    """An autoencoder whose methods share a weight."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def encode(self, x, *, scale=1.0):
        return torch.tanh(self.inner(x)) * scale

    def decode(self, x):
        return self.outer(x) @ self.inner.weight

    def both(self, x):
        return self.decode(self.encode(x)) + self(x)

    def again(self, x):
        return checkpoint(self.decode, checkpoint(self.encode, x, use_reentrant=False), use_reentrant=False)

    def forward(self, x):
        return self.decode(self.encode(x))

    @staticmethod
    def size():
        return WIDTH

    @property
    def width(self):
        return WIDTH


def made(way):
    """Return a module that calls methods of its coder in some way, between two layers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        call = WAYS[way][0] if isinstance(way, str) else way
        return Runs(lambda m, x: m.head(call(m.coder, x)), coder=Coder(), head=nn.Linear(WIDTH, 1))


WAYS = {  # name -> the calls, and how many times they gather the unit in forward
    "one method": (lambda coder, x: coder.encode(x), 1),
    "one after another": (lambda coder, x: coder.decode(coder.encode(x, scale=0.5)), 2),
    "a method and forward": (lambda coder, x: coder(x) + coder.encode(x), 2),
    "a method of methods and of forward": (lambda coder, x: coder.both(x), 1),
    "checkpoints inside": (lambda coder, x: coder.again(x), 1),
    "a checkpoint around": (lambda coder, x: checkpoint(coder.both, x, use_reentrant=False), 1),
}
METHODS = {"coder": ["encode", "decode", "both", "again"]}
OPTIONS = {
    "full_shard": {},
    "shard_grad_op": {"strategy": "shard_grad_op"},
    "remat": {"how": {"remat": ["coder"]}},
    "no_shard": {"strategy": "no_shard"},
}


def batch(rank):
    return torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH).roll(rank, 0).requires_grad_()


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
def test_methods_give_the_unsharded_gradients_and_gather_as_predicted(way, name):
    options = {**OPTIONS[name]}
    how = {"methods": METHODS, **options.pop("how", {})}
    calls = check_equal(made(way), batch, ["coder"], how=how, **options)
    recomputed = ["coder"] if name == "remat" or "checkpoint" in way else []
    for call in calls:
        if way != "checkpoints inside":  # where backward needs no leaf outside of checkpoints
            assert call.events == call.predicted(recomputed=recomputed)


@pytest.mark.parametrize("way", WAYS)
def test_each_call_of_a_method_from_outside_gathers_the_unit_once(way):
    def gathered(model, x):
        with torch.no_grad(), fs.record_events() as events:
            model(x)
        return gathers(events, "coder")

    functional = fs.make_functional(made(way))
    assert outputs_on(2, functional, batch, ["coder"], program=gathered, how={"methods": METHODS}) == [WAYS[way][1]] * 2


def test_without_its_name_a_method_that_reads_a_leaf_is_an_error_that_says_so():
    with pytest.raises(ValueError, match=r"'coder\.inner\.weight' was read .* name the method in fully_shard\(.*, methods="):
        check_equal(made("one method"), batch, ["coder"])


@pytest.mark.parametrize("precision", [None, fs.MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True)])
def test_a_method_of_the_whole_model_calls_methods_of_units_which_cast_as_forward_does(precision):
    net, encoded = made("one method"), lambda m, x: m.coder.encode(x, scale=2.0)
    apply, params, buffers = fs.make_functional(net)
    units = fs.wrap.Units(["coder"], {"coder": {"precision": precision}})
    functional, how = (apply.method(encoded), params, buffers), {"methods": {"coder": ["encode"]}}
    for rank, found in enumerate(outputs_on(2, functional, batch, units, how=how)):
        expected = encoded(net, batch(rank))
        torch.testing.assert_close(found, expected.bfloat16() if precision else expected, rtol=0.05, atol=0.05)


def test_methods_run_under_transforms_and_beside_compiled_forwards():
    net = made("a method and forward")
    evaluate = lambda loss_fn: lambda *args: (torch.zeros(()), torch.func.grad(loss_fn)(*args))  # noqa: E731
    how = {"methods": METHODS, "compiler": lambda f: f}
    expected = plain_call(net, batch, 2)[1]
    for call in calls_on(2, fs.make_functional(net), batch, ["coder"], how=how, evaluate=evaluate):
        # torch.func adds over ranks
        torch.testing.assert_close(call.grads, {name: 2 * grad for name, grad in expected.items()})


def test_methods_of_the_modules_of_a_group_gather_the_group_once():
    net = Runs(lambda m, x: m.second.decode(m.first.encode(x)), first=Coder(), second=Coder())
    how = {"methods": {"first": ["encode"], "second": ["decode"]}}
    for call in check_equal(net, batch, [["first", "second"]], how=how):
        assert gathers(call.events, "first+second") == 2  # once forward, once backward


REFUSED = [
    (["encode"], TypeError, r"must be a dictionary from units to lists of method names; found \['encode'\]"),
    ({"coder": 1}, TypeError, r"the methods of 'coder' must be a list of names; found 1"),
    ({"": ["encode"]}, ValueError, r"found ''; .* call fully_shard\(apply\.method\(name\), plan, mesh\)"),
    ({"head": ["forward"]}, ValueError, r"must name units of the plan .*; found 'head'; its units are \['coder'\]: make"),
    ({"coder": ["encodes"]}, ValueError, r"found 'encodes': leave it out"),
    ({"coder": ["forward"]}, ValueError, r"besides forward and those that Python calls; found 'forward'"),
    ({"coder": ["size"]}, ValueError, r"found 'size'"),
    ({"coder": ["width"]}, ValueError, r"found 'width'"),
]


@pytest.mark.parametrize(("methods", "error", "message"), REFUSED)
def test_what_is_no_method_of_a_unit_is_refused(methods, error, message):
    apply, params, _ = fs.make_functional(made("one method"))
    plan = fs.make_plan(params, 1, units=["coder"])
    with pytest.raises(error, match=message):
        fs.fully_shard(apply, plan, fs.Mesh(), methods=methods)


class Halves(Coder):
    forward = nn.Module.forward  # it has none of its own


def test_a_unit_without_a_forward_runs_by_its_methods_and_is_refused_without_them():
    net = made("one after another")
    net.coder = Halves()
    for call in check_equal(net, batch, ["coder"], how={"methods": {"coder": ["encode", "decode"]}}):
        assert call.events == call.predicted()
    for methods in (None, {"coder": []}):
        with pytest.raises(ValueError, match=r"is a Halves, which has no forward of its own; .* in fully_shard\(methods="):
            check_equal(net, batch, ["coder"], how={"methods": methods})


def beside_fsdp2(mesh):
    """Check that the gradients of a loss of two methods are those of FSDP2."""
    net = made("one after another")
    how, evaluate = {"methods": METHODS}, functools.partial(fs.accumulate, micro_batches=1, reduce="once")
    ours = sharded_call(mesh, fs.make_functional(net), batch, ["coder"], how=how, evaluate=evaluate, calls=1).grads
    for part in (net.coder, net):
        fsdp2(part)
    for name in ("encode", "decode"):
        register_fsdp_forward_method(net.coder, name)
    squares(net, batch(mesh.rank)).backward()
    same_bits(ours, {name: p.grad.full_tensor() for name, p in net.named_parameters()})


@pytest.mark.slow
def test_methods_have_the_gradients_of_register_fsdp_forward_method_to_the_bit():
    run_ranks(beside_fsdp2, 2)
