"""``Later``: parameters that a trace makes only if a model reads them.

A fake tensor takes half a millisecond, and most experts of a model are never run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Later"]


class Later(dict[str, Any]):
    """The table of parameters of a module; they are made when one of them is read.

    Arguments:
        table: the names, with any values.
        make: makes the parameters.
    """

    def __init__(self, table: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> None:
        super().__init__(table)
        self._make: Callable[[], dict[str, Any]] | None = make

    def _made(self) -> Later:
        make, self._make = self._make, None
        if make is not None:
            self.update(make())
        return self

    def __getitem__(self, key: str) -> Any:
        return dict.__getitem__(self._made(), key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a parameter."""
        return dict.get(self._made(), key, default)

    def items(self) -> Any:
        """Return the names and parameters."""
        return dict.items(self._made())

    def values(self) -> Any:
        """Return the parameters."""
        return dict.values(self._made())
