"""Small units: which adjacent ones become one group, by a given limit or by a rule."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

from funcshard._utils import tree
from funcshard._utils.options import check_count
from funcshard.plan.unit_plan import UnitPlan

_TO = "…"  # between the first and the last unit in the name of a group

# The rule of "auto": at least so many adjacent units of at most so many gathered bytes form
# groups, of at most so many bytes.
# Why sizes and options alone: every rank and every process has to make the same groups.
_LEAST_UNITS = 32
_GROUP_BYTES = 1 << 20
_SMALL_UNIT = _GROUP_BYTES // _LEAST_UNITS


def joined_name(units: Sequence[str]) -> str:
    """Return the name of a group of small units: that of the first and that of the last."""
    return f"{units[0]}{_TO}{units[-1]}"


def ends_of(name: str) -> list[str]:
    """Return the ends of a group of small units; for another unit, its name."""
    return name.split(_TO)


def check_bucket_bytes(value: Any) -> int | None:
    """Return ``bucket_bytes`` as a number, ``None`` for ``"auto"``; raise otherwise."""
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
) -> dict[tuple[str, ...], bool]:
    """Return the groups that small units of a plan form.

    Arguments:
        units: the units in plan order.
        limit: the most gathered bytes of a group, 0 for no groups, ``None`` for the rule.
        undecided: the units whose ``reshard_after_forward`` no option sets.
        modules: the indices of the leaves that ``make_functional`` returned.

    Returns:
        For the names of each group, whether it stays gathered until backward although its strategy
        frees it.
    """
    if limit == 0:
        return {}
    # Note: gathered bytes, with padding and in the dtype that travels.
    unit_bytes = [_gathered_bytes(unit) for unit in units]
    unit_keys = [_key(unit, undecided) for unit in units]
    if limit is not None:
        return dict.fromkeys(_filled(units, unit_bytes, unit_keys, limit), False)
    for i, unit in enumerate(units):
        # Why only modules: programs by hand look their units up by name.
        if unit_bytes[i] > _SMALL_UNIT or any(leaf.index not in modules for leaf in unit.leaves):
            unit_keys[i] = None
    key_runs = [list(run) for _, run in itertools.groupby(unit_keys)]
    # Why a least number: the names of a few units are worth more than the microseconds.
    unit_keys = [
        unit_key if len(run) >= _LEAST_UNITS else None for run in key_runs for unit_key in run
    ]
    total_bytes = sum(
        unit_size
        for unit_size, unit_key in zip(unit_bytes, unit_keys, strict=True)
        if unit_key is not None
    )
    freed_units = {unit.name for unit in units if unit.reshard_after_forward}
    return {
        names: total_bytes <= _GROUP_BYTES and names[0] in freed_units.intersection(undecided)
        for names in _filled(units, unit_bytes, unit_keys, _GROUP_BYTES)
    }


def _gathered_bytes(unit: UnitPlan) -> int:
    return sum(buffer.model_numel * unit.computed_dtype(buffer).itemsize for buffer in unit.buffers)


def _key(unit: UnitPlan, undecided: Collection[str]) -> tuple[Any, ...] | None:
    """Return all in which the units of a group agree; ``None`` for a unit that joins none."""
    # The root is gathered first anyway, and a group has its name from the user.
    if unit.name == "" or unit.members:
        return None
    buffers = [(buffer.key, buffer.local) for buffer in unit.buffers]
    reshard_options = (
        unit.reshard_after_forward,
        unit.name in undecided,
        unit.reshard_after_backward,
    )
    return (
        unit.strategy,
        reshard_options,
        unit.offload,
        unit.precision,
        unit.full_precision,
        buffers,
    )


def _filled(
    units: Sequence[UnitPlan], sizes: Sequence[int], keys: Sequence[Any], limit: int
) -> list[tuple[str, ...]]:
    """Return groups of adjacent units whose gathered buffers take at most ``limit`` bytes."""
    groups: list[dict[str, None]] = [{}]
    nodes_around: set[str] = set()  # the nodes that hold a unit of the last group
    last_key, total_bytes = None, 0
    for unit, unit_size, unit_key in zip(units, sizes, keys, strict=True):
        if unit_key is None or unit_size > limit:
            last_key = None
            continue
        nodes_above = [*tree.upwards(unit.name)]
        # Why: a unit and one inside it run at the same time, so they cannot be one.
        is_nested = unit.name in nodes_around or not groups[-1].keys().isdisjoint(nodes_above)
        if unit_key != last_key or total_bytes + unit_size > limit or is_nested:
            groups.append({})
            nodes_around, last_key, total_bytes = set(), unit_key, 0
        groups[-1][unit.name] = None
        nodes_around.update(nodes_above)
        total_bytes += unit_size
    return [tuple(unit_group) for unit_group in groups if len(unit_group) > 1]
