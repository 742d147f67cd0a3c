"""Units that are freed, or stay gathered, as the plan says: the same bits, the predicted collectives, no more memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.module.law import Runs, calls_on, gathers, held, plain_call, same_bits, sharded_call
from tests.ranks import on_ranks
from tests.storages import Log

WIDTH = 6


def forward(m, x):
    """Run two blocks between two uses of a weight of the root."""
    m.log(m.weight)
    x = torch.tanh(x @ m.weight)
    for block in m.blocks:
        x = torch.tanh(block(x))
    return x @ m.weight.T


def made():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
        net = Runs(forward, blocks=blocks, weight=weight, log=Log())
        return net.log, *fs.make_functional(net)


def batch(rank):
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).roll(rank, 0)


@pytest.mark.parametrize(("option", "times"), [(None, (1, 2)), (True, (2, 2)), (False, (1, 1))])
def test_the_caller_decides_whether_root_and_units_are_freed_after_forward(option, times):
    functional = made()[1:]
    chosen, plain = (
        calls_on(2, functional, batch, ["blocks.*"], **each) for each in ({"reshard_after_forward": option}, {})
    )
    for call, other in zip(chosen, plain, strict=True):
        same_bits(call[:2], other[:2])
        assert call.events == call.predicted()
        assert (gathers(call.events, ""), gathers(call.events, "blocks.1")) == times


@pytest.mark.parametrize(("option", "alive"), [(True, 0), (False, 1)])
@on_ranks(2)
def test_a_root_that_is_freed_takes_no_memory_between_forward_and_backward(mesh, option, alive):
    (log, *functional), found = made(), []

    def program(model, x):
        loss = model(x).square().mean()
        found.append(held(mesh, log))
        return loss

    sharded_call(mesh, functional, batch, ["blocks.*"], program=program, calls=1, reshard_after_forward=option)
    assert found == [alive]


def two_paths(log):
    """Return a block that calls one linear layer by two names, and logs its weight."""

    def forward(m, x):
        log(m.first.weight)
        return torch.tanh(m.inner["again"](torch.tanh(checkpoint(m.first, x, use_reentrant=False))))

    first = nn.Linear(WIDTH, WIDTH)
    return Runs(forward, first=first, inner=nn.ModuleDict({"again": first}))


@pytest.mark.parametrize("grad", [True, False])
def test_a_module_at_two_paths_of_a_unit_is_freed_after_forward_and_cannot_be_read_outside(grad):
    class Reads(nn.Sequential):
        def forward(self, x, reads=False):
            out = super().forward(x)
            return out + self[0].inner["again"].weight.sum() if reads else out

    def program(model, x):
        with torch.set_grad_enabled(grad):
            kept = model(x)
            alive.append(held(model.func.mesh, log))
            with pytest.raises(ValueError, match=r"'0\.first\.weight' was read"):
                model(x, reads=True)
        del kept
        return model(x).square().mean()

    log, alive = Log(), []
    net = Reads(*(two_paths(log) for _ in range(3)))
    functional, (_, grads) = fs.make_functional(net), plain_call(net, batch, 2)
    log.clear()
    for call in calls_on(2, functional, batch, ["*"], program=program, calls=1):
        torch.testing.assert_close(call.grads, grads)
    assert alive == [0, 0]
