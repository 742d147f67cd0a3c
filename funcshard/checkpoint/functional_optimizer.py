"""The state of a functional optimizer, an ``(init, update)`` pair as TorchOpt and Optax make them.

Such a state is any nest of tuples, namedtuples, lists and dictionaries. Some of its nodes hold one
value for each shard; its other leaves, such as a count of steps, are of no parameter.
``partition_state`` separates the two, and ``combine_state`` is the inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from funcshard.checkpoint.stored_state import buffers_in_tree_order, join
from funcshard.plan import Plan
from funcshard.train import trainable_buffers

ByBuffer = Mapping[str, Mapping[str, Any]]
"""One value for each trainable shard: ``{unit: {buffer key: value}}``."""


def partition_state(state: Any, plan: Plan) -> tuple[dict[str, ByBuffer], dict[str, Any]]:
    """Split a functional optimizer's state into values of shards and other leaves.

    Arguments:
        state: the state.
        plan: the plan of the shards.

    Returns:
        ``(per_shard, others)``: the values of each node that holds one for each shard, and every
        other leaf, both by the path of the node or leaf in ``state``.
    """
    per_shard: dict[str, ByBuffer] = {}
    others: dict[str, Any] = {}
    _partition(state, "", plan, per_shard, others)
    return per_shard, others


# Why no function inside: it would refer to itself and to the state, which would stay in memory
# until Python looks for such garbage.
def _partition(
    node: Any, path: str, plan: Plan, per_shard: dict[str, ByBuffer], others: dict[str, Any]
) -> None:
    values = _by_buffer(node, plan)
    if values is not None:
        per_shard[path] = values
    elif _is_container(node):
        for key, child in _children(node):
            _partition(child, join(path, key), plan, per_shard, others)
    elif node is not None:
        others[path] = node


def combine_state(
    like: Any,
    plan: Plan,
    per_shard: Callable[[str], ByBuffer],
    others: Mapping[str, Any],
    path: str = "",
) -> Any:
    """Put values of shards and other leaves into a state; the inverse of ``partition_state``.

    Arguments:
        like: a state of the same structure, such as ``init`` returns.
        plan: the plan of the shards.
        per_shard: a function from the path of a node to the values of its shards.
        others: other leaves by path; a leaf that is missing here is taken from ``like``.
        path: the path of ``like`` in the whole state.
    """
    if _by_buffer(like, plan) is not None:
        values = per_shard(path)
        if not isinstance(like, list):
            return values
        return [
            values[unit.name][buffer.key]
            for unit, buffer in buffers_in_tree_order(plan, trainable_only=True)
        ]
    if not _is_container(like):
        return others.get(path, like)
    children = [
        combine_state(child, plan, per_shard, others, join(path, key))
        for key, child in _children(like)
    ]
    if isinstance(like, tuple):
        return type(like)(*children) if hasattr(like, "_fields") else tuple(children)
    return children if isinstance(like, list) else dict(zip(like, children, strict=True))


def _by_buffer(node: Any, plan: Plan) -> ByBuffer | None:
    """Return a node's values if it holds one for each trainable shard, else ``None``.

    Such a node is a dictionary like the shards, or, in TorchOpt's states, a list of tensors in the
    order of the tree's leaves.
    """
    if isinstance(node, Mapping) and node and node.keys() == {unit.name for unit in plan.unit_list}:
        return (
            node
            if all(buffer.key in node[unit.name] for unit, buffer in trainable_buffers(plan))
            else None
        )
    if type(node) is list and node and all(isinstance(leaf, torch.Tensor) for leaf in node):
        order = buffers_in_tree_order(plan, trainable_only=True)
        if len(order) == len(node):
            state_by_unit: dict[str, dict[str, Any]] = {unit.name: {} for unit in plan.unit_list}
            for (unit, buffer), leaf in zip(order, node, strict=True):
                state_by_unit[unit.name][buffer.key] = leaf
            return state_by_unit
    return None


def _is_container(node: Any) -> bool:
    return isinstance(node, list | tuple | Mapping)


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, Mapping):
        return [(str(key), child) for key, child in node.items()]
    return [(str(i), child) for i, child in enumerate(node)]
