"""Initialise shards one unit at a time, so that no rank ever holds all parameters."""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from funcshard._utils.options import check_choice, outline
from funcshard.comm import Mesh, check_all_same
from funcshard.core import (
    LeafChecksums,
    Shards,
    check_leaf,
    check_mesh,
    cut,
    empty_shard,
    on_every_rank,
    put_whole,
)
from funcshard.module.block_draws import BlockDraws, drawn_values
from funcshard.module.copying import NamedTensors, Tensors
from funcshard.module.fully_sharded import check_plan_names, placeholder
from funcshard.module.resets import (
    Reset,
    allocate_buffers,
    blank_tensor,
    check_written,
    in_apply_order,
    own_reset,
    unwritten_buffers,
    was_written,
)
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan, innermost_in

_REMEDY = (
    "draw random numbers from torch's generators, which are seeded alike on every rank, and not "
    "from numpy or the rank's number; if ranks need values of their own, make the plan with local="
)

_WHAT = "the module after its reset"


class _Location(NamedTuple):
    """Where the plan keeps a parameter."""

    unit: UnitPlan
    buffer: BufferPlan
    leaf: LeafSpec


def init_shards(init: Callable[[UnitPlan], NamedTensors], plan: Plan, mesh: Mesh) -> Shards:
    """Make the shards of new parameters, with the full leaves of only one unit in memory at a time.

    Every rank calls your ``init`` for every unit, in plan order, keeps its slices of the leaves,
    and frees the rest. So return the same values on every rank, which is checked; seed torch's
    generators alike.

    A leaf that is local along a mesh axis may depend on the rank's index along that axis. Return a
    slice of a larger tensor as that whole tensor; each rank keeps its slice.

    Arguments:
        init: ``init(unit)`` returns ``{path: tensor}`` for the leaves of ``plan.units[name]``, each
            of the shape ``leaf.whole_shape``.
        plan: the plan of the parameters.
        mesh: the ranks, in the plan's shape.

    Returns:
        The shards, as from ``shard``.

    Raises:
        ValueError: ``init`` returned too few or too many leaves, or one of another shape or dtype
            than planned; or ranks differ in their random number generators, or in the values. Every
            rank raises, also if ``init`` failed on one rank only.

    Example:
        >>> import torch, funcshard as fs
        >>> def init(unit):
        ...     return {leaf.path: torch.randn(leaf.whole_shape) for leaf in unit.leaves}
        >>> def main(mesh):
        ...     torch.manual_seed(0)
        ...     params = {"a": torch.empty(3, device="meta"), "b": torch.empty(2, device="meta")}
        ...     plan = fs.make_plan(params, mesh)
        ...     return fs.gather(fs.init_shards(init, plan, mesh), plan, mesh)["a"]
        >>> first, second = fs.simulate(main, world_size=2)
        >>> torch.equal(first, second)
        True
    """
    check_mesh(plan, mesh)
    _check_random_state(mesh)
    if not callable(init) or isinstance(init, type | nn.Module):
        title = type(init).__name__
        if isinstance(init, type):
            title = f"the class {init.__name__}"
        raise TypeError(
            f"init_shards takes a function init(unit) -> {{path: tensor}}; found {title}: call "
            "init_module(module, plan, mesh) for a module on meta, or shard(params, plan, mesh) "
            "for values that exist already"
        )
    checksums = LeafChecksums(mesh, "init(unit)", _REMEDY)
    with on_every_rank(mesh, checksums):
        return {
            unit.name: _init_unit(init, unit, mesh, checksums) for unit in plan.unit_list
        }


def _init_unit(
    init: Callable[[UnitPlan], NamedTensors],
    unit: UnitPlan,
    mesh: Mesh,
    checksums: LeafChecksums,
) -> Tensors:
    """Return the shard of a unit, whose leaves are freed before those of the next are made."""
    leaf_values = init(unit)
    leaf_paths = sorted([leaf.path for leaf in unit.leaves])
    if not isinstance(leaf_values, Mapping) or leaf_values.keys() != {*leaf_paths}:
        raise ValueError(
            f"init must return {{path: tensor}} for the leaves of unit {unit.title!r}, "
            f"{leaf_paths[:6]}; found {outline(leaf_values)}"
        )
    # Why before the checksums: it tells leaves of another shape or dtype.
    # Why whole tensors: ranks that are seeded alike would draw the same values for different
    # slices.
    shard = cut(unit, leaf_values, mesh, "init(unit)", whole=True)
    for buffer in unit.buffers:
        for leaf in buffer.leaves:
            checksums.add(leaf.path, leaf_values[leaf.path], buffer.own_axes(leaf))
    return shard


def init_module(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    *,
    reset: Reset | None = None,
    draws: str = "whole",
) -> tuple[Shards, Tensors]:
    """Make shards and buffers of a module on meta, with one unit's parameters in memory at a time.

    The values equal, to the bit, those of ``module.to_empty(device=mesh.device).apply(reset)``
    after the same seed, which resets modules children first. Your constructor may draw its random
    numbers in another order.

    Modules that follow one another in that order and belong to one unit are reset together. A reset
    therefore cannot read or write parameters of another unit.

    A parameter that is a slice of a larger tensor has the shape of that whole tensor while it is
    reset.

    Arguments:
        module: a module whose parameters are all on meta; it is not changed. Buffers that have
            values are copied.
        plan: the plan of its parameters.
        mesh: the ranks, in the plan's shape. Seed them alike; that, and the values, are checked.
        reset: your ``reset(module)`` writes the module's own parameters and buffers, or those of
            its unit, in place or by assignment. By default it calls the module's
            ``reset_parameters`` or ``_reset_parameters``, if it has one.
        draws: ``"whole"``: every rank draws the random numbers of the whole model. ``"blocks"``: a
            rank draws only blocks of 32,768 elements that its shards touch, so the time falls with
            the number of ranks. The values are others, but the same on every mesh. See
            docs/training.md.

    Returns:
        ``(shards, buffers)``, as from ``shard`` and ``make_functional``.

    Raises:
        ValueError: the plan is for another module; a parameter is not on meta; no reset wrote all
            of a parameter, or of a buffer on meta; a reset used a parameter of another unit; ranks
            differ in their random number generators, or in the values. Every rank raises, also if a
            reset failed on one rank only.

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
    check_choice("draws", draws, ("whole", "blocks"))
    check_mesh(plan, mesh)
    _check_random_state(mesh)
    block_draws = None
    if draws == "blocks":
        # Why torch's generator: torch.manual_seed then decides on these draws too.
        block_draws = BlockDraws(mesh.device, int(torch.randint(2**62, (), device="cpu")))
    checksums = LeafChecksums(mesh, _WHAT, _REMEDY)
    with on_every_rank(mesh, checksums):
        return _reset_module(module, plan, mesh, reset, checksums, block_draws)


def _reset_module(
    module: nn.Module,
    plan: Plan,
    mesh: Mesh,
    reset: Reset | None,
    checksums: LeafChecksums,
    draws: BlockDraws | None,
) -> tuple[Shards, Tensors]:
    """Reset a copy of the module, one unit after another."""
    locations = _locate(module, plan)
    new_module = copy.deepcopy(module)  # cheap: its parameters are meta tensors
    parameters = module.named_parameters(remove_duplicate=False)
    frozen_names = {name for name, parameter in parameters if not parameter.requires_grad}
    blank_buffers = allocate_buffers(new_module, mesh.device)
    placeholders: dict[str, Any] = {
        leaf.path: placeholder(leaf, buffer, unit.in_full_precision(), mesh.device)
        for unit, buffer, leaf in dict.fromkeys(locations.values())
    }
    # Why placeholders: a reset that uses a parameter of another unit gets an error, not garbage.
    for path, m in new_module.named_modules():
        m._parameters.update(
            {
                key: placeholders[locations[name].leaf.path]
                for key, name in _own_names(path, m)
            }
        )
    new_shards = {
        u.name: {b.key: empty_shard(u, b, mesh) for b in u.buffers} for u in plan.unit_list
    }
    make_blank: Callable[..., torch.Tensor] = functools.partial(
        blank_tensor, device=mesh.device
    )
    if draws is not None:
        make_blank = draws.tensor
    written_paths: set[str] = set()
    # The leaves that are drawn in blocks, at the end: a reset may overwrite what it drew before.
    later_puts: dict[str, Callable[[], None]] = {}

    def keep(name: str, value: Any, blank: Any) -> None:
        """Keep this rank's part of a parameter, if it was written."""
        unit, buffer, leaf = locations[name]
        shard, local_axes = new_shards[unit.name][buffer.key], buffer.own_axes(leaf)
        drawn_leaf = drawn_values(value)
        # Note: an operation needed all values, so every rank has made them; and blocks are not
        # those of the storage of packed leaves.
        if drawn_leaf is not None and (
            drawn_leaf.whole is not None or buffer.packing is not None
        ):
            value = blank = (
                drawn_leaf.make_whole() if drawn_leaf.steps else drawn_leaf.whole
            )
            drawn_leaf = None
        is_drawn = drawn_leaf is not None and bool(drawn_leaf.steps)
        is_assigned = drawn_leaf is None and value is not placeholders[leaf.path]
        if not is_drawn and not (is_assigned and was_written(value, blank, name)):
            return
        # Note: a tied parameter, or one of a shared module, is reset once for each path.
        later_puts.pop(leaf.path, None)
        written_paths.add(leaf.path)
        check_leaf(value, leaf, buffer, _WHAT, whole=True)
        if drawn_leaf is None:
            put_whole(shard, value, leaf, buffer, mesh)
        else:
            later_puts[leaf.path] = functools.partial(
                drawn_leaf.blocks.put, shard, leaf, buffer, mesh
            )
            value = drawn_leaf.digest()
        checksums.add(leaf.path, value, local_axes)

    def reset_together(unit_modules: list[tuple[str, nn.Module]]) -> None:
        """Allocate parameters of one unit's modules, reset these, and keep this rank's slices."""
        table_entries = [
            (m._parameters, *names)
            for path, m in unit_modules
            for names in _own_names(path, m)
        ]
        blank_params: dict[str, Any] = {}
        for table, key, name in table_entries:
            _, buffer, leaf = locations[name]
            # Note: a tied parameter stays one parameter while its modules are reset.
            if leaf.path not in blank_params:
                blank = make_blank(leaf.model_shape, buffer.model_dtype)
                blank_params[leaf.path] = nn.Parameter(
                    blank, buffer.trainable and name not in frozen_names
                )
            table[key] = blank_params[leaf.path]
        # Why all before any is kept: a reset may write to other parameters of its unit.
        for path, m in unit_modules:
            _reset(path, m, reset)
        for table, key, name in table_entries:
            leaf_path = locations[name].leaf.path
            value: Any = table[key]
            table[key] = placeholders[leaf_path]
            keep(name, value, blank_params[leaf_path])

    innermost_unit = innermost_in({unit.name: unit.paths for unit in plan.unit_list})
    with torch.no_grad():
        # Why runs of modules, and not all of a unit: the order of resets decides which random
        # numbers a module draws.
        for _, unit_modules in itertools.groupby(
            in_apply_order(new_module), lambda item: innermost_unit(item[0]) or ""
        ):
            reset_together(list(unit_modules))
        for path, put_values in later_puts.items():
            try:
                put_values()
            except Exception as error:
                error.add_note(
                    f"while parameter {path!r} was drawn in blocks, as its module's reset had asked"
                )
                raise
    unwritten_paths = [leaf.path for leaf in plan.leaves if leaf.path not in written_paths]
    check_written([*unwritten_paths, *unwritten_buffers(new_module, blank_buffers)])
    return new_shards, dict(new_module.named_buffers())


def _own_names(path: str, module: nn.Module) -> list[tuple[str, str]]:
    """Return key in the module's table, and name in the model, of its own parameters."""
    table = module._parameters
    return [
        (key, f"{path}.{key}".removeprefix("."))
        for key, parameter in table.items()
        if parameter is not None
    ]


def _locate(module: nn.Module, plan: Plan) -> dict[str, _Location]:
    """Return where the plan keeps each parameter of ``module``."""
    locations = {
        name: _Location(unit, buffer, leaf)
        for unit in plan.unit_list
        for buffer in unit.buffers
        for leaf in buffer.leaves
        for name in leaf.names
    }
    parameters = dict(module.named_parameters(remove_duplicate=False))
    check_plan_names(parameters.keys(), locations.keys())
    for leaf in plan.leaves:
        untied_names = [
            name for name in leaf.aliases if parameters[name] is not parameters[leaf.path]
        ]
        if untied_names:
            raise ValueError(
                f"the plan ties parameter {leaf.path!r} to {untied_names[0]!r}; found two "
                "parameters in the module: tie them again, or make the plan from "
                "make_functional(module)'s params"
            )
    real_names = [name for name, parameter in parameters.items() if not parameter.is_meta]
    if real_names:
        raise ValueError(
            f"init_module takes a module with all parameters on meta; {real_names[:3]} have "
            "values: use shard(params, plan, mesh) for parameters that have values, or build the "
            "module under torch.device('meta')"
        )
    return locations


def _reset(path: str, module: nn.Module, reset: Reset | None) -> None:
    method = own_reset(module)
    try:
        if reset is not None:
            reset(module)
        elif method is not None:
            method()
    except Exception as error:
        error.add_note(
            f"while module {path or '(root)'!r} ({type(module).__name__}) was reset; only "
            "parameters of its own unit exist at that time: write a reset that uses only each "
            "module's own parameters"
        )
        raise


def _check_random_state(mesh: Mesh) -> None:
    generator_states = [torch.get_rng_state()]
    if mesh.device.type == "cuda":
        generator_states.append(torch.cuda.get_rng_state(mesh.device))
    # Why a digest: a generator's state has 5 kB, and the text goes to every rank.
    state_digest = hashlib.sha256(
        b"".join(bytes(state.tolist()) for state in generator_states)
    ).hexdigest()[:16]
    check_all_same(
        mesh,
        {
            "the state of torch's random number generators, as after torch.manual_seed,": state_digest
        },
    )
