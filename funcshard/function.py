"""What every ``torch.autograd.Function`` here needs besides its mathematics."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["signed"]


def signed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Store a function's signature on it: arguments by position only, none of them with a default.

    ``Function.apply`` asks for the signature of ``forward`` at every call and binds the arguments to it, to fill in
    defaults, which takes longer than all the rest of a small unit. A stored signature (PEP 362) is found at once, and where
    there are no defaults binding has nothing to do.
    """
    assert all(p.default is inspect.Parameter.empty for p in inspect.signature(forward).parameters.values())
    forward.__signature__ = _Positional.from_callable(forward)  # type: ignore[attr-defined]
    return forward


class _Positional(inspect.Signature):
    """A signature whose ``bind`` gives back the arguments; calling the function finds what does not fit."""

    def bind(self, *args: Any, **kwargs: Any) -> _Bound:  # type: ignore[override]
        return _Bound(args, kwargs)


class _Bound:
    __slots__ = ("args", "kwargs")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs

    def apply_defaults(self) -> None:
        """There are none."""
