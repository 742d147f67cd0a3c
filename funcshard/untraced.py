"""Under ``torch.compile`` what communicates runs as it is, between what is compiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch  # noqa: F401  (the next line needs it)
from torch._compile import _disable_dynamo

__all__ = ["untraced"]

P = ParamSpec("P")
T = TypeVar("T")


def untraced(f: Callable[P, T]) -> Callable[P, T]:
    """Keep Dynamo out of ``f`` and of what it calls, except for what is compiled by itself there.

    A graph of it would hold memory that a collective writes into, and not the collective. ``torch.compiler.disable`` imports
    Dynamo, which takes longer than all of this library: here that is left to whoever compiles something.
    """
    disabled = _disable_dynamo(f)

    @functools.wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return (disabled if "torch._dynamo" in sys.modules else f)(*args, **kwargs)

    return run
