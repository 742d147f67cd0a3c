"""One unit: gather its leaves, compute, reduce their gradients. The heart of the library.

Read in this order; each file stands on those before it:

- ``topology``, ``buffer_comm``: over which ranks and how one flat buffer is gathered and reduced;
  ``start_gather`` and ``start_reduce`` are where collectives start.
- ``grad_reducer``: unreduced gradients, until their sums are here.
- ``flat_buffer``: a shard to its leaves and back as autograd Functions; their backward is where a
  gradient goes to the reducer.
- ``prefetcher``: which units a call gathers and when; ``pre_forward`` and ``pre_backward`` are where
  an all-gather is waited for, ``SavedUnit`` is how its memory is freed between forward and backward.
- ``unit``: ``unshard`` and ``reshard``, which run a function inside all that.
- ``collectives``: ``psum`` and ``pmean``. ``checks``: errors for shards that do not fit a plan.
- ``sharding``: ``shard`` and ``gather``, the whole tree to shards and back.
- ``gradients``: ``value_and_grad`` and ``accumulate``. ``recompute``: ``remat``.
"""

from __future__ import annotations

from funcshard.core.buffer_comm import BufferComm, all_gather, bucketed, start_gather, start_gathers, start_reduce
from funcshard.core.checks import check_leaf, check_mesh, check_shard, check_shards
from funcshard.core.collectives import pmean, psum
from funcshard.core.flat_buffer import views
from funcshard.core.grad_reducer import GradReducer, activate, current_reducer
from funcshard.core.gradients import OnGrads, accumulate, detached, value_and_grad
from funcshard.core.prefetcher import Prefetcher, RecomputeParams, ScheduleLearner, current_unit, hooks_allowed
from funcshard.core.recompute import remat
from funcshard.core.sharding import Shards, cut, empty_shard, gather, put, shard
from funcshard.core.topology import Topology
from funcshard.core.unit import Reshard, Unshard, cast_inputs, reshard, run_in_full_precision, unshard

__all__ = [
    "BufferComm", "GradReducer", "OnGrads", "Prefetcher", "RecomputeParams", "Reshard", "ScheduleLearner", "Shards",
    "Topology", "Unshard", "accumulate", "activate", "all_gather", "bucketed", "cast_inputs", "check_leaf", "check_mesh",
    "check_shard", "check_shards", "current_reducer", "current_unit", "cut", "detached", "empty_shard", "gather",
    "hooks_allowed", "pmean", "psum", "put", "remat", "reshard", "run_in_full_precision", "shard", "start_gather",
    "start_gathers", "start_reduce", "unshard", "value_and_grad", "views",
]  # fmt: skip
