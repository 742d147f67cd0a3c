"""The leaves of a parameter tree: each tensor once, with all paths at which the model uses it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from funcshard._utils import file_data, tree
from funcshard._utils.options import module_remedy
from funcshard._utils.tensors import check_plain, dtype_name, has_numbers, is_continuous
from funcshard.plan.storage import Packing
from funcshard.plan.unit_plan import LeafCut, Placements

_DIGITS = 4300  # Python writes no whole number of more digits
_PLAIN = "str, int, bool, finite float, None and tuples of these"


class Leaf(NamedTuple):
    """One tensor of the tree, as data that caches may keep.

    Attributes:
        leaf_index: number of the tensor in the tree's order of leaves.
        paths: where the tensor is used; the first path becomes the leaf's path in the plan.
        shape: shape of the part that each rank holds.
        dtype: name of its dtype.
        trainable: whether the leaf gets a gradient.
        local: the mesh axes along which its values differ.
        cuts: how it is a slice of a larger tensor along these axes, if that is known.
        placements: how it is placed, if it is a DTensor.
        packing: how it is stored packed; ``None`` if it is stored as it is.
    """

    leaf_index: int
    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    local: tuple[str, ...] = ()
    cuts: tuple[LeafCut, ...] = ()
    placements: Placements = ()
    packing: Packing | None = None


def read_leaves(params: Any) -> tuple[tree.Structure, list[Leaf], list[torch.Tensor]]:
    """Return the structure of a parameter tree, its leaves and their tensors, tied ones once."""
    structure, leaf_tensors, paths = tree.describe(params, _check_container)
    tensor_uses: dict[int, dict[str, None]] = {}  # the paths of each tensor by its id
    for leaf_tensor, leaf_path in zip(leaf_tensors, paths, strict=True):
        # Why a dictionary: it keeps the order, and a tied path comes from several sides.
        use_paths = tensor_uses.setdefault(id(leaf_tensor), {})
        use_paths[leaf_path] = None
        # Note: a parameter that make_functional marked as tied has several names, in the module,
        # whose parameters may be a subtree of this tree.
        names = [*module_classes(leaf_tensor)]
        path_prefix = prefix_of(leaf_path, names[0]) if len(names) > 1 else None
        if path_prefix is not None:
            use_paths.update(dict.fromkeys(path_prefix + name for name in names))
    # Tied tensors: the structure names one leaf at several places.
    if len(tensor_uses) < len(leaf_tensors):
        new_indices = {identity: number for number, identity in enumerate(tensor_uses)}
        structure = _renumbered(
            structure, [new_indices[id(leaf_tensor)] for leaf_tensor in leaf_tensors]
        )
        leaf_tensors = list({id(leaf_tensor): leaf_tensor for leaf_tensor in leaf_tensors}.values())
    for leaf_tensor, use_paths in zip(leaf_tensors, tensor_uses.values(), strict=True):
        _check_leaf(leaf_tensor, [*use_paths])
    leaves = [
        Leaf(
            index,
            tuple(use_paths),
            tuple(leaf_tensor.shape),
            dtype_name(leaf_tensor.dtype),
            trainable,
        )
        for index, (leaf_tensor, use_paths, trainable) in enumerate(
            zip(leaf_tensors, tensor_uses.values(), _trainable(leaf_tensors), strict=True)
        )
    ]
    return structure, leaves, leaf_tensors


def module_classes(leaf: Any) -> dict[str, tuple[type, ...]]:
    """Return the marks of ``make_functional``: by name of use, the modules' classes, outside in."""
    marks: dict[str, tuple[type, ...]] = getattr(leaf, "funcshard_modules", {})
    return marks


def prefix_of(path: str, name: str) -> str | None:
    """Return what a larger tree puts before a module's name of a parameter, if it keeps it."""
    return path[: len(path) - len(name)] if f".{path}".endswith(f".{name}") else None


def names_in_order(params: Any, leaves: Sequence[Leaf]) -> tuple[str, ...]:
    """Return the paths of all uses of leaves, and a module's buffers, in the order of the tree."""
    names: dict[str, None] = {}
    for leaf_path, leaf in tree.insertion_order(params):
        state_names: tuple[str, ...] = getattr(leaf, "funcshard_names", ())
        # Why only for a new path: the first parameter of a module brings the names of all.
        if state_names and leaf_path not in names:
            path_prefix = prefix_of(leaf_path, next(iter(module_classes(leaf))))
            if path_prefix is not None:
                names.update(dict.fromkeys(path_prefix + state_name for state_name in state_names))
        names[leaf_path] = None
    names.update(dict.fromkeys(leaf_path for leaf in leaves for leaf_path in leaf.paths))
    return tuple(names)


def _renumbered(structure: tree.Structure, numbers: Sequence[int]) -> tree.Structure:
    """Return ``structure`` with leaf ``i`` replaced by leaf ``numbers[i]``."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return numbers[structure]
    node_kind, meta, children = structure
    return node_kind, meta, tuple([_renumbered(child, numbers) for child in children])


def _trainable(tensors: Sequence[torch.Tensor]) -> list[bool]:
    # Why not one rule for all: a module whose parameters are all frozen says so by requires_grad,
    # and plain tensors, as in JAX, say nothing by it unless one of them requires a gradient.
    is_plain = [
        not (module_classes(leaf_tensor) or isinstance(leaf_tensor, torch.nn.Parameter))
        for leaf_tensor in tensors
    ]
    if any(t.requires_grad and plain for t, plain in zip(tensors, is_plain, strict=True)):
        return [leaf_tensor.requires_grad for leaf_tensor in tensors]
    return [
        leaf_tensor.requires_grad or (plain and is_continuous(leaf_tensor))
        for leaf_tensor, plain in zip(tensors, is_plain, strict=True)
    ]


# --- what a plan cannot hold ----------------------------------------------------------------------


def _check_leaf(leaf: Any, paths: Sequence[str]) -> None:
    for path in paths:
        if path.count(".") >= tree.DEEPEST:
            raise ValueError(tree.too_deep(path, "keys in one path"))
        if ".." in f".{path}." and path:
            raise ValueError(
                f"the leaf at {path!r} has an empty key in its path; a path joins keys with dots, "
                "and no key may be empty or begin or end with a dot: rename the key"
            )
    path = paths[0]
    if not isinstance(leaf, torch.Tensor):
        remedy = module_remedy(leaf, "params") or "move it out of params, or make it a tensor"
        if isinstance(leaf, Iterator):
            remedy = (
                "pass the params of make_functional(module), or a tree such as "
                "dict(module.named_parameters())"
            )
        raise TypeError(
            f"leaf {path!r} must be a torch.Tensor; found {type(leaf).__name__}: {remedy}"
        )
    # These have a dense layout and a plain class, so the later checks let them pass.
    if leaf.is_nested or leaf.is_quantized:
        raise TypeError(
            f"leaf {path!r} is a {'nested' if leaf.is_nested else 'quantized'} tensor, of which no "
            "shard can be cut: hold its values, and what else it consists of, as plain tensors"
        )
    if not has_numbers(leaf.dtype):
        raise TypeError(
            f"leaf {path!r} has dtype {leaf.dtype}, which torch can neither copy nor fill "
            "everywhere: hold its bytes, leaf.view(torch.uint8), and view them inside the model"
        )
    if leaf.layout != torch.strided:
        raise TypeError(
            f"leaf {path!r} must be a dense tensor; found layout {leaf.layout}: call .to_dense() "
            "on it"
        )
    check_plain(leaf, f"leaf {path!r}")


def _check_container(kind: str, meta: Any, entries: Sequence[Any], path: str) -> None:
    """Raise unless JSON gives the keys or metadata of a container back as they are."""
    where = f"at {path!r}" if path else "at the root of the tree"
    # Why: JSON would give back text in place of bytes, of members of an enum or of dtypes, and so
    # another plan.
    if kind in ("dict", "ordered_dict"):
        for dict_key in meta:
            if not _is_data(dict_key):
                raise TypeError(
                    f"the key {file_data.shown(dict_key)} of the dictionary {where} cannot be part "
                    f"of a plan, because JSON does not give it back: keys may be {_PLAIN}; found a "
                    f"{type(dict_key).__name__}, so use its name or number as the key"
                )
    if kind == "custom" and not _is_data(meta[1]):
        raise TypeError(
            f"the node of class {meta[0]} {where} cannot be part of a plan: its metadata "
            f"{file_data.shown(meta[1])} must consist of {_PLAIN}, which JSON gives back; let its "
            "flatten function return names or numbers"
        )
    # Why by type: an entry may be an object of any class, whose truth says nothing.
    if any(type(entry) is str and not entry for entry in entries):
        raise ValueError(
            f"a key of the container {where} is empty; a path joins keys with dots: name the key"
        )


def _is_data(value: Any) -> bool:
    """Return whether JSON gives a value back, of the same class."""
    # Why by class: JSON gives an IntEnum back as an int, and so on.
    cls = type(value)
    if cls is tuple:
        return all(map(_is_data, value))
    if cls is int:
        # JSON holds larger numbers, but Python refuses to read them back.
        return bool(value.bit_length() < _DIGITS * math.log2(10) - 1)
    return value is None or cls in (str, bool) or (cls is float and math.isfinite(value))
