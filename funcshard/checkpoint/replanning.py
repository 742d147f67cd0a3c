"""``replan``: move the states of all ranks from one plan to another, in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import tree
from funcshard.checkpoint.flatten_state import flatten_state
from funcshard.checkpoint.metadata import (
    TensorMetadata,
    TensorSlice,
    check_replicated,
    replicated_summary,
)
from funcshard.checkpoint.unflatten_state import unflatten_state
from funcshard.plan import Plan


def replan(states: Sequence[Any], old: Plan, new: Plan) -> list[Any]:
    """Cut the states of all ranks again, from the ranks and units of one plan to those of another.

    A pure function, which one process computes without communication. Saving under the old plan and
    restoring under the new one gives the same states through files.

    - Every tree that looks like shards is cut again leaf by leaf, under whatever name it has in
      the state: parameters, averages of them, optimizer states.
    - A tensor or value that is the same on every rank stays the same.
    - New rank ``r`` takes the ``PerRank`` values and the local leaves of old rank ``r`` modulo the
      old number of ranks.

    Replanning from old to new and back gives the same states, apart from their own values that
    the last ranks lose when the new plan has fewer ranks.

    Arguments:
        states: each rank's state, any pytree, in order of ranks.
        old: the plan that the states are cut by.
        new: the plan to cut them by: the same leaves in other units, under another strategy, or on
            another number of ranks.

    Returns:
        Each new rank's state, in order of ranks. Its tensors share no memory with the old ones.
        Shards of offloaded units are on the CPU, and other shards on the device of ``states``.

    Raises:
        TypeError: a leaf is neither a tensor nor a number or string; ``states`` is no list, or a
            plan no plan.
        ValueError: the number of states is not the old plan's number of ranks, a plan is of another
            model, or ranks differ in a value that is not marked with ``PerRank``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.arange(4.0)}
        >>> old, new = fs.make_plan(params, 2), fs.make_plan(params, 3)
        >>> states = fs.simulate(
        ...     lambda mesh: {"ema": fs.shard(params, old, mesh), "step": 7}, world_size=2
        ... )
        >>> fs.replan(states, old, new)[1]
        {'ema': {'': {'float32': tensor([2., 3.])}}, 'step': 7}
    """
    for name, plan in (("old", old), ("new", new)):
        if not isinstance(plan, Plan):
            raise TypeError(
                f"{name} must be a plan; found {type(plan).__name__}: pass what make_plan returned"
            )
    if isinstance(states, str | Mapping) or not isinstance(states, Sequence):
        raise TypeError(
            f"states must be a list of the states of all ranks; found {type(states).__name__}: put "
            "them into a list, in order of ranks"
        )
    if len(states) != old.world_size:
        raise ValueError(
            f"there must be one state per rank of the old plan, {old.world_size}; found "
            f"{len(states)}"
        )
    device = _device_of(states)
    flat = [flatten_state(state, old, rank, device.type) for rank, state in enumerate(states)]
    check_replicated([replicated_summary(rank_flat) for rank_flat in flat])
    tensors: dict[str, TensorMetadata] = {}
    slices: dict[str, list[TensorSlice]] = {}
    for rank_flat in flat:
        tensors |= rank_flat.tensors
        for part in rank_flat.slices:
            slices.setdefault(part.name, []).append(part)

    cpu = torch.device("cpu")

    def device_of(stored: Any, unit: Any) -> torch.device:
        return cpu if not stored.on_mesh or (unit and unit.offload) else device

    result = []
    for rank in range(new.world_size):
        rank_specs = flat[rank % old.world_size].rank_specs
        empty = unflatten_state(flat[0].spec, rank_specs, tensors, new, rank, old, device_of)
        for item in empty.reads:
            copied_numel = sum(
                item.copy_from(part.begin, part.tensor) for part in slices.get(item.name, ())
            )
            assert copied_numel == item.out.numel(), (
                f"{item.name}: {copied_numel} of {item.out.numel()} elements"
            )
        empty.finish()
        result.append(empty.state)
    return result


def _device_of(states: Sequence[Any]) -> torch.device:
    """Return the device of the first tensor that is not on the CPU; if there is none, the CPU."""
    tensors = (
        leaf for state in states for leaf in tree.leaves(state) if isinstance(leaf, torch.Tensor)
    )
    return next(
        (tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu")
    )
