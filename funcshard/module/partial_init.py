"""Initialise a part of a module on meta: its buffers, and parameters that a file lacks.

A checkpoint holds parameters, and some buffers. Tables that a module computes, such as those of
rotary embeddings, are in no file, and a module on the meta device has not computed them.
``init_buffers`` resets the modules that hold such buffers, while all parameters stay on meta.
``init_missing`` does the same for parameters, in one unit after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from funcshard.comm import Mesh
from funcshard.core import LeafChecksums, Shards, put_whole
from funcshard.module.blanks import allocate_buffers, blank_tensor, is_blank, reset_method
from funcshard.plan import Plan, own_axes

Reset = Callable[[nn.Module], object]


def init_buffers(
    module: nn.Module, mesh: Mesh, *, reset: Reset | None = None
) -> dict[str, torch.Tensor]:
    """Compute the buffers of a module on meta, such as the tables of rotary embeddings.

    Each module that holds a buffer on meta is reset, and so are the modules around it, children
    first. Parameters on meta stay there, so a reset writes to them in vain and takes no memory for
    them. Call this where the parameters come from a file, and ``init_module`` where they do not.

    Arguments:
        module: a module; it is not changed. Buffers that have values are copied.
        mesh: the ranks; the buffers are on its device.
        reset: ``reset(module)`` writes the module's own buffers. By default it is the
            ``_init_weights(module)`` of the module or of the nearest one around it, as Hugging
            Face's models have it, and then, for a buffer that is still unwritten, the module's
            ``reset_parameters``.

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
        raise TypeError(f"init_buffers takes a torch.nn.Module; found {type(module).__name__}")
    return _reset_buffers(copy.deepcopy(module), mesh, reset)


def init_missing(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    shards: Shards,
    missing: Collection[str],
    reset: Reset | None = None,
) -> None:
    """Write initial values of some leaves into shards, with one unit's leaves in memory at a time.

    Ranks have to be seeded alike. Their values are compared, so every rank has to call.

    Arguments:
        module: a module on meta; it is not changed.
        plan: the plan of its parameters.
        mesh: the ranks.
        shards: the shards to write to.
        missing: paths of the leaves.
        reset: as in ``init_buffers``, for the modules that hold the leaves and those around them.
    """
    new = copy.deepcopy(module)
    remedy = "call torch.manual_seed(0) on every rank before"
    checksums, fault = LeafChecksums(mesh, "the parameters that the files lack", remedy), None
    try:
        _reset_buffers(new, mesh, None)  # because a reset may read them
        for unit in plan.unit_list:
            for buffer in unit.buffers:
                leaves = {leaf.path: leaf for leaf in buffer.leaves if leaf.path in missing}
                for path, value in _reset_parameters(new, mesh, leaves, reset).items():
                    put_whole(shards[unit.name][buffer.key], value, leaves[path], buffer, mesh)
                    checksums.add(path, value, own_axes(buffer.local, leaves[path].cuts))
    except Exception as error:  # of any kind, because other ranks wait
        fault = error
    checksums.start(fault).finish()


def _reset_parameters(
    module: nn.Module, mesh: Mesh, leaves: Mapping[str, Any], reset: Reset | None
) -> dict[str, torch.Tensor]:
    """Return initial values of some parameters, by name; the module's own are on meta again."""
    places = {name: _place(module, name) for name in leaves}
    old = {name: holder._parameters[key] for name, (holder, key) in places.items()}
    for name in places:
        _replace(module, old[name], _blank_parameter(old[name], mesh.device))
    blanks = {name: holder._parameters[key] for name, (holder, key) in places.items()}
    _reset_around(module, blanks, reset)
    reset_parameters = {name: holder._parameters[key] for name, (holder, key) in places.items()}
    _check_written(reset_parameters, blanks, "parameter")
    for name, value in reset_parameters.items():
        _replace(module, value, old[name])
    return {name: value.detach() for name, value in reset_parameters.items() if value is not None}


def _replace(module: nn.Module, old: Any, new: Any) -> None:
    """Replace one parameter in every table: a tied one stands in several."""
    for m in module.modules():
        m._parameters.update(
            {key: new for key, parameter in m._parameters.items() if parameter is old}
        )


def _reset_buffers(module: nn.Module, mesh: Mesh, reset: Reset | None) -> dict[str, torch.Tensor]:
    """Compute the buffers of ``module``, in place, and return them."""
    blanks = allocate_buffers(module, mesh.device)
    _reset_around(module, blanks, reset)
    _check_written(
        {name: holder._buffers[key] for name in blanks for holder, key in [_place(module, name)]},
        blanks,
        "buffer",
    )
    return dict(module.named_buffers())


def _reset_around(module: nn.Module, blanks: Mapping[str, Any], reset: Reset | None) -> None:
    """Reset the modules that hold the tensors named in ``blanks``, and those around them."""
    holders: dict[str, list[Any]] = {}
    for name, blank in blanks.items():
        holders.setdefault(name.rpartition(".")[0], []).append(blank)
    around = {path[:i] for path in holders for i in range(len(path)) if path[i] == "."} | {
        *holders,
        *([""] if holders else []),
    }
    modules = dict(module.named_modules())
    with torch.no_grad():
        for path in sorted(
            around & modules.keys(), key=lambda path: (-(path.count(".") + bool(path)), path)
        ):
            chosen = reset or _init_weights_around(module, path)
            if chosen is not None:
                chosen(modules[path])
        for path, own_blanks in holders.items() if reset is None else ():
            m = modules[path]
            held = [
                t
                for t in (*m._parameters.values(), *m._buffers.values())
                if t is not None and not t.is_meta
            ]
            own_reset = reset_method(m)
            if own_reset is not None and any(
                is_blank(tensor)
                for tensor in held
                if any(tensor is own_blank for own_blank in own_blanks)
            ):
                written = [
                    (tensor, tensor.detach().clone()) for tensor in held if not is_blank(tensor)
                ]
                own_reset()
                for tensor, value in written:  # _init_weights has decided on these
                    tensor.copy_(value)


def _init_weights_around(module: nn.Module, path: str) -> Reset | None:
    """Return the ``_init_weights`` of the innermost module that has one and holds ``path``."""
    init_weights = None
    for i in range(len(path) + 1):
        if i in (0, len(path)) or path[i] == ".":
            m = module.get_submodule(path[:i])
            init_weights = getattr(m, "_init_weights", None) or init_weights
    return init_weights


def _place(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor, and the key in its table."""
    path, _, key = name.rpartition(".")
    return module.get_submodule(path), key


def _blank_parameter(old: Any, device: torch.device) -> nn.Parameter:
    blank = blank_tensor(old.shape, old.dtype, device)
    return nn.Parameter(blank, requires_grad=old.requires_grad)


def _check_written(found: Mapping[str, Any], blanks: Mapping[str, Any], what: str) -> None:
    unwritten = sorted(
        name for name, value in found.items() if value is blanks[name] and is_blank(value)
    )
    if unwritten:
        raise ValueError(
            f"every {what} on meta must be written by the reset of a module that holds it; no "
            f"reset wrote {unwritten[:3]}: give the module a reset_parameters that writes it, pass "
            "reset=function, or build the module with real buffers"
        )
