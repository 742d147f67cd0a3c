"""The simulated peak of models that call a unit several times in a step, against the measured one."""

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import funcshard as fs
from benchmarks.fake_ranks import fake_mesh
from benchmarks.storages import Storages
from funcshard.estimate import Runtime

WIDTH, TOKENS = 32, 8
MOST = 64  # bytes: the optimizer's counts of steps, and scalars


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


# Which block each call of a model runs.
CALLS = {"in depth": (0, 1, 2, 0, 1, 2), "in a row": (0, 0, 1, 1, 2, 2), "at the ends": (0, 1, 2, 0)}


class Net(nn.Module):
    def __init__(self, calls):
        super().__init__()
        self.first, self.head, self.calls = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 7), calls
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for number in self.calls:
            x = self.blocks[number](x)
        return self.head(x)


def loss_of(out, y):
    return F.cross_entropy(out.flatten(0, 1).float(), y.flatten())


def measured(apply, params, buffers, plan, mesh, remat, batch):
    """The most bytes of storages in the second step of one rank."""
    sharded = fs.fully_shard(apply, plan, mesh, remat=remat)
    optimizer = fs.torch_optimizer(torch.optim.AdamW, lr=1e-3, foreach=False)
    step = fs.make_train_step(lambda s, b, batch: loss_of(sharded(s, b, batch[0]), batch[1]), optimizer, plan, mesh)
    shards = {u.name: {b.key: torch.full((b.shard_numel,), 0.01) for b in u.buffers} for u in plan.unit_list}
    state, storages = step.init(shards, buffers), Storages()
    storages.hold("shards", state.shards)
    storages.hold("inputs", batch)
    del shards
    with storages:
        for _ in range(2):
            gc.collect()
            storages.reset()
            state, _ = step(state, batch)
            storages.hold("optimizer", state.opt_state)
    return storages.peak("cpu").bytes


BLOCKS, INSIDE = ["blocks.*"], ["blocks.*.up", "blocks.*.down"]
GRAD_OP, MIXED = {"strategy": "shard_grad_op"}, {"precision": fs.MixedPrecision(torch.bfloat16, torch.float32)}
CASES = {
    "blocks in depth, remat": ("in depth", BLOCKS, {}, True),
    "blocks in depth, kept, remat": ("in depth", BLOCKS, GRAD_OP, True),
    "blocks in a row, mixed, remat": ("in a row", BLOCKS, MIXED, True),
    "blocks at the ends, remat": ("at the ends", BLOCKS, {}, True),
    "blocks and layers in a row, remat": ("in a row", [*BLOCKS, "blocks.*.up"], {}, True),
    "layers in depth": ("in depth", INSIDE, {}, False),
    "layers in a row, kept, remat": ("in a row", INSIDE, GRAD_OP, True),
}


@pytest.mark.slow
@pytest.mark.parametrize(("calls", "units", "options", "again"), CASES.values(), ids=CASES.keys())
def test_the_simulated_peak_is_the_measured_one(calls, units, options, again):
    mesh = fake_mesh({"shard": 4}, "cpu")
    apply, params, buffers = fs.make_functional(Net(CALLS[calls]))
    batch = torch.randn(2, TOKENS, WIDTH), torch.zeros(2, TOKENS, dtype=torch.int64)
    plan = fs.make_plan(params, mesh, units=units, **options)
    remat = [name for name in plan.units if name] if again else []
    profile = fs.profile(apply, params, buffers, batch[0], loss=loss_of, targets=batch[1], precision=plan)
    report = fs.estimate(
        profile, plan, optimizer="adamw_single", remat=remat, runtime=Runtime(accelerator=False), hardware="h100"
    )
    assert report.peak == pytest.approx(measured(apply, params, buffers, plan, mesh, remat, batch), abs=MOST)
    assert report.timeline[-1].memory == report.timeline[0].memory
