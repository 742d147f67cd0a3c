"""Models, checkpoints and losses of published training runs, in plain torch on the meta device."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from funcshard.demo import decoder


def build(name: str, length: int, checkpoints: str, *, compiled: bool = False) -> nn.Module:
    """Return a decoder of ``length`` positions on the meta device, some of whose blocks are checkpointed.

    ``checkpoints`` are ``"none"``, ``"full"``, ``"selective op"`` or ``"selective layer"``.
    """
    with torch.device("meta"):
        model = decoder(name, context=length)
        for i, block in enumerate(model.blocks):
            if checkpoints in ("full", "selective op") or (checkpoints == "selective layer" and i % 2):
                model.blocks[i] = Checkpointed(block, selective=checkpoints == "selective op", compiled=compiled)
    return model


class Checkpointed(nn.Module):
    """A module whose backward computes its forward again, or most of it.

    Arguments:
        block: the module.
        selective: whether to keep attention and every second matrix product, as torchtitan does.
        compiled: whether the result of the last product is dropped, which only the output needs.
    """

    def __init__(self, block: nn.Module, *, selective: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.block, self.selective, self.compiled = block, selective, compiled

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        if not self.selective:
            return checkpoint(self.block, *args, use_reentrant=False)
        # Why one less: a compiled graph keeps a result only if backward reads it.
        products = sum(isinstance(module, nn.Linear) for module in self.block.modules()) - self.compiled
        contexts = functools.partial(_contexts, products)
        return checkpoint(self.block, *args, use_reentrant=False, context_fn=contexts)


def _contexts(products: int) -> Any:
    counts: Counter[bool] = Counter()

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation is torch.ops.aten.mm.default:
            counts[context.is_recompute] += 1
            number = counts[context.is_recompute]
            keep = number % 2 == 1 and number <= products
        else:
            keep = "scaled_dot_product" in operation.__name__
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


# --- losses ---------------------------------------------------------------------------------------


def _eager(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _held(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    wide = logits.float()
    return _Held.apply(F.cross_entropy(wide.flatten(0, 1), targets.flatten()), wide.detach())


def _low(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return _Held.apply(F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits.detach())


def _chunked(logits: torch.Tensor, targets: torch.Tensor, chunks: int = 8) -> torch.Tensor:
    parts = zip(logits.chunk(chunks, 1), targets.chunk(chunks, 1), strict=True)
    return torch.stack([_Fused.apply(part.float(), target, True) for part, target in parts]).sum()


class _Held(torch.autograd.Function):
    """``_Held.apply(loss, tensor)``: the loss; the graph's first node holds the tensor."""

    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        ctx.tensor = tensor  # unlike a saved tensor, an attribute lives as long as the graph
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class _Fused(torch.autograd.Function):
    """``_Fused.apply(logits, targets, in_place)``: the cross-entropy as two kernels."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, in_place: bool) -> torch.Tensor:
        ctx.in_place = in_place
        ctx.save_for_backward(logits, targets)
        return logits.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        logits, _ = ctx.saved_tensors
        return (logits.mul_(grad) if ctx.in_place else logits * grad), None, None


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "eager": _eager,  # logits cast to float32, operation by operation
    "held": _held,  # the same, and a variable of the loop holds the float32 logits until the end
    "low": _low,  # in the dtype of the logits, which the loop's variable holds
    "chunked": _chunked,  # cast chunk by chunk, compiled: torchtune's ``CEWithChunkedOutputLoss``
    # In one kernel each way, as a compiler makes it.
    "compiled": lambda logits, targets: _Fused.apply(logits.float(), targets, False),
    # Its backward overwrites the logits: flash-attention's ``CrossEntropyLoss(inplace_backward=True)``,
    # which llm-foundry uses.
    "fused": lambda logits, targets: _Fused.apply(logits, targets, True),
}
