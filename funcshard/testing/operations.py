"""The first operation whose result differs from that of one rank, and why."""

from __future__ import annotations

import collections
import inspect
import linecache
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.torch_private import TorchDispatchMode
from funcshard.plan import AXES
from funcshard.testing.relations import (
    RankValues,
    contains_rows,
    distance,
    powers,
    relation,
    scaled_relation,
    varying_axes,
)

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])


class Finding(NamedTuple):
    """Why results differ.

    Attributes:
        cause: a ``Difference.cause``.
        axes: the mesh axes along which the ranks are at fault.
        text: what happened, and in which line.
    """

    cause: str
    axes: tuple[str, ...]
    text: str


class Operation(NamedTuple):
    """One operation of torch.

    Attributes:
        place: the module, the file and the line of the user's code that called it.
        name: its name.
        inputs: copies of the tensors that it took.
        outputs: copies of the tensors that it returned.
        is_random: whether it drew random numbers.
    """

    place: tuple[str, str, int]
    name: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    is_random: bool


_Pair = tuple[RankValues, torch.Tensor]  # as ranks have it, and as one rank has it


class OperationLog(TorchDispatchMode):
    """Keeps the operations that user code calls inside a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        place = None if "empty" in str(func) else _place()
        # Why before the call: it may write to its inputs.
        inputs = _copies((args, kwargs)) if place else ()
        result = func(*args, **kwargs)
        if place and not _is_view(result, (args, kwargs)):
            is_random = torch.Tag.nondeterministic_seeded in func.tags
            operation = Operation(place, str(func), inputs, _copies(result), is_random)
            self.operations.append(operation)
        return result


def _is_view(result: Any, arguments: Any) -> bool:
    """Return whether a result is new and yet shares memory with an argument."""
    # Why: a list of views has the parts of all ranks, of which each uses one.
    tensors = [leaf for leaf in tree.leaves(arguments) if isinstance(leaf, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    return any(
        isinstance(leaf, torch.Tensor)
        and leaf.untyped_storage().data_ptr() in storages
        and not any(leaf is tensor for tensor in tensors)
        for leaf in tree.leaves(result)
    )


def _copies(values: Any) -> tuple[torch.Tensor, ...]:
    tensors = [leaf for leaf in tree.leaves(values) if isinstance(leaf, torch.Tensor)]
    # Note: whether a tensor requires a gradient tells parameters and activations from data.
    return tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors)


def _place() -> tuple[str, str, int] | None:
    """Return where the user's code called the operation that runs; ``None`` if the library did."""
    frame = inspect.currentframe()
    modules: list[torch.nn.Module] = []
    line: tuple[str, int] | None = None
    is_inside = True  # the library's own operations, and torch's
    while frame := frame.f_back if frame else None:
        file = frame.f_code.co_filename
        module = frame.f_locals.get("self") if frame.f_code.co_name != "_call_impl" else None
        if isinstance(module, torch.nn.Module):
            modules.append(module)
        if file == __file__ or file.startswith(_TORCH):
            continue
        if file.startswith(_PACKAGE):
            if is_inside and not modules:
                return None
        elif line is None and is_inside:
            line = file, frame.f_lineno
        is_inside = False
    path = ""
    if modules:
        names = (name for name, other in modules[-1].named_modules() if other is modules[0])
        path = next(names, type(modules[0]).__name__)
    if line is None:
        return (path, "", 0) if modules else None
    return path, *line


def place_text(place: tuple[str, str, int]) -> str:
    """Return a place in the user's code as text."""
    path, file, number = place
    texts = [f"module {path!r}"] if path else []
    if file:
        code = linecache.getline(file, number).strip()
        texts.append(f"line {number} of {Path(file).name}" + (f", `{code}`" if code else ""))
    return " in ".join(texts)


def explain(
    reference: Sequence[Operation], logs: Sequence[Sequence[Operation]], axes: Mapping[str, int]
) -> Finding | None:
    """Return why ranks differ from one rank, by the first operation whose result does.

    Arguments:
        reference: the operations of one rank.
        logs: those of each rank of the mesh.
        axes: size of each mesh axis.
    """
    by_rank = [_numbered(log) for log in logs]
    first: Finding | None = None
    for key, operation in _numbered(reference).items():
        if not all(key in numbered for numbered in by_rank):
            continue
        others = [numbered[key] for numbered in by_rank]
        columns = zip(operation.inputs, *(other.inputs for other in others), strict=False)
        inputs = [(RankValues(tuple(own), tuple(axes.items())), value) for value, *own in columns]
        columns = zip(operation.outputs, *(other.outputs for other in others), strict=False)
        outputs = [(RankValues(tuple(own), tuple(axes.items())), value) for value, *own in columns]
        # Note: an operation that draws in place gets memory without values.
        batches = [] if operation.is_random else inputs
        faults = [_batch_fault(*pair, operation) for pair in batches]
        faults += [_cause(operation, inputs, *pair) for pair in outputs if relation(*pair) is None]
        for finding in filter(None, faults):
            # Why not the first of any cause: ranks may well hold numbers between that make up
            # nothing, such as rows of a table's part that a mask drops. What follows is right then.
            if first is None and finding.cause == "value":
                first = finding
            elif finding.cause != "value" and (
                first is None or all(relation(*pair) is not None for pair in inputs)
            ):
                return finding
    return first


def _numbered(log: Sequence[Operation]) -> dict[Any, Operation]:
    counts: collections.Counter[Any] = collections.Counter()
    numbered = {}
    for operation in log:
        key = operation.place, operation.name
        counts[key] += 1
        numbered[*key, counts[key]] = operation
    return numbered


def _cause(
    operation: Operation, inputs: Sequence[_Pair], outputs: RankValues, output: torch.Tensor
) -> Finding | None:
    where = place_text(operation.place)
    long_axes = [axis for axis, size in outputs.axes if size > 1]
    varying = varying_axes(outputs)
    if operation.is_random:
        if varying:
            return _finding("randomness", varying, "ranks {} drew other numbers in " + where)
        return _finding("randomness", long_axes, "ranks {} drew the same numbers in " + where)
    if (fault := _batch_fault(outputs, output, operation)) is not None:
        return fault
    if not output.is_floating_point() and not output.is_complex():
        return None  # e.g. indices into a rank's own part
    return (
        _cause_in_inputs(operation, inputs, outputs, where)
        or _scale(outputs, output, f"the result of {where}")
        or _finding("value", varying, f"it first differs in {where}")
    )


def _batch_fault(
    rank_values: RankValues, reference: torch.Tensor, operation: Operation
) -> Finding | None:
    """Return what is wrong with ranks' parts of a batch, if it is one."""
    if reference.requires_grad or relation(rank_values, reference) is not None:
        return None
    where, varying = place_text(operation.place), varying_axes(rank_values)
    if not {*varying} <= {*AXES}:  # such as indices into a rank's own part
        return None
    long_axes = [axis for axis, size in rank_values.axes if size > 1 and axis in AXES]
    is_first = distance(rank_values.values[0], reference) < 1e-3
    if is_first and reference.ndim and varying:
        return _finding("data", varying, "ranks {} add batches to that of one rank, in " + where)
    if not contains_rows(reference, rank_values.values):
        return None
    if equal := [axis for axis in long_axes if axis not in varying]:
        return _finding("data", equal, "ranks {} saw the same batch, in " + where)
    return _finding(
        "data", varying, "ranks {} saw some samples twice or left some out, in " + where
    )


def _cause_in_inputs(
    operation: Operation, inputs: Sequence[_Pair], outputs: RankValues, where: str
) -> Finding | None:
    relations, finding = [], None
    for rank_values, value in inputs:
        relations.append(relation(rank_values, value))
        if relations[-1] is None and finding is None:
            finding = _scale(rank_values, value, f"an input of {where}")
    varying, output = varying_axes(outputs), operation.outputs[0]
    ways = [(axis, how) for how_by_axis in relations for axis, how in (how_by_axis or {}).items()]
    is_mean = output.numel() == 1 and {*varying} <= {*AXES} and _within(outputs.values, output)
    if is_mean and varying and "mean" not in {how for _, how in ways}:
        text = "ranks {} have means of unequal numbers of samples, which count equally, in "
        return _finding("weights", varying, text + where)
    added = [
        axis for axis, how in ways if how == "sum" and (axis not in AXES or (axis, "mean") in ways)
    ]
    if added:
        text = "ranks {} have a term each, which is used as the whole: a psum is missing before it, in "
        return _finding("not added", sorted(set(added)), text + where)
    if norms := [axis for axis, how in ways if how == "norm"]:
        text = "ranks {} use the norm of their own part in " + where
        return _finding("norm", sorted(set(norms)), text)
    for how_by_axis, value in zip(relations, operation.inputs, strict=False):
        cut = [
            axis for axis, how in (how_by_axis or {}).items() if how == "cut" and axis not in AXES
        ]
        if not value.requires_grad and any(ways.count((axis, "cut")) > 1 for axis in cut):
            return _finding("data", cut, "ranks {} saw other samples, in " + where)
    return finding


def _scale(rank_values: RankValues, reference: torch.Tensor, what: str) -> Finding | None:
    """Return by which sizes of axes the joined values of ranks are too large or too small."""
    found = scaled_relation(rank_values, reference)
    if found is None:
        return None
    exponents = powers([(dict(rank_values.axes), found)])
    text = f"{what} is {found:.2f} times that of one rank {{}}"
    return _finding("scale", list(exponents), text) if exponents else None


def _within(values: Sequence[torch.Tensor], output: torch.Tensor) -> bool:
    numbers = [value.item() for value in values if value.numel() == 1]
    return len(numbers) == len(values) and min(numbers) < output.item() < max(numbers)


def _finding(cause: str, axes: Sequence[str], text: str) -> Finding:
    return Finding(cause, tuple(axes), text.replace("{}", axes_phrase(axes)))


def axes_phrase(axes: Sequence[str]) -> str:
    """Return axes as text, such as ``along 'shard' and 'tensor'``."""
    return "along " + " and ".join(map(repr, axes)) if axes else "everywhere"


def recorded(main: Callable[[Any], Any], mesh: Any) -> list[Operation]:
    """Run a program, and return its operations."""
    with OperationLog() as log:
        main(mesh)
    return log.operations
