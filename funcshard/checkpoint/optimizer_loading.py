"""Optimizer state by parameter name to state on shards; the inverse is in ``optimizer_state``.

The state dict may be on every rank, or, with ``src``, on one rank alone. It may lack the state of
leaves that were frozen when it was saved: with ``strict=False`` these begin with the optimizer's
initial state, and state of leaves that the plan does not train is left out.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import check_count
from funcshard.checkpoint.every_rank import on_every_rank
from funcshard.checkpoint.functional_optimizer import ByBuffer, map_state, partition_state
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
from funcshard.checkpoint.stored_state import fits_shard, name_in
from funcshard.comm import Mesh
from funcshard.core import LeafChecksums, check_mesh, check_source, zero_shard
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan, dtype_name, own_axes
from funcshard.train import (
    KnownEntries,
    MuonStep,
    ParamGroupLayout,
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
        if isinstance(optimizer, TorchOptimizer):
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
        src: the rank that has the full tensors of leaves; ``None`` if every rank has them.
        strict: ``False`` leaves a shard without any state as the optimizer's ``init`` does.
        steps: number of steps taken, or ``None`` for that of the state.
    """

    plan: Plan
    mesh: Mesh
    src: int | None
    strict: bool
    steps: int | None

    def state(
        self, by_path: dict[str, LeafState], options: Mapping[str, Any], optimizer: Any
    ) -> Any:
        """Return the state of an optimizer from the state of each leaf."""
        if not isinstance(optimizer, TorchOptimizer):
            return self.pair_state(by_path, options, optimizer[0])
        if isinstance(optimizer.step, MuonStep):
            return self.muon_state(by_path, optimizer.step)
        return self.torch_state(by_path, optimizer.step)

    def torch_state(self, by_path: dict[str, LeafState], step: Any) -> dict[str, Any]:
        """Return the state of a ``torch.optim`` class."""
        _check_names(by_path, step)
        flat_names = _elementwise_names(by_path, self.plan)
        layout = group_layout(step.layout, self.plan, self.mesh)
        leaves = self.by_buffer(by_path, layout, flat_names, step.options)
        return {"steps": self.steps_taken(by_path, step.options), "leaves": leaves}

    def muon_state(self, by_path: dict[str, LeafState], step: MuonStep) -> dict[str, Any]:
        """Return the state of ``muon``: momentum of its matrices, and AdamW's of other leaves."""
        _check_names(by_path, step)
        is_matrix = step.layout.group_of.__contains__
        matrices = {path: state for path, state in by_path.items() if is_matrix(path)}
        others = {path: state for path, state in by_path.items() if not is_matrix(path)}
        steps = self.steps_taken(by_path, [step.options, *step.adamw.options])
        adamw = self.torch_state(others, step.adamw) | {"steps": steps}
        momentum = step.init(self.zero_shards())["momentum"]
        if any(matrices.values()):
            # Why strict: momentum is zeros before the first step, so leaves without it need no
            # care.
            strictly = dataclasses.replace(self, strict=True)
            leaves = strictly.by_buffer(matrices, step.layout, {"momentum_buffer"})
            momentum = {
                unit: {key: shard_state["momentum_buffer"] for key, shard_state in shards.items()}
                for unit, shards in leaves.items()
            }
        return {"steps": steps, "momentum": momentum, "adamw": adamw}

    def pair_state(
        self, by_path: dict[str, LeafState], options: Mapping[str, Any], init: Callable[[Any], Any]
    ) -> Any:
        """Return the state of an ``(init, update)`` pair."""
        like = init(self.zero_shards())
        if not by_path:
            return like
        initial, _ = partition_state(like, self.plan)
        names = sorted({name for leaf_state in by_path.values() for name in leaf_state})
        if lost_names := [name for name in initial if name not in names]:
            raise ValueError(
                f"the optimizer's state dict must hold {lost_names[0]!r}; found {names}: the state "
                "dict is of another optimizer"
            )
        layout = group_layout(None, self.plan, self.mesh)
        loaded: dict[str, ByBuffer] = {}
        for name in sorted(initial):
            with_name = {
                path: {name: leaf_state[name]}
                for path, leaf_state in by_path.items()
                if name in leaf_state
            }
            # Why init's values tell: a count of steps has the shape of a leaf without dimensions.
            is_flat = any(
                fits_shard(initial[name][unit.name][buffer.key], buffer)
                for unit, buffer in trainable_buffers(self.plan)
            )
            states = self.by_buffer(with_name, layout, {name} if is_flat else set())
            loaded[name] = self._with_initial(name, states, initial[name], with_name)
        return map_state(like, self.plan, lambda path, _: loaded[path], options.get)

    def _with_initial(
        self, name: str, states: ByBuffer, initial: ByBuffer, with_name: Mapping[str, LeafState]
    ) -> ByBuffer:
        """Return an entry of each shard, with the initial values of leaves that lack it."""
        shard_values: dict[str, dict[str, Any]] = {unit: {} for unit in states}
        for unit, buffer in trainable_buffers(self.plan):
            shard_state, first = states[unit.name][buffer.key], initial[unit.name][buffer.key]
            value = shard_values[unit.name][buffer.key] = shard_state.get(name, first)
            if self.strict or not isinstance(value, torch.Tensor) or not value.ndim:
                continue
            for leaf in buffer.leaves:
                if leaf.path not in with_name:
                    in_shard = buffer.part(leaf, self.mesh.shard.rank).in_shard
                    value[in_shard] = first[in_shard]
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
            flat_names: the entries that have a value for each element of a leaf.
            group_options: the options of each parameter group.
        """
        # Why: fused kernels need scalars on the device of the shard.
        on_device = any(group.get("fused") or group.get("capturable") for group in group_options)
        # Why: with dampening, momentum of zeros is not the same as no state yet.
        dampened = any(group.get("dampening") for group in group_options)
        states: dict[str, dict[str, LeafState]] = {name: {} for name in self.plan.units}
        names = dict.fromkeys(name for leaf_state in by_path.values() for name in leaf_state)
        for unit, buffer in trainable_buffers(self.plan):
            shard_state = states[unit.name][buffer.key] = {}
            paths = [leaf.path for leaf in buffer.leaves if leaf.path in layout.group_of]
            begun_paths = [path for path in paths if by_path.get(path)]
            new_paths = [path for path in paths if not by_path.get(path) and not self.strict]
            if new_paths and not begun_paths:
                continue  # the optimizer makes the state in its next step
            if new_paths and (dampened or not names.keys() <= flat_names):
                # Why one group: dampening applies to a whole shard, whatever the groups of leaves.
                group_of = dict.fromkeys(paths, 0) if dampened else layout.group_of
                _check_groups(begun_paths, new_paths, group_of)
            new_groups = {layout.group_of[path] for path in new_paths}
            device = torch.device("cpu") if unit.offload else self.mesh.device
            for name in names:
                values = {
                    leaf.path: by_path[leaf.path][name]
                    for leaf in buffer.leaves
                    if name in by_path.get(leaf.path, {})
                }
                if name in flat_names:
                    flat = self.flat_tensor(name, values, unit, buffer)
                    shard_state[name] = layout.pick(flat, buffer)
                    continue
                scalars = _scalars(name, values, layout, by_path, new_groups)
                scalars = [_copied(scalar, device if on_device else None) for scalar in scalars]
                shard_state[name] = tuple(scalars) if layout.count > 1 else scalars[0]
        return states

    def flat_tensor(
        self, name: str, values: dict[str, Any], unit: UnitPlan, buffer: BufferPlan
    ) -> torch.Tensor:
        """Return this rank's shard of an entry, in the entry's own dtype."""
        tensor = next(iter(values.values()), None)
        if pieces := as_pieces(tensor):
            tensor = pieces[0].tensor
        if isinstance(tensor, torch.Tensor):
            buffer = dataclasses.replace(buffer, dtype=dtype_name(tensor.dtype))
        where = f"{name!r} of the optimizer's state dict"
        return shard_from_leaves(unit, buffer, self.mesh, values, where, src=self.src)

    def steps_taken(
        self, by_path: dict[str, LeafState], group_options: Sequence[Mapping[str, Any]]
    ) -> int:
        """Return ``steps`` if given, else the largest ``step`` of a leaf."""
        if self.steps is not None:
            return self.steps
        counts = [float(state["step"]) for state in by_path.values() if "step" in state]
        if counts:
            return int(max(counts))
        schedules = [value for group in group_options for value in group.values()]
        if by_path and any(map(callable, schedules)):
            raise ValueError(
                "an option of this optimizer is a function of the number of steps taken, which this "
                "state dict does not hold: pass steps=, such as the step of the TrainState that it "
                "belongs to"
            )
        return 0

    def zero_shards(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return trainable shards for an optimizer's ``init``."""
        shards: dict[str, dict[str, torch.Tensor]] = {name: {} for name in self.plan.units}
        for unit, buffer in trainable_buffers(self.plan):
            shards[unit.name][buffer.key] = zero_shard(unit, buffer, self.mesh)
        return shards


def _elementwise_names(by_path: Mapping[str, LeafState], plan: Plan) -> set[str]:
    """Return the entries of ``torch.optim`` that have a value for each element of a leaf."""
    shapes = {leaf.path: leaf.whole_shape for leaf in plan.leaves}
    names = set()
    for path, leaf_state in by_path.items():
        for name, value in leaf_state.items():
            # Why names: for a parameter without dimensions, scalars have its shape too.
            is_scalar = shapes[path] == () and name in ("step", "mu_product", "eta", "mu")
            has_shape = isinstance(value, torch.Tensor) and value.shape == shapes[path]
            if isinstance(value, Piece | list | tuple) or (has_shape and not is_scalar):
                names.add(name)
    return names


def _check_groups(
    begun_paths: Sequence[str], new_paths: Sequence[str], group_of: Mapping[str, int]
) -> None:
    """Raise if a leaf that begins from scratch shares buffer and group with one that has state."""
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
    """Return the scalar of each parameter group; its leaves in one buffer must have the same.

    ``new_groups`` are those whose leaves in this buffer begin from scratch; they have no scalar.
    """
    first_scalars: dict[int, tuple[str, Any]] = {}
    for path, value in values.items():
        first_path, first = first_scalars.setdefault(layout.group_of[path], (path, value))
        if float(value) != float(first):
            raise ValueError(
                f"{name!r} must be the same for all leaves of a flat buffer that have the same "
                f"options; found {float(first)} for {first_path!r} and {float(value)} for {path!r}: "
                "give one a group of its own, in groups="
            )
    # Why leaves elsewhere count: a shard also keeps the scalars of groups that it has no leaf of,
    # and the leaves of another shard have the same ones.
    for path, leaf_state in by_path.items():
        group = layout.group_of.get(path)
        if name in leaf_state and group is not None and group not in new_groups:
            first_scalars.setdefault(group, (path, leaf_state[name]))
    return [first_scalars.get(group, ("", None))[1] for group in range(layout.count)]


def _copied(value: Any, device: torch.device | None) -> Any:
    return value.detach().to(device, copy=True) if isinstance(value, torch.Tensor) else value


# --- from a state dict ----------------------------------------------------------------------------


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


# --- checks ---------------------------------------------------------------------------------------


def _add_checksums(
    checksums: LeafChecksums,
    by_path: Mapping[str, LeafState],
    others: Mapping[str, Any],
    plan: Plan,
) -> None:
    """Add the full tensors and scalars of a state dict, which must be the same on every rank."""

    def add(name: str, value: Any, local: tuple[str, ...]) -> None:
        if is_full(value):
            checksums.add(name, value, local)
        elif isinstance(value, int | float):
            checksums.add(
                name, torch.tensor(float(value), dtype=torch.float64, device="cpu"), local
            )

    for _, buffer in trainable_buffers(plan):
        for leaf in buffer.leaves:
            for name, value in by_path.get(leaf.path, {}).items():
                add(f"{leaf.path}.{name}", value, own_axes(buffer.local, leaf.cuts))
    for name, value in others.items():
        add(name, value, ())


def _check_names(by_path: dict[str, LeafState], step: Any) -> None:
    """Raise ``ValueError`` unless the state of each leaf has the names that the optimizer keeps."""
    if isinstance(step, MuonStep):
        known_entries = KnownEntries({"momentum_buffer": True}, exact=True)
        of_group = dict.fromkeys(range(step.layout.count), known_entries)
    elif step.known is not None and step.cls.__module__.startswith("torch.optim."):
        known_entries = step.known
        of_group = {
            n: learn_entries(step.cls, step.options, [n]) or known_entries
            for n in range(len(step.options))
        }
    else:
        return  # a class of the user's own may keep other names for other leaves
    for path, leaf_state in by_path.items():
        group = 0 if step.layout is None else step.layout.group_of.get(path)
        if (
            group is None or not leaf_state
        ):  # some optimizers keep no state of a leaf that got no gradient
            continue
        missing_names = sorted(of_group[group].flat.keys() - leaf_state.keys())
        unexpected = sorted(
            name
            for name in leaf_state.keys() - known_entries.flat.keys()
            if known_entries.exact and leaf_state[name] is not None
        )
        if missing_names or unexpected:
            raise ValueError(
                f"the optimizer's state dict must hold {sorted(of_group[group].flat) or 'nothing'} "
                f"of leaf {path!r}, as this optimizer keeps; found {sorted(leaf_state)}: it is of another "
                "optimizer, or of other options; make the optimizer as it was made then, or begin "
                "with its init"
            )
