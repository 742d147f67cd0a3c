"""A ``StepGraph`` as JSON."""

from __future__ import annotations

import base64
import dataclasses
import keyword
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import string_at
from typing import Any, cast

import torch
from torch import fx

from funcshard._utils import argument_names
from funcshard.graph.conditions import Conditions
from funcshard.graph.filling import fill_in, input_memory
from funcshard.graph.saving.forms import form_from, form_to, signature_from, signature_to
from funcshard.graph.saving.operators import FUNCTIONS, operator_of, target_name
from funcshard.graph.saving.values import MOST, decoded, encoded
from funcshard.graph.signatures import sized
from funcshard.graph.step_graph import Constant, Place, StepGraph, collective_of
from funcshard.plan import Event, dtype_name, dtype_of

_ITEM = "funcshard::number.item"  # the number itself, and no tensor
_OF_INPUTS = ("path", "unit")  # notes for the text of a graph
_NODE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def graph_to(step_graph: StepGraph, schedules: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Return a graph as JSON; ``graph_from`` is the inverse.

    Arguments:
        step_graph: the graph.
        schedules: the step's functions of the number of steps, by name.

    Raises:
        ValueError: the graph holds something that a file cannot hold.
    """
    nodes = list(step_graph.graph.nodes)
    names = {node: f"%{node.name}" for node in nodes}
    constants = {
        old: f"_tensor_constant{constant_index}"
        for constant_index, old in enumerate(sorted(step_graph.constants))
    }
    return {
        "signature": signature_to(step_graph.signature),
        "sizes": dict(step_graph.sizes),
        "inputs": list(step_graph.inputs),
        "memory": input_memory([node for node in nodes if node.op == "placeholder"]),
        "form": form_to(step_graph.form),
        "results": [_result_to(step_result) for step_result in step_graph.results],
        "donated": list(step_graph.donated),
        "spent": [list(path) for path in step_graph.spent],
        "numbers": [_schedule_name(step_number, schedules) for step_number in step_graph.numbers],
        "replayable": step_graph.replayable,
        "constants": {constants[old]: _constant_to(step_graph.constants[old]) for old in sorted(constants)},
        "nodes": list(_nodes_to(nodes, names, constants)),
    }  # fmt: skip


def graph_from(
    data: Any,
    device: torch.device,
    ranks: Mapping[str, int],
    schedules: Mapping[str, Callable[[int], float]],
) -> StepGraph:
    """Return the graph that ``graph_to`` wrote.

    Arguments:
        data: the JSON.
        device: the device of the mesh.
        ranks: size of each axis of the mesh.
        schedules: the functions of the number of steps, by name.

    Raises:
        ValueError: ``graph_to`` cannot have written that.
    """
    signature = signature_from(data["signature"], device)
    inputs = tuple(data["inputs"])
    leaves = [signature.leaves[i] for i in inputs if _index(i, len(signature.leaves))]
    tensors = [leaf for leaf in leaves if leaf is not int]
    if (
        any(not isinstance(leaf, tuple) or len(leaf) != 5 for leaf in tensors)
        or int in leaves[: len(tensors)]
    ):
        raise ValueError("an input of the graph is neither a tensor nor a counter")
    sizes, conditions = _sizes_from(data["sizes"], tensors), Conditions(signature.conditions)
    if failing := conditions.failing(sizes):
        raise ValueError(f"its own sizes do not fulfil {failing}")
    for storage_index, size, offset in data["memory"]:
        if not all(
            type(each) is int and 0 <= each < MOST for each in (storage_index, size, offset)
        ):
            raise ValueError(f"found memory of {size} bytes, more than a machine has")
    constants = {name: _constant_from(name, fields) for name, fields in data["constants"].items()}
    graph, items = _nodes_from(data["nodes"], device, ranks, constants)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise ValueError(
            f"the graph has {len(placeholders)} inputs, and the file describes {len(inputs)}"
        )
    fill_in(graph, [sized(leaf, sizes) for leaf in tensors], data["memory"], constants, items)
    _check_sizes(graph)
    outputs, form = len(graph.output_node().args[0]), form_from(data["form"])  # type: ignore[arg-type]
    results = tuple(_result_from(step_result, outputs, device) for step_result in data["results"])
    if form.num_leaves != len(results):
        raise ValueError(
            f"the results have {form.num_leaves} leaves, and the file describes {len(results)}"
        )
    donated = tuple(i for i in data["donated"] if _index(i, len(signature.leaves)))
    spent = tuple(tuple(path) for path in data["spent"])
    if not all(path and all(type(key) in (str, int) for key in path) for path in spent):
        raise ValueError("a path of an optimizer's state is damaged")
    numbers = tuple(schedules[name] for name in data["numbers"])
    for node in graph.nodes:
        if collective_of(node) == "number":
            _index(node.args[0], len(numbers))
    if type(data["replayable"]) is not bool:
        raise ValueError("found no answer to whether the graph may run")
    return StepGraph(
        graph, signature, inputs, results, form, donated, spent, constants, numbers, data["replayable"], sizes, conditions
    )  # fmt: skip


def _sizes_from(data: Any, leaves: Sequence[Any]) -> dict[str, int]:
    """Return the size of each name among the inputs of a graph."""
    names = {size for leaf in leaves for size in leaf[0] if isinstance(size, str)}
    if data.keys() != names or not all(
        type(size) is int and 0 <= size < MOST for size in data.values()
    ):
        raise ValueError(f"found the sizes {data} for the names {sorted(names)}")
    return dict(data)


# --- operations -----------------------------------------------------------------------------------


def _nodes_to(
    nodes: Sequence[fx.Node], names: Mapping[fx.Node, str], constants: Mapping[str, str]
) -> Iterator[list[Any]]:
    phase = ""
    for node in nodes:
        if node.meta.get("phase", phase) != phase:
            phase = node.meta["phase"]
            yield ["phase", phase]
        yield _node_to(node, names, constants)


def _node_to(
    node: fx.Node, names: Mapping[fx.Node, str], constants: Mapping[str, str]
) -> list[Any]:
    if node.op == "placeholder":
        return [
            names[node],
            "input",
            {key: node.meta[key] for key in _OF_INPUTS if node.meta.get(key) is not None},
        ]
    if node.op == "get_attr":
        return [names[node], "constant", constants[str(node.target)]]
    if node.op == "output":
        return ["return", encoded(node.args[0], names)]
    name = target_name(node.target)
    if collective_of(node) == "number" and not isinstance(node.meta["val"], torch.Tensor):
        name = _ITEM
    kwargs = {key: encoded(value, names) for key, value in node.kwargs.items()}
    event = node.meta.get("event")
    node_data: list[Any] = [
        names[node],
        name,
        encoded(node.args, names),
        kwargs,
        None if event is None else dataclasses.astuple(event),
    ]
    while not node_data[-1]:
        node_data.pop()
    return node_data


def _nodes_from(
    data: Any, device: torch.device, ranks: Mapping[str, int], constants: Mapping[str, torch.Tensor]
) -> tuple[fx.Graph, set[fx.Node]]:
    """Return a graph, and its nodes whose tensors are numbers."""
    graph, nodes, items = fx.Graph(), dict[str, fx.Node](), set[fx.Node]()
    *operations, (last, outputs) = data
    if last != "return" or not isinstance(outputs, list):
        raise ValueError("the graph returns nothing")
    phase = None
    for name, operation, *node_fields in operations:
        if name == "phase":
            phase = _text(operation)
            continue
        if (
            name in nodes
            or not _NODE.fullmatch(name[1:])
            or keyword.iskeyword(name[1:])
            or name[0] != "%"
        ):
            raise ValueError(f"found an operation that is named {name!r}")
        node = nodes[name] = _node_from(
            graph, name[1:], operation, node_fields, nodes, device, constants
        )
        if operation == _ITEM:
            items.add(node)
        if phase is not None and node.op != "placeholder":
            node.meta["phase"] = phase
        _check_collective(node, ranks)
    graph.output([decoded(output, nodes, device) for output in outputs])
    graph.lint()
    return graph, items


def _node_from(
    graph: fx.Graph,
    name: str,
    operation: str,
    rest: list[Any],
    nodes: Mapping[str, fx.Node],
    device: torch.device,
    constants: Mapping[str, torch.Tensor],
) -> fx.Node:
    if operation == "input":
        node = graph.create_node("placeholder", name, name=name)
        node.meta.update({key: _text(rest[0][key]) for key in _OF_INPUTS if key in rest[0]})
        return node
    if operation == "constant":
        if rest[0] not in constants:
            raise ValueError(f"found the constant {rest[0]!r}, which the file does not hold")
        return graph.create_node("get_attr", rest[0], name=name)
    missing_fields: list[Any] = [[], {}, None]
    data, kwargs, event = [*rest, *missing_fields[len(rest) :]]
    target = operator_of("funcshard::number.default" if operation == _ITEM else operation)
    args = tuple(decoded(argument, nodes, device) for argument in data)
    kwargs = {key: decoded(value, nodes, device) for key, value in kwargs.items()}
    if not all(map(str.isidentifier, kwargs)):
        raise ValueError(f"found arguments of {name} that are named {list(kwargs)}")
    if operation in FUNCTIONS and (
        kwargs or not any(isinstance(argument, fx.Node) for argument in args)
    ):
        raise ValueError(f"found {operation} without an operation that it depends on")
    node = graph.create_node("call_function", target, args, kwargs, name=name)
    if event is not None:
        node.meta["event"] = _event_from(event)
    return node


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"found {str(value)[:40]} in place of a text")
    return value


def _event_from(data: Any) -> Event:
    event_kind, unit, buffer, dtype, size, axis, ranks = data
    for event_text in (event_kind, buffer, dtype, axis, "" if unit is None else unit):
        _text(event_text)
    if type(size) is not int or type(ranks) is not int:
        raise ValueError(f"found {data}, which describes no collective")
    return Event(event_kind, unit, buffer, dtype, size, axis, ranks)


def _check_collective(node: fx.Node, sizes: Mapping[str, int]) -> None:
    """Raise unless the mesh has the axis of a collective, or a part of it."""
    names = argument_names(node.target)
    if collective_of(node) and "axis" in names:
        axis, ranks = (cast(Any, node.args[names.index(name)]) for name in ("axis", "ranks"))
        if axis not in sizes or type(ranks) is not int or ranks < 1 or sizes[axis] % ranks:
            raise ValueError(
                f"{node.name} runs along {axis!r} on {ranks} ranks; the mesh has {dict(sizes)}"
            )


def _check_sizes(graph: fx.Graph) -> None:
    for node in graph.nodes:
        tensor = node.meta.get("val")
        if isinstance(tensor, torch.Tensor) and int(tensor.untyped_storage().nbytes()) >= MOST:
            raise ValueError(
                f"the operation {node.name} makes a tensor of shape {tuple(tensor.shape)}, larger "
                "than any memory"
            )


# --- results, constants, schedules ----------------------------------------------------------------


def _result_to(result: Place | Constant) -> Any:
    return result.number if isinstance(result, Place) else {"value": encoded(result.value, {})}


def _result_from(data: Any, outputs: int, device: torch.device) -> Place | Constant:
    if isinstance(data, dict):
        return Constant(decoded(data["value"], {}, device))
    _index(data, outputs)
    return Place(data)


def _index(number: Any, count: int) -> bool:
    """Return true, or raise unless ``number`` counts one of ``count`` things."""
    if type(number) is not int or not 0 <= number < count:
        raise ValueError(f"found the number {number!r} of {count}")
    return True


def _constant_to(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    data = string_at(flat.data_ptr(), flat.numel() * flat.element_size()) if flat.numel() else b""
    return [dtype_name(tensor.dtype), list(tensor.shape), base64.b64encode(data).decode()]


def _constant_from(name: str, fields: Any) -> torch.Tensor:
    dtype, shape, data = dtype_of(fields[0]), fields[1], base64.b64decode(fields[2], validate=True)
    if not re.fullmatch(r"_tensor_constant\d+", name):
        raise ValueError(f"found a constant that is named {name!r}")
    if not all(type(size) is int and 0 <= size < MOST for size in shape):
        raise ValueError(f"found a constant of shape {shape}")
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(
            f"the constant {name} of shape {shape} needs {math.prod(shape) * dtype.itemsize} "
            f"bytes; found {len(data)}"
        )
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def _schedule_name(number: Any, schedules: Mapping[str, Callable[..., Any]]) -> str:
    for name, function in schedules.items():
        if function == number:
            return name
    raise ValueError(
        f"a file of graphs names the schedules of the step's optimizer; found {number!r}, which it "
        "does not have: load the graph with step=, and save it then"
    )
