"""``GradScaler``: loss scaling for float16, with the scale as an explicit state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_count, check_flag, check_number, with_remedies
from funcshard._utils.torch_private import transforms_active, unscale_in_place
from funcshard.comm import Mesh
from funcshard.core import check_cut, check_fits, psum_world
from funcshard.plan import Plan, current_recording
from funcshard.train.clipping import without_padding
from funcshard.train.optimizer_step import donate as donated


class ScalerState(NamedTuple):
    """The state of loss scaling between two steps; it is the same on every rank.

    Attributes:
        scale: the factor that the next loss is multiplied by, a float32 scalar.
        growth_tracker: number of good steps since the scale last changed, an int32 scalar.

    Example:
        >>> import torch, funcshard as fs
        >>> state = fs.GradScaler(init_scale=8.0).init(fs.Mesh())
        >>> state == fs.ScalerState(torch.tensor(8.0), torch.tensor(0, dtype=torch.int32))
        True
    """

    scale: torch.Tensor
    growth_tracker: torch.Tensor


_REMEDY = "make_train_step(..., scaler=) does it; by hand, call scale, unscale and update with the state"


@with_remedies("a GradScaler", {"step": _REMEDY})
@dataclass(frozen=True, slots=True)
class GradScaler:
    """Loss scaling: multiply the loss by a scale, so that small gradients do not vanish in float16.

    A step whose gradients have an infinity or NaN on any rank is skipped, and the scale shrinks;
    after enough good steps in a row, it grows. The scale is in a ``ScalerState``, not here. Pass
    the scaler to ``make_train_step``, or call its methods in your own step: ``scale`` the loss,
    ``unscale`` the gradients, skip the optimizer if ``found_inf``, and ``update`` the state.

    Attributes:
        init_scale: the first scale.
        growth_factor: the factor of the scale after ``growth_interval`` good steps in a row.
        backoff_factor: its factor after a step with infinities or NaN.
        growth_interval: the number of good steps after which the scale grows.

    Example:
        >>> import torch, funcshard as fs
        >>> scaler = fs.GradScaler(init_scale=8.0)
        >>> mesh = fs.Mesh()
        >>> state = scaler.init(mesh)
        >>> scaler.scale(torch.tensor(0.5), state)
        tensor(4.)
        >>> scaled = {"w": torch.tensor([16.0, float("inf")])}
        >>> grads, found_inf = scaler.unscale(scaled, state, mesh)
        >>> bool(found_inf), scaler.update(state, found_inf).scale
        (True, tensor(4.))

    Source: ``torch.amp.GradScaler``, whose scale can shrink to zero, and
    ``torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler``.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        # Why bounds: the scale is a float32, and unscale multiplies by its reciprocal.
        float32 = torch.finfo(torch.float32)
        check_number("init_scale", self.init_scale, least=float32.tiny, below=float32.max)
        check_number("growth_factor", self.growth_factor, above=1)
        check_number("backoff_factor", self.backoff_factor, above=0, below=1)
        interval = check_count("growth_interval", self.growth_interval, of="steps")
        object.__setattr__(self, "growth_interval", interval)
        for name in (
            "init_scale",
            "growth_factor",
            "backoff_factor",
        ):  # of NumPy or torch, maybe
            object.__setattr__(self, name, float(getattr(self, name)))

    def init(self, mesh: Mesh) -> ScalerState:
        """Return the state before the first step, on the mesh's device."""
        # Why not torch.tensor: it copies from the host, which waits for the copy on CUDA.
        scale = torch.full((), self.init_scale, dtype=torch.float32, device=mesh.device)
        return ScalerState(scale, torch.zeros((), dtype=torch.int32, device=mesh.device))

    def scale(self, loss: torch.Tensor, state: ScalerState) -> torch.Tensor:
        """Return ``loss`` times the scale, differentiably, in float32 or a wider dtype."""
        if not isinstance(state, ScalerState) or not isinstance(state.scale, torch.Tensor):
            raise TypeError(
                f"state must be a ScalerState of tensors; found {state!r}: make it with "
                "scaler.init(mesh)"
            )
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * state.scale.to(
            loss.device
        )

    def unscale(
        self,
        grads: Any,
        state: ScalerState,
        mesh: Mesh,
        *,
        donate: bool = False,
        plan: Plan | None = None,
    ) -> tuple[Any, torch.Tensor]:
        """Divide gradients by the scale, and tell whether any rank found an infinity or NaN.

        Arguments:
            grads: a tree like the shards; ``None`` leaves stay ``None``.
            state: the state that the loss was scaled with.
            mesh: the ranks, which all-reduce one number.
            donate: whether to write into the memory of ``grads``, so that you can't use them
                afterwards.
            plan: the plan of the shards that ``grads`` are like. With it, padding does not count,
                even if a hook of yours has written to it.

        Returns:
            ``(grads, found_inf)``: a new tree, with gradients of lower precision cast to float32,
            and a boolean scalar, the same on every rank.

        Raises:
            RuntimeError: the gradients were donated already.
            TypeError: ``donate`` isn't a flag, or ``plan`` isn't a plan.
            ValueError: ``grads`` isn't a tree of this plan's shards, or the mesh has another shape.
        """
        check_flag("donate", donate)
        if plan is not None:
            check_fits(plan, mesh)
            check_cut(plan, grads)
        leaves, unflatten = tree.flatten(grads)
        if donate:
            leaves = donated(leaves)
        # As torch computes it; the bits of the gradients depend on it.
        inverse = state.scale.double().reciprocal().float()
        # Why by device: gradients of offloaded units lie on the CPU, and the host waits for each
        # copy between devices.
        inverse_on = {
            device: inverse.to(device) for device in {leaf.device for leaf in leaves}
        }
        wide_leaves = [
            (leaf, torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves
        ]
        if (
            transforms_active()
            or current_recording() is not None
            or any(leaf.requires_grad for leaf in leaves)
        ):
            # Why not the kernel: a graph can fuse arithmetic, and transforms know no rule for the
            # kernel.
            unscaled_leaves = [
                leaf.to(dtype) * inverse_on[leaf.device].to(dtype)
                for leaf, dtype in wide_leaves
            ]
            found_infs: dict[torch.device, torch.Tensor] = {}
            for leaf in _without_paddings(unflatten(leaves), plan, mesh):
                found_inf = leaf.isfinite().all().logical_not().float()
                device_inf = found_infs.get(leaf.device, found_inf)
                found_infs[leaf.device] = torch.maximum(device_inf, found_inf)
        else:
            unscaled_leaves = [
                leaf.to(dtype, copy=not donate) for leaf, dtype in wide_leaves
            ]
            unscaled_parts = _without_paddings(unflatten(unscaled_leaves), plan, mesh)
            found_infs = unscale_in_place(unscaled_parts, inverse_on)
        # A scale of zero hides every infinity from the gradients.
        any_inf = inverse.isfinite().logical_not().float().to(mesh.device)
        for found_inf in found_infs.values():
            any_inf = torch.maximum(any_inf, found_inf.to(mesh.device))
        return unflatten(unscaled_leaves), psum_world(any_inf, mesh) > 0

    def update(self, state: ScalerState, found_inf: torch.Tensor) -> ScalerState:
        """Return the state after a step, with a smaller scale if ``found_inf``."""
        # Note: no branch on a value, so that the host does not wait for the device.
        found_inf = torch.as_tensor(found_inf, device=state.scale.device)
        good_steps = state.growth_tracker + 1
        # Why float64: a factor need not be representable in float32, and torch multiplies in
        # float64.
        wide_scale = state.scale.double()
        grown_scale = (wide_scale * self.growth_factor).float()
        is_due = good_steps >= self.growth_interval
        larger_scale = torch.where(
            is_due & grown_scale.isfinite(), grown_scale, state.scale
        )
        growth_tracker = torch.where(
            found_inf | is_due, torch.zeros_like(good_steps), good_steps
        )
        # Why not below: the reciprocal of a smaller scale overflows, and zero would make every
        # gradient NaN.
        smaller_scale = (
            (wide_scale * self.backoff_factor)
            .float()
            .clamp(min=torch.finfo(torch.float32).tiny)
        )
        return ScalerState(
            torch.where(found_inf, smaller_scale, larger_scale), growth_tracker
        )


def _without_paddings(grads: Any, plan: Plan | None, mesh: Mesh) -> list[torch.Tensor]:
    """Return views of gradients without padding, as far as ``plan`` tells."""
    if plan is None:
        return tree.leaves(grads)
    grad_buffers = [
        (grads[unit.name][b.key], b) for unit in plan.unit_list for b in unit.buffers
    ]
    rank = mesh.shard.rank
    return [
        without_padding(grad, buffer, rank)
        for grad, buffer in grad_buffers
        if grad is not None
    ]
