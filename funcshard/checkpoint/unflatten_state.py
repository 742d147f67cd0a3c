"""Make one rank's state of its tree and named tensors, under the plan that cut it or another one.

``unflatten_state`` builds the state with tensors that are still empty. It lists which elements of
which stored tensors belong into them, in the classes of ``read_items``. The caller fills them:
``replan`` from memory, ``restore`` from files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils import byte_view, tree
from funcshard.checkpoint.metadata import (
    NO_UNIT,
    PerRank,
    Plans,
    TensorMetadata,
    TreeSpec,
    buffers_in_tree_order,
    by_entry,
    find_class,
    kind_of,
    name_in,
    stored_name,
)
from funcshard.checkpoint.read_items import ReadBox, ReadItem
from funcshard.core import can_cast
from funcshard.plan import (
    Box,
    BufferPlan,
    LeafSpec,
    Plan,
    UnitPlan,
    boxes,
    dtype_name,
    dtype_of,
    has_numbers,
    own_axes,
    position_of,
    rank_at,
    slice_offsets,
)

DeviceOf = Callable[[TensorMetadata, UnitPlan | None], torch.device]
"""A function from a tensor, and its unit if it is a shard, to the tensor's device."""

_CONTAINERS = ("dict", "ordered_dict", "list", "tuple", "namedtuple", "custom")


@dataclass(frozen=True, slots=True)
class EmptyState:
    """A state whose tensors are still to be filled.

    Attributes:
        state: the tree.
        reads: the elements that belong into its tensors.
        merged: the tensors of leaves that must be equal, with the unit's title and the leaves.
        casts: the shards to convert, and their dtypes.
    """

    state: Any
    reads: list[ReadItem | ReadBox]
    merged: list[tuple[str, list[str], list[torch.Tensor]]] = field(default_factory=list)
    casts: list[tuple[torch.Tensor, torch.dtype]] = field(default_factory=list)

    def finish(self) -> None:
        """Cast shards; raise ``ValueError`` if leaves disagree on what their buffer has once.

        Call it when the state is filled. Adam's ``step`` is such a tensor: the flattened state has
        one for each leaf, and this state one for each buffer.
        """
        for shard, dtype in self.casts:
            shard.data = shard.to(dtype)
        for where, paths, tensors in self.merged:
            first_tensor = tensors[0]
            for path, other_tensor in zip(paths, tensors, strict=True):
                if first_tensor.shape != other_tensor.shape:
                    raise _disagreement(
                        where,
                        paths[0],
                        path,
                        f"of shape {tuple(first_tensor.shape)}",
                        f"of {tuple(other_tensor.shape)}",
                    )
                # Why bytes: NaN is equal to no number, and torch compares no tensors of bits8.
                if not torch.equal(byte_view(first_tensor), byte_view(other_tensor)):
                    at = (
                        int((byte_view(first_tensor) != byte_view(other_tensor)).nonzero()[0])
                        // first_tensor.element_size()
                    )
                    raise _disagreement(
                        where, paths[0], path, _shown(first_tensor, at), _shown(other_tensor, at)
                    )


def unflatten_state(
    spec: TreeSpec,
    rank_specs: Sequence[TreeSpec],
    tensors: Mapping[str, TensorMetadata],
    plans: Plans,
    rank: int,
    old: Plans,
    device_of: DeviceOf,
    *,
    where: str = "the state",
    cast: bool | None = None,
) -> EmptyState:
    """Make one rank's state, with tensors still to be filled; the inverse of ``flatten_state``.

    Arguments:
        spec: the tree.
        rank_specs: the trees of the ``PerRank`` values that this rank takes.
        tensors: metadata by name, with the tensors of the rank that those values come from.
        plans: the plans to cut the trees of shards by.
        rank: this rank.
        old: the plans that cut the stored state, with the keys of ``plans``. A local tensor comes
            from this rank's index modulo the sizes of its mesh axes.
        device_of: the device of each tensor.
        where: the words for the state in an error message.
        cast: whether shards get the dtypes of ``plan`` if they had those of ``old``. ``None`` is an
            error for them that doesn't propose it.

    Raises:
        ValueError: the plan is of another model, or it puts leaves into one buffer that disagree on
            a value which a buffer has once.
    """
    empty = EmptyState(None, [])
    nodes = []
    try:
        for (_, node, plan), (_, _, old_plan) in zip(
            by_entry(spec, plans), by_entry(spec, old), strict=True
        ):
            buffers = [buffer for unit in old_plan.unit_list for buffer in unit.buffers]
            dtypes = {leaf.path: buffer.dtype for buffer in buffers for leaf in buffer.leaves}
            axes = old_plan.mesh_axes
            unflattener = _Unflattener(
                rank_specs, tensors, plan, rank, axes, dtypes, device_of, where, cast, empty
            )
            nodes.append(unflattener.node(node))
    # A file whose PerRank values lie inside each other; flatten_state writes none.
    except RecursionError:
        raise ValueError(
            "the state has more PerRank values inside each other than save writes: restore another"
        ) from None
    return dataclasses.replace(
        empty, state=nodes[0] if isinstance(plans, Plan) else _container(spec, nodes)
    )


@dataclass(slots=True)
class _Unflattener:
    rank_specs: Sequence[TreeSpec]
    tensors: Mapping[str, TensorMetadata]
    plan: Plan
    rank: int
    old_mesh_axes: Mapping[str, int]
    old_dtypes: Mapping[str, str]
    device_of: DeviceOf
    where: str
    cast: bool | None
    empty: EmptyState

    def node(self, spec: TreeSpec) -> Any:
        if spec is None:
            return None
        node_kind = spec[0]
        if node_kind == "value":
            return spec[1]
        if node_kind == "tensor":
            return self._whole(spec[1])
        if node_kind == "rank":
            if spec[1] >= len(self.rank_specs):
                raise ValueError(
                    f"the state has {len(self.rank_specs)} PerRank values of this rank; found "
                    f"number {spec[1]}"
                )
            return PerRank(self.node(self.rank_specs[spec[1]]))
        if node_kind == "shards":
            return self._shards(spec[1], dict(spec[2]))
        return _container(spec, [self.node(child) for child in spec[3]])

    def _whole(self, name: str) -> torch.Tensor:
        metadata = self.tensors[name]
        out = torch.empty(
            metadata.shape, dtype=dtype_of(metadata.dtype), device=self.device_of(metadata, None)
        )
        self.empty.reads.append(ReadItem(name, 0, out.view(-1)))
        return out

    # --- trees of shards --------------------------------------------------------------------------

    def _shards(self, form: str, by_leaf: dict[str, TreeSpec]) -> Any:
        by_buffer = self._by_buffer(by_leaf)
        if form in ("list", "tuple"):
            pairs = [
                (u, b)
                for u in self.plan.unit_list
                for b in u.buffers
                if (u.name, b.key) in by_buffer
            ]
            order = buffers_in_tree_order(
                self.plan, trainable_only=all(buffer.trainable for _, buffer in pairs)
            )
            flat = [
                by_buffer[unit.name, buffer.key]
                for unit, buffer in order
                if (unit.name, buffer.key) in by_buffer
            ]
            return flat if form == "list" else tuple(flat)
        shards: dict[str, Any] = {}
        for unit in self.plan.unit_list:
            buffer_tensors = {
                b.key: by_buffer[unit.name, b.key]
                for b in unit.buffers
                if (unit.name, b.key) in by_buffer
            }
            if buffer_tensors or form == "every unit":
                named = [by_leaf.get(name_in(by_leaf, leaf) or "") for leaf in unit.leaves]
                shards[unit.name] = (
                    None
                    if buffer_tensors and all(node == NO_UNIT for node in named)
                    else buffer_tensors
                )
        return shards

    def _by_buffer(self, by_leaf: dict[str, TreeSpec]) -> dict[tuple[str, str], Any]:
        """Return the node of each buffer, by unit and key, of a tree of shards by leaf."""
        tensors_by_buffer: dict[tuple[str, str], Any] = {}
        used: set[str] = set()
        for unit in self.plan.unit_list:
            for buffer in unit.buffers:
                names = [name_in(by_leaf, leaf) for leaf in buffer.leaves]
                present = [name for name in names if name is not None]
                if not present:
                    continue
                if len(present) < len(names):
                    absent = buffer.leaves[names.index(None)].path
                    raise ValueError(
                        f"the plan puts leaves {present[0]!r} and {absent!r} into one buffer, and "
                        "a tree of shards in the state holds the first but not the second: the "
                        "state is of another model, or other leaves were trainable; make the plan "
                        "as it was made then"
                    )
                used.update(present)
                tensors_by_buffer[unit.name, buffer.key] = self._below(
                    [by_leaf[name] for name in present], unit, buffer
                )
        if unknown := sorted(by_leaf.keys() - used):
            raise ValueError(
                f"leaf {unknown[0]!r} of the state is not in the plan: the plan is of another model"
            )
        return tensors_by_buffer

    def _below(self, specs: Sequence[TreeSpec], unit: UnitPlan, buffer: BufferPlan) -> Any:
        """Return the node below one buffer from those below its leaves in the stored tree."""
        first, paths = specs[0], [leaf.path for leaf in buffer.leaves]
        for path, other_spec in zip(paths, specs, strict=True):
            if _form(other_spec) != _form(first):
                raise ValueError(
                    f"the plan puts leaves {paths[0]!r} and {path!r} into one buffer of unit "
                    f"{unit.title!r}, and the state holds values of different structure for them: "
                    "keep them in separate units"
                )
            if other_spec is not None and other_spec[0] == "value" and other_spec != first:
                raise _disagreement(unit.title, paths[0], path, first[1], other_spec[1])
        if first is None or first[0] in ("value", "rank"):
            return self.node(first)
        if first[0] == "tensor":
            return self._tensor([spec[1] for spec in specs], unit, buffer)
        return _container(
            first,
            [
                self._below([spec[3][i] for spec in specs], unit, buffer)
                for i in range(len(first[3]))
            ],
        )

    def _tensor(self, names: Sequence[str], unit: UnitPlan, buffer: BufferPlan) -> torch.Tensor:
        """Return the tensor below one buffer whose leaves' tensors are stored under ``names``."""
        stored = [self.tensors[name] for name in names]
        first = stored[0]
        for name, other_stored in zip(names, stored, strict=True):
            if (other_stored.dtype, _sort(other_stored)) != (first.dtype, _sort(first)):
                raise ValueError(
                    f"the plan puts {names[0]!r} and {name!r} into one buffer of unit "
                    f"{unit.title!r}, and they are stored as {first.kind} {first.dtype} and as "
                    f"{other_stored.kind} {other_stored.dtype}: keep them in separate units"
                )
        if first.kind in ("whole", "rank"):
            tensors = [self._whole(name) for name in names]
            self.empty.merged.append((unit.title, [leaf.path for leaf in buffer.leaves], tensors))
            return tensors[0]
        device = self.device_of(first, unit)
        shard = torch.empty(
            buffer.shard_numel, dtype=dtype_of(first.dtype), device=device,
            pin_memory=device.type == "cpu" and self.device_of(first, None).type == "cuda",
        )  # fmt: skip
        self._check_dtype(shard, names[0], buffer)
        for leaf, name, metadata in zip(buffer.leaves, names, stored, strict=True):
            self._read_leaf(shard, leaf, buffer, name, metadata)
        self._clear_padding(shard, buffer)
        return shard

    def _check_dtype(self, shard: torch.Tensor, name: str, buffer: BufferPlan) -> None:
        """Cast a shard if the old plan says its dtype and the new plan says another one.

        A shard that was saved in another dtype than its leaves' stays, such as a float32 average.
        """
        leaf, planned_dtype = buffer.leaves[0], dtype_of(buffer.dtype)
        known_name = name_in(self.old_dtypes, leaf)
        if (
            known_name is None
            or shard.dtype == planned_dtype
            or shard.dtype != dtype_of(self.old_dtypes[known_name])
        ):
            return
        if self.cast and can_cast(shard.dtype, planned_dtype):
            self.empty.casts.append((shard, planned_dtype))
            return
        remedy = "make the plan of parameters in the stored dtype" + (
            ", or pass cast=True" if self.cast is False else ""
        )
        raise ValueError(
            f"{self.where} holds {name!r} in {dtype_name(shard.dtype)}, and leaf {leaf.path!r} is "
            f"of {buffer.dtype} in the plan: {remedy}"
        )

    def _clear_padding(self, shard: torch.Tensor, buffer: BufferPlan) -> None:
        """Write zeros to the elements of a shard that belong to no leaf."""
        position = position_of(self.rank, self.plan.mesh_axes)
        parts = [
            part for leaf in buffer.leaves if (part := buffer.part(leaf, position["shard"])).numel
        ]
        end = 0
        for begin, stop in sorted((part.in_shard.start, part.in_shard.stop) for part in parts):
            if begin > end:
                byte_view(shard[end:begin]).zero_()
            end = max(end, stop)
        byte_view(shard[end:]).zero_()

    def _read_leaf(
        self,
        shard: torch.Tensor,
        leaf: LeafSpec,
        buffer: BufferPlan,
        name: str,
        metadata: TensorMetadata,
    ) -> None:
        if metadata.own_axes != own_axes(buffer.local, leaf.cuts):
            raise ValueError(
                f"{name!r} is local to ranks under only one of the two plans; make the new plan "
                "with the same local. A leaf that ranks hold in slices must say which dimension "
                f"they cut, as in local={{{leaf.path!r}: {{'tensor': 0}}}}"
            )
        if metadata.whole_shape != leaf.whole_shape:
            whole_text = " as a whole" if leaf.cuts or metadata.cuts else ""
            raise ValueError(
                f"leaf {leaf.path!r} has shape {leaf.whole_shape}{whole_text} in the plan; found "
                f"{metadata.whole_shape} stored as {name!r}: the plan is of another model, or cuts "
                "another dimension"
            )
        position = position_of(self.rank, self.plan.mesh_axes)
        part = buffer.part(leaf, position["shard"])
        if not part.numel:
            return
        source = self._source(metadata.own_axes)
        if (metadata.shape, metadata.cuts, metadata.kind) == (
            leaf.shape,
            leaf.cuts,
            kind_of(buffer),
        ):
            source |= {cut.axis: position[cut.axis] for cut in leaf.cuts}
            stored = stored_name(name, metadata.kind, source, self.old_mesh_axes)
            self.empty.reads.append(ReadItem(stored, part.begin, shard[part.in_shard]))
        else:
            self._read_slices(
                shard[part.in_shard], part.begin, leaf, position, name, metadata, source
            )

    def _read_slices(
        self,
        own: torch.Tensor,
        begin: int,
        leaf: LeafSpec,
        position: Mapping[str, int],
        name: str,
        metadata: TensorMetadata,
        source: dict[str, int],
    ) -> None:
        """Read this rank's part of a leaf, which begins at ``begin``, from slices of other cuts."""
        origin = slice_offsets(leaf.shape, leaf.cuts, position)
        targets = []
        for box in boxes(leaf.shape, begin, begin + own.numel()):
            targets.append((box.moved(origin), own[: box.numel].view(box.sizes)))
            own = own[box.numel :]
        ways = {cut.axis: cut.ranks for cut in metadata.cuts}
        for way_index in range(math.prod(ways.values())):
            old = source | position_of(way_index, ways)
            held = Box(slice_offsets(metadata.shape, metadata.cuts, old), metadata.shape)
            stored = stored_name(name, metadata.kind, old, self.old_mesh_axes)
            for box, out in targets:
                if shared := box.overlap(held):
                    shared_box = shared.moved([-n for n in box.offsets])
                    there = shared.moved([-n for n in held.offsets])
                    self.empty.reads.append(
                        ReadBox(stored, metadata.shape, there, out[shared_box.slices])
                    )

    def _source(self, axes: Sequence[str]) -> dict[str, int]:
        """Return the old position, along its own axes, that a local tensor comes from.

        A tensor that is local along several axes comes from the number of this rank along these
        axes, modulo the number of ranks along them that there were. For one axis this is the index
        along it, modulo its old size.
        """
        position, mesh_axes = position_of(self.rank, self.plan.mesh_axes), self.plan.mesh_axes
        old_axes = {axis: self.old_mesh_axes.get(axis, 1) for axis in axes}
        source_rank = rank_at(
            {axis: position.get(axis, 0) for axis in axes},
            {axis: mesh_axes.get(axis, 1) for axis in axes},
        )
        return position_of(source_rank % math.prod(old_axes.values()), old_axes)


def _sort(metadata: TensorMetadata) -> str:
    """Return ``"whole"``, ``"rank"``, or ``"flat"`` for the leaves of shards."""
    return metadata.kind if metadata.kind in ("whole", "rank") else "flat"


def _container(spec: TreeSpec, children: list[Any]) -> Any:
    node_kind, fields, meta, _ = spec
    if node_kind not in _CONTAINERS:
        raise ValueError(
            f"the state contains a container of unknown kind {node_kind!r}: a newer version of "
            "funcshard stored it, or it is damaged"
        )
    if node_kind == "namedtuple":
        cls: Any = find_class(meta)
        if not issubclass(cls, tuple) or not hasattr(cls, "_fields"):
            raise ValueError(
                f"the state contains a namedtuple {meta!r}; found another kind of class there: "
                "define it again"
            )
        if unknown := set(fields) - set(cls._fields):
            raise ValueError(
                f"the stored {meta} has the field {sorted(unknown)[0]!r}; found the fields "
                f"{cls._fields} in the class: add the field to the class again"
            )
        try:
            return cls(**dict(zip(fields, children, strict=True)))
        # Errors of any kind: it is the code of the class, which may have other fields now.
        except Exception as error:
            raise ValueError(
                f"the stored {meta} cannot be made of the fields {fields}: {error}"
            ) from error
    meta = tree.freeze(meta)
    if node_kind == "custom":
        find_class(meta[0])
    return tree.build((node_kind, meta, tuple(range(len(children)))), children)


def _form(spec: TreeSpec) -> Any:
    """Return the structure of a node, without the values and names at its leaves."""
    if spec is None or spec[0] in ("value", "tensor", "rank"):
        return spec and spec[0]
    return (spec[0], repr(spec[2]), len(spec[3]))


def _shown(tensor: torch.Tensor, at: int) -> str:
    """Return one element as text."""
    element = tensor.view(-1)[at : at + 1]
    return (
        str(element.item())
        if has_numbers(tensor.dtype)
        else f"the bytes {bytes(byte_view(element).tolist()).hex()}"
    )


def _disagreement(where: str, one: str, other: str, here: Any, there: Any) -> ValueError:
    return ValueError(
        f"the plan puts leaves {one!r} and {other!r} into one buffer of unit {where!r}, and a "
        f"value that the state keeps once per buffer is {here} for the first and {there} for the "
        "second: keep them in separate units"
    )
