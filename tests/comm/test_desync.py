"""Ranks that issue different collectives all raise an error soon; slow ranks do not.

Almost all tests here run on real processes.
"""

from __future__ import annotations

import collections
import datetime
import json
import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcshard as fs
from funcshard._utils import default_store
from funcshard.comm import check_same, desync, journal
from funcshard.comm.desync import DesyncDetector
from funcshard.comm.journal import Journal
from funcshard.comm.shm import rendezvous
from funcshard.comm.torch_group import TorchGroup
from funcshard.core import raise_on_every_rank
from tests.ranks import run_ranks, run_simulated

PATIENCE = 0.4
USUAL = (0, 1, 2)


class Blocks(nn.Module):
    """Units of one size, which run in the order that the caller passes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for number in order:
            x = torch.tanh(self.blocks[number](x))
        return x


class Actions:
    """The actions from which the programs of the ranks are made."""

    def __init__(self, mesh: fs.Mesh, given: bool) -> None:
        torch.manual_seed(0)
        self.mesh = mesh
        apply, params, self.buffers = fs.make_functional(Blocks())
        plan = fs.make_plan(params, mesh, units=["blocks.*"])
        schedule = fs.make_schedule(plan, order=[f"blocks.{i}" for i in USUAL]) if given else None
        self.sharded = fs.fully_shard(apply, plan, mesh, schedule=schedule)
        self.shards = fs.shard(params, plan, mesh)

    def train(self, order: tuple[int, ...] = USUAL) -> None:
        loss_fn = lambda shards: self.sharded(shards, self.buffers, torch.ones(1, 4), order).sum()  # noqa: E731
        fs.value_and_grad(loss_fn)(self.shards)

    def evaluate(self, order: tuple[int, ...] = USUAL) -> None:
        with torch.no_grad():
            self.sharded(self.shards, self.buffers, torch.ones(1, 4), order)

    def add(self, n: int) -> None:
        fs.psum(torch.ones(n), self.mesh)


# The program of rank 0, the program of rank 1, and words of the error.
DISAGREEMENTS: dict[str, tuple[list[Any], list[Any], str]] = {
    "a unit is skipped in training": (["train"], [("train", (0, 2))], "unit 'blocks.2' on rank"),
    "a unit is skipped in evaluation": (["evaluate"], [("evaluate", (1, 2))], "unit 'blocks.1' on rank"),
    "equal units are swapped in training": (["train"], [("train", (0, 2, 1))], "unit 'blocks.2' on rank"),
    "equal units are swapped in evaluation": (["evaluate"], [("evaluate", (1, 0, 2))], "unit 'blocks.1' on rank"),
    "one rank adds up more": (["train"], [("add", 1), "train"], "all_reduce of float32[1] on rank"),
    "sizes differ": ([("add", 2)], [("add", 3)], "all_reduce of float32[3] on rank"),
    "one evaluates and one trains": (["train"], ["evaluate"], "all_gather of float32[20] of buffer"),
}


def disagree(
    _: fs.Mesh, program: tuple[list[Any], list[Any], str], given: bool, shared_memory: bool
) -> tuple[str, float, int]:
    mesh = fs.init_mesh(device="cpu", patience=PATIENCE, shared_memory=shared_memory)
    actions = Actions(mesh, given)
    warnings.simplefilter("ignore")  # about an order other than the schedule's
    for _ in range(2):
        actions.train()
        actions.evaluate()
        actions.evaluate()
        actions.train()
    start = time.monotonic()
    for step in range(12):
        for action in program[mesh.rank]:
            name, *args = (action,) if isinstance(action, str) else action
            try:
                getattr(actions, name)(*args)
            except RuntimeError as error:
                return str(error), time.monotonic() - start, step
    return "nothing noticed", time.monotonic() - start, step


CASES = [pytest.param(name, False, True, id=name) for name in DISAGREEMENTS]
CASES += [pytest.param(name, False, False, id=f"{name}, on gloo") for name in DISAGREEMENTS if "train" in name]
CASES += [pytest.param(name, True, True, id=f"{name}, order given") for name in DISAGREEMENTS if "in training" in name]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "given", "shared_memory"), CASES)
def test_every_rank_raises_an_error_that_names_the_first_difference(name: str, given: bool, shared_memory: bool) -> None:
    for message, seconds, step in run_ranks(disagree, 2, DISAGREEMENTS[name], given, shared_memory, timeout=30):
        assert message.startswith("ranks issue different collectives: number ")
        assert " on mesh axis 'shard' is " in message
        assert "rank 0" in message and "rank 1" in message  # noqa: PT018
        assert DISAGREEMENTS[name][2] in message
        assert "every rank has to issue the same ones in the same order" in message
        assert seconds < 20  # the timeout of the group is 90 s
        # An action that is new to a rank is found before data moves. On gloo, other differences are
        # found after at most two comparisons.
        assert step <= (desync.COMPARE_EVERY * 2 // 3 if "and one trains" in name and not shared_memory else 1)


@pytest.mark.parametrize("unit", ["a", "b"])
def test_simulated_ranks_compare_labels_too(unit: str) -> None:
    def main(mesh: fs.Mesh) -> None:
        out, shard = torch.empty(2), torch.empty(1)
        mesh.shard.all_gather(out, shard, label=f"unit {unit!r}" if mesh.rank else "unit 'a'").wait()

    if unit == "a":
        fs.simulate(main, 2)
        return
    words = r"all_gather of float32\[2\], float32\[1\] of unit 'a' on rank 0 and all_gather .* of unit 'b' on rank 1"
    with pytest.raises(RuntimeError, match=words):
        fs.simulate(main, 2)


def with_a_slow_rank(_: fs.Mesh, known: bool, shared_memory: bool) -> list[float]:
    mesh = fs.init_mesh(device="cpu", patience=0.1, shared_memory=shared_memory)
    total = []
    for i in range(20):
        if i == (15 if known else 0) and mesh.rank == 1:
            time.sleep(0.6)
        total.append(fs.psum(torch.tensor(float(mesh.rank + i)), mesh).item())
    return total


BOTH_BACKENDS = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("known", "shared_memory"),
    [(False, False), (True, False), (True, True)],
    ids=["while they agree", "while data moves", "shared memory"],
)
def test_a_slow_rank_is_waited_for(known: bool, shared_memory: bool) -> None:
    assert run_ranks(with_a_slow_rank, 2, known, shared_memory) == [[2.0 * i + 1 for i in range(20)]] * 2


def slow_twice(mesh: fs.Mesh) -> list[float]:
    machine = rendezvous._machine

    def slow() -> str:
        time.sleep(0.5 if mesh.rank == 1 else 0)
        return machine()

    rendezvous._machine = slow
    try:
        mesh = fs.init_mesh(device="cpu", patience=0.1)
    finally:
        rendezvous._machine = machine
    totals = []
    for i in range(2):
        time.sleep(0.5 if mesh.rank == 0 else 0)  # rank 1 reads the store meanwhile
        totals.append(fs.psum(torch.tensor(float(i)), mesh).item())
    return totals


@pytest.mark.slow
def test_collectives_of_the_rendezvous_are_not_compared_with_those_of_the_axis() -> None:
    assert run_ranks(slow_twice, 2) == [[0.0, 2.0]] * 2


def killed_on_the_way(_: fs.Mesh, shared_memory: bool) -> tuple[str, float]:
    mesh = fs.init_mesh(device="cpu", patience=PATIENCE, shared_memory=shared_memory)
    for _ in range(15):
        fs.psum(torch.ones(3), mesh)
    if mesh.rank == 1:
        notes, end = mesh.shard.desync._store, time.monotonic() + 15  # type: ignore[attr-defined]
        # Rank 0 writes its latest collectives once it has waited for longer than patience.
        while not (notes.check(["0"]) and json.loads(notes.get("0"))[0] == 16) and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    try:
        fs.psum(torch.ones(3), mesh)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "nothing noticed", 0.0


@pytest.mark.slow
@BOTH_BACKENDS
def test_when_a_rank_dies_the_error_names_the_collective_that_waited_for_it(shared_memory: bool) -> None:
    (message, seconds), _ = run_ranks(killed_on_the_way, 2, shared_memory, may_die={1}, timeout=20)
    if not message.startswith("the process of rank 1 has ended (process "):  # rank 0 may look before the connection ends
        assert (
            "rank 0 waited for all_reduce of float32[3], collective number 16 on mesh axis 'shard', which failed" in message
        )
        # rank 1 may have waited long for rank 0 before
        assert re.search(r"not known to have reached it: rank 1 \((never seen|last seen at number \d+)\)", message)
        assert ("Connection closed by rank 1 of the group" if shared_memory else "Connection") in message
    assert seconds < 15  # the timeout of the group is 80 s


def never_joined(mesh: fs.Mesh, shared_memory: bool) -> str:
    short, store = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=3.0)), default_store()
    group = TorchGroup.of(short, "replicate", patience=0.2, shared_memory=shared_memory)
    group.all_reduce(torch.ones(3)).wait()
    if mesh.rank == 1:
        store.wait(["the other rank has failed"])
        return ""
    try:
        with pytest.raises(RuntimeError) as caught:
            group.all_reduce(torch.ones(3)).wait()
    finally:
        store.set("the other rank has failed", "")
    return str(caught.value)


@pytest.mark.slow
@BOTH_BACKENDS
def test_the_timeout_of_the_group_names_the_rank_that_did_not_join(shared_memory: bool) -> None:
    message, _ = run_ranks(never_joined, 2, shared_memory, timeout=20)
    assert (
        "rank 0 waited for all_reduce of float32[3], collective number 2 on mesh axis 'replicate', which failed" in message
    )
    assert "not known to have reached it: rank 1" in message
    assert "Timed out waiting" in message


def reduce_on_a_group(mesh: fs.Mesh, separate: bool) -> tuple[list[Any], list[str]]:
    group = TorchGroup.of(dist.group.WORLD, separate_reductions=separate, shared_memory=False)
    used = []

    def spied(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            used.append((name, "reductions" if kwargs["group"] is not group.group else "gatherings"))
            return original(*args, **kwargs)

        return original, call

    results: list[Any] = []
    names = ("broadcast", "all_to_all_single")
    originals = {}
    for name in names:
        originals[name], call = spied(name)
        setattr(dist, name, call)
    try:
        full = torch.arange(1 << 15, dtype=torch.float32) + mesh.rank  # large enough to be gathered by broadcasts
        half = full.numel() // 2
        for _ in range(3):
            gathered, scattered, everywhere = torch.empty_like(full), torch.empty(half), full.clone()
            works = [
                group.reduce_scatter(scattered, [full]),
                group.all_gather(gathered, full[:half].clone()),
                group.all_reduce(everywhere),
            ]
            for work in reversed(works):
                work.wait()
            results.append((gathered.tolist(), scattered.tolist(), everywhere.tolist()))
    finally:
        for name in names:
            setattr(dist, name, originals[name])
    return results, sorted({f"{name} on {where}" for name, where in used})


@pytest.mark.slow
def test_reductions_on_a_group_of_their_own_give_the_same_numbers() -> None:
    same, separate = run_ranks(reduce_on_a_group, 2, False), run_ranks(reduce_on_a_group, 2, True)
    assert [results for results, _ in same] == [results for results, _ in separate]
    gather = "all_to_all_single on gatherings", "broadcast on gatherings"
    assert [used for _, used in same] == [[*gather]] * 2
    split = ["all_to_all_single on reductions", "broadcast on gatherings", "broadcast on reductions"]
    assert [used for _, used in separate] == [split] * 2


def exchange_texts_after_different_collectives(_: fs.Mesh) -> str:
    mesh = fs.init_mesh(device="cpu", patience=PATIENCE, shared_memory=False)
    agree_on_all(mesh.shard.desync)
    fs.psum(torch.ones(2), mesh)
    mesh.shard.all_reduce(torch.ones(2), label=f"unit {mesh.rank}").wait()
    with pytest.raises(RuntimeError) as caught:
        mesh.shard.all_gather_text("")
    return str(caught.value)


def agree_on_all(detector: DesyncDetector) -> None:
    """Let a detector take every order and size of collectives for one that the ranks have agreed on."""
    detector._agreed_contexts = _Everything()
    detector._sizes = collections.defaultdict(lambda: desync.MOST_SIZES)  # type: ignore[assignment]


class _Everything(set):  # type: ignore[type-arg]
    def __contains__(self, _: object) -> bool:
        return True


def test_an_exchange_of_texts_compares_the_collectives_before_it() -> None:
    for message in run_ranks(exchange_texts_after_different_collectives, 2):
        assert "number 2 on mesh axis 'shard' is all_reduce of float32[2] of unit" in message


def differ_in_a_known_context(_: fs.Mesh) -> tuple[str, int]:
    mesh = fs.init_mesh(device="cpu", patience=PATIENCE, shared_memory=False)
    agree_on_all(mesh.shard.desync)
    for number in range(1, 100):
        try:
            mesh.shard.all_reduce(torch.ones(2), label=f"unit {mesh.rank if number == 5 else 0}").wait()
        except RuntimeError as error:
            return str(error), number
    return "nothing noticed", number


@pytest.mark.slow
def test_a_difference_in_a_known_context_is_found_after_two_comparisons_at_the_latest() -> None:
    for message, number in run_ranks(differ_in_a_known_context, 2):
        assert "number 5 on mesh axis 'shard' is all_reduce of float32[2] of unit" in message
        assert number <= 2 * desync.COMPARE_EVERY


def test_a_detector_keeps_the_latest_collectives_only() -> None:
    alone = DesyncDetector("shard", [0], 0)
    for number in range(desync.KEPT + 3):
        assert alone.record("all_reduce", "", torch.ones(number + 1)) == number + 1
    assert alone._describe(3) == "a collective that is no longer recorded"
    assert alone._describe(4) == "all_reduce of float32[4]"


class Work:
    """The work of a comparison, which ends when it is told to."""

    def __init__(self) -> None:
        self.ended, self.waited = False, False

    def is_completed(self) -> bool:
        return self.ended

    def wait(self, *_: object) -> None:
        self.waited = True


def test_a_detector_that_is_deleted_waits_for_nothing_and_its_group_ends_after_its_last_comparison(monkeypatch) -> None:
    destroyed: list[str] = []
    monkeypatch.setattr(journal, "destroy_group", destroyed.append)
    store, notes, work = dist.HashStore(), Journal(0, dist.HashStore()), Work()
    control = SimpleNamespace(group_name="control")
    detector = DesyncDetector("shard", [0, 1], 0, control, store, patience=1000.0, journal=notes)
    detector.comparison = journal.Comparison((1, 2), torch.zeros(7), work)
    detector._exchange_entries()
    assert store.check(["0"])
    start = time.monotonic()
    del detector
    assert not work.waited
    notes.destroy_unused()  # as before another mesh is made
    assert destroyed == []
    notes.finish(0.01)  # at the end of the process
    assert time.monotonic() - start < 10
    work.ended = True
    notes.destroy_unused()
    assert destroyed == [control]
    assert notes.unused == []
    assert not store.check(["0"])


@pytest.mark.slow
def test_a_desync_aborts_the_groups_of_other_backends_than_gloo_once() -> None:
    aborted: list[str] = []

    def group(name: str, error: str = "") -> Any:
        def abort() -> None:
            aborted.append(name)
            if error:
                raise RuntimeError(error)

        return SimpleNamespace(abort=abort)

    groups = [group("gathers"), group("reductions", "the backend has no abort"), SimpleNamespace()]
    detector = DesyncDetector("shard", [0, 1], 0, store=dist.HashStore(), patience=0.01, aborted=groups)
    with pytest.raises(RuntimeError, match="ranks issue different collectives"):
        detector.raise_desync(0, 1, 5)
    assert sorted(aborted) == ["gathers", "reductions"]
    detector.close_connections()
    assert len(aborted) == 2


class Counted(DesyncDetector):
    """A detector that counts how often the ranks wait for an agreement."""

    waits = 0

    def _compare_now(self, *_: int) -> list[int]:
        self.waits += 1
        return []

    def _start_comparison(self, *_: int) -> Any:
        return None


def waits_of(sizes: Callable[[int], int], order: Callable[[int], list[str]] = lambda step: ["a", "b", "c"]) -> list[int]:
    """Return how often ranks wait for an agreement in each of a thousand steps."""
    detector = Counted("shard", [0, 1], 0, control=SimpleNamespace(group_name="control"))
    found = []
    for step in range(1000):
        before = detector.waits
        for unit in order(step):
            detector.record("all_gather", unit, torch.empty(100))
        detector.record("all_reduce", "psum", torch.empty(sizes(step), device="meta"))
        found.append(detector.waits - before)
    return found


def test_later_steps_wait_for_no_agreement_whatever_sizes_their_collectives_have() -> None:
    fixed = waits_of(lambda step: 7)
    assert sum(fixed[3:]) == 0
    for sizes in (lambda step: 1 + step, lambda step: 1 + step % 50, lambda step: 1 + step // 100):
        waits = waits_of(sizes)
        assert sum(waits) <= sum(fixed) + desync.MOST_SIZES
        assert waits[0] == fixed[0]
    assert sum(waits_of(lambda step: 1 + step)[10:]) == 0
    assert waits_of(lambda step: 1 + step // 100)[100] == 1  # a new size


def test_a_program_with_ever_new_orders_says_that_its_ranks_agree_no_more(caplog) -> None:
    mixed = random.Random(0)

    def order(_: int) -> list[str]:
        return mixed.sample([f"unit {number}" for number in range(16)], 16)

    waits = waits_of(lambda step: 7, order)
    assert 4000 < sum(waits) <= desync.MOST_CONTEXTS + 17
    assert waits[-1] == 0
    (record,) = caplog.records
    assert "mesh axis 'shard': the program has issued its collectives in 4096 orders" in record.getMessage()
    assert "compares the ranks every 16 collectives only" in record.getMessage()


def exchange_other_texts(mesh: fs.Mesh) -> str:
    try:
        if mesh.rank:
            raise_on_every_rank(mesh, None)
        check_same(mesh, "text", "the plan")
    except RuntimeError as error:
        return str(error)
    return "nothing noticed"


@pytest.mark.parametrize("run", [run_ranks, run_simulated])
def test_ranks_that_exchange_texts_for_different_purposes_say_which(run: Any) -> None:
    if run is run_simulated:
        with pytest.raises(RuntimeError) as raised:
            run(exchange_other_texts_simulated, 2)
        messages = [str(raised.value)]
    else:
        messages = run(exchange_other_texts, 2, timeout=30)
    for message in messages:
        assert message.startswith("ranks issue different collectives: number ")
        for rank, purpose in enumerate(("a comparison of the plan", "a report of faults")):
            assert f"of {purpose} on rank {rank}" in message


def exchange_other_texts_simulated(mesh: fs.Mesh) -> None:
    raise_on_every_rank(mesh, None) if mesh.rank else check_same(mesh, "text", "the plan")


def test_a_forked_child_records_no_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    detector, process = DesyncDetector("shard", [0, 1], 0), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.raises(RuntimeError, match=f"was forked from process {process}"):
        detector.record("all_reduce", "unit 'a'")
    assert detector.number == 0


@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_closes_its_connections_by_a_receive_from_another_rank(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    senders: list[int] = []
    monkeypatch.setattr(dist, "irecv", lambda _, group, group_src: senders.append(group_src))
    for rank in range(size):
        DesyncDetector("shard", range(size), rank, groups=["gloo"]).close_connections()
    assert senders == [*range(1, size), 0]
