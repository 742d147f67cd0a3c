"""The prefetcher: which units it gathers ahead, and when; it changes no result and leaves nothing in memory."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcshard as fs
from funcshard._utils import tree
from funcshard.comm.mesh import CommDtypes, Topology
from funcshard.core.buffer_comm import AllGatherHandle, BufferComm
from funcshard.core.prefetcher import Prefetcher, ScheduleLearner, Use
from tests.core.units import of_module, recorded, requiring_grad, same_bits
from tests.module.law import Runs
from tests.pairwise import crossed
from tests.ranks import on_ranks, run_ranks, run_simulated
from tests.storages import Log, LoggedBlock

WIDTH, BLOCKS = 6, 5


def in_order(net, x, order=range(BLOCKS)):
    x = x * net.scale  # so that the backward of the first block needs its weight too
    for number in order:
        x = net.blocks[number](x)
    return net.head(x).square().mean()


def made(log=None):
    """Return blocks, called in the order that is an argument of the call, and a head."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        blocks = nn.ModuleList(LoggedBlock(WIDTH, Log() if log is None else log) for _ in range(BLOCKS))
        return Runs(in_order, blocks=blocks, head=nn.Linear(WIDTH, 1), scale=nn.Parameter(torch.ones(WIDTH)))


def units_of(*numbers):
    return ["", *(f"blocks.{number}" for number in numbers)]


def batch_of(mesh):
    return torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH) * (1 + mesh.rank)


def steps(mesh, module, schedule=None, orders=(range(BLOCKS), range(BLOCKS))):
    """Run one step for each order; return their losses, gradients and events, and the sharded function."""
    plan, sharded, shards = of_module(mesh, module, ["blocks.*"], schedule=schedule)
    done = []
    for order in orders:
        loss_fn = lambda s, order=order: sharded(s, {}, batch_of(mesh), order)  # noqa: E731
        (loss, grads), events = recorded(fs.value_and_grad(loss_fn), shards)
        done.append((loss, fs.gather(grads, plan, mesh), events))
    return done, sharded


@pytest.mark.parametrize(("backward", "ahead"), [("pre", ["2"]), ("post", []), (None, [])], ids=str)
@pytest.mark.parametrize("spared", [[], ["2"]], ids=["", "on demand"])
@on_ranks(2)
def test_the_last_unit_is_gathered_when_the_gradient_of_the_output_arrives(mesh, backward, ahead, spared):
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    schedule = {"backward_prefetch": backward, "on_demand": spared}
    plan, sharded, shards = of_module(mesh, net, ["*"], schedule=schedule)
    seen = []

    def loss_fn(s):
        out = sharded(s, {}, batch_of(mesh))
        forward, loss = len(events), out.square()
        for tensor in (out, loss):  # of out it runs after the older hook, which begins the backward prefetch
            tensor.register_hook(lambda _: seen.append([event.unit for event in events[forward:]]))
        return loss.sum()

    with fs.record_events() as events:
        fs.value_and_grad(loss_fn)(shards)
    assert tuple(events) == fs.predict_events(plan, sharded.schedule, not_saved=["0"])
    assert seen == [[], ahead if not spared else []]


@on_ranks(2)
def test_the_first_call_learns_the_order_and_the_next_gathers_ahead_by_it(mesh):
    order = (3, 1, 0, 4, 2)
    (first, second), sharded = steps(mesh, made(), orders=(order, order))
    plan, schedule = sharded.plan, sharded.schedule
    assert schedule == fs.make_schedule(plan, [f"blocks.{number}" for number in order])
    assert first[2] == second[2] == fs.predict_events(plan, schedule)
    gathers = [event.unit for event in second[2] if event.kind == "all_gather"]
    assert gathers == [*units_of(*order), *units_of(*reversed(order))[1:]]
    same_bits(first[:2], second[:2])
    _, sharded, shards = of_module(mesh, made(), ["blocks.*"])
    with pytest.raises(IndexError):  # a call that fails teaches nothing
        sharded(shards, {}, batch_of(mesh), (4, 9))
    with torch.no_grad():
        sharded(shards, {}, batch_of(mesh), (2, 0, 1))
    assert sharded.schedule.order == tuple(units_of(2, 0, 1))


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("grad", [True, False])
def test_a_call_that_is_over_keeps_no_shard_until_garbage_is_collected(grad):
    mesh = fs.Mesh()
    _, sharded, shards = of_module(mesh, made(), ["blocks.*"])
    refs = [weakref.ref(each) for each in tree.leaves(requiring_grad(shards, grad))]
    loss = sharded(shards, {}, batch_of(mesh))
    if grad:
        loss.backward()
    del shards, loss
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.nightly(one_in=4)
@pytest.mark.parametrize("schedule", [{}, {"limit": 3}, None], ids=["given", "three ahead", "learned"])
@pytest.mark.parametrize("order", [(4, 3, 2, 1, 0), (0, 1, 3), (0, 0, 1, 2, 3, 4)], ids=str)
def test_another_order_is_correct_to_the_bit_and_warned_about_once(order, schedule):
    log, usual = Log(), range(BLOCKS)
    functional, orders = fs.make_functional(made(log)), (usual, order, order, usual)
    wrong = next(i for i, name in enumerate([*units_of(*order), None]) if name != [*units_of(*usual), None][i])
    lazy = {"forward_prefetch": False, "backward_prefetch": None}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        results = fs.simulate(lambda mesh: [steps(mesh, functional, how, orders)[0] for how in (lazy, schedule)], 2)
    for expected, done in results:
        same_bits([step[:2] for step in done], [step[:2] for step in expected])
    words = f"units ran in another order than the schedule's, from position {wrong} on: .* on demand, which is correct"
    assert [bool(re.match(words, str(each.message))) for each in said] == [True] * 2  # once on each rank
    assert log.alive() == 0


def with_its_own(mesh, orders):
    steps(mesh, fs.make_functional(made()), orders=(orders[mesh.rank],))


DIFFERENCES = {  # orders of two ranks, and the error; tests/promises/test_equal_arguments.py has other schedules
    "another unit": (((0, 1, 2), (0, 2, 1)), r"rank 0 has unit 'blocks\.1' at position 2 and rank 1 .*\.2'"),
    "one unit fewer": (((0, 1, 2), (0, 1)), r"rank 0 has unit 'blocks\.2' at position 3 and rank 1 has no unit at"),
}


@pytest.mark.parametrize(("name", "run"), [*((name, run_simulated) for name in DIFFERENCES), ("another unit", run_ranks)])
def test_ranks_that_run_units_in_different_orders_are_told_the_position_and_the_units(name, run):
    orders, words = DIFFERENCES[name]
    with pytest.raises(ValueError, match=f"(?s)must be the same on every rank; .*{words}"):
        run(with_its_own, 2, orders)


class Waited:
    """A started collective that counts how often it is waited for."""

    def __init__(self, out=None):
        self.waits, self.out = 0, out

    def wait(self):
        self.waits += 1
        if isinstance(self.out, BaseException):
            raise self.out
        return self.out


def handle(name, work):
    in_float32 = CommDtypes(gathered=torch.float32)  # so that what is gathered is no shard
    return AllGatherHandle(work, BufferComm(Topology(fs.Mesh(), True), name, dtypes=in_float32))


def prefetcher_of(order, start, limit=1):
    return Prefetcher(ScheduleLearner(fs.Schedule(tuple(order), True, "pre", limit), known=True), start)


def test_a_rank_that_is_ahead_waits_for_a_unit_before_it_gathers_the_next():
    started, waited_for = {name: [handle(name, Waited())] for name in "ab"}, {}

    def start(name):
        waited_for[name] = [other for other, of in started.items() if of[0].work.waits]
        return started[name]

    prefetcher_of("ab", start).pre_forward("a")
    assert waited_for == {"a": [], "b": ["a"]}


def test_what_was_gathered_ahead_for_a_unit_that_is_never_entered_is_waited_for_and_dropped():
    started, asked = {name: [handle(name, Waited())] for name in "abcd"}, []
    prefetcher = prefetcher_of("abcd", lambda name: asked.append(name) or started[name], limit=2)
    assert prefetcher.pre_forward("a") is started["a"]
    assert prefetcher.pre_forward("b") is started["b"]
    for _ in range(2):
        prefetcher.post_forward()
        assert {name: of[0].work.waits for name, of in started.items()} == dict.fromkeys("abcd", 1)
    assert prefetcher.pre_forward("c") is None  # a unit that backward computes again gathers itself, and nothing ahead
    assert (asked, prefetcher.ran) == (["a", "b", "c", "d"], ["a", "b"])


def test_what_backward_gathered_ahead_in_vain_is_waited_for_when_it_ends():
    work, prefetcher = Waited(), prefetcher_of("a", lambda name: [])
    prefetcher.uses = [use := Use(index=0, name="a", source=None, began=1, last=2, ahead=[handle("a", work)])]
    prefetcher.end_backward()
    assert (work.waits, use.ahead) == (1, None)


def test_a_wait_that_was_interrupted_is_not_begun_again_when_the_call_ends():
    work = Waited(KeyboardInterrupt())
    prefetcher = prefetcher_of("aa", lambda name: [handle(name, work)])
    with pytest.raises(KeyboardInterrupt):
        prefetcher.pre_forward("a", stays=True)
    prefetcher.post_forward()
    assert work.waits == 1


def test_what_stays_for_a_second_time_is_waited_for_by_each_use_which_has_a_tensor_of_its_own():
    work = Waited(torch.arange(3.0))
    prefetcher = prefetcher_of("abaab", lambda name: [handle(name, work if name == "a" else Waited())])
    (first,) = prefetcher.pre_forward("a", stays=True)
    assert work.waits == 1
    one = first.finish()
    prefetcher.pre_forward("b", stays=False)
    (second,), (third,) = (prefetcher.pre_forward("a", stays=True) for _ in range(2))
    assert first is second is third
    waits = work.waits
    two, three = second.finish(), third.finish()
    assert work.waits == waits + 2
    assert one is not two is not three
    assert one.data_ptr() == two.data_ptr() == three.data_ptr() == work.out.data_ptr()
    assert prefetcher.pre_forward("b", stays=False)[0].work.waits == 1  # gathered again
    prefetcher.post_forward()


def marked(layer, x, mark):
    """Compute two products, and say when backward has the gradient of the first one's result."""
    hidden = torch.tanh(layer.first(x))
    hidden.register_hook(mark)
    return x + layer.second(hidden)


def through(net, x, mark):
    for number, layer in enumerate(net.layers):
        x = layer(x, lambda _, number=number: mark(f"gradients layers.{number}"))
    return x


@pytest.mark.parametrize("setting", ["pre", "post", None])
@on_ranks(2)
def test_the_next_gather_of_a_backward_starts_before_after_or_well_after_the_gradient_work(mesh, setting):
    blocks = nn.ModuleList(Runs(marked, first=nn.Linear(4, 4), second=nn.Linear(4, 4)) for _ in range(6))
    net, layers = Runs(through, layers=blocks), [f"layers.{number}" for number in range(6)]
    _, sharded, shards = of_module(mesh, net, ["layers.*"], schedule={"backward_prefetch": setting})
    x = torch.randn(2, 4, requires_grad=True)
    with fs.record_events() as events:
        fs.value_and_grad(lambda s: sharded(s, {}, x, events.append).square().mean())(shards)
    line = [e if isinstance(e, str) else f"{e.kind} {e.unit}" for e in events]
    gathers = [e.removeprefix("all_gather ") for e in line if e.startswith("all_gather")]
    assert gathers == [*layers, *reversed(layers)]
    line = line[len(layers) :]  # without the all-gathers of forward
    for now, following in itertools.pairwise(reversed(layers)):
        gather = line.index(f"all_gather {following}")
        gradients, reduced = line.index(f"gradients {now}"), line.index(f"reduce_scatter {now}")
        assert gradients < reduced
        assert (gather < gradients, gather < reduced) == (setting == "pre", setting is not None)


def wide(layer, x, number, reached):
    """Tell when a layer, whose all-gather takes milliseconds, has been computed."""
    reached(f"forward {number}")
    y = torch.tanh(layer.linear(x))
    y.register_hook(lambda grad: reached(f"backward {number}"))
    reached(f"forward {number} computed")
    return y


def overlap(mesh, backward):
    store = dist.PrefixStore("overlap", dist.distributed_c10d._get_default_store())
    # Forward gathers 0 1 2 3, and backward 3 2 1 0: eight all-gathers, or seven if unit 3 were
    # kept. Rank 1 starts some of them after rank 0 has reached a moment.
    late = {1: "forward 0 computed", 2: "forward 1 computed", 3: "forward 2 computed"}
    late |= {5: "backward 3", 6: "backward 2", 7: "backward 1"} if backward == "pre" else {}
    line, after = [], {}

    def all_gather(shard, collectives):
        number = sum(moment.startswith("start") for moment in line)
        if mesh.rank == 1 and number in after:
            store.get(after[number])
        line.append(f"start {number}")
        work = collectives.all_gather(shard)
        return lambda: line.append(f"wait {number}") or work.wait()

    def reached(moment):
        line.append(moment)
        if mesh.rank == 0:
            store.set(moment, "reached")

    runs = [functools.partial(wide, number=number, reached=reached) for number in range(4)]
    net = nn.Sequential(*[Runs(run, linear=nn.Linear(600, 600)) for run in runs])
    on = fs.with_collectives(mesh, "shard", all_gather=all_gather)
    _, sharded, shards = of_module(on, net, ["*"], schedule={"backward_prefetch": backward})
    loss_fn = lambda s: sharded(s, {}, torch.ones(4, 600)).mean()  # noqa: E731
    for _ in range(2):  # in these steps ranks wait for each other to compare the order of units
        fs.value_and_grad(loss_fn)(shards)
    line.clear()
    for moment in set(late.values()) if mesh.rank == 0 else ():
        store.delete_key(moment)
    dist.barrier()
    after.update(late)
    fs.value_and_grad(loss_fn)(shards)
    return line


@pytest.mark.slow
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


# --- ranks that keep other outputs ----------------------------------------------------------------


def block():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def all_heads(net, x):
    x = net.b(net.a(x))
    aux = net.aux(x)
    more = net.more(aux)
    return net.c(x), aux, more


def heads():
    """Blocks, and two auxiliary heads between them; the result holds all outputs."""
    return Runs(all_heads, a=block(), b=block(), aux=block(), more=block(), c=block())


def shifted(net, x):
    x, aux = net.b(net.a(x))
    return net.c(x), aux


def shifts():
    """Blocks around a unit that saves its weight for an output, and has another output that saves nothing."""
    weight, bias = nn.Parameter(torch.eye(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
    both = Runs(lambda unit, x: (x + unit.bias, x @ unit.weight), weight=weight, bias=bias)
    return Runs(shifted, a=block(), b=both, c=block())


UNITS = {heads: ["a", "b", "aux", "more", "c"], shifts: ["a", "b", "c"]}
ROWS = {
    "default": (heads, {}, {}),
    "two ahead": (heads, {}, {"limit": 2}),
    "after gradients": (heads, {}, {"backward_prefetch": "post"}),
    "a bucket": (heads, {"bucket_bytes": 1 << 20}, {}),
    "slices": (heads, {"reshard_after_forward": 2}, {}),
    "a part of a unit": (shifts, {}, {}),
}


def kept(mesh: fs.Mesh, row: str, frozen: bool, keeps: str) -> Any:
    """Return losses, gradients and events of steps in which rank 0 alone keeps outputs."""
    model, options, scheduled = ROWS[row]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = model()
    for name, param in net.named_parameters():
        param.requires_grad_(not frozen or not name.startswith(("aux", "more", "b")))
    plan, sharded, shards = of_module(mesh, net, UNITS[model], schedule=scheduled or None, **options)
    log = []

    def loss_fn(shards, x):
        out, *aux = sharded(shards, {}, x)
        if mesh.rank == 0 or keeps == "on all ranks":
            log.append([aux, log] if keeps == "in a cycle" else aux)
        return out.square().sum()

    found, events = [], []
    for _ in range(3):
        (loss, grads), step = recorded(fs.value_and_grad(loss_fn), shards, torch.ones(2, WIDTH) * (1 + mesh.rank))
        found.append((loss, fs.gather(grads, plan, mesh)))
        events.append(step)
        if keeps == "in a cycle":
            log = []
    return found, events


@pytest.mark.nightly(one_in=3)
@pytest.mark.usefixtures("without_garbage_collection")
@crossed(keeps=["on rank 0", "in a cycle"], frozen={"trainable": False, "frozen": True}, row=list(ROWS))
def test_a_rank_that_keeps_an_output_which_the_loss_does_not_use_gathers_what_the_others_gather(row, frozen, keeps):
    ranks = 4 if row == "slices" else 2
    alike = run_simulated(kept, ranks, row, frozen, "on all ranks")
    found = run_simulated(kept, ranks, row, frozen, keeps)
    assert [events for _, events in found] == [events for _, events in alike]
    same_bits([steps for steps, _ in found], [steps for steps, _ in alike])


@pytest.mark.parametrize("keeps", ["on all ranks", "on rank 0"])
def test_a_unit_of_which_the_loss_uses_no_output_is_not_gathered_in_backward(keeps):
    for _, steps in run_simulated(kept, 2, "default", False, keeps):
        for events in steps:
            units = [event.unit for event in events if event.kind == "all_gather"]
            assert units == [*UNITS[heads], "c", "b", "a"]


def noted(net, x, note):
    """Run blocks; backward calls ``note`` when it comes to the output of each."""
    for each in net.blocks:
        x = each(x)
        x.register_hook(note)
    return x


@pytest.mark.parametrize("by", ["inputs", "shards", "both"])
@on_ranks(2)
def test_a_backward_by_inputs_or_shards_gathers_ahead(mesh, by):
    _, sharded, shards = of_module(mesh, Runs(noted, blocks=nn.ModuleList(block() for _ in range(4))), ["blocks.*"])
    x, leaves, gathered = torch.ones(2, WIDTH, requires_grad=True), requiring_grad(shards), []

    def note(_):
        gathered.append(sum(event.kind == "all_gather" for event in events))

    loss = sharded(leaves, {}, x, note).square().sum()
    with fs.record_events() as events:
        torch.autograd.grad(loss, {"inputs": [x], "shards": tree.leaves(leaves), "both": [x, *tree.leaves(leaves)]}[by])
    assert gathered == [0, 2, 3, 4]
