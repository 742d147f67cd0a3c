"""Initialisation: shards of parameters that never exist all at once, from a function per unit or a module on meta."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from funcshard._utils import tree, version
from funcshard.comm import Mesh, check_same
from funcshard.core import Shards, check_leaf, check_mesh, cut, empty_shard, put
from funcshard.module.placeholder import placeholder
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan, dtype_of

__all__ = ["init_module", "init_shards"]

_Home = tuple[UnitPlan, BufferPlan, LeafSpec]


def init_shards(init: Callable[[UnitPlan], Mapping[str, torch.Tensor]], plan: Plan, mesh: Mesh) -> Shards:
    """Make shards of new parameters, one unit at a time: ``shard`` without the whole tree.

    Every rank makes every unit's full leaves, in plan order, and keeps its slices, so they are equal on all ranks if
    ``init`` gives the same values everywhere. Random numbers do if the ranks were seeded alike, which is checked. Leaves
    that the plan keeps local to a rank come from ``init`` too; what it makes of them may depend on the rank, or, where they
    are local along one axis, on the rank's place along that axis.

    Arguments:
        init: ``init(unit)`` -> ``{path: tensor}`` for the leaves of one unit, ``plan.units[name]``.
        plan: how they are cut.
        mesh: the ranks, of the plan's shape.

    Returns:
        Shards; see ``shard``.

    Raises:
        ValueError: a leaf is missing, or has another shape or dtype than planned; the ranks' random states differ.

    Example:
        >>> import torch, funcshard as fs
        >>> def init(unit):
        ...     return {leaf.path: torch.randn(leaf.shape) for leaf in unit.leaves}
        >>> def main(mesh):
        ...     torch.manual_seed(0)
        ...     plan = fs.make_plan({"a": torch.empty(3, device="meta"), "b": torch.empty(2, device="meta")}, mesh)
        ...     return fs.gather(fs.init_shards(init, plan, mesh), plan, mesh)["a"]
        >>> first, second = fs.simulate(main, world_size=2)
        >>> torch.equal(first, second)
        True
    """
    check_mesh(plan, mesh)
    _check_random_state(mesh)
    shards = {}
    for unit in plan.unit_list:
        values = init(unit)
        wanted = {leaf.path for leaf in unit.leaves}
        if not isinstance(values, Mapping) or values.keys() != wanted:
            found = sorted(values)[:6] if isinstance(values, Mapping) else type(values).__name__
            raise ValueError(
                f"init must return {{path: tensor}} for the leaves of unit {unit.title!r}, {sorted(wanted)[:6]}; found "
                f"{found}"
            )
        shards[unit.name] = cut(unit, values, mesh, "init(unit)")
        del values  # before the next unit's are made
    return shards


def init_module(
    module: nn.Module, plan: Plan, mesh: Mesh, *, reset: Callable[[nn.Module], object] | None = None
) -> tuple[Shards, dict[str, torch.Tensor]]:
    """Make the shards and buffers of a module on the meta device: what no rank has memory for never exists.

    The values are those of ``module.to_empty(device=mesh.device).apply(reset)`` after the same seed, to the bit: modules
    are reset children first, in the order of ``nn.Module.apply``. That order can differ from the order in which a
    constructor draws its numbers. Before neighbours in this order that lie in one unit are reset, their own parameters come
    to be; after that this rank's slices are kept and the rest is freed. So never more than one unit's parameters exist. A
    parameter of another unit cannot be read by then.

    Arguments:
        module: a module with all parameters on meta; it stays as it is. Its buffers may be on meta, or have values, which
            are copied before modules are reset.
        plan: the plan of its parameters.
        mesh: the ranks, of the plan's shape. They have to be seeded alike, which is checked.
        reset: ``reset(module)`` writes a module's own parameters and buffers, in place or by assignment, and may write those
            of modules inside it that belong to the same unit. By default it calls ``reset_parameters``, or
            ``_reset_parameters``, of the modules that have one.

    Returns:
        ``(shards, buffers)``, as from ``shard`` and ``make_functional``.

    Raises:
        ValueError: a parameter or a buffer on meta was not written; a parameter has values already; one of another unit was
            read; the plan is another module's; the ranks' random states differ.

    Example:
        >>> import torch, funcshard as fs
        >>> with torch.device("meta"):
        ...     net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> apply, params, _ = fs.make_functional(net)
        >>> def main(mesh):
        ...     torch.manual_seed(0)
        ...     plan = fs.make_plan(params, mesh, units=["*"])
        ...     shards, buffers = fs.init_module(net, plan, mesh)
        ...     return fs.fully_shard(apply, plan, mesh)(shards, buffers, torch.ones(1, 2))
        >>> first, second = fs.simulate(main, world_size=2)
        >>> _ = torch.manual_seed(0)
        >>> same = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> torch.equal(first, same(torch.ones(1, 2))) and torch.equal(first, second)
        True

    Source: ``param_init_fn`` of ``torch.distributed.fsdp.FullyShardedDataParallel``.
    """
    check_mesh(plan, mesh)
    _check_random_state(mesh)
    homes = _homes(module, plan)
    new = copy.deepcopy(module)  # nothing but meta tensors, and buffers with values
    frozen = {path for path, parameter in module.named_parameters(remove_duplicate=False) if not parameter.requires_grad}
    blanks = _make_buffers(new, mesh.device)
    absent: dict[str, Any] = {
        leaf.path: placeholder(leaf, buffer, unit.in_full_precision(), mesh.device)
        for unit, buffer, leaf in dict.fromkeys(homes.values())
    }
    for path, m in new.named_modules():
        m._parameters.update({name: absent[homes[place][2].path] for name, place in _own(path, m)})
    shards = {u.name: {b.key: empty_shard(u, b, mesh) for b in u.buffers} for u in plan.unit_list}
    written: set[str] = set()

    def together(members: list[tuple[str, nn.Module]]) -> None:
        """Reset neighbours of one unit: make their own parameters, keep this rank's slices, free them."""
        own = [(m, name, place, homes[place]) for path, m in members for name, place in _own(path, m)]
        made = {leaf.path: _blank(leaf, buffer, mesh.device, place in frozen) for _, _, place, (_, buffer, leaf) in own}
        for m, name, _, (_, _, leaf) in own:
            m._parameters[name] = made[leaf.path]
        for path, m in members:
            _reset(path, m, reset)
        for m, name, place, (unit, buffer, leaf) in own:
            value: Any = m._parameters[name]
            if value is not absent[leaf.path] and _written(value, made[leaf.path], place):
                check_leaf(value, leaf, buffer, "the module after its reset")
                put(shards[unit.name][buffer.key], value, leaf, buffer, mesh)
                written.add(leaf.path)
        for m, name, _, (_, _, leaf) in own:
            m._parameters[name] = absent[leaf.path]

    with torch.no_grad():
        for _, members in itertools.groupby(_in_order("", new), lambda item: _unit_at(item[0], plan)):
            together(list(members))
    buffers = dict(new.named_buffers())
    unwritten = [leaf.path for leaf in plan.leaves if leaf.path not in written]
    unwritten += [name for name, value in buffers.items() if name in blanks and not _written(value, blanks[name], name)]
    if unwritten:
        raise ValueError(
            f"every parameter, and every buffer on meta, must be written by the reset of a module that holds it; nothing "
            f"wrote {unwritten[:6]}: pass reset=function, which is called with each module, or give buffers their values"
        )
    return shards, buffers


def _in_order(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules with their paths in the order of ``nn.Module.apply``: children first, one shared by two parents twice."""
    for name, child in module.named_children():
        yield from _in_order(f"{path}.{name}".removeprefix("."), child)
    yield path, module


def _own(path: str, module: nn.Module) -> list[tuple[str, str]]:
    """Names and full names of a module's own parameters."""
    return [(name, f"{path}.{name}".removeprefix(".")) for name, p in module._parameters.items() if p is not None]


def _unit_at(path: str, plan: Plan) -> str:
    """Name of the innermost unit that a module lies in."""
    return max((name for name in plan.units if tree.is_under(path, name)), key=len, default="")


def _homes(module: nn.Module, plan: Plan) -> dict[str, _Home]:
    """Where the parameter of each name lies."""
    homes = {
        path: (unit, buffer, leaf)
        for unit in plan.unit_list
        for buffer in unit.buffers
        for leaf in buffer.leaves
        for path in (leaf.path, *leaf.aliases)
    }
    parameters = dict(module.named_parameters(remove_duplicate=False))
    missing, unexpected = sorted(parameters.keys() - homes.keys()), sorted(homes.keys() - parameters.keys())
    if missing or unexpected:
        raise ValueError(
            f"the plan was made for another module; it lacks {missing[:3] or 'nothing'} of this one's parameters and has "
            f"{unexpected[:3] or 'nothing'} besides: make the plan from make_functional(module)'s params"
        )
    real = [path for path, parameter in parameters.items() if not parameter.is_meta]
    if real:
        raise ValueError(
            f"init_module takes a module with all parameters on meta; {real[:3]} have values: use shard(params, plan, mesh) "
            f"for values that are there, or build the module under torch.device('meta')"
        )
    return homes


def _blank(leaf: LeafSpec, buffer: BufferPlan, device: torch.device, frozen: bool) -> nn.Parameter:
    return nn.Parameter(
        _unwritten(leaf.shape, dtype_of(buffer.dtype), device), requires_grad=buffer.trainable and not frozen
    )


def _unwritten(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor by which one can tell whether it was written: full of NaN, or with a version counter of zero."""
    return torch.full(shape, float("nan") if dtype.is_floating_point or dtype.is_complex else 0, dtype=dtype, device=device)


def _written(value: torch.Tensor | None, blank: torch.Tensor, name: str) -> bool:
    if value is None or value is not blank:
        return value is not None
    if not (value.is_floating_point() or value.is_complex()):
        return version(value) > 0
    nan = value.isnan()
    if nan.any() and not nan.all():
        raise ValueError(f"{name!r} still has elements that its module's reset did not write, or wrote NaN to; write all")
    return not nan.numel() or not nan.any()


def _make_buffers(module: nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Put buffers on ``device`` in place of the module's; return those that have no values yet."""
    blanks = {}
    made: dict[int, torch.Tensor] = {}
    for name, old in list(module.named_buffers()):
        made[id(old)] = _unwritten(old.shape, old.dtype, device) if old.is_meta else old.to(device)
        if old.is_meta:
            blanks[name] = made[id(old)]
    for m in module.modules():
        m._buffers.update({name: made[id(old)] for name, old in m._buffers.items() if old is not None})
    return blanks


def _reset(path: str, module: nn.Module, reset: Callable[[nn.Module], object] | None) -> None:
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    try:
        if reset is not None:
            reset(module)
        elif own is not None:
            own()
    except Exception as error:
        error.add_note(
            f"while module {path or '(root)'!r} ({type(module).__name__}) was reset; only parameters of its own unit exist "
            f"at that time, so a reset has to write each module's own parameters, and read no other unit's"
        )
        raise


def _check_random_state(mesh: Mesh) -> None:
    states = [torch.get_rng_state()]
    if mesh.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(mesh.device))
    digest = hashlib.sha256(b"".join(bytes(state.tolist()) for state in states)).hexdigest()[:16]
    check_same(mesh, digest, "the state of torch's random numbers, as after torch.manual_seed,")
