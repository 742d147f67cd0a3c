"""Micro-batches of ``accumulate``: equal parts of one batch, or batches that an iterator gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import tree
from funcshard.comm import current_recording
from funcshard.plan import Reduce, check_reduce_units


def micro_batch_calls(
    loss_fn: Callable[..., Any],
    micro_batches: int,
    reduce: Reduce,
    shards: Any,
    rest: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> list[Callable[[Any], Any]]:
    """Return, for each micro-batch, a function of shards that calls ``loss_fn``.

    Arguments:
        loss_fn: the loss function.
        micro_batches: the number of micro-batches.
        reduce: the option of ``accumulate``.
        shards: the shards of the units that ``reduce`` may name.
        rest: further positional arguments, the batch last.
        kwargs: arguments by name.
    """
    if not rest:
        raise TypeError(
            "the function takes (shards, *rest, batch), the batch as its last positional argument"
        )
    *first_args, batch = rest
    next_micro_batch = _stream(batch, micro_batches)
    if isinstance(reduce, Mapping):
        check_reduce_units(reduce, _unit_names(shards))
    # Why one function for all: each call takes the next micro-batch, just before its forward.
    return [lambda local: loss_fn(local, *first_args, next_micro_batch(), **kwargs)] * micro_batches


def _unit_names(shards: Any) -> list[str]:
    """Return the names of the units in a tree that may hold the shards of several models."""
    if isinstance(shards, Mapping):
        unit_names = [
            str(name) for name, inner_shards in shards.items() if isinstance(inner_shards, Mapping)
        ]
        return unit_names + [
            name for inner_shards in shards.values() for name in _unit_names(inner_shards)
        ]
    if isinstance(shards, list | tuple):
        return [name for inner_shards in shards for name in _unit_names(inner_shards)]
    return []


def _remedy(leaves: Sequence[Any]) -> str:
    # Why one: a batch of a class that is no pytree is one leaf.
    if len(leaves) == 1 and isinstance(leaves[0], Mapping):
        return "pass dict(batch)"
    if len(leaves) == 1 and not isinstance(leaves[0], torch.Tensor):
        return "pass one batch as a tensor, or as a tuple or dictionary of tensors"
    return "pass what is not to be split before the batch, or by keyword"


def _stream(batches: Any, micro_batches: int) -> Callable[[], Any]:
    """Return a function that takes the next micro-batch of a batch, or from an iterator."""
    if not isinstance(batches, Iterator):
        return iter(_split(batches, micro_batches)).__next__
    if current_recording() is not None:
        raise ValueError(
            "trace records a step on one batch, and its graph cannot ask an iterator for "
            "micro-batches; found an iterator: pass the whole batch, which accumulate splits"
        )
    taken_count = itertools.count()

    def take() -> Any:
        # For the error: how many the iterator gave.
        batch_index = next(taken_count)
        try:
            return next(batches)
        except StopIteration:
            raise ValueError(
                f"an iterator must hold the {micro_batches} micro-batches of every call, on every "
                f"rank; found {batch_index}: leave out the incomplete rest of an epoch, or "
                "continue with batches of weight zero (weighted=True)"
            ) from None

    return take


def _split(batch: Any, micro_batches: int) -> list[Any]:
    """Split a pytree of tensors into equal parts along dim 0, as views."""
    batch_leaves, unflatten = tree.flatten(batch)
    leaf_sizes = [
        leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else type(leaf).__name__
        for leaf in batch_leaves
    ]
    # Why no set: while fs.trace records, a size may be a symbol, which has no hash.
    if not leaf_sizes or any(
        isinstance(leaf_size, str) or leaf_size != leaf_sizes[0] for leaf_size in leaf_sizes
    ):
        raise ValueError(
            "the batch must be a pytree of tensors with one size of dim 0, along which it is "
            f"split into micro-batches; found {sorted({*map(str, leaf_sizes)}) or 'no leaves'}: "
            f"{_remedy(batch_leaves)}"
        )
    batch_size: Any = leaf_sizes[0]
    if batch_size == 0 or batch_size % micro_batches:
        raise ValueError(
            f"dim 0 of the batch must be a multiple of the {micro_batches} micro-batches; found "
            f"{batch_size}: choose a divisor, or pad the batch and weigh the samples "
            "(weighted=True)"
        )
    split_leaves = [
        leaf.split([batch_size // micro_batches] * micro_batches) for leaf in batch_leaves
    ]
    return [unflatten(list(leaf_parts)) for leaf_parts in zip(*split_leaves, strict=True)]
