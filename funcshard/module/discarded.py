"""Warnings for a function that throws changes away: of buffers, and of other state of its modules.

A buffer may hold statistics of BatchNorm. Other state is in attributes of modules: a counter, a
``torch.Generator``, the offset of positions that a model keeps between two calls of ``forward``.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from funcshard._utils import byte_view, callers_level, recording_or_transforming, version
from funcshard.module.digests import digest
from funcshard.module.skeleton import ModuleSpec, Skeleton
from funcshard.module.template import TORCH_ATTRIBUTES

_MISSING = object()
_EMPTY = (dict, list, set, tuple, deque)
_MOST = 8  # kinds of calls that are looked at


@dataclass(slots=True, eq=False)
class DiscardedChanges:
    """Looks for buffers that a call changed although it does not return them; warns once.

    The object belongs to one function of ``make_functional``, and to all functions made from it.

    Attributes:
        title: the class of the root module.
        watched: (index of a module, key in its buffer table, name) of each persistent buffer. Other
            buffers hold values that a forward may compute again at any time.
        compared: the training flags of the calls after which all values were compared.
        warned: whether the warning was given.
    """

    title: str
    watched: tuple[tuple[int, str, str], ...]
    compared: set[bool | None] = field(default_factory=set)
    warned: bool = False

    @classmethod
    def of(cls, skeleton: Skeleton) -> DiscardedChanges | None:
        """Return the object for a function, or ``None`` if the module has no persistent buffers."""
        watched = tuple(
            (index, key, name)
            for index, spec in enumerate(skeleton.specs)
            for key, name in spec.buffers.items()
            if name is not None and not skeleton.persistent.isdisjoint(skeleton.buffers[name])
        )
        return cls(skeleton.specs[0].cls.__name__, watched) if watched else None

    def look(
        self,
        modules: Sequence[nn.Module],
        before: Mapping[str, torch.Tensor],
        caller_buffers: Mapping[str, torch.Tensor],
        training: bool | None,
    ) -> None:
        """Warn if a call changed a buffer.

        Where versions and values of tensors cannot be read, as under a transform, nothing is done.

        Arguments:
            modules: those of the call, after it.
            before: the call's own copies of the buffers, by name, with which it began.
            caller_buffers: those that the call was given.
            training: the training flag of the call.
        """
        if self.warned or _not_now() or torch.is_inference_mode_enabled():
            return
        # Why compare all values once: F.batch_norm changes its statistics without counting it in
        # their versions. BatchNorm also counts its batches, which the versions show.
        all_values = training not in self.compared
        self.compared.add(training)
        changed = []
        for index, key, name in self.watched:
            after, own_copy = modules[index]._buffers.get(key), before[name]
            suspicious = all_values or after is not own_copy or version(own_copy) != 0
            if suspicious and _differ(after, caller_buffers[name], own_copy.dtype):
                changed.append(name)
        if changed:
            self.warned = True
            warnings.warn(
                f"the forward of {self.title} changed buffers of the module ({_some(changed)}), "
                "and the call threw the changes away: use make_functional(module, mutable=True), "
                "whose calls return the new buffers, or apply.eval() if the module should not "
                "change them; this warning comes once for each function",
                stacklevel=callers_level(),
            )


def _differ(after: torch.Tensor | None, before: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a buffer has other bits than the one given to the call, cast to ``dtype``."""
    if after is None or after.shape != before.shape:
        return True
    if after.is_meta or {after.layout, before.layout} != {torch.strided}:
        return False
    return not torch.equal(byte_view(after.to(dtype)), byte_view(before.to(dtype)))


@dataclass(slots=True, eq=False)
class DiscardedState:
    """Looks for state, other than buffers, that a call leaves in its modules; warns once.

    The object belongs to one function of ``make_functional``, and to all functions made from it.
    State is an attribute that a later call of the module would read: one that the module had when
    the function was made, and that has another value after a call. ``None`` and empty containers
    may also be caches that a call fills; these are state if two calls leave other values there. An
    attribute that the module did not have is none: forward looks whether it is there.

    Only the first call of each kind is looked at, and the one after it: a look takes about as long
    as making the modules of a call.

    Attributes:
        skeleton: the module.
        kinds: the kinds of calls of which nothing more is looked at, if nothing is ``filled``.
        filled: kind of a call -> what it left in place of ``None`` and empty containers, by module
            and attribute, until the next call of the kind.
        warned: whether the warning was given.
    """

    skeleton: Skeleton
    kinds: set[Any] = field(default_factory=set)
    filled: dict[Any, dict[tuple[int, str], bytes | None]] = field(default_factory=dict)
    warned: bool = False

    def look(
        self,
        modules: Sequence[nn.Module],
        method: str | Callable[..., Any],
        training: bool | None,
        kwargs: Mapping[str, Any],
    ) -> None:
        """Warn if a call left state in its modules.

        Arguments:
            modules: those of the call, after it.
            method: the method that ran. A function of the module is the place where state may last.
                Methods besides ``forward``, such as ``generate``, leave their caches behind.
            training: the training flag of the call.
            kwargs: the call's keyword arguments, whose names distinguish kinds of calls.
        """
        mode, kind = (method, training), (method, training, *kwargs)
        if self.warned or callable(method):
            self.kinds.add(kind)
            return
        if _not_now():
            return
        changed = [
            (index, name)
            for (index, name), before in self.filled.pop(mode, {}).items()
            if digest(vars(modules[index]).get(name)) != before
        ]
        if kind not in self.kinds and len(self.kinds) < _MOST:
            self.kinds.add(kind)
            filled = {}
            for index, (spec, module) in enumerate(zip(self.skeleton.specs, modules, strict=True)):
                for name, old, new in _changes(spec, module, modules):
                    if _was_unset(old, new):
                        filled[index, name] = digest(new)
                    else:
                        changed.append((index, name))
            if filled and method == "forward":
                self.filled[mode] = filled
        if changed:
            self._warn(changed)

    def _warn(self, changed: Sequence[tuple[int, str]]) -> None:
        self.warned = True
        paths = {index: path for path, index in self.skeleton.paths().items()}
        names = [
            f"{paths[index]}.{name}".removeprefix(".") for index, name in dict.fromkeys(changed)
        ]
        warnings.warn(
            f"the forward of {self.skeleton.specs[0].cls.__name__} set attributes of the module "
            f"({_some(names)}), and the call threw them away: the next call begins with the "
            "attributes that the module had in make_functional. Run what shares them in one "
            "call, with apply.method(function), or keep them in buffers, with mutable=True; this "
            "warning comes once for each function",
            stacklevel=callers_level(),
        )


def _changes(
    spec: ModuleSpec, module: nn.Module, modules: Sequence[nn.Module]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each attribute of a module that a call changed."""
    for name, child in module._modules.items():
        index = spec.children.get(name)
        if child is not None and (index is None or modules[index] is not child):
            yield name, child, child
    attributes = spec.attributes
    for name, new in module.__dict__.items():
        old = attributes.get(name, _MISSING)
        if (
            old is new
            or name in TORCH_ATTRIBUTES
            or name == "forward"
            or name.startswith("_funcshard")
        ):
            continue
        if f"{name}_orig" in spec.parameters or f"{name}_g" in spec.parameters:
            continue  # a hook of torch's old spectral_norm, prune or weight_norm computes it in each call
        if old is _MISSING:  # the class may have a value for all of its objects
            old = inspect.getattr_static(spec.cls, name, _MISSING)
        if old is _MISSING:
            continue
        digests = {digest(old), digest(new)}
        if len(digests) == 2 and None not in digests:
            yield name, old, new


def _is_unset(value: Any) -> bool:
    return value is None or (isinstance(value, _EMPTY) and not value)


def _was_unset(old: Any, new: Any) -> bool:
    """Return whether a call only filled in what was ``None`` or empty, in ``old`` or inside it.

    Classifiers of Hugging Face set ``config.problem_type`` by the labels of each call.
    """
    if _is_unset(old):
        return True
    before, after = getattr(old, "__dict__", None), getattr(new, "__dict__", None)
    if type(old) is not type(new) or not isinstance(before, dict) or not isinstance(after, dict):
        return False
    changed = [
        name for name in after if name not in before or digest(before[name]) != digest(after[name])
    ]
    return bool(changed) and all(_is_unset(before.get(name)) for name in changed)


def _not_now() -> bool:
    """Return whether values of tensors cannot be read now."""
    return torch.compiler.is_compiling() or recording_or_transforming()


def _some(names: Sequence[str]) -> str:
    """Return the first of some names, for a message."""
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join([*map(repr, names[:3]), *more])
