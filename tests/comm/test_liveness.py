"""Signs of life in a store: who is given up and who is not, and that no store ends or stops a heart.

What ranks are told is in test_desync_waits.py.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from funcshard.comm import liveness
from funcshard.comm.desync import DesyncDetector
from funcshard.comm.journal import Journal, Wait
from funcshard.comm.liveness import Heart, StorePart
from tests.comm.stores import FailingStore, SuspendedStore, until


class Detector:
    number = 7

    def latest(self) -> str:
        return "all_gather of unit 'x'"


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def heart_and_thread(store: Any) -> tuple[Heart, threading.Thread]:
    before = threading.enumerate()
    own = Heart(0, store)
    (thread,) = [each for each in threading.enumerate() if each not in before and "heart" in each.name]
    return own, thread


def watching(rank: int, store: Any, give_up: float) -> Heart:
    """Return a heart that watches a detector, which lives as long."""
    heart = Heart(rank, store)
    heart.detector = Detector()  # type: ignore[attr-defined]
    heart.watch(heart.detector, give_up)  # type: ignore[attr-defined]
    return heart


ELSEWHERE = ["node7", 4711, "another machine", "0"]


def stopped(rank: int, store: Any, *beat: Any) -> Heart:
    """Return a heart that beats no more: one that has said farewell, unless its last beat is given."""
    heart = Heart(rank, store)
    liveness._stop(heart._pulse, threading.current_thread(), os.getpid())
    assert until(lambda: b"farewell" in store.get(str(rank)))
    if beat:
        store.set(str(rank), json.dumps(beat))
    return heart


def faint(store: Any, place: Sequence[Any] = ELSEWHERE, *every: float) -> Heart:
    """Return the heart of rank 1 as that of a suspended process, which beat once in so many seconds."""
    return stopped(1, store, 9, "all_reduce of unit 'y'", place, *every)


def told_within(own: Heart, seconds: float, give_up: float) -> str:
    """Return what a heart finds within so many seconds of its clock."""
    begin, message = own._pulse.clock, ""
    while own._pulse.clock - begin < seconds and not message:
        message = own.find_lost([0, 1], give_up)
    return message


@pytest.mark.slow
@pytest.mark.parametrize("every", [(), (0.2,)])
def test_a_rank_is_given_up_once_its_beat_has_stayed_the_same_for_long(every, store) -> None:
    own, _ = watching(0, store, 0.8), faint(store, ELSEWHERE, *every)
    assert own.find_lost([0, 1], 0.8) == ""  # the first look
    message = told_within(own, 30.0, 0.8)
    assert message.startswith("rank 1 has given no sign of life for ")
    assert "(process 4711 on node7, last seen in all_reduce of unit 'y')" in message
    assert "rank 0 waited for it and gives it up (give_up=0.8)" in message
    assert "pass a larger give_up to init_mesh" in message


# Hearts of rank 1, with the store.
ALIVE: dict[str, Callable[[Any], Heart]] = {
    "beats": lambda store: watching(1, store, 1.0),
    "beats once a minute": lambda store: faint(store, ELSEWHERE, 60.0),
    "has said farewell": lambda store: stopped(1, store),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ALIVE)
def test_a_rank_that_beats_or_has_said_farewell_is_not_given_up(how, store) -> None:
    own, other = watching(0, store, 1.0), ALIVE[how](store)
    assert told_within(own, 1.5, 1.0) == ""
    del other


@pytest.mark.slow
def test_a_rank_whose_store_fails_now_and_then_is_not_given_up() -> None:
    store = FailingStore()
    own, other = watching(0, store.inner, 1.0), watching(1, store, 1.0)
    store.failures = 5
    assert until(lambda: not store.failures)
    assert told_within(own, 1.5, 1.0) == ""
    del other


def test_time_in_which_the_looking_rank_was_suspended_does_not_count(store, monkeypatch) -> None:
    later = 0.0
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later))
    own, _ = watching(0, store, 60.0), faint(store)
    assert own.find_lost([1], 60.0) == ""
    clock = own._pulse.clock
    later = 1000.0  # the clock of the system has gone on while this process was suspended
    assert own.find_lost([1], 60.0) == ""
    assert own._pulse.clock - clock < 60.0


def test_a_rank_that_has_left_is_lost_where_it_is_needed(store) -> None:
    own, _ = Heart(0, store), stopped(1, store)
    assert own.find_lost([0, 1], 100.0) == ""
    assert own.find_lost([0, 1], 100.0, lambda rank: rank != 1) == ""
    message = until(lambda: own.find_lost([0, 1], 100.0, lambda rank: rank == 1))
    assert message.startswith(f"rank 1 has left the job (process {os.getpid()} on ")
    assert "rank 0 waited for it to make a mesh; every rank has to make the same meshes in the same order" in message


def test_a_process_of_this_machine_that_has_ended_is_given_up_at_once(store) -> None:
    own = Heart(0, store)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name, _, space, _ = liveness._place_of(os.getpid())
    place = [name, child.pid, space, liveness._began(child.pid)]
    faint(store, place)
    assert own.find_lost([1], 100.0) == ""
    child.kill()
    message = until(lambda: own.find_lost([1], 100.0))  # a process that nothing has waited for
    child.communicate()
    assert message.startswith(f"the process of rank 1 has ended (process {child.pid} on {name}, last seen in all_reduce")
    place[1], place[3] = os.getpid(), "12345"  # another process has its number now
    faint(store, place)
    assert "the process of rank 1 has ended" in until(lambda: own.find_lost([1], 100.0))


@pytest.mark.slow
def test_a_finding_is_read_by_all_and_ends_when_the_rank_beats_again(store) -> None:
    first, second, _ = watching(0, store, 0.3), Heart(2, store), faint(store)
    message = until(lambda: first.find_lost([1], 0.3))
    assert message
    # it waits for rank 0, which waited for rank 1
    assert until(lambda: second.find_lost([0], 100.0)) == until(lambda: second.find_lost([], 100.0)) == message
    Heart(1, store)
    assert until(lambda: second.find_lost([0], 100.0) == second.find_lost([], 100.0) == "")


def test_of_many_ranks_some_are_read_in_each_look(store) -> None:
    own, asked, looks = Heart(0, store), [], [0]
    own._why_lost = lambda rank, give_up, is_away: asked.append(rank) or ""  # type: ignore[method-assign]
    for _ in range(4):
        own.find_lost(range(200), 1.0)
        looks.append(len(asked))
    assert all(after - before <= liveness.MOST_READ for before, after in itertools.pairwise(looks))
    assert set(asked) == set(range(1, 200))


def test_a_heart_may_be_stopped_in_the_middle_of_any_of_its_calls(store) -> None:
    """Python collects garbage between any two instructions, and a heart in it is stopped there."""
    own, thread = heart_and_thread(store)
    assert thread.daemon

    def watch() -> None:
        def trace(frame: Any, event: str, value: object) -> Any:
            if frame.f_code is not liveness._stop.__code__:
                liveness._stop(own._pulse, threading.current_thread(), os.getpid())
            return trace

        sys.settrace(trace)
        own.watch(Detector(), 1.0)
        sys.settrace(None)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    for ending in (watching, thread):
        ending.join(30)
        assert not ending.is_alive()


def test_the_thread_ends_with_the_heart_and_keeps_no_detector(store) -> None:
    own, detector = Heart(0, store), Detector()
    own.watch(detector, 1.0)
    gone, pulse = weakref.ref(detector), own._pulse
    assert until(lambda: b"all_gather of unit 'x'" in store.get("0"))
    del detector
    assert until(lambda: gone() is None)
    del own
    gc.collect()
    assert until(lambda: pulse.ended and b"farewell" in store.get("0"))


def test_a_heart_ends_at_once_when_the_file_of_its_store_is_deleted(tmp_path) -> None:
    (tmp_path / "folder").mkdir()
    store = dist.PrefixStore("beats", dist.FileStore(str(tmp_path / "folder" / "store"), 1))
    own, thread = heart_and_thread(store)
    assert own.ask(lambda store: store.check(["0"]))
    shutil.rmtree(tmp_path / "folder")
    del own, store
    gc.collect()
    thread.join(30)  # a call of such a store waits minutes
    assert not thread.is_alive()


def test_no_error_of_a_call_or_of_a_detector_ends_the_thread(store) -> None:
    own, thread = heart_and_thread(store)

    class Broken(Detector):
        def latest(self) -> str:
            raise IndexError("deque index out of range")

    broken = Broken()
    own.watch(broken, 1.0)
    with pytest.raises(ZeroDivisionError):
        own.ask(lambda store: 1 / 0)
    del broken
    gc.collect()
    before = store.get("0")
    assert until(lambda: store.get("0") != before)
    assert thread.is_alive()


def test_a_mesh_that_is_made_during_a_beat_does_not_end_the_heart(store) -> None:
    own, thread = heart_and_thread(store)
    made = []

    class Meanwhile(Detector):
        def latest(self) -> str:
            if not made:  # another thread makes a mesh now, and meshes of before are gone
                made.append(Detector())
                own.watch(made[0], 100.0)
            return "all_reduce of unit 'z'"

    gone = [Detector(), Detector()]
    own._pulse.detectors = [(weakref.ref(detector), 7) for detector in gone]
    last = Meanwhile()
    own._pulse.detectors.append((weakref.ref(last), 0))
    gone.clear()
    own._pulse.questions.put(None)
    assert until(lambda: b"all_gather of unit 'x'" in store.get("0"))  # the latest of the new mesh
    assert thread.is_alive()
    assert [found() for found, _ in own._pulse.detectors] == [last, *made]


def test_a_call_that_fails_once_is_made_again() -> None:
    store = FailingStore()
    own = Heart(0, store)
    store.failures = 1
    own.store.set("key", "text")
    store.failures = 1
    assert own.store.get("key") == b"text"


def test_a_call_that_fails_by_itself_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "reconnected", lambda store: pytest.fail("the connection is not at fault"))
    calls = []
    with pytest.raises(ZeroDivisionError):
        Heart(0, FailingStore()).ask(lambda store: calls.append(store) or 1 / 0)
    assert len(calls) == 1


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_no_hang() -> None:
    store = SuspendedStore()
    own = Heart(0, store)
    assert own.find_lost([1], 1.5) == ""
    store.answers = 0
    assert own.find_lost([1], 1.5) == ""
    message = until(lambda: own.find_lost([1], 1.5))
    assert message.startswith("the store of the job has not answered rank 0 for ")
    assert "rank 0 or the launcher, is suspended" in message
    store.goes_on.set()
    assert until(lambda: own.find_lost([1], 1.5) == "")  # it was slow


LOOKS: dict[str, Callable[[Heart], object]] = {
    "for lost ranks": lambda heart: heart.find_lost([1, 2], 2.0),
    "for what others have found": lambda heart: heart.find_lost([], 2.0),
    "for a desync": lambda heart: DesyncDetector(
        "shard", [0, 1, 2], 0, store=heart.part("axis"), heart=heart, journal=Journal(0, heart.part("waits"), heart)
    ).look(0, 1),
    "for ranks that wait for each other": lambda heart: Journal(0, heart.part("waits"), heart).find_circle(
        Wait("axis", 1, "a collective", [1, 2], 1)
    ),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("answers", range(6))
def test_a_look_ends_soon_if_the_store_is_suspended_in_the_middle_of_it(look: str, answers: int, monkeypatch) -> None:
    monkeypatch.setattr(liveness, "_ANSWER", 0.1)
    store = SuspendedStore(answers)
    own = Heart(0, store)
    looking = threading.Thread(target=LOOKS[look], args=(own,), daemon=True)
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
def test_a_heart_connects_again_after_its_connection_was_cut_and_ends_with_the_process_of_the_store() -> None:
    servers = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    port = servers[0].port
    before = connections_to(port)
    own, thread = heart_and_thread(dist.PrefixStore("job", dist.TCPStore("127.0.0.1", port, is_master=False)))
    own.watch(Detector(), 0.4)
    for file in connections_to(port) - before:
        with socket.socket(fileno=os.dup(file)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
    own.store.set("after", "the cut")
    assert until(lambda: servers[0].check(["job/after"]))
    beat = servers[0].get("job/0")
    assert until(lambda: servers[0].get("job/0") != beat)
    servers.clear()
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(RuntimeError):
        own.store.check(["0"])
    assert own.find_lost([1], 0.1) == ""  # the collective that waits says more


def test_a_text_that_a_cut_connection_loses_is_an_error() -> None:
    def answer(_: Any) -> bool:
        raise dist.DistNetworkError("connection reset by peer")

    cut: Any = SimpleNamespace(set=lambda key, text: None, check=answer)  # torch's set waits for no answer
    part = StorePart(SimpleNamespace(ask=lambda call: call(cut)), "job")  # type: ignore[arg-type]
    with pytest.raises(dist.DistNetworkError):
        part.set("rank", "text")


def raises(store: Any) -> None:
    raise ValueError("no such key")


@pytest.mark.usefixtures("without_garbage_collection")
@pytest.mark.parametrize("call", [raises, lambda store: time.sleep(0.1)], ids=["an error", "silence"])
def test_a_heart_without_an_answer_says_farewell_when_it_goes(
    call: Callable[[Any], None], store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Heart(0, store)
    monkeypatch.setattr(liveness, "_ANSWER", 0.02)
    with contextlib.suppress(RuntimeError, ValueError):
        own.ask(call)
    monkeypatch.undo()
    del own
    assert until(lambda: b"farewell" in store.get("0"))
