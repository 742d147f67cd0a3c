"""``MixedPrecision``: the dtypes in which units compute and communicate.

This file holds the data and pure functions of it. The casts themselves happen elsewhere: parameters
and gradients are cast in core's ``buffer_comm``, inputs and outputs in core's ``unit``, and buffers
in module's ``unit_forward``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils.options import check_flag

_DTYPES = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
_FLAGS = (
    "keep_low_precision_grads",
    "cast_forward_inputs",
    "cast_root_forward_inputs",
    "full_precision_in_eval",
    "divide_before_reduce",
)


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The dtypes in which a model computes and communicates.

    Shards and optimizer state always keep the dtype of their leaves.

    Attributes:
        param_dtype: dtype to which shards are cast before they are gathered, and so the dtype in
            which units compute. ``None``: the dtype of the leaves. Leaves that are not
            floating-point are never cast.
        reduce_dtype: dtype in which gradients are reduced. ``None``: ``param_dtype``, or the dtype
            of the leaves if that is ``None`` too.
        buffer_dtype: dtype to which a module's floating-point buffers are cast for a call.
            ``None``: buffers are not cast. The caller's buffers never change, and new buffers come
            back in the dtypes of the caller's.
        keep_low_precision_grads: whether reduced gradients stay in ``reduce_dtype``. Otherwise they
            are cast to the dtype of the shard.
        cast_forward_inputs: whether floating-point inputs of each unit are cast to its
            ``param_dtype``.
        cast_root_forward_inputs: whether floating-point inputs of the whole model are cast to the
            root's ``param_dtype``.
        ignored_classes: module classes that compute in full precision, given as classes or by
            qualified name, and stored by name. Modules of these classes and of their subclasses
            become their own units. Their inputs are cast to the dtype of their leaves, and their
            outputs are cast back to the dtype of their inputs. Units inside such modules are in
            full precision too.
        full_precision_in_eval: whether modules in evaluation mode compute and communicate in full
            precision.
        output_dtype: dtype to which floating-point outputs are cast. In the precision of a plan,
            these are the outputs of the whole model. In the precision that a policy gives one unit,
            they are the outputs of that unit. ``None``: outputs are not cast.
        divide_before_reduce: whether ``value_and_grad`` divides gradients before they are reduced
            too, so that sums of float16 do not overflow. It divides by the least power of two whose
            square is at least the number of ranks, and afterwards by the rest.

    Example:
        >>> import torch, funcshard as fs
        >>> precision = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        >>> plan = fs.make_plan({"w": torch.zeros(4)}, 2, precision=precision)
        >>> [(event.kind, event.dtype) for event in fs.predict_events(plan)]
        [('all_gather', 'bfloat16'), ('reduce_scatter', 'float32')]

    Source: ``torch.distributed.fsdp.MixedPrecision``. The defaults are the same, except that
    PyTorch reads the default for evaluation from the environment variable
    ``FSDP_USE_FULL_PREC_IN_EVAL``, and always divides sums of float16 in two steps. The source of
    ``output_dtype`` is ``MixedPrecisionPolicy`` of FSDP2.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    ignored_classes: tuple[str, ...] = ("torch.nn.modules.batchnorm._BatchNorm",)
    full_precision_in_eval: bool = False
    output_dtype: torch.dtype | None = field(default=None, metadata={"later": True})
    divide_before_reduce: bool = field(default=False, metadata={"later": True})

    def __post_init__(self) -> None:
        for name in _DTYPES:
            dtype = getattr(self, name)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ValueError(
                    f"{name} must be a floating-point torch.dtype, or None for no cast; found "
                    f"{dtype!r}"
                )
        for flag in _FLAGS:
            check_flag(flag, getattr(self, flag))
        given_classes: Any = self.ignored_classes
        if not isinstance(given_classes, Iterable) or isinstance(given_classes, str):
            raise TypeError(
                "ignored_classes must be a tuple of module classes; found "
                f"{given_classes!r}: write ({given_classes!r},)"
            )
        object.__setattr__(
            self,
            "ignored_classes",
            tuple(class_name(module_class) for module_class in given_classes),
        )


def class_name(cls: Any) -> str:
    """Return the qualified name of a module class; a string is returned unchanged.

    ``torch.nn.LayerNorm`` gives ``"torch.nn.modules.normalization.LayerNorm"``.
    """
    if isinstance(cls, str):
        # A class of a notebook has a module too, so every qualified name has a dot.
        if "." not in cls:
            raise ValueError(
                "ignored_classes must be given as classes, or by qualified name as in "
                f"'torch.nn.modules.normalization.LayerNorm'; found {cls!r}, which no class has: "
                "pass the class itself"
            )
        return cls
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise TypeError(
            "ignored_classes must be subclasses of torch.nn.Module, or their qualified names; "
            f"found {cls!r}"
        )
    return f"{cls.__module__}.{cls.__qualname__}"


def is_one_of(cls: type, names: Iterable[str]) -> bool:
    """Return whether ``cls`` is one of the named classes, or a subclass of one."""
    return not set(names).isdisjoint(
        f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__
    )
