"""Facts about torch's operators."""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from funcshard._utils.torch_private import storage_id
from funcshard._utils.tree import tensors_in

# Operations that do not read the memory that they write into, or write nothing into new memory.
_FILLS = (
    "copy_",
    "zero_",
    "fill_",
    "bernoulli_",
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
)
_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class AttentionCall(NamedTuple):
    """The arguments of ``torch.nn.functional.scaled_dot_product_attention``."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False


_Overload: Any = type(torch.ops.aten.add.Tensor)  # the class of operators


def _schema(operation: Any) -> Any:
    """Return an operator's arguments, their types, and which of them it writes to."""
    return operation._schema


def writes_inputs(operation: Any) -> bool:
    """Return whether an operation writes to one of its inputs."""
    return bool(_schema(operation).is_mutable)


def written_arguments(operation: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments of a call that an operator writes to."""
    operator_inputs = operator_arguments(operation, args, kwargs)
    written_names = [
        argument.name
        for argument in _schema(operation).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [operator_inputs[name] for name in written_names if name in operator_inputs]


def new_tensors(arguments: Any, results: Any) -> list[torch.Tensor]:
    """Return the results of a call that lie in the memory of no argument."""
    known_storages = set(map(storage_id, tensors_in(arguments)))
    return [
        tensor for tensor in tensors_in(results) if storage_id(tensor) not in known_storages
    ]


def moved_bytes(
    operation: Any,
    args: Any,
    kwargs: Any,
    new: Iterable[torch.Tensor],
    parts: Callable[[Iterable[torch.Tensor]], Iterable[torch.Tensor]] = list,
) -> int:
    """Return the bytes that an operation reads and writes.

    Arguments:
        new: its results in new memory.
        parts: from tensors to those with their data.
    """
    name = operator_name(operation).removeprefix("aten::")
    if name in _EMPTY:
        return 0
    read_tensors = list(parts(tensors_in((args, kwargs))))
    written_tensors: list[torch.Tensor] = []
    if writes_inputs(operation):
        written_tensors = list(
            parts(tensors_in(written_arguments(operation, args, kwargs)))
        )
        # What is overwritten is not read first.
        if name in _FILLS:
            read_tensors = [
                tensor
                for tensor in read_tensors
                if all(tensor is not written_tensor for written_tensor in written_tensors)
            ]
    return sum(map(data_bytes, (*read_tensors, *written_tensors, *new)))


def data_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, those that share memory once."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def list_arguments(operation: Any) -> list[str]:
    """Return an operator's arguments that are lists of tensors or numbers."""
    list_types = ("List[Tensor]", "List[number]", "List[float]")
    return [a.name for a in _schema(operation).arguments if str(a.type) in list_types]


def operator_name(target: Any) -> str:
    """Return an operator's name, such as ``"aten::add"``; ``""`` for other code."""
    if not isinstance(target, _Overload):
        return ""
    return str(target.name()).partition(".")[0]


def operator_full_name(target: Any) -> str:
    """Return an operator's name with its overload, ``"aten::add.Tensor"``, or ``""``."""
    if not isinstance(target, _Overload):
        return ""
    name = str(target.name())
    return name if "." in name else f"{name}.default"


def operator_by_name(space: str, name: str, overload: str) -> Any:
    """Return an operator of torch, or ``None``."""
    try:
        overload_packet = getattr(getattr(getattr(torch.ops, space), name), overload)
    except (AttributeError, RuntimeError):
        return None
    return overload_packet if isinstance(overload_packet, _Overload) else None


def argument_names(operation: Any) -> list[str]:
    """Return the names of an operator's arguments; none of other code."""
    if not isinstance(operation, _Overload):
        return []
    return [argument.name for argument in _schema(operation).arguments]


def operator_arguments(operation: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the given arguments of a call by name."""
    return dict(zip(argument_names(operation), args, strict=False)) | dict(kwargs)


def is_random(operation: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a call of an operator draws random numbers."""
    if (
        torch.Tag.nondeterministic_seeded not in operation.tags
        or operation.namespace == "funcshard"
    ):
        return False
    # Why: attention has the tag, and draws no numbers without dropout.
    is_attention = "attention" in operation.name()
    return not (
        is_attention
        and operator_arguments(operation, args, kwargs).get("dropout_p", 0.0) == 0.0
    )


def count_flops(operation: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Return the FLOPs of one call; 0 for all but products and attention.

    It warns of operators that torch can't count.
    """
    name = operator_name(operation)
    if "_scaled_dot_product_" in name:
        # Why by hand: torch has no rule for the CPU's kernel, and none for fewer keys than queries.
        is_backward = name.endswith("_backward")
        if is_backward:
            args = args[1:]  # after the gradient of the output
        query, key, value = (tensor.shape for tensor in args[:3])
        product_size = query[-1] + value[-1]
        if is_backward:
            product_size = 3 * query[-1] + 2 * value[-1]
        return 2 * math.prod(query[:-1]) * key[-2] * product_size
    for packet in (operation.overloadpacket, _out_of_place(name)):
        count_function: Any = flop_registry.get(packet)
        if count_function is not None:
            return int(count_function(*args, **kwargs, out_val=out))
    if name == "aten::_grouped_mm":
        return _grouped_flops(*args[:2])
    if _is_uncounted(name) and torch.Tag.pointwise not in operation.tags:
        warnings.warn(
            f"no FLOPs are counted for {name}, because torch has no rule for it, so a step is "
            "estimated to be faster than it is: register one with "
            "torch.utils.flop_counter.register_flop_formula",
            stacklevel=2,
        )
    return 0


@functools.cache
def _out_of_place(name: str) -> Any:
    """Return the operator that does the same as one of the name ``aten::name_``."""
    short_name = name.partition("::")[2]
    return getattr(torch.ops.aten, short_name.removesuffix("_"), None)


_SPACES = re.compile("aten|prims?|funcshard|_?c10d_functional|c10d|profiler")
_PRODUCTS = re.compile(
    r"(^|_)(b?mm|addmm|baddbmm|matmul|bilinear|linear|conv\w*|attention|attn|lstm|gru|rnn|cdist|fft"
    r"|linalg(?!_vector_norm|_cross))(_|$)"
)


@functools.cache
def _is_uncounted(name: str) -> bool:
    """Return whether an operator may take many FLOPs."""
    space, _, short = name.partition("::")
    return not _SPACES.fullmatch(space) or _PRODUCTS.search(short) is not None


def _grouped_flops(first: torch.Tensor, second: torch.Tensor) -> int:
    """Return the FLOPs of a grouped product, in which a group has a part of one dimension."""
    num_groups = first.shape[0] if first.dim() == second.dim() == 3 else 1
    return int(2 * num_groups * first.shape[-2] * first.shape[-1] * second.shape[-1])
