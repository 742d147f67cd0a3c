"""The state of a pair of functions, as TorchOpt and optax write them: where in it there is one value for each shard.

Optimizer state by parameter name, as ``torch.distributed.checkpoint`` writes it, from flat state and back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import tree
from funcshard.checkpoint.state_dict import Piece, fill, found_leaves, held, refuse_local, taken
from funcshard.comm import Mesh
from funcshard.core import check_mesh, empty_shard
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan, dtype_name
from funcshard.train import MuonStep, ParamGroupLayout, TorchOptimizer, TorchStep, trainable_buffers

__all__ = ["fill_nodes", "nodes", "optimizer_from_state_dict", "optimizer_to_state_dict"]

Values = Mapping[str, Mapping[str, Any]]


def nodes(state: Any, plan: Plan, path: str = "") -> Iterator[tuple[str, Values | None, Any]]:
    """Give ``(path, values, node)`` of each node that has one value for each shard, and of what else there is.

    Arguments:
        state: the pair's state; any nest of tuples, named tuples, lists and dictionaries.
        plan: the plan of the shards.
        path: the path of ``state`` itself.

    Yields:
        ``values`` is ``{unit: {buffer key: value}}``, or ``None`` for a leaf of another kind.
    """
    found = _values(state, plan)
    if found is not None:
        yield path, found, state
    elif _is_container(state):
        for key, child in _children(state):
            yield from nodes(child, plan, _join(path, key))
    elif state is not None:
        yield path, None, state


def fill_nodes(state: Any, plan: Plan, values_of: Callable[[str], Values], others: Mapping[str, Any], path: str = "") -> Any:
    """Return ``state`` with ``values_of(path)`` in the nodes that have one value for each shard; the inverse of ``nodes``.

    Arguments:
        state: a state of the right form.
        plan: the plan of the shards.
        values_of: what belongs into the node at a path.
        others: leaves of other kinds by path; those that are not in it stay as they are.
        path: the path of ``state`` itself.
    """
    if _values(state, plan) is not None:
        values = values_of(path)
        return [values[u.name][b.key] for u, b in _in_tree_order(plan)] if isinstance(state, list) else values
    if not _is_container(state):
        return others.get(path, state)
    children = [fill_nodes(child, plan, values_of, others, _join(path, key)) for key, child in _children(state)]
    if isinstance(state, tuple):
        return type(state)(*children) if hasattr(state, "_fields") else tuple(children)
    return children if isinstance(state, list) else dict(zip(state, children, strict=True))


def _values(node: Any, plan: Plan) -> Values | None:
    if isinstance(node, Mapping) and node and node.keys() == {unit.name for unit in plan.unit_list}:
        return node if all(b.key in node[u.name] for u, b in trainable_buffers(plan)) else None
    # TorchOpt's own nodes are lists of leaves, in the order of the tree
    if type(node) is list and node and all(isinstance(leaf, torch.Tensor) for leaf in node):
        places = _in_tree_order(plan)
        if len(places) == len(node):
            found: dict[str, dict[str, Any]] = {unit.name: {} for unit in plan.unit_list}
            for (unit, buffer), leaf in zip(places, node, strict=True):
                found[unit.name][buffer.key] = leaf
            return found
    return None


def _in_tree_order(plan: Plan) -> list[tuple[Any, Any]]:
    places: dict[str, dict[str, Any]] = {unit.name: {} for unit in plan.unit_list}
    shards = trainable_buffers(plan)
    for number, (unit, buffer) in enumerate(shards):
        places[unit.name][buffer.key] = number
    return [shards[number] for number in tree.leaves(places)]


def _is_container(node: Any) -> bool:
    return isinstance(node, list | tuple | Mapping)


def _children(node: Any) -> list[tuple[str, Any]]:
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return list(zip(node._fields, node, strict=True))
    if isinstance(node, Mapping):
        return [(str(key), child) for key, child in node.items()]
    return [(str(i), child) for i, child in enumerate(node)]


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


State = dict[str, Any]


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
    """Return an optimizer's state by parameter name, in the layout of torch's ``get_optimizer_state_dict``.

    It is gathered one flat tensor after another, as in ``to_state_dict``. Frozen leaves have no state. A leaf's scalars
    (``step``) are those of its group. Before the first step there is no state yet.

    Arguments:
        opt_state: this rank's state, as the optimizer returned it.
        optimizer: ``torch_optimizer``, ``muon``, or a pair in the style of TorchOpt and optax.
        plan: the plan of the shards.
        mesh: the ranks.
        rank0_only: see ``to_state_dict``.
        offload: see ``to_state_dict``.
        sharded: see ``to_state_dict``.
        flatten: whether to return one dictionary with names such as ``"state.0.weight.exp_avg"`` and
            ``"param_groups.0.weight.lr"``, as torch does with ``flatten_optimizer_state_dict``.

    Returns:
        ``{"state": {name: {"exp_avg": tensor, ...}}, "param_groups": [{"lr": ..., "params": [names]}, ...]}``. For a pair
        of TorchOpt's the state's names are paths in its own tree (``"0.mu"``); what is of no parameter stands in the one
        parameter group.

    Raises:
        ValueError: see ``to_state_dict``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(3)}
        >>> optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     _, opt_state = optimizer.step(fs.shard(params, plan, mesh), optimizer.init(shards), shards)
        ...     return fs.optimizer_to_state_dict(opt_state, optimizer, plan, mesh)["state"]
        >>> fs.simulate(main, world_size=2)[0]
        {'w': {'momentum_buffer': tensor([1., 1., 1.])}}

    Source: ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.
    """
    check_mesh(plan, mesh)
    if rank0_only:
        refuse_local(plan)
    slots, param_groups = _taken_apart(opt_state, optimizer, plan)
    found: dict[str, State] = {path: {} for path in _paths(plan)}
    for slot in slots:
        for unit, buffer in trainable_buffers(plan):
            value = slot.values[unit.name].get(buffer.key)
            if isinstance(value, torch.Tensor) and slot.is_flat(value, buffer):
                flat = value if slot.layout is None else slot.layout.spread(value, buffer)
                for leaf, part in taken(flat, unit, buffer, mesh, rank0_only, offload, sharded):
                    if slot.holds(leaf):
                        found[leaf.path][slot.name] = part
            elif value is not None:
                for leaf in buffer.leaves:
                    if slot.holds(leaf):
                        mine = value[slot.group(leaf)] if isinstance(value, tuple) else value
                        found[leaf.path][slot.name] = held(mine, offload) if isinstance(mine, torch.Tensor) else mine
    if rank0_only and mesh.rank:
        return {}
    state_dict = {"state": {path: own for path, own in found.items() if own}, "param_groups": param_groups}
    return _flattened(state_dict) if flatten else state_dict


def optimizer_from_state_dict(
    state_dict: Mapping[str, Any], optimizer: Any, plan: Plan, mesh: Mesh, *, steps: int | None = None
) -> Any:
    """Return this rank's optimizer state; ``optimizer_to_state_dict`` is the inverse.

    Arguments:
        state_dict: what ``optimizer_to_state_dict`` or torch's ``get_optimizer_state_dict`` returned, flattened or not, with
            full tensors, DTensors or pieces. The options in its parameter groups are not looked at: the optimizer has its
            own.
        optimizer: what the state is for; see ``optimizer_to_state_dict``.
        plan: how it is cut.
        mesh: the ranks.
        steps: number of steps taken, for schedules. By default what the state's ``step`` says.

    Returns:
        The state, for ``optimizer.step`` or in a ``TrainState``. It shares no memory with the state dict.

    Raises:
        ValueError: a trainable leaf has no state, or of another shape; scalars differ between leaves that share them;
            ``steps`` is needed and not given.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Linear(3, 1)
        >>> theirs = torch.optim.AdamW(net.parameters())
        >>> net(torch.ones(1, 3)).sum().backward()
        >>> theirs.step()
        >>> from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
        >>> state_dict = get_optimizer_state_dict(net, theirs)
        >>> apply, params, buffers = fs.make_functional(net)
        >>> plan, ours = fs.make_plan(params, 1), fs.torch_optimizer(torch.optim.AdamW)
        >>> opt_state = fs.optimizer_from_state_dict(state_dict, ours, plan, fs.Mesh())
        >>> opt_state["steps"], sorted(opt_state["leaves"][""]["float32"])
        (1, ['exp_avg', 'exp_avg_sq', 'step'])

    Source: ``torch.distributed.checkpoint.state_dict.set_optimizer_state_dict``.
    """
    check_mesh(plan, mesh)
    by_path, group = _by_path(state_dict, plan)
    if isinstance(optimizer, TorchOptimizer):
        return _torch_state(by_path, optimizer.step, plan, mesh, steps)
    like = optimizer[0](_zeros(plan, mesh))
    if not by_path:
        return like
    names = sorted({name for own in by_path.values() for name in own})
    flat = {
        name: _leaves({p: {name: own[name]} for p, own in by_path.items() if name in own}, None, plan, mesh)
        for name in names
    }

    def values_of(path: str) -> dict[str, dict[str, Any]]:
        if path not in flat:
            raise ValueError(f"the optimizer's state dict must hold {path!r}; found {names}: it is another optimizer's")
        return {unit: {key: own[path] for key, own in each.items()} for unit, each in flat[path].items()}

    return fill_nodes(like, plan, values_of, group)


@dataclass(frozen=True, slots=True)
class _Slot:
    """One named thing that an optimizer keeps of every parameter: flat tensors, or scalars of whole shards or groups."""

    name: str
    values: Mapping[str, Mapping[str, Any]]
    layout: ParamGroupLayout | None = None

    def is_flat(self, value: torch.Tensor, buffer: BufferPlan) -> bool:
        return value.ndim == 1 and (self.layout is not None or value.numel() == buffer.shard_numel)

    def holds(self, leaf: LeafSpec) -> bool:
        return self.layout is None or leaf.path in self.layout.group_of

    def group(self, leaf: LeafSpec) -> int:
        return 0 if self.layout is None else self.layout.group_of[leaf.path]


def _taken_apart(opt_state: Any, optimizer: Any, plan: Plan) -> tuple[list[_Slot], list[dict[str, Any]]]:
    paths = _paths(plan)
    if not isinstance(optimizer, TorchOptimizer):
        slots: list[_Slot] = []
        loose: dict[str, Any] = {}
        for path, values, node in nodes(opt_state, plan):
            if values is None:
                loose[path] = node
            else:
                slots.append(_Slot(path, values))
        return slots, [{**loose, "params": paths}]
    step: Any = optimizer.step
    if isinstance(step, MuonStep):
        momentum = _Slot("momentum_buffer", opt_state["momentum"], step.layout)
        adamw = _torch_slots(opt_state["adamw"], step.adamw, plan)
        return [momentum, *adamw], [
            *step.param_groups(opt_state["steps"]),
            *step.adamw.param_groups(opt_state["steps"], paths),
        ]
    return _torch_slots(opt_state, step, plan), step.param_groups(opt_state["steps"], paths)


def _torch_slots(opt_state: Any, step: TorchStep, plan: Plan) -> list[_Slot]:
    leaves = {unit.name: {} for unit in plan.unit_list} | opt_state["leaves"]
    names = dict.fromkeys(name for unit, buffer in trainable_buffers(plan) for name in leaves[unit.name][buffer.key])
    return [
        _Slot(name, {unit: {key: own.get(name) for key, own in each.items()} for unit, each in leaves.items()}, step.layout)
        for name in names
    ]


def _torch_state(by_path: dict[str, State], step: Any, plan: Plan, mesh: Mesh, steps: int | None) -> State:
    if isinstance(step, MuonStep):
        mine = {path: own for path, own in by_path.items() if path in step.layout.group_of}
        rest = {path: own for path, own in by_path.items() if path not in step.layout.group_of}
        adamw = _torch_state(rest, step.adamw, plan, mesh, steps)
        steps = _steps(by_path, [step.options, *step.adamw.options], steps)
        state = {**step.init(_zeros(plan, mesh)), "steps": steps, "adamw": {**adamw, "steps": steps}}
        if mine:
            leaves = _leaves(mine, step.layout, plan, mesh)
            state["momentum"] = {u: {k: own["momentum_buffer"] for k, own in each.items()} for u, each in leaves.items()}
        return state
    on_device = any(options.get("fused") or options.get("capturable") for options in step.options)
    leaves = _leaves(by_path, step.layout, plan, mesh, on_device)
    return {"steps": _steps(by_path, step.options, steps), "leaves": leaves}


def _leaves(
    by_path: dict[str, State], layout: ParamGroupLayout | None, plan: Plan, mesh: Mesh, on_device: bool = False
) -> dict[str, dict[str, State]]:
    """The state of each trainable shard: flat tensors, and scalars, which some kernels want on the device."""
    flat: dict[str, dict[str, State]] = {unit.name: {} for unit in plan.unit_list}
    shapes = {leaf.path: leaf.shape for leaf in plan.leaves}
    names = dict.fromkeys(name for own in by_path.values() for name in own)
    elementwise = {
        name: any(_is_elementwise(name, own[name], shapes[path]) for path, own in by_path.items() if name in own)
        for name in names
    }
    for unit, buffer in trainable_buffers(plan):
        flat[unit.name][buffer.key] = {}
        device = (torch.device("cpu") if unit.offload else mesh.device) if on_device else None
        for name in names:
            values = {leaf.path: by_path[leaf.path][name] for leaf in buffer.leaves if name in by_path.get(leaf.path, {})}
            if elementwise[name]:
                value = _flat(name, values, unit, buffer, mesh)
                flat[unit.name][buffer.key][name] = value if layout is None else layout.pick(value, buffer).clone()
            else:
                flat[unit.name][buffer.key][name] = _scalars(name, values, layout, by_path, device)
    return flat


def _flat(name: str, values: dict[str, Any], unit: UnitPlan, buffer: BufferPlan, mesh: Mesh) -> torch.Tensor:
    first = next(iter(values.values()), None)
    first = first[0] if isinstance(first, Sequence) and not isinstance(first, Piece) else first
    tensor = first.tensor if isinstance(first, Piece) else first
    dtype = dtype_name(tensor.dtype) if isinstance(tensor, torch.Tensor) else buffer.dtype
    return fill(unit, dataclasses.replace(buffer, dtype=dtype), mesh, values, f"{name!r} of the optimizer's state dict")


def _scalars(
    name: str,
    values: dict[str, Any],
    layout: ParamGroupLayout | None,
    by_path: dict[str, State],
    device: torch.device | None,
) -> Any:
    """The scalar of each group, which all its leaves in a buffer have to agree on."""
    found: dict[int, tuple[str, Any]] = {}
    # a shard also keeps the scalars of groups that it has no leaf of; those of another shard's leaves are the same
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
    if isinstance(value, Piece | list | tuple):
        return True
    if not isinstance(value, torch.Tensor) or tuple(value.shape) != shape:
        return False
    # of a parameter without dimensions both kinds look alike; these are what torch.optim counts
    return shape != () or name not in ("step", "mu_product", "eta", "mu")


def _steps(by_path: dict[str, State], options: Sequence[Mapping[str, Any]], steps: int | None) -> int:
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


def _paths(plan: Plan) -> list[str]:
    leaves = [leaf for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves]
    return [leaf.path for leaf in sorted(leaves, key=lambda leaf: leaf.index)]


def _zeros(plan: Plan, mesh: Mesh) -> dict[str, dict[str, torch.Tensor]]:
    return {unit.name: {b.key: empty_shard(unit, b, mesh) for b in unit.buffers if b.trainable} for unit in plan.unit_list}


def _by_path(state_dict: Mapping[str, Any], plan: Plan) -> tuple[dict[str, State], dict[str, Any]]:
    """The state of each trainable leaf by path, and the first parameter group's options."""
    leaves = [leaf for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves]
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
    there = [leaf for leaf in leaves if any(name in state for name in (leaf.path, *leaf.aliases))]
    counted = any("step" in own for own in state.values())  # what counts no steps may have nothing of some parameters
    what = "the optimizer's state dict must hold the state of every trainable leaf"
    found = found_leaves(state, leaves if counted or not there else there, what)
    return {leaf.path: dict(found.get(leaf.path, {})) for leaf in leaves}, options


def _flattened(state_dict: dict[str, Any]) -> dict[str, Any]:
    state = {f"state.{path}.{name}": v for path, own in state_dict["state"].items() for name, v in own.items()}
    options = {
        f"param_groups.{path}.{key}": value
        for group in state_dict["param_groups"]
        for path in group["params"]
        for key, value in group.items()
        if key != "params"
    }
    return {**state, **options}


def _unflattened(flat: Mapping[str, Any], leaves: Sequence[LeafSpec]) -> dict[str, Any]:
    if flat and not any(str(name).startswith(("state.", "param_groups.")) for name in flat):
        raise ValueError(
            f"an optimizer's state dict must have 'state' and 'param_groups', or names that begin so; found "
            f"{list(flat)[:3]}: get it with optimizer_to_state_dict, or torch's get_optimizer_state_dict"
        )
    state: dict[str, State] = {}
    options: dict[str, Any] = {}
    for leaf in leaves:
        for path in (leaf.path, *leaf.aliases):
            begin, first = f"state.{path}.", f"param_groups.{path}."
            own = {name.removeprefix(begin): value for name, value in flat.items() if name.startswith(begin)}
            state |= {path: own} if own else {}
            options = options or {n.removeprefix(first): v for n, v in flat.items() if n.startswith(first)}
    return {"state": state, "param_groups": [options]}
