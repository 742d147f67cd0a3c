"""The plan: which leaf lives where, as pure data.

A ``Plan`` holds integers, strings and tuples only: it is immutable, hashable, comparable, and survives JSON unchanged.
Everything else is derived from it: execution, the collectives of a step, checkpoints, tables. ``planner.make_plan``
makes one; nothing here communicates, and nothing here holds a tensor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcshard._utils import table, tree
from funcshard.plan.precision import MixedPrecision

__all__ = [
    "LeafPart",
    "AXES",
    "STRATEGIES",
    "BufferPlan",
    "LeafSpec",
    "Plan",
    "UnitPlan",
    "check_strategy",
    "dtype_name",
    "dtype_of",
]

AXES = ("replicate", "shard")


STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")


_FORMAT = "funcshard.plan/1"

# fields whose names in JSON are those of the first plans, so that stored plans and fingerprints stay valid
_STORED_NAMES = {"buckets": "joined", "full_precision": "island"}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.float32`` -> ``"float32"``; the inverse of ``dtype_of``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """``"float32"`` -> ``torch.float32``; the inverse of ``dtype_name``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype; found in a plan, so the plan is damaged")
    return dtype


def check_strategy(strategy: str) -> None:
    """Raise ``ValueError`` unless ``strategy`` is one of ``STRATEGIES``."""
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}; found {strategy!r}")


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One leaf of the parameter tree: its path, shape, and place in its flat buffer.

    Attributes:
        path: dotted path of the leaf in the whole tree.
        shape: its shape.
        offset: index of its first element in the flat buffer, in elements.
        index: its number in the whole tree's order of leaves.
        aliases: further paths at which the same tensor is used (tied parameters).
    """

    path: str
    shape: tuple[int, ...]
    offset: int
    index: int
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class LeafPart(NamedTuple):
    """The elements of one leaf that lie in one rank's shard; empty where the leaf lies in other ranks' shards.

    Attributes:
        begin: index of the first of them in the raveled leaf.
        end: index after the last of them in the raveled leaf.
        shard_begin: index of the first of them in the shard.
    """

    begin: int
    end: int
    shard_begin: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin

    @property
    def in_leaf(self) -> slice:
        """Where they are in the raveled leaf."""
        return slice(self.begin, self.end)

    @property
    def in_shard(self) -> slice:
        """Where they are in the shard."""
        return slice(self.shard_begin, self.shard_begin + self.numel)


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One flat buffer of a unit: leaves of one dtype, all trainable or all frozen, raveled one after another.

    Attributes:
        key: its name in the unit: the dtype, and ``.frozen`` and ``.local`` where it is (``.local_replicate`` or
            ``.local_shard`` where along one axis only).
        dtype: name of the dtype of its leaves.
        trainable: whether its leaves get a gradient.
        leaves: its leaves, in the order of their offsets.
        shards: into how many shards it is cut (1 when it is not sharded).
        local: the mesh axes along which its values differ, and are neither gathered nor reduced: ``()`` for what all ranks
            share, ``("replicate", "shard")`` for what is each rank's own.
    """

    key: str
    dtype: str
    trainable: bool
    leaves: tuple[LeafSpec, ...]
    shards: int
    local: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        dtype_of(self.dtype)
        assert self.local == tuple(axis for axis in AXES if axis in self.local), (
            f"buffer {self.key} is local to {self.local}"
        )
        end = 0
        for leaf in self.leaves:
            assert leaf.offset == end, f"leaf {leaf.path} at {leaf.offset}, expected at {end}: padding is at the end"
            end += leaf.numel

    @property
    def numel(self) -> int:
        """Number of elements of the leaves."""
        return self.leaves[-1].offset + self.leaves[-1].numel if self.leaves else 0  # they lie one after another

    @property
    def shard_numel(self) -> int:
        """Number of elements of one rank's shard, padding included."""
        return -(-self.numel // self.shards)

    @property
    def padded_numel(self) -> int:
        """Number of elements of the gathered buffer, padding included."""
        return self.shard_numel * self.shards

    def part(self, leaf: LeafSpec, rank: int) -> LeafPart:
        """Return which elements of ``leaf`` lie in the shard of the rank at ``rank`` along the shard axis.

        Every rank holds the whole leaf if the buffer is not sharded.
        """
        first = rank * self.shard_numel if self.shards > 1 else 0
        low = min(max(first, leaf.offset), leaf.offset + leaf.numel)
        high = max(min(first + self.shard_numel, leaf.offset + leaf.numel), low)
        return LeafPart(low - leaf.offset, high - leaf.offset, low - first)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return dtype_of(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Leaves that are gathered together: the part of the tree under one path, less what inner units own.

    Attributes:
        name: the unit's path; ``""`` is the root unit.
        strategy: ``"full_shard"``, ``"shard_grad_op"`` or ``"no_shard"``.
        reshard_after_forward: whether ``fully_shard`` frees the gathered leaves between forward and backward.
        mesh_shape: sizes of the mesh axes ``(replicate, shard)`` that the unit was planned for.
        structure: the unit's part of the tree, its leaves numbered through its buffers (see ``tree``).
        buffers: its flat buffers.
        offload: whether its shards, and so their gradients and optimizer state, live on the CPU, whatever the mesh's device.
        precision: in which dtypes it computes and communicates; ``None``: those of its leaves.
        full_precision: whether it computes in the dtype of its leaves inside a model of another dtype: its inputs are cast to it, and its
            outputs back.
    """

    name: str
    strategy: str
    reshard_after_forward: bool
    mesh_shape: tuple[int, int]
    structure: tree.Structure
    buffers: tuple[BufferPlan, ...]
    offload: bool = False
    precision: MixedPrecision | None = None
    full_precision: bool = False

    def __post_init__(self) -> None:
        check_strategy(self.strategy)
        assert not (self.full_precision and self.precision), (
            f"unit {self.name}: a full-precision unit computes in the dtype of its leaves"
        )
        shards = self.mesh_shape[1] if self.sharded else 1
        for buffer in self.buffers:
            wanted = 1 if "shard" in buffer.local else shards
            assert buffer.shards == wanted, f"unit {self.name}: buffer {buffer.key} has {buffer.shards} shards, not {wanted}"
        assert not self.reshard_after_forward or self.strategy == "full_shard", f"unit {self.name}: nothing to reshard"

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a slice (``False``: every rank holds the whole buffer)."""
        return self.strategy != "no_shard"

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        """The leaves of all its buffers, in the numbering of ``structure``."""
        return tuple(leaf for buffer in self.buffers for leaf in buffer.leaves)

    def gathered_dtype(self, buffer: BufferPlan) -> torch.dtype:
        """The dtype in which a buffer is gathered, and so computed in."""
        own = dtype_of(buffer.dtype)
        return (self.precision and own.is_floating_point and self.precision.param_dtype) or own

    def reduced_dtype(self, buffer: BufferPlan) -> torch.dtype:
        """The dtype in which a buffer's gradient is reduced."""
        own = dtype_of(buffer.dtype)
        return (self.precision and own.is_floating_point and self.precision.reduce_dtype) or self.gathered_dtype(buffer)

    @property
    def bucket_key(self) -> tuple[Any, ...]:
        """What has to be the same in units that share their collectives."""
        # a buffer without elements takes part in no collective, and would in a shared one
        full = all(buffer.numel for buffer in self.buffers) or self.name
        keys = tuple((buffer.key, buffer.dtype, buffer.trainable, buffer.local) for buffer in self.buffers)
        return self.strategy, self.reshard_after_forward, self.mesh_shape, self.offload, self.precision, keys, full

    def in_full_precision(self) -> UnitPlan:
        """The same unit, with everything in the dtype of its leaves."""
        return dataclasses.replace(self, precision=None)

    def listed(self) -> UnitPlan:
        """The same unit with its leaves as a list, in their numbering, instead of as a part of the tree."""
        return dataclasses.replace(self, structure=("list", None, tuple(range(len(self.leaves)))))

    @property
    def title(self) -> str:
        """Its name for people: ``(root)`` for the root unit."""
        return self.name or "(root)"


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """How a parameter tree is cut into units, flat buffers and shards; made by ``make_plan``.

    Attributes:
        mesh_shape: sizes of the mesh axes ``(replicate, shard)``.
        structure: the whole tree's structure (see ``tree``).
        unit_list: the units, the root first when it owns anything, then in the order they were given.
        precision: that of the root, and of what no unit's module holds.
        buckets: groups of two or more adjacent units that share their collectives.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"w": torch.zeros(3, 3), "b": torch.zeros(3)}, 2)
        >>> plan == fs.Plan.from_json(plan.to_json())
        True
        >>> plan.units[""].buffers[0].padded_numel
        12
    """

    mesh_shape: tuple[int, int]
    structure: tree.Structure
    unit_list: tuple[UnitPlan, ...]
    precision: MixedPrecision | None = None
    buckets: tuple[tuple[str, ...], ...] = ()

    def __post_init__(self) -> None:
        for unit in self.unit_list:
            assert unit.mesh_shape == self.mesh_shape, f"unit {unit.name} was planned for mesh {unit.mesh_shape}"
        indices = sorted(leaf.index for leaf in self.leaves)
        assert indices == list(range(len(indices))), "every leaf has to be in exactly one unit"
        _check_buckets(self.buckets, self.units)

    @property
    def units(self) -> dict[str, UnitPlan]:
        """The units by name, in plan order."""
        return {unit.name: unit for unit in self.unit_list}

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        """Every leaf, unit by unit."""
        return tuple(leaf for unit in self.unit_list for leaf in unit.leaves)

    @property
    def world_size(self) -> int:
        """Number of ranks of the data-parallel world."""
        return math.prod(self.mesh_shape)

    def in_full_precision(self) -> Plan:
        """The same plan with everything in the dtypes of the leaves: what evaluation runs, where the precision says so."""
        units = tuple(unit.in_full_precision() for unit in self.unit_list)
        return dataclasses.replace(self, unit_list=units, precision=None)

    def to_json(self) -> str:
        """Return the plan as JSON text; ``from_json`` is the exact inverse."""
        data = _renamed(dataclasses.asdict(self), _STORED_NAMES)
        if not self.buckets:
            del data[
                "joined"
            ]  # a plan without buckets keeps the text, and so the fingerprint, of plans before there were any
        return _canonical({"format": _FORMAT, **data})

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan written by ``to_json``.

        Raises:
            ValueError: the text is not JSON, or not a plan of a known format.
        """
        data = json.loads(text)
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        if found != _FORMAT:
            raise ValueError(f"expected JSON written by Plan.to_json with format {_FORMAT!r}; found {found!r}")
        data = _renamed(data, {stored: name for name, stored in _STORED_NAMES.items()})
        units = tuple(_unit_from(unit) for unit in data["unit_list"])
        precision = _precision_from(data["precision"])
        buckets = tree.freeze(data.get("buckets", []))
        return cls(tree.freeze(data["mesh_shape"]), tree.freeze(data["structure"]), units, precision, buckets)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that are equal exactly for equal plans, in every process and Python version."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def __str__(self) -> str:
        return table.as_text(*_columns(self), total=_total(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return table.as_html(*_columns(self), total=_total(self))


def _columns(plan: Plan) -> tuple[str, list[str], list[list[str]]]:
    replicate, shard = plan.mesh_shape
    ranks = f"{plan.world_size} rank{'s' if plan.world_size > 1 else ''}"
    mesh = f"{ranks} = {replicate} replicate × {shard} shard" if replicate > 1 else ranks
    header = ["unit", "buffer", "leaves", "numel", "padding", "bytes a rank", "strategy"]
    rows = [_row(u, b) for u in plan.unit_list for b in u.buffers]
    title = f"Plan {plan.fingerprint()} for {mesh}"
    if not plan.buckets:
        return title, header, rows
    numbers = {name: str(number) for number, run in enumerate(plan.buckets, start=1) for name in run}
    column = [numbers.get(unit.name, "") for unit in plan.unit_list for _ in unit.buffers]
    buckets = f"{len(plan.buckets)} bucket{'s' if len(plan.buckets) > 1 else ''}"
    title += f", {len(numbers)} units in {buckets}"
    return title, [*header, "bucket"], [[*row, number] for row, number in zip(rows, column, strict=True)]


def _row(unit: UnitPlan, buffer: BufferPlan) -> list[str]:
    numbers = [len(buffer.leaves), buffer.numel, buffer.padded_numel - buffer.numel]
    keeps = unit.strategy == "full_shard" and not unit.reshard_after_forward
    strategy = unit.strategy + (", kept until backward" if keeps else "")
    if buffer.local:
        strategy = "local to a rank" if buffer.local == AXES else f"local along {buffer.local[0]}"
        strategy += "" if "shard" in buffer.local else f", {unit.strategy} along shard"
    strategy += ", offload" if unit.offload else ""
    dtypes = (dtype_of(buffer.dtype), unit.gathered_dtype(buffer), unit.reduced_dtype(buffer))
    if len(set(dtypes)) > 1:
        strategy += f", in {dtype_name(dtypes[1])}"
        strategy += f", reduced in {dtype_name(dtypes[2])}" if buffer.trainable and dtypes[2] != dtypes[1] else ""
    strategy += ", full precision" if unit.full_precision else ""
    size = table.size(buffer.shard_numel * buffer.itemsize)
    return [unit.title, buffer.key, *map(table.count, numbers), size, strategy]


def _total(plan: Plan) -> list[str]:
    buffers = [buffer for unit in plan.unit_list for buffer in unit.buffers]
    numel = sum(b.numel for b in buffers)
    numbers = [len(plan.leaves), numel, sum(b.padded_numel for b in buffers) - numel]
    size = table.size(sum(b.shard_numel * b.itemsize for b in buffers))
    return ["total", "", *map(table.count, numbers), size, "", *[""] * bool(plan.buckets)]


def _check_buckets(buckets: tuple[tuple[str, ...], ...], units: dict[str, UnitPlan]) -> None:
    order = {name: position for position, name in enumerate(name for name in units if name != "")}
    seen: set[str] = set()
    for run in buckets:
        assert len(run) > 1, f"buckets: a bucket of {len(run)}"
        for name in run:
            assert name in order, f"buckets: {name!r} is no unit that could be bucketed"
            assert name not in seen, f"buckets: unit {name!r} is in two buckets"
            seen.add(name)
        first = order[run[0]]
        assert [order[name] for name in run] == list(range(first, first + len(run))), f"buckets: {run} are not adjacent"
        assert len({units[name].bucket_key for name in run}) == 1, f"buckets: {run} differ in their collectives"


def _canonical(data: Any) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=dtype_name)


def _renamed(data: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return the data of a plan with fields of it and of its units under other names."""
    units = [{names.get(key, key): value for key, value in unit.items()} for unit in data["unit_list"]]
    return {**{names.get(key, key): value for key, value in data.items()}, "unit_list": units}


def _unit_from(data: dict[str, Any]) -> UnitPlan:
    buffers = tuple(
        BufferPlan(
            **{
                **{k: tree.freeze(v) for k, v in b.items()},
                "leaves": tuple(LeafSpec(**{k: tree.freeze(v) for k, v in x.items()}) for x in b["leaves"]),
            }
        )
        for b in data["buffers"]
    )
    frozen = {key: tree.freeze(value) for key, value in data.items()}
    return UnitPlan(**{**frozen, "buffers": buffers, "precision": _precision_from(data["precision"])})


def _precision_from(data: dict[str, Any] | None) -> MixedPrecision | None:
    return None if data is None else MixedPrecision.from_data(data, dtype_of)
