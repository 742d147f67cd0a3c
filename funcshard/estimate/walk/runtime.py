"""``Runtime`` and ``OptimizerMemory``: which buffers a training step holds beside the model's own.

The default runtime is funcshard's. FSDP1 and FSDP2 hold other buffers around the same collectives,
so the memory that they publish is compared with an estimate under their own runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from funcshard._utils.options import check_choice, check_count, check_flag


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMemory:
    """The memory that the end of a step takes: clipping, and the optimizer's update.

    Attributes:
        states: tensors of state for each shard.
        temporaries: ``"none"``; ``"largest"``: it updates one shard at a time; ``"all"``: it
            updates all shards at once; ``"foreach"``: all at once on an accelerator, one at a time
            on the CPU, as torch does by default.
        donate: whether it updates shards and state in place, as ``make_train_step`` does by
            default.
        clip: whether the step clips gradients by their norm (``max_norm``).
        first_step: whether this is the first step, before which the optimizer has no state.

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
        check_count("states", self.states, 0, of="tensors of state")
        check_choice("temporaries", self.temporaries, ("none", "largest", "all", "foreach"))
        for name in ("donate", "clip", "first_step"):
            check_flag(name, getattr(self, name))

    @property
    def states_before(self) -> int:
        """Tensors of state for each shard, before the step."""
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
    """How the ranks of a mesh communicate, as far as memory depends on it.

    Attributes:
        accelerator: whether the device is not the CPU. Its host runs ahead of it.
        send_buffers: whether reductions take a flat send buffer from the device's memory; shared
            memory does not.
        sent_lives: whether the cast of a shard lives until its gather has finished.
        communicators: bytes that communication libraries take for themselves.
        one_lane: whether gathers and reductions share one lane.
        overlaps: whether collectives run while the rank computes.
        copies_out: whether a gathered buffer is copied into a tensor for each parameter. In forward
            the buffer itself then lives until the next unit is gathered.
        frees_first: whether a reduction frees the send buffer of the one before, and then takes its
            own. On the CPU it always does.
        streams: whether gathered buffers and reduced gradients have their own streams. The
            allocator keeps a pool for each stream, and no pool lends memory to another.
        replicates_apart: whether all-reduces run beside gathers and reduce-scatters, and are waited
            for after backward.
        lingering: number of gathered units that were freed, but whose memory the allocator still
            counts as in use.

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

    def __post_init__(self) -> None:
        check_count("communicators", self.communicators, 0, of="bytes")
        check_count("lingering", self.lingering, 0, of="units")

    @classmethod
    def on(cls, device: str) -> Runtime:
        """Return funcshard's own runtime on ``"cuda"`` or ``"cpu"``.

        On a CPU the processor that computes also moves the data, so nothing overlaps.
        """
        # Note: shared memory and gloo move data by the CPU that also computes.
        return cls() if device == "cuda" else cls(accelerator=False, overlaps=False)

    @classmethod
    def fsdp2(cls) -> Runtime:
        """Return the runtime of torch's ``fully_shard`` on GPUs.

        The shards are cast straight into their place in the gathered buffer. When the gather is
        over, parameters get their own tensors. A reduction first drops the input of the one
        before.

        Source: ``foreach_all_gather``, ``wait_for_unshard`` and ``post_backward`` in
        https://github.com/pytorch/pytorch/tree/v2.7.0/torch/distributed/fsdp/_fully_shard
        """
        return cls(
            sent_lives=False, copies_out=True, frees_first=True, streams=True, replicates_apart=True
        )

    @classmethod
    def fsdp1(cls) -> Runtime:
        """Return the runtime of torch's ``FullyShardedDataParallel`` on GPUs.

        Parameters are views of the gathered buffer. The allocator learns from ``record_stream``
        that another stream still uses a freed buffer, and counts it until that stream has passed.
        The rate limiter lets two gathers run ahead, so two such units count.

        Source: ``_free_unsharded_flat_param`` in
        https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_flat_param.py and
        https://github.com/pytorch/pytorch/blob/v2.7.0/torch/distributed/fsdp/_limiter_utils.py
        """
        return cls(lingering=2, streams=True, replicates_apart=True)


def check_runtime(runtime: Any) -> None:
    """Raise ``TypeError`` unless ``runtime`` is a runtime or ``None``."""
    if runtime is not None and not isinstance(runtime, Runtime):
        raise TypeError(
            f"runtime must be a Runtime, such as Runtime.fsdp2(), or None; found {runtime!r}"
        )
