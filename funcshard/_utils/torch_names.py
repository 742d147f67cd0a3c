"""Look up private names of torch: a release that lacks one costs a feature, not the library.

``private`` looks a name up, or returns a substitute: a function that does the same by public names,
or a class that raises when it's used.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

NAMES: dict[str, str] = {}
"""The feature that needs each private name that was looked up."""

_RAISE: Any = object()


def private(name: str, feature: str, otherwise: Any = _RAISE) -> Any:
    """Return what torch has under a private name.

    Arguments:
        name: the dotted name, such as ``"torch._C._is_alias_of"``.
        otherwise: what to return if torch has no such name; by default a class that raises the
            error.
    """
    NAMES[name] = feature
    try:
        return look_up(name)
    except (AttributeError, ImportError):
        if otherwise is _RAISE:
            return _missing(name, feature)
        return otherwise


def look_up(name: str) -> Any:
    name_parts = name.split(".")
    private_value: Any = torch
    for part_count, part in enumerate(name_parts[1:], 2):
        try:
            private_value = getattr(private_value, part)
        except AttributeError:
            # A module that torch has not imported is no attribute yet.
            private_value = importlib.import_module(".".join(name_parts[:part_count]))
    return private_value


def lacks(name: str, feature: str) -> RuntimeError:
    """Return the error about a private name that torch lacks."""
    return RuntimeError(
        f"{feature} needs {name}, which torch {torch.__version__} lacks: install a torch that "
        "funcshard was tested with, such as 2.13, or do without"
    )


@contextlib.contextmanager
def needed_for(feature: str) -> Iterator[None]:
    """Let private names that the ``with`` block misses raise an error with the feature."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise lacks(str(error), feature) from error


def _missing(name: str, feature: str) -> type:
    class MissingName:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise lacks(name, feature)

    return MissingName
