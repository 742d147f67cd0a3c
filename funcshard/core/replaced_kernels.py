"""``any_order``: where kernels of torch that lack derivatives are replaced by what has them.

``attention`` has derivatives of any order. So have the functions here, as plain operations:

- torch's kernels for these losses, for ``hardsigmoid`` and for weight norm have no derivative of
  their gradient in forward mode, so a product with a Hessian, which is forward over reverse, fails
  in them.
- Those for norms have right derivatives of the first order, and right derivatives of a gradient.
  All others are wrong, as they take the batch's statistics for constants. So norms are replaced
  there, and nowhere else.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch.nn import functional

from funcshard._utils.tensors import is_dtensor
from funcshard._utils.torch_private import (
    derivatives_of,
    function_modes,
    transforms_active,
    weight_norm_kernel,
    without_mode_check,
)
from funcshard.core.attention import attention

T = TypeVar("T")


@contextlib.contextmanager
def any_order() -> Iterator[None]:
    """Give attention derivatives of any order inside the ``with`` block.

    The kernels of ``torch.nn.functional.scaled_dot_product_attention`` have a first derivative in
    reverse mode, and no other. Under a transform of ``torch.func``, or with a dual level of
    ``torch.autograd.forward_ad`` open, functions of ``make_functional`` and ``fully_shard`` replace
    them by themselves. Nothing tells that you'll differentiate a gradient of
    ``torch.autograd.grad(..., create_graph=True)``, so run the forward inside this block then. The
    replacement has the same arguments, and memory linear in the length of the sequence.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, _ = fs.make_functional(torch.nn.MultiheadAttention(4, 2))
        >>> x = torch.ones(3, 1, 4, requires_grad=True)
        >>> with fs.any_order():
        ...     out, _ = apply(params, {}, x, x, x, need_weights=False)
        >>> (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        >>> grad.square().sum().backward()  # a gradient penalty

    Source: ``torch.nn.attention.sdpa_kernel``, which chooses among torch's kernels.
    """
    if any_order_active():  # Why not twice: each mode is asked about every operation.
        yield
        return
    with _AnyOrder():
        yield


def check_derivatives(error: RuntimeError) -> None:
    """Raise what says what to do if ``error`` is torch's and tells too little."""
    for torch_text, advice in _ADVICE.items():
        if re.search(torch_text, str(error)):
            raise RuntimeError(advice) from error


_ADVICE = {
    # As in "derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward is not
    # implemented", and "Trying to use forward AD with aten::_native_multi_head_attention".
    r"(derivative for|forward AD with) (aten::)?_\w*(attention|transformer_encoder_layer)\w*": (
        "torch's attention kernels have a first derivative in reverse mode, and another one was "
        "taken of them: run the forward inside `with fs.any_order():`, which replaces them if "
        "`sdpa_kernel` leaves MATH and others enabled"
    ),
    r"torch\.func\..* support saved tensor hooks": (
        "torch.utils.checkpoint and other saved-tensor hooks don't run inside torch.func, and so "
        "not in fs.grad or fs.hvp: use fs.remat or fully_shard(remat=...) in place of a checkpoint, "
        "and no remat of a unit whose forward calls torch.func"
    ),
    r"autograd\.Function with functorch .*setup_context": (
        "an autograd.Function without setup_context doesn't run inside torch.func, and so not in "
        "fs.hvp: give it one; if it's of a reentrant checkpoint, use fs.remat, and remove full "
        "backward hooks"
    ),
    r"only change requires_grad flags of leaf": (
        "forward set requires_grad of a computed tensor; parameters inside a unit are computed too, "
        "and the plan decides which are trained: freeze it before make_functional, or use its "
        "detach() in forward"
    ),
    r"storage_offset.* divisible": (
        "forward viewed a tensor in a larger dtype, which starts in the middle of an element; "
        "parameters start anywhere in the buffer of their unit: view its clone()"
    ),
}


def any_order_active() -> bool:
    """Return whether ``any_order`` is on here."""
    return any(isinstance(mode, _AnyOrder) for mode in function_modes())


def repeating_any_order(f: Callable[..., T]) -> Callable[..., T]:
    """Return ``f`` such that calls elsewhere run with ``any_order`` if it is on here."""
    if not any_order_active():
        return f

    @functools.wraps(f)
    def run(*args: Any, **kwargs: Any) -> T:
        with any_order():
            return f(*args, **kwargs)

    return run


class _AnyOrder(torch.overrides.TorchFunctionMode):
    """Calls the replacements in place of torch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            with self:  # Why again: torch leaves the mode while this method runs.
                return without_mode_check(func)(*args, **kwargs)
        replacement = _PLAIN_KERNELS.get(func)
        if func in _PLAIN_NORMS and _is_of_high_order(args[0] if args else kwargs["input"]):
            replacement = _PLAIN_NORMS[func]
        if func is functional.scaled_dot_product_attention and not _kernel_chosen():
            replacement = attention
        if replacement is None or any(map(is_dtensor, (*args, *kwargs.values()))):
            replacement = func
        return replacement(*args, **kwargs)


def _is_of_high_order(tensor: torch.Tensor) -> bool:
    """Return whether derivatives are taken by a tensor that torch's kernels for norms get wrong."""
    kinds = derivatives_of(tensor)
    if kinds == "r" and not transforms_active():
        return True  # Note: the block says that there will be more.
    return len(kinds) > 2 or kinds in ("rf", "ff")


def _kernel_chosen() -> bool:
    """Return whether ``torch.nn.attention.sdpa_kernel`` chose MATH, or kernels without it."""
    kernels = torch.backends.cuda
    # Why not any choice: models allow several kernels, MATH among them, to order them.
    fused = kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled()
    return not (kernels.math_sdp_enabled() and (fused or kernels.cudnn_sdp_enabled()))


# --- kernels whose gradient has no forward derivative ---------------------------------------------


def _plain(
    kernel: Any, elementwise: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """Return the loss of ``kernel``, computed by ``elementwise(inputs, targets, **options)``."""
    signature = inspect.signature(kernel)

    def loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        bound_values = signature.bind(*args, **kwargs).arguments
        values = {name: value for name, value in bound_values.items() if value is not None}
        inputs, targets = values.pop("input"), values.pop("target")
        reduction = values.pop("reduction", "mean")
        # Why the kernel: it warns of other shapes, and knows torch's deprecated arguments.
        is_plain = inputs.shape == targets.shape and values.keys() <= {"delta"}
        if not is_plain or reduction not in ("none", "mean", "sum"):
            result: torch.Tensor = kernel(*args, **kwargs)
            return result
        losses = elementwise(inputs, targets, **values)
        if reduction == "none":
            return losses
        return losses.mean() if reduction == "mean" else losses.sum()

    return loss


def _squares(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (inputs - targets).square()


def _huber(inputs: torch.Tensor, targets: torch.Tensor, delta: float = 1.0) -> torch.Tensor:
    distance = (inputs - targets).abs()
    return torch.where(
        distance <= delta, 0.5 * distance.square(), delta * (distance - 0.5 * delta)
    )


def _soft_margin(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.softplus(-targets * inputs)


def _hardsigmoid(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:  # noqa: A002
    out = functional.relu6(input + 3) / 6
    return input.copy_(out) if inplace else out


def _weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    # Note: -1 means the norm of the whole tensor.
    dims = [i for i in range(v.ndim) if dim == -1 or i != dim % v.ndim]
    # Why not vector_norm: its third derivatives fail in torch, which writes to a tensor in place.
    return v * (g / v.square().sum(dims, keepdim=True).sqrt())


_PLAIN_KERNELS: dict[Any, Callable[..., torch.Tensor]] = {
    functional.mse_loss: _plain(functional.mse_loss, _squares),
    functional.huber_loss: _plain(functional.huber_loss, _huber),
    functional.soft_margin_loss: _plain(functional.soft_margin_loss, _soft_margin),
    functional.hardsigmoid: _hardsigmoid,
    weight_norm_kernel: _weight_norm,
}


# --- norms ----------------------------------------------------------------------------------------


def _layer_norm(
    input: torch.Tensor,  # noqa: A002  # torch's name
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    out = _standardised(input, [-1 - i for i in range(len(normalized_shape))], eps)
    return _scaled(out, weight, bias).to(input.dtype)


def _norm_of_batch(
    dims: Callable[[int], list[int]], func: Any
) -> Callable[..., torch.Tensor]:
    """Return ``func``, which computes statistics over dims of its input, as plain operations."""
    signature = inspect.signature(func)

    def norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = signature.bind(*args, **kwargs)
        call.apply_defaults()
        x, running_mean, _, weight, bias, uses_batch, _, eps = call.arguments.values()
        if running_mean is not None or not uses_batch:
            kernel_out: torch.Tensor = func(
                *args, **kwargs
            )  # which updates running statistics
            if not uses_batch:
                return kernel_out
        shape = [-1] + [1] * (x.ndim - 2)
        out = _standardised(x, dims(x.ndim), eps)
        params = [None if p is None else p.view(shape) for p in (weight, bias)]
        return _scaled(out, *params).to(x.dtype)

    return norm


def _standardised(x: torch.Tensor, dims: list[int], eps: float) -> torch.Tensor:
    # Why wide: torch's kernels compute so, and give a result of the input's dtype.
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return (x - mean) * (var + eps).rsqrt()


def _scaled(x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    if weight is not None:
        x = x * weight
    return x if bias is None else x + bias


def _glu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:  # noqa: A002  # torch's name
    values, gates = input.chunk(2, dim)
    return values * gates.sigmoid()


_PLAIN_NORMS: dict[Any, Callable[..., torch.Tensor]] = {
    functional.layer_norm: _layer_norm,
    functional.batch_norm: _norm_of_batch(
        lambda ndim: [0, *range(2, ndim)], functional.batch_norm
    ),
    functional.instance_norm: _norm_of_batch(
        lambda ndim: [*range(2, ndim)], functional.instance_norm
    ),
    functional.glu: _glu,  # whose tangent has no gradient
}
