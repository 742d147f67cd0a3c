"""Blank tensors, which of them a reset wrote, and resets of a part of a module on meta.

Tables that a module computes, such as those of rotary embeddings, are in no file. ``init_buffers``
resets the modules that hold such buffers, while all parameters stay on meta; ``init_missing`` does
the same for parameters, one unit after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from funcshard._utils import tree
from funcshard._utils.tensors import is_continuous
from funcshard._utils.torch_private import version
from funcshard.comm import Mesh
from funcshard.core import LeafChecksums, Shards, on_every_rank, put_whole
from funcshard.module.copying import NamedTensors, Tensors
from funcshard.plan import Plan

Reset = Callable[[nn.Module], object]


def blank_tensor(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor that shows whether it was written: full of NaN, or else with version 0."""
    filler = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full(shape, filler, dtype=dtype, device=device)


def is_blank(value: torch.Tensor) -> bool:
    """Return whether a blank tensor still has elements that no reset wrote."""
    if not is_continuous(value):
        return bool(value.numel()) and version(value) == 0
    # Why the sum: it is NaN if an element is, and takes a fifteenth of the time of isnan.
    if value.dtype.itemsize > 1 and not value.detach().sum().isnan():
        return False
    return bool(value.detach().isnan().any())


def was_written(value: torch.Tensor | None, blank: torch.Tensor, name: str) -> bool:
    """Return whether a reset wrote ``blank`` or assigned a tensor; raise if it wrote a part."""
    # Note: a reset that assigns a parameter has written all of it.
    if value is None or value is not blank:
        return value is not None
    if not is_blank(value):
        return True
    if not value.isnan().all() and is_continuous(value):
        raise ValueError(
            f"{name!r} still has elements that its module's reset did not write, or wrote NaN to: "
            "write every element"
        )
    return False


def check_written(unwritten: Collection[str]) -> None:
    """Raise if a tensor was left unwritten."""
    if unwritten:
        raise ValueError(
            "every parameter, and every buffer on meta, must be written by the reset of a module "
            f"that holds it; no reset wrote {[*unwritten][:6]}: pass reset=function, which is "
            "called with each module, or give buffers their values"
        )


def allocate_buffers(module: nn.Module, device: torch.device) -> Tensors:
    """Move the module's buffers to ``device``; return those that were on meta and are blank."""
    blanks: Tensors = {}
    moved_buffers: dict[int, torch.Tensor] = {}
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            blanks[name] = blank_tensor(buffer.shape, buffer.dtype, device)
        moved_buffers[id(buffer)] = blanks.get(name, buffer).to(device)
    # Why every table: one buffer may stand in several.
    for m in module.modules():
        m._buffers.update(
            {key: moved_buffers[id(b)] for key, b in m._buffers.items() if b is not None}
        )
    return blanks


def unwritten_buffers(module: nn.Module, blanks: NamedTensors) -> list[str]:
    """Return the names of the buffers of ``allocate_buffers`` that no reset wrote."""
    buffers = dict(module.named_buffers())
    return [
        name
        for name, blank in sorted(blanks.items())
        if not was_written(buffers.get(name), blank, name)
    ]


def in_apply_order(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield paths and modules in the order of ``nn.Module.apply``, children first."""
    for name, child in module.named_children():
        yield from in_apply_order(child, f"{path}.{name}".removeprefix("."))
    yield path, module


def own_reset(module: nn.Module) -> Callable[[], object] | None:
    """Return the method by which a module resets its own tensors, if it has one."""
    method: Any = getattr(module, "reset_parameters", None)
    return method or getattr(module, "_reset_parameters", None)


# --- parts of a module ----------------------------------------------------------------------------


def init_buffers(module: nn.Module, mesh: Mesh, *, reset: Reset | None = None) -> Tensors:
    """Compute the buffers of a module on meta, such as the tables of rotary embeddings.

    Each module that holds a buffer on meta is reset, and so are the modules around it, children
    first. Parameters on meta stay there. Call this where your parameters come from a file, and
    ``init_module`` where they do not.

    Arguments:
        module: a module; it is not changed. Buffers that have values are copied.
        mesh: the ranks; the buffers are on its device.
        reset: your ``reset(module)`` writes the module's own buffers. By default it is the
            ``_init_weights(module)`` of the module or of the nearest one around it, as in Hugging
            Face's models, and then, for buffers that are still unwritten, ``reset_parameters``.

    Returns:
        The buffers by name, as from ``make_functional``.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.
        ValueError: no reset wrote a buffer.

    Example:
        >>> import torch, funcshard as fs
        >>> class Table(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.register_buffer("table", torch.empty(3), persistent=False)
        ...         self.reset_parameters()
        ...     def reset_parameters(self):
        ...         self.table.copy_(torch.arange(3.0))
        >>> with torch.device("meta"):
        ...     net = torch.nn.Sequential(torch.nn.Linear(2, 3), Table())
        >>> fs.init_buffers(net, fs.Mesh())
        {'1.table': tensor([0., 1., 2.])}
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"init_buffers takes a torch.nn.Module; found {type(module).__name__}"
        )
    return _reset_buffers(copy.deepcopy(module), mesh, reset)


def init_missing(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    shards: Shards,
    missing: Collection[str],
    reset: Reset | None = None,
) -> None:
    """Write initial values of some leaves into shards, one flat buffer's at a time.

    Every rank has to call, seeded alike; the values are compared.

    Arguments:
        module: a module on meta; it is not changed.
        plan: the plan of its parameters.
        mesh: the ranks.
        shards: the shards to write to.
        missing: paths of the leaves.
        reset: as in ``init_buffers``, for the modules that hold the leaves and those around them.
    """
    new_module = copy.deepcopy(module)
    remedy = "call torch.manual_seed(0) on every rank before"
    checksums = LeafChecksums(mesh, "the parameters that the files lack", remedy)
    with on_every_rank(mesh, checksums):
        _reset_buffers(new_module, mesh, None)  # because a reset may read them
        # Why buffer by buffer: only these leaves are in memory at a time.
        for unit in plan.unit_list:
            for buffer in unit.buffers:
                leaves = [leaf for leaf in buffer.leaves if leaf.path in missing]
                if not leaves:
                    continue
                leaf_values = _reset_parameters(
                    new_module, mesh, [x.path for x in leaves], reset
                )
                for leaf in leaves:
                    value = leaf_values[leaf.path]
                    put_whole(shards[unit.name][buffer.key], value, leaf, buffer, mesh)
                    checksums.add(leaf.path, value, buffer.own_axes(leaf))


def _reset_parameters(
    module: nn.Module, mesh: Mesh, names: Collection[str], reset: Reset | None
) -> Tensors:
    """Return initial values of some parameters, by name."""
    meta_params = {name: module.get_parameter(name) for name in names}
    blank_params: dict[str, Any] = {}
    for name, old in meta_params.items():
        blank = blank_tensor(old.shape, old.dtype, mesh.device)
        blank_params[name] = nn.Parameter(blank, old.requires_grad)
        _replace(module, old, blank_params[name])
    _reset_around(module, blank_params, reset)
    new_values = {name: module.get_parameter(name) for name in names}
    check_written([n for n in names if not was_written(new_values[n], blank_params[n], n)])
    # Why on meta again: the next leaves take the memory of these.
    for name, value in new_values.items():
        _replace(module, value, meta_params[name])
    return {name: value.detach() for name, value in new_values.items()}


def _replace(module: nn.Module, old: Any, new: Any) -> None:
    # Note: a tied parameter is in several tables.
    for m in module.modules():
        m._parameters.update(
            {key: new for key, parameter in m._parameters.items() if parameter is old}
        )


def _reset_buffers(module: nn.Module, mesh: Mesh, reset: Reset | None) -> Tensors:
    blanks = allocate_buffers(module, mesh.device)
    _reset_around(module, blanks, reset)
    check_written(unwritten_buffers(module, blanks))
    return dict(module.named_buffers())


@torch.no_grad()
def _reset_around(module: nn.Module, blanks: NamedTensors, reset: Reset | None) -> None:
    """Reset the modules that hold the tensors named in ``blanks``, and those around."""
    holder_paths = dict.fromkeys(name.rpartition(".")[0] for name in blanks)
    around_paths = {outer for path in holder_paths for outer in tree.upwards(path)}
    for path, m in in_apply_order(module):
        if path in around_paths:
            init_weights = reset or _init_weights_around(module, path)
            if init_weights is not None:
                init_weights(m)
    # Why as well: Hugging Face's _init_weights leaves out what a module computes by itself.
    if reset is None:
        for path in holder_paths:
            _reset_rest(module.get_submodule(path), blanks.values())


def _reset_rest(module: nn.Module, blanks: Iterable[torch.Tensor]) -> None:
    """Call the module's own reset for the tensors that ``_init_weights`` left blank."""
    tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    real_tensors = {tensor for tensor in tensors if not tensor.is_meta}
    blank_tensors = {tensor for tensor in real_tensors if is_blank(tensor)}
    reset_method = own_reset(module)
    if reset_method is None or blank_tensors.isdisjoint(blanks):
        return
    # Why: ``_init_weights`` has decided on the values of the other tensors.
    decided_values = {t: t.detach().clone() for t in real_tensors - blank_tensors}
    reset_method()
    for tensor, value in decided_values.items():
        tensor.copy_(value)


def _init_weights_around(module: nn.Module, path: str) -> Reset | None:
    """Return the ``_init_weights`` of the innermost module that has one."""
    inside_out = (module.get_submodule(outer) for outer in tree.upwards(path))
    init_methods = (getattr(m, "_init_weights", None) for m in inside_out)
    return next(filter(None, init_methods), None)
