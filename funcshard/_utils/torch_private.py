"""Under ``torch.compile`` what communicates runs as it is; and whom a warning is about, behind the wrappers for that.

What every ``torch.autograd.Function`` here needs besides its mathematics.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

__all__ = ["callers_level", "signed", "untraced"]

P = ParamSpec("P")


T = TypeVar("T")


def untraced(f: Callable[P, T]) -> Callable[P, T]:
    """Keep Dynamo out of ``f`` and of what it calls, except for what is compiled by itself there.

    A graph of it would hold memory that a collective writes into, and not the collective. ``torch.compiler.disable`` imports
    Dynamo, which takes longer than all of this library: here that is left to others, such as whoever compiles something.
    """
    disabled = _disable_dynamo(f)

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return (disabled if "torch._dynamo" in sys.modules else f)(*args, **kwargs)

    return run


def callers_level() -> int:
    """The ``stacklevel`` of a warning about who called this library, however many wrappers there are in between."""
    package = sys.modules[__name__.partition(".")[0]]
    inside = tuple(os.path.dirname(str(module.__file__)) + os.sep for module in (package, torch))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level


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
