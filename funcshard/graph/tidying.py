"""Change the nodes of a graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from funcshard._utils.torch_operators import is_random, operator_name, writes_inputs
from funcshard._utils.torch_private import storage_id
from funcshard._utils.tree import tensors_in
from funcshard.graph.memory import GraphStorages
from funcshard.graph.step_graph import called, collective_of

_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape")


def tidy(graph: fx.Graph, *, counters: int) -> None:
    """Simplify a new graph in place, with the same bits.

    Arguments:
        counters: number of its last placeholders, which are counters.
    """
    _take_phases(graph)
    placeholders = graph.find_nodes(op="placeholder")
    for node in placeholders[len(placeholders) - counters :]:
        _take_items(graph, node)
    for node in list(graph.nodes):
        if collective_of(node) == "number":
            _take_items(graph, node)
        # Why: no operation is differentiated when the graph runs.
        elif operator_name(node.target) in ("aten::detach", "aten::alias"):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    _drop_copies(graph)
    drop_unused_nodes(graph)
    graph.lint()


def _take_phases(graph: fx.Graph) -> None:
    """Move the marks of ``funcshard::phase`` into ``meta["phase"]``."""
    phase_name: Any = "sizes"  # the numbers at the start of a graph for any size
    for node in list(graph.nodes):
        if collective_of(node) == "phase":
            phase_name = node.args[0]
            graph.erase_node(node)
        elif node.op not in ("placeholder", "output"):
            node.meta["phase"] = phase_name
            # Note: torch notes no result of an operation that only writes, such as _foreach_add_.
            node.meta.setdefault("val", None)


def _take_items(graph: fx.Graph, node: fx.Node) -> None:
    """Let a node be the number itself, which the recording took out of a tensor."""
    for user in list(node.users):
        if operator_name(user.target) == "aten::_local_scalar_dense":
            # Note: the item of a tensor with the number; in the graph the number itself comes in.
            user.replace_all_uses_with(node)
            node.meta["val"] = user.meta.get("val")
            graph.erase_node(user)


def _drop_copies(graph: fx.Graph) -> None:
    """Use the result of a collective itself where the step copies it."""
    # Why there are copies: a group writes into memory that it's given, but its operation in the
    # graph returns new memory.
    storages = GraphStorages.find(graph)
    node_position = {node: node_index for node_index, node in enumerate(graph.nodes)}
    for copy in [
        node for node in graph.nodes if operator_name(node.target) == "aten::copy_"
    ]:
        target_node, source_node = copy.args[:2]
        target_value, source_value = target_node.meta["val"], source_node.meta["val"]
        (target_storage,), (source_storage,) = (
            storages.of[target_node],
            storages.of[source_node],
        )
        waited_node = source_node
        while operator_name(waited_node.target) in _VIEWS:
            (waited_node,) = waited_node.all_input_nodes
        if collective_of(waited_node) != "wait" or layout_of(target_value) != layout_of(
            source_value
        ):
            continue
        # Note: an argument is written to for the caller, who reads it.
        if storages.made[target_storage].op == "placeholder":
            continue
        sharing_nodes = (storages.made[target_storage], *storages.users[target_storage])
        later_users = [
            user
            for node in sharing_nodes
            if node_position[node] < node_position[copy]
            and target_storage in storages.of[node]
            for user in node.users
        ]
        # Why: only what reads the copy through its own result can read the source instead.
        later_users += storages.users[source_storage]
        if all(node_position[user] <= node_position[copy] for user in later_users):
            replace_node(copy, source_node)
            graph.erase_node(copy)


def layout_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the device of a tensor, and all else that a view of it depends on."""
    return (
        tensor.device,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
    )


def drop_unused_nodes(graph: fx.Graph) -> None:
    """Take out operations without users, unless they write, draw random numbers or communicate."""
    # Why from the end: what only served an unused operation is unused too.
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    if collective_of(node) not in ("", "coordinate", "number", "random_state"):
        return True
    operator_text = operator_name(node.target)
    if not operator_text or operator_text.startswith("profiler::"):
        return False
    return writes_inputs(node.target) or is_random(node.target, node.args, node.kwargs)


# --- new nodes ------------------------------------------------------------------------------------


def add_node(graph: fx.Graph, operation: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """Add a call at the graph's insertion point, in the phase that follows it."""
    node = graph.call_function(operation, args, kwargs)
    node.meta["val"] = _form_of(node)
    node.meta["phase"] = node.next.meta.get("phase", "")
    return node


def replace_node(node: fx.Node, new_node: fx.Node) -> None:
    """Let the users of a node use a new one; views of the node view the new one."""
    waiting_users = [(user, _storages(node)) for user in node.users]
    node.replace_all_uses_with(new_node)
    for user, replaced_storages in waiting_users:  # which grows
        storages_before = _storages(user)
        # Note: only views and writes have results in memory that was replaced.
        if user.op == "call_function" and storages_before & replaced_storages:
            user.meta["val"] = _form_of(user)
            further_storages = storages_before - _storages(user)
            waiting_users += [
                (further_user, further_storages) for further_user in user.users
            ]


def _storages(node: fx.Node) -> set[int]:
    return set(map(storage_id, tensors_in(node.meta.get("val"))))


def _form_of(node: fx.Node) -> Any:
    """Return the result of a node without data."""
    # Why: a user may call a pass inside autocast, which the graph has recorded as operations.
    cpu_off, cuda_off = (
        torch.autocast(device, enabled=False) for device in ("cpu", "cuda")
    )
    with torch.no_grad(), cpu_off, cuda_off:
        return called(node)
