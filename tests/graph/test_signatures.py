"""A step is recorded again for arguments of another form alone, and the log names the difference."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import funcshard as fs
from tests.graph.linear import BATCH, made, squares


@contextmanager
def messages() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("funcshard.graph")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def in_autocast(take: Any, state: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        take(state, BATCH)


AGAIN: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "another shape": (lambda t, s: t(s, BATCH[:1]), "leaf `batch`: recorded float32[2, 3], found float32[1, 3]"),
    "another tree": (lambda t, s: t.graph_for(s, {"x": BATCH}), "the new leaf `batch['x']`"),
    "autocast": (in_autocast, "autocast on the CPU: recorded off with bfloat16, found on with bfloat16"),
    "a number": (lambda t, s: [t.graph_for(s, (BATCH, n)) for n in (3, 4)], "leaf `batch[1]`: recorded int 3, found int 4"),
    "a buffer": (lambda t, s: t.graph_for(s._replace(buffers={"a": BATCH}), BATCH), "the new leaf `state.buffers['a']`"),
}


def tolerant(f: Any, batch: Any) -> torch.Tensor:
    """Return the loss of a batch in one of several forms."""
    x, scale = batch if isinstance(batch, tuple) else (batch["x"] if isinstance(batch, dict) else batch, 1)
    return scale * squares(f, x)


@pytest.mark.parametrize("case", AGAIN)
def test_a_new_recording_says_what_differs_from_the_nearest_one(case: str) -> None:
    call, words = AGAIN[case]
    step, state = made(fs.Mesh(), tolerant)
    traced = fs.trace(step, state, BATCH)
    with messages() as found:
        call(traced, state)
    assert [text for text in found if re.search(f"trace records a step again: .*{re.escape(words)}", text)], found


@pytest.mark.slow
def test_fifteen_steps_with_a_schedule_make_two_recordings_and_steps_without_state_one() -> None:
    for momentum, count in ((0.9, 2), (0.0, 1)):
        step, state = made(fs.Mesh(), lr=lambda step: 0.1 / (1 + step), momentum=momentum)
        with messages() as found:
            traced = fs.trace(step, state, BATCH)
            for number in range(15):
                state, metrics = traced(state, BATCH)
                assert metrics["lr"] == 0.1 / (1 + number)
        assert len(found) == count, found
    assert "records a step; it has 1 recordings" in found[0]
