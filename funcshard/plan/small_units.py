"""Buckets: which adjacent units share their collectives, by a given limit or by a rule.

The rule is for models of many tiny units, whose collectives take longer to start than to run. It
reads sizes and options alone, so every rank and every process makes the same buckets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from funcshard._utils import check_count
from funcshard.plan.unit_plan import UnitPlan

__all__ = ["BUCKET_BYTES", "LEAST_UNITS", "SMALL_UNIT", "check_bucket_bytes", "gathered_bytes", "small_buckets",
           "with_buckets"]  # fmt: skip

Buckets = tuple[tuple[str, ...], ...]


class _Row(NamedTuple):
    """A unit, the bytes of its gathered buffers, and its key; ``None`` if it can share nothing."""

    unit: UnitPlan
    size: int
    key: tuple[Any, ...] | None


# The rule of "auto": at least so many adjacent units of at most so many gathered bytes form
# buckets, of at most so many bytes.
LEAST_UNITS = 32
BUCKET_BYTES = 1 << 20
SMALL_UNIT = BUCKET_BYTES // LEAST_UNITS


def check_bucket_bytes(value: Any) -> int | None:
    """Return ``bucket_bytes`` as a number, ``None`` for ``"auto"``; raise if it is neither."""
    if isinstance(value, str) and value == "auto":
        return None
    return check_count("bucket_bytes", value, 0, of="bytes", remedy='pass 0 for no buckets, or "auto"')


def gathered_bytes(unit: UnitPlan) -> int:
    """Return the bytes of a unit's gathered buffers."""
    return sum(buffer.padded_numel * unit.gathered_dtype(buffer).itemsize for buffer in unit.buffers)


def with_buckets(
    units: Sequence[UnitPlan], limit: int | None, undecided: Collection[str]
) -> tuple[tuple[UnitPlan, ...], Buckets]:
    """Return the units and the buckets of a plan.

    Arguments:
        units: the units in plan order.
        limit: the most gathered bytes of a bucket, 0 for no buckets, ``None`` for the rule.
        undecided: the names of the units whose ``reshard_after_forward`` no option sets. If all
            buckets of the rule together fit into one, these units stay gathered after forward.
    """
    if limit == 0:
        return tuple(units), ()
    rows = [_Row(unit, gathered_bytes(unit), unit.bucket_key if _fits(unit) else None) for unit in units]
    if limit is not None:
        return tuple(units), _filled(rows, limit)
    small = [row for run in _runs(rows) if len(run) >= LEAST_UNITS for row in run]
    if not small:
        return tuple(units), ()
    if sum([row.size for row in small]) <= BUCKET_BYTES:
        kept = {row.unit.name for row in small if row.unit.reshard_after_forward and row.unit.name in undecided}
        units = [dataclasses.replace(unit, reshard_after_forward=False) if unit.name in kept else unit for unit in units]
        rows = [
            _Row(unit, row.size, unit.bucket_key if row.key else None) if unit is not row.unit else row
            for unit, row in zip(units, rows, strict=True)
        ]
    return tuple(units), _filled(rows, BUCKET_BYTES, {row.unit.name for row in small})


def small_buckets(units: Sequence[UnitPlan]) -> Buckets:
    """Return the buckets that the rule of ``"auto"`` makes of units."""
    return with_buckets(units, None, ())[1]


def _runs(rows: Iterable[_Row]) -> list[list[_Row]]:
    """Return the longest runs of adjacent small units that may share their collectives."""
    alike = itertools.groupby(rows, key=lambda row: row.key if row.size <= SMALL_UNIT else None)
    return [list(run) for key, run in alike if key is not None]


def _fits(unit: UnitPlan) -> bool:
    return unit.name != "" and not unit.members and unit.post_forward_ranks is None


def _filled(rows: Iterable[_Row], limit: int, among: Collection[str] | None = None) -> Buckets:
    """Return groups of adjacent units whose gathered buffers take at most ``limit`` bytes."""
    buckets: list[list[str]] = []
    last, size = None, 0
    for unit, own, key in rows:
        if key is None or own > limit or (among is not None and unit.name not in among):
            last = None
        elif key == last and size + own <= limit:
            buckets[-1].append(unit.name)
            size += own
        else:
            buckets.append([unit.name])
            last, size = key, own
    return tuple(tuple(bucket) for bucket in buckets if len(bucket) > 1)
