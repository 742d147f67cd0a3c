"""The plan of a whole parameter tree, as pure data.

A ``Plan`` holds integers, strings and tuples, but no tensors. It is immutable, hashable and
comparable, and it survives JSON unchanged. Execution, the collectives of a step, checkpoints and
tables are all derived from it. ``planner.make_plan`` makes one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcshard._utils import Shown, Table, file_data, tree
from funcshard.plan.mesh_axes import AXES, Axes, model_axes_of, world_size_of
from funcshard.plan.plan_data import (
    axes_from,
    precision_from,
    shape_from,
    structure_from,
    unit_from,
)
from funcshard.plan.precision import MixedPrecision, dtype_name, stored_precision
from funcshard.plan.show import plan_table
from funcshard.plan.small_units import joined_name
from funcshard.plan.unit_plan import BufferPlan, LeafSpec, UnitPlan

_FORMAT = "funcshard.plan/1"

# Why JSON has other names for these fields: it keeps the names of the first plans, so that stored
# plans and fingerprints stay valid.
_STORED_NAMES = {"full_precision": "island"}

# Fields that plans, units, buffers or leaves got later, with the value that changes nothing. JSON
# leaves out such a field if it has that value, so old texts and fingerprints stay valid.
_LATER_FIELDS: dict[str, Any] = {
    "axes": (), "cuts": (), "placements": (), "reshard_after_backward": True, "members": (),
}  # fmt: skip
_NOT_STORED = ("names", "_digest")  # to_json adds the names, and the digest is that of the rest
_NAMES = {stored: name for name, stored in _STORED_NAMES.items()}
# Keys that a plan need not have; "joined" named units of older plans that shared collectives.
_LATER = ("format", "precision", "joined", "axes", "names")


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Shown):
    """The division of a parameter tree into units, flat buffers and shards; made by ``make_plan``.

    Attributes:
        mesh_shape: sizes of the data axes ``(replicate, shard)``.
        structure: structure of the whole tree: its containers and keys, without the tensors.
        unit_list: the units: the root first if it owns a leaf, then the others in the given order.
        precision: precision of the root and of all modules outside other units.
        axes: all mesh axes in the order of ranks; ``()`` stands for ``replicate`` and ``shard``.
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
    axes: Axes = ()
    names: tuple[str, ...] = field(default=(), compare=False)
    # The answer of fingerprint, which is kept because every call that takes a plan asks for it.
    _digest: str = field(default="", init=False, compare=False)

    def __post_init__(self) -> None:
        for unit in self.unit_list:
            if (unit.mesh_shape, unit.axes) != (self.mesh_shape, self.axes):
                raise ValueError(
                    f"unit {unit.name} was planned for mesh {unit.mesh_axes}; found "
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
        known = {name: position for position, name in enumerate(self.names)}
        positions = {
            leaf.index: known.get(leaf.path, len(known) + leaf.index) for leaf in self.leaves
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
        return self._text(names=self.names)

    def _text(self, **more: Any) -> str:
        return _canonical({"format": _FORMAT, **_stored(self), **more})

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
            object.__setattr__(
                self, "_digest", hashlib.sha256(self._text().encode()).hexdigest()[:16]
            )
        return self._digest

    def _parts(self) -> list[Table]:
        return [plan_table(self.fingerprint(), self.mesh_axes, self.unit_list)]


def plan_from_data(data: Any) -> Plan:
    """Return the plan of data that was read from JSON; see ``Plan.from_json``.

    Raises:
        ValueError: it is not a plan of a known format, or it is damaged.
    """
    found = data.get("format") if isinstance(data, dict) else type(data).__name__
    if found != _FORMAT:
        raise ValueError(
            f"expected JSON written by Plan.to_json with format {_FORMAT!r}; found "
            f"{file_data.shown(found)}"
        )
    try:
        return _plan_from(data)
    except ValueError as error:
        raise ValueError(
            f"the plan is damaged, or of a later version of funcshard: {error}: make the plan again"
        ) from None


def _plan_from(data: dict[str, Any]) -> Plan:
    file_data.table("a plan", data, ("mesh_shape", "structure", "unit_list"), _LATER, others=False)
    shape = shape_from(data["mesh_shape"])
    stored = [
        file_data.table("a unit", unit) for unit in file_data.listed("unit_list", data["unit_list"])
    ]
    units = tuple(
        [unit_from({_NAMES.get(key, key): value for key, value in unit.items()}) for unit in stored]
    )
    leaves = [leaf.path for unit in units for leaf in unit.leaves]
    if len({unit.name for unit in units}) < len(units) or len({*leaves}) < len(leaves):
        raise ValueError("its units and its leaves must have different names")
    return Plan(
        shape,
        structure_from(data["structure"], len(leaves)),
        units,
        precision_from(data.get("precision")),
        axes_from(data.get("axes", []), shape),
        file_data.texts("names", data.get("names", [])),
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


class _Fields(NamedTuple):
    """How JSON holds a class: first the fields that every text has, then the ``_LATER_FIELDS``.

    Attributes:
        keys: the names in JSON of the fields that every text has.
        values: a function from an object to the values of these fields.
        later: name and name in JSON of each other field, and the value with which JSON lacks it.
        parts: the field that holds units, buffers or leaves, if there is one.
    """

    keys: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]]
    later: tuple[tuple[str, str, Any], ...]
    parts: str | None

    @classmethod
    def of(cls, each: Any) -> _Fields:
        """Return the fields of a class."""
        stored = {
            name: _STORED_NAMES.get(name, name)
            for name in each.__slots__
            if name not in _NOT_STORED
        }
        always = [name for name, key in stored.items() if key not in _LATER_FIELDS]
        later = [
            (name, key, _LATER_FIELDS[key]) for name, key in stored.items() if key in _LATER_FIELDS
        ]
        parts = next((name for name in ("unit_list", "buffers", "leaves") if name in stored), None)
        return cls(
            tuple(stored[name] for name in always),
            operator.attrgetter(*always),
            tuple(later),
            parts,
        )


_FIELDS = {cls: _Fields.of(cls) for cls in (Plan, UnitPlan, BufferPlan, LeafSpec)}


def _stored(value: Any) -> dict[str, Any]:
    """Return a plan, unit, buffer or leaf as JSON holds it; see ``_LATER_FIELDS``."""
    keys, values, later, parts = _FIELDS[type(value)]
    found: dict[str, Any] = dict(zip(keys, values(value), strict=True))
    for name, key, absent in later:
        own = getattr(value, name)
        if own != absent:
            found[key] = own
    if parts is not None:
        found[parts] = [_stored(each) for each in found[parts]]
    if found.get("precision") is not None:
        found["precision"] = stored_precision(dataclasses.asdict(found["precision"]))
    return found
