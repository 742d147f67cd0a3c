"""Which modules of a model are of one kind, so that a trace of one stands for all of them.

Two modules are of one kind if they agree in everything that can change the shapes or the
operations of a forward: class, settings, parameters, buffers and children. Numbers that only say
which layer a module is, such as ``layer_idx``, and the values of floating-point settings do not
count.
"""

from __future__ import annotations

import enum
import functools
import re
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import torch

from funcshard._utils import tree

__all__ = ["kinds_of"]

# Settings that number a layer among others.
_INDEX = re.compile(r"(^|_)(idx|index|id|layer|layer_number|number|depth|position)$")

_PLAIN = frozenset({bool, str, type(None)})
_TABLES = frozenset({dict, OrderedDict})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def kinds_of(skeleton: Any, form: Callable[[str], Hashable], marked: Collection[int] = ()) -> dict[int, int]:
    """Return a number for the kind of each module that may be folded, by its index.

    A module may be folded if it has children, if there is another one of its kind, and if no
    parameter inside it is tied to one outside.

    Arguments:
        skeleton: the module tree.
        form: the shape, the dtype and the like of a parameter or buffer, by its name.
        marked: indices of modules that run otherwise than unmarked ones.
    """
    numbers: dict[Hashable, int] = {}
    kinds: dict[int, int] = {}
    for index in reversed(range(len(skeleton.specs))):  # children come after their parents
        spec = skeleton.specs[index]
        children = tuple((key, None if child is None else kinds[child]) for key, child in spec.children.items())
        tensors = tuple(
            (key, None if name is None else form(name))
            for table in (spec.parameters, spec.buffers)
            for key, name in table.items()
        )
        settings = tuple(
            (key, value if type(value) in _PLAIN else _setting(key, value))
            for key, value in spec.attributes.items()
            if value or type(value) not in _TABLES  # empty tables of hooks take most of the time
        )
        own = any(spec.attributes.get(hooks) for hooks in _HOOKS) or "forward" in spec.attributes
        kind = (spec.cls, children, tensors, settings, index if own else None, index in marked)
        kinds[index] = numbers.setdefault(kind, len(numbers))
    paths = skeleton.paths()
    counts = Counter(kinds[index] for index in paths.values())
    tied = [names for names in skeleton.parameters.values() if len(names) > 1]
    found = {}
    for path, index in paths.items():
        if path and counts[kinds[index]] > 1 and skeleton.specs[index].children:
            split = any(len({tree.is_under(name, path) for name in names}) > 1 for names in tied)
            if not split:
                found[index] = kinds[index]
    return found


@functools.lru_cache(maxsize=4096)
def _is_index(key: str) -> bool:
    return _INDEX.search(key) is not None


def _setting(key: str, value: Any) -> Hashable:
    if isinstance(value, (bool, str, type(None), torch.dtype, torch.device, enum.Enum)):
        return value
    if isinstance(value, int):
        return None if _is_index(key) else value
    if isinstance(value, float):
        return value == 0  # dropout with p = 0 is no operation
    if isinstance(value, (list, tuple)):
        return tuple(_setting(key, each) for each in value)
    if isinstance(value, Mapping):
        return tuple((str(name), _setting(str(name), each)) for name, each in value.items())
    return getattr(value, "__qualname__", type(value).__qualname__)
