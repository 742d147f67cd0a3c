"""Say once that ``torch.compile`` around an object of this library compiles nothing of it."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from funcshard._utils.torch_private import callers_level, hidden_from_dynamo

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Warned:
    """Whether an object has given its warning; each object has one of these.

    Attributes:
        already: whether there is nothing to say any more.
    """

    already: bool = False


class _Warning(Protocol):
    @property
    def warned(self) -> Warned: ...


S = TypeVar("S", bound=_Warning)
Method = Callable[Concatenate[S, P], T]


def untraced_with_warning(text: str) -> Callable[[Method[S, P, T]], Method[S, P, T]]:
    """Return a decorator of methods that Dynamo does not trace; see ``untraced``.

    The method warns when ``torch.compile`` was given its object, or a function that calls it. An
    object warns once. Where the whole program has to be one graph, the text is in torch's error.

    Arguments:
        text: why the object is not compiled, and what to do.
    """

    def decorate(method: Method[S, P, T]) -> Method[S, P, T]:
        @functools.wraps(method)
        def warn(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
            if not self.warned.already:
                self.warned.already = True
                warnings.warn(
                    f"{text}; this warning comes once for each object", stacklevel=callers_level()
                )
            return method(self, *args, **kwargs)

        hidden, warns = hidden_from_dynamo(method, text), hidden_from_dynamo(warn, text)

        @functools.wraps(method)
        def run(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
            if "torch._dynamo" not in sys.modules:
                return method(self, *args, **kwargs)
            # Dynamo takes the condition for true, and Python for false.
            return (warns if torch.compiler.is_dynamo_compiling() else hidden)(
                self, *args, **kwargs
            )

        return run

    return decorate
