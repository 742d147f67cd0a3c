"""Optimizer state by parameter name, in the layout of ``torch.distributed.checkpoint``.

On the shards, an optimizer keeps flat tensors that are cut like the shards, such as ``exp_avg``,
and scalars, such as ``step``, once per flat buffer and parameter group. By name, each parameter has
its own dictionary. The inverse of ``optimizer_to_state_dict`` is in ``optimizer_loading``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import check_not_donated
from funcshard.checkpoint.functional_optimizer import ByBuffer, partition_state
from funcshard.checkpoint.optimizer_checks import LeafState, check_opt_state
from funcshard.checkpoint.state_dict import (
    check_flags,
    check_no_local_leaf,
    kept_copy,
    leaves_for_this_rank,
)
from funcshard.comm import Mesh
from funcshard.core import check_mesh
from funcshard.plan import BufferPlan, LeafSpec, Plan
from funcshard.train import (
    MuonStep,
    ParamGroupLayout,
    TorchOptimizer,
    TorchStep,
    check_optimizer,
    trainable_buffers,
)


def optimizer_to_state_dict(
    opt_state: Any,
    optimizer: Any,
    plan: Plan,
    mesh: Mesh,
    *,
    rank0_only: bool = False,
    offload: bool = False,
    sharded: bool = False,
    flatten: bool = False,
) -> dict[str, Any]:
    """Return an optimizer's state by parameter name; ``optimizer_from_state_dict`` is the inverse.

    The layout is that of torch's ``get_optimizer_state_dict``. Every rank has to call. The flat
    tensors are gathered one after another, as in ``to_state_dict``.

    Arguments:
        opt_state: this rank's state, as the optimizer returned it.
        optimizer: ``torch_optimizer``, ``muon``, or an ``(init, update)`` pair in the style of
            TorchOpt and Optax.
        plan: the plan of the shards.
        mesh: the ranks.
        rank0_only: see ``to_state_dict``.
        offload: see ``to_state_dict``.
        sharded: see ``to_state_dict``.
        flatten: whether to return one flat dictionary with names such as
            ``"state.0.weight.exp_avg"`` and ``"param_groups.0.weight.lr"``, as torch does with
            ``flatten_optimizer_state_dict``.

    Returns:
        A dictionary ``{"state": {name: state}, "param_groups": [group, ...]}``. A leaf's state is
        ``{"exp_avg": tensor, "step": tensor, ...}``, with the scalars of its parameter group. A
        group is ``{"lr": ..., "params": [names]}``. Frozen leaves have no state, and before the
        first step no leaf has. For an ``(init, update)`` pair, the keys of a leaf's state are paths
        in the pair's state (``"0.mu"``), and values that belong to no parameter are in the one
        group.

    Raises:
        ValueError: a leaf is local to each rank, so that ``rank0_only`` would lose the state of the
            other ranks.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(3)}
        >>> optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     state, grads = optimizer.init(shards), fs.shard(params, plan, mesh)
        ...     _, opt_state = optimizer.step(grads, state, shards)
        ...     return fs.optimizer_to_state_dict(opt_state, optimizer, plan, mesh)["state"]
        >>> fs.simulate(main, world_size=2)[0]
        {'w': {'momentum_buffer': tensor([1., 1., 1.])}}

    Source: ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.
    """
    check_flags(rank0_only=rank0_only, offload=offload, sharded=sharded, flatten=flatten)
    check_mesh(
        plan,
        mesh,
        {
            "the options of optimizer_to_state_dict": f"rank0_only={rank0_only!r}, sharded={sharded!r}"
        },
    )
    if rank0_only:
        check_no_local_leaf(plan)
    check_optimizer(optimizer, plan)
    check_opt_state(opt_state, optimizer, plan)
    entries, param_groups = _entries_and_groups(opt_state, optimizer, plan)
    states_by_path: dict[str, LeafState] = {path: {} for path in _trainable_paths(plan)}
    # Leaves of groups that take their first step next, and have no state yet.
    anew: set[str] = set()
    for entry in entries:
        for unit, buffer in trainable_buffers(plan):
            value = entry.values[unit.name].get(buffer.key)
            if isinstance(value, torch.Tensor) and entry.is_flat(value, buffer):
                flat = value if entry.layout is None else entry.layout.spread(value, buffer)
                for leaf, part in leaves_for_this_rank(
                    flat, unit, buffer, mesh, rank0_only, offload, sharded
                ):
                    if entry.has(leaf):
                        states_by_path[leaf.path][entry.name] = part
            elif isinstance(value, torch.Tensor) and value.ndim == 1 and value.numel() > 1:
                raise ValueError(
                    f"the entry {entry.name!r} of unit {unit.title!r} must have "
                    f"{buffer.shard_numel} elements, as the shard has under the plan; found "
                    f"{value.numel()}: pass the plan that the state was made with"
                )
            elif value is not None:
                for leaf in filter(entry.has, buffer.leaves):
                    scalar = value[entry.group(leaf)] if isinstance(value, tuple) else value
                    if (
                        scalar is None
                        and isinstance(value, tuple)
                        and any(state_value is not None for state_value in value)
                    ):
                        anew.add(leaf.path)
                    states_by_path[leaf.path][entry.name] = (
                        kept_copy(scalar, offload) if isinstance(scalar, torch.Tensor) else scalar
                    )
    if rank0_only and mesh.rank:
        return {}
    state_dict = {
        "state": plan.in_order(
            {
                path: leaf_state
                for path, leaf_state in states_by_path.items()
                if leaf_state and path not in anew
            }
        ),
        "param_groups": param_groups,
    }
    return _flattened(state_dict) if flatten else state_dict


# --- from an optimizer's state --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    """A named entry of the state of every parameter, such as ``exp_avg`` or ``step``.

    Attributes:
        name: its name.
        values: by buffer, a flat tensor that is cut like the shard, or a scalar, or a tuple with a
            scalar for each parameter group.
        layout: where the parameter groups lie in the shards; ``None`` for one group with all
            leaves.
    """

    name: str
    values: ByBuffer
    layout: ParamGroupLayout | None = None

    def is_flat(self, value: torch.Tensor, buffer: BufferPlan) -> bool:
        """Return whether ``value`` is a flat tensor, and not a scalar."""
        return value.ndim == 1 and (self.layout is not None or value.numel() == buffer.shard_numel)

    def has(self, leaf: LeafSpec) -> bool:
        """Return whether the entry is part of the state of ``leaf``."""
        return self.layout is None or leaf.path in self.layout.group_of

    def group(self, leaf: LeafSpec) -> int:
        """Return the number of the parameter group of ``leaf``."""
        return 0 if self.layout is None else self.layout.group_of[leaf.path]


def _entries_and_groups(
    opt_state: Any, optimizer: Any, plan: Plan
) -> tuple[list[_Entry], list[dict[str, Any]]]:
    """Return the entries of an optimizer's state, and its parameter groups."""
    paths = _trainable_paths(plan)
    if not isinstance(optimizer, TorchOptimizer):
        per_shard, others = partition_state(opt_state, plan)
        return [_Entry(path, values) for path, values in per_shard.items()], [
            {**others, "params": paths}
        ]
    step: Any = optimizer.step
    required_keys = (
        {"steps", "momentum", "adamw"} if isinstance(step, MuonStep) else {"steps", "leaves"}
    )
    if missing_keys := required_keys - opt_state.keys():
        raise ValueError(
            f"opt_state must be a state of the optimizer, which has {sorted(required_keys)}; found no "
            f"{sorted(missing_keys)}: pass state.opt_state, or what optimizer.init returned"
        )
    check_not_donated(opt_state.get("momentum", opt_state.get("leaves")))
    if isinstance(step, MuonStep):
        momentum = _Entry("momentum_buffer", opt_state["momentum"], step.layout)
        adamw = _torch_entries(opt_state["adamw"], step.adamw, plan)
        return [momentum, *adamw], [
            *step.param_groups(opt_state["steps"]),
            *step.adamw.param_groups(opt_state["steps"], paths),
        ]
    return _torch_entries(opt_state, step, plan), step.param_groups(opt_state["steps"], paths)


def _torch_entries(opt_state: Any, step: TorchStep, plan: Plan) -> list[_Entry]:
    leaves = {unit.name: {} for unit in plan.unit_list} | opt_state["leaves"]
    names = dict.fromkeys(
        name for unit, buffer in trainable_buffers(plan) for name in leaves[unit.name][buffer.key]
    )
    return [
        _Entry(
            name,
            {
                unit: {key: buffer_state.get(name) for key, buffer_state in buffer_states.items()}
                for unit, buffer_states in leaves.items()
            },
            step.layout,
        )
        for name in names
    ]


def _flattened(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict as one flat dictionary; the inverse is in ``optimizer_loading``."""
    state = {
        f"state.{path}.{name}": v
        for path, leaf_state in state_dict["state"].items()
        for name, v in leaf_state.items()
    }
    options = {
        f"param_groups.{path}.{key}": value
        for group in state_dict["param_groups"]
        for path in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return {**state, **options}


def _trainable_paths(plan: Plan) -> list[str]:
    leaves = [leaf for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves]
    return [leaf.path for leaf in sorted(leaves, key=lambda leaf: leaf.index)]
