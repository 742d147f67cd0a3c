"""Flatten a state into a tree as JSON, and the named tensors that this rank stores.

A tree of shards stays as it is, because the plan says where each leaf lies in it. It's recognised
by its form, under any name in the state:

- ``{unit: {buffer: tensor}}``, with 1-D tensors of the plan's ``shard_numel``;
- the same with a container of such tensors below each buffer, as optimizer states have;
- in the state of an optimizer, a list of such tensors in the order of the tree's leaves, as
  TorchOpt has.

Nothing here communicates or reads a file.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.tensors import byte_memory, byte_view
from funcshard._utils.tree import loaded_class
from funcshard.checkpoint.resharding import turn_of
from funcshard.checkpoint.stored_state import (
    NO_UNIT,
    BufferPlace,
    FlatState,
    PerRank,
    Plans,
    Stored,
    TreeSpec,
    buffer_places,
    buffers_in_tree_order,
    by_entry,
    fits_shard,
    is_json,
    join,
)
from funcshard.plan import BufferPlan, Plan, UnitPlan, dtype_name, position_of
from funcshard.train import TrainState, check_not_donated


def flatten_state(state: Any, plans: Plans, rank: int, device: str = "cpu") -> FlatState:
    """Flatten one rank's state; ``unflatten_state`` is the inverse.

    Arguments:
        state: any pytree.
        plans: the plans that the trees of shards in it were cut by.
        rank: the rank that holds the state.
        device: type of the mesh's device.

    Raises:
        TypeError: a leaf or a container can't be stored.
        ValueError: a tree of shards doesn't match the plan, or two tensors have one name.
    """
    structure, leaves = _described(state)
    flat, turns = FlatState(None), itertools.count()
    # Note: with one plan for each entry, the root is walked here, one level above the entries.
    entry_specs = [
        _Flattener(plan, rank, device, flat, turns, leaves, buffer_places(plan)).node(
            node, path, path
        )
        for path, node, plan in by_entry(structure, plans)
    ]
    spec = entry_specs[0] if isinstance(plans, Plan) else _container(structure, entry_specs)
    return dataclasses.replace(flat, spec=spec)


Order = list[BufferPlace]
"""The buffers, with their units, that the items of a list of shards belong to."""

Zone = str | BufferPlace
"""What a node belongs to: the ``"state"``, the state of an ``"optimizer"``, a ``"PerRank"``, or the
place of a buffer in a tree of shards."""

# Dtypes below a byte and quantized ones, which torch can hold and neither copy nor write.
_UNWRITABLE = re.compile(r"u?int[1-7]|qu?int\w+")


def _described(
    state: Any, above: str = "", leaf_types: tuple[type, ...] = (PerRank,)
) -> tuple[tree.Structure, list[Any]]:
    """Return structure and leaves of a state that can be stored."""
    structure, leaves, paths = tree.describe(state, _check_container, above=above)
    for index, path in enumerate(paths):
        leaf = leaves[index]
        check_not_donated(leaf)
        # Note: a number of NumPy, which this library doesn't need.
        if type(leaf).__module__ == "numpy" and getattr(leaf, "shape", None) == ():
            leaf = leaves[index] = leaf.item()
        leaf_text = f"a {type(leaf).__name__}"
        is_storable = type(leaf) in (int, float, bool, str, *leaf_types)
        if isinstance(leaf, torch.Tensor):
            # Why hasattr: it tells a DTensor without importing torch.distributed.tensor.
            is_special = leaf.is_nested or leaf.is_quantized or hasattr(leaf, "full_tensor")
            is_dense = leaf.layout == torch.strided and not (is_special or leaf.is_meta)
            is_storable = is_dense and not _UNWRITABLE.fullmatch(dtype_name(leaf.dtype))
            leaf_text += f" of {leaf.dtype} and {leaf.layout} on {leaf.device}"
        if not is_storable:
            raise TypeError(
                f"leaf {path!r} of the state cannot be stored; it must be a number, a str, or a "
                f"dense tensor of whole bytes, not nested and not quantized; found {leaf_text}: "
                "convert it, store tensor.view(torch.uint8), or leave it out"
            )
    return structure, leaves


def _check_container(node_kind: str, meta: Any, entries: Sequence[Any], path: str) -> None:
    """Raise ``TypeError`` if JSON can't hold what a container has beside its children."""
    # Note: JSON has no other keys, and the index has to tell 1 from "1".
    for key in entries if node_kind in ("dict", "ordered_dict") else ():
        if type(key) not in (str, int):
            raise TypeError(
                f"the keys of a dictionary in a state must be str or int; found {key!r} at "
                f"{path!r} of the state: convert it to a str"
            )
    if node_kind == "custom" and not is_json(meta[1]):
        raise TypeError(
            f"the {meta[0]} at {path!r} of the state cannot be stored: its metadata "
            f"{meta[1]!r} cannot be written as JSON; convert it to a dictionary"
        )


@dataclass(slots=True)
class _Flattener:
    """A walk over one state, which fills ``flat`` and returns the tree's spec."""

    plan: Plan
    rank: int
    device: str
    flat: FlatState
    turns: Iterator[int]
    leaves: Sequence[Any]
    places: Mapping[tuple[str, str], BufferPlace]

    def node(
        self, structure: tree.Structure, name: str, label: str, zone: Zone = "state"
    ) -> TreeSpec:
        """Return the spec of a node, and add its tensors to ``flat``.

        Arguments:
            structure: the node.
            name: its path.
            label: the same, with ``*`` in place of the unit and the buffer of a tree of shards.
            zone: what it belongs to.
        """
        if structure is None:
            return None
        if isinstance(structure, int):
            return self._leaf(self.leaves[structure], name, label, zone)
        node_kind, meta, children = structure
        orders: dict[int, Order] = {}
        if zone in ("state", "optimizer") and self._are_shards(structure, name):
            return self._shards(structure, name)
        # Note: TorchOpt's own classes and the opt_state of a TrainState are optimizers for sure.
        is_state = False
        if zone == "state" and node_kind == "namedtuple":
            is_state = loaded_class(meta) is TrainState
            if meta.startswith("torchopt."):
                zone = "optimizer"
        # Why there alone: elsewhere, a list that is the same on every rank would be cut.
        if zone == "optimizer":
            orders = self._orders(children)
        child_specs = []
        for index, (child, entry) in enumerate(
            zip(children, _entries(structure), strict=True)
        ):
            path = join(name, entry)
            if index in orders:
                nodes = zip(orders[index], child[2], strict=True)
                buffer_specs = [self._buffer(path, *place, node) for place, node in nodes]
                child_specs.append(["shards", child[0], buffer_specs])
                continue
            child_zone = "optimizer" if is_state and entry == "opt_state" else zone
            child_specs.append(self.node(child, path, join(label, entry), child_zone))
        return _container(structure, child_specs)

    # --- leaves -----------------------------------------------------------------------------------

    def _leaf(self, value: Any, name: str, label: str, zone: Zone) -> TreeSpec:
        if isinstance(value, PerRank):
            if isinstance(zone, tuple):
                raise TypeError(
                    f"{name!r} of the state is a PerRank inside a tree of shards, which no other "
                    "plan could cut: store the shard itself, because every rank stores its own, or "
                    "put the PerRank beside the tree"
                )
            structure, inner_leaves = _described(value.value, name, leaf_types=())
            inner_walk = dataclasses.replace(self, leaves=inner_leaves)
            self.flat.rank_specs.append(inner_walk.node(structure, name, label, "PerRank"))
            return ["rank", len(self.flat.rank_specs) - 1]
        if not isinstance(value, torch.Tensor):
            if zone in ("state", "optimizer"):
                # Why JSON: NaN is equal to itself there, and 1 is not True.
                self.flat.shared_texts[f"{name!r} of the state"] = json.dumps(value)
            return ["value", value]
        # Note: keys may have dots, so two paths may join to one name.
        if name in self.flat.stored:
            raise ValueError(
                f"two tensors of the state would be stored as {name!r}; rename one of the keys "
                "above them"
            )
        kind, stores, turn = "whole", self.rank == 0, 0
        on_mesh = value.device.type == self.device
        if zone == "PerRank":
            kind, stores = "rank", True
            # Why a CPU mesh does not count: a random state on the CPU must stay there when it is
            # restored on a CUDA mesh.
            on_mesh = on_mesh and self.device != "cpu"
        elif isinstance(zone, tuple) and fits_shard(value, zone[1]):
            # Note: a rank that doesn't store the shard still lists it, because ranks agree on the
            # list.
            (unit, buffer), mesh_axes = zone, self.plan.mesh_axes
            kind, turn, on_mesh = "shard", next(self.turns), on_mesh or unit.offload
            turn_position = turn_of(turn, buffer, mesh_axes)
            stores = turn_position.items() <= position_of(self.rank, mesh_axes).items()
        else:
            # Note: ranks compare these, so a value that one rank has changed alone is found. What
            # isn't a shard below a buffer, such as a count of steps, is the same on every rank.
            checksum_text = f"the checksum {_checksum(value.detach().reshape(-1))}"
            self.flat.shared_texts[f"tensor {name!r} of the state"] = checksum_text
        shape, dtype = tuple(value.shape), dtype_name(value.dtype)
        self.flat.stored[name] = Stored(kind, dtype, shape, on_mesh, label, turn)
        if stores:
            self.flat.tensors[name] = value.detach().reshape(-1)
        return ["tensor", name]

    # --- trees of shards --------------------------------------------------------------------------

    def _are_shards(self, structure: tree.Structure, path: str) -> bool:
        """Return whether a node is a dictionary of units, and of their buffers below them.

        Raise ``ValueError`` if the plan has none of the units or buffers that it seems to hold.
        """
        node_kind, names, children = structure
        # Note: below a unit lie buffers alone; a tensor there is no tree of shards.
        if node_kind != "dict" or any(
            isinstance(child, int) or (child is not None and child[0] != "dict")
            for child in children
        ):
            return False
        keys_by_name = {
            name: child[1]
            for name, child in zip(names, children, strict=True)
            if child is not None
        }
        keys = [
            (name, key) for name, unit_keys in keys_by_name.items() for key in unit_keys
        ]
        unit_list = self.plan.unit_list
        if self.places.keys() >= {*keys} and {*names} <= {unit.name for unit in unit_list}:
            # Why not some units without buffers: that may be any dictionary, which would lose its
            # keys.
            return bool(keys) or (bool(keys_by_name) and len(names) == len(unit_list))
        looks_like_shards = all(map(keys_by_name.get, names)) and all(
            isinstance(getattr(torch, str(key).partition(".")[0], None), torch.dtype)
            for _, key in keys
        )
        if looks_like_shards and not unit_list:
            raise ValueError(
                f"{path!r} of the state holds shards, and no plan has the key of this part of the "
                "state: pass a plan for every entry that holds shards"
            )
        if looks_like_shards:
            raise ValueError(
                f"the shards at {path!r} of the state do not match the plan: they have units "
                f"{[*names][:4]}, the plan has units {list(self.plan.units)[:4]}, or the "
                "buffers of a unit differ; pass the plan that cut them"
            )
        return False

    def _shards(self, structure: tree.Structure, top: str) -> TreeSpec:
        _, names, children = structure
        # Why here: the plan makes this dictionary each time.
        units, buffer_specs = self.plan.units, []
        for unit_name, child in zip(names, children, strict=True):
            if child is None:
                # Note: None for a unit has no buffers, so each of its buffers stands for it.
                buffer_specs += [
                    [unit_name, b.key, NO_UNIT] for b in units[unit_name].buffers
                ]
            else:
                buffer_specs += [
                    self._buffer(top, *self.places[unit_name, key], node)
                    for key, node in zip(child[1], child[2], strict=True)
                ]
        every_unit = len(names) == len(self.plan.unit_list)
        return ["shards", "every unit" if every_unit else "some units", buffer_specs]

    def _buffer(
        self, top: str, unit: UnitPlan, buffer: BufferPlan, structure: tree.Structure
    ) -> TreeSpec:
        """Return what the shards at ``top`` hold in place of a buffer."""
        value = self.leaves[structure] if isinstance(structure, int) else None
        if isinstance(value, torch.Tensor) and value.ndim and not fits_shard(value, buffer):
            # Note: TorchOpt's counters have one element; without shards, a stack is whole.
            is_counter = value.numel() == 1 and not value.is_floating_point()
            if not is_counter and (value.ndim == 1 or buffer.shards > 1):
                raise ValueError(
                    f"shard {buffer.key!r} of unit {unit.title!r} at {top!r} of the state must have "
                    f"the shape ({buffer.shard_numel},); found {tuple(value.shape)}: pass the plan "
                    "that made it. Save several models as a list of trees, and muon or per_matrix "
                    "by optimizer_to_state_dict"
                )
        name = join(top, unit.name, buffer.key)
        spec = self.node(structure, name, join(top, "*"), (unit, buffer))
        return [unit.name, buffer.key, spec]

    def _orders(self, children: Sequence[tree.Structure]) -> dict[int, Order]:
        """Return the order of buffers of each child that is a list of shards, by index."""
        tensor_lists: dict[int, list[torch.Tensor | None]] = {}
        for index, child in enumerate(children):
            if isinstance(child, tuple) and child[0] in ("list", "tuple"):
                items = [self.leaves[i] if isinstance(i, int) else i for i in child[2]]
                if items and all(
                    item is None or isinstance(item, torch.Tensor) for item in items
                ):
                    tensor_lists[index] = items
        orders: dict[int, Order] = {}
        # Note: an optimizer's lists cover trainable shards alone; one of parameters covers all.
        for trainable_only in (False, True):
            order = buffers_in_tree_order(self.plan, trainable_only=trainable_only)
            same_length = {
                i: items for i, items in tensor_lists.items() if len(items) == len(order)
            }
            # Note: a list of that length beside it counts too, because TorchOpt keeps a counter for
            # each shard there.
            if any(_all_fit(items, order) for items in same_length.values()):
                orders |= dict.fromkeys(same_length, order)
        return orders


def _all_fit(items: Sequence[Any], order: Order) -> bool:
    """Return whether the items are shards of buffers or ``None``, but not all ``None``."""
    fit = [
        fits_shard(item, buffer)
        for item, (_, buffer) in zip(items, order, strict=True)
        if item is not None
    ]
    return bool(fit) and all(fit)


def _entries(structure: tree.Structure) -> Sequence[Any]:
    """Return the keys, field names or indices of a container's children."""
    node_kind, meta, children = structure
    if node_kind == "namedtuple":
        cls: Any = loaded_class(meta)
        return list(cls._fields)
    return meta if node_kind in ("dict", "ordered_dict") else range(len(children))


def _container(structure: tree.Structure, specs: list[TreeSpec]) -> TreeSpec:
    fields = _entries(structure) if structure[0] == "namedtuple" else None
    return [structure[0], fields, structure[1], specs]


def _checksum(flat: torch.Tensor) -> int:
    data = byte_view(flat.cpu())
    return zlib.crc32(byte_memory(data)) if data.numel() else 0
