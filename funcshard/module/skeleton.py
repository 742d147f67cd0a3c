"""A module tree without its tensors, from which every call gets its own module objects.

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

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx, nn

from funcshard._utils import (
    LARGE,
    class_for_calls,
    late_copy,
    reachable,
    recording_or_transforming,
    state_names,
    storage_id,
    tree,
)
from funcshard.comm import Mesh
from funcshard.module.checks import check_module
from funcshard.module.rebinding import Rebinding, Rebindings, copied, rebind, references
from funcshard.module.template import (
    TABLES,
    TORCH_ATTRIBUTES,
    TORCH_CONTAINERS,
    attributes_to_follow,
    graph_attributes,
    is_immutable,
    make_template,
    may_refer,
)
from funcshard.module.walking import ModuleTree, walk

Entry = TypeVar("Entry", str, int)

# Why the modules of a call share these of torch's tables: an empty dictionary for each would double
# the time of a call. The tables that say how a hook is called have the numbers of hooks as keys,
# and these are unique. The others are about state dicts, for which a call has no use. No call
# shares a table with another call.
_SHARED_TABLES = tuple(
    (key, kind)
    for key, kind in TORCH_CONTAINERS.items()
    if key
    not in (
        *TABLES,
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    )
)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSpec:
    """One module of a skeleton.

    Attributes:
        cls: its class.
        attributes: its attributes, except for the three tables below and torch's empty tables.
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
        hook_tables: the same for tables of hooks that are functions; a call copies the table alone.
        parameters: name of each parameter -> all names under which the tree holds it, its own
            first.
        frozen: the parameters that required no gradient when the skeleton was made.
        shapes: name of each parameter -> its shape.
        buffers: name of each buffer -> all names under which the tree holds it, its own first.
        persistent: those names of buffers that the module's state dict contains.
        state_names: the names of the module's state dict, in its order.
        rebindings: the functions in copied attributes that captured modules or tensors of the tree,
            and their bound methods.
        shared: the objects in copied attributes that all calls share.
        large: large tensors in copied attributes, whose copies share memory until they are written.
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
    hook_tables: tuple[tuple[int, str], ...] = ()
    rebindings: Rebindings = ()
    shared: tuple[Any, ...] = ()
    large: tuple[torch.Tensor, ...] = ()

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
        # Why all keys beforehand, and each line by itself: it takes less time, and these lines run
        # for every module of every call.
        begin = {**dict.fromkeys(TORCH_ATTRIBUTES), **{key: kind() for key, kind in _SHARED_TABLES}}
        set_state = object.__setattr__  # that of nn.Module takes longer
        for spec, module in zip(self.specs, modules, strict=True):
            state = begin.copy()
            state["_forward_hooks"] = OrderedDict()
            state["_forward_pre_hooks"] = OrderedDict()
            state["_backward_hooks"] = OrderedDict()
            state["_backward_pre_hooks"] = OrderedDict()
            state.update(spec.attributes)
            own_parameters, own_buffers, children = spec.parameters, spec.buffers, spec.children
            state["_parameters"] = (
                {k: v if v is None else parameters[v] for k, v in own_parameters.items()}
                if own_parameters
                else {}
            )
            state["_buffers"] = (
                {k: v if v is None else buffers[v] for k, v in own_buffers.items()}
                if own_buffers
                else {}
            )
            state["_modules"] = (
                {k: v if v is None else modules[v] for k, v in children.items()} if children else {}
            )
            if training is not None:
                state["training"] = training
            set_state(module, "__dict__", state)
        for index, name in self.hook_tables:
            modules[index].__dict__[name] = self.specs[index].attributes[name].copy()
        if self.copied_attributes:
            # Why this memo: deepcopy follows an attribute to the template's modules and empty
            # tensors, and the memo makes the copy refer to the call's modules and tensors instead.
            memo: dict[int, Any] = {
                old: modules[index] for old, index in self.module_indices.items()
            }
            memo.update(
                (old, parameters[name] if name in parameters else buffers[name])
                for old, name in self.tensor_names.items()
            )
            memo.update((id(value), value) for value in self.shared)
            if self.large and not recording_or_transforming():
                memo.update((id(tensor), late_copy(tensor)) for tensor in self.large)
            # An attribute may be the handle of a hook, which refers to the hook's table.
            memo.update(
                (id(self.specs[i].attributes[k]), modules[i].__dict__[k])
                for i, k in self.hook_tables
            )
            memo, functions = rebind(self.rebindings, memo)
            for index, name in self.copied_attributes:
                modules[index].__dict__[name] = copied(self.specs[index].attributes[name], memo)
            for rebinding, function in functions:
                rebinding.fill(function, memo)
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
        first_paths: dict[int, str] = {}

        def visit(index: int, path: str) -> None:
            if index not in first_paths:
                first_paths[index] = path
                for key, child in self.specs[index].children.items():
                    if child is not None:
                        visit(child, f"{path}.{key}" if path else key)

        visit(0, "")
        return {path: index for index, path in first_paths.items()}

    def classes(self, name: str) -> tuple[type[nn.Module], ...]:
        """Return the classes of the modules that contain a parameter or buffer, the root first."""
        indices = [self.find(path) for path in tree.upwards(name.rpartition(".")[0])]
        return tuple([self.specs[index].cls for index in reversed(indices) if index is not None])


def make_skeleton(
    module: nn.Module,
) -> tuple[Skeleton, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Split ``module`` into a skeleton, its parameters and its buffers.

    None of them shares memory with ``module``.

    Returns:
        ``(skeleton, parameters, buffers)``; the two dictionaries hold each tensor once, under its
        first name.

    Raises:
        TypeError: an attribute refers to a module of the tree in a way that copying does not
            follow.
    """
    modules = walk(module)
    check_module(modules)
    template, tensor_names = make_template(modules)
    indices = {id(m): index for index, m in enumerate(template)}
    specs = tuple([_spec(m, tensor_names, indices) for m in template])
    attributes = [
        (index, key, value)
        for index, m in enumerate(template)
        for key, value in attributes_to_follow(m)
    ]
    # Why not torch's own: a hook may refer to any module that its user likes.
    own_attributes = [
        (index, key, value)
        for index, key, value in attributes
        if key not in TORCH_ATTRIBUTES and key not in graph_attributes(specs[index].cls)
    ]
    rebindings, shared = references(
        (value for _, _, value in own_attributes if may_refer(value)),
        indices.keys() | tensor_names.keys(),
    )
    rebound = {id(r.function) for r in rebindings if isinstance(r, Rebinding)}
    every = list(module.named_modules(remove_duplicate=False))
    in_state_dict = state_names(module, every, {type(m) for _, m in modules.modules})
    buffer_names = {name for names in modules.buffer_names.values() for name in names}
    parameters = modules.parameters
    skeleton = Skeleton(
        template=template[0],
        specs=specs,
        module_indices=indices,
        tensor_names=tensor_names,
        copied_attributes=tuple(
            [
                (index, key)
                for index, key, value in attributes
                if id(value) in rebound or _needs_copy(specs[index].cls, key, value)
            ]
        ),
        hook_tables=tuple(
            [(index, key) for index, key, value in attributes if _is_plain_table(key, value)]
        ),
        parameters=modules.parameter_names,
        frozen=frozenset([name for name, p in parameters.items() if not p.requires_grad]),
        shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        buffers=modules.buffer_names,
        persistent=frozenset(buffer_names & {*in_state_dict}),
        state_names=in_state_dict,
        rebindings=rebindings,
        shared=shared,
        large=_large_tensors(value for _, _, value in own_attributes),
    )
    _check_copies(skeleton, modules, own_attributes)
    copies = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in parameters.items()}
    return skeleton, copies, {n: b.detach().clone() for n, b in modules.buffers.items()}


def _spec(
    m: nn.Module, tensor_names: Mapping[int, str], module_indices: Mapping[int, int]
) -> ModuleSpec:
    """Return a module of a template as data."""
    parameters, buffers, children = [m.__dict__[key] for key in TABLES]
    return ModuleSpec(
        cls=class_for_calls(m),
        attributes={
            key: value
            for key, value in m.__dict__.items()
            if key not in TABLES and (key not in TORCH_CONTAINERS or value)
        },
        parameters={key: _look_up(value, tensor_names) for key, value in parameters.items()},
        buffers={key: _look_up(value, tensor_names) for key, value in buffers.items()},
        children={key: _look_up(value, module_indices) for key, value in children.items()},
    )


def _look_up(value: Any, by_id: Mapping[int, Entry]) -> Entry | None:
    """Return what represents an entry of a table, which may be ``None``."""
    return None if value is None else by_id[id(value)]


def _restored(values: dict[str, Any]) -> Skeleton:
    """Return a skeleton that was pickled."""
    unique = [m for _, m in walk(values["template"]).modules]
    module_indices = {id(m): index for index, m in enumerate(unique)}
    tensor_names = {}
    for spec, m in zip(values["specs"], unique, strict=True):
        for tensors, names in ((m._parameters, spec.parameters), (m._buffers, spec.buffers)):
            tensor_names.update(
                {id(tensors[key]): name for key, name in names.items() if name is not None}
            )
    return Skeleton(**values | {"module_indices": module_indices, "tensor_names": tensor_names})


def _needs_copy(cls: type[nn.Module], key: str, value: Any) -> bool:
    """Return whether each call needs its own copy of an attribute of a module of class ``cls``."""
    if key in graph_attributes(cls):
        return False
    if key in TORCH_CONTAINERS:
        return not _is_plain_table(key, value)
    if issubclass(cls, fx.GraphModule):
        # Why fewer copies: the code of a graph assigns no attribute, so calls can share them. The
        # exceptions are one that refers to a module of the tree, and a tensor to which the graph
        # may write.
        kinds = (nn.Module, torch.Tensor)
        return not is_immutable(value) and any(
            isinstance(inner, kinds) for inner in reachable(value)
        )
    return not is_immutable(value)


def _is_plain_table(key: str, value: Any) -> bool:
    """Return whether an attribute is one of torch's tables, and holds no object with a state."""
    if key not in TORCH_CONTAINERS:
        return False
    return all(map(is_immutable, value.values() if isinstance(value, dict) else value))


def _large_tensors(values: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    """Return the large plain tensors among attributes, and inside their lists and dictionaries."""
    tensors: dict[int, torch.Tensor] = {}
    for value in values:
        items: Iterable[Any] = (value,)
        if type(value) is dict:
            items = value.values()
        elif type(value) in (list, tuple):
            items = value
        tensors.update(
            (id(item), item)
            for item in items
            if type(item) is torch.Tensor and item.layout is torch.strided
        )
    # Note: of views, deepcopy copies the memory once.
    storages = Counter(map(storage_id, tensors.values()))
    return tuple(
        [
            tensor
            for tensor in tensors.values()
            if tensor.numel() >= LARGE
            and not (tensor.requires_grad or vars(tensor))
            and storages[storage_id(tensor)] == 1
        ]
    )


def _check_copies(
    skeleton: Skeleton, modules: ModuleTree, attributes: list[tuple[int, str, Any]]
) -> None:
    """Raise if an attribute copied for a call would still lead to a module outside the call.

    Arguments:
        skeleton: the skeleton.
        modules: the modules that it was made of.
        attributes: index of a module, name and value of the attributes to look at.
    """
    if not attributes:
        return
    foreign = {*skeleton.module_indices, *map(id, modules.parameters.values())}
    foreign |= {id(m) for _, m in modules.modules}
    memo: dict[int, Any] = dict.fromkeys(skeleton.module_indices, nn.Identity())
    memo |= dict.fromkeys(skeleton.tensor_names, torch.empty(0, dtype=torch.float32, device="cpu"))
    memo.update((id(value), value) for value in skeleton.shared)
    memo, functions = rebind(skeleton.rebindings, memo)
    for rebinding, function in functions:
        rebinding.fill(function, memo)
    for index, key, value in attributes:
        if isinstance(value, Mesh):
            continue
        trial = copied(value, memo)
        if not any(id(inner) in foreign for inner in reachable(trial)):
            continue
        paths = {module_index: path for path, module_index in skeleton.paths().items()}
        raise TypeError(
            f"attribute {key!r} of module {paths[index] or '(root)'!r} refers to a module or "
            "parameter of the model in a way that copying does not follow (a global variable, a "
            "weak reference), so calls would always use that module's own parameters; store the "
            "module itself, or bind a method, as in types.MethodType(function, module)"
        )
