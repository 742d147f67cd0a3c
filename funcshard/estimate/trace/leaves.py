"""``Table`` and ``Leaves``: parameters that tell the recorder of their uses and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from funcshard.estimate.trace.recorder import Recorder
from funcshard.estimate.trace.tape import UseParam

__all__ = ["Leaves", "Table"]


class Table(dict[str, Any]):
    """A module's parameters; it tells the recorder when a checkpoint's second forward reads one."""

    __slots__ = ("names", "recorder")

    def __init__(self, table: Mapping[str, Any], recorder: Recorder, names: Mapping[str, str | None]) -> None:
        super().__init__(table)
        self.recorder = recorder
        self.names = names

    def __getitem__(self, key: str) -> Any:
        name = self.names.get(key)
        if name is not None and self.recorder.phase == "backward":
            self.recorder.emit(UseParam(name))
        return super().__getitem__(key)


class Leaves(torch.autograd.Function):
    """``Leaves.apply(recorder, call, names, anchor, *params)``: the parameters for one call.

    Backward runs it when all gradients of the call are complete, as it runs the runtime's gather.
    """

    @staticmethod
    def forward(
        ctx: Any, recorder: Recorder, call: int, names: list[str], anchor: torch.Tensor, *params: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.recorder, ctx.call, ctx.names = recorder, call, names
        ctx.set_materialize_grads(False)
        return tuple(param.detach() for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        for name, grad in zip(ctx.names, grads, strict=True):
            if grad is not None:
                ctx.recorder.complete(name, grad, ctx.call)
        return None, None, None, None, *(None for _ in grads)
