"""Small values that all ranks get: ``broadcast_object``, of one rank, and ``agree``, of all."""

from __future__ import annotations

import json
import numbers
from typing import Any

import torch

from funcshard._utils.options import outline
from funcshard._utils.torch_private import unwrapped
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core.checksum import on_every_rank
from funcshard.core.collectives import pmax
from funcshard.core.sharding import check_source


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
        raise TypeError(f"mesh must be a Mesh, as from init_mesh(); found {type(mesh).__name__}")
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
    if not isinstance(number, bool | numbers.Real):
        raise TypeError(
            f"agree takes a bool, a real number, or a tensor of one; found {outline(value)}: take "
            "its norm, or .all() of conditions"
        )
    is_bool = isinstance(number, bool)
    own = torch.tensor(float(not number if is_bool else number), dtype=torch.float64, device="cpu")
    largest = pmax(own.to(mesh.device), mesh, axis=tuple(mesh.groups)).item()
    return largest == 0.0 if is_bool else largest
