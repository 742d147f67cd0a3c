"""``optimize``: the end of a step, in which the rank clips gradients and runs the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from funcshard.estimate.walk.lanes import Lanes
from funcshard.estimate.walk.ledger import Ledger
from funcshard.estimate.walk.runtime import OptimizerMemory, Runtime
from funcshard.estimate.walk.sizes import UnitSizes


class Walk(Protocol):
    """The part that the optimizer needs of the simulator's walk."""

    optimizer: OptimizerMemory | None
    runtime: Runtime
    lanes: Lanes
    ledger: Ledger
    sizes: dict[str, UnitSizes]
    graded: set[tuple[str, str]]

    def note(self, what: str, unit: str) -> None: ...


def optimize(walk: Walk) -> None:
    """Clip the gradients, and run the optimizer on all shards."""
    optimizer = walk.optimizer
    if optimizer is not None and optimizer.clip:
        # Clipping makes a second tree of gradients.
        for host in (False, True):
            kept = sum(
                walk.sizes[n].by_key[key].kept
                for n, key in walk.graded
                if walk.sizes[n].offload == host
            )
            walk.ledger.add("gradient shards", kept, host=host)
            walk.note("clip", "")
            walk.ledger.free("gradient shards", kept, host=host)
    copied = {False: 0, True: 0}
    if optimizer is not None and not optimizer.donate:
        for sizes in walk.sizes.values():
            copied[sizes.offload] += (1 + optimizer.states) * sizes.trainable_shard
        for host, size in copied.items():
            walk.ledger.add("optimizer", size, host=host)
    if optimizer is not None:
        trained = [
            (unit.offload, buffer.shard)
            for unit in walk.sizes.values()
            for buffer in unit.buffers
            if buffer.trainable and buffer.shard
        ]
        states = optimizer.states
        if optimizer.first_step:
            for host, size in trained:
                walk.ledger.add("optimizer", states * size, host=host)
        temporary_kind = optimizer.temporaries
        if temporary_kind == "foreach":
            # On the CPU torch loops over the tensors.
            temporary_kind = "all" if walk.runtime.accelerator else "largest"
        temporaries = {
            host: _temporaries(temporary_kind, [s for h, s in trained if h == host])
            for host in (False, True)
        }
        for host, size in temporaries.items():
            walk.ledger.add("temporaries", size, host=host)
        moved = sum(size for host, size in trained if not host) * (3 + 2 * states)
        walk.note("optimizer", "")
        walk.lanes.move("optimizer", moved)
        for host, size in temporaries.items():
            walk.ledger.free("temporaries", size, host=host)
    for host, size in copied.items():
        walk.ledger.free("optimizer", size, host=host)
    for name, key in walk.graded:
        unit = walk.sizes[name]
        walk.ledger.free("gradient shards", unit.by_key[key].kept, host=unit.offload)
    walk.note("end", "")


def _temporaries(kind: str, shards: Sequence[int]) -> int:
    if kind == "none" or not shards:
        return 0
    if kind == "all":
        return sum(shards)
    # Why three: the result for the shard before lives while the next one takes two tensors.
    return max(
        shard_before + 2 * size for shard_before, size in zip([0, *shards], shards, strict=False)
    )
