"""Optimizer state by parameter name to state on shards; the inverse is in ``optimizer_state``."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils.options import check_count
from funcshard.checkpoint.every_rank import on_every_rank
from funcshard.checkpoint.functional_optimizer import ByBuffer, map_state, partition_state
from funcshard.checkpoint.matrix_states import load_matrix_states
from funcshard.checkpoint.optimizer_message import broadcast_text, decode_state, encode_state
from funcshard.checkpoint.optimizer_state import LeafState, group_layout
from funcshard.checkpoint.pieces import Piece, as_pieces
from funcshard.checkpoint.state_dict import (
    check_flags,
    check_no_local_leaf,
    find_leaves,
    is_full,
    shard_from_leaves,
)
from funcshard.checkpoint.stored_state import first_of, fits_shard, name_in
from funcshard.comm import Mesh
from funcshard.core import LeafChecksums, check_mesh, check_source, zero_shard
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan, dtype_name, own_axes
from funcshard.train import (
    KnownEntries,
    MuonStep,
    PairStep,
    ParamGroupLayout,
    PerMatrixStep,
    TorchOptimizer,
    check_optimizer,
    learn_entries,
    trainable_buffers,
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
    check: bool = True,
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
        check: whether ranks compare checksums, as in ``shard``; not with ``src``.

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
        check_source(src, mesh)
        check_no_local_leaf(plan)
    checksums = LeafChecksums(
        mesh, "the optimizer's state dict", "load the same file on every rank, or pass src=0"
    )
    by_path: dict[str, LeafState] = {}
    options: dict[str, Any] = {}
    state, state_text = None, ""
    loading = _Loading(plan=plan, mesh=mesh, src=src, strict=strict, steps=steps)
    with on_every_rank(mesh, checksums if src is None else None):
        check_optimizer(optimizer, plan)
        if src in (None, mesh.rank):
            by_path, options = _by_path(state_dict, plan, strict)
        if src is None and check:
            _add_checksums(checksums, by_path, {**options, "steps": steps}, plan)
        if isinstance(optimizer, TorchOptimizer) and not isinstance(optimizer.step, PerMatrixStep):
            options = {}  # it has its own
        if src is None:
            state = loading.state(by_path, options, optimizer)
        elif src == mesh.rank:
            state_text = encode_state(by_path, options, plan)
    if src is None:
        return state
    state_text = broadcast_text(state_text, src, mesh)
    if src != mesh.rank:
        by_path, options = decode_state(state_text, mesh.device)
    # From here on every rank has the same names, shapes and scalars, so every rank does the same.
    return loading.state(by_path, options, optimizer)


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

    def state(
        self, by_path: dict[str, LeafState], options: Mapping[str, Any], optimizer: Any
    ) -> Any:
        step: Any = getattr(optimizer, "step", None)
        if not isinstance(optimizer, TorchOptimizer) or isinstance(step, PairStep):
            layout = group_layout(step and step.layout, self.plan, self.mesh)
            return self.pair_state(by_path, options, optimizer[0], layout)
        if isinstance(step, PerMatrixStep):
            paths = {matrix.holder.path for matrix in step.owners.matrices}
            others = {path: state for path, state in by_path.items() if path not in paths}
            matrices = {path: state for path, state in by_path.items() if path in paths}
            return {
                "matrices": load_matrix_states(
                    matrices, step, self.mesh, src=self.src, strict=self.strict
                ),
                "others": step.others and self.state(others, options, step.others),
            }
        if isinstance(optimizer.step, MuonStep):
            return self.muon_state(by_path, optimizer.step)
        return self.torch_state(by_path, optimizer.step)

    def torch_state(self, by_path: dict[str, LeafState], step: Any) -> dict[str, Any]:
        _check_names(by_path, step)
        flat_names = _elementwise_names(by_path, self.plan)
        group_ranges = group_layout(step.layout, self.plan, self.mesh)
        shard_states = self.by_buffer(by_path, group_ranges, flat_names, step.options)
        return {"steps": self.steps_taken(by_path, step.options), "leaves": shard_states}

    def muon_state(self, by_path: dict[str, LeafState], step: MuonStep) -> dict[str, Any]:
        """Return the state of ``muon``: its momentum, and AdamW's of other leaves."""
        _check_names(by_path, step)
        is_matrix = step.layout.group_of.__contains__
        matrix_states = {path: state for path, state in by_path.items() if is_matrix(path)}
        other_states = {path: state for path, state in by_path.items() if not is_matrix(path)}
        # Note: one count serves both, because every step updates matrices and other leaves.
        step_count = self.steps_taken(by_path, [step.options, *step.adamw.options])
        # Note: AdamW has no count of its own in the state dict, and gets Muon's.
        adamw_state = self.torch_state(other_states, step.adamw) | {"steps": step_count}
        momentum = step.init(self.zero_shards())["momentum"]
        if any(matrix_states.values()):
            # Why strict: momentum is zeros before the first step, so leaves without it need no
            # care.
            strict_loading = dataclasses.replace(self, strict=True)
            shard_states = strict_loading.by_buffer(matrix_states, step.layout, {"momentum_buffer"})
            momentum = {
                unit: {key: shard_state["momentum_buffer"] for key, shard_state in shards.items()}
                for unit, shards in shard_states.items()
            }
        return {"steps": step_count, "momentum": momentum, "adamw": adamw_state}

    def pair_state(
        self,
        by_path: dict[str, LeafState],
        options: Mapping[str, Any],
        init: Callable[[Any], Any],
        layout: ParamGroupLayout,
    ) -> Any:
        # Note: init tells the structure of the state; names of entries are paths in it.
        initial_state = init(self.zero_shards())
        if not by_path:
            return initial_state
        initial_values, _ = partition_state(initial_state, self.plan)
        entry_names = sorted({name for leaf_state in by_path.values() for name in leaf_state})
        if lost_names := [name for name in initial_values if name not in entry_names]:
            raise ValueError(
                f"the optimizer's state dict must hold {lost_names[0]!r}; found {entry_names}: the state "
                "dict is of another optimizer"
            )
        loaded_values: dict[str, ByBuffer] = {}
        for name in sorted(initial_values):
            with_name = {
                path: {name: leaf_state[name]}
                for path, leaf_state in by_path.items()
                if name in leaf_state
            }
            # Why init's values tell: a count of steps has the shape of a leaf without dimensions.
            is_flat = any(
                fits_shard(
                    initial_values[name][unit.name][buffer.key], buffer, layout.numel(buffer)
                )
                for unit, buffer in trainable_buffers(self.plan)
            )
            states = self.by_buffer(with_name, layout, {name} if is_flat else set())
            loaded_values[name] = self._with_initial(
                name, states, initial_values[name], with_name, layout
            )
        # Note: leaves that belong to no parameter, such as a count, are in the one group's options.
        return map_state(initial_state, self.plan, lambda path, _: loaded_values[path], options.get)

    def _with_initial(
        self,
        name: str,
        states: ByBuffer,
        initial: ByBuffer,
        with_name: Mapping[str, LeafState],
        layout: ParamGroupLayout,
    ) -> ByBuffer:
        """Return an entry of each shard, with initial values of leaves that lack it."""
        shard_values: dict[str, dict[str, Any]] = {unit: {} for unit in states}
        for unit, buffer in trainable_buffers(self.plan):
            shard_state, first_value = states[unit.name][buffer.key], initial[unit.name][buffer.key]
            value = shard_values[unit.name][buffer.key] = shard_state.get(name, first_value)
            if self.strict or not isinstance(value, torch.Tensor) or not value.ndim:
                continue
            value, first_value = (layout.spread(flat, buffer) for flat in (value, first_value))
            for leaf in buffer.leaves:
                if leaf.path not in with_name:
                    in_shard = buffer.part(leaf, self.mesh.shard.rank).in_shard
                    value[in_shard] = first_value[in_shard]
            shard_values[unit.name][buffer.key] = layout.pick(value, buffer)
        return shard_values

    def by_buffer(
        self,
        by_path: dict[str, LeafState],
        layout: ParamGroupLayout,
        flat_names: Set[str],
        group_options: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, dict[str, LeafState]]:
        """Return the state of each trainable shard: flat tensors, and scalars.

        Arguments:
            by_path: the state of each leaf.
            layout: where the parameter groups lie in the shards.
            flat_names: the entries with a value for each element of a leaf.
            group_options: the options of each parameter group.
        """
        # Why: fused kernels need scalars on the device of the shard.
        on_device = any(group.get("fused") or group.get("capturable") for group in group_options)
        # Why: with dampening, momentum of zeros is not the same as no state yet.
        is_dampened = any(group.get("dampening") for group in group_options)
        shard_states: dict[str, dict[str, LeafState]] = {name: {} for name in self.plan.units}
        entry_names = dict.fromkeys(name for leaf_state in by_path.values() for name in leaf_state)
        for unit, buffer in trainable_buffers(self.plan):
            shard_state = shard_states[unit.name][buffer.key] = {}
            paths = [leaf.path for leaf in buffer.leaves if leaf.path in layout.group_of]
            begun_paths = [path for path in paths if by_path.get(path)]
            # Note: with strict, a leaf without state gets zeros; find_leaves says if it may.
            new_paths = [path for path in paths if not by_path.get(path) and not self.strict]
            if new_paths and not begun_paths:
                continue  # the optimizer makes the state in its next step
            if new_paths and (is_dampened or not entry_names.keys() <= flat_names):
                # Why one group: dampening applies to a whole shard, whatever the groups of leaves.
                group_of = dict.fromkeys(paths, 0) if is_dampened else layout.group_of
                _check_groups(begun_paths, new_paths, group_of)
            # Note: the optimizer makes the scalars of such a group in its next step.
            new_groups = {layout.group_of[path] for path in new_paths}
            scalar_device = None  # where it is
            if on_device:
                scalar_device = torch.device("cpu") if unit.offload else self.mesh.device
            for name in entry_names:
                leaf_values = {
                    leaf.path: by_path[leaf.path][name]
                    for leaf in buffer.leaves
                    if name in by_path.get(leaf.path, {})
                }
                if name in flat_names:
                    flat = self.flat_tensor(name, leaf_values, unit, buffer)
                    # Note: an optimizer with groups keeps the elements of their leaves alone.
                    shard_state[name] = layout.pick(flat, buffer)
                    continue
                group_scalars = _scalars(name, leaf_values, layout, by_path, new_groups)
                for group_index, scalar in enumerate(group_scalars):
                    if isinstance(scalar, torch.Tensor):
                        group_scalars[group_index] = scalar.detach().to(scalar_device, copy=True)
                shard_state[name] = tuple(group_scalars) if layout.count > 1 else group_scalars[0]
        return shard_states

    def flat_tensor(
        self, name: str, values: dict[str, Any], unit: UnitPlan, buffer: BufferPlan
    ) -> torch.Tensor:
        """Return this rank's shard of an entry, in its own dtype."""
        # Note: moments may be in another dtype than their parameters. All leaves of a shard
        # have the same, so the first one tells; of none, the entry is zeros in the buffer's dtype.
        first_value = next(iter(values.values()), None)
        if pieces := as_pieces(first_value):
            first_value = pieces[0].tensor
        if isinstance(first_value, torch.Tensor):
            buffer = dataclasses.replace(buffer, dtype=dtype_name(first_value.dtype))
        where = f"{name!r} of the optimizer's state dict"
        return shard_from_leaves(unit, buffer, self.mesh, values, where, src=self.src)

    def steps_taken(
        self, by_path: dict[str, LeafState], group_options: Sequence[Mapping[str, Any]]
    ) -> int:
        if self.steps is not None:
            return self.steps
        step_counts = [float(state["step"]) for state in by_path.values() if "step" in state]
        if step_counts:
            return int(max(step_counts))
        schedules = [value for group in group_options for value in group.values()]
        if by_path and any(map(callable, schedules)):
            raise ValueError(
                "an option of this optimizer is a function of the number of steps taken, which this "
                "state dict does not hold: pass steps=, such as the step of the TrainState that it "
                "belongs to"
            )
        return 0

    def zero_shards(self) -> dict[str, dict[str, torch.Tensor]]:
        shards: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.plan.units}
        for unit, buffer in trainable_buffers(self.plan):
            shards[unit.name][buffer.key] = zero_shard(unit, buffer, self.mesh)
        return shards


def _elementwise_names(by_path: Mapping[str, LeafState], plan: Plan) -> set[str]:
    """Return the entries of ``torch.optim`` with a value for each element of a leaf."""
    shapes = {leaf.path: leaf.whole_shape for leaf in plan.leaves}
    flat_names = set()
    for path, leaf_state in by_path.items():
        for name, value in leaf_state.items():
            # Why names: for a parameter without dimensions, scalars have its shape too.
            # Note: the test of a shape cannot tell elements from scalars there.
            is_scalar = shapes[path] == () and name in ("step", "mu_product", "eta", "mu")
            has_shape = isinstance(value, torch.Tensor) and value.shape == shapes[path]
            if isinstance(value, Piece | list | tuple) or (has_shape and not is_scalar):
                flat_names.add(name)
    return flat_names


def _check_groups(
    begun_paths: Sequence[str], new_paths: Sequence[str], group_of: Mapping[str, int]
) -> None:
    """Raise if a new leaf shares buffer and group with one that has state."""
    # Why reversed: of several leaves, the first one is named.
    begun_groups = {group_of[path]: path for path in reversed(begun_paths)}
    for path in new_paths:
        if group_of[path] in begun_groups:
            raise ValueError(
                f"leaf {path!r} has no state and begins anew, but it shares a flat buffer and a "
                f"parameter group with {begun_groups[group_of[path]]!r}, which has state: they "
                "would share one count of steps, and dampening would apply to both: give it a unit "
                "of its own in make_plan, or, without dampening, a group of its own, as in "
                f'groups=[{{"paths": [{path!r}]}}]'
            )


def _scalars(
    name: str,
    values: dict[str, Any],
    layout: ParamGroupLayout,
    by_path: dict[str, LeafState],
    new_groups: set[int],
) -> list[Any]:
    """Return the scalar of each parameter group, which its leaves in a buffer must share.

    ``new_groups`` begin from scratch, so they have none.
    """
    first_scalars: dict[int, tuple[str, Any]] = {}
    for path, value in values.items():
        first_path, first_value = first_scalars.setdefault(layout.group_of[path], (path, value))
        if float(value) != float(first_value):
            raise ValueError(
                f"{name!r} must be the same for all leaves of a flat buffer that have the same "
                f"options; found {float(first_value)} for {first_path!r} and {float(value)} for {path!r}: "
                "give one a group of its own, in groups="
            )
    # Why leaves elsewhere count: a shard also keeps the scalars of groups that it has no leaf of,
    # and the leaves of another shard have the same ones.
    for path, leaf_state in by_path.items():
        group_index = layout.group_of.get(path)
        if name in leaf_state and group_index is not None and group_index not in new_groups:
            first_scalars.setdefault(group_index, (path, leaf_state[name]))
    return [first_scalars.get(group_index, ("", None))[1] for group_index in range(layout.count)]


# --- from a state dict ----------------------------------------------------------------------------


def _by_path(
    state_dict: Mapping[str, Any], plan: Plan, strict: bool
) -> tuple[dict[str, LeafState], dict[str, Any]]:
    """Return the state of each trainable leaf, and the first parameter group's options."""
    trainable_leaves = [leaf for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves]
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"an optimizer's state dict must be a dictionary; found {type(state_dict).__name__}: "
            "pass what optimizer_to_state_dict returned, or torch.load(path, weights_only=True)"
        )
    if not state_dict and trainable_leaves:
        raise ValueError(
            "an optimizer's state dict must have 'state' and 'param_groups'; found an empty one, "
            "as rank0_only leaves it on all ranks but one: pass src=0 to take the state dict of "
            "rank 0, or take it without rank0_only"
        )
    # Note: torch's flatten_optimizer_state_dict gives one dictionary of dotted names.
    if not {"state", "param_groups"} <= state_dict.keys():
        state_dict = _unflattened(state_dict, trainable_leaves)
    state, param_groups = state_dict["state"], state_dict["param_groups"]
    # Note: torch numbers parameters in optimizer.state_dict(), in an order that a plan can't know.
    if any(isinstance(name, int) for name in state):
        raise ValueError(
            "an optimizer's state dict must name parameters; found numbers, as in "
            "optimizer.state_dict(): get it with "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)"
        )
    first_group = param_groups[0] if param_groups else {}
    options = {key: value for key, value in first_group.items() if key != "params"}
    if not state:
        return {}, options
    # Why leaves may be missing: an optimizer that counts no steps may keep nothing of some
    # parameters.
    counts_steps = any("step" in leaf_state for leaf_state in state.values())
    needed_leaves = [leaf for leaf in trainable_leaves if name_in(state, leaf) is not None]
    if (counts_steps and strict) or not needed_leaves:
        needed_leaves = trainable_leaves
    rule_text = "the optimizer's state dict must hold the state of every trainable leaf"
    anew_hint = (
        "; or the leaves were frozen then: strict=False begins them with the optimizer's initial "
        "state"
    )
    states_by_path = find_leaves(state, needed_leaves, rule_text, anew_hint if strict else "")
    # Note: entries without any state, as torch writes for frozen parameters, do no harm.
    known_names = {name for leaf in trainable_leaves for name in (leaf.path, *leaf.aliases)}
    unknown_names = [name for name in state if state[name] and name not in known_names]
    if strict and unknown_names:
        raise ValueError(
            "the optimizer's state dict must hold state of the trainable leaves only; found state "
            f"of {first_of(unknown_names)}, which are frozen now, or not in the plan: strict=False "
            "leaves it out"
        )
    paths = [leaf.path for leaf in trainable_leaves]
    return {path: dict(states_by_path.get(path, {})) for path in paths}, options


def _unflattened(flat: Mapping[str, Any], leaves: Sequence[LeafSpec]) -> dict[str, Any]:
    if flat and not any(str(name).startswith(("state.", "param_groups.")) for name in flat):
        raise ValueError(
            "an optimizer's state dict must have 'state' and 'param_groups', or names that begin "
            f"with them; found {list(flat)[:3]}: get it with optimizer_to_state_dict, or torch's "
            "get_optimizer_state_dict"
        )
    known_paths = dict.fromkeys(path for leaf in leaves for path in (leaf.path, *leaf.aliases))
    state_parts: dict[str, dict[str, LeafState]] = {"state": {}, "param_groups": {}}
    for name, value in flat.items():
        part, _, path_and_key = str(name).partition(".")
        # Why known paths: paths have dots, and an entry may have dots too, such as TorchOpt's 0.mu.
        # Of an unknown path, the entry is what follows the last dot.
        path, _, key = path_and_key.rpartition(".")
        for dot in re.finditer(r"\.", path_and_key):
            if path_and_key[: dot.start()] in known_paths:
                path, key = path_and_key[: dot.start()], path_and_key[dot.end() :]
                break
        if part in state_parts and "." in path_and_key:
            state_parts[part].setdefault(path, {})[key] = value
    groups = state_parts["param_groups"]
    options = next((groups[path] for path in known_paths if path in groups), {})
    return {"state": state_parts["state"], "param_groups": [options]}


# --- checks ---------------------------------------------------------------------------------------


def _add_checksums(
    checksums: LeafChecksums,
    by_path: Mapping[str, LeafState],
    others: Mapping[str, Any],
    plan: Plan,
) -> None:
    """Add the full tensors and scalars of a state dict, which ranks must agree on."""

    rows: list[tuple[str, Any, tuple[str, ...]]] = [
        (name, value, ()) for name, value in others.items()
    ]
    for _, buffer in trainable_buffers(plan):
        for leaf in buffer.leaves:
            local_axes = own_axes(buffer.local, leaf.cuts)
            leaf_state = by_path.get(leaf.path, {})
            rows += [(f"{leaf.path}.{name}", leaf_state[name], local_axes) for name in leaf_state]
    for name, value, local_axes in rows:
        if isinstance(value, int | float):
            # Why float64: it holds every count of steps that occurs.
            value = torch.tensor(float(value), dtype=torch.float64, device="cpu")
        if is_full(value):
            checksums.add(name, value, local_axes)


def _check_names(by_path: dict[str, LeafState], step: Any) -> None:
    """Raise ``ValueError`` unless each leaf's state has the names that the optimizer keeps."""
    if isinstance(step, MuonStep):
        known_entries = KnownEntries({"momentum_buffer": True}, exact=True)
        entries_of_groups = [known_entries] * step.layout.count
    elif step.known is not None and step.cls.__module__.startswith("torch.optim."):
        known_entries = step.known
        entries_of_groups = [
            learn_entries(step.cls, step.options, [group_index]) or known_entries
            for group_index in range(len(step.options))
        ]
    else:
        return  # a class of the user's own may keep other names for other leaves
    group_of = dict.fromkeys(by_path, 0) if step.layout is None else step.layout.group_of
    for path, leaf_state in by_path.items():
        # Why not without state: some optimizers keep none of a leaf that got no gradient.
        if path not in group_of or not leaf_state:
            continue
        group_entries = entries_of_groups[group_of[path]].flat
        missing_names = sorted(group_entries.keys() - leaf_state.keys())
        unexpected = sorted(
            name
            for name in leaf_state.keys() - known_entries.flat.keys()
            if known_entries.exact and leaf_state[name] is not None
        )
        if missing_names or unexpected:
            raise ValueError(
                f"the optimizer's state dict must hold {sorted(group_entries) or 'nothing'} "
                f"of leaf {path!r}, as this optimizer keeps; found {sorted(leaf_state)}: it is of another "
                "optimizer, or of other options; make the optimizer as it was made then, or begin "
                "with its init"
            )
