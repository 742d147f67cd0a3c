"""Wrong calls, and the error that each of them raises: one table, in rows.

A row names the public functions that it misuses, first the one that should tell, and says what the mistake
is, what must come of it, and the program that makes it::

    ("psum", "a Python number", TypeError("make it one with torch.tensor"), lambda mesh: fs.psum(1.0, mesh)),

Every rank raises an error of this class, with these words in its message; "…" stands for any text,
and of several texts the message has to hold one. ``None`` in its place is no error: the program
looks like a mistake, and asserts that it isn't one.

A program takes ``s``, the ``Setup`` of one rank, or ``mesh``; one that takes nothing runs on no
simulated rank. It runs on two ranks; where it takes communication to know, the row ends in
``EVERYWHERE``: 2 × 2 ranks. ``tests/promises/test_misuse.py`` runs the rows of all files of this
folder.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

import funcshard as fs

__all__ = ["APPLY", "BUFFERS", "DATA", "DESYNC", "EVERYWHERE", "GRID", "NET", "PARAMS", "Case", "Setup", "check", "set_up"]

GRID = {"replicate": 2, "shard": 2}
EVERYWHERE = (GRID,)
# Ranks issue different collectives: one rank raises, and the simulation ends the rest.
DESYNC = RuntimeError(
    "ranks issue different collectives", "simulated ranks wait for each other and none can continue"
)  # fmt: skip


class Case(NamedTuple):
    """One mistake.

    Attributes:
        of: the public names that it misuses.
        name: the mistake.
        error: the error that every rank must raise; none if the program is right.
        program: the program of one rank.
        worlds: the worlds that it runs in.
    """

    of: str
    name: str
    error: Exception | None
    program: Callable[..., Any]
    worlds: tuple[int | Mapping[str, int], ...] = (2,)

    def __str__(self) -> str:
        return f"{self.of.split()[0]}: {self.name}"


def check(case: Case) -> None:
    """Run ``case`` in each of its worlds, and compare the errors of the ranks with its own."""
    for world in case.worlds:
        errors = _errors(case.program, world)
        where = f"{case} on {world}"
        if case.error is None:
            assert not errors, f"{where}: {errors}"
            continue
        for rank in range(world if isinstance(world, int) else 4):
            assert rank in errors or not _takes(case.program), f"{where}: rank {rank} raised nothing; errors {errors}"
        assert errors, f"{where}: it raised nothing"
        for rank, raised in errors.items():
            assert _fits(case.error, raised), f"{where}: rank {rank} raised {type(raised).__name__}: {raised}"


def _fits(error: Exception, raised: Exception) -> bool:
    text = "\n".join([str(raised), *getattr(raised, "__notes__", ())])
    patterns = (".*".join(map(re.escape, words.split("…"))) for words in error.args)
    return isinstance(raised, type(error)) and any(re.search(pattern, text, re.DOTALL) for pattern in patterns)


def _errors(program: Callable[..., Any], world: Any) -> dict[int, Exception]:
    """Return what the ranks raise."""
    errors, takes = dict[int, Exception](), _takes(program)

    def one_rank(mesh: fs.Mesh) -> None:
        # Why caught here: simulate ends all ranks when one raises, and each rank has to raise by
        # itself.
        try:
            program(*[set_up(mesh) if takes == "s" else mesh] * bool(takes))
        except Exception as raised:
            errors[mesh.rank] = raised

    if not takes:
        one_rank(fs.Mesh())
        return errors
    try:
        fs.simulate(one_rank, world)
    except RuntimeError as raised:  # a deadlock; it is the error of every rank that did not raise before
        return dict.fromkeys(range(world if isinstance(world, int) else 4), raised) | errors
    return errors


def _takes(program: Callable[..., Any]) -> str:
    """Return the name of the first parameter, if ranks run the program."""
    name = next(iter(inspect.signature(program).parameters), "")
    return name if name in ("s", "mesh") else ""


# --- the start of most programs -------------------------------------------------------------------

torch.manual_seed(0)
# Units "0" and "2" have leaves of equal names and shapes.
NET = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
APPLY, PARAMS, BUFFERS = fs.make_functional(NET)
DATA = torch.randn(8, 4)


class Setup(NamedTuple):
    """The values that one rank has before its mistake.

    Attributes:
        mesh: the ranks.
        plan: a plan with two equal units and a root.
        sharded: the sharded function of ``NET``.
        shards: this rank's shards of ``PARAMS``.
        x: this rank's rows of ``DATA``.
    """

    mesh: fs.Mesh
    plan: fs.Plan
    sharded: Any
    shards: Any
    x: torch.Tensor

    def loss(self, shards: Any, x: torch.Tensor) -> torch.Tensor:
        return self.sharded(shards, BUFFERS, x).square().mean()

    def grads(self) -> Any:
        return fs.value_and_grad(self.loss)(self.shards, self.x)[1]

    def whole(self, shards: Any) -> Any:
        return fs.gather(shards, self.plan, self.mesh)

    def state(self) -> fs.TrainState:
        return self.step().init(self.shards, BUFFERS)

    def step(self, optimizer: Any = None, loss_fn: Any = None, **options: Any) -> Any:
        optimizer = optimizer or fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        return fs.make_train_step(loss_fn or self.loss_of_step, optimizer, self.plan, self.mesh, **options)

    def loss_of_step(self, shards: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return self.sharded(shards, buffers, x).square().mean()


def set_up(mesh: fs.Mesh, units: Any = ("0", "2")) -> Setup:
    """Return the set-up of one rank."""
    plan = fs.make_plan(PARAMS, mesh, units=list(units))
    sharded = fs.fully_shard(APPLY, plan, mesh)
    return Setup(mesh, plan, sharded, fs.shard(PARAMS, plan, mesh), DATA.chunk(mesh.world_size)[mesh.rank])
