"""The template of a skeleton: a copy of a module tree in which empty tensors stand for all tensors.

``copy.deepcopy`` would make the same copy, if it could copy functions that captured modules, graphs
of ``torch.fx`` and tensors that have a graph, and it would take several times as long.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import pathlib
import re
import types
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from funcshard._utils import reachable
from funcshard.comm import Mesh
from funcshard.module.rebinding import copied, rebind, references
from funcshard.module.walking import ModuleTree, walk

TABLES = ("_parameters", "_buffers", "_modules")
TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__)  # hooks, tables, the training flag
TORCH_CONTAINERS = {
    key: type(value) for key, value in nn.Module().__dict__.items() if isinstance(value, dict | set)
}
# The graph and its code.
_GRAPH_ATTRIBUTES = frozenset(fx.GraphModule({}, fx.Graph()).__dict__) - TORCH_ATTRIBUTES
Attributes = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """A copy of a module tree in which empty tensors replace parameters and buffers.

    Attributes:
        modules: its modules, each once, parents first.
        attributes: the attributes of each module that may refer to something, as from
            ``attributes_to_follow``.
        tensor_names: id of each empty tensor -> first name of the parameter or buffer.
    """

    modules: list[nn.Module]
    attributes: list[Attributes]
    tensor_names: dict[int, str]


def make_template(tree: ModuleTree) -> Template:
    """Return the template of a tree."""
    memo: dict[int, Any] = {}
    tensor_names: dict[int, str] = {}
    empty = torch.empty(0, device="meta", dtype=torch.float32)
    for tensors in (tree.parameters, tree.buffers):
        for name, tensor in tensors.items():
            empty_tensor = (
                nn.Parameter(empty, requires_grad=False)
                if isinstance(tensor, nn.Parameter)
                else empty.detach()
            )
            memo[id(tensor)] = empty_tensor
            tensor_names[id(empty_tensor)] = name
    modules = [m for _, m in tree.modules]
    follow = [attributes_to_follow(m) for m in modules]
    captured: list[Any] = []
    mutable = False  # whether there is an attribute that a call may change
    for m, attributes in zip(modules, follow, strict=True):
        graph = graph_attributes(type(m)) if attributes else frozenset()
        for key, value in attributes:
            if key in graph:
                continue
            if key not in TORCH_ATTRIBUTES and may_refer(value):
                captured.append(value)
            if is_immutable(value):
                continue
            mutable = True
            for reached_value in reachable(value):
                # Why a clone: an earlier forward may have kept a tensor that has a graph, which
                # deepcopy refuses.
                if isinstance(reached_value, torch.Tensor) and reached_value.grad_fn is not None:
                    memo[id(reached_value)] = reached_value.detach().clone()
    of_tree = {id(m) for m in modules} | {
        id(tensor) for ts in (tree.parameters, tree.buffers) for tensor in ts.values()
    }
    rebindings, shared = references(captured, of_tree)
    memo.update((id(shared_value), shared_value) for shared_value in shared)
    memo, made_functions = rebind(rebindings, memo)
    _copy_by_attributes(modules, memo)
    plain = all(map(_is_copied_as_usual, tree.classes))
    if plain:
        copies = _copy_plain_modules(modules, follow, memo, handles=mutable)
    else:
        root = copy.deepcopy(modules[0], memo)
        copies = []
    for rebinding, function in made_functions:
        rebinding.fill(function, memo)
    if not copies:
        copies = [m for _, m in walk(root).modules]
    for m in copies if made_functions else ():
        state = m.__dict__
        functions = [
            key
            for key, value in state.items()
            if isinstance(value, types.FunctionType) and id(value) in memo
        ]
        state.update({key: copied(state[key], memo) for key in functions})
    if plain:  # the copies have the same keys
        copied_attributes = [
            [(key, m.__dict__[key]) for key, _ in module_attributes]
            for m, module_attributes in zip(copies, follow, strict=True)
        ]
    else:
        copied_attributes = [attributes_to_follow(m) for m in copies]
    return Template(copies, copied_attributes, tensor_names)


def _copy_by_attributes(modules: Sequence[nn.Module], memo: dict[int, Any]) -> None:
    """Put copies of modules of ``torch.fx``, and of those with another pickle, into ``memo``.

    ``GraphModule.__deepcopy__`` loses attributes and compiles the graph again. The copies share the
    graph, which no call changes. A pickle may make other children and other tensors, as that of
    e3nn's modules does.
    """
    copied_modules: list[nn.Module] = []
    # Why by class: a model has thousands of modules of a few classes.
    pickled = {
        cls
        for cls in set(map(type, modules))
        if _is_copied_as_usual(cls, pickled_as_usual=False) and not _is_copied_as_usual(cls)
    }
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
            copied_modules.append(m)
        elif cls in pickled and _can_copy_attributes(
            m, memo | {id(tree_module): tree_module for tree_module in modules}
        ):
            memo[id(m)] = object.__new__(cls)
            copied_modules.append(m)
    for m in copied_modules:
        shared = graph_attributes(type(m))
        memo[id(m)].__dict__.update(
            {
                key: value if key in shared else copy.deepcopy(value, memo)
                for key, value in m.__dict__.items()
            }
        )


def _copy_plain_modules(
    modules: Sequence[nn.Module],
    follow: Iterable[Attributes],
    memo: dict[int, Any],
    *,
    handles: bool,
) -> list[nn.Module]:
    """Put copies of all modules into ``memo``, and return them; see ``_is_copied_as_usual``.

    An attribute may hold the handle of a hook, which refers to a table of hooks, only with
    ``handles``.

    ``copy.deepcopy`` makes the same copies, but takes longer, mostly for the dozen empty tables of
    hooks that every module has.
    """
    copies: list[nn.Module] = []
    states: list[dict[str, Any]] = []
    for m in modules:
        own_state = m.__dict__
        state = dict(own_state)
        state.pop("_compiled_call_impl", None)  # torch compiled it for the module's own parameters
        for key in TORCH_CONTAINERS:
            value = own_state.get(key)
            value_type = type(value)
            if value_type in _CONTAINERS and (not value or key in TABLES):
                state[key] = table = value_type()
                if handles:
                    memo[id(value)] = table
        memo[id(m)] = new = object.__new__(type(m))
        copies.append(new)
        states.append(state)
    for m, new, state, attributes in zip(modules, copies, states, follow, strict=True):
        for key, value in attributes:
            state[key] = copy.deepcopy(value, memo)
        for key in TABLES:
            table = m.__dict__.get(key)
            if not table:
                continue
            if state[key] is table:  # a class of its own
                state[key] = copy.deepcopy(table, memo)
            else:
                state[key].update(
                    [
                        (k, memo[id(v)] if id(v) in memo else copy.deepcopy(v, memo))
                        for k, v in table.items()
                    ]
                )
        if state.keys() >= TORCH_ATTRIBUTES:
            object.__setattr__(new, "__dict__", state)  # that of nn.Module takes longer
        else:  # a module that an old version of torch made
            new.__setstate__(state)
    return copies


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


def _is_copied_as_usual(cls: type[nn.Module], *, pickled_as_usual: bool = True) -> bool:
    """Return whether ``copy.deepcopy`` copies the attributes of such a module, and nothing else.

    Without ``pickled_as_usual`` the module's ``__getstate__`` and ``__setstate__`` do not matter.
    """
    usual: dict[str, Any] = {
        "__new__": object.__new__,
        "__reduce_ex__": object.__reduce_ex__,
        "__reduce__": object.__reduce__,
    }
    if pickled_as_usual:
        usual |= {"__getstate__": nn.Module.__getstate__, "__setstate__": nn.Module.__setstate__}
    slots = any(base.__dict__.get("__slots__") for base in cls.__mro__)
    return (
        not slots
        and not hasattr(cls, "__deepcopy__")
        and all(getattr(cls, n) is usual_method for n, usual_method in usual.items())
    )


# --- attributes -----------------------------------------------------------------------------------


_PLAIN = frozenset({type(None), bool, int, float, str})
_CONTAINERS = frozenset({dict, OrderedDict, set})
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


def attributes_to_follow(module: nn.Module) -> Attributes:
    """Return the attributes that may refer to something, without the tables of the tree.

    Plain values do not, and neither do the empty tables of hooks that every module has.
    """
    # Why in one expression: it runs for twenty attributes of every module.
    return [
        (key, value)
        for key, value in module.__dict__.items()
        if (key not in TORCH_ATTRIBUTES or value or type(value) not in _CONTAINERS)
        and (value_type := type(value)) not in _PLAIN
        and key not in TABLES
        and key != "_compiled_call_impl"
        and not (value_type is tuple and _is_plain(value))
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


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is a number, a text, ``None``, or a tuple of these."""
    value_type = type(value)
    return value_type in _PLAIN or (value_type is tuple and _PLAIN.issuperset(map(type, value)))
