"""The axes of a mesh as data: their names and sizes, and the position of each rank.

A mesh is a grid of ranks whose axes have names. ``replicate`` and ``shard`` are its *data axes*:
flat buffers are cut along ``shard`` and repeated along ``replicate``. Every other axis is a *model
axis*, such as ``tensor``, ``expert``, ``context`` or ``stage``: the model's own code communicates
along it. Ranks are numbered row by row, so neighbours differ in their index along the last axis.
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
        mesh: a number of ranks, a mapping from the names of axes to sizes, or a ``Mesh``. A data
            axis that is left out has one rank.
        name: name of the option that holds the mesh, for errors.

    Raises:
        ValueError: ``mesh`` is none of these, or a size is no positive whole number.
    """
    sizes: Any = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if isinstance(mesh, Integral) and not isinstance(mesh, bool):
        sizes = {"shard": int(mesh)}
    if not isinstance(sizes, Mapping) or not sizes or not all(map(_is_name, sizes)):
        raise ValueError(
            f'{name} must be a number of ranks, a shape such as {{"replicate": R, "shard": S}}, or a funcshard.Mesh; found '
            f"{mesh!r}: pass one of these; an axis has a name of letters, such as 'tensor'"
        )
    if not all(
        isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 1 for n in sizes.values()
    ):
        raise ValueError(
            f"{name} axes must be whole numbers of ranks, at least one each; found {dict(sizes)}: "
            "leave out an axis of one rank"
        )
    # A data axis of one rank gives the same order of ranks wherever it stands, so it stands first;
    # and both do if one of them has one rank and there is no other axis.
    axis_sizes = {axis: 1 for axis in AXES if sizes.get(axis, 1) == 1} | {
        axis: int(size) for axis, size in sizes.items()
    }
    return (
        {axis: axis_sizes[axis] for axis in AXES}
        if axis_sizes.keys() == set(AXES) and 1 in axis_sizes.values()
        else axis_sizes
    )


def _is_name(axis: Any) -> bool:
    return isinstance(axis, str) and axis.isidentifier()


def model_axes_of(axes: Mapping[str, int]) -> Axes:
    """Return the axes that are no data axes."""
    return tuple((axis, size) for axis, size in axes.items() if axis not in AXES)


def position_of(rank: int, axes: Mapping[str, int]) -> dict[str, int]:
    """Return the index of a rank along each axis; the inverse of ``rank_at``."""
    position = {}
    for axis, size in reversed(list(axes.items())):
        rank, position[axis] = rank // size, rank % size
    return {axis: position[axis] for axis in axes}


def rank_at(position: Mapping[str, int], axes: Mapping[str, int]) -> int:
    """Return the rank at an index along each axis; the inverse of ``position_of``."""
    rank = 0
    for axis, size in axes.items():
        rank = rank * size + position[axis]
    return rank


def axes_text(axes: Mapping[str, int], *, ones: Iterable[str] = AXES) -> str:
    """Return axes as text, such as ``2 replicate × 4 shard``.

    Arguments:
        axes: size of each axis.
        ones: the axes that are named even if they have one rank.
    """
    named = set(ones)
    return (
        " × ".join(f"{size} {axis}" for axis, size in axes.items() if size > 1 or axis in named)
        or "1 shard"
    )


def world_size_of(axes: Mapping[str, int]) -> int:
    """Return the number of ranks of a mesh."""
    return math.prod(axes.values())
