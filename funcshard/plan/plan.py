"""The plan of a whole parameter tree, as pure data: immutable, hashable, and unchanged by JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from funcshard._utils import file_data, tree
from funcshard._utils.codec import decode, encode
from funcshard._utils.table import Shown, Table
from funcshard._utils.tensors import dtype_name, dtype_of
from funcshard.plan.equal_units import plan_table
from funcshard.plan.layout import Leaf, plan_units
from funcshard.plan.leaf_options import read_storages
from funcshard.plan.mesh_axes import AXES, Axes, mesh_axes_of
from funcshard.plan.precision import MixedPrecision
from funcshard.plan.unit_options import OPTIONS
from funcshard.plan.unit_plan import (
    STRATEGIES,
    BufferPlan,
    LeafSpec,
    UnitPlan,
    whole_shape_of,
)

_FORMAT = "funcshard.plan/1"
_MOST_RANKS = 2**31 - 1
_MOST_ELEMENTS = file_data.MOST // 16  # the largest elements have 16 bytes

# Note: JSON keeps the names of the first plans (see "key" and "later" of fields), so that stored
# plans and fingerprints stay valid.


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Shown):
    """The division of a parameter tree into units, flat buffers and shards; made by ``make_plan``.

    A plan holds integers, strings and tuples, but no tensors, so you can print, compare, hash and
    store it.

    Attributes:
        mesh_shape: sizes of the data axes ``(replicate, shard)``.
        structure: the containers and keys of the whole tree, without the tensors.
        unit_list: the units: the root first if it owns a leaf, then the others in your order.
        precision: precision of the root and of all modules outside other units.
        axes: all mesh axes in the order of ranks; ``()`` represents ``replicate`` and ``shard``.
        names: the names of leaves, and of a module's buffers, in the order of your tree or of the
            module's state dict. It decides the order of keys in results only, so plans that differ
            in it alone are equal.

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
    axes: Axes = field(default=(), metadata={"later": True})
    names: tuple[str, ...] = field(default=(), compare=False)
    # The answer of fingerprint, which is kept because every call that takes a plan asks for it.
    _digest: str = field(default="", init=False, compare=False)

    @property
    def units(self) -> dict[str, UnitPlan]:
        """The units by name, in plan order."""
        return {unit.name: unit for unit in self.unit_list}

    @property
    def leaves(self) -> tuple[LeafSpec, ...]:
        """All leaves, unit by unit."""
        return tuple(leaf for unit in self.unit_list for leaf in unit.leaves)

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Size of each mesh axis, in the order of ranks."""
        return dict(self.axes or zip(AXES, self.mesh_shape, strict=True))

    @property
    def model_axes(self) -> Axes:
        """Name and size of each mesh axis that isn't a data axis."""
        return tuple(
            (axis_name, size)
            for axis_name, size in self.mesh_axes.items()
            if axis_name not in AXES
        )

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.mesh_axes.values())

    @property
    def ordered_structure(self) -> tree.Structure:
        """The structure, with the keys of dictionaries in the order of ``names``."""
        known_positions = {
            leaf_name: position for position, leaf_name in enumerate(self.names)
        }
        ordered_leaves = sorted(self.leaves, key=lambda leaf: leaf.index)
        # A leaf that names lack comes last, as in the structure.
        positions = [
            known_positions.get(leaf.path, len(known_positions) + leaf.index)
            for leaf in ordered_leaves
        ]
        return tree.with_dicts_in_order(self.structure, positions)

    def in_order(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return leaves or buffers by name in the order of ``names``, unknown keys last."""
        name_order = dict.fromkeys((*self.names, *named))
        return {
            leaf_name: named[leaf_name] for leaf_name in name_order if leaf_name in named
        }

    def in_full_precision(self) -> Plan:
        """Return the plan without a precision: units use the dtypes of their leaves.

        With ``MixedPrecision.full_precision_in_eval``, modules in evaluation mode run under it.
        """
        # Why the units one by one: each may have a precision of its own.
        units = tuple(unit.in_full_precision() for unit in self.unit_list)
        return dataclasses.replace(self, unit_list=units, precision=None)

    def to_json(self) -> str:
        """Return the plan as JSON text; ``from_json`` is the exact inverse."""
        return _canonical(plan_to_data(self))

    @classmethod
    def from_json(cls, text: str, storage: Any = None) -> Plan:
        """Return the plan that ``to_json`` wrote.

        Arguments:
            text: the JSON.
            storage: that of ``make_plan``, if it has your pairs of functions: JSON holds their
                names alone, and a plan without them can neither pack nor decode.

        Raises:
            TypeError: the argument isn't text.
            ValueError: the text isn't JSON or a plan of a known format, or it's damaged.
        """
        try:
            plan_data = file_data.parse(text)
        except ValueError as error:
            raise ValueError(
                f"expected JSON written by Plan.to_json; found {text[:40]!r}, and {error}: read "
                "the file first"
            ) from None
        return _with_storage(plan_from_data(plan_data), storage)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits that equal plans share, in every process."""
        if not self._digest:
            # Why without names: two plans that differ in the order of keys alone shard alike.
            compared_fields = {
                key: value for key, value in encode(self).items() if key != "names"
            }
            plan_text = _canonical({"format": _FORMAT, **compared_fields})
            # Why this way: the class is frozen, and the digest follows from the other fields.
            object.__setattr__(
                self, "_digest", hashlib.sha256(plan_text.encode()).hexdigest()[:16]
            )
        return self._digest

    def _parts(self) -> list[Table]:
        return [plan_table(self.fingerprint(), self.mesh_axes, self.unit_list)]


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """Return a plan for ``json.dumps`` with ``default=dtype_name``; see ``plan_from_data``."""
    return {"format": _FORMAT, **encode(plan)}


def plan_from_data(data: Any) -> Plan:
    """Return the plan of data that was read from JSON; ``ValueError`` as in ``Plan.from_json``."""
    # Why first: data of another kind would fail at an odd field.
    found_format = data.get("format") if isinstance(data, dict) else type(data).__name__
    if found_format != _FORMAT:
        raise ValueError(
            f"expected JSON written by Plan.to_json with format {_FORMAT!r}; found "
            f"{file_data.shown(found_format)}"
        )
    try:
        plan: Plan = decode(
            Plan, {k: v for k, v in data.items() if k != "format"}, "the plan"
        )
        _check_layout(plan)
    except (
        Exception
    ) as error:  # of any kind, because the parts may contradict each other anywhere
        raise ValueError(
            f"the plan is damaged, or of a later version of funcshard: {error}: make the plan again"
        ) from None
    return plan


def _with_storage(plan: Plan, storage: Any) -> Plan:
    """Return the plan with the functions of ``storage`` for the packings that it names."""
    _, pairs = read_storages(storage)
    if not pairs:
        return plan

    def with_functions(buffer: BufferPlan) -> BufferPlan:
        packing = buffer.packing
        if packing is None or (packing.name, packing.block) not in pairs:
            return buffer
        pair = pairs[packing.name, packing.block]
        return dataclasses.replace(buffer, packing=packing.with_storage(pair))

    units = tuple(
        dataclasses.replace(unit, buffers=tuple(map(with_functions, unit.buffers)))
        for unit in plan.unit_list
    )
    return dataclasses.replace(plan, unit_list=units)


def _check_layout(plan: Plan) -> None:
    """Raise unless the planner lays the leaves out in the same units."""
    mesh_axes, mesh_ranks = plan.mesh_axes, mesh_axes_of(plan.mesh_axes, "axes")
    leaves = [
        Leaf(
            leaf_index=leaf.index,
            paths=leaf.names,
            shape=leaf.shape if leaf.unpacked is None else leaf.unpacked,
            dtype=buffer.dtype if buffer.packing is None else buffer.packing.dtype,
            trainable=buffer.trainable,
            local=buffer.local,
            cuts=leaf.cuts,
            placements=leaf.placements,
            packing=buffer.packing,
        )
        for unit in plan.unit_list
        for buffer in unit.buffers
        for leaf in buffer.leaves
    ]
    leaves.sort(key=lambda leaf: leaf.leaf_index)
    for leaf in leaves:
        axis_ranks = [(cut.axis, cut.ranks) for cut in leaf.cuts]
        placed_dims = [dim or 0 for _, dim in leaf.placements]
        # Why at least 1: DTensor places a scalar along dim 0.
        if (
            not {*axis_ranks} <= mesh_axes.items()
            or not {*leaf.local, *dict(leaf.placements)} <= mesh_axes.keys()
            or max(placed_dims, default=0) >= max(len(leaf.shape), 1)
            # Why a limit: such numbers would overflow in torch, far from here.
            or math.prod(whole_shape_of(leaf.shape, leaf.cuts)) > _MOST_ELEMENTS
        ):
            raise ValueError(f"leaf {leaf.paths[0]!r} must fit the mesh {mesh_axes}")
        dtype_of(leaf.dtype)
    units = plan_units(
        plan.structure,
        leaves,
        {unit.name: unit.paths for unit in plan.unit_list},
        {
            unit.name: {name: getattr(unit, name) for name in (*OPTIONS, "full_precision")}
            for unit in plan.unit_list
        },
        plan.axes,
        mesh_axes,
    )
    if (
        units != plan.unit_list
        or mesh_ranks != mesh_axes
        or len(mesh_axes) != len(plan.axes or AXES)
        or plan.mesh_shape != (mesh_axes["replicate"], mesh_axes["shard"])
        or len({leaf.paths[0] for leaf in leaves}) < len(leaves)
        or tree.check_structure(plan.structure) != len(leaves)
        or [leaf.leaf_index for leaf in leaves] != list(range(len(leaves)))
        or not {unit.strategy for unit in units} <= {*STRATEGIES}
        or plan.world_size > _MOST_RANKS
    ):
        raise ValueError("its units must be those of make_plan for its leaves and its mesh")


def trainable_buffers(plan: Plan) -> list[tuple[UnitPlan, BufferPlan]]:
    """Return every flat buffer that has gradients, with its unit."""
    return [
        (unit, buffer)
        for unit in plan.unit_list
        for buffer in unit.buffers
        if buffer.trainable
    ]


def check_plan(plan: Any) -> None:
    """Raise ``TypeError`` unless ``plan`` is a plan."""
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan must be the Plan that make_plan returned; found {type(plan).__name__}"
        )


def _canonical(data: Any) -> str:
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=True, default=dtype_name
    )
