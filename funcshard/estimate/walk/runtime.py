"""Which buffers a training step holds beside the model's own, and their bytes on one rank.

``Runtime`` and ``OptimizerMemory`` say which, ``UnitSizes`` how large each buffer of a unit is.
FSDP1 and FSDP2 hold other buffers than funcshard, so published memory is compared with an estimate
under their runtime.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from funcshard._utils.options import check_choice
from funcshard.plan import (
    BufferPlan,
    Packing,
    Plan,
    UnitPlan,
    dtype_of,
    representatives,
    step_numel,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """The memory of clipping and of your optimizer's update.

    Attributes:
        states: tensors of state for each shard.
        temporaries: ``"none"``, ``"largest"`` (one shard at a time), ``"all"`` (all shards at
            once), or ``"foreach"`` (all at once on a GPU only, as torch does by default).
        donate: whether it updates shards and state in place.
        clip: whether the step clips gradients by their norm.
        first_step: whether there's no optimizer state before the step.

    Example:
        >>> import dataclasses
        >>> from funcshard.estimate import OPTIMIZERS
        >>> dataclasses.replace(OPTIMIZERS["sgd_momentum"], clip=True).states
        1
    """

    states: int = 2
    temporaries: str = "largest"
    donate: bool = True
    clip: bool = False
    first_step: bool = False

    def __post_init__(self) -> None:
        check_choice("temporaries", self.temporaries, ("none", "largest", "all", "foreach"))

    @property
    def states_before(self) -> int:
        return 0 if self.first_step else self.states


# Optimizers by name.
OPTIMIZERS = {
    "adamw": OptimizerMemory(states=2, temporaries="foreach"),
    "adamw_fused": OptimizerMemory(states=2, temporaries="none"),
    "adamw_single": OptimizerMemory(states=2, temporaries="largest"),
    "sgd": OptimizerMemory(states=0, temporaries="none"),
    "sgd_momentum": OptimizerMemory(states=1, temporaries="none"),
}


@dataclass(frozen=True, slots=True)
class Runtime:
    """How ranks communicate, as far as memory and time depend on it.

    Attributes:
        accelerator: whether the device isn't a CPU, so its host runs ahead.
        sent_lives: whether the cast of a shard lives until its gather has finished.
        communicators: bytes that communication libraries take.
        overlaps: whether collectives run while the rank computes.
        copies_out: whether a gathered buffer is copied into a tensor for each parameter.
        frees_first: whether a reduction first frees the send buffer of the one before, as it does
            on a CPU.
        streams: whether gathered buffers and reduced gradients have their own streams, and so their
            own memory pools.
        replicates_apart: whether all-reduces have their own lane until backward ends.
        lingering: number of freed units that the allocator still counts.

    Example:
        >>> from funcshard.estimate import Runtime
        >>> Runtime.fsdp2().copies_out, Runtime().copies_out
        (True, False)
    """

    accelerator: bool = True
    sent_lives: bool = True
    communicators: int = 0
    overlaps: bool = True
    copies_out: bool = False
    frees_first: bool = False
    streams: bool = False
    replicates_apart: bool = False
    lingering: int = 0

    @classmethod
    def on(cls, device: str) -> Runtime:
        """Return funcshard's own runtime on ``"cuda"`` or ``"cpu"``."""
        # Note: the CPU that computes also moves the data, so nothing overlaps.
        return cls() if device == "cuda" else cls(accelerator=False, overlaps=False)

    @classmethod
    def fsdp2(cls) -> Runtime:
        """Return the runtime of torch's ``fully_shard`` on GPUs.

        Source: ``foreach_all_gather``, ``wait_for_unshard`` and ``post_backward`` in
        https://github.com/pytorch/pytorch/tree/v2.7.0/torch/distributed/fsdp/_fully_shard
        """
        # Note: shards are cast straight into the gathered buffer, and parameters then get their own
        # tensors. A reduction first drops the input of the one before.
        return cls(
            sent_lives=False,
            copies_out=True,
            frees_first=True,
            streams=True,
            replicates_apart=True,
        )

    @classmethod
    def fsdp1(cls) -> Runtime:
        """Return the runtime of torch's ``FullyShardedDataParallel`` on GPUs.

        Source: ``_free_unsharded_flat_param`` in
        https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_flat_param.py and
        https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_limiter_utils.py
        """
        # Why 2: ``record_stream`` makes the allocator count a freed buffer until the other stream
        # has passed, and the rate limiter lets two gathers run ahead.
        return cls(lingering=2, streams=True, replicates_apart=True)


# --- sizes ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Bytes of one flat buffer of a unit on one rank.

    Attributes:
        key: key of the buffer.
        trainable: whether it gets gradients.
        cut: whether ranks hold shards of it, which are gathered.
        repeated: whether ranks along other mesh axes hold the same values.
        shard: the shard, in the dtype of the leaves.
        sent: the shard in the dtype in which it is gathered; 0 if that is the same tensor. Of
            packed leaves, the gathered bytes until they are decoded.
        gathered: the gathered buffer; 0 if the leaves are views of the shard.
        decoding: what decoding takes beside its result; 0 if the leaves are not packed.
        full: the flat gradient that is reduced.
        full_before_cast: the same before its cast; 0 without a cast.
        cast_grads: the gradients of the leaves, if they're cast to be reduced.
        reduced: the rank's part of the reduced gradient.
        kept: the same in the dtype of the shard, as the optimizer gets it.
    """

    key: str
    trainable: bool
    cut: bool
    repeated: bool
    shard: int
    sent: int
    gathered: int
    decoding: int
    full: int
    full_before_cast: int
    cast_grads: int
    reduced: int
    kept: int


@dataclass(frozen=True, slots=True)
class UnitSizes:
    """Bytes of a unit's buffers on one rank.

    Attributes:
        buffers: the buffers by their keys.
        slice: bytes of the slice that the rank keeps after forward.
        offload: whether shards, gradients and optimizer state live on the host.
        stays: whether the unit stays gathered between forward and backward.
        shard: bytes of the shards.
        trainable_shard: bytes of the shards that the optimizer updates.
        uncut: bytes of buffers that are cast or copied, not gathered from shards.
        gathered: bytes of all gathered buffers.
        sent: bytes of the casts of the shards, while they are sent.
        decoded: bytes of the gathered buffers that are decoded when the unit is reached.
        decoding: bytes that decoding takes beside its result.
        last_cut: key of the buffer that is gathered last, or ``""``.
        reduced: the buffers with gradients, in the order in which backward reaches them.
    """

    buffers: Mapping[str, BufferSizes]
    slice: int
    offload: bool
    stays: bool
    shard: int
    trainable_shard: int
    uncut: int
    gathered: int
    sent: int
    decoded: int
    decoding: int
    last_cut: str
    reduced: tuple[BufferSizes, ...]


def sizes_by_unit(plan: Plan, *, accelerator: bool) -> dict[str, UnitSizes]:
    """Return the sizes of each unit of a plan, by its name.

    Arguments:
        plan: the plan.
        accelerator: whether the device isn't a CPU, so that ``offload`` counts.
    """
    # Note: a large model has few distinct units.
    first_units = representatives(plan.unit_list)
    distinct_units = {unit.name: unit for unit in first_units.values()}
    distinct_sizes = {
        name: sizes_of(unit, accelerator=accelerator)
        for name, unit in distinct_units.items()
    }
    return {name: distinct_sizes[unit.name] for name, unit in first_units.items()}


def sizes_of(unit: UnitPlan, *, accelerator: bool) -> UnitSizes:
    """Return the sizes of a unit; see ``sizes_by_unit``."""
    on_host = unit.offload and accelerator
    buffer_sizes = {
        buffer.key: _buffer_sizes(unit, buffer, accelerator=accelerator)
        for buffer in unit.buffers
    }
    cut_buffers = [sizes for sizes in buffer_sizes.values() if sizes.cut]
    trained_buffers = [sizes for sizes in buffer_sizes.values() if sizes.trainable]
    gathered_bytes = sum(sizes.gathered for sizes in buffer_sizes.values())
    gathered_from_shards = sum(sizes.gathered for sizes in cut_buffers)
    decoded_bytes = sum(sizes.gathered for sizes in cut_buffers if sizes.decoding)
    # Note: neighbours that hold a unit together each keep an equal slice of what was gathered.
    ranks = unit.post_forward_ranks
    return UnitSizes(
        buffers=buffer_sizes,
        # Note: packed leaves are gathered from the shards again.
        slice=0 if ranks is None else (gathered_from_shards - decoded_bytes) // ranks,
        offload=on_host,
        stays=not unit.reshard_after_forward,
        shard=sum(sizes.shard for sizes in buffer_sizes.values()),
        trainable_shard=sum(sizes.shard for sizes in trained_buffers),
        uncut=gathered_bytes - gathered_from_shards,
        gathered=gathered_bytes,
        sent=sum(sizes.sent for sizes in cut_buffers),
        decoded=decoded_bytes,
        decoding=max((sizes.decoding for sizes in buffer_sizes.values()), default=0),
        last_cut=cut_buffers[-1].key if cut_buffers else "",
        reduced=tuple(sizes for sizes in reversed(trained_buffers) if sizes.full),
    )


def _buffer_sizes(unit: UnitPlan, buffer: BufferPlan, *, accelerator: bool) -> BufferSizes:
    on_host = unit.offload and accelerator
    _, gathered_dtype, reduced_dtype, _ = unit.dtypes(buffer)
    gathered_itemsize, reduced_itemsize = gathered_dtype.itemsize, reduced_dtype.itemsize
    shard_numel, padded_numel = buffer.shard_numel, buffer.padded_numel
    is_cut = buffer.shards > 1
    # Note: a shard on the host is copied to the device even if its dtype stays.
    is_cast = on_host or gathered_dtype != buffer.shard_dtype
    sent_bytes, gathered_numel, decoding_bytes = (
        shard_numel * gathered_itemsize,
        padded_numel,
        0,
    )
    if buffer.packing is not None:
        sent_bytes, gathered_numel = padded_numel * buffer.itemsize, buffer.model_numel
        decoding_bytes = _decoding(buffer.packing, gathered_numel, accelerator=accelerator)
    mesh_axes = [
        axis
        for axis, size in unit.mesh_axes.items()
        if size > 1 and axis not in buffer.local
    ]
    trained_factor = int(buffer.trainable)  # a factor: frozen buffers have no gradients
    casts_grads = reduced_dtype != gathered_dtype
    reduced_bytes = trained_factor * shard_numel * reduced_itemsize
    keeps_dtype = unit.precision is not None and unit.precision.keep_low_precision_grads
    return BufferSizes(
        key=buffer.key,
        trainable=buffer.trainable,
        cut=is_cut,
        repeated=any(axis != "shard" for axis in mesh_axes)
        or (bool(mesh_axes) and not is_cut),
        shard=shard_numel * buffer.itemsize,
        sent=sent_bytes * (is_cut and is_cast),
        # Note: without a cast, the leaves of an uncut buffer are views of the shard.
        gathered=gathered_numel * gathered_itemsize * (is_cut or is_cast),
        decoding=decoding_bytes,
        full=trained_factor * padded_numel * reduced_itemsize,
        full_before_cast=trained_factor
        * padded_numel
        * gathered_itemsize
        * (casts_grads and not is_cut),
        cast_grads=trained_factor * buffer.numel * gathered_itemsize * casts_grads,
        reduced=reduced_bytes,
        kept=reduced_bytes
        if keeps_dtype
        else trained_factor * shard_numel * buffer.itemsize,
    )


def _decoding(packing: Packing, numel: int, *, accelerator: bool) -> int:
    """Return what decoding so many elements takes beside its result, by the built-in functions."""
    step = min(numel, step_numel(accelerator=accelerator) // packing.block * packing.block)
    # Note: copies of the parts of records, and values in float32; nf4 has codes in int32 too.
    own_bytes = step * (6 if packing.name == "nf4" else 4)
    leaf_dtype = dtype_of(packing.dtype)
    converted_bytes = step * (4 + leaf_dtype.itemsize * (leaf_dtype != torch.float32))
    return max(packing.bytes_of(step) + own_bytes, converted_bytes)
