"""Two combinators: ``unshard`` gathers a unit for a function, ``reshard`` frees it until backward.

Both return pure functions. All state of a call lives in that call and in the autograd graph that it
returns, so calls may overlap, repeat, and fail at any point.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from funcshard._utils.options import module_remedy
from funcshard.comm import Mesh
from funcshard.core.buffer_comm import BufferComm
from funcshard.core.checks import same_axes
from funcshard.core.dtensor_leaves import dtensor_forms
from funcshard.core.prefetcher import slice_comms
from funcshard.core.unit import Unshard
from funcshard.plan import ChooseCast, UnitPlan, axes_text, cast_of


def unshard(
    apply: Callable[..., Any], unit: UnitPlan, mesh: Mesh, *, cast: ChooseCast | None = None
) -> Unshard:
    """Turn a function of a unit's leaves into a function of this rank's shard of the unit.

    Forward all-gathers the shard, and calls ``apply`` with the leaves as views of the gathered
    buffer. Backward reduce-scatters the leaves' gradients; if the unit is repeated along an axis,
    all-reduces add up those of the copies.

    The gathered leaves stay in memory as long as the autograd graph does, unless you ``reshard``.

    Arguments:
        apply: your ``apply(leaves, *args, **kwargs)``. ``leaves`` is the part of the parameter tree
            at the unit's path, without the leaves of units inside this one.
        unit: the unit, ``plan.units[name]``.
        mesh: the ranks, in the plan's shape.
        cast: ``cast(unit, buffer)`` -> the ``Cast`` that replaces the cast to ``param_dtype`` for
            that buffer, or ``None`` to keep it.

    Returns:
        ``f(shard, *args, **kwargs)``, which returns the result of ``apply``; ``shard`` is
        ``shards[unit.name]``. ``handle = f.start(shard)`` starts the gather early, for
        ``f(handle, *args, **kwargs)``.

    Raises:
        ValueError: the mesh does not have the plan's shape, or has no DeviceMesh for a leaf that is
            a DTensor; or, when ``f`` is called, ``shard`` is not this rank's shard of the unit.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(3, 2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     f = fs.unshard(lambda leaves, x: x @ leaves["w"], plan.units[""], mesh)
        ...     return f(shards[""], torch.ones(1, 3)).tolist()
        >>> fs.simulate(main, world_size=2)
        [[[3.0, 3.0]], [[3.0, 3.0]]]
    """
    if isinstance(apply, nn.Module) and next(apply.parameters(), None) is not None:
        raise TypeError(
            "unshard takes a function of leaves; found a module with parameters of its own, "
            f"{type(apply).__name__}: {module_remedy(apply, 'apply')}"
        )
    if not callable(apply) or not isinstance(unit, UnitPlan) or not isinstance(mesh, Mesh):
        raise TypeError(
            f"unshard takes a function of leaves, a unit and a mesh; found {type(apply).__name__}, "
            f"{type(unit).__name__} and {type(mesh).__name__}: a unit is plan.units[name], and its "
            "name for the root is ''"
        )
    if not same_axes(unit.mesh_axes, mesh):
        raise ValueError(
            f"unit {unit.title!r} was planned for a mesh of {axes_text(unit.mesh_axes)} ranks; "
            f"found {mesh.shape}: make the plan with make_plan(params, mesh)"
        )
    return unshard_with(apply, unit, mesh, unit_comms(unit, mesh, cast))


def unit_comms(unit: UnitPlan, mesh: Mesh, cast: ChooseCast | None) -> tuple[BufferComm, ...]:
    """Return the communication of each buffer of a unit."""
    return tuple(
        [BufferComm.of(mesh, unit, buffer, cast_of(cast, unit, buffer)) for buffer in unit.buffers]
    )


def unshard_with(
    apply: Callable[..., Any],
    unit: UnitPlan,
    mesh: Mesh,
    comms: Sequence[BufferComm],
    *,
    listed: bool = False,
) -> Unshard:
    """Return ``unshard``, with the communication of each buffer.

    With ``listed``, ``apply`` takes the unit's leaves as a list in their order.
    """
    return Unshard(
        apply=apply,
        unit=unit,
        mesh=mesh,
        comms=tuple(comms),
        dtensors=dtensor_forms(unit.leaves, mesh),
        listed=listed,
    )


def reshard(f: Unshard) -> Unshard:
    """Turn a function from ``unshard`` into one that frees the leaves from forward to backward.

    The gathered leaves are freed when forward returns, and gathered again when backward needs the
    first of them. In between, autograd keeps the shape and the position of each view of the
    gathered buffer, and not its data.

    If the plan lets a number of ranks hold the unit after forward, every rank of the mesh has to
    call ``reshard``. Under ``torch.func`` transforms, which allow no saved-tensor hooks, the leaves
    stay gathered; use ``remat`` there.

    Arguments:
        f: a function that ``unshard`` returned.

    Returns:
        A function of the same arguments and results.

    Raises:
        TypeError: ``f`` did not come from ``unshard``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(3, 2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     apply = lambda leaves, x: (x @ leaves["w"]).sum()
        ...     f = fs.reshard(fs.unshard(apply, plan.units[""], mesh))
        ...     shards = fs.shard(params, plan, mesh)
        ...     loss, grads = fs.value_and_grad(lambda s: f(s[""], torch.ones(1, 3)))(shards)
        ...     return loss.item(), grads[""]["float32"].tolist()
        >>> fs.simulate(main, world_size=2)
        [(6.0, [1.0, 1.0, 1.0]), (6.0, [1.0, 1.0, 1.0])]
    """
    if not isinstance(f, Unshard) or f.freed:
        raise TypeError(
            f"reshard takes what unshard returned; found {f!r}: write reshard(unshard(apply, unit, "
            "mesh))"
        )
    # Note: slices need process groups, which all ranks make together.
    return dataclasses.replace(f, freed=True, slices=slice_comms(f.unit, f.mesh, f.comms))
