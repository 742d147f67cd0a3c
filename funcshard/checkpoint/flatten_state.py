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
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.donation import check_not_donated
from funcshard._utils.tensors import byte_memory, byte_view
from funcshard.checkpoint.resharding import turn_of
from funcshard.checkpoint.stored_state import (
    NO_UNIT,
    FlatState,
    PerRank,
    Plans,
    Stored,
    TreeSpec,
    buffers_in_tree_order,
    by_entry,
    find_class,
    fits_shard,
    is_json,
    join,
)
from funcshard.plan import BufferPlan, Plan, UnitPlan, dtype_name, position_of
from funcshard.train import TrainState


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
    # Note: with one plan for each entry, the root is walked here, one level above the entries.
    flat, root_depth = FlatState(None), 0 if isinstance(plans, Plan) else 1
    shard_turns = itertools.count()
    entry_specs = [
        _Flattener(plan, rank, device, flat, shard_turns, leaves).node(node, path, root_depth)
        for path, node, plan in by_entry(structure, plans)
    ]
    if not isinstance(plans, Plan):
        root_kind, keys, children = structure
        entry_specs = [
            _container(root_kind, _entries(root_kind, keys, len(children), ""), keys, entry_specs)
        ]
    return dataclasses.replace(flat, spec=entry_specs[0])


Order = list[tuple[UnitPlan, BufferPlan]]
"""The buffers, with their units, that the items of a list of shards belong to."""

# Dtypes below a byte and quantized ones, which torch can hold and neither copy nor write.
_UNWRITABLE = re.compile(r"u?int[1-7]|qu?int\w+")
_MOST_BITS = 13_000  # Python reads and writes no whole number of more than 4300 digits


def _described(state: Any, above: str = "", depth: int = 0) -> tuple[tree.Structure, list[Any]]:
    """Return structure and leaves of a state that can be stored."""
    structure, leaves, paths = tree.describe(state, above=above, depth=depth)
    leaves = [_plain(leaf) for leaf in leaves]
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, PerRank):
            continue
        check_not_donated(leaf)
        obstacle_text, remedy = _obstacle(leaf), "convert it"
        if isinstance(leaf, torch.Tensor) and _UNWRITABLE.fullmatch(dtype_name(leaf.dtype)):
            remedy = "hold its bytes, tensor.view(torch.uint8)"
            obstacle_text = obstacle_text or f"a tensor of {leaf.dtype}"
        if obstacle_text:
            raise TypeError(
                f"leaf {path!r} of the state cannot be stored; it must be a dense tensor, an int, "
                f"float, bool, str or None; found {obstacle_text}: {remedy}, or leave it out of the "
                "state"
            )
    return structure, leaves


def _plain(value: Any) -> Any:
    """Return a number of NumPy as one of Python."""
    # Note: if nobody has imported NumPy, no leaf is of it.
    numpy = sys.modules.get("numpy")  # which this library doesn't need
    return value.item() if numpy is not None and isinstance(value, numpy.generic) else value


def _obstacle(leaf: Any) -> str:
    """Return why a leaf isn't its elements alone, or ``""``."""
    if type(leaf) is int and leaf.bit_length() > _MOST_BITS:
        return "an int of more than 4,000 digits"
    if type(leaf) in (int, float, bool, str):
        return ""
    # Why hasattr: it tells a DTensor without importing torch.distributed.tensor.
    if not isinstance(leaf, torch.Tensor) or hasattr(leaf, "full_tensor"):
        return f"a {type(leaf).__name__}"
    if leaf.is_nested:
        return "a nested tensor"
    if leaf.is_quantized:
        return "a quantized tensor"
    if leaf.is_meta:
        return "a tensor on the meta device"
    return "" if leaf.layout == torch.strided else f"a tensor of layout {leaf.layout}"


@dataclass(slots=True)
class _Flattener:
    """A walk over one state, which fills ``flat`` and returns the tree's spec."""

    plan: Plan
    rank: int
    device: str
    flat: FlatState
    turns: Iterator[int]
    leaves: Sequence[Any] = ()
    in_per_rank: bool = False

    def node(
        self, structure: tree.Structure, path: str, depth: int = 0, *, in_optimizer: bool = False
    ) -> TreeSpec:
        """Return the spec of the node at ``path``, and add its tensors to ``flat``.

        Arguments:
            structure: the node.
            path: its path.
            depth: number of containers and ``PerRank`` values around it.
            in_optimizer: whether it belongs to an optimizer's state.
        """
        if structure is None:
            return None
        if isinstance(structure, int):
            leaf = self.leaves[structure]
            if isinstance(leaf, PerRank):
                return self._per_rank(leaf, path, depth)
            return self._leaf(leaf, path)
        node_kind, meta, children = structure
        listed_shards: dict[int, Order] = {}
        if not self.in_per_rank:
            if node_kind == "dict" and self._are_shards(meta, children):
                return self._shards(structure, path)
            if node_kind == "dict" and _look_like_shards(children):
                raise self._unplanned(path, meta)
            listed_shards = self._lists_of_shards(children)
        entries = _entries(node_kind, meta, len(children), path)
        # Note: TorchOpt's own classes and the opt_state of a TrainState are optimizers for sure.
        in_optimizer |= node_kind == "namedtuple" and meta.startswith("torchopt.")
        # Why an error: stored as shards, a list that is the same on every rank would be cut.
        if listed_shards and not in_optimizer:
            raise _undecided(join(path, entries[min(listed_shards)]))
        is_state = node_kind == "namedtuple" and find_class(meta) is TrainState
        child_specs = []
        for i, (child, entry) in enumerate(zip(children, entries, strict=True)):
            child_path = join(path, entry)
            if i in listed_shards:
                child_specs.append(self._listed_shards(child, child_path, listed_shards[i]))
            else:
                inside_optimizer = in_optimizer or (is_state and entry == "opt_state")
                child_specs.append(
                    self.node(child, child_path, depth + 1, in_optimizer=inside_optimizer)
                )
        if node_kind == "custom" and not is_json(meta[1]):
            raise TypeError(
                f"the {meta[0]} at {path!r} of the state cannot be stored: its metadata "
                f"{meta[1]!r} cannot be written as JSON; convert it to a dictionary"
            )
        return _container(node_kind, entries, meta, child_specs)

    def _unplanned(self, path: str, unit_names: Sequence[Any]) -> ValueError:
        if not self.plan.unit_list:
            return ValueError(
                f"{path!r} of the state holds shards, and no plan has the key of this part of the "
                "state: pass a plan for every entry that holds shards"
            )
        return ValueError(
            f"the shards at {path!r} of the state do not match the plan: they have units "
            f"{list(unit_names)[:4]}, the plan has units {list(self.plan.units)[:4]}, or the "
            "buffers of a unit differ; pass the plan that cut them"
        )

    # --- leaves -----------------------------------------------------------------------------------

    def _leaf(self, value: Any, path: str) -> TreeSpec:
        if isinstance(value, torch.Tensor):
            return self._whole(value, path, path)
        return ["value", value]

    def _per_rank(self, value: PerRank, path: str, depth: int) -> TreeSpec:
        # Why they count as containers: a PerRank in a PerRank is walked by recursion too.
        if depth == tree.DEEPEST:
            raise ValueError(tree.too_deep(path, "containers and PerRank values inside each other"))
        inner_walk = dataclasses.replace(self, in_per_rank=True)
        structure, inner_walk.leaves = _described(value.value, path, depth + 1)
        self.flat.rank_specs.append(inner_walk.node(structure, path, depth + 1))
        return ["rank", len(self.flat.rank_specs) - 1]

    def _whole(self, value: torch.Tensor, name: str, label: str) -> TreeSpec:
        """Add a tensor that all ranks share or, in a ``PerRank``, this rank's own."""
        if self.in_per_rank:
            return self._add(value, name, "rank", label)
        # Note: ranks compare these, so a value that one rank has changed alone is found.
        self.flat.checksums[name] = _checksum(value.detach().reshape(-1))
        return self._add(value, name, "whole", label, stores=self.rank == 0)

    # --- trees of shards --------------------------------------------------------------------------

    def _are_shards(self, keys: Sequence[Any], children: Sequence[tree.Structure]) -> bool:
        """Return whether a dictionary has units as keys, and buffers below them."""
        units = self.plan.units
        if not set(keys) <= units.keys():
            return False
        filled_units = [(units[name], child) for name, child in zip(keys, children, strict=True)]
        filled_units = [(unit, child) for unit, child in filled_units if child is not None]
        for unit, child in filled_units:
            # Note: below a unit lie buffers alone; a tensor there is no tree of shards.
            if isinstance(child, int) or child[0] != "dict":
                return False
            if not set(child[1]) <= {buffer.key for buffer in unit.buffers}:
                return False
        # Why not some units without buffers: that may be any dictionary, which would lose its keys.
        has_buffers = any(child[2] for _, child in filled_units)
        return has_buffers or (bool(filled_units) and len(keys) == len(units))

    def _shards(self, structure: tree.Structure, path: str) -> TreeSpec:
        buffer_nodes, units = [], self.plan.units
        for name, child in zip(structure[1], structure[2], strict=True):
            unit = units[name]
            if child is None:
                # Note: None for a unit has no buffers, so each of its buffers stands for it.
                buffer_nodes += [[name, buffer.key, NO_UNIT] for buffer in unit.buffers]
                continue
            buffers = {buffer.key: buffer for buffer in unit.buffers}
            buffer_nodes += [
                [name, key, self._below(buffer_structure, path, "", unit, buffers[key])]
                for key, buffer_structure in zip(child[1], child[2], strict=True)
            ]
        every_unit = len(structure[1]) == len(self.plan.unit_list)
        return ["shards", "every unit" if every_unit else "some units", buffer_nodes]

    def _lists_of_shards(self, children: Sequence[tree.Structure]) -> dict[int, Order]:
        """Return the children that are lists of shards, by index, with their buffers."""
        tensor_lists: dict[int, list[torch.Tensor | None]] = {}
        for index, child in enumerate(children):
            if isinstance(child, tuple) and child[0] in ("list", "tuple"):
                items = [self.leaves[i] if isinstance(i, int) else i for i in child[2]]
                if items and all(item is None or isinstance(item, torch.Tensor) for item in items):
                    tensor_lists[index] = items
        order_of_list: dict[int, Order] = {}
        for trainable_only in (True, False):
            # Note: an optimizer's lists cover trainable shards alone; one of parameters covers all.
            buffer_order = buffers_in_tree_order(self.plan, trainable_only=trainable_only)
            of_length = [
                index for index, items in tensor_lists.items() if len(items) == len(buffer_order)
            ]
            # Note: a list of that length beside it counts too, because TorchOpt keeps a counter for
            # each shard there.
            if any(_all_fit(tensor_lists[index], buffer_order) for index in of_length):
                for index in of_length:
                    order_of_list.setdefault(index, buffer_order)
        return order_of_list

    def _listed_shards(self, structure: tree.Structure, path: str, order: Order) -> TreeSpec:
        buffer_nodes = [
            [unit.name, buffer.key, self._below(inner, path, "", unit, buffer)]
            for (unit, buffer), inner in zip(order, structure[2], strict=True)
        ]
        return ["shards", structure[0], buffer_nodes]

    def _below(
        self, structure: tree.Structure, top: str, suffix: str, unit: UnitPlan, buffer: BufferPlan
    ) -> TreeSpec:
        """Return the spec of the node at ``suffix`` below a buffer of the shards at ``top``."""
        if structure is None:
            return None
        if not isinstance(structure, int):
            node_kind, meta, children = structure
            entries = _entries(
                node_kind, meta, len(children), join(top, unit.name, buffer.key, suffix)
            )
            child_specs = [
                self._below(child, top, join(suffix, entry), unit, buffer)
                for child, entry in zip(children, entries, strict=True)
            ]
            return _container(node_kind, entries, meta, child_specs)
        leaf_value, stored_name = self.leaves[structure], join(top, unit.name, buffer.key, suffix)
        if isinstance(leaf_value, PerRank):
            raise TypeError(
                f"{stored_name!r} of the state is a PerRank inside a tree of shards, which no other plan "
                "could cut: store the shard itself, because every rank stores its own, or put the "
                "PerRank beside the tree"
            )
        if not isinstance(leaf_value, torch.Tensor):
            return self._leaf(leaf_value, stored_name)
        # Note: anything else below a buffer, such as a count of steps, is the same on every rank.
        if fits_shard(leaf_value, buffer):
            return self._shard(leaf_value, stored_name, join(top, "*", suffix), unit, buffer)
        if (
            leaf_value.ndim == 1
            and not suffix
            and not (leaf_value.numel() == 1 and not leaf_value.is_floating_point())
        ):
            raise ValueError(
                f"shard {buffer.key!r} of unit {unit.title!r} at {top!r} of the state must have "
                f"{buffer.shard_numel} elements under the plan; found {leaf_value.numel()}: pass the "
                "plan that made it. For a state of muon or per_matrix, which is kept by name, save "
                "optimizer_to_state_dict(opt_state, optimizer, plan, mesh) instead"
            )
        if (
            buffer.shards > 1
            and leaf_value.ndim > 1
            and leaf_value.shape[-1] == buffer.shard_numel
            and not suffix
        ):
            raise ValueError(
                f"shard {buffer.key!r} of unit {unit.title!r} at {top!r} of the state must have "
                f"the shape ({buffer.shard_numel},); found {tuple(leaf_value.shape)}, a stack of the "
                "shards of several models: save a list of trees of shards, one for each model, "
                f"{{unit: {{buffer: stack[i]}}}}"
            )
        return self._whole(leaf_value, stored_name, join(top, "*", suffix))

    def _shard(
        self, value: torch.Tensor, name: str, label: str, unit: UnitPlan, buffer: BufferPlan
    ) -> TreeSpec:
        """Add a shard, which one of the ranks with copies of it stores."""
        mesh_axes, turn = self.plan.mesh_axes, next(self.turns)
        position = position_of(self.rank, mesh_axes)
        # Note: a rank that doesn't store the shard still lists it, because ranks agree on the list.
        stores = all(position[axis] == at for axis, at in turn_of(turn, buffer, mesh_axes).items())
        return self._add(value, name, "shard", label, stores, turn, offload=unit.offload)

    # --- tensors ----------------------------------------------------------------------------------

    def _add(
        self,
        value: torch.Tensor,
        name: str,
        kind: str,
        label: str,
        stores: bool = True,
        turn: int = 0,
        *,
        offload: bool = False,
    ) -> TreeSpec:
        # Note: keys may have dots, so two paths may join to one name.
        if name in self.flat.stored:
            raise ValueError(
                f"two tensors of the state would be stored as {name!r}; rename one of the keys "
                "above them"
            )
        # Why a PerRank on a CPU mesh counts as a CPU tensor: its random state must stay on the CPU
        # when it is restored on a CUDA mesh.
        on_cpu_mesh = self.in_per_rank and self.device == "cpu"
        on_mesh = offload or (value.device.type == self.device and not on_cpu_mesh)
        shape, dtype = tuple(value.shape), dtype_name(value.dtype)
        self.flat.stored[name] = Stored(kind, dtype, shape, on_mesh, label, turn)
        if stores:
            self.flat.tensors[name] = value.detach().reshape(-1)
        return ["tensor", name]


def _undecided(path: str) -> ValueError:
    return ValueError(
        f"the list at {path!r} of the state has one tensor of a shard's size for each buffer of "
        "the plan, and may hold shards, or tensors that are the same on every rank: keep an "
        f"optimizer's state as the opt_state of a TrainState, shards as {{unit: {{buffer: "
        f"tensor}}}}, and other tensors in a dictionary"
    )


def _look_like_shards(children: Sequence[tree.Structure]) -> bool:
    return bool(children) and all(
        isinstance(child, tuple)
        and child[0] == "dict"
        and child[1]
        and all(_is_buffer_key(key) for key in child[1])
        for child in children
    )


def _is_buffer_key(key: Any) -> bool:
    """Return whether ``key`` looks like that of a buffer: ``float32``, ``bfloat16.frozen``."""
    name, *key_marks = key.split(".") if isinstance(key, str) else ("",)
    # Note: the marks are those of the planner, for frozen buffers and local axes.
    known_marks = all(
        mark in ("frozen", "local") or mark.startswith("local_") for mark in key_marks
    )
    return isinstance(getattr(torch, name or "-", None), torch.dtype) and known_marks


def _all_fit(values: Sequence[Any], order: Order) -> bool:
    """Return whether values are shards of buffers or ``None``, but not all ``None``."""
    fit = [
        fits_shard(value, buffer)
        for value, (_, buffer) in zip(values, order, strict=True)
        if value is not None
    ]
    return bool(fit) and all(fit)


def _entries(kind: str, meta: Any, number: int, path: str) -> list[Any]:
    """Return the keys, field names or indices of a container's children."""
    if kind in ("dict", "ordered_dict"):
        for key in meta:
            # Note: JSON has no other keys, and the index has to tell 1 from "1".
            if type(key) not in (str, int):
                raise TypeError(
                    f"the keys of a dictionary in a state must be str or int; found {key!r} at "
                    f"{path!r} of the state: convert it to a str"
                )
        return list(meta)
    if kind == "namedtuple":
        cls: Any = find_class(meta)
        return list(cls._fields)
    return list(range(number))


def _container(kind: str, entries: list[Any], meta: Any, children: list[TreeSpec]) -> TreeSpec:
    return [kind, entries if kind == "namedtuple" else None, meta, children]


def _checksum(flat: torch.Tensor) -> int:
    data = byte_view(flat.cpu())
    return zlib.crc32(byte_memory(data)) if data.numel() else 0
