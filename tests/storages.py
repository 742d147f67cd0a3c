"""Count the storages that are alive, for tests of when memory is freed."""

from collections import Counter

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from funcshard._utils import tree


class Log(list):
    """A list of weak references to storages; copies of a module share the log of the module."""

    def __call__(self, tensor):
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        self.append(StorageWeakRef(tensor.untyped_storage()))

    def __deepcopy__(self, memo):
        return self

    def alive(self):
        return sum(not ref.expired() for ref in self)


class LoggedBlock(nn.Module):
    """A residual block of one linear layer; each forward logs the storage of the layer's weight."""

    def __init__(self, width, log):
        super().__init__()
        self.linear, self.log = nn.Linear(width, width), log

    def forward(self, x):
        self.log(self.linear.weight)
        return x + torch.tanh(self.linear(x))


class Alive(TorchDispatchMode):
    """A mode that counts the living storages that operations in this thread have allocated.

    Attributes:
        made: number of storages allocated so far.
        most: the highest number of living storages so far.
        most_bytes: the highest sum of their sizes so far.
        most_of: size in bytes -> the highest number of living storages of that size so far.
    """

    def __init__(self, counts):
        """Count only storages for whose size in bytes ``counts(nbytes)`` is true."""
        super().__init__()
        self.counts, self.made, self.most, self.most_bytes, self.most_of, self._held = counts, 0, 0, 0, Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # Views and tensors written in place are no new storages. Their storage may belong to
        # another simulated rank, because the last rank to join a collective does the copies of all
        # ranks.
        given = {x.untyped_storage()._cdata for x in tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for made in tree.leaves(out):
            storage = made.untyped_storage() if isinstance(made, torch.Tensor) and not made.is_meta else None
            if storage is not None and storage._cdata not in given and self.counts(storage.nbytes()):
                self.made += 1
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        now = self.now()
        self.most = max(self.most, now.total())
        self.most_bytes = max(self.most_bytes, sum(nbytes * count for nbytes, count in now.items()))
        self.most_of |= now
        return out

    def now(self):
        """Return the number of living storages by their size in bytes."""
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        return Counter(nbytes for _, nbytes in self._held.values())
