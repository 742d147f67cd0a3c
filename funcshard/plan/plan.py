"""The plan of a whole parameter tree, as pure data.

A ``Plan`` holds integers, strings and tuples, but no tensors. It is immutable, hashable and
comparable, and it survives JSON unchanged. Execution, the collectives of a step, checkpoints and
tables are all derived from it. ``planner.make_plan`` makes one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from funcshard._utils import (
    Shown,
    Table,
    check_structure,
    decode,
    dtype_name,
    encode,
    file_data,
    tree,
)
from funcshard.plan.mesh_axes import AXES, Axes, mesh_axes_of, model_axes_of, world_size_of
from funcshard.plan.precision import MixedPrecision
from funcshard.plan.show import plan_table
from funcshard.plan.small_units import joined_name
from funcshard.plan.unit_plan import LeafCut, LeafSpec, UnitPlan

_FORMAT = "funcshard.plan/1"

# Note: JSON keeps the names of the first plans (see "key" and "later" of fields), so that stored
# plans and fingerprints stay valid.
_MOST_RANKS = 2**31 - 1
_MOST_ELEMENTS = file_data.MOST // 16  # the largest elements have 16 bytes


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Shown):
    """The division of a parameter tree into units, flat buffers and shards; made by ``make_plan``.

    Attributes:
        mesh_shape: sizes of the data axes ``(replicate, shard)``.
        structure: structure of the whole tree: its containers and keys, without the tensors.
        unit_list: the units: the root first if it owns a leaf, then the others in the given order.
        precision: precision of the root and of all modules outside other units.
        axes: all mesh axes in the order of ranks; ``()`` represents ``replicate`` and ``shard``.
        names: the names of leaves, and of a module's buffers, in the order of the tree as it was
            given, or of the module's state dict. It decides the order of keys in results, and is no
            part of the fingerprint: plans that differ in it alone are equal.

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

    def __post_init__(self) -> None:
        for unit in self.unit_list:
            if (unit.mesh_shape, unit.axes) != (self.mesh_shape, self.axes):
                raise ValueError(
                    f"unit {unit.title!r} was planned for mesh {unit.mesh_axes}; found "
                    f"{self.mesh_axes}"
                )
        indices = sorted([leaf.index for leaf in self.leaves])
        if indices != list(range(len(indices))):
            raise ValueError("every leaf must be in exactly one unit")

    @property
    def units(self) -> dict[str, UnitPlan]:
        """The units by name, in plan order."""
        return {unit.name: unit for unit in self.unit_list}

    @property
    def buckets(self) -> tuple[tuple[str, ...], ...]:
        """The groups that ``bucket_bytes`` made: the paths of the small units in each of them."""
        return tuple(
            unit.members
            for unit in self.unit_list
            if unit.members and unit.name.startswith(joined_name(unit.members))
        )

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
        """Name and size of each mesh axis that is no data axis."""
        return model_axes_of(self.mesh_axes)

    @property
    def world_size(self) -> int:
        """Number of ranks of the mesh."""
        return world_size_of(self.mesh_axes)

    @property
    def ordered_structure(self) -> tree.Structure:
        """The structure with the keys of dictionaries in the order of ``names``."""
        known_positions = {name: position for position, name in enumerate(self.names)}
        positions = {
            leaf.index: known_positions.get(leaf.path, len(known_positions) + leaf.index)
            for leaf in self.leaves
        }
        return tree.with_dicts_in_order(
            self.structure, [positions[index] for index in range(len(positions))]
        )

    def in_order(self, named: Mapping[str, Any]) -> dict[str, Any]:
        """Return a dictionary of leaves or buffers in the order of ``names``, unknown keys last."""
        order = dict.fromkeys(name for name in self.names if name in named)
        return {
            name: named[name] for name in (*order, *(name for name in named if name not in order))
        }

    def in_full_precision(self) -> Plan:
        """Return the same plan without a precision.

        Its units compute and communicate in the dtypes of their leaves.
        Modules in evaluation mode run under this plan if ``MixedPrecision.full_precision_in_eval``
        is set.
        """
        units = tuple(unit.in_full_precision() for unit in self.unit_list)
        return dataclasses.replace(self, unit_list=units, precision=None)

    def to_json(self) -> str:
        """Return the plan as JSON text; ``from_json`` is the exact inverse."""
        return _canonical(plan_to_data(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that ``to_json`` wrote.

        Raises:
            TypeError: the argument is no text.
            ValueError: the text is not JSON, it is not a plan of a known format, or it is damaged.
        """
        try:
            data = file_data.parse(text)
        except ValueError as error:
            raise ValueError(
                f"expected JSON written by Plan.to_json; found {text[:40]!r}, and {error}: read "
                "the file first"
            ) from None
        return plan_from_data(data)

    def fingerprint(self) -> str:
        """Return 16 hexadecimal digits: the same for equal plans, others for different plans.

        The digits do not depend on the process or on the version of Python.
        """
        if not self._digest:
            compared = {key: value for key, value in encode(self).items() if key != "names"}
            plan_text = _canonical({"format": _FORMAT, **compared})
            object.__setattr__(self, "_digest", hashlib.sha256(plan_text.encode()).hexdigest()[:16])
        return self._digest

    def _parts(self) -> list[Table]:
        return [plan_table(self.fingerprint(), self.mesh_axes, self.unit_list)]


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """Return a plan for ``json.dumps`` with ``default=dtype_name``; see ``plan_from_data``."""
    return {"format": _FORMAT, **encode(plan)}


def plan_from_data(data: Any) -> Plan:
    """Return the plan of data that was read from JSON; see ``Plan.from_json``.

    Raises:
        ValueError: it is not a plan of a known format, or it is damaged.
    """
    found_format = data.get("format") if isinstance(data, dict) else type(data).__name__
    if found_format != _FORMAT:
        raise ValueError(
            f"expected JSON written by Plan.to_json with format {_FORMAT!r}; found "
            f"{file_data.shown(found_format)}"
        )
    try:
        plan: Plan = decode(Plan, {k: v for k, v in data.items() if k != "format"}, "the plan")
        _validate(plan)
    except ValueError as error:
        raise ValueError(
            f"the plan is damaged, or of a later version of funcshard: {error}: make the plan again"
        ) from None
    return plan


def _validate(plan: Plan) -> None:
    """Raise ``ValueError`` unless the parts of a plan that was read fit each other."""
    paths = [leaf.path for leaf in plan.leaves]
    if len(plan.units) < len(plan.unit_list) or len({*paths}) < len(paths):
        raise ValueError("its units and its leaves must have different names")
    axes = plan.mesh_axes
    if len(axes) < len(plan.axes) or tuple(map(axes.get, AXES)) != plan.mesh_shape:
        raise ValueError(f"axes must have the data axes of {plan.mesh_shape}; found {plan.axes}")
    if world_size_of(mesh_axes_of(axes, "axes")) > _MOST_RANKS:
        raise ValueError(f"axes must have at most {_MOST_RANKS} ranks; found {axes}")
    _check_leaves(plan.structure, len(paths))
    for unit in plan.unit_list:
        _check_leaves(unit.structure, len(unit.leaves))
        if len({buffer.key for buffer in unit.buffers}) < len(unit.buffers):
            raise ValueError("the buffers of a unit must have different keys")
        for buffer in unit.buffers:
            if not {*buffer.local} <= axes.keys() or len({*buffer.local}) < len(buffer.local):
                raise ValueError(f"local must name axes of the mesh {axes}; found {buffer.local}")
            _check_numel(buffer.numel)
            for leaf in buffer.leaves:
                check_cuts(leaf.cuts, leaf.shape, axes)
                for axis, dim in leaf.placements:
                    _check_axis(axis, dim or 0, leaf.shape, axes)


def check_cuts(cuts: Sequence[LeafCut], shape: tuple[int, ...], axes: Mapping[str, int]) -> None:
    """Raise unless a slice of ``shape`` can be cut so, from a tensor that torch can hold.

    Arguments:
        cuts: how the slice is cut.
        shape: the shape of the slice.
        axes: size of each axis of the mesh.
    """
    for cut in cuts:
        _check_axis(cut.axis, cut.dim, shape, axes)
        if axes[cut.axis] != cut.ranks:
            raise ValueError(f"a cut must have the ranks of its axis in {axes}; found {cut}")
    _check_numel(math.prod(shape) * math.prod([cut.ranks for cut in cuts]))


def _check_axis(axis: str, dim: int, shape: tuple[int, ...], axes: Mapping[str, int]) -> None:
    if axis not in axes:
        raise ValueError(f"leaves are cut along axes of the mesh {axes}; found {axis!r}")
    if dim >= max(len(shape), 1):
        raise ValueError(f"a leaf of shape {shape} has no dim {dim}")


def _check_numel(numel: int) -> None:
    if numel > _MOST_ELEMENTS:
        raise ValueError(f"a tensor has at most {_MOST_ELEMENTS} elements; found {numel}")


def _check_leaves(structure: tree.Structure, leaves: int) -> None:
    if (leaf_count := check_structure(structure)) != leaves:
        raise ValueError(
            f"a structure must have the leaves of its units, {leaves}; found {leaf_count}"
        )


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
