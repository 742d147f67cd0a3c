"""Optimizer state by parameter name, in the layout of ``torch.distributed.checkpoint``.

On the shards, an optimizer keeps flat tensors, such as ``exp_avg``, and scalars, such as ``step``,
once for each flat buffer and parameter group. By name, each parameter has a dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils.donation import check_not_donated
from funcshard.checkpoint.functional_optimizer import ByBuffer, partition_state
from funcshard.checkpoint.matrix_states import matrix_states_by_path
from funcshard.checkpoint.state_dict import (
    check_flags,
    check_no_local_leaf,
    kept_copy,
    leaves_for_this_rank,
)
from funcshard.checkpoint.stored_state import fits_shard
from funcshard.comm import Mesh
from funcshard.core import check_mesh
from funcshard.plan import BufferPlan, Plan, UnitPlan
from funcshard.train import (
    MuonStep,
    PairStep,
    ParamGroupLayout,
    PerMatrixStep,
    TorchOptimizer,
    check_optimizer,
    trainable_buffers,
)

LeafState = dict[str, Any]
"""The state of one parameter: ``{"exp_avg": tensor, "step": tensor, ...}``."""


def optimizer_to_state_dict(
    opt_state: Any,
    optimizer: Any,
    plan: Plan,
    mesh: Mesh,
    *,
    rank0_only: bool = False,
    offload: bool = False,
    sharded: bool = False,
    flatten: bool = False,
) -> dict[str, Any]:
    """Return your optimizer's state by name; ``optimizer_from_state_dict`` is the inverse.

    The layout is that of torch's ``get_optimizer_state_dict``. You have to call it on every rank.

    Arguments:
        opt_state: this rank's state, as the optimizer returned it.
        optimizer: ``torch_optimizer``, ``muon``, ``per_matrix``, or an ``(init, update)`` pair in
            the style of TorchOpt and Optax.
        plan: the plan of your shards.
        mesh: the ranks.
        rank0_only: as in ``to_state_dict``.
        offload: as in ``to_state_dict``.
        sharded: as in ``to_state_dict``.
        flatten: whether to return one flat dictionary with names such as
            ``"state.0.weight.exp_avg"``, like torch's ``flatten_optimizer_state_dict``.

    Returns:
        ``{"state": {name: state}, "param_groups": [{"lr": ..., "params": [names]}, ...]}``, where a
        leaf's state is ``{"exp_avg": tensor, "step": tensor, ...}``. Leaves without state are left
        out. For an ``(init, update)`` pair, the keys of a leaf's state are paths in the pair's
        state, such as ``"0.mu"``.

    Raises:
        ValueError: a leaf is local, so that ``rank0_only`` would lose state of other ranks.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(3)}
        >>> optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     state, grads = optimizer.init(shards), fs.shard(params, plan, mesh)
        ...     _, opt_state = optimizer.step(grads, state, shards)
        ...     return fs.optimizer_to_state_dict(opt_state, optimizer, plan, mesh)["state"]
        >>> fs.simulate(main, world_size=2)[0]
        {'w': {'momentum_buffer': tensor([1., 1., 1.])}}

    Source: ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.
    """
    check_flags(rank0_only=rank0_only, offload=offload, sharded=sharded, flatten=flatten)
    check_mesh(
        plan,
        mesh,
        {
            "the options of optimizer_to_state_dict": f"rank0_only={rank0_only!r}, sharded={sharded!r}"
        },
    )
    if rank0_only:
        check_no_local_leaf(plan)
    check_optimizer(optimizer, plan)
    # Note: the three kinds of optimizers differ only in where they keep their entries.
    shard_entries, param_groups = _entries_and_groups(opt_state, optimizer, plan, mesh)
    states_by_path: dict[str, LeafState] = {path: {} for path in trainable_paths(plan)}
    # Leaves of groups that take their first step next, and have no state yet.
    new_paths: set[str] = set()
    for entry in shard_entries:
        # Note: every rank has the same entries in the same order, because flat ones are gathered.
        unit, buffer, value, group_of = entry.unit, entry.buffer, entry.value, entry.layout.group_of
        if isinstance(value, torch.Tensor) and entry.is_flat(value):
            flat_tensor = entry.layout.spread(value, buffer)
            for leaf, leaf_value in leaves_for_this_rank(
                flat_tensor, unit, buffer, mesh, rank0_only, offload, sharded
            ):
                if leaf.path in group_of:
                    states_by_path[leaf.path][entry.name] = leaf_value
            continue
        if isinstance(value, torch.Tensor) and value.ndim == 1 and value.numel() > 1:
            raise ValueError(
                f"the entry {entry.name!r} of unit {unit.title!r} must have {buffer.shard_numel} "
                f"elements, as the shard has under the plan; found {value.numel()}: pass the plan "
                "that the state was made with"
            )
        # Note: with several parameter groups, the leaves of each have their own scalar.
        group_scalars = value if isinstance(value, tuple) else (value,) * entry.layout.count
        for leaf in buffer.leaves:
            if value is None or leaf.path not in group_of:
                continue
            group_scalar = group_scalars[group_of[leaf.path]]
            if group_scalar is None and any(other is not None for other in group_scalars):
                new_paths.add(leaf.path)
            if isinstance(group_scalar, torch.Tensor):
                group_scalar = kept_copy(group_scalar, offload)
            states_by_path[leaf.path][entry.name] = group_scalar
    if isinstance(step := getattr(optimizer, "step", None), PerMatrixStep):
        matrix_states = matrix_states_by_path(
            opt_state["matrices"],
            step,
            mesh,
            rank0_only=rank0_only,
            offload=offload,
            sharded=sharded,
        )
        states_by_path |= matrix_states
    if rank0_only and mesh.rank:
        return {}
    # Note: torch has no entry for a parameter that has taken no step, so neither have we.
    leaf_states = {
        path: leaf_state
        for path, leaf_state in states_by_path.items()
        if leaf_state and path not in new_paths
    }
    state_dict = {"state": plan.in_order(leaf_states), "param_groups": param_groups}
    return _flattened(state_dict) if flatten else state_dict


# --- from an optimizer's state --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A named entry of the state of one shard, such as ``exp_avg`` or ``step``.

    Attributes:
        name: its name.
        unit: the unit of the shard.
        buffer: the buffer of the shard.
        value: a flat tensor that's cut like the shard, a scalar, a tuple with a scalar for each
            parameter group, or ``None``.
        layout: where the parameter groups lie in the shards.
    """

    name: str
    unit: UnitPlan
    buffer: BufferPlan
    value: Any
    layout: ParamGroupLayout

    def is_flat(self, value: torch.Tensor) -> bool:
        """Return whether ``value`` is a flat tensor, and no scalar."""
        return fits_shard(value, self.buffer, self.layout.numel(self.buffer))


def _entries_and_groups(
    opt_state: Any, optimizer: Any, plan: Plan, mesh: Mesh
) -> tuple[list[_Entry], list[dict[str, Any]]]:
    leaf_paths = trainable_paths(plan)
    step: Any = getattr(optimizer, "step", None)
    if not isinstance(optimizer, TorchOptimizer) or isinstance(step, PairStep):
        per_shard, other_values = partition_state(opt_state, plan)
        layout = group_layout(step and step.layout, plan, mesh)
        pair_paths = [path for path in leaf_paths if path in layout.group_of]
        return _entries(per_shard, layout, plan), [{**other_values, "params": pair_paths}]
    _check_opt_state(opt_state, step, plan)
    if isinstance(step, PerMatrixStep):
        matrix_group = {"params": [*dict.fromkeys(m.holder.path for m in step.owners.matrices)]}
        if step.others is None:
            return [], [matrix_group]
        shard_entries, param_groups = _entries_and_groups(
            opt_state["others"], step.others, plan, mesh
        )
        return shard_entries, [*param_groups, matrix_group]
    step_count = opt_state["steps"]
    shard_entries, param_groups = [], []
    # Note: Muon's step holds a whole AdamW for the leaves that are no matrices.
    if isinstance(step, MuonStep):
        shard_entries = _entries({"momentum_buffer": opt_state["momentum"]}, step.layout, plan)
        param_groups = step.param_groups(step_count)
        step, opt_state = step.adamw, opt_state["adamw"]
    by_name: dict[str, dict[str, dict[str, Any]]] = {}
    for unit, buffer in trainable_buffers(plan):
        # Note: shards keep their entries; a state dict wants each entry of all shards.
        for name, value in opt_state["leaves"][unit.name][buffer.key].items():
            shard_values = by_name.setdefault(name, {name: {} for name in plan.units})
            shard_values[unit.name][buffer.key] = value
    shard_entries += _entries(by_name, group_layout(step.layout, plan, mesh), plan)
    return shard_entries, param_groups + step.param_groups(step_count, leaf_paths)


def _entries(by_name: Mapping[str, ByBuffer], layout: ParamGroupLayout, plan: Plan) -> list[_Entry]:
    return [
        _Entry(
            name=name,
            unit=unit,
            buffer=buffer,
            value=shard_values[unit.name].get(buffer.key),
            layout=layout,
        )
        for name, shard_values in by_name.items()
        for unit, buffer in trainable_buffers(plan)
    ]


def _check_opt_state(opt_state: Any, step: Any, plan: Plan) -> None:
    """Raise unless ``opt_state`` is a state of a ``torch.optim`` optimizer under the plan."""
    if not isinstance(opt_state, Mapping):
        raise TypeError(
            f"opt_state must be the optimizer's own state; found {type(opt_state).__name__}: pass "
            "state.opt_state of a TrainState"
        )
    required_keys = {"steps", "leaves"}
    if isinstance(step, MuonStep):
        required_keys = {"steps", "momentum", "adamw"}
    elif isinstance(step, PerMatrixStep):
        required_keys = {"matrices", "others"}
    if missing_keys := required_keys - opt_state.keys():
        raise ValueError(
            f"opt_state must be a state of the optimizer, which has {sorted(required_keys)}; found "
            f"no {sorted(missing_keys)}: pass state.opt_state, or what optimizer.init returned"
        )
    shard_states = opt_state.get("leaves", opt_state.get("momentum"))
    check_not_donated(opt_state.get("matrices", shard_states))
    if isinstance(shard_states, Mapping) and not shard_states.keys() <= plan.units.keys():
        raise ValueError(
            f"opt_state must hold the units of the plan, {list(plan.units)[:6]}; found "
            f"{list(shard_states)[:6]}: pass the plan that the state was made with"
        )


def _flattened(state_dict: dict[str, Any]) -> dict[str, Any]:
    flat_dict = {
        f"state.{path}.{name}": value
        for path, leaf_state in state_dict["state"].items()
        for name, value in leaf_state.items()
    }
    for group in state_dict["param_groups"]:
        options = {key: value for key, value in group.items() if key != "params"}
        for path in group["params"]:
            flat_dict.update(
                (f"param_groups.{path}.{key}", value) for key, value in options.items()
            )
    return flat_dict


def trainable_paths(plan: Plan) -> list[str]:
    """Return the paths of the trainable leaves, in the order of the tree."""
    leaves = [leaf for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves]
    return [leaf.path for leaf in sorted(leaves, key=lambda leaf: leaf.index)]


def group_layout(layout: ParamGroupLayout | None, plan: Plan, mesh: Mesh) -> ParamGroupLayout:
    """Return where parameter groups lie in this rank's shards; by default all in one group."""
    # Note: with it, a state without groups needs no code of its own.
    one_group = dict.fromkeys(trainable_paths(plan), 0)
    return layout or ParamGroupLayout(one_group, 1, mesh.shard.rank)
