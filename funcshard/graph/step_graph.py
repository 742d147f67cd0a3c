"""The graph of one step, as data.

``fill_in`` gives every operation the form of its result, by running it on tensors without data. So
a file stores no shapes of results, and a graph that doesn't fit together is found before it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from funcshard._utils import tree
from funcshard._utils.torch_operators import operator_name
from funcshard._utils.torch_private import recording_tensors, storage_id
from funcshard._utils.tree import tensors_in
from funcshard.graph.signatures import Conditions, Signature, sized
from funcshard.plan import Event

# The operations that start a collective.
STARTS = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all")


class Place(NamedTuple):
    """A leaf of the results: a number among the graph's outputs."""

    number: int


class Constant(NamedTuple):
    """A leaf of the results that's the same in every call."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class StepGraph:
    """The operations of one step in order: operators of torch and of ``funcshard``.

    ``meta["event"]`` has the event of a collective's start, ``meta["val"]`` the form of a result.

    Attributes:
        graph: the operations; its placeholders are tensors and counters of ``(state, batch)``.
        inputs: the number of each placeholder among the arguments' leaves.
        results: each leaf of ``(state, metrics)``.
        donated: numbers of the leaves of the arguments that the step takes over.
        spent: the keys that lead to each optimizer state that the step takes over.
        constants: tensors that the step makes of numbers, as ``torch.tensor([1, 2])`` does.
        numbers: functions of the number of steps, such as schedules.
        replayable: whether the graph may replace the step; see ``StepRecording``.
    """

    graph: fx.Graph
    signature: Signature
    inputs: tuple[int, ...]
    results: tuple[Place | Constant, ...]
    form: Any
    donated: tuple[int, ...]
    spent: tuple[tuple[Any, ...], ...]
    constants: Mapping[str, torch.Tensor]
    numbers: tuple[Callable[[int], float], ...]
    replayable: bool
    sizes: Mapping[str, int] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)

    def copy(self) -> StepGraph:
        """Return the same graph with new nodes, for a pass to change."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        # Note: graph_copy copies meta with each node, and returns the output's argument.
        graph.output(graph.graph_copy(self.graph, copies))
        return dataclasses.replace(self, graph=graph)

    @property
    def events(self) -> tuple[Event, ...]:
        """The collectives that start in the graph, in order."""
        nodes = self.graph.nodes
        return tuple(node.meta["event"] for node in nodes if node.meta.get("event"))


def collective_of(node: fx.Node) -> str:
    """Return the name of ``funcshard``'s operation in a node, or ``""``.

    It's one of ``STARTS`` for the start of a collective; ``"wait"`` for its end; ``"number"`` for
    the result of a schedule; ``"coordinate"`` for this rank's index on an axis; ``"random_state"``
    or ``"set_random_state"``.
    """
    space, _, name = operator_name(node.target).partition("::")
    return name if space == "funcshard" else ""


def is_unit_gather(node: fx.Node) -> bool:
    """Return whether a node starts the all-gather of a unit."""
    event = node.meta.get("event")
    return (
        collective_of(node) == "all_gather" and event is not None and event.unit is not None
    )


def starts_and_waits(graph: fx.Graph) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
    """Yield the start of each collective, with the nodes that wait for it."""
    for node in graph.nodes:
        if collective_of(node) in STARTS:
            yield node, [user for user in node.users if collective_of(user) == "wait"]


# --- forms of results -----------------------------------------------------------------------------

# For each tensor: number of its storage, the storage's bytes, offset in elements.
InputMemory = list[list[int]]


def input_memory(placeholders: Iterable[fx.Node]) -> InputMemory:
    """Return where a graph's input tensors lie; some may share memory."""
    storage_indices: dict[int, int] = {}
    tensor_places = []
    for tensor in tensors_in([node.meta["val"] for node in placeholders]):
        storage_index = storage_indices.setdefault(storage_id(tensor), len(storage_indices))
        storage_bytes = int(tensor.untyped_storage().nbytes())
        tensor_places.append([storage_index, storage_bytes, int(tensor.storage_offset())])
    return tensor_places


def filled(step_graph: StepGraph, sizes: Mapping[str, int]) -> StepGraph:
    """Return a graph for any size with the forms of results for some sizes."""
    filled_graph = step_graph.copy()
    fill_in(
        filled_graph.graph,
        [step_graph.signature.leaves[i] for i in step_graph.inputs],
        sizes,
        input_memory(filled_graph.graph.find_nodes(op="placeholder")),
        step_graph.constants,
    )
    return dataclasses.replace(filled_graph, sizes=dict(sizes))


def is_number_item(node: fx.Node) -> bool:
    """Return whether a node is the number of a schedule, and no tensor of it."""
    return collective_of(node) == "number" and isinstance(
        node.meta.get("val"), float | torch.SymFloat
    )


def fill_in(
    graph: fx.Graph,
    leaves: Sequence[Any],
    sizes: Mapping[str, int],
    memory: InputMemory,
    constants: Mapping[str, torch.Tensor],
) -> None:
    """Set ``meta["val"]`` of each node.

    Arguments:
        graph: the graph; its placeholders are tensors, then counters.
        leaves: the leaf of the signature for each of them.
        memory: see ``input_memory``.

    Raises:
        ValueError: an operation can't take its arguments.
    """
    with recording_tensors() as mode, torch.no_grad():
        tensor_leaves = [leaf for leaf in leaves if leaf is not int]
        # Why a list: an input that does not fit is then no fault of an operation.
        input_tensors = iter(list(_inputs(tensor_leaves, sizes, memory)))
        for node in graph.nodes:
            if node.op == "output":
                break
            try:
                node_result = _result(node, input_tensors, constants, mode)
                if is_number_item(node):
                    node_result = node_result.item()
                # Why a view: an operation that changes a tensor's shape leaves the view as it is.
                node.meta["val"] = tree.map_tensors(torch.Tensor.detach, node_result)
            except Exception as error:
                name = operator_name(node.target) or str(node.target)
                first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise ValueError(
                    f"the operation {node.name} = {name} cannot run: {first_line[:200]}"
                ) from None


def _inputs(
    leaves: Sequence[Any], sizes: Mapping[str, int], memory: InputMemory
) -> Iterator[torch.Tensor]:
    storages: dict[int, torch.Tensor] = {}
    for leaf_index, (leaf, place) in enumerate(zip(leaves, memory, strict=True)):
        shape, dtype, device, strides, _ = sized(leaf, sizes)
        storage_index, storage_bytes, offset = place
        # Note: a tensor with named sizes shares no memory, and has as much as the sizes need.
        if any(isinstance(size, str) for size in leaf[0]):
            last_element = sum(
                (size - 1) * stride for size, stride in zip(shape, strides, strict=True)
            )
            # Note: a tensor without elements takes no memory, whatever its strides are.
            elements = (last_element + 1) * (0 not in shape)
            storage_index, storage_bytes, offset = (
                -1 - leaf_index,
                elements * dtype.itemsize,
                0,
            )
        # Why bytes: inputs of other dtypes may be views of the same memory.
        if storage_index not in storages:
            storages[storage_index] = torch.empty(
                storage_bytes, dtype=torch.uint8, device=device
            )
        base_bytes = storages[storage_index]
        if base_bytes.numel() != storage_bytes or base_bytes.device.type != device.type:
            raise ValueError(
                f"two inputs lie in memory {storage_index}, and give it other sizes"
            )
        # Note: the storage may end inside an element, if it is shared with another dtype.
        whole_tensor = base_bytes[: storage_bytes // dtype.itemsize * dtype.itemsize].view(
            dtype
        )
        yield whole_tensor.as_strided(shape, strides, offset)


def _result(
    node: fx.Node, inputs: Any, constants: Mapping[str, torch.Tensor], mode: Any
) -> Any:
    if node.op == "placeholder":
        tensor = next(inputs, None)
        # Why item: it gives a number whose arithmetic is that of the recording.
        return (
            torch.zeros((), dtype=torch.int64, device="cpu").item()
            if tensor is None
            else tensor
        )
    if node.op == "get_attr":
        return mode.from_tensor(constants[str(node.target)])
    return called(node)


def called(node: fx.Node) -> Any:
    """Return the result of an operation on tensors without data."""
    node_target: Any = node.target
    args, kwargs = arguments_of(node)
    return node_target(*args, **kwargs)


def arguments_of(node: fx.Node) -> Any:
    """Return the arguments of an operation, without data."""
    return fx.node.map_arg((node.args, node.kwargs), lambda used: used.meta["val"])
