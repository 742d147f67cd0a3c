"""Frozen weights stored small: the bits of the decoded weights, and bytes that nothing encodes again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import funcshard as fs
from tests.core.units import same_bits
from tests.jobs import decoded
from tests.ranks import run_ranks, run_simulated

PAIR = fs.Storage(lambda x: (x.bfloat16(), x[:, :1] * 0), lambda low, zero: low.double() + zero, name="pair")
SMALL: Mapping[str, fs.Storage] = {"nf4": fs.nf4(), "int8": fs.int8(32), "fp8": fs.fp8(), "pair": PAIR}
STORAGES = {**SMALL, "as it is": fs.Storage(torch.clone, torch.clone, name="as it is")}
BF16 = fs.MixedPrecision(param_dtype=torch.bfloat16)
UNITS, X, Y = ["0", "2", "4"], torch.linspace(-1, 1, 8 * 32).view(8, 32).sin(), torch.linspace(0, 1, 8).view(8, 1)


class Lora(nn.Module):
    """A frozen linear layer plus a trained matrix of low rank."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, inputs) / 4), nn.Parameter(torch.randn(outputs, 4) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.T @ self.b.T


def net(storage: fs.Storage | None = None) -> nn.Module:
    """Return adapters on a frozen model; with a storage, its weights are what this decodes to."""
    torch.manual_seed(0)
    model = nn.Sequential(Lora(32, 48), nn.Tanh(), Lora(48, 32), nn.Tanh(), Lora(32, 16))
    if storage is not None:
        for name, leaf in model.named_parameters():
            leaf.data = decoded(leaf.data, storage) if "base.weight" in name else leaf.data
    return model


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().mean()


def train(mesh: fs.Mesh, model: nn.Module, name: str, options: Any = (), folder: Path | None = None) -> Any:
    """Train for three steps; return losses, parameters, and whether the collectives were those predicted."""
    apply, params, buffers = fs.make_functional(model)
    plan_options = {"units": UNITS, "bucket_bytes": 0, **dict(options)}
    remat = plan_options.pop("remat", False)
    plan = fs.make_plan(params, mesh, storage={"*.base.weight": STORAGES[name]}, **plan_options)
    sharded = fs.fully_shard(apply, plan, mesh, remat=remat)
    step = fs.make_train_step(
        lambda shards, buffers, batch: loss_of(sharded(shards, buffers, batch[0]), batch[1]),
        fs.torch_optimizer(torch.optim.AdamW, lr=1e-2), plan, mesh,
    )  # fmt: skip
    state, mine, losses = step.init(fs.shard(params, plan, mesh), buffers), slice(mesh.rank, None, mesh.world_size), []
    for number in range(3):
        if folder is not None and number == 2:
            state = fs.restore(fs.save(folder / "job", state, plan, mesh).path, plan, mesh)
        with fs.record_events() as events:
            state, metrics = step(state, (X[mine], Y[mine]))
        losses.append(metrics["loss"].item())
    predicted = fs.predict_events(plan, sharded.schedule, recomputed=UNITS if remat else ())
    of_units = tuple(event for event in events if event.unit is not None)
    return losses, fs.to_state_dict(state.shards, plan, mesh), of_units == predicted


def unsharded(model: nn.Module, ranks: int) -> Any:
    """Train the plain module on the batches of all ranks, one after another."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        rank_losses = [loss_of(model(X[rank::ranks]), Y[rank::ranks]) for rank in range(ranks)]
        for loss in rank_losses:
            loss.backward()
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad /= ranks
        optimizer.step()
        losses.append((sum(rank_losses) / ranks).item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("ranks", "runner"), [(1, run_simulated), (2, run_simulated), (4, run_simulated), (2, run_ranks)])
def test_a_job_has_the_bits_of_the_unsharded_module_with_the_decoded_weights(ranks: int, runner: Any, name: str) -> None:
    losses, params = unsharded(net(SMALL[name]), ranks)
    for found in runner(train, ranks, net(), name):
        same_bits(found, (losses, params, True))


OPTIONS: Mapping[str, tuple[int, Any]] = {
    "3 ranks": (3, {}),
    "slices": (4, {"reshard_after_forward": 2}),
    "copies": (2, {"strategy": "no_shard"}),
    "bfloat16": (2, {"precision": BF16}),
    "remat": (2, {"remat": True, "strategy": "shard_grad_op"}),
    "groups": (2, {"units": [UNITS]}),
    "local": (2, {"local": {"2": "replicate"}}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_change_nothing_and_a_restored_job_continues(case: str, tmp_path: Path) -> None:
    ranks, options = OPTIONS[case]
    packed = run_simulated(train, ranks, net(), "nf4", options, tmp_path)
    same_bits(packed, run_simulated(train, ranks, net(fs.nf4()), "as it is", options))
    assert packed[0][2]
