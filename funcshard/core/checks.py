"""Check that meshes and leaves fit a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from funcshard._utils.options import other_names
from funcshard.comm import Mesh, all_gather_texts, check_all_same
from funcshard.plan import BufferPlan, LeafSpec, Plan, axes_text, dtype_name


def check_mesh(
    plan: Any, mesh: Any, options: Mapping[str, str] = MappingProxyType({}), label: str = ""
) -> None:
    """Raise ``ValueError`` unless all ranks have the same plan, and ``mesh`` has its shape.

    Arguments:
        plan: the plan.
        mesh: the ranks.
        options: texts by name, which ranks compare in the same exchange.
        label: the calling function, for errors about ranks that call another one.
    """
    if isinstance(plan, Plan) and isinstance(mesh, Mesh):
        # Why before the shape: a rank that raised alone would leave the rest of the ranks waiting.
        check_all_same(mesh, {"the plan": plan.fingerprint(), **options}, label)
    check_fits(plan, mesh)


def check_fits(plan: Any, mesh: Any) -> None:
    """Raise ``ValueError`` unless ``mesh`` has the plan's shape; nothing is communicated."""
    if not isinstance(plan, Plan) or not isinstance(mesh, Mesh):
        raise TypeError(
            "the arguments plan and mesh must be the Plan that make_plan returned and a Mesh, in "
            f"this order; found {type(plan).__name__} and {type(mesh).__name__}"
        )
    if not same_axes(plan.mesh_axes, mesh):
        raise ValueError(
            f"the plan was made for a mesh of {axes_text(plan.mesh_axes)} ranks; found "
            f"{mesh.shape}: make the plan with make_plan(params, mesh)"
        )


def same_axes(planned: Mapping[str, int], mesh: Mesh) -> bool:
    """Return whether a mesh has the planned axes in their order; axes of one rank do not count."""
    planned_axes, mesh_axes = (
        [(axis, size) for axis, size in axes.items() if size > 1]
        for axes in (planned, mesh.shape)
    )
    return planned_axes == mesh_axes


def check_source(src: int, mesh: Mesh) -> None:
    """Raise ``ValueError`` unless ``src`` is a rank of the mesh."""
    if type(src) is not int or not 0 <= src < mesh.world_size:
        raise ValueError(
            f"src must be a rank of the world, from 0 to {mesh.world_size - 1}; found {src!r}"
        )


def check_leaf(
    leaf: Any,
    spec: LeafSpec,
    buffer: BufferPlan,
    where: str,
    *,
    meta: bool = False,
    dtensor: bool = False,
    whole: bool = False,
    cast: bool | None = None,
) -> None:
    """Raise unless ``leaf`` is a tensor of the shape and dtype of ``spec``, with values.

    Arguments:
        leaf: a full leaf.
        spec: the leaf's entry in the plan.
        buffer: the flat buffer that it lies in.
        where: a name for the tree that holds it, for the error.
        meta: whether it may be on the meta device.
        dtensor: whether it may be a DTensor.
        whole: whether it is the whole tensor that the planned leaf is a slice of.
        cast: whether it may have another dtype of the same kind; ``None`` if the caller has no such
            option.
    """
    if not isinstance(leaf, torch.Tensor):
        raise TypeError(
            f"leaf {spec.path!r} of {where} must be a tensor; found {type(leaf).__name__}: convert "
            "it"
        )
    # Why hasattr: it tells a DTensor without importing torch.distributed.tensor.
    if hasattr(leaf, "full_tensor") and not dtensor:
        raise TypeError(
            f"leaf {spec.path!r} of {where} is a DTensor, of which this rank holds a part; pass "
            "its full_tensor(), or, in a state dict, call from_state_dict without src"
        )
    planned_shape = spec.model_shape if whole or spec.unpacked is not None else spec.shape
    planned_dtype = buffer.model_dtype
    same_shape = tuple(leaf.shape) == planned_shape
    if not same_shape or not (
        leaf.dtype == planned_dtype or (cast and can_cast(leaf.dtype, planned_dtype))
    ):
        shape_text, remedy = (
            str(planned_shape),
            "pass the tensors that the plan was made for",
        )
        axes = " and ".join(cut.axis for cut in spec.cuts)
        if axes and whole:
            shape_text += (
                f", that of the whole tensor, which ranks along {axes} hold in slices,"
            )
            remedy = "pass whole tensors, as to_state_dict returns them; shard takes slices"
        elif axes:
            shape_text += f", that of this rank's slice along {axes} of {spec.whole_shape},"
            remedy = (
                "pass this rank's slice; from_state_dict takes whole tensors and cuts them"
            )
        if same_shape and cast is False and can_cast(leaf.dtype, planned_dtype):
            remedy = "pass cast=True to convert them to the plan's dtypes"
        raise ValueError(
            f"leaf {spec.path!r} of {where} must have shape {shape_text} and dtype "
            f"{dtype_name(planned_dtype)}, as planned; found {tuple(leaf.shape)} and "
            f"{dtype_name(leaf.dtype)}: "
            f"{remedy}, or make a new plan"
        )
    if leaf.is_meta and not meta:
        raise ValueError(
            f"leaf {spec.path!r} of {where} is on the meta device and has no values to cut; "
            "initialise it first, as in init_module(module, plan, mesh)"
        )


def other_leaves(by_path: Mapping[str, Any], plan: Plan) -> str:
    """Return as text which leaves of the plan are missing, and which paths aren't leaves."""
    aliases = {alias for leaf in plan.leaves for alias in leaf.aliases}
    return other_names([leaf.path for leaf in plan.leaves], by_path.keys() - aliases)


def can_cast(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether both dtypes are floating-point ones, or both complex ones."""
    floating = found.is_floating_point and wanted.is_floating_point
    return floating or (found.is_complex and wanted.is_complex)


def raise_on_every_rank(mesh: Mesh, fault: Exception | None) -> None:
    """Raise this rank's fault, or else the first fault of another rank; every rank has to call."""
    own_text = json.dumps([type(fault).__name__, str(fault)] if fault else None)
    fault_texts = all_gather_texts(mesh, own_text, "a report of faults")
    if fault is not None:
        raise fault
    for rank, fault_text in enumerate(fault_texts):
        if rank_fault := json.loads(fault_text):
            error_name, message = rank_fault
            # The class is known by name only, because errors travel as text.
            raise _ERRORS.get(error_name, ValueError)(f"{message} (found on rank {rank})")


# The errors that a fault of another rank is raised as; all others become ValueErrors.
_ERRORS: dict[str, type[Exception]] = {
    error_type.__name__: error_type
    for error_type in (
        TypeError,
        RuntimeError,
        FileNotFoundError,
        OSError,
        MemoryError,
        torch.OutOfMemoryError,
    )
}
