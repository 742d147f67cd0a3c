"""The differences between the plans and options of two reports, and the numbers they can move."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from funcshard.estimate.reports.report import Report
from funcshard.estimate.reports.unit_use import recomputed_units
from funcshard.estimate.walk import CATEGORIES
from funcshard.plan import MixedPrecision, Schedule, UnitPlan, dtype_name, fold_units, mesh_text

__all__ = ["BACKWARD", "COMPUTE", "EXPOSED", "MESH", "TRAFFIC", "Difference", "differences_between"]

# Numbers that a change can move, besides the categories of memory.
# Recomputation is a part of backward; ``COMPUTE`` is the time of all other computations.
BACKWARD, COMPUTE, EXPOSED, TRAFFIC, MESH = "backward", "compute", "exposed", "traffic", "mesh"

_STATE = frozenset({"shards", "optimizer", "gradient shards"})
_COLLECTIVE = frozenset({"gathered", "gradients", "reduction", TRAFFIC, EXPOSED})
_BACKWARDD = frozenset({"activations", "temporaries", "gathered", BACKWARD, EXPOSED, TRAFFIC})
_BATCH = frozenset({"inputs", "activations", "temporaries", "loss", COMPUTE, BACKWARD, EXPOSED})
_ALL = frozenset({*CATEGORIES, COMPUTE, EXPOSED, BACKWARD, TRAFFIC})
_DTYPES = {"param": "parameters", "reduce": "reductions", "output": "outputs"}
_OPTIONS = {
    "optimizer": frozenset({"optimizer", "temporaries", COMPUTE}),
    "loss": frozenset({"loss", "temporaries", COMPUTE}),
    "batch": _BATCH,
    "budget": frozenset[str](),
}


class Difference(NamedTuple):
    """One difference between two reports.

    Attributes:
        text: the difference as a clause, such as ``"2 × blocks.* are recomputed in backward"``.
        moves: the categories of memory that it can move, and the names of times and traffic.
    """

    text: str
    moves: frozenset[str]


def differences_between(before: Report, after: Report) -> tuple[Difference, ...]:
    """Return the differences of two reports: mesh, units, options of units, schedule.

    If several units differ in the same way, that is one difference.
    """
    return (*_of_whole(before, after), *_of_units(before, after), *_of_options(before, after))


def _of_whole(before: Report, after: Report) -> Iterable[Difference]:
    old, new = before.plan, after.plan
    if before.hardware != after.hardware:
        moves = frozenset({"communicators", COMPUTE, BACKWARD, EXPOSED})
        yield Difference(f"the hardware is {after.hardware} instead of {before.hardware}", moves)
    if old.mesh_axes != new.mesh_axes:
        meshes = f"{mesh_text(new.mesh_axes)} instead of {mesh_text(old.mesh_axes)}"
        yield Difference(f"the mesh has {meshes}", _STATE | _COLLECTIVE | {"communicators", MESH})
    leaves = [{leaf.path: leaf.whole_shape for leaf in plan.leaves} for plan in (old, new)]
    if leaves[0] != leaves[1]:
        numel = [sum(leaf.numel for leaf in plan.leaves) for plan in (old, new)]
        yield Difference(f"the model has {numel[1]:,} parameters a rank instead of {numel[0]:,}", _ALL)
    elif old.units.keys() != new.units.keys():
        yield Difference(f"the plan has {len(new.units)} units instead of {len(old.units)}", _COLLECTIVE)
    if old.buckets != new.buckets:
        texts = [
            f"{len(plan.buckets)} bucket{'s' if len(plan.buckets) > 1 else ''}" if plan.buckets else "none"
            for plan in (new, old)
        ]
        yield Difference(f"the plan has {texts[0]} instead of {texts[1]}", _COLLECTIVE - {TRAFFIC})
    settings: Mapping[str, Callable[[Schedule], Any]] = {
        "forward prefetch": lambda each: "on" if each.forward_prefetch else "off",
        "backward prefetch": lambda each: each.backward_prefetch or "off",
        "limit of units gathered ahead": lambda each: each.limit,
    }
    for name, setting in settings.items():
        values = setting(after.schedule), setting(before.schedule)
        if values[0] != values[1]:
            yield Difference(f"the {name} is {values[0]} instead of {values[1]}", frozenset({"gathered", EXPOSED}))


def _of_units(before: Report, after: Report) -> Iterable[Difference]:
    old, again = before.plan.units, (recomputed_units(before), recomputed_units(after))
    both = [unit for unit in after.plan.unit_list if unit.name in old]

    def differences(unit: UnitPlan) -> tuple[Difference, ...]:
        was, now = (unit.name in names for names in again)
        recomputed = Difference(f"{{is}} {'' if now else 'not '}recomputed in backward", _BACKWARDD)
        return (*_of_unit(old[unit.name], unit), *([recomputed] if was != now else []))

    found = {unit.name: differences(unit) for unit in both}
    for change in dict.fromkeys(change for each in found.values() for change in each):
        units = [unit for unit in both if change in found[unit.name]]
        changed = {unit.name for unit in units}
        groups = [group for group in fold_units(both, key=lambda unit: unit.name in changed) if group.first.name in changed]
        whose = "all units" if len(units) == len(both) > 1 else " and ".join(group.title for group in groups)
        many = len(units) > 1
        words = {"is": "are" if many else "is", "has": "have" if many else "has", "use": "use" if many else "uses"}
        yield Difference(f"{whose} {change.text.format(**words)}", change.moves)


def _of_unit(old: UnitPlan, new: UnitPlan) -> Iterable[Difference]:
    if old.strategy != new.strategy:
        whole = "no_shard" in (old.strategy, new.strategy)
        moves = _COLLECTIVE | _STATE if whole else frozenset({"gathered", TRAFFIC, EXPOSED})
        yield Difference(f"{{has}} the strategy {new.strategy} instead of {old.strategy}", moves)
    if old.reshard_after_forward != new.reshard_after_forward and old.strategy == new.strategy:
        yield Difference(f"{{is}} {_freed(new)} instead of {_freed(old)}", frozenset({"gathered", TRAFFIC, EXPOSED}))
    if old.reshard_after_backward != new.reshard_after_backward:
        kept = "freed after each backward" if new.reshard_after_backward else "kept over micro-batches"
        yield Difference(f"{{is}} {kept}", frozenset({"gathered", TRAFFIC, EXPOSED}))
    if old.precision != new.precision:
        moves = frozenset({"activations", "temporaries", "loss", COMPUTE, BACKWARD}) | _COLLECTIVE
        yield Difference(f"{{use}} {_precision(new)} instead of {_precision(old)}", moves)
    if old.offload != new.offload:
        yield Difference(f"{{is}} {'' if new.offload else 'not '}offloaded to the CPU", _STATE | {EXPOSED, COMPUTE})
    if [buffer.local for buffer in old.buffers] != [buffer.local for buffer in new.buffers]:
        yield Difference("{has} other local leaves", _STATE | _COLLECTIVE)


def _freed(unit: UnitPlan) -> str:
    ranks = unit.post_forward_ranks
    if ranks is not None:
        return f"held by {ranks} ranks after forward"
    return "freed after forward" if unit.reshard_after_forward else "kept until backward"


def _precision(unit: UnitPlan) -> str:
    precision = unit.precision or MixedPrecision()
    names = {field.name: getattr(precision, field.name) for field in dataclasses.fields(precision)}
    short = {
        name.removesuffix("_dtype"): dtype_name(value) for name, value in names.items() if name.endswith("_dtype") and value
    }
    return " and ".join(f"{value} for {_DTYPES[name]}" for name, value in short.items()) or "the dtypes of the leaves"


def _of_options(before: Report, after: Report) -> Iterable[Difference]:
    names = dict.fromkeys((*before.options, *after.options))
    for name in names:
        old, new = before.options.get(name), after.options.get(name)
        if name != "remat" and old != new:
            words = {
                "micro_batches": f"the step has {new} micro-batches instead of {old}",
                "optimizer": f"the optimizer is {new} instead of {old}",
            }
            yield Difference(words.get(name, f"the option {name} is {new!r} instead of {old!r}"), _OPTIONS.get(name, _ALL))
    batches = [report.tokens / int(str(report.options.get("micro_batches") or 1)) for report in (before, after)]
    if batches[0] != batches[1]:
        yield Difference(f"a rank's batch has {after.tokens:,} tokens instead of {before.tokens:,}", _BATCH)
