"""``attempt``: a step that may fail on some ranks, and then leaves all of them as they were."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from funcshard._utils import tree
from funcshard._utils.process_state import RandomState
from funcshard.comm import AGREEMENT, UNDO, AttemptLog, Mesh, all_gather_texts
from funcshard.core import raise_on_every_rank
from funcshard.train.optimizer_step import is_donated

_log = logging.getLogger("funcshard.train")

Result = TypeVar("Result")


def attempt(
    step: Callable[..., Result], *args: Any, mesh: Mesh
) -> tuple[Result | None, dict[int, str]]:
    """Return ``step(*args)``, or what went wrong if it raised on any rank; no rank is left waiting.

    If the step raises on one rank, that rank issues the rest of the step's collectives with zeros.
    The others compute on with wrong numbers, and no rank returns their result. Then you can call
    the step again: with the same state, another batch, or in smaller micro-batches.

    A step of ``make_train_step`` or ``trace`` doesn't donate its state here, also inside a function
    of yours. That costs it a copy of the trainable shards and of the optimizer's state. Other
    functions must not change their arguments.

    Arguments:
        step: any function, such as that of ``make_train_step``. Every rank calls the same one.
        args: its arguments, such as state and batch.
        mesh: all ranks that the step communicates with. Every rank has to call this.

    Returns:
        The result and ``{}``, or ``None`` and the errors as text by number of the rank, the
        earliest first: the others may be consequences. All ranks get the same ones. After a failure
        torch's random number generators are as before.

    Raises:
        RuntimeError: the step donated its arguments; it failed inside a collective; or
            communication itself failed, such as by a rank that was killed. Every rank raises, and
            you have to start the job again.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     def step(state, batch):
        ...         if batch.isnan().any():
        ...             raise ValueError("NaN in the batch")
        ...         return state + fs.pmean(batch, mesh)
        ...     batch = torch.ones(1) * (float("nan") if mesh.rank == 1 else 1)
        ...     return fs.attempt(step, torch.zeros(1), batch, mesh=mesh)
        >>> fs.simulate(main, world_size=2)[0]
        (None, {1: 'ValueError: NaN in the batch'})
    """
    if not callable(step):
        raise TypeError(
            f"attempt takes a step, and then its arguments; found {type(step).__name__}: call "
            "attempt(step, state, batch, mesh=mesh)"
        )
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a Mesh, as from init_mesh(); found {type(mesh).__name__}"
        )
    if UNDO.get() is not None:
        raise RuntimeError(
            "attempt was called inside the step of another attempt: call it once, around both"
        )
    random_before = RandomState.take()
    undo: list[Callable[[], Any]] = []
    undo_token = UNDO.set(undo)
    try:
        if mesh.world_size == 1:
            result, fault = _run(step, args, None)
            failures = {} if fault is None else {0: fault}
        else:
            result, failures = _run_together(step, args, mesh)
    finally:
        UNDO.reset(undo_token)
    if not failures:
        return result, {}
    # Why: a rank that has failed drew fewer numbers than the others.
    random_before.put()
    for undo_change in reversed(undo):
        undo_change()
    donation_fault = None
    if any(is_donated(leaf) for leaf in tree.leaves(args)):
        donation_fault = RuntimeError(
            "a step that failed has donated its arguments, so it cannot be called again with them; "
            f"the failures were {failures}: pass fs.copy of them to the optimizer's step"
        )
    raise_on_every_rank(mesh, donation_fault)
    return None, failures


def _run_together(
    step: Callable[..., Result], args: tuple[Any, ...], mesh: Mesh
) -> tuple[Result | None, dict[int, str]]:
    group: Any = mesh.axes[0][1].plain
    log = group.open_attempt(_global_ranks(mesh))
    try:
        result, fault = _run(step, args, log)
        # Why here: the error is gone, and with it all memory that its frames held.
        own_row = None
        if fault is not None:
            own_row = log.position, mesh.rank, fault
            log.join_rest()
        rank_rows = map(json.loads, all_gather_texts(mesh, json.dumps(own_row), AGREEMENT))
    finally:
        log.close()
    # Why the earliest first: the others may be consequences of its zeros.
    failures = {rank: text for _, rank, text in sorted(filter(None, rank_rows))}
    if failures:
        log.forget()
    return result, failures


def _run(
    step: Callable[..., Result], args: tuple[Any, ...], log: AttemptLog | None
) -> tuple[Result | None, str | None]:
    """Return the result of a step, or its error as text."""
    try:
        return step(*args), None
    except Exception as error:
        if log is not None:
            log.check_usable(error)
        _log.info("a step has failed in an attempt", exc_info=error)
        return None, f"{type(error).__name__}: {error}"


def _global_ranks(mesh: Mesh) -> tuple[int, ...]:
    """Return the global numbers of the ranks of a mesh, in their order."""
    key = "ranks", *(axis for axis, _ in mesh.axes)
    if key not in mesh.memo:
        own_number = str(mesh.axes[0][1].global_rank)
        rank_numbers = all_gather_texts(mesh, own_number, "the ranks of an attempt")
        mesh.memo[key] = tuple(map(int, rank_numbers))
    numbers: tuple[int, ...] = mesh.memo[key]
    return numbers
