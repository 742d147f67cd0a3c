"""The collectives that a rank issues: recorded as events, and logged as ``funcshard.comm``."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_log = logging.getLogger("funcshard.comm")

_recorders: contextvars.ContextVar[tuple[list[Event], ...]] = contextvars.ContextVar(
    "funcshard_recorders", default=()
)


@dataclass(frozen=True, slots=True)
class Event:
    """One collective that this rank issued.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"``, ``"all_to_all"`` or
            ``"ppermute"``.
        unit: name of the unit; ``None`` for collectives of no unit (``psum``, ``muon``).
        buffer: key of the unit's flat buffer; ``""`` for collectives of no unit.
        dtype: name of the dtype of the data sent.
        bytes: size of the whole buffer: the output of an all-gather, the input of a reduction. For
            an all-to-all or a ``ppermute``: the most that one rank sends or receives.
        axis: the mesh axis of the collective, such as ``"shard"``.
        ranks: number of ranks on that axis.

    Example:
        >>> import funcshard as fs
        >>> event = fs.Event(
        ...     "all_gather", "blocks.0", "float32", "float32", bytes=64, axis="shard", ranks=4
        ... )
        >>> event.traffic
        48
    """

    kind: str
    unit: str | None
    buffer: str
    dtype: str
    bytes: int
    axis: str
    ranks: int

    @property
    def traffic(self) -> int:
        """Least number of bytes that a rank, or the busiest rank of an exchange, must send."""
        # An exchange counts what the busiest rank sends, which is its bytes already.
        if self.kind in ("all_to_all", "ppermute"):
            return self.bytes
        share = self.bytes * (self.ranks - 1) // self.ranks
        return 2 * share if self.kind == "all_reduce" else share


@contextlib.contextmanager
def record_events() -> Iterator[list[Event]]:
    """Record the collectives that the ``with`` block issues on this rank, in order.

    A backward that you run in the block stays in your thread, on CUDA too.

    Yields:
        A list of ``Event`` that grows while the block runs.

    Example:
        >>> import torch, funcshard as fs
        >>> def step(mesh):
        ...     with fs.record_events() as events:
        ...         fs.psum(torch.ones(2), mesh)
        ...     return [(event.kind, event.bytes) for event in events]
        >>> fs.simulate(step, world_size=2)
        [[('all_reduce', 8)], [('all_reduce', 8)]]
    """
    with _recorded_by(_recorders.get()) as recorded_events:
        yield recorded_events


@contextlib.contextmanager
def record_events_apart() -> Iterator[list[Event]]:
    """Record collectives as ``record_events`` does, hidden from blocks around it."""
    with _recorded_by(()) as recorded_events:
        yield recorded_events


@contextlib.contextmanager
def _recorded_by(outer: tuple[list[Event], ...]) -> Iterator[list[Event]]:
    recorded_events: list[Event] = []
    token = _recorders.set((*outer, recorded_events))
    try:
        # Why single-threaded: on CUDA autograd would run backward in a thread of its own, which
        # sees no context variable, and so no recorder.
        with torch.autograd.set_multithreading_enabled(False):
            yield recorded_events
    finally:
        _recorders.reset(token)


def emit(event: Event) -> None:
    """Append ``event`` to the list of every open ``record_events`` block, and log it."""
    # Blocks may be nested, and each sees all of its events.
    for recorded_events in _recorders.get():
        recorded_events.append(event)
    if _log.isEnabledFor(logging.DEBUG):
        owner_text = ""
        if event.unit is not None:
            owner_text = f" of buffer {event.buffer!r} of unit {event.unit or '(root)'!r}"
        axis_text = f"along {event.axis!r}, {event.ranks} ranks"
        _log.debug(
            "%s%s begins: %d bytes of %s %s",
            event.kind,
            owner_text,
            event.bytes,
            event.dtype,
            axis_text,
        )


def recording() -> bool:
    """Return whether events are recorded or logged."""
    return bool(_recorders.get()) or _log.isEnabledFor(logging.DEBUG)
