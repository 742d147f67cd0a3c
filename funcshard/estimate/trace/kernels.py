"""``AcceleratorKernels``: trace the attention and the dropout of a GPU.

On the fake CPU tensors of a trace, autograd would keep more: the whole matrix of scores if
attention has dropout or a mask with a gradient, and a factor for each element of dropout, not a
bool. A trace for a GPU calls the operators that torch would choose there.

Source of the rules: ``aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`` and
``aten/src/ATen/native/Dropout.cpp`` of PyTorch, for compute capability 8.0 and later.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from funcshard._utils.torch_operators import AttentionCall, operator_by_name
from funcshard._utils.torch_private import without_mode_check

_HALF = (torch.float16, torch.bfloat16)
_flash = operator_by_name("aten", "_scaled_dot_product_flash_attention", "default")
_efficient = operator_by_name("aten", "_scaled_dot_product_efficient_attention", "default")
_safe_softmax = operator_by_name("aten", "_safe_softmax", "default")


class AcceleratorKernels(TorchFunctionMode):
    """Let attention and dropout run as on a GPU, for the ``with`` block."""

    def __torch_function__(
        self, func: Any, classes: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(AttentionCall(*args, **kwargs))
        if func in (F.dropout, torch.dropout):
            return _dropout(*args, **kwargs)
        if func in (F.multi_head_attention_forward, torch.autograd.grad):
            # Why again: torch leaves the mode while this method runs. But the first function calls
            # attention, and a checkpoint computes it in backward.
            with self:
                return without_mode_check(func)(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(
    input: torch.Tensor,  # noqa: A002  # torch's name
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> torch.Tensor:
    if inplace or not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


def _attention(call: AttentionCall) -> torch.Tensor:
    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa = call
    query, key, value = _autocast(query), _autocast(key), _autocast(value)
    if scale is None:
        scale = query.shape[-1] ** -0.5
    if attn_mask is None and _takes_flash(query, key, value, is_causal):
        size = query.shape[-1]
        # Note: flash attention takes head sizes that are multiples of 8.
        if size % 8:
            query, key, value = (F.pad(x, (0, -size % 8)) for x in (query, key, value))
        return _flash(query, key, value, dropout_p, is_causal, scale=scale)[0][..., :size]
    mask = attn_mask
    if mask is not None:
        mask = _bias(mask, query.dtype) if mask.dtype == torch.bool else _autocast(mask)
    if _takes_efficient(query, key, value, mask):
        # Note: the sums of exponentials are kept for backward only.
        keeps_sums = torch.is_grad_enabled() and any(
            x.requires_grad for x in (query, key, value)
        )
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:-1], key.shape[-2])
        return _efficient(
            query, key, value, mask, keeps_sums, dropout_p, is_causal, scale=scale
        )[0]
    if is_causal:
        score_shape = query.shape[-2], key.shape[-2]
        causal_mask = torch.ones(score_shape, dtype=torch.bool, device=query.device).tril()
        mask = _bias(causal_mask, query.dtype)
    if enable_gqa:
        head_repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(head_repeats, -3) for x in (key, value))
    return _unfused(query, key, value, mask, dropout_p, scale)


def _takes_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> bool:
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and query.dim() == 4
        and query.dtype in _HALF
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= 256
        and not (is_causal and query.shape[-2] != key.shape[-2])
    )


def _takes_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> bool:
    aligned = 16 // query.element_size()  # elements of 16 bytes
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and query.dim() == 4
        and query.dtype in (torch.float32, *_HALF)
        and query.shape[1] == key.shape[1] == value.shape[1]
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % aligned == value.shape[-1] % aligned == 0
        and (mask is None or mask.stride(-1) == 1)
    )


def _unfused(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    scale: float,
) -> torch.Tensor:
    """Compute attention by the matrix of scores."""
    dtype = query.dtype
    if dtype in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        # Note: without the reduction in half precision, CUDA's math kernel computes in float32.
        query, key, value = query.float(), key.float(), value.float()
        if mask is not None:
            mask = mask.float()
    scale_root = scale**0.5
    scores = (query * scale_root) @ (key.transpose(-2, -1) * scale_root)
    weights = scores.softmax(-1) if mask is None else _safe_softmax(scores.add_(mask), -1)
    if dropout_p:
        weights = _dropout(weights, dropout_p)
    return (weights @ value).to(dtype)


def _bias(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a mask of bools as a summand of scores."""
    return torch.zeros_like(allowed, dtype=dtype).masked_fill_(~allowed, float("-inf"))


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    length = mask.shape[-1]
    if length % 16 == 0:
        return mask
    # Note: the kernel asks for rows that lie a multiple of 16 elements apart.
    return F.pad(mask, (0, -length % 16))[..., :length]


def _autocast(tensor: torch.Tensor) -> torch.Tensor:
    if not torch.is_autocast_enabled("cpu") or not tensor.is_floating_point():
        return tensor
    # Why by hand: autocast goes by the names of operators, and these aren't on its lists.
    return tensor.to(torch.get_autocast_dtype("cpu"))
