"""The collectives that a rank issues: recorded as events, and logged as ``funcshard.comm``.

While ``fs.trace`` records a step, a ``StepRecording`` holds its events too.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

_log = logging.getLogger("funcshard.comm")

_recorders: contextvars.ContextVar[tuple[list[Event], ...]] = contextvars.ContextVar(
    "funcshard_recorders", default=()
)
current_recorders: Callable[[], tuple[list[Event], ...]] = _recorders.get
"""Return the lists of the open ``record_events`` blocks."""


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
    with _recorded_by(current_recorders()) as recorded_events:
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
    for recorded_events in current_recorders():
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


# --- a step that ``fs.trace`` records -------------------------------------------------------------


_recording: contextvars.ContextVar[StepRecording | None] = contextvars.ContextVar(
    "funcshard_recording", default=None
)


@dataclass(slots=True, eq=False)
class StepRecording:
    """The collectives of a step that is recorded.

    Attributes:
        events: the events of the step so far.
        started: the event of each collective that has started, or ``None``.
        numbers: the functions of the number of steps, such as schedules.
        updates: whether the step has its gradients, and updates the state.
        replayable: whether a run of the graph may replace the step, as the form of its results
            depends on no values.
    """

    events: list[Event]
    started: list[Event | None] = field(default_factory=list)
    numbers: list[Callable[[int], float]] = field(default_factory=list)
    updates: bool = False
    replayable: bool = True
    _claimed: int = 0

    def start(self) -> None:
        """Note that a collective starts, whose event was the last."""
        own_start = len(self.events) > self._claimed
        assert len(self.events) <= self._claimed + 1, (
            "a collective emits one event, before it starts"
        )
        self.started.append(self.events[-1] if own_start else None)
        self._claimed = len(self.events)

    def number(
        self, function: Callable[[int], float], steps: int, *, tensor: bool = False
    ) -> Any:
        """Return a number that a run of the graph computes in Python, before it runs.

        Arguments:
            function: a function from the number of steps to a float.
            steps: the number of steps.
            tensor: whether to return a tensor, for operators that take no numbers of a recording.
        """
        self.numbers.append(function)
        step_number = torch.ops.funcshard.number(len(self.numbers) - 1, steps)
        return step_number if tensor else step_number.item()


current_recording: Callable[[], StepRecording | None] = _recording.get
"""Return the recording of the step that ``fs.trace`` records here, if any."""


@contextlib.contextmanager
def record_step() -> Iterator[StepRecording]:
    """Let collectives of the ``with`` block become operations of the graph."""
    with record_events_apart() as events:
        recording = StepRecording(events)
        token = _recording.set(recording)
        try:
            yield recording
        finally:
            _recording.reset(token)
