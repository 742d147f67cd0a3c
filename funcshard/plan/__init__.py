"""Which leaf lives where, as pure data. Start here.

- ``plan``: ``Plan``, ``UnitPlan``, ``BufferPlan``, ``LeafSpec``: integers and strings.
- ``planner``: ``make_plan``.
- ``wrap``: policies that choose units.
- ``precision``: ``MixedPrecision``.
- ``cast``: ``Cast``, a pair of functions around an all-gather.
- ``schedule``: ``Schedule``: when units are gathered ahead.
- ``events``: ``Event`` and ``record_events``.
- ``predict``: ``predict_events``: the collectives of a step.
"""

from __future__ import annotations

from funcshard.plan import wrap
from funcshard.plan.cast import Cast, ChooseCast
from funcshard.plan.events import Event, emit, record_events, recording
from funcshard.plan.plan import AXES, STRATEGIES, BufferPlan, LeafPart, LeafSpec, Plan, UnitPlan, dtype_name, dtype_of
from funcshard.plan.planner import make_plan, match
from funcshard.plan.precision import MixedPrecision, is_one_of
from funcshard.plan.predict import predict_events
from funcshard.plan.schedule import Schedule, check_reduce, joint_runs, make_schedule, together

__all__ = [
    "AXES",
    "STRATEGIES",
    "BufferPlan",
    "Cast",
    "ChooseCast",
    "Event",
    "LeafPart",
    "LeafSpec",
    "MixedPrecision",
    "Plan",
    "Schedule",
    "UnitPlan",
    "check_reduce",
    "dtype_name",
    "dtype_of",
    "emit",
    "is_one_of",
    "joint_runs",
    "make_plan",
    "make_schedule",
    "match",
    "predict_events",
    "record_events",
    "recording",
    "together",
    "wrap",
]
