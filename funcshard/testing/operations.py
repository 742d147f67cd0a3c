"""The first operation whose result differs from that of one rank, and why."""

from __future__ import annotations

import collections
import inspect
import itertools
import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.torch_operators import is_random
from funcshard._utils.torch_private import TorchDispatchMode, graph_task_id
from funcshard.comm import Mesh
from funcshard.plan import AXES
from funcshard.testing.relations import (
    Finding,
    Sizes,
    Values,
    Ways,
    distance,
    find,
    partial,
    relation,
    scale_of,
    tolerance_of,
    varying_axes,
)

_TORCH = str(Path(torch.__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])


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
        # Why before the call: it may write to its inputs. Why no lists: a rank's may be shorter.
        inputs = _copies((*args, *kwargs.values())) if place else ()
        result = func(*args, **kwargs)
        if place:
            draws = is_random(func, args, kwargs)
            outputs = _copies(tree.leaves(result))
            self.log.append(_Operation(place, str(func), inputs, outputs, draws))
        return result


def _copies(values: Iterable[Any]) -> tuple[torch.Tensor, ...]:
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    # Note: whether a tensor requires a gradient tells parameters and activations from data.
    return tuple(
        tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors
    )


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
            # Why not the line: it may hold a loop beside the operation.
            positions = itertools.islice(
                frame.f_code.co_positions(), frame.f_lasti // 2, None
            )
            first, last, start, end = next(positions)
            code = linecache.getline(file, first or 0).encode()[
                start : end if first == last else None
            ]
            line = f"line {first} of {Path(file).name}, `{code.decode().strip()}`"
    if not modules:
        return line
    names = (name for name, module in modules[-1].named_modules() if module is modules[0])
    module_text = f"module {next(names, '') or type(modules[0]).__name__!r}"
    return f"{module_text} in {line}" if line else module_text


def explain(
    reference: Sequence[_Operation],
    logs: Sequence[Sequence[_Operation]],
    sizes: Sizes,
    right_axes: Set[str] = frozenset(),
) -> Finding | None:
    """Return why ranks differ from one rank, by the first operation whose result does.

    Arguments:
        reference: the operations of one rank.
        logs: those of each rank of the mesh.
        sizes: size of each mesh axis.
        right_axes: axes along which ranks are right on meshes without the others.
    """
    first: Finding | None = None
    for place, finding, inputs_make_sense in _findings(reference, logs, sizes, right_axes):
        named = finding._replace(text=f"in {place}, a tensor {finding.text}")
        if finding.cause == "value":
            first = first or named
        # Why not the first of any cause: ranks may well hold numbers between that make up nothing,
        # such as rows of a table's part that a mask drops. What follows is right then.
        elif first is None or inputs_make_sense:
            return named
    return first


def _findings(
    reference: Sequence[_Operation],
    logs: Sequence[Sequence[_Operation]],
    sizes: Sizes,
    right_axes: Set[str],
) -> Iterator[tuple[str, Finding, bool]]:
    """Yield what is wrong with operations: where, what, and whether their inputs make sense."""
    reference_calls, *rank_calls = [_by_place(log) for log in (reference, *logs)]
    seen: collections.Counter[tuple[str, str]] = collections.Counter()
    for operation in reference:
        key = operation.place, operation.name
        own_calls, every_call = reference_calls[key], [calls[key] for calls in rank_calls]
        if not seen[key] and all(every_call):
            for finding in _batch_faults(own_calls, every_call, sizes, right_axes):
                yield operation.place, finding, operation.is_random
        # Note: a loop over samples or experts has other turns on a rank, which have no pair.
        if {*map(len, every_call)} == {len(own_calls)} and not operation.is_random:
            ranks = [calls[seen[key]] for calls in every_call]
            for finding, makes_sense in _faults(operation, ranks, sizes):
                yield operation.place, finding, makes_sense
        seen[key] += 1


def _by_place(log: Sequence[_Operation]) -> Mapping[tuple[str, str], list[_Operation]]:
    calls = collections.defaultdict(list)
    for operation in log:
        calls[operation.place, operation.name].append(operation)
    return calls


def _faults(
    operation: _Operation, ranks: Sequence[_Operation], sizes: Sizes
) -> Iterator[tuple[Finding, bool]]:
    outputs = zip(*(rank.outputs for rank in ranks), strict=False)
    for values, output in zip(outputs, operation.outputs, strict=False):
        if relation(values, sizes, output) is not None:
            continue
        # Why: whole numbers may be indices into a rank's own part.
        if output.is_floating_point() or output.is_complex():
            inputs = zip(*(rank.inputs for rank in ranks), strict=False)
            pairs = [
                (tensors, sizes, tensor)
                for tensors, tensor in zip(inputs, operation.inputs, strict=False)
            ]
            all_ways = [relation(*pair) for pair in pairs]
            scales = [
                scale_of(*pair)
                for pair, ways in zip(pairs, all_ways, strict=True)
                if ways is None
            ]
            text = "differs first"
            if None in all_ways:
                text = "differs, and an input too: look at what comes before"
            finding = (
                next(filter(None, scales), None)
                or _of_own_part(values, output, all_ways, sizes)
                or partial(all_ways)
                or _other_samples(all_ways)
                or scale_of(values, sizes, output)
                or find("value", varying_axes(values, sizes), text)
            )
            yield finding, None not in all_ways


def _of_own_part(
    values: Values, output: torch.Tensor, all_ways: Sequence[Ways | None], sizes: Sizes
) -> Finding | None:
    """Return what's wrong with a reduction of each rank's own part, which no sum makes right."""
    varying = varying_axes(values, sizes)
    ways_by_axis = [pair for ways in all_ways for pair in (ways or {}).items()]
    names = {way for _, way in ways_by_axis}
    if None in all_ways or names & {"mean", "norm", "max"}:
        return None
    are_data = {*varying} <= {*AXES}
    if are_data and output.numel() == 1 and min(values) < output < max(values):
        text = "is a mean of unequal numbers of samples on ranks {}, which count equally"
        return find("weights", varying, text)
    are_cut = {*varying} <= {axis for axis, way in ways_by_axis if way == "cut"}
    if "sum" in names or not varying or not are_cut or values[0].shape != output.shape:
        return None
    text = "is of each rank's own part {}: reduce its terms before"
    return find("not averaged" if are_data else "not added", varying, text)


def _other_samples(all_ways: Sequence[Ways | None]) -> Finding | None:
    cuts = [axis for ways in all_ways for axis, way in (ways or {}).items() if way == "cut"]
    axes = sorted({axis for axis in cuts if cuts.count(axis) > 1})
    text = "mixes samples of other ranks {}, or an input needs an all_gather"
    return find("data", axes, text) if axes else None


def _batch_faults(
    own_calls: Sequence[_Operation],
    every_call: Sequence[Sequence[_Operation]],
    sizes: Sizes,
    right_axes: Set[str],
) -> Iterator[Finding]:
    """Yield what is wrong with ranks' parts of a batch, or of random numbers."""
    is_random = own_calls[0].is_random
    for index, tensor in enumerate(own_calls[0].tensors):
        if is_random and index < len(own_calls[0].inputs):  # memory without values
            continue
        if not is_random and not _is_batch(tensor):
            continue
        if any(len(calls[0].tensors) <= index for calls in every_call):
            continue
        # Why all calls: ranks may split the same samples into other micro-batches.
        whole, *parts = [_joined(calls, index) for calls in (own_calls, *every_call)]
        if relation(parts, sizes, whole) is not None:
            continue
        varying = varying_axes(parts, sizes)
        equal = [axis for axis, size in sizes.items() if size > 1 and axis not in varying]
        # Why: copies along a model axis are right, unless the data axes are without it.
        suspects = [
            axis
            for axis in equal
            if axis not in right_axes and (axis in AXES or right_axes)
        ]
        if is_random and varying:
            yield find("randomness", varying, "has other random numbers on ranks {}")
        elif is_random:
            yield find("randomness", equal, "has the same random numbers on ranks {}")
        elif not {*varying} <= {*AXES}:
            continue
        elif varying and distance(parts[0], whole) <= tolerance_of(whole.dtype):
            yield find("data", varying, "adds batches to that of one rank on ranks {}")
        elif _are_rows(parts, whole) and suspects:
            yield find("data", suspects, "has the same batch on ranks {}")
        elif _are_rows(parts, whole):
            yield find(
                "data", varying, "has some samples twice or leaves some out on ranks {}"
            )


def _joined(calls: Sequence[_Operation], index: int) -> torch.Tensor:
    """Return the rows of all calls of an operation that have the shape of the first ones."""
    tensors = [
        torch.atleast_1d(tensor.detach())
        for call in calls
        for tensor in call.tensors[index : index + 1]
    ]
    return torch.cat([rows for rows in tensors if rows.shape[1:] == tensors[0].shape[1:]])


def _is_batch(tensor: torch.Tensor) -> bool:
    """Return whether a tensor may hold a sample in each row."""
    if tensor.requires_grad or tensor.dtype == torch.bool or not tensor.ndim:
        return False
    # Note: whole numbers are indices or labels, one a row, or choices and masks, in equal rows.
    is_distinct = tensor.numel() > len(tensor) == len(tensor.unique(dim=0))
    return is_distinct or not torch.equal(tensor, tensor.round())


def _are_rows(parts: Values, whole: torch.Tensor) -> bool:
    """Return whether all rows of the parts are rows of the whole, which can be told apart."""
    rows = whole.reshape(len(whole), -1).unique(dim=0)
    if len(rows) <= 2 or any(part.shape[1:] != whole.shape[1:] for part in parts):
        return False
    every_row = torch.cat(list(parts)).reshape(-1, rows.shape[1])
    return all((row == rows).all(1).any() for row in every_row)
