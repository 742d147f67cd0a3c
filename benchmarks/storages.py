"""``Storages``: the bytes of all tensors that are alive, at every moment of a computation.

A dispatch mode sees every operation, those of autograd's backward included. It notes the storage of
each result, and a weak reference tells when the storage is gone. Views share a storage, which counts
once. Memory that a kernel takes and frees within one operation is not seen.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from funcshard._utils.tree import tensors_in

GATHERED = "gathered units"
_aten = torch.ops.aten


class Storages(TorchDispatchMode):
    """Count the bytes of storages while the mode is active.

    Memory from before the mode counts only if it is given to ``hold``. Copies from the meta device to
    the CPU, which have no data, do nothing, so a model on meta tensors can keep shards on the CPU.

    Attributes:
        live: bytes that are alive now, by type of device, and those of gathered units.
        peak: the most bytes since ``reset``, alike.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def hold(self, tensors: Any) -> None:
        """Count tensors that are alive already."""
        for tensor in tensors_in(tensors):
            self._add(tensor, [tensor.device.type])

    def reset(self) -> None:
        """Begin a new peak, from the memory that is alive now."""
        self.peak = Counter(self.live)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _without_data(func, args, kwargs or {})
        out = func(*args, **(kwargs or {})) if out is None else out
        for tensor in tensors_in(out):
            if tensor.untyped_storage()._cdata not in self._refs:
                self._add(tensor, [tensor.device.type, *[GATHERED] * _gathers(sys._getframe(1))])
        return out

    def _add(self, tensor: torch.Tensor, counts: list[str]) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not size or key in self._refs:
            return

        def forget(_: Any) -> None:
            del self._refs[key]
            self.live.subtract(dict.fromkeys(counts, size))

        self._refs[key] = weakref.ref(storage, forget)
        for count in counts:
            self.live[count] += size
            self.peak[count] = max(self.peak[count], self.live[count])


def _without_data(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a copy from the meta device to the CPU; ``None`` for anything else."""
    if func is _aten.copy_.default and args[1].is_meta and not args[0].is_meta:
        return args[0]
    if func is _aten._to_copy.default and args[0].is_meta and torch.device(kwargs.get("device") or "meta").type != "meta":
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    return None


def _gathers(frame: FrameType | None) -> bool:
    """Return whether the library gathers a unit at the moment."""
    while frame is not None:
        if frame.f_code.co_name == "all_gather_private" and frame.f_code.co_filename.endswith("funcshard/comm/group.py"):
            return True
        frame = frame.f_back
    return False
