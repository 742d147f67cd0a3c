"""A warning for a function that throws changes of buffers away, such as statistics of BatchNorm."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from funcshard._utils import byte_view, callers_level, recording_or_transforming, version
from funcshard.module.skeleton import Skeleton

__all__ = ["DiscardedChanges"]


@dataclass(slots=True, eq=False)
class DiscardedChanges:
    """Looks for buffers that a call changed although it does not return them; warns once.

    The object belongs to one function of ``make_functional``, and to all functions made from it.

    Attributes:
        title: the class of the root module.
        watched: (index of a module, key in its buffer table, name) of each persistent buffer. Other
            buffers hold values that a forward may compute again at any time.
        compared: the training flags of the calls after which all values were compared.
        warned: whether the warning was given.
    """

    title: str
    watched: tuple[tuple[int, str, str], ...]
    compared: set[bool | None] = field(default_factory=set)
    warned: bool = False

    @classmethod
    def of(cls, skeleton: Skeleton) -> DiscardedChanges | None:
        """Return the object for a function, or ``None`` if the module has no persistent buffers."""
        watched = tuple(
            (index, key, name)
            for index, spec in enumerate(skeleton.specs)
            for key, name in spec.buffers.items()
            if name is not None and any(each in skeleton.persistent for each in skeleton.buffers[name])
        )
        return cls(skeleton.specs[0].cls.__name__, watched) if watched else None

    def look(
        self,
        modules: Sequence[nn.Module],
        before: Mapping[str, torch.Tensor],
        given: Mapping[str, torch.Tensor],
        training: bool | None,
    ) -> None:
        """Warn if a call changed a buffer.

        Where versions and values of tensors cannot be read, as under a transform, nothing is done.

        Arguments:
            modules: those of the call, after it.
            before: the call's own copies of the buffers, by name, with which it began.
            given: the buffers that the caller gave.
            training: the training flag of the call.
        """
        if self.warned or torch.compiler.is_compiling() or recording_or_transforming() or torch.is_inference_mode_enabled():
            return
        # Why compare all values once: F.batch_norm changes its statistics without counting it in
        # their versions. BatchNorm also counts its batches, which the versions show.
        every = training not in self.compared
        self.compared.add(training)
        changed = []
        for index, key, name in self.watched:
            now, own = modules[index]._buffers.get(key), before[name]
            if (every or now is not own or version(own) != 0) and _differ(now, given[name], own.dtype):
                changed.append(name)
        if changed:
            self.warned = True
            names = ", ".join([repr(name) for name in changed[:3]] + [f"{len(changed) - 3} more"] * (len(changed) > 3))
            warnings.warn(
                f"the forward of {self.title} changed buffers of the module ({names}), and the call threw the changes away: "
                f"use make_functional(module, mutable=True), whose calls return the new buffers, or apply.eval() if the "
                f"module should not change them; this warning comes once for each function",
                stacklevel=callers_level(),
            )


def _differ(now: torch.Tensor | None, given: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether a buffer has other bits than the one given to the call, cast to ``dtype``."""
    if now is None or now.shape != given.shape:
        return True
    if now.is_meta or now.layout != torch.strided or given.layout != torch.strided:
        return False
    return not torch.equal(byte_view(now.to(dtype)), byte_view(given.to(dtype)))
