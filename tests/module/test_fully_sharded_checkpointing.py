"""Checkpoints around, inside and across units: the same bits, less memory, predicted all-gathers."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.models import SUBJECTS
from tests.module.law import calls_on, check_equal, same_bits
from tests.storages import Log

WIDTH, BLOCKS = 6, 4
NAMES = [f"blocks.{i}" for i in range(BLOCKS)]
again = functools.partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    """An MLP with dropout; ``how`` names the part that backward computes again."""

    def __init__(self, how, log):
        super().__init__()
        self.how, self.log = how, log
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.5)

    def wide(self, x):
        y = torch.tanh(self.up(x))
        self.log(y)
        self.log.most = max(self.log.most, self.log.alive())
        return y.cos()

    def inner(self, x):
        y = again(self.wide, x) if self.how == "half inside" else self.wide(x)
        return x + torch.tanh(self.dropout(self.down(y)))

    def forward(self, x):
        return again(self.inner, x) if self.how == "all inside" else self.inner(x)


class Stack(nn.Module):
    def __init__(self, how, log):
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block(how, log) for _ in range(BLOCKS))

    def forward(self, x):
        x = x * self.scale
        if self.how == "pairs":
            for i in range(0, BLOCKS, 2):
                x = again(nn.Sequential(*self.blocks[i : i + 2]), x)
        else:
            for block in self.blocks:
                x = again(block, x) if self.how == "around" else block(x)
        return x


WAYS = {  # part that backward computes again -> options of predict_events
    "remat": {"recomputed": NAMES},
    "around": {"recomputed": NAMES},
    "pairs": {"recomputed": [tuple(NAMES[:2]), tuple(NAMES[2:])]},
    "all inside": {"recomputed": NAMES, "not_saved": NAMES},
    "half inside": {"recomputed": NAMES},
}
SETTINGS = {
    "full_shard, pre": {"prefetch": "pre"},
    "full_shard, post": {"prefetch": "post"},
    "full_shard, none": {"prefetch": None},
    "shard_grad_op": {"prefetch": "pre", "strategy": "shard_grad_op"},
    "no_shard": {"prefetch": "post", "strategy": "no_shard"},
    "bfloat16": {"prefetch": "pre", "precision": fs.MixedPrecision(torch.bfloat16, torch.float32)},
}


def batch(rank):
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (1 + rank)


def steps(how, *, prefetch, calls=1, **options):
    """Return the calls of two ranks, and the most activations of both that were alive at a time."""

    def program(model, x):
        torch.manual_seed(5)
        return model(x).square().mean()

    log = Log()
    log.most = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        functional = fs.make_functional(Stack(how, log))
    plan = fs.make_plan(functional[1], 2, units=["blocks.*"], **options)
    arguments = {"schedule": fs.make_schedule(plan, backward_prefetch=prefetch), "remat": NAMES if how == "remat" else ()}
    found = calls_on(2, functional, batch, ["blocks.*"], program=program, calls=calls, how=arguments, **options)
    assert log.alive() == 0
    return found, log.most


@pytest.mark.nightly(one_in=5)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("how", WAYS)
def test_the_bits_are_the_same_the_memory_is_less_and_the_gathers_are_predicted(how, setting):
    (found, most), (wanted, before) = (steps(each, **SETTINGS[setting]) for each in (how, "nothing"))
    for call, other in zip(found, wanted, strict=True):
        same_bits(call[:2], other[:2])
        assert call.events == call.predicted(**WAYS[how])
    assert most <= 2 * (2 if how == "pairs" else 1)
    assert before >= BLOCKS


@pytest.mark.nightly(one_in=4)
@pytest.mark.parametrize("prefetch", ["pre", "post", None])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_units_with_all_inside_a_checkpoint_are_gathered_ahead_once_a_backward_has_reached_them(strategy, prefetch):
    inside, around = (steps(how, prefetch=prefetch, strategy=strategy, calls=2)[0][0] for how in ("all inside", "around"))
    assert inside.events == around.events == inside.predicted(recomputed=NAMES)


def test_statistics_are_those_of_one_forward_though_it_runs_twice():
    class Normed(nn.Sequential):
        def forward(self, x):
            return again(self[0], x).square().sum()

    apply, params, buffers = fs.make_functional(Normed(nn.BatchNorm1d(3)), mutable=True)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in params.items()}
    loss, new = apply(leaves, buffers, torch.arange(12.0).view(4, 3))
    before = {name: buffer.clone() for name, buffer in new.items()}
    loss.backward()
    same_bits(new, before)
    assert new["0.num_batches_tracked"] == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # transformers renames it
def test_hugging_faces_switch_keeps_the_numbers_and_the_prediction():
    subject = SUBJECTS["llama"]
    program = lambda model, batch: subject.loss(model(**batch["inputs"]), batch)  # noqa: E731
    model, inputs = subject.build(), subject.make_batch(2, 0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    # The switch computes inside of units, which the first backward teaches.
    for call in check_equal(model, inputs, subject.units, program=program):
        assert call.events == call.predicted(recomputed=[unit for unit in call.plan.units if unit])
