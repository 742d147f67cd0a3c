"""Adapters on a frozen model: a unit has one flat buffer of frozen leaves and one of trainable leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.models import SUBJECTS, part
from tests.ranks import run_ranks, run_simulated

STEPS, RANK = 3, 2
SUBJECT = SUBJECTS["llama"]
ADAMW = {"lr": 1e-2, "eps": 1e-3}


class Adapted(nn.Module):
    """A frozen linear layer plus the trainable product of two thin ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, RANK, bias=False), nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


def adapted_llama() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = SUBJECT.build().requires_grad_(False)
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj, attention.v_proj = Adapted(attention.q_proj), Adapted(attention.v_proj)
        return model


def adapters_of(model: nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def prepared(mesh: fs.Mesh) -> Any:
    apply, params, buffers = fs.make_functional(adapted_llama())
    plan = fs.make_plan(params, mesh, units=SUBJECT.units)
    sharded = fs.fully_shard(apply, plan, mesh)
    loss_fn = lambda s, b, batch: SUBJECT.loss(sharded(s, b, **batch["inputs"]), batch)  # noqa: E731
    return plan, sharded, fs.shard(params, plan, mesh), buffers, loss_fn


def batch_of(mesh: fs.Mesh, step: int) -> Any:
    return part(SUBJECT.make_batch(2 * mesh.world_size, step), mesh.rank, mesh.world_size)


def train(mesh: fs.Mesh) -> Any:
    plan, sharded, shards, buffers, loss_fn = prepared(mesh)
    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.AdamW, **ADAMW), plan, mesh)
    state = step.init(shards, buffers)
    losses = []
    for i in range(STEPS):
        with fs.record_events() as events:
            state, metrics = step(state, batch_of(mesh, i))
        losses.append(metrics["loss"].item())
    held = [t for t in torch.utils._pytree.tree_leaves(state.opt_state) if isinstance(t, torch.Tensor) and t.ndim]
    units = [event for event in events if event.unit is not None]
    return losses, fs.gather(state.shards, plan, mesh), units, plan, sharded.schedule, sum(t.numel() for t in held)


@pytest.mark.slow
@pytest.mark.parametrize("run", [run_simulated, run_ranks])
def test_training_adapters_equals_the_unsharded_model_and_leaves_the_rest(run: Any) -> None:
    model = adapted_llama()
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer, expected_losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW), []
    for i in range(STEPS):
        optimizer.zero_grad()
        batch = SUBJECT.make_batch(4, i)
        loss = SUBJECT.loss(model(**batch["inputs"]), batch)
        loss.backward()
        optimizer.step()
        expected_losses.append(loss.item())
    trained = adapters_of(model)
    for losses, params, *_ in run(train, 2):
        torch.testing.assert_close(losses, expected_losses)
        torch.testing.assert_close(params, dict(model.named_parameters()))
        assert {name for name in start if not torch.equal(params[name], start[name])} == trained
        assert len(trained) == 8


@pytest.mark.slow
def test_frozen_leaves_have_no_gradient_no_reduction_and_no_optimizer_state() -> None:
    def main(mesh: fs.Mesh) -> Any:
        plan, _, shards, buffers, loss_fn = prepared(mesh)
        _, grads = fs.value_and_grad(loss_fn)(shards, buffers, batch_of(mesh, 0))
        return grads, plan, train(mesh)

    for grads, plan, (_, _, events, _, schedule, moments) in fs.simulate(main, 2):
        layers = [name for name in plan.units if name]
        assert len(layers) == 2
        for name, unit in plan.units.items():
            wanted = ["float32", "float32.frozen"] if name else ["float32.frozen"]
            assert [buffer.key for buffer in unit.buffers] == wanted
            assert grads[name]["float32.frozen"] is None
            assert not name or grads[name]["float32"].abs().sum() > 0
        reduced = [(event.unit, event.buffer) for event in events if event.kind != "all_gather"]
        assert reduced == [(name, "float32") for name in reversed(layers)]
        assert tuple(events) == fs.predict_events(plan, schedule)
        trainable = sum(b.shard_numel for unit in plan.unit_list for b in unit.buffers if b.trainable)
        assert moments == 2 * trainable


def test_the_printed_plan_tells_frozen_from_trainable_buffers() -> None:
    _, params, _ = fs.make_functional(adapted_llama())
    plan = fs.make_plan(params, 2, units=SUBJECT.units)
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in str(plan).splitlines()]
    named = {(row[0], row[1]): row for row in rows if len(row) > 2}
    first = plan.units["model.layers.0"]
    for buffer in first.buffers:
        row = named["2 × model.layers.*", buffer.key]
        assert row[2:4] == [str(len(buffer.leaves)), f"{buffer.numel:,}"]
    assert [b.key for b in first.buffers] == ["float32", "float32.frozen"]
    assert {leaf.path.rsplit(".", 2)[1] for leaf in first.buffers[0].leaves} == {"a", "b"}
