"""Reports made by hand for tests of tables, pictures and traces: no trace and no simulator."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import funcshard as fs
from funcshard.estimate.reports.report import Report
from funcshard.estimate.walk import CATEGORIES, Moment, Span

MIB = 1 << 20


def moment(seconds: float, what: str, unit: str, memory: dict[str, int]) -> Moment:
    return Moment(seconds, what, unit, tuple(memory.get(category, 0) for category in CATEGORIES))


def plan_of(
    blocks: int = 4, mesh: Any = 8, *, dtype: torch.dtype = torch.float32, frozen: bool = False, **options: Any
) -> fs.Plan:
    with torch.device("meta"):
        weights = [torch.empty(512, 1024, dtype=dtype) for _ in range(blocks)]
        layers = [{"w": torch.nn.Parameter(weight, requires_grad=not frozen)} for weight in weights]
        params = {"blocks": layers, "head": torch.empty(512, 512, dtype=dtype)}
    return fs.make_plan(params, mesh, **{"units": ["blocks.*"], **options})


def report_of(plan: fs.Plan | None = None, *, seconds: float = 0.01, saved: int = 3 * MIB, **changes: Any) -> Report:
    """Return a report of a step in which each computation takes ``seconds``.

    Each unit that is not in ``options["remat"]`` saves ``saved`` bytes of activations.
    """
    plan = plan_of() if plan is None else plan
    schedule, remat = fs.make_schedule(plan), changes.get("options", {}).get("remat", ())
    names = [name for name in schedule.order if name]
    sizes = {unit.name: sum(b.padded_numel * 4 for b in unit.buffers) for unit in plan.unit_list}
    shards = sum(b.shard_numel * 4 for unit in plan.unit_list for b in unit.buffers)
    fixed = {"shards": shards, "optimizer": 2 * shards, "inputs": 64}
    timeline, spans, now, kept = [moment(0.0, "start", "", fixed)], [], 0.0, 0
    most: tuple[int, dict[str, dict[str, int]]] = (0, {})
    held: dict[str, int] = {}
    for what, order in (("forward", names), ("backward", names[::-1])):
        for name in order:
            spans.append(Span("gather", "all_gather", name, now, seconds / 2, sizes[name], 0, "calibrated"))
            now += seconds / 2
            if what == "forward" and name not in remat:
                held[name] = saved
            kept = sum(held.values())
            memory = {**fixed, "gathered": sizes[name], "activations": kept, "gradients": sizes[name] * (what == "backward")}
            timeline.append(moment(now, what, name, memory))
            if timeline[-1].total > most[0]:
                most = timeline[-1].total, {n: {"activations": size} for n, size in held.items()}
                most[1].setdefault(name, {})["gathered"] = sizes[name]
            spans.append(
                Span("compute", what, name, now, seconds * (1 + (what == "backward")), sizes[name], 10**9, "traced")
            )
            now = spans[-1].end
            if what == "backward":
                spans.append(Span("reduce", "reduce_scatter", name, now, seconds / 4, sizes[name], 0, "extrapolated"))
                held.pop(name, None)
    now += seconds / 4
    timeline.append(moment(now, "optimizer", "", fixed))
    options = {"remat": (), **changes.pop("options", {})}
    report = Report(
        plan, schedule, "h100-8x400gbps", tuple(timeline), max(timeline, key=lambda m: m.total), tuple(spans),
        fs.predict_events(plan, schedule), now, seconds,
        tokens=4096, flops=10**12, peak_flops=1e15, reserved=(int(1.02 * most[0]), int(1.2 * most[0])), budget=80 * MIB,
        reserved_source="a source", unit_memory=most[1], options=options,
    )  # fmt: skip
    return dataclasses.replace(report, **{"sources": {"peak": "traced", "step_time": "calibrated"}, **changes})
