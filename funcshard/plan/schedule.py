"""When units are gathered, reduced and computed again.

``Schedule`` says it as data. ``ForwardOrder`` and ``BackwardOrder`` are two small state machines
without tensors. The prefetcher of ``core`` drives them with the calls of a real program,
``predict_events`` with those of the schedule. So a run and its prediction share each rule, and a
program may leave the schedule. The options ``reduce`` and ``remat`` name units.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from funcshard._utils.options import check_choice, check_count, check_flag, some
from funcshard.plan.plan import Plan, check_plan
from funcshard.plan.planner import ends_of
from funcshard.plan.unit_options import matches

BACKWARD = ("pre", "post", None)


@dataclass(frozen=True, slots=True)
class Schedule:
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
        last_calls: the last position of each unit in ``order``.

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
    last_calls: Mapping[str, int] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        check_flag("forward_prefetch", self.forward_prefetch)
        check_choice("backward_prefetch", self.backward_prefetch, BACKWARD)
        remedy = (
            "to gather no unit ahead pass forward_prefetch=False and backward_prefetch=None"
        )
        object.__setattr__(
            self, "limit", check_count("limit", self.limit, of="units", remedy=remedy)
        )
        object.__setattr__(
            self, "last_calls", {name: position for position, name in enumerate(self.order)}
        )

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
    unit_names(
        plan, "the schedule", [*schedule.order, *schedule.on_demand, *backward_units]
    )


def unit_names(plan: Plan, option: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the units that an option names; raise unless the plan has them."""
    if isinstance(names, str):
        raise TypeError(
            f"{option} must be a list of unit names; found the text {names!r}: pass [{names!r}]"
        )
    listed_names, units = tuple(names), plan.units
    for unit_name in listed_names:
        # A plan without a leaf outside of its units has no root, and naming it does no harm.
        if unit_name and unit_name not in units:
            raise ValueError(
                f"{option} must name units of the plan; found {unit_name!r}; its units are "
                f"{[known_unit for known_unit in units if known_unit][:6]}: list(plan.units) names "
                "them in order"
            )
    return listed_names


# --- the order of a call --------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ForwardOrder:
    """Decide which units forward gathers, and when.

    Attributes:
        schedule: the expected order of calls, and how far to gather ahead.
        follows: whether forward has followed the schedule so far; at first, whether the order of
            the schedule is more than a guess.
        ran: the units that forward has called so far.
        gathered: those not called since their gather, or kept for their next call.
    """

    schedule: Schedule
    follows: bool = True
    ran: list[str] = field(default_factory=list)
    gathered: set[str] = field(default_factory=set)

    def call(self, name: str, *, stays: bool) -> tuple[bool, bool, list[str]]:
        """Note that forward calls a unit.

        Arguments:
            name: the unit.
            stays: whether the unit stays gathered after forward.

        Returns:
            Whether to gather it now; whether it stays gathered for its next call; and the units to
            gather ahead after it.
        """
        is_gathered = name in self.gathered
        schedule, order_position = self.schedule, len(self.ran)
        # Once forward has left the schedule, it gathers on demand for the rest of the call.
        self.follows = (
            self.follows
            and order_position < len(schedule.order)
            and schedule.order[order_position] == name
        )
        # Why ran: without a known order, a unit that forward calls a second time may be called a
        # third time.
        keeps = stays and name in self.ran
        if stays and self.follows:
            keeps = schedule.last_calls[name] > order_position
        if keeps:
            self.gathered.add(name)
        else:
            self.gathered.discard(name)
        self.ran.append(name)
        if not self.follows or not schedule.forward_prefetch:
            return not is_gathered, keeps, []
        next_position = order_position + 1
        next_units = dict.fromkeys(
            schedule.order[next_position : next_position + schedule.limit]
        )
        ahead_units = [
            name
            for name in next_units
            if name not in schedule.on_demand and name not in self.gathered
        ]
        self.gathered.update(ahead_units)
        return not is_gathered, keeps, ahead_units


@dataclass(slots=True, eq=False)
class BackwardOrder:
    """Decide which units backward gathers again, and when.

    A *use* is one call of a unit whose gathered leaves backward needs. Uses are numbered, and each
    has a moment: an integer that grows as backward proceeds.

    Attributes:
        schedule: how far to gather ahead.
        uses: the uses that backward will reach: ``(moment, number, unit)``, by moment.
        gathered: the uses whose buffers are in memory since backward has reached them.
        ahead: those gathered, and not reached since.
    """

    schedule: Schedule
    uses: Sequence[tuple[int, int, str]] = ()
    gathered: set[int] = field(default_factory=set)
    ahead: set[int] = field(default_factory=set)

    def reach(self, number: int) -> bool:
        """Note that backward computes with a use; return whether to gather it now."""
        is_ahead = number in self.ahead
        self.ahead.discard(number)
        self.gathered.add(number)
        return not is_ahead

    def prefetch(
        self,
        moment: int,
        *,
        most: int | None = None,
        reaches: Callable[[int], bool] = lambda number: True,
    ) -> list[int]:
        """Return the uses after ``moment`` to gather ahead now.

        Arguments:
            moment: the moment that backward is at.
            most: the most uses to gather ahead; by default the schedule's limit.
            reaches: whether the backward that runs may reach a use, by number.
        """
        ahead_uses = []
        uses_left = self.schedule.limit if most is None else most
        # Note: the use at the moment itself is the one that backward computes with.
        first_use = bisect.bisect_left(self.uses, (moment + 1, 0, ""))
        for _, use_index, unit_name in self.uses[first_use:]:
            # What is in memory, or is never reached, takes no part of the limit.
            # Note: every rank has to give the same answer, or gathers would differ; so it must not
            # depend on what is in a rank's memory.
            if use_index in self.gathered or not reaches(use_index):
                continue
            is_spared = unit_name in self.schedule.on_demand
            if not is_spared and use_index not in self.ahead:
                self.ahead.add(use_index)
                ahead_uses.append(use_index)
            # A use on demand counts too: the limit is a distance, not a number of gathers.
            uses_left -= 1
            if not uses_left:
                break
        return ahead_uses


# --- options of a step that name units ------------------------------------------------------------


# One of _MODES for all units, or by globs of unit names.
Reduce = str | Mapping[str, str]

_MODES = ("each", "once", "shard_each")


def check_reduce(micro_batches: Any, reduce: Any, name: str = "micro_batches") -> int:
    """Return the number of micro-batches; raise unless it and ``reduce`` are valid."""
    if isinstance(reduce, Mapping):
        for glob, reduce_mode in reduce.items():
            if not isinstance(glob, str):
                raise TypeError(
                    f"reduce must map names or globs of units to {', '.join(map(repr, _MODES))}; "
                    f"found the key {glob!r}: write {{'blocks.*': 'once'}}, with '' for the root"
                )
            check_choice(f"reduce[{glob!r}]", reduce_mode, _MODES)
    else:
        check_choice("reduce", reduce, _MODES)
    remedy = "pass 1 for the whole batch at once"
    return check_count(name, micro_batches, of="micro-batches", remedy=remedy)


@dataclass(frozen=True, slots=True)
class Accumulation:
    """What a step runs before it updates: for ``predict_events`` and ``estimate``.

    Attributes:
        micro_batches: number of micro-batches that ``accumulate`` runs.
        reduce: as in ``accumulate``.
        forwards: how often your loss function calls the model, with the same shards and order of
            units, before its backward.

    Raises:
        TypeError: an option has the wrong type.
        ValueError: a number is too small, or ``reduce`` isn't valid for ``accumulate``.

    Example:
        >>> import torch, funcshard as fs
        >>> plan = fs.make_plan({"a": torch.zeros(4), "b": torch.zeros(4)}, 2, units=["b"])
        >>> once = fs.Accumulation(4, reduce="once")
        >>> [len(fs.predict_events(plan, accumulate=each)) for each in (1, 4, once)]
        [5, 20, 14]
    """

    micro_batches: int = 1
    reduce: Reduce = "each"
    forwards: int = 1

    def __post_init__(self) -> None:
        count = check_reduce(self.micro_batches, self.reduce)
        object.__setattr__(self, "micro_batches", count)
        remedy = "pass 1 if the loss function calls the model once"
        count = check_count("forwards", self.forwards, of="forwards", remedy=remedy)
        object.__setattr__(self, "forwards", count)


def check_accumulate(accumulate: int | Accumulation) -> Accumulation:
    """Return the option ``accumulate`` as a value; raise unless it's one, or a number."""
    if isinstance(accumulate, Accumulation):
        return accumulate
    return Accumulation(check_reduce(accumulate, "each", "accumulate"))


def check_reduce_units(reduce: Mapping[str, str], units: Iterable[str]) -> None:
    """Raise ``ValueError`` unless every glob of ``reduce`` matches a unit."""
    unit_names = list(units)
    for glob in reduce:
        if not any(_chooses(glob, unit_name) for unit_name in unit_names):
            raise ValueError(
                f"reduce must name units; found {glob!r}, which matches none of "
                f"{some(unit_names)}: write the names of units, or globs of them"
            )


def unit_mode(reduce: Reduce, unit: str) -> str:
    """Return the value for a unit, ``"each"`` by default; a name counts before the last glob."""
    if isinstance(reduce, str):
        return reduce
    # A name that is written out counts before all globs.
    if unit in reduce:
        return reduce[unit]
    for glob in reversed(list(reduce)):
        if _chooses(glob, unit):
            return reduce[glob]
    return "each"


def buffer_mode(mode: str, *, cut: bool, repeated: bool) -> str:
    """Return when a buffer's gradient is reduced; a run and its prediction both ask here.

    Arguments:
        mode: the value for the unit.
        cut: whether the reduction begins with a reduce-scatter.
        repeated: whether all-reduces follow.
    """
    # Why: "shard_each" only makes the all-reduces wait. A buffer that is not cut has nothing else,
    # and one that is not repeated has none.
    if mode != "shard_each" or (cut and repeated):
        return mode
    return "each" if cut else "once"


def _chooses(glob: str, unit: str) -> bool:
    # Why: "*" is one component of a path, and the path of the root has none.
    if unit == "":
        return glob in ("", "**")
    # A group of small units is named after the first and the last of them.
    return matches(glob, unit) or all(matches(glob, end) for end in ends_of(unit))


def read_remat(remat: Iterable[str] | bool) -> tuple[str, ...] | bool:
    """Return the names and globs of ``remat`` as a tuple, and a flag unchanged."""
    if isinstance(remat, bool):
        return remat
    unit_names: tuple[Any, ...] = (None,)
    if isinstance(remat, Iterable) and not isinstance(remat, str):
        unit_names = tuple(remat)
    if not all(isinstance(unit_name, str) for unit_name in unit_names):
        remedy = [remat] if isinstance(remat, str) else True
        raise TypeError(
            f"remat must be a list of names or globs of units, True or False; found {remat!r}: "
            f"write {remedy!r}"
        )
    return unit_names


def recomputed_modules(plan: Plan, remat: Iterable[str] | bool) -> list[str]:
    """Return the paths of the modules that ``remat`` names, in plan order.

    Arguments:
        plan: the plan.
        remat: names or globs of units, or of modules of groups; ``True`` for all but the root.

    Raises:
        TypeError: ``remat`` is neither a list of texts nor a flag.
        ValueError: a name or glob matches no unit, or names the root.
    """
    unit_names = read_remat(remat)
    # Why without the root: to compute it again is to run all of forward again.
    units = {unit.name: unit for unit in plan.unit_list if unit.name}
    paths = [module_path for unit in units.values() for module_path in unit.paths]
    if isinstance(unit_names, bool):
        return paths * unit_names
    chosen_paths: set[str] = set()
    for unit_name in unit_names:
        module_paths = [
            module_path for module_path in paths if matches(unit_name, module_path)
        ]
        if unit_name in units:
            module_paths = list(units[unit_name].paths)
        if not module_paths:
            raise ValueError(
                f"remat must name units of the plan, not the root; found {unit_name!r}; its units "
                f"are {list(units)[:6]}: write names or globs of these, or remat=True for all"
            )
        chosen_paths.update(module_paths)
    return [module_path for module_path in paths if module_path in chosen_paths]
