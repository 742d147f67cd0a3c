"""``Runtime`` and ``OptimizerMemory``: which buffers a training step holds beside the model's own.

FSDP1 and FSDP2 hold other buffers than funcshard, so published memory is compared with an estimate
under their runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from funcshard._utils.options import check_choice


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
        send_buffers: whether a reduction takes a flat send buffer; shared memory takes none.
        sent_lives: whether the cast of a shard lives until its gather has finished.
        communicators: bytes that communication libraries take.
        one_lane: whether gathers and reductions share one lane.
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
    send_buffers: bool = True
    sent_lives: bool = True
    communicators: int = 0
    one_lane: bool = True
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
            sent_lives=False, copies_out=True, frees_first=True, streams=True, replicates_apart=True
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


def check_runtime(runtime: Any) -> None:
    """Raise ``TypeError`` unless ``runtime`` is a runtime or ``None``."""
    if runtime is not None and not isinstance(runtime, Runtime):
        raise TypeError(
            f"runtime must be a Runtime, such as Runtime.fsdp2(), or None; found {runtime!r}"
        )
