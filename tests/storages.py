"""Which storages are alive, for tests of what is freed when."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef


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
