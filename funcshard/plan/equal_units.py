"""Equal units as one: the groups that tables, pictures and comparisons show as one row.

Two units are equal if they differ in the numbers in their names alone: a model of 126 equal blocks
is one group, "126 × blocks.*".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils import table
from funcshard._utils.table import Table
from funcshard._utils.tensors import dtype_name
from funcshard.plan.mesh_axes import AXES, mesh_text
from funcshard.plan.unit_plan import BufferPlan, UnitPlan

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class UnitGroup:
    """Equal units of a plan, in plan order.

    Attributes:
        title: name for tables: ``"126 × blocks.*"``, or the title of the only unit.
        units: the units.
    """

    title: str
    units: tuple[UnitPlan, ...]

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
    equal_units = units_by_class.values()
    # How many groups have names of each pattern: a glob says nothing if there are several.
    patterns = Counter(_pattern(group_units[0].name) for group_units in equal_units)
    return tuple(
        [
            UnitGroup(_title(group_units, patterns), tuple(group_units))
            for group_units in equal_units
        ]
    )


def representatives(units: Iterable[UnitPlan]) -> dict[str, UnitPlan]:
    """Return, by name of each unit, the first unit of the same sizes and the same collectives.

    A large model has few of them, so what depends on sizes alone is worked out once for each.

    Example:
        >>> import torch, funcshard as fs
        >>> from funcshard.plan import representatives
        >>> params = {"a": torch.zeros(2, 3), "b": torch.zeros(6), "c": torch.zeros(7)}
        >>> plan = fs.make_plan(params, 2, units=["a", "b", "c"])
        >>> {name: unit.name for name, unit in representatives(plan.unit_list).items()}
        {'a': 'a', 'b': 'a', 'c': 'c'}
    """
    first_units_by_key: dict[Hashable, UnitPlan] = {}
    first_units: dict[str, UnitPlan] = {}
    for unit in units:
        buffer_classes = tuple(
            [
                (b.key, b.dtype, b.numel, b.trainable, b.shards, b.local)
                for b in unit.buffers
            ]
        )
        # Why id: the units of a plan share their precision, and its hash takes long.
        key = buffer_classes, _options_of(unit), id(unit.precision)
        first_units[unit.name] = first_units_by_key.setdefault(key, unit)
    return first_units


def unit_class(unit: UnitPlan) -> Hashable:
    """Return what equal units agree in: all but the numbers in names, and the places of leaves."""
    precisions = unit.precision, unit.full_precision
    buffer_classes = tuple([_buffer_class(unit, buffer) for buffer in unit.buffers])
    return (
        _pattern(unit.name),
        len(unit.members),
        _options_of(unit),
        precisions,
        buffer_classes,
    )


def _options_of(unit: UnitPlan) -> Hashable:
    freed = unit.reshard_after_forward, unit.reshard_after_backward
    return unit.strategy, freed, unit.offload, unit.mesh_shape, unit.axes


def _buffer_class(unit: UnitPlan, buffer: BufferPlan) -> Hashable:
    paths = [leaf.path.removeprefix(unit.name) for leaf in buffer.leaves]
    # The paths of a group's leaves begin with those of its modules.
    if unit.members:
        paths = [_pattern(leaf_path) for leaf_path in paths]
    leaves = tuple([
        (leaf_path, leaf.shape, leaf.unpacked, leaf.cuts, leaf.placements, len(leaf.aliases))
        for leaf_path, leaf in zip(paths, buffer.leaves, strict=True)
    ])  # fmt: skip
    return buffer.key, buffer.dtype, buffer.trainable, buffer.shards, buffer.local, leaves


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def _title(units: Sequence[UnitPlan], patterns: Mapping[str, int]) -> str:
    """Return the title of a group; a glob only if it names no unit of another group."""
    unit_names = [unit.name for unit in units]
    # A group of one unit needs no pattern.
    if len(units) == 1:
        return units[0].title
    if patterns[_pattern(unit_names[0])] == 1:
        return f"{len(units)} × {_glob(unit_names)}"
    joint = ", " if len(unit_names) == 2 else " … "
    return f"{len(units)} × {unit_names[0]}{joint}{unit_names[-1]}"


def _glob(names: Sequence[str]) -> str:
    """Return the name that all share, with a star for each number in which they differ."""
    number_columns = zip(*(_NUMBER.findall(name) for name in names), strict=True)
    number_texts = iter(
        [column[0] if len({*column}) == 1 else "*" for column in number_columns]
    )
    return _NUMBER.sub(lambda _: next(number_texts), names[0])


def plan_table(
    fingerprint: str, mesh_axes: Mapping[str, int], units: Sequence[UnitPlan]
) -> Table:
    """Return the table of a plan, with equal units as one row and a total of all."""
    unit_groups = fold_units(units)
    header = ["unit", "buffer", "leaves", "numel", "padding", "bytes a rank", "strategy"]
    rows = [
        [group.title, buffer.key, *_sums([buffer]), _strategy(group.first, buffer)]
        for group in unit_groups
        for buffer in group.first.buffers
    ]
    total_row = [
        "total",
        "",
        *_sums([buffer for unit in units for buffer in unit.buffers]),
        "",
    ]
    folded_note = (
        "; a row n × shows one of n equal units" if len(unit_groups) < len(units) else ""
    )
    return Table(
        f"Plan {fingerprint} for {mesh_text(mesh_axes)}{folded_note}",
        header,
        rows,
        total_row,
    )


def _sums(buffers: Sequence[BufferPlan]) -> list[str]:
    """Return the number of leaves, elements, padding elements and bytes a rank."""
    leaves = sum(len(buffer.leaves) for buffer in buffers)
    numel = sum(leaf.model_numel for buffer in buffers for leaf in buffer.leaves)
    padding = sum(buffer.model_numel for buffer in buffers) - numel
    size = sum(buffer.shard_numel * buffer.itemsize for buffer in buffers)
    return [*map(table.count, (leaves, numel, padding)), table.size(size)]


def _strategy(unit: UnitPlan, buffer: BufferPlan) -> str:
    """Return the strategy of a buffer, with its offload and dtypes if they are special."""
    strategy_words = [unit.strategy]
    if buffer.local == AXES:
        strategy_words = ["local to a rank"]
    elif buffer.local:
        strategy_words = [f"local along {', '.join(buffer.local)}"]
        if "shard" not in buffer.local:
            strategy_words.append(f"{unit.strategy} along shard")
    elif not unit.reshard_after_backward:
        strategy_words.append("kept over micro-batches")
    elif unit.post_forward_ranks is not None:
        strategy_words.append(f"over {unit.post_forward_ranks} ranks after forward")
    # What the strategy says itself is not said again.
    elif unit.reshard_after_forward and unit.strategy != "full_shard":
        strategy_words.append("freed after forward")
    elif unit.strategy == "full_shard" and not unit.reshard_after_forward:
        strategy_words.append("kept until backward")
    if unit.offload:
        strategy_words.append("offload")
    gathered_dtype, computed_dtype, reduced_dtype, _ = unit.dtypes(buffer)
    if buffer.packing is not None:
        strategy_words.append(f"decoded to {dtype_name(computed_dtype)}")
    elif {gathered_dtype, reduced_dtype} != {buffer.shard_dtype}:
        strategy_words.append(f"in {dtype_name(gathered_dtype)}")
        if buffer.trainable and reduced_dtype != gathered_dtype:
            strategy_words.append(f"reduced in {dtype_name(reduced_dtype)}")
    if unit.precision is not None and unit.precision.output_dtype is not None:
        strategy_words.append(f"outputs in {dtype_name(unit.precision.output_dtype)}")
    if unit.full_precision:
        strategy_words.append("full precision")
    return ", ".join(strategy_words)
