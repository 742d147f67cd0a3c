"""``Space``: the plans that a search tries, as data.

All equal units share one choice: how many of them backward recomputes, and how many stay gathered.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from funcshard.estimate.trace import MARGIN, Program, Run, equal_units
from funcshard.plan import Plan, UnitPlan, fold_units, mesh_axes_of

STRATEGIES = ("full_shard", "no_shard")

_MOST_CLASSES = 2  # of equal units, of which each has its own choice
_PARTS = 8  # of a class, by default
_FEW = 16  # units of a class in which each number of units is tried
_LITTLE = (
    8  # times as many units in the largest class as in one that is recomputed as a whole
)
MOST_RUNGS = _FEW + 1  # of a ladder on which each rung is tried


@dataclass(frozen=True, slots=True)
class Space:
    """The plans that ``auto_plan`` tries: all combinations of your options.

    Attributes:
        meshes: sizes ``(replicate, shard)`` to try; ``None`` tries all pairs.
        strategies: ``"full_shard"`` and ``"no_shard"``, for each class of equal units.
        kept: steps in which to try how many sharded units of a class stay gathered between forward
            and backward; 0: none.
        remat: steps in which to try how many units of a class backward recomputes; 0: none.
            ``None``: steps of one unit in the largest class, and eighths of others.
        local: as in ``make_plan``, for all plans.
        storage: as in ``make_plan``, for all plans.

    Example:
        >>> from funcshard.estimate import Space
        >>> Space(meshes=((1, 64),), remat=4).kept
        2
    """

    meshes: tuple[tuple[int, int], ...] | None = None
    strategies: tuple[str, ...] = STRATEGIES
    kept: int = 2
    remat: int | None = None
    local: Any = ()
    storage: Any = None


class Choice(NamedTuple):
    """The choice for the units of one class.

    Attributes:
        strategy: ``"full_shard"`` or ``"no_shard"``.
        kept: how many units, the last ones, stay gathered.
        remat: how many of ``UnitClass.again`` backward recomputes.
    """

    strategy: str
    kept: int
    remat: int


class Candidate(NamedTuple):
    """One plan that a search may try: ``choices`` has one choice for each class of units."""

    profile: int
    mesh: tuple[int, int]
    choices: tuple[Choice, ...]


class Ladder(NamedTuple):
    """Plans that differ only in how many units of one class backward recomputes.

    Attributes:
        first: the plan that recomputes none of them.
        climbed: index of that class.
        counts: numbers of its units to try, the least first.
    """

    first: Candidate
    climbed: int
    counts: tuple[int, ...]

    def rung(self, position: int) -> Candidate:
        unit_choices = list(self.first.choices)
        unit_choices[self.climbed] = unit_choices[self.climbed]._replace(
            remat=self.counts[position]
        )
        return self.first._replace(choices=tuple(unit_choices))


class UnitClass(NamedTuple):
    """Units that share a choice.

    Attributes:
        names: their names, in the order of forward.
        again: those that backward can recompute, the cheapest for each saved byte first.
        repeated: whether there are several of each kind.
        title: the units as text, such as ``"blocks.*"``.
    """

    names: tuple[str, ...]
    again: tuple[str, ...]
    repeated: bool
    title: str


def unit_classes(
    plan: Plan, program: Program, seconds: Callable[[Run], float]
) -> tuple[UnitClass, ...]:
    """Return the classes of equal units, and last the class of all single units.

    Of more than two kinds of equal units, all but the largest one are a single class.

    Arguments:
        plan: a plan of the units.
        program: the model as these units see it.
        seconds: the time of a computation.
    """
    forward_seconds: defaultdict[str, float] = defaultdict(float)
    for run in program.runs():
        if run.what == "forward":
            forward_seconds[run.unit] += seconds(run)
    unit_groups = equal_units(plan, program)
    kinds = [units for units in unit_groups if len(units) > 1]
    mixed_classes = []
    if len(kinds) > _MOST_CLASSES:
        # Why: a network of many stages has a class for each, and their choices multiply.
        largest = max(kinds, key=len)
        other_units = [unit for units in kinds if units is not largest for unit in units]
        kinds, mixed_classes = [largest], [(other_units, True, "units of other kinds")]
    single_units = [units[0] for units in unit_groups if len(units) == 1]
    if single_units:
        title = (
            "other units" if len(single_units) > 1 else single_units[0].name or "the root"
        )
        mixed_classes.append((single_units, False, title))
    classes = []
    for units, is_repeated, title in (
        *((units, True, "") for units in kinds),
        *mixed_classes,
    ):
        # Note: backward recomputes only what forward ran, such as no vision for a batch of text. It
        # recomputes neither the root nor groups.
        again = [
            u.name for u in units if u.name in program.order and u.name and not u.members
        ]
        if title:
            # Why this order: it fills a knapsack well, with seconds as the price of each saved
            # byte.
            again.sort(
                key=lambda name: forward_seconds[name] / max(program.saved.get(name, 0), 1)
            )
        names = tuple(unit.name for unit in units)
        classes.append(UnitClass(names, tuple(again), is_repeated, title or _title(units)))
    return tuple(classes)


def _title(units: Sequence[UnitPlan]) -> str:
    """Return equal units as text."""
    group_titles = [group.title for group in fold_units(units)]
    if len(group_titles) > 1:
        return f"units like {units[0].name}"
    return group_titles[0].rpartition("× ")[2]


def on_mesh(
    plan: Plan, mesh: tuple[int, int], options: Callable[[UnitPlan], Mapping[str, Any]]
) -> Plan:
    """Return the plan that ``make_plan`` makes for another mesh, in a tenth of its time.

    Arguments:
        plan: the plan.
        mesh: sizes ``(replicate, shard)``.
        options: fields of each unit's plan that change.
    """
    axis_sizes = plan.mesh_axes | {"replicate": mesh[0], "shard": mesh[1]}
    axes = tuple(mesh_axes_of(axis_sizes, "mesh").items()) if plan.axes else ()
    changed_units = []
    for unit in plan.unit_list:
        unit_changes = {"strategy": unit.strategy, **options(unit)}
        shards = 1 if unit_changes["strategy"] == "no_shard" else mesh[1]
        buffers = tuple(
            dataclasses.replace(buffer, shards=1 if "shard" in buffer.local else shards)
            for buffer in unit.buffers
        )
        changed_units.append(
            dataclasses.replace(
                unit, mesh_shape=mesh, axes=axes, buffers=buffers, **unit_changes
            )
        )
    return dataclasses.replace(
        plan, mesh_shape=mesh, axes=axes, unit_list=tuple(changed_units)
    )


def ladders(
    space: Space, ranks: int, classes: Sequence[UnitClass], profiles: int
) -> Iterator[Ladder]:
    """Yield all plans of a space as ladders, in a fixed order.

    Arguments:
        space: the space.
        ranks: number of ranks.
        classes: the classes of units.
        profiles: number of profiles.
    """
    mesh_list = space.meshes or [
        (ranks // size, size) for size in range(ranks, 0, -1) if ranks % size == 0
    ]
    # Note: beside equal units, single ones save little, and each of them takes a trace.
    has_repeated = any(units.repeated for units in classes)
    able_counts = [
        len(units.again) if units.repeated or not has_repeated else 0 for units in classes
    ]
    climbed_class = max(range(len(classes)), key=able_counts.__getitem__)
    part_counts = [_PARTS if space.remat is None else space.remat] * len(classes)
    if space.remat is None and able_counts[climbed_class] > _FEW:
        # Note: beside many equal units, a few others hold little, and each number takes a trace.
        # Half of many others are enough: together with the rungs they make all numbers.
        part_counts = [
            1 if _LITTLE * count <= able_counts[climbed_class] else 2
            for count in able_counts
        ]
    remat_counts = list(map(_counts, able_counts, part_counts))
    if space.remat is None and (
        able_counts[climbed_class] <= _FEW or classes[climbed_class].repeated
    ):
        # Why not the first ones of many: they take a trace each. The last ones do so too, but the
        # search seldom comes to them.
        able_count = able_counts[climbed_class]
        remat_counts[climbed_class] = [
            count
            for count in range(able_count + 1)
            if able_count <= _FEW or not 0 < count <= MARGIN
        ]
    # Note: the rungs of a ladder are the counts of its climbed class.
    rung_counts = tuple(remat_counts[climbed_class])
    remat_counts[climbed_class] = [0]
    for profile, mesh in itertools.product(range(profiles), mesh_list):
        options = [
            _choices(space, mesh, units, class_counts)
            for units, class_counts in zip(classes, remat_counts, strict=True)
        ]
        for choices in itertools.product(*options):
            yield Ladder(Candidate(profile, mesh, choices), climbed_class, rung_counts)


def _choices(
    space: Space, mesh: tuple[int, int], units: UnitClass, remat: Sequence[int]
) -> list[Choice]:
    unit_choices = []
    for strategy in space.strategies:
        # Why one shard is left out: then nothing is gathered, as with no_shard.
        if strategy == "no_shard" and mesh[1] == 1 and "full_shard" in space.strategies:
            continue
        is_gathered = strategy == "full_shard" and mesh[1] > 1
        for kept in _counts(len(units.names), space.kept if is_gathered else 0):
            unit_choices += [Choice(strategy, kept, count) for count in remat]
    return unit_choices


def _counts(units: int, parts: int) -> list[int]:
    """Return 0, all, and the numbers between at equal distances."""
    if not parts:
        return [0]
    return sorted({units * part // parts for part in range(parts + 1)})
