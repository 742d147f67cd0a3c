"""``value_of``: a Python object as a value that can be compared, its nested objects included."""

from __future__ import annotations

import enum
import functools
import types
from typing import Any

import torch

_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, torch.dtype, torch.device, torch.layout,
    torch.memory_format,
)  # fmt: skip
_LIMIT = 10_000  # objects; a larger object is compared by its identity
_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE, which classes in Python code have


def is_plain(value: Any) -> bool:
    """Return whether a value cannot change and holds no other object."""
    return type(value) in _PLAIN or isinstance(value, enum.Enum)


def value_of(value: Any, owner: Any = None) -> Any:
    """Return a value that can be hashed, equal to that of another object if both work alike.

    Objects of Python classes, containers and functions are compared by what they hold, tensors by
    their form. Modules and objects of which Python does not show everything are compared by their
    identity.

    Arguments:
        value: the object.
        owner: the object that holds it, of which a bound method is equal to that of another one.
    """
    try:
        return _Values(owner).of(value)
    except RecursionError:
        return "object", id(value)


class _Values:
    def __init__(self, owner: Any) -> None:
        self.owner = owner
        # By id of an object: its place, for objects that refer to themselves.
        self.seen: dict[int, int] = {}
        self.kept: list[Any] = []  # objects made on the way, whose ids must not come again

    def of(self, value: Any) -> Any:
        # Why the type: 1, 1.0 and True are equal in Python, and work otherwise.
        if is_plain(value):
            return type(value), repr(value) if isinstance(value, (float, complex)) else value
        if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)):
            return type(value), id(value)
        if isinstance(value, torch.Tensor):
            return (
                "tensor",
                tuple(value.shape),
                tuple(value.stride()),
                value.dtype,
                value.requires_grad,
            )
        if value is self.owner:
            return "owner"
        if id(value) in self.seen:
            return "seen", self.seen[id(value)]
        if len(self.seen) >= _LIMIT or isinstance(value, torch.nn.Module):
            return "object", id(value)
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        return self._inside(value)

    def _inside(self, value: Any) -> Any:
        value_type = type(value)
        if isinstance(value, types.FunctionType):
            cells = [self._cell(cell) for cell in value.__closure__ or ()]
            defaults = value.__defaults__, value.__kwdefaults__, value.__dict__
            return (
                value_type,
                value.__code__,
                id(value.__globals__),
                tuple(cells),
                self.of(defaults),
            )
        if isinstance(value, types.MethodType):
            return value_type, self.of(value.__func__), self.of(value.__self__)
        if value_type is functools.partial:
            return value_type, self.of((value.func, value.args, value.keywords))
        # Why __new__: a class that C code made may keep what Python does not show.
        builtin = next(
            base
            for base in value_type.__mro__
            if not base.__flags__ & _HEAP
            or type(base.__dict__.get("__new__")) is types.BuiltinFunctionType
        )
        parts: list[Any] = [value_type]
        if issubclass(builtin, dict):
            parts += [(self.of(key), self.of(dict_value)) for key, dict_value in dict.items(value)]
        elif issubclass(builtin, (list, tuple)):
            parts += map(self.of, builtin.__iter__(value))
        elif issubclass(builtin, (set, frozenset)):
            parts.append(frozenset(map(self.of, builtin.__iter__(value))))
        elif builtin not in (object, types.SimpleNamespace):
            return "object", id(value)
        for base in value_type.__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                member = base.__dict__.get(name)
                if isinstance(member, types.MemberDescriptorType):
                    parts.append((name, self._slot(member, value)))
        try:
            state = object.__getattribute__(value, "__dict__")
        except AttributeError:
            return tuple(parts)
        return (*parts, *((key, self.of(attribute)) for key, attribute in state.items()))

    def _cell(self, cell: Any) -> Any:
        try:
            return self.of(cell.cell_contents)
        except ValueError:  # it is empty
            return None

    def _slot(self, member: Any, value: Any) -> Any:
        try:
            return self.of(member.__get__(value))
        except AttributeError:  # it is empty
            return None
