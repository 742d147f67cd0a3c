"""Optimizer state by parameter name to state on shards; the inverse is in ``optimizer_state``."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_count
from funcshard.checkpoint.matrix_states import (
    broadcast_text,
    from_text,
    load_matrix_states,
    to_text,
)
from funcshard.checkpoint.optimizer_state import (
    ByBuffer,
    LeafStates,
    StateNode,
    map_state,
    nodes_of,
)
from funcshard.checkpoint.resharding import as_pieces
from funcshard.checkpoint.state_dict import (
    check_flags,
    check_no_local_leaf,
    find_leaves,
    is_full,
    shard_from_leaves,
)
from funcshard.checkpoint.stored_state import (
    by_buffer,
    each_leaf,
    first_of,
    fits_shard,
    join,
    name_in,
)
from funcshard.comm import Mesh
from funcshard.core import (
    LeafChecksums,
    check_mesh,
    check_source,
    empty_shard,
    on_every_rank,
)
from funcshard.plan import BufferPlan, Plan, UnitPlan, dtype_name, trainable_buffers
from funcshard.train import (
    MuonStep,
    ParamGroupLayout,
    PerMatrixStep,
    TorchStep,
    check_optimizer,
)


def optimizer_from_state_dict(
    state_dict: Mapping[str, Any],
    optimizer: Any,
    plan: Plan,
    mesh: Mesh,
    *,
    src: int | None = None,
    strict: bool = True,
    steps: int | None = None,
) -> Any:
    """Return this rank's optimizer state; ``optimizer_to_state_dict`` is the inverse.

    Arguments:
        state_dict: a dictionary from ``optimizer_to_state_dict`` or torch's
            ``get_optimizer_state_dict``, flattened or not, with full tensors, DTensors or pieces.
            Options in its parameter groups are ignored, because ``optimizer`` has its own.
        optimizer: your optimizer, as in ``optimizer_to_state_dict``.
        plan: your plan, to cut the state by.
        mesh: the ranks.
        src: as in ``from_state_dict``.
        strict: whether the state dict must hold the state of all trainable leaves and no others.
            With ``False``, leaves without state begin with the initial state, and other state is
            ignored.
        steps: number of steps taken, for schedules; by default the ``step`` of the state.

    Returns:
        The state, for ``optimizer.step`` or a ``TrainState``.

    Raises:
        ValueError: state of a leaf is missing, too much, or of another shape; the state is of
            another optimizer or other options; leaves that share a scalar or a count of steps
            disagree; ranks differ in a leaf that they share; or a schedule needs ``steps``. If one
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
    check_flags(strict=strict)
    if steps is not None:
        remedy = "pass the step of the TrainState that the state dict belongs to"
        steps = check_count(
            "steps", steps, 0, of="steps", none="for the step of the state", remedy=remedy
        )
    check_mesh(
        plan,
        mesh,
        {"the options of optimizer_from_state_dict": f"src={src!r}, strict={strict!r}"},
    )
    if src is not None:
        check_source(src, mesh)
        check_no_local_leaf(plan)
    checksums = LeafChecksums(
        mesh,
        "the optimizer's state dict",
        "load the same file on every rank, or pass src=0",
    )
    by_path: LeafStates = {}
    options: dict[str, Any] = {}
    state_text = ""
    loading = _Loading(plan=plan, mesh=mesh, src=src, strict=strict, steps=steps)
    with on_every_rank(mesh, checksums if src is None else None):
        check_optimizer(optimizer, plan)
        if src in (None, mesh.rank):
            by_path, options = _by_path(state_dict, plan, strict)
        if src is None:
            _add_checksums(checksums, by_path, {**options, "steps": steps}, plan)
            return loading.state(by_path, options, optimizer)
        if src == mesh.rank:
            _check_full(by_path)
            state_text = f"{to_text(by_path)}\n{to_text(options, with_elements=True)}"
    # Note: JSON escapes line breaks, so the only one is between the two texts.
    text_lines = broadcast_text(state_text, src, mesh).split("\n")
    if src != mesh.rank:
        by_path, options = (from_text(line, mesh.device) for line in text_lines)
    # From here on every rank has the same names, shapes and scalars, so every rank does the same.
    return loading.state(by_path, options, optimizer)


def _check_full(by_path: LeafStates) -> None:
    """Raise ``ValueError`` unless the state of each leaf consists of full tensors and numbers."""
    for path, leaf_state in by_path.items():
        for name, value in leaf_state.items():
            if not is_full(value) and not isinstance(value, int | float | None):
                raise ValueError(
                    "with src the optimizer's state dict must hold full tensors and numbers; found "
                    f"{type(value).__name__} for {name!r} of leaf {path!r}: leave src out, and pass "
                    "every rank's state dict"
                )


# --- to an optimizer's state ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loading:
    """The way from the state of each leaf to the state of this rank's shards.

    Attributes:
        plan: the plan of the shards.
        mesh: the ranks.
        src: the rank that has the full tensors; ``None`` if every rank does.
        strict: as in ``optimizer_from_state_dict``.
        steps: the same.
    """

    plan: Plan
    mesh: Mesh
    src: int | None
    strict: bool
    steps: int | None

    def state(self, by_path: LeafStates, options: Mapping[str, Any], optimizer: Any) -> Any:
        step = getattr(optimizer, "step", None)
        if isinstance(step, PerMatrixStep):
            matrix_paths = {matrix.holder.path for matrix in step.owners.matrices}
            others = {
                path: state for path, state in by_path.items() if path not in matrix_paths
            }
            return {
                "matrices": load_matrix_states(
                    by_path, step, self.mesh, src=self.src, strict=self.strict
                ),
                "others": step.others and self.state(others, options, step.others),
            }
        # Note: init tells the form of the state.
        zero_shards = by_buffer(
            self.plan,
            lambda unit, b: empty_shard(unit, b, self.mesh).zero_(),
            trainable_only=True,
        )
        initial_state = optimizer[0](zero_shards)
        nodes, _ = nodes_of(initial_state, optimizer, self.plan, self.mesh)

        def other(path: str, initial: Any) -> Any:
            if isinstance(step, TorchStep | MuonStep):
                return self.steps_taken(by_path, step)
            # Note: values that belong to no parameter, such as a count, are options of the one
            # group.
            return options.get(path, initial)

        return map_state(
            initial_state,
            self.plan,
            lambda path, _: self.shard_values(by_path, nodes[path]),
            other,
        )

    def shard_values(self, by_path: LeafStates, node: StateNode) -> ByBuffer:
        """Return the values of a node of the state, given one with its initial values."""
        group_of = node.layout.group_of
        states = {
            path: state for path, state in by_path.items() if state and path in group_of
        }
        if not states:
            return node.values
        names = [node.name]
        options: Sequence[Mapping[str, Any]] = ()
        if node.step is not None:
            options = node.step.options
            names = list(dict.fromkeys(name for state in states.values() for name in state))
        _check_names(states, node)
        flat_names = _flat_names(states, node, self.plan)
        # Why: with dampening, momentum of zeros is not the same as no state yet.
        is_dampened = any(group.get("dampening") for group in options)
        # Why: fused kernels need scalars on the device of the shard.
        on_device = any(group.get("fused") or group.get("capturable") for group in options)

        def values_of(unit: UnitPlan, buffer: BufferPlan) -> Any:
            entries = dict(node.entries(unit, buffer))
            paths = [leaf.path for leaf in buffer.leaves if leaf.path in group_of]
            begun_paths = [path for path in paths if path in states]
            # Note: with strict, a leaf without state gets zeros; find_leaves says if it may.
            new_paths = [path for path in paths if path not in states and not self.strict]
            if begun_paths and (is_dampened or not flat_names.issuperset(names)):
                # Why one group: dampening applies to a whole shard, whatever the groups of leaves.
                _check_groups(begun_paths, new_paths, {} if is_dampened else group_of)
            new_groups = {group_of[path] for path in new_paths}
            scalar_device = None  # where it is
            if on_device:
                scalar_device = torch.device("cpu") if unit.offload else self.mesh.device
            # Note: the optimizer makes the state of new leaves alone in its next step.
            for name in names if begun_paths or not new_paths else ():
                values = {
                    path: states[path][name] for path in begun_paths if name in states[path]
                }
                if name in flat_names:
                    entries[name] = self.flat_tensor(
                        name, values, entries.get(name), unit, buffer, node.layout
                    )
                    continue
                scalars = [
                    scalar.detach().to(scalar_device, copy=True)
                    if isinstance(scalar, torch.Tensor)
                    else scalar
                    for scalar in _scalars(name, values, states, node.layout, new_groups)
                ]
                entries[name] = tuple(scalars) if node.layout.count > 1 else scalars[0]
            return entries.get(node.name, entries)

        return by_buffer(self.plan, values_of, trainable_only=True)

    def flat_tensor(
        self,
        name: str,
        values: Mapping[str, Any],
        initial: torch.Tensor | None,
        unit: UnitPlan,
        buffer: BufferPlan,
        layout: ParamGroupLayout,
    ) -> torch.Tensor:
        """Return this rank's elements of an entry, in its own dtype."""
        # Note: moments may be in another dtype than their parameters. All leaves of a shard
        # have the same, so the first one tells.
        first_value = next(iter(values.values()), initial)
        if pieces := as_pieces(first_value):
            first_value = pieces[0].tensor
        if isinstance(first_value, torch.Tensor):
            buffer = dataclasses.replace(buffer, dtype=dtype_name(first_value.dtype))
        where = f"{name!r} of the optimizer's state dict"
        flat = shard_from_leaves(unit, buffer, self.mesh, values, where, src=self.src)
        if initial is not None:
            initial = layout.spread(initial, buffer)
            for leaf in buffer.leaves:
                if leaf.path not in values:
                    in_shard = buffer.part(leaf, self.mesh.shard.rank).in_shard
                    flat[in_shard] = initial[in_shard]
        # Note: an optimizer with groups keeps the elements of their leaves alone.
        return layout.pick(flat, buffer)

    def steps_taken(self, by_path: LeafStates, step: TorchStep | MuonStep) -> int:
        if self.steps is not None:
            return self.steps
        step_counts = [
            float(state["step"]) for state in by_path.values() if "step" in state
        ]
        if by_path and not step_counts and step.schedules:
            raise ValueError(
                "an option of this optimizer is a function of the number of steps taken, which this "
                "state dict does not hold: pass steps=, such as the step of the TrainState that it "
                "belongs to"
            )
        return int(max(step_counts, default=0))


def _flat_names(states: LeafStates, node: StateNode, plan: Plan) -> set[str]:
    """Return the entries with a value for each element of a leaf."""
    if node.step is None:
        # Why init's values tell: a count of steps has the shape of a leaf without dimensions.
        is_flat = any(
            fits_shard(
                node.values[unit.name][buffer.key], buffer, node.layout.numel(buffer)
            )
            for unit, buffer in trainable_buffers(plan)
        )
        return {node.name} if is_flat else set()
    known = node.step.known or {}
    shapes = {leaf.path: leaf.whole_shape for leaf in plan.leaves}
    return {
        name
        for path, leaf_state in states.items()
        for name, value in leaf_state.items()
        if known.get(
            name, bool(as_pieces(value)) or getattr(value, "shape", None) == shapes[path]
        )
    }


def _check_names(states: LeafStates, node: StateNode) -> None:
    """Raise ``ValueError`` unless each leaf's state has the names that the optimizer keeps."""
    names_by_group: dict[int, Set[str]] = {}
    for path, leaf_state in states.items():
        group_index = node.layout.group_of[path]
        # Note: the leaves of a group have the same names, and so the first one tells.
        needed: Set[str] = {node.name} if node.name else leaf_state.keys()
        needed = names_by_group.setdefault(group_index, needed)
        if needed - leaf_state.keys() or (not node.name and leaf_state.keys() - needed):
            raise _foreign(path, needed, leaf_state)
    if node.step is not None and (known := node.step.known) is not None:
        all_names = set[str]().union(*names_by_group.values())
        if known.keys() - all_names or (node.step.is_exact and all_names - known.keys()):
            raise _foreign(next(iter(states)), known, all_names)


def _foreign(path: str, needed: Iterable[str], names: Iterable[str]) -> ValueError:
    return ValueError(
        f"the optimizer's state dict must hold {sorted(needed) or 'nothing'} of leaf {path!r}, as "
        f"this optimizer keeps; found {sorted(names)}: pass the optimizer and the options that it "
        "was saved with, or begin with its init"
    )


def _check_groups(
    begun_paths: Sequence[str], new_paths: Sequence[str], group_of: Mapping[str, int]
) -> None:
    """Raise if a new leaf shares buffer and group with one that has state."""
    # Why reversed: of several leaves, the first one is named.
    begun_groups = {group_of.get(path): path for path in reversed(begun_paths)}
    for path in new_paths:
        if (begun_path := begun_groups.get(group_of.get(path))) is not None:
            raise ValueError(
                f"leaf {path!r} has no state, but it shares a flat buffer and a count of steps with "
                f"{begun_path!r}, which has state: give it a separate unit in make_plan, or, "
                f"without dampening, a separate group, as in groups=[{{'paths': [{path!r}]}}]"
            )


def _scalars(
    name: str,
    values: Mapping[str, Any],
    states: LeafStates,
    layout: ParamGroupLayout,
    new_groups: Container[int],
) -> list[Any]:
    """Return the scalar of each parameter group, which its leaves in a buffer must share.

    ``new_groups`` begin from scratch, so they have none.
    """
    # Why leaves elsewhere count: a shard also keeps the scalars of groups that it has no leaf of,
    # and the leaves of another shard have the same ones.
    elsewhere = {
        path: leaf_state[name]
        for path, leaf_state in states.items()
        if name in leaf_state and layout.group_of[path] not in new_groups
    }
    first_scalars: dict[int, tuple[str, Any]] = {}
    for path, value in {**values, **elsewhere}.items():
        first_path, first_value = first_scalars.setdefault(
            layout.group_of[path], (path, value)
        )
        if path in values and float(value) != float(first_value):
            raise ValueError(
                f"{name!r} must be the same for all leaves of a flat buffer that have the same "
                f"options; found {float(first_value)} for {first_path!r} and {float(value)} for {path!r}: "
                "give one a separate group, in groups="
            )
    return [
        first_scalars.get(group_index, ("", None))[1] for group_index in range(layout.count)
    ]


# --- from a state dict ----------------------------------------------------------------------------


def _by_path(
    state_dict: Mapping[str, Any], plan: Plan, strict: bool
) -> tuple[LeafStates, dict[str, Any]]:
    """Return the state of each trainable leaf, and the first parameter group's options."""
    leaves = [leaf for _, buffer, leaf in each_leaf(plan) if buffer.trainable]
    names = dict.fromkeys(name for leaf in leaves for name in leaf.names)
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"an optimizer's state dict must be a dictionary; found {type(state_dict).__name__}: "
            "pass what optimizer_to_state_dict returned, or torch.load(path, weights_only=True)"
        )
    # Note: torch's flatten_optimizer_state_dict gives one dictionary of dotted names.
    if not {"state", "param_groups"} <= state_dict.keys():
        state_dict = _unflattened(state_dict, names)
    state, param_groups = state_dict["state"], state_dict["param_groups"]
    # Note: torch numbers parameters in optimizer.state_dict(), in an order that a plan can't know.
    if any(isinstance(name, int) for name in state):
        raise ValueError(
            "an optimizer's state dict must name parameters; found numbers, as in "
            "optimizer.state_dict(): get it with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)"
        )
    first_group: Mapping[str, Any] = next(iter(param_groups), {})
    options = {key: value for key, value in first_group.items() if key != "params"}
    if not state:
        return {}, options
    # Why leaves may be missing: an optimizer that counts no steps may keep nothing of some
    # parameters.
    counts_steps = any("step" in leaf_state for leaf_state in state.values())
    held_leaves = [leaf for leaf in leaves if name_in(state, leaf) is not None]
    if not held_leaves or (counts_steps and strict):
        held_leaves = leaves
    rule_text = "the optimizer's state dict must hold the state of every trainable leaf"
    frozen_hint = (
        "; or the leaves were frozen then: strict=False begins them with the optimizer's initial "
        "state"
    )
    states_by_path = find_leaves(state, held_leaves, rule_text, frozen_hint * strict)
    # Note: entries without any state, as torch writes for frozen parameters, do no harm.
    unknown_names = [name for name in state if state[name] and name not in names]
    if strict and unknown_names:
        raise ValueError(
            "the optimizer's state dict must hold state of the trainable leaves only; found state "
            f"of {first_of(unknown_names)}, which are frozen now, or not in the plan: strict=False "
            "leaves it out"
        )
    return {path: dict(leaf_state) for path, leaf_state in states_by_path.items()}, options


def _unflattened(flat: Mapping[str, Any], names: Mapping[str, None]) -> dict[str, Any]:
    parts: dict[str, LeafStates] = {"state": {}, "param_groups": {}}
    for name, value in flat.items():
        part, _, path_and_key = str(name).partition(".")
        # Why known names: paths have dots, and an entry may have dots too, such as TorchOpt's 0.mu.
        # Of an unknown path, the entry is what follows the last dot.
        unknown_path = path_and_key.rpartition(".")[0]
        path = next((p for p in tree.upwards(path_and_key) if p in names), unknown_path)
        if part in parts and path:
            parts[part].setdefault(path, {})[path_and_key[len(path) + 1 :]] = value
    groups = parts["param_groups"]
    if names and not (parts["state"] or groups):
        raise ValueError(
            "an optimizer's state dict must have 'state' and 'param_groups', or names that begin "
            f"with them; found {list(flat)[:3]}: get it with optimizer_to_state_dict, or torch's "
            "get_optimizer_state_dict; if rank0_only left it empty, pass src=0"
        )
    options = next((groups[path] for path in names if path in groups), {})
    return {"state": parts["state"], "param_groups": [options]}


def _add_checksums(
    checksums: LeafChecksums,
    by_path: LeafStates,
    others: Mapping[str, Any],
    plan: Plan,
) -> None:
    """Add the full tensors and scalars of a state dict, which ranks must agree on."""
    local_axes = {leaf.path: buffer.own_axes(leaf) for _, buffer, leaf in each_leaf(plan)}
    for path, leaf_state in [*by_path.items(), ("", others)]:
        for name, value in leaf_state.items():
            if isinstance(value, int | float):
                # Why float64: it holds every count of steps that occurs.
                value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
            if is_full(value):
                checksums.add(join(path, name), value, local_axes.get(path, ()))
