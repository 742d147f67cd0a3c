"""``accumulate``: one gradient of several micro-batches, reduced each time or once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from funcshard import tree
from funcshard.schedule import check_reduce
from funcshard.transform import OnGrads, evaluate

__all__ = ["accumulate", "split"]


def accumulate(
    loss_fn: Callable[..., Any],
    micro_batches: int,
    has_aux: bool = False,
    *,
    reduce: str = "each",
    weighted: bool = False,
    on_grads: OnGrads | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Do what ``value_and_grad`` does, one micro-batch after another, so that only one's activations exist at a time.

    The result is the mean over the micro-batches, weighted where weights are given: the loss and gradient of the whole
    batch, to rounding, if each micro-batch's loss is the mean over its samples and these are independent of each other.

    Arguments:
        loss_fn: as ``value_and_grad`` takes it, of shards, anything, and, as its last positional argument, the batch:
            a pytree of tensors whose dim 0 counts samples. It is called once for each micro-batch.
        micro_batches: into how many equal parts the batch is split along dim 0.
        has_aux: see ``value_and_grad``; aux becomes a list, one of each micro-batch.
        reduce: ``"each"`` reduces the gradients of each micro-batch, and adds up shards. ``"once"`` adds up this rank's
            unreduced gradients, which takes the memory of the full gradient of every unit, and reduces each unit once,
            during the last backward.
        weighted: see ``value_and_grad``; each micro-batch has its own weight.
        on_grads: see ``value_and_grad``; with ``"once"`` it sees the sum over micro-batches.

    Returns:
        ``f(shards, *rest, batch, **kwargs)``, with the results of ``value_and_grad``'s.

    Raises:
        ValueError: an argument that does not exist, or a batch that cannot be split. See also ``value_and_grad``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: (x @ leaves["w"]).mean(), plan.units[""], mesh)
        ...     evaluate = fs.accumulate(lambda shards, x: f(shards[""], x), micro_batches=2, reduce="once")
        ...     loss, grads = evaluate(fs.shard(params, plan, mesh), torch.eye(2))
        ...     return loss.item(), grads[""]["float32"].item()
        >>> fs.simulate(main, world_size=2)
        [(1.5, 0.5), (1.5, 0.5)]

    Source: ``optax.MultiSteps``; ``"once"`` is ``no_sync`` of DistributedDataParallel and FSDP.
    """
    check_reduce(micro_batches, reduce)

    def run(shards: Any, /, *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not rest:
            raise TypeError("the function takes (shards, *rest, batch), the batch as its last positional argument")
        *first, batch = rest
        calls = [
            functools.partial(lambda micro, local: loss_fn(local, *first, micro, **kwargs), micro)
            for micro in split(batch, micro_batches)
        ]
        once = reduce == "once"
        result, grads = evaluate(shards, calls, has_aux, weighted=weighted, once=once, on_grads=on_grads)
        return result.value(result.aux, has_aux, weighted), grads

    return run


def split(batch: Any, parts: int) -> list[Any]:
    """Split a pytree of tensors into equal parts along dim 0, as views."""
    leaves, unflatten = tree.flatten(batch)
    sizes = {leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else type(leaf).__name__ for leaf in leaves}
    size = next(iter(sizes), None)
    if len(sizes) != 1 or not isinstance(size, int):
        raise ValueError(
            f"the batch must be a pytree of tensors with one size of dim 0, along which it is split into micro-batches; "
            f"found {sorted(map(str, sizes)) or 'no leaves'}: pass what is not to be split before the batch, or by keyword"
        )
    if size == 0 or size % parts:
        raise ValueError(
            f"dim 0 of the batch must be a multiple of the {parts} micro-batches; found {size}: choose a divisor, or pad "
            f"the batch and weigh the samples (weighted=True)"
        )
    pieces = [leaf.split(size // parts) for leaf in leaves]
    return [unflatten(list(piece)) for piece in zip(*pieces, strict=True)]
