"""What a module keeps besides its tensors and children: what calls may share, and what each call needs its own copy of.

A module without its tensors: made once, and brought to life for one call at a time.

``functional_call`` swaps tensors into one shared module and out again. Here every call gets module objects of its own
instead: a shallow copy of each module's attributes, with the call's tensors in place. That costs less than the
swapping, and what the call does to its modules (a counter, a cache, a buffer) stays in the call. Threads and nested calls
cannot disturb each other, and what outlives the call, such as a checkpoint that recomputes in backward, still finds its
tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import pathlib
import re
import types
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from funcshard._utils import callers_level, is_compiled_in_place, reachable

__all__ = ["Skeleton", "is_immutable", "make_skeleton", "reachable"]

_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type, enum.Enum, pathlib.PurePath, re.Pattern),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def is_immutable(value: Any) -> bool:
    """Whether no call can change ``value``, so that all of them may share it."""
    if isinstance(value, (tuple, frozenset)):
        return all(is_immutable(each) for each in value)
    if dataclasses.is_dataclass(value) and type(value).__dataclass_params__.frozen:  # type: ignore[union-attr]
        return all(is_immutable(getattr(value, field.name)) for field in dataclasses.fields(value))
    return isinstance(value, _ATOMS)


_TABLES = ("_parameters", "_buffers", "_modules")


_OWN = frozenset(nn.Module().__dict__)  # what torch itself keeps in a module: hooks, tables, the training flag


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One module: its class, its attributes, and what stands in its three tables (names of tensors, numbers of parts)."""

    cls: type[nn.Module]
    state: dict[str, Any]
    parameters: dict[str, str | None]
    buffers: dict[str, str | None]
    children: dict[str, int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """Every module of a tree, parents first; ``instantiate`` makes the tree for one call.

    Attributes:
        bare: the module tree itself, its tensors replaced by empty ones; never run.
        parts: its modules, each once.
        originals: ids of the bare module objects -> number of the part.
        stand_ins: ids of the empty tensors -> name of the parameter or buffer.
        copied: numbers of parts and names of attributes that each call gets a copy of, because it could change them, or
            because they lead to a module or tensor of the tree.
        parameters: name of each parameter -> the names of all places that it stands at, its own first.
        shapes: name of each parameter -> its shape.
        buffers: name of each buffer -> the names of all places that it stands at.
        persistent: those places of buffers that a state dict holds.
    """

    bare: nn.Module
    parts: tuple[_Part, ...]
    originals: dict[int, int]
    stand_ins: dict[int, str]
    copied: tuple[tuple[int, str], ...]
    parameters: dict[str, tuple[str, ...]]
    shapes: dict[str, tuple[int, ...]]
    buffers: dict[str, tuple[str, ...]]
    persistent: frozenset[str]

    def instantiate(
        self,
        parameters: Mapping[str, torch.Tensor],
        buffers: Mapping[str, torch.Tensor],
        *,
        training: bool | None = None,
    ) -> list[nn.Module]:
        """Return the modules of a new tree with these tensors, in the order of ``parts``, the root first.

        Arguments:
            parameters: a tensor for every name in ``self.parameters``.
            buffers: a tensor for every name in ``self.buffers``.
            training: the training flag of every module; ``None`` keeps each one's own.
        """
        modules: list[nn.Module] = [part.cls.__new__(part.cls) for part in self.parts]
        for part, module in zip(self.parts, modules, strict=True):
            state = module.__dict__
            state.update(part.state)
            state["_parameters"] = {k: v if v is None else parameters[v] for k, v in part.parameters.items()}
            state["_buffers"] = {k: v if v is None else buffers[v] for k, v in part.buffers.items()}
            state["_modules"] = {k: v if v is None else modules[v] for k, v in part.children.items()}
            if training is not None:
                state["training"] = training
        if self.copied:
            memo: dict[int, Any] = {old: modules[number] for old, number in self.originals.items()}
            memo.update(
                (old, parameters[name] if name in parameters else buffers[name]) for old, name in self.stand_ins.items()
            )
            for number, name in self.copied:
                modules[number].__dict__[name] = copy.deepcopy(self.parts[number].state[name], memo)
        return modules

    def find(self, path: str) -> int | None:
        """Number of the module at a dotted ``path``, ``None`` if there is no module there."""
        number: int | None = 0
        for name in path.split(".") if path else ():
            number = None if number is None else self.parts[number].children.get(name)
        return number

    def paths(self) -> dict[str, int]:
        """Every module's number by its first path, parents first."""
        return {path: self.originals[id(m)] for path, m in self.bare.named_modules()}

    def classes(self, place: str) -> tuple[type[nn.Module], ...]:
        """The classes of the modules on the way to a parameter or buffer, the root first."""
        number: int | None = 0
        found = [self.parts[0].cls]
        for name in place.split(".")[:-1]:
            number = self.parts[number or 0].children[name]
            assert number is not None, f"no module on the way to {place}"
            found.append(self.parts[number].cls)
        return tuple(found)


def make_skeleton(module: nn.Module) -> tuple[Skeleton, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Take ``module`` apart into a skeleton, its parameters and its buffers, none of which share memory with it.

    Returns:
        ``(skeleton, parameters, buffers)``; the two dictionaries hold each tensor once, under its first name.

    Raises:
        TypeError: an attribute holds on to a module of the tree by a way that no copy of it could follow.
        ValueError: a lazy module has not been initialised.
    """
    _check_initialised(module)
    _check_compiled(module)
    named_parameters = dict(module.named_parameters())
    named_buffers = dict(module.named_buffers())
    bare, stand_ins = _bare_copy(module, {**named_parameters, **named_buffers})
    unique = list(dict.fromkeys(bare.modules()))
    originals = {id(m): number for number, m in enumerate(unique)}

    def table(entries: Mapping[str, Any], known: Mapping[int, Any]) -> dict[str, Any]:
        return {key: None if value is None else known[id(value)] for key, value in entries.items()}

    parts = tuple(
        _Part(
            type(m),
            {key: value for key, value in m.__dict__.items() if key not in _TABLES},
            table(m._parameters, stand_ins),
            table(m._buffers, stand_ins),
            table(m._modules, originals),
        )
        for m in unique
    )
    buffers = _places(named_buffers, module.named_buffers(remove_duplicate=False))
    saved = module.state_dict(keep_vars=True).keys()
    skeleton = Skeleton(
        bare=bare,
        parts=parts,
        originals=originals,
        stand_ins=stand_ins,
        copied=tuple(
            (i, key) for i, part in enumerate(parts) for key, value in part.state.items() if _is_copied(key, value)
        ),
        parameters=_places(named_parameters, module.named_parameters(remove_duplicate=False)),
        shapes={name: tuple(parameter.shape) for name, parameter in named_parameters.items()},
        buffers=buffers,
        persistent=frozenset(place for places in buffers.values() for place in places if place in saved),
    )
    _check_copies(skeleton, module)
    parameters = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in named_parameters.items()}
    return skeleton, parameters, {n: b.detach().clone() for n, b in named_buffers.items()}


def _bare_copy(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[nn.Module, dict[int, str]]:
    """Copy a module with empty tensors in place of its parameters and buffers; return their ids and names besides."""
    memo: dict[int, Any] = {}
    stand_ins: dict[int, str] = {}
    for name, tensor in tensors.items():
        empty = torch.empty(0, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
        stand_ins[id(memo[id(tensor)])] = name
    for m in module.modules():
        for key, value in m.__dict__.items():
            if key in _TABLES or is_immutable(value):
                continue
            for found in reachable(value):  # what an earlier forward computed and kept; deepcopy refuses it
                if isinstance(found, torch.Tensor) and found.grad_fn is not None:
                    memo[id(found)] = found.detach().clone()
    return copy.deepcopy(module, memo), stand_ins


def _is_copied(key: str, value: Any) -> bool:
    if key in _OWN:  # torch's own tables change only when hooks are added; a hook may be bound to a module of the tree
        return bool(value) and not is_immutable(value) and any(isinstance(found, nn.Module) for found in reachable(value))
    return not is_immutable(value)


def _check_initialised(module: nn.Module) -> None:
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            raise ValueError(f"{name!r} of a lazy module has no shape yet; run the module once on a sample input first")


def _check_compiled(module: nn.Module) -> None:
    """Raise or warn where a call's own modules cannot be run as compiled, because that is bound to other ones."""
    remedy = "pass compiler=torch.compile to fully_shard, which compiles what units compute"
    for name, m in module.named_modules():
        if type(m).__name__ == "OptimizedModule" and "_orig_mod" in m._modules:  # its class is Dynamo's, not imported here
            raise TypeError(
                f"module {name or '(root)'!r} is what torch.compile made of another one, and would always run that one and "
                f"its parameters; put the module itself in its place, its _orig_mod, and {remedy}"
            )
    for name, m in module.named_modules():
        if is_compiled_in_place(m):
            warnings.warn(
                f"module {name or '(root)'!r} was compiled in place; make_functional takes it as it was: {remedy}, or apply "
                f"torch.compile to the function",
                stacklevel=callers_level(),
            )
            return


def _check_copies(skeleton: Skeleton, module: nn.Module) -> None:
    """Raise where a copy made for a call would still lead to a module that is not the call's own."""
    strangers = skeleton.originals.keys() | {id(m) for m in module.modules()}
    names = {number: name for name, m in skeleton.bare.named_modules() for number in [skeleton.originals[id(m)]]}
    memo: dict[int, Any] = {old: nn.Identity() for old in skeleton.originals}
    for number, part in enumerate(skeleton.parts):
        for key in part.state.keys() - _OWN:  # what a hook leads to by itself is its user's business
            trial = copy.deepcopy(part.state[key], memo)
            if not any(id(found) in strangers for found in reachable(trial)):
                continue
            raise TypeError(
                f"attribute {key!r} of module {names[number] or '(root)'!r} holds on to a module of the model by a way that "
                f"copying does not follow (a closure, a weak reference), so it would always run that one and its "
                f"parameters; hold the module itself, or bind a method, as in types.MethodType(function, module)"
            )


def _places(unique: Mapping[str, torch.Tensor], every: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    first = {id(tensor): name for name, tensor in unique.items()}
    places: dict[str, list[str]] = {name: [] for name in unique}
    for name, tensor in every:
        places[first[id(tensor)]].append(name)
    return {name: tuple(names) for name, names in places.items()}
