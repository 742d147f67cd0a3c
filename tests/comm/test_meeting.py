"""Ranks that make different meshes, or one mesh more, all raise soon; slow ranks do not."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import funcshard as fs
from funcshard._utils import group_timeout
from funcshard.comm.journal import Journal
from funcshard.comm.liveness import Heart
from funcshard.comm.meeting import meet, name_of
from tests.comm.stores import CountingStore, FailingStore, SuspendedStore
from tests.ranks import run_ranks

PATIENCE = 0.4
CIRCLE = "ranks wait for each other in collectives of different axes or meshes, and none can go on: "


def outcome(action: Callable[[], object]) -> tuple[str, str, float]:
    """Return the kind and the text of the error of an action, and its seconds."""
    start = time.monotonic()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "nothing noticed", time.monotonic() - start


# --- different meshes -----------------------------------------------------------------------------


def make(names: tuple[str, ...], sizes: tuple[int, ...]) -> object:
    return fs.Mesh.from_device_mesh(init_device_mesh("cpu", sizes, mesh_dim_names=names), patience=PATIENCE)


# The calls of ranks 0 and 1, and words of the error on both.
DIFFERENT: dict[str, tuple[Callable[[fs.Mesh], object], Callable[[fs.Mesh], object], str]] = {
    "other axes": (
        lambda mesh: fs.init_mesh({"shard": 2}, device="cpu"),
        lambda mesh: fs.init_mesh({"replicate": 2, "shard": 1}, device="cpu"),
        "the shape of the mesh must be the same on every rank; rank 0 has 1 replicate × 2 shard and rank 1 has 2 replicate",
    ),
    "other names": (
        lambda mesh: fs.init_mesh({"tensor": 2, "shard": 1}, device="cpu"),
        lambda mesh: fs.init_mesh({"expert": 2, "shard": 1}, device="cpu"),
        "the shape of the mesh must be the same on every rank; rank 0 has",
    ),
    "another function": (
        lambda mesh: fs.init_mesh(device="cpu"),
        lambda mesh: make(("shard",), (2,)),
        "the function that makes the mesh must be the same on every rank; rank 0 has init_mesh and rank 1 has Mesh.from",
    ),
    "names of a device mesh": (
        lambda mesh: make(("shard", "replicate"), (2, 1)),
        lambda mesh: make(("replicate", "shard"), (2, 1)),
        "the shape of the mesh must be the same on every rank; rank 0 has",
    ),
    "reshaped": (
        lambda mesh: mesh.reshaped({"replicate": 2, "shard": 1}),
        lambda mesh: mesh.reshaped({"tensor": 2, "shard": 1}),
        "the shape of Mesh.reshaped must be the same on every rank; rank 0 has",
    ),
}


def differ(mesh: fs.Mesh, case: str) -> list[tuple[str, str, float]]:
    found = [outcome(lambda: DIFFERENT[case][mesh.rank](mesh))]
    # The ranks go on together, because the error came before any group was made.
    again = fs.init_mesh({"replicate": 2, "shard": 1}, device="cpu")
    return [*found, outcome(lambda: fs.psum(torch.ones(2), again))]


@pytest.mark.parametrize("case", DIFFERENT)
def test_ranks_that_make_different_meshes_all_raise_at_once(case: str) -> None:
    for (kind, words, _), (_, after, _) in run_ranks(differ, 2, case, timeout=30):
        assert (kind, after) == ("ValueError", "nothing noticed")
        assert DIFFERENT[case][2] in words


def differ_in_sizes(mesh: fs.Mesh) -> tuple[str, str, float]:
    return outcome(lambda: fs.init_mesh({"replicate": 2, "shard": 2} if mesh.rank == 3 else {"shard": 4}, device="cpu"))


def test_one_of_four_ranks_with_another_shape_is_named_on_all_of_them() -> None:
    for kind, words, _ in run_ranks(differ_in_sizes, 4, timeout=30):
        assert kind == "ValueError"
        assert "the shape of the mesh must be the same on every rank; rank 0 has" in words
        assert "and rank 3 has" in words


# --- one mesh more --------------------------------------------------------------------------------


def one_mesh_more(_: fs.Mesh, shared_memory: bool) -> tuple[str, str, float]:
    mesh = fs.init_mesh(device="cpu", patience=PATIENCE, shared_memory=shared_memory)
    for _ in range(3):
        fs.psum(torch.ones(3), mesh)
    if mesh.rank == 1:
        return outcome(lambda: fs.init_mesh({"replicate": 2, "shard": 1}, device="cpu", patience=PATIENCE))
    return outcome(lambda: fs.psum(torch.ones(3), mesh))


BOTH_BACKENDS = pytest.mark.parametrize("shared_memory", [True, False], ids=["shared memory", "gloo"])


@pytest.mark.slow
@BOTH_BACKENDS
def test_a_rank_that_makes_one_mesh_more_and_the_ranks_that_wait_for_it_all_raise(shared_memory: bool) -> None:
    for rank, (kind, words, seconds) in enumerate(run_ranks(one_mesh_more, 2, shared_memory, timeout=40)):
        assert kind == "RuntimeError"
        assert words.startswith(CIRCLE)
        own = (
            "all_reduce of float32[3] (number 4 on mesh axis 'shard')",
            "init_mesh of 2 replicate × 1 shard ranks",
        )
        assert f"rank {rank} waits for {own[rank]}" in words
        assert f"which rank {1 - rank} has not reached" in words
        assert seconds < 20


def meet_alone(store: Any, heart: Heart | None = None, timeout: float = 600.0) -> tuple[str, str, float]:
    """Return the outcome of rank 1 in a meeting with rank 0, which does not come."""
    journal = Journal(1, store, heart)
    facts, limits = {"the shape": "2"}, {"timeout": timeout, "patience": 0.1, "give_up": 1.5}
    return outcome(lambda: meet(journal, [0, 1], "init_mesh", facts, **limits))


@pytest.mark.slow
def test_the_timeout_ends_a_meeting_and_names_the_rank_that_has_not_come() -> None:
    kind, words, seconds = meet_alone(dist.HashStore(), timeout=1.0)
    assert kind == "RuntimeError"
    assert "rank 1 waited 1 s in init_mesh, which is number 1 of these ranks, and rank 0 has not come" in words
    assert "every rank has to make the same meshes in the same order; read the log of the rank that is missing" in words
    assert 1.0 <= seconds < 60


@pytest.mark.slow
@pytest.mark.parametrize("answers", [0, 5])
def test_a_store_whose_process_is_suspended_ends_a_meeting(answers: int) -> None:
    store, found = SuspendedStore(answers), []
    heart = Heart(1, store)
    thread = threading.Thread(target=lambda: found.append(meet_alone(store, heart)), daemon=True)
    thread.start()
    thread.join(60)
    store.goes_on.set()
    ((kind, words, _),) = found
    assert kind == "RuntimeError"
    assert "the store of the job has not answered rank 1 for " in words
    assert "(give_up=1.5): the process that holds it, which is rank 0 or the launcher, is suspended" in words


def make_another_mesh_after_the_others(_: fs.Mesh, folder: str) -> tuple[str, str, float] | None:
    mesh = fs.init_mesh(device="cpu", patience=PATIENCE)
    fs.psum(torch.ones(3), mesh)
    if mesh.rank == 1:
        del mesh
        dist.destroy_process_group()  # as at the end of its program
        (Path(folder) / "left").touch()
        return None
    while not (Path(folder) / "left").exists():
        time.sleep(0.02)
    return outcome(lambda: fs.init_mesh({"replicate": 2, "shard": 1}, device="cpu", patience=PATIENCE))


@pytest.mark.slow
def test_a_rank_that_makes_a_mesh_after_the_others_have_left_is_told_so(tmp_path: Path) -> None:
    (kind, words, _), _ = run_ranks(make_another_mesh_after_the_others, 2, str(tmp_path), timeout=40)
    assert kind == "RuntimeError"
    assert words.startswith("rank 1 has left the job (process ")
    assert "rank 0 waited for it to make a mesh; every rank has to make the same meshes in the same order" in words


def slow(_: fs.Mesh) -> float:
    time.sleep(1.0 if dist.get_rank() == 1 else 0.0)
    mesh = fs.init_mesh(device="cpu", patience=0.1)
    return fs.psum(torch.tensor(1.0), mesh).item()


@pytest.mark.slow
def test_a_rank_that_comes_late_is_waited_for() -> None:
    assert run_ranks(slow, 2, timeout=30) == [2.0, 2.0]


def other_groups_before(_: fs.Mesh) -> list[float]:
    for _ in range(dist.get_rank()):  # each rank makes another number of groups of its own
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    grid = fs.init_mesh({"replicate": 2, "shard": 2}, device="cpu")
    return [fs.psum(torch.tensor(1.0), grid[axis]).item() for axis in ("replicate", "shard")]


def test_ranks_that_have_made_other_groups_before_meet_all_the_same() -> None:
    assert run_ranks(other_groups_before, 4, timeout=30) == [[2.0, 2.0]] * 4


def test_a_store_that_has_ended_is_an_error_of_ours() -> None:
    with pytest.raises(RuntimeError, match="rank 1 cannot reach the store of the job in init_mesh: the process") as raised:
        meet(Journal(1, FailingStore(math.inf)), [0, 1], "init_mesh", {"the shape": "2"}, timeout=1.0, patience=0.1)
    assert isinstance(raised.value.__cause__, dist.DistNetworkError)


def test_of_a_thousand_ranks_all_but_the_first_ask_the_store_a_few_times_only() -> None:
    ranks, facts = range(1000), {"the shape": "1000"}
    store = CountingStore()
    place = Journal(5, store)
    name = name_of("meeting", ranks)
    store.inner.set(f"{name}/1/answer", "")
    meet(place, ranks, "init_mesh", facts, timeout=5.0, patience=1.0)
    assert store.requests.total() == 3
    for rank in ranks:
        store.inner.set(f"{name}/1/{rank}", '{"the shape": "1000"}')
    store.requests.clear()
    meet(Journal(0, store), ranks, "init_mesh", facts, timeout=5.0, patience=1.0)
    assert store.requests.total() == len(ranks) + 3


def keys_after(meetings: int) -> int:
    """Return how many keys three ranks leave in the store after so many meetings."""
    store = dist.HashStore()
    limits = {"timeout": 60.0, "patience": 30.0}
    places = [Journal(rank, store) for rank in range(3)]
    for _ in range(meetings):
        ranks = [
            threading.Thread(target=meet, args=(place, range(3), "init_mesh", {"the shape": "3"}), kwargs=limits)
            for place in places
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
    return store.num_keys()


def test_the_store_does_not_grow_with_the_number_of_meetings() -> None:
    assert keys_after(1) == keys_after(2) == keys_after(20) == 4


# --- timeouts and patience ------------------------------------------------------------------------


def all_timeouts(mesh: fs.Mesh, port: int, seconds: float) -> dict[str, list[float]]:
    """Start the job anew as under torchrun, and return the timeouts of all groups, and the patience."""
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
    found = {}
    line = fs.init_mesh(device="cpu", patience=0.7)
    parts = {"grid": grid, "reshaped": line.reshaped({"replicate": 2, "shard": 2}), "row": grid["shard"], "line": line}
    for name, each in parts.items():
        for axis, group in each.axes:
            inner = [group.group, group.backend.reductions, group.desync._control]
            limits = [group_timeout(each).total_seconds() for each in inner]
            limits += [] if group.shm is None else [group.shm.exchange.timeout]
            found[f"{name}.{axis}"] = [*limits, group.desync.patience]
    return found


@pytest.mark.slow
def test_the_timeout_and_the_patience_hold_on_every_axis_and_in_every_group_of_it() -> None:
    # Why here, as torchrun has it: a port that is only chosen here may be taken before rank 0 listens at it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for found in run_ranks(all_timeouts, 4, store.port, 7.0):
        assert found.keys() == {f"{mesh}.{axis}" for mesh in ("grid", "reshaped") for axis in ("replicate", "shard")} | {
            "row.shard",
            "line.shard",
        }
        assert all(set(each) == {7.0, 0.7} for each in found.values()), found
