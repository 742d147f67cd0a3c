"""Changes that the function of a module cannot keep: it undoes them, raises, or warns."""

from __future__ import annotations

import hashlib
import inspect
import operator
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from funcshard._utils.tensors import byte_view
from funcshard._utils.torch_private import callers_level, recording_or_transforming, version
from funcshard.module.copying import TORCH_ATTRIBUTES, NamedTensors
from funcshard.module.skeleton import ModuleSpec, Skeleton

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, range, slice})
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
_MAX_OBJECTS = 10_000  # inside one value
_MAX_BYTES = 2**16  # of a tensor that are read one by one
_MAX_KINDS = 8  # of calls that are looked at
_MISSING = object()


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

    State is an attribute that the module had at first, such as a counter or a ``torch.Generator``,
    and that has another value after a call. ``None`` and empty containers may be caches: they're
    state if two calls leave other values there.

    It looks at the first call of each kind and the one after it, because a look takes about as long
    as making the modules of a call.

    Attributes:
        buffers: (index of a module, key in its buffer table, name) of each buffer to watch.
        compared: the training flags of the calls after which all buffers were compared.
        kinds: mode, and names of keyword arguments, of the calls that were looked at.
        filled: what a call in a mode left in place of ``None`` and empty containers, by module and
            attribute.
    """

    def __init__(self, skeleton: Skeleton, *, mutable: bool) -> None:
        self.skeleton = skeleton
        self.buffers: list[tuple[int, str, str]] = []
        self.compared: set[bool | None] = set()
        self.kinds: set[Any] = set()
        self.filled: dict[Any, dict[tuple[int, str], bytes | None]] = {}
        self.warned = False
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
        kwargs: Mapping[str, Any],
    ) -> None:
        """Warn if a call changed a buffer, or left other state in its modules.

        Arguments:
            mode: the method that ran, or a function of the module, and the training flag.
            call_buffers: the call's copies of the buffers, with which it began.
            caller_buffers: those that the call was given.
        """
        method, training = mode
        call_kind = (*mode, *kwargs)
        looks_at_attributes = self.filled or call_kind not in self.kinds
        # Note: a function of the module is the place where state may last.
        if looks_at_attributes and (self.warned or callable(method)):
            self.kinds.add(call_kind)
            looks_at_attributes = False
        if not (self.buffers or looks_at_attributes) or torch.compiler.is_compiling():
            return
        # Note: the values of tensors cannot be read there.
        if recording_or_transforming():
            return
        if self.buffers and not torch.is_inference_mode_enabled():
            self._look_at_buffers(training, modules, call_buffers, caller_buffers)
        if looks_at_attributes:
            self._look_at_attributes(mode, call_kind, modules)

    def _look_at_buffers(
        self,
        training: bool | None,
        modules: Sequence[nn.Module],
        call_buffers: NamedTensors,
        caller_buffers: NamedTensors,
    ) -> None:
        # Why compare all values once: F.batch_norm changes its statistics without counting it in
        # their versions. BatchNorm also counts its batches, which the versions show.
        all_values = training not in self.compared
        self.compared.add(training)
        changed_names = []
        for index, key, buffer_name in self.buffers:
            after, before = modules[index]._buffers.get(key), call_buffers[buffer_name]
            suspicious = all_values or after is not before or version(before) != 0
            if suspicious and _differ(after, caller_buffers[buffer_name], before.dtype):
                changed_names.append(buffer_name)
        if changed_names:
            self.buffers = []
            self._warn(
                f"changed buffers of the module ({_some(changed_names)}), and the call threw the "
                "changes away: use make_functional(module, mutable=True), whose calls return the "
                "new buffers, or apply.eval() if the module should not change them"
            )

    def _look_at_attributes(
        self, mode: tuple[Any, bool | None], call_kind: Any, modules: Sequence[nn.Module]
    ) -> None:
        changed_attributes = [
            (index, name)
            for (index, name), before in self.filled.pop(mode, {}).items()
            if digest(vars(modules[index]).get(name)) != before
        ]
        if call_kind not in self.kinds and len(self.kinds) < _MAX_KINDS:
            self.kinds.add(call_kind)
            filled_digests = {}
            for index, (spec, module) in enumerate(zip(self.skeleton.specs, modules, strict=True)):
                for name, old, new in _changes(spec, module, modules):
                    if _was_unset(old, new):
                        filled_digests[index, name] = digest(new)
                    else:
                        changed_attributes.append((index, name))
            # Why forward alone: methods such as generate leave their caches behind.
            if filled_digests and mode[0] == "forward":
                self.filled[mode] = filled_digests
        if changed_attributes:
            self.warned = True
            specs = self.skeleton.specs
            attribute_paths = [
                f"{specs[index].path}.{name}".removeprefix(".")
                for index, name in dict.fromkeys(changed_attributes)
            ]
            self._warn(
                f"set attributes of the module ({_some(attribute_paths)}), and the call threw them "
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


def _differ(after: torch.Tensor | None, before: torch.Tensor, dtype: torch.dtype) -> bool:
    if after is None or after.shape != before.shape:
        return True
    if after.is_meta or {after.layout, before.layout} != {torch.strided}:
        return False
    return not torch.equal(byte_view(after.to(dtype)), byte_view(before.to(dtype)))


def _changes(
    spec: ModuleSpec, module: nn.Module, modules: Sequence[nn.Module]
) -> Iterator[tuple[str, Any, Any]]:
    """Yield name, old and new value of each attribute that a call changed."""
    for name, child in module._modules.items():
        child_index = spec.children.get(name)
        if child is not None and (child_index is None or modules[child_index] is not child):
            yield name, child, child
    for name, new in module.__dict__.items():
        old = spec.attributes.get(name, _MISSING)
        internal = name in TORCH_ATTRIBUTES or name == "forward" or name.startswith("_funcshard")
        # Note: a hook of torch's old spectral_norm, prune or weight_norm computes it in each call.
        by_hook = f"{name}_orig" in spec.parameters or f"{name}_g" in spec.parameters
        if old is new or internal or by_hook:
            continue
        if old is _MISSING:  # the class may have a value for all of its objects
            old = inspect.getattr_static(spec.cls, name, _MISSING)
        if old is _MISSING:
            continue
        both_digests = {digest(old), digest(new)}
        if len(both_digests) == 2 and None not in both_digests:
            yield name, old, new


def _was_unset(old: Any, new: Any) -> bool:
    """Return whether a call only filled in what was ``None`` or empty, in ``old`` or inside it."""
    if _is_unset(old):
        return True
    # Why inside too: classifiers of Hugging Face set ``config.problem_type`` by the labels of a
    # call.
    old_attributes, new_attributes = getattr(old, "__dict__", None), getattr(new, "__dict__", None)
    if (
        type(old) is not type(new)
        or not isinstance(old_attributes, dict)
        or not isinstance(new_attributes, dict)
    ):
        return False
    changed_names = [
        name
        for name in new_attributes
        if name not in old_attributes
        or digest(old_attributes[name]) != digest(new_attributes[name])
    ]
    return bool(changed_names) and all(
        _is_unset(old_attributes.get(name)) for name in changed_names
    )


def _is_unset(value: Any) -> bool:
    return value is None or (isinstance(value, (dict, list, set, tuple, deque)) and not value)


def _some(names: Sequence[str]) -> str:
    shown_names = [repr(name) for name in names[:3]]
    if len(names) > 3:
        shown_names.append(f"{len(names) - 3} more")
    return ", ".join(shown_names)


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
        # Note: tensors of inference mode have no version.
        _WRITTEN: [version(tensor) for tensor in parameters if not tensor.is_inference()],
        "parameters were frozen or unfrozen": [tensor.requires_grad for tensor in parameters],
        _TRAINING: [m.training for m in module.modules()],
    }


# --- digests --------------------------------------------------------------------------------------


class _Unknown(Exception):  # noqa: N818
    """A value that has no digest."""


def digest(value: Any) -> bytes | None:
    """Return the digest of a value; ``None`` if it has none, like functions and modules."""
    hash_state = hashlib.blake2b(digest_size=16)
    try:
        _feed(value, hash_state.update, {})
    except Exception:  # whatever a user's object raises
        return None
    return hash_state.digest()


def _feed(value: Any, update: Callable[[bytes], None], seen: dict[int, Any]) -> None:
    cls = type(value)
    if cls in _PLAIN or isinstance(value, _OF_TORCH):
        update(f"{cls.__name__} {value!r};".encode())
        return
    without_digest = (nn.Module, nn.Parameter, types.FunctionType, types.MethodType)
    if isinstance(value, without_digest) or len(seen) > _MAX_OBJECTS:
        # Why: copies of these differ in each call.
        raise _Unknown
    update(f"{cls.__module__}.{cls.__qualname__}:".encode())
    if id(value) in seen:
        update(b"again;")
        return
    seen[id(value)] = value  # which keeps the number from another object
    if isinstance(value, type):
        update(f"{value.__module__}.{value.__qualname__};".encode())
    elif isinstance(value, torch.Tensor):
        _feed_tensor(value, update)
    elif isinstance(value, torch.Generator):
        _feed_tensor(value.get_state(), update)
    elif isinstance(value, (list, tuple, deque)):
        # Why the iterators of built-in classes: an object of a user may iterate in its own way.
        base_class = next(
            base_class for base_class in (list, tuple, deque) if isinstance(value, base_class)
        )
        for item in base_class.__iter__(value):  # type: ignore[arg-type]
            _feed(item, update, seen)
    elif isinstance(value, dict):
        _feed([*dict.items(value)], update, seen)
    elif isinstance(value, (set, frozenset)):
        update(repr(sorted([digest(item) or b"" for item in value])).encode())
    else:
        # Note: a user's object may raise, lie about its length or compare to arrays, so none of its
        # methods is called.
        _feed(object.__getattribute__(value, "__dict__"), update, seen)
    update(b";")


def _feed_tensor(value: torch.Tensor, update: Callable[[bytes], None]) -> None:
    update(f"{value.dtype} {tuple(value.shape)} {value.device} ".encode())
    if value.is_meta or value.layout != torch.strided or type(value) is not torch.Tensor:
        return
    tensor_bytes = byte_view(value.detach())
    if tensor_bytes.numel() > _MAX_BYTES:
        # Why two sums: bytes that change places leave the first one as it was.
        update(f"{int(tensor_bytes.sum())} {int(tensor_bytes[::2].sum())}".encode())
        tensor_bytes = tensor_bytes[:: tensor_bytes.numel() // _MAX_BYTES]
    update(bytes(tensor_bytes.tolist()))
