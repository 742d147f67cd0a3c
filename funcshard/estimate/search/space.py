"""``Space``: the plans that a search tries, as data; and the equal units that it chooses for.

A model of 126 equal blocks has one choice for all of them, not 126: how many are computed again in
backward, and how many stay gathered. Units of which there is only one share a choice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from funcshard._utils import check_choice, check_count, check_flag
from funcshard.estimate.trace import Program, Run
from funcshard.plan import Plan, fold_units

__all__ = ["Candidate", "Choice", "Space", "UnitClass", "candidates", "unit_classes"]

STRATEGIES = ("full_shard", "no_shard")


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
            computes again: the first ones. 0: none.
        offload: whether shards live on the host, for all units.
        buckets: largest bytes of units that share their collectives; 0 for none.
        limits: how many units are gathered ahead.

    Example:
        >>> Space(meshes=((1, 8),), remat=4, offload=(False, True)).kept
        2
    """

    meshes: tuple[tuple[int, int], ...] | None = None
    strategies: tuple[str, ...] = STRATEGIES
    kept: int = 2
    remat: int = 8
    offload: tuple[bool, ...] = (False,)
    buckets: tuple[int, ...] = (0,)
    limits: tuple[int, ...] = (1,)

    def __post_init__(self) -> None:
        for mesh in self.meshes or ():
            if len(mesh) != 2:
                raise ValueError(f"meshes must hold pairs (replicate, shard); found {mesh!r}")
            for size in mesh:
                check_count("size of a mesh axis", size, of="ranks")
        for strategy in self.strategies:
            check_choice("strategy", strategy, STRATEGIES)
        for name in ("strategies", "offload", "buckets", "limits"):
            if not getattr(self, name):
                raise ValueError(f"{name} must hold at least one value to try; found {getattr(self, name)!r}")
        for flag in self.offload:
            check_flag("offload", flag)
        check_count("kept", self.kept, 0, of="parts")
        check_count("remat", self.remat, 0, of="parts")
        for size in self.buckets:
            check_count("buckets", size, 0, of="bytes")
        for limit in self.limits:
            check_count("limits", limit, of="units")


class Choice(NamedTuple):
    """The choice for the units of one class.

    Attributes:
        strategy: ``"full_shard"`` or ``"no_shard"``.
        kept: number of units that stay gathered, the last ones.
        remat: number of units that backward computes again, the first ones.
    """

    strategy: str
    kept: int
    remat: int


class Candidate(NamedTuple):
    """One plan that a search may try.

    Attributes:
        profile: index of the profile.
        mesh: sizes ``(replicate, shard)``.
        offload: whether shards live on the host.
        bucket: bytes of units that share their collectives.
        limit: how many units are gathered ahead.
        choices: the choice for each class of units.
    """

    profile: int
    mesh: tuple[int, int]
    offload: bool
    bucket: int
    limit: int
    choices: tuple[Choice, ...]


class UnitClass(NamedTuple):
    """Units that share a choice.

    Attributes:
        names: their names, in the order of forward.
        repeated: whether they are equal; if not, they are those without an equal one.
        title: the units in words, such as ``"blocks.*"``.
    """

    names: tuple[str, ...]
    repeated: bool
    title: str


def unit_classes(plan: Plan, program: Program) -> tuple[UnitClass, ...]:
    """Return the classes of equal units, and last the class of all units without an equal one.

    Units are equal if their buffers, their precision and the FLOPs of their forward are.
    """
    flops: dict[str, int] = {}
    for step in program.steps:
        if isinstance(step, Run) and step.what == "forward":
            flops[step.unit] = flops.get(step.unit, 0) + sum(work.flops for work in step.work)
    order = {name: position for position, name in enumerate(dict.fromkeys(program.order))}
    groups: dict[Any, list[str]] = {}
    for unit in sorted(plan.unit_list, key=lambda unit: order.get(unit.name, len(order))):
        forms = tuple((each.key, each.numel, each.dtype, each.trainable, each.local) for each in unit.buffers)
        groups.setdefault((unit.name == "", forms, unit.precision, flops.get(unit.name, 0)), []).append(unit.name)
    units = plan.units
    found = []
    for names in groups.values():
        if len(names) > 1:
            titles = [group.title for group in fold_units(units[name] for name in names)]
            title = titles[0].rpartition("× ")[2] if len(titles) == 1 else f"units like {names[0]}"
            found.append(UnitClass(tuple(names), True, title))
    single = tuple(names[0] for names in groups.values() if len(names) == 1)
    title = "other units" if len(single) > 1 else "".join(single) or "the root"
    return (*found, UnitClass(single, False, title)) if single else tuple(found)


def candidates(space: Space, ranks: int, classes: Sequence[UnitClass], profiles: int) -> Iterator[Candidate]:
    """Yield all candidates of a space, always in the same order.

    Arguments:
        space: the space.
        ranks: number of ranks.
        classes: the classes of units.
        profiles: number of profiles to choose from.
    """
    pairs = space.meshes or tuple((ranks // size, size) for size in range(ranks, 0, -1) if ranks % size == 0)
    repeats = any(each.repeated for each in classes)
    shared = (range(profiles), pairs, space.offload, space.buckets, space.limits)
    for profile, mesh, offload, bucket, limit in itertools.product(*shared):
        options = [_choices(space, mesh, each, again=each.repeated or not repeats) for each in classes]
        for choices in itertools.product(*options):
            yield Candidate(profile, mesh, offload, bucket, limit, choices)


def _choices(space: Space, mesh: tuple[int, int], units: UnitClass, *, again: bool) -> list[Choice]:
    """Return the choices of one class; ``again`` lets backward compute its units again."""
    able = sum(name != "" for name in units.names)
    remat = _counts(able, space.remat if again else 0)
    found = []
    for strategy in space.strategies:
        # Why one shard is left out: then nothing is gathered, as with no_shard.
        if strategy == "no_shard" and mesh[1] == 1 and "full_shard" in space.strategies:
            continue
        kept = _counts(len(units.names), space.kept) if strategy == "full_shard" and mesh[1] > 1 else [0]
        found += [Choice(strategy, stay, k) for stay in kept for k in remat]
    return found


def _counts(units: int, parts: int) -> list[int]:
    """Return the numbers of units to try: 0, all, and those between at equal distances."""
    return sorted({units * part // parts for part in range(parts + 1)}) if parts else [0]
