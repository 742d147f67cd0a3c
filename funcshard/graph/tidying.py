"""Take operations out of a new graph that do nothing when it runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from funcshard._utils import is_random, operator_name, storage_id, tree, writes_inputs
from funcshard.graph.step_graph import collective_of
from funcshard.graph.storages import GraphStorages

_VIEWS = ("aten::view", "aten::_unsafe_view", "aten::reshape")


def tidy(graph: fx.Graph, *, counters: int) -> None:
    """Simplify a new graph in place, without changing a bit of any result.

    Arguments:
        graph: the graph.
        counters: number of its last placeholders, which are counters.
    """
    _take_phases(graph)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
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
    """Move the marks of ``funcshard::phase`` into ``meta["phase"]`` of the nodes after each."""
    phase: Any = "sizes"  # the numbers at the start of a graph for any size
    for node in list(graph.nodes):
        if collective_of(node) == "phase":
            phase = node.args[0]
            graph.erase_node(node)
        elif node.op not in ("placeholder", "output"):
            node.meta["phase"] = phase
            # Note: torch notes no result of an operation that only writes, such as _foreach_add_.
            node.meta.setdefault("val", None)


def _take_items(graph: fx.Graph, node: fx.Node) -> None:
    """Let a node be the number itself, which the recording took out of a tensor."""
    for user in list(node.users):
        if operator_name(user.target) == "aten::_local_scalar_dense":
            user.replace_all_uses_with(node)
            node.meta["val"] = user.meta.get("val")
            graph.erase_node(user)


def _drop_copies(graph: fx.Graph) -> None:
    """Use the result of a collective itself where the step copies it into separate memory.

    A group writes into memory that it is given. The operation in the graph returns new memory, so
    the recording holds a copy from one into the other.
    """
    storages = GraphStorages.find(graph)
    position = {node: node_index for node_index, node in enumerate(graph.nodes)}
    # By storage of a copy: its position, and its source.
    moved: dict[int, tuple[int, torch.Tensor]] = {}
    for copy in [node for node in graph.nodes if operator_name(node.target) == "aten::copy_"]:
        target, source = copy.args[:2]
        target_value, source_value = target.meta["val"], source.meta["val"]
        waited = _behind_views(source)
        (into,), (result,) = storages.of[target], storages.of[source]
        if collective_of(waited) != "wait" or _layout(target_value) != _layout(source_value):
            continue
        if storages.made[into].op == "placeholder" or _read_after(copy, into, storages, position):
            continue
        if any(position[user] > position[copy] for user in storages.users[result]):
            continue
        copy.replace_all_uses_with(source)
        graph.erase_node(copy)
        moved[storage_id(target_value)] = position[copy], source_value
    # Why: views of a copy, and the results of writes to it, now lie in the memory of its source.
    for node in graph.nodes if moved else ():
        if node.op != "output":
            at = position[node]
            node.meta["val"] = tree.map(
                lambda value, at=at: _moved(value, moved, at), node.meta.get("val")
            )


def _moved(value: Any, moved: dict[int, tuple[int, torch.Tensor]], position: int) -> Any:
    """Return a result of the node at ``position`` in the memory that its copy's source has."""
    if not isinstance(value, torch.Tensor):
        return value
    copied, source = moved.get(storage_id(value), (position, value))
    if copied >= position or source.untyped_storage().nbytes() < value.untyped_storage().nbytes():
        return value
    size = value.dtype.itemsize
    whole_tensor = source.as_strided(
        (source.untyped_storage().nbytes() // source.dtype.itemsize,), (1,), 0
    ).view(torch.uint8)
    whole_tensor = whole_tensor[: whole_tensor.numel() // size * size].view(value.dtype)
    return _moved(
        whole_tensor.as_strided(value.shape, value.stride(), value.storage_offset()),
        moved,
        position,
    )


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the device of a tensor, and all else that a view of it depends on."""
    return tensor.device, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


def _read_after(
    copy: fx.Node, storage: int, storages: GraphStorages, position: dict[fx.Node, int]
) -> bool:
    """Return whether a node after ``copy`` uses its target other than through its result."""
    return any(
        position[user] > position[copy]
        and any(
            position[input_node] < position[copy] and storage in storages.of[input_node]
            for input_node in user.all_input_nodes
        )
        for user in storages.users[storage]
    )


def _behind_views(node: fx.Node) -> fx.Node:
    while operator_name(node.target) in _VIEWS:
        (node,) = node.all_input_nodes
    return node


def drop_unused_nodes(graph: fx.Graph) -> None:
    """Take out operations without users, unless they write, draw random numbers or communicate."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not _has_effect(node):
            graph.erase_node(node)


def _has_effect(node: fx.Node) -> bool:
    if collective_of(node) not in ("", "coordinate", "number", "random_state"):
        return True
    name = operator_name(node.target)
    if not name or name.startswith("profiler::"):
        return False
    return writes_inputs(node.target) or is_random(node.target, node.args, node.kwargs)
