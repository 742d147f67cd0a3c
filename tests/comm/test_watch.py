"""Records of ranks in a store: who waits in vain and who does not, and that no store ends or stops a watch.

What ranks are told is in test_desync_waits.py.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from funcshard.comm import watch as watches
from funcshard.comm.desync import DesyncDetector
from funcshard.comm.watch import Limits, Record, Wait, Watch
from tests.comm.stores import FailingStore, SuspendedStore, until

BETWEEN = Wait(ranks=[0, 1])  # a wait outside of collectives


class Detector:
    """The part of a detector that a watch uses."""

    def __init__(self, number: int = 7, give_up: float = 1000.0, titles: Mapping[str, str] | None = None) -> None:
        self.number, self.thread, self.closed, self.limits = number, 0, False, Limits(0.1, give_up)
        self.axis, self.names = "shard", titles or {}

    def titles(self) -> Mapping[str, str]:
        return self.names

    def close_connections(self) -> None:
        self.closed = True


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def shown(store: Any, rank: int) -> Record:
    """Return the record of a rank."""
    return Record.of(store.get(f"funcshard/{rank}"))


# --- ranks that wait for each other -----------------------------------------------------------------------------------


class Rank:
    """A rank that waits for the ranks ``needs`` in the latest collective of a group.

    ``counts`` says how many collectives it has issued, by group. It has a record in the store.
    """

    def __init__(self, number: int, store: Any, group: str, needs: Sequence[int], counts: Mapping[str, int]) -> None:
        self.number, self.group, self.needs, self.watch = number, group, needs, Watch(number, store)
        self.detectors = {name: Detector(count) for name, count in counts.items()}  # the watch does not keep them
        for name, detector in self.detectors.items():
            self.watch.add(name, detector)

    def wait(self) -> Wait:
        number = self.detectors[self.group].number
        return Wait(self.group, number, f"number {number} along {self.group}", self.needs)

    def look(self, *, failed: bool = False) -> str:
        return self.watch.why(self.wait(), 1000.0, failed=failed)


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
    assert ranks[0].look(failed=True) == ""  # a failure by itself, such as a dead process, is no circle
    for rank in ranks[1:]:
        rank.look()
    messages = [rank.look() for rank in ranks]
    for rank, message in zip(ranks, messages, strict=True):
        assert message.startswith(
            "ranks wait for each other in collectives of different axes or meshes, and none can continue: "
        )
        assert f"rank {rank.number} waits for {rank.wait().what}" in message
    assert "rank 0 waits for number 8 along shard 0, which rank 1 has not reached" in messages[0]
    assert "rank 1 waits for number 4 along replicate 1, which rank 3 has not reached" in messages[0]
    ranks[0].watch.close_connections()
    assert all(detector.closed for detector in ranks[0].detectors.values())
    assert ranks[0].watch.is_broken()


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
    "it waits for something else each time": lambda last, step: set_and_look(last, needs=[*last.needs, 9 + step]),
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


def test_records_that_are_cut_short_show_nothing() -> None:
    ranks = parted()
    for rank in ranks:
        rank.look()
    ranks[0].watch.ask(lambda store: store.set("funcshard/1", '[1, ["shard"'))
    assert ranks[0].look() == ""


@pytest.mark.parametrize("failed", [True, False])
def test_a_rank_takes_over_what_another_one_has_found(failed: bool, store: Any) -> None:
    ranks = [
        Rank(0, store, "all", [*range(4)], {"all": 2, "pair 0": 1}),
        Rank(1, store, "pair 0", [0, 1], {"all": 1, "pair 0": 2}),
        Rank(2, store, "pair 2", [2, 3], {"all": 1, "pair 2": 2}),
        Rank(3, store, "all", [*range(4)], {"all": 2, "pair 2": 1}),
    ]
    assert ranks[1].look() == ""  # rank 1 waits for rank 0, and would be a circle with it
    assert ranks[0].look(failed=failed) == ""
    messages = [rank.look() for _ in range(3) for rank in ranks[2:]]
    assert any(messages)
    assert "which rank 2 has not reached" in ranks[0].look(failed=failed)


# --- ranks that are lost ----------------------------------------------------------------------------------------------


def watching(rank: int, store: Any, give_up: float) -> Watch:
    """Return a watch with a detector, which lives as long."""
    watch = Watch(rank, store)
    watch.detector = Detector(give_up=give_up)  # type: ignore[attr-defined]
    watch.add("axis", watch.detector)  # type: ignore[attr-defined]
    return watch


ELSEWHERE = ["node7", 4711, "another machine", "0"]


def stopped(rank: int, store: Any, **last: Any) -> Watch:
    """Return a watch that beats no more: one that has said farewell, unless its last record is given."""
    watch = Watch(rank, store)
    watches._stop(watch.pulse, threading.current_thread(), os.getpid())
    assert until(lambda: shown(store, rank).left)
    if last:
        store.set(f"funcshard/{rank}", json.dumps(Record(9, latest="all_reduce of unit 'y'", **last)))
    return watch


def told_within(own: Watch, seconds: float, give_up: float, wait: Wait = BETWEEN) -> str:
    """Return what a watch finds within so many seconds of its clock."""
    begin, message = own.pulse.clock, ""
    while own.pulse.clock - begin < seconds and not message:
        message = own.why(wait, give_up)
    return message


@pytest.mark.slow
def test_a_rank_is_given_up_once_its_beat_has_stayed_the_same_for_long(store: Any) -> None:
    own, _ = watching(0, store, 0.8), stopped(1, store, place=ELSEWHERE, every=0.05)
    assert own.why(BETWEEN, 0.8) == ""  # the first look
    message = told_within(own, 30.0, 0.8)
    assert message.startswith("rank 1 has given no sign of life for ")
    assert "(process 4711 on node7, last seen in all_reduce of unit 'y')" in message
    assert "rank 0 waited for it and gives it up (give_up=0.8)" in message
    assert "pass a larger give_up to init_mesh" in message
    assert shown(store, 0).why == message  # for ranks that wait for this one


@pytest.mark.slow
def test_a_rank_that_beats_or_has_said_farewell_is_not_given_up() -> None:
    failing = FailingStore()
    store = failing.inner
    own = watching(0, store, 1.0)
    others = [watching(1, failing, 1.0), stopped(2, store, place=ELSEWHERE, every=60.0), stopped(3, store)]
    failing.failures = 5
    assert until(lambda: not failing.failures)
    assert told_within(own, 1.5, 1.0, Wait(ranks=range(4))) == ""
    del others


def test_time_in_which_the_looking_rank_was_suspended_does_not_count(store: Any, monkeypatch) -> None:
    later = 0.0
    monkeypatch.setattr(watches, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later))
    own, _ = watching(0, store, 60.0), stopped(1, store, place=ELSEWHERE)
    assert own.why(BETWEEN, 60.0) == ""
    clock = own.pulse.clock
    later = 1000.0  # the clock of the system has gone on while this process was suspended
    assert own.why(BETWEEN, 60.0) == ""
    assert own.pulse.clock - clock < 60.0


def test_a_rank_that_has_left_is_lost_where_it_is_needed(store: Any) -> None:
    own, _ = Watch(0, store), stopped(1, store)
    assert own.why(BETWEEN, 100.0) == ""
    assert own.why(BETWEEN, 100.0, is_away=lambda rank: rank != 1) == ""
    message = own.why(BETWEEN, 100.0, is_away=lambda rank: rank == 1)
    assert message.startswith(f"rank 1 has left the job (process {os.getpid()} on ")
    assert "rank 0 waited for it to make a mesh; every rank has to make the same meshes in the same order" in message


def test_a_process_of_this_machine_that_has_ended_is_given_up_at_once(store: Any) -> None:
    own = Watch(0, store)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name, _, space, _ = watches._place_of(os.getpid())
    place = [name, child.pid, space, watches._state_of(child.pid)[1]]
    stopped(1, store, place=place)
    assert own.why(BETWEEN, 100.0) == ""
    child.kill()
    message = until(lambda: own.why(BETWEEN, 100.0))  # a process that nothing has waited for
    child.communicate()
    assert message.startswith(f"the process of rank 1 has ended (process {child.pid} on {name}, last seen in all_reduce")
    assert own.why(BETWEEN, 100.0) == message
    place[1], place[3] = os.getpid(), "12345"  # another process has its number now
    stopped(1, store, place=place)
    assert "the process of rank 1 has ended" in own.why(BETWEEN, 100.0)


# --- the thread -------------------------------------------------------------------------------------------------------


def watch_and_thread(store: Any) -> tuple[Watch, threading.Thread]:
    before = threading.enumerate()
    own = Watch(0, store)
    (thread,) = [each for each in threading.enumerate() if each not in before and "watch" in each.name]
    return own, thread


def test_a_watch_may_be_stopped_in_the_middle_of_any_of_its_calls(store: Any) -> None:
    """Python collects garbage between any two instructions, and a watch in it is stopped there."""
    own, thread = watch_and_thread(store)
    assert thread.daemon

    def add() -> None:
        def trace(frame: Any, event: str, value: object) -> Any:
            if frame.f_code is not watches._stop.__code__:
                watches._stop(own.pulse, threading.current_thread(), os.getpid())
            return trace

        sys.settrace(trace)
        own.add("axis", Detector())
        sys.settrace(None)

    adding = threading.Thread(target=add, daemon=True)
    adding.start()
    for ending in (adding, thread):
        ending.join(30)
        assert not ending.is_alive()


def test_the_thread_ends_with_the_watch_and_keeps_no_detector(store: Any) -> None:
    own = Watch(0, store)
    detector = DesyncDetector("shard", [0, 1], 0, watch=own, limits=Limits(1.0, 1.0), name="axis")
    detector.record("all_gather", "unit 'x'")
    gone, pulse = weakref.ref(detector), own.pulse
    assert until(lambda: shown(store, 0).latest == "all_gather of unit 'x', collective number 1 on mesh axis 'shard'")
    del detector
    assert until(lambda: gone() is None)
    del own
    gc.collect()
    assert until(lambda: pulse.ended and shown(store, 0).left)


def test_a_watch_ends_at_once_when_the_file_of_its_store_is_deleted(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    store = dist.PrefixStore("beats", dist.FileStore(str(tmp_path / "folder" / "store"), 1))
    own, thread = watch_and_thread(store)
    assert own.check(["funcshard/0"])
    shutil.rmtree(tmp_path / "folder")
    del own, store
    gc.collect()
    thread.join(30)  # a call of such a store waits minutes
    assert not thread.is_alive()


def test_no_error_of_a_call_ends_the_thread_or_makes_it_connect_again(store: Any, monkeypatch) -> None:
    monkeypatch.setattr(watches, "reconnected", lambda store: pytest.fail("the connection is not at fault"))
    (own, thread), calls = watch_and_thread(store), []
    own.add("axis", detector := Detector(give_up=1.0))
    with pytest.raises(ZeroDivisionError):
        own.ask(lambda store: calls.append(store) or 1 / 0)
    assert len(calls) == 1
    own.pulse.latest = "no entry"  # type: ignore[assignment]
    time.sleep(0.3)
    own.pulse.latest = None
    before = shown(store, 0).beat
    assert until(lambda: shown(store, 0).beat != before)
    assert thread.is_alive()
    del detector


def test_a_call_that_fails_once_is_made_again() -> None:
    store = FailingStore()
    own = Watch(0, store)
    store.failures = 1
    own.ask(lambda store: watches.write_text(store, "key", "text"))
    store.failures = 1
    assert own.get("key") == b"text"


@pytest.mark.parametrize("answers", range(4))
def test_a_look_ends_soon_if_the_store_is_suspended_in_the_middle_of_it(answers: int, monkeypatch) -> None:
    monkeypatch.setattr(watches, "_ANSWER", 0.1)
    store = SuspendedStore(answers)
    detector = DesyncDetector("shard", [0, 1, 2], 0, watch=Watch(0, store), name="axis")
    looking = threading.Thread(target=detector.look, args=(0,), daemon=True)
    looking.start()
    looking.join(10)
    ended = not looking.is_alive()
    store.goes_on.set()
    looking.join(30)
    assert ended


def connections_to(port: int) -> set[int]:
    """Return the open files of this process that are connected to a port."""
    found = set()
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{file}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(file))) as connection:
                    if connection.getpeername()[1:2] == (port,):
                        found.add(int(file))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_watch_connects_again_after_its_connection_was_cut_and_ends_with_the_process_of_the_store() -> None:
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = servers[0].port
    before = connections_to(port)
    own, thread = watch_and_thread(dist.PrefixStore("job", dist.TCPStore("127.0.0.1", port, is_master=False)))
    own.add("axis", detector := Detector(give_up=0.4))
    for file in connections_to(port) - before:
        with socket.socket(fileno=os.dup(file)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    own.ask(lambda store: watches.write_text(store, "after", "the cut"))
    assert until(lambda: servers[0].check(["job/after"]))
    beat = servers[0].get("job/funcshard/0")
    assert until(lambda: servers[0].get("job/funcshard/0") != beat)
    servers.clear()
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError):
        own.check(["0"])
    assert own.why(BETWEEN, 0.1) == ""  # the collective that waits says more
    del detector


def test_a_text_that_a_cut_connection_loses_is_an_error() -> None:
    def answer(_: Any) -> bool:
        raise dist.DistNetworkError("connection reset by peer")

    cut: Any = SimpleNamespace(set=lambda key, text: None, check=answer)  # torch's set waits for no answer
    with pytest.raises(dist.DistNetworkError):
        watches.write_text(cut, "rank", "text")


def raises(store: Any) -> None:
    raise ValueError("no such key")


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("call", [raises, lambda store: time.sleep(0.1)], ids=["an error", "silence"])
def test_a_watch_without_an_answer_says_farewell_when_it_goes(
    call: Callable[[Any], None], store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Watch(0, store)
    monkeypatch.setattr(watches, "_ANSWER", 0.02)
    with contextlib.suppress(RuntimeError, ValueError):
        own.ask(call)
    monkeypatch.undo()
    del own
    assert until(lambda: shown(store, 0).left)
