"""State dicts: the module's own names and full tensors, to shards and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from funcshard.comm import Mesh, check_same
from funcshard.core import (
    Link,
    Shards,
    check_leaf,
    check_mesh,
    check_shard,
    check_shards,
    empty_shard,
    put,
    shard,
    start_gather,
    views,
)
from funcshard.plan import BufferPlan, LeafSpec, Plan, UnitPlan, dtype_of

__all__ = ["Piece", "fill", "found_leaves", "from_state_dict", "held", "refuse_local", "taken", "to_state_dict"]


class Piece(NamedTuple):
    """What one rank holds of a leaf: a run of its elements, counted in the raveled leaf.

    Attributes:
        tensor: the elements, 1-D.
        offset: index of the first of them in the raveled leaf.
        shape: shape of the whole leaf.
        copy: number of this copy among those that ranks hold of the same elements; whoever writes them once writes copy 0.

    Example:
        >>> import torch, funcshard as fs
        >>> piece = fs.Piece(torch.zeros(5), offset=3, shape=(3, 4), copy=0)
        >>> range(piece.offset, piece.offset + len(piece.tensor))
        range(3, 8)
    """

    tensor: torch.Tensor
    offset: int
    shape: tuple[int, ...]
    copy: int = 0


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
    """Return the tensors under the module's own names, in full or this rank's pieces; ``from_state_dict`` is the inverse.

    Flat buffers are gathered one after another, and each is free again before the next one is gathered. With ``rank0_only``
    and ``offload`` no device ever holds more than one of them in full, and no host but rank 0's holds anything.

    Arguments:
        shards: this rank's shards.
        plan: the plan they are cut by.
        mesh: the ranks.
        buffers: what the state dict should hold besides; ``apply.persistent(buffers)`` are the module's.
        rank0_only: whether rank 0 alone gets the dictionary, and the others an empty one. Every rank has to call.
        offload: whether the full tensors are put on the CPU.
        sharded: whether each rank gets a ``Piece`` of each leaf of which it holds something, instead of full tensors.
            Nothing is gathered, and the pieces are views of the shards.

    Returns:
        A dictionary that ``module.load_state_dict`` takes: a tied parameter stands under each of its names, as one
        tensor, as in ``module.state_dict()``. A leaf that is local to a rank is each rank's own: its name is the same
        on every rank, its values are not.

    Raises:
        ValueError: the shards are not of this plan; with ``rank0_only`` a leaf is local to its rank, so that rank 0 would
            not have the others'; ``sharded`` goes with neither ``rank0_only`` nor ``offload``.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Linear(2, 3)
        >>> apply, params, buffers = fs.make_functional(net)
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     return fs.to_state_dict(fs.shard(params, plan, mesh), plan, mesh, rank0_only=True, offload=True)
        >>> state_dict, nothing = fs.simulate(main, world_size=2)
        >>> net.load_state_dict(state_dict)
        <All keys matched successfully>
        >>> nothing
        {}

    Source: ``torch.distributed.checkpoint.state_dict.get_model_state_dict``.
    """
    if sharded and (rank0_only or offload):
        raise ValueError(
            "sharded=True gives each rank the pieces that it has, where they are; found rank0_only or offload with it: "
            "leave them out"
        )
    check_mesh(plan, mesh)
    check_shards(plan, shards)
    for unit in plan.unit_list:
        check_shard(unit, shards[unit.name], mesh)
    if rank0_only:
        refuse_local(plan)
    named: dict[str, Any] = {}
    nothing = rank0_only and mesh.rank != 0
    for unit in plan.unit_list:
        for buffer in unit.buffers:
            for leaf, value in taken(shards[unit.name][buffer.key], unit, buffer, mesh, rank0_only, offload, sharded):
                named.update(dict.fromkeys((leaf.path, *leaf.aliases), value))
    if buffers is not None and not nothing:
        named.update({name: held(value, offload) if offload else value for name, value in buffers.items()})
    return named


def from_state_dict(state_dict: Mapping[str, Any], plan: Plan, mesh: Mesh, *, src: int | None = None) -> Shards:
    """Return this rank's shards of a state dict; ``to_state_dict`` is the inverse.

    Arguments:
        state_dict: by name, full tensors, such as ``module.state_dict()``; or DTensors, as a module sharded with FSDP2
            has, each of which is gathered on its own; or pieces, those of one rank or a list of those of several. Names
            that are no leaf of the plan, such as those of buffers, are left aside. A tied parameter may stand under any
            of its names.
        plan: how they are cut.
        mesh: the ranks.
        src: the rank that has the state dict, of full tensors, which it broadcasts one flat buffer after another; what
            other ranks pass is not looked at. By default every rank has it.

    Returns:
        Shards; see ``shard``. They share no memory with the state dict.

    Raises:
        ValueError: a name is missing, a tensor has another shape or dtype than planned, or pieces do not cover this rank's
            part of a leaf.

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
    check_mesh(plan, mesh)
    if src is not None:
        return _from_rank(state_dict, plan, mesh, src)
    found = found_leaves(state_dict, plan.leaves)
    return {
        unit.name: {
            buffer.key: fill(unit, buffer, mesh, {leaf.path: found[leaf.path] for leaf in buffer.leaves}, "the state dict")
            for buffer in unit.buffers
        }
        for unit in plan.unit_list
    }


def taken(
    flat: torch.Tensor, unit: UnitPlan, buffer: BufferPlan, mesh: Mesh, rank0_only: bool, offload: bool, sharded: bool
) -> list[tuple[LeafSpec, Any]]:
    """Return what ``to_state_dict`` gives this rank of a flat tensor that is cut like ``buffer``."""
    if sharded:
        return list(_pieces(flat, buffer, mesh))
    if rank0_only and mesh.replicate.rank:
        return []  # rank 0 gathers among those that hold its own copy's slices
    if rank0_only and mesh.rank:
        _full_leaves(flat, unit, buffer, mesh, lambda _: None)
        return []
    return _full_leaves(flat, unit, buffer, mesh, functools.partial(held, offload=offload))


def _whole(flat: torch.Tensor, unit: UnitPlan, buffer: BufferPlan, mesh: Mesh) -> torch.Tensor:
    """Gather a flat tensor that is cut like ``buffer``, of any dtype; where nothing is cut it is ``flat`` itself."""
    link = Link(mesh, unit.name, buffer.key, buffer.shards > 1, offload=unit.offload)
    with torch.no_grad():
        return start_gather(flat.detach(), link).finish()


def _full_leaves(
    flat: torch.Tensor, unit: UnitPlan, buffer: BufferPlan, mesh: Mesh, keep: Callable[[torch.Tensor], Any]
) -> list[tuple[LeafSpec, Any]]:
    """Gather a flat tensor that is cut like ``buffer``, and return ``keep(leaf)`` of each leaf; the rest is free again."""
    full = _whole(flat, unit, buffer, mesh)
    return [(leaf, keep(view)) for leaf, view in zip(buffer.leaves, views(full, buffer), strict=True)]


def _pieces(flat: torch.Tensor, buffer: BufferPlan, mesh: Mesh) -> list[tuple[LeafSpec, Piece]]:
    """Return what this rank holds of each leaf of which it holds something, as views of ``flat``."""
    copy = 0
    for axis, group in (("replicate", mesh.replicate), ("shard", mesh.shard)):
        if axis not in buffer.local and not (axis == "shard" and buffer.shards > 1):
            copy = copy * group.size + group.rank
    found = []
    for leaf in buffer.leaves:
        low, high, begin = _part(leaf, buffer, mesh)
        if low < high or leaf.numel == 0:
            view = flat.detach()[low - begin : max(low, high) - begin]
            found.append((leaf, Piece(view, low - leaf.offset, leaf.shape, copy)))
    return found


def held(value: torch.Tensor, offload: bool) -> torch.Tensor:
    """Return a copy to keep, on the CPU if it is offloaded."""
    value = value.detach()
    return value.cpu() if offload and value.device.type != "cpu" else value.clone()


def refuse_local(plan: Plan) -> None:
    """Raise ``ValueError`` if a leaf is local to each rank, so that no rank alone can have a full state dict."""
    own = next((leaf.path for u in plan.unit_list for b in u.buffers if b.local for leaf in b.leaves), None)
    if own is not None:
        raise ValueError(
            f"leaf {own!r} is local to each rank, and rank 0's state dict alone would lose what the other ranks have; take "
            f"each rank's own, with rank0_only=False or sharded=True"
        )


def fill(unit: UnitPlan, buffer: BufferPlan, mesh: Mesh, leaves: Mapping[str, Any], where: str) -> torch.Tensor:
    """Return this rank's shard of one buffer out of full tensors, DTensors or pieces by path; zeros where there are none."""
    local = empty_shard(unit, buffer, mesh)
    for spec in buffer.leaves:
        if spec.path not in leaves:
            continue
        value = leaves[spec.path]
        if isinstance(value, Piece) or (isinstance(value, Sequence) and all(isinstance(x, Piece) for x in value)):
            _join(local, [value] if isinstance(value, Piece) else list(value), spec, buffer, mesh, where)
            continue
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"leaf {spec.path!r} of {where} must be a tensor, a DTensor, a Piece or a list of pieces; found "
                f"{type(value).__name__}"
            )
        check_leaf(value, spec, buffer, where)
        # a DTensor; torch.distributed.tensor need not be imported to know one
        put(local, value.full_tensor() if hasattr(value, "full_tensor") else value, spec, buffer, mesh)
    return local


def _part(leaf: LeafSpec, buffer: BufferPlan, mesh: Mesh) -> tuple[int, int, int]:
    """Where this rank's part of a leaf begins and ends in the whole buffer, and where the shard begins."""
    begin = mesh.shard.rank * buffer.shard_numel if buffer.shards > 1 else 0
    return max(begin, leaf.offset), min(begin + buffer.shard_numel, leaf.offset + leaf.numel), begin


def _join(local: torch.Tensor, pieces: list[Piece], leaf: LeafSpec, buffer: BufferPlan, mesh: Mesh, where: str) -> None:
    """Write what pieces of one leaf have in common with this rank's shard into it."""
    for piece in pieces:
        if tuple(piece.shape) != leaf.shape or piece.tensor.dtype != dtype_of(buffer.dtype):
            raise ValueError(
                f"pieces of leaf {leaf.path!r} of {where} must be of shape {leaf.shape} and dtype {buffer.dtype}, as "
                f"planned; found {tuple(piece.shape)} and {str(piece.tensor.dtype).removeprefix('torch.')}"
            )
    if "shard" in buffer.local and len(pieces) != 1:
        raise ValueError(
            f"leaf {leaf.path!r} is local to each rank, so {where} must hold this rank's own piece of it; found "
            f"{len(pieces)} pieces"
        )
    low, high, begin = _part(leaf, buffer, mesh)
    done = low
    for piece in sorted(pieces, key=lambda piece: piece.offset):
        first, last = leaf.offset + piece.offset, leaf.offset + piece.offset + piece.tensor.numel()
        if first <= done < last and done < high:
            end = min(last, high)
            with torch.no_grad():
                local[done - begin : end - begin].copy_(piece.tensor[done - first : end - first])
            done = end
    if done < high:
        raise ValueError(
            f"pieces of leaf {leaf.path!r} of {where} must cover elements {low - leaf.offset} to {high - leaf.offset}, this "
            f"rank's part under the plan; nothing holds element {done - leaf.offset}: pass the pieces of all ranks, as in "
            f"{{name: [pieces of each rank]}}"
        )


def found_leaves(
    state_dict: Mapping[str, Any], leaves: Iterable[LeafSpec], what: str = "the state dict must hold every leaf of the plan"
) -> dict[str, Any]:
    """Return what ``state_dict`` holds of each leaf, by path, under whichever of its names it stands."""
    found: dict[str, Any] = {}
    missing = []
    for leaf in leaves:
        place = next((p for p in (leaf.path, *leaf.aliases) if p in state_dict), None)
        if place is None:
            missing.append(leaf.path)
        else:
            found[leaf.path] = state_dict[place]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"{what}; missing: {missing[:3]}{more}: {_remedy(state_dict, missing)}")
    return found


def _remedy(state_dict: Mapping[str, Any], missing: list[str]) -> str:
    longer = [name.removesuffix(missing[0]) for name in state_dict if name.endswith("." + missing[0])]
    prefix = next((p for p in longer if all(p + path in state_dict for path in missing)), None)
    if prefix is None:
        return "it is another module's, or its names carry a prefix such as 'module.' that has to be removed"
    return (
        f"they are there under names that carry the prefix {prefix!r} that has to be removed: call "
        f"torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, {prefix!r}) first"
    )


def _from_rank(state_dict: Mapping[str, Any], plan: Plan, mesh: Mesh, src: int) -> Shards:
    refuse_local(plan)
    fault: Exception | None = None
    leaves = {
        leaf.path: torch.empty(leaf.shape, dtype=dtype_of(buffer.dtype), device="meta")
        for unit in plan.unit_list
        for buffer in unit.buffers
        for leaf in buffer.leaves
    }
    try:
        leaves = found_leaves(state_dict, plan.leaves) if mesh.rank == src else leaves
    except ValueError as error:
        fault = error
    check_same(mesh, str(fault or "no fault"), "what was found in the state dict")
    if fault is not None:
        raise fault
    return shard(leaves, plan, mesh, src=src)
