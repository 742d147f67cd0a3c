"""Adapters on a frozen model: a unit has one flat buffer of frozen leaves and one of trainable leaves."""

from __future__ import annotations

import optree
import torch
from torch import nn

import funcshard as fs
from tests.core.units import of_module
from tests.module.law import Runs


def adapted() -> nn.Module:
    """Return a frozen linear layer plus the trainable product of two thin ones."""
    thin = {"a": nn.Linear(5, 2, bias=False), "b": nn.Linear(2, 5, bias=False)}
    return Runs(lambda net, x: net.base(x) + net.b(net.a(x)), base=nn.Linear(5, 5).requires_grad_(False), **thin)


def test_frozen_leaves_have_no_gradient_no_reduction_and_no_optimizer_state() -> None:
    def main(mesh: fs.Mesh) -> None:
        # Two adapted layers on a frozen one, which the root owns.
        net = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Sequential(adapted(), adapted()))
        plan, sharded, shards = of_module(mesh, net, ["1.*"])
        loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()  # noqa: E731
        for _ in range(2):
            with fs.record_events() as events:
                _, grads = fs.value_and_grad(loss_fn)(shards, {}, torch.ones(3, 5))
        for name, unit in plan.units.items():
            assert [buffer.key for buffer in unit.buffers] == ["float32"] * bool(name) + ["float32.frozen"]
            assert grads[name]["float32.frozen"] is None
            assert not name or grads[name]["float32"].abs().sum() > 0
        reduced = [(event.unit, event.buffer) for event in events if event.kind != "all_gather"]
        assert reduced == [("1.1", "float32"), ("1.0", "float32")]
        step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW), plan, mesh)
        state, _ = step(step.init(shards, {}), torch.ones(3, 5))
        moments = sum(x.numel() for x in optree.tree_leaves(state.opt_state) if isinstance(x, torch.Tensor) and x.ndim)
        trainable = sum(b.shard_numel for unit in plan.unit_list for b in unit.buffers if b.trainable)
        assert moments == 2 * trainable > 0
        after = fs.gather(state.shards, plan, mesh)
        moved = {name for name, value in net.named_parameters() if not torch.equal(after[name], value)}
        assert moved == {name for name in after if ".a." in name or ".b." in name}

    torch.manual_seed(5)
    fs.simulate(main, 2)
