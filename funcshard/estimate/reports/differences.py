"""The differences between the plans, the options and the profiles of two reports."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from funcshard._utils import table
from funcshard.estimate.reports.report import Report
from funcshard.estimate.reports.unit_use import recomputed_units
from funcshard.plan import (
    MixedPrecision,
    Plan,
    Schedule,
    UnitPlan,
    dtype_name,
    fold_units,
    mesh_text,
)

_DTYPES = {"param": "parameters", "reduce": "reductions", "buffer": "buffers", "output": "outputs"}
_UNSEEN = "the profile, the plan or the description of the hardware differs in what this list does not show"


def differences_between(before: Report, after: Report) -> tuple[str, ...]:
    """Return the differences of two reports as clauses: plan, options, and profile.

    If several units differ in the same way, that is one difference.
    """
    all_differences = (
        *_of_whole(before, after),
        *_of_units(before, after),
        *_of_options(before, after),
        *_of_profile(before, after),
    )
    same = all(
        getattr(before, field.name) == getattr(after, field.name)
        for field in dataclasses.fields(Report)
    )
    return all_differences if all_differences or same else (_UNSEEN,)


def _of_whole(before: Report, after: Report) -> Iterable[str]:
    old, new = before.plan, after.plan
    if before.hardware != after.hardware:
        yield f"the hardware is {after.hardware} instead of {before.hardware}"
    if old.mesh_axes != new.mesh_axes:
        yield f"the mesh has {mesh_text(new.mesh_axes)} instead of {mesh_text(old.mesh_axes)}"
    shapes = _shapes(old), _shapes(new)
    if shapes[0] != shapes[1]:
        numbers = [sum(map(math.prod, leaf_shapes.values())) for leaf_shapes in shapes]
        others = f"{numbers[1]:,} parameters instead of {numbers[0]:,}"
        yield f"the model has {'other parameters' if numbers[0] == numbers[1] else others}"
    elif old.units.keys() != new.units.keys():
        counts = len(new.units), len(old.units)
        others = (
            f"the plan has {counts[0]} unit{'s' if counts[0] > 1 else ''} instead of {counts[1]}"
        )
        yield "the plan cuts other units" if counts[0] == counts[1] else others
    settings: Mapping[str, Callable[[Schedule], Any]] = {
        "forward prefetch": lambda each: "on" if each.forward_prefetch else "off",
        "backward prefetch": lambda each: each.backward_prefetch or "off",
        "limit of units gathered ahead": lambda each: each.limit,
    }
    for name, setting in settings.items():
        values = setting(after.schedule), setting(before.schedule)
        if values[0] != values[1]:
            yield f"the {name} is {values[0]} instead of {values[1]}"


def _of_units(before: Report, after: Report) -> Iterable[str]:
    old, recomputed_names = before.plan.units, (recomputed_units(before), recomputed_units(after))
    both = [unit for unit in after.plan.unit_list if unit.name in old]

    def differences(unit: UnitPlan) -> tuple[str, ...]:
        was, recomputed_now = (unit.name in names for names in recomputed_names)
        recomputed = f"{{is}} {'' if recomputed_now else 'not '}recomputed in backward"
        return (*_of_unit(old[unit.name], unit), *([recomputed] if was != recomputed_now else []))

    by_name = {unit.name: differences(unit) for unit in both}
    for change in dict.fromkeys(change for texts in by_name.values() for change in texts):
        units = [unit for unit in both if change in by_name[unit.name]]
        changed = {unit.name for unit in units}
        groups = [
            group
            for group in fold_units(both, key=lambda unit: unit.name in changed)
            if group.first.name in changed
        ]
        whose = (
            "all units"
            if len(units) == len(both) > 1
            else " and ".join(group.title for group in groups)
        )
        many = len(units) > 1
        words = {
            "is": "are" if many else "is",
            "has": "have" if many else "has",
            "use": "use" if many else "uses",
        }
        yield f"{whose} {change.format(**words)}"


def _of_unit(old: UnitPlan, new: UnitPlan) -> Iterable[str]:
    if old.strategy != new.strategy:
        yield f"{{has}} the strategy {new.strategy} instead of {old.strategy}"
    if old.reshard_after_forward != new.reshard_after_forward and old.strategy == new.strategy:
        yield f"{{is}} {_freed(new)} instead of {_freed(old)}"
    if old.reshard_after_backward != new.reshard_after_backward:
        yield (
            "{is} freed after each backward"
            if new.reshard_after_backward
            else "{is} kept over micro-batches"
        )
    # If not, other units have the rest.
    same = {leaf.path for leaf in old.leaves} == {leaf.path for leaf in new.leaves}
    if same and _dtypes(old) != _dtypes(new):
        yield f"{{has}} leaves in {_dtypes(new)} instead of {_dtypes(old)}"
    if same and _trainable(old) != _trainable(new):
        yield f"{{has}} {_trainable(new)} trainable leaves instead of {_trainable(old)}"
    old_precision, new_precision = (
        dataclasses.asdict(unit.precision or MixedPrecision()) for unit in (old, new)
    )
    if _precision(old_precision) != _precision(new_precision):
        yield f"{{use}} {_precision(new_precision)} instead of {_precision(old_precision)}"
    for name in new_precision:
        if not name.endswith("_dtype") and old_precision[name] != new_precision[name]:
            yield f"{{use}} {name}={new_precision[name]!r} instead of {old_precision[name]!r}"
    if old.offload != new.offload:
        yield f"{{is}} {'' if new.offload else 'not '}offloaded to the CPU"
    if same and {buffer.local for buffer in old.buffers} != {
        buffer.local for buffer in new.buffers
    }:
        yield "{has} other local leaves"


def _freed(unit: UnitPlan) -> str:
    ranks = unit.post_forward_ranks
    if ranks is not None:
        return f"held by {ranks} ranks after forward"
    return "freed after forward" if unit.reshard_after_forward else "kept until backward"


def _dtypes(unit: UnitPlan) -> str:
    return " and ".join(dict.fromkeys(buffer.dtype for buffer in unit.buffers))


def _trainable(unit: UnitPlan) -> int:
    return sum(len(buffer.leaves) for buffer in unit.buffers if buffer.trainable)


def _precision(precision: Mapping[str, Any]) -> str:
    dtypes = {dtype_use: precision[f"{dtype_use}_dtype"] for dtype_use in _DTYPES}
    texts = [
        f"{dtype_name(dtype)} for {_DTYPES[dtype_use]}"
        for dtype_use, dtype in dtypes.items()
        if dtype
    ]
    return " and ".join(texts) or "the dtypes of the leaves"


def _of_options(before: Report, after: Report) -> Iterable[str]:
    for name in dict.fromkeys((*before.options, *after.options)):
        old, new = before.options.get(name), after.options.get(name)
        if name == "remat" or old == new:
            continue
        if name == "micro_batches":
            yield f"the step has {new} micro-batches instead of {old}"
        elif name == "budget":
            yield f"the budget is {_budget(new)} instead of {_budget(old)}"
        elif name == "optimizer":
            yield f"the optimizer is {new} instead of {old}"
        else:
            yield f"the option {name} is {new!r} instead of {old!r}"


def _budget(budget: Any) -> str:
    return "the device's memory" if budget is None else table.size(budget)


def _of_profile(before: Report, after: Report) -> Iterable[str]:
    """Yield what the same parameters compute otherwise: other inputs, code, or loss."""
    if _shapes(before.plan) != _shapes(after.plan):
        return
    reports = (after, before)
    tokens, flops, moved = zip(*map(_forward, reports), strict=True)
    if tokens[0] != tokens[1]:
        yield f"a micro-batch of a rank has {tokens[0]:,} tokens instead of {tokens[1]:,}"
    elif flops[0] != flops[1]:
        yield f"forward and loss of a micro-batch have {flops[0]:,} FLOPs instead of {flops[1]:,}"
    elif moved[0] != moved[1]:
        sizes = [table.size(size) for size in moved]
        yield f"forward and loss of a micro-batch move {sizes[0]} instead of {sizes[1]}"


def _forward(report: Report) -> tuple[int, int, int]:
    """Return tokens, FLOPs and moved bytes of the forward and loss of a micro-batch."""
    batch_count = int(str(report.options.get("micro_batches") or 1))
    spans = [span for span in report.spans if span.what in ("forward", "loss")]
    sums = report.tokens, sum(span.flops for span in spans), sum(span.bytes for span in spans)
    return sums[0] // batch_count, sums[1] // batch_count, sums[2] // batch_count


def _shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {leaf.path: leaf.whole_shape for leaf in plan.leaves}
