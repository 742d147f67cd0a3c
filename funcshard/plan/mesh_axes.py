"""The axes of a mesh as data: their names and sizes, and the position of each rank.

Flat buffers are cut along ``shard`` and repeated along ``replicate``, the *data axes*. Every other
axis is a *model axis*: the model's own code communicates along it. Ranks are numbered row by row,
so neighbours differ in their index along the last axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

AXES = ("replicate", "shard")  # the data axes

Axes = tuple[tuple[str, int], ...]  # name and size of each axis, in the order of ranks


def mesh_axes_of(mesh: Any, name: str = "mesh") -> dict[str, int]:
    """Return the size of each axis, in the order of ranks, of a mesh in any form.

    Arguments:
        mesh: a number of ranks, sizes by the names of axes, or a ``Mesh``. A data axis that is left
            out has one rank.
        name: name of the option that holds the mesh, for errors.

    Raises:
        ValueError: ``mesh`` is none of these, or a size isn't a positive whole number.
    """
    sizes: Any = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    # NumPy numbers are numbers of ranks too; True is none.
    if isinstance(mesh, Integral) and not isinstance(mesh, bool):
        sizes = {"shard": int(mesh)}
    if (
        not isinstance(sizes, Mapping)
        or not sizes
        or not all(
            isinstance(axis_name, str) and axis_name.isidentifier() for axis_name in sizes
        )
    ):
        raise ValueError(
            f'{name} must be a number of ranks, a shape such as {{"replicate": R, "shard": S}}, or '
            f"a funcshard.Mesh; found {mesh!r}: pass one of these; an axis has a name of letters, "
            "such as 'tensor'"
        )
    axis_ranks = [
        int(n)
        for n in sizes.values()
        if isinstance(n, Integral) and not isinstance(n, bool)
    ]
    if len(axis_ranks) < len(sizes) or min(axis_ranks) < 1:
        raise ValueError(
            f"{name} axes must be whole numbers of ranks, at least one each; found {dict(sizes)}: "
            "leave out an axis of one rank"
        )
    # A data axis of one rank gives the same order of ranks wherever it stands, so it stands first;
    # and both do if one of them has one rank and there is no other axis.
    axis_sizes = {axis_name: 1 for axis_name in AXES if sizes.get(axis_name, 1) == 1}
    axis_sizes |= dict(zip(sizes, axis_ranks, strict=True))
    if axis_sizes.keys() == set(AXES) and 1 in axis_ranks:
        return {axis_name: axis_sizes[axis_name] for axis_name in AXES}
    return axis_sizes


def position_of(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the index of a rank, modulo their number, along each axis; see ``rank_at``."""
    position = {}
    # The last axis is the innermost one, so its index is the remainder.
    for axis_name, axis_size in reversed(list(axes.items())):
        rank, position[axis_name] = rank // axis_size, rank % axis_size
    return {axis_name: position[axis_name] for axis_name in axes}


def rank_at(position: Mapping[str, int], axes: Mapping[str, int]) -> int:
    """Return the rank at an index along each axis, 0 by default; the inverse of ``position_of``."""
    rank = 0
    for axis_name, axis_size in axes.items():
        rank = rank * axis_size + position.get(axis_name, 0)
    return rank


def axes_text(axes: Mapping[str, int], *, ones: Iterable[str] = AXES) -> str:
    """Return axes as text, as in ``2 replicate × 4 shard``, with those of one rank in ``ones``."""
    named_axes = {*ones}
    axis_parts = [
        f"{axis_size} {axis_name}"
        for axis_name, axis_size in axes.items()
        if axis_size > 1 or axis_name in named_axes
    ]
    return " × ".join(axis_parts) or "1 shard"


def mesh_text(mesh_axes: Mapping[str, int]) -> str:
    """Return the ranks of a mesh as text, such as ``8 ranks = 2 replicate × 4 shard``."""
    world_size = math.prod(mesh_axes.values())
    ranks_text = f"{world_size} rank{'s' * (world_size > 1)}"
    # A mesh of the shard axis alone is nothing but its ranks.
    if world_size == mesh_axes["shard"]:
        return ranks_text
    ones = AXES if mesh_axes["replicate"] > 1 else ()
    return f"{ranks_text} = {axes_text(mesh_axes, ones=ones)}"
