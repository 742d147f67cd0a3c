"""Record a step: run it on tensors without data, and write down every operation.

torch's make_fx sees each operation below autograd, so also backward and the optimizer. Collectives
become operations of ours (see ``comm.recorded_group``), so ranks exchange nothing.
"""

from __future__ import annotations

import inspect
import os
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.closures import captured, emptied_caches, reachable
from funcshard._utils.tensors import is_dtensor
from funcshard._utils.torch_operators import is_random
from funcshard._utils.torch_private import (
    TorchDispatchMode,
    ValueReadError,
    check_thread,
    graph_task_id,
    is_fake,
    is_zero_tensor,
    record_graph,
)
from funcshard._utils.torch_symbols import record_sized_graph
from funcshard.graph.signatures import Conditions, paths_of, signature_of, sizes_of
from funcshard.graph.step_graph import (
    Constant,
    Place,
    StepGraph,
    fill_in,
    input_memory,
    starts_and_waits,
)
from funcshard.graph.tidying import tidy
from funcshard.plan import StepRecording, record_step
from funcshard.train import DONATED_STATE, is_donated

Step = Callable[[Any, Any], tuple[Any, Any]]


def record(
    step: Step, state: Any, batch: Any, names: Mapping[int, Any]
) -> tuple[StepGraph, Any]:
    """Return the graph of one step, and a state after it, without data; raise as ``trace`` does.

    Arguments:
        state: a state to call it with, which stays as it is.
        names: names of the dims of leaves of ``(state, batch)``, by the number of the leaf.
    """
    check_thread("record with one process for each rank")
    leaves, form = tree.flatten_with_form((state, batch))
    sizes = sizes_of(leaves, names)
    if names and any(map(is_dtensor, leaves)):
        raise ValueError(
            "dynamic_shapes takes plain tensors, because sizes of a DTensor belong to a whole "
            "that no rank holds; found a DTensor in the state or the batch: leave out "
            "dynamic_shapes"
        )
    in_state = len(tree.leaves(state))
    tensor_leaves = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    counter_leaves = [i for i, leaf in enumerate(leaves[:in_state]) if type(leaf) is int]
    input_leaves = (*tensor_leaves, *counter_leaves)
    # Note: the facts about results are known only while make_fx runs ``flat_step``.
    step_facts: dict[str, Any] = {}

    def flat_step(*values: torch.Tensor) -> list[Any]:
        new_leaves = list(leaves)
        for leaf_index, value in zip(input_leaves, values, strict=True):
            # Why item: it gives a number whose arithmetic is recorded.
            is_tensor = isinstance(leaves[leaf_index], torch.Tensor)
            new_leaves[leaf_index] = value if is_tensor else value.item()
        step_arguments = tree.build_form(form, new_leaves)
        # Note: below autograd, so the guard sees the operations of backward too.
        with _Guard(recording):
            result = step(*step_arguments)
        result_leaves, step_facts["form"] = tree.flatten_with_form(result)
        output_values: list[Any] = []
        step_facts["results"] = tuple(_place(leaf, output_values) for leaf in result_leaves)
        step_facts["donated"] = tuple(i for i in tensor_leaves if is_donated(new_leaves[i]))
        step_facts["spent"] = tuple(_spent(step_arguments[0], ()))
        step_facts["after"] = tree.map(
            # Why 1: the number of steps goes on, and any number has the same signature.
            lambda leaf: 1 if isinstance(leaf, torch.SymInt) else leaf,
            result[0],
        )
        return output_values

    conditions = Conditions()
    leaf_paths = paths_of(form)
    example_inputs = [_example(leaves[i]) for i in input_leaves]
    # Why: an optimizer that changes a variable of its own would compute with the old value for
    # ever.
    captured_before = _variables(step)
    classes = [type(part) for part in reachable(step) if isinstance(part, torch.nn.Module)]
    with emptied_caches(classes), record_step() as recording:
        try:
            if names:
                input_names = [names.get(i, ()) for i in input_leaves]
                graph, constants, size_rules = record_sized_graph(
                    flat_step, example_inputs, input_names
                )
                conditions = _usable(size_rules, sizes)
            else:
                graph, constants = record_graph(flat_step, example_inputs)
        except ValueReadError as error:
            raise RuntimeError(
                "trace records operations on tensors, and cannot follow Python code that depends "
                "on their values, such as float(loss) or `if loss > 1`; found such code "
                f"{_where(error)}: use torch.where, or keep a tensor"
            ) from error
    for name, value in _variables(step).items():
        if captured_before.get(name, value) != value:
            raise RuntimeError(
                "trace records an optimizer that keeps its state in opt_state; found one that "
                f"changed its variable {name[1]!r}, of {name[0]}, which a graph cannot see: use "
                "fs.torch_optimizer, or take a step before trace if only its first step does that"
            )
    # Note: the group counted its collectives as it recorded them, so both are in one order.
    for (start, _), event in zip(starts_and_waits(graph), recording.started, strict=True):
        start.meta["event"] = event
    # Note: by identity, because the shards of two units may be equal.
    unit_of_leaf = {
        id(leaf): unit
        for unit, shard in state.shards.items()
        for leaf in tree.leaves(shard)
    }
    placeholders = graph.find_nodes(op="placeholder")
    for node, leaf_index in zip(placeholders, input_leaves, strict=True):
        unit = unit_of_leaf.get(id(leaves[leaf_index]))
        node.meta.update(path=leaf_paths[leaf_index], unit=unit)
    signature = signature_of(leaves, form, in_state, names)._replace(
        conditions=conditions.texts
    )
    state_after = step_facts.pop("after")
    if names:
        # Why first: a recording whose state grows with the batch would be recorded again in each
        # step.
        _check_after(state_after, sizes)
        # Note: the results get forms with numbers in place of symbols; counters are still tensors.
        counter_facts = torch.Size(), torch.int64, torch.device("cpu"), (), False
        leaf_facts = [signature.leaves[i] for i in tensor_leaves]
        leaf_facts += [counter_facts] * len(counter_leaves)
        fill_in(graph, leaf_facts, sizes, input_memory(placeholders), constants)
    tidy(graph, counters=len(counter_leaves))
    step_graph = StepGraph(
        graph=graph,
        signature=signature,
        inputs=input_leaves,
        constants=constants,
        numbers=tuple(recording.numbers),
        replayable=recording.replayable,
        sizes=sizes,
        conditions=conditions,
        **step_facts,
    )
    return step_graph, state_after


def _usable(rules: Sequence[tuple[str, str]], sizes: Mapping[str, int]) -> Conditions:
    """Return conditions as data; one that can't be data fixes all sizes."""
    place_of: dict[str, str] = {}
    for text, place in rules:
        try:
            Conditions((text,))
            place_of[text] = place
        except ValueError:
            # Note: such as a condition with a function of torch's symbols that Python lacks.
            place_of |= {f"{name} == {size}": place for name, size in sizes.items()}
    return Conditions(tuple(place_of), tuple(place_of.values()))


def _check_after(state: Any, sizes: Mapping[str, int]) -> None:
    """Raise if the form of the next state depends on the sizes of this batch."""
    for leaf, path in zip(tree.leaves(state), tree.code_paths(state, "state"), strict=True):
        if any(isinstance(size, torch.SymInt) for size in getattr(leaf, "shape", ())):
            raise ValueError(
                f"the state after a step has the form of the state before it; found `{path}`, "
                f"whose size depends on {', '.join(map(repr, sizes))} of the batch: keep such "
                "tensors in the aux (has_aux=True), or leave out dynamic_shapes"
            )


def _variables(step: Step) -> dict[tuple[str, str, int], Any]:
    """Return the numbers, flags and texts that functions of the optimizer captured."""
    captured_values = captured(getattr(step, "optimizer", None))
    functions = [
        value for value in captured_values if isinstance(value, types.FunctionType)
    ]
    captured_before = {}
    for function_index, function in enumerate(functions):
        owner_name = f"{function.__module__}.{function.__qualname__}"
        for name, value in inspect.getclosurevars(function).nonlocals.items():
            if isinstance(value, bool | int | float | str):
                captured_before[owner_name, name, function_index] = value
    return captured_before


def _where(error: BaseException) -> str:
    """Return the last place in the user's code that an error passed."""
    library_folders = tuple(
        os.path.dirname(path) + os.sep
        for path in (str(torch.__file__), os.path.dirname(__file__))
    )
    code_frames = traceback.extract_tb((error.__cause__ or error).__traceback__)
    user_frames = [
        frame for frame in code_frames if not frame.filename.startswith(library_folders)
    ]
    if not user_frames:
        return f"in torch: {error}"
    return f"in {os.path.basename(user_frames[-1].filename)}, line {user_frames[-1].lineno}"


def _example(leaf: Any) -> torch.Tensor:
    if not isinstance(leaf, torch.Tensor):
        return torch.tensor(leaf, device="cpu")
    # Note: a tensor with a history would lead backward out of the graph.
    return leaf if leaf.is_leaf else leaf.detach().requires_grad_()


def _place(value: Any, outputs: list[Any]) -> Place | Constant:
    if not isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return Constant(value)
    outputs.append(value)
    return Place(len(outputs) - 1)


def _spent(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each optimizer state that the step took over."""
    # Note: the step put this mark in the place of the state that it updated in memory.
    if node is DONATED_STATE:
        yield path
    elif isinstance(node, tuple | list):
        yield from _spent(dict(enumerate(node)), path)
    elif isinstance(node, Mapping):
        for key, child in node.items():
            yield from _spent(child, (*path, key))


class _Guard(TorchDispatchMode):
    """Raise for operations that a graph would run with other values than the step."""

    def __init__(self, recording: StepRecording) -> None:
        super().__init__()
        self._recording, self._phase = recording, ""
        # Whether the step draws numbers again, from a state that the graph sets.
        self._set_back = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        argument_leaves = tree.leaves((args, kwargs))
        given_tensors = [
            value for value in argument_leaves if isinstance(value, torch.Tensor)
        ]
        if any(hasattr(value, "__tensor_flatten__") for value in given_tensors):
            # Such as a DTensor: it runs the operations of its parts, which come here again.
            return NotImplemented
        self._note_phase(func, given_tensors)
        if func.namespace == "c10d":  # Why: its schemas hide that it writes to tensors.
            raise RuntimeError(
                f"trace cannot record {func}, because it writes to tensors that its schema doesn't "
                "name: call fs.psum, fs.all_gather or torch.distributed._functional_collectives"
            )
        if func is torch.ops.funcshard.set_random_state.default:
            self._set_back = not self._set_back
        elif graph_task_id() != -1 and not self._set_back and is_random(func, args, kwargs):
            raise RuntimeError(
                "trace cannot record random numbers that torch.utils.checkpoint draws again in "
                f"backward; found {func}: recompute whole units, with fully_shard(remat=...), or "
                "functions, with fs.remat"
            )
        if any(isinstance(value, torch.Generator) for value in argument_leaves):
            raise RuntimeError(
                "trace records random numbers of torch's own generator; found a torch.Generator "
                f"given to {func}, which a run of the graph could not seed again: leave generator "
                "out, or pass the numbers in the batch"
            )
        # Why not lift_fresh: torch.tensor(1.0) inside the step makes a constant of the graph.
        if "lift_fresh" not in func.name():
            for tensor in given_tensors:
                if is_fake(tensor):
                    continue
                if is_zero_tensor(tensor):
                    raise ValueError(
                        "trace cannot record this torch.func.jvp: torch differentiates an "
                        "operation forwards with zeros that no recording sees, as for GroupNorm; "
                        f"found them in {func}: run the step itself, or take the derivative with "
                        "torch.func.vjp"
                    )
                raise ValueError(
                    "trace records a step whose tensors come from its arguments; found a tensor "
                    f"of shape {tuple(tensor.shape)} and {tensor.dtype} in {func}, which would be "
                    "a constant: pass it in the state's buffers or the batch, whose classes "
                    "optree.register_pytree_node has to know"
                )
        return func(*args, **kwargs)

    def _note_phase(self, func: Any, tensors: list[torch.Tensor]) -> None:
        """Mark where forward, backward and the update begin."""
        if graph_task_id() != -1:
            phase = "backward"
        elif self._recording.updates:
            phase = "update"
        else:  # a forward of the next micro-batch, or what ends backward
            differentiates = func is not torch.ops.aten.detach.default and any(
                tensor.requires_grad for tensor in tensors
            )
            gathers = func is torch.ops.funcshard.all_gather.default
            phase = "forward" if differentiates or gathers else self._phase or "forward"
        if phase != self._phase:
            self._phase = phase
            torch.ops.funcshard.phase(phase)
