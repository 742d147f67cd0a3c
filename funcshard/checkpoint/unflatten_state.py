"""Make one rank's state of its tree and named tensors, under the plan that cut it or another one.

The caller has the elements of tensors: ``replan`` in memory, ``restore`` in files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.tensors import byte_view
from funcshard.checkpoint.flatten_state import flatten_state
from funcshard.checkpoint.resharding import (
    ByAxis,
    Read,
    Run,
    Source,
    as_leaf,
    leaf_sources,
    old_position,
    read_run,
    run_in_shard,
    turn_of,
)
from funcshard.checkpoint.stored_state import (
    NO_UNIT,
    PerRank,
    Plans,
    Stored,
    TreeSpec,
    by_entry,
    check_replicated,
    find_class,
    name_in,
    replicated_summary,
)
from funcshard.core import can_cast
from funcshard.plan import (
    BufferPlan,
    LeafSpec,
    Plan,
    UnitPlan,
    dtype_name,
    dtype_of,
    has_numbers,
    own_axes,
    position_of,
)


@dataclass(frozen=True, slots=True)
class Saved:
    """A flattened state, as one rank finds it.

    Attributes:
        spec: the tree.
        rank_specs: the trees of this rank's ``PerRank`` values.
        stored: the facts about each tensor by name.
        plans: the plans that cut it.
        read: fills a tensor with stored elements.
        title: what errors call it.
    """

    spec: TreeSpec
    rank_specs: Sequence[TreeSpec]
    stored: Mapping[str, Stored]
    plans: Plans
    read: Read
    title: str = "the state"


def unflatten_state(
    saved: Saved, plans: Plans, rank: int, device: torch.device, *, cast: bool | None = None
) -> Any:
    """Make one rank's state; the inverse of ``flatten_state``.

    Arguments:
        saved: the flattened state.
        plans: the plans to cut the trees of shards by, with the keys of ``saved.plans``.
        rank: this rank.
        device: the device of the mesh.
        cast: as in ``restore``; ``None`` is an error that doesn't propose it.

    Raises:
        ValueError: the plan is of another model, or joins leaves that disagree on a value of their
            buffer.
    """
    new_entries, old_entries = by_entry(saved.spec, plans), by_entry(saved.spec, saved.plans)
    try:
        unflattened = [
            _Unflattener(saved, plan, old_plan, rank, device, cast).node(node)
            for (_, node, plan), (_, _, old_plan) in zip(new_entries, old_entries, strict=True)
        ]
    # A file whose PerRank values lie inside each other; flatten_state writes none.
    except RecursionError:
        raise ValueError(
            "the state has more PerRank values inside each other than save writes: restore another"
        ) from None
    return unflattened[0] if isinstance(plans, Plan) else _container(saved.spec, unflattened)


class _Home(NamedTuple):
    """Leaves of a buffer that one old buffer holds.

    Attributes:
        unit: the unit of the old buffer.
        buffer: the old buffer.
        leaves: pairs of new and old leaf.
    """

    unit: UnitPlan
    buffer: BufferPlan
    leaves: list[tuple[LeafSpec, LeafSpec]]

    @property
    def key(self) -> tuple[str, str]:
        return self.unit.name, self.buffer.key

    @property
    def path(self) -> str:
        """The path of the first leaf, for errors."""
        return self.leaves[0][0].path


class _Move(NamedTuple):
    """A run of this rank's shard, and where its elements are in old shards.

    Attributes:
        path: the leaf's path, for errors.
        in_shard: the place of the run in the shard.
        target: the run.
        sources: the runs that hold its elements.
    """

    path: str
    in_shard: slice
    target: Run
    sources: list[Source]


@dataclass(slots=True)
class _Unflattener:
    saved: Saved
    plan: Plan
    old_plan: Plan
    rank: int
    device: torch.device
    cast: bool | None
    axes: ByAxis = field(init=False)
    old_axes: ByAxis = field(init=False)
    position: ByAxis = field(init=False)
    old_buffers: dict[tuple[str, str], tuple[UnitPlan, BufferPlan]] = field(init=False)
    old_leaves: dict[str, tuple[UnitPlan, BufferPlan, LeafSpec]] = field(init=False)
    unplanned: dict[tuple[str, str], str] = field(init=False)
    homes: dict[tuple[str, str], list[_Home]] = field(default_factory=dict)
    moves: dict[tuple[int, ...], list[_Move]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes, self.old_axes = self.plan.mesh_axes, self.old_plan.mesh_axes
        self.position = position_of(self.rank, self.axes)
        self.old_buffers = {
            (unit.name, buffer.key): (unit, buffer)
            for unit in self.old_plan.unit_list
            for buffer in unit.buffers
        }
        by_name = {
            name: (unit, buffer, old_leaf)
            for unit, buffer in self.old_buffers.values()
            for old_leaf in buffer.leaves
            for name in (old_leaf.path, *old_leaf.aliases)
        }
        # Note: a tied parameter may have been stored under any of its names.
        old_names = {leaf.path: name_in(by_name, leaf) for leaf in self.plan.leaves}
        self.old_leaves = {path: by_name[name] for path, name in old_names.items() if name}
        # Note: state of a leaf that the new plan lacks would be lost without a word.
        planned_paths = {old_leaf.path for _, _, old_leaf in self.old_leaves.values()}
        self.unplanned = {
            (unit.name, buffer.key): old_leaf.path
            for unit, buffer, old_leaf in by_name.values()
            if old_leaf.path not in planned_paths
        }

    def node(self, spec: TreeSpec) -> Any:
        if spec is None:
            return None
        node_kind = spec[0]
        if node_kind == "value":
            return spec[1]
        if node_kind == "tensor":
            return self._whole(spec[1])
        if node_kind == "rank":
            if spec[1] >= len(self.saved.rank_specs):
                raise ValueError(
                    f"the state has {len(self.saved.rank_specs)} PerRank values of this rank; "
                    f"found number {spec[1]}"
                )
            # Note: the value is this rank's own, and its tensors lie in the file of one old rank.
            return PerRank(self.node(self.saved.rank_specs[spec[1]]))
        if node_kind == "shards":
            return self._shards(spec[1], {(unit, key): node for unit, key, node in spec[2]})
        return _container(spec, [self.node(child) for child in spec[3]])

    def _whole(self, name: str) -> torch.Tensor:
        stored = self.saved.stored[name]
        device = self._device_of(stored)
        whole_tensor = torch.empty(stored.shape, dtype=dtype_of(stored.dtype), device=device)
        # Note: rank 0 has stored what is the same on every rank.
        source_rank = self.rank % self.old_plan.world_size if stored.kind == "rank" else 0
        self.saved.read(whole_tensor.view(-1), source_rank, name, 0)
        return whole_tensor

    def _device_of(self, stored: Stored) -> torch.device:
        return self.device if stored.on_mesh else torch.device("cpu")

    # --- trees of shards --------------------------------------------------------------------------

    def _shards(self, form: str, nodes: Mapping[tuple[str, str], TreeSpec]) -> Any:
        """Return a tree of shards from the nodes of the old buffers."""
        shards: dict[str, Any] = {}
        for unit in self.plan.unit_list:
            unit_shards, unit_specs = {}, []
            for buffer in unit.buffers:
                homes = self._homes(unit, buffer)
                # Why not every buffer: gradients and optimizer states lack the frozen ones.
                absent_paths = [home.path for home in homes if home.key not in nodes]
                if len(absent_paths) == len(homes):
                    continue
                if absent_paths:
                    stored_path = next(home.path for home in homes if home.key in nodes)
                    raise ValueError(
                        f"the plan puts leaves {stored_path!r} and {absent_paths[0]!r} into one "
                        "buffer, and a tree of shards in the state holds the first but not the "
                        "second: the state is of another model, or other leaves were trainable; "
                        "make the plan as it was made then"
                    )
                old_specs = [nodes[home.key] for home in homes]
                unit_shards[buffer.key] = self._below(old_specs, homes, unit, buffer)
                unit_specs += old_specs
            # Note: gradients have None for a unit without trainable leaves, and keep it.
            if unit_specs and all(spec == NO_UNIT for spec in unit_specs):
                shards[unit.name] = None
            elif unit_specs or form == "every unit":
                shards[unit.name] = unit_shards
        if lost_keys := sorted(nodes.keys() & self.unplanned.keys()):
            raise ValueError(
                f"leaf {self.unplanned[lost_keys[0]]!r} of the state is not in the plan: the plan "
                "is of another model"
            )
        if form not in ("list", "tuple"):
            return shards
        shard_list = [
            unit_shards[key]
            for _, unit_shards in sorted(shards.items())
            for key in sorted(unit_shards or ())
        ]
        return shard_list if form == "list" else tuple(shard_list)

    def _homes(self, unit: UnitPlan, buffer: BufferPlan) -> list[_Home]:
        """Return the old buffers that hold the leaves of a buffer."""
        buffer_key = (unit.name, buffer.key)
        if buffer_key in self.homes:
            return self.homes[buffer_key]
        # Note: in most restores the plan is the same, or only the number of ranks differs.
        old_unit, old_buffer = self.old_buffers.get(buffer_key, (unit, None))
        if old_buffer is not None and self._is_same(buffer, old_buffer):
            # Note: one run in place of one for each leaf.
            flat_leaf = as_leaf(buffer)
            self.homes[buffer_key] = [_Home(old_unit, old_buffer, [(flat_leaf, flat_leaf)])]
            return self.homes[buffer_key]
        # Note: the leaves of one new buffer may come from several old ones.
        by_buffer: dict[tuple[str, str], _Home] = {}
        for leaf in buffer.leaves:
            if leaf.path not in self.old_leaves:
                raise ValueError(
                    f"leaf {leaf.path!r} of the plan is not in {self.saved.title}: the plan is of "
                    "another model"
                )
            old_unit, old_buffer, old_leaf = self.old_leaves[leaf.path]
            if _packed_as(buffer) != _packed_as(old_buffer):
                raise ValueError(
                    f"leaf {leaf.path!r} is stored {_packed_as(old_buffer)} in {self.saved.title}, "
                    f"and {_packed_as(buffer)} in the plan; found that it would have to be encoded "
                    "again: make the plan with the same storage, or take to_state_dict and "
                    "from_state_dict, which decode and encode"
                )
            home = _Home(old_unit, old_buffer, [])
            by_buffer.setdefault(home.key, home).leaves.append((leaf, old_leaf))
        self.homes[buffer_key] = list(by_buffer.values())
        return self.homes[buffer_key]

    def _is_same(self, buffer: BufferPlan, old: BufferPlan) -> bool:
        """Return whether two flat buffers have the same elements, maybe in other shards."""
        # Note: a local buffer has other elements on each rank, so the number of these ranks counts.
        same_axes = all(self.axes[axis] == self.old_axes.get(axis, 1) for axis in buffer.local)
        same_values = _packed_as(old) == _packed_as(buffer) and same_axes
        return (old.leaves, old.local, same_values) == (buffer.leaves, buffer.local, True)

    def _below(
        self, specs: Sequence[TreeSpec], homes: list[_Home], unit: UnitPlan, buffer: BufferPlan
    ) -> Any:
        """Return the node below one buffer from those below its leaves' old buffers."""
        first_spec, first_path = specs[0], homes[0].path
        for home, other_spec in zip(homes[1:], specs[1:], strict=True):
            if _form(other_spec) != _form(first_spec):
                raise ValueError(
                    f"the plan puts leaves {first_path!r} and {home.path!r} into one buffer of unit "
                    f"{unit.title!r}, and the state holds values of different structure for them: "
                    "keep them in separate units"
                )
            if other_spec is not None and other_spec[0] == "value" and other_spec != first_spec:
                raise _disagreement(unit.title, first_path, home.path, first_spec[1], other_spec[1])
        # Note: all agree on it, so the first stands for them.
        if first_spec is None or first_spec[0] in ("value", "rank"):
            return self.node(first_spec)
        if first_spec[0] == "tensor":
            return self._tensor([spec[1] for spec in specs], homes, unit, buffer)
        children = [
            self._below([spec[3][i] for spec in specs], homes, unit, buffer)
            for i in range(len(first_spec[3]))
        ]
        return _container(first_spec, children)

    def _tensor(
        self, names: Sequence[str], homes: list[_Home], unit: UnitPlan, buffer: BufferPlan
    ) -> torch.Tensor:
        """Return the tensor below one buffer from those below its leaves' old buffers."""
        first_stored = self.saved.stored[names[0]]
        # Note: merged leaves must agree on how they are kept, and not only on their values.
        for name in names[1:]:
            other = self.saved.stored[name]
            if (other.dtype, other.kind) != (first_stored.dtype, first_stored.kind):
                raise ValueError(
                    f"the plan puts {names[0]!r} and {name!r} into one buffer of unit "
                    f"{unit.title!r}, and they are stored as {first_stored.kind} {first_stored.dtype} and as "
                    f"{other.kind} {other.dtype}: keep them in separate units"
                )
        # Note: such as a count of steps, which each old buffer has once; merged ones must agree.
        if first_stored.kind != "shard":
            whole_values = [self._whole(name) for name in names]
            for home, other_value in zip(homes[1:], whole_values[1:], strict=True):
                _check_equal(unit, homes[0].path, home.path, whole_values[0], other_value)
            return whole_values[0]
        mesh_device = self._device_of(first_stored)
        # Note: memory of offloaded shards is pinned, as shard makes it.
        pinned = unit.offload and mesh_device.type == "cuda"
        shard = torch.empty(
            buffer.shard_numel,
            dtype=dtype_of(first_stored.dtype),
            device="cpu" if unit.offload else mesh_device,
            pin_memory=pinned,
        )
        dtype = self._dtype_of(shard, homes[0], buffer)
        self._fill(shard, names, homes, buffer)
        if (filled := buffer.filled(self.position["shard"])) < shard.numel():
            # Why bytes: torch cannot fill tensors of some dtypes.
            byte_view(shard[filled:]).zero_()
        return shard.to(dtype)

    def _dtype_of(self, shard: torch.Tensor, home: _Home, buffer: BufferPlan) -> torch.dtype:
        """Return the dtype of a shard: another one if the two plans differ in it."""
        planned_dtype = dtype_of(buffer.dtype)
        # Note: an average in float32 beside bfloat16 parameters is no parameter, and stays.
        if shard.dtype == planned_dtype or shard.dtype != dtype_of(home.buffer.dtype):
            return shard.dtype
        if self.cast and can_cast(shard.dtype, planned_dtype):
            return planned_dtype
        remedy = "make the plan of parameters in the stored dtype" + (
            ", or pass cast=True" if self.cast is False else ""
        )
        raise ValueError(
            f"{self.saved.title} holds leaf {buffer.leaves[0].path!r} in {dtype_name(shard.dtype)}, "
            f"and it is of {buffer.dtype} in the plan: {remedy}"
        )

    def _fill(
        self, shard: torch.Tensor, names: Sequence[str], homes: list[_Home], buffer: BufferPlan
    ) -> None:
        """Read the elements of all leaves in this rank's shard of a buffer."""
        for name, home in zip(names, homes, strict=True):
            turn = turn_of(self.saved.stored[name].turn, home.buffer, self.old_axes)
            # Note: all trees of a state have the same homes, whose ids stay unique because
            # ``homes`` keeps them. A turn picks one of the copies.
            move_key = (id(home), *turn.values())
            # Note: an optimizer's trees have the runs of the parameters.
            if move_key not in self.moves:
                self.moves[move_key] = list(self._moves(name, turn, home, buffer))
            for move in self.moves[move_key]:
                shard_part = shard[move.in_shard]
                copied_numel = read_run(
                    shard_part, move.target, move.sources, name, self.saved.read
                )
                if copied_numel != shard_part.numel():
                    raise ValueError(
                        f"{self.saved.title} holds {copied_numel} of {shard_part.numel()} needed elements "
                        f"of {move.path!r}"
                    )

    def _moves(self, name: str, turn: ByAxis, home: _Home, buffer: BufferPlan) -> Iterator[_Move]:
        for leaf, old_leaf in home.leaves:
            _check_same_leaf(name, leaf, buffer, old_leaf, home.buffer)
            in_shard, target = run_in_shard(buffer, leaf, self.position)
            # Note: a leaf that lies in other ranks' shards alone needs no reads here.
            if target.numel:
                local_axes = own_axes(buffer.local, leaf.cuts)
                start_position = {
                    **dict.fromkeys(self.old_axes, 0),
                    **turn,
                    **old_position(local_axes, self.position, self.axes, self.old_axes),
                }
                leaf_runs = leaf_sources(
                    home.buffer, old_leaf, self.old_axes, start_position, target
                )
                yield _Move(leaf.path, in_shard, target, list(leaf_runs))


def _packed_as(buffer: BufferPlan) -> str:
    if buffer.packing is None:
        return "as it is"
    name, block, dtype, parts = buffer.packing.form
    record_text = " and ".join(f"{part.dtype} {part.shape}" for part in parts)
    return f"by {name!r}, which makes {record_text} of {block} elements of {dtype},"


def _check_same_leaf(
    name: str, leaf: LeafSpec, buffer: BufferPlan, old_leaf: LeafSpec, old: BufferPlan
) -> None:
    if own_axes(old.local, old_leaf.cuts) != own_axes(buffer.local, leaf.cuts):
        raise ValueError(
            f"{leaf.path!r} is local to ranks under only one of the two plans; make the new plan "
            "with the same local. A leaf that ranks hold in slices must say which dimension "
            f"they cut, as in local={{{leaf.path!r}: {{'tensor': 0}}}}"
        )
    if old_leaf.whole_shape != leaf.whole_shape:
        whole_text = " as a whole" if leaf.cuts or old_leaf.cuts else ""
        raise ValueError(
            f"leaf {leaf.path!r} has shape {leaf.whole_shape}{whole_text} in the plan; found "
            f"{old_leaf.whole_shape} stored in {name!r}: the plan is of another model, or cuts "
            "another dimension"
        )


def _container(spec: TreeSpec, children: list[Any]) -> Any:
    # Note: only classes that are loaded are found, so no code of the checkpoint runs.
    node_kind, fields, meta, _ = spec
    if node_kind == "namedtuple":
        cls: Any = find_class(meta)
        if not issubclass(cls, tuple) or not hasattr(cls, "_fields"):
            raise ValueError(
                f"the state contains a namedtuple {meta!r}; found another kind of class there: "
                "define it again"
            )
        # Note: a class may have got fields with defaults, but may not have lost any.
        if unknown_fields := set(fields) - set(cls._fields):
            raise ValueError(
                f"the stored {meta} has the field {sorted(unknown_fields)[0]!r}; found the fields "
                f"{cls._fields} in the class: add the field to the class again"
            )
        try:
            return cls(**dict(zip(fields, children, strict=True)))
        # Errors of any kind: it is the code of the class, which may have other fields now.
        except Exception as error:
            raise ValueError(
                f"the stored {meta} cannot be made of the fields {fields}: {error}"
            ) from error
    # Note: JSON has made lists of tuples.
    meta = tree.freeze(meta)
    if node_kind == "custom":
        find_class(meta[0])
    return tree.build((node_kind, meta, tuple(range(len(children)))), children)


def _form(spec: TreeSpec) -> Any:
    """Return a node's structure, without values and names."""
    if spec is None or spec[0] in ("value", "tensor", "rank"):
        return spec and spec[0]
    return (spec[0], repr(spec[2]), len(spec[3]))


def _check_equal(
    unit: UnitPlan, path: str, other_path: str, value: torch.Tensor, other: torch.Tensor
) -> None:
    """Raise ``ValueError`` if two leaves disagree on a value of their buffer, as a ``step``."""
    if value.shape != other.shape:
        value_texts = f"of shape {tuple(value.shape)}", f"of {tuple(other.shape)}"
    # Why bytes: NaN is equal to no number, and torch compares no tensors of bits8.
    elif not torch.equal(byte_view(value), byte_view(other)):
        differing_bytes = (byte_view(value) != byte_view(other)).nonzero()
        element_index = int(differing_bytes[0]) // value.element_size()
        value_texts = _shown(value, element_index), _shown(other, element_index)
    else:
        return
    raise _disagreement(unit.title, path, other_path, *value_texts)


def _shown(tensor: torch.Tensor, at: int) -> str:
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


# --- in memory -----------------------------------------------------------------------------------


def replan(states: Sequence[Any], old: Plan, new: Plan) -> list[Any]:
    """Cut the states of all ranks again, from one plan to another.

    It's a pure function, and gives you the states that ``save`` and ``restore`` give. Every tree
    that looks like shards is cut again; values that all ranks share stay.

    New rank ``r`` takes ``PerRank`` values and local leaves of old rank ``r`` modulo the old number
    of ranks.

    Arguments:
        states: each rank's state, any pytree, in order of ranks.
        old: the plan that the states are cut by.
        new: the plan to cut them by, of the same leaves.

    Returns:
        Each new rank's state, in order of ranks, with new memory.

    Raises:
        TypeError: a leaf can't be stored, ``states`` is no list, or a plan no plan.
        ValueError: the number of states isn't the old number of ranks, a plan is of another model,
            or ranks differ in a value.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.arange(4.0)}
        >>> old, new = fs.make_plan(params, 2), fs.make_plan(params, 3)
        >>> states = fs.simulate(
        ...     lambda mesh: {"ema": fs.shard(params, old, mesh), "step": 7}, world_size=2
        ... )
        >>> fs.replan(states, old, new)[1]
        {'ema': {'': {'float32': tensor([2., 3.])}}, 'step': 7}
    """
    for name, plan in (("old", old), ("new", new)):
        if not isinstance(plan, Plan):
            raise TypeError(
                f"{name} must be a plan; found {type(plan).__name__}: pass what make_plan returned"
            )
    if isinstance(states, str | Mapping) or not isinstance(states, Sequence):
        raise TypeError(
            f"states must be a list of the states of all ranks; found {type(states).__name__}: put "
            "them into a list, in order of ranks"
        )
    if len(states) != old.world_size:
        raise ValueError(
            f"there must be one state per rank of the old plan, {old.world_size}; found "
            f"{len(states)}"
        )
    device = _device_of(states)
    flat_states = [
        flatten_state(state, old, rank, device.type) for rank, state in enumerate(states)
    ]
    # Note: as ranks do before they save, so replan is an exact model of save and restore.
    check_replicated([replicated_summary(rank_flat) for rank_flat in flat_states])

    def read(out: torch.Tensor, rank: int, name: str, begin: int) -> None:
        out.copy_(flat_states[rank].tensors[name][begin : begin + out.numel()])

    def replanned(rank: int) -> Any:
        own_state = flat_states[rank % old.world_size]
        saved = Saved(
            flat_states[0].spec,
            own_state.rank_specs,
            flat_states[0].shared | own_state.stored,
            old,
            read,
        )
        return unflatten_state(saved, new, rank, device)

    return [replanned(rank) for rank in range(new.world_size)]


def _device_of(states: Sequence[Any]) -> torch.device:
    """Return the first device of tensors but the CPU, or the CPU."""
    state_tensors = (
        leaf for state in states for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)
    )
    return next(
        (tensor.device for tensor in state_tensors if tensor.device.type != "cpu"),
        torch.device("cpu"),
    )
