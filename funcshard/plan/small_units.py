"""Buckets: which adjacent units share their collectives, by a given limit or by a rule.

The rule is for models of many tiny units, whose collectives take longer to start than to run. It
reads sizes and options alone, so every rank and every process makes the same buckets.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any

from funcshard._utils import check_count
from funcshard.plan.unit_plan import UnitPlan

__all__ = ["BUCKET_BYTES", "LEAST_UNITS", "SMALL_UNIT", "check_bucket_bytes", "gathered_bytes", "small_buckets",
           "with_buckets"]  # fmt: skip

Buckets = tuple[tuple[str, ...], ...]

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
    if limit is not None:
        return tuple(units), _filled(units, limit)
    small = [unit for run in _runs(units) if len(run) >= LEAST_UNITS for unit in run]
    if not small:
        return tuple(units), ()
    if sum(map(gathered_bytes, small)) <= BUCKET_BYTES:
        kept = {unit.name for unit in small if unit.reshard_after_forward and unit.name in undecided}
        units = [dataclasses.replace(unit, reshard_after_forward=False) if unit.name in kept else unit for unit in units]
    return tuple(units), _filled(units, BUCKET_BYTES, {unit.name for unit in small})


def small_buckets(units: Sequence[UnitPlan]) -> Buckets:
    """Return the buckets that the rule of ``"auto"`` makes of units."""
    return with_buckets(units, None, ())[1]


def _runs(units: Sequence[UnitPlan]) -> list[list[UnitPlan]]:
    """Return the longest runs of adjacent small units that may share their collectives."""
    alike = itertools.groupby(
        units, key=lambda unit: unit.bucket_key if _fits(unit) and gathered_bytes(unit) <= SMALL_UNIT else None
    )
    return [list(run) for key, run in alike if key is not None]


def _fits(unit: UnitPlan) -> bool:
    return unit.name != "" and not unit.members and unit.post_forward_ranks is None


def _filled(units: Sequence[UnitPlan], limit: int, among: Collection[str] | None = None) -> Buckets:
    """Return groups of adjacent units whose gathered buffers take at most ``limit`` bytes."""
    if not limit:
        return ()
    buckets: list[list[str]] = []
    last, size = None, 0
    for unit in units:
        own = gathered_bytes(unit)
        fits = own <= limit and _fits(unit) and (among is None or unit.name in among)
        if fits and unit.bucket_key == last and size + own <= limit:
            buckets[-1].append(unit.name)
            size += own
        elif fits:
            buckets.append([unit.name])
            last, size = unit.bucket_key, own
        else:
            last = None
    return tuple(tuple(bucket) for bucket in buckets if len(bucket) > 1)
