"""A vector space of shards: inner products, sums and random vectors of trees like shards.

A vector is a tree like the plan's shards, such as gradients: ``{unit name: {buffer key: shard}}``.
``None``, which gradients have for frozen leaves, counts as zeros. Each element of the whole tree
counts once, whatever number of ranks hold a copy of it, and padding counts nothing.

R ranks with copies of one shard compute one thing. A unit that gathers the result gives each copy
the whole gradient, whereas the gradients of a value's copies elsewhere are parts that add up. So a
value on its way to shards becomes an R-th of it: ``_Copies`` is the mean of R equal variables, and
its transpose divides by R.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.options import outline
from funcshard._utils.tensors import is_continuous
from funcshard._utils.torch_private import signed, untraced
from funcshard.comm import Mesh, Topology, check_all_same
from funcshard.core.checks import check_fits, other_leaves
from funcshard.core.collectives import pmean, psum_world
from funcshard.core.leaf_blocks import LeafBlocks, block_count
from funcshard.core.sharding import Shards, empty_shard
from funcshard.core.unit import check_cut
from funcshard.plan import BufferPlan, LeafSpec, Plan, rank_at


@untraced
def vdot(a: Shards, b: Shards, plan: Plan, mesh: Mesh) -> torch.Tensor:
    """Return the inner product of two whole trees, given every rank's shards of them.

    It costs one all-reduce of one number, and is differentiable any number of times. A loss may
    contain it: ``fs.value_and_grad`` then gives the gradient of the product, under every strategy.
    A product that multiplies shards passes ``broadcast_to_shards`` first, as every value does that
    all ranks hold.

    Arguments:
        a: this rank's shards of the first tree, like the plan's shards; complex ones are
            conjugated. ``None`` counts as zeros.
        b: this rank's shards of the second tree.
        plan: the plan of the shards.
        mesh: the ranks.

    Returns:
        A scalar tensor, the same on every rank: float32, or the widest dtype of the leaves if that
        is wider. Under ``torch.vmap``, over stacked shards, it is the product of each model.

    Raises:
        ValueError: ``mesh`` does not have the plan's shape, or ``a`` or ``b`` is not a tree of this
            plan's shards.
        TypeError: a leaf has integers, booleans or float8 numbers.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     params = {"w": torch.tensor([1.0, 2.0, 3.0])}
        ...     plan = fs.make_plan(params, mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     return fs.vdot(shards, shards, plan, mesh).item()
        >>> fs.simulate(main, world_size=2)
        [14.0, 14.0]

    Source: ``optax.tree_utils.tree_vdot``.
    """
    check_fits(plan, mesh)
    check_cut(plan, a)
    check_cut(plan, b)
    # By the axes along which ranks hold copies: the sum over this rank's elements.
    sums: dict[tuple[str, ...], torch.Tensor] = {}
    # Why from all leaves: a rank that has nothing but padding of one must send the same dtype.
    dtype = torch.float32
    for unit in plan.unit_list:
        for buffer in unit.buffers:
            x, y = a[unit.name][buffer.key], b[unit.name][buffer.key]
            if x is None or y is None:
                continue
            if not (_is_vector(x) and _is_vector(y)):
                raise TypeError(
                    "an inner product needs floating-point or complex numbers of two bytes or more; "
                    f"found {x.dtype} and {y.dtype} for leaf {buffer.leaves[0].path!r}: pass None for "
                    f"shard {buffer.key!r} of unit {unit.title!r}, or cast it"
                )
            wide_dtype = functools.reduce(
                torch.promote_types, (x.dtype, y.dtype), torch.float32
            )
            filled = buffer.filled(mesh.shard.rank)
            x, y = (shard[..., :filled].to(wide_dtype) for shard in (x, y))
            copy_axes = tuple(
                name for name, _ in Topology(mesh, unit.sharded, buffer.local).repeated
            )
            buffer_sum = (x.conj() * y).sum().to(mesh.device)
            sums[copy_axes] = (
                sums[copy_axes] + buffer_sum if copy_axes in sums else buffer_sum
            )
            dtype = torch.promote_types(dtype, wide_dtype)
    total = torch.zeros((), dtype=dtype, device=mesh.device)
    for copy_axes, copied_sum in sums.items():
        # Note: the parts of copies add up to their value, and the adjoint gives each copy the whole
        # gradient, as it has everywhere else.
        if copy_axes:
            copied_sum = _Copies.apply(copied_sum, mesh, copy_axes, False)
        total = total + copied_sum
    return psum_world(total, mesh)


@untraced
def norm(tree: Shards, plan: Plan, mesh: Mesh) -> torch.Tensor:
    """Return the Euclidean norm of a whole tree, given every rank's shards of it; differentiable.

    It is the square root of ``vdot(tree, tree, plan, mesh)``. ``global_norm`` has the same value
    but for rounding, takes norms of other orders too, and is not differentiable.

    Arguments:
        tree: this rank's shards, a tree like the plan's shards. ``None`` counts as zeros.
        plan: the plan of the shards.
        mesh: the ranks.

    Returns:
        A scalar tensor, the same on every rank; see ``vdot``. Its gradient at zero is NaN.

    Raises:
        ValueError, TypeError: see ``vdot``.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     params = {"w": torch.tensor([3.0, 4.0])}
        ...     plan = fs.make_plan(params, mesh, strategy="no_shard")
        ...     loss_fn = lambda shards: fs.norm(shards, plan, mesh)
        ...     loss, grads = fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh))
        ...     return loss.item(), fs.norm(grads, plan, mesh).item()
        >>> fs.simulate(main, world_size=2)
        [(5.0, 1.0), (5.0, 1.0)]

    Source: ``optax.tree_utils.tree_norm``.
    """
    return vdot(tree, tree, plan, mesh).real.sqrt()


def axpy(alpha: Any, x: Any, y: Any) -> Any:
    """Return ``alpha * x + y`` for trees like shards; nothing is communicated.

    Arguments:
        alpha: a number, a tensor of one number, or a tree like ``y``: what ``broadcast_to_shards``
            makes of a number that is differentiated.
        x: a tree like ``y``.
        y: any tree of tensors, such as shards, or shards of several models in a tuple. ``None``
            counts as zeros, in ``x`` and in ``y``.

    Returns:
        A tree like ``y``, with ``None`` where both have ``None``.

    Raises:
        ValueError: the trees have different keys.

    Example:
        >>> import torch, funcshard as fs
        >>> x, y = {"": {"w": torch.ones(2)}}, {"": {"w": torch.tensor([1.0, 2.0])}}
        >>> fs.axpy(-0.5, x, y)
        {'': {'w': tensor([0.5000, 1.5000])}}

    Source: BLAS's ``axpy``; ``optax.tree_utils.tree_add_scale``.
    """
    scales = alpha
    if all(leaf is alpha for leaf in tree.leaves(alpha)):
        scales = tree.map(lambda _: alpha, y, of_none=True)
    try:
        return tree.map(_scaled_sum, y, scales, x, of_none=True)
    except ValueError as error:
        raise ValueError(
            f"axpy takes two trees with the same keys; found {outline(x)} beside {outline(y)}: make "
            "both with the same plan"
        ) from error


def _scaled_sum(y: Any, scale: Any, x: Any) -> Any:
    if x is None:
        return y
    if isinstance(scale, torch.Tensor):
        scale = scale.to(x.device)  # shards of offloaded units lie on the CPU
        if x.ndim == 0:
            scale = scale.to(x.dtype)  # Why: it would decide on the dtype of the sum.
    return scale * x if y is None else scale * x + y


@untraced
def randn_like(
    shards: Shards, plan: Plan, mesh: Mesh, *, generator: torch.Generator | None = None
) -> Shards:
    """Return shards of a whole tree of standard normal numbers, the same on every mesh.

    Each rank draws only the blocks that its shards touch. A leaf's numbers depend on the generator,
    on the leaf's shape and its place in the tree, and not on the mesh, the units or the strategy.
    Of a leaf that each rank has for itself, each rank gets other numbers.

    Arguments:
        shards: this rank's shards, whose dtypes and devices the result has.
        plan: the plan of the shards.
        mesh: the ranks.
        generator: the generator that a seed is drawn from; by default torch's own, which
            ``torch.manual_seed`` sets. It must be in the same state on every rank, which each call
            checks.

    Returns:
        A tree like ``shards``, with ``None`` for frozen leaves, for integers, and where ``shards``
        has ``None``. The padding is zeros.

    Raises:
        ValueError: ``shards`` or ``mesh`` is not the plan's, or generators differ between ranks.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.zeros(3, 2), "b": torch.zeros(2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     generator = torch.Generator().manual_seed(0)
        ...     v = fs.randn_like(fs.shard(params, plan, mesh), plan, mesh, generator=generator)
        ...     return fs.gather(v, plan, mesh)["b"].tolist()
        >>> fs.simulate(main, world_size=1) * 3 == fs.simulate(main, world_size=3)
        True

    Source: ``torch.randn_like``; ``jax_threefry_partitionable``.
    """
    check_fits(plan, mesh)
    check_cut(plan, shards)
    # Why torch's own by default: torch.manual_seed then decides on these draws too.
    device = "cpu" if generator is None else generator.device
    first_seed = int(torch.randint(2**62, (), generator=generator, device=device))
    check_all_same(mesh, {"the state of the generator of randn_like": str(first_seed)})
    # Why by index: the units of a plan come in another order, and the tree's is the same for all.
    first_blocks, total_blocks = {}, 0
    for leaf in sorted(plan.leaves, key=lambda leaf: leaf.index):
        first_blocks[leaf.index] = total_blocks
        total_blocks += block_count(math.prod(leaf.whole_shape))
    vectors: dict[str, dict[str, Any]] = {}
    for unit in plan.unit_list:
        vectors[unit.name] = {}
        for buffer in unit.buffers:
            like = shards[unit.name][buffer.key]
            if like is None or not buffer.trainable or not _is_vector(like):
                vectors[unit.name][buffer.key] = None
                continue
            vector = empty_shard(unit, buffer, mesh).to(like.dtype)
            for leaf in buffer.leaves:
                # Ranks along these axes have leaves of their own, whose blocks follow all others.
                own_sizes = {
                    axis: mesh.shape.get(axis, 1) for axis in buffer.own_axes(leaf)
                }
                own_position = {axis: mesh.position.get(axis, 0) for axis in own_sizes}
                own_index = rank_at(own_position, own_sizes)
                leaf_seed = first_seed + own_index * total_blocks + first_blocks[leaf.index]

                def fill(
                    values: torch.Tensor,
                    block: int,
                    source: torch.Generator,
                    seed: int = leaf_seed,
                ) -> None:
                    values.normal_(generator=source.manual_seed(seed + block))

                blocks = LeafBlocks(leaf.whole_shape, vector.dtype, mesh.device, fill)
                blocks.put(vector, leaf, buffer, mesh)
            vectors[unit.name][buffer.key] = vector
    return vectors


def _is_vector(x: torch.Tensor) -> bool:
    return is_continuous(x) and x.dtype.itemsize > 1


# --- values that all ranks hold -------------------------------------------------------------------


@untraced
def broadcast_to_shards(
    value: Any, plan: Plan, mesh: Mesh
) -> dict[str, dict[str, torch.Tensor]]:
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
            copy_axes = tuple(
                name for name, _ in Topology(mesh, unit.sharded, buffer.local).repeated
            )
            local_values = local_values.to(device)
            if copy_axes:
                local_values = _Copies.apply(local_values, mesh, copy_axes, True)
            values_by_unit[unit.name][buffer.key] = local_values
    return values_by_unit


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


def _elements(
    by_path: dict[str, torch.Tensor], buffer: BufferPlan, mesh: Mesh
) -> torch.Tensor:
    """Return the elements of whole leaves in this rank's shard of ``buffer``."""
    leaf_pieces = []
    for leaf in buffer.leaves:
        begin, end, _ = buffer.part(leaf, mesh.shard.rank)
        leaf_pieces.append(_expanded(by_path[leaf.path], leaf).reshape(-1)[begin:end])
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
