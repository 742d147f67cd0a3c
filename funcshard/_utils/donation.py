"""Donation: a step updates tensors in place, and nothing may use the old ones afterwards.

The step returns new tensor objects over the same memory. The old objects would silently show the
new values, so ``donate`` makes each of them a ``_DonatedTensor``, which raises whenever you use it.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

_REMEDY = (
    "use the state that the step returned, keep fs.copy(state) from before the step, or pass "
    "donate=False to make_train_step"
)


class _DonatedTensor(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise RuntimeError(
            f"this tensor was donated to a training step, which updated it in place: {_REMEDY}"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "<tensor that was donated to a training step>"


class _DonatedState:
    """Replaces the tensors of an optimizer's state that were donated to a step."""

    def __repr__(self) -> str:
        return "<optimizer state that was donated to a step>"


DONATED_STATE = _DonatedState()


def donate(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return new tensor objects over the memory of ``leaves``; the old ones can't be used again."""
    new_leaves = [leaf.detach() for leaf in leaves]
    empty_tensors: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for old_leaf, new_leaf in zip(leaves, new_leaves, strict=True):
        if isinstance(old_leaf, _DonatedTensor):  # a tree that holds one tensor twice
            continue
        memory_kind = new_leaf.dtype, new_leaf.device
        if memory_kind not in empty_tensors:
            empty_tensors[memory_kind] = new_leaf.new_empty(0)
        # Note: both are needed. A transform looks through the class, and finds no memory.
        old_leaf.data = empty_tensors[memory_kind]
        old_leaf.__class__ = _DonatedTensor
    return new_leaves


def is_donated(leaf: Any) -> bool:
    """Return whether a tensor, or an optimizer's state, was donated to a step."""
    return leaf is DONATED_STATE or isinstance(leaf, _DonatedTensor)


def check_not_donated(state: Any) -> None:
    """Raise ``RuntimeError`` if ``state``, part of an optimizer's state, was donated."""
    if state is DONATED_STATE:
        raise RuntimeError(
            f"this optimizer state was donated to a step, which updated it in place: {_REMEDY}"
        )
