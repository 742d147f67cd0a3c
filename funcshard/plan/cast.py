"""``Cast``: what is done to a shard before it is gathered, and to what was gathered after, as a pair of pure functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from funcshard.plan.plan import BufferPlan, UnitPlan

__all__ = ["Cast", "ChooseCast"]


class Cast(NamedTuple):
    """A pair of pure functions around the gathering of a flat buffer, in place of the cast to ``param_dtype``.

    Gradients do not see it: they are those of the gathered values as they are, and are reduced in ``reduce_dtype``
    (a straight-through estimate where the pair rounds). Tangents, and whatever else is not the parameters themselves, are
    gathered by the plain cast.

    Attributes:
        pre_all_gather: from this rank's shard, 1-D, to what travels: a 1-D tensor of any dtype, of one size on every rank. Backward
            may gather again what forward gathered, so within a step it must give the same for the same shard.
        post_all_gather: from what was gathered, ``[ranks, size]``, one row from each rank, to the flat buffer, 1-D, of
            ``ranks * shard.numel()`` elements or more (what lies beyond is left out), in the dtype to compute in.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
        >>> truncate = fs.Cast(lambda shard: shard.to(torch.int8), lambda rows: rows.flatten().float())
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves: leaves["w"] * 1, plan.units[""], mesh, cast=lambda unit, buffer: truncate)
        ...     with fs.record_events() as events:
        ...         out = f(fs.shard(params, plan, mesh)[""])
        ...     return out.tolist(), events[0].dtype, events[0].bytes
        >>> fs.simulate(main, world_size=2)[0]
        ([1.0, 2.0, 3.0, 4.0], 'int8', 4)

    Source: quantised weight communication is that of Wang et al., "ZeRO++" (2023), https://arxiv.org/abs/2306.10209
    """

    pre_all_gather: Callable[[torch.Tensor], torch.Tensor]
    post_all_gather: Callable[[torch.Tensor], torch.Tensor]


# which pair a buffer of a unit has; None: the plain cast to param_dtype
ChooseCast = Callable[[UnitPlan, BufferPlan], Cast | None]
