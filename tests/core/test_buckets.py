"""Buckets: small units share their collectives, and nothing else changes."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import re
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funcshard as fs
from funcshard._utils import tree
from funcshard.comm.topology import Topology
from funcshard.core.buckets import UnitBucket
from funcshard.core.buffer_comm import BufferComm
from tests.plan.test_predict_nested import MODELS, units_of
from tests.storages import Log

WIDTH, BLOCKS = 5, 4
MUCH = 1 << 20
TWO = 2 * (4 * 30 + 8 * 6)  # bytes of two blocks on two ranks, padding included


class Block(nn.Module):
    """A linear layer, and a frozen gain of another dtype."""

    def __init__(self, log=None):
        super().__init__()
        self.linear, self.log = nn.Linear(WIDTH, WIDTH), Log() if log is None else log
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        self.log(self.linear.weight)
        return x + torch.tanh(self.linear(x.to(self.linear.weight.dtype))) * self.gain.to(x.dtype)


class Stack(nn.Module):
    """Blocks, called in the order that is an argument of the call, after a scale that the root owns."""

    def __init__(self, log=None, blocks=BLOCKS):
        super().__init__()
        self.blocks = nn.ModuleList(Block(log) for _ in range(blocks))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x, order=None, pairs=False):
        x = x * self.scale
        order = range(len(self.blocks)) if order is None else order
        if pairs:
            for a, b in zip(order[::2], order[1::2], strict=True):
                both = nn.Sequential(self.blocks[a], self.blocks[b])
                x = checkpoint(lambda x, both=both: both(x), x, use_reentrant=False)
            return x
        for number in order:
            x = self.blocks[number](x)
        return x


def made(log=None, blocks=BLOCKS):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return fs.make_functional(Stack(log, blocks))


def batch_of(mesh, samples=4):
    return torch.linspace(-1, 1, samples * WIDTH).view(samples, WIDTH) * (1 + mesh.rank)


def same_bits(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def names(*numbers):
    return " + ".join(f"blocks.{number}" for number in numbers)


def of_units(events, kind=""):
    return [event.unit for event in events if event.unit and event.kind.startswith(kind)]


def sharded_of(mesh, bucket_bytes, *, strategy="full_shard", precision=None, settings=None, functional=None, **options):
    """Return the sharded function of a stack, its shards and its buffers."""
    apply, params, buffers = functional or made()
    plan = fs.make_plan(params, mesh, units=["blocks.*"], strategy=strategy, precision=precision, bucket_bytes=bucket_bytes)
    schedule = None if settings is None else fs.make_schedule(plan, **settings)
    return fs.fully_shard(apply, plan, mesh, schedule=schedule, **options), fs.shard(params, plan, mesh), buffers


def trained(mesh, bucket_bytes, how):
    """Train two steps; return metrics, parameters and optimizer state, and the numbers of collectives of the second."""
    how = dict(how)
    order, weighted = how.pop("order", None), how.get("weighted", False)
    model = {key: how.pop(key) for key in ("strategy", "precision", "settings", "remat", "functional") if key in how}
    sharded, shards, buffers = sharded_of(mesh, bucket_bytes, **model)

    def loss_fn(shards, buffers, x):
        loss = sharded(shards, buffers, x, order).float().square().mean()
        return (loss, float(mesh.rank)) if weighted else loss

    step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.Adam, lr=0.1), sharded.plan, mesh, **how)
    state, results = step.init(shards, buffers), []
    for _ in range(2):
        with fs.record_events() as events:
            state, metrics = step(state, batch_of(mesh))
        results.append(metrics)
    return [*results, tree.map(torch.clone, state.shards), state.opt_state], Counter(
        event.kind for event in events if event.unit
    )


def both(mesh, how, bucket_bytes=MUCH):
    """Train with and without buckets, compare the bits, and return the numbers of collectives of both."""
    (bucketed, fewer), (alone, more) = (trained(mesh, size, how) for size in (bucket_bytes, 0))
    same_bits(bucketed, alone)
    return fewer, more


HOWS = {
    "weights, of which one is zero": {"weighted": True},
    "shown": {"on_grads": lambda unit, grads: {path: 2 * grad for path, grad in grads.items() if "bias" in path}},
    "a unit that is not used": {"order": (0, 1, 3)},
    "the first and last are not used": {"order": (1, 2)},
    "a unit that is used twice": {"order": (0, 1, 2, 1, 3)},
    "used twice in a row, the last": {"order": (0, 1, 3, 3)},
    "all of them twice, reduced once": {"order": (0, 1, 2, 3, 3, 2, 1, 0), "accumulate": 2, "reduce": "once"},
    "backwards": {"order": (3, 2, 1, 0)},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS.values(), ids=HOWS)
@pytest.mark.filterwarnings("ignore:units ran in another order")
def test_whatever_is_trained_the_bits_are_the_same(how):
    for fewer, more in fs.simulate(lambda mesh: both(mesh, how), 2):
        assert fewer.total() < more.total()


# --- numbers and collectives -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_of_a_hundred_tiny_units_all_collectives_are_three():
    torch.manual_seed(0)
    apply, params, buffers = fs.make_functional(nn.Sequential(*[nn.Linear(4, 4) for _ in range(100)]))

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["*"], bucket_bytes=MUCH)
        sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        with fs.record_events() as events:
            fs.value_and_grad(lambda s: sharded(s, buffers, torch.ones(2, 4, requires_grad=True)).sum())(shards)
        assert tuple(events) == fs.predict_events(plan)
        return [(event.kind, event.bytes, event.unit) for event in events]

    unit = " + ".join(map(str, range(100)))
    expected = [(kind, 100 * 20 * 4, unit) for kind in ("all_gather", "all_gather", "reduce_scatter")]
    assert fs.simulate(main, 2) == [expected] * 2


def test_events_say_which_units_shared_a_collective_and_how_much_it_carried():
    def main(mesh):
        sharded, shards, buffers = sharded_of(mesh, TWO, settings={"limit": 1})
        with fs.record_events() as events:
            fs.value_and_grad(lambda s: sharded(s, buffers, batch_of(mesh)).square().mean())(shards)
        assert tuple(events) == fs.predict_events(sharded.plan, sharded.schedule)
        return [event for event in events if event.unit]

    def pair(kind, numbers):
        buffers = ["float32"] if kind == "reduce_scatter" else ["float32", "float64.frozen"]
        sizes = {"float32": 2 * 30 * 4, "float64.frozen": 2 * 6 * 8}
        return [fs.Event(kind, names(*numbers), key, key[:7], sizes[key], "shard", 2) for key in buffers]

    (found, other), first, last = fs.simulate(main, 2), (0, 1), (2, 3)
    assert found == other
    assert found == [
        *pair("all_gather", first), *pair("all_gather", last),
        *pair("all_gather", last), *pair("all_gather", first), *pair("reduce_scatter", last), *pair("reduce_scatter", first),
    ]  # fmt: skip


SETTINGS = [
    {"forward_prefetch": forward, "backward_prefetch": backward, "limit": limit, "on_demand": spared}
    for forward, backward, limit, spared in itertools.product(
        [True, False], ["pre", "post", None], [1, 2], [(), ("blocks.1",)]
    )
]


def truncated(unit, buffer):
    """Return a cast for one unit in the middle only, which is therefore gathered by itself."""
    if (unit.name, buffer.key) == ("blocks.2", "float32"):
        return fs.Cast(lambda shard: shard.half(), lambda rows: rows.flatten().float())
    return None


WAYS = {  # options of fully_shard, of accumulate, and of predict_events
    "one gradient": ({}, {}, {}),
    "micro-batches": ({}, {"micro_batches": 2, "reduce": "each"}, {}),
    "reduced once": ({}, {"micro_batches": 2, "reduce": "once"}, {}),
    "a cast": ({"cast": truncated}, {}, {"cast": truncated}),
    "computed again": ({"remat": ["blocks.0", "blocks.3"]}, {}, {"recomputed": ["blocks.0", "blocks.3"]}),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_what_runs_under_any_schedule_is_what_is_predicted(strategy, way):
    sharding, accumulation, prediction = WAYS[way]
    functional = made()

    def main(mesh):
        settings = SETTINGS[:: 1 if (strategy, way) == ("full_shard", "one gradient") else 7]
        for each, size in itertools.product(settings, (TWO, MUCH)):
            sharded, shards, buffers = sharded_of(
                mesh, size, strategy=strategy, settings=each, functional=functional, **sharding
            )
            loss_fn = lambda s, x, f=sharded, b=buffers: f(s, b, x).square().mean()  # noqa: E731
            run = fs.accumulate(loss_fn, **accumulation) if accumulation else fs.value_and_grad(loss_fn)
            with fs.record_events() as events:
                run(shards, batch_of(mesh))
            assert tuple(events) == fs.predict_events(sharded.plan, sharded.schedule, **prediction, **accumulation), each

    fs.simulate(main, 2)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_what_runs_of_nested_units_is_what_is_predicted(model):
    torch.manual_seed(0)
    net = MODELS[model]()
    apply, params, _ = fs.make_functional(net)

    def main(mesh):
        x = torch.linspace(-1, 1, 6).view(2, 3) * (1 + mesh.rank)
        results = []
        for size, settings in ((0, {}), (150, {}), (MUCH, {"backward_prefetch": "post"}), (MUCH, {"limit": 2})):
            plan = fs.make_plan(params, mesh, units=units_of(net), bucket_bytes=size)
            sharded = fs.fully_shard(apply, plan, mesh, schedule=fs.make_schedule(plan, **settings))
            shards = fs.shard(params, plan, mesh)
            with fs.record_events() as events:
                loss, grads = fs.value_and_grad(lambda s, f=sharded: f(s, {}, x).square().mean())(shards)
            assert tuple(events) == fs.predict_events(plan, sharded.schedule)
            results.append((loss, fs.gather(grads, plan, mesh)))
        for result in results[1:]:
            same_bits(result, results[0])

    fs.simulate(main, 2)


PAIRS = [("blocks.0", "blocks.1"), ("blocks.2", "blocks.3")]


@pytest.mark.parametrize("size", [TWO, MUCH])
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_what_runs_of_units_that_one_checkpoint_holds_is_what_is_predicted(strategy, size):
    def main(mesh):
        results = []
        for bucket_bytes in (size, 0):
            sharded, shards, buffers = sharded_of(mesh, bucket_bytes, strategy=strategy, settings={})
            with fs.record_events() as events:
                loss_fn = lambda s, f=sharded, b=buffers: f(s, b, batch_of(mesh), None, True).square().mean()  # noqa: E731
                results.append(fs.value_and_grad(loss_fn)(shards))
            assert tuple(events) == fs.predict_events(sharded.plan, sharded.schedule, recomputed=PAIRS)
        same_bits(*results)

    fs.simulate(main, 2)


def test_an_order_that_is_learned_says_which_units_share_a_gather():
    def main(mesh):
        sharded, shards, buffers = sharded_of(mesh, MUCH)
        found = []
        for _ in range(2):
            with fs.record_events() as events:
                fs.value_and_grad(lambda s: sharded(s, buffers, batch_of(mesh), (3, 0, 2)).square().mean())(shards)
            found.append(tuple(events))
        assert found[1] == fs.predict_events(sharded.plan, sharded.schedule)
        return [list(dict.fromkeys(of_units(events))) for events in found]

    # The first call cannot know that unit 1 will not be called, and gathers it in vain.
    assert fs.simulate(main, 2) == [[[names(0, 1, 2, 3), names(0, 2, 3)], [names(0, 2, 3)]]] * 2


APART = {
    "on demand": {"settings": {"on_demand": ["blocks.2"]}},
    "with a cast": {"settings": {}, "cast": truncated},
}


@pytest.mark.parametrize("which", APART)
def test_a_unit_on_demand_or_with_a_cast_is_gathered_by_itself(which):
    options = APART[which]

    def main(mesh):
        results = []
        for size in (MUCH, 0):
            sharded, shards, buffers = sharded_of(mesh, size, **options)
            with fs.record_events() as events:
                loss_fn = lambda s, f=sharded, b=buffers: f(s, b, batch_of(mesh)).sum()  # noqa: E731
                results.append(fs.value_and_grad(loss_fn)(shards))
            if size:
                found = [event for event in events if event.buffer == "float32"]
        same_bits(*results)
        return [set(of_units(found, kind)) for kind in ("all_gather", "reduce")]

    apart = {names(0, 1, 3), names(2)}
    assert fs.simulate(main, 2) == [[apart, apart if "cast" in which else {names(0, 1, 2, 3)}]] * 2


def test_units_that_an_earlier_micro_batch_alone_has_used_are_reduced_together_in_the_end():
    def main(mesh):
        results = []
        for size in (MUCH, 0):
            sharded, shards, buffers = sharded_of(mesh, size, settings={"forward_prefetch": False})
            loss_fn = lambda s, x, f=sharded, b=buffers: f(s, b, x[1:], (0,) if x[0, 0] else None).sum()  # noqa: E731
            batch = torch.cat([torch.zeros(1, WIDTH), batch_of(mesh, 1), torch.ones(1, WIDTH), batch_of(mesh, 1)])
            with fs.record_events() as events:
                results.append(fs.accumulate(loss_fn, micro_batches=2, reduce="once")(shards, batch))
            if size:
                found = of_units(events, "reduce")
        same_bits(*results)
        return found

    assert fs.simulate(main, 2) == [[names(0), names(1, 2, 3)]] * 2


@pytest.mark.filterwarnings("ignore:units ran in another order")
def test_a_unit_that_comes_again_is_gathered_by_itself_and_reduced_twice():
    def main(mesh):
        sharded, shards, buffers = sharded_of(mesh, MUCH, settings={})
        with fs.record_events() as events:
            fs.value_and_grad(lambda s: sharded(s, buffers, batch_of(mesh), (0, 1, 2, 3, 1)).square().mean())(shards)
        found = [event for event in events if event.unit and event.buffer == "float32"]
        return of_units(found, "all_gather"), of_units(found, "reduce")

    everything, one = names(0, 1, 2, 3), names(1)
    # Backward reaches the second use of unit 1 first. It gathers the other units with it, but not
    # the first use.
    assert fs.simulate(main, 2) == [([everything, one] * 2, [names(1, 2, 3), names(0, 1)])] * 2


def test_units_whose_gradients_do_not_come_are_not_waited_for_beyond_backward():
    class Twigs(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            return [part(x) for part in self.parts]

    apply, params, buffers = fs.make_functional(Twigs())

    def main(mesh):
        results = []
        for size in (MUCH, 0):
            plan = fs.make_plan(params, mesh, units=["parts.*"], bucket_bytes=size)
            sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
            with fs.record_events() as events:
                loss_fn = lambda s, f=sharded: sum(y.sum() for y in f(s, buffers, torch.ones(2, 3))[:2])  # noqa: E731
                results.append(fs.value_and_grad(loss_fn)(shards))
            reduced = of_units(events, "reduce")
            assert reduced == (["parts.0 + parts.1"] if size else ["parts.1", "parts.0"])
        same_bits(*results)

    fs.simulate(main, 2)


@pytest.mark.slow
def test_two_calls_in_one_loss_and_losses_of_a_second_model_share_what_each_has():
    def main(mesh):
        results = []
        for size in (MUCH, 0):
            student, shards, buffers = sharded_of(mesh, size)
            teacher, others, _ = sharded_of(mesh, size)

            def loss_fn(both, student=student, teacher=teacher, buffers=buffers):
                x = batch_of(mesh)
                y = student(both["student"], buffers, student(both["student"], buffers, x))
                return (y - teacher(both["teacher"], buffers, x)).square().mean()

            with fs.record_events() as events:
                results.append(fs.value_and_grad(loss_fn)({"student": shards, "teacher": others}))
        same_bits(*results)
        with fs.record_events() as events:
            student, shards, buffers = sharded_of(mesh, MUCH)
            loss_fn = lambda s: student(s, buffers, student(s, buffers, batch_of(mesh))).square().mean()  # noqa: E731
            fs.value_and_grad(loss_fn)(shards)
        return of_units(events, "reduce")

    assert fs.simulate(main, 2) == [[names(0, 1, 2, 3)] * 2] * 2


@pytest.mark.slow
def test_one_tree_of_shards_for_two_models_and_two_trees_for_one():
    def main(mesh):
        results, x = [], batch_of(mesh)
        for size in (MUCH, 0):
            one, shards, buffers = sharded_of(mesh, size)
            two, _, _ = sharded_of(mesh, size)
            shared = lambda s, a=one, b=two, c=buffers: (a(s, c, x) * b(s, c, 2 * x)).mean()  # noqa: E731
            trees = lambda s, a=one, c=buffers: (a(s[0], c, x) * a(s[1], c, 2 * x)).mean()  # noqa: E731
            results.append((fs.value_and_grad(shared)(shards), fs.value_and_grad(trees)((shards, shards))))
        same_bits(*results)

    fs.simulate(main, 2)


def test_gradients_by_hand_and_a_second_backward_gather_together_and_reduce_alone():
    def main(mesh):
        results = []
        for size in (MUCH, 0):
            sharded, shards, buffers = sharded_of(mesh, size, settings={})
            leaves = [shards[f"blocks.{i}"]["float32"].requires_grad_() for i in range(BLOCKS)]
            loss = sharded(shards, buffers, batch_of(mesh)).square().mean()
            with fs.record_events() as events:
                first = torch.autograd.grad(loss, leaves, retain_graph=True)
                second = torch.autograd.grad(loss, leaves)
            same_bits(first, second)
            results.append(first)
            if size:
                # the input of the first unit needs no gradient
                once = [*[names(1, 2, 3)] * 2, *[names(i) for i in reversed(range(BLOCKS))]]
                assert of_units(events) == once * 2
        same_bits(*results)

    fs.simulate(main, 2)


def test_transforms_of_torch_func_gather_and_reduce_unit_by_unit():
    def main(mesh):
        results = []
        for size in (MUCH, 0):
            sharded, shards, buffers = sharded_of(mesh, size)
            leaves = {name: {"float32": shard["float32"]} for name, shard in shards.items() if name}

            def loss_fn(trained, shards=shards, sharded=sharded, buffers=buffers):
                merged = {name: {**shard, **trained.get(name, {})} for name, shard in shards.items()}
                return sharded(merged, buffers, batch_of(mesh)).square().mean()

            with fs.record_events() as events:
                results.append(torch.func.grad(loss_fn)(leaves))
            assert set(of_units(events)) == {names(i) for i in range(BLOCKS)}
        same_bits(*results)

    fs.simulate(main, 2)


def test_the_memory_of_a_bucket_is_freed_unit_by_unit():
    comms = [BufferComm(Topology(fs.Mesh(), True), name) for name in "abc"]
    wholes = []

    class Work:
        def wait(self):
            wholes.append(torch.arange(6.0))
            return wholes[0]

    bucket, shards = UnitBucket(comms), [(name, torch.ones(2)) for name in "abc"]
    handles = bucket.start_gather(shards)
    whole = handles[0].work.split._whole
    handles[0].work.split._whole = dataclasses.replace(whole, work=Work())
    buffers = [handle.finish() for handle in handles[:2]]
    assert [buffer.tolist() for buffer in buffers] == [[0.0, 1.0], [2.0, 3.0]]
    assert handles[0].finish() is buffers[0]
    assert len(wholes) == 1
    log = Log()
    log(wholes.pop())
    for buffer in buffers:
        log(buffer)
    del buffer, buffers, handles[:2]
    assert log.alive() == 0  # although the third handle is not finished
    assert handles[0].finish().tolist() == [4.0, 5.0]


# --- properties that do not change -------------------------------------------------------------------------------------


def test_each_unit_has_gathered_buffers_and_gradients_of_its_own_and_nothing_is_left():
    log = Log()
    functional = made(log)

    def main(mesh):
        sharded, shards, buffers = sharded_of(mesh, MUCH, functional=functional)
        _, grads = fs.value_and_grad(lambda s: sharded(s, buffers, batch_of(mesh)).square().mean())(shards)
        storages = {grad.untyped_storage().data_ptr() for grad in tree.leaves(grads) if grad is not None}
        sizes = [grad.untyped_storage().nbytes() == 4 * grad.numel() for grad in tree.leaves(grads) if grad is not None]
        return len(storages), all(sizes)

    gc.disable()  # so that memory has to be freed by reference counts, at the end of the step
    try:
        assert fs.simulate(main, 2) == [(BLOCKS + 1, True)] * 2
        assert len({ref.cdata for ref in log}) >= 2
        assert log.alive() == 0
    finally:
        gc.enable()


def test_a_checkpoint_of_bucketed_units_is_restored_without_buckets(tmp_path):
    def main(mesh):
        states = []
        for size in (MUCH, 0):
            sharded, shards, buffers = sharded_of(mesh, size)
            step = fs.make_train_step(
                lambda s, b, x, f=sharded: f(s, b, x).square().mean(),
                fs.torch_optimizer(torch.optim.Adam, lr=0.1), sharded.plan, mesh,
            )  # fmt: skip
            state = step.init(shards, buffers)
            if size:
                state, _ = step(state, batch_of(mesh))
                fs.save(tmp_path / "bucketed", state, sharded.plan, mesh)
            else:
                state = fs.restore(tmp_path / "bucketed", sharded.plan, mesh)
            state, metrics = step(state, batch_of(mesh))
            states.append((state, metrics))
        same_bits(*states)

    fs.simulate(main, 2)


def test_evaluation_gathers_together_and_gives_the_same_bits():
    def main(mesh):
        found = []
        for size in (MUCH, 0):
            sharded, shards, buffers = sharded_of(mesh, size)
            with torch.no_grad(), fs.record_events() as events:
                found.append(sharded(shards, buffers, batch_of(mesh)))
        same_bits(*found)
        with torch.no_grad(), fs.record_events() as events:
            sharded, shards, buffers = sharded_of(mesh, MUCH)
            sharded(shards, buffers, batch_of(mesh))
        return of_units(events)

    assert fs.simulate(main, 2) == [[names(0, 1, 2, 3)] * 2] * 2


def test_a_unit_that_computes_in_another_precision_in_its_mode_is_gathered_by_itself():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        net = Stack()
    net.blocks[1].eval()
    functional = fs.make_functional(net)
    precision = fs.MixedPrecision(param_dtype=torch.bfloat16, full_precision_in_eval=True)

    def main(mesh):
        sharded, shards, buffers = sharded_of(mesh, MUCH, precision=precision, functional=functional)
        with fs.record_events() as events:
            sharded(shards, buffers, batch_of(mesh))
        return [(event.unit, event.dtype) for event in events if event.unit and event.buffer == "float32"]

    assert fs.simulate(main, 2) == [[(names(0, 2, 3), "bfloat16"), (names(1), "float32")]] * 2


# --- errors ------------------------------------------------------------------------------------------------------------


def test_ranks_that_gather_other_units_together_are_told_the_units():
    def main(mesh):
        sharded, shards, buffers = sharded_of(mesh, TWO, settings={})
        if mesh.rank:
            return sharded.plan, sharded(shards, buffers, batch_of(mesh))
        return fs.unshard(lambda leaves: None, sharded.plan.units[""], mesh)(shards[""]), fs.psum(torch.ones(1), mesh)

    words = r"all_gather of float32\[60\], float32\[30\] of buffer 'float32' of units 'blocks\.0' \+ 'blocks\.1'"
    with pytest.raises(RuntimeError, match=words):
        fs.simulate(main, 2)


def test_a_shard_that_was_modified_is_named_whichever_unit_starts_to_gather():
    def main(mesh):
        sharded, shards, buffers = sharded_of(mesh, MUCH)
        loss = sharded(tree.map(torch.clone, shards), buffers, batch_of(mesh)).sum()
        assert not loss.requires_grad
        leaves = {
            name: {key: t.requires_grad_(key == "float32") for key, t in shard.items()} for name, shard in shards.items()
        }
        loss = sharded(leaves, buffers, batch_of(mesh)).sum()
        with torch.no_grad():
            leaves["blocks.1"]["float32"].add_(1)
        # Backward by a shard that is gathered earlier does not reach the one that was modified.
        torch.autograd.grad(loss, leaves["blocks.3"]["float32"], retain_graph=True)
        torch.autograd.grad(loss, leaves["blocks.0"]["float32"])

    words = "the shard 'float32' of unit 'blocks.1' was modified in place between forward and backward"
    with pytest.raises(RuntimeError, match=re.escape(words)):
        fs.simulate(main, 2)


def test_a_bucket_keeps_few_comms_whatever_units_share_it():
    bucket = UnitBucket([BufferComm(Topology(fs.Mesh(), True), str(i), "float32") for i in range(200)])
    assert [bucket.comm(["0", str(i)]).unit for i in range(1, 200)] == [f"0 + {i}" for i in range(1, 200)]
    assert bucket.comm(["3", "4"]) is bucket.comm(["3", "4"])
    assert bucket.comm(["3", "4"]).label == "buffer 'float32' of units '3' + '4'"
    assert len(bucket._comms) <= 64
