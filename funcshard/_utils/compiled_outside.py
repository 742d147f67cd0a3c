"""Warn once that ``torch.compile`` around an object of this library compiles nothing of it."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from funcshard._utils.torch_private import callers_level, hidden_from_dynamo

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Warned:
    """Whether an object has given its warning."""

    already: bool = False


def untraced_with_warning(text: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator of methods that Dynamo doesn't trace; see ``untraced``.

    An object, which has an attribute ``warned``, warns once if ``torch.compile`` was given it, or a
    function that calls it. With ``fullgraph``, the text is in torch's error.
    """

    def decorate(method: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(method)
        def warn(*args: P.args, **kwargs: P.kwargs) -> T:
            # The object whose method this is.
            owner: Any = args[0]
            if not owner.warned.already:
                owner.warned.already = True
                warnings.warn(
                    f"{text}; this warning comes once for each object", stacklevel=callers_level()
                )
            return method(*args, **kwargs)

        hidden_method = hidden_from_dynamo(method, text)
        hidden_warn = hidden_from_dynamo(warn, text)

        @functools.wraps(method)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            if "torch._dynamo" not in sys.modules:
                return method(*args, **kwargs)
            # Dynamo takes the condition for true, and Python for false.
            if torch.compiler.is_dynamo_compiling():
                return hidden_warn(*args, **kwargs)
            return hidden_method(*args, **kwargs)

        return run

    return decorate
