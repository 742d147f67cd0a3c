"""The file of a traced step, for all ranks, and a ``StepGraph`` as JSON.

The first line has the format and a checksum of the rest, the second one facts, the third one the
graphs.

An operation may only be an operator of torch or funcshard that reads and writes no files, or a
function on numbers.

In arguments and signatures, a node is ``"%3"``, and a text begins with an apostrophe. Numbers,
``true``, ``false``, ``null`` and lists are themselves. All else is an object such as ``{"dtype":
"float32"}``.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import json
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from funcshard._utils import file_data, tree
from funcshard._utils.regular_files import read_regular
from funcshard._utils.tensors import byte_memory, byte_view
from funcshard._utils.torch_operators import operator_by_name, operator_full_name
from funcshard.comm import Mesh, all_gather_texts
from funcshard.graph.signatures import Conditions, Signature
from funcshard.graph.step_graph import (
    Constant,
    Place,
    StepGraph,
    fill_in,
    input_memory,
    is_number_item,
)
from funcshard.plan import Event, dtype_name, dtype_of

FORMAT = "funcshard.graph/3"


def graphs_text(
    step_graphs: Iterable[StepGraph], schedules: Mapping[str, Callable[..., Any]]
) -> str:
    """Return graphs as JSON; ``schedules`` are the step's functions of the number of steps."""
    return _short([_graph_to(step_graph, schedules) for step_graph in step_graphs])


def _short(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def text_digest(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_file(path: Path, facts: dict[str, Any], kinds: Sequence[str]) -> None:
    """Write a file under another name, and rename it once it's complete."""
    file_text = f"{_short(facts)}\n[{','.join(kinds)}]\n"
    first_line = _short({"format": FORMAT, "sha256": text_digest(file_text)})
    # Why the process's number: jobs that save to one path must not write the same file.
    part_path = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part_path, "w", newline="\n") as file:
            file.write(f"{first_line}\n{file_text}")
            file.flush()
            # Why: the rename must not come before the data, if the machine stops.
            os.fsync(file.fileno())
        os.replace(part_path, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part_path.unlink()


def read_file(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """Return the facts and the graphs of a file; the facts have its ``"digest"`` too."""
    first_part, _, file_rest = read_regular(path).partition(b"\n")
    try:
        first_line = file_data.table(
            "its first line", file_data.parse(first_part), ("format",)
        )
    except ValueError:
        raise ValueError(
            f"{path} is not a file of Traced.save; found {first_part[:40]!r} in its first line"
        ) from None
    if first_line["format"] != FORMAT:
        format_text = file_data.shown(first_line["format"])
        raise ValueError(
            f"{path} is of format {format_text}; this version of funcshard reads {FORMAT!r}"
        )
    digest = hashlib.sha256(file_rest).hexdigest()
    if first_line.get("sha256") != digest:
        raise ValueError(
            f"{path} is damaged: its checksum is not the one that was saved; save the traced step "
            "again"
        )
    facts, _, kind_texts = file_rest.partition(b"\n")
    try:
        file_facts = file_data.table("its second line", file_data.parse(facts))
        return file_facts | {"digest": digest}, file_data.parse(kind_texts)
    except ValueError as error:
        raise ValueError(
            f"{path} cannot be read: {error}; save the traced step again"
        ) from None


# --- all ranks ------------------------------------------------------------------------------------


def save_together(
    path: Path,
    facts: dict[str, Any],
    text: str,
    collectives: str,
    mesh: Mesh,
    *,
    error: str = "",
) -> None:
    """Write one file for all ranks, which all call this; raise if they differ, or one has an error.

    Arguments:
        text: this rank's graphs. The file holds each text once.
        collectives: this rank's collectives, equal on all ranks.
    """
    # Why digests: texts of many MiB are sent only if they differ.
    own_report = [error, text_digest(json.dumps([facts, collectives])), text_digest(text)]
    rank_reports = map(
        json.loads, all_gather_texts(mesh, json.dumps(own_report), "a saved step")
    )
    rank_errors, fact_digests, text_digests = zip(*rank_reports, strict=True)
    for rank in range(mesh.world_size):
        if rank_errors[rank]:
            raise ValueError(error or f"rank {rank} cannot save: {rank_errors[rank]}")
        if fact_digests[rank] != fact_digests[0]:
            raise ValueError(
                f"every rank saves the same step; ranks 0 and {rank} differ in the plan, the mesh, "
                "the number of passes, or the collectives of their graphs"
            )
    # Note: the first rank of each kind of graph, in order.
    first_ranks = [text_digests.index(digest) for digest in dict.fromkeys(text_digests)]
    kind_texts: Sequence[str] = [text]
    if len(first_ranks) > 1:
        # Note: one rank of each kind is enough.
        own_text = text if mesh.rank in first_ranks else ""
        sent_texts = all_gather_texts(mesh, own_text, "the graphs of a saved step")
        kind_texts = [sent_texts[rank] for rank in first_ranks]
    write_failure = ""
    if mesh.rank == 0:
        of_rank = [first_ranks.index(text_digests.index(digest)) for digest in text_digests]
        try:
            write_file(path, {**facts, "of_rank": of_rank}, kind_texts)
        except OSError as problem:
            write_failure = f"rank 0 cannot write {path}: {problem}"
    # Why: no rank returns before the file is there.
    write_failure = all_gather_texts(mesh, write_failure, "the end of a saved step")[0]
    if write_failure:
        raise OSError(write_failure)


# --- graphs ---------------------------------------------------------------------------------------

_NUMBER_ITEM = "funcshard::number.item"  # the number itself, and no tensor
_OF_INPUTS = ("path", "unit")  # notes for the text of a graph


def _graph_to(
    step_graph: StepGraph, schedules: Mapping[str, Callable[..., Any]]
) -> dict[str, Any]:
    """Return a graph as JSON; ``graph_from`` is the inverse."""
    nodes, signature = list(step_graph.graph.nodes), step_graph.signature
    node_names = {node: f"%{node.name}" for node in nodes}
    # Why numbers: torch names constants in the order of their use, which passes change.
    constant_names = sorted(step_graph.constants)
    return {
        "signature": encoded(signature._replace(form=_structure(signature.form)), {}),
        "sizes": dict(step_graph.sizes),
        "inputs": step_graph.inputs,
        "memory": input_memory([node for node in nodes if node.op == "placeholder"]),
        "form": encoded(_structure(step_graph.form), {}),
        # Note: a number is a place among the graph's outputs, a list of one value that value.
        "results": [
            result.number if isinstance(result, Place) else encoded(result, {})
            for result in step_graph.results
        ],
        "donated": step_graph.donated,
        "spent": step_graph.spent,
        "numbers": [_schedule_name(function, schedules) for function in step_graph.numbers],
        "replayable": step_graph.replayable,
        "constants": [_constant_to(step_graph.constants[name]) for name in constant_names],
        "nodes": list(_nodes_to(step_graph.graph, node_names, constant_names)),
    }


def graph_from(
    data: Any, device: torch.device, schedules: Mapping[str, Callable[[int], float]]
) -> StepGraph:
    """Return the graph that ``graphs_text`` wrote; raise any error for other data."""

    def values(name: str) -> Any:
        return tree.freeze(decoded(data[name], {}, device))

    signature, inputs = Signature(*values("signature")), tuple(data["inputs"])
    signature = signature._replace(form=tree.form_of(signature.form))
    constants = {
        f"_tensor_constant{i}": _constant_from(*fields)
        for i, fields in enumerate(data["constants"])
    }
    graph = _graph_from(data["nodes"], device, list(constants))
    # Note: this runs all operations on tensors without data, so it also checks that they fit.
    fill_in(
        graph,
        [signature.leaves[i] for i in inputs],
        data["sizes"],
        data["memory"],
        constants,
    )
    return StepGraph(
        graph=graph,
        signature=signature,
        inputs=inputs,
        results=tuple(
            Constant(*result) if isinstance(result, tuple) else Place(result)
            for result in values("results")
        ),
        form=tree.form_of(values("form")),
        donated=tuple(data["donated"]),
        spent=tuple(map(tuple, data["spent"])),
        constants=constants,
        numbers=tuple(schedules[name] for name in data["numbers"]),
        replayable=data["replayable"],
        sizes=data["sizes"],
        conditions=Conditions(signature.conditions),
    )


def _structure(form: Any) -> Any:
    """Return the form of a tree as nested tuples; ``tree.form_of`` is the inverse."""
    index_tree = tree.build_form(form, range(form.num_leaves))
    try:
        structure, _, _ = tree.describe(index_tree)
    except TypeError as error:
        raise ValueError(f"a file of graphs describes trees as data: {error}") from None
    # Why: dictionaries of the results keep the order in which the step made their keys.
    return tree.as_inserted(structure, index_tree)


def _constant_to(tensor: torch.Tensor) -> list[Any]:
    constant_bytes = byte_view(tensor.cpu())
    base64_text = base64.b64encode(byte_memory(constant_bytes)).decode()
    return [dtype_name(tensor.dtype), list(tensor.shape), base64_text]


def _constant_from(dtype: str, shape: list[int], text: str) -> torch.Tensor:
    constant_bytes = list(base64.b64decode(text, validate=True))
    constant = torch.tensor(constant_bytes, dtype=torch.uint8, device="cpu")
    return constant.view(dtype_of(dtype)).reshape(shape)


def _schedule_name(number: Any, schedules: Mapping[str, Callable[..., Any]]) -> str:
    for name, function in schedules.items():
        if function == number:
            return name
    raise ValueError(
        f"a file of graphs names the schedules of the step's optimizer; found {number!r}, which it "
        "does not have: load the graph with step=, and save it then"
    )


# --- operations -----------------------------------------------------------------------------------


def _nodes_to(
    graph: fx.Graph, names: Mapping[fx.Node, str], constant_names: list[str]
) -> Iterator[list[Any]]:
    """Yield a line for each node: name, operation, arguments, named arguments, event."""
    phase = ""
    for node in graph.nodes:
        # Note: a line where the phase changes, in place of a field in each line.
        if node.meta.get("phase", phase) != phase:
            phase = node.meta["phase"]
            yield ["phase", phase]
        operation, args, kwargs, event = node.op, node.args, node.kwargs, ()
        if node.op == "placeholder":
            kwargs = {
                key: node.meta[key] for key in _OF_INPUTS if node.meta.get(key) is not None
            }
        elif node.op == "get_attr":
            args = (constant_names.index(str(node.target)),)
        elif node.op == "call_function":
            operation = _NUMBER_ITEM if is_number_item(node) else target_name(node.target)
            if node.meta.get("event"):
                event = dataclasses.astuple(node.meta["event"])
        encoded_kwargs = {key: encoded(value, names) for key, value in kwargs.items()}
        line = [names[node], operation, encoded(args, names), encoded_kwargs, event]
        while not line[-1]:
            # Note: most operations have no named arguments and no event, so their lines end early.
            line.pop()
        yield line


def _graph_from(data: Any, device: torch.device, constant_names: list[str]) -> fx.Graph:
    graph, nodes_by_name = fx.Graph(), dict[str, fx.Node]()
    *lines, (_, _, (output_data,)) = data
    phase_name = None
    for name, operation, *node_fields in lines:
        if name == "phase":
            phase_name = operation
            continue
        defaults: list[Any] = [(), {}, ()]
        args_data, kwargs_data, event = node_fields + defaults[len(node_fields) :]
        args = tuple(decoded(argument, nodes_by_name, device) for argument in args_data)
        kwargs = {
            key: decoded(item, nodes_by_name, device) for key, item in kwargs_data.items()
        }
        # Note: fx makes an identifier of a node's name. Names of variables in the code that it runs
        # must not come from a file otherwise.
        if operation == "placeholder":
            node = graph.create_node(operation, f"input{len(nodes_by_name)}", name=name[1:])
            node.meta.update(
                (key, note) for key, note in kwargs.items() if key in _OF_INPUTS
            )
        elif operation == "get_attr":
            node = graph.create_node(operation, constant_names[args[0]], name=name[1:])
        else:
            target = _checked_operator(operation, args, kwargs)
            node = graph.create_node("call_function", target, args, kwargs, name=name[1:])
            if event:
                node.meta["event"] = Event(*event)
            if operation == _NUMBER_ITEM:
                node.meta["val"] = (
                    0.0  # for fill_in, which takes the number out of the tensor
                )
            if phase_name is not None:
                node.meta["phase"] = phase_name
        nodes_by_name[name] = node
    graph.output(decoded(output_data, nodes_by_name, device))
    graph.lint()
    return graph


def _checked_operator(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the operation of a line; raise if it's none that a file may call so."""
    if operation == _NUMBER_ITEM:
        operation = "funcshard::number.default"
    if not all(map(str.isidentifier, kwargs)):
        raise ValueError(f"found arguments of {operation} that are named {list(kwargs)}")
    # Why: arithmetic of plain numbers, such as 9**9**9, would run now and may never end.
    has_node = any(isinstance(argument, fx.Node) for argument in args)
    if operation in FUNCTIONS:
        if kwargs or not has_node:
            raise ValueError(f"found {operation} without an operation that it depends on")
        return FUNCTIONS[operation]
    named_operator = operator_by_name(*_check(operation))
    if named_operator is None:
        raise ValueError(
            f"the file holds the operation {operation!r}, and this torch ({torch.__version__}) has "
            "none of that name"
        )
    return named_operator


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
    "type": {cls.__name__: cls for cls in (bool, int, float, str, complex)},  # of a leaf
    "layout": {"strided": torch.strided},
    "memory_format": {
        name: getattr(torch, name)
        for name in (
            "contiguous_format",
            "preserve_format",
            "channels_last",
            "channels_last_3d",
        )
    },
    "float": {"inf": math.inf, "-inf": -math.inf, "nan": math.nan},
}


def target_name(target: Any) -> str:
    """Return the name of an operation for a file."""
    if full_name := operator_full_name(target):
        _check(full_name)
        return full_name
    try:
        return _FUNCTION_NAMES[target]
    except (KeyError, TypeError):
        name = getattr(target, "__name__", target)
        raise _error(f"{getattr(target, '__module__', '?')}.{name}") from None


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
        # Note: a rank's tensors are on its own GPU, whatever number the one that saved had.
        return device if device.type == coded_value else torch.device(coded_value)
    return _NAMED[key][coded_value]
