"""Where an optimizer's state has a value for each shard, and what these values are.

The state is any nest of tuples, namedtuples, lists and dictionaries. Some nodes hold one value for
each shard; other leaves, such as a count of steps, belong to no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard.checkpoint.stored_state import buffers_in_tree_order, by_buffer
from funcshard.comm import Mesh
from funcshard.plan import BufferPlan, Plan, UnitPlan
from funcshard.train import (
    MuonStep,
    ParamGroupLayout,
    TorchStep,
    check_not_donated,
    trainable_buffers,
)

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
        TypeError: ``opt_state`` is no dictionary, as the optimizer's state is.
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
            f"opt_state must be the optimizer's own state, with a value for each shard of the plan "
            f"at {sorted(node_facts)}; found {sorted(per_shard)}: pass state.opt_state of a "
            "TrainState, or what optimizer.init returned, and the plan that the state was made with"
        )
    nodes = {path: StateNode._make((*facts, per_shard[path])) for path, facts in node_facts.items()}
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
    value_of = {(u.name, b.key): leaf for (u, b), leaf in zip(buffer_order, node, strict=True)}
    return by_buffer(plan, lambda u, b: value_of[u.name, b.key], trainable_only=True)
