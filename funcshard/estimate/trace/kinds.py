"""Which modules of a model are of one kind, so that a trace of one may represent all of them.

They agree in class, parameters, buffers, children, hooks and names of attributes. Values of
attributes may differ, as a layer's number does. The tracer sees which of them a module reads, and
only these must be equal.
"""

from __future__ import annotations

import enum
import functools
import itertools
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch import nn

from funcshard._utils import tree
from funcshard.estimate.trace.tape import Form

_TABLES = frozenset({dict, OrderedDict, set})
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TORCH = frozenset(nn.Module().__dict__)


def kinds_of(
    skeleton: Any, form: Callable[[str], Hashable], marked: Collection[int] = ()
) -> tuple[dict[int, int], dict[int, dict[str, Hashable]]]:
    """Return the kinds of the modules that may be folded, by index, and where those differ.

    The latter are attributes whose values differ within a kind, by index and name, as from
    ``value_of``.

    Arguments:
        skeleton: the module tree.
        form: shape, dtype and the like of a parameter or buffer, by its name.
        marked: indices of modules that are of other kinds than unmarked ones.
    """
    kind_numbers: dict[Hashable, int] = {}
    kinds: dict[int, int] = {}
    kind_groups: dict[int, list[int]] = {}
    # Note: fixed attributes follow from the class, and a model has few classes.
    fixed_of = functools.cache(_fixed)
    # Why sorted: two modules may share a child, so a parent's index may be above its child's.
    for index in TopologicalSorter(
        {i: _children(s) for i, s in enumerate(skeleton.specs)}
    ).static_order():
        spec = skeleton.specs[index]
        children = tuple(
            [
                (key, None if child is None else kinds[child])
                for key, child in spec.children.items()
            ]
        )
        tensor_forms = tuple([
            (key, None if name is None else form(name))
            for table in (spec.parameters, spec.buffers)
            for key, name in table.items()
        ])  # fmt: skip
        # Note: the tracer sees reads of ordinary attributes only, so all others must be equal.
        fixed_names = fixed_of(spec.cls)
        fixed_settings = tuple([
            (key, value if type(value) is bool else value_of(value))
            for key, value in spec.attributes.items()
            # Note: most attributes are empty tables of hooks.
            if (fixed_names is None or key in fixed_names) and (value or type(value) not in _TABLES)
        ])  # fmt: skip
        has_hooks = any(spec.attributes.get(hooks) for hooks in _HOOKS)
        module_kind = (
            spec.cls,
            children,
            tensor_forms,
            tuple(spec.attributes),
            fixed_settings,
            # Note: a module with a hook or its own forward is equal to itself alone.
            index if has_hooks or "forward" in spec.attributes else None,
            index in marked,
        )
        kind_index = kinds[index] = kind_numbers.setdefault(module_kind, len(kind_numbers))
        kind_groups.setdefault(kind_index, []).append(index)

    @functools.cache
    def owners() -> dict[int, nn.Module]:
        return dict(enumerate(skeleton.modules))

    differing: dict[int, dict[str, Hashable]] = {}
    for kind_group in kind_groups.values():
        fixed_names = fixed_of(skeleton.specs[kind_group[0]].cls)
        # Note: with all attributes fixed, modules of one kind differ in none.
        if len(kind_group) > 1 and fixed_names is not None:
            tables = {index: skeleton.specs[index].attributes for index in kind_group}
            for key, values in _differing(tables, fixed_names, owners):
                for index, value in values.items():
                    differing.setdefault(index, {})[key] = value
    return _foldable(skeleton, kinds), differing


def order_below(specs: Sequence[Any]) -> Callable[[int], tuple[int, ...]]:
    """Return a function to a module and those below, as indices in an order that a kind shares."""

    @functools.cache
    def below(index: int) -> tuple[int, ...]:
        indices_below = itertools.chain.from_iterable(map(below, _children(specs[index])))
        return tuple(dict.fromkeys([index, *indices_below]))

    return below


def _children(spec: Any) -> list[int]:
    return [child for child in spec.children.values() if child is not None]


def _fixed(cls: type[nn.Module]) -> frozenset[str] | None:
    """Return the attributes that must be equal in a kind; ``None`` for all of them."""
    as_usual = (
        cls.__getattr__ is nn.Module.__getattr__
        and cls.__getattribute__ is object.__getattribute__
    )
    # Why: the tracer watches ``Module.__getattr__``. Python never asks it for names that the class
    # has, nor for any name if the class has its own attribute access.
    return _TORCH.union(*map(vars, cls.__mro__)) if as_usual else None


def _differing(
    tables: Mapping[int, Mapping[str, Any]],
    fixed: Collection[str],
    owners: Callable[[], Mapping[int, nn.Module]],
) -> Iterator[tuple[str, dict[int, Hashable]]]:
    """Yield each attribute in which the modules of a kind differ, with its values."""
    for key, first_value in next(iter(tables.values())).items():
        # Note: a seed changes values and no forms, as of BigBird's random blocks.
        if key in fixed or key == "seed":
            continue
        # Why the type: most values are plain and equal, and value_of takes long.
        value_type = type(first_value) if is_plain(first_value) else None
        if all(
            table[key] is first_value
            or (type(table[key]) is value_type and table[key] == first_value)
            for table in tables.values()
        ):
            continue
        values = {
            index: value_of(table[key], owners()[index]) for index, table in tables.items()
        }
        if len(set(values.values())) > 1:
            yield key, values


def _foldable(skeleton: Any, kinds: Mapping[int, int]) -> dict[int, int]:
    """Return the kinds of the modules that may be folded, by index."""
    tied_names = [names for names in skeleton.parameters.values() if len(names) > 1]
    kind_numbers: dict[Hashable, int] = {}
    kinds_by_index = {}
    for path, index in skeleton.paths().items():
        spec = skeleton.specs[index]
        has_forward = (
            spec.cls.forward is not nn.Module.forward or "forward" in spec.attributes
        )
        if not path or not spec.children or not has_forward:
            continue
        names_within = [
            tuple(name[len(path) + 1 :] for name in names if tree.is_under(name, path))
            for names in tied_names
        ]
        # Note: a parameter that is tied to one outside gets gradients from both at once.
        if any(
            0 < len(inner) < len(names)
            for inner, names in zip(names_within, tied_names, strict=True)
        ):
            continue
        shared_names = tuple(filter(None, names_within))
        kinds_by_index[index] = kind_numbers.setdefault(
            (kinds[index], shared_names), len(kind_numbers)
        )
    # Note: a kind of one module has no one to represent.
    kind_counts = Counter(kinds_by_index.values())
    return {index: kind for index, kind in kinds_by_index.items() if kind_counts[kind] > 1}


# --- values ---------------------------------------------------------------------------------------

_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
_EMPTY = types.CellType()  # of a variable that has no value yet
_LIMIT = 8  # levels; what is nested deeper is compared by its identity


def is_plain(value: Any) -> bool:
    """Return whether a value can't change and holds no other object."""
    return type(value) in _PLAIN or isinstance(value, enum.Enum)


def value_of(value: Any, owner: Any = None, around: tuple[int, ...] = ()) -> Any:
    """Return a hashable value, equal to that of another object if both work alike.

    Containers and functions of Python are compared by what they hold, tensors by their form, and
    all others by identity.

    Arguments:
        value: the object.
        owner: the object that holds it; its methods equal those of another owner.
        around: identities of the containers around it.
    """
    value_type = type(value)
    # Why the type: 1, 1.0 and True are equal in Python, and work otherwise.
    if is_plain(value):
        return value_type, repr(value) if isinstance(value, float | complex) else value
    if isinstance(value, torch.Tensor):
        return "tensor", Form.of(value)
    if value is owner:
        return "owner"
    if id(value) in around:  # a container that holds itself
        return "around", around.index(id(value))
    parts: Any = None
    if value_type in (list, tuple, set, frozenset, torch.Size):
        parts = value
    elif value_type in (dict, OrderedDict):
        parts = itertools.chain.from_iterable(value.items())
    elif value_type is types.MethodType:
        parts = value.__func__, value.__self__
    elif value_type is functools.partial:
        parts = value.func, value.args, value.keywords
    elif value_type is types.FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        parts = value.__code__, value.__defaults__, value.__kwdefaults__, cells
    if parts is None or len(around) == _LIMIT:
        return "object", id(value)
    part_values = [value_of(part, owner, (*around, id(value))) for part in parts]
    is_set = value_type in (set, frozenset)
    return value_type, (frozenset if is_set else tuple)(part_values)
