"""A rank's shared memory: who needs which piece of it, and tensors in pieces that the others can read as they are."""

from __future__ import annotations

import torch

from funcshard.memory import Piece, Pool, shared

__all__ = ["LEAST", "Lender"]

# Bytes of a piece that tiny contributions share, and pieces that are lent at a time: each has an open file.
LEAST, _MOST = 1 << 16, 64

# Bytes up to which contributions lie side by side in a piece of LEAST, each from a multiple of _STEP on.
_TINY, _STEP = 1 << 12, 64


class Lender:
    """Pieces of shared memory, and how many need each.

    Attributes:
        pool: where they come from.
        lent: those that are tensors, and whether these are to be sent, by address.
        replaced: numbers of pieces that there are no more, until somebody takes note.
    """

    def __init__(self) -> None:
        self.pool = Pool(shared)
        self.lent: dict[int, tuple[Piece, bool]] = {}
        self.replaced: list[int] = []
        self._returned: list[Piece] = []  # lent ones whose tensors are gone; other threads may add to it
        self._begun: Piece | None = None  # what holds tiny contributions, and up to where it does
        self._end = 0

    def take(self, size: int) -> Piece:
        """Take a piece of so many bytes, which one needs; ``release`` is the inverse."""
        piece, replaced = self.pool.take(size)
        self.replaced += [replaced] * (replaced > 0)
        piece.users = 1
        return piece

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

    def lend(self, numel: int, dtype: torch.dtype, *, sent: bool) -> torch.Tensor | None:
        """Return a new tensor in a piece, ``None`` where too many are lent; ``take_back`` is the inverse."""
        if len(self.lent) >= _MOST:
            return None
        piece = self.take(numel * dtype.itemsize)
        tensor = piece.tensor(numel, dtype, self._returned.append)
        self.lent[tensor.data_ptr()] = (piece, sent)
        return tensor

    def to_send(self, tensor: torch.Tensor) -> Piece | None:
        """The piece that ``tensor`` was lent in, if it is to be sent as it is."""
        piece, sent = self.lent.get(tensor.data_ptr(), (None, False))
        return piece if sent and tensor.is_contiguous() else None

    def take_back(self) -> None:
        """Take back the pieces of tensors that are gone."""
        while self._returned:
            piece = self._returned.pop()
            self.lent = {address: lent for address, lent in self.lent.items() if lent[0] is not piece}
            self.release(piece)
