"""``Region``: the tensors that a compiler keeps for backward, and the operations that it fuses.

A compiler such as ``torch.compile`` fuses pointwise operations into the kernels around them. A
tensor that autograd saves is dropped if pointwise operations made it, if no unfused operation (a
matrix product, attention, a lookup) reads it, and if the tensors that it's computed from, beyond
those that are kept anyway, aren't larger. These are the rules of torch's partitioner by its default
settings, without its search for the least cut.

Source: ``min_cut_rematerialization_partition`` and ``ban_recompute_materialized_backward`` in
https://github.com/pytorch/pytorch/blob/v2.7.0/torch/_functorch/partitioners.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from funcshard._utils.torch_private import TorchDispatchMode, storage_id
from funcshard._utils.tree import tensors_in
from funcshard.estimate.trace.tape import Form

# Operations that compilers fuse, though torch does not tag them as pointwise.
_FUSED = frozenset({
    "aten._to_copy.default", "aten.copy_.default", "aten.fill_.Scalar", "aten.native_layer_norm.default",
    "aten.native_dropout.default", "aten.complex.default", "aten.cat.default",
})  # fmt: skip


def is_fused(operation: Any) -> bool:
    """Return whether a compiler fuses an operation with its neighbours."""
    return torch.Tag.pointwise in operation.tags or str(operation) in _FUSED


def is_reduction(operation: Any) -> bool:
    """Return whether an operation is a reduction, which reads a fused result as it's made."""
    return torch.Tag.reduction in operation.tags


@dataclass(slots=True, eq=False)
class _Packed:
    """A tensor that autograd saves; ``tensor`` is ``None`` if the compiler drops it.

    Attributes:
        roots: the tensors that a dropped one is computed from, which are kept.
    """

    tensor: Any
    form: Form
    roots: list[torch.Tensor]


class Region(TorchDispatchMode):
    """One call of a compiled module's forward, as a context."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self.recorder = recorder
        # By the number of a storage: the tensors that a pointwise result is computed from.
        self.roots: dict[int, dict[int, torch.Tensor]] = {}
        self.read: set[int] = set()  # storages that an unfused operation reads
        self.packed: list[_Packed] = []
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> Region:
        super().__enter__()
        # Note: these hooks lie inside the recorder's own, so they see a tensor first.
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        super().__exit__(*error)
        if error[0] is None:
            self._choose()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs, results = tensors_in((args, kwargs)), tensors_in(out)
        known_numbers = set(map(self._number, inputs))
        new_results = [
            tensor for tensor in results if self._number(tensor) not in known_numbers
        ]
        # Note: nothing new is made, so there is nothing to keep or to compute again.
        if not new_results:  # a view, or an operation in place
            return out
        if is_fused(func):
            root_tensors: dict[int, torch.Tensor] = {}
            for tensor in inputs:
                tensor_index = self._number(tensor)
                root_tensors.update(self.roots.get(tensor_index, {tensor_index: tensor}))
            self.roots.update(
                (self._number(tensor), root_tensors) for tensor in new_results
            )
        # Note: what an unfused operation reads is in memory anyway.
        elif not is_reduction(func):
            self.read |= known_numbers
        return out

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._is_param(tensor):
            return self.recorder.pack(tensor)
        # Note: which ones the compiler keeps is known only at the end of the region.
        self.packed.append(_Packed(tensor, Form.of(tensor), []))
        return self.packed[-1]

    def _choose(self) -> None:
        """Drop what the compiler recomputes, and note the rest as saved."""
        kept_storages: set[int] = set()

        def may_go(packed: _Packed) -> bool:
            tensor_index = self._number(packed.tensor)
            return tensor_index in self.roots and tensor_index not in self.read

        # Note: those that stay come first, because they may be roots of others.
        for packed in sorted(self.packed, key=may_go):
            tensor_index = self._number(packed.tensor)
            root_tensors = {
                key: root
                for key, root in self.roots.get(tensor_index, {}).items()
                if not self._is_param(root)
            }
            more_bytes = sum(
                _nbytes(root)
                for key, root in root_tensors.items()
                if key not in kept_storages
            )
            is_kept = not may_go(packed) or tensor_index in kept_storages
            if is_kept or more_bytes > _nbytes(packed.tensor):
                kept_storages.add(tensor_index)
                self.recorder.pack(packed.tensor)
                continue
            # Note: the roots are kept in place of the tensor, and serve later candidates too.
            kept_storages |= root_tensors.keys()
            packed.tensor, packed.roots = None, list(root_tensors.values())
            for root in packed.roots:
                self.recorder.pack(root)
        self.packed, self.roots = [], {}

    def _number(self, tensor: torch.Tensor) -> int:
        return self.recorder.number(tensor, known=True)

    def _is_param(self, tensor: torch.Tensor) -> bool:
        return storage_id(tensor) in self.recorder.params

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Packed):
            return packed
        # Note: a dropped tensor is made again by a kernel that is fused, so it takes no memory.
        if packed.tensor is not None:
            return packed.tensor
        return self.recorder.unseen(packed.form.empty)


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()
