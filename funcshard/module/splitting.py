"""``make_functional``: split any ``nn.Module`` into a pure function, parameters and buffers."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn

from funcshard._utils.closures import reachable
from funcshard._utils.options import check_flag
from funcshard._utils.process_state import without_collection
from funcshard._utils.tensors import check_plain
from funcshard._utils.torch_modules import LARGE, class_for_calls
from funcshard._utils.torch_private import (
    callers_level,
    has_gradient_hooks,
    is_compiled_in_place,
    storage_id,
)
from funcshard.comm import Mesh
from funcshard.module.copying import (
    TABLES,
    TORCH_CONTAINERS,
    NamedTensors,
    References,
    Tensors,
    attributes_to_follow,
    is_immutable,
    make_template,
)
from funcshard.module.functional import (
    DiscardedChanges,
    Functional,
    LateChanges,
    ModuleSpec,
    Names,
    Skeleton,
    plain_tensors,
)

Modules = Sequence[tuple[str, nn.Module]]  # path and module
Entry = TypeVar("Entry", str, int)


def make_functional(
    module: nn.Module, mutable: bool = False
) -> tuple[Functional, Tensors, Tensors]:
    """Turn your module into a pure function of its parameters and buffers.

    A call changes neither the module nor its arguments, and later changes of the module do not
    reach the function. So set training modes, freeze parameters, add hooks and load state dicts
    before. You may call it in several threads at once, inside itself, and under the transforms of
    ``torch.func``. A tied parameter appears once, under its first name, and stays tied; DTensors
    stay DTensors.

    Arguments:
        module: any module, on any device, including ``"meta"``.
        mutable: whether the function also returns the new buffers, such as the running statistics
            of BatchNorm. If not, the first call that would change one warns you.

    Returns:
        ``(apply, params, buffers)``. ``apply(params, buffers, *args, **kwargs)`` returns the output
        of the module; with ``mutable`` ``(output, new_buffers)``. ``params`` and ``buffers`` are
        ``{name: tensor}``, copies under the names of ``named_parameters`` and ``named_buffers``,
        with their ``requires_grad``. ``apply.eval()``, ``apply.train()`` and ``apply.method(name)``
        return functions that run the module in another mode, or another method.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``; ``torch.compile``, DistributedDataParallel,
            FSDP or ``torch.jit`` wrapped, changed or made one of its modules; an attribute refers
            to one in a way that copying does not follow, such as a global variable; a parameter or
            buffer is of a tensor class with its own operations, other than DTensor.
        ValueError: a lazy module has not been initialised; an embedding has a ``max_norm``; a
            parameter has hooks.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(2, 1))
        >>> zeros = {name: torch.zeros_like(value) for name, value in params.items()}
        >>> apply(zeros, buffers, torch.ones(1, 2))
        tensor([[0.]])

        With ``mutable``, a call returns the buffers that it would have changed:

        >>> apply, params, buffers = fs.make_functional(torch.nn.BatchNorm1d(2), mutable=True)
        >>> _, new_buffers = apply(params, buffers, torch.ones(4, 2))
        >>> buffers["num_batches_tracked"], new_buffers["num_batches_tracked"]
        (tensor(0), tensor(1))

    Source: ``torch.func.functional_call``, which swaps tensors into one shared module.
    """
    if not isinstance(module, nn.Module):
        title, remedy = type(module).__name__, "unshard shards a function of your own"
        if isinstance(module, type) and issubclass(module, nn.Module):
            title = f"the class {module.__name__}"
            remedy = f"make a module of it, as in {module.__name__}(...)"
        elif isinstance(module, Functional):
            title, remedy = (
                "a function that make_functional returned",
                "pass it to fully_shard",
            )
        raise TypeError(f"make_functional takes a torch.nn.Module; found {title}: {remedy}")
    check_flag("mutable", mutable)
    with without_collection():
        skeleton, params, buffers = make_skeleton(module)
        for first_name, all_names in skeleton.parameters.items():
            param: Any = params[first_name]
            # Why these attributes: make_plan reads from them all names of a tied parameter, the
            # classes of the modules that contain a parameter, and the order of the module's state
            # dict. The first one also says that the parameter is frozen unless it requires a
            # gradient.
            param.funcshard_modules = {
                alias: skeleton.classes(alias) for alias in all_names
            }
            param.funcshard_names = skeleton.state_names
    apply = Functional(
        skeleton=skeleton,
        mutable=mutable,
        discarded=DiscardedChanges(skeleton, mutable=mutable),
        late_changes=LateChanges(module),
    )
    return apply, params, buffers


def make_skeleton(module: nn.Module) -> tuple[Skeleton, Tensors, Tensors]:
    """Split ``module`` into a skeleton and copies of its parameters and buffers.

    Returns:
        ``(skeleton, parameters, buffers)``, each tensor once, under its first name.
    """
    modules = list(module.named_modules())
    parameters, parameter_names = _by_name(module.named_parameters(remove_duplicate=False))
    buffers, buffer_names = _by_name(module.named_buffers(remove_duplicate=False))
    _check_module(modules, parameters, buffers)
    template_modules, stand_ins = make_template(
        [m for _, m in modules], {**parameters, **buffers}
    )
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
        [value for _, _, value in own_attributes],
        module_indices.keys() | tensor_names.keys(),
    )
    # Why these too: a function is immutable, but a call needs its own if it captured modules.
    captured_functions = {id(capture.function) for capture in references.captures}
    copied_attributes += [
        (index, key)
        for index, key, value in own_attributes
        if id(value) in captured_functions or _needs_copy(specs[index].cls, value)
    ]
    copied_values = [specs[index].attributes[key] for index, key in copied_attributes]
    all_paths = list(module.named_modules(remove_duplicate=False))
    original_indices = {id(m): index for index, (_, m) in enumerate(modules)}
    skeleton = Skeleton(
        modules=tuple(template_modules),
        stand_ins=stand_ins,
        specs=specs,
        indices={path: original_indices[id(m)] for path, m in all_paths},
        copied_attributes=tuple(copied_attributes),
        hook_tables=tuple(hook_tables),
        aliases=tuple(
            f"{specs[index].path}.{key}".removeprefix(".")
            for index, key, value in own_attributes
            if isinstance(value, list | tuple | dict)
            and any(id(inner) in tensor_names for inner in reachable(value))
        ),
        references=references,
        large=_large_tensors(copied_values),
        generators=tuple(
            v for v in reachable(copied_values) if isinstance(v, torch.Generator)
        ),
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
    path: str,
    m: nn.Module,
    tensor_names: Mapping[int, str],
    module_indices: Mapping[int, int],
) -> ModuleSpec:
    try:
        parameters = _looked_up(m._parameters, tensor_names)
        buffers = _looked_up(m._buffers, tensor_names)
        children = _looked_up(m._modules, module_indices)
    except KeyError as error:  # tensordict's TensorDictParams makes other parameters
        raise TypeError(
            f"make_functional copies the module, and {path or '(root)'!r} ({type(m).__name__}) "
            "copies itself with other tensors or modules than copy.deepcopy would: keep its "
            "parameters in an nn.ParameterDict"
        ) from error
    return ModuleSpec(
        path=path,
        cls=class_for_calls(m),
        attributes={
            key: value
            for key, value in m.__dict__.items()
            if key not in TABLES and (key not in TORCH_CONTAINERS or value)
        },
        parameters=parameters,
        buffers=buffers,
        children=children,
    )


def _looked_up(
    table: Mapping[str, Any], by_id: Mapping[int, Entry]
) -> dict[str, Entry | None]:
    return {
        key: None if value is None else by_id[id(value)] for key, value in table.items()
    }


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
    all_tensors = plain_tensors(values)
    # Note: of views, deepcopy copies the memory once.
    storage_counts = Counter(map(storage_id, all_tensors))
    return tuple(
        [
            tensor
            for tensor in all_tensors
            if tensor.numel() >= LARGE
            and not (tensor.requires_grad or vars(tensor))
            and storage_counts[storage_id(tensor)] == 1
        ]
    )


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
_COMPILE = (
    "pass compiler=torch.compile to fully_shard, which compiles the forward of each unit"
)


def _check_module(
    modules: Modules, parameters: NamedTensors, buffers: NamedTensors
) -> None:
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
    for name, parameter in parameters.items():
        if has_gradient_hooks(parameter):
            raise ValueError(
                f"parameter {name!r} has hooks, which no call would run: remove them; change gradients "
                "in fs.value_and_grad(on_grads=...), or those of outputs by hooks of modules"
            )
        # Why None passes: it means any dtype.
        if (
            parameter.requires_grad
            and parameter.is_leaf
            and parameter.grad_dtype not in (None, parameter.dtype)
        ):
            raise ValueError(
                f"parameter {name!r} has grad_dtype={parameter.grad_dtype}, and its gradients would be "
                f"of {parameter.dtype}: set grad_dtype to that, and reduce_dtype and "
                "keep_low_precision_grads of MixedPrecision for sums of another dtype"
            )
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
        return (
            f"is parallelized by {cls.__name__}, {_EXCHANGES}; use its .module: {_IN_PLACE}"
        )
    # Why by name: an import of torch.distributed.fsdp or torch._dynamo takes a while.
    if any(base.__module__.startswith("torch.distributed.fsdp.") for base in cls.__mro__):
        return (
            f"is parallelized by FSDP, {_EXCHANGES}; use the module without it: {_IN_PLACE}"
        )
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
