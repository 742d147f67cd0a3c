"""A warning for a module that was changed after ``make_functional`` had copied it.

Such changes reach neither the function nor its parameters: a loaded state dict, frozen parameters,
another mode. ``make_functional`` notes the state of the module, and the function's first
``fully_shard`` compares. Later changes are no mistake: the module may be a reference, or the one
that trained weights are loaded into. Hooks aren't compared: modules of Hugging Face install some
in their calls.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from funcshard._utils import callers_level, version


class ModuleState(NamedTuple):
    """What a change of a module changes."""

    versions: list[int]
    trainable: list[bool]
    training: list[bool]


_WORDS = (  # for a difference in each field of ModuleState
    "its parameters were written, as load_state_dict and optimizers do",
    "parameters were frozen or unfrozen",
    "train() or eval() was called",
)


@dataclass(slots=True, eq=False)
class LateChanges:
    """The state of a module when ``make_functional`` copied it; ``look`` compares, once.

    Attributes:
        module: the module.
        before: its state then.
        looked: whether it was compared.
    """

    module: weakref.ref[nn.Module]
    before: ModuleState
    looked: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> LateChanges:
        """Return the object for a module."""
        return cls(weakref.ref(module), _state_of(module))

    def __reduce__(self) -> tuple[Any, ...]:
        return _of_no_module, ()  # the module stays in its process

    def look(self) -> None:
        """Warn if the module is not as it was; do nothing the second time."""
        module = None if self.looked else self.module()
        self.looked = True
        if module is None:
            return
        state_now = _state_of(module)
        if any(parameter.is_meta for parameter in module.parameters()):
            # The values were dropped, to free memory.
            state_now = state_now._replace(versions=self.before.versions)
        same_modules = len(state_now.training) == len(self.before.training)
        if state_now == self.before or not same_modules:
            return
        changes = [
            words
            for old, new, words in zip(self.before, state_now, _WORDS, strict=True)
            if old != new
        ]
        warnings.warn(
            f"{type(module).__name__} was changed after make_functional had copied it: "
            f"{', and '.join(changes)}. Neither apply nor params see that: change the module "
            "first, or call make_functional again; for values alone call from_state_dict, for "
            "another mode pass apply.eval() or apply.train()",
            stacklevel=callers_level(),
        )


def _state_of(module: nn.Module) -> ModuleState:
    parameters = list(module.parameters())
    return ModuleState(
        # Inference tensors have no version.
        [version(parameter) for parameter in parameters if not parameter.is_inference()],
        [parameter.requires_grad for parameter in parameters],
        [submodule.training for submodule in module.modules()],
    )


def _of_no_module() -> LateChanges | None:
    return None
