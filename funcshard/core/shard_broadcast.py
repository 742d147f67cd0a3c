"""Values that every rank holds, such as a learned learning rate, for arithmetic on shards.

R ranks with copies of one shard compute one thing. A unit that gathers the result gives each copy
the whole gradient, whereas the gradients of a value's copies elsewhere are parts that add up. So a
value on its way to shards becomes an R-th of it: ``_Copies`` is the mean of R equal variables, and
its transpose divides by R.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.torch_private import signed, untraced
from funcshard.comm import Mesh, Topology
from funcshard.core.checks import check_fits, other_leaves
from funcshard.core.collectives import pmean
from funcshard.plan import BufferPlan, LeafSpec, Plan


@untraced
def broadcast_to_shards(value: Any, plan: Plan, mesh: Mesh) -> dict[str, dict[str, torch.Tensor]]:
    """Prepare a value that all ranks hold for arithmetic with each shard, differentiably.

    Use it for a learned rate in ``shard - rate * grad``, or a scale for each leaf. Where ranks hold
    copies of a shard (``no_shard``, a replicate axis, a model axis), the gradient counts their
    computation once. On each rank you get its part of the value's gradient: add the parts up with
    ``psum`` along all axes, or let the value be a leaf of a plan, whose unit does so.

    Arguments:
        value: a tensor, the same on every rank; or a tree like the params of the plan, of tensors
            that can be expanded to the shapes of the leaves.
        plan: the plan of the shards.
        mesh: the ranks.

    Returns:
        A tree like the plan's shards: the tensor itself for each shard, or this rank's elements of
        the tree, with zeros for the padding.

    Raises:
        ValueError: the mesh, the tree or a leaf does not fit the plan.
        TypeError: the value, or a leaf of it, is not a tensor.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh, strategy="no_shard")
        ...     f = fs.unshard(lambda leaves: leaves["w"].sum(), plan.units[""], mesh)
        ...     shard = fs.shard(params, plan, mesh)[""]["float32"]
        ...     def loss_fn(scale):
        ...         scales = fs.broadcast_to_shards(scale, plan, mesh)
        ...         return f({"float32": shard * scales[""]["float32"]})
        ...     _, grad = fs.value_and_grad(loss_fn)(torch.tensor(1.0))
        ...     return fs.psum(grad, mesh).item()
        >>> fs.simulate(main, world_size=2)
        [3.0, 3.0]

    Source: ``pmean`` in ``jax.shard_map``, from a value that varies along the axes of copies to one
    that does not.
    """
    check_fits(plan, mesh)
    is_tensor = isinstance(value, torch.Tensor)
    by_path = {} if is_tensor else _by_path(value, plan)
    values_by_unit: dict[str, dict[str, torch.Tensor]] = {}
    for unit in plan.unit_list:
        device = torch.device("cpu") if unit.offload else mesh.device
        values_by_unit[unit.name] = {}
        for buffer in unit.buffers:
            local_values = value if is_tensor else _elements(by_path, buffer, mesh)
            # Along these axes ranks hold copies of the shard.
            copy_axes = tuple(name for name, _ in Topology.of(buffer, unit, mesh).repeated)
            local_values = local_values.to(device)
            if copy_axes:
                local_values = _Copies.apply(local_values, mesh, copy_axes, True)
            values_by_unit[unit.name][buffer.key] = local_values
    return values_by_unit


def part_of_copies(value: torch.Tensor, mesh: Mesh, axes: tuple[str, ...]) -> torch.Tensor:
    """Return this rank's part of a value that all ranks along ``axes`` computed from copies.

    The parts add up to the value. Their adjoint gives each copy the whole gradient, as it has
    everywhere else, and not a part of it.
    """
    return _Copies.apply(value, mesh, axes, False) if axes else value


class _Copies(torch.autograd.Function):
    """``_Copies.apply(value, mesh, axes, whole)``: a value on its way to copies, or its gradient.

    With ``whole`` it returns the value, for a computation that all ranks along ``axes`` do alike.
    Without, it returns this rank's part of a gradient that they all hold. These are adjoints.
    """

    @staticmethod
    @signed
    def forward(value: torch.Tensor, mesh: Mesh, axes: tuple[str, ...], whole: bool) -> Any:
        if whole:
            # A view, because a Function must not return its input itself.
            return value.view_as(value)
        return value / math.prod(mesh.groups[name].size for name in axes)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.mesh, ctx.axes, ctx.whole = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        if not ctx.whole:
            # Why a mean: ranks may use their parts differently, as in a loss that adds parts up
            # with other weights on each rank.
            grad = pmean(grad, ctx.mesh, axis=ctx.axes)
        return _Copies.apply(grad, ctx.mesh, ctx.axes, not ctx.whole), None, None, None

    @staticmethod
    def jvp(ctx: Any, value: torch.Tensor, *_: None) -> Any:
        return _Copies.apply(value, ctx.mesh, ctx.axes, ctx.whole)

    @staticmethod
    def vmap(info: Any, in_dims: Any, value: torch.Tensor, *rest: Any) -> Any:
        return _Copies.apply(value, *rest), in_dims[0]


def _by_path(value: Any, plan: Plan) -> dict[str, torch.Tensor]:
    _, leaves, paths = tree.describe(value)
    by_path = dict(zip(paths, leaves, strict=True))
    for path, leaf in by_path.items():
        if not isinstance(leaf, torch.Tensor):
            path_text = path and f" at {path!r}"
            raise TypeError(
                "broadcast_to_shards takes a tensor, or a tree of them; found "
                f"{type(leaf).__name__}{path_text}: make it one with torch.tensor(..., "
                "device=mesh.device)"
            )
    if difference := other_leaves(by_path, plan):
        raise ValueError(
            "a tree for broadcast_to_shards must have the leaves of the params; "
            f"{difference}: for one value for all shards, pass a tensor"
        )
    return by_path


def _elements(by_path: dict[str, torch.Tensor], buffer: BufferPlan, mesh: Mesh) -> torch.Tensor:
    """Return the elements of whole leaves in this rank's shard of ``buffer``."""
    leaf_pieces = []
    for leaf in buffer.leaves:
        leaf_part = buffer.part(leaf, mesh.shard.rank)
        leaf_pieces.append(_expanded(by_path[leaf.path], leaf).reshape(-1)[leaf_part.in_leaf])
    padding_numel = buffer.shard_numel - sum(piece.numel() for piece in leaf_pieces)
    return torch.cat([*leaf_pieces, leaf_pieces[0].new_zeros(padding_numel)])


def _expanded(value: torch.Tensor, leaf: LeafSpec) -> torch.Tensor:
    try:
        return value.expand(leaf.shape)
    except RuntimeError as error:
        raise ValueError(
            f"leaf {leaf.path!r} of a tree for broadcast_to_shards must expand to the shape "
            f"{leaf.shape}; found the shape {tuple(value.shape)}: one number needs the shape ()"
        ) from error
