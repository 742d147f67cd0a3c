"""Units that are freed, or stay gathered over forwards, recomputations and micro-batches, as the plan says."""

from __future__ import annotations

import functools
from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.module.law import Runs, calls_on, check_equal, held, plain_call, same_bits, sharded_call, squares
from tests.ranks import on_ranks, run_ranks
from tests.storages import Log, LoggedBlock

WIDTH, BLOCKS = 6, 3
ALL = ["", *(f"blocks.{number}" for number in range(BLOCKS))]
JOINED = f"{ALL[1]}…{ALL[-1]}"
KEPT = {"strategy": "shard_grad_op"}
STAYS = {key: {"reshard_after_backward": False} for key in ALL}
FREED = {"reshard_after_forward": True}
ONE = fs.wrap.Units(ALL[1:], {"blocks.1": {"reshard_after_forward": False}})
LOW = {"precision": fs.MixedPrecision(param_dtype=torch.bfloat16)}
WAYS = {  # units, options of the plan -> the units that stay gathered
    "shard_grad_op": (ALL[1:], KEPT, ALL),
    "the root": (ALL[1:], {}, [""]),
    "no unit": (ALL[1:], FREED, []),
    "one unit": (ONE, FREED, ["blocks.1"]),
    "a group": (ALL[1:], {**KEPT, "bucket_bytes": 1 << 20}, ["", JOINED]),
    "bfloat16": (ALL[1:], {**KEPT, **LOW}, ALL),
}


def forward(net, x):
    net.of_root(net.scale)
    x = x * net.scale if net.twice else x
    for block in net.blocks:
        x = net.wrap(block, x) if net.wrap else block(x)
    return (x * net.scale).sum(1)


def made(wrap=None, twice=True):
    """Return a log of the units' weights, a model whose forward uses the root's leaf twice or once, and its function."""
    log = Log()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        blocks = nn.ModuleList(LoggedBlock(WIDTH, log) for _ in range(BLOCKS))
    scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
    net = Runs(forward, blocks=blocks, scale=scale, wrap=wrap, twice=twice, of_root=Log())
    return log, net, fs.make_functional(net)


def batch(rank, rows=4):
    return torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH).roll(rank, 0)


def preference(model, x):
    """Return a loss of two forwards of one model, as that of DPO."""
    return -nn.functional.logsigmoid(model(x) - model(-x)).mean()


def gathers(events):
    return Counter(event.unit for event in events if event.kind == "all_gather")


@pytest.mark.parametrize(("option", "times"), [(None, (1, 2)), (True, (2, 2)), (False, (1, 1))])
def test_the_caller_decides_whether_root_and_units_are_freed_after_forward(option, times):
    (_, net, functional), alive = made(), []

    def program(model, x):
        loss = squares(model, x)
        alive.append(held(model.func.mesh, net.of_root))
        return loss

    chosen = calls_on(2, functional, batch, ALL[1:], program=program, calls=1, reshard_after_forward=option)
    assert alive == [2 * (times[0] == 1)] * 2  # of both ranks, between forward and backward
    for call, other in zip(chosen, calls_on(2, functional, batch, ALL[1:], calls=1), strict=True):
        same_bits(call[:2], other[:2])
        assert call.events == call.predicted()
        assert (gathers(call.events)[""], gathers(call.events)["blocks.1"]) == times


@pytest.mark.nightly(one_in=2)
@pytest.mark.parametrize("way", WAYS)
def test_two_forwards_before_one_backward_gather_a_unit_that_stays_once(way):
    units, options, stays = WAYS[way]
    _, net, functional = made()
    anew = calls_on(2, functional, batch, ALL[1:], program=preference, **FREED, **(LOW if way == "bfloat16" else {}))
    for call, other in zip(calls_on(2, functional, batch, units, program=preference, **options), anew, strict=True):
        assert gathers(call.events) == {name: 1 if name in stays else 4 for name in call.plan.units}
        assert call.events == call.predicted(accumulate=fs.Accumulation(forwards=2))
        same_bits(call[:2], other[:2])
    if way == "no unit":
        check_equal(net, batch, units, program=preference, **options)


def target_first(model, x):
    """Return a loss whose target is a forward without gradients."""
    with torch.no_grad():
        target = model(-x)
    return (model(x) - target).square().mean()


def target_last(model, x):
    found = model(x)
    with torch.no_grad():
        target = model(-x)
    return (found - target).square().mean()


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("of", [preference, target_first, target_last])
@on_ranks(2)
def test_two_forwards_have_one_copy_which_goes_with_the_last_gradient_of_its_unit(mesh, of):
    (log, _, functional), alive = made(), {}

    def program(model, x):
        loss = of(model, x)
        alive["forward"] = held(mesh, log)
        return loss

    evaluate = functools.partial(fs.value_and_grad, on_grads=lambda unit, grads: alive.update({unit: held(mesh, log)}))
    sharded_call(mesh, functional, batch, ALL[1:], program=program, calls=1, evaluate=evaluate, **KEPT)
    # The last gradient of a unit finds the unit free.
    assert alive == {"forward": BLOCKS, "blocks.2": 2, "blocks.1": 1, "blocks.0": 0, "": 0}


@pytest.mark.parametrize("of", [target_first, target_last])
def test_a_forward_without_gradients_delays_no_reduction(of):
    evaluate = functools.partial(fs.accumulate, micro_batches=2, reduce="once")
    events = calls_on(2, made()[2], batch, ALL[1:], program=of, calls=1, evaluate=evaluate, **FREED)[0].events
    last = [event.unit for event in events if event.kind == "reduce_scatter" or event.unit == "blocks.0"][-5:]
    assert last == ["blocks.2", "blocks.0", "blocks.1", "blocks.0", ""]


def test_a_shard_that_changed_between_two_forwards_is_gathered_anew():
    apply, params, buffers = made()[2]
    changed = {name: p.detach() * (2 if name.startswith("blocks.1") else 1) for name, p in params.items()}

    def program(model, x):
        first = model(x)
        with torch.no_grad():
            model.args[0]["blocks.1"]["float32"].mul_(2)
            torch.testing.assert_close(model(x), apply(changed, buffers, x))
        return first.mean()

    for call in calls_on(2, (apply, params, buffers), batch, ALL[1:], program=program, calls=1, **KEPT):
        assert gathers(call.events) == {name: 2 if name == "blocks.1" else 1 for name in ALL}


@on_ranks(2)
def test_two_functions_of_one_plan_share_what_stays_gathered(mesh):
    """Such as those of two methods of a module, or of training and evaluation mode."""
    apply, params, buffers = made()[2]
    plan = fs.make_plan(params, mesh, units=ALL[1:], **KEPT)
    one, other = (fs.fully_shard(each, plan, mesh) for each in (apply, apply.eval()))
    loss_fn = lambda s, x: (one(s, buffers, x) * other(s, buffers, x)).mean()  # noqa: E731
    with fs.record_events() as events:
        fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh), batch(mesh.rank))
    assert gathers(events) == dict.fromkeys(ALL, 1)


def around(block, x):
    return checkpoint(block, x, use_reentrant=False)


@pytest.mark.slow
@pytest.mark.parametrize(("wrap", "remat", "forwards"), [(None, ALL[1:], 2), (around, [], 1)], ids=["remat", "checkpoint"])
def test_a_recomputation_gathers_a_unit_that_stays_not_again(wrap, remat, forwards):
    functional = made(wrap)[2]
    program = preference if forwards == 2 else squares
    kept, freed = (
        calls_on(2, functional, batch, ALL[1:], program=program, how={"remat": remat}, **options)
        for options in (KEPT, FREED)
    )
    for call, other in zip(kept, freed, strict=True):
        assert gathers(call.events) == dict.fromkeys(ALL, 1)
        assert call.events == call.predicted(recomputed=ALL[1:], accumulate=fs.Accumulation(forwards=forwards))
        assert other.events == other.predicted(recomputed=ALL[1:], accumulate=fs.Accumulation(forwards=forwards))
        same_bits(call[:2], other[:2])


class CheckpointInside(nn.Sequential):
    def forward(self, x):
        return self[1](checkpoint(lambda x: torch.tanh(self[0](x)), x, use_reentrant=False))


def checkpointed(model, x):
    return checkpoint(model, x, use_reentrant=False).square().mean()


@pytest.mark.parametrize("options", [{}, {"program": checkpointed}], ids=["inside a unit", "around the whole call"])
def test_a_checkpoint_inside_a_unit_or_around_all_units_finds_what_stays_gathered(options):
    first, last = (CheckpointInside(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
    net = nn.Sequential(first, nn.Tanh(), last)
    for call in check_equal(net, batch, ["0", "2"], **KEPT, **options):
        assert gathers(call.events) == {"0": 1, "2": 1}


@pytest.mark.parametrize("passes", [True, False], ids=["backward passes through them", "backward ends before them"])
def test_frozen_units_stay_gathered_if_backward_may_need_them(passes):
    _, net, _ = made(around if passes else None, twice=passes)
    net.blocks.requires_grad_(False)
    ways = {"recomputed": ALL[1:]} if passes else {"not_saved": ALL[1:]}
    for call in calls_on(2, fs.make_functional(net), batch, ALL[1:], program=preference, **KEPT):
        assert call.events == call.predicted(accumulate=fs.Accumulation(forwards=2), **ways)
        assert gathers(call.events) == {name: 1 if passes or name == "" else 2 for name in ALL}


@pytest.mark.usefixtures("without_garbage_collection")
@on_ranks(2)
def test_a_unit_that_stays_over_micro_batches_is_freed_after_the_last(mesh):
    (log, _, functional), alive = made(), []

    def program(model, x):
        alive.append(held(mesh, log))
        return squares(model, x)

    note = lambda unit, grads: alive.append(held(mesh, log))  # noqa: E731
    evaluate = functools.partial(fs.accumulate, micro_batches=2, reduce="once", on_grads=note)
    sharded_call(mesh, functional, batch, STAYS, program=program, calls=1, evaluate=evaluate, **KEPT)
    assert alive == [0, BLOCKS, 2, 1, 0, 0]  # before each forward, then as each unit is reduced


def two_paths(log):
    """Return a block that calls one linear layer by two names, and logs its weight."""

    def forward(m, x):
        log(m.first.weight)
        return torch.tanh(m.inner["again"](torch.tanh(around(m.first, x))))

    first = nn.Linear(WIDTH, WIDTH)
    return Runs(forward, first=first, inner=nn.ModuleDict({"again": first}))


@pytest.mark.parametrize("grad", [True, False])
def test_a_module_at_two_paths_of_a_unit_is_freed_after_forward_and_cannot_be_read_outside(grad):
    class Reads(nn.Sequential):
        def forward(self, x, reads=False):
            out = super().forward(x)
            return out + self[0].inner["again"].weight.sum() if reads else out

    def program(model, x):
        with torch.set_grad_enabled(grad):
            kept = model(x)
            alive.append(held(model.func.mesh, log))
            with pytest.raises(ValueError, match=r"'0\.first\.weight' was read"):
                model(x, reads=True)
        del kept
        return squares(model, x)

    log, alive = Log(), []
    net = Reads(*(two_paths(log) for _ in range(3)))
    functional, (_, grads) = fs.make_functional(net), plain_call(net, batch, 2)
    log.clear()
    for call in calls_on(2, functional, batch, ["*"], program=program, calls=1):
        torch.testing.assert_close(call.grads, grads)
    assert alive == [0, 0]


def beside_fsdp2(mesh):
    """Check the gathers of this library, and its gradients beside those of FSDP2.

    Two forwards before a backward: FSDP2 adds up their gradients before it reduces them. Two
    micro-batches: it reduces those of each.
    """
    for forwards, micro_batches, reduce in ((2, 1, "once"), (1, 2, "each")):
        _, net, functional = made(twice=False)  # else the sums of four terms run in another order
        program = preference if forwards == 2 else squares
        evaluate = functools.partial(fs.accumulate, micro_batches=micro_batches, reduce=reduce)
        call = sharded_call(mesh, functional, batch, STAYS, program=program, calls=1, evaluate=evaluate, **KEPT)
        for part in (*net.blocks, net):
            fsdp2(part, reshard_after_forward=False if part is not net else None)
        for number, x in enumerate(batch(mesh.rank).chunk(micro_batches), start=1):
            net.set_reshard_after_backward(number == micro_batches)
            program(net, x).div(micro_batches).backward()
        assert gathers(call.events) == dict.fromkeys(ALL, 1)
        same_bits(call.grads, {name: p.grad.full_tensor() for name, p in net.named_parameters()})


@pytest.mark.slow
def test_the_gradients_are_those_of_fsdp2_to_the_bit():
    run_ranks(beside_fsdp2, 2)
