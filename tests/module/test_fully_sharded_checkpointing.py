"""Checkpoints around, inside and across units, whole or selective: the same bits, less memory, predicted all-gathers."""

from __future__ import annotations

import functools
from typing import NamedTuple

import optree
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import funcshard as fs
from tests.core.test_gradients import Solution
from tests.core.units import by_hand, of_module, recorded
from tests.models import SUBJECTS
from tests.module.law import Runs, Watch, calls_on, check_equal, plain_call, same_bits, sharded_call
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_ranks, run_simulated
from tests.storages import Alive

WIDTH, BLOCKS, ROWS = 6, 4, 6  # square activations: a result kept for another one would have its shape
WRAPPED = "_checkpoint_wrapped_module"
NAMES = [f"blocks.{i}" for i in range(BLOCKS)]
aten = torch.ops.aten


def chosen(policy, ctx, op, *args, **kwargs):
    return policy


def every_second(ctx, op, *args, **kwargs):
    """Keep the results of operations in turn; one policy object serves one region."""
    every_second.count += 1
    return CheckpointPolicy.MUST_SAVE if every_second.count % 2 else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = {
    **{policy.name: functools.partial(chosen, policy) for policy in CheckpointPolicy},
    "matrix products": [aten.addmm.default, aten.mm.default],
    "views": [aten.t.default, aten.view.default],
    "in turn": every_second,
    # operations that gathers and reductions run too
    "memory": [aten.new_empty.default, aten.clone.default, aten.empty.memory_format, aten.copy_.default],
}


def options_of(policy):
    return {"context_fn": functools.partial(create_selective_checkpoint_contexts, POLICIES[policy])} if policy else {}


class Place(NamedTuple):
    """Where the checkpoints are, and their policy; ``None`` keeps nothing."""

    name: str
    policy: str | None

    def again(self, here, f, *args):
        if self.name != here:
            return f(*args)
        return checkpoint(f, *args, use_reentrant=False, **options_of(self.policy))

    def wrapped(self, here, module):
        is_wrapped = self.name in (here, "wrappers")
        return checkpoint_wrapper(module, **options_of(self.policy)) if is_wrapped else module


class MLP(nn.Module):
    def __init__(self, place, weights, results):
        super().__init__()
        self.place, self.weights, self.results = place, weights, results
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        # Why: a policy that keeps one of two random results of a region draws other numbers, in torch too.
        self.dropout = nn.Dropout(0.0 if place.policy else 0.5)

    def half(self, x):
        self.weights(self.up.weight)
        y = torch.tanh(self.up(x))
        self.results(y)
        return y.cos() * x.new_full((), 1.5, dtype=torch.float64).to(x)  # operations with keyword arguments

    def forward(self, x):
        return torch.tanh(self.dropout(self.down(self.place.again("half inside", self.half, x))))


class Block(nn.Module):
    def __init__(self, place, *logs):
        super().__init__()
        self.place, self.norm = place, nn.LayerNorm(WIDTH)
        self.mlp = place.wrapped("", MLP(place, *logs))

    def inner(self, x):
        return x + self.mlp(self.norm(x))

    def forward(self, x):
        return self.place.again("inside", self.inner, x)


class Stack(nn.Module):
    def __init__(self, place):
        super().__init__()
        self.place, self.scale = place, nn.Parameter(torch.linspace(1, 2, WIDTH))
        self.weights, self.results = Watch(), Watch()
        blocks = (Block(place, self.weights, self.results) for _ in range(BLOCKS))
        self.blocks = nn.ModuleList(place.wrapped("wrapper around", block) for block in blocks)

    def forward(self, x):
        x, again = x * self.scale, functools.partial(self.place.again, self.place.name)
        first, second = nn.Sequential(*self.blocks[:2]), nn.Sequential(*self.blocks[2:])
        if self.place.name == "pairs":
            return again(second, again(first, x)) * self.scale
        if self.place.name == "pairs, and a leaf of the root":
            return again(lambda x: second(x) * self.scale, again(first, x))
        for block in self.blocks:
            x = self.place.again("around", block, x)
        return x * self.scale


WAYS = {  # place -> units, options of fully_shard, options of predict_events where the suite predicts it
    "remat": (["blocks.*"], {"remat": NAMES}, {"recomputed": NAMES}),
    "around": (["blocks.*"], {}, {"recomputed": NAMES}),
    "pairs": (["blocks.*"], {}, {"recomputed": [tuple(NAMES[:2]), tuple(NAMES[2:])]}),
    "pairs, and a leaf of the root": (["blocks.*"], {}, None),
    "inside": (["blocks.*"], {}, {"recomputed": NAMES}),
    "half inside": (["blocks.*"], {}, {"recomputed": NAMES}),
    "wrapper around": ([f"blocks.*.{WRAPPED}"], {}, {"recomputed": [f"{name}.{WRAPPED}" for name in NAMES]}),
    "wrappers": (["blocks.*", f"blocks.*.{WRAPPED}.mlp"], {}, None),  # the outer wrapper is a unit, and around one
    "inside under remat": (["blocks.*"], {"remat": NAMES}, None),
    "around under remat": (["blocks.*"], {"remat": NAMES}, None),
    "nothing": (["blocks.*"], {}, {}),
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
    return torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH) * (1 + rank)


def program(model, x):
    torch.manual_seed(5)
    return model(x).square().mean()


def build(place, policy=None):
    every_second.count = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Stack(Place(place.removesuffix(" under remat"), policy))


def steps(place, policy=None, *, prefetch="pre", calls=2, **options):
    """Return the calls of two ranks, and the most results of both that were alive at a time."""
    units, how, _ = WAYS[place]
    net = build(place, policy)
    functional = fs.make_functional(net)
    if place != "wrappers":  # whose units run in another order than that of the plan
        schedule = fs.make_schedule(fs.make_plan(functional[1], 2, units=units, **options), backward_prefetch=prefetch)
        how = {**how, "schedule": schedule}
    found = calls_on(2, functional, batch, units, program=program, calls=calls, how=how, **options)
    assert net.results.alive() == net.weights.alive() == 0
    return found, net.results.most


@functools.cache
def steps_without_checkpoints(is_random, setting):
    return steps("nothing", None if is_random else "views", **SETTINGS[setting])


@pytest.mark.nightly(one_in=8)
@crossed(place=[*WAYS][:-1], policy=[None, *POLICIES], setting=list(SETTINGS))
def test_the_bits_are_the_same_the_memory_is_less_and_the_gathers_are_predicted(place, policy, setting):
    found, most = steps(place, policy, **SETTINGS[setting])
    wanted, before = steps_without_checkpoints(policy is None, setting)
    for call, other in zip(found, wanted, strict=True):
        same_bits([call.loss, *call.grads.values()], [other.loss, *other.grads.values()])
        if WAYS[place][2] is not None:
            assert call.events == call.predicted(**WAYS[place][2])
    assert before >= BLOCKS
    if policy is None:
        assert most <= 2 * (2 if place.startswith("pairs") else 1)


@pytest.mark.nightly(one_in=4)
@pytest.mark.parametrize("prefetch", ["pre", "post", None])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_units_with_all_inside_a_checkpoint_are_gathered_ahead_once_a_backward_has_reached_them(strategy, prefetch):
    first, later, around = (
        steps(place, prefetch=prefetch, strategy=strategy, calls=calls)[0][0]
        for place, calls in (("inside", 1), ("inside", 2), ("around", 2))
    )
    assert first.events == first.predicted(recomputed=NAMES, not_saved=NAMES)
    assert later.events == around.events == later.predicted(recomputed=NAMES)


def on_processes(mesh, policy):
    net = build("wrappers", policy)
    return sharded_call(mesh, fs.make_functional(net), batch, WAYS["wrappers"][0], program=program)[:2]


@pytest.mark.slow
def test_the_same_on_real_ranks_whose_collectives_are_operations_that_a_policy_sees():
    losses, grads = plain_call(build("wrappers", "MUST_SAVE"), batch, 2, program)
    same_bits(run_ranks(on_processes, 2, "matrix products"), [(loss, grads) for loss in losses])


def summed(mesh, policy):
    """Return the gradient of a loss whose checkpoint holds an all-reduce, and the number of all-reduces."""

    def region(w, x):
        y = torch.sin(w * x)
        return torch.cos((y - fs.pmean(y.clone(), mesh)).clone()).exp()

    place = Place("region" if policy else "nothing", policy)
    _, unit, shards = by_hand(
        mesh,
        {"w": torch.linspace(-1, 1, 4)},
        lambda leaves, x: place.again("region", region, leaves["w"], x).sum(),
        how=fs.reshard,
    )
    found, events = recorded(fs.value_and_grad(lambda s: unit(s[""], torch.ones(3, 4) + mesh.rank)), shards)
    return found, sum(event.kind == "all_reduce" for event in events)


@pytest.mark.parametrize("policy", ["memory", "PREFER_RECOMPUTE"])
def test_an_all_reduce_in_the_region_runs_again_whatever_the_policy_keeps(policy):
    found, wanted = (run_simulated(summed, 2, each) for each in (policy, None))
    for (result, times), (expected, before) in zip(found, wanted, strict=True):
        same_bits(result, expected)
        assert times == before + 1


def kept(place, policy):
    """Return how many activations one rank keeps between forward and backward."""
    left, rows = [], 50  # so that no parameter has the size of an activation

    def noting(model, x):
        with Alive(lambda nbytes: nbytes == rows * WIDTH * 4) as alive:
            loss = program(model, x)
        left.append(alive.now().total())
        return loss

    x = torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH)
    calls_on(2, fs.make_functional(build(place, policy)), x, ["blocks.*"], program=noting, calls=1)
    return max(left)


@pytest.mark.slow
def test_a_policy_keeps_more_than_full_recomputation_and_less_than_no_checkpoint():
    nothing, full = kept("nothing", "views"), kept("inside", "PREFER_RECOMPUTE")
    products, everything = kept("inside", "matrix products"), kept("inside", "MUST_SAVE")
    assert products == full + 2 * BLOCKS  # the results of two matrix products of each block
    assert full < products < nothing < everything


@pytest.mark.parametrize(
    ("place", "policy", "alive"),
    [("around", "views", 0), ("inside", "matrix products", 0), ("inside", "views", BLOCKS)],
)
@on_ranks(2)
def test_only_a_policy_inside_a_unit_that_keeps_views_keeps_its_gathered_leaves(mesh, place, policy, alive):
    net, held = build(place, policy), []

    def noting(model, x):
        loss = program(model, x)
        held.append(net.weights.alive())
        return loss

    sharded_call(mesh, fs.make_functional(net), batch, WAYS[place][0], program=noting)
    assert (held[-1], net.weights.alive()) == (alive, 0)


def test_statistics_are_those_of_one_forward_though_it_runs_twice():
    class Normed(nn.Sequential):
        def forward(self, x):
            return checkpoint(self[0], x, use_reentrant=False).square().sum()

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


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("units", [[], ["first"], ["first", "field"]], ids=["root", "another unit", "its unit"])
def test_a_module_that_backward_runs_again_by_itself_is_an_error(units, alone, remat):
    """Its parameters would get zeros, also where backward has no shard to reach it for."""

    def by_adjoint(m, x):  # as torchdiffeq's
        state, rest = (x, m.first(x)) if alone else (m.first(x), 0.0)
        return Solution.apply(m.field, state, *m.field.parameters()) + rest

    net = Runs(by_adjoint, first=nn.Linear(3, 3), field=nn.Linear(3, 3))
    _, sharded, shards = of_module(fs.Mesh(), net, units, how={"remat": remat})
    with pytest.raises(ValueError, match="its parameters would get no gradient"):
        fs.value_and_grad(lambda shards: sharded(shards, {}, torch.ones(2, 3)).sum())(shards)


class Stateful(nn.Module):
    """A layer that reads what it wrote before: a buffer, an attribute or what one refers to."""

    def __init__(self, place):
        super().__init__()
        self.place, self.layer = place, nn.Linear(3, 3)
        self.state, self.states, self.list = torch.zeros(2, 3), {"h": torch.zeros(2, 3)}, []
        self.register_buffer("mean", torch.zeros(2, 3))
        self.register_buffer("range", torch.zeros(0))

    def forward(self, x):
        if self.place == "buffer":
            self.mean = torch.tanh(self.layer(x) + self.mean)
            return self.mean
        if self.place == "buffer in place":
            self.mean.mul_(0.5).add_(self.layer(x).detach())
            return self.layer(x) * self.mean.sin()
        if self.place == "buffer that grows":
            if not self.range.numel():
                self.range.resize_(3).fill_(2.0)  # as an observer of quantization does
            return self.layer(x) * self.range.sin()
        if self.place == "attribute":
            self.state = torch.tanh(self.layer(x) + self.state)
            return self.state
        if self.place == "dictionary":
            self.states["h"] = torch.tanh(self.layer(x) + self.states["h"])
            return self.states["h"]
        self.list.append(torch.tanh(self.layer(x)))
        return torch.stack(self.list).sum(0)


def losses_with_and_without_remat(module):
    """Yield the loss and its gradient with and without ``remat``, in each mode of differentiation."""
    apply, params, buffers = fs.make_functional(module, mutable=True)
    mesh = fs.Mesh()
    plan = fs.make_plan(params, mesh, units=["layer"])
    shards = fs.shard(params, plan, mesh)

    def loss_fn(shards, remat):
        torch.manual_seed(0)
        sharded = fs.fully_shard(apply, plan, mesh, remat=remat)
        return sharded(shards, buffers, torch.ones(2, 3))[0].square().sum()

    for derivative in (fs.value_and_grad, torch.func.grad_and_value):
        yield [derivative(functools.partial(loss_fn, remat=remat))(shards) for remat in (True, False)]


@pytest.mark.parametrize("place", ["buffer", "buffer in place", "buffer that grows", "attribute", "dictionary", "list"])
def test_a_unit_runs_again_with_the_state_that_forward_began_with(place):
    """It ran with the state after forward, and had other gradients."""
    for found, expected in losses_with_and_without_remat(Runs(lambda m, x: m.layer(m.layer(x)), layer=Stateful(place))):
        optree.tree_map(torch.testing.assert_close, found, expected)


class ForAWhile(nn.Module):
    """Calls its layer while something in the layer differs."""

    def __init__(self, difference):
        super().__init__()
        self.difference, self.layer = difference, nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Dropout(0.5))
        self.layer[1].table = {"x": [torch.arange(3)]}

    def forward(self, x):
        linear, tanh, dropout = self.layer
        if self.difference == "hook":
            hook = tanh.register_forward_hook(lambda module, args, kwargs, out: 3 * out, with_kwargs=True)
            try:
                return self.layer(x)
            finally:
                hook.remove()
        if self.difference == "method":
            tanh.forward = lambda x: x.sin()[:, tanh.table["x"][0].flip(0)]
        elif self.difference == "module":
            self.layer[1] = nn.Sigmoid()
        elif self.difference == "mode":
            dropout.eval()
        else:
            linear.out_features, linear.forward = 2, lambda x: nn.Linear.forward(linear, x) * linear.out_features
        out = self.layer(x)
        dropout.train()
        self.layer[1] = tanh
        linear.out_features = 3
        tanh.__dict__.pop("forward", None)
        return out


@pytest.mark.parametrize("difference", ["hook", "method", "module", "mode", "attribute"])
def test_a_unit_runs_again_as_it_was_for_a_while(difference):
    """Its gradients were silently those of the module as forward left it."""
    for found, expected in losses_with_and_without_remat(ForAWhile(difference)):
        optree.tree_map(torch.testing.assert_close, found, expected)


def with_other_weights(m, x):
    weights = {name: 1.5 * getattr(m.layer, name) for name in ("weight", "bias")}
    return torch.func.functional_call(m.layer, weights, (m.layer(x),)).sin()


def along_a_slope(m, x):
    z = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(m.layer(z).sin().sum(), z, create_graph=True)
    return m.layer(x + slope)


INSIDE_A_UNIT = {  # what its checkpoint runs, and whether that is ``remat``
    "functional_call": (with_other_weights, nn.Linear, False),
    "a gradient": (along_a_slope, nn.Linear, True),
    "complex leaves": (
        lambda m, x: m.layer(x.cfloat()).abs().sin(),
        functools.partial(nn.Linear, dtype=torch.cfloat),
        False,
    ),
}


@pytest.mark.parametrize("case", INSIDE_A_UNIT)
def test_a_unit_that_a_checkpoint_runs_again_has_the_gradients_of_the_module(case):
    """They were those of other weights, or errors."""
    run, layer, remat = INSIDE_A_UNIT[case]
    unit = Runs(lambda m, x: run(m, x) if remat else checkpoint(run, m, x, use_reentrant=False), layer=layer(3, 3))
    check_equal(nn.Sequential(nn.Linear(3, 3), unit), torch.ones(2, 3), ["1"], how={"remat": ["1"] * remat})
