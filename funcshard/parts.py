"""What a state is taken apart into: an outline as JSON, named tensors, and the pieces of them that ranks hold.

Nothing here communicates, reads a file, or knows how a state is taken apart (``pieces``) or put together (``assemble``).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard.plan import AXES, BufferPlan, Plan, UnitPlan

__all__ = [
    "Item", "Outline", "Parts", "PerRank", "Piece", "check_alike", "facts", "find_class", "join", "kind_of", "listed",
    "stored_name", "values",
]  # fmt: skip

Outline = Any  # None, or a list that begins with what it is: see ``pieces``


@dataclass(frozen=True, slots=True)
class PerRank:
    """What each rank has of its own in a state that ``save`` stores: a random state, a position in the data.

    Attributes:
        value: any pytree of tensors, numbers and strings; it may differ between ranks in everything.

    Example:
        >>> import torch, funcshard as fs
        >>> own = fs.PerRank({"rng": torch.get_rng_state(), "position": 3})
        >>> own.value["position"]
        3
    """

    value: Any


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor that is stored under one name.

    Attributes:
        shape: its shape: a leaf's own, whatever the plan.
        dtype: name of its dtype.
        kind: ``"sharded"`` (ranks hold parts of it), ``"whole"`` (all ranks hold all of it), ``"local"`` (each rank
            holds another tensor, stored under the name with ``@rank`` behind), ``"local shard"`` and ``"local replicate"``
            (each place along that mesh axis has another, stored with ``@place`` behind), ``"rank"`` (only one rank has it).
        on_mesh: whether it lies on the mesh's device, rather than on the CPU in any case.
        label: what it is listed as; tensors of all leaves have the same.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str
    on_mesh: bool
    label: str

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of elements of a named tensor, from ``begin`` in its flat order; ``tensor`` is 1-D."""

    name: str
    begin: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class Parts:
    """One rank's state, taken apart.

    Attributes:
        outline: the tree with names and values at its leaves; the same on every rank.
        own: the outline of each ``PerRank``.
        items: the tensors by name; the same on every rank but for those of kind ``"rank"``.
        pieces: what this rank stores of them.
        checks: checksum of each tensor that has to be the same on every rank.
    """

    outline: Outline
    own: list[Outline] = field(default_factory=list)
    items: dict[str, Item] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)
    checks: dict[str, int] = field(default_factory=dict)


def facts(parts: Parts) -> dict[str, Any]:
    """Return what has to be the same on every rank, as JSON: values, checksums of tensors, shapes, and the outline."""
    shared = {name: [*item.shape, item.dtype, item.kind] for name, item in parts.items.items() if item.kind != "rank"}
    outline = hashlib.sha256(json.dumps([parts.outline, shared], sort_keys=True).encode()).hexdigest()
    return {"values": dict(values(parts.outline)), "tensors": parts.checks, "outline": outline}


def check_alike(everyones: Sequence[dict[str, Any]]) -> None:
    """Raise ``ValueError``, naming what differs, unless all ranks' ``facts`` are the same."""
    for rank, other in enumerate(everyones):
        first = everyones[0]
        if json.dumps(first) == json.dumps(other):
            continue
        remedy = "mark what is a rank's own with PerRank(value)"
        for path in first["values"].keys() & other["values"].keys():
            one, two = first["values"][path], other["values"][path]
            if json.dumps(one) != json.dumps(two):
                raise ValueError(f"{path!r} of the state is {one!r} on rank 0 and {two!r} on rank {rank}: {remedy}")
        for name in first["tensors"].keys() & other["tensors"].keys():
            if first["tensors"][name] != other["tensors"][name]:
                raise ValueError(f"tensor {name!r} of the state is not the same on rank 0 and rank {rank}: {remedy}")
        raise ValueError(f"the state must be built alike on every rank; that of rank {rank} differs from rank 0's: {remedy}")


def kind_of(buffer: BufferPlan) -> str:
    """The kind of an item that is cut as the leaves of a buffer are."""
    if not buffer.local:
        return "sharded"
    return "local" if buffer.local == AXES else f"local {buffer.local[0]}"


def stored_name(name: str, kind: str, rank: int, mesh_shape: tuple[int, int]) -> str:
    """The name under which a rank's tensor is stored, or is to be taken from, on a mesh of the given shape."""
    outer, inner = divmod(rank, mesh_shape[1])
    places = {"local": rank, "local shard": inner, "local replicate": outer}
    return f"{name}@{places[kind]}" if kind in places else name


def join(*parts: str) -> str:
    """Join dotted paths, leaving out empty ones."""
    return ".".join(part for part in parts if part)


def find_class(name: str) -> type:
    """Return the class ``module:qualname`` of a module that is loaded; nothing is imported, so no code of a file's runs.

    Raises:
        ValueError: there is no such class.
    """
    module, _, qualname = name.partition(":")
    try:
        # not getattr, for which some modules import others
        found: Any = functools.reduce(lambda node, name: vars(node)[name], qualname.split("."), sys.modules[module])
    except (KeyError, TypeError):
        found = None
    if not isinstance(found, type):
        raise ValueError(
            f"a state with a {qualname} in it needs that class at the top level of the loaded module {module!r}, and there "
            f"is none: import the module first, or use a dictionary instead"
        )
    return found


def listed(plan: Plan, trainable: bool) -> list[tuple[UnitPlan, BufferPlan]]:
    """The buffers in the order of the leaves of a tree of shards: of the trainable ones, or of all."""
    pairs = [(unit, buffer) for unit in plan.unit_list for buffer in unit.buffers if buffer.trainable or not trainable]
    return sorted(pairs, key=lambda pair: (pair[0].name, pair[1].key))


def values(outline: Outline) -> list[tuple[str, Any]]:
    """Return every int, float, bool and str of an outline with its path, but for those below leaves of shards."""
    return list(_values(outline, ""))


def _values(outline: Outline, path: str) -> Iterator[tuple[str, Any]]:
    if outline is None or outline[0] in ("tensor", "rank", "shards"):
        return
    if outline[0] == "value":
        yield path, outline[1]
        return
    kind, fields, meta, children = outline
    keys = meta if kind in ("dict", "ordered_dict") else fields or range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _values(child, f"{path}.{key}" if path else str(key))
