"""Copies of module trees and of what their attributes refer to.

``make_template`` copies a whole tree with empty tensors, and every call copies attributes of that
template. Both use ``copy.deepcopy``, with a memo for what it doesn't copy. ``References`` finds
functions whose closure or defaults refer to modules of the tree, such as a ``forward`` that was
wrapped in another function: ``copy.deepcopy`` would return them themselves.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import pathlib
import re
import types
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from funcshard._utils.closures import reachable
from funcshard.comm import Mesh

Tensors = dict[str, torch.Tensor]
NamedTensors = Mapping[str, torch.Tensor]  # which is not written to

TABLES = ("_parameters", "_buffers", "_modules")
TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__)  # hooks, tables, the training flag
TORCH_CONTAINERS = {
    key: type(value)
    for key, value in nn.Module().__dict__.items()
    if isinstance(value, dict | set)
}
# The graph and its code.
_GRAPH_ATTRIBUTES = frozenset(fx.GraphModule({}, fx.Graph()).__dict__) - TORCH_ATTRIBUTES

# --- attributes -----------------------------------------------------------------------------------

_PLAIN = frozenset({type(None), bool, int, float, str})
_IMMUTABLE = (
    *_PLAIN, complex, bytes, range, slice, type, enum.Enum, pathlib.PurePath, re.Pattern,
    types.FunctionType, types.BuiltinFunctionType, types.ModuleType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, Mesh, DeviceMesh,
)  # fmt: skip


def attributes_to_follow(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes that may refer to something, without the tables of the tree."""
    left_out = {*TABLES, "_compiled_call_impl", *graph_attributes(type(module))}
    return [
        (key, value)
        for key, value in module.__dict__.items()
        if type(value) not in _PLAIN
        and (key not in TORCH_CONTAINERS or value)
        and key not in left_out
    ]


def graph_attributes(cls: type[nn.Module]) -> frozenset[str]:
    """Return the attributes that hold the graph of a ``torch.fx`` module, which no call changes."""
    if issubclass(cls, fx.GraphModule):
        return _GRAPH_ATTRIBUTES
    return frozenset()


def is_immutable(value: Any) -> bool:
    """Return whether no call can change ``value``, so that all calls may share it."""
    if type(value) in _PLAIN:
        return True  # only for speed
    # Why the iterators of built-in classes: an object of a user may iterate in its own way, or
    # raise.
    if isinstance(value, tuple):
        return all(map(is_immutable, tuple.__iter__(value)))
    if isinstance(value, frozenset):
        return all(map(is_immutable, frozenset.__iter__(value)))
    # Why by class: isinstance of a DeviceMesh reads an attribute of the object in torch 2.12.
    if issubclass(type(value), _IMMUTABLE):
        return True
    if dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen:  # type: ignore[union-attr]
        return all(
            is_immutable(getattr(value, field.name)) for field in dataclasses.fields(value)
        )
    return False


# --- functions that captured modules --------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Capture:
    """A function that captured modules or tensors of the tree.

    Attributes:
        cells: positions of the cells of its closure that lead to the tree.
        defaults: whether default values of its arguments lead there.
    """

    function: types.FunctionType
    cells: tuple[int, ...]
    defaults: bool

    def empty_copy(self) -> types.FunctionType:
        """Return a copy whose cells are empty where they lead to the tree."""
        old_function = self.function
        closure = list(old_function.__closure__ or ())
        for cell_index in self.cells:
            closure[cell_index] = types.CellType()
        new_function = types.FunctionType(
            old_function.__code__,
            old_function.__globals__,
            old_function.__name__,
            old_function.__defaults__,
            tuple(closure),
        )
        new_function.__kwdefaults__ = old_function.__kwdefaults__
        new_function.__qualname__ = old_function.__qualname__
        new_function.__dict__.update(old_function.__dict__)
        return new_function

    def fill(self, new: types.FunctionType, memo: dict[int, Any]) -> None:
        """Give a copy copies of what the function captured."""
        old_closure, new_closure = self.function.__closure__ or (), new.__closure__ or ()
        for cell_index in self.cells:
            cell_contents = old_closure[cell_index].cell_contents
            new_closure[cell_index].cell_contents = copied(cell_contents, memo)
        if self.defaults:
            new.__defaults__ = copied(self.function.__defaults__, memo)
            new.__kwdefaults__ = copied(self.function.__kwdefaults__, memo)


@dataclass(frozen=True, slots=True, eq=False)
class References:
    """What attributes refer to that ``copy.deepcopy`` would copy otherwise, or not at all.

    Attributes:
        captures: the functions that captured a part of the tree.
        methods: the bound methods of these, and of other callables that lead to the tree.
        shared: the objects that aren't copied: DeviceMeshes, and functions of ``torch.jit``.
    """

    captures: tuple[Capture, ...]
    methods: tuple[types.MethodType, ...]
    shared: tuple[Any, ...]

    @classmethod
    def of(cls, attributes: Iterable[Any], parts: Collection[int]) -> References:
        """Return the references of attributes; ``parts`` are the ids of the tree's objects."""
        captures: dict[int, Capture] = {}
        methods: list[types.MethodType] = []
        shared_objects: list[Any] = []
        distinct_values = {
            id(value): value
            for value in attributes
            if isinstance(value, types.FunctionType) or not is_immutable(value)
        }
        reached_objects = {
            id(item): item
            for value in distinct_values.values()
            for item in reachable(value)
        }
        for item in reached_objects.values():
            if issubclass(type(item), (DeviceMesh, torch.jit.ScriptFunction)):
                shared_objects.append(item)
            elif isinstance(item, types.MethodType):
                methods.append(item)
            elif isinstance(item, types.FunctionType):
                closure = enumerate(item.__closure__ or ())
                followed_cells = tuple(
                    index for index, cell in closure if _leads(cell, parts)
                )
                all_defaults = item.__defaults__, item.__kwdefaults__
                follows_defaults = any(_leads(values, parts) for values in all_defaults)
                if followed_cells or follows_defaults:
                    captures[id(item)] = Capture(item, followed_cells, follows_defaults)
        # Note: a method of another function leads to the tree by its object alone, and deepcopy
        # follows that.
        followed_methods = [
            method
            for method in methods
            if id(method.__func__) in captures
            or (
                not isinstance(method.__func__, types.FunctionType)
                and _leads(method, parts)
            )
        ]
        return cls(tuple(captures.values()), tuple(followed_methods), tuple(shared_objects))

    @contextlib.contextmanager
    def in_memo(self, memo: dict[int, Any]) -> Iterator[dict[int, Any]]:
        """Yield a memo for ``copied`` with copies of the functions, which the end fills."""
        memo.update((id(value), value) for value in self.shared)
        function_copies = [(capture, capture.empty_copy()) for capture in self.captures]
        memo.update(
            (id(capture.function), function) for capture, function in function_copies
        )
        if self.methods:
            memo = _MethodsToo(memo, self.methods)
        yield memo
        # Why only now: what a function captured may refer to objects that hold the function.
        for capture, function in function_copies:
            capture.fill(function, memo)


def _leads(value: Any, parts: Collection[int]) -> bool:
    return value is not None and any(id(item) in parts for item in reachable(value))


class _MethodsToo(dict[int, Any]):
    """A memo of ``copy.deepcopy`` that copies bound methods when they are asked for."""

    def __init__(self, memo: dict[int, Any], methods: Iterable[types.MethodType]) -> None:
        super().__init__(memo)
        self.methods = {id(method): method for method in methods}

    def get(self, key: int, default: Any = None) -> Any:
        if key not in self and key in self.methods:
            method = self.methods[key]
            # Why only now: before, the object that the method is bound to may have no copy.
            function, owner = copied(method.__func__, self), copied(method.__self__, self)
            self[key] = types.MethodType(function, owner)
        return super().get(key, default)


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of ``value`` under ``memo``, which may hold functions too."""
    # Why here: new versions of Python copy a function without a look at the memo.
    if isinstance(value, types.FunctionType) and id(value) in memo:
        return memo[id(value)]
    return copy.deepcopy(value, memo)


# --- the template ---------------------------------------------------------------------------------


def make_template(
    modules: Sequence[nn.Module], tensors: NamedTensors
) -> tuple[list[nn.Module], Tensors]:
    """Copy a module tree, with empty tensors in place of its tensors.

    Arguments:
        modules: the modules of the tree, each once, parents first.

    Returns:
        The modules of the copy, in the same order, and its empty tensors by name.
    """
    empty_tensor = torch.empty(0, device="meta", dtype=torch.float32)
    stand_ins: Tensors = {}
    for name, tensor in tensors.items():
        # Why an object for each name: the memo of deepcopy goes by identity.
        stand_ins[name] = empty_tensor.detach()
        if isinstance(tensor, nn.Parameter):
            stand_ins[name] = nn.Parameter(empty_tensor, requires_grad=False)
    memo: dict[int, Any] = {
        id(tensors[name]): stand_in for name, stand_in in stand_ins.items()
    }
    part_ids = {*map(id, modules), *memo}
    attributes: list[Any] = []
    for m in modules:
        for key, table_type in TORCH_CONTAINERS.items():
            table = m.__dict__.get(key)
            if type(table) is table_type and not table:
                memo[id(table)] = table_type()
        for key, value in attributes_to_follow(m):
            if not is_immutable(value):
                # Why a clone: an earlier forward may have kept a tensor that has a graph, which
                # deepcopy refuses.
                memo.update(
                    (id(inner), inner.detach().clone())
                    for inner in reachable(value)
                    if isinstance(inner, torch.Tensor) and inner.grad_fn is not None
                )
            # Why not torch's own: a hook may refer to any module that its user likes.
            if key not in TORCH_CONTAINERS:
                attributes.append(value)
    references = References.of(attributes, part_ids)
    with references.in_memo(memo) as memo:
        try:
            _copy_by_attributes(modules, memo)
            root_copy = copy.deepcopy(modules[0], memo)
        except Exception:  # of any kind: it is the code of any object
            parts = {id(part): part for part in (*modules, *tensors.values())}
            _check_attributes(modules, parts)
            raise
    module_copies = list(root_copy.modules())
    if references.captures:
        # Why again: deepcopy of a module copies its attributes without ``copied``.
        for m in module_copies:
            function_attributes = [
                (k, v) for k, v in vars(m).items() if isinstance(v, types.FunctionType)
            ]
            m.__dict__.update(
                (key, copied(value, memo)) for key, value in function_attributes
            )
    return module_copies, stand_ins


def _check_attributes(modules: Sequence[nn.Module], memo: Mapping[int, Any]) -> None:
    """Raise an error that names the first attribute that has no copy."""
    for module in modules:
        for name, value in attributes_to_follow(module):
            try:
                copy.deepcopy(value, dict(memo))
            except Exception as error:
                raise TypeError(
                    f"make_functional copies the module, and attribute {name!r} of "
                    f"{type(module).__name__} has no copy ({error}): keep it outside of the "
                    "module, or give its class a __deepcopy__"
                ) from error


def _copy_by_attributes(modules: Sequence[nn.Module], memo: dict[int, Any]) -> None:
    """Put copies of modules into ``memo``, except for those that deepcopy has to copy."""
    # Why not deepcopy: it takes three times as long for a usual module. That of GraphModule loses
    # attributes and compiles the graph again, and a pickle may make other children and tensors, as
    # that of e3nn's modules does.
    originals: list[nn.Module] = []
    for module in modules:
        cls = type(module)
        if isinstance(module, fx.GraphModule):
            # Why a class of its own: when the module's graph is edited, the forward of its class is
            # replaced.
            class_attributes = {
                key: getattr(cls, key) for key in ("forward", "__module__", "__qualname__")
            }
            memo[id(module)] = object.__new__(type(cls.__name__, (cls,), class_attributes))
            originals.append(module)
        elif not hasattr(cls, "__deepcopy__") and (
            _is_usual(cls)
            or _can_copy_attributes(
                module, memo | {id(module): module for module in modules}
            )
        ):
            memo[id(module)] = object.__new__(cls)
            originals.append(module)
    for module in originals:
        shared_keys, attributes = graph_attributes(type(module)), memo[id(module)].__dict__
        for key, value in nn.Module.__getstate__(
            module
        ).items():  # without what was compiled
            if type(value) in _PLAIN or key in shared_keys:
                attributes[key] = value
            # Why asked here: a module has a dozen empty tables, which would take most time.
            elif (known_copy := memo.get(id(value))) is not None:
                attributes[key] = known_copy
            else:
                attributes[key] = copy.deepcopy(value, memo)


def _can_copy_attributes(module: nn.Module, memo: dict[int, Any]) -> bool:
    attributes = {key: value for key, value in module.__dict__.items() if key not in TABLES}
    # Why: a copy of a weak reference refers to the same object, as that of nn.LSTM to its weights.
    if any(
        issubclass(type(value), weakref.ref) for value in reachable([*attributes.values()])
    ):
        return False
    try:
        copy.deepcopy(attributes, memo)
    except Exception:  # of any kind: it is the code of any object
        return False
    return True


def _is_usual(cls: type[nn.Module]) -> bool:
    """Return whether a pickle of the class has the attributes of the module, and nothing else."""
    return (
        cls.__new__
        is object.__new__  # others may need arguments, as that of ema_pytorch's EMA
        and cls.__getstate__ is nn.Module.__getstate__
        and cls.__setstate__ is nn.Module.__setstate__
        and cls.__reduce__ is nn.Module.__reduce__
        and cls.__reduce_ex__ is nn.Module.__reduce_ex__
    )
