"""A state as the parts that a checkpoint stores: a tree as JSON, and tensors by name.

It defines these parts and their names, and checks that ranks agree on them. Nothing here
communicates or reads a file.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan

T = TypeVar("T")

Tensors = dict[str, torch.Tensor]

HOW_TO_AGREE = (
    "pass the same everywhere, a rank's own as PerRank(value), and a state of muon or per_matrix as "
    "optimizer_to_state_dict returns it"
)

TreeSpec = Any
"""A state without its tensors, as JSON. Each node is one of these:

- ``None``;
- ``["value", value]``: an int, float, bool or str;
- ``["tensor", name]``: the tensor that is stored under that name;
- ``["rank", i]``: a ``PerRank``; ``i`` is the index of its spec in ``FlatState.rank_specs``;
- ``["shards", form, [[unit, buffer key, node], ...]]``: a tree of shards. Its form is
  ``"every unit"`` or ``"some units"`` (of the plan), ``"list"`` or ``"tuple"``;
- ``[kind, fields, metadata, [node, ...]]``: a container, as in ``tree``; a namedtuple has fields.
"""

Plans = Plan | Mapping[str, Plan]
"""The plan of all trees of shards in a state, or one for each of some entries of a dictionary."""

NO_UNIT: TreeSpec = ["value", None]
"""The node of each buffer of a unit for which a tree of shards has ``None``."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """A value of each rank's own in your state, such as a random state.

    Attributes:
        value: any pytree of tensors, numbers and strings; ranks may hold different ones.

    Example:
        >>> import torch, funcshard as fs
        >>> own = fs.PerRank({"rng": torch.get_rng_state(), "position": 3})
        >>> own.value["position"]
        3
    """

    value: Any


class Stored(NamedTuple):
    """The facts about a stored tensor.

    Attributes:
        kind: ``"shard"`` as the plan cuts the buffer, ``"whole"`` the same on every rank, or
            ``"rank"`` another one on each.
        dtype: name of its dtype.
        shape: its shape on one rank.
        on_mesh: whether it lives on the mesh's device, not on the CPU.
        label: its row in a table, such as ``train.shards.*``.
        turn: which of several ranks stores it; see ``turn_of``.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    on_mesh: bool
    label: str
    turn: int


@dataclass(frozen=True, slots=True)
class FlatState:
    """One rank's state after ``flatten_state``.

    Attributes:
        spec: the tree, the same on every rank.
        rank_specs: the tree of each ``PerRank`` value.
        stored: the facts about each tensor by name.
        tensors: the tensors that this rank stores, by name.
        shared_texts: a text of each value and tensor that all ranks share, by title.
    """

    spec: TreeSpec
    rank_specs: list[TreeSpec] = field(default_factory=list)
    stored: dict[str, Stored] = field(default_factory=dict)
    tensors: Tensors = field(default_factory=dict)
    shared_texts: dict[str, str] = field(default_factory=dict)

    @property
    def shared(self) -> dict[str, Stored]:
        """The facts about the tensors that ranks agree on."""
        return {
            name: stored for name, stored in self.stored.items() if stored.kind != "rank"
        }

    def texts(self) -> dict[str, str]:
        """Return what must be the same on every rank, as a text by title."""
        # Why a digest: of a large model, this text has some MiB.
        structure_text = json.dumps([self.spec, list(self.shared.items())]).encode()
        structure_digest = hashlib.sha256(structure_text).hexdigest()[:16]
        return {**self.shared_texts, "the structure of the state": structure_digest}


# --- the tree -------------------------------------------------------------------------------------


def shard_buffers(spec: TreeSpec, plans: Plans) -> dict[str, BufferPlan]:
    """Return the buffer of each tensor in trees of shards, by stored name.

    Raises:
        ValueError: it's no tree that ``flatten_state`` returned, or other errors of damaged data.
    """
    buffers_by_name: dict[str, BufferPlan] = {}
    for _, root, plan in by_entry(spec, plans):
        places = buffer_places(plan)
        nodes: list[tuple[TreeSpec, BufferPlan | None]] = [(root, None)]
        while nodes:
            node, buffer = nodes.pop()
            match node:
                case ["tensor", name]:
                    if buffer is not None:
                        buffers_by_name[name] = buffer
                case ["shards", _, entries]:
                    nodes += [(below, places[unit, key][1]) for unit, key, below in entries]
                # Note: every container has four parts, and no other node has.
                case [_, _, _, children]:
                    nodes += [(child, buffer) for child in children]
                case None | ["value", _] | ["rank", _]:
                    pass
                case _:
                    raise ValueError(
                        f"a node of its tree must be one of a state; found {node!s:.60}"
                    )
    return buffers_by_name


# --- names ----------------------------------------------------------------------------------------


def join(*parts: Any) -> str:
    """Join parts of a dotted path, leaving out empty ones."""
    return ".".join(str(part) for part in parts if part != "")


def first_of(names: Sequence[Any]) -> str:
    """Return the first three names as text, and how many more there are."""
    more = f" and {len(names) - 3} more" * (len(names) > 3)
    return f"{names[:3]}{more}"


def name_in(names: Container[str], leaf: LeafSpec) -> str | None:
    """Return the first name of a leaf that's in ``names``."""
    return next((name for name in leaf.names if name in names), None)


def is_json(value: Any) -> bool:
    """Return whether frozen data are texts, numbers or tuples of them."""
    if isinstance(value, tuple):
        return all(map(is_json, value))
    return value is None or type(value) in (int, float, bool, str)


# --- plans ----------------------------------------------------------------------------------------


BufferPlace = tuple[UnitPlan, BufferPlan]


def buffer_places(plan: Plan) -> dict[tuple[str, str], BufferPlace]:
    """Return every flat buffer with its unit, by the unit's name and the buffer's key."""
    return {
        (u.name, buffer.key): (u, buffer) for u in plan.unit_list for buffer in u.buffers
    }


def each_leaf(plan: Plan) -> Iterator[LeafPlace]:
    """Yield every leaf of a plan, with its unit and its flat buffer."""
    for unit, buffer in buffer_places(plan).values():
        for leaf in buffer.leaves:
            yield unit, buffer, leaf


LeafPlace = tuple[UnitPlan, BufferPlan, LeafSpec]


def leaves_by_name(plan: Plan) -> dict[str, LeafPlace]:
    """Return every leaf with its unit and its buffer, under each of its names."""
    return {name: place for place in each_leaf(plan) for name in place[2].names}


def by_buffer(
    plan: Plan,
    value_of: Callable[[UnitPlan, BufferPlan], T],
    *,
    trainable_only: bool = False,
) -> dict[str, dict[str, T]]:
    """Return a tree of shards with a value for every flat buffer."""
    return {
        unit.name: {
            buffer.key: value_of(unit, buffer)
            for buffer in unit.buffers
            if buffer.trainable or not trainable_only
        }
        for unit in plan.unit_list
    }


def any_plan(plans: Plans) -> Plan:
    """Return one of the plans, for what they share: mesh axes and ranks."""
    return plans if isinstance(plans, Plan) else next(iter(plans.values()))


def by_entry(root: Any, plans: Plans) -> list[tuple[str, Any, Plan]]:
    """Return path and node of each part of a state, and the plan of its shards.

    One plan is that of the whole state, at ``""``. Several belong to entries of a dictionary.

    Arguments:
        root: the root of the state, as a ``TreeSpec`` or a ``tree.Structure``.
        plans: the plans.

    Raises:
        ValueError: the state lacks an entry that has a plan.
    """
    if isinstance(plans, Plan):
        return [("", root, plans)]
    # Note: the keys of a dictionary come before its children in a spec and in a structure.
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
    # Note: shards in another entry are then an error, and values are stored like any others.
    no_units = dataclasses.replace(
        plan, structure=("dict", (), ()), unit_list=(), precision=None, names=()
    )
    return [
        (str(key), child, plans.get(key, no_units))
        for key, child in zip(keys, root[-1], strict=True)
    ]


def buffers_in_tree_order(plan: Plan, *, trainable_only: bool) -> list[BufferPlace]:
    """Return the buffers, with their units, in the order of a tree's leaves."""
    places = [
        place for _, place in sorted(buffer_places(plan).items(), key=lambda item: item[0])
    ]
    return [place for place in places if place[1].trainable or not trainable_only]


def fits_shard(value: Any, buffer: BufferPlan, numel: int | None = None) -> bool:
    """Return whether ``value`` is a flat tensor of ``numel`` elements, or of a shard's number."""
    shard_numel = buffer.shard_numel if numel is None else numel
    if not isinstance(value, torch.Tensor) or value.shape != (shard_numel,):
        return False
    # Note: a counter has one element too, so an integer tensor of one element must have the
    # buffer's dtype.
    has_fractions = value.is_floating_point() or value.is_complex()
    return shard_numel != 1 or has_fractions or value.dtype == buffer.shard_dtype
