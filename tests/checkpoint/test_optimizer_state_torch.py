"""Training moves from FSDP2 to shards and back with its optimizer state, and goes on unchanged."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import funcshard as fs
from tests.ranks import run_ranks

FULL = StateDictOptions(full_state_dict=True)
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}
NO_DECAY = {"paths": ["**.bias"], "weight_decay": 0.0}
DATA = torch.randn(24, 6, generator=torch.Generator().manual_seed(3))


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))


def batch(step: int, rank: int) -> torch.Tensor:
    return DATA.roll(step, 0)[:12].chunk(2)[rank]


class Theirs:
    """A module under FSDP2, with an AdamW that does not decay biases."""

    def __init__(self) -> None:
        self.net = build()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (self.net[0], self.net[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)
        weights = [p for name, p in self.net.named_parameters() if name.endswith("weight")]
        biases = [p for name, p in self.net.named_parameters() if name.endswith("bias")]
        self.optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], **OPTIONS)

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            self.optimizer.zero_grad()
            self.net(batch(step, dist.get_rank())).square().mean().backward()
            self.optimizer.step()

    def params(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in get_model_state_dict(self.net, options=FULL).items()}


class Ours:
    """The same module and optimizer on shards."""

    def __init__(self, mesh: fs.Mesh) -> None:
        self.apply, params, self.buffers = fs.make_functional(build())
        self.mesh, self.plan = mesh, fs.make_plan(params, mesh, units=["0", "2"])
        self.optimizer = fs.torch_optimizer(torch.optim.AdamW, groups=[NO_DECAY], plan=self.plan, mesh=mesh, **OPTIONS)
        sharded = fs.fully_shard(self.apply, self.plan, mesh)
        loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()  # noqa: E731
        self.step = fs.make_train_step(loss_fn, self.optimizer, self.plan, mesh)
        self.state = self.step.init(fs.shard(params, self.plan, mesh), self.buffers)

    def train(self, begin: int, end: int) -> None:
        for step in range(begin, end):
            self.state, _ = self.step(self.state, batch(step, self.mesh.rank))

    def params(self) -> dict[str, Any]:
        return fs.to_state_dict(self.state.shards, self.plan, self.mesh)


def close(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def over_and_back(mesh: fs.Mesh, full: bool) -> None:
    theirs, ours = Theirs(), Ours(mesh)
    theirs.train(0, 2)
    options = StateDictOptions(full_state_dict=full)
    params, state = (
        get_model_state_dict(theirs.net, options=options),
        get_optimizer_state_dict(theirs.net, theirs.optimizer, options=options),
    )
    assert full != any(hasattr(value, "full_tensor") for value in state["state"]["0.weight"].values())
    ours.state = ours.state._replace(
        shards=fs.from_state_dict(params, ours.plan, mesh),
        opt_state=fs.optimizer_from_state_dict(state, ours.optimizer, ours.plan, mesh),
    )
    ours.train(2, 4)
    theirs.train(2, 4)
    close(ours.params(), theirs.params())
    forms = [{}, {"rank0_only": True, "offload": True}]
    into = [FULL, StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)]
    for form, how in zip(forms, into, strict=True):
        again = Theirs()
        params = fs.to_state_dict(ours.state.shards, ours.plan, mesh, **form)
        state = fs.optimizer_to_state_dict(ours.state.opt_state, ours.optimizer, ours.plan, mesh, **form)
        set_model_state_dict(again.net, params, options=how)
        set_optimizer_state_dict(again.net, again.optimizer, state, options=how)
        again.train(4, 5)
        if form == {}:
            theirs.train(4, 5)
        close(again.params(), theirs.params())


@pytest.mark.slow
@pytest.mark.parametrize("full", [True, False], ids=["full", "DTensors"])
def test_from_fsdp2_and_back(full: bool) -> None:
    run_ranks(over_and_back, 2, full)
