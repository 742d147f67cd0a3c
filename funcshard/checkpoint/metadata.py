"""The parts of a flattened state: a tree as JSON, tensors by name, and one rank's slices of them.

``flatten_state`` makes a ``FlatState``, and ``unflatten_state`` makes a state of its parts. This
file defines those parts, their names, and the check that ranks agree on them. Nothing here
communicates or reads a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils import loaded_class, public_class_name
from funcshard.plan import (
    AXES,
    BufferPlan,
    LeafCut,
    LeafSpec,
    Plan,
    UnitPlan,
    own_axes,
    rank_at,
    whole_shape_of,
)

TreeSpec = Any
"""A state without its tensors, as JSON. Each node is one of these:

- ``None``;
- ``["value", value]``: an int, float, bool or str;
- ``["tensor", name]``: the tensor that is stored under that name;
- ``["rank", i]``: a ``PerRank``; ``i`` is the index of its spec in ``FlatState.rank_specs``;
- ``["shards", form, [[path, node], ...]]``: a tree of shards, by path of the module's leaves. Its
  form is ``"every unit"`` or ``"some units"`` (of the plan), ``"list"`` or ``"tuple"``;
- ``[kind, fields, metadata, [node, ...]]``: a container, as in ``tree``; a namedtuple has fields.
"""

Plans = Plan | Mapping[str, Plan]
"""The plan of all trees of shards in a state, or one for each of some entries of a dictionary."""

NO_UNIT: TreeSpec = ["value", None]
"""The node of each leaf of a unit for which a tree of shards has ``None``."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """A value of one rank's own in a state, such as a random state or a position in the data.

    ``save`` stores one value per rank, and does not compare them.

    Attributes:
        value: any pytree of tensors, numbers and strings; ranks may hold entirely different ones.

    Example:
        >>> import torch, funcshard as fs
        >>> own = fs.PerRank({"rng": torch.get_rng_state(), "position": 3})
        >>> own.value["position"]
        3
    """

    value: Any


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    """The facts about a stored tensor, apart from its values.

    Attributes:
        shape: the tensor's shape. A leaf of a tree of shards has its own shape under every plan.
        dtype: name of its dtype.
        kind: how ranks hold the tensor. ``"sharded"``: each rank holds a part of it. ``"whole"``:
            every rank holds all of it. ``"rank"``: one rank alone holds it. ``"local"``: each rank
            holds a different tensor, stored as ``name@rank``. ``"local shard"`` and others: each
            index along these mesh axes has a different tensor, stored as ``name@index``.
        on_mesh: whether it lives on the mesh's device; if not, it lives on the CPU.
        label: the row of a checkpoint's table that counts it, such as ``train.shards.*``; the
            tensors of all leaves share one.
        cuts: how a local tensor is a slice of a whole tensor; ``shape`` is that of the slice.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str
    on_mesh: bool
    label: str
    cuts: tuple[LeafCut, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the tensor that this one is a slice of; its own shape if it is none."""
        return whole_shape_of(self.shape, self.cuts)

    @property
    def own_axes(self) -> tuple[str, ...]:
        """The mesh axes along which tensors of this name differ and no whole tensor joins them."""
        return own_axes(local_axes(self.kind), self.cuts)

    def to_json(self) -> list[Any]:
        """Return the fields as JSON, without cuts if there are none; inverse of ``from_json``."""
        fields = [list(self.shape), self.dtype, self.kind, self.on_mesh, self.label]
        return [*fields, [list(cut) for cut in self.cuts]] if self.cuts else fields

    @classmethod
    def from_json(cls, fields: Sequence[Any]) -> TensorMetadata:
        """Return the metadata that ``to_json`` wrote, of any version of the library."""
        shape, dtype, tensor_kind, on_mesh, label, *cuts = fields
        return cls(
            tuple(shape),
            dtype,
            tensor_kind,
            on_mesh,
            label,
            tuple(LeafCut(*cut) for cut_list in cuts for cut in cut_list),
        )


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Consecutive elements of a stored tensor.

    Attributes:
        name: the stored tensor's name.
        begin: index of the first element in the raveled tensor.
        tensor: the elements, 1-D.
    """

    name: str
    begin: int
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class FlatState:
    """One rank's state after ``flatten_state``.

    Attributes:
        spec: the tree, with names of tensors and values at its leaves; the same on every rank.
        rank_specs: the tree of each ``PerRank`` value.
        tensors: metadata of each tensor by name. Ranks agree on it, apart from tensors of kind
            ``"rank"``.
        slices: the elements that this rank stores.
        checksums: checksum of each tensor that must be the same on every rank, by name.
    """

    spec: TreeSpec
    rank_specs: list[TreeSpec] = field(default_factory=list)
    tensors: dict[str, TensorMetadata] = field(default_factory=dict)
    slices: list[TensorSlice] = field(default_factory=list)
    checksums: dict[str, int] = field(default_factory=dict)


# --- agreement between ranks ----------------------------------------------------------------------


def replicated_summary(flat: FlatState) -> dict[str, Any]:
    """Return a JSON summary of the parts of a state that must be the same on every rank.

    The summary holds every value, the checksum of every replicated tensor, and one digest of the
    tree and of all shapes and dtypes.
    """
    tensors = {
        name: [*t.shape, t.dtype, t.kind, t.cuts]
        for name, t in flat.tensors.items()
        if t.kind != "rank"
    }
    structure = hashlib.sha256(
        json.dumps([flat.spec, tensors], sort_keys=True).encode()
    ).hexdigest()
    return {
        "values": replicated_values(flat.spec),
        "tensors": flat.checksums,
        "structure": structure,
    }


def check_replicated(summaries: Sequence[dict[str, Any]]) -> None:
    """Raise ``ValueError``, naming a difference, unless the summaries of all ranks are the same."""
    first = summaries[0]
    remedy = "mark a value of a rank's own with PerRank(value)"
    for rank, rank_summary in enumerate(summaries):
        if json.dumps(first) == json.dumps(rank_summary):
            continue
        for path in first["values"].keys() & rank_summary["values"].keys():
            first_value, two = first["values"][path], rank_summary["values"][path]
            if json.dumps(first_value) != json.dumps(two):
                shown, differs = shortened(first_value, two)
                raise ValueError(
                    f"{path!r} of the state is {shown} on rank 0 and {differs} on rank {rank}: "
                    f"{remedy}"
                )
        for name in first["tensors"].keys() & rank_summary["tensors"].keys():
            if first["tensors"][name] != rank_summary["tensors"][name]:
                raise ValueError(
                    f"tensor {name!r} of the state is not the same on rank 0 and rank {rank}: "
                    f"{remedy}"
                )
        raise ValueError(
            f"the state must have the same structure on every rank; rank {rank}'s differs from "
            f"rank 0's: {remedy}"
        )


def shortened(one: Any, other: Any, most: int = 80) -> tuple[str, str]:
    """Return two different values as text; of long ones, the part around the first difference."""
    texts = repr(one), repr(other)
    at = next(
        (i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts))
    )
    begin = max(0, at - most // 2)

    def part(text: str) -> str:
        shown = text if len(text) <= most else text[begin : begin + most]
        return f"{'…' * (shown != text and begin > 0)}{shown}{'…' * (shown != text and begin + most < len(text))}"

    return part(texts[0]), part(texts[1])


def replicated_values(spec: TreeSpec) -> dict[str, Any]:
    """Return every int, float, bool and str outside of trees of shards, by path."""
    return dict(_values(spec, ""))


def _values(spec: TreeSpec, path: str) -> Iterator[tuple[str, Any]]:
    if spec is None or spec[0] in ("tensor", "rank", "shards"):
        return
    if spec[0] == "value":
        yield path, spec[1]
        return
    node_kind, fields, meta, children = spec
    keys = meta if node_kind in ("dict", "ordered_dict") else fields or range(len(children))
    for key, child in zip(keys, children, strict=True):
        yield from _values(child, child_path(path, key))


# --- names ----------------------------------------------------------------------------------------


def join(*parts: str) -> str:
    """Join dotted paths, leaving out empty ones."""
    return ".".join(part for part in parts if part)


def child_path(path: str, key: Any) -> str:
    """Return the path of the child ``key`` of the node at ``path``."""
    return f"{path}.{key}" if path else str(key)


def name_in(names: Container[str], leaf: LeafSpec) -> str | None:
    """Return the first name of a leaf that is in ``names``; a tied parameter has several names."""
    return next((name for name in (leaf.path, *leaf.aliases) if name in names), None)


def stored_name(
    name: str, kind: str, position: Mapping[str, int], mesh_axes: Mapping[str, int]
) -> str:
    """Return the name under which the tensor of one rank is stored: local ones have a suffix.

    Arguments:
        name: name of the tensor, the same on all ranks.
        kind: as in ``TensorMetadata``.
        position: index of the rank along each mesh axis.
        mesh_axes: size of each mesh axis.
    """
    axes = local_axes(kind)
    return f"{name}@{rank_at(position, {axis: mesh_axes[axis] for axis in axes})}" if axes else name


def local_axes(kind: str) -> tuple[str, ...]:
    """Return the mesh axes along which tensors of a kind differ."""
    word, *axes = kind.split(" ")
    return () if word != "local" else tuple(axes) or AXES


def metadata_of(name: str, tensors: Mapping[str, TensorMetadata]) -> TensorMetadata:
    """Return the metadata of a stored tensor; a local one, ``name@index``, has that of ``name``."""
    return tensors[name] if name in tensors else tensors[name.rpartition("@")[0]]


def find_class(name: str) -> type:
    """Return the class that is recorded as ``module:qualname``.

    Only modules that are loaded are searched, and nothing is imported, so a checkpoint cannot make
    this process run code.

    Raises:
        ValueError: no loaded module has such a class.
    """
    loaded_type = loaded_class(name)
    if loaded_type is None:
        module, _, qualname = public_class_name(name).partition(":")
        raise ValueError(
            f"the state contains a {qualname}, so that class must be at the top level of the "
            f"loaded module {module!r}; found none: import the module first, or store a dictionary "
            "instead"
        )
    return loaded_type


# --- plans ----------------------------------------------------------------------------------------


def any_plan(plans: Plans) -> Plan:
    """Return one of the plans, for what they share: mesh axes and ranks."""
    return plans if isinstance(plans, Plan) else next(iter(plans.values()))


def by_entry(root: Any, plans: Plans) -> list[tuple[str, Any, Plan]]:
    """Return path and node of each part of a state, and the plan of its shards.

    One plan is that of the whole state, at path ``""``. Several are those of entries of a
    dictionary, whose other entries get a plan without units, because they hold no shards.

    Arguments:
        root: the root of the state, as a ``TreeSpec`` or a ``tree.Structure``.
        plans: the plans.

    Raises:
        ValueError: the state is no dictionary, or lacks an entry that has a plan.
    """
    if isinstance(plans, Plan):
        return [("", root, plans)]
    keys: Sequence[Any] = ()
    if isinstance(root, list | tuple) and root[0] in ("dict", "ordered_dict"):
        keys = root[-2]
    if missing_keys := [key for key in plans if key not in keys]:
        raise ValueError(
            "with several plans, the state must be a dictionary with an entry for each of them; "
            f"found none for the plan of {missing_keys[0]!r}: give the plan the key of its part of the "
            "state"
        )
    plan = any_plan(plans)
    no_units = dataclasses.replace(
        plan, structure=("dict", (), ()), unit_list=(), precision=None, names=()
    )
    return [
        (str(key), child, plans.get(key, no_units))
        for key, child in zip(keys, root[-1], strict=True)
    ]


# --- flat buffers ---------------------------------------------------------------------------------


def kind_of(buffer: BufferPlan) -> str:
    """Return the kind of a tensor that is cut as a leaf of ``buffer`` is."""
    if not buffer.local:
        return "sharded"
    return "local" if buffer.local == AXES else " ".join(("local", *buffer.local))


def copy_axes(buffer: BufferPlan, mesh_axes: Mapping[str, int]) -> dict[str, int]:
    """Return name and size of the mesh axes along which every rank holds the same shard."""
    return {
        axis: size
        for axis, size in mesh_axes.items()
        if axis not in buffer.local and not (axis == "shard" and buffer.shards > 1)
    }


def buffers_in_tree_order(plan: Plan, *, trainable_only: bool) -> list[tuple[UnitPlan, BufferPlan]]:
    """Return the buffers, with their units, in the order of the leaves of a tree of shards."""
    pairs = [
        (unit, buffer)
        for unit in plan.unit_list
        for buffer in unit.buffers
        if buffer.trainable or not trainable_only
    ]
    return sorted(pairs, key=lambda pair: (pair[0].name, pair[1].key))
