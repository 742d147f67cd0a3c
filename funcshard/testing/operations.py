"""The first operation whose result differs from that of one rank, and why."""

from __future__ import annotations

import collections
import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.torch_operators import is_random
from funcshard._utils.torch_private import TorchDispatchMode, graph_task_id
from funcshard.comm import Mesh
from funcshard.plan import AXES
from funcshard.testing.relations import (
    Sizes,
    Values,
    distance,
    partial_cause,
    powers,
    relation,
    scale_of,
    tolerance_of,
    varying_axes,
)

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])


class Finding(NamedTuple):
    """Why results differ: a ``Difference.cause``, the axes at fault, and what happened where."""

    cause: str
    axes: tuple[str, ...]
    text: str


class _Operation(NamedTuple):
    """A call of one of torch's operations: where, which, and copies of its tensors."""

    place: str
    name: str
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    is_random: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.inputs + self.outputs


Calls = Mapping[tuple[str, str], Sequence[_Operation]]  # by place and name
Relations = Sequence[Mapping[str, str] | None]  # of each input, as ``relation`` returns them


def recorded(main: Callable[[Mesh], Any], mesh: Mesh) -> list[_Operation]:
    """Run a program, and return the operations that user code calls outside of backward."""
    with _Recorder() as recorder:
        main(mesh)
    return recorder.log


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[_Operation] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # Why not views: a list of them has the parts of all ranks, of which each uses one.
        # Why not backward: there each rank has the gradient of its own loss, not of their mean.
        is_left_out = func.is_view or "empty" in str(func) or graph_task_id() != -1
        place = "" if is_left_out else _place()
        # Why before the call: it may write to its inputs.
        inputs = _copies((args, kwargs)) if place else ()
        result = func(*args, **kwargs)
        if place:
            draws = is_random(func, args, kwargs)
            self.log.append(_Operation(place, str(func), inputs, _copies(result), draws))
        return result


def _copies(values: Any) -> tuple[torch.Tensor, ...]:
    tensors = [leaf for leaf in tree.leaves(values) if isinstance(leaf, torch.Tensor)]
    # Note: whether a tensor requires a gradient tells parameters and activations from data.
    return tuple(tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors)


def _place() -> str:
    """Return where user code called the operation that runs, or ``""`` if the library did."""
    frame = inspect.currentframe()
    modules: list[torch.nn.Module] = []
    line, is_library = "", False
    while frame := frame.f_back if frame else None:
        file = frame.f_code.co_filename
        # Note: a hook of modules runs in ``_call_impl`` too, but not inside the module.
        owner = frame.f_locals.get("self") if frame.f_code.co_name != "_call_impl" else None
        if isinstance(owner, torch.nn.Module):
            modules.append(owner)
        if line or is_library or file == __file__ or file.startswith(_TORCH):
            continue
        if file.startswith(_PACKAGE):
            if not modules:
                return ""
            is_library = True
        else:
            code = linecache.getline(file, frame.f_lineno).strip()
            line = f"line {frame.f_lineno} of {Path(file).name}, `{code}`"
    if not modules:
        return line
    names = (name for name, module in modules[-1].named_modules() if module is modules[0])
    module_text = f"module {next(names, '') or type(modules[0]).__name__!r}"
    return f"{module_text} in {line}" if line else module_text


def explain(
    reference: Sequence[_Operation], logs: Sequence[Sequence[_Operation]], sizes: Sizes
) -> Finding | None:
    """Return why ranks differ from one rank, by the first operation whose result does.

    Arguments:
        reference: the operations of one rank.
        logs: those of each rank of the mesh.
        sizes: size of each mesh axis.
    """
    first: Finding | None = None
    for finding, inputs_make_sense in _findings(reference, logs, sizes):
        # Why not the first of any cause: ranks may well hold numbers between that make up nothing,
        # such as rows of a table's part that a mask drops. What follows is right then.
        if finding.cause != "value" and (first is None or inputs_make_sense):
            return finding
        first = first or finding
    return first


def _findings(
    reference: Sequence[_Operation], logs: Sequence[Sequence[_Operation]], sizes: Sizes
) -> Iterator[tuple[Finding, bool]]:
    """Yield what is wrong with operations, and whether their inputs make up those of one rank."""
    reference_calls, *rank_calls = [_by_place(log) for log in (reference, *logs)]
    numbers: collections.Counter[tuple[str, str]] = collections.Counter()
    for operation in reference:
        key = operation.place, operation.name
        number = numbers[key]
        numbers[key] += 1
        every_call = [calls.get(key, []) for calls in rank_calls]
        if number == 0 and all(every_call) and not operation.is_random:
            yield from _batch_faults(reference_calls[key], every_call, sizes)
        ranks = [calls[number] for calls in every_call if number < len(calls)]
        if len(ranks) == len(logs):
            yield from _faults(operation, ranks, sizes)


def _by_place(log: Sequence[_Operation]) -> Calls:
    calls = collections.defaultdict(list)
    for operation in log:
        calls[operation.place, operation.name].append(operation)
    return calls


def _faults(
    operation: _Operation, ranks: Sequence[_Operation], sizes: Sizes
) -> Iterator[tuple[Finding, bool]]:
    outputs = list(zip(*(rank.outputs for rank in ranks), strict=False))
    for values, output in zip(outputs, operation.outputs, strict=False):
        if relation(values, sizes, output) is not None:
            continue
        inputs = list(zip(*(rank.inputs for rank in ranks), strict=False))
        pairs = list(zip(inputs, operation.inputs, strict=False))
        relations = [relation(values, sizes, reference) for values, reference in pairs]
        if operation.is_random:
            yield _random_fault(operation, values, sizes), True
        # Why: whole numbers may be indices into a rank's own part.
        elif output.is_floating_point() or output.is_complex():
            cause = _cause(operation.place, values, output, relations, sizes)
            cause = cause or _scale([*pairs, (values, output)], operation.place, sizes)
            if cause is None:
                cause = _finding(
                    "value", varying_axes(values, sizes), "it first differs in " + operation.place
                )
            yield cause, None not in relations


def _random_fault(operation: _Operation, values: Values, sizes: Sizes) -> Finding:
    if varying := varying_axes(values, sizes):
        return _finding("randomness", varying, "ranks {} drew other numbers in " + operation.place)
    long_axes = [axis for axis, size in sizes.items() if size > 1]
    return _finding("randomness", long_axes, "ranks {} drew the same numbers in " + operation.place)


def _batch_faults(
    reference_calls: Sequence[_Operation], rank_calls: Sequence[Sequence[_Operation]], sizes: Sizes
) -> Iterator[tuple[Finding, bool]]:
    """Yield what is wrong with ranks' parts of a batch, if all calls of an operation have one."""
    place = reference_calls[0].place
    for index, tensor in enumerate(reference_calls[0].tensors):
        # Note: a whole number for each sample is no sample, but an index or a label.
        is_number = tensor.ndim == 0 or (tensor.ndim == 1 and not tensor.is_floating_point())
        if tensor.requires_grad or is_number:
            continue
        # Why all calls: ranks may split the same samples into other micro-batches.
        try:
            whole, *parts = [
                torch.cat([call.tensors[index].detach() for call in calls])
                for calls in (reference_calls, *rank_calls)
            ]
        except (RuntimeError, IndexError):  # calls with other shapes or inputs
            continue
        varying = varying_axes(parts, sizes)
        if relation(parts, sizes, whole) is not None or not {*varying} <= {*AXES}:
            continue
        equal = [axis for axis in AXES if sizes.get(axis, 1) > 1 and axis not in varying]
        if varying and distance(parts[0], whole) <= tolerance_of(whole.dtype):
            text = "ranks {} add batches to that of one rank, in " + place
            yield _finding("data", varying, text), False
        elif equal and _contains_rows(whole, parts):
            yield _finding("data", equal, "ranks {} saw the same batch, in " + place), False
        elif _contains_rows(whole, parts):
            text = "ranks {} saw some samples twice or left some out, in " + place
            yield _finding("data", varying, text), False


def _contains_rows(whole: torch.Tensor, parts: Values) -> bool:
    """Return whether every row of the parts is a row of the whole, and can be told from others."""
    rows = whole.reshape(len(whole), -1).unique(dim=0)
    # Note: zeros and ones of a mask are in every part.
    if len(rows) <= 2 or any(part.shape[1:] != whole.shape[1:] for part in parts):
        return False
    every_row = torch.cat(list(parts)).reshape(-1, rows.shape[1])
    return all((row == rows).all(1).any() for row in every_row)


def _cause(
    place: str,
    values: Values,
    output: torch.Tensor,
    relations: Relations,
    sizes: Sizes,
) -> Finding | None:
    varying = varying_axes(values, sizes)
    ways = [way for by_axis in relations for way in (by_axis or {}).items()]
    are_means = output.numel() == 1 and min(values) < output < max(values)
    if are_means and {*varying} <= {*AXES} and "mean" not in dict(ways).values():
        text = "ranks {} have means of unequal numbers of samples, which count equally, in "
        return _finding("weights", varying, text + place)
    if partial := partial_cause(relations):
        cause, axes = partial
        return _finding(cause, axes, _PARTIAL_TEXTS[cause] + place)
    joined = sorted({axis for axis, way in ways if ways.count((axis, way)) > 1 and way == "cut"})
    if joined:
        text = "ranks {} saw other samples, or need an all_gather of one of the inputs, in "
        return _finding("data", joined, text + place)
    return None


_PARTIAL_TEXTS = {
    "norm": "ranks {} use the norm of their own part in ",
    "max": "ranks {} use the maximum of their own part in ",
    "not added": "ranks {} have a term each, which is used as the whole: a psum is missing before it, in ",
    "not averaged": "ranks {} have a mean each, which is used as that of all: a pmean is missing before it, in ",
}


def _scale(
    pairs: Sequence[tuple[Values, torch.Tensor]], place: str, sizes: Sizes
) -> Finding | None:
    """Return the first tensor that is too large or too small by the sizes of axes."""
    for values, reference in pairs:
        factor = None if relation(values, sizes, reference) else scale_of(values, sizes, reference)
        exponents = powers([(sizes, factor)]) if factor else None
        if exponents:
            text = f"a tensor is {factor:.2f} times that of one rank {{}} in {place}"
            return _finding("scale", list(exponents), text)
    return None


def _finding(cause: str, axes: Sequence[str], text: str) -> Finding:
    return Finding(cause, tuple(axes), text.replace("{}", axes_phrase(axes)))


def axes_phrase(axes: Sequence[str]) -> str:
    """Return axes as text, such as ``along 'shard' and 'tensor'``."""
    return "along " + " and ".join(map(repr, axes)) if axes else "everywhere"
