"""``Stub``: represents a module whose kind ran before, with inputs of the same form."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from funcshard.estimate.trace.recorder import Recorder


@dataclass(frozen=True, slots=True)
class Form:
    """Shape, strides and dtype of a tensor, and whether it requires a gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Form:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="cpu")

    def gradient(self) -> torch.Tensor:
        """Return a new tensor of the form of a gradient, which has no gaps in memory."""
        spanned_numel = 1 + sum(
            (size - 1) * step for size, step in zip(self.shape, self.stride, strict=True)
        )
        return (
            self.empty()
            if spanned_numel == math.prod(self.shape)
            else torch.empty(self.shape, dtype=self.dtype, device="cpu")
        )


@dataclass(frozen=True, slots=True, eq=False)
class Traced:
    """A module that ran, as a stub repeats it.

    Attributes:
        fold: index of its fold.
        outputs: the form of each output tensor.
        build: from output tensors to the module's result.
        kept_inputs: positions of the input tensors that autograd kept.
        kept_outputs: positions of the output tensors that autograd kept.
        reads: attributes of ``Kinds.differing`` that it read: place in ``Kinds.below``, name and
            value.
    """

    fold: int
    outputs: tuple[Form, ...]
    build: Callable[[list[Any]], Any]
    kept_inputs: tuple[int, ...]
    kept_outputs: tuple[int, ...]
    reads: tuple[tuple[int, str, Hashable], ...]


class Stub(torch.autograd.Function):
    """``Stub.apply(traced, recorder, anchor, *inputs)``: outputs of a module's form.

    The anchor requires a gradient, so the outputs do too.
    """

    @staticmethod
    def forward(
        ctx: Any, traced: Traced, recorder: Recorder, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outs = tuple(form.empty() for form in traced.outputs)
        # Note: what the module would keep for backward stays alive for as long.
        ctx.save_for_backward(
            *(inputs[i] for i in traced.kept_inputs), *(outs[i] for i in traced.kept_outputs)
        )
        ctx.mark_non_differentiable(
            *(out for out, form in zip(outs, traced.outputs, strict=True) if not form.requires_grad)
        )
        ctx.set_materialize_grads(False)
        ctx.forms, ctx.recorder = [Form.of(tensor) for tensor in inputs], recorder
        return outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.recorder.touch()
        # Note: unpacking may run a checkpoint, as the module's own backward would.
        kept_tensors = ctx.saved_tensors
        needed_forms = zip(ctx.forms, ctx.needs_input_grad[3:], strict=True)
        form_gradients = [
            form.gradient() if is_needed else None for form, is_needed in needed_forms
        ]
        # Note: the gradients exist while what was saved is still there.
        del kept_tensors
        return None, None, None, *form_gradients
