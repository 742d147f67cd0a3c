"""Ranks that are suspended or killed are given up by all others within a bound; slow ranks are not."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import funcshard as fs
from funcshard.comm import liveness
from funcshard.comm.desync import DesyncDetector
from funcshard.comm.journal import Journal, Wait
from funcshard.comm.liveness import Heart, StorePart
from tests.comm.stores import FailingStore, SuspendedStore
from tests.ranks import run_ranks, suspend, wakes_once_stopped

GRID = {"replicate": 2, "shard": 2}
PATIENCE, GIVE_UP = 0.3, 2.0
SOON = 12.0  # seconds in which ranks give one up on a machine that others use too

# --- hearts in one process ------------------------------------------------------------------------


class Detector:
    number = 7

    def latest(self) -> str:
        return "all_gather of unit 'x'"


def until(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """Return what a condition finds, once it does: a thread of a loaded machine may be late."""
    end = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return found


@pytest.fixture
def store() -> Any:
    return dist.HashStore()


def heart_and_thread(store: Any) -> tuple[Heart, threading.Thread]:
    before = threading.enumerate()
    own = Heart(0, store)
    (thread,) = [each for each in threading.enumerate() if each not in before and "heart" in each.name]
    return own, thread


class Faint(Heart):
    """A heart that stops beating, as that of a suspended process on another machine."""

    def __init__(self, rank: int, store: Any, place: list[Any]) -> None:
        super().__init__(rank, store)
        liveness._stop(self._pulse, threading.current_thread(), os.getpid())
        until(lambda: b"farewell" in store.get(str(rank)))
        store.set(str(rank), liveness.json.dumps([9, "all_reduce of unit 'y'", place]))


ELSEWHERE = ["node7", 4711, "another machine", "0"]


@pytest.mark.slow
def test_a_rank_is_given_up_once_its_beat_has_stayed_the_same_for_long(store) -> None:
    own, _ = Heart(0, store), Faint(1, store, ELSEWHERE)
    own.watch(Detector(), 0.8)
    assert own.find_lost([0, 1], 0.8) == ""  # the first look
    message = until(lambda: own.find_lost([0, 1], 0.8))
    assert message.startswith("rank 1 has given no sign of life for ")
    assert "(process 4711 on node7, last seen in all_reduce of unit 'y')" in message
    assert "rank 0 waited for it and gives it up (give_up=0.8)" in message
    assert "pass a larger give_up to init_mesh" in message


@pytest.mark.slow
def test_a_rank_that_beats_is_never_given_up(store) -> None:
    own, other, detector = Heart(0, store), Heart(1, store), Detector()
    own.watch(detector, 1.0)
    other.watch(detector, 1.0)
    begin = own._pulse.clock
    while own._pulse.clock - begin < 1.5:
        assert own.find_lost([0, 1], 1.0) == ""


@pytest.mark.slow
def test_a_rank_that_has_not_made_the_mesh_of_a_short_give_up_yet_beats_more_seldom_and_is_waited_for(store) -> None:
    own, _ = Heart(0, store), Faint(1, store, ELSEWHERE)
    own.watch(Detector(), 0.3)
    for every in (60.0, 0.2):  # seconds between its beats
        store.set("1", liveness.json.dumps([9, "no collective yet", ELSEWHERE, every]))
        begin = own._pulse.clock
        while own._pulse.clock - begin < 0.9 and not (message := own.find_lost([1], 0.3)):
            pass
        assert bool(message) == (every == 0.2)


def test_time_in_which_the_looking_rank_was_suspended_does_not_count(store, monkeypatch) -> None:
    later = 0.0
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + later))
    own, _ = Heart(0, store), Faint(1, store, ELSEWHERE)
    own.watch(Detector(), 60.0)
    assert own.find_lost([1], 60.0) == ""
    clock = own._pulse.clock
    later = 1000.0  # the clock of the system has gone on while this process was suspended
    assert own.find_lost([1], 60.0) == ""
    assert own._pulse.clock - clock < 60.0


class Absent(Heart):
    """A heart that says farewell at once, as that of a process that has ended by itself."""

    def __init__(self, rank: int, store: Any) -> None:
        super().__init__(rank, store)
        liveness._stop(self._pulse, threading.current_thread(), os.getpid())
        assert until(lambda: b"farewell" in store.get(str(rank)))


def test_a_rank_that_has_left_is_lost_where_it_is_needed(store) -> None:
    own, _ = Heart(0, store), Absent(1, store)
    assert own.find_lost([0, 1], 100.0) == ""
    assert own.find_lost([0, 1], 100.0, lambda rank: rank != 1) == ""
    message = until(lambda: own.find_lost([0, 1], 100.0, lambda rank: rank == 1))
    assert message.startswith(f"rank 1 has left the job (process {os.getpid()} on ")
    assert "rank 0 waited for it to make a mesh; every rank has to make the same meshes in the same order" in message


def test_a_heart_may_be_stopped_in_the_middle_of_any_of_its_calls(store) -> None:
    """Python collects garbage between any two instructions, and a heart in it is stopped there."""
    own, thread = heart_and_thread(store)

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
    watching.join(30)
    assert not watching.is_alive()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.slow
def test_a_finding_is_read_by_all_and_ends_when_the_rank_beats_again(store) -> None:
    first, second, _ = Heart(0, store), Heart(2, store), Faint(1, store, ELSEWHERE)
    first.watch(Detector(), 0.3)
    message = until(lambda: first.find_lost([1], 0.3))
    assert message
    # it waits for rank 0, which waited for rank 1
    assert until(lambda: second.find_lost([0], 100.0)) == until(second.finding) == message
    Heart(1, store)
    assert until(lambda: second.find_lost([0], 100.0) == second.finding() == "")


def test_a_process_of_this_machine_that_has_ended_is_given_up_at_once(store) -> None:
    own = Heart(0, store)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name, _, space, _ = liveness._place_of(os.getpid())
    place = [name, child.pid, space, liveness._began(child.pid)]
    Faint(1, store, place)
    assert own.find_lost([1], 100.0) == ""
    child.kill()
    message = until(lambda: own.find_lost([1], 100.0))  # a process that nothing has waited for
    child.communicate()
    assert message.startswith(f"the process of rank 1 has ended (process {child.pid} on {name}, last seen in all_reduce")
    place[1], place[3] = os.getpid(), "12345"  # another process has its number now
    Faint(1, store, place)
    assert "the process of rank 1 has ended" in until(lambda: own.find_lost([1], 100.0))


@pytest.mark.slow
def test_a_rank_that_has_said_farewell_is_not_lost(store) -> None:
    (own, thread), other = heart_and_thread(store), Heart(1, store)
    assert thread.daemon
    own.watch(Detector(), 0.1)
    del other
    gc.collect()
    assert until(lambda: b"farewell" in store.get("1"))
    begin = own._pulse.clock
    while own._pulse.clock - begin < 0.5:
        assert own.find_lost([0, 1], 0.1) == ""


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


def test_of_many_ranks_some_are_read_in_each_look(store) -> None:
    own, asked = Heart(0, store), []
    own._why_lost = lambda rank, give_up, is_away: asked.append(rank) or ""  # type: ignore[method-assign]
    looks = []
    for _ in range(4):
        own.find_lost(range(200), 1.0)
        looks.append(len(asked))
    assert all(after - before <= liveness._MOST_READ for before, after in zip([0, *looks], looks, strict=False))
    assert set(asked) == set(range(1, 200))


def test_the_thread_ends_with_the_heart_and_keeps_no_detector(store) -> None:
    own, detector = Heart(0, store), Detector()
    own.watch(detector, 1.0)
    gone, pulse = weakref.ref(detector), own._pulse
    assert until(lambda: b"all_gather of unit 'x'" in store.get("0"))
    del detector
    assert until(lambda: gone() is None)
    del own
    gc.collect()
    assert until(lambda: pulse.ended)


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


# --- a store that fails, or is silent, or gone -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("failures", [1, 5])
def test_a_rank_whose_store_fails_now_and_then_goes_on_beating(failures: int) -> None:
    store = FailingStore()
    own, other = Heart(0, store.inner), Heart(1, store)
    own.watch(Detector(), 1.0)
    other.watch(Detector(), 1.0)
    store.failures = failures
    assert until(lambda: not store.failures)
    begin = own._pulse.clock
    while own._pulse.clock - begin < 1.5:
        assert own.find_lost([1], 1.0) == ""


def test_a_call_that_fails_once_is_made_again() -> None:
    store = FailingStore()
    own = Heart(0, store)
    store.failures = 1
    own.store.set("key", "text")
    store.failures = 1
    assert own.store.get("key") == b"text"


def test_a_call_that_fails_by_itself_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(store: Any) -> Any:
        raise AssertionError("the connection is not at fault")

    monkeypatch.setattr(liveness, "reconnected", never)
    calls = []
    with pytest.raises(ZeroDivisionError):
        Heart(0, FailingStore()).ask(lambda store: calls.append(store) or 1 / 0)
    assert len(calls) == 1


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


LOOKS: dict[str, Callable[[Heart], object]] = {
    "for lost ranks": lambda heart: heart.find_lost([1, 2], 2.0),
    "for what others have found": lambda heart: heart.finding(),
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


class Router:
    """Forwards connections to a server; it can cut them, and end."""

    def __init__(self, port: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port, self.target = self.listener.getsockname()[1], port
        self.ends: list[socket.socket] = []
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self.listener.accept()
                theirs = socket.create_connection(("127.0.0.1", self.target))
                self.ends += [ours, theirs]
                for source, sink in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self.forward, args=(source, sink), daemon=True).start()

    def forward(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def cut(self) -> None:
        for end in self.ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.ends.clear()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.cut()


def test_a_heart_connects_again_after_its_connection_was_cut_and_ends_with_the_process_of_the_store() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    router = Router(server.port)
    own, thread = heart_and_thread(dist.PrefixStore("job", dist.TCPStore("127.0.0.1", router.port, is_master=False)))
    own.watch(Detector(), 0.4)
    router.cut()
    own.store.set("after", "the cut")
    assert until(lambda: server.check(["job/after"]))
    before = server.get("job/0")
    assert until(lambda: server.get("job/0") != before)
    router.end()
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


# --- real ranks -----------------------------------------------------------------------------------


def train(mesh: fs.Mesh, steps: int) -> Iterator[int]:
    for step in range(steps):
        yield step
        for axis in ("shard", "replicate"):
            fs.psum(torch.ones(1000), mesh[axis])


def give_up_one(_: fs.Mesh, odd: int, what: str, shared_memory: bool, folder: str) -> tuple[str, float] | None:
    """Suspend or kill rank ``odd`` after three steps; return the error of every other rank, and its seconds."""
    mesh = fs.init_mesh(GRID, device="cpu", patience=PATIENCE, give_up=GIVE_UP, shared_memory=shared_memory)
    process, rank, beats = os.getpid(), mesh.rank, mesh.shard.desync.heart.store  # type: ignore[attr-defined]
    if rank == odd:
        (Path(folder) / "process").write_text(str(process))
    try:
        for step in train(mesh, 100):
            if step == 3:
                until(lambda: b"all_reduce" in beats.get(str(rank)))
                start = time.monotonic()
                if rank == odd and what == "suspended":
                    suspend(mesh)
                elif rank == odd:
                    if not os.fork():  # a child that holds all connections, and ends with the other ranks
                        until(lambda: len(os.listdir(folder)) == 4, 30)
                        os._exit(0)
                    os.kill(process, signal.SIGKILL)
    except RuntimeError as error:
        message, seconds = str(error), time.monotonic() - start
    (Path(folder) / str(rank)).touch()
    until(lambda: len(os.listdir(folder)) == 4, 15)
    if rank == (odd + 1) % 4 and what == "suspended":
        os.kill(int((Path(folder) / "process").read_text()), signal.SIGKILL)
    return message, seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "odd", "shared_memory", "words"),
    [
        ("suspended", 3, False, "rank 3 has given no sign of life for "),
        ("suspended", 0, True, "rank 0 has given no sign of life for "),
        ("killed with a living child", 1, True, "the process of rank 1 has ended"),
        ("killed with a living child", 1, False, "the process of rank 1 has ended"),
    ],
)
def test_all_other_ranks_give_up_one_that_is_lost(what, odd, words, shared_memory, tmp_path) -> None:
    found = run_ranks(give_up_one, 4, odd, what, shared_memory, str(tmp_path), may_die={odd}, timeout=45)
    assert found[odd] is None
    for rank in set(range(4)) - {odd}:
        message, seconds = found[rank]
        assert words in message, message
        assert "last seen in all_reduce" in message
        assert seconds < SOON


# What a child of rank 0 does; all ranks have started the work.
DEEDS = {
    "a step": lambda mesh, work: list(train(mesh, 1)),
    "a small sum": lambda mesh, work: fs.psum(torch.ones(3), mesh["shard"]),
    "a message": lambda mesh, work: fs.ppermute(torch.ones(3), mesh, [(0, 1)], axis="shard"),
    "the end of a collective": lambda mesh, work: work.wait(),
}


def add_up_in_children(_: fs.Mesh, shared_memory: bool, folder: str) -> tuple[list[str], list[float]]:
    """Return the errors of children of rank 0 that take part, and what the ranks add up later."""
    mesh = fs.init_mesh(GRID, device="cpu", patience=PATIENCE, shared_memory=shared_memory)
    list(train(mesh, 3))
    answers = []
    for what, deed in DEEDS.items():
        answer, work = Path(folder) / what, mesh.groups["shard"].all_reduce(torch.ones(2))
        if mesh.rank == 0:
            child = os.fork()
            if not child:
                try:
                    deed(mesh, work)
                except RuntimeError as error:
                    answer.write_text(str(error))
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
            answers.append(answer.read_text())
        work.wait()
    return answers, fs.psum(torch.tensor([1.0]), mesh).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
def test_forked_children_cannot_take_part_and_do_no_harm(shared_memory, tmp_path) -> None:
    (messages, total), *others = run_ranks(add_up_in_children, 4, shared_memory, str(tmp_path), timeout=40)
    assert len(messages) == len(DEEDS)
    for message in messages:
        assert "was forked from process " in message
        assert "which is rank 0, and cannot take part in its collectives: keep the mesh out of forked workers" in message
    assert [total, *(each for _, each in others)] == [[4.0]] * 4


def pause(_: fs.Mesh, seconds: float, shared_memory: bool) -> list[float]:
    mesh = fs.init_mesh(GRID, device="cpu", patience=PATIENCE, give_up=4 * GIVE_UP, shared_memory=shared_memory)
    for step in train(mesh, 6):
        if step == 3 and mesh.rank == 3:
            with wakes_once_stopped(seconds):
                os.kill(os.getpid(), signal.SIGSTOP)
    return fs.psum(torch.tensor([1.0]), mesh).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])
def test_a_rank_that_is_suspended_for_a_short_time_is_waited_for(shared_memory) -> None:
    assert run_ranks(pause, 4, 2.0, shared_memory) == [[4.0]] * 4
