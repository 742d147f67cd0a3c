"""Collectives along the axes of a mesh, by their names in JAX: ``psum``, ``all_gather`` and others.

Each is differentiable any number of times, forwards and backwards, and under ``vmap``: all of them
are made of one autograd Function, ``Collective``. The gradient is the exact adjoint. Values of
Python have two more: ``broadcast_object``, of one rank's, and ``agree``, of all.
"""

from __future__ import annotations

import json
import math
import operator
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from typing import Any, TypeVar

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_flag, outline
from funcshard._utils.torch_private import (
    signed,
    transforms_active,
    unseen,
    untraced,
    unwrapped,
)
from funcshard.comm import Mesh, Topology, all_gather_texts
from funcshard.core.basis import noted, refuse_mixed_ranks
from funcshard.core.checks import check_source
from funcshard.core.checksum import on_every_rank
from funcshard.core.grad_reducer import current_reducer, note_collective
from funcshard.core.plain_collectives import AxisComm, SumComm
from funcshard.plan import AXES, position_of

T = TypeVar("T")
Axis = str | Sequence[str] | None  # one or several names; None for the data axes


# --- sums -----------------------------------------------------------------------------------------


@untraced
def psum(x: T, mesh: Mesh, *, axis: Axis = None) -> T:
    """Return the sum of ``x`` over the ranks along mesh axes.

    ``psum`` is differentiable, and its own adjoint: its gradient is the sum of the ranks'
    gradients.

    Arguments:
        x: your tensor, or tree of tensors, with the same shapes and dtypes on all ranks.
        mesh: the ranks.
        axis: the mesh axis, or a tuple of several; by default the data axes, ``replicate`` and
            ``shard``.

    Raises:
        TypeError: a leaf of ``x`` is not a tensor, or holds truth values, which have no sum.
        ValueError: the mesh has no such axis.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.simulate(lambda mesh: fs.psum(torch.tensor([1.0, 2.0]), mesh).tolist(), world_size=3)
        [[3.0, 6.0], [3.0, 6.0], [3.0, 6.0]]
        >>> def main(mesh):
        ...     return fs.psum(torch.tensor(mesh.rank), mesh, axis="tensor").item()
        >>> fs.simulate(main, {"shard": 2, "tensor": 2})
        [1, 1, 5, 5]

    Source: ``jax.lax.psum``.
    """
    paths = iter([""] if isinstance(x, torch.Tensor) else tree.paths(x))

    def summed(leaf: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        # The sum runs over all axes along which the data counts as repeated.
        other_axes = tuple(name for name in mesh.groups if name not in names)
        comm = SumComm(Topology(mesh, False, other_axes), label=next(paths))
        return Collective.apply(leaf, comm)

    return _mapped("psum", x, mesh, summed, axis, adds=True)


def psum_world(x: T, mesh: Mesh) -> T:
    """Return the sum of ``x`` over all ranks of the mesh, model axes included."""
    return psum(x, mesh, axis=tuple(mesh.groups))


@untraced
def pmean(x: T, mesh: Mesh, *, axis: Axis = None) -> T:
    """Return the mean of ``x`` over the ranks along mesh axes.

    ``pmean`` is differentiable, and its own adjoint: its gradient is the mean of the ranks'
    gradients.

    Arguments:
        x: a floating-point tensor, or a tree of them, with the same shapes and dtypes on all ranks.
        mesh: the ranks.
        axis: as in ``psum``.

    Raises:
        TypeError: a leaf of ``x`` is not a tensor.
        ValueError: the mesh has no such axis.

    Example:
        >>> import torch, funcshard as fs
        >>> fs.simulate(
        ...     lambda mesh: fs.pmean({"loss": torch.tensor(float(mesh.rank))}, mesh), world_size=2
        ... )
        [{'loss': tensor(0.5000)}, {'loss': tensor(0.5000)}]

    Source: ``jax.lax.pmean``.
    """
    summed_tree = psum(x, mesh, axis=axis)
    rank_count = _count(mesh, axis)
    mean_tree: T = tree.map(lambda leaf: leaf / rank_count, summed_tree)
    return mean_tree


@untraced
def pmax(x: T, mesh: Mesh, *, axis: Axis = None) -> T:
    """Return the largest of the ranks' values along mesh axes, element by element.

    ``pmax`` is differentiable: the gradient goes to the rank with the largest value, in equal parts
    to several. It gathers all ranks' tensors, so use it for small ones.

    Arguments:
        x: as in ``psum``.
        mesh: the ranks.
        axis: as in ``psum``.

    Raises:
        TypeError: a leaf of ``x`` is not a tensor, or is complex.
        ValueError: the mesh has no such axis.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     return fs.pmax(torch.tensor([mesh.rank, -mesh.rank]), mesh, axis="shard").tolist()
        >>> fs.simulate(main, world_size=3)
        [[2, 0], [2, 0], [2, 0]]

    Source: ``jax.lax.pmax``, which has no gradient.
    """
    _check_tensors("pmax", x)
    for leaf in tree.leaves(x):
        if leaf.is_complex():
            raise TypeError(
                f"pmax compares, and complex numbers have no order; found {leaf.dtype}: pass "
                "x.abs(), or real and imaginary part"
            )
    # Why amax: it divides the gradient among equal values; max(0) gives one all of it.
    return _mapped(
        "pmax",
        x,
        mesh,
        lambda leaf, names: _gather(leaf, mesh, names, "pmax").amax(0),
        axis,
    )


# --- gathers and exchanges ------------------------------------------------------------------------


@untraced
def all_gather(
    x: T, mesh: Mesh, *, axis: Axis = None, dim: int = 0, tiled: bool = False
) -> T:
    """Return the tensors of all ranks along mesh axes, stacked in the order of ranks.

    The adjoint is ``psum_scatter`` with the same arguments.

    Arguments:
        x: as in ``psum``.
        mesh: the ranks.
        axis: as in ``psum``. With several axes the first one changes slowest.
        dim: the dimension of the result that counts ranks.
        tiled: whether to concatenate along ``dim``, and not to stack along a new dimension.

    Raises:
        TypeError: a leaf of ``x`` is not a tensor.
        ValueError: the mesh has no such axis, or the tensor no such dimension.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     x = torch.tensor([[mesh.rank]])
        ...     whole = fs.all_gather(x, mesh, axis="tensor", dim=1, tiled=True)
        ...     return fs.all_gather(x, mesh, axis="tensor").shape, whole.tolist()
        >>> fs.simulate(main, {"tensor": 2})[0]
        (torch.Size([2, 1, 1]), [[0, 1]])

    Source: ``jax.lax.all_gather``.
    """
    check_flag("tiled", tiled)

    def gathered(leaf: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        dim_index = _dim("all_gather", "dim", leaf, dim, extra=int(not tiled))
        return _join(_gather(leaf, mesh, names, "all_gather"), dim_index, tiled)

    return _mapped("all_gather", x, mesh, gathered, axis)


@untraced
def psum_scatter(
    x: T, mesh: Mesh, *, axis: Axis = None, dim: int = 0, tiled: bool = False
) -> T:
    """Add the ranks' tensors along mesh axes, and return this rank's slice of the sum.

    The adjoint is ``all_gather`` with the same arguments.

    Arguments:
        x: as in ``psum``.
        mesh: the ranks.
        axis: as in ``psum``. With several axes the first one changes slowest.
        dim: the dimension that is cut into one slice for each rank.
        tiled: whether a slice may have several indices of ``dim``, which the result keeps. If not,
            ``dim`` has the size of the number of ranks, and goes.

    Raises:
        TypeError: a leaf of ``x`` is not a tensor, or holds truth values, which have no sum.
        ValueError: the mesh has no such axis, or the tensor cannot be cut so.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     return fs.psum_scatter(torch.arange(4), mesh, tiled=True).tolist()
        >>> fs.simulate(main, world_size=2)
        [[0, 2], [4, 6]]

    Source: ``jax.lax.psum_scatter``.
    """
    check_flag("tiled", tiled)

    def scattered(leaf: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        dim_index = _dim("psum_scatter", "dim", leaf, dim)
        rank_rows = _split("psum_scatter", leaf, dim_index, _count(mesh, names), tiled)
        axis_sizes = [mesh.groups[name].size for name in names]
        rank_rows = rank_rows.reshape(*axis_sizes, *rank_rows.shape[1:])
        # Note: each reduction takes dim 0 away, so the dim of the next axis comes first.
        for name in names:
            rank_rows = Collective.apply(
                rank_rows, AxisComm("reduce_scatter", mesh, name, "psum_scatter")
            )
        return rank_rows

    return _mapped("psum_scatter", x, mesh, scattered, axis, adds=True)


@untraced
def all_to_all(
    x: T,
    mesh: Mesh,
    *,
    axis: Axis = None,
    split_dim: int = 0,
    concat_dim: int = 0,
    tiled: bool = False,
) -> T:
    """Send the i-th slice of ``x`` to the i-th rank, and return the slices that this rank receives.

    The adjoint is ``all_to_all`` with ``split_dim`` and ``concat_dim`` in each other's place.

    Arguments:
        x: as in ``psum``.
        mesh: the ranks.
        axis: as in ``psum``. With several axes the first one changes slowest.
        split_dim: the dimension that is cut into one slice for each rank.
        concat_dim: the dimension of the result that counts the ranks that the slices come from.
        tiled: whether slices may have several indices of ``split_dim``, and are concatenated along
            ``concat_dim``. If not, ``split_dim`` has the size of the number of ranks and goes, and
            ``concat_dim`` is new.

    Raises:
        TypeError: a leaf of ``x`` is not a tensor.
        ValueError: the mesh has no such axis, or the tensor cannot be cut so.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     return fs.all_to_all(torch.arange(2) + 10 * mesh.rank, mesh, axis="expert").tolist()
        >>> fs.simulate(main, {"expert": 2})
        [[0, 10], [1, 11]]

    Source: ``jax.lax.all_to_all``.
    """
    check_flag("tiled", tiled)

    def exchanged(leaf: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        place = _dim("all_to_all", "split_dim", leaf, split_dim)
        concat_index = _dim("all_to_all", "concat_dim", leaf, concat_dim)
        axis_sizes = [mesh.groups[name].size for name in names]
        rank_rows = _split("all_to_all", leaf, place, math.prod(axis_sizes), tiled)
        row_shape = rank_rows.shape[1:]
        rank_rows = rank_rows.reshape(*axis_sizes, *row_shape)
        for dim_index, (name, size) in enumerate(zip(names, axis_sizes, strict=True)):
            comm = AxisComm(
                kind="all_to_all",
                mesh=mesh,
                axis=name,
                name="all_to_all",
                send=(1,) * size,
                receive=(1,) * size,
                busiest=size - 1,
            )
            rank_rows = Collective.apply(rank_rows.movedim(dim_index, 0), comm).movedim(
                0, dim_index
            )
        return _join(
            rank_rows.reshape(math.prod(axis_sizes), *row_shape), concat_index, tiled
        )

    return _mapped("all_to_all", x, mesh, exchanged, axis)


@untraced
def ppermute(x: T, mesh: Mesh, perm: Iterable[tuple[int, int]], *, axis: Axis = None) -> T:
    """Send ``x`` from ranks to ranks along mesh axes; return the tensor that this rank receives.

    A rank that no pair sends to gets zeros. The adjoint sends the gradients back.

    Arguments:
        x: as in ``psum``.
        mesh: the ranks.
        perm: pairs ``(source, target)`` of indices along the axis, the same on every rank, each
            source and each target in one pair.
        axis: as in ``psum``. With several axes the first one changes slowest.

    Raises:
        TypeError: a leaf of ``x`` is not a tensor.
        ValueError: the mesh has no such axis, or ``perm`` isn't a list of such pairs.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     ring = [(0, 1), (1, 2), (2, 0)]
        ...     return fs.ppermute(torch.tensor(mesh.rank), mesh, ring, axis="context").item()
        >>> fs.simulate(main, {"context": 3})
        [2, 0, 1]

    Source: ``jax.lax.ppermute``.
    """
    axis_names = _names(mesh, axis)
    axis_sizes = {name: mesh.groups[name].size for name in axis_names}
    position_at = lambda index: tuple(position_of(index, axis_sizes).values())  # noqa: E731
    index_pairs = _pairs(perm, math.prod(axis_sizes.values()), axis_names)
    position_pairs = [
        (position_at(source), position_at(target)) for source, target in index_pairs
    ]
    # Why in words: ranks with different pairs would wait for data that no rank sends. The words are
    # part of the collective's label, which has to be the same on every rank.
    pairs_text = str(sorted(index_pairs))
    if len(pairs_text) >= 60:
        checksum = zlib.crc32(pairs_text.encode())
        pairs_text = f"{pairs_text[:40]}... (checksum {checksum:08x})"
    return _mapped(
        "ppermute",
        x,
        mesh,
        lambda leaf, _: _permuted(
            leaf, mesh, axis_names, position_pairs, f"ppermute by {pairs_text}"
        ),
        axis,
    )


def axis_index(mesh: Mesh, *, axis: Axis = None) -> int:
    """Return the index of this rank along mesh axes.

    Arguments:
        mesh: the ranks.
        axis: as in ``psum``. With several axes the first one changes slowest.

    Raises:
        ValueError: the mesh has no such axis.

    Example:
        >>> import funcshard as fs
        >>> fs.simulate(lambda mesh: fs.axis_index(mesh, axis="tensor"), {"shard": 2, "tensor": 2})
        [0, 1, 0, 1]

    Source: ``jax.lax.axis_index``.
    """
    rank_index = 0
    for name in _names(mesh, axis):
        rank_index = rank_index * mesh.groups[name].size + mesh.groups[name].rank
    return rank_index


# --- values of Python -----------------------------------------------------------------------------


def broadcast_object(value: Any, mesh: Mesh, src: int = 0) -> Any:
    """Return the value of rank ``src`` on every rank. Every rank has to call.

    The value travels as JSON. (``torch.distributed.broadcast_object_list`` runs the code in a
    pickle.)

    Arguments:
        value: on rank ``src``, ``None``, a bool, an int, a float, a string, or lists and
            dictionaries of these with strings as keys. What you pass on other ranks is ignored.
        mesh: the ranks.
        src: the rank whose value is returned.

    Returns:
        A copy of the value.

    Raises:
        TypeError: JSON can't hold the value exactly, such as a tuple. Every rank raises.
        ValueError: ``src`` isn't a rank of the mesh.

    Example:
        >>> import funcshard as fs
        >>> def main(mesh):
        ...     return fs.broadcast_object({"run": "a7"} if mesh.rank == 0 else None, mesh)
        >>> fs.simulate(main, world_size=2)
        [{'run': 'a7'}, {'run': 'a7'}]

    Source: ``torch.distributed.broadcast_object_list``.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh must be a Mesh, as from init_mesh(); found {type(mesh).__name__}"
        )
    check_source(src, mesh)
    json_text = ""
    with on_every_rank(mesh):
        if mesh.rank == src:
            json_text = json.dumps(value)
            # Why as text: it tells a tuple from a list, a number from a key, and NaN from nothing.
            if repr(json.loads(json_text)) != repr(value):
                raise TypeError(
                    "a value to broadcast must be None, a bool, an int, a float, a str, or a list "
                    "or dict of these with strings as keys, which JSON holds exactly; found "
                    f"{value!r:.200}: convert it, or send a tensor with psum or shard"
                )
    # Why gathered: a broadcast needs the length on every rank. The other texts are empty.
    return json.loads(all_gather_texts(mesh, json_text, "an object")[src])


def agree(value: Any, mesh: Mesh) -> Any:
    """Return one value for all ranks: whether it's true on every rank, or the largest number.

    A loop whose length depends on data has to end on all ranks at once, because ranks that call
    collectives wait for each other: ``while not fs.agree(error < tolerance, mesh)``. Every rank has
    to call.

    Arguments:
        value: this rank's bool or real number, or a tensor of one.
        mesh: the ranks.

    Returns:
        A bool: whether ``value`` is true on every rank. Or a float: the largest of the ranks'
        numbers, NaN if one is NaN. For the smallest, or for any, negate before and after.

    Raises:
        TypeError: ``value`` isn't a bool, a real number or a tensor of one.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     x, steps = torch.tensor(10.0 * (1 + mesh.rank)), 0
        ...     while not fs.agree(x < 1, mesh):
        ...         x, steps = x / 2, steps + 1
        ...     return steps, fs.agree(x, mesh)
        >>> fs.simulate(main, world_size=2)
        [(5, 0.625), (5, 0.625)]

    Source: ``jax.lax.pmax``, and ``psum`` of a condition.
    """
    number = value
    # Why unwrapped: the loop may run inside a transform, which does not see its number of steps.
    if isinstance(value, torch.Tensor) and unwrapped(value).numel() == 1:
        number = unwrapped(value).item()
    if not isinstance(number, bool | Real):
        raise TypeError(
            f"agree takes a bool, a real number, or a tensor of one; found {outline(value)}: take "
            "its norm, or .all() of conditions"
        )
    # Note: of bools, ranks take the largest negation, which is 0 if all are true.
    is_bool = isinstance(number, bool)
    own = torch.tensor(
        float(not number if is_bool else number), dtype=torch.float64, device="cpu"
    )
    largest = pmax(own.to(mesh.device), mesh, axis=tuple(mesh.groups)).item()
    return largest == 0.0 if is_bool else largest


# --- one leaf -------------------------------------------------------------------------------------


class Collective(torch.autograd.Function):
    """``Collective.apply(tensor, comm)``: return the result of the collective on this rank."""

    @staticmethod
    @signed
    @unseen
    def forward(tensor: torch.Tensor, comm: AxisComm | SumComm) -> Any:
        return comm.run(tensor)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.comm, ctx.loop = inputs[1], None
        # Within value_and_grad no loop over unit vectors runs, unless a transform does.
        if transforms_active() or (
            ctx.needs_input_grad[0] and current_reducer.get() is None
        ):
            ctx.comm, ctx.loop = noted(ctx.comm)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        refuse_mixed_ranks(ctx.comm, ctx.loop)
        # Note: the adjoint is this Function too, so gradients can be differentiated again.
        return Collective.apply(grad, ctx.comm.adjoint), None

    @staticmethod
    def jvp(ctx: Any, tensor: torch.Tensor, *_: None) -> Any:
        refuse_mixed_ranks(ctx.comm, ctx.loop)
        return Collective.apply(tensor, ctx.comm)

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, tensor: torch.Tensor, comm: AxisComm | SumComm
    ) -> Any:
        # Why last: collectives run over dim 0, whose rows have all other dims.
        out = Collective.apply(tensor.movedim(in_dims[0], -1), comm)
        return out, out.ndim - 1


def _gather(
    leaf: torch.Tensor, mesh: Mesh, names: tuple[str, ...], caller: str
) -> torch.Tensor:
    shape = leaf.shape
    # The last axis first, so that the first one ends up in front.
    for name in reversed(names):
        leaf = Collective.apply(leaf, AxisComm("all_gather", mesh, name, caller))
    return leaf.reshape(_count(mesh, names), *shape)


def _permuted(
    leaf: torch.Tensor,
    mesh: Mesh,
    names: tuple[str, ...],
    pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
    label: str,
) -> torch.Tensor:
    """Send a tensor along one axis after another, until it has its target's index along all."""
    own_position = tuple(mesh.groups[name].rank for name in names)
    # Under way a rank may hold several tensors, or none: the pairs of those, and their rows.
    held_pairs = [pair for pair in pairs if pair[0] == own_position]
    held_rows, has_moved = leaf.unsqueeze(0)[: len(held_pairs)], False
    for i, name in enumerate(names):
        # The pairs whose tensors the ranks along this axis hold now: they have their target's
        # indices along earlier axes, and their source's along later ones.
        own_line = own_position[:i], own_position[i + 1 :]
        line_pairs = [pair for pair in pairs if (pair[1][:i], pair[0][i + 1 :]) == own_line]
        moving_pairs = [
            (source[i], target[i])
            for source, target in line_pairs
            if source[i] != target[i]
        ]
        if not moving_pairs:
            continue  # every rank along the axis sees that nothing moves
        # The rows that are sent lie in the order of targets, and those received in that of sources.
        row_order = sorted(
            range(len(held_pairs)), key=lambda row: (held_pairs[row][1][i], held_pairs[row])
        )
        # In order already: no copy.
        if row_order != list(range(len(row_order))):
            held_rows = torch.stack([held_rows[row] for row in row_order])
        received_pairs = [pair for pair in line_pairs if pair[1][i] == own_position[i]]
        received_pairs.sort(key=lambda pair: (pair[0][i], pair))
        ranks = range(mesh.groups[name].size)
        sent_counts = Counter(target[i] for _, target in held_pairs)
        received_counts = Counter(source[i] for source, _ in received_pairs)
        busiest_rows = max(
            max(Counter(ends).values()) for ends in zip(*moving_pairs, strict=True)
        )
        comm = AxisComm(
            kind="ppermute",
            mesh=mesh,
            axis=name,
            name=label,
            send=tuple([sent_counts[rank] for rank in ranks]),
            receive=tuple([received_counts[rank] for rank in ranks]),
            busiest=busiest_rows,
        )
        held_rows = Collective.apply(held_rows, comm)
        held_pairs, has_moved = received_pairs, True
    if held_pairs and has_moved:
        return held_rows[0]
    if held_pairs:
        # Why a clone: the result of a collective shares no memory with its argument.
        return held_rows[0].clone()
    # Why a sum, of no rows: a rank that receives zeros takes part in the backward too.
    return held_rows.sum(0, dtype=held_rows.dtype)


def _split(
    caller: str, leaf: torch.Tensor, dim: int, ranks: int, tiled: bool
) -> torch.Tensor:
    """Return the slices of ``leaf`` along ``dim``, one for each rank, stacked along dim 0."""
    dim_size = leaf.shape[dim]
    rule, remedy = f"a multiple of the {ranks} ranks", "pad it"
    if not tiled:
        rule = f"as large as the number of ranks, {ranks}"
        if dim_size % ranks == 0:
            remedy = "pass tiled=True"
    if dim_size % ranks or not (tiled or dim_size == ranks):
        raise ValueError(
            f"{caller} cuts dim {dim} of its tensor into one slice for each rank, so it must be "
            f"{rule}; found the shape {tuple(leaf.shape)}: {remedy}"
        )
    if not tiled:
        return leaf.movedim(dim, 0)
    return leaf.unflatten(dim, (ranks, dim_size // ranks)).movedim(dim, 0)


def _join(rows: torch.Tensor, dim: int, tiled: bool) -> torch.Tensor:
    moved_rows = rows.movedim(0, dim)
    return moved_rows.flatten(dim, dim + 1) if tiled else moved_rows


# --- arguments ------------------------------------------------------------------------------------


def _mapped(
    caller: str,
    x: T,
    mesh: Mesh,
    f: Callable[[torch.Tensor, tuple[str, ...]], torch.Tensor],
    axis: Axis,
    *,
    adds: bool = False,
) -> T:
    """Return ``f(leaf, names)`` of each leaf of ``x``, after checks."""
    _check_tensors(caller, x, adds=adds)
    axis_names = _names(mesh, axis)
    note_collective(mesh)
    tree_leaves, unflatten = tree.flatten(x)
    mapped_tree: T = unflatten([f(leaf, axis_names) for leaf in tree_leaves])
    return mapped_tree


def _names(mesh: Mesh, axis: Axis) -> tuple[str, ...]:
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"a collective takes a tensor, or a tree of them, and then the mesh; found {mesh!r} in "
            "place of the mesh: name the axis by keyword, as in psum(x, mesh, axis='tensor')"
        )
    return AXES if axis is None else mesh.names(axis)


def _count(mesh: Mesh, axis: Axis) -> int:
    return math.prod(mesh.groups[name].size for name in _names(mesh, axis))


def _check_tensors(caller: str, x: Any, *, adds: bool = False) -> None:
    for leaf_index, leaf in enumerate(tree.leaves(x)):
        if not isinstance(leaf, torch.Tensor):
            path = tree.describe(x)[2][leaf_index]
            place = path and f" at {path!r}"
            remedy = "make it one with torch.tensor(..., device=mesh.device)"
            if isinstance(leaf, Mesh):
                remedy = f"the tensor comes before the mesh, as in {caller}(x, mesh)"
            raise TypeError(
                f"{caller} takes a tensor, or a tree of tensors; found {type(leaf).__name__}"
                f"{place}: {remedy}"
            )
        if adds and leaf.dtype == torch.bool:
            raise TypeError(
                f"{caller} adds, and a sum of bool tensors isn't a bool; found torch.bool: count "
                "with psum(x.int(), mesh); psum(x.int(), mesh) > 0 says whether any rank has it"
            )


def _dim(caller: str, name: str, leaf: torch.Tensor, dim: int, extra: int = 0) -> int:
    """Return ``dim`` counted from the first, of ``leaf`` with ``extra`` more dimensions."""
    ndim = leaf.ndim + extra
    # True is an Integral, and never meant as a dimension.
    is_whole = isinstance(dim, Integral) and not isinstance(dim, bool)
    if is_whole and -ndim <= int(dim) < ndim:
        return int(dim) % ndim
    rule = f"from {-ndim} to {ndim - 1}"
    if not ndim:
        rule = "and its tensor has none"
    error_type = ValueError if is_whole else TypeError
    raise error_type(
        f"{name} of {caller} must be the number of a dimension, {rule}; found {dim!r}: the shape "
        f"of the tensor is {tuple(leaf.shape)}"
    )


def _pairs(perm: Any, ranks: int, names: Sequence[str]) -> list[tuple[int, int]]:
    try:
        index_pairs = [
            (operator.index(source), operator.index(target)) for source, target in perm
        ]
    except (TypeError, ValueError):
        # Which the next check refuses.
        index_pairs = [(-1, -1)]
    source_indices, target_indices = (
        [source for source, _ in index_pairs],
        [target for _, target in index_pairs],
    )
    all_inside = all(0 <= index < ranks for index in (*source_indices, *target_indices))
    if (
        not all_inside
        or len(set(source_indices)) < len(index_pairs)
        or len(set(target_indices)) < len(index_pairs)
    ):
        raise ValueError(
            f"perm must be pairs (source, target) of indices along {', '.join(names)}, from 0 to "
            f"{ranks - 1}, each source and each target once; found {perm!r}: a ring is [(i, (i + "
            f"1) % {ranks}) for i in range({ranks})]"
        )
    return index_pairs
