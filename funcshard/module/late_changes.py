"""A warning for a module that was changed after ``make_functional`` had copied it.

Such changes reach neither the function nor its parameters: a loaded state dict, frozen parameters,
another mode. ``make_functional`` notes the state of the module, and the function's first
``fully_shard`` compares. So steps and calls take no longer. Later changes are no mistake: the
module may be a reference, or the one that trained weights are loaded into. Hooks aren't compared:
modules of Hugging Face install some in their calls.
"""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

from funcshard._utils import callers_level, version

_WRITTEN = "its parameters were written, as load_state_dict and optimizers do"
_TRAINING = "train() or eval() was called"


@dataclass(slots=True, eq=False)
class LateChanges:
    """The state of a module when ``make_functional`` copied it; ``look`` compares, once.

    Attributes:
        module: the module.
        before: what each kind of change would change, by the kind in a few words.
        looked: whether it was compared.
    """

    module: weakref.ref[nn.Module]
    before: dict[str, list[int]]
    looked: bool = False

    @classmethod
    def of(cls, module: nn.Module) -> LateChanges:
        """Return the object for a module."""
        return cls(weakref.ref(module), _state(module))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # the module stays in its process

    def look(self) -> None:
        """Warn if the module is not as it was; do nothing the second time."""
        module = None if self.looked else self.module()
        self.looked = True
        if module is None:
            return
        after = _state(module)
        if len(after[_TRAINING]) != len(self.before[_TRAINING]):
            return  # it has other modules, as with adapters
        if any(parameter.is_meta for parameter in module.parameters()):
            after[_WRITTEN] = self.before[_WRITTEN]  # the values were dropped, to free memory
        changes = [words for words, values in after.items() if values != self.before[words]]
        if changes:
            warnings.warn(
                f"{type(module).__name__} was changed after make_functional had copied it: "
                f"{', and '.join(changes)}. Neither apply nor params see that: change the module "
                "first, or call make_functional again; for values alone call from_state_dict, for "
                "another mode pass apply.eval() or apply.train()",
                stacklevel=callers_level(),
            )


def _state(module: nn.Module) -> dict[str, list[int]]:
    """Return numbers that a change of the module would change, by the kind of change."""
    modules, parameters = [*module.modules()], [*module.parameters()]
    return {
        # Note: tensors of inference mode have no version.
        _WRITTEN: [version(tensor) for tensor in parameters if not tensor.is_inference()],
        "parameters were frozen or unfrozen": [tensor.requires_grad for tensor in parameters],
        _TRAINING: [m.training for m in modules],
    }
