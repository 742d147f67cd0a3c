"""Run a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from funcshard._utils.process_state import RandomState
from funcshard._utils.torch_operators import operator_arguments
from funcshard.comm import Group, Mesh, Op, all_gather_private, neighbours
from funcshard.graph.memory import GraphStorages
from funcshard.graph.step_graph import StepGraph, collective_of
from funcshard.plan import emit


def bind(step_graph: StepGraph, mesh: Mesh) -> Callable[..., list[Any]]:
    """Return a graph as a function that runs on a mesh and frees each tensor after its last use."""
    storages = GraphStorages.find(step_graph.graph)
    graph = fx.Graph()
    copy_of = dict[fx.Node, fx.Node]()
    graph.output(graph.graph_copy(step_graph.graph, copy_of))
    for node, copy in copy_of.items():
        lower(node, copy, step_graph, mesh, storages)
    return fx.GraphModule(dict(step_graph.constants), graph).forward


def lower(
    node: fx.Node, copy: fx.Node, step_graph: StepGraph, mesh: Mesh, storages: GraphStorages
) -> None:
    """Let the copy of a node call what the node does on a mesh, if it's ours."""
    operation_name = collective_of(node)
    node_args: Any = node.args
    if operation_name == "wait":
        copy.target = _wait
    elif operation_name == "number":
        is_tensor = isinstance(node.meta["val"], torch.Tensor)
        # Note: the number of the schedule goes, and the number of steps stays.
        copy.target = _number(step_graph.numbers[node_args[0]], is_tensor)
        copy.args = copy.args[1:]
    elif operation_name == "coordinate":
        copy.target, copy.args = torch.tensor, (_group(mesh, *node_args[:2]).rank,)
        copy.kwargs = {"device": "cpu"}
    elif operation_name == "random_state":
        # Why not torch.get_rng_state: a GPU has a generator of its own.
        copy.target = RandomState.take
    elif operation_name == "set_random_state":
        copy.target = RandomState.put
    elif node.target is torch.ops.aten.view.default:
        # Why: a kernel may lay its result out in memory otherwise than in the recording.
        copy.target = torch.ops.aten.reshape.default
    elif operation_name:
        # Note: unit, axis and label are known now; only data, and the source of a broadcast, are
        # arguments.
        copy.target = _start_of(
            node, operation_name, mesh, donated=_is_free(node, storages)
        )
        copy.args, copy.kwargs = copy.args[: 2 if operation_name == "broadcast" else 1], {}


def _is_free(start: fx.Node, storages: GraphStorages) -> bool:
    """Return whether a collective may overwrite its data."""
    data: Any = start.args[0]
    data_storages = storages.of.get(data, ())  # none of a list of parts
    return len(data_storages) == 1 and all(
        storages.made[storage].op != "placeholder" and storages.last(storage) is start
        for storage in data_storages
    )


def _wait(pending: Any) -> Any:
    return pending.wait()


def _number(function: Callable[[int], float], is_tensor: bool) -> Callable[[int], Any]:
    def number(steps: int) -> Any:
        value = float(function(steps))
        return (
            torch.tensor(value, dtype=torch.float64, device="cpu") if is_tensor else value
        )

    return number


@dataclass(slots=True, eq=False)
class _Pending:
    """A collective that runs, with the tensors that it reads and writes."""

    work: Any
    out: torch.Tensor
    held: Any = None

    def wait(self) -> torch.Tensor:
        self.work.wait()
        # Why: data that a collective read is free with its wait, as memory_of counts.
        self.held = None
        return self.out


def _start_of(node: fx.Node, name: str, mesh: Mesh, *, donated: bool) -> Callable[..., Any]:
    """Return the start of a collective: a function from its data to its wait."""
    event: Any = node.meta.get("event")
    arguments = operator_arguments(node.target, node.args, node.kwargs)
    group, label = _group(mesh, arguments["axis"], arguments["ranks"]), arguments["label"]

    def all_gather(shard: torch.Tensor) -> Any:
        if arguments["shared"]:
            return group.all_gather_last(shard, shared=True, label=label)
        return all_gather_private(group, shard, label=label)

    def pending(held: Any, out: torch.Tensor, *rest: Any) -> _Pending:
        return _Pending(group.start(Op(name, label, out, *rest)), out, held)

    def reduce_scatter(parts: Any) -> Any:
        shard_numel = sum(part.numel() for part in parts) // group.size
        out_tensor = parts[0].new_empty(shard_numel, dtype=arguments["dtype"])
        # Why one: a group copies several parts at once, and reads a single one until it is done.
        return pending(parts if len(parts) == 1 else None, out_tensor, parts)

    def in_place(tensor: torch.Tensor, *src: int) -> Any:
        # Why cloned: a group writes into its data, which other operations may read.
        return pending(None, tensor if donated else tensor.clone(), None, *src)

    def all_to_all(full: torch.Tensor) -> Any:
        split_sizes = arguments["out_sizes"], arguments["sizes"]
        return pending(full, full.new_empty(sum(split_sizes[0])), full, 0, *split_sizes)

    starts: Any = {f.__name__: f for f in (all_gather, reduce_scatter, all_to_all)}
    start_data = starts.get(name, in_place)

    def start(*data: Any) -> Any:
        if event is not None:
            emit(event)
        return start_data(*data)

    return start


def _group(mesh: Mesh, axis: str, ranks: int) -> Group:
    """Return the group of an axis, or of this rank's neighbours on it."""
    # Note: reshard_after_forward=n gathers from n neighbours, which are a part of the axis.
    axis_group = mesh.groups[axis]
    return axis_group if axis_group.size == ranks else neighbours(mesh, ranks).shard
