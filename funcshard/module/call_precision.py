"""The casts of a call that no unit does, and modules in full precision that are no units."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from funcshard.core import cast_outputs, run_in_full_precision
from funcshard.plan import MixedPrecision


@dataclass(frozen=True, slots=True, eq=False)
class CallPrecision:
    """The casts of a call that no unit does: of its outputs, of buffers, of modules without leaves.

    Attributes:
        root: the precision that says how the outputs of the whole model are cast, and its inputs
            if the plan has no root unit.
        buffer_dtypes: name of each buffer that is cast -> its dtype during the call.
        full_precision: indices of the modules that compute in full precision without being units,
            because they have no parameters or because units inside them own all of their
            parameters.
    """

    root: MixedPrecision | None
    buffer_dtypes: dict[str, torch.dtype]
    full_precision: frozenset[int]

    def cast_buffers(self, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the buffers in the dtypes of the call; ``restore_buffers`` is the inverse."""
        dtypes = {
            name: dtype
            for name, dtype in self.buffer_dtypes.items()
            if buffers[name].is_floating_point()
        }
        return {name: b.to(dtypes[name]) if name in dtypes else b for name, b in buffers.items()}

    def cast_outputs(self, out: Any, *, mutable: bool) -> Any:
        """Return the results of the whole model, with outputs but not new buffers cast."""
        return (
            (cast_outputs(self.root, out[0]), out[1]) if mutable else cast_outputs(self.root, out)
        )

    def restore_buffers(
        self, buffers: dict[str, torch.Tensor], given: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the new buffers of a call in the dtypes of the buffers that were given to it."""
        return {
            name: b.to(given[name].dtype) if name in self.buffer_dtypes else b
            for name, b in buffers.items()
        }


def forward_in_full_precision(
    module: nn.Module, forward: Callable[[Any, Any], Any], args: Any, kwargs: Any
) -> Any:
    """Run a module that is no unit in the widest dtype of its buffers and inner parameters."""
    own_dtypes = [
        t.dtype
        for t in (*module.parameters(), *module.buffers(recurse=False))
        if t.is_floating_point()
    ]
    return run_in_full_precision(
        max(own_dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32),
        forward,
        (args, kwargs),
        {},
    )
