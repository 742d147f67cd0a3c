"""The plan: which leaf lives where, as pure data without tensors. Start here.

- ``plan``: ``Plan``, the whole tree, and its JSON.
- ``unit_plan``: ``UnitPlan``, ``BufferPlan``, ``LeafSpec``: one unit, its buffers, their leaves;
  ``Cast``, a pair of functions around an all-gather; leaves that are slices of whole tensors.
- ``equal_units``: ``UnitGroup``, ``fold_units``: equal units as one row of a table;
  ``representatives``: one unit for all of the same sizes. The table of a printed plan.
- ``mesh_axes``: the axes of a mesh, and the position of each rank.
- ``planner``: ``make_plan``. ``unit_options``: the nodes and units that the user names by paths and
  globs, and the options of units. ``leaf_options``: leaves whose values differ along mesh axes, and
  those that are stored small. ``layout``: the leaves of a tree, which unit owns each of them, where
  it lies in the unit's buffers, and the unit's part of the tree.
- ``stacked``: ``stack`` and ``unstack``, layers whose leaves have the shape ``[L, ...]``.
- ``wrap``: policies that choose the units of a module.
- ``precision``: ``MixedPrecision``, and classes by name.
- ``storage``: ``Storage``, ``nf4``, ``int8``, ``fp8``: pairs of functions that store leaves small.
- ``events``: ``Event``, ``record_events``: the collectives that ran, or that ``fs.trace`` records.
- ``schedule``: ``Schedule``: when units are gathered ahead of their use, and the gathers of a call
  in order, for prediction and runtime. The options ``reduce`` and ``remat``.
- ``predict``: ``predict_events``: the collectives of a step, or of ``fs.hvp`` and other operators.
"""

from __future__ import annotations

from funcshard._utils.tensors import dtype_name, dtype_of, has_numbers
from funcshard.plan import wrap
from funcshard.plan.equal_units import (
    UnitGroup,
    fold_units,
    representatives,
    unit_class,
)
from funcshard.plan.events import (
    Event,
    StepRecording,
    current_recorders,
    current_recording,
    emit,
    record_events,
    record_events_apart,
    record_step,
)
from funcshard.plan.mesh_axes import (
    AXES,
    Axes,
    axes_text,
    mesh_axes_of,
    mesh_text,
    position_of,
    rank_at,
)
from funcshard.plan.plan import (
    Plan,
    check_plan,
    plan_from_data,
    plan_to_data,
    trainable_buffers,
)
from funcshard.plan.planner import make_plan
from funcshard.plan.precision import MixedPrecision, is_one_of
from funcshard.plan.predict import (
    Reached,
    Transform,
    check_transform,
    predict_events,
    predict_step,
)
from funcshard.plan.schedule import (
    Accumulation,
    BackwardOrder,
    ForwardOrder,
    Reduce,
    Schedule,
    buffer_mode,
    check_accumulate,
    check_reduce,
    check_reduce_units,
    check_schedule,
    make_schedule,
    read_remat,
    recomputed_modules,
    unit_mode,
)
from funcshard.plan.stacked import stack, unstack
from funcshard.plan.storage import Packing, Storage, fp8, int8, nf4, step_numel
from funcshard.plan.unit_options import last_match, list_of_globs, match, matches
from funcshard.plan.unit_plan import (
    STRATEGIES,
    Box,
    BufferPlan,
    Cast,
    ChooseCast,
    LeafCut,
    LeafPart,
    LeafSpec,
    LeafView,
    UnitPlan,
    boxes,
    cast_of,
    innermost_in,
    slice_offsets,
    whole_shape_of,
)

__all__ = [
    "Accumulation",
    "check_accumulate",
    "check_transform",
    "AXES",
    "STRATEGIES",
    "Axes",
    "BackwardOrder",
    "Box",
    "BufferPlan",
    "Cast",
    "ChooseCast",
    "Event",
    "StepRecording",
    "current_recorders",
    "current_recording",
    "ForwardOrder",
    "LeafCut",
    "LeafPart",
    "LeafSpec",
    "LeafView",
    "MixedPrecision",
    "Packing",
    "Plan",
    "Reached",
    "Reduce",
    "Schedule",
    "Storage",
    "Transform",
    "UnitGroup",
    "UnitPlan",
    "axes_text",
    "boxes",
    "buffer_mode",
    "cast_of",
    "check_plan",
    "check_reduce",
    "check_reduce_units",
    "check_schedule",
    "dtype_name",
    "dtype_of",
    "emit",
    "fold_units",
    "fp8",
    "has_numbers",
    "innermost_in",
    "int8",
    "is_one_of",
    "make_plan",
    "make_schedule",
    "last_match",
    "match",
    "matches",
    "mesh_axes_of",
    "mesh_text",
    "list_of_globs",
    "nf4",
    "plan_from_data",
    "plan_to_data",
    "position_of",
    "predict_events",
    "predict_step",
    "rank_at",
    "record_events",
    "record_events_apart",
    "record_step",
    "read_remat",
    "recomputed_modules",
    "representatives",
    "slice_offsets",
    "stack",
    "step_numel",
    "trainable_buffers",
    "unit_class",
    "unit_mode",
    "unstack",
    "whole_shape_of",
    "wrap",
]
