"""Small units: which adjacent ones become one group, by a given limit or by a rule.

The rule is for models of many tiny units, whose collectives take longer to start than to run. It
reads sizes and options alone, so every rank and every process makes the same groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from funcshard._utils import check_count, tree
from funcshard.plan.unit_plan import UnitPlan

_TO = "…"  # between the first and the last unit in the name of a group

# The rule of "auto": at least so many adjacent units of at most so many gathered bytes form
# groups, of at most so many bytes.
_LEAST_UNITS = 32
_GROUP_BYTES = 1 << 20
_SMALL_UNIT = _GROUP_BYTES // _LEAST_UNITS


class SmallGroup(NamedTuple):
    """Units that become one.

    Attributes:
        units: their names, in plan order.
        stays: whether they stay gathered until backward, although their strategy frees them.
    """

    units: tuple[str, ...]
    stays: bool = False


class _SizedUnit(NamedTuple):
    """A unit, the bytes of its gathered buffers, and its key; ``None`` if it stays alone."""

    unit: UnitPlan
    size: int
    key: tuple[Any, ...] | None


def joined_name(units: Sequence[str]) -> str:
    """Return the name of a group of small units: that of the first and that of the last."""
    return f"{units[0]}{_TO}{units[-1]}"


def ends_of(name: str) -> list[str]:
    """Return the units after which a group of small units is named; for another unit, its name."""
    return name.split(_TO)


def check_bucket_bytes(value: Any) -> int | None:
    """Return ``bucket_bytes`` as a number, ``None`` for ``"auto"``; raise if it is neither."""
    if isinstance(value, str) and value == "auto":
        return None
    return check_count(
        "bucket_bytes", value, 0, of="bytes", remedy='pass 0 for no groups, or "auto"'
    )


def small_groups(
    units: Sequence[UnitPlan],
    limit: int | None,
    undecided: Collection[str],
    modules: Collection[int],
) -> list[SmallGroup]:
    """Return the groups that small units of a plan form.

    Arguments:
        units: the units in plan order.
        limit: the most gathered bytes of a group, 0 for no groups, ``None`` for the rule.
        undecided: the names of the units whose ``reshard_after_forward`` no option sets. If all
            groups of the rule together fit into one, these units stay gathered after forward.
        modules: the indices of the leaves that ``make_functional`` returned. The rule leaves all
            others alone, because programs by hand look their units up by name.
    """
    if limit == 0:
        return []
    sized = [_SizedUnit(unit, _gathered_bytes(unit), _key(unit, undecided)) for unit in units]
    if limit is not None:
        return [SmallGroup(names) for names in _filled(sized, limit)]
    alike = itertools.groupby(
        sized, key=lambda each: each.key if _is_small(each, modules) else None
    )
    runs = [
        members
        for key, run in alike
        if key is not None and len(members := list(run)) >= _LEAST_UNITS
    ]
    fits = sum(small_unit.size for run in runs for small_unit in run) <= _GROUP_BYTES
    return [
        SmallGroup(
            names, fits and names[0] in undecided and bool(run[0].unit.reshard_after_forward)
        )
        for run in runs
        for names in _filled(run, _GROUP_BYTES)
    ]


def _gathered_bytes(unit: UnitPlan) -> int:
    return sum(
        buffer.padded_numel * unit.gathered_dtype(buffer).itemsize for buffer in unit.buffers
    )


def _key(unit: UnitPlan, undecided: Collection[str]) -> tuple[Any, ...] | None:
    """Return all in which the units of a group agree; ``None`` for a unit that joins none."""
    if unit.name == "" or unit.members:
        return None
    kinds = tuple(
        [(buffer.key, buffer.dtype, buffer.trainable, buffer.local) for buffer in unit.buffers]
    )
    freeing = (unit.reshard_after_forward, unit.name in undecided, unit.reshard_after_backward)
    return unit.strategy, freeing, unit.offload, unit.precision, unit.full_precision, kinds


def _is_small(sized: _SizedUnit, modules: Collection[int]) -> bool:
    return sized.size <= _SMALL_UNIT and all(leaf.index in modules for leaf in sized.unit.leaves)


def _filled(units: Iterable[_SizedUnit], limit: int) -> list[tuple[str, ...]]:
    """Return groups of adjacent units whose gathered buffers take at most ``limit`` bytes."""
    groups: list[dict[str, None]] = []
    around: set[str] = set()  # the nodes that hold a unit of the last group
    last, total = None, 0
    for unit, size, key in units:
        if key is None or size > limit:
            last = None
            continue
        above = [*tree.upwards(unit.name)]
        # Why: a unit and one inside it run at the same time, so they cannot be one.
        nested = unit.name in around or (groups and not groups[-1].keys().isdisjoint(above))
        if key != last or total + size > limit or nested:
            groups.append({})
            around, last, total = set(), key, 0
        groups[-1][unit.name] = None
        around.update(above)
        total += size
    return [tuple(names) for names in groups if len(names) > 1]
