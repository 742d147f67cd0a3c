"""The use of each storage of a tape, which follows from later events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from funcshard.estimate.trace.tape import LOSS, Alloc, At, Free, Grad

ACTIVATION, TEMPORARY, LOSS_TENSOR, GRADIENT = range(4)


def categories_of(events: Sequence[Any]) -> dict[int, int]:
    """Return the category of each storage, by the position of the event that makes it."""
    made_by: dict[int, int] = {}
    category_numbers: dict[int, int] = {}
    backward: set[int] = set()
    path, phase = "", "forward"
    for position, event in enumerate(events):
        if isinstance(event, At):
            path, phase = event
        elif isinstance(event, Alloc):
            made_by[event.storage] = position
            category_numbers[position] = LOSS_TENSOR if path == LOSS else TEMPORARY
            if phase != "forward":
                backward.add(position)
        elif isinstance(event, Free):
            begin = made_by.get(event.storage)
            if (
                begin is not None
                and category_numbers[begin] == TEMPORARY
                and phase != "forward"
                and begin not in backward
            ):
                category_numbers[begin] = ACTIVATION
        elif isinstance(event, Grad):
            begin = made_by.get(event.storage)
            if begin is not None:
                category_numbers[begin] = GRADIENT
    return category_numbers
