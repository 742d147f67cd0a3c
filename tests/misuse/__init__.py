"""Wrong calls, and what comes of each: one table, in rows.

A row names the public functions that it misuses, first the one that should tell, and says what the mistake
is, what must come of it, and the program that makes it::

    ("psum", "a Python number", TypeError("make it one with torch.tensor"), lambda mesh: fs.psum(1.0, mesh)),

The outcome is one of three:

- an exception: every rank that can know raises one of this class, with these words in its message; "…"
  stands for any text, and of several texts the message has to hold one;
- ``right``: the program gives what the same program without shards gives;
- ``untold``: nothing can tell the mistake from a valid program. The result is not what was meant,
  and a sentence in the documentation says why.

A program takes ``s``, the ``Setup`` of one rank, or ``mesh``; one that takes nothing runs on no
simulated rank. An exception has to come on two ranks; where it takes communication to know, the row
ends in ``EVERYWHERE``: 2 × 2 ranks. ``right`` and ``untold`` are tried there anyway.
``tests/promises/test_misuse.py`` runs the rows of all files of this folder.

The rows of ``documented.py`` are on the page "Common mistakes": there the mistake is a sentence,
and the row ends in its cure. ``python -m tests.misuse`` writes the page.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optree
import torch
from torch import nn

import funcshard as fs

__all__ = [
    "APPLY", "BUFFERS", "DATA", "DESYNC", "EVERYWHERE", "GRID", "NET", "PARAMS", "Case", "Setup", "Table",
    "check", "clone", "error", "right", "set_up", "trained", "untold", "values", "whole_grads", "whole_loss",
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
GRID = {"replicate": 2, "shard": 2}
Worlds = tuple[int | Mapping[str, int], ...]
PAIR: Worlds = (2,)
EVERYWHERE: Worlds = (GRID,)

Program = Callable[..., Any]

# --- outcomes -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Right:
    """Every rank returns ``meant``, or its result if it is a function."""

    meant: Any


@dataclass(frozen=True, slots=True)
class Error:
    """The ranks raise ``kind`` with one of ``words`` in the message: every rank, or at least ``ranks``."""

    kind: type[BaseException]
    words: tuple[str, ...]
    ranks: Sequence[int] | None = None

    def fits(self, raised: BaseException) -> bool:
        text = "\n".join([str(raised), *getattr(raised, "__notes__", ())])
        patterns = (".*".join(map(re.escape, words.split("…"))) for words in self.words)
        return isinstance(raised, self.kind) and any(re.search(pattern, text, re.DOTALL) for pattern in patterns)


@dataclass(frozen=True, slots=True)
class Untold:
    """No rank raises, a rank returns something else than ``meant``, and ``page`` says why."""

    page: str
    sentence: str
    meant: Any


Outcome = Right | Error | Untold


def right(meant: Any) -> Right:
    return Right(meant)


def error(kind: type[BaseException], *words: str, ranks: Sequence[int] | None = None) -> Error:
    return Error(kind, words, ranks)


# Ranks issue different collectives: one rank raises, and the simulation ends the rest.
DESYNC = error(
    RuntimeError, "ranks issue different collectives", "simulated ranks wait for each other and none can continue"
)


def untold(page: str, sentence: str, meant: Any) -> Untold:
    return Untold(page, sentence, meant)


# --- cases ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Case:
    """One mistake.

    Attributes:
        of: the public names that it misuses.
        name: the mistake.
        outcome: the outcome that it must have.
        program: the program of one rank.
        worlds: the worlds that it runs in.
        section: the heading that the page lists it under; none if the page does not list it.
        cure: what the page says to do.
    """

    of: tuple[str, ...]
    name: str
    outcome: Outcome
    program: Program
    worlds: Worlds
    section: str = ""
    cure: str = ""

    def __str__(self) -> str:
        name = self.outcome.words[0] if self.section and isinstance(self.outcome, Error) else self.name
        return f"{self.of[0]}: {name}"


@dataclass(slots=True)
class Table:
    """The rows of one file: ``CASES += [...]``, and ``@CASES(of, name, outcome)`` above a long program.

    Attributes:
        cases: the rows.
        worlds: the worlds of rows that name none; by default as the module says.
        section: the heading that the page lists the next rows under.
    """

    cases: list[Case] = field(default_factory=list)
    worlds: Worlds = ()
    section: str = ""

    def __iadd__(self, rows: Sequence[tuple[Any, ...]]) -> Table:
        for row in rows:
            self._add(*row)
        return self

    def __call__(self, of: str, name: str, outcome: Any, worlds: Worlds = ()) -> Callable[[Program], Program]:
        return lambda program: self._add(of, name, outcome, program, worlds)

    def _add(self, of: str, name: str, outcome: Any, program: Program, last: Worlds | str = ()) -> Program:
        cure, worlds = (last, self.worlds) if isinstance(last, str) else ("", last or self.worlds)
        if isinstance(outcome, BaseException):
            outcome, worlds = Error(type(outcome), outcome.args), worlds or PAIR
        if not _takes(program):
            worlds = (1,)
        self.cases.append(Case(tuple(of.split()), name, outcome, program, worlds or EVERYWHERE, self.section, cure))
        return program


@dataclass(slots=True)
class _Found:
    """The results and the errors of a run, by rank."""

    results: dict[int, Any] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)


def check(case: Case) -> None:
    """Run ``case`` in each of its worlds, and compare with its outcome."""
    for world in case.worlds:
        size = world if isinstance(world, int) else 4
        found = _run(case.program, world, size)
        where = f"{case} on {world}"
        outcome = case.outcome
        if isinstance(outcome, Error):
            for rank in range(size) if outcome.ranks is None else outcome.ranks:
                assert rank in found.errors, f"{where}: rank {rank} raised nothing; {_told(found)}"
                raised = found.errors[rank]
                assert outcome.fits(raised), f"{where}: rank {rank} raised {type(raised).__name__}: {raised}"
            continue
        assert not found.errors, f"{where}: {_told(found)}"
        meant = outcome.meant() if callable(outcome.meant) else outcome.meant
        wrong = {rank: text for rank, result in found.results.items() if (text := _difference(result, meant))}
        if isinstance(outcome, Right):
            assert not wrong, f"{where}: {wrong}"
        else:
            assert wrong, f"{where}: the result is right, so this is no mistake"
            text = " ".join(re.sub(r"^[ \t]*[-*] ", "", (ROOT / outcome.page).read_text(), flags=re.MULTILINE).split())
            assert outcome.sentence in text, f"{outcome.page} does not say: {outcome.sentence}"


def _run(program: Program, world: Any, size: int) -> _Found:
    found, takes = _Found(), _takes(program)

    def one_rank(mesh: fs.Mesh) -> None:
        # Why caught here: simulate ends all ranks when one raises, and each rank has to raise by
        # itself.
        try:
            found.results[mesh.rank] = program(*[set_up(mesh) if takes == "s" else mesh] * bool(takes))
        except Exception as raised:
            found.errors[mesh.rank] = raised

    if not takes:
        one_rank(fs.Mesh())
        return found
    try:
        fs.simulate(one_rank, world)
    except RuntimeError as raised:  # a deadlock; it is the error of every rank that did not raise before
        found.errors = dict.fromkeys(range(size), raised) | found.errors
    return found


def _takes(program: Program) -> str:
    """Return the name of the first parameter, or nothing."""
    return next(iter(inspect.signature(program).parameters), "")


def _told(found: _Found) -> str:
    raised = {rank: f"{type(error).__name__}: {error}" for rank, error in found.errors.items()}
    return f"errors {raised}, results {found.results}"


def _difference(found: Any, meant: Any) -> str:
    """Return how ``found`` differs from ``meant``; nothing if it does not."""
    if not any(isinstance(leaf, torch.Tensor | float) for leaf in optree.tree_leaves((found, meant))):
        return "" if found == meant else f"found {found}, meant {meant}"
    try:
        torch.testing.assert_close(found, meant, equal_nan=True)
    except (AssertionError, TypeError) as different:
        return f"found {found}, meant {meant}: {different}"
    return ""


# --- the start of most programs -------------------------------------------------------------------

torch.manual_seed(0)
# Units "0" and "2" have leaves of equal names and shapes.
NET = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
APPLY, PARAMS, BUFFERS = fs.make_functional(NET)
DATA = torch.randn(8, 4)


@dataclass(frozen=True, slots=True)
class Setup:
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

    def step(self, optimizer: Any = None, loss_fn: Any = None, **options: Any) -> Any:
        optimizer = optimizer or fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        return fs.make_train_step(loss_fn or self.loss_of_step, optimizer, self.plan, self.mesh, **options)

    def loss_of_step(self, shards: Any, buffers: Any, x: torch.Tensor) -> torch.Tensor:
        return self.sharded(shards, buffers, x).square().mean()


def set_up(mesh: fs.Mesh, strategy: str = "full_shard", **options: Any) -> Setup:
    """Return the set-up of one rank; ``options`` are those of ``make_plan``."""
    plan = fs.make_plan(PARAMS, mesh, **{"units": ["0", "2"], "strategy": strategy, **options})
    sharded = fs.fully_shard(APPLY, plan, mesh)
    return Setup(mesh, plan, sharded, fs.shard(PARAMS, plan, mesh), DATA.chunk(mesh.world_size)[mesh.rank])


def values() -> dict[str, torch.Tensor]:
    return {name: leaf.detach() for name, leaf in PARAMS.items()}


def clone(tree: Any) -> Any:
    """Return a copy of a tree of tensors."""
    return optree.tree_map(torch.clone, tree)


def whole_loss() -> torch.Tensor:
    return NET(DATA).square().mean().detach()


def whole_grads() -> dict[str, torch.Tensor]:
    return dict(zip(PARAMS, torch.autograd.grad(NET(DATA).square().mean(), [*NET.parameters()]), strict=True))


def trained() -> dict[str, torch.Tensor]:
    """Return the parameters after a step of SGD on all rows."""
    grads = whole_grads()
    return {name: leaf - 0.1 * grads[name] for name, leaf in values().items()}
