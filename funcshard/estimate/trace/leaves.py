"""``Table`` and ``Leaves``: parameters that tell the recorder of their uses and gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from funcshard.estimate.trace.recorder import Recorder
from funcshard.estimate.trace.tape import UseParam

_SETATTR = nn.Module.__setattr__.__code__


class Table(dict[str, Any]):
    """A module's parameters and watched attributes, which tells the tracer of each read.

    Arguments:
        names: key -> name of the parameter in the model.
        recorder: the recorder.
        make: from the name of a parameter to the parameter.
        watched: attributes that differ within the module's kind.
        note: is called with the name of an attribute that is read, or ``None`` for parameters.
    """

    __slots__ = ("_make", "_note", "_unmade", "names", "recorder", "watched")

    def __init__(
        self,
        names: Mapping[str, str | None],
        recorder: Recorder,
        make: Callable[[str], torch.Tensor],
        watched: dict[str, Any],
        note: Callable[[str | None], None],
    ) -> None:
        super().__init__(dict.fromkeys(names))
        self.names, self.recorder, self.watched = names, recorder, watched
        # Why make a parameter only when it's read: a fake tensor takes half a millisecond, and most
        # experts never run.
        self._unmade = {key for key, name in names.items() if name is not None}
        self._make, self._note = make, note

    def make(self) -> Table:
        for key in [*self._unmade]:
            super().__setitem__(key, self._make(self.names[key] or ""))
        self._unmade.clear()
        return self

    def __getitem__(self, key: str) -> Any:
        if key in self.watched:
            self._note(key)
            return self.watched[key]
        name = self.names.get(key)
        self._note(None)
        # Note: in forward autograd's hook tells of saved parameters; here only a forward that runs
        # again reads them.
        if name is not None and self.recorder.phase == "backward":
            self.recorder.emit(UseParam(name))
        return super(Table, self.make()).__getitem__(key)

    def _read(self) -> Table:
        self._note(None)
        return self.make()

    def __setitem__(self, key: str, value: Any) -> None:
        self._unmade.discard(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        if key in self.watched:
            del self.watched[key]
        else:
            self._unmade.discard(key)
            super().__delitem__(key)

    def __contains__(self, key: object) -> bool:
        # Why the caller: a module must not set an attribute that has the name of a parameter.
        return super().__contains__(key) or (
            key in self.watched and sys._getframe(1).f_code is not _SETATTR  # noqa: SLF001
        )

    def __iter__(self) -> Iterator[str]:  # with it, dict(table) reads the values one by one
        return super().__iter__()

    def get(self, key: str, default: Any = None) -> Any:
        return super(Table, self._read()).get(key, default)

    def items(self) -> Any:
        return super(Table, self._read()).items()

    def values(self) -> Any:
        return super(Table, self._read()).values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())


class Leaves(torch.autograd.Function):
    """``Leaves.apply(recorder, call, names, anchor, *params)``: the parameters for one call.

    Its backward runs when all gradients of the call are complete, like that of the runtime's
    gather.
    """

    @staticmethod
    def forward(
        ctx: Any,
        recorder: Recorder,
        call: int,
        names: list[str],
        anchor: torch.Tensor,
        *params: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.recorder, ctx.call, ctx.names = recorder, call, names
        # Why: a gradient that is missing must not become a tensor of zeros, which takes memory.
        ctx.set_materialize_grads(False)
        return tuple(param.detach() for param in params)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        for name, grad in zip(ctx.names, grads, strict=True):
            if grad is not None:
                ctx.recorder.complete(name, grad, ctx.call)
        return None, None, None, None, *(None for _ in grads)
