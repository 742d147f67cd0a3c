"""The schedule: the order of the units, and when they are gathered ahead of their use, as data."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils import Shown, Table, check_choice, check_count, check_flag
from funcshard.plan.plan import Plan, check_plan

BACKWARD = ("pre", "post", None)

_MOST_ROWS = 8  # of a printed schedule; the rows between are left out


@dataclass(frozen=True, slots=True, repr=False)
class Schedule(Shown):
    """When units are gathered ahead of their use; made by ``make_schedule``.

    Attributes:
        order: names of the units in the order in which forward calls them, the root first if it
            owns a leaf. A unit that forward calls several times is named as often.
        forward_prefetch: whether forward gathers the next unit before the current one computes.
        backward_prefetch: ``"pre"``: backward gathers the next unit before it computes the current
            unit's gradients, and the first unit before all else; ``"post"``: after it has computed
            them; ``None``: on demand.
        limit: largest number of units that are gathered ahead at a time.
        on_demand: units that are never gathered ahead.
        backward: the events of backward, in order: ``("gather", unit)`` when it first needs the
            unit's leaves, ``("reduce", unit)`` when their gradients are complete. ``None`` means
            the reverse of ``order``, each unit gathered and then reduced, which holds unless units
            are called inside others, or between the modules of a group. ``fully_shard`` learns it.

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
        title = (
            f"Schedule of {len(self.order)} units: forward prefetch "
            f"{'on' if self.forward_prefetch else 'off'}, backward prefetch "
            f"{self.backward_prefetch or 'off'}, at most {self.limit} ahead"
        )
        title += f", on demand {', '.join(self.on_demand)}" if self.on_demand else ""
        ahead = [*self.order[1:], ""] if self.forward_prefetch else [""] * len(self.order)
        # Why counted: backward reaches the last call of a unit first.
        needs = _counted(
            [name for moment_kind, name in self.backward_order() if moment_kind == "gather"]
        )
        then = dict(itertools.pairwise(needs)) if self.backward_prefetch else {}
        backward_ahead = [
            then.get(call, ("", 0))[0] for call in reversed(_counted(self.order[::-1]))
        ]
        ahead, backward_ahead = (
            [n if n not in self.on_demand else "" for n in column]
            for column in (ahead, backward_ahead)
        )
        rows = [
            [str(i), name or "(root)", forward_ahead, earlier]
            for i, (name, forward_ahead, earlier) in enumerate(
                zip(self.order, ahead, backward_ahead, strict=True)
            )
        ]
        if len(rows) > _MOST_ROWS:
            rows[_MOST_ROWS // 2 : -_MOST_ROWS // 2] = [["…"] * 4]
        header = ["position", "unit", "forward gathers next", "backward gathers next"]
        return [Table(title, header, rows)]

    def backward_order(self) -> tuple[tuple[str, str], ...]:
        """Return what backward reaches, in order; see ``backward``."""
        if self.backward is not None:
            return self.backward
        return tuple(
            (moment_kind, name) for name in self.order[::-1] for moment_kind in ("gather", "reduce")
        )


def _counted(names: Sequence[str]) -> list[tuple[str, int]]:
    seen = Counter[str]()
    counted_calls = []
    for name in names:
        counted_calls.append((name, seen[name]))
        seen[name] += 1
    return counted_calls


def make_schedule(
    plan: Plan,
    order: Sequence[str] | None = None,
    *,
    forward_prefetch: bool = True,
    backward_prefetch: str | None = "pre",
    limit: int = 1,
    on_demand: Iterable[str] = (),
) -> Schedule:
    """Decide when units are gathered ahead of their use, so that communication overlaps compute.

    Arguments:
        plan: the plan.
        order: names of the units in the order in which forward calls them, each as often as forward
            calls it; by default plan order. ``fully_shard`` learns the real order in its first call
            if it is given no schedule.
        forward_prefetch: whether forward gathers the next unit before the current one computes.
        backward_prefetch: ``"pre"``, ``"post"`` or ``None``; see ``Schedule``.
        limit: largest number of units that are gathered ahead at a time.
        on_demand: names of units that are never gathered ahead.

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
    for option, given_names in (("order", order), ("on_demand", on_demand)):
        if isinstance(given_names, str):
            raise TypeError(
                f"{option} must be a list of unit names; found the text {given_names!r}: pass [{given_names!r}]"
            )
    units = plan.units
    names = (
        [name for name in units if name != ""]
        if order is None
        else [name for name in order if name != ""]
    )
    spared = tuple(sorted(on_demand))
    for name in (*names, *spared):
        if name not in units:
            raise ValueError(
                f"the plan has no unit {name!r} to put in order; its units are "
                f"{[n for n in units if n][:6]}"
            )
    root = [""] if "" in units else []
    return Schedule((*root, *names), forward_prefetch, backward_prefetch, limit, spared)


def check_schedule(schedule: Any, plan: Plan) -> None:
    """Raise unless ``schedule`` is a schedule, and names units of ``plan`` only."""
    if not isinstance(schedule, Schedule):
        raise TypeError(
            "schedule must be a funcshard.Schedule, or None to learn the order; found "
            f"{schedule!r}: make it with make_schedule(plan, order)"
        )
    named = (*schedule.order, *schedule.on_demand, *(name for _, name in schedule.backward or ()))
    units = plan.units
    unknown = next((name for name in named if name not in units), None)
    if unknown is not None:
        raise ValueError(
            f"the schedule must name units of the plan; found {unknown!r}; the plan's units are "
            f"{[n for n in units if n][:6]}: make the schedule with make_schedule(plan, order)"
        )
