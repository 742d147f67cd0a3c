"""A ``StepGraph`` as JSON.

An operation may only be an operator of torch or funcshard that reads and writes no files, or a
function on numbers.

In arguments, a node is ``"%3"``, and a text begins with an apostrophe. Numbers, ``true``,
``false``, ``null`` and lists are themselves. All else is an object such as ``{"dtype":
"float32"}``.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import operator
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from funcshard._utils import tree
from funcshard._utils.tensors import byte_memory, byte_view
from funcshard._utils.torch_operators import operator_by_name, operator_full_name
from funcshard.graph.filling import fill_in, input_memory, is_number_item
from funcshard.graph.signatures import Conditions, Signature
from funcshard.graph.step_graph import Constant, Place, StepGraph
from funcshard.plan import Event, dtype_name, dtype_of

_NUMBER_ITEM = "funcshard::number.item"  # the number itself, and no tensor
_OF_INPUTS = ("path", "unit")  # notes for the text of a graph
_PLAIN = (bool, int, float, str, complex)


def graph_to(step_graph: StepGraph, schedules: Mapping[str, Callable[..., Any]]) -> dict[str, Any]:
    """Return a graph as JSON; ``graph_from`` is the inverse.

    ``schedules`` has the step's functions of the number of steps, by name.
    """
    nodes = list(step_graph.graph.nodes)
    node_names = {node: f"%{node.name}" for node in nodes}
    # Why numbers: torch names constants in the order of their use, which passes change.
    constant_names = sorted(step_graph.constants)
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
        "constants": [_constant_to(step_graph.constants[name]) for name in constant_names],
        "nodes": list(_nodes_to(step_graph.graph, node_names, constant_names)),
    }


def graph_from(
    data: Any, device: torch.device, schedules: Mapping[str, Callable[[int], float]]
) -> StepGraph:
    """Return the graph that ``graph_to`` wrote; raise any error for other data."""
    signature = signature_from(data["signature"], device)
    inputs = tuple(data["inputs"])
    tensor_leaves = [signature.leaves[i] for i in inputs if signature.leaves[i] is not int]
    constants = {
        f"_tensor_constant{i}": _constant_from(*fields)
        for i, fields in enumerate(data["constants"])
    }
    graph, number_items = _nodes_from(data["nodes"], device, list(constants))
    # Note: this runs all operations on tensors without data, so it also checks that they fit.
    fill_in(graph, tensor_leaves, data["sizes"], data["memory"], constants, number_items)
    return StepGraph(
        graph=graph,
        signature=signature,
        inputs=inputs,
        results=tuple(_result_from(result, device) for result in data["results"]),
        form=form_from(data["form"]),
        donated=tuple(data["donated"]),
        spent=tuple(map(tuple, data["spent"])),
        constants=constants,
        numbers=tuple(schedules[name] for name in data["numbers"]),
        replayable=data["replayable"],
        sizes=data["sizes"],
        conditions=Conditions(signature.conditions),
    )


# --- operations -----------------------------------------------------------------------------------


def _nodes_to(
    graph: fx.Graph, names: Mapping[fx.Node, str], constant_names: list[str]
) -> Iterator[list[Any]]:
    phase = ""
    for node in graph.nodes:
        # Note: a line where the phase changes, in place of a field in each line.
        if node.meta.get("phase", phase) != phase:
            phase = node.meta["phase"]
            yield ["phase", phase]
        if node.op == "placeholder":
            input_notes = {
                key: node.meta[key] for key in _OF_INPUTS if node.meta.get(key) is not None
            }
            yield [names[node], "input", input_notes]
        elif node.op == "get_attr":
            yield [names[node], "constant", constant_names.index(str(node.target))]
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
    data: Any, device: torch.device, constant_names: list[str]
) -> tuple[fx.Graph, set[fx.Node]]:
    """Return a graph, and its nodes whose tensors are numbers."""
    graph, nodes_by_name = fx.Graph(), dict[str, fx.Node]()
    number_items = set()
    *operations, (_, output_data) = data
    phase_name = None
    for name, operation, *node_fields in operations:
        if name == "phase":
            phase_name = operation
            continue
        # Note: fx makes an identifier of a node's name. Names of variables in the code that it runs
        # must not come from a file otherwise.
        if operation == "input":
            target = f"input{len(nodes_by_name)}"
            node = graph.create_node("placeholder", target, name=name[1:])
            node.meta.update(
                (key, note) for key, note in node_fields[0].items() if key in _OF_INPUTS
            )
        elif operation == "constant":
            node = graph.create_node("get_attr", constant_names[node_fields[0]], name=name[1:])
        else:
            call = _call_from(operation, nodes_by_name, device, *node_fields[:2])
            node = graph.create_node("call_function", *call, name=name[1:])
            if len(node_fields) > 2:
                node.meta["event"] = Event(*node_fields[2])
        if operation == _NUMBER_ITEM:
            # Note: fill_in makes the number of the tensor that the operator returns.
            number_items.add(node)
        if phase_name is not None and node.op != "placeholder":
            node.meta["phase"] = phase_name
        nodes_by_name[name] = node
    graph.output(decoded(output_data, nodes_by_name, device))
    graph.lint()
    return graph, number_items


def _call_from(
    operation: str,
    nodes: Mapping[str, fx.Node],
    device: torch.device,
    args_data: Any = (),
    kwargs_data: Any = None,
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


# --- results, constants, schedules ----------------------------------------------------------------


def _result_to(result: Place | Constant) -> Any:
    return result.number if isinstance(result, Place) else {"value": encoded(result.value, {})}


def _result_from(data: Any, device: torch.device) -> Place | Constant:
    if isinstance(data, dict):
        return Constant(decoded(data["value"], {}, device))
    return Place(data)


def _constant_to(tensor: torch.Tensor) -> list[Any]:
    constant_bytes = byte_view(tensor.cpu())
    base64_text = base64.b64encode(byte_memory(constant_bytes)).decode()
    return [dtype_name(tensor.dtype), list(tensor.shape), base64_text]


def _constant_from(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    constant_bytes = bytearray(base64.b64decode(text, validate=True))
    constant = torch.empty(len(constant_bytes), dtype=torch.uint8, device="cpu")
    if constant_bytes:  # of none torch makes no tensor
        constant = torch.frombuffer(constant_bytes, dtype=torch.uint8)
    return constant.view(dtype_of(dtype)).reshape(shape)


def _schedule_name(number: Any, schedules: Mapping[str, Callable[..., Any]]) -> str:
    for name, function in schedules.items():
        if function == number:
            return name
    raise ValueError(
        f"a file of graphs names the schedules of the step's optimizer; found {number!r}, which it "
        "does not have: load the graph with step=, and save it then"
    )


# --- signatures -----------------------------------------------------------------------------------


def form_to(form: Any) -> Any:
    """Return the form of a tree as JSON; ``form_from`` is the inverse."""
    index_tree = tree.build_form(form, range(form.num_leaves))
    try:
        structure, _, _ = tree.describe(index_tree)
    except TypeError as error:
        raise ValueError(f"a file of graphs describes trees as data: {error}") from None
    # Why: dictionaries of the results keep the order in which the step made their keys.
    return _plain(tree.as_inserted(structure, index_tree))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str | float):
        return value
    raise ValueError(
        f"a file of graphs describes trees as data; found the key or metadata {value!r}"
    )


def form_from(data: Any) -> Any:
    """Return the form that ``form_to`` wrote; import no module."""
    return tree.form_of(tree.freeze(data))


def signature_to(signature: Signature) -> Any:
    """Return a signature as JSON; ``signature_from`` is the inverse."""
    inference, *autocast_modes = signature.modes
    return {
        "form": form_to(signature.form),
        "modes": [inference, *([enabled, dtype_name(dtype)] for enabled, dtype in autocast_modes)],
        "conditions": list(signature.conditions),
        "leaves": list(map(_leaf_to, signature.leaves)),
    }


def signature_from(data: Any, device: torch.device) -> Signature:
    """Return the signature that ``signature_to`` wrote, for tensors of a mesh on ``device``."""
    inference, *autocast_modes = data["modes"]
    return Signature(
        form=form_from(data["form"]),
        modes=(
            bool(inference),
            *((bool(enabled), dtype_of(dtype)) for enabled, dtype in autocast_modes),
        ),
        leaves=tuple(_leaf_from(leaf, device) for leaf in data["leaves"]),
        conditions=tuple(data["conditions"]),
    )


def _leaf_to(leaf: Any) -> Any:
    if leaf is int:
        return "a counter"
    if len(leaf) == 2:
        leaf_type, value = leaf
        # Note: a leaf without a hash is its repr here, of another type than its own.
        if leaf_type not in _PLAIN or type(value) is not leaf_type:
            raise ValueError(
                "a file of graphs holds numbers and texts of the batch; found a leaf of type "
                f"{leaf_type.__name__}: pass it as a tensor, or keep it out of the batch"
            )
        return {"value": encoded(value, {})}
    shape, dtype, device, stride, requires_grad = leaf
    stride_data = None if stride is None else list(stride)
    return [dtype_name(dtype), list(shape), stride_data, device.type, requires_grad]


def _leaf_from(data: Any, device: torch.device) -> Hashable:
    if data == "a counter":
        return int
    if isinstance(data, dict):
        value = decoded(data["value"], {}, device)
        return type(value), value
    dtype, shape, stride, device_type, requires_grad = data
    is_named = any(isinstance(size, str) for size in shape)
    return (
        # Why: the sizes of an argument are a torch.Size, which a tuple with names cannot be.
        tuple(shape) if is_named else torch.Size(shape),
        dtype_of(dtype),
        device_from(device_type, device),
        None if stride is None else tuple(stride),
        requires_grad,
    )


# --- names of operations --------------------------------------------------------------------------

_SPACES = ("aten", "prims", "funcshard")
_NAME = re.compile(r"([A-Za-z0-9_]+)::([A-Za-z0-9_]+)\.([A-Za-z0-9_]+)")

# Why these: torch computes with numbers of a recording by them.
FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        f"operator.{name}": getattr(operator, name)
        for name in (
            "abs", "add", "and_", "eq", "floordiv", "ge", "getitem", "gt", "le", "lt", "mod", "mul", "ne", "neg", "or_",
            "pow", "sub", "truediv",
        )
    },
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc")},
    **{
        f"torch.{name}": getattr(torch, name)
        for name in ("sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not")
    },
}  # fmt: skip
_FUNCTION_NAMES = {function: name for name, function in FUNCTIONS.items()}

_REFUSED = {"from_file", "_print", "set_data"}

# By the key of the object that stands for each in a file.
_NAMED: dict[str, dict[str, Any]] = {
    "layout": {"strided": torch.strided},
    "memory_format": {
        name: getattr(torch, name)
        for name in ("contiguous_format", "preserve_format", "channels_last", "channels_last_3d")
    },
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
}


def target_name(target: Any) -> str:
    """Return the name of an operation for a file; ``operator_of`` is the inverse."""
    if full_name := operator_full_name(target):
        _check(full_name)
        return full_name
    try:
        return _FUNCTION_NAMES[target]
    except (KeyError, TypeError):
        name = getattr(target, "__name__", target)
        raise _error(f"{getattr(target, '__module__', '?')}.{name}") from None


def operator_of(name: str) -> Any:
    """Return the operation of a name."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    named_operator = operator_by_name(*_check(name))
    if named_operator is None:
        raise ValueError(
            f"the file holds the operation {name!r}, and this torch ({torch.__version__}) has none "
            "of that name"
        )
    return named_operator


def _check(name: str) -> tuple[str, str, str]:
    name_match = _NAME.fullmatch(name)
    if name_match is None or name_match[1] not in _SPACES or name_match[2] in _REFUSED:
        raise _error(name)
    return name_match[1], name_match[2], name_match[3]


def _error(name: str) -> ValueError:
    return ValueError(
        f"a file of graphs holds operators of {', '.join(_SPACES)} and arithmetic of numbers, "
        f"because reading a file must not run other code; found {name!r}"
    )


# --- arguments ------------------------------------------------------------------------------------


def encoded(value: Any, names: Mapping[fx.Node, str]) -> Any:
    """Return an argument as JSON; ``decoded`` is the inverse, with lists for tuples."""
    if isinstance(value, fx.Node):
        return names[value]
    if value is None or type(value) in (bool, int):
        return value
    if isinstance(value, str):
        return f"'{value}"
    if isinstance(value, tuple | list):
        return [encoded(item, names) for item in value]
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"device": value.type}  # ranks have devices of other numbers
    if type(value) is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, complex):
        return {"complex": [encoded(value.real, names), encoded(value.imag, names)]}
    for key, named_values in _NAMED.items():
        for name, named_value in named_values.items():
            if named_value is value:
                return {key: name}
    raise ValueError(
        f"a file of graphs holds tensors, numbers, texts and dtypes; found {value!r} of type "
        f"{type(value).__name__}: keep such values out of the batch and of the metrics"
    )


def decoded(data: Any, nodes: Mapping[str, fx.Node], device: torch.device) -> Any:
    """Return the argument that ``encoded`` wrote."""
    if isinstance(data, str):
        return data[1:] if data.startswith("'") else nodes[data]
    if isinstance(data, list):
        return [decoded(item, nodes, device) for item in data]
    if not isinstance(data, dict):
        return data
    ((key, coded_value),) = data.items()
    if key == "complex":
        return complex(*decoded(coded_value, {}, device))
    if key == "dtype":
        return dtype_of(coded_value)
    if key == "device":
        return device_from(coded_value, device)
    return _NAMED[key][coded_value]


def device_from(device_type: str, device: torch.device) -> torch.device:
    """Return the mesh's device if it's of this type, or else a device of this type."""
    # Note: a rank's tensors are on its own GPU, whatever number the one that saved had.
    return device if device.type == device_type else torch.device(device_type)
