"""An optimizer as a pair of functions, of either kind; and errors for other objects in its place.

``torch_optimizer`` and ``muon`` return a ``TorchOptimizer``; TorchOpt and optax make pairs
``(init, update)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funcshard._utils import absent
from funcshard.plan import Plan

# Why only these classes: a flat shard keeps nothing of its leaves' shapes. Each of these classes
# updates an element from that element's own gradient and state, so a flat shard gets the same
# numbers as the leaves would.
ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
)  # fmt: skip

_STATE = "the state is state.opt_state, a value that the step takes and returns"
_REMEDIES = {
    "zero_grad": "leave it out; value_and_grad returns new gradients each time",
    "state_dict": f"{_STATE}: call fs.optimizer_to_state_dict, or fs.save(path, state, plan, mesh)",
    "load_state_dict": f"{_STATE}: call fs.optimizer_from_state_dict, or fs.restore(path, plan, mesh)",
    "param_groups": "pass options that change as functions of the step, as in lr=lambda step: ...",
    "state": _STATE,
    "add_param_group": "pass groups= to torch_optimizer",
    "update": "call step(grads, state, params), which returns new parameters instead of updates",
}


class TorchOptimizer(NamedTuple):
    """An optimizer as a pair of functions; made by ``torch_optimizer`` or ``muon``.

    Attributes:
        init: ``init(params) -> state``.
        step: ``step(grads, state, params) -> (params, state)``. The tensors of ``state`` and
            ``params`` are donated: the step updates them in place and returns them, and the old
            ones raise an error when they are used.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]

    def __repr__(self) -> str:
        return getattr(self.step, "title", f"TorchOptimizer({self.init!r}, {self.step!r})")

    def __getattr__(self, name: str) -> Any:
        raise absent("an optimizer of torch_optimizer or muon", name, _REMEDIES)


def refusal(cls: Any) -> Exception:
    """Return the error for a value that is no class of elementwise optimizers."""
    if isinstance(cls, torch.optim.Optimizer):
        own_type = type(cls).__name__
        return TypeError(
            "torch_optimizer takes a class of torch.optim and its options, because it makes the "
            f"state from the shards; found an instance of {own_type}: pass "
            f"torch_optimizer(torch.optim.{own_type}, lr=...), and the shards to step.init"
        )
    if not callable(cls):
        found_text = f"found {cls!r}" if isinstance(cls, str) else f"found {type(cls).__name__}"
        return TypeError(
            f"torch_optimizer takes a class of torch.optim and its options; {found_text}: pass the "
            "class, as in torch_optimizer(torch.optim.AdamW, lr=...)"
        )
    names = ", ".join(c.__name__ for c in ELEMENTWISE)
    remedy = "pass elementwise=True if it is one too"
    if cls is getattr(torch.optim, "Muon", None):
        remedy = "call fs.muon(plan, mesh, lr=...), which updates whole matrices"
    elif isinstance(cls, functools.partial):
        remedy = "pass the class itself, and its options by name"
    elif isinstance(cls, type) and cls.__module__.startswith("torch.optim"):
        remedy = "choose one of these; elementwise=True would compute something else on shards"
    return ValueError(
        "torch_optimizer takes an optimizer that updates each element by itself, because it works "
        f"on flat shards; found {getattr(cls, '__name__', cls)!r}, known are {names}: {remedy}"
    )


def check_optimizer(optimizer: Any, plan: Plan) -> None:
    """Raise unless ``optimizer`` is a pair of functions, made for shards that ``plan`` cuts."""
    if not isinstance(optimizer, TorchOptimizer) and not (
        isinstance(optimizer, tuple) and len(optimizer) == 2
    ):
        raise TypeError(
            "optimizer must be a pair (init, update), as TorchOpt's are, or "
            f"torch_optimizer(torch.optim.AdamW, lr=...); found {_misfit(optimizer)}"
        )
    if not isinstance(optimizer, TorchOptimizer) and hasattr(optimizer[1], "param_groups"):
        # Why refused: the second function of such a pair returns updates, and not parameters.
        raise TypeError(
            "optimizer must be the pair that torch_optimizer or muon returned; found a plain "
            "tuple of its functions, which stands for a pair (init, update) as TorchOpt's are: "
            "pass the pair itself"
        )
    own_plan: Plan | None = (
        getattr(optimizer[1], "plan", None) if isinstance(optimizer, TorchOptimizer) else None
    )
    if own_plan is not None and [(u.name, u.buffers) for u in own_plan.unit_list] != [
        (u.name, u.buffers) for u in plan.unit_list
    ]:
        raise ValueError(
            "the optimizer's groups or matrices lie elsewhere in these shards: it was made with "
            f"plan {own_plan.fingerprint()}; found plan {plan.fingerprint()} here: make the optimizer "
            "and the step with one plan"
        )


def _misfit(optimizer: Any) -> str:
    """Return what was found in place of an optimizer's pair, and what to do."""
    cls = optimizer if isinstance(optimizer, type) else type(optimizer)
    found_text = f"{'the class' if cls is optimizer else 'an instance of'} {cls.__name__}"
    if not callable(optimizer):
        return f"{found_text}: pass one of these"
    if not issubclass(cls, torch.optim.Optimizer):
        return f"{found_text}: call the function that returns a pair, and pass its result"
    if cls is getattr(torch.optim, "Muon", None):
        return f"{found_text}: pass fs.muon(plan, mesh, lr=...)"
    return f"{found_text}: pass fs.torch_optimizer(torch.optim.{cls.__name__}, lr=...), and the shards to step.init"
