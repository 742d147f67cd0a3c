"""Which rank holds which part of each unit, from the plan alone.

A buffer of a unit is cut into equal parts along the shard axis, and has other values along the axes
to which its leaves are local. Along every other axis the ranks hold copies. Ranks differ in their
bytes only by padding, which is at the end of a buffer, so a map of 16,384 ranks has few columns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from funcshard._utils import Shown, Table, table
from funcshard.plan import (
    BufferPlan,
    LeafPart,
    Plan,
    UnitGroup,
    axes_text,
    check_plan,
    fold_units,
    mesh_text,
    position_of,
    rank_at,
)

_MOST_GROUPS = 4  # groups of ranks with a column of their own


class Held(NamedTuple):
    """The elements of one leaf that a rank holds.

    Attributes:
        unit: name of the unit.
        path: path of the leaf.
        part: the elements.
        bytes: their size.
    """

    unit: str
    path: str
    part: LeafPart
    bytes: int


class RankGroup(NamedTuple):
    """Ranks that hold equally many bytes of each buffer: those of some indices on the shard axis.

    Attributes:
        begin: the first index on the shard axis.
        end: the index after the last.
        ranks: number of ranks; every axis but the shard axis has all its indices.
    """

    begin: int
    end: int
    ranks: int

    @property
    def title(self) -> str:
        """Name of the group for tables, such as ``shard 0–6``."""
        last = self.end - 1
        return f"shard {self.begin}" if self.begin == last else f"shard {self.begin}–{last}"


@dataclass(frozen=True, slots=True)
class Holding:
    """How the ranks hold one buffer of a unit, or of each of some equal units.

    Attributes:
        group: the unit, or the equal units.
        buffer: the buffer of the first of them.
        axes: size of each mesh axis, in the order of ranks.
        cut: the axes along which ranks hold other parts; copies lie along the others.
        gathered: bytes of the gathered buffer of one unit, padding included.
    """

    group: UnitGroup
    buffer: BufferPlan
    axes: tuple[tuple[str, int], ...]
    cut: tuple[str, ...]
    gathered: int

    @property
    def bytes(self) -> int:
        """Bytes that each rank holds of one unit, padding included."""
        return self.buffer.shard_numel * self.buffer.itemsize

    @property
    def parts(self) -> int:
        """Number of parts that differ."""
        return math.prod(size for axis, size in self.axes if axis in self.cut)

    @property
    def copies(self) -> int:
        """Number of ranks that hold each part."""
        return math.prod(size for axis, size in self.axes if axis not in self.cut)

    def part(self, rank: int) -> int:
        """Return the number of the part that a rank holds."""
        position = position_of(rank, dict(self.axes))
        cut = {axis: size for axis, size in self.axes if axis in self.cut}
        return rank_at({axis: position[axis] for axis in cut}, cut)

    def held(self, shard: int) -> int:
        """Return the bytes of leaves, without padding, at an index on the shard axis."""
        first = shard * self.buffer.shard_numel if self.buffer.shards > 1 else 0
        return (
            max(min(self.buffer.numel - first, self.buffer.shard_numel), 0) * self.buffer.itemsize
        )


@dataclass(frozen=True, slots=True, repr=False)
class Holdings(Shown):
    """The map of units and ranks of a plan; made by ``holdings``.

    Attributes:
        plan: the plan.
        rows: how the ranks hold each buffer, equal units once.
        ranks: the groups of ranks that hold equally many bytes.
    """

    plan: Plan
    rows: tuple[Holding, ...]
    ranks: tuple[RankGroup, ...]

    def of_rank(self, rank: int) -> tuple[Held, ...]:
        """Return the elements of leaves that one rank holds, in plan order.

        Raises:
            ValueError: the mesh has no such rank.
        """
        world_size = self.plan.world_size
        if not 0 <= rank < world_size:
            raise ValueError(
                f"rank must be one of the plan's {world_size} ranks; found {rank}: pass 0 to "
                f"{world_size - 1}"
            )
        shard = position_of(rank, self.plan.mesh_axes)["shard"]
        rank_holdings = []
        for unit in self.plan.unit_list:
            for buffer in unit.buffers:
                parts = [(leaf.path, buffer.part(leaf, shard)) for leaf in buffer.leaves]
                rank_holdings += [
                    Held(unit.name, path, part, part.numel * buffer.itemsize)
                    for path, part in parts
                    if part.numel
                ]
        return tuple(rank_holdings)

    def bytes_of(self, rank: int) -> int:
        """Return the bytes of leaves that one rank holds, without padding."""
        shard = position_of(rank, self.plan.mesh_axes)["shard"]
        return sum(row.held(shard) * len(row.group.units) for row in self.rows)

    def _parts(self) -> list[Table]:
        shown = _shown(self.ranks)
        header = [
            "unit",
            "buffer",
            "gathered",
            "parts",
            "copies",
            *(group.title for group in shown),
        ]
        rows = [
            [
                row.group.title, row.buffer.key, table.size(row.gathered), _parts_text(row), str(row.copies),
                *(table.size(row.held(group.begin)) for group in shown),
            ]
            for row in self.rows
        ]  # fmt: skip
        gathered = sum(row.gathered * len(row.group.units) for row in self.rows)
        sums = [
            sum(row.held(group.begin) * len(row.group.units) for row in self.rows)
            for group in shown
        ]
        left_out = len(self.ranks) - len(shown)
        title = f"Holdings of {mesh_text(self.plan.mesh_axes)}, bytes without padding of one unit and rank"
        title += f"; {left_out} groups of ranks with other padding are left out" if left_out else ""
        return [
            Table(
                title,
                header,
                rows,
                ["total", "", table.size(gathered), "", "", *map(table.size, sums)],
            )
        ]


def holdings(plan: Plan) -> Holdings:
    """Return which rank holds which part of each unit.

    Arguments:
        plan: the plan.

    Returns:
        The map, with equal units and equal ranks once. ``print`` and notebooks show it as a table.

    Raises:
        TypeError: ``plan`` is no plan.

    Example:
        >>> import torch
        >>> import funcshard as fs
        >>> from funcshard.estimate.reports.holding_map import holdings
        >>> params = {"blocks": [{"w": torch.zeros(5)} for _ in range(3)]}
        >>> found = holdings(fs.make_plan(params, {"replicate": 2, "shard": 2}, units=["blocks.*"]))
        >>> [(group.title, group.ranks) for group in found.ranks]
        [('shard 0', 2), ('shard 1', 2)]
        >>> found.bytes_of(0), found.bytes_of(1), found.of_rank(1)[0].part.in_leaf
        (36, 24, slice(3, 5, None))
    """
    check_plan(plan)
    axes = tuple(plan.mesh_axes.items())
    rows = tuple(_rows(plan, axes))
    bounds = sorted(
        {0, plan.mesh_shape[1], *(bound for row in rows for bound in _bounds(row.buffer))}
    )
    others = plan.world_size // plan.mesh_shape[1]
    groups = [
        RankGroup(begin, end, (end - begin) * others) for begin, end in itertools.pairwise(bounds)
    ]
    return Holdings(plan, rows, tuple(groups))


def _rows(plan: Plan, axes: tuple[tuple[str, int], ...]) -> Iterator[Holding]:
    for group in fold_units(plan.unit_list):
        for buffer in group.first.buffers:
            cut_axes = {*buffer.local, *(["shard"] if buffer.shards > 1 else [])}
            cut = tuple(axis for axis, size in axes if axis in cut_axes and size > 1)
            yield Holding(
                group,
                buffer,
                axes,
                cut,
                buffer.padded_numel * group.first.gathered_dtype(buffer).itemsize,
            )


def _bounds(buffer: BufferPlan) -> list[int]:
    """Return the indices on the shard axis from which ranks hold fewer elements than before."""
    if buffer.shards == 1 or not buffer.numel:
        return []
    full, last_numel = divmod(buffer.numel, buffer.shard_numel)
    return [
        bound for bound in ([full, full + 1] if last_numel else [full]) if bound < buffer.shards
    ]


def _shown(groups: tuple[RankGroup, ...]) -> tuple[RankGroup, ...]:
    """Return the groups with a column: the first ones and the last."""
    return groups if len(groups) <= _MOST_GROUPS else (*groups[: _MOST_GROUPS - 1], groups[-1])


def _parts_text(row: Holding) -> str:
    return (
        axes_text({axis: size for axis, size in row.axes if axis in row.cut}, ones=())
        if row.cut
        else "whole"
    )
