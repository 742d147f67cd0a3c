"""``Tape``: the memory and the operations of one forward and backward, in order, as data.

A tape says in which module an operation ran; its unit depends on the plan. Of many equal modules it
holds the events of one in a ``Fold``, and a ``Call`` for each. Storages have numbers. Inside a
fold, those of storages that it exchanges with its caller are negative.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree

LOSS = "(loss)"  # stands for the path of the code that computes the loss


class At(NamedTuple):
    """The events that follow belong to a module: ``""`` is the root of the tape or fold."""

    path: str
    phase: str


class Enter(NamedTuple):
    """A module's forward begins, with the storages of its inputs.

    ``held``: it's the outermost module inside a checkpoint.
    """

    path: str
    storages: tuple[int, ...]
    held: bool = False


class Exit(NamedTuple):
    """A module's forward ends, with the storages of its outputs."""

    path: str
    storages: tuple[int, ...]


class Alloc(NamedTuple):
    """A storage comes into being."""

    storage: int
    bytes: int


class Free(NamedTuple):
    """Nothing refers to a storage any more."""

    storage: int


class Op(NamedTuple):
    """An operation that reads or writes memory: one kernel."""

    flops: int
    bytes: int
    dtype: str


class Save(NamedTuple):
    """Autograd saves a tensor in a storage for backward."""

    storage: int
    dtype: str


class UseParam(NamedTuple):
    """Autograd saves a parameter; in backward: backward or a checkpoint uses it."""

    path: str


class Ask(NamedTuple):
    """Backward of a module asks a checkpoint for a tensor."""

    path: str


class Grad(NamedTuple):
    """The gradient of a parameter is complete; ``call`` if the module's calls are apart."""

    path: str
    storage: int
    call: int = 0


class Call(NamedTuple):
    """A folded module runs: the events of the fold's phase happen here.

    Attributes:
        fold: index of the fold.
        path: path of the module, in place of the fold's own.
        phase: ``"forward"``, ``"backward"``, or ``"recompute"`` for a forward that a checkpoint
            around several modules runs again.
        instance: number of the forward call, which its backward shares.
        exchanged: numbers, inside the fold and here, of storages that both know.
        freed: numbers inside the fold of those that are freed here.
    """

    fold: int
    path: str
    phase: str
    instance: int
    exchanged: tuple[tuple[int, int], ...]
    freed: tuple[int, ...]


# By number of a call: its storages by their number inside, and the calls inside it.
Instances = dict[int, tuple[dict[int, int], Any]]

Event = At | Enter | Exit | Alloc | Free | Op | Save | UseParam | Ask | Grad | Call


def rewritten(
    event: Event, path: Callable[[str], str], storage: Callable[[int], int]
) -> Event:
    """Return an event with other paths and storages."""
    if isinstance(event, Op):
        return event
    if isinstance(event, (Alloc, Free, Save)):
        return event._replace(storage=storage(event.storage))
    if isinstance(event, Grad):
        return Grad(path(event.path), storage(event.storage), event.call)
    if isinstance(event, (Enter, Exit)):
        return event._replace(
            path=path(event.path), storages=tuple(map(storage, event.storages))
        )
    if isinstance(event, Call):
        exchanged_pairs = tuple(
            (inside, storage(outside)) for inside, outside in event.exchanged
        )
        return event._replace(path=path(event.path), exchanged=exchanged_pairs)
    return event._replace(path=path(event.path))


def renumbered(numbers: Mapping[int, int]) -> Callable[[int], int]:
    """Return a function that maps some numbers of storages, and keeps others."""
    return lambda storage: numbers.get(storage, storage)


@dataclass(frozen=True, slots=True)
class Fold:
    """The events of one module, which represents all modules of its kind.

    Attributes:
        path: path of the module that was traced.
        parts: the events of each phase; paths start below the module.
    """

    path: str
    parts: Mapping[str, tuple[Event, ...]]


@dataclass(frozen=True, slots=True)
class Tape:
    """The events of one forward and backward.

    Attributes:
        events: the events in order.
        folds: the folds that calls refer to, by index.
    """

    events: tuple[Event, ...]
    folds: tuple[Fold, ...] = ()

    def expanded(self, events: Iterable[Event]) -> Iterator[list[Event]]:
        """Yield for each event itself, or the events of the call."""
        numbers = itertools.count(1 << 40)  # far above the numbers of the tape
        instances: Instances = {}
        for event in events:
            if isinstance(event, Call):
                yield list(self._call(event, "", int, instances, numbers))
            else:
                yield [event]

    def repeated(self, paths: Iterable[str]) -> set[str]:
        """Return the modules that one forward calls several times."""
        call_levels = [_calls(fold.parts.get("forward", ())) for fold in self.folds]
        # Note: each level knows only the folds that it calls itself.
        call_levels.append(_calls(self.events))  # the tape itself is the last level
        return {path for path in paths if _is_repeated(path, call_levels, -1)}

    def _call(
        self,
        call: Call,
        prefix: str,
        outer: Callable[[int], int],
        instances: Instances,
        numbers: Iterator[int],
    ) -> Iterator[Event]:
        if call.instance not in instances:
            instances[call.instance] = defaultdict(numbers.__next__), {}
        storages, inner_instances = instances[call.instance]
        storages.update((inside, outer(outside)) for inside, outside in call.exchanged)
        module_path = joined(prefix, call.path)
        inner_path = functools.partial(joined, module_path)
        # Note: a storage gets its number at its first event, and keeps it in later phases.
        storage_number = storages.__getitem__
        for event in self.folds[call.fold].parts.get(call.phase, ()):
            if isinstance(event, Call):
                yield from self._call(
                    event, module_path, storage_number, inner_instances, numbers
                )
                continue
            # Note: negative numbers are those of the caller, which may not know all of them.
            if (
                isinstance(event, Alloc)
                and event.storage <= 0
                and event.storage not in storages
            ):
                continue
            if isinstance(event, Free) and (
                event.storage not in storages
                or not (event.storage > 0 or event.storage in call.freed)
            ):
                continue
            yield rewritten(event, inner_path, storage_number)


def _calls(events: Iterable[Event]) -> tuple[Counter[str], dict[str, int]]:
    """Return how often forward calls each module, and which folds it calls."""
    call_counts, fold_indices = Counter[str](), dict[str, int]()
    for event in events:
        if isinstance(event, At) and event.phase != "forward":
            break
        if isinstance(event, (Enter, Call)):
            call_counts[event.path] += 1
        if isinstance(event, Call):
            fold_indices[event.path] = event.fold
    return call_counts, fold_indices


def _is_repeated(
    path: str, levels: Sequence[tuple[Counter[str], Mapping[str, int]]], level: int
) -> bool:
    """Return whether a module, or one around it, is called several times."""
    call_counts, fold_indices = levels[level]
    nodes_around = [*tree.upwards(path)]
    if any(call_counts[node_path] > 1 for node_path in nodes_around):
        return True
    folded_path = next(
        (node_path for node_path in nodes_around if node_path in fold_indices), path
    )
    return folded_path != path and _is_repeated(
        path[len(folded_path) + 1 :], levels, fold_indices[folded_path]
    )


def joined(prefix: str, path: str) -> str:
    """Return the path of a module below another one."""
    return f"{prefix}.{path}" if prefix and path else prefix or path


# --- categories -----------------------------------------------------------------------------------

ACTIVATION, TEMPORARY, LOSS_TENSOR, GRADIENT = range(4)


def categories_of(events: Iterable[Any]) -> dict[int, int]:
    """Return the category of each storage, by the position of its ``Alloc``."""
    made_at: dict[int, int] = {}
    storage_categories: dict[int, int] = {}
    forward_end = None
    current_path, current_phase = "", "forward"
    for position, event in enumerate(events):
        if isinstance(event, At):
            current_path, current_phase = event
            if current_phase != "forward" and forward_end is None:
                forward_end = position
        elif isinstance(event, Alloc):
            made_at[event.storage] = position
            storage_categories[position] = (
                LOSS_TENSOR if current_path == LOSS else TEMPORARY
            )
        elif isinstance(event, (Free, Grad)):
            alloc_position = made_at.get(event.storage)
            if alloc_position is None:
                continue
            if isinstance(event, Grad):
                storage_categories[alloc_position] = GRADIENT
            elif (
                storage_categories[alloc_position] == TEMPORARY
                and forward_end is not None
                and alloc_position < forward_end
            ):
                # Note: forward made it and backward frees it, so autograd kept it.
                storage_categories[alloc_position] = ACTIVATION
    return storage_categories


# --- forms of tensors ----------------------------------------------------------------------------


class Form(NamedTuple):
    """Shape, strides and dtype of a tensor, and whether it requires a gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(
            tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad
        )

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")

    def gradient(self, grads: Iterable[torch.Tensor | None] = ()) -> torch.Tensor:
        """Return a new tensor of the form of a gradient, which has no gaps in memory."""
        for grad in grads:
            # Note: a residual stream passes the layout of its gradient on.
            if grad is not None and (grad.shape, grad.dtype) == (self.shape, self.dtype):
                return torch.empty_like(grad)
        spanned_numel = 1 + sum(
            (size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)
        )
        return (
            self.empty()
            if spanned_numel == math.prod(self.shape)
            else torch.empty(self.shape, dtype=self.dtype, device="cpu")
        )
