"""A rank's shared memory: who needs which piece of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from funcshard.memory import Piece, Pool, fits, shared

__all__ = ["LEAST", "Lender"]

# Bytes of a piece that tiny contributions share.
LEAST = 1 << 16

# Bytes up to which contributions lie side by side in a piece of LEAST, each from a multiple of _STEP on.
_TINY, _STEP = 1 << 12, 64

# Seconds a byte, and at most, that others are waited for before a piece is made, if they have one in use: who is so far
# ahead would wait for them soon, and what is made stays.
_WORTH, _MOST = 1e-8, 0.2


class Lender:
    """Pieces of shared memory, and how many need each.

    Attributes:
        pool: where they come from.
        replaced: numbers of pieces that there are no more, until somebody takes note.
    """

    def __init__(self) -> None:
        self.pool = Pool(shared)
        self.replaced: list[int] = []
        self._begun: Piece | None = None  # what holds tiny contributions, and up to where it does
        self._end = 0

    def take(self, size: int) -> Piece:
        """Take a piece of so many bytes, which one needs; ``release`` is the inverse."""
        piece, replaced = self.pool.take(size)
        self.replaced += [replaced] * (replaced > 0)
        piece.users = 1
        return piece

    def take_soon(self, size: int, busy: Callable[[], Iterable[Piece]], meanwhile: Callable[[float], object]) -> Piece:
        """``take``, which waits a while for one of the pieces that are ``busy``, where else one would have to be made.

        ``meanwhile(seconds)`` takes what comes in that time.
        """
        end = time.monotonic() + min(size * _WORTH, _MOST)
        while not self.pool.has(size) and any(fits(piece, size) for piece in busy()):
            left = end - time.monotonic()
            if left <= 0:
                break
            meanwhile(left)
        return self.take(size)

    def release(self, piece: Piece) -> None:
        """Take note that one less needs a piece."""
        piece.users -= 1
        if not piece.users:
            self.pool.give(piece)

    def room(self, size: int) -> tuple[Piece, int]:
        """A piece for so many bytes, which one more needs, and where in it: what is tiny shares one with other such."""
        if size > _TINY:
            return self.take(size), 0
        begun = self._begun
        if begun is None or self._end + size > LEAST:
            if begun is not None:
                self.release(begun)
            begun, self._end = self.take(LEAST), 0
            self._begun = begun
        at, self._end = self._end, self._end + -(-size // _STEP) * _STEP
        begun.users += 1
        return begun, at
