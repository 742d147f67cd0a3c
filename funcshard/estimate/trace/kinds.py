"""Which modules of a model are of one kind, so that a trace of one may represent all of them.

Modules of one kind agree in class, parameters, buffers, children and hooks, and in the names of
their attributes. The values of attributes may differ, as a layer's number does: the tracer sees
which of them a module reads, and a module represents another one only if these are equal in both.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from funcshard._utils import tree
from funcshard.estimate.trace.values import is_plain, value_of

_TABLES = frozenset({dict, OrderedDict, set})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TORCH = frozenset(nn.Module().__dict__)


@dataclass(frozen=True, slots=True)
class Kinds:
    """The modules of a tree that may represent others.

    Attributes:
        of: index of each module that may be folded -> number of its kind.
        differing: index of a module -> its attributes that have other values in other modules of
            its kind, and the value of each, as from ``value_of``.
        below: index of each module -> the indices of it and of the modules below it, each once.
            Modules of one kind have theirs in the same order.
    """

    of: Mapping[int, int]
    differing: Mapping[int, Mapping[str, Hashable]]
    below: Callable[[int], tuple[int, ...]]


def kinds_of(skeleton: Any, form: Callable[[str], Hashable], marked: Collection[int] = ()) -> Kinds:
    """Return the kinds of the modules that may be folded.

    A module may be folded if it has a forward and children, if there is another one of its kind,
    and if no parameter inside it is tied to one outside.

    Arguments:
        skeleton: the module tree.
        form: the shape, the dtype and the like of a parameter or buffer, by its name.
        marked: indices of modules that run otherwise than unmarked ones.
    """
    numbers: dict[Hashable, int] = {}
    kinds: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    known_settings: dict[type, frozenset[str] | None] = {}
    for index in reversed(range(len(skeleton.specs))):  # children come after their parents
        spec = skeleton.specs[index]
        children = tuple(
            [(key, None if child is None else kinds[child]) for key, child in spec.children.items()]
        )
        tensors = tuple([
            (key, None if name is None else form(name))
            for table in (spec.parameters, spec.buffers)
            for key, name in table.items()
        ])  # fmt: skip
        fixed = _fixed(spec.cls, known_settings)
        settings = tuple([
            (key, value if type(value) is bool else value_of(value))
            for key, value in spec.attributes.items()
            if (fixed is None or key in fixed) and (value or type(value) not in _TABLES)  # most are empty tables of hooks
        ])  # fmt: skip
        alone = any(spec.attributes.get(hooks) for hooks in _HOOKS) or "forward" in spec.attributes
        module_kind = (
            spec.cls, children, tensors, tuple(spec.attributes), settings, index if alone else None, index in marked
        )  # fmt: skip
        kind_index = kinds[index] = numbers.setdefault(module_kind, len(numbers))
        groups.setdefault(kind_index, []).append(index)

    @functools.cache
    def owners() -> dict[int, nn.Module]:
        return dict(enumerate(skeleton.modules))

    differing: dict[int, dict[str, Hashable]] = {}
    for group in groups.values():
        fixed = known_settings[skeleton.specs[group[0]].cls]
        if len(group) > 1 and fixed is not None:
            tables = {index: skeleton.specs[index].attributes for index in group}
            for key, values in _differing(tables, fixed, owners):
                for index, value in values.items():
                    differing.setdefault(index, {})[key] = value
    return Kinds(_foldable(skeleton, kinds), differing, _below(skeleton))


def _fixed(cls: type[nn.Module], known: dict[type, frozenset[str] | None]) -> frozenset[str] | None:
    """Return the attributes whose values must be equal in a kind: those that can be read unseen.

    ``None`` represents all attributes.
    """
    if cls not in known:
        as_usual = (
            cls.__getattr__ is nn.Module.__getattr__
            and cls.__getattribute__ is object.__getattribute__
        )
        known[cls] = _TORCH.union(*map(vars, cls.__mro__)) if as_usual else None
    return known[cls]


def _differing(
    tables: Mapping[int, Mapping[str, Any]],
    fixed: Collection[str],
    owners: Callable[[], Mapping[int, nn.Module]],
) -> Iterator[tuple[str, dict[int, Hashable]]]:
    """Yield each attribute in which the modules of a kind differ, with its values."""
    for key, first in next(iter(tables.values())).items():
        if key in fixed:
            continue
        value_type = type(first) if is_plain(first) else None
        if all(
            table[key] is first or (type(table[key]) is value_type and table[key] == first)
            for table in tables.values()
        ):
            continue
        values = {index: value_of(table[key], owners()[index]) for index, table in tables.items()}
        if len(set(values.values())) > 1:
            yield key, values


def _foldable(skeleton: Any, kinds: Mapping[int, int]) -> dict[int, int]:
    """Return the kinds of the modules that may be folded, by index."""
    paths = skeleton.paths()
    tied = [names for names in skeleton.parameters.values() if len(names) > 1]
    numbers: dict[Hashable, int] = {}
    kinds_by_index = {}
    for path, index in paths.items():
        spec = skeleton.specs[index]
        runs = spec.cls.forward is not nn.Module.forward or "forward" in spec.attributes
        if not path or not spec.children or not runs:
            continue
        within = [
            tuple(name[len(path) + 1 :] for name in names if tree.is_under(name, path))
            for names in tied
        ]
        if all(len(names) in (0, len(every)) for names, every in zip(within, tied, strict=True)):
            shared = tuple(names for names in within if names)
            kinds_by_index[index] = numbers.setdefault((kinds[index], shared), len(numbers))
    counts = Counter(kinds_by_index.values())
    return {
        index: module_kind
        for index, module_kind in kinds_by_index.items()
        if counts[module_kind] > 1
    }


def _below(skeleton: Any) -> Callable[[int], tuple[int, ...]]:
    """Return a function from a module to the indices of it and of the modules below it."""

    @functools.cache
    def below(index: int) -> tuple[int, ...]:
        children = [child for child in skeleton.specs[index].children.values() if child is not None]
        return tuple(dict.fromkeys([index, *itertools.chain.from_iterable(map(below, children))]))

    return below
