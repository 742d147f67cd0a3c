"""A module without its tensors: made once, and brought to life for one call at a time.

``functional_call`` swaps tensors into one shared module and out again. Here every call gets module objects of its own
instead: a shallow copy of each module's attributes, with the call's tensors in place. That costs less than the
swapping, and what the call does to its modules (a counter, a cache, a buffer) stays in the call. Threads and nested calls
cannot disturb each other, and what outlives the call, such as a checkpoint that recomputes in backward, still finds its
tensors.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Skeleton", "make_skeleton"]

_TABLES = ("_parameters", "_buffers", "_modules")
_OWN = frozenset(nn.Module().__dict__)  # what torch itself keeps in a module: hooks, tables, the training flag


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """One module: its class, its attributes, and what stands in its three tables (numbers of parts for children)."""

    cls: type[nn.Module]
    state: dict[str, Any]
    parameters: dict[str, str | None]
    buffers: dict[str, str | None]
    children: dict[str, int | None]
    relinked: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """Every module of a tree, parents first; ``instantiate`` makes the tree for one call.

    Attributes:
        bare: the module tree itself, its tensors replaced by empty ones; never run.
        parts: its modules, each once.
        originals: ids of the skeleton's own module objects -> number of the part.
        parameters: name of each parameter -> the names of all places that it stands at, its own first.
        shapes: name of each parameter -> its shape.
        buffers: name of each buffer -> the names of all places that it stands at.
        persistent: names of the buffers that a state dict holds.
    """

    bare: nn.Module
    parts: tuple[_Part, ...]
    originals: dict[int, int]
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
        for part, module in zip(self.parts, modules, strict=True):
            for name in part.relinked:
                module.__dict__[name] = _relink(part.state[name], lambda m: modules[self.originals[id(m)]], self.originals)
        return modules

    def find(self, path: str) -> int | None:
        """Number of the module at a dotted ``path``, ``None`` if there is no module there."""
        number: int | None = 0
        for name in path.split(".") if path else ():
            number = None if number is None else self.parts[number].children.get(name)
        return number


def make_skeleton(module: nn.Module) -> tuple[Skeleton, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Take ``module`` apart into a skeleton, its parameters and its buffers, none of which share memory with it.

    Returns:
        ``(skeleton, parameters, buffers)``; the two dictionaries hold each tensor once, under its first name.

    Raises:
        TypeError: a module carries a function that holds on to a module of the tree, so that no copy could be made of it.
    """
    for name, m in module.named_modules():
        _check_functions(name, m, {id(each) for each in module.modules()})
    named_parameters = dict(module.named_parameters())
    named_buffers = dict(module.named_buffers())
    memo: dict[int, Any] = {}
    for tensor in (*named_parameters.values(), *named_buffers.values()):
        empty = torch.empty(0, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    bare = copy.deepcopy(module, memo)  # the memo keeps deepcopy from copying what the module computes with
    names = {id(memo[id(t)]): name for name, t in (*named_parameters.items(), *named_buffers.items())}

    unique = list(dict.fromkeys(bare.modules()))
    originals = {id(m): number for number, m in enumerate(unique)}

    def table(entries: Mapping[str, Any], known: Mapping[int, Any]) -> dict[str, Any]:
        return {key: None if value is None else known[id(value)] for key, value in entries.items()}

    parts = tuple(
        _Part(
            type(m),
            {key: value for key, value in m.__dict__.items() if key not in _TABLES},
            table(m._parameters, names),
            table(m._buffers, names),
            table(m._modules, originals),
            tuple(k for k, v in m.__dict__.items() if k not in _OWN and (_mutable(v) or _mentions(v, originals))),
        )
        for m in unique
    )
    skeleton = Skeleton(
        bare,
        parts,
        originals,
        _places(named_parameters, module.named_parameters(remove_duplicate=False)),
        {name: tuple(parameter.shape) for name, parameter in named_parameters.items()},
        _places(named_buffers, module.named_buffers(remove_duplicate=False)),
        frozenset(named_buffers.keys() & module.state_dict(keep_vars=True).keys()),
    )
    parameters = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in named_parameters.items()}
    return skeleton, parameters, {n: b.detach().clone() for n, b in named_buffers.items()}


def _places(unique: Mapping[str, torch.Tensor], every: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[str, ...]]:
    first = {id(tensor): name for name, tensor in unique.items()}
    places: dict[str, list[str]] = {name: [] for name in unique}
    for name, tensor in every:
        places[first[id(tensor)]].append(name)
    return {name: tuple(names) for name, names in places.items()}


def _mentions(value: Any, originals: Mapping[int, int]) -> bool:
    """Whether an attribute leads to another module by a way that copying attributes would not redirect."""
    found = False

    def see(m: nn.Module) -> nn.Module:
        nonlocal found
        found = True
        return m

    _relink(value, see, originals)
    return found


def _check_functions(name: str, module: nn.Module, tree: set[int]) -> None:
    for attribute, value in module.__dict__.items():
        if attribute in _OWN or not isinstance(value, types.FunctionType):
            continue
        held = [cell.cell_contents for cell in value.__closure__ or ()] + list(value.__defaults__ or ())
        if any(id(getattr(each, "__self__", each)) in tree for each in held):
            raise TypeError(
                f"attribute {attribute!r} of module {name or '(root)'!r} is a function that holds on to a module of "
                f"the model, so it would always run that one and its parameters; bind it instead, as in "
                f"types.MethodType(function, module)"
            )


def _mutable(value: Any) -> bool:
    return type(value) in (list, dict, set)


def _relink(value: Any, new: Callable[[nn.Module], nn.Module], originals: Mapping[int, int]) -> Any:
    """Copy containers, so that a call fills its own, and replace the skeleton's modules inside by the call's."""
    if isinstance(value, nn.Module):
        return new(value) if id(value) in originals else value
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module) and id(value.__self__) in originals:
        return types.MethodType(value.__func__, new(value.__self__))
    if isinstance(value, functools.partial):
        args = _relink(value.args, new, originals)
        return functools.partial(_relink(value.func, new, originals), *args, **_relink(value.keywords, new, originals))
    if type(value) in (list, tuple):
        return type(value)(_relink(v, new, originals) for v in value)
    if type(value) is dict:
        return {k: _relink(v, new, originals) for k, v in value.items()}
    return set(value) if type(value) is set else value
