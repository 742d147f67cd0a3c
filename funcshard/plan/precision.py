"""``MixedPrecision``: in which dtypes a unit's leaves are gathered and reduced, and what is cast on its way in.

Data and pure functions of it. Where the casts happen: of parameters and gradients in ``collectives``, of inputs in
``unit``, of buffers in ``module``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["MixedPrecision", "class_name", "is_one_of"]

_DTYPES = ("param_dtype", "reduce_dtype", "buffer_dtype")


@dataclass(frozen=True, slots=True)
class MixedPrecision:
    """In which dtypes a model computes and communicates; shards and optimizer state keep the dtype of their leaves.

    Attributes:
        param_dtype: what shards are cast to before they are gathered, and so what units compute in; ``None``: the dtype
            of the leaves. Leaves that are not of floating point stay as they are.
        reduce_dtype: what gradients are reduced in; ``None``: ``param_dtype``, or that of the leaves.
        buffer_dtype: what a module's floating-point buffers are cast to for a call; ``None``: they stay as they are. The
            caller's own are never changed, and new buffers come back in the dtypes of those that were given.
        keep_low_precision_grads: whether reduced gradients stay in ``reduce_dtype``; otherwise they arrive in the dtype of
            the shard.
        cast_forward_inputs: whether floating-point inputs of a unit are cast to its ``param_dtype``.
        cast_root_forward_inputs: the same for the inputs of the whole model.
        ignored_classes: module classes that compute in full precision, as units of their own, given as classes or by
            qualified name, and kept by name. Subclasses are meant too, and units inside such modules. Their inputs
            are cast to the dtype of their leaves, and their outputs back to that of their inputs.
        full_precision_in_eval: whether modules in evaluation mode compute, and communicate, in full precision.

    Example:
        >>> import torch, funcshard as fs
        >>> precision = fs.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        >>> plan = fs.make_plan({"w": torch.zeros(4)}, 2, precision=precision)
        >>> [(event.kind, event.dtype) for event in fs.predict_events(plan)]
        [('all_gather', 'bfloat16'), ('reduce_scatter', 'float32')]

    Source: ``torch.distributed.fsdp.MixedPrecision``, whose defaults these are, apart from evaluation: PyTorch reads
    ``FSDP_USE_FULL_PREC_IN_EVAL`` from the environment.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    ignored_classes: tuple[str, ...] = ("torch.nn.modules.batchnorm._BatchNorm",)
    full_precision_in_eval: bool = False

    def __post_init__(self) -> None:
        for field in _DTYPES:
            dtype = getattr(self, field)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(
                    f"{field} must be a floating-point torch.dtype, or None to leave dtypes as they are; found {dtype!r}"
                )
        given: Any = self.ignored_classes
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise TypeError(f"ignored_classes must be a tuple of module classes; found {given!r}: write ({given!r},)")
        object.__setattr__(self, "ignored_classes", tuple(class_name(each) for each in given))

    @classmethod
    def from_data(cls, data: dict[str, Any], dtype_of: Callable[[str], torch.dtype]) -> MixedPrecision:
        """Return the value whose fields are ``data``, with dtypes by name, as JSON holds them."""
        dtypes = {field: None if data[field] is None else dtype_of(data[field]) for field in _DTYPES}
        return cls(**{**data, **dtypes, "ignored_classes": tuple(data["ignored_classes"])})


def class_name(cls: Any) -> str:
    """``torch.nn.LayerNorm`` -> ``"torch.nn.modules.normalization.LayerNorm"``; a string is a name already."""
    if isinstance(cls, str):
        return cls
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)):
        raise TypeError(f"ignored_classes must be subclasses of torch.nn.Module, or their qualified names; found {cls!r}")
    return f"{cls.__module__}.{cls.__qualname__}"


def is_one_of(cls: type, names: Iterable[str]) -> bool:
    """Whether ``cls`` is one of the named classes, or a subclass of one."""
    return not set(names).isdisjoint(f"{base.__module__}.{base.__qualname__}" for base in cls.__mro__)
