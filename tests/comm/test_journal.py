"""Notes of waiting ranks in a store: a circle of them is found, and ranks that may go on are none.

What ranks are told is in test_desync_waits.py.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch.distributed as dist

import funcshard as fs
from funcshard.comm.journal import Journal, Wait
from tests.comm.stores import CountingStore, FailingStore
from tests.comm.test_desync_waits import GRID, PART


class Detector:
    def __init__(self, number: int) -> None:
        self.number, self.thread, self.closed = number, 0, False

    def close_connections(self) -> None:
        self.closed = True


class Rank:
    """A rank that waits for its next collective of a group, and has a note in the store.

    Arguments:
        number: the rank.
        store: the store with the notes.
        group: the group in whose latest collective it waits.
        needs: the ranks of that group.
        counts: how many collectives it has issued, by group.
    """

    def __init__(self, number: int, store: Any, group: str, needs: Sequence[int], counts: Mapping[str, int]) -> None:
        self.number, self.group, self.needs, self.journal = number, group, needs, Journal(number, store)
        self.detectors = {name: Detector(count) for name, count in counts.items()}  # the journal does not keep them
        for name, detector in self.detectors.items():
            self.journal.add(name, detector)
        self.serial = self.journal.begin_wait()

    def wait(self) -> Wait:
        number = self.detectors[self.group].number
        return Wait(self.group, number, f"number {number} along {self.group}", self.needs, self.serial)

    def look(self, *, failed: bool = False) -> str:
        return self.journal.find_circle(self.wait(), failed=failed)


def parted() -> list[Rank]:
    """Return ranks of a grid: 0 and 3 have gone on with the shard axis, and 1 and 2 with the replicate axis."""
    store, ranks = dist.HashStore(), []
    for number in range(4):
        row, column = divmod(number, 2)
        shard, replicate = f"shard {row}", f"replicate {column}"
        if number in (0, 3):
            ranks.append(Rank(number, store, shard, [2 * row, 2 * row + 1], {shard: 8, replicate: 3}))
        else:
            ranks.append(Rank(number, store, replicate, [column, 2 + column], {shard: 7, replicate: 4}))
    return ranks


def test_a_circle_counts_when_all_of_its_ranks_wait_at_the_second_look() -> None:
    ranks = parted()
    for _ in range(2):
        assert [rank.look() for rank in ranks[:3]] == [""] * 3
    assert ranks[3].look() == ""  # its first look
    assert ranks[0].look() == ""  # the first look of rank 0 that finds the circle
    assert ranks[0].look() == ""  # the other ranks have not written again
    for rank in ranks[1:]:
        rank.look()
    messages = [rank.look() for rank in ranks]
    for rank, message in zip(ranks, messages, strict=True):
        assert message.startswith(
            "ranks wait for each other in collectives of different axes or meshes, and none can go on: "
        )
        assert f"rank {rank.number} waits for {rank.wait().what}" in message
    assert "rank 0 waits for number 8 along shard 0, which rank 1 has not reached" in messages[0]
    assert "rank 1 waits for number 4 along replicate 1, which rank 3 has not reached" in messages[0]
    ranks[0].journal.close_connections()
    assert all(detector.closed for detector in ranks[0].detectors.values())


def with_another_thread(last: Rank, *, keeps: bool) -> str:
    """Look as a rank of which another thread may go on with an axis, or make it."""
    last.detectors["replicate 1" if keeps else "shard 1"].thread = -1
    if not keeps:
        last.detectors.pop("replicate 1", None)
    return last.look()


def set_and_look(last: Rank, **values: Any) -> str:
    vars(last).update(values)
    return last.look()


def join(last: Rank) -> str:
    last.detectors["replicate 1"].number = 4
    return last.look()


# What the last rank does in each round, in which the others look.
NO_CIRCLES: dict[str, Callable[[Rank, int], str]] = {
    "it writes nothing": lambda last, step: "",
    "it has written long ago": lambda last, step: "" if step else last.look(),
    "it waits for something else each time": lambda last, step: set_and_look(last, serial=last.journal.begin_wait()),
    "it has joined": lambda last, step: join(last),
    "it needs no other": lambda last, step: set_and_look(last, needs=[]),
    "another of its threads goes on": lambda last, step: with_another_thread(last, keeps=True),
    "another of its threads may make the axis": lambda last, step: with_another_thread(last, keeps=False),
}


@pytest.mark.parametrize("what", NO_CIRCLES)
def test_ranks_that_may_go_on_are_no_circle(what: str) -> None:
    ranks = parted()
    for step in range(6):
        assert [rank.look() for rank in ranks[:3]] == [""] * 3
        assert NO_CIRCLES[what](ranks[3], step) == ""


def test_a_rank_that_has_not_made_the_axis_has_not_reached_its_collectives() -> None:
    ranks = parted()
    ranks[3].detectors.pop("replicate 1")  # as if it had not made that mesh, or had it no more
    messages = [rank.look() for _ in range(4) for rank in ranks]
    assert any("rank 1 waits for number 4 along replicate 1, which rank 3 has not reached" in each for each in messages)


def test_notes_that_are_cut_short_are_no_circle() -> None:
    ranks = parted()
    for rank in ranks:
        rank.look()
    ranks[0].journal.store.set("1", '[1, ["shard"')
    assert ranks[0].look() == ""


def test_a_rank_whose_collective_fails_takes_over_the_finding_of_another_one() -> None:
    ranks = parted()
    for rank in ranks:
        rank.look()
    # a failure by itself, such as a dead process, is no circle
    assert ranks[2].look(failed=True) == ""
    messages = [rank.look() for _ in range(2) for rank in ranks]
    assert any(messages)
    assert "rank 2 waits for number 4 along replicate 0, which rank 0 has not reached" in ranks[2].look(failed=True)


def test_a_rank_whose_collective_fails_passes_over_a_circle_that_no_rank_has_found() -> None:
    store = dist.HashStore()
    ranks = [
        Rank(0, store, "all", range(4), {"all": 2, "pair 0": 1}),
        Rank(1, store, "pair 0", [0, 1], {"all": 1, "pair 0": 2}),
        Rank(2, store, "pair 2", [2, 3], {"all": 1, "pair 2": 2}),
        Rank(3, store, "all", range(4), {"all": 2, "pair 2": 1}),
    ]
    assert ranks[1].look() == ""  # rank 1 waits for rank 0, and would be a circle with it
    messages = [rank.look() for _ in range(3) for rank in ranks[2:]]
    assert any(messages)
    assert "which rank 2 has not reached" in ranks[0].look(failed=True)


def test_one_rank_of_many_that_parted_is_found_by_reading_few_notes_at_a_time() -> None:
    store, size, other, parted_rank = CountingStore(), 1000, 3, 700
    ranks = [Rank(number, store, "all", range(size), {"all": 8}) for number in range(size)]
    ranks[other] = Rank(other, store, "all", range(size), {"all": 8, "pair": 3})
    ranks[parted_rank] = Rank(parted_rank, store, "pair", [other, parted_rank], {"all": 7, "pair": 4})
    for rank in ranks:
        rank.journal._write(rank.wait())
    messages, most = [], 0
    for _ in range(size // 64 + 3):
        for number in (parted_rank, other):
            store.requests.clear()
            messages.append(ranks[number].look())
            most = max(most, store.requests["get"])
    assert most < 100
    assert f"rank {other} waits for number 8 along all, which rank {parted_rank} has not reached" in max(messages, key=len)


def test_without_a_store_nothing_is_found() -> None:
    journal = Journal(0, FailingStore(math.inf))
    assert journal.find_circle(Wait("shard", 1, "", [1], 1)) == ""


def test_simulated_ranks_that_part_onto_different_axes_raise_at_once() -> None:
    with pytest.raises(RuntimeError, match="none can go on") as raised:
        fs.simulate(lambda mesh: PART(mesh, None), GRID)
    message = str(raised.value)
    assert "rank 0 waits in all_gather of float32[20], float32[10] of buffer 'float32' of unit 'blocks.0' (number" in message
    assert "rank 1 waits in all_reduce of float32[3] (number" in message
    assert "mesh axis 'shard'), which ranks 0 have joined" in message
    assert "mesh axis 'replicate'), which ranks 1 have joined" in message


@pytest.mark.usefixtures("without_garbage_collection")
def test_a_journal_that_has_looked_for_a_circle_goes_with_its_rank() -> None:
    ranks = parted()
    for rank in ranks:
        rank.look()
    journals = [weakref.ref(rank.journal) for rank in ranks]
    del rank, ranks
    assert [journal() for journal in journals] == [None] * 4
