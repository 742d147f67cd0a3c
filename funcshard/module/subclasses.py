"""Subclasses of a module's class that differ from it in single methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["with_method", "with_methods"]


def with_method(cls: type[nn.Module], name: str, method: Any) -> type[nn.Module]:
    """Return a subclass of ``cls``, under the same name, with ``method`` as its method ``name``."""
    return with_methods(cls, {name: method})


def with_methods(cls: type[nn.Module], methods: Mapping[str, Any]) -> type[nn.Module]:
    """Return a subclass of ``cls``, under the same name, with ``methods``.

    The ``__init_subclass__`` of ``cls`` runs, because layers of Hugging Face put their checkpoints
    around the new forward there. It is left out if it needs arguments.
    """
    names = {**methods, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    try:
        return type(cls.__name__, (cls,), names)
    except TypeError:
        subclass = type(cls.__name__, (_Unannounced, cls), names)
        subclass.__bases__ = (cls,)
        return subclass


class _Unannounced:
    """A first base that keeps ``__init_subclass__`` of the others from running."""

    def __init_subclass__(cls) -> None:
        pass
