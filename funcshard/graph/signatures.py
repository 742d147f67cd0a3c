"""The signature of a graph."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard.plan import dtype_name


class Signature(NamedTuple):
    """The facts about the arguments of a step that a graph depends on.

    Attributes:
        modes: inference mode, and autocast with its dtype on CPU and CUDA.
        leaves: shape, dtype, device, strides and need of gradients of a tensor; ``int`` for a
            counter; type and value of others. A size that may change is its name, and such strides
            are ``None`` if contiguous.
        conditions: rules of the named sizes, which only a graph has.
    """

    form: Any
    modes: tuple[Any, ...]
    leaves: tuple[Hashable, ...]
    conditions: tuple[str, ...] = ()


def signature_of(
    leaves: Sequence[Any], form: Any, counters: int, names: Mapping[int, Any] | None = None
) -> Signature:
    """Return the signature of arguments.

    Arguments:
        counters: number of the leaves of ``state``, whose whole numbers may change.
        names: names of dims by the number of a leaf, ``None`` for a fixed size.
    """
    autocast = [
        (torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type))
        for device_type in ("cpu", "cuda")
    ]
    modes = torch.is_inference_mode_enabled(), *autocast
    leaf_facts = [_leaf_facts(leaf, i < counters) for i, leaf in enumerate(leaves)]
    for leaf_index, named_dims in (names or {}).items():
        leaf_facts[leaf_index] = _named_facts(leaves[leaf_index], named_dims)
    return Signature(form, modes, tuple(leaf_facts))


def _leaf_facts(leaf: Any, in_state: bool) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device, leaf.stride(), leaf.requires_grad
    # Note: the number of steps is an input, a number in the batch a constant.
    if in_state and type(leaf) is int:
        return int
    try:
        hash(leaf)
    except TypeError:
        # Note: such as a set; a text tells two of them apart well enough for a recording.
        return type(leaf), repr(leaf)
    return type(leaf), leaf


def _named_facts(tensor: torch.Tensor, names: Sequence[str | None]) -> Hashable:
    shape = tuple([name or size for name, size in zip(names, tensor.shape, strict=True)])
    strides = None if tensor.stride() == contiguous_strides(tensor.shape) else tensor.stride()
    return shape, tensor.dtype, tensor.device, strides, tensor.requires_grad


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def sized(leaf: Any, sizes: Mapping[str, int]) -> Any:
    """Return the facts about a tensor, with numbers in place of names."""
    shape, dtype, device, strides, requires_grad = leaf
    # Note: a number has no name, so it is its own size.
    shape = torch.Size([sizes.get(size, size) for size in shape])
    if strides is None:
        strides = contiguous_strides(shape)
    return shape, dtype, device, strides, requires_grad


# --- differences as text --------------------------------------------------------------------------


def nearest_difference(found: Signature, recorded: Iterable[Signature]) -> str:
    """Return how a signature differs from the nearest of several."""
    return difference(min(recorded, key=lambda each: _distance(each, found)), found)


def difference(recorded: Signature, found: Signature) -> str:
    """Return how arguments differ: ``leaf `batch[0]`: recorded float32[4], found float32[5]``.

    It names one leaf, and how many others differ; ``""`` if none does.
    """
    if recorded.form != found.form:
        return _form_difference(_paths(recorded.form), _paths(found.form))
    names = ("inference mode", "autocast on the CPU", "autocast on CUDA")
    for name, *modes in zip(names, recorded.modes, found.modes, strict=True):
        if modes[0] != modes[1]:
            return f"{name}: recorded {_mode(modes[0])}, found {_mode(modes[1])}"
    leaf_pairs = list(zip(_paths(found.form), recorded.leaves, found.leaves, strict=True))
    differing_leaves = [pair for pair in leaf_pairs if pair[1] != pair[2]]
    if not differing_leaves:
        return ""
    # Why the batch first: other shapes of a batch are the usual reason.
    differing_leaves.sort(key=lambda pair: not pair[0].startswith("batch"))
    path, *leaves = differing_leaves[0]
    for fact_count in range(2, 6):
        recorded_text, found_text = (_described(leaf, fact_count) for leaf in leaves)
        if recorded_text != found_text:
            break
    others, further_text = len(differing_leaves) - 1, ""
    if others:
        verb = "leaf differs" if others == 1 else "leaves differ"
        further_text = f", and {others} other {verb}"
    return f"leaf `{path}`: recorded {recorded_text}, found {found_text}{further_text}"


def _distance(recorded: Signature, found: Signature) -> tuple[int, int]:
    """Return how far two signatures are apart; trees count more than leaves."""
    if recorded.form != found.form:
        return 1, len({*_paths(recorded.form)} ^ {*_paths(found.form)})
    all_facts = [(*signature.modes, *signature.leaves) for signature in (recorded, found)]
    return 0, sum(fact != other_fact for fact, other_fact in zip(*all_facts, strict=True))


def _paths(form: Any) -> list[str]:
    """Return the path of each leaf of ``(state, batch)``."""
    state, batch = tree.build_form(form, range(form.num_leaves))
    return tree.code_paths(state, "state") + tree.code_paths(batch, "batch")


def _form_difference(recorded: list[str], found: list[str]) -> str:
    old_set, new_set = {*recorded}, {*found}
    new_paths = [path for path in found if path not in old_set]
    gone_paths = [path for path in recorded if path not in new_set]
    changed_paths = new_paths or gone_paths
    if not changed_paths:
        return "the tree has the same leaves in containers of other types"
    verb_text = "has the new leaf" if new_paths else "lacks the leaf"
    further_text = f" and {len(changed_paths) - 1} more" * (len(changed_paths) > 1)
    return f"the tree {verb_text} `{changed_paths[0]}`{further_text}"


def _mode(mode: Any) -> str:
    if isinstance(mode, bool):
        return "on" if mode else "off"
    enabled, dtype = mode
    return f"{_mode(enabled)} with {dtype_name(dtype)}"


def _described(leaf: Any, fact_count: int) -> str:
    """Return a leaf as text, with as many facts as tell two leaves apart."""
    if leaf is int:
        return "a counter"
    if len(leaf) == 2:
        return f"{leaf[0].__name__} {leaf[1]!r}"
    shape, dtype, device, stride, requires_grad = leaf
    fact_texts = [
        f"{dtype_name(dtype)}[{', '.join(map(str, shape))}]",
        f"on {device}",
        "contiguous" if stride is None else f"of strides {list(stride)}",
        "that requires a gradient" if requires_grad else "without gradient",
    ]
    return " ".join(fact_texts[: fact_count - 1])
