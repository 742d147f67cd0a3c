"""A unit of several modules: gathered for the first of them, and freed after the last has run.

``unshard`` and ``reshard`` gather a unit around one function. The modules of a group run at
different times of a call, and share what the first of them gathered: one autograd node, whose
backward runs once when the gradients of all leaves are complete.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from funcshard._utils import forget_parametrized, tensors_in
from funcshard.core.flat_buffer import TransformedLeaves
from funcshard.core.prefetcher import Handles, Prefetcher, SavedUnit, current_unit
from funcshard.core.recompute import remat
from funcshard.core.slices import SlicedUnit, save_unit
from funcshard.core.unit import Reshard, Unshard, copy_aliased_outputs


def grad_mode() -> tuple[bool, bool]:
    """Return whether gradients are recorded, and whether inference mode is on."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


@dataclass(frozen=True, slots=True, eq=False)
class OpenGroup:
    """The gathered leaves of a group, between the first and the last of its modules.

    Attributes:
        gathered: the leaves of each buffer.
        saved: the state that the group keeps for backward, if there is any.
        freed: whether autograd saves positions in the gathered buffers, and not the buffers.
        mode: the ``grad_mode`` that the leaves were gathered in.
    """

    gathered: tuple[tuple[torch.Tensor, ...], ...]
    saved: SavedUnit | None
    freed: bool
    mode: tuple[bool, bool]

    def close(self) -> None:
        """End the group's forward: its leaves are free, apart from slices for backward."""
        if isinstance(self.saved, SlicedUnit):
            self.saved.post_forward(self.gathered)

    def run(self, f: Unshard, /, *args: Any, **kwargs: Any) -> Any:
        """Run one module of the group, whose function and unit ``f`` has."""
        token = current_unit.set(self.saved)
        try:
            if not self.freed or self.saved is None:
                out = f.run(self.gathered, *args, **kwargs)
            else:
                with saved_tensors_hooks(*self.saved.hooks()):
                    out = f.run(self.gathered, *args, **kwargs)
        finally:
            current_unit.reset(token)
        return out if isinstance(self.gathered[0], TransformedLeaves) else copy_aliased_outputs(out, self.gathered)

    def run_recomputed(self, f: Unshard, /, module: Any, forward: Any, args: Any, kwargs: Any) -> Any:
        """Run one module of the group, which backward computes again from the module's inputs."""
        saved = self.saved
        if saved is None or not torch.is_grad_enabled():
            return self.run(f, module, forward, args, kwargs)
        if f.trainable or any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
            saved.note_needed()
        # Why a list: what backward runs must not hold the leaves that forward gathered.
        first = [self.gathered]

        def run(args: Any, kwargs: Any) -> Any:
            gathered = first.pop() if first else saved.gathered_again()
            token = current_unit.set(saved)
            try:
                return copy_aliased_outputs(f.run(gathered, module, forward, args, kwargs), gathered)
            finally:
                current_unit.reset(token)
                forget_parametrized(module)  # they have no graph in forward, and another one in backward

        return remat(run)(args, kwargs)


def open_group(
    f: Unshard,
    resharded: Reshard | None,
    prefetcher: Prefetcher | None,
    handles: Handles | None,
    shard: Mapping[str, torch.Tensor],
) -> OpenGroup:
    """Gather a group for the module of it that a call runs first.

    Arguments:
        f: ``unshard`` of the group.
        resharded: ``reshard`` of it, if the group is freed between forward and backward.
        prefetcher: that of the call; ``None`` under a transform, where autograd has no hooks.
        handles: the handles of the group's all-gathers, from the prefetcher.
        shard: this rank's shard of the group.
    """
    if prefetcher is None:
        return OpenGroup(f.gather(shard), None, freed=False, mode=grad_mode())
    freed = resharded is not None and torch.is_grad_enabled() and f.gathers
    saved = None
    if freed and resharded is not None:
        kind = functools.partial(save_unit, resharded.slices) if resharded.slices else SavedUnit
        saved = kind(f, shard, prefetcher)
    elif torch.is_grad_enabled():
        saved = SavedUnit(f, shard, None)
        saved.kept = f.kept(shard)
    gathered = f.gather(shard, handles, None if saved is None else saved.post_backward())
    if saved is not None and freed:
        saved.watch(gathered)
    return OpenGroup(gathered, saved, freed, grad_mode())
