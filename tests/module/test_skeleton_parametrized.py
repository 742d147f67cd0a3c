"""Parametrized modules under ``parametrize.cached``, whose table belongs to the whole program."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import funcshard as fs

x = torch.randn(2, 3, dtype=torch.float64)


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).T


class View(nn.Module):
    def forward(self, w):
        return w.view(w.shape)


class Twice(nn.Module):
    """A network that calls its parametrized layer twice."""

    def __init__(self, parametrization, *, cached):
        super().__init__()
        self.a, self.b = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(2))
        parametrize.register_parametrization(self.a, "weight", parametrization)
        self.cached = cached

    def forward(self, x):
        if not self.cached:
            return self.a(self.b(self.a(x)))
        with parametrize.cached():
            return self.a(self.b(self.a(x)))


def made(parametrization=Symmetric, *, cached):
    torch.manual_seed(0)
    return Twice(parametrization(), cached=cached)


def test_calls_of_two_trees_inside_cached_do_not_share_tensors():
    net = made(cached=False)
    apply, params, buffers = fs.make_functional(net)
    other = {name: value * 2 for name, value in params.items()}
    alone = [apply(each, buffers, x) for each in (params, other)]
    with parametrize.cached():
        together = [apply(each, buffers, x) for each in (params, other)]
        assert torch.equal(net(x), together[0])
    assert all(map(torch.equal, together, alone))


def test_a_tensor_is_computed_once_in_a_call_inside_cached():
    class Counts(Symmetric):
        computed = 0

        def forward(self, w):
            Counts.computed += 1
            return super().forward(w)

    for cached, times in ((True, 1), (False, 2)):
        apply, params, buffers = fs.make_functional(made(Counts, cached=cached))
        Counts.computed = 0
        for calls in (1, 2):
            apply(params, buffers, x)
            assert Counts.computed == times * calls


@pytest.mark.parametrize("parametrization", [Symmetric, View])
@pytest.mark.parametrize(
    ("units", "remat"), [([], []), (["a", "b"], []), (["a", "b"], ["a"]), (["a.parametrizations.weight"], [])]
)
@pytest.mark.parametrize("whole_step", [False, True])
def test_sharded_gradients_inside_cached_are_the_modules(parametrization, units, remat, whole_step):
    net = made(parametrization, cached=not whole_step)
    loss = net(x).square().mean()
    grads = torch.autograd.grad(loss, list(net.parameters()))
    apply, params, buffers = fs.make_functional(net)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=units)
        sharded = fs.fully_shard(apply, plan, mesh, remat=remat)
        step = fs.value_and_grad(lambda shards: sharded(shards, buffers, x).square().mean(), mesh=mesh)
        shards, found = fs.shard(params, plan, mesh), []
        for _ in range(3):
            if whole_step:
                with parametrize.cached():
                    value, grads = step(shards)
            else:
                value, grads = step(shards)
            found.append((value, fs.to_state_dict(grads, plan, mesh)))
        return found

    for rank in fs.simulate(main, world_size=2):
        for value, state_dict in rank:
            torch.testing.assert_close(value, loss)
            for (name, _), grad in zip(net.named_parameters(), grads, strict=True):
                torch.testing.assert_close(state_dict[name], grad)


def test_a_parametrized_module_keeps_its_class_for_torch():
    seen = []

    class Asks(Twice):
        def forward(self, x):
            seen.append((parametrize.is_parametrized(self.a, "weight"), parametrize.type_before_parametrizations(self.a)))
            return super().forward(x)

    apply, params, buffers = fs.make_functional(Asks(Symmetric(), cached=False))
    apply(params, buffers, x)
    assert seen == [(True, nn.Linear)]
