"""Data classes as JSON and back, by their type hints.

``decode`` checks each part, so its result has the types of the hints. Ranges are up to the class.

``field(metadata=...)`` may hold two keys. ``"key"`` is the field's name in JSON. ``"later"`` marks
a field that older texts lack: at its default ``encode`` leaves it out, so they stay valid.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch

from funcshard._utils import file_data, tree
from funcshard._utils.tensors import dtype_of

_NONE = type(None)

_PLAIN: dict[Any, Callable[[str, Any], Any]] = {
    Any: lambda where, data: tree.freeze(data),
    object: lambda where, data: data,
    int: file_data.whole,
    str: functools.partial(file_data.of_type, str),
    bool: functools.partial(file_data.of_type, bool),
    torch.dtype: lambda where, data: dtype_of(file_data.of_type(str, where, data)),
}


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[dataclasses.Field[Any], Any, bool]]:
    """Return each field, its type hint and whether it holds data classes, by its name in JSON."""
    fields = {}
    for field in dataclasses.fields(cls):
        hint = typing.get_type_hints(cls)[field.name]
        has_class = any(map(dataclasses.is_dataclass, (hint, *typing.get_args(hint))))
        if field.init:
            fields[field.metadata.get("key", field.name)] = field, hint, has_class
    return fields


@functools.cache
def _required_keys(cls: Any) -> list[str]:
    return [
        key for key, (f, *_) in _fields(cls).items() if f.default is dataclasses.MISSING
    ]


@functools.cache
def _arguments(hint: Any) -> tuple[Any, ...] | None:
    """Return the arguments of a type hint, or a named tuple's types; ``None`` for a data class."""
    if dataclasses.is_dataclass(hint):
        return None
    return typing.get_args(hint) or tuple(typing.get_type_hints(hint).values())


def encode(value: Any) -> Any:
    """Return a data class, or a tuple of them, for ``json.dumps`` with ``default=dtype_name``."""
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    encoded = {}
    value_type: Any = type(value)
    # Why by the hint: a plan has thousands of leaves, most of whose fields hold no class.
    for key, (field, _, has_class) in _fields(value_type).items():
        part = getattr(value, field.name)
        if "later" not in field.metadata or part != field.default:
            encoded[key] = encode(part) if has_class else part
    return encoded


def decode(hint: Any, data: Any, where: str) -> Any:
    """Return the value of a type hint that ``encode`` wrote.

    Arguments:
        hint: a data class, a named tuple, a tuple, a mapping of texts, ``Any`` for nested tuples,
            ``object`` for data as they are, or a plain type.

    Raises:
        ValueError: the data has another type, or other fields.
    """
    if (check := _PLAIN.get(hint)) is not None:
        return check(where, data)
    type_arguments = _arguments(hint)
    if type_arguments is None:
        return _decode_class(hint, data, where)
    if isinstance(hint, types.UnionType):
        # Note: of None, a truth value and one other type, JSON tells which it holds.
        if (data is None and _NONE in type_arguments) or (
            type(data) is bool and bool in type_arguments
        ):
            return data
        (hint,) = [choice for choice in type_arguments if choice not in (_NONE, bool)]
        return decode(hint, data, where)
    if typing.get_origin(hint) is Mapping:
        return {
            key: decode(type_arguments[1], item, f"{where}[{key!r}]")
            for key, item in file_data.table(where, data).items()
        }
    items = file_data.of_type(list, where, data)
    if type_arguments[1:] == (...,):
        # Why: most lists hold numbers or texts, and a plan has thousands of them.
        if (check := _PLAIN.get(type_arguments[0])) is not None:
            return tuple(
                [check(f"{where}[{index}]", item) for index, item in enumerate(items)]
            )
        type_arguments = type_arguments[:1] * len(items)
    if len(items) != len(type_arguments):
        raise ValueError(
            f"{where} must be a list of {len(type_arguments)}; found {len(items)}"
        )
    make: Callable[[Any], Any] = getattr(hint, "_make", tuple)  # of a named tuple
    return make(
        [
            decode(item_hint, item, f"{where}[{index}]")
            for index, (item_hint, item) in enumerate(
                zip(type_arguments, items, strict=True)
            )
        ]
    )


def _decode_class(cls: Any, data: Any, where: str) -> Any:
    fields = _fields(cls)
    # No further keys either: a field that this release lacks may change the meaning of others.
    file_data.table(where, data, _required_keys(cls), fields, others=False)
    return cls(
        **{
            fields[key][0].name: decode(fields[key][1], part, f"{where}.{key}")
            for key, part in data.items()
        }
    )
