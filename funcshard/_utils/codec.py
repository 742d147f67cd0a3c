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
from collections.abc import Callable
from typing import Any

import torch

from funcshard._utils import file_data, tree
from funcshard._utils.tensors import dtype_of

_NONE = type(None)

_PLAIN: dict[Any, Callable[[str, Any], Any]] = {
    Any: lambda where, data: tree.freeze(data),
    int: file_data.whole,
    str: functools.partial(file_data.of_type, str),
    bool: functools.partial(file_data.of_type, bool),
    torch.dtype: lambda where, data: dtype_of(file_data.of_type(str, where, data)),
}


@functools.cache
def _fields(cls: Any) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Return each field and its type hint, by its name in JSON."""
    type_hints = typing.get_type_hints(cls)
    return {
        field.metadata.get("key", field.name): (field, type_hints[field.name])
        for field in dataclasses.fields(cls)
        if field.init
    }


def encode(value: Any) -> Any:
    """Return a data class, or a tuple of them, for ``json.dumps`` with ``default=dtype_name``."""
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    encoded = {}
    value_type: Any = type(value)
    for key, (field, _) in _fields(value_type).items():
        part = getattr(value, field.name)
        if "later" not in field.metadata or part != field.default:
            encoded[key] = encode(part)
    return encoded


def decode(hint: Any, data: Any, where: str) -> Any:
    """Return the value of a type hint that ``encode`` wrote.

    Arguments:
        hint: a data class, a named tuple, a tuple, ``Any`` for nested tuples, or a plain type.

    Raises:
        ValueError: the data has another type, or other fields.
    """
    if hint in _PLAIN:
        return _PLAIN[hint](where, data)
    if dataclasses.is_dataclass(hint):
        return _decode_class(hint, data, where)
    type_arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        # Note: of None, a truth value and one other type, JSON tells which it holds.
        if (data is None and _NONE in type_arguments) or (
            type(data) is bool and bool in type_arguments
        ):
            return data
        (hint,) = [choice for choice in type_arguments if choice not in (_NONE, bool)]
        return decode(hint, data, where)
    make: Any = tuple
    items = file_data.of_type(list, where, data)
    if type_arguments[1:] == (...,):
        type_arguments = type_arguments[:1] * len(items)
    elif not type_arguments:
        assert issubclass(hint, tuple), f"no data is stored as {hint}"
        make, type_arguments = hint._make, tuple(typing.get_type_hints(hint).values())
    if len(items) != len(type_arguments):
        raise ValueError(f"{where} must be a list of {len(type_arguments)}; found {len(items)}")
    return make(
        decode(item_hint, item, f"{where}[{index}]")
        for index, (item_hint, item) in enumerate(zip(type_arguments, items, strict=True))
    )


def _decode_class(cls: Any, data: Any, where: str) -> Any:
    fields = _fields(cls)
    required_keys = [key for key, (f, _) in fields.items() if f.default is dataclasses.MISSING]
    # No further keys either: a field that this release lacks may change the meaning of others.
    file_data.table(where, data, required_keys, fields, others=False)
    return cls(
        **{
            fields[key][0].name: decode(fields[key][1], part, f"{where}.{key}")
            for key, part in data.items()
        }
    )
