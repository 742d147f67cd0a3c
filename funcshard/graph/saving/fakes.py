"""Give every operation of a graph that was read from a file the form of its result.

The operations run on tensors without data, so a file stores no shapes of results, and a graph whose
operations do not fit together is found before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from funcshard._utils import operator_name, recording_tensors, storage_id, tree
from funcshard.graph.step_graph import collective_of

__all__ = ["InputMemory", "fill_in", "input_memory"]

# Operations that change the shape of the tensor itself, which is the result of another node too.
_RELAYOUTS = ("as_strided_", "resize_", "set_", "squeeze_", "swapdims_", "t_", "transpose_", "unsqueeze_")

InputMemory = list[list[int]]  # for each tensor: number of its storage, the storage's bytes, offset in elements


def input_memory(placeholders: Sequence[fx.Node]) -> InputMemory:
    """Return where the tensors among a graph's inputs lie; some of them may share memory."""
    numbers: dict[int, int] = {}
    found = []
    for node in placeholders:
        tensor = node.meta["val"]
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            number = numbers.setdefault(storage_id(tensor), len(numbers))
            found.append([number, int(storage.nbytes()), int(tensor.storage_offset())])
    return found


def fill_in(
    graph: fx.Graph, tensors: Sequence[Any], memory: InputMemory, constants: Mapping[str, torch.Tensor], items: set[fx.Node]
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
    reshapes = any(operator_name(node.target).rpartition("::")[2] in _RELAYOUTS for node in graph.nodes)
    with recording_tensors() as mode, torch.no_grad():
        inputs = iter(_inputs(tensors, memory))
        for node in graph.nodes:
            if node.op == "output":
                break
            try:
                found = _result(node, inputs, constants, mode, item=node in items)
                node.meta["val"] = tree.map(_another, found) if reshapes else found
            except Exception as error:
                name = operator_name(node.target) or str(node.target)
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ValueError(f"the operation {node.name} = {name} cannot run: {reason[:200]}") from None


def _another(value: Any) -> Any:
    """Return a tensor with the same memory, which keeps its shape when ``value`` changes it."""
    return value.detach() if isinstance(value, torch.Tensor) else value


def _inputs(tensors: Sequence[Any], memory: InputMemory) -> list[torch.Tensor]:
    storages: dict[int, torch.Tensor] = {}
    found = []
    for (shape, dtype, device, stride, _), (number, size, offset) in zip(tensors, memory, strict=True):
        if number not in storages:
            storages[number] = torch.empty(size, dtype=torch.uint8, device=device)
        base = storages[number]
        if base.numel() != size or base.device.type != device.type:
            raise ValueError(f"two inputs lie in memory {number}, and give it other sizes")
        whole = base[: size // dtype.itemsize * dtype.itemsize].view(dtype)
        found.append(whole.as_strided(shape, stride, offset))
    return found


def _result(node: fx.Node, inputs: Any, constants: Mapping[str, torch.Tensor], mode: Any, *, item: bool) -> Any:
    if node.op == "placeholder":
        found = next(inputs, None)
        # Why item: it gives a number whose arithmetic is that of the recording.
        return torch.zeros((), dtype=torch.int64).item() if found is None else found
    if node.op == "get_attr":
        return mode.from_tensor(constants[str(node.target)])
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    target: Any = node.target
    found = target(*args, **kwargs)
    assert not item or collective_of(node) == "number"
    return found.item() if item else found
