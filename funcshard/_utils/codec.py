"""Data classes as JSON and back, by their type hints.

``decode`` checks each part, so its result has the types of the hints. Ranges are up to the class.

``field(metadata=...)`` may hold two keys. ``"key"`` is the field's name in JSON. ``"later"`` marks
a field that older texts lack: at its default ``encode`` leaves it out, so they stay valid.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from funcshard._utils import file_data, tree
from funcshard._utils.tensors import dtype_of

_NONE = type(None)


class _Layout(NamedTuple):
    """How JSON holds a class.

    Attributes:
        keys: the JSON names of the fields that every text has.
        values: from an object to the values of these fields.
        later: name, JSON name and default of each field that older texts lack.
        nested: the JSON names of fields that hold data classes.
    """

    keys: tuple[str, ...]
    values: Callable[[Any], Any]
    later: tuple[tuple[str, str, Any], ...]
    nested: tuple[str, ...]
    decoders: dict[str, tuple[str, Callable[[str, Any], Any]]]
    required: tuple[str, ...]


@functools.cache
def _layout(cls: Any) -> _Layout:
    type_hints = typing.get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    key_of = {field.name: field.metadata.get("key", field.name) for field in fields}
    later_fields = [field for field in fields if field.metadata.get("later")]
    usual_names = [field.name for field in fields if field not in later_fields]
    return _Layout(
        keys=tuple(key_of[name] for name in usual_names),
        values=operator.attrgetter(*usual_names),
        later=tuple((field.name, key_of[field.name], field.default) for field in later_fields),
        nested=tuple(
            key_of[field.name] for field in fields if _holds_class(type_hints[field.name])
        ),
        decoders={key_of[name]: (name, _decoder(type_hints[name])) for name in key_of},
        required=tuple(key_of[f.name] for f in fields if f.default is dataclasses.MISSING),
    )


def encode(value: Any) -> dict[str, Any]:
    """Return the fields of a data class for ``json.dumps`` with ``default=dtype_name``."""
    keys, values, later, nested, _, _ = _layout(value.__class__)
    encoded: dict[str, Any] = dict(zip(keys, values(value), strict=True))
    # Note: at its default such a field is left out, so texts of older releases stay valid.
    for name, key, default in later:
        if (part := getattr(value, name)) != default:
            encoded[key] = part
    for key in nested:
        part = encoded.get(key)
        if isinstance(part, tuple):
            encoded[key] = [encode(item) for item in part]
        elif part is not None:
            encoded[key] = encode(part)
    return encoded


def decode(hint: Any, data: Any, where: str) -> Any:
    """Return the value of a type hint that ``encode`` wrote.

    Arguments:
        hint: a data class, a named tuple, a tuple, ``Any`` for nested tuples, or a plain type.

    Raises:
        ValueError: the data has another type, or other fields.
    """
    return _decoder(hint)(where, data)


@functools.cache
def _decoder(hint: Any) -> Callable[[str, Any], Any]:
    plain_decoders: dict[Any, Callable[[str, Any], Any]] = {
        Any: lambda where, data: tree.freeze(data),
        int: file_data.whole,
        str: file_data.text,
        bool: file_data.flag,
        torch.dtype: lambda where, data: dtype_of(file_data.text(where, data)),
        tuple[int, ...]: file_data.numbers,
        tuple[str, ...]: file_data.texts,
    }
    # A decoder is made once for each hint: a plan has thousands of leaves.
    if hint in plain_decoders:
        return plain_decoders[hint]
    type_arguments = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        return functools.partial(_decode_union, type_arguments)
    if dataclasses.is_dataclass(hint):
        return functools.partial(_decode_class, hint)
    if type_arguments and type_arguments[-1] is ...:
        decode_item = _decoder(type_arguments[0])
        return functools.partial(_decode_sequence, tuple, itertools.repeat(decode_item), None)
    make: Any = tuple
    if not type_arguments:
        assert issubclass(hint, tuple), f"no data is stored as {hint}"
        make, type_arguments = hint._make, tuple(typing.get_type_hints(hint).values())
    decoders = [_decoder(type_argument) for type_argument in type_arguments]
    return functools.partial(_decode_sequence, make, decoders, len(decoders))


def _decode_union(choices: tuple[Any, ...], where: str, data: Any) -> Any:
    # Note: of None, a truth value and one other type, JSON tells which it holds.
    if (data is None and _NONE in choices) or (type(data) is bool and bool in choices):
        return data
    (hint,) = [choice for choice in choices if choice not in (_NONE, bool)]
    return decode(hint, data, where)


def _decode_sequence(
    make: Callable[[list[Any]], Any],
    decoders: Iterable[Callable[[str, Any], Any]],
    length: int | None,
    where: str,
    data: Any,
) -> Any:
    items = zip(decoders, file_data.listed(where, data, length), strict=False)
    return make([decode_item(f"{where}[{i}]", item) for i, (decode_item, item) in enumerate(items)])


def _decode_class(cls: Any, where: str, data: Any) -> Any:
    layout = _layout(cls)
    # No further keys either: a field that this release lacks may change the meaning of others.
    file_data.table(where, data, layout.required, layout.decoders, others=False)
    field_values = {}
    for key, part in data.items():
        name, decoder = layout.decoders[key]
        field_values[name] = decoder(f"{where}.{key}", part)
    return cls(**field_values)


def _holds_class(hint: Any) -> bool:
    return any(dataclasses.is_dataclass(part_hint) for part_hint in (hint, *typing.get_args(hint)))
