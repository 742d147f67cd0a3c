"""Which storages are alive, for tests of what is freed when."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from funcshard import tree


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


class Peak(TorchDispatchMode):
    """Counts, in this thread, the storages of at least ``nbytes`` that operations make and that are alive at a time.

    Attributes:
        most: the most of them at any time so far.
    """

    def __init__(self, nbytes):
        super().__init__()
        self.nbytes, self.most, self._alive = nbytes, 0, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for made in tree.leaves(out):
            if isinstance(made, torch.Tensor) and made.untyped_storage().nbytes() >= self.nbytes:
                self._alive[made.untyped_storage()._cdata] = StorageWeakRef(made.untyped_storage())
        self._alive = {key: ref for key, ref in self._alive.items() if not ref.expired()}
        self.most = max(self.most, len(self._alive))
        return out
