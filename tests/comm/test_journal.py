"""Ranks that wait for each other on different axes all raise soon; ranks that are slow do not."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import funcshard as fs
from funcshard.comm.journal import Journal, Wait
from funcshard.comm.mesh import neighbours
from tests.comm.stores import CountingStore, FailingStore
from tests.ranks import run_ranks

GRID, LINE = {"replicate": 2, "shard": 2}, {"shard": 4}
PATIENCE = 0.4
INTRODUCTION = "ranks wait for each other in collectives of different axes or meshes, and none can go on: "

# --- notes in a store -----------------------------------------------------------------------------


class Rank:
    """A rank of the 2 × 2 grid, with a note of its own in the store."""

    def __init__(self, number: int, store: Any, counts: tuple[int, int]) -> None:
        row, column = divmod(number, 2)
        self.groups = {"shard": [2 * row, 2 * row + 1], "replicate": [column, 2 + column]}
        self.names = {axis: f"{axis} {ranks[0]}" for axis, ranks in self.groups.items()}
        self.detectors = {axis: Detector(count) for axis, count in zip(self.groups, counts, strict=True)}
        self.number, self.journal = number, Journal(number, store)
        for axis, detector in self.detectors.items():
            self.journal.add(self.names[axis], detector)
        self.serial = self.journal.begin_wait()

    def look(self, axis: str, needs: list[int] | None = None, failed: bool = False) -> str:
        number = self.detectors[axis].number
        ranks = [rank for rank in (self.groups[axis] if needs is None else needs) if rank != self.number]
        wait = Wait(self.names[axis], number, f"number {number} along {axis}", ranks, self.serial)
        return self.journal.find_circle(wait, failed=failed)


class Detector:
    def __init__(self, number: int) -> None:
        self.number, self.thread, self.closed = number, 0, False

    def close_connections(self) -> None:
        self.closed = True


def ranks_of(*counts: tuple[int, int]) -> list[Rank]:
    store = dist.HashStore()
    return [Rank(number, store, own) for number, own in enumerate(counts)]


# Ranks 0 and 3 have gone on with the shard axis, ranks 1 and 2 with the replicate axis.
PARTED = ((8, 3), (7, 4), (7, 4), (8, 3))
AXES = ("shard", "replicate", "replicate", "shard")


def test_a_circle_counts_when_all_of_its_ranks_wait_at_the_second_look() -> None:
    ranks = ranks_of(*PARTED)
    for _ in range(2):
        assert [rank.look(axis) for rank, axis in zip(ranks[:3], AXES, strict=False)] == [""] * 3
    assert ranks[3].look("shard") == ""  # its first look
    message = ranks[0].look("shard")
    assert message == ""  # the first look of rank 0 that finds the circle
    assert ranks[0].look("shard") == ""  # the other ranks have not written anew
    for rank, axis in zip(ranks[1:], AXES[1:], strict=True):
        rank.look(axis)
    messages = [rank.look(axis) for rank, axis in zip(ranks, AXES, strict=True)]
    for number, message in enumerate(messages):
        assert message.startswith(f"{INTRODUCTION}rank ")
        assert f"rank {number} waits for number {8 if AXES[number] == 'shard' else 4} along {AXES[number]}" in message
    assert "rank 0 waits for number 8 along shard, which rank 1 has not reached" in messages[0]
    assert "rank 1 waits for number 4 along replicate, which rank 3 has not reached" in messages[0]
    ranks[0].journal.close_connections()
    assert all(detector.closed for detector in ranks[0].detectors.values())


def one_writes_nothing(ranks: list[Rank]) -> None:
    for rank, axis in zip(ranks[:3], AXES, strict=False):
        assert rank.look(axis) == ""


def one_has_written_long_ago(ranks: list[Rank]) -> None:
    if not hasattr(ranks[3], "wrote"):
        ranks[3].look("shard")
        ranks[3].wrote = True  # type: ignore[attr-defined]
    one_writes_nothing(ranks)


def one_waits_anew_each_time(ranks: list[Rank]) -> None:
    one_writes_nothing(ranks)
    ranks[3].serial = ranks[3].journal.begin_wait()
    assert ranks[3].look("shard") == ""


def one_has_joined(ranks: list[Rank]) -> None:
    ranks[3].detectors["replicate"].number = 4
    one_writes_nothing(ranks)
    assert ranks[3].look("shard") == ""


def one_needs_no_other(ranks: list[Rank]) -> None:
    one_writes_nothing(ranks)
    assert ranks[3].look("shard", needs=[]) == ""


def another_thread_of_one_may_make_the_axis(ranks: list[Rank]) -> None:
    ranks[3].detectors.pop("replicate", None)
    ranks[3].detectors["shard"].thread = -1
    one_writes_nothing(ranks)
    assert ranks[3].look("shard") == ""


def another_thread_of_one_goes_on(ranks: list[Rank]) -> None:
    ranks[3].detectors["replicate"].thread = -1
    one_writes_nothing(ranks)
    assert ranks[3].look("shard") == ""


NO_CIRCLES = [
    one_writes_nothing, one_has_written_long_ago, one_waits_anew_each_time, one_has_joined, one_needs_no_other,
    another_thread_of_one_goes_on, another_thread_of_one_may_make_the_axis,
]  # fmt: skip


@pytest.mark.parametrize("look", NO_CIRCLES, ids=lambda look: look.__name__)
def test_ranks_that_may_go_on_are_no_circle(look: Any) -> None:
    ranks = ranks_of(*PARTED)
    for _ in range(6):
        look(ranks)


def test_a_rank_that_has_not_made_the_axis_has_not_reached_its_collectives() -> None:
    ranks = ranks_of(*PARTED)
    ranks[3].detectors.pop("replicate")  # as if it had not made that mesh, or had it no more
    found = {message for _ in range(4) for rank, axis in zip(ranks, AXES, strict=True) if (message := rank.look(axis))}
    assert any("rank 1 waits for number 4 along replicate, which rank 3 has not reached" in each for each in found)


def test_notes_that_are_cut_short_are_no_circle() -> None:
    ranks = ranks_of(*PARTED)
    for rank, axis in zip(ranks, AXES, strict=True):
        rank.look(axis)
    ranks[0].journal.store.set("1", '[1, ["shard"')
    assert ranks[0].look("shard") == ""


def test_a_rank_whose_collective_fails_takes_over_the_finding_of_another_one() -> None:
    ranks = ranks_of(*PARTED)
    for rank, axis in zip(ranks, AXES, strict=True):
        rank.look(axis)
    # a failure by itself, such as a dead process, is no circle
    assert ranks[2].look("replicate", failed=True) == ""
    for _ in range(2):
        found = [rank.look(axis) for rank, axis in zip(ranks, AXES, strict=True)]
    assert any(found)
    late = ranks[2]
    assert "rank 2 waits for number 4 along replicate, which rank 0 has not reached" in late.look("replicate", failed=True)


def test_a_rank_whose_collective_fails_passes_over_a_circle_that_no_rank_has_found() -> None:
    store, pairs = dist.HashStore(), {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    waits = {0: ("all", range(4)), 1: ("pair 0", pairs[1]), 2: ("pair 2", pairs[2]), 3: ("all", range(4))}
    ranks = {}
    for number, (group, _) in waits.items():
        counts = {"all": 1, f"pair {pairs[number][0]}": 1}
        detectors = {name: Detector(count + (name == group)) for name, count in counts.items()}
        journal = Journal(number, store)
        for name, detector in detectors.items():
            journal.add(name, detector)
        ranks[number] = journal, journal.begin_wait(), detectors

    def look(number: int, failed: bool = False) -> str:
        (group, needed), (journal, serial, _) = waits[number], ranks[number]
        return journal.find_circle(Wait(group, 2, f"number 2 along {group}", needed, serial), failed=failed)

    assert look(1) == ""  # rank 1 waits for rank 0, and would be a circle with it
    found = [look(number) for _ in range(3) for number in (2, 3)]
    assert any(found)
    assert "which rank 2 has not reached" in look(0, failed=True)


def test_one_rank_of_many_that_parted_is_found_by_reading_few_notes_at_a_time() -> None:
    store, size, parted, other = CountingStore(), 1000, 700, 3
    pair = [other, parted]

    detectors: dict[tuple[int, str], Detector] = {}  # a journal does not keep them

    def rank_of(number: int) -> tuple[Journal, int]:
        counts = {"all": 7 if number == parted else 8}
        if number in pair:
            counts["pair"] = 4 if number == parted else 3
        journal = Journal(number, store)
        for name, count in counts.items():
            journal.add(name, detectors.setdefault((number, name), Detector(count)))
        return journal, journal.begin_wait()

    ranks = {number: rank_of(number) for number in range(size)}

    def look(number: int) -> str:
        journal, serial = ranks[number]
        group, at, needed = ("pair", 4, pair) if number == parted else ("all", 8, range(size))
        return journal.find_circle(Wait(group, at, f"number {at} along {group}", needed, serial))

    found, most = [], 0
    for number in range(size):
        journal, serial = ranks[number]
        journal._write(Wait("all", 8, "number 8 along all", range(size), serial))
    for _ in range(size // 64 + 3):
        for number in (parted, other):
            store.requests.clear()
            found.append(look(number))
            most = max(most, store.requests["get"])
    assert most < 100
    assert f"rank {other} waits for number 8 along all, which rank {parted} has not reached" in max(found, key=len)


def test_without_a_store_nothing_is_found() -> None:
    journal = Journal(0, FailingStore(math.inf))
    assert journal.find_circle(Wait("shard", 1, "", [1], 1)) == ""


# --- processes and simulated ranks ----------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](torch.tanh(self.blocks[0](x)))


def part(mesh: fs.Mesh) -> None:
    """Train, then let ranks 0 and 3 go on with a unit, and ranks 1 and 2 with the replicate axis."""
    torch.manual_seed(0)
    apply, params, buffers = fs.make_functional(Blocks())
    plan = fs.make_plan(params, mesh, units=["blocks.*"])
    sharded, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
    for _ in range(2):
        fs.value_and_grad(lambda s: sharded(s, buffers, torch.ones(1, 4)).sum())(shards)
        fs.psum(torch.ones(3), mesh["replicate"])
        with torch.no_grad():
            sharded(shards, buffers, torch.ones(1, 4))
    if mesh.rank in (1, 2):
        fs.psum(torch.ones(3), mesh["replicate"])
    with torch.no_grad():
        sharded(shards, buffers, torch.ones(1, 4))


def part_on_processes(_: fs.Mesh, shared_memory: bool) -> tuple[str, float]:
    if shared_memory:
        mesh = fs.init_mesh(GRID, device="cpu", patience=PATIENCE)
    else:  # meshes made from one another share their journal
        mesh = fs.init_mesh(device="cpu", patience=PATIENCE, shared_memory=False).reshaped(GRID)
    start = time.monotonic()
    try:
        part(mesh)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "nothing noticed", 0.0


BOTH_BACKENDS = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])


@pytest.mark.slow
@BOTH_BACKENDS
def test_processes_that_part_onto_different_axes_all_raise(shared_memory: bool) -> None:
    for rank, (message, seconds) in enumerate(run_ranks(part_on_processes, 4, shared_memory, timeout=30)):
        assert message.startswith(INTRODUCTION)
        gather, reduction = "all_gather of float32[20] of buffer 'float32' of unit 'blocks.0'", "all_reduce of float32[3]"
        assert f"rank {rank} waits for {gather if rank in (0, 3) else reduction}" in message
        assert gather in message and reduction in message  # noqa: PT018
        assert "on mesh axis 'shard'), which rank" in message
        assert "on mesh axis 'replicate'), which rank" in message
        assert seconds < 20


def test_simulated_ranks_that_part_onto_different_axes_raise_at_once() -> None:
    with pytest.raises(RuntimeError, match="none can go on") as raised:
        fs.simulate(part, GRID)
    message = str(raised.value)
    assert "rank 0 waits in all_gather of float32[20], float32[10] of buffer 'float32' of unit 'blocks.0' (number" in message
    assert "rank 1 waits in all_reduce of float32[3] (number" in message
    assert "mesh axis 'shard'), which ranks 0 have joined" in message
    assert "mesh axis 'replicate'), which ranks 1 have joined" in message


# Two meshes of each rank: one where ranks 0 and 3 go on, and one where ranks 1 and 2 do.
MESHES = {
    "two meshes": (lambda line, grid: line, lambda line, grid: grid["shard"]),
    "the parts of a row": (lambda line, grid: line, lambda line, grid: neighbours(line, 2)),
    "an axis and a mesh made of another": (lambda line, grid: grid, lambda line, grid: line.reshaped(GRID)["replicate"]),
}


def part_onto_meshes(_: fs.Mesh, case: str, shared_memory: bool) -> tuple[str, float]:
    options = {"device": "cpu", "patience": PATIENCE, "shared_memory": shared_memory}
    line, grid = fs.init_mesh(**options), fs.init_mesh(GRID, **options)
    made = [choose(line, grid) for choose in MESHES[case]]
    for mesh in made:
        fs.psum(torch.ones(3), mesh)
    start = time.monotonic()
    # Why these ranks: each axis and each part of a row has one of both kinds.
    first = 0 if line.rank in (0, 3) else 1
    try:
        for mesh in (made[first], made[1 - first]):
            fs.psum(torch.ones(4), mesh)
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    return "nothing noticed", 0.0


@pytest.mark.slow
@pytest.mark.parametrize(("case", "shared_memory"), [*zip(MESHES, (False, True, False), strict=True)])
def test_processes_that_part_onto_different_meshes_all_raise(case: str, shared_memory: bool) -> None:
    for message, seconds in run_ranks(part_onto_meshes, 4, case, shared_memory, timeout=40):
        assert message.startswith(INTRODUCTION), message
        assert "waits for all_reduce of float32[4] (number " in message
        assert "every rank has to issue the same ones in the same order" in message
        assert seconds < 20


def slow_in_turns(_: fs.Mesh, shared_memory: bool, shape: dict[str, int]) -> list[float]:
    """Let each rank in turn be slow, while the other ranks wait for it in two groups, in both orders."""
    meshes = [fs.init_mesh(shape, device="cpu", patience=0.05, shared_memory=shared_memory) for _ in range(2)]
    mesh, groups = (
        meshes[0],
        {"shard": meshes[0].shard, "replicate": (meshes[1] if shape == LINE else meshes[0]).axes[-1][1]},
    )
    found = []
    for turn in range(8):
        if mesh.rank == turn % 4:
            time.sleep(0.4)
        order = ("shard", "replicate") if turn % 3 else ("replicate", "shard")
        works = [groups[axis].all_reduce(torch.ones(2)) for axis in order]
        for work in works[:: 1 if mesh.rank % 2 else -1]:
            work.wait()
        found.append(fs.psum(torch.tensor(float(mesh.rank + turn)), mesh).item())
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "shared_memory"), [(GRID, True), (LINE, False)], ids=["two axes", "two meshes on gloo"])
def test_slow_ranks_are_waited_for_on_all_axes_of_all_meshes(shared_memory: bool, shape: dict[str, int]) -> None:
    assert run_ranks(slow_in_turns, 4, shared_memory, shape, timeout=40) == [[6.0 + 4 * turn for turn in range(8)]] * 4
