"""Leaves that the model uses as DTensors: made of this rank's views in forward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from funcshard._utils.torch_private import local_part, transforms_active
from funcshard.comm import Mesh
from funcshard.plan import LeafSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class DTensorForm:
    """The DTensor that the model uses in place of one leaf.

    Attributes:
        device_mesh: the ranks that it is placed on.
        placements: its placements.
        shape: shape of the whole tensor.
        stride: its stride.
        path: the leaf.
        factor: the factor of the gradient; see ``_form``.
    """

    device_mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    path: str = ""
    factor: int = 1

    @classmethod
    def of(cls, whole: Any) -> DTensorForm:
        return cls(whole.device_mesh, whole.placements, whole.shape, whole.stride())

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """Return the DTensor of which ``local`` is this rank's part."""
        # Why not at the top of the file: importing this takes longer than importing this library.
        from torch.distributed.tensor import DTensor

        # Why no check: it would communicate, in a collective that no plan predicts.
        return DTensor.from_local(
            local,
            self.device_mesh,
            self.placements,
            run_check=False,
            shape=self.shape,
            stride=self.stride,
        )


def dtensor_forms(leaves: Sequence[LeafSpec], mesh: Mesh) -> tuple[DTensorForm | None, ...]:
    """Return the form of each leaf, ``None`` for a plain one.

    Raises:
        ValueError: there is a DTensor, and the mesh has no DeviceMesh with the axes of the leaf.
    """
    return tuple([_form(leaf, mesh) if leaf.placements else None for leaf in leaves])


def _form(leaf: LeafSpec, mesh: Mesh) -> DTensorForm:
    from torch.distributed.tensor import Replicate, Shard

    whole_shape = torch.Size(leaf.whole_shape)
    # On meta, the default strides come from torch itself.
    whole_stride = torch.empty(whole_shape, device="meta", dtype=torch.float32).stride()
    placements = tuple(
        Replicate() if dim is None else Shard(dim) for _, dim in leaf.placements
    )
    # Why a factor: for DTensor the T ranks along a model axis compute one loss. Our objective is
    # the mean of all ranks' losses, and holds that loss T times. The reduction of a leaf that is
    # not cut adds up T equal gradients; a leaf that is cut is not reduced along the axis, so it
    # gets the factor here.
    grad_factor = math.prod(cut.ranks for cut in leaf.cuts)
    return DTensorForm(
        _device_mesh(leaf, mesh),
        placements,
        whole_shape,
        whole_stride,
        leaf.path,
        grad_factor,
    )


def _device_mesh(leaf: LeafSpec, mesh: Mesh) -> DeviceMesh:
    device_names = {axis: name for name, axis in mesh.device_axes.items()}
    leaf_axes = [axis for axis, _ in leaf.placements]
    if mesh.device_mesh is None or not all(axis in device_names for axis in leaf_axes):
        device_axes = f"whose DeviceMesh has {list(device_names)}"
        if mesh.device_mesh is None:
            device_axes = "without one"
        raise ValueError(
            f"leaf {leaf.path!r} is a DTensor along {leaf_axes}, so the mesh must have a "
            f"DeviceMesh with these axes; found {mesh.shape} {device_axes}: use init_mesh or "
            "Mesh.from_device_mesh in real processes; simulated ranks have none"
        )
    leaf_mesh: DeviceMesh = mesh.device_mesh[
        tuple(device_names[axis] for axis in leaf_axes)
    ]
    return leaf_mesh


def part_as_planned(leaf: LeafSpec, value: Any, mesh: Mesh, where: str) -> Any:
    """Return this rank's part of a DTensor that is placed as planned.

    Raises:
        ValueError: the DTensor is placed otherwise.
    """
    planned_form = _form(leaf, mesh)
    planned_placement = (
        planned_form.device_mesh,
        planned_form.placements,
        planned_form.shape,
    )
    if (value.device_mesh, value.placements, value.shape) != planned_placement:
        raise ValueError(
            f"leaf {leaf.path!r} of {where} must be a DTensor of shape {tuple(planned_form.shape)}, "
            f"placed by {planned_form.placements} on {planned_form.device_mesh}, as planned; found "
            f"{tuple(value.shape)}, {value.placements} on {value.device_mesh}: pass the plan's "
            "params and the mesh of their DeviceMesh"
        )
    return local_part(value.detach())


# --- forward and backward -------------------------------------------------------------------------


def as_dtensors(
    leaves: Sequence[torch.Tensor], forms: Sequence[DTensorForm | None]
) -> list[torch.Tensor]:
    """Return the leaves, as DTensors where a form says so.

    Raises:
        RuntimeError: the code runs inside a ``torch.func`` transform.
    """
    if transforms_active():
        first_path = next(form.path for form in forms if form is not None)
        raise RuntimeError(
            f"leaf {first_path!r} is a DTensor, and DTensors do not run inside torch.func "
            "transforms: use value_and_grad, or a model without DTensors, whose forward calls psum"
        )
    return [
        leaf if form is None else _AsDTensor.apply(leaf, form)
        for leaf, form in zip(leaves, forms, strict=True)
    ]


class _AsDTensor(torch.autograd.Function):
    """This rank's part of a leaf as a DTensor."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, form: DTensorForm) -> Any:
        ctx.form = form
        ctx.set_materialize_grads(False)
        return form.whole(local)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        form: DTensorForm = ctx.form
        if grad is None:
            return None, None
        # DTensor may return a gradient as a partial sum.
        if grad.placements != form.placements:
            grad = grad.redistribute(placements=form.placements)
        # to_local makes a node, which only higher derivatives need.
        local_grad = grad.to_local() if torch.is_grad_enabled() else local_part(grad)
        if form.factor != 1:
            local_grad = local_grad * form.factor
        return local_grad, None
