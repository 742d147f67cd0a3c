"""Which leaf lives where, as pure data. Start here.

- ``plan``: ``Plan``, ``UnitPlan``, ``BufferPlan``, ``LeafSpec``: integers and strings.
- ``planner``: ``make_plan``.
- ``wrap``: policies that choose units.
- ``precision``: ``MixedPrecision``.
- ``cast``: ``Cast``, a pair of functions around an all-gather.
- ``schedule``: ``Schedule``: when units are gathered ahead.
- ``events``: ``Event`` and ``record_events``.
- ``execution_order``: which units are gathered and reduced, when, and which together; prediction
  and runtime drive the same state machines.
- ``predict``: ``predict_events``: the collectives of a step.
"""

from __future__ import annotations

from funcshard.plan import wrap
from funcshard.plan.cast import Cast, ChooseCast
from funcshard.plan.events import Event, emit, record_events, recording
from funcshard.plan.execution_order import BackwardOrder, ForwardOrder, ReduceOrder
from funcshard.plan.plan import AXES, STRATEGIES, BufferPlan, LeafPart, LeafSpec, Plan, UnitPlan, dtype_name, dtype_of
from funcshard.plan.planner import make_plan, match
from funcshard.plan.precision import MixedPrecision, is_one_of
from funcshard.plan.predict import predict_events
from funcshard.plan.schedule import Schedule, buckets_to_run, check_reduce, gather_buckets, make_schedule

__all__ = [
    "AXES",
    "STRATEGIES",
    "BackwardOrder",
    "BufferPlan",
    "Cast",
    "ChooseCast",
    "Event",
    "ForwardOrder",
    "LeafPart",
    "LeafSpec",
    "MixedPrecision",
    "Plan",
    "ReduceOrder",
    "Schedule",
    "UnitPlan",
    "buckets_to_run",
    "check_reduce",
    "dtype_name",
    "dtype_of",
    "emit",
    "gather_buckets",
    "is_one_of",
    "make_plan",
    "make_schedule",
    "match",
    "predict_events",
    "record_events",
    "recording",
    "wrap",
]
