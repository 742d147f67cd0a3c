"""The values that a program returns on the ranks of a mesh, by path, with shards put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from funcshard.plan import BufferPlan, LeafSpec, Plan, own_axes, position_of, slice_offsets
from funcshard.testing.relations import RankValues

# Why a key of two: a tensor of shards has its leaf beside its path.
_Entry = tuple[Plan, BufferPlan, LeafSpec] | None


def values_by_path(results: Sequence[Any], axes: Mapping[str, int]) -> dict[str, Any]:
    """Return what ranks returned, by path: numbers as ``RankValues``, other leaves as lists.

    Arguments:
        results: what each rank returned. A tree of shards is put together if the result holds its
            plan too.
        axes: the size of each mesh axis.
    """
    plans = [leaf for leaf in _leaves(results[0]) if isinstance(leaf, Plan)]
    by_rank = [dict(_entries(result, "", plans)) for result in results]
    by_path: dict[str, Any] = {}
    for path, (_, entry) in by_rank[0].items():
        leaves = [entries[path][0] if path in entries else None for entries in by_rank]
        tensors = [_as_tensor(leaf) for leaf in leaves]
        if any(tensor is None for tensor in tensors):
            by_path[path] = leaves
        elif entry is None:
            by_path[path] = RankValues(tuple(tensors), tuple(axes.items()))
        elif not own_axes(_long(entry[1].local, axes), entry[2].cuts):
            by_path[path] = _put_together(tensors, entry, axes)
    return by_path


def _as_tensor(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.detach()
    is_number = isinstance(leaf, (int, float, complex)) and not isinstance(leaf, bool)
    return torch.tensor(leaf, dtype=torch.float64, device="cpu") if is_number else None


def _long(local: Sequence[str], axes: Mapping[str, int]) -> list[str]:
    return [axis for axis in local if axes[axis] > 1]


def _children(node: Any) -> list[tuple[str, Any]] | None:
    """Return a container's children by name; ``None`` for a leaf."""
    if isinstance(node, Mapping):
        return [(str(key), child) for key, child in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, (list, tuple)):
        return [(str(index), child) for index, child in enumerate(node)]
    return None


def _leaves(node: Any) -> Iterator[Any]:
    children = _children(node)
    if children is None:
        yield node
    for _, child in children or ():
        yield from _leaves(child)


def _entries(
    node: Any, path: str, plans: Sequence[Plan]
) -> Iterator[tuple[str, tuple[Any, _Entry]]]:
    if isinstance(node, Plan):
        return
    for plan in plans:
        if _has_form_of(node, plan):
            yield from _shard_entries(node, path, plan)
            return
    children = _children(node)
    if children is None:
        yield path, (node, None)
    for name, child in children or ():
        yield from _entries(child, f"{path}.{name}" if path else name, plans)


def _has_form_of(node: Any, plan: Plan) -> bool:
    """Return whether a tree has the form of shards, or of an optimizer's state of them."""
    if not isinstance(node, Mapping) or not node or not node.keys() <= plan.units.keys():
        return False
    for unit_name, of_unit in node.items():
        numels = {buffer.key: buffer.shard_numel for buffer in plan.units[unit_name].buffers}
        if not isinstance(of_unit, Mapping) or not of_unit.keys() <= numels.keys():
            return False
        tensors = [(key, leaf) for key, child in of_unit.items() for leaf in _leaves(child)]
        if any(getattr(leaf, "ndim", 0) and leaf.shape != (numels[key],) for key, leaf in tensors):
            return False
    return True


def _shard_entries(node: Any, path: str, plan: Plan) -> Iterator[tuple[str, tuple[Any, _Entry]]]:
    for unit_name, of_unit in node.items():
        for buffer in plan.units[unit_name].buffers:
            for leaf in buffer.leaves if buffer.key in of_unit else ():
                where = f"{path}.{leaf.path}" if path else leaf.path
                # Note: an optimizer's state has several tensors in place of each shard.
                for name, (value, _) in _entries(of_unit[buffer.key], "", ()):
                    is_shard = isinstance(value, torch.Tensor) and value.ndim
                    entry = (plan, buffer, leaf) if is_shard else None
                    yield f"{where}.{name}" if name else where, (value, entry)


def _put_together(
    shards: Sequence[torch.Tensor], entry: Any, axes: Mapping[str, int]
) -> RankValues:
    """Return the whole tensor of a leaf, once for each copy that ranks hold."""
    _, buffer, leaf = entry
    cut_axes = {cut.axis for cut in leaf.cuts} | ({"shard"} if buffer.shards > 1 else set())
    copy_axes = tuple((axis, size) for axis, size in axes.items() if axis not in cut_axes)
    slices: dict[tuple[int, ...], dict[tuple[int, ...], torch.Tensor]] = {}
    for rank, shard in enumerate(shards):
        position = position_of(rank, axes)
        part = buffer.part(leaf, position["shard"])
        copy = slices.setdefault(tuple(position[axis] for axis, _ in copy_axes), {})
        origin = slice_offsets(leaf.shape, leaf.cuts, position)
        flat = copy.setdefault(origin, shard.new_empty(leaf.numel))
        flat[part.in_leaf] = shard[part.in_shard]
    wholes = []
    for copy in slices.values():
        whole = shards[0].new_empty(leaf.whole_shape)
        for origin, flat in copy.items():
            box = tuple(slice(o, o + n) for o, n in zip(origin, leaf.shape, strict=True))
            whole[box] = flat.view(leaf.shape)
        wholes.append(whole)
    return RankValues(tuple(wholes), copy_axes)
