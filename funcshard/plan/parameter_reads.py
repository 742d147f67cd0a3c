"""Which modules cannot be units, because other code than their forward reads their parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from funcshard._utils.tensors import tensors_in


def read_outside(module: nn.Module, inputs: Any) -> set[int]:
    """Return the ids of the modules of which a parameter is read while their forward does not run.

    Arguments:
        module: the module; one forward of a copy, which shares its parameters, runs.
        inputs: a tuple of arguments, a dictionary of keyword arguments, or the only argument.
    """
    holder_ids: dict[int, set[int]] = {}
    for inner_module in module.modules():
        for parameter in inner_module.parameters():
            holder_ids.setdefault(id(parameter), set()).add(id(inner_module))
    # Why a memo: the copy shares the parameters, so their ids lead back to the module.
    clone_root = copy.deepcopy(
        module, {id(parameter): parameter for parameter in module.parameters()}
    )
    running_ids: list[int] = []
    for inner_module, cloned_module in zip(module.modules(), clone_root.modules(), strict=True):
        # Why forward and no hooks: a unit is gathered in its forward, and its hooks run outside.
        cloned_module.forward = _noting(running_ids, id(inner_module), cloned_module.forward)
    args, kwargs = (), {}
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    else:
        args = inputs if isinstance(inputs, tuple) else (inputs,)
    reads_mode = _Reads(holder_ids, running_ids)
    # Why with gradients: without them, torch's transformer layers read the parameters of their
    # children, and fully_shard keeps them from that.
    with torch.random.fork_rng(), torch.enable_grad(), reads_mode:
        clone_root(*args, **kwargs)
    return reads_mode.outside


def _noting(running: list[int], number: int, forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        running.append(number)
        try:
            return forward(*args, **kwargs)
        finally:
            running.pop()

    return run


class _Reads(TorchFunctionMode):
    """Notes which modules' parameters an operation reads while these modules do not run."""

    def __init__(self, holders: Mapping[int, set[int]], running: Iterable[int]) -> None:
        super().__init__()
        self.holders, self.running = holders, running
        self.outside: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read_tensors = [
            tensor for tensor in tensors_in((args, kwargs)) if id(tensor) in self.holders
        ]
        # Why the results: a shape or a device is no tensor, and a placeholder has them too.
        if read_tensors and any(
            all(result is not tensor for tensor in read_tensors) for result in tensors_in((out,))
        ):
            for tensor in read_tensors:
                self.outside |= self.holders[id(tensor)].difference(self.running)
        return out
