"""The template of a skeleton: a copy of a module tree in which empty tensors replace all tensors.

``copy.deepcopy`` makes the copy, with a memo for what it cannot copy: functions that captured
modules, graphs of ``torch.fx``, and tensors that have a graph.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import pathlib
import re
import types
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from funcshard._utils import reachable
from funcshard.comm import Mesh
from funcshard.module.rebinding import copied, rebind, references
from funcshard.module.walking import ModuleTree

TABLES = ("_parameters", "_buffers", "_modules")
TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__)  # hooks, tables, the training flag
TORCH_CONTAINERS = {
    key: type(value) for key, value in nn.Module().__dict__.items() if isinstance(value, dict | set)
}
# The graph and its code.
_GRAPH_ATTRIBUTES = frozenset(fx.GraphModule({}, fx.Graph()).__dict__) - TORCH_ATTRIBUTES


def make_template(tree: ModuleTree) -> tuple[list[nn.Module], dict[int, str]]:
    """Return the template of a tree.

    Returns:
        The modules of the copy, each once, parents first; and id of each empty tensor -> first name
        of the parameter or buffer.
    """
    memo: dict[int, Any] = {}
    tensor_names: dict[int, str] = {}
    empty = torch.empty(0, device="meta", dtype=torch.float32)
    for name, tensor in (*tree.parameters.items(), *tree.buffers.items()):
        stand_in = empty.detach()
        if isinstance(tensor, nn.Parameter):
            stand_in = nn.Parameter(empty, requires_grad=False)
        memo[id(tensor)] = stand_in
        tensor_names[id(stand_in)] = name
    modules = [m for _, m in tree.modules]
    # Why not by deepcopy: a module has a dozen empty tables of hooks, which take most of its time.
    tables = [
        m.__dict__[key]
        for m in modules
        for key, kind in TORCH_CONTAINERS.items()
        if type(m.__dict__.get(key)) is kind
    ]
    memo.update((id(table), type(table)()) for table in tables if not table)
    parts = {*map(id, modules), *map(id, tree.parameters.values()), *map(id, tree.buffers.values())}
    values = [
        (key, value)
        for m in modules
        for key, value in attributes_to_follow(m)
        if key not in graph_attributes(type(m))
    ]
    for _, value in values:
        for inner in () if is_immutable(value) else reachable(value):
            # Why a clone: an earlier forward may have kept a tensor that has a graph, which
            # deepcopy refuses.
            if isinstance(inner, torch.Tensor) and inner.grad_fn is not None:
                memo[id(inner)] = inner.detach().clone()
    rebindings, shared = references(
        [value for key, value in values if key not in TORCH_ATTRIBUTES and may_refer(value)], parts
    )
    memo.update((id(value), value) for value in shared)
    memo, functions = rebind(rebindings, memo)
    _copy_by_attributes(modules, memo)
    root = copy.deepcopy(modules[0], memo)
    for rebinding, function in functions:
        rebinding.fill(function, memo)
    copies = list(root.modules())
    for m in copies if functions else ():
        # Note: new versions of Python copy a function without a look at the memo.
        m.__dict__.update(
            {
                key: copied(value, memo)
                for key, value in m.__dict__.items()
                if isinstance(value, types.FunctionType)
            }
        )
    return copies, tensor_names


def _copy_by_attributes(modules: Sequence[nn.Module], memo: dict[int, Any]) -> None:
    """Put copies of modules of ``torch.fx``, and of those with another pickle, into ``memo``.

    ``GraphModule.__deepcopy__`` loses attributes and compiles the graph again. The copies share the
    graph, which no call changes. A pickle may make other children and other tensors, as that of
    e3nn's modules does.
    """
    originals: list[nn.Module] = []
    for m in modules:
        cls = type(m)
        if isinstance(m, fx.GraphModule):
            # Why a class of its own: when the module's graph is edited, the forward of its class is
            # replaced.
            names = {
                "forward": cls.forward,
                "__module__": cls.__module__,
                "__qualname__": cls.__qualname__,
            }
            memo[id(m)] = object.__new__(type(cls.__name__, (cls,), names))
            originals.append(m)
        elif _has_own_pickle(cls) and _can_copy_attributes(m, memo | {id(m): m for m in modules}):
            memo[id(m)] = object.__new__(cls)
            originals.append(m)
    for m in originals:
        shared = graph_attributes(type(m))
        memo[id(m)].__dict__.update(
            {
                key: value if key in shared else copy.deepcopy(value, memo)
                for key, value in m.__dict__.items()
            }
        )


def _can_copy_attributes(module: nn.Module, memo: dict[int, Any]) -> bool:
    """Return whether all attributes can be copied; a pickle may leave out others, or make them."""
    attributes = {key: value for key, value in module.__dict__.items() if key not in TABLES}
    if any(issubclass(type(value), weakref.ref) for value in reachable([*attributes.values()])):
        return False  # copies refer to the same object, as that of nn.LSTM to its weights
    try:
        copy.deepcopy(attributes, memo)
    except Exception:  # of any kind: it is the code of any object
        return False
    return True


def _has_own_pickle(cls: type[nn.Module]) -> bool:
    """Return whether a class says by its pickle alone how its modules are copied."""
    return not hasattr(cls, "__deepcopy__") and (
        cls.__getstate__ is not nn.Module.__getstate__
        or cls.__setstate__ is not nn.Module.__setstate__
    )


# --- attributes -----------------------------------------------------------------------------------


_PLAIN = frozenset({type(None), bool, int, float, str})
_IMMUTABLE = (
    *(
        type(None),
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        slice,
        type,
        enum.Enum,
        pathlib.PurePath,
        re.Pattern,
    ),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, Mesh, DeviceMesh),
)


def attributes_to_follow(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes that may refer to something, without the tables of the tree."""
    return [
        (key, value)
        for key, value in module.__dict__.items()
        if type(value) not in _PLAIN
        and (key not in TORCH_CONTAINERS or value)
        and key not in (*TABLES, "_compiled_call_impl")
    ]


def graph_attributes(cls: type[nn.Module]) -> frozenset[str]:
    """Return the attributes that describe the graph of a module that ``torch.fx`` made."""
    return _GRAPH_ATTRIBUTES if issubclass(cls, fx.GraphModule) else frozenset()


def may_refer(value: Any) -> bool:
    """Return whether ``value`` may refer to a module of the tree, or to an object of all calls."""
    return isinstance(value, types.FunctionType) or not is_immutable(value)


def is_immutable(value: Any) -> bool:
    """Return whether no call can change ``value``, so that all calls may share it."""
    if type(value) in _PLAIN:
        return True  # only for speed
    # Why not all(... for each in value): a class of its own may iterate in its own way, or raise.
    if isinstance(value, tuple):
        return all(map(is_immutable, tuple.__iter__(value)))
    if isinstance(value, frozenset):
        return all(map(is_immutable, frozenset.__iter__(value)))
    # Why by class: isinstance of a DeviceMesh reads an attribute of the object in torch 2.12.
    if issubclass(type(value), _IMMUTABLE):
        return True
    if dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen:  # type: ignore[union-attr]
        return all(is_immutable(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False
