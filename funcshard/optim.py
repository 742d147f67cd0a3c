"""Optimizers as pairs of functions: TorchOpt's as they are, and ``torch.optim``'s through ``torch_optimizer``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from funcshard import tree

__all__ = ["TorchOptimizer", "apply_optimizer", "torch_optimizer"]

# each updates an element from that element's own gradient and state, so it may work on flat shards as on matrices
_ELEMENTWISE = tuple(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
)  # fmt: skip


class TorchOptimizer(NamedTuple):
    """A ``torch.optim`` class as a pair of functions; made by ``torch_optimizer``.

    Attributes:
        init: ``init(params) -> state``.
        step: ``step(grads, state, params) -> (params, state)``; the tensors of ``state`` and ``params`` are donated.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]


def torch_optimizer(
    cls: type[torch.optim.Optimizer], /, *, elementwise: bool | None = None, **options: Any
) -> TorchOptimizer:
    """Make a pair of functions of a ``torch.optim`` class, its fused kernels included.

    The state is a tree like the parameters, with a dictionary of the class's own state (``exp_avg``, ``step`` …) at each
    leaf; it is empty until the first step, as in ``torch.optim``. A step *donates* its parameters and state: they are
    updated in place and returned, so that no second copy of them ever exists, and what was passed in must not be used
    afterwards.

    Arguments:
        cls: an optimizer that updates each element by itself: SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adadelta, Adagrad,
            RMSprop, Rprop, ASGD, or a subclass of one.
        elementwise: ``True`` vouches for a class that is not known to be elementwise.
        options: what the class takes (``lr``, ``weight_decay``, ``fused`` …). An option may be a function of the number
            of steps taken, which makes a schedule.

    Returns:
        The pair ``(init, step)``, for ``make_train_step``.

    Raises:
        ValueError: the class is not known to be elementwise: on flat shards it would compute something else.

    Example:
        >>> import torch, funcshard as fs
        >>> optimizer = fs.torch_optimizer(torch.optim.SGD, lr=lambda step: 0.5 / (1 + step))
        >>> params = {"w": torch.ones(2)}
        >>> params, state = optimizer.step({"w": torch.ones(2)}, optimizer.init(params), params)
        >>> params["w"]
        tensor([0.5000, 0.5000])
    """
    known = isinstance(cls, type) and issubclass(cls, _ELEMENTWISE)
    if not (known if elementwise is None else elementwise):
        names = ", ".join(c.__name__ for c in _ELEMENTWISE)
        raise ValueError(
            f"torch_optimizer takes an optimizer that updates each element by itself, because it works on flat shards; "
            f"found {getattr(cls, '__name__', cls)!r}, known are {names}: pass elementwise=True if it is one too"
        )

    def init(params: Any) -> Any:
        return {"steps": 0, "leaves": tree.map(lambda _: {}, params)}

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, unflatten = tree.flatten(params)
        parameters = [torch.nn.Parameter(leaf.detach()) for leaf in leaves]
        now = {key: value(state["steps"]) if callable(value) else value for key, value in options.items()}
        optimizer = cls(parameters, **now)
        for parameter, grad, own in zip(
            parameters, tree.leaves(grads), tree.leaves_up_to(params, state["leaves"]), strict=True
        ):
            parameter.grad = None if grad is None else grad.to(parameter.dtype)  # where it was kept in lower precision
            optimizer.state[parameter] = dict(own)
        optimizer.step()
        new = unflatten([optimizer.state[parameter] for parameter in parameters])
        return unflatten([parameter.detach() for parameter in parameters]), {"steps": state["steps"] + 1, "leaves": new}

    return TorchOptimizer(init, step)


def apply_optimizer(optimizer: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Return the parameters and state after one update by either kind of pair.

    Arguments:
        optimizer: what ``torch_optimizer`` returned, or a pair ``(init, update)`` as TorchOpt and optax write it:
            ``update(grads, state, params) -> (updates, state)``, where updates are added to the parameters.
        grads: a tree like ``params``.
        state: the optimizer's state.
        params: the tree to update.
    """
    if isinstance(optimizer, TorchOptimizer):
        return optimizer.step(grads, state, params)
    _, update = optimizer
    takes = inspect.signature(update).parameters
    by_keyword = "params" in takes and takes["params"].kind is inspect.Parameter.KEYWORD_ONLY
    extra: dict[str, Any] = {"inplace": False} if "inplace" in takes else {}
    updates, state = update(grads, state, params=params, **extra) if by_keyword else update(grads, state, params, **extra)
    return tree.map(lambda leaf, change: leaf + change.to(leaf.dtype), params, updates), state
