"""The pickle in which ``torch.save`` describes one tensor, without the tensor's data.

Like ``torch_private``, this file uses torch's private API.
"""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from funcshard._utils.torch_names import needed_for


def tensor_pickle(dtype: torch.dtype, sizes: Sequence[int]) -> bytes:
    """Return the pickle that ``torch.save`` writes for a contiguous CPU tensor.

    ``torch.load`` makes the tensor from it, and from the data of a storage named ``"0"``.

    Arguments:
        dtype: the tensor's dtype.
        sizes: the tensor's shape.

    Example:
        >>> b"FloatStorage" in tensor_pickle(torch.float32, (2, 3))
        True
    """
    file = io.BytesIO()
    # Memory that is never written takes no pages, so a tensor of any size is cheap to make.
    with needed_for("fs.save"):
        _Pickler(file, math.prod(sizes)).dump(torch.empty(sizes, dtype=dtype, device="cpu"))
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Writes a reference in place of a storage, of that many elements."""

    def __init__(self, file: io.BytesIO, numel: int) -> None:
        super().__init__(file, protocol=2)
        self._numel = numel

    def persistent_id(self, found: Any) -> Any:
        if isinstance(found, torch.storage.TypedStorage):
            return (
                "storage",
                getattr(torch, found._pickle_storage_type()),
                "0",
                "cpu",
                self._numel,
            )
        if isinstance(found, torch.UntypedStorage):
            return ("storage", torch.UntypedStorage, "0", "cpu", found.nbytes())
        return None
