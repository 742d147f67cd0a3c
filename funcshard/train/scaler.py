"""``GradScaler``: loss scaling for float16 as a pure value, state in, state out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard.comm import Mesh
from funcshard.core import psum

__all__ = ["GradScaler", "ScalerState"]


class ScalerState(NamedTuple):
    """What loss scaling carries from step to step, the same on every rank.

    Attributes:
        scale: what losses are multiplied by, a float32 scalar.
        growth_tracker: steps without infinities since it last changed, an int32 scalar.

    Example:
        >>> import torch, funcshard as fs
        >>> state = fs.GradScaler(init_scale=8.0).init(fs.Mesh())
        >>> state == fs.ScalerState(torch.tensor(8.0), torch.tensor(0, dtype=torch.int32))
        True
    """

    scale: torch.Tensor
    growth_tracker: torch.Tensor


@dataclass(frozen=True, slots=True)
class GradScaler:
    """How a loss is scaled so that gradients do not vanish in float16; for ``make_train_step``, or by hand.

    Attributes:
        init_scale: the first scale.
        growth_factor: what it is multiplied by after ``growth_interval`` steps in a row without infinities or NaN.
        backoff_factor: what it is multiplied by when a gradient has any; the step is then left out, by every rank.
        growth_interval: a number of steps.

    Example:
        >>> import torch, funcshard as fs
        >>> scaler = fs.GradScaler(init_scale=8.0)
        >>> mesh = fs.Mesh()
        >>> state = scaler.init(mesh)
        >>> scaler.scale(torch.tensor(0.5), state)
        tensor(4.)
        >>> grads, found_inf = scaler.unscale({"w": torch.tensor([16.0, float("inf")])}, state, mesh)
        >>> bool(found_inf), scaler.update(state, found_inf).scale
        (True, tensor(4.))

    Source: ``torch.amp.GradScaler``, whose scales these are step for step, and
    ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        if not self.init_scale > 0 or not self.growth_factor > 1 or not 0 < self.backoff_factor < 1:
            raise ValueError(
                f"a scaler needs init_scale > 0, growth_factor > 1 and a backoff_factor between 0 and 1; found {self}"
            )
        if not isinstance(self.growth_interval, int) or self.growth_interval < 1:
            raise ValueError(f"growth_interval must be a whole number of steps, at least 1; found {self.growth_interval!r}")

    def init(self, mesh: Mesh) -> ScalerState:
        """Return the state before the first step, on the mesh's device."""
        scale = torch.tensor(self.init_scale, dtype=torch.float32, device=mesh.device)
        return ScalerState(scale, torch.zeros((), dtype=torch.int32, device=mesh.device))

    def scale(self, loss: torch.Tensor, state: ScalerState) -> torch.Tensor:
        """Return ``loss`` times the scale, differentiably; in float32 at the least."""
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * state.scale.to(loss.device)

    def unscale(self, grads: Any, state: ScalerState, mesh: Mesh) -> tuple[Any, torch.Tensor]:
        """Divide a tree of gradients by the scale; ``scale`` is the inverse.

        Arguments:
            grads: a tree like shards; ``None`` leaves stay.
            state: the state that the loss was scaled with.
            mesh: the ranks, who find out together whether any of them has infinities or NaN: one number each.

        Returns:
            ``(grads, found_inf)``: a new tree, of float32 where gradients were of lower precision, and a boolean scalar,
            the same on every rank.
        """
        leaves, unflatten = tree.flatten(grads)
        inverse = state.scale.double().reciprocal().float()
        new = []
        found = torch.zeros((), device=mesh.device)
        for leaf in leaves:
            wide = leaf.to(torch.promote_types(leaf.dtype, torch.float32))
            new.append(wide * inverse.to(wide))
            found = torch.maximum(found, leaf.isfinite().all().logical_not().to(found))
        return unflatten(new), psum(found, mesh) > 0

    def update(self, state: ScalerState, found_inf: torch.Tensor) -> ScalerState:
        """Return the state after a step: smaller after infinities, larger after long enough without."""
        good = state.growth_tracker + 1
        wide = state.scale.double()  # a factor need not be a number of float32; torch multiplies in float64 too
        grown = (wide * self.growth_factor).float()
        due = good >= self.growth_interval
        larger = torch.where(due & grown.isfinite(), grown, state.scale)
        tracker = torch.where(found_inf | due, torch.zeros_like(good), good)
        return ScalerState(torch.where(found_inf, (wide * self.backoff_factor).float(), larger), tracker)
