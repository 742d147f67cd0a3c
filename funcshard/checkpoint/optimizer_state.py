"""Optimizer state by parameter name, in the layout of ``torch.distributed.checkpoint``, and back.

On the shards, an optimizer keeps flat tensors that are cut like the shards, such as ``exp_avg``,
and scalars, such as ``step``, once per flat buffer and parameter group. By name, each parameter has
a dictionary of its own. ``optimizer_to_state_dict`` and ``optimizer_from_state_dict`` are inverses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import check_count, check_not_donated
from funcshard.checkpoint.functional_optimizer import ByBuffer, combine_state, partition_state
from funcshard.checkpoint.metadata import name_in
from funcshard.checkpoint.optimizer_checks import LeafState, add_checksums, check_names, check_opt_state
from funcshard.checkpoint.state_dict import (
    Piece,
    check_flags,
    check_no_local_leaf,
    find_leaves,
    kept_copy,
    leaves_for_this_rank,
    shard_from_leaves,
)
from funcshard.comm import Mesh, check_same
from funcshard.core import LeafChecksums, check_mesh, empty_shard
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan, dtype_name
from funcshard.train import (
    MuonStep,
    ParamGroupLayout,
    TorchOptimizer,
    TorchStep,
    check_optimizer,
    trainable_buffers,
)

__all__ = ["optimizer_from_state_dict", "optimizer_to_state_dict"]


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
        in the pair's state (``"0.mu"``), and values that belong to no parameter stand in the one
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
    check_mesh(plan, mesh)
    check_same(mesh, f"rank0_only={rank0_only!r}, sharded={sharded!r}", "the options of optimizer_to_state_dict")
    if rank0_only:
        check_no_local_leaf(plan)
    check_optimizer(optimizer, plan)
    check_opt_state(opt_state, optimizer, plan)
    entries, param_groups = _entries_and_groups(opt_state, optimizer, plan)
    found: dict[str, LeafState] = {path: {} for path in _trainable_paths(plan)}
    for entry in entries:
        for unit, buffer in trainable_buffers(plan):
            value = entry.values[unit.name].get(buffer.key)
            if isinstance(value, torch.Tensor) and entry.is_flat(value, buffer):
                flat = value if entry.layout is None else entry.layout.spread(value, buffer)
                for leaf, part in leaves_for_this_rank(flat, unit, buffer, mesh, rank0_only, offload, sharded):
                    if entry.has(leaf):
                        found[leaf.path][entry.name] = part
            elif isinstance(value, torch.Tensor) and value.ndim == 1 and value.numel() > 1:
                raise ValueError(
                    f"the entry {entry.name!r} of unit {unit.title!r} must have {buffer.shard_numel} elements, as the shard "
                    f"has under the plan; found {value.numel()}: pass the plan that the state was made with"
                )
            elif value is not None:
                for leaf in filter(entry.has, buffer.leaves):
                    scalar = value[entry.group(leaf)] if isinstance(value, tuple) else value
                    found[leaf.path][entry.name] = kept_copy(scalar, offload) if isinstance(scalar, torch.Tensor) else scalar
    if rank0_only and mesh.rank:
        return {}
    state_dict = {"state": {path: own for path, own in found.items() if own}, "param_groups": param_groups}
    return _flattened(state_dict) if flatten else state_dict


def optimizer_from_state_dict(
    state_dict: Mapping[str, Any], optimizer: Any, plan: Plan, mesh: Mesh, *, steps: int | None = None, check: bool = True
) -> Any:
    """Return this rank's optimizer state; ``optimizer_to_state_dict`` is the inverse.

    Arguments:
        state_dict: a dictionary from ``optimizer_to_state_dict`` or torch's
            ``get_optimizer_state_dict``, flattened or not, with full tensors, DTensors or pieces.
            The options in its parameter groups are ignored, because ``optimizer`` has its own.
        optimizer: the optimizer to make the state for; see ``optimizer_to_state_dict``.
        plan: the plan to cut the state by.
        mesh: the ranks.
        steps: number of steps taken, for schedules. By default the ``step`` of the state.
        check: whether ranks compare checksums of full tensors and scalars, as in ``shard``.

    Returns:
        The state, for ``optimizer.step`` or a ``TrainState``. It shares no memory with the state
        dict.

    Raises:
        ValueError: a trainable leaf has no state, or state of another shape; the state is one of
            another class, or of options with which the class keeps other tensors; leaves that
            share a scalar have different values of it; ranks have different state of a leaf that
            they share; or an option is a schedule, and neither ``steps`` nor the state dict gives
            the number of steps. If one rank's state dict has a fault, every rank raises.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Linear(3, 1)
        >>> theirs = torch.optim.AdamW(net.parameters())
        >>> net(torch.ones(1, 3)).sum().backward()
        >>> theirs.step()
        >>> from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
        >>> state_dict = get_optimizer_state_dict(net, theirs)
        >>> apply, params, buffers = fs.make_functional(net)
        >>> plan, ours = fs.make_plan(params, 1), fs.torch_optimizer(torch.optim.AdamW)
        >>> opt_state = fs.optimizer_from_state_dict(state_dict, ours, plan, fs.Mesh())
        >>> opt_state["steps"], sorted(opt_state["leaves"][""]["float32"])
        (1, ['exp_avg', 'exp_avg_sq', 'step'])

    Source: ``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict``.
    """
    check_flags(check=check)
    if steps is not None:
        remedy = "pass the step of the TrainState that the state dict belongs to"
        steps = check_count("steps", steps, 0, of="steps", none="for the step of the state", remedy=remedy)
    check_mesh(plan, mesh)
    checksums = LeafChecksums(mesh, "the optimizer's state dict", "load the same file on every rank")
    state, fault = None, None
    try:
        check_optimizer(optimizer, plan)
        by_path, options = _by_path(state_dict, plan)
        if check:
            add_checksums(checksums, by_path, {**options, "steps": steps}, plan)
        state = _state_on_shards(by_path, options, optimizer, plan, mesh, steps)
    except Exception as error:  # of any kind, because other ranks wait
        fault = error
    checksums.start(fault).finish()
    return state


def _state_on_shards(
    by_path: dict[str, LeafState], options: Mapping[str, Any], optimizer: Any, plan: Plan, mesh: Mesh, steps: int | None
) -> Any:
    """Return this rank's optimizer state from the state of each leaf."""
    if isinstance(optimizer, TorchOptimizer):
        return _torch_state(by_path, optimizer.step, plan, mesh, steps)
    init = optimizer[0]
    like = init(_zero_shards(plan, mesh))
    if not by_path:
        return like
    names = sorted({name for own in by_path.values() for name in own})
    by_name = {
        name: _by_buffer({p: {name: own[name]} for p, own in by_path.items() if name in own}, None, plan, mesh)
        for name in names
    }

    def per_shard(path: str) -> ByBuffer:
        if path not in by_name:
            raise ValueError(
                f"the optimizer's state dict must hold {path!r}; found {names}: the state dict is of another optimizer"
            )
        return {unit: {key: own[path] for key, own in each.items()} for unit, each in by_name[path].items()}

    return combine_state(like, plan, per_shard, options)


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


def _entries_and_groups(opt_state: Any, optimizer: Any, plan: Plan) -> tuple[list[_Entry], list[dict[str, Any]]]:
    """Return the entries of an optimizer's state, and its parameter groups."""
    paths = _trainable_paths(plan)
    if not isinstance(optimizer, TorchOptimizer):
        per_shard, others = partition_state(opt_state, plan)
        return [_Entry(path, values) for path, values in per_shard.items()], [{**others, "params": paths}]
    step: Any = optimizer.step
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
    names = dict.fromkeys(name for unit, buffer in trainable_buffers(plan) for name in leaves[unit.name][buffer.key])
    return [
        _Entry(name, {unit: {key: own.get(name) for key, own in each.items()} for unit, each in leaves.items()}, step.layout)
        for name in names
    ]


def _flattened(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict as one flat dictionary; the inverse of ``_unflattened``."""
    state = {f"state.{path}.{name}": v for path, own in state_dict["state"].items() for name, v in own.items()}
    options = {
        f"param_groups.{path}.{key}": value
        for group in state_dict["param_groups"]
        for path in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return {**state, **options}


# --- to an optimizer's state ----------------------------------------------------------------------


def _by_path(state_dict: Mapping[str, Any], plan: Plan) -> tuple[dict[str, LeafState], dict[str, Any]]:
    """Return the state of each trainable leaf by path, and the first parameter group's options."""
    leaves = [leaf for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves]
    if not state_dict and leaves:
        raise ValueError(
            "an optimizer's state dict must have 'state' and 'param_groups'; found an empty one, as rank0_only leaves it on "
            "all ranks but one: send rank 0's dictionary to every rank, or take it without rank0_only"
        )
    if not {"state", "param_groups"} <= state_dict.keys():
        state_dict = _unflattened(state_dict, leaves)
    state, groups = state_dict["state"], state_dict["param_groups"]
    if any(isinstance(name, int) for name in state):
        raise ValueError(
            "an optimizer's state dict must name parameters; found numbers, as in optimizer.state_dict(): get it with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)"
        )
    options = {key: value for key, value in groups[0].items() if key != "params"} if groups else {}
    if not state:
        return {}, options
    # Why leaves may be missing: an optimizer that counts no steps may keep nothing of some
    # parameters.
    counts_steps = any("step" in own for own in state.values())
    present = [leaf for leaf in leaves if name_in(state, leaf) is not None]
    rule = "the optimizer's state dict must hold the state of every trainable leaf"
    found = find_leaves(state, leaves if counts_steps or not present else present, rule)
    return {leaf.path: dict(found.get(leaf.path, {})) for leaf in leaves}, options


def _unflattened(flat: Mapping[str, Any], leaves: Sequence[LeafSpec]) -> dict[str, Any]:
    """Return a flat dictionary as a state dict; the inverse of ``_flattened``."""
    if flat and not any(str(name).startswith(("state.", "param_groups.")) for name in flat):
        raise ValueError(
            f"an optimizer's state dict must have 'state' and 'param_groups', or names that begin with them; found "
            f"{list(flat)[:3]}: get it with optimizer_to_state_dict, or torch's get_optimizer_state_dict"
        )
    state: dict[str, LeafState] = {}
    options: dict[str, Any] = {}
    for leaf in leaves:
        for path in (leaf.path, *leaf.aliases):
            begin, first = f"state.{path}.", f"param_groups.{path}."
            own = {name.removeprefix(begin): value for name, value in flat.items() if name.startswith(begin)}
            state |= {path: own} if own else {}
            options = options or {n.removeprefix(first): v for n, v in flat.items() if n.startswith(first)}
    return {"state": state, "param_groups": [options]}


def _torch_state(by_path: dict[str, LeafState], step: Any, plan: Plan, mesh: Mesh, steps: int | None) -> dict[str, Any]:
    """Return the state of ``torch_optimizer`` or ``muon``."""
    check_names(by_path, step)
    if isinstance(step, MuonStep):
        matrices = {path: own for path, own in by_path.items() if path in step.layout.group_of}
        others = {path: own for path, own in by_path.items() if path not in step.layout.group_of}
        adamw = _torch_state(others, step.adamw, plan, mesh, steps)
        steps = _steps(by_path, [step.options, *step.adamw.options], steps)
        state = {**step.init(_zero_shards(plan, mesh)), "steps": steps, "adamw": {**adamw, "steps": steps}}
        if matrices:
            leaves = _by_buffer(matrices, step.layout, plan, mesh)
            state["momentum"] = {u: {k: own["momentum_buffer"] for k, own in each.items()} for u, each in leaves.items()}
        return state
    on_device = any(options.get("fused") or options.get("capturable") for options in step.options)
    leaves = _by_buffer(by_path, step.layout, plan, mesh, on_device)
    return {"steps": _steps(by_path, step.options, steps), "leaves": leaves}


def _by_buffer(
    by_path: dict[str, LeafState], layout: ParamGroupLayout | None, plan: Plan, mesh: Mesh, on_device: bool = False
) -> dict[str, dict[str, LeafState]]:
    """Return the state of each trainable shard: flat tensors, and scalars.

    With ``on_device`` the scalars are on the device of the shard, as fused kernels need them.
    """
    found: dict[str, dict[str, LeafState]] = {unit.name: {} for unit in plan.unit_list}
    shapes = {leaf.path: leaf.shape for leaf in plan.leaves}
    names = dict.fromkeys(name for own in by_path.values() for name in own)
    elementwise = {
        name: any(_is_elementwise(name, own[name], shapes[path]) for path, own in by_path.items() if name in own)
        for name in names
    }
    for unit, buffer in trainable_buffers(plan):
        own = found[unit.name][buffer.key] = {}
        device = (torch.device("cpu") if unit.offload else mesh.device) if on_device else None
        for name in names:
            values = {leaf.path: by_path[leaf.path][name] for leaf in buffer.leaves if name in by_path.get(leaf.path, {})}
            if elementwise[name]:
                value = _flat_tensor(name, values, unit, buffer, mesh)
                own[name] = value if layout is None else layout.pick(value, buffer).clone()
            else:
                own[name] = _scalars(name, values, layout, by_path, device)
    return found


def _flat_tensor(name: str, values: dict[str, Any], unit: UnitPlan, buffer: BufferPlan, mesh: Mesh) -> torch.Tensor:
    """Return this rank's shard of an entry, in the entry's own dtype."""
    first = next(iter(values.values()), None)
    first = first[0] if isinstance(first, Sequence) and not isinstance(first, Piece) else first
    tensor = first.tensor if isinstance(first, Piece) else first
    dtype = dtype_name(tensor.dtype) if isinstance(tensor, torch.Tensor) else buffer.dtype
    where = f"{name!r} of the optimizer's state dict"
    return shard_from_leaves(unit, dataclasses.replace(buffer, dtype=dtype), mesh, values, where)


def _scalars(
    name: str,
    values: dict[str, Any],
    layout: ParamGroupLayout | None,
    by_path: dict[str, LeafState],
    device: torch.device | None,
) -> Any:
    """Return the scalar of each parameter group; its leaves in one buffer must have the same."""
    found: dict[int, tuple[str, Any]] = {}
    # Why leaves elsewhere count: a shard also keeps the scalars of groups that it has no leaf of,
    # and the leaves of another shard have the same ones.
    elsewhere = {path: own[name] for path, own in by_path.items() if name in own and path not in values}
    for path, value in [*values.items(), *elsewhere.items()]:
        group = 0 if layout is None else layout.group_of[path]
        before, first = found.setdefault(group, (path, value))
        if path in values and float(value) != float(first):
            raise ValueError(
                f"{name!r} must be the same for all leaves of a flat buffer that have the same options; found "
                f"{float(first)} for {before!r} and {float(value)} for {path!r}: give one a group of its own, in groups="
            )
    count = 1 if layout is None else layout.count
    scalars = tuple(_copied(found[group][1], device) if group in found else None for group in range(count))
    return scalars if count > 1 else scalars[0]


def _copied(value: Any, device: torch.device | None) -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) else value


def _is_elementwise(name: str, value: Any, shape: tuple[int, ...]) -> bool:
    """Return whether a leaf's entry has a value for each element of the leaf."""
    if isinstance(value, Piece | list | tuple):
        return True
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
        return False
    # Why names: for a parameter without dimensions, scalars have its shape too. These are
    # torch.optim's.
    return shape != () or name not in ("step", "mu_product", "eta", "mu")


def _steps(by_path: dict[str, LeafState], options: Sequence[Mapping[str, Any]], steps: int | None) -> int:
    """Return the number of steps taken: ``steps`` if given, else the largest ``step`` of a leaf."""
    if steps is not None:
        return steps
    counts = [float(own["step"]) for own in by_path.values() if "step" in own]
    if counts:
        return int(max(counts))
    if by_path and any(callable(value) for each in options for value in each.values()):
        raise ValueError(
            "an option of this optimizer is a function of the number of steps taken, which this state dict does not hold: "
            "pass steps=, such as the step of the TrainState that it belongs to"
        )
    return 0


# --- the plan -------------------------------------------------------------------------------------


def _trainable_paths(plan: Plan) -> list[str]:
    leaves = [leaf for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves]
    return [leaf.path for leaf in sorted(leaves, key=lambda leaf: leaf.index)]


def _zero_shards(plan: Plan, mesh: Mesh) -> dict[str, dict[str, torch.Tensor]]:
    return {unit.name: {b.key: empty_shard(unit, b, mesh) for b in unit.buffers if b.trainable} for unit in plan.unit_list}
