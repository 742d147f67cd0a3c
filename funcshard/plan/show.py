"""The table that a printed plan shows: one row a flat buffer, and a total."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from funcshard._utils import table
from funcshard.plan.mesh_axes import AXES, axes_text, world_size_of
from funcshard.plan.precision import dtype_name, dtype_of
from funcshard.plan.unit_plan import BufferPlan, UnitPlan

__all__ = ["mesh_text", "plan_table"]


def plan_table(
    fingerprint: str, mesh_axes: Mapping[str, int], units: Sequence[UnitPlan], buckets: Sequence[Sequence[str]]
) -> tuple[str, list[str], list[list[str]], list[str]]:
    """Return title, header, rows and total of the table of a plan.

    The table of a plan with buckets has one more column: the number of each unit's bucket.
    """
    pairs = [(unit, buffer) for unit in units for buffer in unit.buffers]
    header = ["unit", "buffer", "leaves", "numel", "padding", "bytes a rank", "strategy"]
    rows = [[unit.title, buffer.key, *_sums([buffer]), _strategy(unit, buffer)] for unit, buffer in pairs]
    total = ["total", "", *_sums([buffer for _, buffer in pairs]), ""]
    if buckets:
        numbers = {name: str(number) for number, bucket in enumerate(buckets, start=1) for name in bucket}
        header.append("bucket")
        total.append("")
        for row, (unit, _) in zip(rows, pairs, strict=True):
            row.append(numbers.get(unit.name, ""))
    return _title(fingerprint, mesh_axes, buckets), header, rows, total


def _title(fingerprint: str, mesh_axes: Mapping[str, int], buckets: Sequence[Sequence[str]]) -> str:
    mesh = mesh_text(mesh_axes)
    shared = f", {sum(map(len, buckets))} units in {_counted(len(buckets), 'bucket')}" if buckets else ""
    return f"Plan {fingerprint} for {mesh}{shared}"


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
        strategy += ", freed after forward" if unit.reshard_after_forward else ", kept until backward"
    if buffer.local:
        strategy = "local to a rank" if buffer.local == AXES else f"local along {', '.join(buffer.local)}"
        strategy += "" if "shard" in buffer.local else f", {unit.strategy} along shard"
    strategy += ", offload" if unit.offload else ""
    own, gathered, reduced = dtype_of(buffer.dtype), unit.gathered_dtype(buffer), unit.reduced_dtype(buffer)
    if len({own, gathered, reduced}) > 1:
        strategy += f", in {dtype_name(gathered)}"
        strategy += f", reduced in {dtype_name(reduced)}" if buffer.trainable and reduced != gathered else ""
    if unit.precision is not None and unit.precision.output_dtype is not None:
        strategy += f", outputs in {dtype_name(unit.precision.output_dtype)}"
    return strategy + (", full precision" if unit.full_precision else "")


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number > 1 else ''}"
