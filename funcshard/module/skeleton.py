"""A module tree without its tensors, from which every call gets its own module objects.

``torch.func.functional_call`` swaps tensors into one shared module and out again. Every call of a
``Skeleton`` builds new module objects, with its tensors in their tables, which takes less time:

- Threads, such as simulated ranks, and nested calls don't see each other's tensors.
- Activation checkpointing, which runs parts of forward again later, still has the call's modules.
- A forward that changes its module (a counter, a cache, a buffer) changes the call's objects only.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx, nn

from funcshard._utils import tree
from funcshard._utils.closures import reachable
from funcshard._utils.tensors import check_plain
from funcshard._utils.torch_modules import LARGE, class_for_calls, late_copy
from funcshard._utils.torch_private import (
    callers_level,
    dispatch_modes,
    is_compiled_in_place,
    storage_id,
    transforms_active,
)
from funcshard.comm import Mesh
from funcshard.module.copying import (
    TABLES,
    TORCH_ATTRIBUTES,
    TORCH_CONTAINERS,
    NamedTensors,
    References,
    Tensors,
    attributes_to_follow,
    copied,
    is_immutable,
    make_template,
)

Names = dict[str, tuple[str, ...]]
Modules = Sequence[tuple[str, nn.Module]]  # path and module
Entry = TypeVar("Entry", str, int)

# Why the modules of a call share these of torch's tables: an empty dictionary for each would double
# the time of a call. The tables that say how a hook is called have the numbers of hooks as keys,
# and these are unique. The others are about state dicts, for which a call has no use. No call
# shares a table with another call.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SHARED_TABLES = tuple(
    (key, kind) for key, kind in TORCH_CONTAINERS.items() if key not in (*TABLES, *_HOOKS)
)


@dataclass(frozen=True, slots=True, eq=False)
class ModuleSpec:
    """One module of a skeleton.

    Attributes:
        path: its path, or its first path if it is shared.
        attributes: its attributes, except for the three tables below and torch's empty tables.
        parameters: key in its parameter table -> name of the parameter in the model.
        buffers: key in its buffer table -> name of the buffer in the model.
        children: key in its module table -> index of the child in ``Skeleton.specs``.
    """

    path: str
    cls: type[nn.Module]
    attributes: dict[str, Any]
    parameters: dict[str, str | None]
    buffers: dict[str, str | None]
    children: dict[str, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """A module tree without its tensors; ``instantiate`` builds the tree of one call.

    Attributes:
        modules: the template, a copy of the modules that never runs: each once, parents first.
        stand_ins: the empty tensor that the template holds for each parameter and buffer.
        indices: the index of each module, by all of its paths.
        copied_attributes: (index of a module, name) of the attributes that each call copies,
            because it could change them or they lead into the tree.
        hook_tables: the same for tables of hooks that are functions.
        large: large tensors in copied attributes, copied when they are written.
        parameters: name of each parameter -> all of its names, this one first.
        frozen: the parameters that required no gradient.
        buffers: the same for each buffer.
    """

    modules: tuple[nn.Module, ...]
    stand_ins: Tensors
    specs: tuple[ModuleSpec, ...]
    indices: dict[str, int]
    copied_attributes: tuple[tuple[int, str], ...]
    hook_tables: tuple[tuple[int, str], ...]
    references: References
    large: tuple[torch.Tensor, ...]
    parameters: Names
    shapes: dict[str, tuple[int, ...]]
    frozen: frozenset[str]
    buffers: Names
    state_names: tuple[str, ...]

    @property
    def template(self) -> nn.Module:
        """The root module of the template."""
        return self.modules[0]

    def instantiate(
        self,
        parameters: NamedTensors,
        buffers: NamedTensors,
        *,
        training: bool | None = None,
        tensor_copy: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> list[nn.Module]:
        """Return the modules of a new tree with these tensors, in the order of ``specs``.

        Arguments:
            training: the training flag of every module; ``None`` keeps each one's.
            tensor_copy: returns what attributes hold in place of a tensor; ``None`` copies it.
        """
        # Why not cls.__new__: that of torch.fx.GraphModule returns an object of another class.
        modules: list[nn.Module] = [object.__new__(spec.cls) for spec in self.specs]
        # Why all keys beforehand, and each line by itself: it takes less time, and these lines run
        # for every module of every call.
        empty_state = {
            **dict.fromkeys(TORCH_ATTRIBUTES),
            **{key: kind() for key, kind in _SHARED_TABLES},
        }
        set_state = object.__setattr__  # that of nn.Module takes longer
        for spec, module in zip(self.specs, modules, strict=True):
            state = empty_state.copy()
            state["_forward_hooks"] = OrderedDict()
            state["_forward_pre_hooks"] = OrderedDict()
            state["_backward_hooks"] = OrderedDict()
            state["_backward_pre_hooks"] = OrderedDict()
            state.update(spec.attributes)
            state["_parameters"] = own_parameters = {}
            state["_buffers"] = own_buffers = {}
            state["_modules"] = children = {}
            # Why loops: a comprehension is a call of its own in Python 3.11, and most tables are
            # empty.
            for key, name in spec.parameters.items():
                own_parameters[key] = None if name is None else parameters[name]
            for key, name in spec.buffers.items():
                own_buffers[key] = None if name is None else buffers[name]
            for key, index in spec.children.items():
                children[key] = None if index is None else modules[index]
            if training is not None:
                state["training"] = training
            set_state(module, "__dict__", state)
        for index, name in self.hook_tables:
            modules[index].__dict__[name] = self.specs[index].attributes[name].copy()
        # Why not always: most modules of torch have nothing to copy, and the memo takes time.
        if self.copied_attributes:
            self._copy_attributes(modules, {**buffers, **parameters}, tensor_copy)
        return modules

    def _copy_attributes(
        self,
        modules: list[nn.Module],
        tensors: NamedTensors,
        tensor_copy: Callable[[torch.Tensor], torch.Tensor] | None,
    ) -> None:
        # Why this memo: deepcopy follows an attribute to the template's modules and empty tensors,
        # and the memo makes the copy refer to the call's modules and tensors instead.
        memo: dict[int, Any] = dict(zip(map(id, self.modules), modules, strict=True))
        memo.update((id(stand_in), tensors[name]) for name, stand_in in self.stand_ins.items())
        # Why: deepcopy sets the storage of a new tensor, which no graph can hold. A lifted tensor
        # is a constant of the graph, as one that the forward makes by torch.tensor.
        if tensor_copy is None and dispatch_modes():
            tensor_copy = torch.ops.aten.lift_fresh_copy.default
        if tensor_copy is not None:
            memo.update((id(tensor), tensor_copy(tensor)) for tensor in self._attribute_tensors())
        elif self.large and not transforms_active():
            memo.update((id(tensor), late_copy(tensor)) for tensor in self.large)
        # An attribute may be the handle of a hook, which refers to the hook's table.
        memo.update(
            (id(self.specs[index].attributes[key]), modules[index].__dict__[key])
            for index, key in self.hook_tables
        )
        with self.references.in_memo(memo) as memo:
            for index, key in self.copied_attributes:
                modules[index].__dict__[key] = copied(self.specs[index].attributes[key], memo)

    def _attribute_tensors(self) -> list[torch.Tensor]:
        """Return the plain tensors to which copied attributes lead."""
        values = [self.specs[index].attributes[key] for index, key in self.copied_attributes]
        return _plain_tensors(values)

    def paths(self) -> dict[str, int]:
        """Return the index of every module by its first path."""
        return {spec.path: index for index, spec in enumerate(self.specs)}

    def classes(self, name: str) -> tuple[type[nn.Module], ...]:
        """Return the classes of the modules around a parameter or buffer, the root first."""
        outer_paths = list(tree.upwards(name.rpartition(".")[0]))
        return tuple([self.specs[self.indices[path]].cls for path in reversed(outer_paths)])


def make_skeleton(module: nn.Module) -> tuple[Skeleton, Tensors, Tensors]:
    """Split ``module`` into a skeleton and copies of its parameters and buffers.

    Returns:
        ``(skeleton, parameters, buffers)``, each tensor once, under its first name.
    """
    modules = list(module.named_modules())
    parameters, parameter_names = _by_name(module.named_parameters(remove_duplicate=False))
    buffers, buffer_names = _by_name(module.named_buffers(remove_duplicate=False))
    _check_module(modules, parameters, buffers)
    template_modules, stand_ins = make_template([m for _, m in modules], {**parameters, **buffers})
    module_indices = {id(m): index for index, m in enumerate(template_modules)}
    tensor_names = {id(stand_in): name for name, stand_in in stand_ins.items()}
    specs = tuple(
        [
            _spec(path, m, tensor_names, module_indices)
            for (path, _), m in zip(modules, template_modules, strict=True)
        ]
    )
    hook_tables: list[tuple[int, str]] = []
    copied_attributes: list[tuple[int, str]] = []
    own_attributes: list[tuple[int, str, Any]] = []
    for index, m in enumerate(template_modules):
        for key, value in attributes_to_follow(m):
            # Why torch's by themselves: a hook may refer to any module that its user likes.
            if key not in TORCH_CONTAINERS:
                own_attributes.append((index, key, value))
            elif _is_plain_table(value):
                hook_tables.append((index, key))
            else:
                copied_attributes.append((index, key))
    references = References.of(
        [value for _, _, value in own_attributes], module_indices.keys() | tensor_names.keys()
    )
    # Why these too: a function is immutable, but a call needs its own if it captured modules.
    captured_functions = {id(capture.function) for capture in references.captures}
    copied_attributes += [
        (index, key)
        for index, key, value in own_attributes
        if id(value) in captured_functions or _needs_copy(specs[index].cls, value)
    ]
    all_paths = list(module.named_modules(remove_duplicate=False))
    original_indices = {id(m): index for index, (_, m) in enumerate(modules)}
    skeleton = Skeleton(
        modules=tuple(template_modules),
        stand_ins=stand_ins,
        specs=specs,
        indices={path: original_indices[id(m)] for path, m in all_paths},
        copied_attributes=tuple(copied_attributes),
        hook_tables=tuple(hook_tables),
        references=references,
        large=_large_tensors(specs[index].attributes[key] for index, key in copied_attributes),
        parameters=parameter_names,
        shapes={name: tuple(parameter.shape) for name, parameter in parameters.items()},
        frozen=frozenset([name for name, p in parameters.items() if not p.requires_grad]),
        buffers=buffer_names,
        state_names=tuple(module.state_dict(keep_vars=True)),
    )
    new_parameters = {
        name: parameter.detach().clone().requires_grad_(parameter.requires_grad)
        for name, parameter in parameters.items()
    }
    new_buffers = {name: buffer.detach().clone() for name, buffer in buffers.items()}
    # Why a trial call: only what a copy leads to shows whether copying followed every reference.
    if own_attributes:
        originals = [*parameters.values(), *[m for _, m in modules], *template_modules]
        trial_modules = skeleton.instantiate(new_parameters, new_buffers)
        _check_copies(trial_modules, own_attributes, specs, {*map(id, originals)})
    return skeleton, new_parameters, new_buffers


def _by_name(tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[Tensors, Names]:
    first_names: dict[int, str] = {}
    by_name: Tensors = {}
    all_names: Names = {}
    for name, tensor in tensors:
        first_name = first_names.setdefault(id(tensor), name)
        by_name[first_name] = tensor
        all_names[first_name] = (*all_names.get(first_name, ()), name)
    return by_name, all_names


def _spec(
    path: str, m: nn.Module, tensor_names: Mapping[int, str], module_indices: Mapping[int, int]
) -> ModuleSpec:
    return ModuleSpec(
        path=path,
        cls=class_for_calls(m),
        attributes={
            key: value
            for key, value in m.__dict__.items()
            if key not in TABLES and (key not in TORCH_CONTAINERS or value)
        },
        parameters=_looked_up(m._parameters, tensor_names),
        buffers=_looked_up(m._buffers, tensor_names),
        children=_looked_up(m._modules, module_indices),
    )


def _looked_up(table: Mapping[str, Any], by_id: Mapping[int, Entry]) -> dict[str, Entry | None]:
    return {key: None if value is None else by_id[id(value)] for key, value in table.items()}


def _needs_copy(cls: type[nn.Module], value: Any) -> bool:
    if is_immutable(value):
        return False
    if not issubclass(cls, fx.GraphModule):
        return True
    # Why fewer copies: the code of a graph assigns no attribute, so calls can share them. The
    # exceptions are one that refers to a module of the tree, and a tensor to which the graph may
    # write.
    return any(isinstance(inner, (nn.Module, torch.Tensor)) for inner in reachable(value))


def _is_plain_table(table: Any) -> bool:
    return all(map(is_immutable, table.values() if isinstance(table, dict) else table))


def _large_tensors(values: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    """Return the large plain tensors to which attributes lead."""
    plain_tensors = _plain_tensors(values)
    # Note: of views, deepcopy copies the memory once.
    storage_counts = Counter(map(storage_id, plain_tensors))
    return tuple(
        [
            tensor
            for tensor in plain_tensors
            if tensor.numel() >= LARGE
            and not (tensor.requires_grad or vars(tensor))
            and storage_counts[storage_id(tensor)] == 1
        ]
    )


def _plain_tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    plain_tensors = {
        id(item): item
        for value in values
        for item in reachable(value)
        if type(item) is torch.Tensor and item.layout is torch.strided
    }
    return list(plain_tensors.values())


def _check_copies(
    modules: list[nn.Module],
    attributes: list[tuple[int, str, Any]],
    specs: tuple[ModuleSpec, ...],
    foreign: set[int],
) -> None:
    """Raise if an attribute of a call's modules leads to an object outside the call."""
    for index, key, value in attributes:
        call_value = modules[index].__dict__[key]
        if not isinstance(value, Mesh) and any(
            id(inner) in foreign for inner in reachable(call_value)
        ):
            raise TypeError(
                f"attribute {key!r} of module {specs[index].path or '(root)'!r} refers to a module "
                "or parameter of the model in a way that copying does not follow, e.g. a global "
                "variable or a weak reference: store the module itself, or bind "
                "types.MethodType(function, module)"
            )


# --- modules that cannot be functions -------------------------------------------------------------


_EXCHANGES = "which exchanges its parameters or gradients by itself"
_IN_PLACE = "fs.fully_shard takes its place"
_COMPILE = "pass compiler=torch.compile to fully_shard, which compiles the forward of each unit"


def _check_module(modules: Modules, parameters: NamedTensors, buffers: NamedTensors) -> None:
    """Raise, as ``make_functional`` says, unless the function of a tree of modules can be made."""
    for path, m in modules:
        reason = _why_refused(m)
        if reason is not None:
            raise TypeError(f"module {path or '(root)'!r} {reason}")
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.max_norm is not None:
            weight_name = f"{path}.weight".removeprefix(".")
            raise ValueError(
                f"module {path or '(root)'!r} ({type(m).__name__}) has max_norm={m.max_norm}, so "
                f"its forward writes to its parameter {weight_name!r}, which no pure function does: "
                "set max_norm to None, and rescale the weight between steps or by "
                "torch.nn.utils.parametrize"
            )
    for noun, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, tensor in tensors.items():
            if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
                raise ValueError(
                    f"{name!r} of a lazy module has no shape yet; run the module once on a sample "
                    "input first"
                )
            check_plain(tensor, f"{noun} {name!r}")
    compiled_path = next((path for path, m in modules if is_compiled_in_place(m)), None)
    if compiled_path is not None:
        warnings.warn(
            f"module {compiled_path or '(root)'!r} was compiled in place, and make_functional uses "
            f"its uncompiled forward: {_COMPILE}, or apply torch.compile to the function that "
            "make_functional returns",
            stacklevel=callers_level(),
        )


def _why_refused(m: nn.Module) -> str | None:
    """Return why a call could not give a module its tensors, and what to do."""
    cls = type(m)
    if issubclass(cls, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return f"is parallelized by {cls.__name__}, {_EXCHANGES}; use its .module: {_IN_PLACE}"
    # Why by name: an import of torch.distributed.fsdp or torch._dynamo takes a while.
    if any(base.__module__.startswith("torch.distributed.fsdp.") for base in cls.__mro__):
        return f"is parallelized by FSDP, {_EXCHANGES}; use the module without it: {_IN_PLACE}"
    # Note: module.compile(), which compiles in place, is no wrapper; it only warns.
    if cls.__name__ == "OptimizedModule" and "_orig_mod" in m._modules:
        return (
            "was wrapped by torch.compile, and the wrapper always runs the module that it wraps, "
            "with that module's own parameters; use the wrapped module itself, its _orig_mod, and "
            f"{_COMPILE}"
        )
    if cls.__module__ == "torch.export.unflatten":
        return (
            "was made by torch.export.unflatten, and such modules cannot be copied: use the "
            ".module() of the exported program, or the module that was exported"
        )
    if issubclass(cls, torch.jit.ScriptModule):
        return (
            "was made by torch.jit, which runs it with parameters of its own that no call can "
            "replace: use the module from which it was made, and pass compiler=torch.compile to "
            "fully_shard for speed; torch.jit.script the result of training"
        )
    return None
