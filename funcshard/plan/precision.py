"""``MixedPrecision``: the dtypes in which units compute and communicate; and dtypes by name.

This file holds the data and pure functions of it. The casts themselves happen elsewhere: parameters
and gradients are cast in core's ``buffer_comm``, inputs and outputs in core's ``unit``, and buffers
in module's ``unit_forward``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import check_flag

_DTYPES = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
_FLAGS = (
    "keep_low_precision_grads", "cast_forward_inputs", "cast_root_forward_inputs", "full_precision_in_eval",
    "divide_before_reduce",
)  # fmt: skip
# Fields that the first plans did not have. As data they are left out at their default, so that
# stored plans and fingerprints stay valid.
_LATER = {"output_dtype": None, "divide_before_reduce": False}


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
            become units of their own. Their inputs are cast to the dtype of their leaves, and their
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
    output_dtype: torch.dtype | None = None
    divide_before_reduce: bool = False

    def __post_init__(self) -> None:
        for field in _DTYPES:
            dtype = getattr(self, field)
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ValueError(
                    f"{field} must be a floating-point torch.dtype, or None for no cast; found "
                    f"{dtype!r}"
                )
        for flag in _FLAGS:
            check_flag(flag, getattr(self, flag))
        given: Any = self.ignored_classes
        if not isinstance(given, Iterable) or isinstance(given, str):
            raise TypeError(
                f"ignored_classes must be a tuple of module classes; found {given!r}: write "
                f"({given!r},)"
            )
        object.__setattr__(self, "ignored_classes", tuple(class_name(each) for each in given))

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> MixedPrecision:
        """Return the value for fields as JSON holds them, with dtypes by name."""
        data = {**_LATER, **data}
        dtypes = {
            field: None if data[field] is None else dtype_of(data[field]) for field in _DTYPES
        }
        return cls(**{**data, **dtypes, "ignored_classes": tuple(data["ignored_classes"])})


def stored_precision(data: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the fields of a precision as a plan's JSON holds them; ``from_data`` reads them."""
    return data and {
        name: value for name, value in data.items() if name not in _LATER or value != _LATER[name]
    }


def class_name(cls: Any) -> str:
    """Return the qualified name of a module class; a string is returned unchanged.

    ``torch.nn.LayerNorm`` gives ``"torch.nn.modules.normalization.LayerNorm"``.
    """
    if isinstance(cls, str):
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


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"``; the inverse of ``dtype_of``."""
    return str(dtype).removeprefix("torch.")


_NAMED = {name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a name, such as ``torch.float32``; the inverse of ``dtype_name``.

    Raises:
        ValueError: torch has no dtype of this name.
    """
    # Why not getattr: torch imports modules in its __getattr__, and a file may give the name.
    dtype = _NAMED.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ValueError(
            f"{name!r} is not the name of a torch dtype; found in a plan, so the plan is damaged"
        )
    return dtype


# Dtypes for which torch lacks most operations: below a byte, and bits without a meaning.
_NO_NUMBERS = re.compile(r"bits\w+|u?int[1-7]|float4\w+|qu?int\w+")


def has_numbers(dtype: torch.dtype) -> bool:
    """Return whether torch can fill, compare and read tensors of a dtype.

    Example:
        >>> has_numbers(torch.float8_e5m2), has_numbers(torch.bits8)
        (True, False)
    """
    return not _NO_NUMBERS.fullmatch(dtype_name(dtype))
