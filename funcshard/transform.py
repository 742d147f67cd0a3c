"""``value_and_grad``: this rank's loss, and the gradient averaged over the data-parallel world."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from funcshard import tree
from funcshard.step import Step, open_step

__all__ = ["value_and_grad"]


def value_and_grad(loss_fn: Callable[..., Any], has_aux: bool = False) -> Callable[..., tuple[Any, Any]]:
    """Turn a loss of shards into a function that returns the loss and its gradient, averaged over ranks.

    The lower-level collectives add over ranks; here, and nowhere else, the sum is divided by the number of ranks of the
    world that the units inside ``loss_fn`` are sharded over. So if every rank's loss is the mean over its part of the
    batch, the gradient is that of the mean over the whole batch.

    Arguments:
        loss_fn: ``loss_fn(shards, *rest, **kwargs)`` -> this rank's loss, a floating-point scalar; with ``has_aux``, a
            pair of the loss and anything else.
        has_aux: whether ``loss_fn`` returns such a pair.

    Returns:
        ``f(shards, *rest, **kwargs)`` -> ``(loss, grads)``, or ``((loss, aux), grads)``. ``loss`` is this rank's; tensors
        in ``aux`` are detached.
        ``grads`` is a pytree like ``shards``; it holds zeros where the loss does not depend on a shard, and ``None``
        for frozen shards, and for integers.

    Raises:
        TypeError: ``loss_fn`` did not return a floating-point scalar, or not a pair where ``has_aux`` says so.
        ValueError: the units inside ``loss_fn`` belong to worlds of different sizes.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: (leaves["w"] * x).sum(), plan.units[""], mesh)
        ...     loss_fn = lambda shards, x: f(shards[""], x)
        ...     loss, grads = fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh), float(mesh.rank))
        ...     return loss.item(), grads[""]["float32"].item()
        >>> fs.simulate(main, world_size=2)
        [(0.0, 0.5), (3.0, 0.5)]

    Source: ``jax.value_and_grad``; the mean is that of DistributedDataParallel.
    """

    def evaluate(shards: Any, /, *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        leaves, unflatten = tree.flatten(shards)
        local = [leaf.detach().requires_grad_(_differentiable(leaf)) for leaf in leaves]
        with open_step(local) as step, torch.enable_grad():
            result = loss_fn(unflatten(local), *rest, **kwargs)
            loss, aux = _split(result, has_aux)
            grads = _backward(loss, step)
        value = loss.detach()
        return ((value, tree.map(_detached, aux)) if has_aux else value), unflatten(grads)

    return evaluate


def _backward(loss: torch.Tensor, step: Step) -> list[torch.Tensor | None]:
    wanted = [leaf for leaf in step.leaves if leaf.requires_grad]
    direct: dict[int, torch.Tensor | None] = {}
    if wanted and loss.requires_grad:
        step.reducing = True
        # on this thread, also for CUDA, so that context variables (the event log) hold in backward too
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(loss, wanted, allow_unused=True)
        direct = {id(leaf): grad for leaf, grad in zip(wanted, found, strict=True)}
        step.finish()
    world = _world_size(step)
    return [_gradient(number, leaf, direct.get(id(leaf)), step, world) for number, leaf in enumerate(step.leaves)]


def _gradient(number: int, leaf: torch.Tensor, direct: torch.Tensor | None, step: Step, world: int) -> torch.Tensor | None:
    """The mean of what reductions gave, and what reached the shard by other ways than a gathering of itself."""
    if number in step.frozen or not leaf.requires_grad:
        return None
    world = 1 if number in step.local else world  # nobody else's loss knows what is local to this rank
    reduced = step.sums.get(number)
    if direct is not None:
        total = direct if reduced is None else reduced + direct
        return total / world if world > 1 else total
    if reduced is not None:
        return reduced.div_(world) if world > 1 else reduced
    return torch.zeros_like(leaf, requires_grad=False)


def _world_size(step: Step) -> int:
    if len(step.worlds) > 1:
        raise ValueError(
            f"the units inside loss_fn must belong to worlds of one size, so that it is clear what the mean is over; "
            f"found sizes {sorted(step.worlds)}: run what is on another mesh outside, and pass its results in"
        )
    return next(iter(step.worlds), 1)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, torch.Tensor) else x


def _differentiable(leaf: torch.Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _split(result: Any, has_aux: bool) -> tuple[torch.Tensor, Any]:
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"with has_aux=True loss_fn must return a pair (loss, aux); found {type(result).__name__}")
    loss, aux = result if has_aux else (result, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}" if isinstance(loss, torch.Tensor) else repr(loss)
        hint = "" if has_aux or not isinstance(loss, tuple) else "; for (loss, aux) pass has_aux=True"
        raise TypeError(f"loss_fn must return a floating-point scalar, the mean over this rank's batch; found {found}{hint}")
    return loss, aux
