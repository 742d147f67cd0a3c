"""Record a step: run it on tensors without data, and write down every operation.

The step runs as it does eagerly: backward, the reductions and the optimizer included. Below
autograd, torch's make_fx sees each operation. The collectives become their own operations (see
``comm.recorded_group``), so the ranks exchange nothing.
"""

from __future__ import annotations

import inspect
import os
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from funcshard._utils import (
    DONATED_STATE,
    TorchDispatchMode,
    ValueReadError,
    captured,
    check_thread,
    graph_task_id,
    is_donated,
    is_dtensor,
    is_fake,
    is_random,
    is_zero_tensor,
    record_graph,
    record_sized_graph,
    tree,
)
from funcshard.comm import StepRecording, record_step
from funcshard.graph.conditions import Conditions
from funcshard.graph.filling import fill_in, input_memory, sized_memory
from funcshard.graph.named_sizes import sizes_of
from funcshard.graph.signatures import signature_of, sized
from funcshard.graph.step_graph import Constant, Place, StepGraph, starts_and_waits
from funcshard.graph.tidying import tidy

Step = Callable[[Any, Any], tuple[Any, Any]]


def record(
    step: Step, state: Any, batch: Any, names: Mapping[int, Any] | None = None
) -> tuple[StepGraph, Any]:
    """Return the graph of one step, and a state after it, without data.

    Arguments:
        step: the step, ``step(state, batch) -> (state, metrics)``.
        state: a state to call it with. It is only looked at.
        batch: a batch to call it with.
        names: for the number of a leaf of ``(state, batch)`` the names of its dims, ``None`` for a
            fixed size. The graph serves other sizes too.

    Raises:
        ValueError: the step uses a tensor that is in none of its arguments; or, with ``names``, the
            new state has a size that depends on one of them, or a leaf is a DTensor.
        RuntimeError: the step draws random numbers in a way that a graph cannot repeat.
    """
    check_thread("record with one process for each rank")
    leaves, form = tree.flatten_with_form((state, batch))
    in_state = len(tree.leaves(state))
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    counters = [i for i, leaf in enumerate(leaves[:in_state]) if type(leaf) is int]
    inputs = (*tensors, *counters)
    recorded_step: dict[str, Any] = {}

    def flat(*values: torch.Tensor) -> list[Any]:
        own_leaves = list(leaves)
        for leaf_index, value in zip(inputs, values, strict=True):
            # Why item: it gives a number whose arithmetic is recorded.
            own_leaves[leaf_index] = (
                value if isinstance(leaves[leaf_index], torch.Tensor) else value.item()
            )
        arguments = tree.build_form(form, own_leaves)
        with _Guard(recording):
            result = step(*arguments)
        recorded_step["donated"] = tuple(i for i in tensors if is_donated(own_leaves[i]))
        recorded_step["spent"] = tuple(_spent(arguments[0], ()))
        recorded_step["after"] = tree.map(
            lambda leaf: 1 if isinstance(leaf, torch.SymInt) else leaf, result[0]
        )
        results, recorded_step["form"] = tree.flatten_with_form(result)
        outputs: list[Any] = []
        recorded_step["results"] = tuple(
            _place(result_tensor, outputs) for result_tensor in results
        )
        return outputs

    names, sizes = names or {}, sizes_of(leaves, names or {})
    if names and any(isinstance(leaf, torch.Tensor) and is_dtensor(leaf) for leaf in leaves):
        raise ValueError(
            "dynamic_shapes takes plain tensors, because sizes of a DTensor belong to a whole "
            "that no rank holds; found a DTensor in the state or the batch: leave out "
            "dynamic_shapes"
        )
    found_conditions: list[tuple[str, str]] = []
    paths = tree.code_paths(state, "state") + tree.code_paths(batch, "batch")
    examples = [_example(leaves[i]) for i in inputs]
    variables = _variables(step)
    with record_step() as recording:
        try:
            if names:
                graph, constants, found_conditions = record_sized_graph(
                    flat, examples, [names.get(i, ()) for i in inputs]
                )
            else:
                graph, constants = record_graph(flat, examples)
        except ValueReadError as error:
            raise RuntimeError(
                "trace records operations on tensors, and cannot follow Python code that depends "
                "on their values, such as float(loss) or `if loss > 1`; found such code "
                f"{_where(error)}: use torch.where, or keep a tensor"
            ) from error
    for name, value in _variables(step).items():
        if variables.get(name, value) != value:
            raise RuntimeError(
                "trace records an optimizer that keeps its state in opt_state; found one that "
                f"changed its variable {name[1]!r}, of {name[0]}, which a graph cannot see: use "
                "fs.torch_optimizer, or take a step before trace if the optimizer does something "
                "else in its first step only"
            )
    for (start, _), event in zip(starts_and_waits(graph), recording.started, strict=True):
        start.meta["event"] = event
    units = {id(leaf): unit for unit, shard in state.shards.items() for leaf in tree.leaves(shard)}
    for node, leaf_index in zip(graph.find_nodes(op="placeholder"), inputs, strict=True):
        node.meta["path"], node.meta["unit"] = paths[leaf_index], units.get(id(leaves[leaf_index]))
    conditions = _usable(found_conditions, sizes)
    signature = signature_of(leaves, form, in_state, names)._replace(conditions=conditions.texts)
    if names:
        _check_after(recorded_step["after"], sizes)
        _fill(graph, [signature.leaves[i] for i in inputs], constants, sizes)
    tidy(graph, counters=len(counters))
    step_graph = StepGraph(
        graph,
        signature,
        inputs,
        recorded_step["results"],
        recorded_step["form"],
        recorded_step["donated"],
        recorded_step["spent"],
        constants,
        tuple(recording.numbers),
        recording.replayable,
        sizes,
        conditions,
    )
    return step_graph, recorded_step["after"]


def _usable(conditions: Sequence[tuple[str, str]], sizes: Mapping[str, int]) -> Conditions:
    """Return conditions as data; one that cannot be data fixes all sizes."""
    dim_places: dict[str, str] = {}
    for condition_text, place in conditions:
        try:
            Conditions((condition_text,))
            dim_places[condition_text] = place
        except ValueError:
            dim_places |= {f"{name} == {size}": place for name, size in sizes.items()}
    usable = Conditions(tuple(dim_places), tuple(dim_places.values()))
    assert not usable.failing(sizes), f"a recording serves its own sizes: {usable.failing(sizes)}"
    return usable


def _fill(
    graph: fx.Graph,
    leaves: Sequence[Any],
    constants: Mapping[str, torch.Tensor],
    sizes: Mapping[str, int],
) -> None:
    """Give the results of a new graph the forms that ``sizes`` give, in place of symbols."""
    counter = torch.Size(), torch.int64, torch.device("cpu"), (), False
    tensors = [counter if leaf is int else leaf for leaf in leaves]
    memory = sized_memory(input_memory(graph.find_nodes(op="placeholder")), tensors, sizes)
    fill_in(graph, [sized(leaf, sizes) for leaf in tensors], memory, constants, set())


def _check_after(state: Any, sizes: Mapping[str, int]) -> None:
    """Raise if the form of the next state depends on the sizes of this batch."""
    for leaf, path in zip(tree.leaves(state), tree.code_paths(state, "state"), strict=True):
        if isinstance(leaf, torch.Tensor) and any(
            isinstance(size, torch.SymInt) for size in leaf.shape
        ):
            raise ValueError(
                f"the state after a step has the form of the state before it; found `{path}`, "
                f"whose size depends on {', '.join(map(repr, sizes))} of the batch: keep such "
                "tensors in the aux (has_aux=True), or leave out dynamic_shapes"
            )


def _variables(step: Step) -> dict[tuple[str, str, int], Any]:
    """Return the numbers, flags and texts that functions of the step's optimizer captured."""
    functions = [
        captured_value
        for captured_value in captured(getattr(step, "optimizer", None))
        if isinstance(captured_value, types.FunctionType)
    ]
    return {
        (f"{captured_value.__module__}.{captured_value.__qualname__}", name, function_index): value
        for function_index, captured_value in enumerate(functions)
        for name, value in inspect.getclosurevars(captured_value).nonlocals.items()
        if isinstance(value, bool | int | float | str)
    }


def _where(error: BaseException) -> str:
    """Return the last place outside of torch and this library that an error passed."""
    libraries = tuple(
        os.path.dirname(path) + os.sep for path in (str(torch.__file__), os.path.dirname(__file__))
    )
    frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    own_frames = [frame for frame in frames if not frame.filename.startswith(libraries)]
    return (
        f"in {os.path.basename(own_frames[-1].filename)}, line {own_frames[-1].lineno}"
        if own_frames
        else f"in torch: {error}"
    )


def _example(leaf: Any) -> torch.Tensor:
    """Return a tensor to record a tensor or a counter with."""
    if not isinstance(leaf, torch.Tensor):
        return torch.tensor(leaf, device="cpu")
    return leaf if leaf.is_leaf else leaf.detach().requires_grad_()


def _place(value: Any, outputs: list[Any]) -> Place | Constant:
    """Return the place of a leaf of the results, and add it to the graph's outputs."""
    if not isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return Constant(value)
    outputs.append(value)
    return Place(len(outputs) - 1)


def _spent(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each optimizer state that the step took over."""
    if node is DONATED_STATE:
        yield path
    elif isinstance(node, Mapping | tuple | list):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            yield from _spent(value, (*path, key))


class _Guard(TorchDispatchMode):
    """Raise for operations that a run of the graph would do with other values than the step."""

    def __init__(self, recording: StepRecording) -> None:
        super().__init__()
        self._recording, self._phase = recording, ""
        # Whether the step draws numbers again, from a state that the graph sets.
        self._set_back = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = tree.leaves((args, kwargs or {}))
        given_tensors = [value for value in values if isinstance(value, torch.Tensor)]
        if any(is_dtensor(value) for value in given_tensors):
            # A DTensor runs the operations of its part, which come here again.
            return NotImplemented
        self._note_phase(func, given_tensors)
        if func is torch.ops.funcshard.set_random_state.default:
            self._set_back = not self._set_back
        elif graph_task_id() != -1 and not self._set_back and is_random(func, args, kwargs or {}):
            raise RuntimeError(
                "trace cannot record random numbers that torch.utils.checkpoint draws again in "
                f"backward; found {func}: recompute whole units, with fully_shard(remat=...), or "
                "functions, with fs.remat"
            )
        if any(isinstance(value, torch.Generator) for value in values):
            raise RuntimeError(
                "trace records random numbers of torch's own generator; found a torch.Generator "
                f"given to {func}, which a run of the graph could not seed again: leave generator "
                "out, or pass the numbers in the batch"
            )
        # Why not lift_fresh: torch.tensor(1.0) inside the step makes a constant of the graph.
        if "lift_fresh" not in func.name():
            for value in given_tensors:
                if not is_fake(value) and is_zero_tensor(value):
                    raise ValueError(
                        "trace cannot record this torch.func.jvp: torch differentiates an "
                        "operation forwards with zeros that no recording sees, as for LayerNorm; "
                        f"found them in {func}: run the step itself, or take the derivative with "
                        "torch.func.vjp"
                    )
                if not is_fake(value):
                    raise ValueError(
                        "trace records a step whose tensors all come from its arguments; found a "
                        f"tensor of shape {tuple(value.shape)} and {value.dtype} in {func}, which "
                        "the step took from elsewhere and which would be a constant of the graph: "
                        "pass it in the state's buffers or in the batch"
                    )
        return func(*args, **(kwargs or {}))

    def _note_phase(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """Mark in the graph where forward, backward and the update begin."""
        if graph_task_id() != -1:
            phase = "backward"
        elif self._recording.updates:
            phase = "update"
        else:  # a forward of the next micro-batch, or what ends backward
            differentiates = func is not torch.ops.aten.detach.default and any(
                tensor.requires_grad for tensor in tensors
            )
            again_gathers = differentiates or func is torch.ops.funcshard.all_gather.default
            phase = "forward" if again_gathers or not self._phase else self._phase
        if phase != self._phase:
            self._phase = phase
            torch.ops.funcshard.phase(phase)
