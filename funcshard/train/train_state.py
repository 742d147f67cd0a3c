"""``TrainState``, the state of training between two steps; ``copy``, which copies any state."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import torch

from funcshard._utils import tree
from funcshard._utils.options import with_remedies
from funcshard.core import Shards
from funcshard.train.optimizer_step import check_not_donated
from funcshard.train.scaler import ScalerState

T = TypeVar("T")


@with_remedies("a training state", {"params": "the parameters are state.shards"})
class TrainState(NamedTuple):
    """The state of training between two steps, as a pytree.

    Attributes:
        shards: this rank's shards of the parameters.
        buffers: the module's buffers.
        opt_state: the optimizer's state of the trainable shards; ``None`` if you don't train.
        step: number of steps taken.
        scaler: the state of loss scaling; ``None`` without a scaler.

    Example:
        >>> import torch, funcshard as fs
        >>> state = fs.TrainState({"": {"float32": torch.ones(3)}}, buffers={})
        >>> state._replace(step=1).step
        1
    """

    shards: Shards
    buffers: dict[str, torch.Tensor]
    opt_state: Any = None
    step: int = 0
    scaler: ScalerState | None = None


def copy(state: T) -> T:
    """Copy a state, so that you keep it when a step donates the original.

    Arguments:
        state: a ``TrainState``, shards, an optimizer's state, or any other pytree.

    Returns:
        A tree like ``state``, with new tensors of the same values, dtypes, devices and
        ``requires_grad``, without autograd graphs. Other leaves are the same objects.

    Raises:
        RuntimeError: ``state`` was donated to a step already.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(2)}
        >>> optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.5)
        >>> best = fs.copy(params)
        >>> params, _ = optimizer.step({"w": torch.ones(2)}, optimizer.init(params), params)
        >>> best["w"], params["w"]
        (tensor([1., 1.]), tensor([0.5000, 0.5000]))

    Source: ``jnp.copy``, for arguments of ``jax.jit(donate_argnums=...)`` that are to be kept.
    """

    def copy_leaf(leaf: Any) -> Any:
        check_not_donated(leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        new_leaf = leaf.detach().clone()
        if leaf.device.type == "cpu" and torch.cuda.is_available() and leaf.is_pinned():
            new_leaf = new_leaf.pin_memory()  # as the shards of offloaded units are
        return new_leaf.requires_grad_(leaf.requires_grad)

    return tree.map(copy_leaf, state)


def choose_tree(is_first: torch.Tensor, first: T, second: T) -> T:
    """Return the tree ``first`` where ``is_first`` is true, and ``second`` where it is not."""
    # Why once: the host waits for a copy to the CPU, which then has the number too.
    flag_on = functools.cache(is_first.to)
    flag_number = functools.cache(
        lambda: flag_on(torch.device("cpu")).to(torch.int64).item()
    )

    # Leaves that are one object, such as frozen shards, cost nothing.
    def choose(first_leaf: Any, second_leaf: Any) -> Any:
        if first_leaf is second_leaf:
            return second_leaf
        if isinstance(second_leaf, torch.Tensor):
            return torch.where(flag_on(second_leaf.device), first_leaf, second_leaf)
        # Why arithmetic: in a graph the flag is a symbol, on which Python cannot branch.
        return second_leaf + (first_leaf - second_leaf) * flag_number()

    return tree.map(choose, first, second)


def same_form(first: Any, second: Any) -> bool:
    """Return whether two trees differ in their leaves only."""
    return bool(tree.flatten_with_form(first)[1] == tree.flatten_with_form(second)[1])
