"""The event log: which collectives ran, in order."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["Event", "emit", "record_events"]

_recorders: contextvars.ContextVar[tuple[list[Event], ...]] = contextvars.ContextVar("funcshard_recorders", default=())


@dataclass(frozen=True, slots=True)
class Event:
    """One collective that this rank took part in.

    Attributes:
        kind: ``"all_gather"``, ``"reduce_scatter"``, ``"all_reduce"`` or ``"all_to_all"``.
        unit: name of the unit; ``"blocks.0 + blocks.1"`` where several share the collective; ``None`` for a collective of no
            unit (``psum``, ``muon``).
        buffer: key of the unit's flat buffer, ``""`` for a collective of no unit.
        dtype: name of the dtype that travelled.
        bytes: size of the whole buffer: what an all-gather puts together, what a reduction takes in. An all-to-all has no
            such buffer: the most that one rank sends to others, or receives.
        axis: the mesh axis it ran over, ``"shard"`` or ``"replicate"``.
        ranks: number of ranks on that axis.

    Example:
        >>> import funcshard as fs
        >>> fs.Event("all_gather", "blocks.0", "float32", "float32", bytes=64, axis="shard", ranks=4).traffic
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
        """Bytes that each rank (in an all-to-all the busiest one) has to send at the least: the bound of the collective."""
        if self.kind == "all_to_all":
            return self.bytes
        share = self.bytes * (self.ranks - 1) // self.ranks
        return 2 * share if self.kind == "all_reduce" else share


@contextlib.contextmanager
def record_events() -> Iterator[list[Event]]:
    """Record the collectives that the ``with`` block issues on this rank, in order.

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
    events: list[Event] = []
    token = _recorders.set((*_recorders.get(), events))
    try:
        yield events
    finally:
        _recorders.reset(token)


def emit(event: Event) -> None:
    """Append ``event`` to the lists of every ``record_events`` block that is open here."""
    for events in _recorders.get():
        events.append(event)


def recording() -> bool:
    """Whether anybody listens, so that the hot path need not build events for nobody."""
    return bool(_recorders.get())
