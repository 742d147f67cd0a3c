"""Predictions from the plan alone are the collectives of any program, nested, repeated, recomputed, and of operators."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard._utils import tree
from funcshard.plan.wrap import Units
from tests.core.units import forward_mode, of_module, recorded, requiring_grad, same_bits
from tests.jobs import Calls
from tests.models import SUBJECTS
from tests.module.law import Runs
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_ranks, run_simulated
from tests.storages import Log, LoggedBlock


def linear():
    return nn.Linear(3, 3)


SETTINGS = [
    {"forward_prefetch": forward, "backward_prefetch": backward, "limit": limit}
    for forward, backward, limit in itertools.product([True, False], ["pre", "post", None], [1, 2])
]


def test_prediction_names_kind_unit_bytes_dtype_and_axis_exactly():
    plan = fs.make_plan({"a": torch.ones(5), "u": {"w": torch.ones(7)}}, {"replicate": 2, "shard": 3}, units=["u"])
    assert fs.predict_events(plan) == (
        fs.Event("all_gather", "", "float32", "float32", 24, "shard", 3),
        fs.Event("all_gather", "u", "float32", "float32", 36, "shard", 3),
        fs.Event("all_gather", "u", "float32", "float32", 36, "shard", 3),
        fs.Event("reduce_scatter", "u", "float32", "float32", 36, "shard", 3),
        fs.Event("reduce_scatter", "", "float32", "float32", 24, "shard", 3),
        fs.Event("all_reduce", "u", "float32", "float32", 12, "replicate", 2),
        fs.Event("all_reduce", "", "float32", "float32", 8, "replicate", 2),
    )


@pytest.mark.nightly(one_in=5)
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(2)
def test_backward_gathers_an_outer_unit_first_where_its_own_leaves_are_used_last(mesh, settings):
    units = ["0.parts.0", "1", "1.parts.0", "1.parts.1"]

    def gathered(order):
        net = nn.Sequential(Calls((0,), linear()), Calls(order, linear(), linear()))
        _, sharded, shards = of_module(mesh, net, units, schedule={"order": units, **settings})
        _, events = recorded(fs.value_and_grad(lambda s: sharded(s, {}, torch.ones(2, 3)).square().mean()), shards)
        return [event.unit for event in events if event.kind == "all_gather"][5:]

    # the first linear layer's input needs no gradient, and so its backward no weight
    assert gathered((None, 0, 1)) == ["1.parts.1", "1.parts.0", "1"]
    assert gathered((0, None, 1)) == ["1.parts.1", "1", "1.parts.0"]
    assert gathered((None, 0, 1, None)) == ["1", "1.parts.1", "1.parts.0"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@on_ranks(2)
def test_units_on_demand_are_not_gathered_ahead_and_the_others_are(mesh, settings):
    net, units = nn.Sequential(Calls((None,)), *(linear() for _ in range(5))), [str(i) for i in range(6)]
    _, sharded, shards = of_module(mesh, net, units, schedule={"order": units, "on_demand": ["3", "1"], **settings})
    _, events = recorded(fs.value_and_grad(lambda s: sharded(s, {}, torch.ones(2, 3)).square().mean()), shards)
    assert events == fs.predict_events(sharded.plan, sharded.schedule)
    found = [event.unit for event in events if event.kind == "all_gather"]
    ahead = settings["forward_prefetch"] and settings["limit"] == 2
    assert found[:6] == (["0", "2", "1", "4", "3", "5"] if ahead else units)
    assert sorted(found[6:]) in (units[1:], units)
    assert sharded.schedule.on_demand == ("1", "3")


@pytest.mark.nightly(one_in=6)
@pytest.mark.parametrize("remat", [True, ["1", "2"]], ids=["each unit", "outer units"])
@pytest.mark.parametrize("order", [(None, 0, 1), (0, 1, None), (0, None, 1, None)], ids=str)
@on_ranks(2)
def test_units_inside_recomputed_units_are_gathered_once_more(mesh, order, remat):
    def outer():
        return Calls(order, linear(), Calls((None, 0), linear()))

    for settings in SETTINGS[::3]:
        net = nn.Sequential(linear(), outer(), outer())
        units = ["0", "1", "1.parts.*", "1.parts.1.parts.0", "2", "2.parts.*", "2.parts.1.parts.0"]
        _, sharded, shards = of_module(mesh, net, units, schedule=settings, how={"remat": remat})
        grad = fs.value_and_grad(lambda s, sharded=sharded: sharded(s, {}, torch.ones(2, 3)).square().mean())
        names = [name for name in sharded.plan.units if name] if remat is True else remat
        for _ in range(3):
            _, events = recorded(grad, shards)
        assert events == fs.predict_events(sharded.plan, sharded.schedule, recomputed=names), settings


# --- units that forward calls several times -------------------------------------------------------


WIDTH, MUCH = 6, 1 << 20
AGAIN, BETWEEN = (0, 0, 0, 0), (0, 1, 0, 2, 0, 3, 0)  # a layer again and again; one between the others


def in_order(net, x, order, *, again=False, last=False):
    x = x if last else x * net.scale
    for number in order:
        block = net.blocks[number]
        x = checkpoint(block, x, use_reentrant=False) if again else block(x)
    return (x * net.scale if last else x).square().mean()


def made(order, log=None, *, run=in_order, **how):
    """Return a function that calls blocks in some order, after a scale of its own, or before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        blocks = nn.ModuleList(LoggedBlock(WIDTH, Log() if log is None else log) for _ in range(max(order) + 1))
        run, scale = functools.partial(run, order=order, **how), nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        return fs.make_functional(Runs(run, blocks=blocks, scale=scale))


def names(order):
    return [f"blocks.{number}" for number in order]


def on(mesh, functional, strategy="shard_grad_op", *, order=None, units=("blocks.*",), bucket_bytes=0, **how):
    """Return ``(sharded, shards)``, under the schedule of an order if one is given."""
    schedule = None if order is None else {"order": names(order)}
    options = {"strategy": strategy, "bucket_bytes": bucket_bytes}
    return of_module(mesh, functional, units, schedule=schedule, how=how, **options)[1:]


def step_of(sharded, shards, mesh, width=WIDTH):
    x = torch.linspace(-1, 1, 2 * width).view(2, width) * (1 + mesh.rank)
    (loss, grads), events = recorded(fs.value_and_grad(lambda s: sharded(s, {}, x)), shards)
    return (loss, fs.gather(grads, sharded.plan, mesh)), events


WAYS = {  # options of the model, of fully_shard, of predict_events
    "remat": ({}, {"remat": ["blocks.0"]}, ["blocks.0"]),
    "checkpointed": ({"again": True}, {}, None),
    # Backward of the first use needs no parameter, but what computes it again gathers them.
    "remat without a gradient for the input": ({"last": True}, {"remat": ["blocks.0"]}, ["blocks.0"]),
}


@pytest.mark.nightly(one_in=3)
@crossed(way=list(WAYS), order=[AGAIN, BETWEEN, (0, 0), (0, 1, 0)], strategy=["full_shard", "shard_grad_op"])
@on_ranks(2)
def test_what_is_computed_again_is_predicted(mesh, strategy, order, way):
    model, sharding, recomputed = WAYS[way]
    recomputed = sorted(set(names(order))) if recomputed is None else recomputed
    functional, plain = made(order, **model), made(order, **{**model, "again": False})[0]
    for size in (0, MUCH):
        sharded, shards = on(mesh, functional, strategy, bucket_bytes=size, **sharding)
        results = [step_of(f, shards, mesh)[0] for f in (fs.fully_shard(plain, sharded.plan, mesh), sharded)]
        result, events = step_of(sharded, shards, mesh)
        units = [unit.name for unit in sharded.plan.unit_list if set(recomputed).intersection(unit.paths)]
        assert events == fs.predict_events(sharded.plan, sharded.schedule, recomputed=units)
        same_bits([*results, result], [result] * 3)


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("learned", [True, False], ids=["learned", "given"])
@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without"])
@on_ranks(2)
def test_a_unit_that_stays_gathered_is_gathered_once_a_call_and_is_in_memory_once(mesh, grad, learned):
    once = Counter(["", *names(range(4))])
    twice = once + Counter(names([0]))  # nobody knows of it until it comes the second time
    log = Log()
    sharded, shards = on(mesh, made(BETWEEN, log), order=None if learned else BETWEEN)
    requiring_grad(shards, grad)
    for gathers, copies in ((twice, 5) if learned else (once, 4), (once, 4)):
        log.clear()
        with fs.record_events() as events, torch.set_grad_enabled(grad):
            loss = sharded(shards, {}, torch.ones(2, WIDTH))
        alive = {ref.cdata for ref in log if not ref.expired()}
        assert Counter(event.unit for event in events if event.kind == "all_gather") == gathers
        assert len(alive) == copies * grad
        del loss
        assert log.alive() == 0


@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without"])
@on_ranks(2)
def test_a_unit_is_let_go_of_after_its_last_time(mesh, grad):
    def watching(net, x, order):
        log, seen = net.blocks[0].log, []
        for number in order:
            x = net.blocks[number](x.detach()) * net.scale  # so that autograd needs no weight
            seen.append(log.alive())
            log.clear()
        return x, tuple(seen)

    sharded, shards = on(mesh, made((0, 1, 0, 2), Log(), run=watching), order=(0, 1, 0, 2))
    assert sharded(requiring_grad(shards, grad), {}, torch.ones(2, WIDTH))[1] == (1, 0, 0, 0)


@on_ranks(2)
def test_uses_with_and_without_gradients_share_what_is_gathered_and_no_graph(mesh):
    def with_and_without(net, x, order):
        x = x * net.scale
        for number, grad in zip(order, (False, True, False, True), strict=True):
            with torch.set_grad_enabled(grad):
                x = net.blocks[number](x)
        return x.square().mean()

    (apply, params, _), results = made(AGAIN, run=with_and_without), []
    for strategy in ("full_shard", "shard_grad_op"):
        sharded, shards = on(mesh, (apply, params, {}), strategy)
        results += [step_of(sharded, shards, mesh)[0] for _ in range(2)]
    same_bits(results, results[:1] * len(results))
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH) * (1 + mesh.rank)
    expected = torch.func.grad(lambda p: apply(p, {}, x))(params)
    torch.testing.assert_close(results[0][1], tree.map(lambda grad: fs.pmean(grad, mesh), expected))


def doubling(block, x):
    """Write to the weight, but in inference mode alone."""
    y = torch.tanh(x @ block.weight)
    if torch.is_inference_mode_enabled():
        block.weight.mul_(2)
    return y


def in_modes(mesh, modes, cast, shared_memory=None):
    """Use one block in inference mode, or outside, as ``modes`` say."""

    def forward(net, x):
        x, total = x * net.scale, 0.0
        for inference in modes:
            with torch.inference_mode(inference):
                y = net.block(x.detach() if inference else x)
            total, x = (total + y.sum().item(), x) if inference else (total, y)
        return x.square().mean() + total

    if shared_memory is not None:
        mesh = fs.init_mesh(mesh.shape, device="cpu", shared_memory=shared_memory)
    block = Runs(doubling, weight=nn.Parameter(torch.linspace(-1, 1, 200 * 200).view(200, 200)))
    functional = fs.make_functional(Runs(forward, block=block, scale=nn.Parameter(torch.linspace(0.5, 1.5, 200))))
    results, cast = [], (lambda unit, buffer: COPYING) if cast else None
    for strategy in ("full_shard", "shard_grad_op"):
        sharded, shards = on(mesh, functional, strategy, units=["block"], cast=cast)
        results += [step_of(sharded, shards, mesh, 200)[0] for _ in range(3)]
    same_bits(results, results[:1] * len(results))
    return results[0]


COPYING = fs.Cast(lambda shard: shard.clone(), lambda rows: rows.flatten())
MODES = {"between": (False, True, False, False), "around": (True, True, False, True, False, True)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("modes", "cast", "shared_memory"), [("between", False, True), ("around", False, False), ("around", True, True)]
)
def test_a_use_in_inference_mode_has_memory_of_its_own_to_write_to(modes, cast, shared_memory):
    expected = fs.simulate(lambda mesh: in_modes(mesh, MODES[modes], cast), 2)
    same_bits(run_ranks(in_modes, 2, MODES[modes], cast, shared_memory), expected)


# --- operators ------------------------------------------------------------------------------------


pytestmark = forward_mode


class Mixed(nn.Module):
    """A linear layer whose leaves of two dtypes, some of them frozen, make three buffers."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(5, 3)), nn.Parameter(torch.ones(5).double())
        self.scale = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x):
        return (x @ self.weight.T * self.scale + self.bias).tanh().float()


def model_of(name):
    """Return a module, the globs of its units, its inputs, and its logits of what it returns."""
    torch.manual_seed(0)
    if name == "mixed":
        return nn.Sequential(Mixed(), nn.Linear(5, 3), Mixed()), ("0", "1", "2"), {"input": torch.randn(4, 3)}, lambda y: y
    subject = SUBJECTS[name]
    inputs = subject.make_batch(4, 0)["inputs"]
    return subject.build(), subject.units, inputs, lambda y: getattr(y, "logits", y)


def pulled(outputs, pullback):
    return pullback(torch.ones_like(outputs))


OPERATORS = {
    "grad": lambda out, loss, s: fs.grad(lambda s: loss(out(s)))(s),
    "jvp": lambda out, loss, s: fs.jvp(out, (s,), (s,)),
    "vjp": lambda out, loss, s: pulled(*fs.vjp(out, s)),
    "hvp": lambda out, loss, s: fs.hvp(lambda s: loss(out(s)), (s,), (s,)),
    "gnvp": lambda out, loss, s: fs.gnvp(out, loss, (s,), (s,)),
    "linearize": lambda out, loss, s: fs.linearize(out, s)[1](s),
}
HALF = fs.MixedPrecision(torch.bfloat16, torch.float32)
NARROW = fs.Cast(lambda x: x.to(torch.float16), lambda rows: rows.flatten().float())
TWO, HYBRID, TENSOR = {"shard": 2}, {"replicate": 2, "shard": 2}, {"shard": 2, "tensor": 2}
NESTED = {"units": ["blocks.*", "blocks.*.mlp"]}
REMAT = {"remat": True}
# Model, mesh, options of the plan and of fully_shard. The first ones run by day.
CASES = {
    "gpt recomputed": ("gpt", TWO, {}, REMAT),
    "mixed": ("mixed", HYBRID, {}, {}),
    "gpt": ("gpt", TWO, {}, {}),
    "mixed recomputed": ("mixed", HYBRID, {}, REMAT),
    "gpt hybrid": ("gpt", HYBRID, {}, REMAT),
    "gpt copied": ("gpt", TWO, {"strategy": "no_shard"}, REMAT),
    "gpt kept": ("gpt", HYBRID, {"strategy": "shard_grad_op"}, {}),
    "gpt beside a tensor axis": ("gpt", TENSOR, {}, REMAT),
    "gpt in bfloat16": ("gpt", TWO, {"precision": HALF}, REMAT),
    "gpt in groups": ("gpt", TWO, {"units": [["blocks.0", "blocks.1"]]}, {}),
    "gpt of units in units": ("gpt", TWO, NESTED, {}),
    "gpt of units in recomputed ones": ("gpt", TWO, NESTED, {"remat": ["blocks.0", "blocks.1"]}),
    "gpt, one recomputed": ("gpt", TWO, {}, {"remat": ["blocks.1"]}),
    "gpt, cast": ("gpt", TWO, {}, {"cast": lambda unit, buffer: NARROW}),
    "llama": ("llama", TWO, {"units": ["model.layers.*"]}, {}),
    "llama recomputed": ("llama", HYBRID, {}, REMAT),
}
BY_DAY = 2
PARAMS = [
    pytest.param(*case, id=name, marks=() if index < BY_DAY else (pytest.mark.slow, pytest.mark.nightly(one_in=7)))
    for index, (name, case) in enumerate(CASES.items())
]


def events_of(mesh, name, options, how):
    module, units, inputs, logits_of = model_of(name)
    apply, params, buffers = fs.make_functional(module)
    plan = fs.make_plan(params, mesh, **{"units": units, **options})
    shards, run = fs.shard(params, plan, mesh), fs.fully_shard(apply, plan, mesh, **how)
    out = lambda s: logits_of(run(s, buffers, **inputs))  # noqa: E731
    out(shards)  # the order of units is known from here on
    remat = how.get("remat", ())
    told = {"recomputed": [name for name in plan.units if name] if remat is True else remat, "cast": how.get("cast")}
    events = {key: recorded(call, out, lambda y: y.float().exp().mean(), shards)[1] for key, call in OPERATORS.items()}
    return events, {key: fs.predict_events(plan, run.schedule, transform=key, **told) for key in OPERATORS}


@pytest.mark.parametrize(("name", "shape", "options", "how"), PARAMS)
def test_an_operator_issues_the_predicted_collectives(name, shape, options, how):
    for events, predicted in run_simulated(events_of, math.prod(shape.values()), name, options, how, shape=shape):
        assert events == predicted


DOCUMENTED = {"jvp": (2, 0), "hvp": (2, 2), "gnvp": (2, 1), "grad": (1, 1), "vjp": (1, 1), "linearize": (2, 1)}


@pytest.mark.parametrize("transform", DOCUMENTED)
def test_an_operator_gathers_and_reduces_each_unit_as_often_as_documented(transform):
    plan = fs.make_plan({"a": torch.ones(3), "b": torch.ones(3)}, 2, units=["a"])
    counts = Counter((event.unit, event.kind) for event in fs.predict_events(plan, transform=transform))
    for unit in ("", "a"):
        assert (counts[unit, "all_gather"], counts[unit, "reduce_scatter"]) == DOCUMENTED[transform], unit


# --- any program ----------------------------------------------------------------------------------


STRATEGIES, SIZE = ("full_shard", "shard_grad_op", "no_shard"), 3
UNITS = (
    "parts.0", "parts.1", "parts.2", "parts.2.parts.0", "parts.2.parts.1", "parts.2.parts.2", "parts.2.parts.2.parts.0",
    "parts.3", "parts.3.inner",
)  # fmt: skip


def lends():
    """Return a module that hands its own weight to the module inside it, which uses it after its own."""
    run = lambda inner, x, weight: torch.sin(torch.sin(x @ inner.own) @ weight)  # noqa: E731
    inner = Runs(run, own=nn.Parameter(torch.eye(SIZE) - 0.2))
    weight = nn.Parameter(torch.eye(SIZE) + 0.1)
    return Runs(lambda outer, x: outer.inner(x, outer.weight), weight=weight, inner=inner)


def program(order, inner, deepest):
    """Return a module that calls its parts in an order; the third part is another such module, with a third inside."""
    third = Calls(inner, linear(), linear(), Calls(deepest, linear()))
    return Calls(order, linear(), linear(), third, lends())


def orders(most, *parts):
    """Lists of parts with a use of the module's own leaf somewhere, because what nobody uses is not reduced."""
    lists = st.lists(st.sampled_from([None, *parts]), max_size=most)
    return st.builds(lambda order, at: [*order[:at], None, *order[at:]], lists, st.integers(0, most))


SCHEDULES = st.fixed_dictionaries({
    "forward_prefetch": st.booleans(),
    "backward_prefetch": st.sampled_from(["pre", "post", None]),
    "limit": st.integers(1, 3),
    "on_demand": st.lists(st.sampled_from(UNITS), max_size=2, unique=True),
})  # fmt: skip


@pytest.mark.nightly
@hypothesis.given(
    world=st.sampled_from([2, {"replicate": 2, "shard": 2}]),
    order=orders(6, 0, 1, 2, 2, 3),
    inner=orders(4, 0, 1, 2),
    deepest=orders(2, 0),
    strategies=st.tuples(*[st.sampled_from(STRATEGIES)] * len(UNITS)),
    bucket_bytes=st.sampled_from([0, 256, 1 << 20]),
    options=SCHEDULES,
)
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_gradients_are_the_unsharded_ones_to_rounding_the_bits_no_schedules_and_the_collectives_the_predicted_ones(
    world, order, inner, deepest, strategies, bucket_bytes, options
):
    torch.manual_seed(0)
    apply, params, _ = fs.make_functional(program(order, inner, deepest))
    units = Units(UNITS, {name: {"strategy": strategy} for name, strategy in zip(UNITS, strategies, strict=True)})

    def main(mesh):
        x = torch.linspace(-1, 1, 2 * SIZE).view(2, SIZE) * (1 + mesh.rank)
        plan = fs.make_plan(params, mesh, units=units, bucket_bytes=bucket_bytes)
        shards, learning = fs.shard(params, plan, mesh), fs.fully_shard(apply, plan, mesh)
        step_of = lambda sharded: fs.value_and_grad(lambda s: sharded(s, {}, x).square().mean())(shards)  # noqa: E731
        first = step_of(learning)
        unit_of = {path: unit.name for unit in plan.unit_list for path in unit.paths}
        on_demand = {unit_of[path] for path in options["on_demand"]}
        schedule = fs.make_schedule(plan, learning.schedule.order, **{**options, "on_demand": on_demand})
        given_one = fs.fully_shard(apply, plan, mesh, schedule=schedule)
        for sharded in (learning, given_one, given_one):
            result, events = recorded(step_of, sharded)
            assert events == fs.predict_events(plan, sharded.schedule)
            same_bits(result, first)
        expected = torch.func.grad(lambda p: apply(p, {}, x).square().mean())(params)
        torch.testing.assert_close(fs.gather(first[1], plan, mesh), tree.map(lambda grad: fs.pmean(grad, mesh), expected))

    fs.simulate(main, world)
