"""The table that a printed plan shows: one row a flat buffer, and a total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from funcshard._utils import Table, dtype_name, dtype_of, table
from funcshard.plan.equal_units import fold_units
from funcshard.plan.mesh_axes import AXES, axes_text, world_size_of
from funcshard.plan.unit_plan import BufferPlan, UnitPlan


def plan_table(fingerprint: str, mesh_axes: Mapping[str, int], units: Sequence[UnitPlan]) -> Table:
    """Return the table of a plan.

    Equal units are one row, with the numbers of one of them; the total counts them all.
    """
    groups = fold_units(units)
    header = ["unit", "buffer", "leaves", "numel", "padding", "bytes a rank", "strategy"]
    rows = [
        [group.title, buffer.key, *_sums([buffer]), _strategy(group.first, buffer)]
        for group in groups
        for buffer in group.first.buffers
    ]
    total = ["total", "", *_sums([buffer for unit in units for buffer in unit.buffers]), ""]
    folded = "; a row n × shows one of n equal units" if len(groups) < len(units) else ""
    return Table(f"Plan {fingerprint} for {mesh_text(mesh_axes)}{folded}", header, rows, total)


def mesh_text(mesh_axes: Mapping[str, int]) -> str:
    """Return the ranks of a mesh as text, such as ``8 ranks = 2 replicate × 4 shard``."""
    ranks = _counted(world_size_of(mesh_axes), "rank")
    grid = any(size > 1 for axis, size in mesh_axes.items() if axis != "shard")
    ones = AXES if mesh_axes["replicate"] > 1 else ()
    return f"{ranks} = {axes_text(mesh_axes, ones=ones)}" if grid else ranks


def _sums(buffers: Sequence[BufferPlan]) -> list[str]:
    """Return the number of leaves, elements, padding elements and bytes a rank of some buffers."""
    leaves = sum(len(buffer.leaves) for buffer in buffers)
    numel = sum(buffer.numel for buffer in buffers)
    padding = sum(buffer.padded_numel for buffer in buffers) - numel
    size = sum(buffer.shard_numel * buffer.itemsize for buffer in buffers)
    return [*map(table.count, (leaves, numel, padding)), table.size(size)]


def _strategy(unit: UnitPlan, buffer: BufferPlan) -> str:
    """Return the strategy of a buffer, followed by its offload and dtypes if they are special."""
    strategy = unit.strategy
    if not unit.reshard_after_backward:
        strategy += ", kept over micro-batches"
    elif unit.post_forward_ranks is not None:
        strategy += f", over {unit.post_forward_ranks} ranks after forward"
    elif unit.reshard_after_forward != (strategy == "full_shard"):
        strategy += (
            ", freed after forward" if unit.reshard_after_forward else ", kept until backward"
        )
    if buffer.local:
        strategy = (
            "local to a rank" if buffer.local == AXES else f"local along {', '.join(buffer.local)}"
        )
        strategy += "" if "shard" in buffer.local else f", {unit.strategy} along shard"
    strategy += ", offload" if unit.offload else ""
    own_dtype = dtype_of(buffer.dtype)
    gathered = unit.gathered_dtype(buffer)
    reduced = unit.reduced_dtype(buffer)
    if len({own_dtype, gathered, reduced}) > 1:
        strategy += f", in {dtype_name(gathered)}"
        strategy += (
            f", reduced in {dtype_name(reduced)}"
            if buffer.trainable and reduced != gathered
            else ""
        )
    if unit.precision is not None and unit.precision.output_dtype is not None:
        strategy += f", outputs in {dtype_name(unit.precision.output_dtype)}"
    return strategy + (", full precision" if unit.full_precision else "")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"
