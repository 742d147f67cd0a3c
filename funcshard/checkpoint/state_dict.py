"""State dicts: shards to tensors under the module's own names, and back."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import nn

from funcshard._utils.options import check_flag
from funcshard._utils.torch_private import callers_level
from funcshard.checkpoint.hugging_face import check_functional, stored, stored_entries
from funcshard.checkpoint.resharding import as_pieces, check_pieces, copy_pieces, own_pieces
from funcshard.checkpoint.stored_state import (
    Tensors,
    by_buffer,
    each_leaf,
    first_of,
    leaves_by_name,
    name_in,
)
from funcshard.comm import Mesh
from funcshard.core import (
    AllGatherHandle,
    LeafChecksums,
    Shards,
    check_leaf,
    check_mesh,
    check_shards,
    check_source,
    check_tie,
    cut_from_rank,
    empty_shard,
    join_slices,
    on_every_rank,
    put_whole,
    slice_from_rank,
    start_gather_flat,
    views,
)
from funcshard.module import Functional
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan


def to_state_dict(
    shards: Shards,
    plan: Plan,
    mesh: Mesh,
    *,
    buffers: Mapping[str, torch.Tensor] | None = None,
    rank0_only: bool = False,
    offload: bool = False,
    sharded: bool = False,
) -> dict[str, Any]:
    """Return the parameters under the module's own names; ``from_state_dict`` is the inverse.

    You have to call it on every rank. Flat buffers are gathered and freed one after another, so
    with ``rank0_only`` and ``offload`` only the host of rank 0 holds the full model.

    Arguments:
        shards: this rank's shards, or a tree like them, such as gradients; ``None`` for a frozen
            shard leaves its leaves out.
        plan: the plan of your shards.
        mesh: the ranks.
        buffers: tensors to add, such as ``apply.persistent(buffers)``, which the module's state
            dict holds.
        rank0_only: whether only rank 0 gets the state dict, and the others an empty one.
        offload: whether to put the full tensors on the CPU.
        sharded: whether each rank gets its ``Piece`` of every leaf, a view of its shard. Nothing is
            gathered.

    Returns:
        A dictionary that you can pass to ``module.load_state_dict``. A tied parameter is under each
        of its names. A leaf that ranks hold in slices is joined. A leaf that's local otherwise has
        this rank's values.

    Raises:
        ValueError: the shards don't match the plan; ``rank0_only`` would lose a local leaf of other
            ranks; or ``sharded`` is combined with ``rank0_only`` or ``offload``.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Linear(2, 3)
        >>> apply, params, buffers = fs.make_functional(net)
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     return fs.to_state_dict(shards, plan, mesh, rank0_only=True, offload=True)
        >>> state_dict, nothing = fs.simulate(main, world_size=2)
        >>> net.load_state_dict(state_dict)
        <All keys matched successfully>
        >>> nothing
        {}

    Source: ``torch.distributed.checkpoint.state_dict.get_model_state_dict``.
    """
    check_flags(rank0_only=rank0_only, offload=offload, sharded=sharded)
    if sharded and (rank0_only or offload):
        raise ValueError(
            "sharded=True gives each rank the pieces that it holds, as views of its shards; found "
            "rank0_only or offload with it: leave them out"
        )
    options_text = {
        "the options of to_state_dict": f"rank0_only={rank0_only!r}, sharded={sharded!r}"
    }
    check_all_shards(shards, plan, mesh, options_text, gradients=True)
    check_no_leaf(buffers, plan)
    if rank0_only:
        check_no_local_leaf(plan)
    delivery = Delivery(mesh, rank0_only, offload, sharded)
    # Note: all names of a tied parameter refer to one tensor, as in module.state_dict().
    named_tensors: dict[str, Any] = {}
    for unit in plan.unit_list:
        for buffer in unit.buffers:
            # Note: one buffer at a time, and every rank in the same order, because they gather.
            flat_shard = shards[unit.name][buffer.key]
            if flat_shard is None:
                continue
            for leaf, value in delivery.leaves(flat_shard, unit, buffer):
                named_tensors.update(dict.fromkeys(leaf.names, value))
    if buffers is not None and not (rank0_only and mesh.rank):
        named_tensors.update(
            (name, kept_copy(value, offload)) for name, value in buffers.items()
        )
    # Note: units order the leaves by buffer, and the module by name.
    return plan.in_order(named_tensors)


def from_state_dict(
    state_dict: Mapping[str, Any],
    plan: Plan,
    mesh: Mesh,
    *,
    src: int | None = None,
    check: bool = True,
    cast: bool = False,
) -> Shards:
    """Return this rank's shards of a state dict; ``to_state_dict`` is the inverse.

    Arguments:
        state_dict: tensors by name, in any of these forms:

            - full tensors, as in ``module.state_dict()``;
            - DTensors, as a module sharded by FSDP2 has; each is gathered by itself;
            - pieces: one ``Piece`` per name, or a list of the pieces of several ranks.

            Names that aren't leaves are ignored. A tied parameter may be under any of its names.
        plan: your plan, to cut the shards by.
        mesh: the ranks.
        src: the rank that has the state dict, with full tensors, and broadcasts one flat buffer
            after another. By default every rank has it.
        check: whether ranks compare checksums of full tensors, as in ``shard``.
        cast: whether to convert floating-point tensors to the plan's dtypes. By default another
            dtype is an error.

    Returns:
        Shards; see ``shard``. They share no memory with the state dict.

    Raises:
        ValueError: a leaf is missing, a tensor has another shape or dtype than planned, pieces
            don't cover this rank's part, or ranks differ in a leaf that they share. If one rank's
            state dict has a fault, every rank raises.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Linear(2, 3)
        >>> apply, params, buffers = fs.make_functional(net)
        >>> def main(mesh):
        ...     shards = fs.from_state_dict(net.state_dict(), fs.make_plan(params, mesh), mesh)
        ...     return shards[""]["float32"].shape
        >>> fs.simulate(main, world_size=2)
        [torch.Size([5]), torch.Size([5])]

    Source: ``torch.distributed.checkpoint.state_dict.set_model_state_dict``.
    """
    check_flags(check=check, cast=cast)
    check_mesh(
        plan,
        mesh,
        {"the options of from_state_dict": f"src={src!r}, check={check!r}, cast={cast!r}"},
    )
    if src is not None:
        check_source(src, mesh)
        check_no_local_leaf(plan)
    source_words = "the state dict"
    checksums = LeafChecksums(
        mesh, source_words, "load the same file on every rank, or pass src=0"
    )
    leaf_values: dict[str, Any] = {}
    # Why before the leaves are cut: ranks gather DTensors and broadcast buffers together.
    with on_every_rank(mesh, checksums if src is None else None):
        # Note: with src, the state dicts of other ranks are not even looked at.
        if src in (None, mesh.rank):
            leaf_values = find_leaves(state_dict, plan.leaves)
            _warn_of_unknown(state_dict, plan)
            for _, buffer, leaf in each_leaf(plan):
                leaf_value = leaf_values[leaf.path]
                if src is not None and not is_full(leaf_value):
                    raise ValueError(
                        f"with src the state dict must hold full tensors, and {leaf.path!r} is "
                        f"none; found {type(leaf_value).__name__}: leave src out, and pass every "
                        "rank's state dict"
                    )
                _check_value(leaf_value, leaf, buffer, mesh, source_words, cast)
                # Note: pieces and DTensors are not compared; ranks hold other elements of them.
                if src is None and check and is_full(leaf_value):
                    checksums.add(leaf.path, leaf_value, buffer.own_axes(leaf))
    return by_buffer(
        plan,
        lambda unit, buffer: shard_from_leaves(
            unit, buffer, mesh, leaf_values, source_words, cast, src
        ),
    )


def check_flags(**flags: Any) -> None:
    """Raise ``TypeError`` unless each option is a bool."""
    for name, value in flags.items():
        check_flag(name, value)


def check_floating(name: str, dtype: Any) -> None:
    """Raise ``TypeError`` unless an option is a floating-point dtype, or ``None``."""
    if dtype is not None and not (
        isinstance(dtype, torch.dtype) and dtype.is_floating_point
    ):
        raise TypeError(
            f"{name} must be a floating-point dtype, such as torch.bfloat16, or None; found "
            f"{dtype!r}"
        )


def check_all_shards(
    shards: Shards,
    plan: Plan,
    mesh: Mesh,
    options: Mapping[str, str] = MappingProxyType({}),
    *,
    gradients: bool = False,
) -> None:
    """Raise unless ``shards`` are this rank's of ``plan``. Every rank has to call.

    Ranks also compare ``options``, texts by name.
    """
    check_mesh(plan, mesh, options)
    check_shards(plan, shards, mesh, gradients=gradients)


def check_no_leaf(buffers: Any, plan: Plan) -> None:
    """Raise unless ``buffers`` is ``None`` or a dictionary without names of leaves."""
    if buffers is not None and not isinstance(buffers, Mapping):
        raise TypeError(
            f"buffers must be a dictionary {{name: tensor}}, or None; found "
            f"{type(buffers).__name__}"
        )
    leaf = next((leaf.path for leaf in plan.leaves if leaf.path in (buffers or ())), None)
    if leaf is not None:
        raise ValueError(
            f"buffers must hold no parameter; found {leaf!r}, a leaf of the plan, whose values "
            "come from the shards: pass apply.persistent(buffers)"
        )


def check_no_local_leaf(plan: Plan) -> None:
    """Raise ``ValueError`` if a leaf is local, because no rank then has a full state dict."""
    for _, buffer, leaf in each_leaf(plan):
        # Note: own_axes leaves out the axes of slices, which join to whole tensors.
        if buffer.own_axes(leaf):
            raise ValueError(
                f"leaf {leaf.path!r} is local to each rank, and a state dict or file of rank 0 would "
                "lose the values of the other ranks; take every rank's state dict, with "
                "rank0_only=False or sharded=True"
            )


# --- one flat tensor, cut like a buffer, to leaves ------------------------------------------------


class Delivery(NamedTuple):
    """What this rank gets of leaves; ``to_state_dict`` describes the options."""

    mesh: Mesh
    rank0_only: bool = False
    offload: bool = False
    sharded: bool = False

    def leaves(
        self, flat: torch.Tensor, unit: UnitPlan, buffer: BufferPlan
    ) -> list[tuple[LeafSpec, Any]]:
        """Return the leaves, or pieces of them, that this rank gets of a flat tensor."""
        mesh = self.mesh
        if self.sharded:
            return list(own_pieces(flat, buffer, mesh))
        # Note: rank 0 gathers from the ranks along its own shard axis, and from those with slices
        # of its leaves. So for each leaf, only ranks that are the first along all other axes take
        # part.
        not_first = {
            axis for axis, group in mesh.groups.items() if self.rank0_only and group.rank
        }
        slice_axes = {leaf_cut.axis for leaf in buffer.leaves for leaf_cut in leaf.cuts}
        if not_first - slice_axes - {"shard"}:
            return []
        full_buffer = start_full_buffer(flat, unit, buffer, mesh).finish()
        rank_leaves = []
        for leaf, view in zip(buffer.leaves, views(full_buffer, buffer), strict=True):
            if not_first - {leaf_cut.axis for leaf_cut in leaf.cuts}:
                continue
            # Note: every rank along the leaf's slice axes takes part; first_only gives the rest
            # None.
            value = join_slices(view, leaf, mesh, first_only=self.rank0_only)
            if value is not None:
                rank_leaves.append((leaf, kept_copy(value, self.offload)))
            del value  # before the slices of the next leaf are joined
        return rank_leaves


def start_full_buffer(
    flat: torch.Tensor, unit: UnitPlan, buffer: BufferPlan, mesh: Mesh
) -> AllGatherHandle:
    """Start to gather a flat tensor that is cut like a buffer."""
    return start_gather_flat(
        flat, mesh, unit.name, buffer.key, sharded=buffer.shards > 1, offload=unit.offload
    )


def kept_copy(value: torch.Tensor, offload: bool) -> torch.Tensor:
    """Return a detached copy of a tensor, on the CPU with ``offload``."""
    # Why a copy: a view would keep the whole gathered buffer in memory.
    value = value.detach()
    return value.cpu() if offload and value.device.type != "cpu" else value.clone()


# --- leaves to one flat tensor --------------------------------------------------------------------


def shard_from_leaves(
    unit: UnitPlan,
    buffer: BufferPlan,
    mesh: Mesh,
    leaves: Mapping[str, Any],
    where: str,
    cast: bool | None = None,
    src: int | None = None,
) -> torch.Tensor:
    """Return this rank's shard of one buffer, with zeros for a missing leaf.

    Arguments:
        unit: the buffer's unit.
        buffer: the buffer.
        mesh: the ranks.
        leaves: full tensors, DTensors, or pieces, by path.
        where: the source of the leaves, for errors.
        cast: as in ``check_leaf``.
        src: the rank that broadcasts its full tensors; on others they may be on meta or missing.
    """
    if src is not None:
        sliced_leaves = []
        for leaf in buffer.leaves:
            leaf_value = leaves.get(leaf.path)
            if leaf_value is None:
                leaf_value = torch.zeros(
                    leaf.model_shape, dtype=buffer.model_dtype, device=mesh.device
                )
            # Note: on every rank, so that a wrong shape raises before a broadcast would hang.
            check_leaf(leaf_value, leaf, buffer, where, meta=True, whole=True, cast=cast)
            sliced_leaves.append(
                slice_from_rank(src, leaf_value.to(buffer.model_dtype), leaf, mesh)
            )
        return cut_from_rank(src, unit, buffer, sliced_leaves, mesh)
    # Note: zeros, because optimizer state may lack leaves.
    shard = empty_shard(unit, buffer, mesh).zero_()
    for leaf in buffer.leaves:
        if leaf.path not in leaves:
            continue
        leaf_value = leaves[leaf.path]
        _check_value(leaf_value, leaf, buffer, mesh, where, cast)
        if (pieces := as_pieces(leaf_value)) is not None:
            in_shard = buffer.part(leaf, mesh.shard.rank).in_shard
            copy_pieces(shard[in_shard], pieces, leaf, buffer, mesh)
        else:
            # Note: all ranks gather a DTensor here, in the order of the plan's leaves.
            whole_leaf = leaf_value if is_full(leaf_value) else leaf_value.full_tensor()
            put_whole(shard, whole_leaf, leaf, buffer, mesh)
    return shard


def is_full(value: Any) -> bool:
    """Return whether an entry of a state dict is a full tensor, and no DTensor."""
    # Why hasattr: it tells a DTensor without importing torch.distributed.tensor.
    return isinstance(value, torch.Tensor) and not hasattr(value, "full_tensor")


def _check_value(
    value: Any,
    leaf: LeafSpec,
    buffer: BufferPlan,
    mesh: Mesh,
    where: str,
    cast: bool | None,
) -> None:
    """Raise unless an entry holds the elements of a leaf that this rank needs."""
    pieces = as_pieces(value)
    if pieces is None:
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"leaf {leaf.path!r} of {where} must be a tensor, a DTensor, a Piece or a list of "
                f"pieces; found {type(value).__name__}"
            )
        check_leaf(value, leaf, buffer, where, dtensor=True, whole=True, cast=cast)
        return
    check_pieces(pieces, leaf, buffer, mesh, where, cast=cast)


def find_leaves(
    state_dict: Mapping[str, Any],
    leaves: Iterable[LeafSpec],
    rule: str = "the state dict must hold every leaf of the plan",
    remedy: str = "",
) -> dict[str, Any]:
    """Return the entry of each leaf by path, under any of its names.

    Raises:
        ValueError: a leaf is missing; the message begins with ``rule`` and ends with ``remedy``. Or
            a tied parameter has several values.
    """
    if not isinstance(state_dict, Mapping):
        remedy = "pass a dictionary {name: tensor}"
        if isinstance(state_dict, nn.Module):
            remedy = "pass module.state_dict()"
        elif isinstance(state_dict, str | os.PathLike):
            remedy = "pass torch.load(path, weights_only=True), or call import_safetensors(path, plan, mesh)"
        raise TypeError(
            f"a state dict must be a dictionary {{name: tensor}}; found "
            f"{type(state_dict).__name__}: {remedy}"
        )
    values_by_path: dict[str, Any] = {}
    missing_paths = []
    for leaf in leaves:
        name = name_in(state_dict, leaf)
        if name is None:
            missing_paths.append(leaf.path)
        else:
            values_by_path[leaf.path] = state_dict[name]
            # Note: copies of a tied parameter under two names may differ, and one would be lost.
            check_tie(leaf, state_dict, "the state dict")
    if missing_paths:
        hint = _remedy(state_dict, missing_paths)
        raise ValueError(f"{rule}; missing: {first_of(missing_paths)}: {hint}{remedy}")
    return values_by_path


def _remedy(state_dict: Mapping[str, Any], missing: list[str]) -> str:
    if not state_dict:
        return "it is empty; if rank0_only=True left it so, pass src=0 to take the state dict of rank 0"
    names = [name for name in state_dict if isinstance(name, str)]
    # Note: the most frequent cause is a wrapper, such as DDP's module., so it is looked for first.
    longer_prefixes = [
        name.removesuffix(missing[0]) for name in names if name.endswith("." + missing[0])
    ]
    prefix = next(
        (p for p in longer_prefixes if all(p + path in state_dict for path in missing)),
        None,
    )
    if prefix is not None:
        return (
            f"it holds them under names that carry the prefix {prefix!r} that has to be removed: "
            "call torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, "
            f"{prefix!r}) first"
        )
    # Note: a checkpoint of a whole job, such as {"model": ..., "optim": ...}.
    inner_key = next(
        (
            key
            for key, value in state_dict.items()
            if isinstance(value, Mapping) and missing[0] in value
        ),
        None,
    )
    if inner_key is not None:
        return f"its entry {inner_key!r} is a state dict that holds them: pass state_dict[{inner_key!r}]"
    return (
        f"it holds {names[:3]}, so it is of another module, a tree of shards, or its names carry a "
        "prefix such as 'module.' that has to be removed"
    )


def _warn_of_unknown(state_dict: Mapping[str, Any], plan: Plan) -> None:
    """Warn of entries that look like parameters, and are neither leaves nor buffers."""
    leaf_names = leaves_by_name(plan).keys()
    # Why by the end of their names: the plan of a plain tree doesn't know the names of buffers.
    last_names = {name.rpartition(".")[2] for name in leaf_names}
    # Note: make_functional's names include those of buffers, which are no leaves.
    own_names = leaf_names | {*plan.names}
    unknown_names = [
        name
        for name in state_dict
        if name not in own_names and str(name).rpartition(".")[2] in last_names
    ]
    if unknown_names:
        warnings.warn(
            f"the state dict holds {first_of(unknown_names)}, which aren't leaves of the plan and were "
            "left out: if they should be loaded, make the plan from the params of the same "
            "module; else delete them from the state dict",
            stacklevel=callers_level(),
        )


# --- whole parameters, unit by unit -------------------------------------------------------------


def iter_params(
    shards: Shards,
    plan: Plan,
    mesh: Mesh,
    *,
    apply: Functional | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and the whole tensor of each parameter, on every rank, unit by unit.

    While you use a unit's tensors, the next unit is gathered. So a rank has at most two units in
    memory, and the tensors that you keep. Every rank has to call this, and to run through the
    whole iterator.

    Arguments:
        shards: this rank's shards.
        plan: the plan of your shards.
        mesh: the ranks.
        apply: the function of a Hugging Face model, for the names and tensors that the files of
            ``save_pretrained`` have. By default they are the plan's.
        dtype: dtype of all floating-point tensors, such as ``torch.bfloat16``; by default their
            own.

    Returns:
        An iterator over pairs. A tied parameter comes once, under its first name, and slices are
        joined. Each tensor is a copy on the mesh's device.

    Raises:
        TypeError: ``apply`` isn't of a model of Hugging Face, or ``dtype`` isn't floating-point.
        ValueError: the shards don't match the plan; a leaf is local to each rank; or one tensor of
            the files lies in several units.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"a": torch.arange(3.0), "b": torch.ones(2, 2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh, units=["a", "b"])
        ...     shards = fs.shard(params, plan, mesh)
        ...     return {name: x.tolist() for name, x in fs.iter_params(shards, plan, mesh)}
        >>> fs.simulate(main, world_size=2)[1]
        {'a': [0.0, 1.0, 2.0], 'b': [[1.0, 1.0], [1.0, 1.0]]}

    Source: ``load_weights`` of the models of vLLM.
    """
    check_floating("dtype", dtype)
    check_all_shards(shards, plan, mesh)
    check_no_local_leaf(plan)
    if apply is not None:
        check_functional("iter_params", apply)
        stored_entries(apply.skeleton.template, plan)
    # Why another function: the checks above run at the call, and not at the first tensor.
    return _iterate(shards, plan, mesh, apply, dtype)


def _iterate(
    shards: Shards,
    plan: Plan,
    mesh: Mesh,
    apply: Functional | None,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, torch.Tensor]]:
    # Note: a generator, which starts the gathers of one unit after another.
    started_units = (
        [start_full_buffer(shards[u.name][b.key], u, b, mesh) for b in u.buffers]
        for u in plan.unit_list
    )
    gather_handles = next(started_units)
    for unit in plan.unit_list:
        full_buffers = [gather_handle.finish() for gather_handle in gather_handles]
        # Why here: the buffers of the unit before are free, and those of two units are in memory.
        gather_handles = next(started_units, [])
        named_tensors: Tensors = {}
        for buffer, full_buffer in zip(unit.buffers, full_buffers, strict=True):
            for leaf, view in zip(buffer.leaves, views(full_buffer, buffer), strict=True):
                joined_leaf = join_slices(view, leaf, mesh)
                assert joined_leaf is not None, "every rank takes part"
                named_tensors[leaf.path] = joined_leaf
        full_buffers.clear()
        # Why: a generator keeps its variables' memory while you use what it yields.
        del full_buffer, view, joined_leaf
        if apply is not None:
            # Note: experts, for example, are one leaf, and several tensors in files.
            named_tensors = stored(apply.skeleton.template, named_tensors)
        for name in list(named_tensors):
            tensor = named_tensors.pop(name)
            # Why a copy: a view that you keep would hold the memory of the whole unit.
            yield (
                name,
                tensor.to(dtype=dtype if tensor.is_floating_point() else None, copy=True),
            )
            del tensor
