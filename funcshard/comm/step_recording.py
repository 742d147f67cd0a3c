"""Whether ``fs.trace`` records a step here, and the collectives of that step so far."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard.plan import Event, record_events_apart

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

    def number(self, function: Callable[[int], float], steps: int, *, tensor: bool = False) -> Any:
        """Return a number that a run of the graph computes in Python, before it runs.

        Arguments:
            function: a function from the number of steps to a float.
            steps: the number of steps.
            tensor: whether to return a tensor, for operators that take no numbers of a recording.
        """
        self.numbers.append(function)
        step_number = torch.ops.funcshard.number(len(self.numbers) - 1, steps)
        return step_number if tensor else step_number.item()


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


def current_recording() -> StepRecording | None:
    """Return the recording of the step that ``fs.trace`` records here, if any."""
    return _recording.get()
