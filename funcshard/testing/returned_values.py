"""The values that a program returns on a rank, by path, with shards put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import tree
from funcshard.comm import Mesh
from funcshard.core import all_gather, join_slices, views
from funcshard.plan import BufferPlan, Plan

Key = tuple[int | None, str]  # the number of a step, if there are steps, and a path


def values_by_path(result: Any, mesh: Mesh) -> dict[Key, Any]:
    """Return what a rank's program returned, by step and path: numbers as tensors.

    A tree of shards is gathered if the result holds its plan too.
    """
    plans = [leaf for leaf in tree.leaves(result) if isinstance(leaf, Plan)]
    steps: dict[int | None, Any] = {None: result}
    if isinstance(result, list):
        steps = dict(enumerate(result))
    with torch.no_grad():
        return {
            (number, path): _as_tensor(leaf)
            for number, step in steps.items()
            for path, leaf in _entries(step, "", plans, mesh)
        }


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    is_number = isinstance(leaf, (int, float)) and not isinstance(leaf, bool)
    if is_number or hasattr(leaf, "__array__"):  # as NumPy's arrays and numbers have
        return torch.tensor(leaf, dtype=torch.float64, device="cpu")
    return leaf


def _entries(
    node: Any, path: str, plans: Sequence[Plan], mesh: Mesh
) -> Iterator[tuple[str, Any]]:
    for plan in plans:
        if _has_form_of(node, plan):
            yield from _whole_leaves(node, path, plan, mesh)
            return
    if isinstance(node, Mapping):
        children = dict(node)
    elif isinstance(node, tuple) and hasattr(node, "_fields"):
        children = dict(zip(node._fields, node, strict=True))
    elif isinstance(node, (list, tuple)):
        children = dict(enumerate(node))
    else:
        if not isinstance(node, Plan):
            yield path, node
        return
    for name, child in children.items():
        yield from _entries(child, f"{path}.{name}".lstrip("."), plans, mesh)


def _has_form_of(node: Any, plan: Plan) -> bool:
    """Return whether a tree has the form of shards, or of an optimizer's state of them."""
    if not isinstance(node, Mapping) or not node or not node.keys() <= plan.units.keys():
        return False
    for unit_name, of_unit in node.items():
        numels = {
            buffer.key: buffer.shard_numel for buffer in plan.units[unit_name].buffers
        }
        if not isinstance(of_unit, Mapping) or not of_unit.keys() <= numels.keys():
            return False
        for key, of_buffer in of_unit.items():
            shapes = [leaf.shape for leaf in tree.leaves(of_buffer) if _is_shard(leaf)]
            if any(shape != (numels[key],) for shape in shapes):
                return False
    return True


def _is_shard(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


def _whole_leaves(
    shards: Mapping[str, Any], path: str, plan: Plan, mesh: Mesh
) -> Iterator[tuple[str, Any]]:
    for unit_name, of_unit in shards.items():
        for buffer in plan.units[unit_name].buffers:
            # Note: an optimizer's state has several tensors in place of each shard.
            for name, value in _entries(of_unit.get(buffer.key, {}), "", (), mesh):
                for leaf_path, whole in _gathered(value, buffer, mesh):
                    yield ".".join(filter(None, (path, leaf_path, name))), whole


def _gathered(value: Any, buffer: BufferPlan, mesh: Mesh) -> Iterator[tuple[str, Any]]:
    is_cut = _is_shard(value)
    if is_cut and buffer.shards > 1:
        value = all_gather(value, mesh, axis="shard", tiled=True)
    leaf_values = views(value, buffer) if is_cut else [value] * len(buffer.leaves)
    for leaf, whole in zip(buffer.leaves, leaf_values, strict=True):
        # Note: one rank has no leaf that's local without being a slice.
        if any(mesh.shape[axis] > 1 for axis in buffer.own_axes(leaf)):
            continue
        yield leaf.path, join_slices(whole, leaf, mesh) if is_cut else whole
