"""``accumulate``: one gradient of several micro-batches, which run one after another."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import tree
from funcshard.comm import Mesh, current_recording
from funcshard.core.grad_hooks import OnGrads, OnReduceScattered
from funcshard.core.gradient_options import GradientOptions
from funcshard.core.gradients import GradientFunction, check_callable, evaluate
from funcshard.plan import Reduce, check_reduce, check_reduce_units


def accumulate(
    loss_fn: Callable[..., Any],
    micro_batches: int,
    has_aux: bool = False,
    *,
    mesh: Mesh | None = None,
    reduce: Reduce = "each",
    weighted: bool = False,
    on_grads: OnGrads | None = None,
    on_reduce_scattered: OnReduceScattered | None = None,
    divisor: float | None = None,
    allow_constant: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Turn a loss function into one that returns loss and gradient of several micro-batches.

    The returned function splits the batch, and does for one micro-batch after another what
    ``value_and_grad`` does for the whole batch. So the activations of only one micro-batch exist at
    a time. Loss and gradient are means over the micro-batches, weighted if ``loss_fn`` returns
    weights. Except for rounding they equal those of the whole batch, if the loss of each
    micro-batch is the mean over its samples and the samples do not influence each other.

    Arguments:
        loss_fn: as in ``value_and_grad``, called once for each micro-batch. The last positional
            argument is the batch: a pytree of tensors whose dim 0 counts samples; or an iterator
            over micro-batches, such as ``iter(loader)``.
        micro_batches: number of equal parts that the batch is split into along dim 0; of an
            iterator, the number of micro-batches that one call takes from it, one before each
            forward. Every rank has to have as many.
        has_aux: as in ``value_and_grad``; the function returns a list with the ``aux`` of each
            micro-batch.
        mesh: as in ``value_and_grad``.
        reduce: when gradients are reduced, for all units or by names or globs of units. A unit
            without an entry has ``"each"``.

            - ``"each"`` reduces the gradients of each micro-batch, and adds up their shards.
            - ``"once"`` adds up this rank's gradients before they are reduced, and reduces each
              unit once, in the last backward. That takes memory for the unit's full gradient.
            - ``"shard_each"`` reduce-scatters the gradients of each micro-batch over the shard
              axis, and adds up the sums. They are all-reduced along the other axes in the last
              backward. A unit that is not cut over the shard axis is reduced as with ``"once"``.

        weighted: as in ``value_and_grad``; each micro-batch has its own weight.
        on_grads: as in ``value_and_grad``, with the gradients of the loss divided by the number of
            micro-batches. With ``"once"`` they are sums over the micro-batches.
        on_reduce_scattered: as in ``value_and_grad``. With ``"shard_each"`` it is called once, with
            the sum over the micro-batches.
        divisor: as in ``value_and_grad``. Without weights, the loss of each micro-batch is divided
            by their number all the same.
        allow_constant: as in ``value_and_grad``, for the loss of each micro-batch.

    Returns:
        ``f(shards, *rest, batch, **kwargs)``, which returns the values that the function of
        ``value_and_grad`` returns.

    Raises:
        ValueError: ``micro_batches`` is not a positive whole number, ``reduce`` is another value or
            names no unit of the shards, the batch cannot be split, or an iterator ends before the
            last micro-batch, on the rank where it does. The errors of ``value_and_grad`` are raised
            too.
        TypeError: ``reduce`` is neither text nor a mapping from names or globs.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: (x @ leaves["w"]).mean(), plan.units[""], mesh)
        ...     loss_fn = lambda shards, x: f(shards[""], x)
        ...     evaluate = fs.accumulate(loss_fn, micro_batches=2, reduce="once")
        ...     loss, grads = evaluate(fs.shard(params, plan, mesh), torch.eye(2))
        ...     return loss.item(), grads[""]["float32"].item()
        >>> fs.simulate(main, world_size=2)
        [(1.5, 0.5), (1.5, 0.5)]

    Source: ``optax.MultiSteps``; ``"once"`` is ``no_sync`` of DistributedDataParallel and FSDP, and
    ``"shard_each"`` is ``set_requires_all_reduce(False)`` of FSDP2.
    """
    check_callable("accumulate", loss_fn)
    micro_batches = check_reduce(micro_batches, reduce)
    options = GradientOptions(
        mesh=mesh,
        has_aux=has_aux,
        weighted=weighted,
        reduce=reduce,
        on_grads=on_grads,
        on_reduce_scattered=on_reduce_scattered,
        divisor=divisor,
        allow_constant=allow_constant,
    )
    options.compare(
        "accumulate", ["has_aux", "weighted", "reduce", "divisor"], micro_batches=micro_batches
    )
    return accumulating_function(loss_fn, micro_batches, options)


def accumulating_function(
    loss_fn: Callable[..., Any], micro_batches: int, options: GradientOptions
) -> GradientFunction:
    """Return what ``accumulate`` does, for options that ranks have compared."""

    def run(shards: Any, /, *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not rest:
            raise TypeError(
                "the function takes (shards, *rest, batch), the batch as its last positional "
                "argument"
            )
        *first, batch = rest
        take = (
            _stream(batch, micro_batches)
            if isinstance(batch, Iterator)
            else iter(_split(batch, micro_batches)).__next__
        )
        calls = [lambda local: loss_fn(local, *first, take(), **kwargs)] * micro_batches
        if not isinstance(options.reduce, str):
            check_reduce_units(options.reduce, _unit_names(shards))
        result, grads = evaluate(shards, calls, options)
        return result.value(result.aux, options), grads

    return GradientFunction(run, loss_fn, options, micro_batches)


def _unit_names(shards: Any) -> list[str]:
    """Return the names of the units in a tree that may hold the shards of several models."""
    if isinstance(shards, Mapping):
        units = [str(name) for name, inner in shards.items() if isinstance(inner, Mapping)]
        return units + [name for inner in shards.values() for name in _unit_names(inner)]
    return (
        [name for inner in shards for name in _unit_names(inner)]
        if isinstance(shards, list | tuple)
        else []
    )


def _remedy(leaves: Sequence[Any]) -> str:
    """Return what to do for a batch with these leaves, which cannot be split."""
    # Why one: a batch of a class that is no pytree is one leaf.
    if len(leaves) == 1 and isinstance(leaves[0], Mapping):
        return "pass dict(batch)"
    if len(leaves) == 1 and not isinstance(leaves[0], torch.Tensor):
        return "pass one batch as a tensor, or as a tuple or dictionary of tensors"
    return "pass what is not to be split before the batch, or by keyword"


def _stream(batches: Iterator[Any], micro_batches: int) -> Callable[[], Any]:
    """Return a function that takes the next micro-batch from an iterator."""
    if current_recording() is not None:
        raise ValueError(
            "trace records a step on one batch, and its graph cannot ask an iterator for "
            "micro-batches; found an iterator: pass the whole batch, which accumulate splits"
        )
    taken = itertools.count()

    def take() -> Any:
        batch_index = next(taken)
        try:
            return next(batches)
        except StopIteration:
            raise ValueError(
                f"an iterator must hold the {micro_batches} micro-batches of every call, on every "
                f"rank; found {batch_index}: leave out the incomplete rest of an epoch, or continue "
                "with batches of weight zero (weighted=True)"
            ) from None

    return take


def _split(batch: Any, micro_batches: int) -> list[Any]:
    """Split a pytree of tensors into equal parts along dim 0, as views."""
    leaves, unflatten = tree.flatten(batch)
    sizes = [
        leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else type(leaf).__name__
        for leaf in leaves
    ]
    size = sizes[0] if sizes else None
    # Why no set: while fs.trace records, a size may be a symbol, which has no hash.
    if not isinstance(size, int | torch.SymInt) or any(
        isinstance(leaf_size, str) or leaf_size != size for leaf_size in sizes
    ):
        raise ValueError(
            "the batch must be a pytree of tensors with one size of dim 0, along which it is "
            f"split into micro-batches; found {sorted({*map(str, sizes)}) or 'no leaves'}: "
            f"{_remedy(leaves)}"
        )
    if size == 0 or size % micro_batches:
        raise ValueError(
            f"dim 0 of the batch must be a multiple of the {micro_batches} micro-batches; found "
            f"{size}: choose a divisor, or pad the batch and weigh the samples (weighted=True)"
        )
    split = [leaf.split([size // micro_batches] * micro_batches) for leaf in leaves]
    return [unflatten(list(part)) for part in zip(*split, strict=True)]
