"""``simulate(check_vma=True)``: find values that vary between ranks where they must not.

Each rank records the operations of its program, and before a backward the ranks compare what they
recorded. So whether a value varies along an axis is a fact, and your code needs no types.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import linecache
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from funcshard._utils.tensors import byte_view
from funcshard._utils.torch_private import callers_level, transforms_active
from funcshard._utils.tree import tensors_in
from funcshard.comm.job import lines_through
from funcshard.comm.mesh import Mesh
from funcshard.plan import AXES

_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_PACKAGE = str(Path(__file__).parents[1])
_INSIDE = (
    _PACKAGE,
    *(str(Path(sys.modules[name].__file__ or "").parent) for name in ("torch", "optree")),
)
# Operations that take a part of a tensor, such as this rank's samples.
_PARTS = {
    "__getitem__",
    "chunk",
    "split",
    "narrow",
    "select",
    "index_select",
    "tensor_split",
}


@dataclass(slots=True, eq=False)
class _Value:
    """A tensor as an operation took it.

    Attributes:
        digest: of its elements.
        trained: whether it requires a gradient, as parameters and activations do, and data don't.
        source: the operation that returned it, if that was recorded.
        position: which of its results it is.
        node: its node in the autograd graph.
    """

    digest: bytes
    trained: bool
    source: _Operation | None
    position: int
    node: Any


@dataclass(slots=True, eq=False)
class _Operation:
    """A recorded operation; ``number`` counts those since the last backward."""

    number: int
    name: str
    place: str
    inputs: Sequence[_Value]


@dataclass(slots=True, eq=False)
class _Report:
    """What a rank shows to the others before a backward."""

    operations: Sequence[_Operation]
    losses: Sequence[tuple[_Value, float]]
    shards: Sequence[tuple[Any, _Value]]  # each with its communication


Reports = dict[tuple[int, int], _Report]  # by number of the backward, and rank


class VaryingCheck(TorchFunctionMode):
    """Record what a simulated rank computes, and compare the ranks before each backward.

    All ranks of a simulation share ``reports``.
    """

    def __init__(self, mesh: Mesh, reports: Reports) -> None:
        super().__init__()
        self._mesh, self._reports, self._backwards = mesh, reports, 0
        self._operations: list[_Operation] = []
        # the operation that returned a tensor or a node of the autograd graph, and its position
        self._tensors: Any = WeakIdKeyDictionary()
        self._nodes: dict[Any, tuple[_Operation, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if transforms_active():
            return func(*args, **kwargs)
        if func in _BACKWARDS:
            targets = args[1] if func is torch.autograd.grad else kwargs.get("inputs")
            self._compare(tensors_in(args[0]), targets)
        # Why before the call: it may write to its inputs.
        inputs = [self._value(tensor) for tensor in tensors_in((args, kwargs))]
        result = func(*args, **kwargs)
        if outputs := tensors_in(result):
            name = getattr(func, "__name__", str(func))
            operation = _Operation(len(self._operations), name, _users_line()[0], inputs)
            self._operations.append(operation)
            for position, tensor in enumerate(outputs):
                self._tensors[tensor] = operation, position
                if tensor.grad_fn is not None:
                    self._nodes[tensor.grad_fn] = operation, position
        return result

    def _value(self, tensor: torch.Tensor) -> _Value:
        node = tensor.grad_fn
        # Why by its node: what an autograd Function returns was made by an operation inside.
        made_by = self._tensors.get(tensor) if node is None else self._nodes.get(node)
        source, position = made_by or (None, 0)
        is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta
        elements = b""  # of what has no memory: it never varies
        if is_plain and tensor.layout == torch.strided:
            elements = byte_view(tensor).cpu().numpy().tobytes()
        digest = hashlib.blake2b(elements, digest_size=16).digest()
        return _Value(digest, tensor.requires_grad, source, position, node)

    def _compare(self, losses: Sequence[torch.Tensor], targets: Any) -> None:
        """Compare the ranks before a backward by ``targets``, and begin a new record."""
        mesh, count = self._mesh, self._backwards
        gathers = list(_gathers([loss.grad_fn for loss in losses]))
        shards = [node.next_functions[0][0].variable for node in gathers]
        differentiated = {id(tensor) for tensor in tensors_in(targets or shards)}
        line, is_library = _users_line()
        if not is_library and mesh.world_size > 1 and differentiated & set(map(id, shards)):
            warnings.warn(
                f"the backward in {line} adds the gradients of all ranks up, where "
                f"fs.value_and_grad takes their mean: divide by {mesh.world_size} unless you want "
                "the sum",
                stacklevel=callers_level(),
            )
        report = _Report(
            operations=self._operations,
            losses=[
                (self._value(loss), float(loss.detach().abs().sum())) for loss in losses
            ],
            shards=[
                (node.comm, self._value(local))
                for node, local in zip(gathers, shards, strict=True)
            ],
        )
        self._reports[count, mesh.rank] = report
        for group in mesh.groups.values():
            group.all_gather_text("", label="check_vma")  # until all ranks have reported
        for axis, ranks in lines_through(mesh.rank, mesh.shape).items():
            reports = [self._reports[count, rank] for rank in ranks]
            _check_copies(axis, [other.shards for other in reports])
            if axis not in AXES:
                _check_losses(axis, reports, self._nodes)
        # Why not this report: other ranks may still read it. All have read the one before.
        self._reports.pop((count - 1, mesh.rank), None)
        for operation in self._operations:  # frees the record of earlier steps
            operation.inputs = ()
        self._operations, self._nodes, self._backwards = [], {}, count + 1


def _check_copies(axis: str, shards: Sequence[Sequence[tuple[Any, _Value]]]) -> None:
    """Raise ``ValueError`` if a shard varies along an axis along which the plan repeats it."""
    for copies in zip(*shards, strict=False):
        comm, _ = copies[0]
        values: Sequence[_Value] = [value for _, value in copies]
        if axis in dict(comm.topology.repeated) and _varies(values):
            # Why back: a view or a copy of what varies is not where it began.
            while _varies(inputs := _only_inputs(values)):
                values = inputs
            place = (
                values[0].source.place if values[0].source is not None else "your program"
            )
            raise ValueError(
                f"the plan repeats {comm.label} along {axis!r}, and the copies differ since "
                f"{place}: reduce what you update them with, e.g. by pmean(..., axis={axis!r})"
            )


def _only_inputs(values: Sequence[_Value]) -> Sequence[_Value]:
    """Return what ranks computed ``values`` from, if by operations of one tensor; else nothing."""
    sources = [value.source for value in values]
    return [source.inputs[0] for source in sources if source and len(source.inputs) == 1]


def _check_losses(
    axis: str, reports: Sequence[_Report], nodes: Mapping[Any, tuple[_Operation, int]]
) -> None:
    """Raise ``ValueError`` if a loss varies along a model axis through parts of leaves alone."""
    operations = [report.operations for report in reports]
    for losses in zip(*(report.losses for report in reports), strict=False):
        numbers = [number for _, number in losses]
        # Why finite: nothing tells where a NaN comes from.
        is_same = all(math.isclose(number, numbers[0], rel_tol=1e-6) for number in numbers)
        if is_same or not all(map(math.isfinite, numbers)):
            continue
        places = ""
        with contextlib.suppress(_OtherCauseError):
            places = _missing_sum(
                axis, tuple(value for value, _ in losses), operations, nodes
            )
        if places:
            raise ValueError(
                f"the loss varies along {axis!r}, where all ranks have the same data: a psum along "
                f"{axis!r} is missing. Each rank has a term of the sum; it meets a value that "
                f"doesn't vary in {places}"
            )


class _OtherCauseError(Exception):
    """A loss varies with the data of ranks, or for a cause that was not recorded."""


def _missing_sum(
    axis: str,
    losses: tuple[_Value, ...],
    operations: Sequence[Sequence[_Operation]],
    nodes: Mapping[Any, tuple[_Operation, int]],
) -> str:
    """Walk from a loss back to what makes it vary along an axis.

    Arguments:
        axis: name of the axis.
        losses: the loss on each rank along it.
        operations: what each of these ranks has recorded.
        nodes: the operation of each node of this rank's autograd graph.

    Returns:
        The first lines where what varies meets what doesn't; ``""`` if the loss depends on no parts
        of leaves that ranks hold.
    """
    # What varies: the values of all ranks, or a node of this rank.
    waiting: list[Any] = [losses]
    seen, meetings, reaches_part = set[int](), set[int](), False

    def visit(number: int, *, trained: bool, is_chosen: bool) -> None:
        """Continue at the inputs of an operation that vary."""
        if number in seen:
            return
        seen.add(number)
        calls = [of_rank[number] for of_rank in operations if number < len(of_rank)]
        if len(calls) < len(operations) or len({call.name for call in calls}) > 1:
            raise _OtherCauseError
        inputs = list(zip(*(call.inputs for call in calls), strict=False))
        varying = [values for values in inputs if _varies(values)]
        # Why only what isn't trained: a rank may take its part of activations, as of data.
        if not varying and not trained and (is_chosen or calls[0].name in _PARTS):
            raise _OtherCauseError
        if len(varying) < len(inputs) and not all(
            _is_weight(values[0]) for values in varying
        ):
            meetings.add(number)
        waiting.extend(varying)

    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple) and (source := item[0].source) is not None:
            is_chosen = len({value.position for value in item}) > 1
            visit(source.number, trained=item[0].trained, is_chosen=is_chosen)
        elif isinstance(item, tuple) and item[0].node is not None:
            waiting.append(item[0].node)  # of an autograd Function
        elif item in nodes:
            visit(nodes[item][0].number, trained=True, is_chosen=False)
        elif _is_gather(item):
            reaches_part |= axis in item.comm.topology.local
        elif edges := getattr(item, "next_functions", ()):
            waiting += [node for node, _ in edges if node is not None]
        else:  # a tensor of the program
            raise _OtherCauseError
    lines = dict.fromkeys(operations[0][number].place for number in sorted(meetings))
    return (
        (", or in ".join([*lines][:3]) or "no recorded operation") if reaches_part else ""
    )


def _varies(values: Sequence[_Value]) -> bool:
    return any(value.digest != values[0].digest for value in values)


def _is_weight(value: _Value) -> bool:
    """Return whether a value is computed from gathered leaves alone."""
    if value.source is None:
        return value.node is not None and _is_gather(value.node)
    return bool(value.source.inputs) and all(map(_is_weight, value.source.inputs))


def _is_gather(node: Any) -> bool:
    """Return whether a node of an autograd graph gathers a shard."""
    return getattr(getattr(node, "comm", None), "unit", None) is not None


def _gathers(nodes: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of an autograd graph that gather a shard of the program."""
    waiting, seen = list(nodes), {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            before = [next_node for next_node, _ in node.next_functions]
            if _is_gather(node) and hasattr(before[0], "variable"):
                yield node
            waiting += before


def _users_line() -> tuple[str, bool]:
    """Return the line of your code that runs, and whether the library called torch."""
    frame, is_library = inspect.currentframe(), False
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        file = frame.f_code.co_filename
        is_library |= file.startswith(_PACKAGE) and file != __file__
        frame = frame.f_back
    if frame is None:
        return "your program", is_library
    file, number = frame.f_code.co_filename, frame.f_lineno
    code = linecache.getline(file, number).strip()
    return f"line {number} of {Path(file).name}, `{code}`", is_library
