"""State dicts: the module's own names and full tensors, to shards and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from funcshard import tree
from funcshard.mesh import Mesh
from funcshard.plan import Plan
from funcshard.shard import Shards, check_mesh, cut, gather

__all__ = ["from_state_dict", "to_state_dict"]


def to_state_dict(
    shards: Shards, plan: Plan, mesh: Mesh, *, buffers: Mapping[str, torch.Tensor] | None = None
) -> dict[str, torch.Tensor]:
    """Return full tensors under the module's own names, on every rank; ``from_state_dict`` is the inverse.

    Arguments:
        shards: this rank's shards.
        plan: the plan they are cut by.
        mesh: the ranks.
        buffers: what the state dict should hold besides; ``apply.persistent(buffers)`` are the module's.

    Returns:
        A dictionary that ``module.load_state_dict`` takes: a tied parameter stands under each of its names, as in
        ``module.state_dict()``.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Linear(2, 3)
        >>> apply, params, buffers = fs.make_functional(net)
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     return fs.to_state_dict(fs.shard(params, plan, mesh), plan, mesh)
        >>> state_dict = fs.simulate(main, world_size=2)[0]
        >>> net.load_state_dict(state_dict)
        <All keys matched successfully>
    """
    with torch.no_grad():
        _, leaves, paths = tree.describe(gather(shards, plan, mesh))
    by_path = dict(zip(paths, leaves, strict=True))
    named = {place: by_path[leaf.path] for leaf in plan.leaves for place in (leaf.path, *leaf.aliases)}
    return {**named, **(buffers or {})}


def from_state_dict(state_dict: Mapping[str, Any], plan: Plan, mesh: Mesh) -> Shards:
    """Return this rank's shards of a full state dict; ``to_state_dict`` is the inverse.

    Arguments:
        state_dict: full tensors by name, such as ``module.state_dict()``; names that are no leaf of the plan, such as
            those of buffers, are left aside. A tied parameter may stand under any of its names.
        plan: how they are cut.
        mesh: the ranks.

    Returns:
        Shards; see ``shard``.

    Raises:
        ValueError: a name is missing, or a tensor has another shape or dtype than planned.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Linear(2, 3)
        >>> apply, params, buffers = fs.make_functional(net)
        >>> def main(mesh):
        ...     shards = fs.from_state_dict(net.state_dict(), fs.make_plan(params, mesh), mesh)
        ...     return shards[""]["float32"].shape
        >>> fs.simulate(main, world_size=2)
        [torch.Size([5]), torch.Size([5])]
    """
    check_mesh(plan, mesh)
    found: dict[str, Any] = {}
    missing = []
    for leaf in plan.leaves:
        place = next((p for p in (leaf.path, *leaf.aliases) if p in state_dict), None)
        if place is None:
            missing.append(leaf.path)
        else:
            found[leaf.path] = state_dict[place]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"the state dict must hold every leaf of the plan; missing: {missing[:3]}{more}: it is another module's, or its "
            f"names carry a prefix such as 'module.' that has to be removed"
        )
    return {unit.name: cut(unit, found, mesh, "the state dict") for unit in plan.unit_list}
