"""Optimizer state by parameter name to state on shards; the inverse is in ``optimizer_state``.

The state dict may be on every rank, or, with ``src``, on one rank alone. It may lack the state of
leaves that were frozen when it was saved: with ``strict=False`` these begin with the optimizer's
initial state, and state of leaves that the plan does not train is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import check_count
from funcshard.checkpoint.functional_optimizer import ByBuffer, combine_state, partition_state
from funcshard.checkpoint.optimizer_checks import LeafState, add_checksums, check_names
from funcshard.checkpoint.optimizer_message import broadcast_text, decode_state, encode_state
from funcshard.checkpoint.pieces import Piece
from funcshard.checkpoint.state_dict import (
    check_flags,
    check_no_local_leaf,
    find_leaves,
    shard_from_leaves,
    shard_from_rank,
)
from funcshard.checkpoint.stored_state import name_in
from funcshard.comm import Mesh
from funcshard.core import LeafChecksums, check_mesh, check_source, raise_on_every_rank, zero_shard
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan, dtype_name
from funcshard.train import (
    MuonStep,
    ParamGroupLayout,
    TorchOptimizer,
    check_optimizer,
    trainable_buffers,
)

# A function from a buffer, and the full tensors or pieces of its leaves, to this rank's shard.
_Cut = Callable[[UnitPlan, BufferPlan, Mesh, Mapping[str, Any], str], torch.Tensor]


def optimizer_from_state_dict(
    state_dict: Mapping[str, Any],
    optimizer: Any,
    plan: Plan,
    mesh: Mesh,
    *,
    src: int | None = None,
    strict: bool = True,
    steps: int | None = None,
    check: bool = True,
) -> Any:
    """Return this rank's optimizer state; ``optimizer_to_state_dict`` is the inverse.

    Arguments:
        state_dict: a dictionary from ``optimizer_to_state_dict`` or torch's
            ``get_optimizer_state_dict``, flattened or not, with full tensors, DTensors or pieces.
            The options in its parameter groups are ignored, because ``optimizer`` has its own.
        optimizer: the optimizer to make the state for; see ``optimizer_to_state_dict``.
        plan: the plan to cut the state by.
        mesh: the ranks.
        src: the rank that has the state dict, which must hold full tensors. That rank broadcasts
            one flat tensor after another; the state dict of other ranks is ignored. By default
            every rank has the state dict.
        strict: whether the state dict must hold the state of every trainable leaf, and of no other
            leaf. With ``False``, leaves without state begin with the optimizer's initial state, and
            further state is ignored.
        steps: number of steps taken, for schedules. By default the ``step`` of the state.
        check: whether ranks compare checksums of full tensors and scalars, as in ``shard``.
            With ``src`` nothing is compared.

    Returns:
        The state, for ``optimizer.step`` or a ``TrainState``. It shares no memory with the state
        dict.

    Raises:
        ValueError: a trainable leaf has no state, or state of another shape; the plan does not
            train a leaf that has state; with ``strict=False``, a leaf without state shares a count
            of steps with leaves that have one; the state is one of another class, or of options
            with which the class keeps other tensors; leaves that share a scalar have different
            values of it; ranks have different state of a leaf that they share; or an option is a
            schedule, and neither ``steps`` nor the state dict gives the number of steps. If one
            rank's state dict has a fault, every rank raises.

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
    check_flags(strict=strict, check=check)
    if steps is not None:
        remedy = "pass the step of the TrainState that the state dict belongs to"
        steps = check_count(
            "steps", steps, 0, of="steps", none="for the step of the state", remedy=remedy
        )
    check_mesh(
        plan,
        mesh,
        {
            "the options of optimizer_from_state_dict": f"src={src!r}, strict={strict!r}, check={check!r}"
        },
    )
    if src is not None:
        return _from_rank(state_dict, optimizer, plan, mesh, src, strict, steps)
    checksums = LeafChecksums(
        mesh, "the optimizer's state dict", "load the same file on every rank, or pass src=0"
    )
    state, fault = None, None
    try:
        check_optimizer(optimizer, plan)
        by_path, options = _by_path(state_dict, plan, strict)
        if check:
            add_checksums(checksums, by_path, {**options, "steps": steps}, plan)
        state = _state_on_shards(
            by_path, options, optimizer, plan, mesh, steps, shard_from_leaves, strict
        )
    except Exception as error:  # of any kind, because other ranks wait
        fault = error
    checksums.compare(fault)
    return state


def _from_rank(
    state_dict: Mapping[str, Any],
    optimizer: Any,
    plan: Plan,
    mesh: Mesh,
    src: int,
    strict: bool,
    steps: int | None,
) -> Any:
    """Return this rank's optimizer state from the state dict of rank ``src``."""
    check_source(src, mesh)
    check_no_local_leaf(plan)
    by_path: dict[str, LeafState] = {}
    options: dict[str, Any] = {}
    state_text, fault = "", None
    try:
        check_optimizer(optimizer, plan)
        if mesh.rank == src:
            by_path, options = _by_path(state_dict, plan, strict)
            options = {} if isinstance(optimizer, TorchOptimizer) else options  # it has its own
            state_text = encode_state(by_path, options, plan)
    except Exception as error:  # of any kind, because other ranks wait
        fault = error
    # Why every rank learns of a fault: it would wait for a broadcast that never starts.
    raise_on_every_rank(mesh, fault)
    state_text = broadcast_text(state_text, src, mesh)
    if mesh.rank != src:
        by_path, options = decode_state(state_text, mesh.device)
    # From here on every rank has the same names, shapes and scalars, so every rank does the same.
    return _state_on_shards(
        by_path,
        options,
        optimizer,
        plan,
        mesh,
        steps,
        functools.partial(shard_from_rank, src),
        strict,
    )


def _state_on_shards(
    by_path: dict[str, LeafState],
    options: Mapping[str, Any],
    optimizer: Any,
    plan: Plan,
    mesh: Mesh,
    steps: int | None,
    cut: _Cut,
    strict: bool,
) -> Any:
    """Return this rank's optimizer state from the state of each leaf."""
    if isinstance(optimizer, TorchOptimizer):
        return _torch_state(by_path, optimizer.step, plan, mesh, steps, cut, strict)
    init = optimizer[0]
    like = init(_zero_shards(plan, mesh))
    if not by_path:
        return like
    names = sorted({name for leaf_state in by_path.values() for name in leaf_state})
    by_name = {
        name: _by_buffer(
            {
                p: {name: leaf_state[name]}
                for p, leaf_state in by_path.items()
                if name in leaf_state
            },
            None,
            plan,
            mesh,
            cut,
            strict,
        )
        for name in names
    }
    initial, _ = partition_state(like, plan)

    def per_shard(path: str) -> ByBuffer:
        if path not in by_name:
            raise ValueError(
                f"the optimizer's state dict must hold {path!r}; found {names}: the state dict is "
                "of another optimizer"
            )
        unit_states: dict[str, dict[str, Any]] = {unit: {} for unit in by_name[path]}
        for unit, buffer in trainable_buffers(plan):
            leaf_tensors, first = (
                by_name[path][unit.name][buffer.key],
                initial[path][unit.name][buffer.key],
            )
            value = unit_states[unit.name][buffer.key] = leaf_tensors.get(path, first)
            for leaf in buffer.leaves if not strict and path in leaf_tensors else ():
                if (
                    path not in by_path.get(leaf.path, {})
                    and isinstance(value, torch.Tensor)
                    and value.ndim
                ):
                    part = buffer.part(leaf, mesh.shard.rank)
                    value[part.in_shard] = first[part.in_shard]
        return unit_states

    return combine_state(like, plan, per_shard, options)


# --- to an optimizer's state ----------------------------------------------------------------------


def _by_path(
    state_dict: Mapping[str, Any], plan: Plan, strict: bool
) -> tuple[dict[str, LeafState], dict[str, Any]]:
    """Return the state of each trainable leaf by path, and the first parameter group's options."""
    leaves = [leaf for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves]
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"an optimizer's state dict must be a dictionary; found {type(state_dict).__name__}: "
            "pass what optimizer_to_state_dict returned, or torch.load(path, weights_only=True)"
        )
    if not state_dict and leaves:
        raise ValueError(
            "an optimizer's state dict must have 'state' and 'param_groups'; found an empty one, "
            "as rank0_only leaves it on all ranks but one: pass src=0 to take the state dict of "
            "rank 0, or take it without rank0_only"
        )
    if not {"state", "param_groups"} <= state_dict.keys():
        state_dict = _unflattened(state_dict, leaves)
    state, groups = state_dict["state"], state_dict["param_groups"]
    if any(isinstance(name, int) for name in state):
        raise ValueError(
            "an optimizer's state dict must name parameters; found numbers, as in "
            "optimizer.state_dict(): get it with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)"
        )
    options = {key: value for key, value in groups[0].items() if key != "params"} if groups else {}
    if not state:
        return {}, options
    # Why leaves may be missing: an optimizer that counts no steps may keep nothing of some
    # parameters.
    counts_steps = any("step" in leaf_state for leaf_state in state.values())
    present = [leaf for leaf in leaves if name_in(state, leaf) is not None]
    needed = leaves if (counts_steps and strict) or not present else present
    rule = "the optimizer's state dict must hold the state of every trainable leaf"
    anew = "; or the leaves were frozen then: strict=False begins them with the optimizer's initial state"
    found_state = find_leaves(state, needed, rule, anew if strict else "")
    if strict:
        _check_no_more(state, leaves)
    return {leaf.path: dict(found_state.get(leaf.path, {})) for leaf in leaves}, options


def _check_no_more(state: Mapping[str, Any], leaves: Sequence[LeafSpec]) -> None:
    """Raise ``ValueError`` if the state dict holds state of a leaf that has none here."""
    known_names = {path for leaf in leaves for path in (leaf.path, *leaf.aliases)}
    if unknown_names := [
        name for name, leaf_state in state.items() if leaf_state and name not in known_names
    ]:
        raise ValueError(
            "the optimizer's state dict must hold state of the trainable leaves only; found state "
            f"of {unknown_names[:3]}{f' and {len(unknown_names) - 3} more' if len(unknown_names) > 3 else ''}, which are "
            "frozen now, or not in the plan: strict=False leaves it out"
        )


def _unflattened(flat: Mapping[str, Any], leaves: Sequence[LeafSpec]) -> dict[str, Any]:
    """Return a flat dictionary as a state dict; the inverse of ``_flattened``."""
    if flat and not any(str(name).startswith(("state.", "param_groups.")) for name in flat):
        raise ValueError(
            "an optimizer's state dict must have 'state' and 'param_groups', or names that begin "
            f"with them; found {list(flat)[:3]}: get it with optimizer_to_state_dict, or torch's "
            "get_optimizer_state_dict"
        )
    known_paths = dict.fromkeys(path for leaf in leaves for path in (leaf.path, *leaf.aliases))
    parts: dict[str, dict[str, LeafState]] = {"state": {}, "param_groups": {}}
    for name, value in flat.items():
        part, _, rest = str(name).partition(".")
        # Why known paths: an entry may have dots too, such as TorchOpt's 0.mu.
        dots = [dot.start() for dot in re.finditer(r"\.", rest)]
        end = next((at for at in dots if rest[:at] in known_paths), rest.rfind("."))
        if part in parts and end >= 0:
            parts[part].setdefault(rest[:end], {})[rest[end + 1 :]] = value
    groups = parts["param_groups"]
    options = next((groups[path] for path in known_paths if path in groups), {})
    return {"state": parts["state"], "param_groups": [options]}


def _torch_state(
    by_path: dict[str, LeafState],
    step: Any,
    plan: Plan,
    mesh: Mesh,
    steps: int | None,
    cut: _Cut,
    strict: bool,
) -> dict[str, Any]:
    """Return the state of ``torch_optimizer`` or ``muon``."""
    check_names(by_path, step)
    if isinstance(step, MuonStep):
        matrices = {
            path: leaf_state for path, leaf_state in by_path.items() if path in step.layout.group_of
        }
        others = {
            path: leaf_state
            for path, leaf_state in by_path.items()
            if path not in step.layout.group_of
        }
        adamw = _torch_state(others, step.adamw, plan, mesh, steps, cut, strict)
        steps = _steps(by_path, [step.options, *step.adamw.options], steps)
        state = {
            **step.init(_zero_shards(plan, mesh)),
            "steps": steps,
            "adamw": {**adamw, "steps": steps},
        }
        if any(matrices.values()):
            # Why strict: momentum is zeros before the first step, so leaves without it need no
            # care.
            leaves = _by_buffer(matrices, step.layout, plan, mesh, cut, strict=True)
            state["momentum"] = {
                u: {k: leaf_state["momentum_buffer"] for k, leaf_state in buffer_states.items()}
                for u, buffer_states in leaves.items()
            }
        return state
    on_device = any(options.get("fused") or options.get("capturable") for options in step.options)
    dampened = any(options.get("dampening") for options in step.options)
    leaves = _by_buffer(by_path, step.layout, plan, mesh, cut, strict, on_device, dampened)
    return {"steps": _steps(by_path, step.options, steps), "leaves": leaves}


def _by_buffer(
    by_path: dict[str, LeafState],
    layout: ParamGroupLayout | None,
    plan: Plan,
    mesh: Mesh,
    cut: _Cut,
    strict: bool,
    on_device: bool = False,
    dampened: bool = False,
) -> dict[str, dict[str, LeafState]]:
    """Return the state of each trainable shard: flat tensors, and scalars.

    Arguments:
        by_path: the state of each leaf.
        layout: where the parameter groups lie in the shards; ``None`` for one group.
        plan: the plan.
        mesh: the ranks.
        cut: returns this rank's shard of a buffer.
        strict: ``False`` leaves a buffer without any state as the optimizer's ``init`` does.
        on_device: whether scalars are on the device of the shard, as fused kernels need them.
        dampened: whether zeros are not the same as no state yet.
    """
    states_by_unit: dict[str, dict[str, LeafState]] = {unit.name: {} for unit in plan.unit_list}
    shapes = {leaf.path: leaf.whole_shape for leaf in plan.leaves}
    names = dict.fromkeys(name for leaf_state in by_path.values() for name in leaf_state)
    elementwise = {
        name: any(
            _is_elementwise(name, leaf_state[name], shapes[path])
            for path, leaf_state in by_path.items()
            if name in leaf_state
        )
        for name in names
    }
    for unit, buffer in trainable_buffers(plan):
        buffer_state = states_by_unit[unit.name][buffer.key] = {}
        device = None
        if on_device:
            device = torch.device("cpu") if unit.offload else mesh.device
        members = [
            leaf.path for leaf in buffer.leaves if layout is None or leaf.path in layout.group_of
        ]
        begun = [path for path in members if by_path.get(path)]
        anew = [path for path in members if not by_path.get(path) and not strict]
        if anew and not begun:
            continue  # the optimizer makes the state in its next step
        if anew and (dampened or not all(elementwise.values())):
            _check_groups(begun, anew, None if dampened else layout)
        without = {_group(path, layout) for path in anew}
        for name in names:
            values = {
                leaf.path: by_path[leaf.path][name]
                for leaf in buffer.leaves
                if name in by_path.get(leaf.path, {})
            }
            if elementwise[name]:
                value = _flat_tensor(name, values, unit, buffer, mesh, cut)
                buffer_state[name] = value if layout is None else layout.pick(value, buffer).clone()
            else:
                buffer_state[name] = _scalars(name, values, layout, by_path, without, device)
    return states_by_unit


def _group(path: str, layout: ParamGroupLayout | None) -> int:
    """Return the number of a leaf's parameter group."""
    return 0 if layout is None else layout.group_of[path]


def _check_groups(
    begun: Sequence[str], anew: Sequence[str], layout: ParamGroupLayout | None
) -> None:
    """Raise if a leaf that begins from scratch shares buffer and group with one that has state."""
    for path in anew:
        peer = next((peer for peer in begun if _group(peer, layout) == _group(path, layout)), None)
        if peer is not None:
            raise ValueError(
                f"leaf {path!r} has no state and begins anew, but it shares a flat buffer and a "
                f"parameter group with {peer!r}, which has state: they would share one count of "
                "steps, and dampening would apply to both: give it a unit of its own in "
                "make_plan, or, without dampening, a group of its own, as in "
                f'groups=[{{"paths": [{path!r}]}}]'
            )


def _flat_tensor(
    name: str, values: dict[str, Any], unit: UnitPlan, buffer: BufferPlan, mesh: Mesh, cut: _Cut
) -> torch.Tensor:
    """Return this rank's shard of an entry, in the entry's own dtype."""
    first = next(iter(values.values()), None)
    first = first[0] if isinstance(first, Sequence) and not isinstance(first, Piece) else first
    tensor = first.tensor if isinstance(first, Piece) else first
    dtype = dtype_name(tensor.dtype) if isinstance(tensor, torch.Tensor) else buffer.dtype
    return cut(
        unit,
        dataclasses.replace(buffer, dtype=dtype),
        mesh,
        values,
        f"{name!r} of the optimizer's state dict",
    )


def _scalars(
    name: str,
    values: dict[str, Any],
    layout: ParamGroupLayout | None,
    by_path: dict[str, LeafState],
    without: set[int],
    device: torch.device | None,
) -> Any:
    """Return the scalar of each parameter group; its leaves in one buffer must have the same.

    ``without`` are the groups whose leaves in this buffer begin from scratch; they have no scalar.
    """
    first_scalars: dict[int, tuple[str, Any]] = {}
    # Why leaves elsewhere count: a shard also keeps the scalars of groups that it has no leaf of,
    # and the leaves of another shard have the same ones.
    elsewhere = {
        path: leaf_state[name]
        for path, leaf_state in by_path.items()
        if name in leaf_state and path not in values and _group(path, layout) not in without
    }
    for path, value in [*values.items(), *elsewhere.items()]:
        group = _group(path, layout)
        first_path, first = first_scalars.setdefault(group, (path, value))
        if path in values and float(value) != float(first):
            raise ValueError(
                f"{name!r} must be the same for all leaves of a flat buffer that have the same "
                f"options; found {float(first)} for {first_path!r} and {float(value)} for {path!r}: "
                "give one a group of its own, in groups="
            )
    count = 1 if layout is None else layout.count
    scalars = tuple(
        _copied(first_scalars[group][1], device) if group in first_scalars else None
        for group in range(count)
    )
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


def _steps(
    by_path: dict[str, LeafState], options: Sequence[Mapping[str, Any]], steps: int | None
) -> int:
    """Return the number of steps taken: ``steps`` if given, else the largest ``step`` of a leaf."""
    if steps is not None:
        return steps
    counts = [float(leaf_state["step"]) for leaf_state in by_path.values() if "step" in leaf_state]
    if counts:
        return int(max(counts))
    if by_path and any(
        callable(value) for group_options in options for value in group_options.values()
    ):
        raise ValueError(
            "an option of this optimizer is a function of the number of steps taken, which this "
            "state dict does not hold: pass steps=, such as the step of the TrainState that it "
            "belongs to"
        )
    return 0


def _zero_shards(plan: Plan, mesh: Mesh) -> dict[str, dict[str, torch.Tensor]]:
    return {
        unit.name: {b.key: zero_shard(unit, b, mesh) for b in unit.buffers if b.trainable}
        for unit in plan.unit_list
    }
