"""Selective checkpoints see the operations of a unit's forward, and not its gathers.

A selective checkpoint keeps the results of some operations, and counts operations to find a result
again when backward computes forward a second time. The second computation gathers units at other
moments than forward did. So gathers run unseen (``_utils.unseen``), and so do the operations that
take views of gathered leaves, such as the transpose inside ``nn.Linear``:

- A view costs nothing to compute again, whereas a view that is kept would keep the whole gathered
  buffer in memory until backward.
- ``SavedUnit.pack`` replaces a saved view of the gathered buffer. It would not know a view of the
  buffer of the first gather, and the checkpoint would give backward other tensors than it needs.
"""

from __future__ import annotations

from typing import Any

import torch

from funcshard._utils import TorchDispatchMode, storage_id, unseen


class UnseenViews(TorchDispatchMode):
    """While it is active, no selective checkpoint sees operations that take views of some storages.

    Arguments:
        storages: the identities of the storages.
    """

    supports_higher_order_operators = True

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return what torch's own modes of selective checkpoints return."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        viewed = args[0] if getattr(func, "is_view", False) and args else None
        if isinstance(viewed, torch.Tensor) and storage_id(viewed) in self._storages:
            return _call_unseen(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@unseen
def _call_unseen(func: Any, *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)
