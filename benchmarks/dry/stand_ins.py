"""``stand_ins`` replaces functions of ``torch.cuda`` in a dry run, in which there is no device.

The random number generator of the device is a counter. Each operation that draws numbers moves it by
one. So a dry run shows whether dropout that is computed again draws the numbers that it drew before.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import funcshard
from benchmarks.dry.stream_order import StreamOrder

__all__ = ["Generator", "stand_ins"]


_LIBRARY = str(Path(funcshard.__file__).parent) + "/"


class Generator:
    """The random number generator of the device.

    Attributes:
        position: number of operations that have drawn numbers since the start, or since the state
            was set back.
        draws: the position before each draw, in the order of the draws.
    """

    def __init__(self) -> None:
        self.position = 0
        self.draws: list[int] = []

    def draw(self) -> None:
        """Note that an operation draws numbers."""
        self.draws.append(self.position)
        self.position += 1

    def get_state(self, *_: Any) -> torch.Tensor:
        """Return the state as ``torch.cuda.get_rng_state`` does; it remembers the position."""
        state = torch.zeros(16, dtype=torch.uint8)
        state.position = self.position  # type: ignore[attr-defined]
        return state

    def set_state(self, state: torch.Tensor, *_: Any) -> None:
        """Set the state as ``torch.cuda.set_rng_state`` does."""
        self.position = state.position  # type: ignore[attr-defined]


def _order() -> StreamOrder | None:
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, StreamOrder)), None)


@dataclass(frozen=True, slots=True)
class Event:
    """An event of a ``Stream``.

    Attributes:
        clock: what the stream had been given; ``None`` where no order is recorded.
        note_wait: see ``stand_ins``.
    """

    clock: dict[str, int] | None
    note_wait: Callable[[], None]

    def synchronize(self) -> None:
        """Make the host wait."""
        self.note_wait()
        if (order := _order()) and self.clock is not None:
            order.synchronize(self.clock)


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream, by its name in ``StreamOrder``.

    Attributes:
        name: its name.
        note_wait: see ``stand_ins``.
    """

    name: str
    note_wait: Callable[[], None]

    def record_event(self) -> Event:
        """Return an event after all that the stream has been given."""
        return Event(order.event(self.name) if (order := _order()) else None, self.note_wait)

    def wait_stream(self, other: Stream) -> None:
        """Make this stream wait for another one."""
        if order := _order():
            order.wait(self.name, other.name)

    def synchronize(self) -> None:
        """Make the host wait."""
        self.note_wait()
        if order := _order():
            order.synchronize(order.event(self.name))


@contextlib.contextmanager
def stand_ins(generator: Generator, note_wait: Callable[[], None]) -> Iterator[None]:
    """Let functions of ``torch.cuda`` answer for one device, of compute capability 9.0.

    Arguments:
        generator: the random number generator of the device.
        note_wait: is called when the host waits for a stream or an event.
    """
    streams = itertools.count(1)
    functions: dict[str, Any] = {
        # Why for the library alone: torch's fake tensors then ask for a device.
        "is_available": lambda: sys._getframe(1).f_code.co_filename.startswith(_LIBRARY),
        "is_initialized": lambda: True,
        "_initialized": True,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "current_stream": lambda *_: Stream(order.current if (order := _order()) else "", note_wait),
        "Stream": lambda *_: Stream(f"stream {next(streams)}", note_wait),
        "stream": lambda stream: order.stream(stream.name) if (order := _order()) else contextlib.nullcontext(),
        "is_bf16_supported": lambda *_: True,
        "get_rng_state": generator.get_state,
        "set_rng_state": generator.set_state,
    }
    autocast = unittest.mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False)
    with unittest.mock.patch.multiple("torch.cuda", **functions), autocast:
        yield
