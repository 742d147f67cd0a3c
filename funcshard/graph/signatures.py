"""``Signature``: the facts about arguments that a graph depends on, and how two of them differ."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard.plan import dtype_name


class Signature(NamedTuple):
    """The facts about the arguments of a step that a graph depends on.

    Attributes:
        form: the form of ``(state, batch)``.
        modes: whether inference mode is on; whether autocast is, and its dtype, on CPU and CUDA.
        leaves: for a tensor its shape, dtype, device, strides and whether it requires a gradient;
            for a counter ``int``; for any other leaf its type and value. A size that may change is
            its name, and the strides of such a tensor are ``None`` if it is contiguous.
        conditions: the rules that the named sizes fulfil; a graph has them, arguments have none.
    """

    form: Any
    modes: tuple[Any, ...]
    leaves: tuple[Hashable, ...]
    conditions: tuple[str, ...] = ()


def signature_of(
    leaves: Sequence[Any], form: Any, counters: int, names: Mapping[int, Any] | None = None
) -> Signature:
    """Return the facts about the arguments that a graph depends on.

    Arguments:
        leaves: the leaves of ``(state, batch)``.
        form: the form of that tree.
        counters: number of the leaves of ``state``; the whole numbers among them may change.
        names: for the number of a leaf the names of its dims, ``None`` for a fixed size.
    """
    autocast = [
        (torch.is_autocast_enabled(device_kind), torch.get_autocast_dtype(device_kind))
        for device_kind in ("cpu", "cuda")
    ]
    modes = torch.is_inference_mode_enabled(), *autocast
    leaf_signatures = [_leaf_signature(leaf, i < counters) for i, leaf in enumerate(leaves)]
    for leaf_index, named_dims in (names or {}).items():
        leaf_signatures[leaf_index] = _named(leaves[leaf_index], named_dims)
    return Signature(form, modes, tuple(leaf_signatures))


def _named(tensor: torch.Tensor, names: Sequence[str | None]) -> Hashable:
    shape = tuple(
        [size if name is None else name for name, size in zip(names, tensor.shape, strict=True)]
    )
    strides = None if tensor.stride() == contiguous_strides(tensor.shape) else tensor.stride()
    return shape, tensor.dtype, tensor.device, strides, tensor.requires_grad


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def sized(leaf: Any, sizes: Mapping[str, int]) -> Any:
    """Return the facts about a tensor, with numbers in the place of names and of no strides."""
    shape, dtype, device, strides, requires_grad = leaf
    shape = torch.Size([sizes[size] if isinstance(size, str) else size for size in shape])
    return (
        shape,
        dtype,
        device,
        contiguous_strides(shape) if strides is None else strides,
        requires_grad,
    )


def _leaf_signature(leaf: Any, in_state: bool) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride(), leaf.requires_grad
    if in_state and type(leaf) is int:
        return int
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), repr(leaf)
    return type(leaf), leaf


# --- differences in words -------------------------------------------------------------------------


def nearest_difference(found: Signature, recorded: Iterable[Signature]) -> str:
    """Return how a signature differs from the one of several that it differs from least."""
    return difference(min(recorded, key=lambda each: _distance(each, found)), found)


def difference(recorded: Signature, found: Signature) -> str:
    """Return how arguments differ: ``leaf `batch[0]`: recorded float32[4], found float32[5]``.

    It names one leaf, and the number of further ones; ``""`` if the signatures are equal.
    """
    if recorded.form != found.form:
        return _other_form(_paths(recorded.form), _paths(found.form))
    names = ("inference mode", "autocast on the CPU", "autocast on CUDA")
    for name, mode_before, mode_now in zip(names, recorded.modes, found.modes, strict=True):
        if mode_before != mode_now:
            return f"{name}: recorded {_mode(mode_before)}, found {_mode(mode_now)}"
    differing = [
        i
        for i, pair in enumerate(zip(recorded.leaves, found.leaves, strict=True))
        if pair[0] != pair[1]
    ]
    if not differing:
        return ""
    # Why the batch first: other shapes of a batch are the usual reason.
    paths = _paths(found.form)
    first = next((i for i in differing if paths[i].startswith("batch")), differing[0])
    more_differing = len(differing) - 1
    further = (
        f", and {more_differing} other {'leaf differs' if more_differing == 1 else 'leaves differ'}"
        if more_differing
        else ""
    )
    mode_before, mode_now = _described(recorded.leaves[first], found.leaves[first])
    return f"leaf `{paths[first]}`: recorded {mode_before}, found {mode_now}{further}"


def _distance(recorded: Signature, found: Signature) -> tuple[int, int]:
    """Return how far two signatures are apart: other trees are further than other leaves."""
    if recorded.form != found.form:
        return 1, len({*_paths(recorded.form)} ^ {*_paths(found.form)})
    differing = sum(
        first_leaf != second_leaf
        for first_leaf, second_leaf in zip(recorded.leaves, found.leaves, strict=True)
    )
    return 0, differing + sum(
        first_mode != second_mode
        for first_mode, second_mode in zip(recorded.modes, found.modes, strict=True)
    )


def _paths(form: Any) -> list[str]:
    """Return the path of each leaf of ``(state, batch)``, as Python code."""
    state, batch = tree.build_form(form, range(form.num_leaves))
    return tree.code_paths(state, "state") + tree.code_paths(batch, "batch")


def _other_form(recorded: list[str], found: list[str]) -> str:
    for words, paths, others in (
        ("has the new leaf", found, {*recorded}),
        ("lacks the leaf", recorded, {*found}),
    ):
        differing = [path for path in paths if path not in others]
        if differing:
            more_text = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            return f"the tree {words} `{differing[0]}`{more_text}"
    return "the tree has the same leaves in containers of other types"


def _mode(value: Any) -> str:
    enabled, dtype = (value, None) if isinstance(value, bool) else value
    return ("on" if enabled else "off") + (
        f" with {dtype_name(dtype)}" if dtype is not None else ""
    )


def _described(recorded: Any, found: Any) -> tuple[str, str]:
    """Return two leaves as text, with as many facts as make them differ."""
    for facts in range(2, 6):
        first_text, second_text = _leaf(recorded, facts), _leaf(found, facts)
        if first_text != second_text:
            break
    return first_text, second_text


def _leaf(leaf: Any, facts: int) -> str:
    if leaf is int:
        return "a counter"
    if len(leaf) == 2:
        return f"{leaf[0].__name__} {leaf[1]!r}"
    shape, dtype, device, stride, requires_grad = leaf
    further = (
        f"on {device}",
        "contiguous" if stride is None else f"of strides {list(stride)}",
        "that requires a gradient" if requires_grad else "without gradient",
    )
    return " ".join([f"{dtype_name(dtype)}[{', '.join(map(str, shape))}]", *further[: facts - 2]])
