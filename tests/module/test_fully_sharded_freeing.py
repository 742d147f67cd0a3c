"""Units that are freed, or stay gathered, as the plan says: the same bits, the predicted collectives, no more memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.ranks import run_simulated
from tests.storages import Log

WIDTH = 6


class Net(nn.Module):
    """Two blocks between two uses of a weight of the root."""

    def __init__(self, log):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.weight = nn.Parameter(torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH))
        self.log = log

    def forward(self, x):
        self.log(self.weight)
        x = torch.tanh(x @ self.weight)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x @ self.weight.T


def made():
    log = Log()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return log, *fs.make_functional(Net(log))


def batch_of(mesh, rows=4):
    return torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH).roll(mesh.rank, 0)


def events_and_grads(mesh, functional, predicted=None, **options):
    """Return the whole gradients and the events of a second step, after checking the events."""
    apply, params, buffers = functional
    plan = fs.make_plan(params, mesh, units=["blocks.*"], **options)
    sharded = fs.fully_shard(apply, plan, mesh)
    shards = fs.shard(params, plan, mesh)
    for _ in range(2):  # the first call learns the order
        with fs.record_events() as events:
            loss, grads = fs.value_and_grad(lambda s: sharded(s, buffers, batch_of(mesh)).square().mean())(shards)
    assert tuple(events) == fs.predict_events(plan, sharded.schedule, **(predicted or {}))
    return fs.gather(grads, plan, mesh), loss, tuple(events)


def gathers_of(events, unit):
    return sum(event.kind == "all_gather" and event.unit == unit for event in events)


@pytest.mark.parametrize(("option", "gathers"), [(None, (1, 2)), (True, (2, 2)), (False, (1, 1))])
@pytest.mark.parametrize("world", [2, {"replicate": 2, "shard": 2}], ids=str)
def test_the_caller_decides_whether_root_and_units_are_freed_after_forward(option, gathers, world):
    _, *functional = made()

    def main(mesh):
        plain = events_and_grads(mesh, functional)
        chosen = events_and_grads(mesh, functional, reshard_after_forward=option)
        torch.testing.assert_close(chosen[:2], plain[:2], rtol=0, atol=0)
        return gathers_of(chosen[2], ""), gathers_of(chosen[2], "blocks.1")

    assert set(fs.simulate(main, world)) == {gathers}


@pytest.mark.parametrize(("option", "alive"), [(True, 0), (False, 2)])
def test_a_root_that_is_freed_takes_no_memory_between_forward_and_backward(option, alive):
    log, apply, params, buffers = made()

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["blocks.*"], reshard_after_forward=option)
        sharded = fs.fully_shard(apply, plan, mesh)
        mesh.shard.all_gather_text("")
        shards = {n: {k: s.requires_grad_() for k, s in unit.items()} for n, unit in fs.shard(params, plan, mesh).items()}
        loss = sharded(shards, buffers, batch_of(mesh)).square().mean()
        mesh.shard.all_gather_text("")
        held = len({ref.cdata for ref in log if not ref.expired()})
        mesh.shard.all_gather_text("")
        loss.backward()
        return held

    assert set(run_simulated(main, 2)) == {alive}


class TwoPaths(nn.Module):
    """A block that calls one linear layer by two names, and logs its weight."""

    def __init__(self, log):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleDict({"again": self.first})
        self.log = log

    def forward(self, x):
        self.log(self.first.weight)
        return torch.tanh(self.inner["again"](torch.tanh(checkpoint(self.first, x, use_reentrant=False))))


class ReadsABlock(nn.Module):
    """Blocks, one of whose parameters the root reads if it is asked to."""

    def __init__(self, log):
        super().__init__()
        self.blocks = nn.ModuleList(TwoPaths(log) for _ in range(3))

    def forward(self, x, reads=False):
        for block in self.blocks:
            x = block(x)
        return x + self.blocks[0].first.weight.sum() if reads else x


@pytest.mark.parametrize("grad", [True, False])
def test_a_module_at_two_paths_of_a_unit_is_freed_after_forward_and_cannot_be_read_outside(grad):
    log = Log()
    apply, params, buffers = fs.make_functional(ReadsABlock(log))
    whole = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    expected = torch.autograd.grad(apply(whole, buffers, torch.ones(4, WIDTH)).square().mean(), [*whole.values()])
    log.clear()

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        sharded = fs.fully_shard(apply, plan, mesh)
        shards, batch = fs.shard(params, plan, mesh), torch.ones(4, WIDTH)
        with torch.set_grad_enabled(grad):
            kept = sharded(shards, buffers, batch)
            mesh.shard.all_gather_text("")
            alive = len({ref.cdata for ref in log if not ref.expired()})
            mesh.shard.all_gather_text("")
            with pytest.raises(ValueError, match=r"'blocks\.0\.first\.weight' was read"):
                sharded(shards, buffers, batch, reads=True)
        del kept
        if grad:
            grads = fs.value_and_grad(lambda s: sharded(s, buffers, batch).square().mean())(shards)[1]
            torch.testing.assert_close(fs.gather(grads, plan, mesh), dict(zip(whole, expected, strict=True)))
        return alive

    assert run_simulated(main, 2) == [0, 0]
