"""What every ``torch.autograd.Function`` here needs besides its mathematics."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

__all__ = ["signed"]


def signed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Store a function's signature on it.

    ``Function.apply`` asks for the signature of ``forward`` at every call, and working it out takes longer than all the
    rest of a small unit; a stored one (PEP 362) is found at once.
    """
    forward.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    return forward
