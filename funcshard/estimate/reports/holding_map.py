"""Which rank holds which part of each unit, from the plan alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from funcshard._utils import table
from funcshard._utils.table import Shown, Table
from funcshard.plan import (
    BufferPlan,
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


@dataclass(frozen=True, slots=True)
class Holding:
    """How the ranks hold one buffer of a unit, or of each of some equal units.

    Attributes:
        group: the unit, or the equal units.
        buffer: the buffer of the first of them.
        axes: size of each mesh axis, in the order of ranks.
        cut: the axes along which parts differ, as of those; along the others are copies.
        gathered: bytes of the gathered buffer of one unit, padding included.
    """

    group: UnitGroup
    buffer: BufferPlan
    axes: Mapping[str, int]
    cut: Mapping[str, int]
    gathered: int

    @property
    def bytes(self) -> int:
        """Bytes that each rank holds of one unit, padding included."""
        return self.buffer.shard_numel * self.buffer.itemsize

    @property
    def parts(self) -> int:
        """Number of parts that differ."""
        return math.prod(self.cut.values())

    @property
    def copies(self) -> int:
        """Number of ranks that hold each part."""
        return math.prod(self.axes.values()) // self.parts

    def part(self, rank: int) -> int:
        """Return the number of the part that a rank holds."""
        # Note: ranks that agree on these axes hold the same part.
        return rank_at(position_of(rank, self.axes), self.cut)

    def held(self, shard: int) -> int:
        """Return the bytes of leaves, without padding, at an index on the shard axis."""
        buffer = self.buffer
        first_element = shard * buffer.shard_numel if buffer.shards > 1 else 0
        return (
            max(min(buffer.numel - first_element, buffer.shard_numel), 0) * buffer.itemsize
        )


@dataclass(frozen=True, slots=True, repr=False)
class Holdings(Shown):
    """The map of units and ranks of a plan; made by ``holdings``.

    Attributes:
        plan: the plan.
        rows: how the ranks hold each buffer, equal units once.
    """

    plan: Plan
    rows: tuple[Holding, ...]

    def shard_groups(self) -> list[range]:
        """Return the indices on the shard axis at which ranks hold equally much, as ranges."""
        shards = self.plan.mesh_shape[1]
        bounds = {0, shards}
        for row in self.rows:
            buffer = row.buffer
            if buffer.shards > 1 and buffer.numel:
                # Note: padding is at the end of a buffer, so at most one rank holds a part of a
                # shard, and the map of 16,384 ranks has few columns.
                full_ranks, last_numel = divmod(buffer.numel, buffer.shard_numel)
                bounds |= {full_ranks, full_ranks + bool(last_numel)}
        return [range(*pair) for pair in itertools.pairwise(sorted(bounds))]

    def _parts(self) -> list[Table]:
        # Note: the first groups and the last one have a column; most groups differ by a few bytes.
        shard_groups = shown_groups = self.shard_groups()
        if len(shown_groups) > _MOST_GROUPS:
            shown_groups = [*shown_groups[: _MOST_GROUPS - 1], shown_groups[-1]]
        header = ["unit", "buffer", "gathered", "parts", "copies"]
        rows = [
            [row.group.title, row.buffer.key, table.size(row.gathered),
             axes_text(row.cut, ones=()) if row.cut else "whole", str(row.copies)]
            for row in self.rows
        ]  # fmt: skip
        gathered_bytes = sum(row.gathered * len(row.group.units) for row in self.rows)
        total_row = ["total", "", table.size(gathered_bytes), "", ""]
        for group in shown_groups:
            bounds = dict.fromkeys((group[0], group[-1]))
            header.append(f"shard {'–'.join(map(str, bounds))}")
            for cells, row in zip(rows, self.rows, strict=True):
                cells.append(table.size(row.held(group[0])))
            held_bytes = sum(row.held(group[0]) * len(row.group.units) for row in self.rows)
            total_row.append(table.size(held_bytes))
        title = f"Holdings of {mesh_text(self.plan.mesh_axes)}, bytes without padding of one unit and rank"
        if left_out := len(shard_groups) - len(shown_groups):
            title += f"; {left_out} groups of ranks with other padding are left out"
        return [Table(title, header, rows, total_row)]


def holdings(plan: Plan) -> Holdings:
    """Return which rank holds which part of each unit.

    Arguments:
        plan: your plan.

    Returns:
        The map, with equal units and equal ranks once, which you can print.

    Raises:
        TypeError: ``plan`` isn't a plan.

    Example:
        >>> import torch
        >>> import funcshard as fs
        >>> from funcshard.estimate import holdings
        >>> params = {"blocks": [{"w": torch.zeros(5)} for _ in range(3)]}
        >>> found = holdings(fs.make_plan(params, {"replicate": 2, "shard": 2}, units=["blocks.*"]))
        >>> [(row.group.title, row.held(0), row.held(1)) for row in found.rows]
        [('3 × blocks.*', 12, 8)]
    """
    check_plan(plan)
    return Holdings(plan, tuple(_rows(plan)))


def _rows(plan: Plan) -> Iterator[Holding]:
    for group in fold_units(plan.unit_list):
        for buffer in group.first.buffers:
            cut_axes = {*buffer.local, *["shard"] * (buffer.shards > 1)}
            yield Holding(
                group=group,
                buffer=buffer,
                axes=plan.mesh_axes,
                cut={
                    axis: n
                    for axis, n in plan.mesh_axes.items()
                    if axis in cut_axes and n > 1
                },
                gathered=buffer.model_numel * group.first.dtypes(buffer).computed.itemsize,
            )
