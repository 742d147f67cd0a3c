"""The global norm of sharded gradients, and clipping by it."""

from __future__ import annotations

import functools

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_flag, check_number
from funcshard._utils.torch_private import untraced
from funcshard.comm import Mesh, Topology, at_own_rank
from funcshard.core import Shards, check_cut, check_fits, psum_world, start_gather_flat
from funcshard.plan import BufferPlan, Plan
from funcshard.train.optimizer_step import donate as donated

PIECE = 1024  # elements that norm_of_rows adds up in one pass


@untraced
def global_norm(
    grads: Shards, plan: Plan, mesh: Mesh, norm_type: float = 2.0
) -> torch.Tensor:
    """Return the norm of the whole gradient, of which each rank passes its shards.

    An all-gather of one number along the shard axis combines the norms of the shards. Leaves that
    are local to a rank take one further all-reduce.

    Arguments:
        grads: this rank's shards of the gradient. ``None`` leaves do not count.
        plan: the plan of the shards.
        mesh: the ranks.
        norm_type: order of the norm; may be ``math.inf``.

    Returns:
        A scalar tensor, the same on every rank: float32, or the widest dtype of your gradients if
        that is wider.

    Raises:
        ValueError: ``norm_type`` is not positive, or ``mesh`` or ``grads`` does not fit the plan.
        TypeError: ``norm_type`` isn't a number, or a leaf has integers, booleans or float8 numbers.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     params = {"w": torch.tensor([3.0, 4.0])}
        ...     plan = fs.make_plan(params, mesh)
        ...     return fs.global_norm(fs.shard(params, plan, mesh), plan, mesh).item()
        >>> fs.simulate(main, world_size=2)
        [5.0, 5.0]

    Source: ``torch.nn.utils.get_total_norm``.
    """
    check_number(
        "norm_type",
        norm_type,
        above=0,
        infinite=True,
        remedy="pass 2.0 for the Euclidean norm",
    )
    if isinstance(norm_type, int):
        norm_type = float(norm_type)  # torch takes no whole number of more than 64 bits
    check_fits(plan, mesh)
    check_cut(plan, grads)
    sharded: list[torch.Tensor] = []
    unsharded: list[torch.Tensor] = []
    local: list[torch.Tensor] = []
    # The dtype of the local leaves' norm. Why from all local leaves: a rank that counts none of
    # them must send its norm in the same dtype as the ranks that do.
    local_dtype = torch.float32
    for unit in plan.unit_list:
        for buffer in unit.buffers:
            grad = grads[unit.name][buffer.key]
            if grad is None or not grad.numel():
                continue
            is_real = grad.dtype.is_floating_point or grad.dtype.is_complex
            if not is_real or grad.dtype.itemsize < 2:
                raise TypeError(
                    "a norm needs floating-point or complex numbers of two bytes or more; "
                    f"found {grad.dtype} for leaf {buffer.leaves[0].path!r}: pass None for "
                    f"shard {buffer.key!r} of unit {unit.title!r}, or cast it"
                )
            grad = without_padding(grad, buffer, mesh.shard.rank)
            if buffer.local:
                local_dtype = torch.promote_types(local_dtype, grad.dtype.to_real())
                if (
                    Topology(mesh, unit.sharded, buffer.local).copy == 0
                ):  # only the first copy counts
                    local.append(grad)
            elif unit.sharded:
                sharded.append(grad)
            else:
                unsharded.append(grad)
    # Why norms, and not sums of powers: these overflow, and need a case for infinity.
    # Along the shard axis only, because ranks along the replicate axis hold the same shards.
    norms_of_shards = start_gather_flat(
        _norm(sharded, norm_type, mesh).reshape(1), mesh
    ).finish()
    # Buffers that are not sharded are the same on all ranks, so they are counted once, here.
    norms = [norms_of_shards, _norm(unsharded, norm_type, mesh).reshape(1)]
    # Every rank knows from the plan whether this collective runs, whatever gradients it has.
    if any(buffer.local for unit in plan.unit_list for buffer in unit.buffers):
        norm = _norm(local, norm_type, mesh).to(local_dtype)
        norms.append(psum_world(at_own_rank(norm, mesh), mesh))
    return torch.linalg.vector_norm(torch.cat(norms), norm_type)


@untraced
def clip_by_global_norm(
    grads: Shards,
    plan: Plan,
    mesh: Mesh,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    donate: bool = False,
) -> tuple[Shards, torch.Tensor]:
    """Scale the gradient so that the norm of the whole gradient is at most ``max_norm``.

    Arguments:
        grads: this rank's shards of the gradient. ``None`` leaves stay ``None``.
        plan: the plan of the shards.
        mesh: the ranks.
        max_norm: the largest norm that the result may have, a positive finite number.
        norm_type: order of the norm; may be ``math.inf``.
        donate: whether to scale the gradients in their own memory, so that you can't use ``grads``
            afterwards.

    Returns:
        ``(clipped, norm)``: a new tree like ``grads``, and the norm before clipping, the same on
        every rank. If it is infinite or NaN, the clipped gradients have NaN, as torch's have: skip
        the step then.

    Raises:
        ValueError: ``max_norm`` is not positive or not finite; or see ``global_norm``.
        TypeError: ``max_norm`` or ``norm_type`` isn't a number, or ``donate`` isn't a flag.
        RuntimeError: the gradients were donated already.

    Example:
        >>> import torch, funcshard as fs
        >>> def main(mesh):
        ...     params = {"w": torch.tensor([3.0, 4.0])}
        ...     plan = fs.make_plan(params, mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     clipped, norm = fs.clip_by_global_norm(shards, plan, mesh, max_norm=1.0)
        ...     return round(clipped[""]["float32"].item(), 4), norm.item()
        >>> fs.simulate(main, world_size=2)
        [(0.6, 5.0), (0.8, 5.0)]

    Source: ``torch.nn.utils.clip_grad_norm_``, which also adds 1e-6 to the norm before dividing.
    """
    check_number(
        "max_norm", max_norm, above=0, remedy="for the norm alone call global_norm"
    )
    check_flag("donate", donate)
    norm = global_norm(grads, plan, mesh, norm_type)
    # Note: NaN stays NaN through clamp, so that a bad gradient shows.
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    leaves, unflatten = tree.flatten(grads)
    # Why once: gradients of offloaded units lie on the CPU, and the host waits for each copy.
    scale_on = {device: scale.to(device) for device in {leaf.device for leaf in leaves}}
    if donate:
        clipped = [leaf.mul_(scale_on[leaf.device].to(leaf)) for leaf in donated(leaves)]
    else:
        clipped = [leaf * scale_on[leaf.device].to(leaf) for leaf in leaves]
    return unflatten(clipped), norm


def _norm(leaves: list[torch.Tensor], norm_type: float, mesh: Mesh) -> torch.Tensor:
    """Return the norm of all elements of ``leaves`` on the mesh's device."""
    wide_dtypes = {
        leaf.dtype: torch.promote_types(leaf.dtype, torch.float32) for leaf in leaves
    }
    # Why from all leaves: a rank that has nothing but padding of one must send its norm in the same
    # dtype as the ranks that hold its elements.
    norm_dtype = functools.reduce(
        torch.promote_types,
        (wide_dtype.to_real() for wide_dtype in wide_dtypes.values()),
        torch.float32,
    )
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for leaf in leaves:
        if leaf.numel():
            norm = norm_of_rows(leaf.flatten(), norm_type, wide_dtypes[leaf.dtype])
            by_device.setdefault(leaf.device, []).append(norm)
    # Why one by device: the gradients of offloaded units lie on the CPU, and the host waits for
    # each copy from there.
    device_norms = [
        torch.linalg.vector_norm(torch.stack(leaf_norms), norm_type).to(
            mesh.device, norm_dtype
        )
        for leaf_norms in by_device.values()
    ]
    if not device_norms:
        return torch.zeros((), dtype=norm_dtype, device=mesh.device)
    if len(device_norms) == 1:
        return device_norms[0]
    return torch.linalg.vector_norm(torch.stack(device_norms), norm_type)


def norm_of_rows(x: torch.Tensor, norm_type: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the norm over the last dimension, in ``dtype``.

    Arguments:
        x: a tensor whose last dimension is not empty.
        norm_type: order of the norm, positive; may be ``math.inf``.
        dtype: dtype of the computation and of the result.

    Example:
        >>> import torch
        >>> norm_of_rows(torch.tensor([[3.0, 4.0], [0.0, 2.0]]), 2.0, torch.float32)
        tensor([5., 2.])

    Source: pairwise summation, N. Higham, "The accuracy of floating point summation" (1993).
    """
    # Why on the CPU only: torch adds there one element after another, with an error that grows with
    # their number: 0.15 % for gradients of 1.8 million elements. CUDA kernels add in a tree.
    if x.device.type != "cpu" or x.shape[-1] < 2 * PIECE:
        # Why no dim: before torch 2.13 the norm of a fake tensor of one element keeps it.
        return torch.linalg.vector_norm(
            x, norm_type, dim=None if x.dim() == 1 else -1, dtype=dtype
        )
    whole_numel = x.shape[-1] // PIECE * PIECE
    piece_norms = torch.linalg.vector_norm(
        x[..., :whole_numel].unflatten(-1, (-1, PIECE)), norm_type, dim=-1, dtype=dtype
    )
    norm = norm_of_rows(piece_norms, norm_type, dtype)
    if whole_numel == x.shape[-1]:
        return norm
    rest_norm = torch.linalg.vector_norm(
        x[..., whole_numel:], norm_type, dim=-1, dtype=dtype
    )
    return torch.linalg.vector_norm(torch.stack([norm, rest_norm]), norm_type, dim=0)


def without_padding(shard: torch.Tensor, buffer: BufferPlan, rank: int) -> torch.Tensor:
    """Return a view of a shard, or of a stack of shards, without the padding at its end.

    Arguments:
        shard: a shard of ``buffer``, or a tensor whose last dimension is like one.
        buffer: the flat buffer.
        rank: index of the rank along the shard axis.
    """
    # Why: an optimizer may leave any value in the padding, such as NaN.
    filled_numel = buffer.filled(rank)
    if filled_numel == shard.shape[-1]:
        return shard
    return shard.narrow(-1, 0, filled_numel)
