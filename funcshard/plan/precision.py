"""``MixedPrecision``: the dtypes in which units compute and communicate.

The casts happen elsewhere: of parameters and gradients in core's ``buffer_comm``, of inputs and
outputs in core's ``unit``, of buffers in module's ``unit_setup``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from funcshard._utils.options import check_flag


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """The dtypes in which a model computes and communicates.

    Shards and optimizer state always keep the dtype of their leaves.

    Attributes:
        param_dtype: dtype to which floating-point shards are cast before they are gathered, and so
            the dtype in which units compute. ``None``: the dtype of the leaves.
        reduce_dtype: dtype in which gradients are reduced. ``None``: that of the gather.
        buffer_dtype: dtype to which a module's floating-point buffers are cast for a call.
            ``None``: no cast. Your buffers never change, and new ones come back in the dtypes of
            yours.
        keep_low_precision_grads: whether reduced gradients stay in ``reduce_dtype``. Otherwise they
            are cast to the dtype of the shard.
        cast_forward_inputs: whether floating-point inputs of each unit are cast to its
            ``param_dtype``.
        cast_root_forward_inputs: the same for the inputs of the whole model and the root's
            ``param_dtype``.
        ignored_classes: module classes that compute in full precision with all inside them, as
            classes or by qualified name. Modules of these classes and of their subclasses become
            their own units. Their inputs are cast to the dtype of their leaves, and their outputs
            back.
        full_precision_in_eval: whether modules in evaluation mode compute and communicate in full
            precision.
        output_dtype: dtype to which floating-point outputs are cast: those of the whole model, or
            of one unit if you override its precision. ``None``: no cast.
        divide_before_reduce: whether ``value_and_grad`` divides gradients in two steps, before and
            after they are reduced, so that sums of float16 do not overflow.

    Example:
        >>> import torch, funcshard as fs
        >>> precision = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        >>> plan = fs.make_plan({"w": torch.zeros(4)}, 2, precision=precision)
        >>> [(event.kind, event.dtype) for event in fs.predict_events(plan)]
        [('all_gather', 'bfloat16'), ('reduce_scatter', 'float32')]

    Source: ``torch.distributed.fsdp.MixedPrecision``. The defaults are the same, except that
    PyTorch reads ``FSDP_USE_FULL_PREC_IN_EVAL``, and always divides sums of float16 in two steps.
    ``output_dtype`` is that of ``MixedPrecisionPolicy`` of FSDP2.
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
        for option in fields(self):
            value = getattr(self, option.name)
            if isinstance(option.default, bool):
                check_flag(option.name, value)
            elif (
                option.default is None
                and value is not None
                and not (isinstance(value, torch.dtype) and value.is_floating_point)
            ):
                raise ValueError(
                    f"{option.name} must be a floating-point torch.dtype, or None for no cast; "
                    f"found {value!r}"
                )
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
    """Return the qualified name of a module class; a string is returned unchanged."""
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
