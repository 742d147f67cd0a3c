"""What a unit is given is only to be read: on one machine all ranks have the same memory, and it is let go of anyway."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from funcshard.plan import UnitPlan
from funcshard.precision import map_tensors

__all__ = ["check_unchanged", "kept_apart", "versions"]

Gathered = Sequence[Sequence[torch.Tensor]]  # the leaves of each buffer


def versions(gathered: Gathered) -> list[int]:
    """Return what torch counts up whenever a buffer's leaves are written to; zeros in inference mode, where they are own."""
    inference = torch.is_inference_mode_enabled()
    return [0 if inference or leaves[0].is_inference() else leaves[0]._version for leaves in gathered]


def check_unchanged(before: Sequence[int], gathered: Gathered, unit: UnitPlan) -> None:
    """Raise if leaves have been written to since ``versions`` was ``before``."""
    for old, new, buffer in zip(before, versions(gathered), unit.buffers, strict=True):
        if new != old:
            paths = ", ".join([repr(leaf.path) for leaf in buffer.leaves[:3]] + ["…"] * (len(buffer.leaves) > 3))
            raise RuntimeError(
                f"the forward of unit {unit.title!r} modified a leaf in place, one of buffer {buffer.key!r} ({paths}); "
                f"gathered leaves are only to be read, because other ranks may have the same memory, and the change would "
                f"be lost: modify a copy, keep what changes in a module's buffer, or change the shards between steps"
            )


def kept_apart(result: Any, gathered: Gathered) -> Any:
    """Return a unit's result with copies of the leaves that it returns as they are, as far as ``map_tensors`` looks into it.

    Whoever gets them may write to them, and keeps nothing else alive.
    """
    if torch._C._are_functorch_transforms_active():  # what is gathered there has no storage to look at
        return result
    storages = {leaves[0].untyped_storage()._cdata for leaves in gathered}

    def own(value: torch.Tensor) -> torch.Tensor:
        inside = value.layout is torch.strided and value.untyped_storage()._cdata in storages
        return value.clone() if inside else value

    return map_tensors(own, result)
