"""What torchrun puts into the environment is checked, and a job that does not start says why.

Ranks meet in a store before they make a mesh: what each asks, what stays, and how long a rank waits.
A rank that connects to others raises as soon as one of them is lost, and else waits. What ranks are
told is in test_desync_waits.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import funcshard as fs
from funcshard._utils.torch_groups import group_timeout
from funcshard.comm.job import meet
from funcshard.comm.watch import Limits, LostError, Wait, Watch, name_of, watched
from tests.comm.stores import FailingStore, SuspendedStore
from tests.commands import Command
from tests.hostile.nursery import needs_linux
from tests.ranks import run_ranks

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}

WRONG: dict[str, tuple[dict[str, str | None], str]] = {
    "a rank that is no number": ({"RANK": "one"}, "RANK must be a whole number of at least 0, as torchrun sets it; found"),
    "a negative rank": ({"RANK": "-1"}, "RANK must be a whole number of at least 0, as torchrun sets it; found"),
    "a rank too high": ({"RANK": "2"}, "RANK must be less than WORLD_SIZE, 2; found 2"),
    "no port": ({"MASTER_PORT": None}, "MASTER_PORT must be a whole number of at least 0, as torchrun sets it; found"),
    "no address": ({"MASTER_ADDR": None}, "MASTER_ADDR must name the machine of rank 0, because RANK"),
}


def launch(monkeypatch: pytest.MonkeyPatch, **changes: str | None) -> None:
    for name, value in {**LAUNCHED, **changes}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_environment_is_an_error_before_anything_is_connected(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, words = WRONG[case]
    launch(monkeypatch, **changes)
    with pytest.raises(ValueError, match=f"environment variable {words}.*start the program with torchrun, or unset"):
        fs.init_mesh(device="cpu", timeout=1.0)
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        (1, r"found process number 1 \(LOCAL_RANK\) and 1 GPUs: start torchrun"),
        (0, r"needs a GPU, and torch finds none here: see nvidia-smi .* or pass init_mesh"),
    ],
)
def test_a_process_without_a_gpu_of_its_own_is_refused(gpus: int, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, LOCAL_RANK="1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(ValueError, match=words):
        fs.init_mesh(device="cuda")
    assert not dist.is_initialized()


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """Yield a port at which nobody listens, nor can meanwhile."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


@pytest.mark.slow
def test_a_job_whose_first_rank_does_not_start_names_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    with silent_port() as port:
        launch(monkeypatch, MASTER_PORT=str(port))
        words = f"rank 1 of 2 cannot join the job at 127.0.0.1:{port} within 1 s"
        with pytest.raises(RuntimeError, match=words) as raised:
            fs.init_mesh(device="cpu", timeout=1.0)
    assert "Read the logs of the other ranks, and see MASTER_ADDR and MASTER_PORT. Communication ended" in str(raised.value)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert time.monotonic() - start < 30


@pytest.mark.slow
def test_a_rank_whose_torchrun_has_ended_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    start = time.monotonic()
    with silent_port() as port:
        launch(monkeypatch, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        words = r"cannot join the job .* torchrun, which holds the store of the job, has ended"
        with pytest.raises(RuntimeError, match=words):
            fs.init_mesh(device="cpu", timeout=600.0, patience=0.2)
    assert time.monotonic() - start < 100  # it has not waited for the timeout


FACTS = {"the shape": "2"}


def meet_alone(store: Any, timeout: float = 600.0) -> str:
    """Return what rank 1 is told in a meeting with rank 0, which does not come."""
    with pytest.raises(RuntimeError) as raised:
        meet(Watch(1, store), [0, 1], "init_mesh", FACTS, timeout=timeout, limits=Limits(0.1, 0.8))
    return str(raised.value)


@pytest.mark.slow
def test_the_timeout_ends_a_meeting_and_names_the_rank_that_has_not_come() -> None:
    start = time.monotonic()
    words = meet_alone(dist.HashStore(), timeout=0.5)
    assert "rank 1 waited 0.5 s in init_mesh, which is number 1 of these ranks, and rank 0 has not come" in words
    assert "every rank has to make the same meshes in the same order. Read its log" in words
    assert 0.5 <= time.monotonic() - start < 60


@pytest.mark.slow
def test_a_store_whose_process_is_suspended_ends_a_meeting() -> None:
    store, told = SuspendedStore(5), []
    thread = threading.Thread(target=lambda: told.append(meet_alone(store)), daemon=True)
    thread.start()
    thread.join(60)
    store.goes_on.set()
    (words,) = told
    assert "the store of the job has not answered rank 1 for " in words
    assert "(give_up=0.8): its process, rank 0 or the launcher, is suspended, or its machine hangs" in words


def test_a_store_that_has_ended_is_an_error_of_ours() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    watch = Watch(1, dist.TCPStore("127.0.0.1", server.port, is_master=False))
    del server
    with pytest.raises(RuntimeError, match="rank 1 cannot reach the store of the job in init_mesh: the process") as raised:
        meet(watch, [0, 1], "init_mesh", FACTS, timeout=1.0, limits=Limits(0.1))
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_of_a_thousand_ranks_all_but_the_first_ask_the_store_a_few_times_only() -> None:
    ranks, store = range(1000), FailingStore()
    name = name_of("meeting", ranks)
    store.inner.set(f"funcshard/{name}/1/answer", "")
    watch = Watch(5, store)
    store.requests.clear()
    meet(watch, ranks, "init_mesh", FACTS, timeout=5.0, limits=Limits(1.0))
    assert store.requests.total() == 4
    store.inner.delete_key(f"funcshard/{name}/1/answer")
    for rank in ranks:
        store.inner.set(f"funcshard/{name}/1/{rank}", '{"the shape": "2"}')
    watch = Watch(0, store)
    store.requests.clear()
    meet(watch, ranks, "init_mesh", FACTS, timeout=5.0, limits=Limits(1.0))
    assert store.requests.total() == len(ranks) + 6


def test_the_store_does_not_grow_with_the_number_of_meetings() -> None:
    store, keys = dist.HashStore(), []
    watches = [Watch(rank, store) for rank in range(3)]
    for _ in range(20):
        ranks = [
            threading.Thread(target=meet, args=(w, range(3), "a", FACTS), kwargs={"timeout": 60.0, "limits": Limits(30.0)})
            for w in watches
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
        keys.append(store.num_keys())
    assert keys == [4 + 3] * 20  # and the records


def all_timeouts(mesh: fs.Mesh, port: int, seconds: float) -> dict[str, list[float]]:
    """Start the job again as under torchrun, and return the timeouts of all groups, and the patience."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    launched = {"RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    launched |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    os.environ |= {name: str(value) for name, value in launched.items()}
    try:
        grid = fs.init_mesh({"replicate": 2, "shard": 2}, device="cpu", timeout=seconds, patience=0.7)
    finally:
        for name in launched:
            del os.environ[name]
    line = fs.init_mesh(device="cpu", patience=0.7)
    meshes = {"grid": grid, "reshaped": line.reshaped({"replicate": 2, "shard": 2}), "row": grid["shard"], "line": line}
    found = {}
    for name, axis, group in [(name, *axis) for name, mesh in meshes.items() for axis in mesh.axes]:
        limits = [group_timeout(g).total_seconds() for g in (group.group, group.desync.control)]
        limits += [] if group.shm is None else [group.shm.exchange.timeout]
        found[f"{name}.{axis}"] = [*limits, group.desync.limits.patience]
    return found


@pytest.mark.slow
def test_the_timeout_and_the_patience_hold_on_every_axis_and_in_every_group_of_it() -> None:
    # Why here, as torchrun has it: a port that is only chosen here may be taken before rank 0 listens at it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    axes = {"grid.shard", "grid.replicate", "reshaped.shard", "reshaped.replicate", "row.shard", "line.shard"}
    for found in run_ranks(all_timeouts, 4, store.port, 7.0):
        assert found.keys() == axes
        assert all(set(limits) == {7.0, 0.7} for limits in found.values()), found


def watch_of(*findings: str) -> Any:
    """Return a watch that finds these at its looks, and then nothing."""
    left, asked = list(findings), []

    def why(wait: Wait, give_up: float) -> str:
        asked.append((list(wait.ranks), give_up))
        return left.pop(0) if left else ""

    return SimpleNamespace(why=why, asked=asked)


def watch(connect: Callable[[], Any], own: Any, patience: float = 5.0) -> Any:
    return watched(connect, own, range(3), Limits(patience, 9.0))


def test_what_connects_at_once_is_returned_or_raised_without_a_look() -> None:
    own = watch_of("rank 1 is lost")
    assert watch(lambda: "connected", own) == "connected"
    with pytest.raises(ZeroDivisionError):
        watch(lambda: 1 / 0, own)
    assert own.asked == []


def test_what_takes_long_is_waited_for_while_no_rank_is_lost() -> None:
    own, go_on = watch_of(), threading.Event()
    own.why = lambda wait, give_up: go_on.set() or ""
    assert watch(lambda: go_on.wait(60), own, 0.01) is True


@pytest.mark.slow
def test_a_lost_rank_ends_the_wait() -> None:
    own, go_on, start = watch_of("", "rank 1 is lost"), threading.Event(), time.monotonic()
    with pytest.raises(LostError, match="rank 1 is lost"):
        watch(lambda: go_on.wait(60), own, 0.6)
    assert time.monotonic() - start < 4  # later looks come sooner than the first
    assert own.asked == [([0, 1, 2], 9.0)] * 2
    go_on.set()


# Rank 1 is killed when it has said that it is alive, and begins to connect.
PROGRAM = """
import os, signal, sys, time
import torch.distributed as dist
import funcshard as fs
if os.environ["RANK"] == "1":
    dist.{call} = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
begin = time.monotonic()
try:
    fs.init_mesh({{"replicate": 1, "shard": 2}}, device="cpu", timeout=100.0, patience=0.5)
except RuntimeError as error:
    print(time.monotonic() - begin, error)
"""


@pytest.mark.nightly(one_in=2)
@needs_linux
@pytest.mark.parametrize("call", ["init_process_group", "distributed_c10d._new_process_group_helper"])
def test_a_rank_that_is_killed_while_it_connects_is_named_in_time(call: str) -> None:
    # Why here, as torchrun has it: a port that is only chosen here may be taken before rank 0 listens at it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "OMP_NUM_THREADS": "1"}
    names |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    program = ["-c", PROGRAM.format(call=call)]
    ranks = [Command(program, {**os.environ, **names, "RANK": str(rank)}) for rank in range(2)]
    told, _ = ranks[0].communicate(timeout=200)
    ranks[1].communicate(timeout=60)
    assert [rank.returncode for rank in ranks] == [0, -9]
    seconds, _, message = told.partition(" ")
    assert "the process of rank 1 has ended (process " in message
    assert "rank 0 waited for it and gives it up" in message
    assert float(seconds) < 50
