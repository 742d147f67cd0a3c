"""One unit: gather its leaves, compute, reduce their gradients. The heart of the library.

docs/life-of-a-step.md follows one step through these files, which build on each other in this
order:

- ``buffer_comm``: how one flat buffer is gathered and reduced. ``start_gather`` and
  ``start_reduce`` start a collective; ``finish`` of the handle that they return waits.
- ``basis``: errors for loops of torch over unit vectors that would mix ranks. Skip it at first.
- ``grad_reducer``: takes unreduced gradients in backward, starts their reductions, keeps the sums,
  and until then the units that stay gathered.
- ``flat_buffer``: a shard to its leaves and back, as two autograd Functions.
- ``prefetcher``: which units a call gathers, and when. ``Gathered``, one gather of a unit, keeps
  autograd from holding its buffers after forward; ``ScheduleLearner`` keeps the order of the first
  call.
- ``checks``: errors for meshes and leaves that do not fit a plan; errors of one rank that all
  raise.
- ``dtensor_leaves``: leaves that the model uses as DTensors.
- ``checksum``: whether ranks that each pass full leaves pass the same ones.
- ``unit``: ``unshard`` and ``reshard``, and the ``Unshard`` that they return; errors for shards
  that do not fit a plan, and for a forward that writes to leaves.
- ``attention``: attention with derivatives of any order. ``replaced_kernels``: losses that have
  them, and where both take the place of torch's kernels.
- ``plain_collectives``: collectives along mesh axes and their adjoints, without autograd.
  ``collectives``: ``psum``, ``all_gather`` and others, differentiable, along named axes;
  ``broadcast_object`` and ``agree``, a small value for all ranks.
- ``sharding``: ``shard`` and ``gather``, the whole tree to shards and back.
- ``leaf_blocks``: random numbers of which a rank draws those that it keeps. ``vectors``: inner
  products, random vectors, and values that all ranks hold, for arithmetic on shards.
- ``gradients``: ``value_and_grad`` and ``accumulate``, which take the mean over ranks.
- ``recompute``: ``remat``.
- ``derivatives``: ``grad``, ``hvp`` and others by ``torch.func``, with the same mean.
"""

from __future__ import annotations

from funcshard.core.buffer_comm import (
    AllGatherHandle,
    BufferComm,
    Leaves,
    start_gather,
    start_reduce,
)
from funcshard.core.checks import (
    can_cast,
    check_fits,
    check_leaf,
    check_mesh,
    check_source,
    raise_on_every_rank,
)
from funcshard.core.checksum import LeafChecksums, check_tie, on_every_rank
from funcshard.core.collectives import (
    agree,
    all_gather,
    all_to_all,
    axis_index,
    broadcast_object,
    pmax,
    pmean,
    ppermute,
    psum,
    psum_scatter,
    psum_world,
)
from funcshard.core.derivatives import gnvp, grad, hvp, jacobian, jvp, linearize, vjp
from funcshard.core.flat_buffer import (
    all_reduce_flat,
    decoded_views,
    start_gather_flat,
    views,
)
from funcshard.core.grad_reducer import GradReducer, activate, current_reducer
from funcshard.core.gradients import (
    CONSTANT,
    UNGATHERED,
    GradientFunction,
    GradientKeywords,
    GradientOptions,
    accumulate,
    check_callable,
    check_weight,
    detached,
    evaluate,
    loss_value,
    named_results,
    value_and_grad,
)
from funcshard.core.leaf_blocks import LeafBlocks, block_count
from funcshard.core.plain_collectives import (
    broadcast,
    join_slices,
    slice_from_rank,
)
from funcshard.core.prefetcher import (
    Gathered,
    Prefetcher,
    ScheduleLearner,
    slice_comms,
)
from funcshard.core.recompute import remat
from funcshard.core.replaced_kernels import any_order, any_order_active, check_derivatives
from funcshard.core.sharding import (
    Shards,
    cut,
    cut_from_rank,
    empty_shard,
    gather,
    put_whole,
    shard,
)
from funcshard.core.unit import (
    FirstLook,
    Unshard,
    cast_inputs,
    cast_outputs,
    check_cut,
    check_shards,
    modified_leaf,
    reshard,
    run_in_full_precision,
    start_unit,
    unit_comms,
    unshard,
)
from funcshard.core.vectors import axpy, broadcast_to_shards, norm, randn_like, vdot

__all__ = [
    "AllGatherHandle", "BufferComm", "CONSTANT", "FirstLook", "Gathered", "GradReducer", "GradientFunction", "UNGATHERED",
    "GradientKeywords", "GradientOptions", "LeafBlocks", "LeafChecksums", "Leaves", "Prefetcher",
    "ScheduleLearner", "Shards", "Unshard", "accumulate",
    "activate", "agree", "all_gather",
    "all_reduce_flat", "all_to_all", "any_order", "any_order_active", "axis_index", "axpy",
    "block_count", "broadcast", "broadcast_object", "broadcast_to_shards", "can_cast",
    "cast_inputs", "cast_outputs", "check_callable", "check_cut", "check_derivatives", "check_fits", "check_leaf",
    "check_mesh", "check_shards", "check_source", "check_tie", "check_weight", "current_reducer",
    "cut", "cut_from_rank", "decoded_views", "detached", "empty_shard", "evaluate", "gather", "gnvp", "grad",
    "hvp", "jacobian", "join_slices", "jvp", "linearize",
    "loss_value", "modified_leaf", "named_results", "norm", "on_every_rank", "pmax", "pmean",
    "ppermute", "psum", "psum_scatter", "psum_world", "put_whole", "raise_on_every_rank", "randn_like", "remat", "reshard",
    "run_in_full_precision", "shard", "slice_comms", "slice_from_rank", "start_gather",
    "start_gather_flat", "start_reduce", "start_unit", "unit_comms", "unshard",
    "value_and_grad", "vdot", "views", "vjp",
]  # fmt: skip
