"""An optimizer as a pair of functions: a ``TorchOptimizer``, or ``(init, update)`` as in optax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funcshard._utils.options import with_remedies
from funcshard.plan import Plan

# Why only these classes: a flat shard keeps nothing of its leaves' shapes. Each of these classes
# updates an element from that element's own gradient and state, so a flat shard gets the same
# numbers as the leaves would.
_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
ELEMENTWISE = tuple(getattr(torch.optim, name) for name in _NAMES.split())

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


@with_remedies("an optimizer of torch_optimizer or muon", _REMEDIES)
class TorchOptimizer(NamedTuple):
    """An optimizer as a pair of functions; made by ``torch_optimizer`` or ``muon``.

    Attributes:
        init: ``init(params) -> state``.
        step: ``step(grads, state, params) -> (params, state)``. It donates ``state`` and
            ``params``: it updates their tensors in place, and the old ones raise an error if you
            use them.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]

    def __repr__(self) -> str:
        return getattr(self.step, "title", f"TorchOptimizer({self.init!r}, {self.step!r})")


def refusal(cls: Any) -> Exception:
    """Return the error for what is no class of elementwise optimizers."""
    remedy = "pass elementwise=True if it is one too"
    if isinstance(cls, torch.optim.Optimizer):
        remedy = f"pass torch_optimizer(torch.optim.{type(cls).__name__}, lr=...)"
    elif not callable(cls):
        remedy = "pass the class, as in torch_optimizer(torch.optim.AdamW, lr=...)"
    elif cls is getattr(torch.optim, "Muon", None):
        remedy = "call fs.muon(plan, mesh, lr=...), which updates whole matrices"
    elif cls is torch.optim.LBFGS:
        remedy = "call fs.lbfgs(loss_fn, shards, plan, mesh), which minimises a loss"
    elif isinstance(cls, functools.partial):
        remedy = "pass the class itself, and its options by name"
    elif cls.__module__.startswith("torch.optim"):
        remedy = "choose one of these; elementwise=True would compute something else on shards"
    error_type = ValueError if callable(cls) else TypeError
    return error_type(
        "torch_optimizer takes a class of optimizers that updates each element by itself, because "
        f"it works on flat shards; found {_title(cls)}, known are {', '.join(_NAMES.split())}: "
        f"{remedy}"
    )


def check_optimizer(optimizer: Any, plan: Plan) -> None:
    """Raise unless ``optimizer`` is a pair of functions, for shards that ``plan`` cuts."""
    is_pair = isinstance(optimizer, tuple) and len(optimizer) == 2
    # The second function of a plain pair returns updates, and not parameters.
    is_opened = is_pair and hasattr(optimizer[1], "param_groups")
    if isinstance(optimizer, TorchOptimizer):
        own_plan: Plan = getattr(optimizer.step, "plan", None) or plan
        # Note: the plans may differ in what concerns no shard, such as precision.
        own_buffers, buffers = (
            [(unit.name, unit.buffers) for unit in unit_plans.unit_list]
            for unit_plans in (own_plan, plan)
        )
        if own_buffers != buffers:
            raise ValueError(
                "the optimizer's groups or matrices lie elsewhere in these shards: it was made "
                f"with plan {own_plan.fingerprint()}; found plan {plan.fingerprint()} here: make "
                "the optimizer and the step with one plan"
            )
    elif is_opened or not is_pair:
        cls = optimizer if isinstance(optimizer, type) else type(optimizer)
        remedy = "pass one of these"
        if issubclass(cls, torch.optim.Optimizer):
            remedy = f"pass fs.torch_optimizer(torch.optim.{cls.__name__}, lr=...)"
        elif is_opened:
            remedy = "pass the pair itself, and not a tuple of its functions"
        elif callable(optimizer):
            remedy = "call the function that returns a pair, and pass its result"
        raise TypeError(
            "optimizer must be a pair (init, update), as TorchOpt's are, or "
            f"torch_optimizer(torch.optim.AdamW, lr=...); found {_title(optimizer)}: {remedy}"
        )


def _title(value: Any) -> str:
    if isinstance(value, torch.optim.Optimizer):
        return f"an instance of {type(value).__name__}"
    return repr(getattr(value, "__name__", value))
