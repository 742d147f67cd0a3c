"""``UnitSizes``: how many bytes each buffer of a unit takes in each state, on one rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from funcshard.plan import UnitPlan, dtype_of


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Bytes of one flat buffer of a unit on one rank.

    Attributes:
        key: the buffer's key.
        trainable: whether it gets gradients.
        cut: whether ranks hold shards of it, which are gathered.
        repeated: whether ranks along other mesh axes than the one that cuts it hold the same
            values.
        shard: the shard, in the dtype of the leaves.
        sent: the shard in the dtype in which it is gathered; 0 if that is the same tensor.
        gathered: the gathered buffer; 0 if the leaves are views of the shard.
        grads: the gradients of the leaves.
        full: the flat gradient that is reduced.
        full_before_cast: the flat gradient before its cast to the dtype of the reduction; 0 without
            its own cast.
        casts_grads: whether gradients are reduced in another dtype.
        reduced: the rank's part of the reduced gradient, in the dtype of the reduction.
        kept: the same in the dtype of the shard, as the optimizer gets it.
    """

    key: str
    trainable: bool
    cut: bool
    repeated: bool
    shard: int
    sent: int
    gathered: int
    grads: int
    full: int
    full_before_cast: int
    casts_grads: bool
    reduced: int
    kept: int


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of a unit's buffers on one rank.

    Attributes:
        buffers: the buffers.
        slice: bytes of the slice that the rank keeps after forward, if several ranks hold the unit.
        offload: whether shards, gradients and optimizer state live on the host.
        stays: whether the unit stays gathered between forward and backward.
        shard: bytes of the shards.
        trainable_shard: bytes of the shards that the optimizer updates.
        uncut: bytes of the gathered buffers that are not gathered from shards, but cast or copied.
        gathered: bytes of all gathered buffers.
        sent: bytes of the casts of the shards, while they are sent.
        last_cut: key of the buffer that is gathered last; ``""`` if none is gathered.
        reduced: the buffers with gradients, in the order in which backward reaches them.
        by_key: the buffers by their keys.
    """

    buffers: tuple[BufferSizes, ...]
    slice: int
    offload: bool
    stays: bool
    shard: int
    trainable_shard: int
    uncut: int
    gathered: int
    sent: int
    last_cut: str
    reduced: tuple[BufferSizes, ...]
    by_key: Mapping[str, BufferSizes]


def sizes_of(unit: UnitPlan, *, accelerator: bool) -> UnitSizes:
    """Return the sizes of a unit.

    Arguments:
        unit: the unit.
        accelerator: whether the mesh has another device than the CPU, so that ``offload`` counts.
    """
    buffer_sizes = []
    keeps = unit.precision is not None and unit.precision.keep_low_precision_grads
    for buffer in unit.buffers:
        stored = buffer.itemsize
        gathered = unit.gathered_dtype(buffer).itemsize
        reduced = unit.reduced_dtype(buffer).itemsize
        shard_numel, padded_numel = buffer.shard_numel, buffer.padded_numel
        cut = buffer.shards > 1
        cast = unit.gathered_dtype(buffer) != _stored(unit, buffer.key)
        moved = unit.offload and accelerator
        trained = buffer.trainable
        axes = [
            axis for axis, size in unit.mesh_axes.items() if size > 1 and axis not in buffer.local
        ]
        cast_grads = trained and unit.reduced_dtype(buffer) != unit.gathered_dtype(buffer)
        buffer_sizes.append(
            BufferSizes(
                key=buffer.key,
                trainable=trained,
                cut=cut,
                repeated=any(axis != "shard" for axis in axes) or (bool(axes) and not cut),
                shard=shard_numel * stored,
                sent=shard_numel * gathered if cut and (cast or moved) else 0,
                gathered=padded_numel * gathered if cut or cast or moved else 0,
                grads=buffer.numel * gathered if trained else 0,
                full=padded_numel * reduced if trained else 0,
                full_before_cast=padded_numel * gathered if cast_grads and not cut else 0,
                casts_grads=cast_grads,
                reduced=shard_numel * reduced if trained else 0,
                kept=(shard_numel * (reduced if keeps else stored)) if trained else 0,
            )
        )
    gathered_bytes = sum(each.gathered for each in buffer_sizes if each.cut)
    ranks = unit.post_forward_ranks
    return UnitSizes(
        tuple(buffer_sizes),
        0 if ranks is None else gathered_bytes // ranks,
        unit.offload and accelerator,
        not unit.reshard_after_forward,
        sum(each.shard for each in buffer_sizes),
        sum(each.shard for each in buffer_sizes if each.trainable),
        sum(each.gathered for each in buffer_sizes if not each.cut),
        sum(each.gathered for each in buffer_sizes),
        sum(each.sent for each in buffer_sizes if each.cut),
        next((each.key for each in reversed(buffer_sizes) if each.cut), ""),
        tuple(each for each in reversed(buffer_sizes) if each.trainable and each.grads),
        {each.key: each for each in buffer_sizes},
    )


def _stored(unit: UnitPlan, key: str) -> object:
    return next(dtype_of(buffer.dtype) for buffer in unit.buffers if buffer.key == key)
