"""The prefetcher: which units it gathers ahead, and when; it changes no result and leaves nothing in memory."""

from __future__ import annotations

import functools
import gc
import itertools
import re
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcshard as fs
from funcshard.comm.topology import Topology
from funcshard.core.buffer_comm import AllGatherHandle, BufferComm
from funcshard.core.prefetcher import Prefetcher
from tests.ranks import run_ranks, run_simulated
from tests.storages import Log, LoggedBlock

WIDTH, BLOCKS = 6, 5
OTHER_ORDER = r"units ran in another order than the schedule's, from position 1 on: .* on demand, which is correct"


class Stack(nn.Module):
    """Blocks, called in the order that is an argument of the call, and a head."""

    def __init__(self, log=None):
        super().__init__()
        self.blocks = nn.ModuleList(LoggedBlock(WIDTH, Log() if log is None else log) for _ in range(BLOCKS))
        self.head, self.scale = nn.Linear(WIDTH, 1), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x, order=range(BLOCKS)):
        x = x * self.scale  # so that the backward of the first block needs its weight too
        for number in order:
            x = self.blocks[number](x)
        return self.head(x).square().mean()


def made(log=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Stack(log)


def units_of(*numbers):
    return ["", *(f"blocks.{number}" for number in numbers)]


def batch_of(mesh):
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (1 + mesh.rank)


def steps(mesh, functional, options, strategy="full_shard", orders=(range(BLOCKS), range(BLOCKS))):
    """Run one step for each order; return their losses, gradients and events, and the sharded function."""
    apply, params, buffers = functional
    plan = fs.make_plan(params, mesh, units=["blocks.*"], strategy=strategy)
    schedule = None if options is None else fs.make_schedule(plan, **options)
    sharded = fs.fully_shard(apply, plan, mesh, schedule=schedule)
    shards, done = fs.shard(params, plan, mesh), []
    for order in orders:
        with fs.record_events() as events:
            loss, grads = fs.value_and_grad(lambda s, order=order: sharded(s, buffers, batch_of(mesh), order))(shards)
        done.append((loss, fs.gather(grads, plan, mesh), tuple(events)))
    return done, sharded


def same_bits(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("backward", "ahead"), [("pre", ["2"]), ("post", []), (None, [])], ids=str)
@pytest.mark.parametrize("spared", [[], ["2"]], ids=["", "on demand"])
def test_the_last_unit_is_gathered_when_the_gradient_of_the_output_arrives(backward, ahead, spared):
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    apply, params, buffers = fs.make_functional(net)

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["*"])
        schedule = fs.make_schedule(plan, backward_prefetch=backward, on_demand=spared)
        sharded = fs.fully_shard(apply, plan, mesh, schedule=schedule)
        shards, seen = fs.shard(params, plan, mesh), []

        def loss_fn(s):
            out = sharded(s, buffers, batch_of(mesh))
            forward = len(events)
            # runs after the older hook on the output, which begins the backward prefetch
            out.register_hook(lambda _: seen.append([event.unit for event in events[forward:]]))
            loss = out.square()
            loss.register_hook(lambda _: seen.append([event.unit for event in events[forward:]]))
            return loss.sum()

        with fs.record_events() as events:
            fs.value_and_grad(loss_fn)(shards)
        assert tuple(events) == fs.predict_events(plan, sharded.schedule, not_saved=["0"])
        return seen

    assert fs.simulate(main, 2) == [[[], ahead if not spared else []]] * 2


# --- the order of units ------------------------------------------------------------------------------------------------


def test_the_first_call_learns_the_order_and_the_next_gathers_ahead_by_it():
    functional = fs.make_functional(made())
    order = (3, 1, 0, 4, 2)

    def main(mesh):
        done, sharded = steps(mesh, functional, None, orders=(order, order))
        return done, sharded

    def gathered(events):
        return [event.unit for event in events if event.kind == "all_gather"]

    for done, sharded in fs.simulate(main, 2):
        plan, schedule = sharded.plan, sharded.schedule
        assert schedule == fs.make_schedule(plan, [f"blocks.{number}" for number in order])
        assert done[0][2] == done[1][2] == fs.predict_events(plan, schedule)
        assert gathered(done[1][2]) == [*units_of(*order), *units_of(*reversed(order))[1:]]
        same_bits(done[0][:2], done[1][:2])


def test_a_call_without_gradients_learns_the_order_as_well():
    apply, params, buffers = fs.make_functional(made())

    def main(mesh):
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        sharded = fs.fully_shard(apply, plan, mesh)
        with torch.no_grad():
            sharded(fs.shard(params, plan, mesh), buffers, batch_of(mesh), (2, 0, 1, 3, 4))
        return sharded.schedule.order

    assert fs.simulate(main, 2) == [tuple(units_of(2, 0, 1, 3, 4))] * 2


@pytest.mark.parametrize("grad", [True, False])
def test_a_call_that_is_over_keeps_no_shard_until_garbage_is_collected(grad):
    apply, params, buffers = fs.make_functional(made())
    mesh = fs.Mesh()
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    refs = [weakref.ref(each.requires_grad_(grad)) for unit in shards.values() for each in unit.values()]
    gc.disable()
    try:
        loss = sharded(shards, buffers, batch_of(mesh))
        if grad:
            loss.backward()
        del shards, loss
        assert [ref() for ref in refs] == [None] * len(refs)
    finally:
        gc.enable()


def test_a_call_that_fails_teaches_no_order():
    apply, params, buffers = fs.make_functional(made())
    mesh = fs.Mesh()
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    with pytest.raises(IndexError):
        sharded(shards, buffers, batch_of(mesh), (4, 9))
    sharded(shards, buffers, batch_of(mesh), (1, 0))
    assert sharded.schedule.order == tuple(units_of(1, 0))


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("given", [True, False], ids=["given", "learned"])
@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (0, 1, 3), (0, 0, 1, 2, 3, 4)], ids=str)
def test_another_order_is_correct_to_the_bit_and_warned_about_once(order, given, limit):
    log = Log()
    functional, usual = fs.make_functional(made(log)), range(BLOCKS)
    given = given or limit > 1
    options = {"limit": limit} if given else None
    first_wrong = next(i for i, name in enumerate([*units_of(*order), None]) if name != [*units_of(*usual), None][i])

    def main(mesh):
        lazy = {"forward_prefetch": False, "backward_prefetch": None}
        expected, _ = steps(mesh, functional, lazy, orders=(usual, order, order, usual))
        return expected, steps(mesh, functional, options, orders=(usual, order, order, usual))[0]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = fs.simulate(main, 2)
    for expected, done in results:
        for found, wanted in zip(done, expected, strict=True):
            same_bits(found[:2], wanted[:2])
    words = OTHER_ORDER.replace("position 1", f"position {first_wrong}")
    assert [bool(re.match(words, str(each.message))) for each in said] == [True] * 2  # once on each rank
    assert log.alive() == 0


def in_an_order_of_its_own(mesh, orders):
    steps(mesh, fs.make_functional(made()), None, orders=(orders[mesh.rank],))


DIFFERENT_ORDERS = {
    "another unit": (
        ((0, 1, 2), (0, 2, 1)),
        r"the order of units must be the same on every rank; rank 0 has unit 'blocks\.1' at position 2 and rank 1 .*\.2'",
    ),
    "one unit fewer": (
        ((0, 1, 2), (0, 1)),
        r"rank 0 has unit 'blocks\.2' at position 3 and rank 1 has no unit at position 3",
    ),
}


@pytest.mark.parametrize("run", [run_simulated, run_ranks])
@pytest.mark.parametrize(("orders", "words"), DIFFERENT_ORDERS.values(), ids=DIFFERENT_ORDERS)
def test_ranks_that_run_units_in_different_orders_are_told_the_position_and_the_units(run, orders, words):
    with pytest.raises(ValueError, match=words):
        run(in_an_order_of_its_own, 2, orders)


def with_a_schedule_of_its_own(mesh, settings):
    steps(mesh, fs.make_functional(made()), settings[mesh.rank])


@pytest.mark.parametrize("run", [run_simulated, run_ranks])
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param(({"limit": 1}, {"limit": 2}), "at most 1 ahead.* at most 2 ahead", id="limit"),
        pytest.param(({}, {"backward_prefetch": None}), "backward prefetch pre.* backward prefetch off", id="backward"),
        pytest.param(({}, {"order": ["blocks.1", "blocks.0"]}), "of 6 units.* of 3 units", id="order"),
    ],
)
def test_ranks_with_different_schedules_are_refused(run, settings, words):
    pattern = f"(?s)the schedule must be the same on every rank; rank 0 has Schedule .*{words}"
    with pytest.raises(ValueError, match=pattern):
        run(with_a_schedule_of_its_own, 2, settings)


class Waited:
    """A started collective that counts how often it is waited for."""

    def __init__(self):
        self.waits = 0

    def wait(self):
        self.waits += 1


def test_what_was_gathered_ahead_for_a_unit_that_is_never_entered_is_waited_for_and_dropped():
    started = {name: [AllGatherHandle(Waited(), BufferComm(Topology(fs.Mesh(), True), name), 1), None] for name in "abcd"}
    asked = []
    start = lambda name: asked.append(name) or started[name]  # noqa: E731
    prefetcher = Prefetcher(fs.Schedule(tuple("abcd"), True, "pre", limit=2), start, known=True)
    assert prefetcher.pre_forward("a") is started["a"]
    assert asked == ["a", "b", "c"]
    assert prefetcher.pre_forward("b") is started["b"]
    assert asked == ["a", "b", "c", "d"]
    prefetcher.post_forward()
    assert {name: of[0].work.waits for name, of in started.items()} == dict.fromkeys("abcd", 1)
    prefetcher.post_forward()
    assert started["c"][0].work.waits == 1
    assert prefetcher.pre_forward("c") is None  # a unit that backward computes again gathers itself, and nothing ahead
    assert asked == ["a", "b", "c", "d"]
    assert prefetcher.ran == ["a", "b"]


@dataclass
class Brought(Waited):
    """A started collective with a result."""

    out: torch.Tensor

    def __post_init__(self):
        super().__init__()

    def wait(self):
        super().wait()
        return self.out


def test_a_wait_that_was_interrupted_is_not_begun_again_when_the_call_ends():
    class Stuck(Waited):
        def wait(self):
            super().wait()
            raise KeyboardInterrupt

    work = Stuck()
    prefetcher = Prefetcher(
        fs.Schedule(("a", "a"), True, "pre", limit=1),
        lambda name: [AllGatherHandle(work, BufferComm(Topology(fs.Mesh(), True), name), 3)],
        known=True,
    )
    with pytest.raises(KeyboardInterrupt):
        prefetcher.pre_forward("a", stays=True)
    prefetcher.post_forward()
    assert work.waits == 1


def test_what_stays_for_a_second_time_is_waited_for_by_each_use_which_has_a_tensor_of_its_own():
    work = Brought(torch.arange(3.0))
    order = ("a", "b", "a", "a", "b")
    prefetcher = Prefetcher(
        fs.Schedule(order, True, "pre", limit=1),
        lambda name: [AllGatherHandle(work if name == "a" else Waited(), BufferComm(Topology(fs.Mesh(), True), name), 3)],
        known=True,
    )
    (first,), waits = prefetcher.pre_forward("a", stays=True), work.waits
    assert waits == 1
    one = first.finish()
    prefetcher.pre_forward("b", stays=False)
    (second,) = prefetcher.pre_forward("a", stays=True)
    (third,) = prefetcher.pre_forward("a", stays=True)
    assert first is second is third
    waits = work.waits
    two, three = second.finish(), third.finish()
    assert work.waits == waits + 2
    assert one is not two is not three
    assert one.data_ptr() == two.data_ptr() == three.data_ptr() == work.out.data_ptr()
    assert prefetcher.pre_forward("b", stays=False)[0].work.waits == 1  # gathered again
    prefetcher.post_forward()


def test_a_rank_that_is_ahead_waits_for_a_unit_before_it_gathers_the_next():
    started = {name: [AllGatherHandle(Waited(), BufferComm(Topology(fs.Mesh(), True), name), 1)] for name in "ab"}
    waited_for = {}

    def start(name):
        waited_for[name] = [other for other, of in started.items() if of[0].work.waits]
        return started[name]

    Prefetcher(fs.Schedule(("a", "b"), True, "pre", limit=1), start, known=True).pre_forward("a")
    assert waited_for == {"a": [], "b": ["a"]}


# --- the order in backward, on real ranks ------------------------------------------------------------------------------


class Timeline(list):
    """The list that markers write to; ``deepcopy`` of a module keeps the same list."""

    def __deepcopy__(self, memo):
        return self


class Marked:
    """A mixin that marks the moment when backward has computed half of a layer's gradients."""

    def mark(self, name, timeline):
        self.name, self.timeline = name, timeline
        return self

    def _sa_block(self, *args: Any, **kwargs: Any):
        out = super()._sa_block(*args, **kwargs)
        if out.requires_grad:
            out.register_hook(lambda grad: self.timeline[-1].append(f"gradients {self.name}"))
        return out


class EncoderLayer(Marked, nn.TransformerEncoderLayer):
    pass


class DecoderLayer(Marked, nn.TransformerDecoderLayer):
    pass


LAYERS = 6
ENCODER = [f"encoder.layers.{i}" for i in range(LAYERS)]
DECODER = [f"decoder.layers.{i}" for i in range(LAYERS)]
SETTINGS = ("pre", "post", None)


def transformer_backward(mesh):
    """Return the timeline of two steps of a transformer, for each setting of backward prefetch."""
    timeline = Timeline()
    net = nn.Transformer(8, 2, LAYERS, LAYERS, 12, dropout=0.0, batch_first=True)
    sizes = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": True}
    for stack, cls, names in ((net.encoder, EncoderLayer, ENCODER), (net.decoder, DecoderLayer, DECODER)):
        stack.layers = nn.ModuleList(cls(8, 2, **sizes).mark(name, timeline) for name in names)
    units = fs.wrap.by_class(nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)(net)
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=units)
    shards, x = fs.shard(params, plan, mesh), torch.randn(2, 3, 8)
    happened = {}
    for setting in SETTINGS:
        sharded = fs.fully_shard(apply, plan, mesh, schedule=fs.make_schedule(plan, backward_prefetch=setting))
        for iteration in range(2):
            with fs.record_events() as events:
                timeline.append(events)
                fs.value_and_grad(lambda s, f=sharded: f(s, buffers, x, x).square().mean())(shards)
            happened[setting, iteration] = [e if isinstance(e, str) else f"{e.kind} {e.unit}" for e in events]
    return happened, units


@functools.cache
def transformer_on_ranks():
    return run_ranks(transformer_backward, 2)


@pytest.mark.parametrize("iteration", [0, 1])
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_next_gather_of_a_backward_starts_before_after_or_well_after_the_gradient_work(setting, iteration):
    backward = [*reversed(DECODER), *reversed(ENCODER)]
    for happened, units in transformer_on_ranks():
        assert units == ENCODER + DECODER
        line = happened[setting, iteration]
        gathers = [e.removeprefix("all_gather ") for e in line if e.startswith("all_gather")]
        assert gathers == ["", *ENCODER, *DECODER, *backward]
        line = line[1 + 2 * LAYERS :]  # the all-gathers of forward
        for now, following in itertools.pairwise(backward):
            gather = line.index(f"all_gather {following}")
            gradients, reduced = line.index(f"gradients {now}"), line.index(f"reduce_scatter {now}")
            assert gradients < reduced
            if setting == "pre":
                assert gather < gradients
            elif setting == "post":
                assert gradients < gather < reduced
            else:
                assert gather > reduced


# --- overlap, on real ranks --------------------------------------------------------------------------------------------


@dataclass
class Late:
    """A group in which rank 1 starts some all-gathers late: number ``n`` after rank 0 has reached ``after[n]``."""

    group: Any
    store: Any
    after: dict[int, str]
    line: list[str] = field(default_factory=list)
    count: int | None = None  # None: all-gathers start on time, and are not recorded

    def __getattr__(self, name):
        return getattr(self.group, name)

    def all_gather(self, out, shard, *, label=""):
        return self.start(lambda: self.group.all_gather(out, shard, label=label))

    def all_gather_shared(self, shard, *, label=""):
        return self.start(lambda: self.group.all_gather_shared(shard, label=label))

    def start(self, start):
        if self.count is None:
            return start()
        number, self.count = self.count, self.count + 1
        if number in self.after and self.rank == 1:
            self.store.get(self.after[number])  # blocks until rank 0 has set it
        self.line.append(f"start {number}")
        return Noted(start(), lambda: self.line.append(f"wait {number}"))


@dataclass
class Noted:
    work: Any
    note: Any

    def wait(self):
        self.note()
        return self.work.wait()


class Wide(nn.Module):
    """A layer whose all-gather takes milliseconds, and that records when it has been computed."""

    def __init__(self, number, reached):
        super().__init__()
        self.linear, self.number, self.reached = nn.Linear(600, 600), number, reached

    def forward(self, x):
        self.reached(f"forward {self.number}")
        y = torch.tanh(self.linear(x))
        y.register_hook(lambda grad: self.reached(f"backward {self.number}"))
        self.reached(f"forward {self.number} computed")
        return y


class Reached:
    def __init__(self, rank, store, line):
        self.rank, self.store, self.line = rank, store, line

    def __deepcopy__(self, memo):
        return self

    def __call__(self, moment):
        self.line.append(moment)
        if self.rank == 0:
            self.store.set(moment, "reached")


def overlap(mesh, backward):
    store = dist.PrefixStore("overlap", dist.distributed_c10d._get_default_store())
    # Forward gathers 0 1 2 3, and backward 3 2 1 0: eight all-gathers, or seven if unit 3 were
    # kept.
    after = {1: "forward 0 computed", 2: "forward 1 computed", 3: "forward 2 computed"}
    after |= {5: "backward 3", 6: "backward 2", 7: "backward 1"} if backward == "pre" else {}
    late = Late(mesh.shard, store, after)
    mesh = fs.Mesh({"shard": late}, device=mesh.device)
    net = nn.Sequential(*[Wide(number, Reached(mesh.rank, store, late.line)) for number in range(4)])
    apply, params, buffers = fs.make_functional(net)
    plan = fs.make_plan(params, mesh, units=["*"])
    sharded = fs.fully_shard(apply, plan, mesh, schedule=fs.make_schedule(plan, backward_prefetch=backward))
    shards = fs.shard(params, plan, mesh)
    loss_fn = lambda s: sharded(s, buffers, torch.ones(4, 600)).mean()  # noqa: E731
    for _ in range(2):  # in these steps ranks wait for each other to compare the order of units
        fs.value_and_grad(loss_fn)(shards)
    late.line.clear()
    for moment in set(after.values()) if mesh.rank == 0 else ():
        store.delete_key(moment)
    dist.barrier()
    late.count = 0
    fs.value_and_grad(loss_fn)(shards)
    return late.line


@pytest.mark.parametrize("backward", ["pre", "post"])
def test_a_rank_computes_while_another_has_not_started_the_next_all_gather(backward):
    # Rank 1 starts the next all-gather only when rank 0 has computed. If rank 0 waited for it
    # before it computes, both ranks would wait for ever.
    for line in run_ranks(overlap, 2, backward, timeout=40):
        for number in range(3):
            moments = [f"wait {number}", f"forward {number}", f"forward {number} computed", f"wait {number + 1}"]
            indices = [line.index(moment) for moment in moments]
            assert indices == sorted(indices)
            assert line.index(f"start {number + 1}") < line.index(f"forward {number} computed")
            assert not [x for x in line[indices[1] : indices[2]] if x.startswith("wait")]
