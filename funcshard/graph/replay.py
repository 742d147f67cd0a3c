"""Run a graph: its operations as torch's, its collectives on the groups of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from funcshard._utils import RandomState, operator_arguments
from funcshard.comm import Group, Mesh, all_gather_private, neighbours
from funcshard.graph.step_graph import StepGraph, collective_of
from funcshard.graph.storages import GraphStorages
from funcshard.plan import emit, recording


def bind(step_graph: StepGraph, mesh: Mesh) -> Callable[..., list[Any]]:
    """Return a function from the inputs of a graph to its outputs, which runs on a mesh.

    The function frees each tensor after its last use, as the step does.
    """
    storages = GraphStorages.find(step_graph.graph)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(step_graph.graph, copies))
    for node, own_nodes in copies.items():
        lower(node, own_nodes, step_graph, mesh, storages)
    return fx.GraphModule(dict(step_graph.constants), graph).forward


def lower(
    node: fx.Node, own: fx.Node, step_graph: StepGraph, mesh: Mesh, storages: GraphStorages
) -> None:
    """Let the copy of a node call what the node does on a mesh, if it is an operation of ours."""
    collective_kind = collective_of(node)
    if collective_kind == "wait":
        own.target = _wait
    elif collective_kind == "number":
        tensor = isinstance(node.meta["val"], torch.Tensor)
        index: Any = node.args[0]
        own.target, own.args = _Number(step_graph.numbers[index], tensor), own.args[1:]
    elif collective_kind == "coordinate":
        axis: Any = node.args[0]
        ranks: Any = node.args[1]
        own.target, own.args = _Coordinate(_group(mesh, axis, ranks).rank), ()
    elif collective_kind in ("random_state", "set_random_state"):
        # Why not torch.get_rng_state: a GPU has a generator of its own.
        own.target = RandomState.take if collective_kind == "random_state" else RandomState.put
    elif collective_kind:
        own.target = _Start(node, collective_kind, mesh, donated=_is_free(node, storages))
        own.args, own.kwargs = own.args[: 2 if collective_kind == "broadcast" else 1], {}


def _is_free(start: fx.Node, storages: GraphStorages) -> bool:
    """Return whether a collective may overwrite its data, because nothing reads it afterwards."""
    data: Any = start.args[0]
    data_storages = storages.of.get(data, ())
    return (
        len(data_storages) == 1
        and storages.made[data_storages[0]].op != "placeholder"
        and storages.last(data_storages[0]) is start
    )


def _wait(pending: Any) -> torch.Tensor:
    waited_tensor: torch.Tensor = pending.wait()
    return waited_tensor


class _Number:
    """A number of the graph that a Python function computes from the number of steps."""

    __name__ = "number"

    def __init__(self, function: Callable[[int], float], tensor: bool) -> None:
        self._function, self._tensor = function, tensor

    def __call__(self, steps: int) -> Any:
        value = float(self._function(steps))
        return torch.tensor(value, dtype=torch.float64, device="cpu") if self._tensor else value


class _Coordinate:
    """The number of this rank along an axis, as a tensor."""

    __name__ = "coordinate"

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self) -> torch.Tensor:
        return torch.tensor(self._rank, device="cpu")


class _Pending:
    """A collective that runs, with the tensors that it reads and writes."""

    __slots__ = ("_held", "_out", "_work")

    def __init__(self, work: Any, out: torch.Tensor, held: Any = None) -> None:
        self._work, self._out, self._held = work, out, held

    def wait(self) -> torch.Tensor:
        """Return the result once it is ready."""
        self._work.wait()
        self._held = None
        return self._out


class _Start:
    """The start of a collective: a function from its data to the collective that runs."""

    def __init__(self, node: fx.Node, kind: str, mesh: Mesh, *, donated: bool) -> None:
        node_arguments = operator_arguments(node.target, node.args, node.kwargs)
        self.__name__ = kind
        self._run = getattr(self, f"_{kind}")
        self._event = node.meta.get("event")
        self._group = _group(mesh, node_arguments["axis"], node_arguments["ranks"])
        self._given, self._label, self._donated = node_arguments, node_arguments["label"], donated

    def __call__(self, *data: Any) -> Any:
        if self._event is not None and recording():
            emit(self._event)
        return self._run(*data)

    def _all_gather(self, shard: torch.Tensor) -> Any:
        if self._given["shared"]:
            return self._group.all_gather_shared(shard, label=self._label)
        return all_gather_private(self._group, shard, label=self._label)

    def _reduce_scatter(self, parts: Sequence[torch.Tensor]) -> Any:
        out = parts[0].new_empty(
            sum(part.numel() for part in parts) // self._group.size, dtype=self._given["dtype"]
        )
        # Why one: a group copies several parts at once, and reads a single one until it is done.
        held = parts if len(parts) == 1 else None
        return _Pending(self._group.reduce_scatter(out, parts, label=self._label), out, held)

    def _all_reduce(self, tensor: torch.Tensor) -> Any:
        out = tensor if self._donated else tensor.clone()
        return _Pending(self._group.all_reduce(out, label=self._label), out)

    def _broadcast(self, tensor: torch.Tensor, src: int) -> Any:
        out = tensor if self._donated else tensor.clone()
        return _Pending(self._group.broadcast(out, src, label=self._label), out)

    def _all_to_all(self, full: torch.Tensor) -> Any:
        out_sizes, sizes = self._given["out_sizes"], self._given["sizes"]
        out = full.new_empty(sum(out_sizes))
        return _Pending(
            self._group.all_to_all(out, full, out_sizes, sizes, label=self._label), out, full
        )


def _group(mesh: Mesh, axis: str, ranks: int) -> Group:
    """Return the group of an axis, or of this rank's neighbours on it."""
    group = mesh.groups[axis]
    return group if group.size == ranks else neighbours(mesh, ranks).shard
