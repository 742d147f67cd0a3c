"""The differences of two reports."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from funcshard._utils import table
from funcshard.estimate.reports.report import Report
from funcshard.estimate.reports.unit_use import recomputed_units
from funcshard.plan import (
    MixedPrecision,
    Plan,
    UnitPlan,
    dtype_name,
    fold_units,
    mesh_text,
)

_DTYPES = {"param": "parameters", "reduce": "reductions", "buffer": "buffers", "output": "outputs"}
_UNSEEN = "the profile, the plan or the description of the hardware differs in what this list does not show"
# Words of a change of some units, for one unit and for several.
_ONE = {"is": "is", "has": "has", "use": "uses"}
_MANY = {"is": "are", "has": "have", "use": "use"}


def differences_between(before: Report, after: Report) -> tuple[str, ...]:
    """Return the differences of two reports as clauses: plan, options, and profile."""
    clauses = (
        *_of_whole(before, after),
        *_of_units(before, after),
        *_of_options(before, after),
        *_of_profile(before, after),
    )
    field_names = [report_field.name for report_field in dataclasses.fields(Report)]
    all_equal = all(getattr(before, name) == getattr(after, name) for name in field_names)
    return clauses if clauses or all_equal else (_UNSEEN,)


def _change(words: str, old: Any, new: Any, noun: str = "") -> Iterable[str]:
    if old != new:
        yield f"{words} {new}{noun} instead of {old}"


def _of_whole(before: Report, after: Report) -> Iterable[str]:
    old, new = before.plan, after.plan
    yield from _change("the hardware is", before.hardware, after.hardware)
    yield from _change("the mesh has", mesh_text(old.mesh_axes), mesh_text(new.mesh_axes))
    old_shapes, new_shapes = _shapes(old), _shapes(new)
    if old_shapes != new_shapes:
        old_count, new_count = (sum(map(math.prod, s.values())) for s in (old_shapes, new_shapes))
        if old_count == new_count:
            yield "the model has other parameters"
        yield from _change("the model has", f"{old_count:,}", f"{new_count:,}", " parameters")
    elif old.units.keys() != new.units.keys():
        old_count, new_count = len(old.units), len(new.units)
        if old_count == new_count:
            yield "the plan cuts other units"
        unit_noun = " units" if new_count > 1 else " unit"
        yield from _change("the plan has", old_count, new_count, unit_noun)
    old_settings, new_settings = _settings(before), _settings(after)
    for name, setting in new_settings.items():
        yield from _change(f"the {name} is", old_settings[name], setting)


def _settings(report: Report) -> dict[str, Any]:
    schedule = report.schedule
    return {
        "forward prefetch": "on" if schedule.forward_prefetch else "off",
        "backward prefetch": schedule.backward_prefetch or "off",
        "limit of units gathered ahead": schedule.limit,
    }


def _of_units(before: Report, after: Report) -> Iterable[str]:
    old_units = before.plan.units
    old_recomputed, new_recomputed = recomputed_units(before), recomputed_units(after)
    common_units = [unit for unit in after.plan.unit_list if unit.name in old_units]
    units_by_change: dict[str, list[UnitPlan]] = {}
    # Note: units that differ in the same way are one clause.
    for unit in common_units:
        changes = list(_of_unit(old_units[unit.name], unit))
        if unit.name in old_recomputed - new_recomputed:
            changes.append("{is} not recomputed in backward")
        if unit.name in new_recomputed - old_recomputed:
            changes.append("{is} recomputed in backward")
        for change in changes:
            units_by_change.setdefault(change, []).append(unit)
    for change, units in units_by_change.items():
        is_many = len(units) > 1
        unit_title = (
            "all units"
            if is_many and len(units) == len(common_units)
            else _title(units, common_units)
        )
        yield f"{unit_title} {change.format(**(_MANY if is_many else _ONE))}"


def _title(units: Iterable[UnitPlan], all_units: Iterable[UnitPlan]) -> str:
    changed_names = {unit.name for unit in units}
    unit_groups = fold_units(all_units, key=lambda unit: unit.name in changed_names)
    return " and ".join(group.title for group in unit_groups if group.first.name in changed_names)


def _of_unit(old: UnitPlan, new: UnitPlan) -> Iterable[str]:
    yield from _change("{has} the strategy", old.strategy, new.strategy)
    if old.strategy == new.strategy:
        yield from _change("{is}", _freed(old), _freed(new))
    if old.reshard_after_backward != new.reshard_after_backward:
        freed_backward = new.reshard_after_backward
        yield "{is} freed after each backward" if freed_backward else "{is} kept over micro-batches"
    # Note: if not, other units have the rest, and the leaves are no difference of this one.
    same_leaves = {leaf.path for leaf in old.leaves} == {leaf.path for leaf in new.leaves}
    if same_leaves:
        yield from _change("{has} leaves in", _dtypes(old), _dtypes(new))
        yield from _change("{has}", _trainable(old), _trainable(new), " trainable leaves")
    old_precision, new_precision = (
        dataclasses.asdict(unit.precision or MixedPrecision()) for unit in (old, new)
    )
    yield from _change("{use}", _precision(old_precision), _precision(new_precision))
    for name, value in new_precision.items():
        if not name.endswith("_dtype") and old_precision[name] != value:
            yield f"{{use}} {name}={value!r} instead of {old_precision[name]!r}"
    if old.offload != new.offload:
        yield "{is} offloaded to the CPU" if new.offload else "{is} not offloaded to the CPU"
    old_local, new_local = ({buffer.local for buffer in unit.buffers} for unit in (old, new))
    if same_leaves and old_local != new_local:
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
    dtype_uses = {tensors: precision[f"{name}_dtype"] for name, tensors in _DTYPES.items()}
    dtype_texts = [
        f"{dtype_name(dtype)} for {tensors}" for tensors, dtype in dtype_uses.items() if dtype
    ]
    return " and ".join(dtype_texts) or "the dtypes of the leaves"


def _of_options(before: Report, after: Report) -> Iterable[str]:
    for name in dict.fromkeys((*before.options, *after.options)):
        old, new = before.options.get(name), after.options.get(name)
        if name == "micro_batches":
            yield from _change("the step has", old, new, " micro-batches")
        elif name == "budget":
            yield from _change("the budget is", _budget(old), _budget(new))
        elif name == "optimizer":
            yield from _change("the optimizer is", old, new)
        elif name != "remat" and old != new:
            yield f"the option {name} is {new!r} instead of {old!r}"


def _budget(budget: Any) -> str:
    return "the device's memory" if budget is None else table.size(budget)


def _of_profile(before: Report, after: Report) -> Iterable[str]:
    """Yield the first difference of inputs, code or loss, if the parameters are the same."""
    if _shapes(before.plan) != _shapes(after.plan):
        return
    old, new = _forward(before), _forward(after)
    # Note: more tokens also mean more FLOPs and bytes, so only the first difference is named.
    clauses = (
        *_change("a micro-batch of a rank has", old[0], new[0], " tokens"),
        *_change("forward and loss of a micro-batch have", old[1], new[1], " FLOPs"),
        *_change("forward and loss of a micro-batch move", old[2], new[2]),
    )
    yield from clauses[:1]


def _forward(report: Report) -> tuple[str, str, str]:
    """Return tokens, FLOPs and bytes of the forward of a micro-batch."""
    batch_count = int(str(report.options.get("micro_batches") or 1))
    forward_spans = [span for span in report.spans if span.what in ("forward", "loss")]
    forward_flops = sum(span.flops for span in forward_spans) // batch_count
    moved_bytes = sum(span.bytes for span in forward_spans) // batch_count
    return f"{report.tokens // batch_count:,}", f"{forward_flops:,}", table.size(moved_bytes)


def _shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {leaf.path: leaf.whole_shape for leaf in plan.leaves}
