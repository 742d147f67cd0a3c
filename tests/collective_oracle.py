"""Every collective as a function of the tensors of all ranks at once.

``OPERATIONS`` holds each public collective twice: as the library's function on one rank, and as a
function of the list of tensors along the axis. So autograd over the list is the reference for every
derivative. ``line`` tells which ranks these are, and ``sum_in_order`` is what sums are to the bit.
``results_of`` does the same for the methods of a group.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

import funcshard as fs
from funcshard.comm import Op

__all__ = ["OPERATIONS", "Operation", "line", "results_of", "sum_in_order", "whole_number_tensor"]


class Operation(NamedTuple):
    """A collective on one rank, and as a function of the tensors of all ranks along the axis.

    ``sizes(n)`` is the shape of a tensor for ``n`` ranks; ``but`` names dtypes without a meaning.
    """

    run: Callable[[torch.Tensor, fs.Mesh, Any], torch.Tensor]
    plain: Callable[[list[torch.Tensor], int], torch.Tensor]
    sizes: Callable[[int], tuple[int, ...]] = lambda n: (2, 3)
    but: tuple[torch.dtype, ...] = ()
    linear: bool = True


BOOL = (torch.bool,)


def gather(**options: Any) -> Callable[[torch.Tensor, fs.Mesh, Any], torch.Tensor]:
    return lambda x, mesh, axis: fs.all_gather(x, mesh, axis=axis, **options)


def scatter(dim: int, tiled: bool) -> Operation:
    """Return ``psum_scatter`` along a dim of a tensor with 3 dims, the one that counts ranks."""

    def plain(xs: list[torch.Tensor], i: int) -> torch.Tensor:
        return sum(xs).chunk(len(xs), dim)[i] if tiled else sum(xs).select(dim, i)  # type: ignore[union-attr]

    return Operation(
        lambda x, mesh, axis: fs.psum_scatter(x, mesh, axis=axis, dim=dim, tiled=tiled),
        plain,
        lambda n: tuple((2 * n if tiled else n) if at == dim % 3 else 2 for at in range(3)),
        BOOL,
    )


def exchange(split: int, concat: int, tiled: bool) -> Operation:
    def plain(xs: list[torch.Tensor], i: int) -> torch.Tensor:
        if tiled:
            return torch.cat([x.chunk(len(xs), split)[i] for x in xs], concat)
        return torch.stack([x.select(split, i) for x in xs], concat)

    return Operation(
        lambda x, mesh, axis: fs.all_to_all(x, mesh, axis=axis, split_dim=split, concat_dim=concat, tiled=tiled),
        plain,
        lambda n: tuple((2 * n if tiled else n) if at == split % 3 else 2 for at in range(3)),
    )


def permutation(pairs: Callable[[int], list[tuple[int, int]]]) -> Operation:
    def plain(xs: list[torch.Tensor], i: int) -> torch.Tensor:
        source = {target: source for source, target in pairs(len(xs))}.get(i)
        return torch.zeros_like(xs[i]) if source is None else xs[source].clone()

    def run(x: torch.Tensor, mesh: fs.Mesh, axis: Any) -> torch.Tensor:
        ranks = math.prod(mesh.shape[name] for name in (mesh.names(axis) if axis else ("replicate", "shard")))
        return fs.ppermute(x, mesh, pairs(ranks), axis=axis)

    return Operation(run, plain)


OPERATIONS = {
    "psum": Operation(lambda x, mesh, axis: fs.psum(x, mesh, axis=axis), lambda xs, i: sum(xs), but=BOOL),  # type: ignore[arg-type,return-value]
    "pmean": Operation(lambda x, mesh, axis: fs.pmean(x, mesh, axis=axis), lambda xs, i: sum(xs) / len(xs), but=BOOL),  # type: ignore[arg-type]
    "pmax": Operation(
        lambda x, mesh, axis: fs.pmax(x, mesh, axis=axis),
        lambda xs, i: torch.stack(xs).amax(0),
        but=(torch.complex64,),
        linear=False,
    ),
    "all_gather": Operation(gather(), lambda xs, i: torch.stack(xs)),
    "all_gather, dim 1": Operation(gather(dim=1), lambda xs, i: torch.stack(xs, 1)),
    "all_gather, dim -1": Operation(gather(dim=-1), lambda xs, i: torch.stack(xs, -1)),
    "all_gather, tiled": Operation(gather(tiled=True), lambda xs, i: torch.cat(xs)),
    "all_gather, tiled, dim -1": Operation(gather(tiled=True, dim=-1), lambda xs, i: torch.cat(xs, -1)),
    "psum_scatter": scatter(0, False),
    "psum_scatter, dim 1": scatter(1, False),
    "psum_scatter, dim -1": scatter(-1, False),
    "psum_scatter, tiled": scatter(0, True),
    "psum_scatter, tiled, dim -2": scatter(-2, True),
    "all_to_all": exchange(0, 0, False),
    "all_to_all, 0 to 2": exchange(0, 2, False),
    "all_to_all, -1 to 0": exchange(-1, 0, False),
    "all_to_all, 1 to 1": exchange(1, 1, False),
    "all_to_all, tiled": exchange(0, 0, True),
    "all_to_all, tiled, 1 to -1": exchange(1, -1, True),
    "all_to_all, tiled, 2 to 0": exchange(2, 0, True),
    "ppermute, a ring": permutation(lambda n: [(i, (i + 1) % n) for i in range(n)]),
    "ppermute, backwards": permutation(lambda n: [(i, n - 1 - i) for i in range(n)]),
    "ppermute, one pair": permutation(lambda n: [(0, n - 1)]),
    "ppermute, a pipeline": permutation(lambda n: [(i, i + 1) for i in range(n - 1)]),
    "ppermute, to itself": permutation(lambda n: [(i, i) for i in range(n)]),
    "ppermute, no pair": permutation(lambda n: []),
}


def line(rank: int, sizes: dict[str, int], axis: Any) -> list[int]:
    """Return the ranks of the world along axes, in order: the first axis changes slowest."""
    names = ("replicate", "shard") if axis is None else (axis,) if isinstance(axis, str) else axis
    sizes = {**{name: 1 for name in ("replicate", "shard") if name not in sizes}, **sizes}
    order = [axis for axis in sizes if sizes[axis] > 1 or axis in names]
    place, rest = {}, rank
    for name in reversed(order):
        rest, place[name] = divmod(rest, sizes[name])
    found = []
    for index in itertools.product(*(range(sizes[name]) for name in names)):
        at, number = {**place, **dict(zip(names, index, strict=True))}, 0
        for name in order:
            number = number * sizes[name] + at[name]
        found.append(number)
    return found


@functools.cache
def whole_number_tensor(
    rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float64, salt: int = 0
) -> torch.Tensor:
    """Return a tensor of small whole numbers, whose sums are exact in every dtype."""
    g = torch.Generator().manual_seed(100 * salt + rank)
    x = torch.randint(-3, 4, shape, generator=g)
    if dtype.is_complex:
        return torch.complex(x.float(), torch.randint(-3, 4, shape, generator=g).float()).to(dtype)
    return (x > 0) if dtype == torch.bool else x.to(dtype)


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors in the order of ranks, which is the order of every backend."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total


def results_of(
    group: Any, parts: Sequence[torch.Tensor], order: Callable[[list[Any]], Iterable[Any]] = reversed
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the result of each collective, and what it has to be, from the tensors of all ranks of a group.

    All collectives are started before the first is waited for. ``order`` says in which order.
    """
    rank, size, own = group.rank, group.size, parts[group.rank]
    wholes = [torch.cat([part + k for k in range(size)]) for part in parts]  # a slice for every rank
    rounded = [
        whole.to(torch.bfloat16) for whole in wholes
    ]  # parts are cast to the dtype of the result before they are added
    stacks = [torch.stack([part, part.flip(0)]) for part in parts]  # gathered along the last dim
    gathered, slice_sum, float_sum = (
        torch.full_like(torch.cat(parts), -1),
        torch.full_like(own, -1),
        torch.full(own.shape, -1.0),
    )
    total, totals, sent = own.clone(), stacks[rank].clone(), own.clone()
    cut = rounded[rank].split([len(wholes[rank]) // 3, len(wholes[rank]) - len(wholes[rank]) // 3])
    shared, stacked = (group.all_gather_last(own_part, shared=True) for own_part in (own, stacks[rank]))
    works = [
        shared,
        stacked,
        group.start(Op("all_gather", "", gathered, own)),
        group.start(Op("reduce_scatter", "", slice_sum, [wholes[rank]])),
        group.start(Op("reduce_scatter", "", float_sum, cut)),
        group.start(Op("all_reduce", "", total)),
        group.start(Op("all_reduce", "", totals)),
        group.start(Op("broadcast", "", sent, src=size - 1)),
    ]
    for work in order(works):
        work.wait()
    assert shared.wait() is shared.wait()
    assert stacked.wait() is stacked.wait()
    return {
        "all_gather": (gathered, torch.cat(parts)),
        "all_gather_shared": (shared.wait(), torch.cat(parts)),
        "all_gather_shared of two dims": (stacked.wait(), torch.cat(stacks, -1)),
        "reduce_scatter": (slice_sum, sum_in_order([whole.view(size, -1)[rank] for whole in wholes])),
        "reduce_scatter to float32": (float_sum, sum_in_order([whole.float().view(size, -1)[rank] for whole in rounded])),
        "all_reduce": (total, sum_in_order(parts)),
        "all_reduce of two dims": (totals, sum_in_order(stacks)),
        "broadcast": (sent, parts[-1]),
    }
