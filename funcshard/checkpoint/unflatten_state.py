"""Make one rank's state of its tree and named tensors, under the plan that cut it or another one.

The caller has the elements of tensors: ``replan`` in memory, ``restore`` in files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.options import outline
from funcshard._utils.tensors import byte_view
from funcshard._utils.tree import loaded_class
from funcshard.checkpoint.flatten_state import flatten_state
from funcshard.checkpoint.resharding import (
    Read,
    Run,
    Source,
    as_leaf,
    leaf_sources,
    read_run,
    run_in_shard,
    turn_of,
)
from funcshard.checkpoint.stored_state import (
    HOW_TO_AGREE,
    NO_UNIT,
    LeafPlace,
    PerRank,
    Plans,
    Stored,
    TreeSpec,
    buffers_in_tree_order,
    by_entry,
    each_leaf,
    leaves_by_name,
    name_in,
)
from funcshard.comm import around_difference, first_difference
from funcshard.core import can_cast
from funcshard.plan import (
    BufferPlan,
    LeafSpec,
    Plan,
    UnitPlan,
    check_plan,
    dtype_name,
    dtype_of,
    has_numbers,
    position_of,
    rank_at,
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
    rank_specs: Any
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
    new_entries, old_entries = (
        by_entry(saved.spec, plans),
        by_entry(saved.spec, saved.plans),
    )
    unflattened = [
        _Unflattener(saved, plan, old_plan, rank, device, cast).node([node])
        for (_, node, plan), (_, _, old_plan) in zip(new_entries, old_entries, strict=True)
    ]
    return (
        unflattened[0] if isinstance(plans, Plan) else _container(saved.spec, unflattened)
    )


class _Move(NamedTuple):
    """A run of this rank's shard, and where its elements are in old shards.

    Attributes:
        in_shard: the place of the run in the shard.
        target: the run.
        sources: the runs that hold its elements.
    """

    in_shard: slice
    target: Run
    sources: list[Source]


class _Home(NamedTuple):
    """An old buffer that holds leaves of a new one.

    Attributes:
        key: its unit's name, and its key.
        buffer: the old buffer.
        path: the path of the first of these leaves.
        moves: where this rank finds its elements of them.
    """

    key: tuple[str, str]
    buffer: BufferPlan
    path: str
    moves: list[_Move]


class _Place(NamedTuple):
    """A buffer of the new plan, and the old buffers that hold its leaves."""

    unit: UnitPlan
    buffer: BufferPlan
    homes: list[_Home]


@dataclass(eq=False)
class _Unflattener:
    """A walk over one flattened state, which makes it under another plan."""

    saved: Saved
    plan: Plan
    old_plan: Plan
    rank: int
    device: torch.device
    cast: bool | None

    def __post_init__(self) -> None:
        self.axes, self.old_axes = self.plan.mesh_axes, self.old_plan.mesh_axes
        self.position = position_of(self.rank, self.axes)
        self.places: dict[tuple[str, str], _Place] = {}
        self.old_leaves, new_names = (
            leaves_by_name(self.old_plan),
            leaves_by_name(self.plan).keys(),
        )
        # Note: state of a leaf that the new plan lacks would be lost without a word. A tied
        # parameter may have been stored under any of its names.
        self.unplanned = {
            (unit.name, buffer.key): old_leaf.path
            for unit, buffer, old_leaf in each_leaf(self.old_plan)
            if name_in(new_names, old_leaf) is None
        }

    def node(self, specs: Sequence[TreeSpec], place: _Place | None = None) -> Any:
        """Return a node of the state.

        Arguments:
            specs: the node; below a buffer, that of each of the old buffers, all of one form.
            place: the buffer.
        """
        spec = specs[0]
        if spec is None:
            return None
        if spec[0] == "value":
            return spec[1]
        if spec[0] == "tensor":
            if place is None:
                return self._whole(spec[1])
            return self._tensor([name for _, name in specs], place)
        if spec[0] == "rank":
            # Note: the value is this rank's own, and its tensors lie in the file of one old rank.
            return PerRank(self.node([self.saved.rank_specs[spec[1]]]))
        if spec[0] == "shards":
            return self._shards(spec[1], {(unit, key): node for unit, key, node in spec[2]})
        children = zip(*[other_spec[3] for other_spec in specs], strict=True)
        return _container(spec, [self.node(child_specs, place) for child_specs in children])

    def _whole(self, name: str) -> torch.Tensor:
        stored = self.saved.stored[name]
        device = self.device if stored.on_mesh else "cpu"
        whole_tensor = torch.empty(
            stored.shape, dtype=dtype_of(stored.dtype), device=device
        )
        # Note: rank 0 has stored what is the same on every rank.
        source_rank = self.rank % self.old_plan.world_size if stored.kind == "rank" else 0
        self.saved.read(whole_tensor.view(-1), source_rank, name, 0)
        return whole_tensor

    # --- trees of shards --------------------------------------------------------------------------

    def _shards(self, form: str, nodes: Mapping[tuple[str, str], TreeSpec]) -> Any:
        """Return a tree of shards from the nodes of the old buffers."""
        shards: dict[str, Any] = {}
        for unit in self.plan.unit_list:
            unit_shards, unit_specs = {}, []
            for buffer in unit.buffers:
                place = self._place(unit, buffer)
                # Why not every buffer: gradients and optimizer states lack the frozen ones.
                old_specs = [nodes[home.key] for home in place.homes if home.key in nodes]
                if not old_specs:
                    continue
                if len(old_specs) < len(place.homes):
                    paths = {home.key in nodes: home.path for home in place.homes}
                    raise ValueError(
                        f"the plan puts leaves {paths[True]!r} and {paths[False]!r} into one "
                        "buffer, and a tree of shards in the state holds the first but not the "
                        "second: the state is of another model, or other leaves were trainable; "
                        "make the plan as it was made then"
                    )
                forms = [self._form(spec) for spec in old_specs]
                for home, other_form in zip(place.homes, forms, strict=True):
                    # Why repr: NaN is equal to itself there, and 1 is not True.
                    if repr(other_form) != repr(forms[0]):
                        raise _disagreement(place, home, repr(forms[0]), repr(other_form))
                unit_shards[buffer.key] = self.node(old_specs, place)
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
            shards[unit.name][buffer.key]
            for unit, buffer in buffers_in_tree_order(self.plan, trainable_only=False)
            if buffer.key in (shards.get(unit.name) or ())
        ]
        return shard_list if form == "list" else tuple(shard_list)

    def _form(self, spec: TreeSpec) -> Any:
        """Return what the leaves of one buffer must have in common: all but tensors' values."""
        if spec is None or spec[0] == "value":
            return spec
        if spec[0] == "tensor":
            stored = self.saved.stored[spec[1]]
            return stored.kind, stored.dtype
        return spec[0], spec[2], [self._form(child) for child in spec[3]]

    def _place(self, unit: UnitPlan, buffer: BufferPlan) -> _Place:
        """Return a buffer with the old buffers that hold its leaves."""
        buffer_key = (unit.name, buffer.key)
        if buffer_key in self.places:
            return self.places[buffer_key]
        old_unit, old_buffer, _ = self._old(buffer.leaves[0])
        if self._is_same(buffer, old_buffer):
            # Note: in most restores the plan is the same, or only the number of ranks differs. Then
            # one run replaces one for each leaf.
            leaf_pairs = [(as_leaf(buffer), (old_unit, old_buffer, as_leaf(buffer)))]
        else:
            leaf_pairs = [(leaf, self._old(leaf)) for leaf in buffer.leaves]
        # Note: the leaves of one new buffer may come from several old ones.
        homes: dict[tuple[str, str], _Home] = {}
        for leaf, (old_unit, old_buffer, old_leaf) in leaf_pairs:
            facts, old_facts = _facts(leaf, buffer), _facts(old_leaf, old_buffer)
            if facts != old_facts:
                raise ValueError(
                    f"leaf {leaf.path!r} has {old_facts} in {self.saved.title}, and {facts} in the "
                    "plan: pass the same model and local=, as in "
                    f"local={{{leaf.path!r}: {{'tensor': 0}}}}. If storage= differs, to_state_dict "
                    "and from_state_dict encode it again"
                )
            old_key = (old_unit.name, old_buffer.key)
            home = homes.setdefault(old_key, _Home(old_key, old_buffer, leaf.path, []))
            in_shard, target = run_in_shard(buffer, leaf, self.position)
            # Note: a leaf that lies in other ranks' shards alone needs no reads here.
            if target.numel:
                own = buffer.own_axes(leaf)
                own_index = rank_at(self.position, {axis: self.axes[axis] for axis in own})
                # Note: a job on more ranks than before has to take some state twice, and so counts
                # modulo the old number.
                own_position = position_of(
                    own_index, {axis: self.old_axes[axis] for axis in own}
                )
                sources = leaf_sources(
                    old_buffer, old_leaf, self.old_axes, own_position, target
                )
                home.moves.append(_Move(in_shard, target, list(sources)))
        self.places[buffer_key] = _Place(unit, buffer, list(homes.values()))
        return self.places[buffer_key]

    def _old(self, leaf: LeafSpec) -> LeafPlace:
        name = name_in(self.old_leaves, leaf)
        if name is None:
            raise ValueError(
                f"leaf {leaf.path!r} of the plan is not in {self.saved.title}: the plan is of "
                "another model"
            )
        return self.old_leaves[name]

    def _is_same(self, buffer: BufferPlan, old: BufferPlan) -> bool:
        """Return whether two flat buffers have the same elements, maybe in other shards."""
        # Note: a local buffer has other elements on each rank, so the number of these ranks counts.
        return (
            (old.leaves, old.local) == (buffer.leaves, buffer.local)
            and all(self.axes[axis] == self.old_axes[axis] for axis in buffer.local)
            and _facts(old.leaves[0], old) == _facts(buffer.leaves[0], buffer)
        )

    def _tensor(self, names: Sequence[str], place: _Place) -> torch.Tensor:
        """Return the tensor below one buffer from those below its leaves' old buffers."""
        stored, (unit, buffer, homes) = self.saved.stored[names[0]], place
        # Note: such as a count of steps, which each old buffer has once; merged ones must agree.
        if stored.kind != "shard":
            values = [self._whole(name) for name in names]
            for home, other_value in zip(homes, values, strict=True):
                # Why bytes: NaN is equal to no number, and torch compares no tensors of bits8.
                if not torch.equal(byte_view(values[0]), byte_view(other_value)):
                    raise _disagreement(place, home, _shown(values[0]), _shown(other_value))
            return values[0]
        mesh_device = self.device if stored.on_mesh else torch.device("cpu")
        shard = torch.empty(
            buffer.shard_numel,
            dtype=dtype_of(stored.dtype),
            device="cpu" if unit.offload else mesh_device,
            # Note: memory of offloaded shards is pinned, as shard makes it.
            pin_memory=unit.offload and mesh_device.type == "cuda",
        )
        dtype = self._dtype_of(shard, homes[0], buffer)
        for name, home in zip(names, homes, strict=True):
            # Note: a turn picks one of the ranks with copies, which count from the first one.
            copy_position = turn_of(
                self.saved.stored[name].turn, home.buffer, self.old_axes
            )
            ranks_on = rank_at(copy_position, self.old_axes)
            for move in home.moves:
                shard_part, read = shard[move.in_shard], self.saved.read
                read_run(shard_part, move.target, move.sources, name, read, ranks_on)
        if (filled := buffer.filled(self.position["shard"])) < shard.numel():
            # Why bytes: torch cannot fill tensors of some dtypes.
            byte_view(shard[filled:]).zero_()
        return shard.to(dtype)

    def _dtype_of(
        self, shard: torch.Tensor, home: _Home, buffer: BufferPlan
    ) -> torch.dtype:
        """Return the dtype of a shard: another one if the two plans differ in it."""
        planned_dtype = buffer.shard_dtype
        # Note: an average in float32 beside bfloat16 parameters is no parameter, and stays.
        if shard.dtype == planned_dtype or shard.dtype != home.buffer.shard_dtype:
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


def _facts(leaf: LeafSpec, buffer: BufferPlan) -> dict[str, Any]:
    """Return what a leaf must have under both plans."""
    storage = buffer.packing and buffer.packing.form
    own = buffer.own_axes(leaf)
    return {"shape": leaf.whole_shape, "local axes": own, "storage": storage}


def _container(spec: TreeSpec, children: list[Any]) -> Any:
    # Note: only classes that are loaded are found, so no code of the checkpoint runs.
    node_kind, fields, meta, _ = spec
    if node_kind == "namedtuple":
        cls: Any = loaded_class(meta)
        if cls is None or not issubclass(cls, tuple) or not hasattr(cls, "_fields"):
            module, _, class_name = meta.partition(":")
            raise ValueError(
                f"the state contains a {class_name}, so that namedtuple must be at the top level of "
                f"the loaded module {module!r}; found {cls}: import the module first, or store a "
                "dictionary instead"
            )
        # Note: a class may have got fields with defaults, but may not have lost any.
        try:
            return cls(**dict(zip(fields, children, strict=True)))
        # Errors of any kind: it is the code of the class, which may have other fields now.
        except Exception as error:
            raise ValueError(
                f"the stored {meta} cannot be made of the fields {fields}: {error}"
            ) from error
    # Note: JSON has made lists of tuples.
    meta = tree.freeze(meta)
    return tree.build((node_kind, meta, tuple(range(len(children)))), children)


def _shown(value: torch.Tensor) -> str:
    numbers = value if has_numbers(value.dtype) else byte_view(value)
    return str(numbers.tolist())


def _disagreement(place: _Place, home: _Home, value: str, other: str) -> ValueError:
    value, other = around_difference(value, other)
    return ValueError(
        f"the plan puts leaves {place.homes[0].path!r} and {home.path!r} "
        f"into one buffer of unit {place.unit.title!r}, and what the state keeps once per buffer is "
        f"{value} for the first and {other} for the second: keep them in separate units"
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
        TypeError: a leaf can't be stored, ``states`` isn't a list, or a plan isn't a ``Plan``.
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
    check_plan(old)
    check_plan(new)
    if not isinstance(states, list | tuple) or len(states) != old.world_size:
        error_type = ValueError if isinstance(states, list | tuple) else TypeError
        raise error_type(
            f"states must be a list with the state of each rank of the old plan, {old.world_size}; "
            f"found {outline(states)}: put them into a list, in order of ranks"
        )
    devices = [
        leaf.device for leaf in tree.leaves(states) if isinstance(leaf, torch.Tensor)
    ]
    # Note: the first device but the CPU.
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    flat_states = [
        flatten_state(state, old, rank, device.type) for rank, state in enumerate(states)
    ]
    # Note: as ranks do before they save, so replan is an exact model of save and restore.
    rank_texts = [rank_flat.texts() for rank_flat in flat_states]
    if error_text := first_difference(rank_texts, range(len(states)), remedy=HOW_TO_AGREE):
        raise ValueError(error_text)

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
