"""One unit: gather, compute, reduce. The heart.

- ``flat_buffer``: leaves as views of a flat buffer, and the adjoint autograd Functions.
- ``buffer_comm``: what travels for one flat buffer.
- ``prefetcher``: which units are gathered, when, and what backward needs again.
- ``grad_reducer``: gradients on their way through the reductions.
- ``unit``: ``unshard`` and ``reshard``.
- ``sharding``: ``shard`` and ``gather``.
- ``gradients``: ``value_and_grad`` and ``accumulate``.
- ``recompute``: ``remat``.
- ``collectives``: ``psum``, ``pmean``.
- ``mixed_precision``: casts of a unit's inputs and outputs.
"""

from __future__ import annotations

from funcshard.core.buffer_comm import Link, joined, start_gather, start_gathers, start_reduce
from funcshard.core.collectives import pmean, psum
from funcshard.core.flat_buffer import views
from funcshard.core.grad_reducer import current_step, open_step
from funcshard.core.gradients import OnGrads, accumulate, detached, value_and_grad
from funcshard.core.mixed_precision import cast_inputs, run_in_full_precision
from funcshard.core.prefetcher import Again, Flight, hooks_work, running
from funcshard.core.recompute import remat
from funcshard.core.sharding import Shards, check_leaf, check_mesh, check_shards, cut, empty_shard, gather, put, shard
from funcshard.core.unit import Reshard, Unshard, check_shard, reshard, unshard

__all__ = [
    "Again",
    "Flight",
    "Link",
    "OnGrads",
    "Reshard",
    "Shards",
    "Unshard",
    "accumulate",
    "cast_inputs",
    "check_leaf",
    "check_mesh",
    "check_shard",
    "check_shards",
    "current_step",
    "cut",
    "detached",
    "empty_shard",
    "gather",
    "hooks_work",
    "joined",
    "run_in_full_precision",
    "open_step",
    "pmean",
    "psum",
    "put",
    "remat",
    "reshard",
    "running",
    "shard",
    "start_gather",
    "start_gathers",
    "start_reduce",
    "unshard",
    "value_and_grad",
    "views",
]
