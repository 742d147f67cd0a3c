"""Units that stay gathered: over forwards before one backward, recomputations, and micro-batches."""

from __future__ import annotations

import functools
import gc
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from tests.ranks import run_ranks, run_simulated
from tests.storages import Log, LoggedBlock

WIDTH, BLOCKS, RANKS = 6, 3, 2
GRID = {"replicate": 2, "shard": 2}
ALL = ["", *(f"blocks.{number}" for number in range(BLOCKS))]
JOINED = f"{ALL[1]}…{ALL[-1]}"
WAYS = {  # options of the plan -> the units that stay gathered
    "shard_grad_op": ({"strategy": "shard_grad_op"}, ALL),
    "the root": ({}, [""]),
    "no unit": ({"reshard_after_forward": True}, []),
    "one unit": ({"reshard_after_forward": True, "overrides": {"blocks.1": {"reshard_after_forward": False}}}, ["blocks.1"]),
    "a group": ({"strategy": "shard_grad_op", "bucket_bytes": 1 << 20}, ["", JOINED]),
    "bfloat16": ({"strategy": "shard_grad_op", "precision": fs.MixedPrecision(param_dtype=torch.bfloat16)}, ALL),
}


class Net(nn.Module):
    def __init__(self, log, wrap=None, twice=True):
        super().__init__()
        self.twice = twice  # whether forward uses the root's leaf twice
        self.blocks = nn.ModuleList(LoggedBlock(WIDTH, log) for _ in range(BLOCKS))
        self.scale, self.wrap = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), wrap

    def forward(self, x):
        x = x * self.scale if self.twice else x
        for block in self.blocks:
            x = self.wrap(block, x) if self.wrap else block(x)
        return (x * self.scale).sum(1)


def made(wrap=None, twice=True):
    log = Log()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        net = Net(log, wrap, twice)
    return log, net, fs.make_functional(net)


def planned(params, mesh, overrides=None, **options):
    return fs.make_plan(params, mesh, units=fs.wrap.Units(ALL[1:], overrides), **options)


def batch_of(mesh, rows=4):
    return torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH).roll(mesh.rank, 0)


def preference(model, x):
    """Return a loss of two forwards of one model, as that of DPO."""
    return -nn.functional.logsigmoid(model(x) - model(-x)).mean()


def gathers(events):
    return Counter(event.unit for event in events if event.kind == "all_gather")


def same_bits(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def held(log):
    return len({ref.cdata for ref in log if not ref.expired()})


# --- several forwards -----------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "way"), [*((2, way) for way in WAYS), (GRID, "shard_grad_op")], ids=str)
def test_two_forwards_before_one_backward_gather_a_unit_that_stays_once(world, way):
    options, stays = WAYS[way]
    _, net, (apply, params, buffers) = made()

    def main(mesh, options):
        plan = planned(params, mesh, **options)
        sharded = fs.fully_shard(apply, plan, mesh)
        shards = fs.shard(params, plan, mesh)
        for _ in range(2):  # the first call learns the order
            with fs.record_events() as events:
                run = lambda s, x: preference(functools.partial(sharded, s, buffers), x)  # noqa: E731
                loss, grads = fs.value_and_grad(run)(shards, batch_of(mesh))
            assert gathers(events) == {name: 1 if name in stays else 4 for name in plan.units}
        assert tuple(events) == fs.predict_events(plan, sharded.schedule, forwards=2)
        return loss, fs.gather(grads, plan, mesh)

    plain = {key: value for key, value in options.items() if key == "precision"}
    anew = fs.simulate(lambda mesh: main_anew(mesh, params, apply, buffers, plain), world)
    same_bits(fs.simulate(lambda mesh: main(mesh, options), world), anew)
    if "precision" not in options:
        ranks = 4 if isinstance(world, dict) else world
        batches = [batch_of(fs.Mesh()).roll(rank, 0) for rank in range(ranks)]
        sum(preference(net, x) for x in batches).div(ranks).backward()
        torch.testing.assert_close(anew[0][1], {name: p.grad for name, p in net.named_parameters()})


def main_anew(mesh, params, apply, buffers, options):
    """Return loss and gradients of a model whose units are all gathered for every use."""
    plan = planned(params, mesh, reshard_after_forward=True, **options)
    sharded = fs.fully_shard(apply, plan, mesh)
    run = lambda s, x: preference(functools.partial(sharded, s, buffers), x)  # noqa: E731
    loss, grads = fs.value_and_grad(run)(fs.shard(params, plan, mesh), batch_of(mesh))
    return loss, fs.gather(grads, plan, mesh)


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


@pytest.mark.parametrize("of", [preference, target_first, target_last])
def test_two_forwards_have_one_copy_which_goes_with_the_last_gradient_of_its_unit(of):
    log, _, (apply, params, buffers) = made()
    alive = {}

    def main(mesh):
        plan = planned(params, mesh, strategy="shard_grad_op")
        sharded = fs.fully_shard(apply, plan, mesh)

        def loss_fn(shards, x):
            loss = of(functools.partial(sharded, shards, buffers), x)
            mesh.shard.all_gather_text("")
            alive["forward"] = held(log)
            mesh.shard.all_gather_text("")
            return loss

        def note(unit, grads):
            mesh.shard.all_gather_text("")
            alive[unit] = held(log)
            mesh.shard.all_gather_text("")

        fs.value_and_grad(loss_fn, on_grads=note)(fs.shard(params, plan, mesh), batch_of(mesh))

    gc.disable()
    try:
        run_simulated(main, RANKS)
        assert log.alive() == 0
    finally:
        gc.enable()
    # One copy a rank. The last gradient of a unit finds the unit free.
    expected = {"forward": BLOCKS, "blocks.2": 2, "blocks.1": 1, "blocks.0": 0, "": 0}
    assert alive == {name: RANKS * copies for name, copies in expected.items()}


@pytest.mark.parametrize("of", [target_first, target_last])
def test_a_forward_without_gradients_delays_no_reduction(of):
    _, _, (apply, params, buffers) = made()

    def main(mesh):
        plan = planned(params, mesh, reshard_after_forward=True)
        sharded = fs.fully_shard(apply, plan, mesh)
        grad = fs.accumulate(lambda s, x: of(functools.partial(sharded, s, buffers), x), 2, reduce="once")
        with fs.record_events() as events:
            grad(fs.shard(params, plan, mesh), batch_of(mesh))
        return [event.unit for event in events if event.kind == "reduce_scatter" or event.unit == "blocks.0"][-5:]

    assert fs.simulate(main, 2)[0] == ["blocks.2", "blocks.0", "blocks.1", "blocks.0", ""]


def test_a_shard_that_changed_between_two_forwards_is_gathered_anew():
    _, _, (apply, params, buffers) = made()

    def main(mesh):
        plan = planned(params, mesh, strategy="shard_grad_op")
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)

        def loss_fn(given, x):
            first = sharded(given, buffers, x)
            with torch.no_grad():
                given["blocks.1"]["float32"].mul_(2)
            return first.mean(), sharded(given, buffers, x).detach()

        with fs.record_events() as events:
            (_, second), _ = fs.value_and_grad(loss_fn, has_aux=True)(shards, batch_of(mesh))
        assert gathers(events) == {name: 2 if name == "blocks.1" else 1 for name in ALL}
        return second, sharded(shards, buffers, batch_of(mesh)).detach()

    for second, expected in run_simulated(main, 2):
        same_bits(second, expected)


def test_equal_shards_that_are_other_tensors_are_gathered_for_themselves():
    _, _, (apply, params, buffers) = made()

    def main(mesh):
        plan = planned(params, mesh, strategy="shard_grad_op")
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        other = fs.shard(params, plan, mesh)
        loss_fn = lambda both, x: (sharded(both[0], buffers, x) * sharded(both[1], buffers, x)).mean()  # noqa: E731
        with fs.record_events() as events:
            fs.value_and_grad(loss_fn)((shards, other), batch_of(mesh))
        return gathers(events)

    assert run_simulated(main, 2) == [dict.fromkeys(ALL, 2)] * 2


def test_a_unit_of_which_one_buffer_has_another_shard_is_gathered_anew():
    net = nn.Linear(WIDTH, WIDTH)
    net.bias.requires_grad_(False)  # so that the unit has two buffers
    apply, params, buffers = fs.make_functional(net)

    def main(mesh):
        plan = fs.make_plan(params, mesh, strategy="shard_grad_op")
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        other = {key: local * 2 for key, local in shards[""].items() if key.endswith("frozen")}

        def loss_fn(shards, x):
            first = sharded(shards, buffers, x)
            return first.mean(), sharded({"": {**shards[""], **other}}, buffers, x).detach()

        with fs.record_events() as events:
            (_, found), _ = fs.value_and_grad(loss_fn, has_aux=True)(shards, batch_of(mesh))
        return len(events), found, nn.functional.linear(batch_of(mesh), net.weight, 2 * net.bias).detach()

    for count, found, expected in run_simulated(main, 2):
        assert count == 5  # two buffers twice, and a reduction
        torch.testing.assert_close(found, expected)


def test_two_functions_of_one_plan_share_what_stays_gathered():
    """Such as those of two methods of a module, or of training and evaluation mode."""
    _, _, (apply, params, buffers) = made()

    def main(mesh):
        plan = planned(params, mesh, strategy="shard_grad_op")
        one, other = (fs.fully_shard(each, plan, mesh) for each in (apply, apply.eval()))
        x, shards = batch_of(mesh), fs.shard(params, plan, mesh)
        with fs.record_events() as events:
            fs.value_and_grad(lambda s: (one(s, buffers, x) * other(s, buffers, x)).mean())(shards)
        return gathers(events)

    assert run_simulated(main, 2) == [dict.fromkeys(ALL, 1)] * 2


def test_a_forward_without_gradients_uses_what_is_gathered_but_keeps_nothing():
    _, _, (apply, params, buffers) = made()

    def main(mesh):
        plan = planned(params, mesh, strategy="shard_grad_op")
        sharded, x = fs.fully_shard(apply, plan, mesh), batch_of(mesh)

        def loss_fn(shards, order):
            found = []
            for grad in order:
                with torch.set_grad_enabled(grad):
                    found.append(sharded(shards, buffers, x).mean())
            return sum(found)

        counts = []
        for order in ((False, True), (True, False), (True, False, True)):
            with fs.record_events() as events:
                fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh), order)
            counts.append(gathers(events))
        return counts

    assert run_simulated(main, 2)[0] == [dict.fromkeys(ALL, times) for times in (2, 1, 1)]


def test_a_forward_that_wrote_to_its_leaves_leaves_nothing_to_use_again():
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x, write):
            if write:
                with torch.no_grad():
                    self.weight.detach().mul_(3)
            return x * self.weight

    apply, params, buffers = fs.make_functional(Writes())

    def main(mesh):
        plan = fs.make_plan(params, mesh)
        sharded, x = fs.fully_shard(apply, plan, mesh), batch_of(mesh)

        def loss_fn(shards):
            with pytest.raises(RuntimeError, match="modified a leaf in place"):
                sharded(shards, buffers, x, True)
            return sharded(shards, buffers, x, False).mean()

        loss, _ = fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))
        return loss, x.mean()

    for loss, expected in run_simulated(main, 2):
        same_bits(loss, expected)


def test_an_error_in_the_loss_function_leaves_nothing_in_memory():
    log, _, (apply, params, buffers) = made()
    errors = []

    def main(mesh):
        plan = planned(params, mesh, strategy="shard_grad_op")
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)

        def loss_fn(shards):
            sharded(shards, buffers, batch_of(mesh))
            raise ValueError("no loss")

        try:
            fs.value_and_grad(loss_fn)(shards)
        except ValueError as error:
            errors.append(error)

    gc.disable()
    try:
        run_simulated(main, 2)
        assert len(errors) == 2
        assert log.alive() == 0
    finally:
        gc.enable()


# --- recomputation --------------------------------------------------------------------------------


def around(block, x):
    return checkpoint(block, x, use_reentrant=False)


RECOMPUTED = {"remat": None, "checkpoint": around}


@pytest.mark.parametrize("way", RECOMPUTED)
@pytest.mark.parametrize("forwards", [1, 2])
def test_a_recomputation_gathers_a_unit_that_stays_not_again(way, forwards):
    _, _, (apply, params, buffers) = made(RECOMPUTED[way])
    remat = ALL[1:] if way == "remat" else []

    def main(mesh, **options):
        plan = planned(params, mesh, **options)
        sharded = fs.fully_shard(apply, plan, mesh, remat=remat)
        shards = fs.shard(params, plan, mesh)
        model = lambda s: functools.partial(sharded, s, buffers)  # noqa: E731
        loss_fn = lambda s, x: preference(model(s), x) if forwards == 2 else model(s)(x).square().mean()  # noqa: E731
        for _ in range(2):
            with fs.record_events() as events:
                loss, grads = fs.value_and_grad(loss_fn)(shards, batch_of(mesh))
        assert tuple(events) == fs.predict_events(plan, sharded.schedule, recomputed=ALL[1:], forwards=forwards)
        return gathers(events), (loss, fs.gather(grads, plan, mesh))

    stays = fs.simulate(lambda mesh: main(mesh, strategy="shard_grad_op"), 2)
    freed = fs.simulate(lambda mesh: main(mesh, reshard_after_forward=True), 2)
    assert {tuple(sorted(count.items())) for count, _ in stays} == {tuple((name, 1) for name in sorted(ALL))}
    same_bits([result for _, result in stays], [result for _, result in freed])


class CheckpointInside(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.second(checkpoint(lambda x: torch.tanh(self.first(x)), x, use_reentrant=False))


@pytest.mark.parametrize("whole", [False, True], ids=["inside a unit", "around the whole call"])
def test_a_checkpoint_inside_a_unit_or_around_all_units_finds_what_stays_gathered(whole):
    net = nn.Sequential(CheckpointInside(), nn.Tanh(), CheckpointInside())
    apply, params, buffers = fs.make_functional(net)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["0", "2"], strategy="shard_grad_op")
        sharded, x = fs.fully_shard(apply, plan, mesh), batch_of(mesh)
        run = functools.partial(checkpoint, sharded, use_reentrant=False) if whole else sharded
        with fs.record_events() as events:
            _, grads = fs.value_and_grad(lambda s: run(s, buffers, x).square().mean())(fs.shard(params, plan, mesh))
        return gathers(events), fs.gather(grads, plan, mesh)

    batches = [batch_of(fs.Mesh()).roll(rank, 0) for rank in range(2)]
    sum(net(x).square().mean() for x in batches).div(2).backward()
    for count, grads in run_simulated(main, 2):
        assert count == {"0": 1, "2": 1}
        torch.testing.assert_close(grads, {name: p.grad for name, p in net.named_parameters()})


@pytest.mark.parametrize("passes", [True, False], ids=["backward passes through them", "backward ends before them"])
def test_frozen_units_stay_gathered_if_backward_may_need_them(passes):
    _, net, _ = made(around if passes else None, twice=passes)
    net.blocks.requires_grad_(False)
    apply, params, buffers = fs.make_functional(net)

    def main(mesh):
        plan = planned(params, mesh, strategy="shard_grad_op")
        sharded = fs.fully_shard(apply, plan, mesh)
        loss_fn = lambda s, x: preference(functools.partial(sharded, s, buffers), x)  # noqa: E731
        for _ in range(2):
            with fs.record_events() as events:
                fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh), batch_of(mesh))
        ways = {"recomputed": ALL[1:]} if passes else {"not_saved": ALL[1:]}
        assert tuple(events) == fs.predict_events(plan, sharded.schedule, forwards=2, **ways)
        return gathers(events)

    assert run_simulated(main, 2) == [{name: 1 if passes or name == "" else 2 for name in ALL}] * 2


# --- micro-batches --------------------------------------------------------------------------------


def test_a_unit_that_stays_over_micro_batches_is_freed_after_the_last():
    log, _, (apply, params, buffers) = made()
    alive = []

    def main(mesh):
        plan = planned(params, mesh, strategy="shard_grad_op", reshard_after_backward=False)
        sharded = fs.fully_shard(apply, plan, mesh)

        def loss_fn(shards, x):
            mesh.shard.all_gather_text("")
            alive.append(held(log))
            mesh.shard.all_gather_text("")
            return sharded(shards, buffers, x).square().mean()

        def note(unit, grads):
            mesh.shard.all_gather_text("")
            alive.append(held(log))
            mesh.shard.all_gather_text("")

        fs.accumulate(loss_fn, 2, reduce="once", on_grads=note)(fs.shard(params, plan, mesh), batch_of(mesh))

    gc.disable()
    try:
        run_simulated(main, RANKS)
        assert log.alive() == 0
    finally:
        gc.enable()
    expected = [0, BLOCKS, 2, 1, 0, 0]  # before each forward, then as each unit is reduced
    assert alive[::RANKS] == [RANKS * copies for copies in expected]


def test_a_train_step_gathers_once_and_the_next_step_the_changed_shards():
    _, _, (apply, params, buffers) = made()

    def main(mesh, **options):
        plan = planned(params, mesh, **options)
        sharded = fs.fully_shard(apply, plan, mesh)
        loss_fn = lambda s, b, x: sharded(s, b, x).square().mean()  # noqa: E731
        adam = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
        step = fs.make_train_step(loss_fn, adam, plan, mesh, accumulate=2)
        state, counts = step.init(fs.shard(params, plan, mesh), buffers), []
        for _ in range(3):
            with fs.record_events() as events:
                state, _ = step(state, batch_of(mesh))
            counts.append(gathers(events))
        return counts, fs.gather(state.shards, plan, mesh)

    kept = fs.simulate(lambda mesh: main(mesh, strategy="shard_grad_op", reshard_after_backward=False), 2)
    plain = fs.simulate(main, 2)
    assert kept[0][0] == [dict.fromkeys(ALL, 1)] * 3
    same_bits([params for _, params in kept], [params for _, params in plain])


# --- FSDP2 ----------------------------------------------------------------------------------------


def beside_fsdp2(mesh):
    """Return the gathers of this library, and its gradients beside those of FSDP2.

    Two forwards before a backward: FSDP2 adds up their gradients before it reduces them. Two
    micro-batches: it reduces those of each.
    """
    from torch.distributed.fsdp import fully_shard

    results = []
    for forwards, micro_batches, reduce in ((2, 1, "once"), (1, 2, "each")):
        _, net, (apply, params, buffers) = made(twice=False)  # else the sums of four terms run in another order
        loss_of = preference if forwards == 2 else lambda model, x: model(x).square().mean()
        plan = planned(params, mesh, strategy="shard_grad_op", reshard_after_backward=False)
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        loss_fn = lambda s, x: loss_of(functools.partial(sharded, s, buffers), x)  # noqa: B023, E731
        with fs.record_events() as events:
            _, grads = fs.accumulate(loss_fn, micro_batches, reduce=reduce)(shards, batch_of(mesh))
        for block in net.blocks:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(net)
        for number, x in enumerate(batch_of(mesh).chunk(micro_batches), start=1):
            net.set_reshard_after_backward(number == micro_batches)
            loss_of(net, x).div(micro_batches).backward()
        theirs = {name: p.grad.full_tensor() for name, p in net.named_parameters()}
        results.append((gathers(events), fs.gather(grads, plan, mesh), theirs))
    return results


@pytest.mark.slow
def test_the_gradients_are_those_of_fsdp2_to_the_bit():
    for results in run_ranks(beside_fsdp2, 2):
        for count, ours, theirs in results:
            assert count == dict.fromkeys(ALL, 1)
            same_bits(ours, {name: theirs[name] for name in ours})


def test_a_group_of_modules_stays_gathered_over_forwards_and_micro_batches_too():
    _, _, (apply, params, buffers) = made()

    def main(mesh, **options):
        plan = fs.make_plan(params, mesh, units=[["blocks.0", "blocks.2"], "blocks.1"], **options)
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        loss_fn = lambda s, x: preference(functools.partial(sharded, s, buffers), x)  # noqa: E731
        for _ in range(2):
            with fs.record_events() as events:
                loss, grads = fs.accumulate(loss_fn, 2)(shards, batch_of(mesh))
        assert tuple(events) == fs.predict_events(plan, sharded.schedule, forwards=2, micro_batches=2)
        return sum(event.kind == "all_gather" for event in events), (loss, fs.gather(grads, plan, mesh))

    kept = fs.simulate(lambda mesh: main(mesh, strategy="shard_grad_op", reshard_after_backward=False), 2)
    plain = fs.simulate(main, 2)
    assert [count for count, _ in kept] == [3, 3]
    same_bits([result for _, result in kept], [result for _, result in plain])
