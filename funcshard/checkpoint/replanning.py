"""Change of plan in memory: what all ranks hold under one plan, to what all ranks hold under another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from funcshard.checkpoint.flatten_state import Item, Parts, Piece, check_alike, facts, take_apart
from funcshard.checkpoint.unflatten_state import Place, Request, put_together
from funcshard.plan import Plan

__all__ = ["copy_into", "replan"]


def replan(states: Sequence[Any], old: Plan, new: Plan) -> list[Any]:
    """Cut the states of all ranks anew: from the ranks and units of one plan to those of another.

    A pure function of one process, without communication; ``save`` under one plan and ``restore`` under another does the
    same through files. Trees that look like shards (parameters, averages of them, optimizer states) are cut anew leaf by
    leaf, whatever their names are; what all ranks have alike stays so; a ``PerRank`` and leaves that are local to a rank go
    to rank ``r`` from rank ``r`` modulo the old number of ranks. A pair of plans and its reverse are inverses, but for what
    ranks that there are no more had of their own.

    Arguments:
        states: each rank's state, any pytree, in order of ranks.
        old: the plan that they are cut by.
        new: the plan of the same leaves that they shall be cut by: other units, strategies or numbers of ranks.

    Returns:
        Each new rank's state, in order of ranks; its tensors share no memory with the old ones.

    Raises:
        TypeError: a leaf is neither a tensor nor a number or string.
        ValueError: there are not as many states as ranks, a plan is of another model, or ranks differ in what is not
            marked as a rank's own.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.arange(4.0)}
        >>> old, new = fs.make_plan(params, 2), fs.make_plan(params, 3)
        >>> states = fs.simulate(lambda mesh: {"ema": fs.shard(params, old, mesh), "step": 7}, world_size=2)
        >>> fs.replan(states, old, new)[1]
        {'ema': {'': {'float32': tensor([2., 3.])}}, 'step': 7}
    """
    if len(states) != old.world_size:
        raise ValueError(f"there must be one state a rank of the old plan, {old.world_size}; found {len(states)}")
    parts = [take_apart(state, old, rank) for rank, state in enumerate(states)]
    check_alike([facts(each) for each in parts])
    items, pieces = _all(parts)

    devices = {item.label: torch.device("cpu") for item in items.values()}
    devices |= {_item(items, name).label: found[0].tensor.device for name, found in pieces.items()}
    place: Place = lambda item, unit: devices[item.label]  # noqa: E731
    result = []
    for rank in range(new.world_size):
        source = rank % old.world_size
        wanted = put_together(parts[0].outline, parts[source].own, items, new, rank, old.mesh_shape, place)
        for request in wanted.requests:
            copy_into(request, pieces.get(request.name, ()))
        wanted.check()
        result.append(wanted.state)
    return result


def copy_into(request: Request, pieces: Iterable[Piece]) -> None:
    """Answer a request from pieces of its tensor."""
    end, found = request.begin + request.out.numel(), 0
    with torch.no_grad():
        for piece in pieces:
            low, high = max(request.begin, piece.begin), min(end, piece.begin + piece.tensor.numel())
            if low < high:
                request.out[low - request.begin : high - request.begin] = piece.tensor[
                    low - piece.begin : high - piece.begin
                ]
                found += high - low
    assert found == request.out.numel(), f"{request.name}: {found} of {request.out.numel()} elements"


def _item(items: Mapping[str, Item], name: str) -> Item:
    return items[name] if name in items else items[name.rpartition("@")[0]]  # a rank's own of a local leaf


def _all(parts: Sequence[Parts]) -> tuple[dict[str, Item], dict[str, list[Piece]]]:
    items: dict[str, Item] = {}
    pieces: dict[str, list[Piece]] = {}
    for each in parts:
        items |= each.items
        for piece in each.pieces:
            pieces.setdefault(piece.name, []).append(piece)
    return items, pieces
