"""Optimizer state by parameter name, in the layout of ``torch.distributed.checkpoint``.

On the shards, an optimizer keeps flat tensors, such as ``exp_avg``, and scalars, such as ``step``,
once for each flat buffer and parameter group. By name, each parameter has a dictionary.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from funcshard.checkpoint.matrix_states import matrix_states_by_path
from funcshard.checkpoint.state_dict import (
    Delivery,
    check_flags,
    check_no_local_leaf,
    kept_copy,
)
from funcshard.checkpoint.state_nodes import (
    StateNode,
    layout_of,
    nodes_of,
    trainable_paths,
)
from funcshard.checkpoint.stored_state import fits_shard
from funcshard.comm import Mesh
from funcshard.core import check_mesh
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan
from funcshard.train import (
    MuonStep,
    PerMatrixStep,
    TorchStep,
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
    step = getattr(optimizer, "step", None)
    flat_state, flat_optimizer = opt_state, optimizer
    if isinstance(step, PerMatrixStep):
        step.check_state(opt_state)
        flat_state, flat_optimizer = opt_state["others"], step.others
    delivery = Delivery(mesh, rank0_only, offload, sharded)
    nodes, other_values = nodes_of(flat_state, flat_optimizer, plan, mesh)
    states_by_path: dict[str, LeafState] = {path: {} for path in trainable_paths(plan)}
    for node in nodes.values():
        for unit, buffer in trainable_buffers(plan):
            # Note: every rank has the same entries in the same order, because flat ones are
            # gathered.
            for name, value in node.entries(unit, buffer).items():
                if fits_shard(value, buffer, node.layout.numel(buffer)):
                    flat_tensor = node.layout.spread(value, buffer)
                    leaf_values = delivery.leaves(flat_tensor, unit, buffer)
                else:
                    leaf_values = _scalars(name, value, node, unit, buffer, offload)
                for leaf, leaf_value in leaf_values:
                    if leaf.path in node.layout.group_of:
                        states_by_path[leaf.path][name] = leaf_value
    param_groups = _param_groups(flat_optimizer, other_values, plan, mesh)
    if isinstance(step, PerMatrixStep):
        matrix_states = matrix_states_by_path(opt_state["matrices"], step, delivery)
        states_by_path |= matrix_states
        param_groups.append({"params": list(matrix_states)})
    if rank0_only and mesh.rank:
        return {}
    # Note: torch has no entry for a parameter that has taken no step, so neither have we.
    leaf_states = {
        path: leaf_state
        for path, leaf_state in states_by_path.items()
        if leaf_state and not any(value is None for value in leaf_state.values())
    }
    state_dict = {"state": plan.in_order(leaf_states), "param_groups": param_groups}
    return _flattened(state_dict) if flatten else state_dict


def _scalars(
    name: str, value: Any, node: StateNode, unit: UnitPlan, buffer: BufferPlan, offload: bool
) -> list[tuple[LeafSpec, Any]]:
    """Return an entry's scalar of each leaf; ``None`` for one that takes its first step next."""
    if isinstance(value, torch.Tensor) and value.ndim == 1 and value.numel() > 1:
        raise ValueError(
            f"the entry {name!r} of unit {unit.title!r} must have {buffer.shard_numel} elements, "
            f"as the shard has under the plan; found {value.numel()}: pass the plan that the state "
            "was made with"
        )
    # Note: with several parameter groups, the leaves of each have their own scalar.
    group_scalars = value if isinstance(value, tuple) else (value,) * node.layout.count
    if all(scalar is None for scalar in group_scalars):
        return []
    group_of, leaf_scalars = node.layout.group_of, []
    for leaf in buffer.leaves:
        if leaf.path in group_of:
            scalar = group_scalars[group_of[leaf.path]]
            if isinstance(scalar, torch.Tensor):
                scalar = kept_copy(scalar, offload)
            leaf_scalars.append((leaf, scalar))
    return leaf_scalars


def _param_groups(
    optimizer: Any, other_values: Mapping[str, Any], plan: Plan, mesh: Mesh
) -> list[dict[str, Any]]:
    if optimizer is None:
        return []
    step, paths = getattr(optimizer, "step", None), trainable_paths(plan)
    param_groups = []
    if isinstance(step, MuonStep):
        param_groups = step.param_groups(other_values["steps"])
        step = step.adamw
    if isinstance(step, TorchStep):
        return param_groups + step.param_groups(other_values["steps"], paths)
    group_of = layout_of(step, plan, mesh).group_of
    return [{**other_values, "params": [path for path in paths if path in group_of]}]


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
