"""A warning for a module that was changed after ``make_functional`` had copied it.

Such changes reach neither the function nor its parameters: a loaded state dict, frozen parameters,
hooks, another mode. ``make_functional`` notes the state of the module, and the function's first
``fully_shard`` compares. So steps and calls take no longer. Later changes are no mistake: the
module may be a reference, or the one that trained weights are loaded into.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from funcshard._utils import callers_level, version


class _Sums(NamedTuple):
    """Sums over a module tree: two trees of other sums differ in the way that the words say."""

    modules: int
    versions: int
    trainable: int
    training: int
    hooks: int


_WORDS = {
    "versions": "its parameters were written, as load_state_dict and optimizers do",
    "trainable": "parameters were frozen or unfrozen",
    "training": "train() or eval() was called",
    "hooks": "hooks were added or removed",
}


@dataclass(slots=True, eq=False)
class LateChanges:
    """The state of a module when ``make_functional`` copied it; ``look`` compares, once.

    Attributes:
        module: the module.
        sums: the numbers that each of these changes would change.
        looked: whether it was compared.
    """

    module: weakref.ref[nn.Module]
    sums: _Sums
    looked: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> LateChanges:
        """Return the object for a module."""
        return cls(weakref.ref(module), _sums(module))

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_no_module, ()  # the module stays in its process

    def look(self) -> None:
        """Warn if the module is not as it was; do nothing the second time."""
        module = None if self.looked else self.module()
        self.looked = True
        if module is None or (now := _sums(module)).modules != self.sums.modules:
            return
        if any(parameter.is_meta for parameter in module.parameters()):
            # The values were dropped, to free memory.
            now = now._replace(versions=self.sums.versions)
        if now == self.sums:
            return
        changes = [
            words
            for name, words in _WORDS.items()
            if getattr(now, name) != getattr(self.sums, name)
        ]
        warnings.warn(
            f"{type(module).__name__} was changed after make_functional had copied it: "
            f"{', and '.join(changes)}. Neither apply nor params see that: change the module "
            "first, or call make_functional again; for values alone call from_state_dict, for "
            "another mode pass apply.eval() or apply.train()",
            stacklevel=callers_level(),
        )


def _sums(module: nn.Module) -> _Sums:
    """Return the sums of a tree; one quick walk, as models have thousands of modules."""
    modules, seen = [module], {id(module)}
    tensors: list[torch.Tensor | None] = []
    training = hooks = 0
    for each in modules:  # which grows
        state = each.__dict__
        tensors += state["_parameters"].values()
        training += state["training"]
        if state["_forward_hooks"] or state["_forward_pre_hooks"] or state["_backward_hooks"]:
            hooks += (
                len(state["_forward_hooks"])
                + len(state["_forward_pre_hooks"])
                + len(state["_backward_hooks"])
            )
        for child in state["_modules"].values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                modules.append(child)
    found = [tensor for tensor in tensors if tensor is not None]
    trainable = sum([tensor.requires_grad for tensor in found])
    # Inference tensors have no version.
    versions = sum([version(tensor) for tensor in found if not tensor.is_inference()])
    return _Sums(len(modules), versions, trainable, training, hooks)


def _of_no_module() -> LateChanges | None:
    return None
