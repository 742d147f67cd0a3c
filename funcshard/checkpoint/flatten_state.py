"""What a state is taken apart into: an outline as JSON, named tensors, and the pieces of them that ranks hold.

Nothing here communicates, reads a file, or knows how a state is taken apart (``pieces``) or put together (``assemble``).

A state as named pieces of tensors, and back: what of each named tensor lies on which rank, under any plan.

A tree that looks like shards (``{unit: {buffer: 1-D tensors of shard_numel}}``, whatever hangs below a buffer, or such
tensors as a list in the tree's order, as TorchOpt keeps them) is written down leaf by leaf of the *module*, so that no unit,
shard or number of ranks remains in it. Everything else is a tensor or a value that all ranks have alike, or a ``PerRank``.
What is left, the outline, is JSON. Nothing here communicates or reads a file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from ctypes import c_char
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils import tree
from funcshard.plan import AXES, BufferPlan, LeafSpec, Plan, UnitPlan, dtype_name, dtype_of

__all__ = [
    "Item",
    "Outline",
    "Parts",
    "PerRank",
    "Piece",
    "check_alike",
    "facts",
    "find_class",
    "join",
    "kind_of",
    "listed",
    "stored_name",
    "take_apart",
    "values",
]

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
    module, _, qualname = tree.public_class_name(name).partition(":")
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


def take_apart(state: Any, plan: Plan, rank: int, device: str = "cpu") -> Parts:
    """Take one rank's state apart into an outline and named pieces.

    Arguments:
        state: any pytree.
        plan: the plan of the trees in it that look like shards.
        rank: whose state it is.
        device: type of the mesh's device.

    Raises:
        TypeError: a leaf is of a kind that cannot be stored.
        ValueError: a tree of shards is not of this plan.
    """
    taker = _Taker(plan, rank, device, Parts(None))
    structure, taker.leaves, _ = tree.describe(state)
    parts = taker.parts
    return Parts(taker.node(structure, ""), parts.own, parts.items, parts.pieces, parts.checks)


@dataclass(slots=True)
class _Taker:
    plan: Plan
    rank: int
    device: str
    parts: Parts
    leaves: Sequence[Any] = ()
    inside: bool = False  # a PerRank

    def node(self, structure: tree.Structure, path: str) -> Outline:
        """The outline of one node, its items and pieces added to the parts."""
        if structure is None:
            return None
        if isinstance(structure, int):
            return self.leaf(self.leaves[structure], path)
        kind, meta, children = structure
        if not self.inside and kind == "dict" and self._are_shards(meta, children):
            return self._shards(structure, path)
        if not self.inside and kind == "dict" and _look_like_shards(children):
            raise ValueError(
                f"the shards at {path!r} of the state are of another plan: their units are {list(meta)[:4]}, and the plan's "
                f"are {list(self.plan.units)[:4]}, or their buffers differ: pass the plan that they were cut by"
            )
        lists = {} if self.inside else self._lists(children)
        entries = _entries(kind, meta, len(children), path)
        paths = [f"{path}.{entry}" if path else str(entry) for entry in entries]
        inner = [
            self._list(child, below, lists[i]) if i in lists else self.node(child, below)
            for i, (child, below) in enumerate(zip(children, paths, strict=True))
        ]
        if kind == "custom" and not _is_json(meta[1]):
            raise TypeError(
                f"the {meta[0]} at {path!r} of the state cannot be stored: its metadata {meta[1]!r} is no JSON; convert it "
                f"to a dictionary"
            )
        return [kind, list(entries) if kind == "namedtuple" else None, meta, inner]

    def leaf(self, value: Any, path: str) -> Outline:
        if isinstance(value, PerRank):
            return self._per_rank(value, path)
        if type(value) in (int, float, bool, str):
            return ["value", value]
        spread = hasattr(value, "full_tensor")  # a DTensor
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta or spread:
            found = f"a {type(value).__name__}"
            if isinstance(value, torch.Tensor) and not spread:
                found = "a tensor on the meta device" if value.is_meta else f"a tensor of layout {value.layout}"
            raise TypeError(
                f"leaf {path!r} of the state cannot be stored; it must be a dense tensor, an int, float, bool, str or None; "
                f"found {found}: convert it, or leave it out of the state"
            )
        return self._whole(value, path, path)

    def _per_rank(self, value: PerRank, path: str) -> Outline:
        inner = _Taker(self.plan, self.rank, self.device, self.parts, inside=True)
        structure, inner.leaves, _ = tree.describe(value.value)
        self.parts.own.append(inner.node(structure, path))
        return ["rank", len(self.parts.own) - 1]

    def _whole(self, value: torch.Tensor, name: str, label: str) -> Outline:
        """A tensor that all ranks have alike, or that only this one has."""
        flat = value.detach().reshape(-1)
        kind, stored = ("rank", f"{name}@{self.rank}") if self.inside else ("whole", name)
        self._add(stored, Item(tuple(value.shape), dtype_name(value.dtype), kind, self._on_mesh(value), label))
        if not self.inside:
            self.parts.checks[stored] = _checksum(flat)
        if self.inside or self.rank == 0:
            self._piece(stored, 0, flat)
        return ["tensor", stored]

    def _are_shards(self, keys: Sequence[Any], children: Sequence[tree.Structure]) -> bool:
        units = self.plan.units
        return bool(keys) and all(
            name in units
            and isinstance(child, tuple)
            and child[0] == "dict"
            and set(child[1]) <= {buffer.key for buffer in units[name].buffers}
            for name, child in zip(keys, children, strict=True)
        )

    def _shards(self, structure: tree.Structure, path: str) -> Outline:
        found = []
        for name, child in zip(structure[1], structure[2], strict=True):
            for key, inner in zip(child[1], child[2], strict=True):
                found.append((self.plan.units[name], _buffer(self.plan.units[name], key), inner))
        everything = len(structure[1]) == len(self.plan.unit_list)
        return ["shards", "every unit" if everything else "some units", self._by_leaf(found, path)]

    def _lists(self, children: Sequence[tree.Structure]) -> dict[int, list[tuple[UnitPlan, BufferPlan]]]:
        """Which children are shards as a list: those whose sizes fit, and lists of tensors of that length beside one."""
        found: dict[int, list[tuple[UnitPlan, BufferPlan]]] = {}
        for trainable in (True, False):
            order = listed(self.plan, trainable)
            tensors = {i: t for i, child in enumerate(children) if (t := self._tensors(child)) and len(t) == len(order)}
            if any(all(_fits(t, b) for t, (_, b) in zip(ts, order, strict=True)) for ts in tensors.values()):
                found |= dict.fromkeys(tensors.keys() - found.keys(), order)
        return found

    def _tensors(self, structure: tree.Structure) -> list[torch.Tensor]:
        if not isinstance(structure, tuple) or structure[0] not in ("list", "tuple"):
            return []
        leaves = [self.leaves[child] if isinstance(child, int) else None for child in structure[2]]
        return leaves if all(isinstance(leaf, torch.Tensor) for leaf in leaves) else []  # type: ignore[return-value]

    def _list(self, structure: tree.Structure, path: str, order: list[tuple[UnitPlan, BufferPlan]]) -> Outline:
        found = [(unit, buffer, inner) for (unit, buffer), inner in zip(order, structure[2], strict=True)]
        return ["shards", structure[0], self._by_leaf(found, path)]

    def _by_leaf(self, found: list[tuple[UnitPlan, BufferPlan, tree.Structure]], path: str) -> list[Any]:
        return [
            [spec.path, self._below(inner, path, "", unit, buffer, spec)]
            for unit, buffer, inner in found
            for spec in buffer.leaves
        ]

    def _below(
        self, structure: tree.Structure, prefix: str, suffix: str, unit: UnitPlan, buffer: BufferPlan, spec: LeafSpec
    ) -> Outline:
        """The outline of what hangs below one buffer, for one of the buffer's leaves."""
        if structure is None:
            return None
        if not isinstance(structure, int):
            kind, meta, children = structure
            entries = _entries(kind, meta, len(children), join(prefix, unit.name, buffer.key, suffix))
            below = [
                self._below(child, prefix, join(suffix, str(entry)), unit, buffer, spec)
                for child, entry in zip(children, entries, strict=True)
            ]
            return [kind, list(entries) if kind == "namedtuple" else None, meta, below]
        value, name = self.leaves[structure], join(prefix, spec.path, suffix)
        if not isinstance(value, torch.Tensor):
            return self.leaf(value, name)
        if _fits(value, buffer):
            return self._sharded(value, name, join(prefix, "*", suffix), unit, buffer, spec)
        if value.ndim == 1 and not suffix and not (value.numel() == 1 and not value.is_floating_point()):
            raise ValueError(
                f"shard {buffer.key!r} of unit {unit.title!r} at {prefix!r} of the state must have {buffer.shard_numel} "
                f"elements by the plan; found {value.numel()}: it was made with another plan; pass that plan. "
                f"If it is the state of muon, which is kept by name, save what "
                f"optimizer_to_state_dict(opt_state, optimizer, plan, mesh) returns in its place"
            )
        return self._whole(value, name, join(prefix, "*", suffix))

    def _sharded(
        self, value: torch.Tensor, name: str, label: str, unit: UnitPlan, buffer: BufferPlan, spec: LeafSpec
    ) -> Outline:
        kind = kind_of(buffer)
        on_mesh = True if unit.offload else self._on_mesh(value)
        self._add(name, Item(spec.shape, dtype_name(value.dtype), kind, on_mesh, label))
        replicate, shard = self.plan.mesh_shape
        outer, inner = divmod(self.rank, shard)
        begin = inner * buffer.shard_numel if buffer.shards > 1 else 0
        low, high = max(begin, spec.offset), min(begin + buffer.shard_numel, spec.offset + spec.numel)
        # the copies of one slice share the work of storing it
        place = dict(zip(AXES, (outer, inner), strict=True))
        turn = dict(zip(AXES, divmod(spec.index % (replicate * shard), shard), strict=True))
        alike = [axis for axis in AXES if axis not in buffer.local and not (axis == "shard" and buffer.shards > 1)]
        if alike == ["replicate"]:
            turn["replicate"] = spec.index % replicate
        if all(place[axis] == turn[axis] for axis in alike) and low < high:
            self._piece(
                stored_name(name, kind, self.rank, self.plan.mesh_shape),
                low - spec.offset,
                value.detach()[low - begin : high - begin],
            )
        return ["tensor", name]

    def _on_mesh(self, value: torch.Tensor) -> bool:
        return value.device.type == self.device and not (self.inside and self.device == "cpu")

    def _add(self, name: str, item: Item) -> None:
        if name in self.parts.items:
            raise ValueError(f"two tensors of the state would be stored as {name!r}; rename one of the keys above them")
        self.parts.items[name] = item

    def _piece(self, name: str, begin: int, flat: torch.Tensor) -> None:
        if flat.numel():
            self.parts.pieces.append(Piece(name, begin, flat))


def _buffer(unit: UnitPlan, key: str) -> BufferPlan:
    return next(buffer for buffer in unit.buffers if buffer.key == key)


def _look_like_shards(children: Sequence[tree.Structure]) -> bool:
    return bool(children) and all(
        isinstance(child, tuple) and child[0] == "dict" and child[1] and all(_is_key(key) for key in child[1])
        for child in children
    )


def _is_key(key: Any) -> bool:
    """Whether it is a name that buffers have: ``float32``, ``bfloat16.frozen``."""
    name, *marks = key.split(".") if isinstance(key, str) else ("",)
    return isinstance(getattr(torch, name or "-", None), torch.dtype) and set(marks) <= {
        "frozen",
        "local",
        *(f"local_{axis}" for axis in AXES),
    }


def _fits(value: Any, buffer: BufferPlan) -> bool:
    """Whether a tensor is a shard of the buffer: by its size, and where that is 1, which counters have, by its dtype."""
    if not isinstance(value, torch.Tensor) or value.shape != (buffer.shard_numel,):
        return False
    floats = value.is_floating_point() or value.is_complex()
    return value.numel() != 1 or floats or value.dtype == dtype_of(buffer.dtype)


def _entries(kind: str, meta: Any, number: int, path: str) -> Sequence[Any]:
    if kind in ("dict", "ordered_dict"):
        for key in meta:
            if type(key) not in (str, int):
                raise TypeError(
                    f"the keys of a stored dictionary must be str or int; found {key!r} at {path!r} of the state"
                )
        return list(meta)
    if kind == "namedtuple":
        cls: Any = find_class(meta)
        return list(cls._fields)
    return list(range(number))


def _is_json(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(_is_json(v) for v in value)
    return value is None or type(value) in (int, float, bool, str)


def _checksum(flat: torch.Tensor) -> int:
    data = flat.cpu().contiguous()
    size = data.numel() * data.element_size()
    return zlib.crc32((c_char * size).from_address(data.data_ptr())) if size else 0
