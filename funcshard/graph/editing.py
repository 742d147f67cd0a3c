"""Change the nodes of a graph, and keep the form of each result right."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from funcshard._utils import storage_id, tree


def add_node(graph: fx.Graph, operation: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call of an operation at the graph's insertion point, with the form of its result.

    It runs in the phase of the step that follows it.
    """
    node = graph.call_function(operation, args, kwargs)
    node.meta["val"] = form_of(node)
    node.meta["phase"] = node.next.meta.get("phase", "")
    return node


def form_of(node: fx.Node) -> Any:
    """Return the result of a node without data, from the results of its inputs."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    assert callable(node.target), "only calls have inputs"
    with (
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        return node.target(*args, **kwargs)


def replace_node(node: fx.Node, new: fx.Node) -> None:
    """Let the users of a node use a new one; views of the node become views of the new one."""
    users = list(node.users)
    node.replace_all_uses_with(new)
    _follow(users, tensor_storages(node))


def tensor_storages(node: fx.Node) -> set[int]:
    """Return the identities of the storages of a node's results."""
    return {
        storage_id(leaf)
        for leaf in tree.leaves(node.meta.get("val"))
        if isinstance(leaf, torch.Tensor)
    }


def _follow(users: Iterable[fx.Node], gone: set[int]) -> None:
    """Make again the results of views and writes whose storages were replaced."""
    for user in users:
        storages_before = tensor_storages(user)
        if user.op == "call_function" and storages_before & gone:
            user.meta["val"] = form_of(user)
            _follow(list(user.users), storages_before - tensor_storages(user))
