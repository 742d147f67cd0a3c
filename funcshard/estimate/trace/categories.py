"""The use of each storage of a tape, which follows from later events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcshard.estimate.trace.tape import LOSS, Alloc, At, Free, Grad

ACTIVATION, TEMPORARY, LOSS_TENSOR, GRADIENT = range(4)


def categories_of(events: Sequence[Any]) -> dict[int, int]:
    """Return the category of each storage, by the position of the event that makes it."""
    made: dict[int, int] = {}
    found: dict[int, int] = {}
    backward: set[int] = set()
    path, phase = "", "forward"
    for position, event in enumerate(events):
        if isinstance(event, At):
            path, phase = event
        elif isinstance(event, Alloc):
            made[event.storage] = position
            found[position] = LOSS_TENSOR if path == LOSS else TEMPORARY
            if phase != "forward":
                backward.add(position)
        elif isinstance(event, Free):
            begin = made.get(event.storage)
            if (
                begin is not None
                and found[begin] == TEMPORARY
                and phase != "forward"
                and begin not in backward
            ):
                found[begin] = ACTIVATION
        elif isinstance(event, Grad):
            begin = made.get(event.storage)
            if begin is not None:
                found[begin] = GRADIENT
    return found
