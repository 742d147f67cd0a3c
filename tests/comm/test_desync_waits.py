"""What ranks are told that wait in vain, and that ranks which are merely slow are waited for, on real processes.

``CASES`` is one table: what each rank does, and what each is told.
"""

from __future__ import annotations

import collections
import math
import os
import re
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import funcshard as fs
from funcshard.comm import Op, desync
from funcshard.comm.watch import Record
from tests.comm.stores import until
from tests.core.units import of_module
from tests.ranks import run_ranks, suspend

LINE, ROW, PAIR, GRID = {"shard": 4}, {"shard": 2}, {"replicate": 2, "shard": 1}, {"replicate": 2, "shard": 2}
PATIENCE = 0.4
DIFFER = (
    r"^ranks issue different collectives: number \d+ on mesh axis 'shard' is ",
    "rank 0",
    "rank 1",
    "every rank has to issue the same ones in the same order",
)
CIRCLE = ("^ranks wait for each other in collectives of different axes or meshes, and none can continue: ",)
SHARED, GLOO, BOTH = (True,), (False,), (True, False)


class Case(NamedTuple):
    """What the ranks of a mesh do, and what they are told."""

    program: Callable[[fs.Mesh, Path], object]  # what each rank does with its mesh, and with a folder that all share
    told: Sequence[str] = ()  # patterns of the error of every rank; {closed} is what is known of closed connections
    carriers: Sequence[bool] = BOTH  # whether ranks use shared memory
    shape: Mapping[str, int] = ROW
    waits: Sequence[str] = ()  # what each rank is said to wait for
    lost: int | None = None  # the rank whose process does not return
    quiet: Sequence[int] = ()  # the ranks that get no error
    result: object = None  # what the program returns if no rank is told anything
    kind: type[Exception] = RuntimeError
    within: float = 20.0  # seconds in which the ranks are told; the timeout of their group is longer by far
    options: Mapping[str, float] = {"patience": PATIENCE}  # of init_mesh; nobody changes it


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

    def __init__(self, mesh: fs.Mesh) -> None:
        torch.manual_seed(0)
        self.mesh = mesh
        _, self.sharded, self.shards = of_module(mesh, Blocks(), ["blocks.*"])

    def train(self, *order: int) -> None:
        loss_fn = lambda shards: self.sharded(shards, {}, torch.ones(1, 4), order or (0, 1, 2)).sum()  # noqa: E731
        fs.value_and_grad(loss_fn)(self.shards)

    def evaluate(self, *order: int) -> None:
        with torch.no_grad():
            self.sharded(self.shards, {}, torch.ones(1, 4), order or (0, 1, 2))

    def add(self, n: int, axis: str | None = None) -> None:
        fs.psum(torch.ones(n), self.mesh if axis is None else self.mesh[axis])


TRAIN, EVALUATE = [("train",)], [("evaluate",)]
SKIP, SWAP = [("train", 0, 2)], [("train", 0, 2, 1)]
ADD_ALONG = [("add", 3, "replicate")]
Program = list[tuple[Any, ...]]


def disagree(
    *programs: Program, before: Program = TRAIN + 2 * EVALUATE + TRAIN, steps: int = 2
) -> Callable[[fs.Mesh, Path], None]:
    """Let each rank do its actions, after all have done equal ones twice."""

    def program(mesh: fs.Mesh, _: Path) -> None:
        warnings.simplefilter("ignore")  # about an order other than the schedule's
        actions = Actions(mesh)
        for name, *args in 2 * before + steps * programs[mesh.rank]:
            getattr(actions, name)(*args)

    return program


# An action that is new to a rank is found before data moves, at the first or second step. On gloo, other
# differences are found after at most two comparisons.
LATER = desync.COMPARE_EVERY * 2 // 3 + 1


def agree_on_all(mesh: fs.Mesh) -> None:
    """Let a detector take every order and size of collectives for one that the ranks have agreed on."""

    class Everything(set):  # type: ignore[type-arg]
        def __contains__(self, _: object) -> bool:
            return True

    mesh.shard.desync._agreed_contexts = Everything()  # type: ignore[attr-defined]
    mesh.shard.desync._sizes = collections.defaultdict(lambda: range(desync.MOST_SIZES))  # type: ignore[attr-defined]


def exchange_texts_after_others(mesh: fs.Mesh, _: Path) -> None:
    agree_on_all(mesh)
    fs.psum(torch.ones(2), mesh)
    mesh.shard.start(Op("all_reduce", f"unit {mesh.rank}", torch.ones(2))).wait()
    mesh.shard.all_gather_text("")


def differ_in_a_known_context(mesh: fs.Mesh, _: Path) -> None:
    agree_on_all(mesh)
    for number in range(1, 2 * desync.COMPARE_EVERY + 1):
        mesh.shard.start(Op("all_reduce", f"unit {mesh.rank if number == 5 else 0}", torch.ones(2))).wait()


CASES: dict[str, Case] = {
    "a unit is skipped in training": Case(disagree(TRAIN, SKIP), (*DIFFER, "unit 'blocks.2' on rank")),
    "equal units are swapped in training": Case(disagree(TRAIN, SWAP), (*DIFFER, "unit 'blocks.2' on rank")),
    "sizes differ": Case(disagree([("add", 2)], [("add", 3)]), (*DIFFER, r"all_reduce of float32\[3\] on rank"), SHARED),
    "one evaluates and one trains, later":
        Case(disagree(TRAIN, EVALUATE, steps=LATER), (*DIFFER, r"all_gather of float32\[20\] of buffer"), GLOO),
    "labels differ in a context that is known":
        Case(differ_in_a_known_context, (r"number 5 on mesh axis 'shard' is all_reduce of float32\[2\] of unit",), GLOO),
    "labels differ before an exchange of texts":
        Case(exchange_texts_after_others, (r"number 2 on mesh axis 'shard' is all_reduce of float32\[2\] of unit",), GLOO),
}  # fmt: skip


def be_killed_when_the_other_waits(mesh: fs.Mesh, _: Path) -> None:
    for _ in range(15):
        fs.psum(torch.ones(3), mesh)
    if mesh.rank == 1:
        watch = mesh.shard.desync.watch  # type: ignore[attr-defined]
        # Rank 0 shows its latest collectives once it has waited for longer than patience.
        until(lambda: "16" in Record.of(watch.get("funcshard/0")).titles, 15)
        os.kill(os.getpid(), signal.SIGKILL)
    fs.psum(torch.ones(3), mesh)


def train(mesh: fs.Mesh, steps: int) -> None:
    for _ in range(steps):
        for axis in ("shard", "replicate"):
            fs.psum(torch.ones(1000), mesh[axis])


def lose(odd: int, how: str) -> Callable[[fs.Mesh, Path], None]:
    """Suspend or kill rank ``odd`` after three steps; the others take more steps."""

    def program(mesh: fs.Mesh, folder: Path) -> None:
        watch, process = mesh.shard.desync.watch, folder / "process"  # type: ignore[attr-defined]
        train(mesh, 3)
        until(lambda: b"all_reduce" in watch.get(f"funcshard/{mesh.rank}"))
        if mesh.rank == odd:
            process.write_text(str(os.getpid()))
            if how == "suspended":
                suspend(mesh)
            if not os.fork():  # a child that holds all connections, and ends with the other ranks
                until(lambda: len(os.listdir(folder)) == 4)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            train(mesh, 97)
        finally:
            (folder / str(mesh.rank)).touch()
            until(lambda: len(os.listdir(folder)) == 4, 15)
            if mesh.rank == (odd + 1) % 4 and how == "suspended":
                os.kill(int(process.read_text()), signal.SIGKILL)

    return program


FAILED = r"rank 0 waited for all_reduce of float32\[3\], collective number 16 on mesh axis 'shard', which failed; not known "
BEHIND = r"rank 1 \((never seen|last seen at number \d+)\)"
LAST_SEEN, GIVEN_UP = (
    "last seen in all_reduce",
    {"shape": GRID, "within": 12.0, "options": {"patience": 0.3, "give_up": 2.0}},
)
CASES |= {
    "a rank is killed":  # rank 0 may look before the connection ends, and rank 1 may have waited long for rank 0 before
        Case(be_killed_when_the_other_waits,
             (f"^the process of rank 1 has ended|{FAILED}to have reached it: {BEHIND}.*{{closed}}",),
             lost=1, within=15.0),
    "a rank is suspended":
        Case(lose(3, "suspended"), ("rank 3 has given no sign of life for ", LAST_SEEN), GLOO, lost=3, **GIVEN_UP),
    "the first rank is suspended":
        Case(lose(0, "suspended"), ("rank 0 has given no sign of life for ", LAST_SEEN), SHARED, lost=0, **GIVEN_UP),
    "a rank with a living child is killed":
        Case(lose(1, "killed"), ("the process of rank 1 has ended", LAST_SEEN), lost=1, **GIVEN_UP),
}  # fmt: skip


def make_one_mesh_more(mesh: fs.Mesh, _: Path) -> None:
    for _ in range(3):
        fs.psum(torch.ones(3), mesh)
    if mesh.rank == 1:
        fs.init_mesh(PAIR, device="cpu", patience=PATIENCE)
    fs.psum(torch.ones(3), mesh)


def make_a_mesh_after_the_others(mesh: fs.Mesh, folder: Path) -> None:
    fs.psum(torch.ones(3), mesh)
    if mesh.rank == 1:
        del mesh
        dist.destroy_process_group()  # as at the end of its program
        (folder / "left").touch()
    else:
        until((folder / "left").exists)
        fs.init_mesh(PAIR, device="cpu", patience=PATIENCE)


def from_device_mesh(**sizes: int) -> Callable[[fs.Mesh], fs.Mesh]:
    return lambda mesh: fs.Mesh.from_device_mesh(
        init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)), patience=PATIENCE
    )


def init(**shape: int) -> Callable[[fs.Mesh], fs.Mesh]:
    return lambda mesh: fs.init_mesh(shape, device="cpu")


def make(*makers: Callable[[fs.Mesh], fs.Mesh]) -> Callable[[fs.Mesh, Path], None]:
    """Let each rank make a mesh; all are told so before any group is made, so they can go on together."""

    def program(mesh: fs.Mesh, _: Path) -> None:
        try:
            makers[mesh.rank](mesh)
        finally:
            again = fs.init_mesh(mesh.shape, device="cpu")
            assert fs.psum(torch.ones(2), again).tolist() == [float(mesh.world_size)] * 2

    return program


def different(words: str, *makers: Callable[[fs.Mesh], fs.Mesh]) -> Case:
    return Case(make(*makers), (words,), SHARED, kind=ValueError)


SHAPE = "the shape of the mesh must be the same on every rank; rank 0 has "
GATHER, SUM = "all_gather of float32[20] of buffer 'float32' of unit 'blocks.0'", "all_reduce of float32[3]"
PART = disagree(EVALUATE, ADD_ALONG + EVALUATE, ADD_ALONG + EVALUATE, EVALUATE, before=TRAIN + ADD_ALONG + EVALUATE, steps=1)
CASES |= {
    "ranks go on with different axes":
        Case(PART,
             (*CIRCLE, re.escape(GATHER), re.escape(SUM), r"axis 'shard'\), which rank", r"axis 'replicate'\), which rank"),
             shape=GRID, waits=(GATHER, SUM, SUM, GATHER)),
    "one rank makes a mesh more":
        Case(make_one_mesh_more, (*CIRCLE, "which rank {peer} has not reached"),
             waits=(f"{SUM} (number 4 on mesh axis 'shard')", "init_mesh of 2 replicate × 1 shard ranks")),
    "a rank makes a mesh after the others have left":
        Case(make_a_mesh_after_the_others,
             (r"^rank 1 has left the job \(process .*rank 0 waited for it to make a mesh; every rank has to make the same",),
             SHARED, quiet=[1]),
    "meshes have other axes":
        different(f"{SHAPE}1 replicate × 2 shard and rank 1 has 2 replicate", init(shard=2), init(**PAIR)),
    "meshes are made by another function":
        different("function that makes the mesh must be the same on every rank; rank 0 has init_mesh and rank 1 has Mesh.f",
                  init(shard=2), from_device_mesh(shard=2)),
    "meshes are reshaped otherwise":
        different("the shape of Mesh.reshaped must be the same on every rank; rank 0 has",
                  lambda mesh: mesh.reshaped(PAIR), lambda mesh: mesh.reshaped({"tensor": 2, "shard": 1})),
}  # fmt: skip


def be_slow(mesh: fs.Mesh, _: Path) -> list[float]:
    totals = []
    for i in range(20):
        time.sleep(0.6 if i in (0, 15) and mesh.rank == 1 else 0)
        totals.append(fs.psum(torch.tensor(float(mesh.rank + i)), mesh).item())
    return totals


def come_late(mesh: fs.Mesh, _: Path) -> float:
    time.sleep(1.0 if mesh.rank == 1 else 0.0)
    return fs.psum(torch.tensor(1.0), fs.init_mesh(device="cpu", patience=0.1)).item()


def make_other_groups_before(_: fs.Mesh, folder: Path) -> list[float]:
    for _ in range(dist.get_rank()):  # each rank makes another number of groups
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    grid = fs.init_mesh(GRID, device="cpu")
    return [fs.psum(torch.tensor(1.0), grid[axis]).item() for axis in ("replicate", "shard")]


CASES |= {
    "slow while ranks agree and while data moves":
        Case(be_slow, result=[2.0 * i + 1 for i in range(20)], options={"patience": 0.1}),
    "late to make a mesh": Case(come_late, carriers=SHARED, result=2.0),
    "with other groups before": Case(make_other_groups_before, (), SHARED, LINE, result=[2.0, 2.0]),
}  # fmt: skip


def run_case(world: fs.Mesh, name: str, shared_memory: bool, folder: str) -> tuple[object, str, str, float]:
    """Return the result of a rank, or kind, text and time of its error."""
    case = CASES[name]
    mesh = fs.init_mesh(
        case.shape if shared_memory else None, device="cpu", shared_memory=shared_memory, **case.options
    ).reshaped(case.shape)  # on gloo, from a line: meshes made from one another share their watch
    del world
    begin = time.monotonic()
    try:
        return case.program(mesh, Path(folder)), "", "", 0.0
    except (RuntimeError, ValueError) as error:
        return None, type(error).__name__, str(error), time.monotonic() - begin


# One of each kind of difference and of loss; the others run at night.
BY_DAY = {
    "a unit is skipped in training, shared memory", "labels differ in a context that is known, gloo",
    "a rank is killed, gloo", "a rank with a living child is killed, gloo", "a rank is suspended, gloo",
    "ranks go on with different axes, shared memory", "one rank makes a mesh more, shared memory",
    "meshes have other axes, shared memory", "slow while ranks agree and while data moves, gloo",
}  # fmt: skip
RUNS = {
    f"{name}, {'shared memory' if shared_memory else 'gloo'}": (name, shared_memory)
    for name, case in CASES.items()
    for shared_memory in case.carriers
}
assert RUNS.keys() >= BY_DAY


@pytest.mark.parametrize(
    ("name", "shared_memory"),
    [
        pytest.param(*run, id=name, marks=pytest.mark.slow if name in BY_DAY else pytest.mark.nightly)
        for name, run in RUNS.items()
    ],
)
def test_ranks_that_wait_are_told_why_or_go_on(name: str, shared_memory: bool, tmp_path: Path) -> None:
    case, may_die = CASES[name], [] if CASES[name].lost is None else [CASES[name].lost]
    answers = run_ranks(
        run_case, math.prod(case.shape.values()), name, shared_memory, str(tmp_path), may_die=may_die, timeout=45
    )
    closed = "Connection closed by rank 1 of the group" if shared_memory else "Connection"
    for rank, answer in enumerate(answers):
        if rank == case.lost:
            assert answer is None
            continue
        result, kind, message, seconds = answer
        if not case.told or rank in case.quiet:
            assert (result, message) == (case.result, "")
            continue
        assert kind == case.kind.__name__, message
        for words in case.told:
            assert re.search(words.format(closed=closed, peer=1 - rank), message, re.S), message
        assert not case.waits or f"rank {rank} waits for {case.waits[rank]}" in message
        assert seconds < case.within
