"""The state of a functional optimizer, an ``(init, update)`` pair as TorchOpt and Optax make them.

It's any nest of tuples, namedtuples, lists and dictionaries. Some nodes hold one value for each
shard; other leaves, such as a count of steps, belong to no parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from funcshard.checkpoint.stored_state import buffers_in_tree_order, join
from funcshard.plan import Plan
from funcshard.train import trainable_buffers

ByBuffer = Mapping[str, Mapping[str, Any]]
"""One value for each trainable shard: ``{unit: {buffer key: value}}``."""


def partition_state(state: Any, plan: Plan) -> tuple[dict[str, ByBuffer], dict[str, Any]]:
    """Return a state's nodes with a value for each shard, and all other leaves, both by path."""
    per_shard: dict[str, ByBuffer] = {}
    other_leaves: dict[str, Any] = {}
    map_state(state, plan, per_shard.setdefault, other_leaves.setdefault)
    return per_shard, {path: value for path, value in other_leaves.items() if value is not None}


def map_state(
    node: Any,
    plan: Plan,
    per_shard: Callable[[str, ByBuffer], ByBuffer],
    other: Callable[[str, Any], Any],
    path: str = "",
) -> Any:
    """Return a functional optimizer's state with new values of shards and other leaves.

    Arguments:
        per_shard: from the path and the values of a node to the new values.
        other: from the path and the value of another leaf to the new leaf.
    """
    shard_values = _by_buffer(node, plan)
    if shard_values is not None:
        shard_values = per_shard(path, shard_values)
        if not isinstance(node, list):
            return shard_values
        buffer_order = buffers_in_tree_order(plan, trainable_only=True)
        return [shard_values[unit.name][buffer.key] for unit, buffer in buffer_order]
    # Note: other containers are leaves here, as Optax and TorchOpt use none.
    if not isinstance(node, list | tuple | Mapping):
        return other(path, node)
    # Why keys of tuples too: a path names a field of a namedtuple, and the index of any other item.
    child_keys: Iterable[Any] = getattr(node, "_fields", range(len(node)))
    children: Iterable[Any] = node
    if isinstance(node, Mapping):
        child_keys, children = node.keys(), node.values()
    new_children = [
        map_state(child, plan, per_shard, other, join(path, key))
        for key, child in zip(child_keys, children, strict=True)
    ]
    if isinstance(node, Mapping):
        return dict(zip(child_keys, new_children, strict=True))
    if hasattr(node, "_fields"):
        return type(node)(*new_children)
    return new_children if isinstance(node, list) else tuple(new_children)


def _by_buffer(node: Any, plan: Plan) -> ByBuffer | None:
    """Return a node's values if it holds one for each trainable shard, else ``None``."""
    if isinstance(node, Mapping):
        # Note: such a state may lack the frozen shards.
        like_shards = node and node.keys() == plan.units.keys()
        buffers = trainable_buffers(plan)
        if like_shards and all(buffer.key in node[unit.name] for unit, buffer in buffers):
            return node
    elif type(node) is list and node and all(isinstance(leaf, torch.Tensor) for leaf in node):
        buffer_order = buffers_in_tree_order(plan, trainable_only=True)
        # Note: TorchOpt flattens the tree of shards, so only the order tells which is whose.
        if len(buffer_order) == len(node):
            shard_values: dict[str, dict[str, Any]] = {name: {} for name in plan.units}
            for (unit, buffer), leaf in zip(buffer_order, node, strict=True):
                shard_values[unit.name][buffer.key] = leaf
            return shard_values
    return None
