"""``Ledger``: the memory of a rank by category, now and at every moment before."""

from __future__ import annotations

from funcshard.estimate.trace import Memory
from funcshard.estimate.walk.step import CATEGORIES, Moment

__all__ = ["Ledger"]

_INDEX = {category: position for position, category in enumerate(CATEGORIES)}
_OF_TAPE = tuple(_INDEX[name] for name in ("activations", "temporaries", "loss", "gradients"))
assert (*range(_OF_TAPE[0], _OF_TAPE[-1] + 1),) == _OF_TAPE, "the categories of a tape lie side by side"
_TAPE = slice(_OF_TAPE[0], _OF_TAPE[-1] + 1)


class Ledger:
    """Add up the memory of one rank by category, and keep its moments.

    Attributes:
        moments: the moments so far: seconds, what, unit, and bytes by position in ``CATEGORIES``.
        host: bytes on the host now, and the most so far.
        total: bytes of all categories now, the host's left out.
    """

    def __init__(self) -> None:
        self.moments: list[tuple[float, str, str, tuple[int, ...]]] = []
        self.host = [0, 0]
        self._now = [0] * len(CATEGORIES)
        self._tape = 0  # bytes of the categories that the tape knows
        self.total = 0

    def add(self, category: str, size: int, *, host: bool = False) -> None:
        """Add bytes to a category; ``free`` is the inverse."""
        if host:
            self.host[0] += size
            self.host[1] = max(self.host)
        else:
            self._now[_INDEX[category]] += size
            self.total += size

    def free(self, category: str, size: int, *, host: bool = False) -> None:
        """Take bytes off a category; the inverse of ``add``."""
        self.add(category, -size, host=host)

    def set_tape(self, memory: Memory) -> None:
        """Set the bytes of the categories that the tape knows."""
        self._now[_TAPE] = memory
        before, self._tape = self._tape, sum(memory)
        self.total += self._tape - before

    def note(self, seconds: float, what: str, unit: str) -> int:
        """Keep the memory as it is now as a moment; return its bytes."""
        self.moments.append((seconds, what, unit, tuple(self._now)))
        return self.total

    def pools(self, *, streams: bool) -> int:
        """Return the bytes that an allocator needs that keeps no memory in reserve.

        Arguments:
            streams: whether gathered units and reduced gradients have pools of their own. Then each
                pool is as large as its own peak, whenever that is.
        """
        own = [_INDEX["gathered"], _INDEX["gradient shards"]] if streams else []
        found = [max(sizes[position] for *_, sizes in self.moments) for position in own]
        rest = max(sum(sizes) - sum(sizes[position] for position in own) for *_, sizes in self.moments)
        return rest + sum(found)

    def timeline(self) -> tuple[Moment, ...]:
        """Return the moments as data."""
        return tuple(
            Moment(seconds, what, unit, {name: size for name, size in zip(CATEGORIES, sizes, strict=True) if size})
            for seconds, what, unit, sizes in self.moments
        )
