"""Optimizer state by parameter name, in the layout of ``torch.distributed.checkpoint``.

On the shards, an optimizer keeps flat tensors, such as ``exp_avg``, and scalars, such as ``step``,
once for each flat buffer and parameter group. By name, each parameter has a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.options import outline
from funcshard.checkpoint.matrix_states import matrix_states_by_path
from funcshard.checkpoint.state_dict import (
    Delivery,
    check_flags,
    check_no_local_leaf,
    kept_copy,
)
from funcshard.checkpoint.stored_state import buffers_in_tree_order, by_buffer, fits_shard
from funcshard.comm import Mesh
from funcshard.core import check_mesh
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan, trainable_buffers
from funcshard.train import (
    MuonStep,
    ParamGroupLayout,
    PerMatrixStep,
    TorchStep,
    check_not_donated,
    check_optimizer,
)

LeafState = dict[str, Any]
"""The state of one parameter: ``{"exp_avg": tensor, "step": tensor, ...}``."""

LeafStates = dict[str, LeafState]
"""The state of each parameter, by path."""


def optimizer_to_state_dict(
    opt_state: Any,
    optimizer: Any,
    plan: Plan,
    mesh: Mesh,
    *,
    rank0_only: bool = False,
    offload: bool = False,
    sharded: bool = False,
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
    check_flags(rank0_only=rank0_only, offload=offload, sharded=sharded)
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
    states_by_path: LeafStates = {path: {} for path in trainable_paths(plan)}
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
    return {"state": plan.in_order(leaf_states), "param_groups": param_groups}


def flatten_optimizer_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Put an optimizer's state dict under one level of names.

    Arguments:
        state_dict: what ``optimizer_to_state_dict`` returned.

    Returns:
        ``{"state.0.weight.exp_avg": tensor, ...}``, which ``optimizer_from_state_dict`` takes too.

    Raises:
        TypeError: ``state_dict`` isn't an optimizer's state dict, or is flat already.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(3)}
        >>> optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        >>> plan, mesh = fs.make_plan(params, 1), fs.Mesh()
        >>> opt_state = optimizer.init(fs.shard(params, plan, mesh))
        >>> state_dict = fs.optimizer_to_state_dict(opt_state, optimizer, plan, mesh)
        >>> fs.flatten_optimizer_state_dict(state_dict)["param_groups.w.lr"]
        0.1

    Source: ``flatten_optimizer_state_dict`` of torch's ``StateDictOptions``.
    """
    if state_dict == {}:
        return {}
    if (
        not isinstance(state_dict, Mapping)
        or not {"state", "param_groups"} <= state_dict.keys()
    ):
        raise TypeError(
            "flatten_optimizer_state_dict takes a dictionary with 'state' and 'param_groups'; "
            f"found {outline(state_dict)}: pass what optimizer_to_state_dict returned"
        )
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


def _scalars(
    name: str,
    value: Any,
    node: StateNode,
    unit: UnitPlan,
    buffer: BufferPlan,
    offload: bool,
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


# --- where a state has a value for each shard ---------------------------------------------------

ByBuffer = Mapping[str, Mapping[str, Any]]
"""One value for each trainable shard: ``{unit: {buffer key: value}}``."""


class StateNode(NamedTuple):
    """What a node with a value for each shard holds.

    Attributes:
        name: the name of the values in a state dict; ``""`` for dictionaries of named entries.
        layout: the elements of shards that they belong to, by parameter group.
        step: the step of a class of ``torch.optim`` that keeps these entries.
        values: the values.
    """

    name: str
    layout: ParamGroupLayout
    step: TorchStep | None
    values: ByBuffer

    def entries(self, unit: UnitPlan, buffer: BufferPlan) -> Mapping[str, Any]:
        """Return the value of a shard as named entries, which it may be already."""
        value = self.values[unit.name][buffer.key]
        return {self.name: value} if self.name else value


def nodes_of(
    opt_state: Any, optimizer: Any, plan: Plan, mesh: Mesh
) -> tuple[dict[str, StateNode], dict[str, Any]]:
    """Return a state's nodes with a value for each shard, and all other leaves, both by path.

    Raises:
        TypeError: ``opt_state`` isn't a dictionary, as the optimizer's state is.
        ValueError: it has other nodes than the optimizer's state.
    """
    per_shard: dict[str, ByBuffer] = {}
    other_leaves: dict[str, Any] = {}
    map_state(opt_state, plan, per_shard.setdefault, other_leaves.setdefault)
    for value in other_leaves.values():
        check_not_donated(value)
    step = getattr(optimizer, "step", None)
    layout = layout_of(step, plan, mesh)
    node_facts: dict[str, Any] = {path: (path, layout, None) for path in per_shard}
    if isinstance(step, TorchStep):
        node_facts = {"leaves": ("", layout, step)}
    elif isinstance(step, MuonStep):
        # Note: Muon's step holds a whole AdamW for the leaves that are no matrices.
        node_facts = {
            "momentum": ("momentum_buffer", layout, None),
            "adamw.leaves": ("", layout_of(step.adamw, plan, mesh), step.adamw),
        }
    if node_facts.keys() != per_shard.keys():
        error_type = ValueError if isinstance(opt_state, Mapping) else TypeError
        raise error_type(
            "opt_state must be the optimizer's own state, with a value for each shard at "
            f"{sorted(node_facts)}; found {sorted(per_shard)}: pass state.opt_state, or what "
            "optimizer.init returned, and the plan that it was made with"
        )
    nodes = {
        path: StateNode._make((*facts, per_shard[path]))
        for path, facts in node_facts.items()
    }
    return nodes, other_leaves


def layout_of(step: Any, plan: Plan, mesh: Mesh) -> ParamGroupLayout:
    """Return where an optimizer's parameter groups lie in the shards; by default one has all."""
    one_group = dict.fromkeys(trainable_paths(plan), 0)
    return getattr(step, "layout", None) or ParamGroupLayout(one_group, 1, mesh.shard.rank)


def trainable_paths(plan: Plan) -> list[str]:
    """Return the paths of the trainable leaves, in the order of the tree."""
    leaves = [leaf for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves]
    return [leaf.path for leaf in sorted(leaves, key=lambda leaf: leaf.index)]


def map_state(
    state: Any,
    plan: Plan,
    per_shard: Callable[[str, ByBuffer], ByBuffer],
    other: Callable[[str, Any], Any],
) -> Any:
    """Return an optimizer's state with new values of shards and other leaves.

    Arguments:
        per_shard: from the path and the values of a node to the new values.
        other: from the path and the value of another leaf to the new leaf.
    """

    def new_value(path: str, node: Any) -> Any:
        shard_values = _by_buffer(node, plan)
        if shard_values is None:
            return other(path, node)
        shard_values = per_shard(path, shard_values)
        if not isinstance(node, list):
            return shard_values
        buffer_order = buffers_in_tree_order(plan, trainable_only=True)
        return [shard_values[unit.name][buffer.key] for unit, buffer in buffer_order]

    return tree.map_with_path(
        new_value, state, is_leaf=lambda node: _by_buffer(node, plan) is not None
    )


def _by_buffer(node: Any, plan: Plan) -> ByBuffer | None:
    """Return a node's values if it holds one for each trainable shard, else ``None``."""
    if isinstance(node, Mapping):
        # Note: such a state may lack the frozen shards.
        like_shards = node and node.keys() == plan.units.keys()
        buffers = trainable_buffers(plan)
        if like_shards and all(buffer.key in node[unit.name] for unit, buffer in buffers):
            return node
        return None
    # Note: TorchOpt flattens the tree of shards, so only the order tells which is whose.
    buffer_order = buffers_in_tree_order(plan, trainable_only=True)
    if type(node) is not list or not node or len(node) != len(buffer_order):
        return None
    if not all(isinstance(leaf, torch.Tensor) for leaf in node):
        return None
    value_of = {
        (u.name, b.key): leaf for (u, b), leaf in zip(buffer_order, node, strict=True)
    }
    return by_buffer(plan, lambda u, b: value_of[u.name, b.key], trainable_only=True)
