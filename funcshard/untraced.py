"""Under ``torch.compile`` what communicates runs as it is; and whom a warning is about, behind the wrappers for that."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

__all__ = ["callers_level", "untraced"]

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
    inside = tuple(os.path.dirname(file) + os.sep for file in (__file__, torch.__file__))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        level, frame = level + 1, frame.f_back
    return level
