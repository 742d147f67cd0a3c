"""The schedule: the order of the units, and when they are gathered ahead of their use, as data."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils.options import check_choice, check_count, check_flag
from funcshard._utils.table import Shown, Table
from funcshard.plan.plan import Plan, check_plan

BACKWARD = ("pre", "post", None)

_MOST_ROWS = 8  # of a printed schedule; the rows between are left out


@dataclass(frozen=True, slots=True, repr=False)
class Schedule(Shown):
    """When units are gathered ahead of their use; made by ``make_schedule``.

    Attributes:
        order: the units in the order of forward's calls, the root first if it owns a leaf.
        forward_prefetch: whether forward gathers the next unit before the current one computes.
        backward_prefetch: ``"pre"``: backward gathers the next unit before it computes the current
            one's gradients; ``"post"``: after it; ``None``: on demand.
        limit: how many units may be gathered ahead at a time.
        on_demand: units that are never gathered ahead.
        backward: what backward does, in order: ``("gather", unit)`` when it first needs the unit's
            leaves, ``("reduce", unit)`` when their gradients are complete. ``None``: the reverse of
            ``order``, each unit gathered and then reduced. ``fully_shard`` learns it.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"a": torch.zeros(4), "b": torch.zeros(4)}, 2, units=["a", "b"])
        >>> fs.make_schedule(plan) == fs.Schedule(("a", "b"), True, "pre", limit=1)
        True
    """

    order: tuple[str, ...]
    forward_prefetch: bool
    backward_prefetch: str | None
    limit: int
    on_demand: tuple[str, ...] = ()
    backward: tuple[tuple[str, str], ...] | None = None

    def __post_init__(self) -> None:
        check_flag("forward_prefetch", self.forward_prefetch)
        check_choice("backward_prefetch", self.backward_prefetch, BACKWARD)
        remedy = "to gather no unit ahead pass forward_prefetch=False and backward_prefetch=None"
        object.__setattr__(
            self, "limit", check_count("limit", self.limit, of="units", remedy=remedy)
        )

    def _parts(self) -> list[Table]:
        prefetch = "on" if self.forward_prefetch else "off"
        title = (
            f"Schedule of {len(self.order)} units: forward prefetch {prefetch}, backward prefetch "
            f"{self.backward_prefetch or 'off'}, at most {self.limit} ahead"
        )
        if self.on_demand:
            title += f", on demand {', '.join(self.on_demand)}"
        needed_units = [name for moment, name in self.backward_order() if moment == "gather"]
        unit_pairs = itertools.zip_longest(self.order, needed_units, fillvalue="-")
        rows = [
            [str(i), called_unit or "(root)", needed_unit or "(root)"]
            for i, (called_unit, needed_unit) in enumerate(unit_pairs)
        ]
        # The middle of a long schedule repeats what its ends show.
        if len(rows) > _MOST_ROWS:
            rows[_MOST_ROWS // 2 : -_MOST_ROWS // 2] = [["…"] * 3]
        return [Table(title, ["position", "forward calls", "backward needs"], rows)]

    def backward_order(self) -> tuple[tuple[str, str], ...]:
        # A learned order wins; otherwise each unit is needed once, last to first.
        if self.backward is not None:
            return self.backward
        return tuple(
            (moment_kind, unit_name)
            for unit_name in self.order[::-1]
            for moment_kind in ("gather", "reduce")
        )


def make_schedule(
    plan: Plan,
    order: Sequence[str] | None = None,
    *,
    forward_prefetch: bool = True,
    backward_prefetch: str | None = "pre",
    limit: int = 1,
    on_demand: Iterable[str] = (),
) -> Schedule:
    """Choose when units are gathered ahead of their use, so that communication overlaps compute.

    Arguments:
        plan: the plan.
        order: the units in the order in which your forward calls them, each as often; by default
            plan order. If you give ``fully_shard`` no schedule, it learns the order in its first
            call.
        forward_prefetch: whether forward gathers the next unit before the current one computes.
        backward_prefetch: ``"pre"``, ``"post"`` or ``None``; see ``Schedule``.
        limit: how many units may be gathered ahead at a time.
        on_demand: units that are never gathered ahead.

    Returns:
        The schedule, for ``fully_shard`` and ``predict_events``.

    Raises:
        TypeError: an option is of another type.
        ValueError: ``order`` or ``on_demand`` names a unit that the plan does not have, or a
            setting does not exist.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"a": torch.zeros(4), "b": torch.zeros(4)}, 2, units=["a", "b"])
        >>> fs.make_schedule(plan, backward_prefetch="post").order
        ('a', 'b')

    Source: ``BackwardPrefetch`` and ``forward_prefetch`` of
    ``torch.distributed.fsdp.FullyShardedDataParallel``.
    """
    check_plan(plan)
    units = plan.units
    # Why without the root: it is gathered first, wherever the order names it.
    names = unit_names(plan, "order", units if order is None else order)
    called_units = tuple(unit_name for unit_name in names if unit_name)
    spared_units = unit_names(plan, "on_demand", on_demand)
    root_name = ("",) * ("" in units)
    return Schedule(
        order=root_name + called_units,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
        limit=limit,
        # Why sorted: callers pass sets, and equal schedules must compare equal.
        on_demand=tuple(sorted(spared_units)),
    )


def check_schedule(schedule: Any, plan: Plan) -> None:
    """Raise unless ``schedule`` is a schedule of units of ``plan``."""
    if not isinstance(schedule, Schedule):
        raise TypeError(
            "schedule must be a funcshard.Schedule, or None to learn the order; found "
            f"{schedule!r}: make it with make_schedule(plan, order)"
        )
    backward_units = [unit_name for _, unit_name in schedule.backward or ()]
    named_units = [*schedule.order, *schedule.on_demand, *backward_units]
    _check_known("the schedule", named_units, plan.units)


def unit_names(plan: Plan, option: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the units that an option names; raise unless the plan has them."""
    if isinstance(names, str):
        raise TypeError(
            f"{option} must be a list of unit names; found the text {names!r}: pass [{names!r}]"
        )
    listed_names = tuple(names)
    # A plan without a leaf outside of its units has no root, and naming it does no harm.
    _check_known(option, listed_names, {"": None, **plan.units})
    return listed_names


def _check_known(option: str, names: Iterable[str], units: Collection[str]) -> None:
    for unit_name in names:
        if unit_name not in units:
            raise ValueError(
                f"{option} must name units of the plan; found {unit_name!r}; its units are "
                f"{[known_unit for known_unit in units if known_unit][:6]}: list(plan.units) names "
                "them in order"
            )
