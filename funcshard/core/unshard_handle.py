"""A gather that a forward written by hand starts early: ``f.start(shard)`` and ``f(handle, x)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from funcshard._utils import graph_task_id, transforms_active, version
from funcshard.core.buffer_comm import BufferComm
from funcshard.core.grad_reducer import GradReducer, current_reducer
from funcshard.core.prefetcher import Handles, wait_all
from funcshard.plan import UnitPlan

UnitShard = Mapping[str, torch.Tensor]


@dataclass(slots=True, eq=False)
class UnshardHandle:
    """The result of ``f.start(shard)``, which ``f`` takes in place of the shard.

    Attributes:
        unit: the unit.
        shard: this rank's shard of the unit.
    """

    unit: UnitPlan
    shard: UnitShard
    _comms: Sequence[BufferComm]
    _handles: Handles | None
    _versions: list[int]
    _reducer: GradReducer | None
    _used: bool = False

    def wait(self) -> None:
        """Wait for the data; do so if the handle is not passed to ``f`` after all."""
        wait_all(self._handles or ())

    def take(
        self, unit: UnitPlan, comms: Sequence[BufferComm], *, freed: bool
    ) -> tuple[UnitShard, Handles | None]:
        """Return the shard and the handles of the all-gathers for one call of a function.

        Arguments:
            unit: the unit of the function.
            comms: the communication of its buffers.
            freed: whether the function frees the leaves after the call, so that the handle serves
                one call.

        Raises:
            ValueError: the handle is of another unit, was used up, or was started outside of the
                call of ``value_and_grad`` that needs its gradient.
            RuntimeError: the shard was modified in place after the gather had started.
        """
        title = f"the handle of unit {self.unit.title!r}"
        if unit != self.unit or comms != self._comms:
            raise ValueError(
                f"{title} was passed to a function of unit {unit.title!r}; pass it to the function "
                "whose start made it"
            )
        if transforms_active():
            return self.shard, None if freed else self._handles
        if torch.is_grad_enabled() and current_reducer() is not self._reducer:
            raise ValueError(
                f"{title} was started outside of this call of value_and_grad, which would lose the "
                "gradient of its shard; call start inside loss_fn, on the shards that loss_fn is "
                "called with"
            )
        if [version(local) for local in self.shard.values()] != self._versions:
            raise RuntimeError(
                f"a shard of unit {self.unit.title!r} was modified in place after its gather had "
                "started; call start after the change"
            )
        handles = self._handles
        if freed and graph_task_id() != -1:
            # A checkpoint that runs the call again in backward gathers for itself.
            return self.shard, None
        if freed and self._used:
            raise ValueError(
                f"{title} was used before, and a function from reshard frees the leaves after each "
                "call; call start for each call, or use the function from unshard to keep the "
                "leaves"
            )
        if freed:
            self._handles, self._used = None, True
        return self.shard, handles
