"""``iter_params``: whole parameters one unit after another, e.g. for an inference engine."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from funcshard.checkpoint.hugging_face import stored
from funcshard.checkpoint.pretrained import check_functional
from funcshard.checkpoint.safetensors import check_floating, stored_entries
from funcshard.checkpoint.state_dict import (
    check_all_shards,
    check_no_local_leaf,
    start_full_buffer,
)
from funcshard.comm import Mesh
from funcshard.core import AllGatherHandle, Shards, join_slices, views
from funcshard.module import Functional
from funcshard.plan import Plan, UnitPlan


def iter_params(
    shards: Shards,
    plan: Plan,
    mesh: Mesh,
    *,
    apply: Functional | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole tensor of each parameter, on every rank, unit by unit.

    While you use a unit's tensors, the next unit is gathered. So a rank has at most two units in
    memory, and the tensors that you keep. Every rank has to call this, and to run through the
    whole iterator.

    Arguments:
        shards: this rank's shards.
        plan: the plan of your shards.
        mesh: the ranks.
        apply: the function of a Hugging Face model, for the names and tensors that the files of
            ``save_pretrained`` have. By default they are the plan's.
        dtype: dtype of all floating-point tensors, such as ``torch.bfloat16``; by default their
            own.

    Returns:
        An iterator over pairs. A tied parameter comes once, under its first name, and slices are
        joined. Each tensor is a copy on the mesh's device.

    Raises:
        TypeError: ``apply`` isn't of a model of Hugging Face, or ``dtype`` isn't floating-point.
        ValueError: the shards don't match the plan; a leaf is local to each rank; or one tensor of
            the files lies in several units.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh, units=["a", "b"])
        ...     shards = fs.shard(params, plan, mesh)
        ...     return {name: x.tolist() for name, x in fs.iter_params(shards, plan, mesh)}
        >>> fs.simulate(main, world_size=2)[1]
        {'a': [0.0, 1.0, 2.0], 'b': [[1.0, 1.0], [1.0, 1.0]]}

    Source: ``load_weights`` of the models of vLLM.
    """
    check_floating("dtype", dtype)
    check_all_shards(shards, plan, mesh)
    check_no_local_leaf(plan)
    if apply is not None:
        check_functional("iter_params", apply)
        stored_entries(apply.skeleton.template, plan)
    # Why another function: the checks above run at the call, and not at the first tensor.
    return _iterate(shards, plan, mesh, apply, dtype)


def _iterate(
    shards: Shards, plan: Plan, mesh: Mesh, apply: Functional | None, dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    units = plan.unit_list
    gather_handles = _start(shards, units[0], mesh)
    for unit, next_unit in zip(units, [*units[1:], None], strict=True):
        full_buffers = [gather_handle.finish() for gather_handle in gather_handles]
        # Why here: the buffers of the unit before are free, and those of two units are in memory.
        gather_handles = [] if next_unit is None else _start(shards, next_unit, mesh)
        named_tensors: dict[str, torch.Tensor] = {}
        for buffer, full_buffer in zip(unit.buffers, full_buffers, strict=True):
            for leaf, view in zip(buffer.leaves, views(full_buffer, buffer), strict=True):
                joined_leaf = join_slices(view, leaf, mesh)
                assert joined_leaf is not None, "every rank takes part"
                named_tensors[leaf.path] = joined_leaf
        full_buffers.clear()
        del full_buffer, view, joined_leaf
        if apply is not None:
            # Note: experts, for example, are one leaf, and several tensors in files.
            named_tensors = stored(apply.skeleton.template, named_tensors)
        for name in list(named_tensors):
            tensor = named_tensors.pop(name)
            tensor_dtype = tensor.dtype
            if dtype is not None and tensor.is_floating_point():
                tensor_dtype = dtype
            # Why a copy: a view that you keep would hold the memory of the whole unit.
            yield name, tensor.to(tensor_dtype, copy=True)
            del tensor


def _start(shards: Shards, unit: UnitPlan, mesh: Mesh) -> list[AllGatherHandle]:
    return [
        start_full_buffer(shards[unit.name][buffer.key], unit, buffer, mesh)
        for buffer in unit.buffers
    ]
