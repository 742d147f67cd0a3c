"""``Cast``: a pair of pure functions that run before and after the all-gather of a flat buffer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from funcshard.plan.unit_plan import BufferPlan, UnitPlan


class Cast(NamedTuple):
    """A pair of pure functions around the all-gather of a flat buffer.

    The pair replaces the cast to ``param_dtype``, of parameters only: tangents use the plain cast.

    Gradients ignore the pair: they are gradients by the gathered values, reduced in
    ``reduce_dtype``. If your pair rounds, they are straight-through estimates.

    Attributes:
        pre_all_gather: your function from this rank's 1-D shard to the data sent: a 1-D tensor of
            any dtype, of the same size on every rank. Backward may gather again, so within a step
            return the same data for the same shard.
        post_all_gather: your function from the data received, of shape ``[ranks, size]``, to the
            flat buffer in the dtype to compute in: a 1-D tensor of at least
            ``ranks * shard.numel()`` elements. Further elements are ignored.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
        >>> truncate = fs.Cast(
        ...     lambda shard: shard.to(torch.int8), lambda rows: rows.flatten().float()
        ... )
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     apply = lambda leaves: leaves["w"] * 1
        ...     f = fs.unshard(apply, plan.units[""], mesh, cast=lambda unit, buffer: truncate)
        ...     with fs.record_events() as events:
        ...         out = f(fs.shard(params, plan, mesh)[""])
        ...     return out.tolist(), events[0].dtype, events[0].bytes
        >>> fs.simulate(main, world_size=2)[0]
        ([1.0, 2.0, 3.0, 4.0], 'int8', 4)

    Source: quantised weight communication is that of Wang et al., "ZeRO++" (2023),
    https://arxiv.org/abs/2306.10209
    """

    pre_all_gather: Callable[[torch.Tensor], torch.Tensor]
    post_all_gather: Callable[[torch.Tensor], torch.Tensor]


# A function that returns the pair for a buffer of a unit, or None for the plain cast to
# param_dtype.
ChooseCast = Callable[[UnitPlan, BufferPlan], Cast | None]


def cast_of(choose: ChooseCast | None, unit: UnitPlan, buffer: BufferPlan) -> Cast | None:
    """Return the pair that ``choose`` gives a buffer; ``None`` for the plain cast."""
    # What packed leaves are sent as, their storage decides.
    if choose is None or buffer.packing is not None:
        return None
    chosen_cast: object = choose
    if callable(choose) and not isinstance(choose, Cast | type | torch.nn.Module):
        chosen_cast = choose(unit, buffer)
        if chosen_cast is None or isinstance(chosen_cast, Cast):
            return chosen_cast
    # The pair itself, a class or a module in place of the function, or what it returned.
    raise TypeError(
        "cast must be a function cast(unit, buffer) that returns a funcshard.Cast or None; found "
        f"{chosen_cast!r}: for one pair everywhere write cast=lambda unit, buffer: pair"
    )
