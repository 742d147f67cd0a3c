"""Changes that the function of a module cannot keep: it undoes them, raises, or warns."""

from __future__ import annotations

import inspect
import operator
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from funcshard._utils.options import some
from funcshard._utils.tensors import byte_view
from funcshard._utils.torch_private import callers_level, recording_or_transforming, version
from funcshard.module.copying import TORCH_ATTRIBUTES, NamedTensors
from funcshard.module.skeleton import ModuleSpec, Skeleton

_PLAIN = frozenset({bool, int, float, complex, str})


# --- parameters of the caller ---------------------------------------------------------------------


@contextmanager
def unchanged(params: NamedTensors) -> Iterator[None]:
    """Undo what the block does to parameters: frozen flags, gradients and attributes.

    Arguments:
        params: the parameters by name.

    Raises:
        RuntimeError: the block wrote values to a parameter.
    """
    param_tensors = list(params.values())
    # Why only leaves: torch warns if you ask for the grad of others.
    leaf_params = [tensor for tensor in param_tensors if tensor.is_leaf]
    # Note: every call pays for these lines, so they loop in C.
    flags_and_grads = list(map(_flag_and_grad, leaf_params))
    attributes_before = [vars(tensor).copy() for tensor in param_tensors]
    versions_before = _versions(param_tensors)
    try:
        yield
    finally:
        for tensor, (trainable, grad) in zip(leaf_params, flags_and_grads, strict=True):
            if tensor.requires_grad is not trainable:
                tensor.requires_grad_(trainable)
            if tensor.grad is not grad:
                tensor.grad = grad
        for tensor, before in zip(param_tensors, attributes_before, strict=True):
            after = vars(tensor)
            same_attributes = len(after) == len(before) and all(
                map(operator.is_, after.values(), before.values())
            )
            if not same_attributes:
                after.clear()
                after.update(before)
    versions_after = _versions(param_tensors)
    if versions_after != versions_before:
        versions = zip(params, versions_before, versions_after, strict=True)
        name = next(name for name, before, after in versions if before != after)
        raise RuntimeError(
            f"forward wrote to its parameter {name!r}, which belongs to the caller: compute with a "
            "copy, or keep values that change in a buffer and pass mutable=True"
        )


_flag_and_grad = operator.attrgetter("requires_grad", "grad")


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    try:
        return list(map(version, tensors))
    except RuntimeError:  # there is one of inference mode, which has no version
        return [-1 if tensor.is_inference() else version(tensor) for tensor in tensors]


# --- changes that calls throw away ----------------------------------------------------------------


class DiscardedChanges:
    """Looks for what calls change in their modules and do not return; warns once of each kind.

    A look takes about as long as making the modules of a call, so it compares everything after the
    first call in each mode only.

    Attributes:
        buffers: (index of a module, key in its buffer table, name) of each buffer to watch.
        compared: the training flags of the calls after which everything was compared.
    """

    def __init__(self, skeleton: Skeleton, *, mutable: bool) -> None:
        self.skeleton = skeleton
        self.buffers: list[tuple[int, str, str]] = []
        self.compared: set[bool | None] = set()
        self.watches_attributes = True
        saved_names = set(skeleton.state_names)
        if not mutable:
            # Why only those of the state dict: others hold values that a forward may compute again
            # at any time.
            self.buffers = [
                (index, key, name)
                for index, spec in enumerate(skeleton.specs)
                for key, name in spec.buffers.items()
                if name is not None and not saved_names.isdisjoint(skeleton.buffers[name])
            ]

    def look(
        self,
        mode: tuple[str | Callable[..., Any], bool | None],
        modules: Sequence[nn.Module],
        call_buffers: NamedTensors,
        caller_buffers: NamedTensors,
    ) -> None:
        """Warn if a call changed a buffer, or an attribute that the module had at first.

        Arguments:
            mode: the method that ran, or a function of the module, and the training flag.
            call_buffers: the call's copies of the buffers, with which it began.
            caller_buffers: those that the call was given.
        """
        method, training = mode
        first_call = training not in self.compared
        if not (self.buffers or first_call) or torch.compiler.is_compiling():
            return
        # Note: the values of tensors cannot be read there.
        if recording_or_transforming() or torch.is_inference_mode_enabled():
            return
        self.compared.add(training)
        changed_buffers = []
        for index, key, buffer_name in self.buffers:
            after, before = modules[index]._buffers.get(key), call_buffers[buffer_name]
            # Why all values once: F.batch_norm changes its statistics without counting it in their
            # versions. BatchNorm also counts its batches, which the versions show.
            suspicious = first_call or after is not before or version(before) != 0
            if suspicious and _differ(after, caller_buffers[buffer_name], before.dtype):
                changed_buffers.append(buffer_name)
        if changed_buffers:
            self.buffers = []
            self._warn(
                f"changed buffers of the module ({some(changed_buffers)}), and the call threw the "
                "changes away: use make_functional(module, mutable=True), whose calls return the "
                "new buffers, or apply.eval() if the module should not change them"
            )
        # Note: a function of the module is the place where state may last.
        if not first_call or not self.watches_attributes or callable(method):
            return
        set_attributes = [
            f"{spec.path}.{name}".removeprefix(".")
            for spec, module in zip(self.skeleton.specs, modules, strict=True)
            for name, value in module.__dict__.items()
            if name not in TORCH_ATTRIBUTES and _was_set(spec, name, value)
        ]
        if set_attributes:
            self.watches_attributes = False
            self._warn(
                f"set attributes of the module ({some(set_attributes)}), and the call threw them "
                "away: the next call begins with the attributes that the module had in "
                "make_functional. Run what shares them in one call, with apply.method(function), "
                "or keep them in buffers, with mutable=True"
            )

    def _warn(self, change: str) -> None:
        title = self.skeleton.specs[0].cls.__name__
        warnings.warn(
            f"the forward of {title} {change}; this warning comes once for each function",
            stacklevel=callers_level(),
        )


def _was_set(spec: ModuleSpec, name: str, value: Any) -> bool:
    """Return whether a call changed a plain value, such as a counter, or drew from a generator."""
    # Note: the class may have a value for all of its objects. What was None may be a cache.
    old = spec.attributes.get(name, inspect.getattr_static(spec.cls, name, None))
    if isinstance(old, torch.Generator) and isinstance(value, torch.Generator):
        return not torch.equal(old.get_state(), value.get_state())
    if type(old) not in _PLAIN or value is old:
        return False
    return type(value) is not type(old) or bool(value != old)


def _differ(after: torch.Tensor | None, before: torch.Tensor, dtype: torch.dtype) -> bool:
    if after is None or after.shape != before.shape:
        return True
    if after.is_meta or {after.layout, before.layout} != {torch.strided}:
        return False
    return not torch.equal(byte_view(after.to(dtype)), byte_view(before.to(dtype)))


# --- changes after the copy -----------------------------------------------------------------------


_WRITTEN = "its parameters were written, as load_state_dict and optimizers do"
_TRAINING = "train() or eval() was called"


class LateChanges:
    """The state of a module when ``make_functional`` copied it; ``look`` compares, once.

    Later changes reach neither the function nor its parameters. The first ``fully_shard`` compares,
    so calls take no longer. Changes after that are no mistake: you may load trained weights into
    the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.before = _state(module)
        self.looked = False

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # the module stays in its process

    def look(self) -> None:
        """Warn if the module is not as it was, once."""
        module = self.module()
        if self.looked or module is None:
            return
        self.looked = True
        state_before, state_after = self.before, _state(module)
        if len(state_after[_TRAINING]) != len(state_before[_TRAINING]):
            return  # it has other modules, as with adapters
        if any(parameter.is_meta for parameter in module.parameters()):
            # Note: the values were dropped, to free memory.
            state_after[_WRITTEN] = state_before[_WRITTEN]
        change_titles = [
            change for change, numbers in state_after.items() if numbers != state_before[change]
        ]
        if change_titles:
            warnings.warn(
                f"{type(module).__name__} was changed after make_functional had copied it: "
                f"{', and '.join(change_titles)}. Neither apply nor params see that: change the "
                "module first, or call make_functional again; for values alone call "
                "from_state_dict, for another mode pass apply.eval() or apply.train()",
                stacklevel=callers_level(),
            )


def _state(module: nn.Module) -> dict[str, list[int]]:
    """Return numbers that a change of the module would change, by the kind of change."""
    parameters = list(module.parameters())
    # Why no hooks: modules of Hugging Face install some in their calls.
    return {
        _WRITTEN: _versions(parameters),
        "parameters were frozen or unfrozen": [tensor.requires_grad for tensor in parameters],
        _TRAINING: [m.training for m in module.modules()],
    }
