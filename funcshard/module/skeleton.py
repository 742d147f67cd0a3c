"""A module tree without its tensors, from which every call gets module objects of its own.

``torch.func.functional_call`` swaps tensors into one shared module and out again.
``make_functional`` does not. A ``Skeleton`` keeps the class, the attributes and the table entries
of each module, and every call builds new module objects from it, with the call's tensors in their
tables. The reasons:

- Threads: simulated ranks are threads, and the tensors of one rank must not show up in the forward
  of another.
- Nested calls: a loss that calls the same function again does not overwrite the tensors of the
  outer call.
- Recomputation: activation checkpointing runs parts of forward again during backward, after the
  call has returned. The closure that recomputes still holds the call's modules, tensors included.
- Purity: a forward that changes its module (a counter, a cache, a buffer) changes the objects of
  the call only.
- Host time: building the objects takes less time than swapping the tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import pathlib
import re
import types
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh

from funcshard._utils import reachable
from funcshard.comm import Mesh
from funcshard.module.checks import check_module
from funcshard.module.rebinding import Rebinding, copied, rebind, references
from funcshard.module.walking import named_modules, named_tensors

__all__ = ["ModuleSpec", "Skeleton", "make_skeleton", "with_method", "with_methods"]

_TABLES = ("_parameters", "_buffers", "_modules")
_TORCH_ATTRIBUTES = frozenset(nn.Module().__dict__)  # hooks, tables, the training flag
_GRAPH_ATTRIBUTES = frozenset(fx.GraphModule({}, fx.Graph()).__dict__) - _TORCH_ATTRIBUTES  # the graph, its code


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSpec:
    """One module of a skeleton.

    Attributes:
        cls: its class.
        attributes: its attributes, except for the three tables below.
        parameters: key in its parameter table -> name of the parameter in the model.
        buffers: key in its buffer table -> name of the buffer in the model.
        children: key in its module table -> index of the child in ``Skeleton.specs``.
    """

    cls: type[nn.Module]
    attributes: dict[str, Any]
    parameters: dict[str, str | None]
    buffers: dict[str, str | None]
    children: dict[str, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """A module tree without its tensors; ``instantiate`` builds the tree of one call.

    Attributes:
        template: a copy of the module tree in which empty tensors replace parameters and buffers;
            it never runs.
        specs: the modules of the tree, each once, parents first.
        module_indices: id of each module of the template -> its index in ``specs``.
        tensor_names: id of each empty tensor of the template -> name of the parameter or buffer.
        copied_attributes: (index of a module, name of an attribute) for the attributes that are
            copied for each call, because the call could change them or because they lead to a
            module or tensor of the tree.
        parameters: name of each parameter -> all names under which the tree holds it, its own
            first.
        frozen: the parameters that required no gradient when the skeleton was made.
        shapes: name of each parameter -> its shape.
        buffers: name of each buffer -> all names under which the tree holds it, its own first.
        persistent: those names of buffers that the module's state dict contains.
        state_names: the names of the module's state dict, in its order.
        rebindings: the functions in copied attributes that captured modules or tensors of the tree.
        shared: the objects in copied attributes that all calls share.
    """

    template: nn.Module
    specs: tuple[ModuleSpec, ...]
    module_indices: dict[int, int]
    tensor_names: dict[int, str]
    copied_attributes: tuple[tuple[int, str], ...]
    parameters: dict[str, tuple[str, ...]]
    frozen: frozenset[str]
    shapes: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[str, ...]]
    persistent: frozenset[str]
    state_names: tuple[str, ...]
    rebindings: tuple[Rebinding, ...] = ()
    shared: tuple[Any, ...] = ()

    def instantiate(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        *,
        training: bool | None = None,
    ) -> list[nn.Module]:
        """Return the modules of a new tree with the given tensors, in the order of ``specs``.

        Arguments:
            parameters: a tensor for every name in ``self.parameters``.
            buffers: a tensor for every name in ``self.buffers``.
            training: the training flag of every module; ``None`` keeps the flag that each module
                had.
        """
        # Why not cls.__new__: that of torch.fx.GraphModule returns an object of another class.
        modules: list[nn.Module] = [object.__new__(spec.cls) for spec in self.specs]
        for spec, module in zip(self.specs, modules, strict=True):
            state = module.__dict__
            state.update(spec.attributes)
            state["_parameters"] = {k: v if v is None else parameters[v] for k, v in spec.parameters.items()}
            state["_buffers"] = {k: v if v is None else buffers[v] for k, v in spec.buffers.items()}
            state["_modules"] = {k: v if v is None else modules[v] for k, v in spec.children.items()}
            if training is not None:
                state["training"] = training
        if self.copied_attributes:
            # Why this memo: deepcopy follows an attribute to the template's modules and empty
            # tensors, and the memo makes the copy refer to the call's modules and tensors instead.
            memo: dict[int, Any] = {old: modules[index] for old, index in self.module_indices.items()}
            memo.update(
                (old, parameters[name] if name in parameters else buffers[name]) for old, name in self.tensor_names.items()
            )
            memo.update((id(each), each) for each in self.shared)
            made = rebind(self.rebindings, memo)
            for index, name in self.copied_attributes:
                modules[index].__dict__[name] = copied(self.specs[index].attributes[name], memo)
            for each, function in made:
                each.fill(function, memo)
        return modules

    def __reduce__(self) -> tuple[Any, ...]:
        # Why: the ids of a copy's modules and tensors are others.
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _restored, (values | {"module_indices": {}, "tensor_names": {}},)

    def find(self, path: str) -> int | None:
        """Return the index of the module at a dotted ``path``; ``None`` if no module is there."""
        index: int | None = 0
        for name in path.split(".") if path else ():
            index = None if index is None else self.specs[index].children.get(name)
        return index

    def paths(self) -> dict[str, int]:
        """Return the index of every module by its path, or its first path if it is shared."""
        found: dict[str, int] = {}
        seen: set[int] = set()

        def visit(index: int, path: str) -> None:
            if index not in seen:
                seen.add(index)
                found[path] = index
                for key, child in self.specs[index].children.items():
                    if child is not None:
                        visit(child, f"{path}.{key}" if path else key)

        visit(0, "")
        return found

    def classes(self, name: str) -> tuple[type[nn.Module], ...]:
        """Return the classes of the modules that contain a parameter or buffer, the root first."""
        index: int | None = 0
        found = [self.specs[0].cls]
        for key in name.split(".")[:-1]:
            index = self.specs[index or 0].children[key]
            assert index is not None, f"no module contains {name}"
            found.append(self.specs[index].cls)
        return tuple(found)


def make_skeleton(module: nn.Module) -> tuple[Skeleton, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split ``module`` into a skeleton, its parameters and its buffers.

    None of them shares memory with ``module``.

    Returns:
        ``(skeleton, parameters, buffers)``; the two dictionaries hold each tensor once, under its
        first name.

    Raises:
        TypeError: an attribute refers to a module of the tree in a way that copying does not
            follow.
    """
    check_module(module)
    modules, every = named_modules(module), named_modules(module, unique=False)
    named_parameters = dict(named_tensors(module, "parameters", modules))
    named_buffers = dict(named_tensors(module, "buffers", modules))
    template, tensor_names = _make_template(module, {**named_parameters, **named_buffers})
    unique, module_indices = _numbered(template)

    def table(entries: Mapping[str, Any], known: Mapping[int, Any]) -> dict[str, Any]:
        return {key: None if value is None else known[id(value)] for key, value in entries.items()}

    specs = tuple(
        ModuleSpec(
            type(m),
            {key: value for key, value in m.__dict__.items() if key not in _TABLES},
            table(m._parameters, tensor_names),
            table(m._buffers, tensor_names),
            table(m._modules, module_indices),
        )
        for m in unique
    )
    buffers = _all_names(named_buffers, named_tensors(module, "buffers", every, unique=False))
    of_tree = module_indices.keys() | tensor_names.keys()
    attributes = [
        (index, key, value)
        for index, spec in enumerate(specs)
        for key, value in spec.attributes.items()
        if not _refers_to_nothing(key, value)
    ]
    own = [
        value
        for index, key, value in attributes
        if key not in _TORCH_ATTRIBUTES and key not in _graph_attributes(specs[index].cls)
    ]
    rebindings, shared = references(filter(_may_refer, own), of_tree)
    rebound = {id(each.function) for each in rebindings}
    in_state_dict = module.state_dict(keep_vars=True).keys()
    skeleton = Skeleton(
        template=template,
        specs=specs,
        module_indices=module_indices,
        tensor_names=tensor_names,
        copied_attributes=tuple(
            (index, key)
            for index, key, value in attributes
            if id(value) in rebound or _needs_copy(specs[index].cls, key, value)
        ),
        parameters=_all_names(named_parameters, named_tensors(module, "parameters", every, unique=False)),
        frozen=frozenset(name for name, parameter in named_parameters.items() if not parameter.requires_grad),
        shapes={name: tuple(parameter.shape) for name, parameter in named_parameters.items()},
        buffers=buffers,
        persistent=frozenset(name for names in buffers.values() for name in names if name in in_state_dict),
        state_names=tuple(in_state_dict),
        rebindings=rebindings,
        shared=shared,
    )
    _check_copies(skeleton, module)
    parameters = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in named_parameters.items()}
    return skeleton, parameters, {n: b.detach().clone() for n, b in named_buffers.items()}


def _restored(values: dict[str, Any]) -> Skeleton:
    """Return a skeleton that was pickled."""
    unique, module_indices = _numbered(values["template"])
    tensor_names = {}
    for spec, m in zip(values["specs"], unique, strict=True):
        for tensors, names in ((m._parameters, spec.parameters), (m._buffers, spec.buffers)):
            tensor_names.update({id(tensors[key]): name for key, name in names.items() if name is not None})
    return Skeleton(**values | {"module_indices": module_indices, "tensor_names": tensor_names})


def _make_template(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[nn.Module, dict[int, str]]:
    """Return a copy of the module with empty tensors, and the names of these tensors by id."""
    memo: dict[int, Any] = {}
    tensor_names: dict[int, str] = {}
    for name, tensor in tensors.items():
        empty = torch.empty(0, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        tensor_names[id(memo[id(tensor)])] = name
    own: list[Any] = []
    modules = [m for _, m in named_modules(module)]
    for m in modules:
        graph = _graph_attributes(type(m))
        for key, value in m.__dict__.items():
            if _refers_to_nothing(key, value):
                continue
            if key not in _TORCH_ATTRIBUTES and key not in graph and _may_refer(value):
                own.append(value)
            if key in _TABLES or key in graph or _is_immutable(value):
                continue
            for found in reachable(value):
                # Why a clone: an earlier forward may have kept a tensor that has a graph, which
                # deepcopy refuses.
                if isinstance(found, torch.Tensor) and found.grad_fn is not None:
                    memo[id(found)] = found.detach().clone()
    of_tree = {id(m) for m in modules} | {id(tensor) for tensor in tensors.values()}
    rebindings, shared = references(own, of_tree)
    memo.update((id(each), each) for each in shared)
    made = rebind(rebindings, memo)
    _copy_graph_modules(modules, memo)
    _copy_plain_modules(modules, memo)
    template = copy.deepcopy(module, memo)
    for each, function in made:
        each.fill(function, memo)
    for _, m in named_modules(template):
        state = m.__dict__
        functions = [key for key, value in state.items() if isinstance(value, types.FunctionType) and id(value) in memo]
        state.update({key: copied(state[key], memo) for key in functions})
    return template, tensor_names


def _numbered(template: nn.Module) -> tuple[list[nn.Module], dict[int, int]]:
    """Return the modules of a template in the order of ``specs``, and their indices by id."""
    unique = [m for _, m in named_modules(template)]
    return unique, {id(m): index for index, m in enumerate(unique)}


def _copy_graph_modules(modules: Sequence[nn.Module], memo: dict[int, Any]) -> None:
    """Put copies of the modules that ``torch.fx`` or ``torch.export`` made into ``memo``.

    ``GraphModule.__deepcopy__`` loses attributes and compiles the graph again. The copies share the
    graph, which no call changes.
    """
    found = [m for m in modules if isinstance(m, fx.GraphModule)]
    for m in found:
        # Why a class of its own: when the module's graph is edited, the forward of its class is
        # replaced.
        cls = type(m)
        memo[id(m)] = object.__new__(with_method(cls, "forward", cls.forward))
    for m in found:
        shared = _graph_attributes(type(m))
        memo[id(m)].__dict__.update(
            {key: value if key in shared else copy.deepcopy(value, memo) for key, value in m.__dict__.items()}
        )


def _copy_plain_modules(modules: Sequence[nn.Module], memo: dict[int, Any]) -> None:
    """Put copies of all modules into ``memo`` if none of them says itself how it is copied.

    ``copy.deepcopy`` makes the same copies, but takes longer, mostly for the dozen empty tables of
    hooks that every module has.
    """
    if not all(map(_is_copied_as_usual, {type(m) for m in modules})):
        return
    states: list[tuple[nn.Module, dict[str, Any], list[tuple[str, Any]]]] = []
    for m in modules:
        memo[id(m)] = object.__new__(type(m))
        new: dict[str, Any] = {}
        rest: list[tuple[str, Any]] = []
        for key, value in m.__getstate__().items():
            kind = type(value)
            new[key] = value
            if kind in _PLAIN:
                continue
            if kind in _CONTAINERS and key in _TORCH_ATTRIBUTES and (key in _TABLES or not value):
                # Why at once: the handle of a hook, in any attribute, refers to its table.
                memo[id(value)] = new[key] = kind()
            if new[key] is value or value:
                rest.append((key, value))
        states.append((m, new, rest))
    for m, new, rest in states:
        for key, value in rest:
            if key in _TABLES and new[key] is not value:
                new[key].update((k, memo[id(v)] if id(v) in memo else copy.deepcopy(v, memo)) for k, v in value.items())
            else:
                new[key] = copy.deepcopy(value, memo)
        memo[id(m)].__setstate__(new)


def _is_copied_as_usual(cls: type[nn.Module]) -> bool:
    """Return whether ``copy.deepcopy`` copies the attributes of such a module, and nothing else."""
    usual: dict[str, Any] = {
        "__new__": object.__new__,
        "__reduce_ex__": object.__reduce_ex__,
        "__reduce__": object.__reduce__,
        "__getstate__": nn.Module.__getstate__,
        "__setstate__": nn.Module.__setstate__,
    }
    slots = any(base.__dict__.get("__slots__") for base in cls.__mro__)
    return not slots and not hasattr(cls, "__deepcopy__") and all(getattr(cls, n) is each for n, each in usual.items())


def with_method(cls: type[nn.Module], name: str, method: Any) -> type[nn.Module]:
    """Return a subclass of ``cls``, under the same name, with ``method`` as its method ``name``."""
    return with_methods(cls, {name: method})


def with_methods(cls: type[nn.Module], methods: Mapping[str, Any]) -> type[nn.Module]:
    """Return a subclass of ``cls``, under the same name, with ``methods``."""
    return type(cls.__name__, (cls,), {**methods, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


def _graph_attributes(cls: type[nn.Module]) -> frozenset[str]:
    """Return the attributes that describe the graph of a module that ``torch.fx`` made."""
    return _GRAPH_ATTRIBUTES if issubclass(cls, fx.GraphModule) else frozenset()


def _all_names(unique: Mapping[str, torch.Tensor], every: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    """Return all names of each tensor in ``unique``, by its name there."""
    first = {id(tensor): name for name, tensor in unique.items()}
    found: dict[str, list[str]] = {name: [] for name in unique}
    for name, tensor in every:
        found[first[id(tensor)]].append(name)
    return {name: tuple(names) for name, names in found.items()}


def _needs_copy(cls: type[nn.Module], key: str, value: Any) -> bool:
    """Return whether each call needs its own copy of an attribute of a module of class ``cls``."""
    if key in _graph_attributes(cls):
        return False
    if key in _TORCH_ATTRIBUTES or issubclass(cls, fx.GraphModule):
        # Why fewer copies: torch's own tables change only when a hook is added, and the code of a
        # graph assigns no attribute, so calls can share them. The exceptions are a hook that refers
        # to a module of the tree, such as a bound method, and a tensor to which a graph may write.
        kinds = (nn.Module,) if key in _TORCH_ATTRIBUTES else (nn.Module, torch.Tensor)
        return bool(value) and not _is_immutable(value) and any(isinstance(each, kinds) for each in reachable(value))
    return not _is_immutable(value)


_PLAIN = frozenset({type(None), bool, int, float, str})
_CONTAINERS = frozenset({dict, OrderedDict, set})
_IMMUTABLE = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, pathlib.PurePath, re.Pattern),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, Mesh, DeviceMesh),
)


def _refers_to_nothing(key: str, value: Any) -> bool:
    """Return whether an attribute is a plain value or an empty table of torch; only for speed."""
    kind = type(value)
    return kind in _PLAIN or (kind in _CONTAINERS and not value and key in _TORCH_ATTRIBUTES)


def _may_refer(value: Any) -> bool:
    """Return whether ``value`` may refer to a module of the tree, or to an object of all calls."""
    return isinstance(value, types.FunctionType) or not _is_immutable(value)


def _is_immutable(value: Any) -> bool:
    """Return whether no call can change ``value``, so that all calls may share it."""
    if type(value) in _PLAIN:
        return True  # only for speed
    if isinstance(value, (tuple, frozenset)):
        return all(_is_immutable(each) for each in value)
    if isinstance(value, _IMMUTABLE):
        return True
    if dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen:  # type: ignore[union-attr]
        return all(_is_immutable(getattr(value, field.name)) for field in dataclasses.fields(value))
    return False


def _check_copies(skeleton: Skeleton, module: nn.Module) -> None:
    """Raise if an attribute copied for a call would still lead to a module outside the call."""
    modules = named_modules(module)
    tensors = [tensor for _, tensor in named_tensors(module, "parameters", modules)]
    foreign = skeleton.module_indices.keys() | {id(each) for _, each in modules} | {id(each) for each in tensors}
    memo: dict[int, Any] = dict.fromkeys(skeleton.module_indices, nn.Identity())
    memo |= dict.fromkeys(skeleton.tensor_names, torch.empty(0))
    memo.update((id(each), each) for each in skeleton.shared)
    for each, function in rebind(skeleton.rebindings, memo):
        each.fill(function, memo)
    for index, spec in enumerate(skeleton.specs):
        # Why not torch's own: a hook may refer to any module that its user likes.
        for key in spec.attributes.keys() - _TORCH_ATTRIBUTES - _graph_attributes(spec.cls):
            if type(spec.attributes[key]) in _PLAIN or isinstance(spec.attributes[key], Mesh):
                continue
            trial = copied(spec.attributes[key], memo)
            if not any(id(found) in foreign for found in reachable(trial)):
                continue
            paths = {number: path for path, number in skeleton.paths().items()}
            raise TypeError(
                f"attribute {key!r} of module {paths[index] or '(root)'!r} refers to a module or parameter of the "
                f"model in a way that copying does not follow (a global variable, a weak reference), so calls "
                f"would always use that module's own parameters; store the module itself, or bind a method, as in "
                f"types.MethodType(function, module)"
            )
