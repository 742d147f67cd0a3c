"""Equal units as one: the groups that tables, pictures and comparisons show as one row.

Two units are equal if they differ in numbers in their names alone: leaves of the same paths, shapes
and dtypes, and the same options. A model of 126 equal blocks is one group, "126 × blocks.*".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard.plan.unit_plan import BufferPlan, UnitPlan

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """Equal units of a plan, in plan order.

    Attributes:
        title: name of the group for tables: ``"126 × blocks.*"``, or a unit's own title if the
            group has one unit.
        units: the units.
    """

    title: str
    units: tuple[UnitPlan, ...]

    def __post_init__(self) -> None:
        assert self.units, f"group {self.title!r} has no unit"

    @property
    def first(self) -> UnitPlan:
        """The unit that represents all."""
        return self.units[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the units."""
        return tuple(unit.name for unit in self.units)


def fold_units(
    units: Iterable[UnitPlan], *, key: Callable[[UnitPlan], Hashable] | None = None
) -> tuple[UnitGroup, ...]:
    """Return the groups of equal units, in the order of the first unit of each.

    Arguments:
        units: the units, in plan order.
        key: a function of a unit; units for which it differs are not equal.

    Returns:
        The groups; each unit is in exactly one.

    Example:
        >>> import torch, funcshard as fs
        >>> from funcshard.plan import fold_units
        >>> blocks = [{"w": torch.zeros(4)} for _ in range(126)]
        >>> params = {"blocks": blocks, "head": torch.zeros(2)}
        >>> plan = fs.make_plan(params, 2, units=["blocks.*"])
        >>> [group.title for group in fold_units(plan.unit_list)]
        ['(root)', '126 × blocks.*']
    """
    units_by_class: dict[Any, list[UnitPlan]] = {}
    for unit in units:
        units_by_class.setdefault((unit_class(unit), key and key(unit)), []).append(unit)
    patterns = [_pattern(members[0].name) for members in units_by_class.values()]
    return tuple(
        UnitGroup(_title(members, alone=patterns.count(pattern) == 1), tuple(members))
        for members, pattern in zip(units_by_class.values(), patterns, strict=True)
    )


def representatives(units: Iterable[UnitPlan]) -> dict[str, UnitPlan]:
    """Return, by name of each unit, the first unit of the same sizes and the same collectives.

    Such units agree in all but names and the leaves inside their buffers. A large model has few of
    them, so what depends on sizes alone is worked out once for each.

    Example:
        >>> import torch, funcshard as fs
        >>> from funcshard.plan import representatives
        >>> params = {"a": torch.zeros(2, 3), "b": torch.zeros(6), "c": torch.zeros(7)}
        >>> plan = fs.make_plan(params, 2, units=["a", "b", "c"])
        >>> {name: unit.name for name, unit in representatives(plan.unit_list).items()}
        {'a': 'a', 'b': 'a', 'c': 'c'}
    """
    first: dict[Hashable, UnitPlan] = {}
    first_units: dict[str, UnitPlan] = {}
    for unit in units:
        buffers = tuple(
            [(b.key, b.dtype, b.numel, b.trainable, b.shards, b.local) for b in unit.buffers]
        )
        freed = (unit.reshard_after_forward, unit.reshard_after_backward)
        # Why id: the units of a plan share their precision, and its hash takes long.
        key = (
            buffers,
            unit.strategy,
            freed,
            unit.offload,
            unit.mesh_shape,
            unit.axes,
            id(unit.precision),
        )
        first_units[unit.name] = first.setdefault(key, unit)
    return first_units


def unit_class(unit: UnitPlan) -> Hashable:
    """Return what equal units agree in: all but the numbers in names, and the places of leaves."""
    options: tuple[Hashable, ...] = (
        unit.strategy,
        unit.reshard_after_forward,
        unit.reshard_after_backward,
        unit.offload,
    )
    options += (unit.precision, unit.full_precision, unit.mesh_shape, unit.axes)
    return (
        _pattern(unit.name),
        len(unit.members),
        options,
        tuple(_buffer_class(unit, buffer) for buffer in unit.buffers),
    )


def _buffer_class(unit: UnitPlan, buffer: BufferPlan) -> Hashable:
    def relative(path: str) -> str:
        return _pattern(path) if unit.members else path.removeprefix(unit.name)

    leaves = tuple(
        (relative(leaf.path), leaf.shape, leaf.cuts, leaf.placements, len(leaf.aliases))
        for leaf in buffer.leaves
    )
    return buffer.key, buffer.dtype, buffer.trainable, buffer.shards, buffer.local, leaves


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def _title(units: Sequence[UnitPlan], *, alone: bool) -> str:
    """Return the title of a group; a glob only if it names no unit of another group."""
    if len(units) == 1:
        return units[0].title
    names = [unit.name for unit in units]
    return f"{len(units)} × {_glob(names) if alone else _names_text(names)}"


def _glob(names: Sequence[str]) -> str:
    """Return the name that all share, with a star for each number in which they differ."""
    columns = [
        set(column) for column in zip(*(_NUMBER.findall(name) for name in names), strict=True)
    ]
    numbers = iter(column.pop() if len(column) == 1 else "*" for column in columns)
    return _NUMBER.sub(lambda _: next(numbers), names[0])


def _names_text(names: Sequence[str]) -> str:
    """Return one or two names, and of more the first and the last."""
    return ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"
