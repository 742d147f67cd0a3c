"""A ``StepGraph`` as JSON."""

from __future__ import annotations

import base64
import dataclasses
import keyword
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from funcshard._utils import file_data
from funcshard._utils.tensors import byte_memory, byte_view, tensors_in
from funcshard._utils.torch_operators import argument_names, operator_arguments
from funcshard.graph.filling import fill_in, input_memory, is_number_item
from funcshard.graph.named_sizes import Conditions
from funcshard.graph.saving.forms import form_from, form_to, signature_from, signature_to
from funcshard.graph.saving.operations import (
    FUNCTIONS,
    MOST,
    decoded,
    encoded,
    operator_of,
    target_name,
)
from funcshard.graph.step_graph import Constant, Place, StepGraph, collective_of
from funcshard.plan import Event, dtype_name, dtype_of

_NUMBER_ITEM = "funcshard::number.item"  # the number itself, and no tensor
_OF_INPUTS = ("path", "unit")  # notes for the text of a graph
# Why so strict: names become names of variables in code that torch writes and runs.
_NODE_NAME = re.compile(r"%[A-Za-z_][A-Za-z0-9_]*")
_CONSTANT_NAME = re.compile(r"_tensor_constant\d+")


def graph_to(step_graph: StepGraph, schedules: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Return a graph as JSON; ``graph_from`` is the inverse.

    ``schedules`` has the step's functions of the number of steps, by name.
    """
    nodes = list(step_graph.graph.nodes)
    node_names = {node: f"%{node.name}" for node in nodes}
    # Why new names: torch numbers constants in the order of their use, which passes change.
    constant_names = {
        old_name: f"_tensor_constant{constant_index}"
        for constant_index, old_name in enumerate(sorted(step_graph.constants))
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
        "numbers": [_schedule_name(function, schedules) for function in step_graph.numbers],
        "replayable": step_graph.replayable,
        "constants": {
            new_name: _constant_to(step_graph.constants[old_name])
            for old_name, new_name in constant_names.items()
        },
        "nodes": list(_nodes_to(step_graph.graph, node_names, constant_names)),
    }


def graph_from(
    data: Any,
    device: torch.device,
    ranks: Mapping[str, int],
    schedules: Mapping[str, Callable[[int], float]],
) -> StepGraph:
    """Return the graph that ``graph_to`` wrote."""
    signature = signature_from(data["signature"], device)
    inputs = file_data.numbers("inputs", data["inputs"], 0, len(signature.leaves) - 1)
    input_leaves: list[Any] = [signature.leaves[i] for i in inputs]
    tensor_leaves = [leaf for leaf in input_leaves if leaf is not int]
    is_tensor = [isinstance(leaf, tuple) and len(leaf) == 5 for leaf in tensor_leaves]
    if not all(is_tensor) or int in input_leaves[: len(tensor_leaves)]:
        raise ValueError("an input of the graph is neither a tensor nor a counter")
    size_names = {size for leaf in tensor_leaves for size in leaf[0] if isinstance(size, str)}
    sizes = file_data.table("sizes", data["sizes"], size_names, others=False)
    for name, size in sizes.items():
        file_data.whole(f"the size {name}", size, 0, MOST - 1)
    conditions = Conditions(signature.conditions)
    if failing_rule := conditions.failing(sizes):
        raise ValueError(f"its own sizes do not fulfil {failing_rule}")
    for input_memory_data in data["memory"]:
        file_data.numbers("the memory of an input", input_memory_data, 0, MOST - 1)
    constants = {
        name: _constant_from(name, constant_fields)
        for name, constant_fields in data["constants"].items()
    }
    graph, number_items = _nodes_from(data["nodes"], device, ranks, constants)
    placeholders = graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs):
        raise ValueError(
            f"the graph has {len(placeholders)} inputs, and the file describes {len(inputs)}"
        )
    # Note: this runs all operations on tensors without data, so it also checks that they fit.
    fill_in(graph, tensor_leaves, sizes, data["memory"], constants, number_items)
    step_numbers = tuple(schedules[name] for name in data["numbers"])
    for node in graph.nodes:
        _check_size(node)
        if collective_of(node) == "number":
            file_data.whole(f"the index of {node.name}", node.args[0], 0, len(step_numbers) - 1)
    output_nodes: Any = graph.output_node().args[0]
    step_results = tuple(
        _result_from(result, len(output_nodes), device) for result in data["results"]
    )
    result_form = form_from(data["form"])
    if result_form.num_leaves != len(step_results):
        raise ValueError(
            f"the results have {result_form.num_leaves} leaves, and the file describes {len(step_results)}"
        )
    spent_paths = tuple(map(tuple, data["spent"]))
    if not all(path and all(type(key) in (str, int) for key in path) for path in spent_paths):
        raise ValueError("a path of an optimizer's state is damaged")
    return StepGraph(
        graph=graph,
        signature=signature,
        inputs=inputs,
        results=step_results,
        form=result_form,
        donated=file_data.numbers("donated", data["donated"], 0, len(signature.leaves) - 1),
        spent=spent_paths,
        constants=constants,
        numbers=step_numbers,
        replayable=file_data.flag("replayable", data["replayable"]),
        sizes=sizes,
        conditions=conditions,
    )


def _check_size(node: fx.Node) -> None:
    """Raise if a result needs more memory than any machine has."""
    for tensor in tensors_in(node.meta.get("val")):
        if int(tensor.untyped_storage().nbytes()) >= MOST:
            raise ValueError(
                f"the operation {node.name} makes a tensor of shape {tuple(tensor.shape)}, larger "
                "than any memory"
            )


# --- operations -----------------------------------------------------------------------------------


def _nodes_to(
    graph: fx.Graph, names: Mapping[fx.Node, str], constant_names: Mapping[str, str]
) -> Iterator[list[Any]]:
    phase = ""
    for node in graph.nodes:
        # Note: a line where the phase changes, in place of a field in each line.
        if node.meta.get("phase", phase) != phase:
            phase = node.meta["phase"]
            yield ["phase", phase]
        if node.op == "placeholder":
            input_notes = {key: node.meta.get(key) for key in _OF_INPUTS}
            yield [
                names[node],
                "input",
                {k: note for k, note in input_notes.items() if note is not None},
            ]
        elif node.op == "get_attr":
            yield [names[node], "constant", constant_names[str(node.target)]]
        elif node.op == "output":
            yield ["return", encoded(node.args[0], names)]
        else:
            yield _call_to(node, names)


def _call_to(node: fx.Node, names: Mapping[fx.Node, str]) -> list[Any]:
    name = target_name(node.target)
    if is_number_item(node):
        name = _NUMBER_ITEM
    encoded_kwargs = {key: encoded(value, names) for key, value in node.kwargs.items()}
    node_fields: list[Any] = [encoded(node.args, names), encoded_kwargs]
    if (event := node.meta.get("event")) is not None:
        node_fields.append(dataclasses.astuple(event))
    while node_fields and not node_fields[-1]:
        # Note: most operations have no keyword arguments and no event, so their lines end early.
        node_fields.pop()
    return [names[node], name, *node_fields]


def _nodes_from(
    data: Any, device: torch.device, ranks: Mapping[str, int], constants: Mapping[str, torch.Tensor]
) -> tuple[fx.Graph, set[fx.Node]]:
    """Return a graph, and its nodes whose tensors are numbers."""
    graph, nodes_by_name = fx.Graph(), dict[str, fx.Node]()
    number_items = set()
    *operations, (last_name, output_data) = data
    if last_name != "return" or not isinstance(output_data, list):
        raise ValueError("the graph returns nothing")
    phase_name = None
    for name, operation, *node_fields in operations:
        if name == "phase":
            phase_name = file_data.text("a phase", operation)
            continue
        node_name = name[1:]
        is_name = _NODE_NAME.fullmatch(name) and not keyword.iskeyword(node_name)
        if not is_name or name in nodes_by_name:
            raise ValueError(f"found an operation that is named {name!r}")
        if operation == "input":
            node = graph.create_node("placeholder", node_name, name=node_name)
            input_notes = {key: note for key, note in node_fields[0].items() if key in _OF_INPUTS}
            file_data.texts("the notes of an input", list(input_notes.values()))
            node.meta.update(input_notes)
        elif operation == "constant":
            if node_fields[0] not in constants:
                raise ValueError(
                    f"found the constant {node_fields[0]!r}, which the file does not hold"
                )
            node = graph.create_node("get_attr", node_fields[0], name=node_name)
        else:
            call = _call_from(operation, nodes_by_name, device, *node_fields)
            node = graph.create_node("call_function", *call, name=node_name)
            if len(node_fields) > 2:
                node.meta["event"] = _event_from(node_fields[2])
            _check_axis(node, ranks)
        if operation == _NUMBER_ITEM:
            # Note: fill_in makes the number of the tensor that the operator returns.
            number_items.add(node)
        if phase_name is not None and node.op != "placeholder":
            node.meta["phase"] = phase_name
        nodes_by_name[name] = node
    graph.output(
        [decoded(output_argument, nodes_by_name, device) for output_argument in output_data]
    )
    graph.lint()
    return graph, number_items


def _call_from(
    operation: str,
    nodes: Mapping[str, fx.Node],
    device: torch.device,
    args_data: Any = (),
    kwargs_data: Any = None,
    event_data: Any = None,
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    if operation == _NUMBER_ITEM:
        operation = "funcshard::number.default"
    decoded_args = tuple(decoded(argument, nodes, device) for argument in args_data)
    decoded_kwargs = {
        key: decoded(item, nodes, device) for key, item in (kwargs_data or {}).items()
    }
    if not all(map(str.isidentifier, decoded_kwargs)):
        raise ValueError(f"found arguments of {operation} that are named {list(decoded_kwargs)}")
    # Why: arithmetic of plain numbers, such as 9**9**9, would run now and may never end.
    has_node = any(isinstance(argument, fx.Node) for argument in decoded_args)
    if operation in FUNCTIONS and (decoded_kwargs or not has_node):
        raise ValueError(f"found {operation} without an operation that it depends on")
    return operator_of(operation), decoded_args, decoded_kwargs


def _event_from(data: Any) -> Event:
    event_kind, unit, buffer, dtype, size, axis, ranks = data
    if unit is not None:
        file_data.text("the unit of a collective", unit)
    file_data.texts("a collective", [event_kind, buffer, dtype, axis])
    file_data.numbers("the bytes and ranks of a collective", [size, ranks])
    return Event(event_kind, unit, buffer, dtype, bytes=size, axis=axis, ranks=ranks)


def _check_axis(node: fx.Node, ranks_of_axis: Mapping[str, int]) -> None:
    """Raise unless the mesh has the axis of a collective, or a part of it."""
    if not collective_of(node) or "axis" not in argument_names(node.target):
        return
    arguments = operator_arguments(node.target, node.args, {})
    axis_name, axis_ranks = arguments["axis"], arguments["ranks"]
    # Note: neighbours on an axis are a divisor of its ranks.
    is_part = type(axis_ranks) is int and axis_ranks >= 1 and axis_name in ranks_of_axis
    if not is_part or ranks_of_axis[axis_name] % axis_ranks:
        raise ValueError(
            f"{node.name} runs along {axis_name!r} on {axis_ranks} ranks; the mesh has {dict(ranks_of_axis)}"
        )


# --- results, constants, schedules ----------------------------------------------------------------


def _result_to(result: Place | Constant) -> Any:
    return result.number if isinstance(result, Place) else {"value": encoded(result.value, {})}


def _result_from(data: Any, outputs: int, device: torch.device) -> Place | Constant:
    if isinstance(data, dict):
        return Constant(decoded(data["value"], {}, device))
    return Place(file_data.whole("a result", data, 0, outputs - 1))


def _constant_to(tensor: torch.Tensor) -> list[Any]:
    constant_bytes = byte_view(tensor.cpu())
    base64_text = base64.b64encode(byte_memory(constant_bytes)).decode()
    return [dtype_name(tensor.dtype), list(tensor.shape), base64_text]


def _constant_from(name: str, fields: Any) -> torch.Tensor:
    if not _CONSTANT_NAME.fullmatch(name):
        raise ValueError(f"found a constant that is named {name!r}")
    dtype, constant_bytes = dtype_of(fields[0]), base64.b64decode(fields[2], validate=True)
    constant_shape = file_data.numbers("the shape of a constant", fields[1], 0, MOST - 1)
    needed_bytes = math.prod(constant_shape) * dtype.itemsize
    if len(constant_bytes) != needed_bytes:
        raise ValueError(
            f"the constant {name} of shape {constant_shape} needs {needed_bytes} bytes; found {len(constant_bytes)}"
        )
    if not constant_bytes:  # which torch.frombuffer refuses
        return torch.empty(constant_shape, dtype=dtype, device="cpu")
    return (
        torch.frombuffer(bytearray(constant_bytes), dtype=torch.uint8)
        .view(dtype)
        .reshape(constant_shape)
    )


def _schedule_name(number: Any, schedules: Mapping[str, Callable[..., Any]]) -> str:
    for name, function in schedules.items():
        if function == number:
            return name
    raise ValueError(
        f"a file of graphs names the schedules of the step's optimizer; found {number!r}, which it "
        "does not have: load the graph with step=, and save it then"
    )
