"""The state of a pair of functions, as TorchOpt and optax write them: where in it there is one value for each shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from funcshard import tree
from funcshard.groups import trainable
from funcshard.plan import Plan

__all__ = ["fill_nodes", "nodes"]

Values = Mapping[str, Mapping[str, Any]]


def nodes(state: Any, plan: Plan, path: str = "") -> Iterator[tuple[str, Values | None, Any]]:
    """Give ``(path, values, node)`` of each node that has one value for each shard, and of what else there is.

    Arguments:
        state: the pair's state; any nest of tuples, named tuples, lists and dictionaries.
        plan: the plan of the shards.
        path: the path of ``state`` itself.

    Yields:
        ``values`` is ``{unit: {buffer key: value}}``, or ``None`` for a leaf of another kind.
    """
    found = _values(state, plan)
    if found is not None:
        yield path, found, state
    elif _is_container(state):
        for key, child in _children(state):
            yield from nodes(child, plan, _join(path, key))
    elif state is not None:
        yield path, None, state


def fill_nodes(state: Any, plan: Plan, values_of: Callable[[str], Values], others: Mapping[str, Any], path: str = "") -> Any:
    """Return ``state`` with ``values_of(path)`` in the nodes that have one value for each shard; the inverse of ``nodes``.

    Arguments:
        state: a state of the right form.
        plan: the plan of the shards.
        values_of: what belongs into the node at a path.
        others: leaves of other kinds by path; those that are not in it stay as they are.
        path: the path of ``state`` itself.
    """
    if _values(state, plan) is not None:
        values = values_of(path)
        return [values[u.name][b.key] for u, b in _in_tree_order(plan)] if isinstance(state, list) else values
    if not _is_container(state):
        return others.get(path, state)
    children = [fill_nodes(child, plan, values_of, others, _join(path, key)) for key, child in _children(state)]
    if isinstance(state, tuple):
        return type(state)(*children) if hasattr(state, "_fields") else tuple(children)
    return children if isinstance(state, list) else dict(zip(state, children, strict=True))


def _values(node: Any, plan: Plan) -> Values | None:
    if isinstance(node, Mapping) and node and node.keys() == {unit.name for unit in plan.unit_list}:
        return node if all(b.key in node[u.name] for u, b in trainable(plan)) else None
    # TorchOpt's own nodes are lists of leaves, in the order of the tree
    if type(node) is list and node and all(isinstance(leaf, torch.Tensor) for leaf in node):
        places = _in_tree_order(plan)
        if len(places) == len(node):
            found: dict[str, dict[str, Any]] = {unit.name: {} for unit in plan.unit_list}
            for (unit, buffer), leaf in zip(places, node, strict=True):
                found[unit.name][buffer.key] = leaf
            return found
    return None


def _in_tree_order(plan: Plan) -> list[tuple[Any, Any]]:
    places: dict[str, dict[str, Any]] = {unit.name: {} for unit in plan.unit_list}
    shards = trainable(plan)
    for number, (unit, buffer) in enumerate(shards):
        places[unit.name][buffer.key] = number
    return [shards[number] for number in tree.leaves(places)]


def _is_container(node: Any) -> bool:
    return isinstance(node, list | tuple | Mapping)


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, Mapping):
        return [(str(key), child) for key, child in node.items()]
    return [(str(i), child) for i, child in enumerate(node)]


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
