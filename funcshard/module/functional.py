"""A module as a pure function of its parameters and buffers: ``Functional``, and its calls.

``torch.func.functional_call`` swaps tensors into one shared module and out again. Every call of a
``Functional`` gets new module objects from its ``Skeleton``, with its tensors in their tables. That
takes less time:

- Threads, such as simulated ranks, and nested calls don't see each other's tensors.
- Activation checkpointing, which runs parts of forward again later, still has the call's modules.
- A forward that changes its module (a counter, a cache, a buffer) changes the call's objects only.

What such a function cannot keep of a call's changes, it undoes, or it raises or warns.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from funcshard._utils import tree
from funcshard._utils.closures import reachable
from funcshard._utils.options import (
    absent,
    check_flag,
    is_tree_of_shards,
    module_remedy,
    other_names,
    some,
)
from funcshard._utils.tensors import byte_view
from funcshard._utils.torch_modules import late_copy
from funcshard._utils.torch_private import (
    callers_level,
    dispatch_modes,
    dual_level_active,
    recording_or_transforming,
    transforms_active,
    version,
)
from funcshard.core import FirstLook, any_order, check_derivatives
from funcshard.module.copying import (
    TABLES,
    TORCH_ATTRIBUTES,
    TORCH_CONTAINERS,
    NamedTensors,
    References,
    Tensors,
    copied,
)

Names = dict[str, tuple[str, ...]]

_PLAIN = frozenset({bool, int, float, complex, str})


@dataclass(frozen=True, slots=True, eq=False)
class Functional:
    """The pure ``apply(params, buffers, *args, **kwargs)`` that ``make_functional`` returns.

    Attributes:
        skeleton: the module without its tensors.
        mutable: whether calls also return the new buffers.
        discarded: warns when a call throws changes of its modules away.
        late_changes: warns if the module was changed later; ``None`` in another process.
        method_name: the method that a call runs, or a function of the module.
        training: the training flag of every module; ``None`` keeps each one's.
        first_look: finds writes to parameters through ``.data`` in the first call.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, buffers = fs.make_functional(torch.nn.Dropout(0.5))
        >>> apply.eval()(params, buffers, torch.ones(3))
        tensor([1., 1., 1.])
    """

    skeleton: Skeleton
    mutable: bool
    discarded: DiscardedChanges
    late_changes: LateChanges | None
    method_name: str | Callable[..., Any] = "forward"
    training: bool | None = None
    first_look: FirstLook = field(init=False, default_factory=FirstLook)

    def __call__(
        self,
        params: NamedTensors,
        buffers: NamedTensors,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        # Note: only a state dict, with all names of tied parameters, has more names.
        if isinstance(params, Mapping) and len(params) > len(self.skeleton.parameters):
            tied_names = {name for names in self.ties for name in names[1:]}
            params = {
                name: value for name, value in params.items() if name not in tied_names
            }
        self.check_names("params", params, self.skeleton.parameters)
        call_buffers = self.copies(buffers)
        modules = self.skeleton.instantiate(params, call_buffers, training=self.training)
        # Note: Dynamo traces neither what undoes changes nor what looks at transforms.
        if torch.compiler.is_compiling():
            out = self.run_plain(modules[0], args, kwargs)
        else:
            with unchanged(params, self.first_look):
                out = self.run(modules[0], args, kwargs)
        self.discarded.look(self, modules, params, call_buffers, buffers)
        return out

    def __repr__(self) -> str:
        method_name = getattr(self.method_name, "__qualname__", self.method_name)
        method_suffix = "" if method_name == "forward" else f".{method_name}"
        mode_suffix = {None: "", True: " in training mode", False: " in evaluation mode"}[
            self.training
        ]
        title = type(self.skeleton.template).__name__
        return f"<apply of make_functional({title}){method_suffix}{mode_suffix}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Functional:
        return self  # as for a Python function, which cannot change either

    if not TYPE_CHECKING:  # which then still knows what this class lacks

        def __getattr__(self, name: str) -> Any:
            # Note: while the function is unpickled, it has none of its own attributes.
            cls = None if name in self.__slots__ else type(self.skeleton.template)
            raise absent_attribute("make_functional", name, cls)

    def method(self, name: str | Callable[..., Any]) -> Functional:
        """Return the function that runs another method, with the same parameters and buffers.

        Arguments:
            name: the method, or your function of the module. It may call the module any number of
                times, and what the modules keep between these calls, such as the offset of
                positions while you decode, lasts until it returns.

        Raises:
            AttributeError: the module has no such method.
        """
        if isinstance(name, nn.Module) or (
            not callable(name) and not callable(getattr(self.skeleton.template, name, None))
        ):
            raise AttributeError(
                f"{type(self.skeleton.template).__name__} has no method {name!r}"
            )
        return dataclasses.replace(self, method_name=name)

    def train(self, mode: bool = True) -> Functional:
        """Return the function with every module in training mode; ``eval`` is the inverse.

        Raises:
            TypeError: ``torch.export`` made a module, whose graph has one mode.
        """
        check_flag("mode", mode)
        for spec in self.skeleton.specs:
            # Why "eval": on these modules torch sets an eval that raises.
            if issubclass(spec.cls, fx.GraphModule) and "eval" in spec.attributes:
                raise TypeError(
                    "the module, or one inside it, was made by torch.export, so its graph stays "
                    "in the mode in which it was exported: export the module in the other mode too"
                )
        return dataclasses.replace(self, training=mode)

    def eval(self) -> Functional:
        """Return the function with every module in evaluation mode."""
        return self.train(False)

    @property
    def ties(self) -> tuple[tuple[str, ...], ...]:
        """All names of each tied parameter."""
        return tuple(names for names in self.skeleton.parameters.values() if len(names) > 1)

    def persistent(self, buffers: NamedTensors) -> Tensors:
        """Return the buffers in the module's state dict, under all of their names there."""
        self.check_names("buffers", buffers, self.skeleton.buffers)
        all_names = self.skeleton.buffers
        saved_names = set(self.skeleton.state_names)
        return {
            name: buffers[first_name]
            for first_name in buffers
            for name in all_names[first_name]
            if name in saved_names
        }

    def copies(self, buffers: NamedTensors) -> Tensors:
        """Return copies of the buffers, into which one call may write.

        Large ones share their memory until it is written to.
        """
        self.check_names("buffers", buffers, self.skeleton.buffers)
        if not buffers:
            return {}
        # Why not below a transform: it has to see the copy, and so has a graph that is recorded.
        copy: Callable[[torch.Tensor], torch.Tensor] = late_copy
        if torch.compiler.is_compiling() or recording_or_transforming():
            copy = torch.clone
        return {name: copy(buffer) for name, buffer in buffers.items()}

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the method on ``module``; under a transform or dual level, with ``any_order``."""
        try:
            if transforms_active() or dual_level_active():
                with any_order():
                    return self.run_plain(module, args, kwargs)
            return self.run_plain(module, args, kwargs)
        except RuntimeError as error:
            check_derivatives(error)
            raise

    def run_plain(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the method on ``module``, the root of a call's modules."""
        method_name = self.method_name
        if callable(method_name):
            out = method_name(module, *args, **kwargs)
        else:
            # Why the module itself: its hooks run only then.
            method = module if method_name == "forward" else getattr(module, method_name)
            out = method(*args, **kwargs)
        if not self.mutable:
            return out
        buffers_after = dict(module.named_buffers(remove_duplicate=False))
        # Why copies: a checkpoint that runs a part of forward again in backward writes into the
        # call's buffers again.
        return out, self.copies(
            {name: buffers_after[name].detach() for name in self.skeleton.buffers}
        )

    @staticmethod
    def check_names(kind: str, tensors: Any, expected: Mapping[str, Any]) -> None:
        """Raise unless ``tensors`` has exactly the expected names."""
        remedy = "pass the dictionary that make_functional returned"
        if not isinstance(tensors, Mapping):
            raise TypeError(
                f"{kind} must be a dictionary {{name: tensor}}; found {type(tensors).__name__}: "
                f"{module_remedy(tensors, kind) or remedy}"
            )
        if tensors.keys() != expected.keys():
            remedy += ", or one with its names"
            if is_tree_of_shards(tensors):
                remedy = (
                    "these are shards: call the function of fully_shard, or "
                    "fs.gather(shards, plan, mesh) first"
                )
            difference = other_names(expected, tensors)
            raise ValueError(f"{kind} must hold the module's names; {difference}: {remedy}")


# --- the modules of a call ------------------------------------------------------------------------

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
        aliases: the names of copied lists, tuples and dictionaries that lead to parameters.
        large: large tensors in copied attributes, copied when they are written.
        generators: random generators in copied attributes.
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
    aliases: tuple[str, ...]
    references: References
    large: tuple[torch.Tensor, ...]
    generators: tuple[torch.Generator, ...]
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
        memo.update(
            (id(stand_in), tensors[name]) for name, stand_in in self.stand_ins.items()
        )
        # Why: deepcopy sets the storage of a new tensor, which no graph can hold. A lifted tensor
        # is a constant of the graph, as one that the forward makes by torch.tensor.
        if tensor_copy is None and dispatch_modes():
            tensor_copy = torch.ops.aten.lift_fresh_copy.default
        if tensor_copy is not None:
            memo.update(
                (id(tensor), tensor_copy(tensor)) for tensor in self._attribute_tensors()
            )
        elif self.large and not transforms_active():
            memo.update((id(tensor), late_copy(tensor)) for tensor in self.large)
        # Why not by deepcopy: it sets the state by a tensor, which fails below a transform.
        memo.update(
            (id(generator), generator.clone_state()) for generator in self.generators
        )
        # An attribute may be the handle of a hook, which refers to the hook's table.
        memo.update(
            (id(self.specs[index].attributes[key]), modules[index].__dict__[key])
            for index, key in self.hook_tables
        )
        with self.references.in_memo(memo) as memo:
            for index, key in self.copied_attributes:
                modules[index].__dict__[key] = copied(
                    self.specs[index].attributes[key], memo
                )

    def _attribute_tensors(self) -> list[torch.Tensor]:
        """Return the plain tensors to which copied attributes lead."""
        values = [
            self.specs[index].attributes[key] for index, key in self.copied_attributes
        ]
        return plain_tensors(values)

    def paths(self) -> dict[str, int]:
        """Return the index of every module by its first path."""
        return {spec.path: index for index, spec in enumerate(self.specs)}

    def classes(self, name: str) -> tuple[type[nn.Module], ...]:
        """Return the classes of the modules around a parameter or buffer, the root first."""
        outer_paths = list(tree.upwards(name.rpartition(".")[0]))
        return tuple([self.specs[self.indices[path]].cls for path in reversed(outer_paths)])


def plain_tensors(values: Iterable[Any]) -> list[torch.Tensor]:
    """Return the plain tensors to which values lead, each once."""
    # Note: one walk, because the modules of a model refer to one config.
    return [
        item
        for item in reachable(list(values))
        if type(item) is torch.Tensor and item.layout is torch.strided
    ]


# --- parameters of the caller ---------------------------------------------------------------------


@contextmanager
def unchanged(params: NamedTensors, first_look: FirstLook) -> Iterator[None]:
    """Undo what the block does to parameters: frozen flags, gradients and attributes.

    Arguments:
        params: the parameters by name.
        first_look: finds writes through ``.data``, in the first block.

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
    samples_before = first_look.begin(param_tensors) if first_look.pending else None
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
    written_index = None
    versions_after = _versions(param_tensors)
    if versions_after != versions_before:
        versions = enumerate(zip(versions_before, versions_after, strict=True))
        written_index = next(i for i, (before, after) in versions if before != after)
    elif samples_before is not None:
        written_index = first_look.end(param_tensors, samples_before)
    if written_index is not None:
        name = list(params)[written_index]
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
        apply: Functional,
        modules: Sequence[nn.Module],
        call_parameters: NamedTensors,
        call_buffers: NamedTensors,
        caller_buffers: NamedTensors,
    ) -> None:
        """Warn if a call changed a buffer, or an attribute that the module had at first.

        Arguments:
            apply: the function that was called.
            call_parameters: the parameters, or their placeholders, with which the call began.
            call_buffers: the call's copies of the buffers, with which it began.
            caller_buffers: those that the call was given.
        """
        first_call = apply.training not in self.compared
        if not (self.buffers or first_call) or torch.compiler.is_compiling():
            return
        # Note: the values of tensors cannot be read there.
        if recording_or_transforming() or torch.is_inference_mode_enabled():
            return
        self.compared.add(apply.training)
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
        if not first_call or not self.watches_attributes or callable(apply.method_name):
            return
        set_attributes = [
            f"{spec.path}.{name}".removeprefix(".")
            for spec, module in zip(apply.skeleton.specs, modules, strict=True)
            for name, value in module.__dict__.items()
            if name not in TORCH_ATTRIBUTES and _was_set(spec, name, value)
        ]
        set_attributes += [
            f"{spec.path}.{key}".removeprefix(".")
            for spec, module in zip(apply.skeleton.specs, modules, strict=True)
            for key, name in spec.parameters.items()
            if name is not None
            and module._parameters.get(key, call_parameters[name])
            is not call_parameters[name]
        ]
        set_attributes += [
            f"{self.skeleton.specs[index].path}.{name}".removeprefix(".")
            for index, name in self.skeleton.copied_attributes
            if name not in TORCH_ATTRIBUTES
            and _was_written(
                self.skeleton.specs[index].attributes[name],
                modules[index].__dict__.get(name),
            )
        ]
        made_parts = [
            f"{spec.path}.{key}".removeprefix(".")
            for spec, module in zip(self.skeleton.specs, modules, strict=True)
            for key, part in (*module._modules.items(), *module._parameters.items())
            if spec.children.get(key) is None
            and spec.parameters.get(key) is None
            and _has_parameters(part)
        ]
        if made_parts:
            self.watches_attributes = False
            self._warn(
                f"made parameters ({some(made_parts)}), and the call threw them away: each call "
                "makes them again, and nothing trains them. Call the module once, or make them in "
                "__init__, before make_functional"
            )
        if set_attributes:
            self.watches_attributes = False
            self._warn(
                f"set attributes of the module ({some(set_attributes)}), and the call threw them "
                "away: every call begins with those of make_functional. Run what shares them in "
                "one call, with apply.method(function), or keep them in buffers, with mutable=True"
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


def _has_parameters(part: nn.Module | torch.Tensor | None) -> bool:
    return isinstance(part, torch.Tensor) or (
        part is not None and next(part.parameters(), None) is not None
    )


def _was_written(before: Any, after: Any) -> bool:
    """Return whether a call wrote to a tensor, such as a cache of keys, also in a container."""
    tensor_pairs = list(zip(tree.tensors_in(before), tree.tensors_in(after), strict=False))
    # Why the version: a tensor that the call made is a result, which it makes again.
    return type(before) is type(after) and any(
        old.shape == new.shape
        and old.dtype == new.dtype
        and version(new) > 0
        and _differ(new, old, old.dtype)
        for old, new in tensor_pairs
    )


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
            change
            for change, numbers in state_after.items()
            if numbers != state_before[change]
        ]
        if change_titles:
            warnings.warn(
                f"{type(module).__name__} was changed after make_functional had copied it: "
                f"{', and '.join(change_titles)}. Neither apply nor params see that: change the "
                "module first, or call from_state_dict for values, apply.eval() or apply.train() "
                "for modes",
                stacklevel=callers_level(),
            )


def _state(module: nn.Module) -> dict[str, list[int]]:
    """Return numbers that a change of the module would change, by the kind of change."""
    parameters = list(module.parameters())
    # Why no hooks: modules of Hugging Face install some in their calls.
    return {
        _WRITTEN: _versions(parameters),
        "parameters were frozen or unfrozen": [
            tensor.requires_grad for tensor in parameters
        ],
        _TRAINING: [m.training for m in module.modules()],
    }


# --- functions that are taken for modules ---------------------------------------------------------


_BEFORE = (
    "the function has no parameters of its own: make_functional returned them as params"
)
_APPLY = {
    "parameters": _BEFORE,
    "state_dict": f"{_BEFORE}; call fs.to_state_dict(shards, plan, mesh) with shards",
    "to": "call module.to(...) before make_functional",
}
_SHARDED = {
    "eval": "call fully_shard(apply.eval(), plan, mesh), which takes the same shards",
    "train": "call fully_shard(apply.train(), plan, mesh), which takes the same shards",
    "parameters": "the parameters are the shards, which every call takes",
    "state_dict": "call fs.to_state_dict(shards, plan, mesh)",
    "load_state_dict": "call shards = fs.from_state_dict(state_dict, plan, mesh)",
    "no_sync": "pass accumulate= to make_train_step, or call fs.accumulate",
    "gradient_checkpointing_enable": "pass remat=True to fully_shard, or the names of units",
}


# By the function of the library that returned a function: what to do for the attributes of modules,
# and how to run a method of the module.
_ADVICE = {
    "make_functional": (_APPLY, "apply.method({!r})"),
    "fully_shard": (_SHARDED, "fs.fully_shard(apply.method({!r}), plan, mesh)"),
}


def absent_attribute(maker: str, name: str, cls: type | None) -> AttributeError:
    """Return the error for an attribute that a function lacks, with what to do.

    Arguments:
        maker: the function of the library that returned the function.
    """
    advice, method_call = _ADVICE[maker]
    is_method = callable(getattr(cls, name, None)) and not hasattr(nn.Module, name)
    if is_method and name not in advice and not name.startswith("_"):
        advice = {
            name: f"it is a method of the module, whose function is {method_call.format(name)}"
        }
    return absent(f"a function of {maker}", name, advice)
