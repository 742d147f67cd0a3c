"""``Space``: the plans that a search tries, as data; and the equal units that it chooses for.

A model of 126 equal blocks has one choice for all of them, not 126: how many are computed again in
backward, and how many stay gathered. Units of which there is only one share a choice.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from funcshard._utils import check_choice, check_count, check_flag
from funcshard.estimate.search.splicing import MARGIN
from funcshard.estimate.trace import Program, Run
from funcshard.plan import Plan, fold_units

STRATEGIES = ("full_shard", "no_shard")

_PARTS = 8  # of a class, by default
_MOST_STEPS = 128  # into which the largest class is divided, by default
_FEW = 16  # units of a class in which each number of units is tried
MOST_RUNGS = _FEW + 1  # of a ladder on which each rung is tried


@dataclass(frozen=True, slots=True)
class Space:
    """The plans that ``auto_plan`` tries: all combinations of these options.

    Attributes:
        meshes: sizes ``(replicate, shard)`` to try; ``None``: all pairs whose product is the number
            of ranks.
        strategies: ``"full_shard"``, in which units are sharded, and ``"no_shard"``; chosen for
            each class of equal units.
        kept: parts into which each class is divided, to choose how many of its sharded units stay
            gathered between forward and backward: the last ones. 0: none stays gathered.
        remat: parts into which each class is divided, to choose how many of its units backward
            computes again: the first of equal units, the cheapest of others. 0: none. ``None``:
            steps of one unit in the largest class, eighths of the other classes. If the largest
            class has more than 16 units, they are equal, and the first step has four units; with
            more than 128 units, it has 128 steps.
        offload: whether shards live on the host; chosen for each class.
        slices: numbers of ranks that may hold a freed unit together between forward and backward
            (``reshard_after_forward=n``), if they divide the shard axis; chosen for each class.
        limits: how many units are gathered ahead.

    Example:
        >>> from funcshard.estimate import Space
        >>> Space(meshes=((1, 64),), remat=4, offload=(False, True), slices=(8,)).kept
        2
    """

    meshes: tuple[tuple[int, int], ...] | None = None
    strategies: tuple[str, ...] = STRATEGIES
    kept: int = 2
    remat: int | None = None
    offload: tuple[bool, ...] = (False,)
    slices: tuple[int, ...] = ()
    limits: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for name in ("strategies", "offload", "slices", "limits"):
            if isinstance(space_option := getattr(self, name), str) or not isinstance(
                space_option, Sequence
            ):
                raise TypeError(
                    f"{name} must be a tuple of values to try; found {space_option!r}: write ({space_option!r},)"
                )
        for mesh in self.meshes or ():
            if not isinstance(mesh, Sequence) or len(mesh) != 2:
                raise ValueError(
                    f"meshes must hold pairs (replicate, shard); found {mesh!r}: write ((1, 8),)"
                )
            for size in mesh:
                check_count("size of a mesh axis", size, of="ranks")
        for strategy in self.strategies:
            check_choice("strategy", strategy, STRATEGIES)
        for name in ("strategies", "offload", "limits"):
            if not getattr(self, name):
                raise ValueError(
                    f"{name} must hold at least one value to try; found {getattr(self, name)!r}"
                )
        for flag in self.offload:
            check_flag("offload", flag)
        check_count("kept", self.kept, 0, of="parts")
        if self.remat is not None:
            check_count("remat", self.remat, 0, of="parts")
        for ranks in self.slices:
            check_count("slices", ranks, 2, of="ranks")
        for limit in self.limits:
            check_count("limits", limit, of="units")


class Choice(NamedTuple):
    """The choice for the units of one class.

    Attributes:
        strategy: ``"full_shard"`` or ``"no_shard"``.
        kept: number of units that stay gathered, the last ones.
        remat: number of units that backward computes again, the first of ``UnitClass.again``.
        offload: whether their shards live on the host.
        slices: number of ranks that hold each freed unit together between forward and backward; 0
            for all ranks of the shard axis.
    """

    strategy: str
    kept: int
    remat: int
    offload: bool = False
    slices: int = 0


class Candidate(NamedTuple):
    """One plan that a search may try.

    Attributes:
        profile: index of the profile.
        mesh: sizes ``(replicate, shard)``.
        limit: how many units are gathered ahead.
        choices: the choice for each class of units.
    """

    profile: int
    mesh: tuple[int, int]
    limit: int
    choices: tuple[Choice, ...]


class Ladder(NamedTuple):
    """Plans that differ only in how many units of one class backward computes again.

    Attributes:
        first: the plan in which backward computes none of them again.
        climbed: index of that class.
        counts: numbers of its units to try, the least first.
    """

    first: Candidate
    climbed: int
    counts: tuple[int, ...]

    def rung(self, position: int) -> Candidate:
        """Return the plan with the count at a position."""
        choices = list(self.first.choices)
        choices[self.climbed] = choices[self.climbed]._replace(remat=self.counts[position])
        return self.first._replace(choices=tuple(choices))


class UnitClass(NamedTuple):
    """Units that share a choice.

    Attributes:
        names: their names, in the order of forward.
        again: those that backward can compute again, all but the root and groups. Of equal units
            the first come first. Of others those come first that take the least time for each byte
            that they save: a knapsack is filled well in that order.
        repeated: whether they are equal; if not, they are those without an equal one.
        title: the units as text, such as ``"blocks.*"``.
    """

    names: tuple[str, ...]
    again: tuple[str, ...]
    repeated: bool
    title: str


def unit_classes(
    plan: Plan, program: Program, seconds: Callable[[Run], float]
) -> tuple[UnitClass, ...]:
    """Return the classes of equal units, and last the class of all units without an equal one.

    Units are equal if their buffers, their precision and the FLOPs of their forward are.

    Arguments:
        plan: a plan of the units.
        program: the model as these units see it.
        seconds: the time of a computation.
    """
    flops: dict[str, int] = {}
    times: dict[str, float] = {}
    for step in program.steps:
        if isinstance(step, Run) and step.what == "forward":
            flops[step.unit] = flops.get(step.unit, 0) + sum(work.flops for work in step.work)
            times[step.unit] = times.get(step.unit, 0.0) + seconds(step)
    order = {name: position for position, name in enumerate(dict.fromkeys(program.order))}
    groups: dict[Any, list[str]] = {}
    for unit in sorted(plan.unit_list, key=lambda unit: order.get(unit.name, len(order))):
        forms = tuple(
            (buffer.key, buffer.numel, buffer.dtype, buffer.trainable, buffer.local)
            for buffer in unit.buffers
        )
        key = (unit.name == "", unit.members == (), forms, unit.precision, flops.get(unit.name, 0))
        groups.setdefault(key, []).append(unit.name)
    units = plan.units
    modules = {unit.name for unit in plan.unit_list if unit.name and not unit.members}
    class_list = []
    for names in groups.values():
        if len(names) > 1:
            titles = [group.title for group in fold_units(units[name] for name in names)]
            title = titles[0].rpartition("× ")[2] if len(titles) == 1 else f"units like {names[0]}"
            recomputed_names = tuple(name for name in names if name in modules)
            class_list.append(UnitClass(tuple(names), recomputed_names, True, title))
    single = tuple(names[0] for names in groups.values() if len(names) == 1)
    title = "other units" if len(single) > 1 else "".join(single) or "the root"
    costs = {
        name: times.get(name, 0.0) / max(program.saved.get(name, 0), 1)
        for name in single
        if name in modules
    }
    recomputed_names = tuple(sorted(costs, key=lambda name: costs[name]))
    return (
        (*class_list, UnitClass(single, recomputed_names, False, title))
        if single
        else tuple(class_list)
    )


def ladders(
    space: Space, ranks: int, classes: Sequence[UnitClass], profiles: int, *, splices: bool
) -> Iterator[Ladder]:
    """Yield all plans of a space in ladders, always in the same order.

    Arguments:
        space: the space.
        ranks: number of ranks.
        classes: the classes of units.
        profiles: number of profiles to choose from.
        splices: whether programs of equal units can be spliced, so that a step takes no trace.
    """
    pairs = space.meshes or tuple((ranks // size, size) for size in _divisors(ranks))
    repeats = any(unit_class.repeated for unit_class in classes)
    able = [
        len(unit_class.again) if unit_class.repeated or not repeats else 0 for unit_class in classes
    ]
    climbed = max(range(len(classes)), key=lambda i: able[i])
    counts = [_counts(units, _PARTS if space.remat is None else space.remat) for units in able]
    if space.remat is None and (able[climbed] <= _FEW or (splices and classes[climbed].repeated)):
        counts[climbed] = _fine_counts(able[climbed])
    for profile, mesh, limit in itertools.product(range(profiles), pairs, space.limits):
        options = [
            _choices(space, mesh, unit_class, counts[i] if i != climbed else [0])
            for i, unit_class in enumerate(classes)
        ]
        for choices in itertools.product(*options):
            yield Ladder(Candidate(profile, mesh, limit, choices), climbed, tuple(counts[climbed]))


def _divisors(number: int) -> list[int]:
    """Return the divisors of a number, the largest first."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)}, reverse=True)


def _choices(
    space: Space, mesh: tuple[int, int], units: UnitClass, remat: Sequence[int]
) -> list[Choice]:
    """Return the choices of one class."""
    unit_choices = []
    for strategy, offload in itertools.product(space.strategies, space.offload):
        # Why one shard is left out: then nothing is gathered, as with no_shard.
        if strategy == "no_shard" and mesh[1] == 1 and "full_shard" in space.strategies:
            continue
        gathered = strategy == "full_shard" and mesh[1] > 1
        for kept in _counts(len(units.names), space.kept) if gathered else [0]:
            freed = gathered and any(units.names[: len(units.names) - kept])
            slices = [
                slice_count
                for slice_count in space.slices
                if freed and slice_count < mesh[1] and mesh[1] % slice_count == 0
            ]
            unit_choices += [
                Choice(strategy, kept, k, offload, slice_count)
                for slice_count in (0, *slices)
                for k in remat
            ]
    return unit_choices


def _counts(units: int, parts: int) -> list[int]:
    """Return the numbers of units to try: 0, all, and those between at equal distances."""
    return sorted({units * part // parts for part in range(parts + 1)}) if parts else [0]


def _fine_counts(units: int) -> list[int]:
    """Return the numbers of units to try in steps of one unit."""
    counts = _counts(units, min(units, _MOST_STEPS))
    # Why not the first ones: they take a trace each. The last ones do so too, but the search seldom
    # comes to them.
    return counts if units <= _FEW else [k for k in counts if k == 0 or k > MARGIN]
