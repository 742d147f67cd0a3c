"""Parametrized modules under ``parametrize.cached``, whose table belongs to the whole program."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import funcshard as fs
from tests.module.law import Runs, check_equal

x = torch.randn(2, 3, dtype=torch.float64)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


class View(nn.Module):
    def forward(self, w):
        return w.view(w.shape)


def made(parametrization=Symmetric, *, cached):
    """Return a network that calls its parametrized layer twice."""

    def run(net, x):
        assert parametrize.type_before_parametrizations(net.a) is nn.Linear  # the class that torch made stays
        with parametrize.cached() if cached else contextlib.nullcontext():
            return net.a(net.b(net.a(x)))

    torch.manual_seed(0)
    a, b = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))
    return Runs(run, a=parametrize.register_parametrization(a, "weight", parametrization()), b=b)


def test_calls_of_two_trees_inside_cached_do_not_share_tensors():
    net = made(cached=False)
    apply, params, buffers = fs.make_functional(net)
    other = {name: value * 2 for name, value in params.items()}
    alone = [apply(each, buffers, x) for each in (params, other)]
    with parametrize.cached():
        together = [apply(each, buffers, x) for each in (params, other)]
        assert torch.equal(net(x), together[0])
    assert all(map(torch.equal, together, alone))


def test_a_call_inside_cached_computes_a_tensor_once():
    seen = []

    class Counts(Symmetric):
        def forward(self, w):
            seen.append(w)
            return super().forward(w)

    for cached, times in ((True, 1), (False, 2)):
        apply, params, buffers = fs.make_functional(made(Counts, cached=cached))
        seen.clear()
        apply(params, buffers, x)
        assert len(seen) == times


def cached_calls(loss_fn):
    evaluate = fs.value_and_grad(loss_fn)

    def call(*args):
        with parametrize.cached():
            return evaluate(*args)

    return call


UNITS = [([], []), (["a", "b"], []), (["a", "b"], ["a"]), (["a.parametrizations.weight"], [])]


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("parametrization", [Symmetric, View])
@pytest.mark.parametrize(("units", "remat"), UNITS)
@pytest.mark.parametrize("evaluate", [fs.value_and_grad, cached_calls])
def test_sharded_gradients_inside_cached_are_the_modules(parametrization, units, remat, evaluate):
    net = made(parametrization, cached=evaluate is not cached_calls)
    check_equal(net, x, units, how={"remat": remat}, evaluate=evaluate)
