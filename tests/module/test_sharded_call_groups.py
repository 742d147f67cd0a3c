"""Units of several modules: gathered for the first of them, freed after the last, reduced once."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.core.units import of_module
from tests.module.law import Runs, calls_on, check_equal, same_bits
from tests.pairwise import crossed
from tests.ranks import on_ranks
from tests.storages import Log

WIDTH, WORDS = 6, 11
GRID = {"replicate": 2, "shard": 2}
NAME = "embed+norm+head"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.up(self.norm(x)))


class Embed(nn.Embedding):
    log = None

    def forward(self, tokens):
        if self.log is not None:
            self.log(self.weight)
        return super().forward(tokens)


def raises(m, tokens, x):
    raise KeyError("from forward")


WAYS = {  # how the modules of the group run after the blocks
    "once": lambda m, tokens, x: m.head(m.norm(x)),
    "no head": lambda m, tokens, x: x,
    "twice": lambda m, tokens, x: m.head(m.norm(m.norm(x) + m.embed(tokens))),
    "again": lambda m, tokens, x: m.head(m.norm(x)) + m.head(m.norm(m.embed(tokens))),
    "checkpoint": lambda m, tokens, x: checkpoint(lambda y: m.head(m.norm(y)), x, use_reentrant=False),
    "first in checkpoint": lambda m, tokens, x: m.head(m.norm(x + checkpoint(m.embed, tokens, use_reentrant=False))),
    "embed without gradients": lambda m, tokens, x: m.head(m.norm(x)),
}


class Model(nn.Module):
    """A language model, of which embedding, norm and head are a group."""

    def __init__(self, way="once", tied=False, log=None):
        super().__init__()
        self.embed, self.norm, self.head = Embed(WORDS, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.way, self.embed.log = way, log
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.way != "embed without gradients"):
            x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        if self.embed.log is not None:
            self.embed.log.between = self.embed.log.alive()
        return {**WAYS, "raises": raises}[self.way](self, tokens, x)


GROUP = [["embed", "norm", "head"], "blocks.*"]


def made(**options):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Model(**options).double()


def tokens(rank):
    return torch.randint(0, WORDS, (3, 5), generator=torch.Generator().manual_seed(rank))


@pytest.mark.nightly(one_in=2)
@crossed(world=[2, GRID], strategy=["full_shard", "shard_grad_op", "no_shard"], tied=[False, True])
def test_a_group_trains_as_unsharded_and_its_collectives_are_the_predicted_ones(world, strategy, tied):
    for call in check_equal(made(tied=tied), tokens, GROUP, world, strategy=strategy):
        assert call.events == call.predicted()
        kinds = [event.kind for event in call.events if event.unit == NAME and event.axis == "shard"]
        times = {"full_shard": 2, "shard_grad_op": 1, "no_shard": 0}[strategy]
        assert kinds == ["all_gather"] * times + ["all_reduce" if strategy == "no_shard" else "reduce_scatter"]


@pytest.mark.nightly(one_in=3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_modules_of_a_group_are_called_in_any_way(way, strategy):
    for call in check_equal(made(way=way), tokens, ["blocks.*", GROUP[0]], strategy=strategy):
        if way in ("once", "no head", "twice", "again"):
            assert call.events == call.predicted()


@pytest.mark.parametrize("prefetch", ["pre", "post", None])
def test_a_group_is_gathered_ahead_as_the_schedule_says(prefetch):
    units = [["blocks.0.norm", "blocks.2.up", "head"], "blocks.*", "embed"]
    functional = fs.make_functional(made())
    order = ["embed", "blocks.0", "blocks.0.norm+blocks.2.up+head", "blocks.1", "blocks.2"]
    schedule = fs.make_schedule(fs.make_plan(functional[1], 2, units=units), order, backward_prefetch=prefetch, limit=2)
    for call in calls_on(2, functional, tokens, units, how={"schedule": schedule}):
        assert call.events == call.predicted()


@pytest.mark.parametrize("remat", [[], ["norm"], [NAME]], ids=str)
@pytest.mark.parametrize("way", ["once", "raises", "no head"])
@on_ranks(2)
def test_a_group_is_held_between_its_modules_and_free_after_the_last_of_them(mesh, way, remat):
    log, out = Log(), None
    _, sharded, shards = of_module(mesh, made(way=way, log=log), GROUP, how={"remat": remat})
    with contextlib.suppress(KeyError):
        out = sharded(shards, {}, tokens(0))
    assert (log.between, log.alive()) == (1, 0)
    del out


REMAT = {
    "one": (["norm"], [NAME]),
    "two": (["embed", "head"], [NAME]),
    "all": (True, [NAME, "blocks.0", "blocks.1", "blocks.2"]),
}


@pytest.mark.nightly(one_in=3)
@crossed(again=REMAT, way=["once", "twice", "again", "checkpoint"], strategy=["full_shard", "shard_grad_op"])
def test_modules_of_a_group_are_computed_again_from_leaves_that_are_gathered_once(strategy, way, again):
    functional, (remat, recomputed) = fs.make_functional(made(way=way)), again
    plain, again = (
        calls_on(2, functional, tokens, ["blocks.*", GROUP[0]], strategy=strategy, how={"remat": each})
        for each in ((), remat)
    )
    for call, other in zip(plain, again, strict=True):
        same_bits(other[:2], call[:2])
        if way == "checkpoint":  # the modules inside it gather the group for themselves
            continue
        assert [event for event in other.events if event.unit == NAME] == [e for e in call.events if e.unit == NAME]
        assert other.events == other.predicted(recomputed=recomputed)


@pytest.mark.filterwarnings("ignore:ignored_classes of the precision hold LayerNorm")
def test_a_group_computes_in_its_precision_and_ignored_classes_leave_it():
    precision = fs.MixedPrecision(param_dtype=torch.float32, ignored_classes=(nn.LayerNorm,))
    low, full = (calls_on(2, fs.make_functional(made()), tokens, GROUP, **each) for each in ({"precision": precision}, {}))
    for call, other in zip(low, full, strict=True):
        assert call.plan.units["norm"].full_precision
        assert call.plan.units[NAME].members == ("embed", "head")
        assert call.events == call.predicted()
        assert {event.dtype for event in call.events if event.unit == NAME} == {"float32"}
        torch.testing.assert_close(call.loss.double(), other.loss, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(call.grads, other.grads, rtol=1e-4, atol=1e-5)


class Caller(nn.Linear):
    """A module that runs another one of its group without gradients, between two uses of its weight."""

    def forward(self, x, other):
        x = super().forward(x).sin()
        with torch.no_grad():
            constant = other(x)
        return super().forward(x).sin() @ self.weight + constant


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_a_module_of_a_group_may_call_another_one_without_gradients(strategy):
    module = Runs(lambda m, x: m.other(m.caller(x, m.other)), caller=Caller(WIDTH, WIDTH), other=nn.Linear(WIDTH, WIDTH))
    check_equal(module, torch.ones(2, WIDTH), [["caller", "other"]], strategy=strategy)


WRONG = [
    (["blocks", "head"], r"unit 'blocks\+head', its module 'blocks', is a ModuleList, which has no forward of its own"),
    (["embed.weight", "head"], r"unit 'embed.weight\+head', its module 'embed.weight', is no mod"),
]


@pytest.mark.parametrize(("units", "words"), WRONG)
def test_wrong_groups_are_errors_of_fully_shard(units, words):
    with pytest.raises(ValueError, match=words):
        calls_on(2, fs.make_functional(made()), tokens, [units])
