"""``Storages``: the bytes of all tensors that are alive, at every moment of a computation.

A dispatch mode sees every operation, those of autograd's backward included. It notes the storage of
each result, and a weak reference tells when the storage is gone. Views share a storage, which counts
once. Memory that a kernel takes and frees within one operation is not seen.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from funcshard._utils.tensors import tensors_in
from funcshard._utils.torch_private import graph_task_id

__all__ = ["Peak", "Storages"]

# The category of a storage that is made while one of these functions of the library runs.
_PLACES = {
    ("core/buffer_comm.py", "start_gather"): "gather send",
    ("comm/group.py", "all_gather_private"): "gathered",
    ("core/prefetcher.py", "cut"): "slices",
    ("core/buffer_comm.py", "_start_scatter"): "reduction",
    ("core/buffer_comm.py", "start_reduce"): "reduction",
    ("core/buffer_comm.py", "start_reduce_parts"): "reduction",
    ("core/grad_reducer.py", "add"): "reduction",
    ("core/buffer_comm.py", "finish"): "gradient shards",
    ("core/buffer_comm.py", "_to_host"): "gradient shards",
    ("core/gradients.py", "_gradient"): "gradient shards",
    ("train/clipping.py", "clip_by_global_norm"): "gradient shards",
    ("train/optimizers.py", "__call__"): "optimizer",
}

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory on one kind of device.

    Attributes:
        bytes: bytes of all storages together.
        what: the operation that reached it.
        by_category: bytes of each category at that moment.
    """

    bytes: int
    what: str
    by_category: Mapping[str, int]


@dataclass(slots=True, eq=False)
class _Held:
    ref: weakref.ref[torch.UntypedStorage]
    category: str
    bytes: int
    device: str


class Storages(TorchDispatchMode):
    """Count the bytes of storages while the mode is active.

    Memory from before the mode counts only if it is given to ``hold``. Copies from the meta device to
    the CPU, which have no data, do nothing, so a model on meta tensors can keep shards on the CPU.

    Attributes:
        live: bytes that are alive now, by type of device.
        on_change: called with ``(operation or "free", category, bytes, device)`` at each change.
    """

    def __init__(self, on_change: Callable[[str, str, int, str], object] | None = None) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.on_change = on_change
        self._held: dict[int, _Held] = {}
        self._categories: dict[str, Counter[str]] = {}
        self._peaks: dict[str, Peak] = {}

    def hold(self, category: str, tensors: Any) -> None:
        """Count tensors that are alive already, or move them to another category."""
        for tensor in tensors_in(tensors):
            found = self._held.get(tensor.untyped_storage()._cdata)
            if found is None:
                self._add(tensor, category, "hold")
            else:
                self._categories[found.device][found.category] -= found.bytes
                self._categories[found.device][category] += found.bytes
                found.category = category

    def reset(self) -> None:
        """Begin a new peak, from the memory that is alive now."""
        self._peaks = {}
        for device in self._categories:
            self._note_peak(device, "start")

    def peak(self, device: str) -> Peak:
        """Return the peak since ``reset`` on a type of device."""
        return self._peaks.get(device, Peak(0, "start", {}))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = _without_data(func, args, kwargs or {})
        out = func(*args, **(kwargs or {})) if out is None else out
        category = ""
        for tensor in tensors_in(out):
            if tensor.untyped_storage()._cdata not in self._held:
                category = category or _category(sys._getframe(1))
                self._add(tensor, category, str(func))
        return out

    def _add(self, tensor: torch.Tensor, category: str, what: str) -> None:
        storage = tensor.untyped_storage()
        key, size, device = storage._cdata, storage.nbytes(), tensor.device.type
        if not size:
            return

        def gone(_: Any) -> None:
            held = self._held.pop(key)
            self.live[device] -= size
            self._categories[device][held.category] -= size
            if self.on_change is not None:
                self.on_change("free", held.category, -size, device)

        self._held[key] = _Held(weakref.ref(storage, gone), category, size, device)
        self.live[device] += size
        self._categories.setdefault(device, Counter())[category] += size
        if self.on_change is not None:
            self.on_change(what, category, size, device)
        self._note_peak(device, what)

    def _note_peak(self, device: str, what: str) -> None:
        if device not in self._peaks or self.live[device] > self._peaks[device].bytes:
            found = {category: size for category, size in self._categories[device].items() if size}
            self._peaks[device] = Peak(self.live[device], what, found)


def _without_data(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a copy from the meta device to the CPU; ``None`` for anything else."""
    if func is _aten.copy_.default and args[1].is_meta and not args[0].is_meta:
        return args[0]
    if func is _aten._to_copy.default and args[0].is_meta and torch.device(kwargs.get("device") or "meta").type != "meta":
        return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    return None


def _category(frame: FrameType | None) -> str:
    """Return the category of memory that is made now, from the functions that run."""
    while frame is not None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if "funcshard/" in file:
            found = _PLACES.get((file.rsplit("funcshard/", 1)[1], name))
            if found == "gather send" and not frame.f_locals["comm"].topology.cut:
                return "gathered"  # a cast or moved copy, which is not sent
            if found is not None:
                return found
        elif name == "unpack_hook" and file.endswith("torch/utils/checkpoint.py"):
            return "activations"  # computed again
        frame = frame.f_back
    return "activations" if graph_task_id() == -1 else "temporaries"
