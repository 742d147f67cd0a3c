"""Calls that leave the parameters of their caller as they were, whatever forward does to them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from funcshard._utils import version


@contextmanager
def unchanged(params: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Undo what the block does to parameters: frozen flags, gradients and attributes.

    Arguments:
        params: the parameters by name.

    Raises:
        RuntimeError: the block wrote values to a parameter, which only a copy of it could undo.
    """
    tensors = list(params.values())
    # Why only leaves: torch warns if you ask for the grad of others.
    leaves = [tensor for tensor in tensors if tensor.is_leaf]
    kept = list(map(_kept, leaves))
    attributes = [vars(tensor).copy() for tensor in tensors]
    versions = _versions(tensors)
    try:
        yield
    finally:
        for tensor, (trainable, grad) in zip(leaves, kept, strict=True):
            if tensor.requires_grad is not trainable:
                tensor.requires_grad_(trainable)
            if tensor.grad is not grad:
                tensor.grad = grad
        for tensor, before in zip(tensors, attributes, strict=True):
            after = vars(tensor)
            if len(after) != len(before) or not all(
                map(operator.is_, after.values(), before.values())
            ):
                after.clear()
                after.update(before)
    if versions != (versions_after := _versions(tensors)):
        name = next(
            name
            for name, old, new in zip(params, versions, versions_after, strict=True)
            if old != new
        )
        raise RuntimeError(
            f"forward wrote to its parameter {name!r}, which belongs to the caller: compute with a "
            "copy, or keep values that change in a buffer and pass mutable=True"
        )


_kept = operator.attrgetter("requires_grad", "grad")


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    try:
        return list(map(version, tensors))
    except RuntimeError:  # there is one of inference mode, which has no version
        return [-1 if tensor.is_inference() else version(tensor) for tensor in tensors]
