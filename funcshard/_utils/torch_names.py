"""Look up private names of torch: a release that lacks one costs a feature, not the library.

torch has no public name for many facts that this library needs. A name that starts with an
underscore may go in any release. So none is imported at the top of a file: ``private`` looks it up,
and returns a stand-in if torch has none. A stand-in is a function that does the same by public
names, or a class whose use raises an error with the feature and the version of torch.
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
        feature: what needs the name, for the error.
        otherwise: what to return if torch has no such name; by default a class, which raises
            the error when it is called, as does a class with this base.
    """
    NAMES[name] = feature
    try:
        return look_up(name)
    except (AttributeError, ImportError):
        if otherwise is _RAISE:
            return _missing(name, feature)
        return otherwise


def look_up(name: str) -> Any:
    """Return the module or the attribute of that name."""
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
    """Return the error about a private name that torch does not have."""
    return RuntimeError(
        f"{feature} needs {name}, which torch {torch.__version__} lacks: install a torch that "
        "funcshard was tested with, such as 2.13, or do without"
    )


@contextlib.contextmanager
def needed_for(feature: str) -> Iterator[None]:
    """Let private names that the ``with`` block does not find raise an error with the feature."""
    try:
        yield
    except (AttributeError, ImportError) as error:
        raise lacks(str(error), feature) from error


def _missing(name: str, feature: str) -> type:
    """Return what takes the place of a function or a class that torch does not have."""

    class MissingName:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise lacks(name, feature)

    return MissingName
