"""Which storages are alive, for tests of what is freed when."""

from collections import Counter

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from funcshard._utils import tree


class Log(list):
    """Weak references to storages; not copied when a module that holds it is."""

    def __call__(self, tensor):
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        self.append(StorageWeakRef(tensor.untyped_storage()))

    def __deepcopy__(self, memo):
        return self

    def alive(self):
        return sum(not ref.expired() for ref in self)


class Alive(TorchDispatchMode):
    """Counts, in this thread, the storages that operations make and that are alive at a time.

    Attributes:
        made: how many have been made.
        most: the most of them at any time so far.
        most_of: the same by size in bytes.
    """

    def __init__(self, counts):
        """``counts(nbytes)`` says whether storages of a size count."""
        super().__init__()
        self.counts, self.made, self.most, self.most_of, self._held = counts, 0, 0, Counter(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        # not views and what is written in place: the last simulated rank to come copies for all the others
        given = {x.untyped_storage()._cdata for x in tree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for made in tree.leaves(out):
            storage = made.untyped_storage() if isinstance(made, torch.Tensor) else None
            if storage is not None and storage._cdata not in given and self.counts(storage.nbytes()):
                self.made += 1
                self._held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        now = self.now()
        self.most = max(self.most, now.total())
        self.most_of |= now
        return out

    def now(self):
        """How many are alive, by size in bytes."""
        self._held = {key: held for key, held in self._held.items() if not held[0].expired()}
        return Counter(nbytes for _, nbytes in self._held.values())
