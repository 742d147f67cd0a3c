"""Give every operation of a graph the form of its result.

The operations run on tensors without data. So a file stores no shapes of results, a graph whose
operations do not fit together is found before it runs, and a graph for any size gets the forms of
one size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from funcshard._utils import operator_name, recording_tensors, storage_id, tree
from funcshard.graph.signatures import sized
from funcshard.graph.step_graph import StepGraph, collective_of

# Operations that change the shape of the tensor itself, which is the result of another node too.
_RELAYOUTS = (
    "as_strided_",
    "resize_",
    "set_",
    "squeeze_",
    "swapdims_",
    "t_",
    "transpose_",
    "unsqueeze_",
)

# For each tensor: number of its storage, the storage's bytes, offset in elements.
InputMemory = list[list[int]]


def input_memory(placeholders: Sequence[fx.Node]) -> InputMemory:
    """Return where the tensors among a graph's inputs lie; some of them may share memory."""
    numbers: dict[int, int] = {}
    input_bytes = []
    for node in placeholders:
        tensor = node.meta["val"]
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            storage_index = numbers.setdefault(storage_id(tensor), len(numbers))
            input_bytes.append([storage_index, int(storage.nbytes()), int(tensor.storage_offset())])
    return input_bytes


def filled(step_graph: StepGraph, sizes: Mapping[str, int]) -> StepGraph:
    """Return a graph for any size with the forms of results that some sizes give.

    Arguments:
        step_graph: the graph.
        sizes: the size of each name.
    """
    filled_graph = step_graph.copy()
    placeholders = filled_graph.graph.find_nodes(op="placeholder")
    leaves = [
        leaf for i in filled_graph.inputs if (leaf := filled_graph.signature.leaves[i]) is not int
    ]
    items = {
        node
        for node in filled_graph.graph.nodes
        if collective_of(node) == "number" and not isinstance(node.meta["val"], torch.Tensor)
    }
    memory = sized_memory(input_memory(placeholders), leaves, sizes)
    fill_in(
        filled_graph.graph,
        [sized(leaf, sizes) for leaf in leaves],
        memory,
        filled_graph.constants,
        items,
    )
    return dataclasses.replace(filled_graph, sizes=dict(sizes))


def sized_memory(
    memory: InputMemory, leaves: Sequence[Any], sizes: Mapping[str, int]
) -> InputMemory:
    """Return where inputs lie if some sizes are others; an input with names shares no memory."""
    memory_sizes = []
    for leaf_index, (leaf, leaf_memory) in enumerate(zip(leaves, memory, strict=True)):
        if any(isinstance(size, str) for size in leaf[0]):
            shape, dtype, _, strides, _ = sized(leaf, sizes)
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            leaf_memory = [
                len(memory) + leaf_index,
                (last + 1) * dtype.itemsize * (0 not in shape),
                0,
            ]
        memory_sizes.append(leaf_memory)
    return memory_sizes


def fill_in(
    graph: fx.Graph,
    tensors: Sequence[Any],
    memory: InputMemory,
    constants: Mapping[str, torch.Tensor],
    items: set[fx.Node],
) -> None:
    """Set ``meta["val"]`` of each node.

    Arguments:
        graph: the graph; its placeholders are tensors, then counters.
        tensors: the leaf of the signature for each tensor.
        memory: see ``input_memory``.
        constants: the constants by name.
        items: the nodes of tensors that are numbers in this graph.

    Raises:
        ValueError: an operation cannot take its arguments.
    """
    reshapes = any(
        operator_name(node.target).rpartition("::")[2] in _RELAYOUTS for node in graph.nodes
    )
    with recording_tensors() as mode, torch.no_grad():
        inputs = iter(_inputs(tensors, memory))
        for node in graph.nodes:
            if node.op == "output":
                break
            try:
                node_result = _result(node, inputs, constants, mode, item=node in items)
                node.meta["val"] = tree.map(_another, node_result) if reshapes else node_result
            except Exception as error:
                name = operator_name(node.target) or str(node.target)
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ValueError(
                    f"the operation {node.name} = {name} cannot run: {reason[:200]}"
                ) from None


def _another(value: Any) -> Any:
    """Return a tensor with the same memory, which keeps its shape when ``value`` changes it."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _inputs(tensors: Sequence[Any], memory: InputMemory) -> list[torch.Tensor]:
    storages: dict[int, torch.Tensor] = {}
    input_tensors = []
    for (shape, dtype, device, stride, _), (storage_index, size, offset) in zip(
        tensors, memory, strict=True
    ):
        if storage_index not in storages:
            storages[storage_index] = torch.empty(size, dtype=torch.uint8, device=device)
        base = storages[storage_index]
        if base.numel() != size or base.device.type != device.type:
            raise ValueError(f"two inputs lie in memory {storage_index}, and give it other sizes")
        whole_tensor = base[: size // dtype.itemsize * dtype.itemsize].view(dtype)
        input_tensors.append(whole_tensor.as_strided(shape, stride, offset))
    return input_tensors


def _result(
    node: fx.Node, inputs: Any, constants: Mapping[str, torch.Tensor], mode: Any, *, item: bool
) -> Any:
    if node.op == "placeholder":
        node_result = next(inputs, None)
        # Why item: it gives a number whose arithmetic is that of the recording.
        return (
            torch.zeros((), dtype=torch.int64, device="cpu").item()
            if node_result is None
            else node_result
        )
    if node.op == "get_attr":
        return mode.from_tensor(constants[str(node.target)])
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    target: Any = node.target
    node_result = target(*args, **kwargs)
    assert not item or collective_of(node) == "number"
    return node_result.item() if item else node_result
