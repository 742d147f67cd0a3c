"""The leaves of a tree, the unit that owns each of them, and its place in the unit's flat buffers.

``read_leaves`` takes each tensor once, with all paths at which the model uses it. ``plan_units``
lays the units out. If keys of dictionaries have dots, several nodes can lie at one path. They
become one dictionary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from funcshard._utils import file_data, tree
from funcshard._utils.options import module_remedy
from funcshard._utils.tensors import check_plain, dtype_name, has_numbers, is_continuous
from funcshard.plan.mesh_axes import AXES, Axes
from funcshard.plan.storage import Packing
from funcshard.plan.unit_options import decided_options
from funcshard.plan.unit_plan import (
    BufferPlan,
    LeafCut,
    LeafSpec,
    Placements,
    UnitPlan,
    owners_of,
)

_DIGITS = 4300  # Python writes no whole number of more digits
_PLAIN = "str, int, bool, finite float, None and tuples of these"
_DICTS = ("dict", "ordered_dict")


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
        leaf_tensors = list(
            {id(leaf_tensor): leaf_tensor for leaf_tensor in leaf_tensors}.values()
        )
    for leaf_tensor, use_paths in zip(leaf_tensors, tensor_uses.values(), strict=True):
        _check_leaf(leaf_tensor, [*use_paths])
    # Why not one rule for all: a module whose parameters are all frozen says so by requires_grad,
    # and plain tensors, as in JAX, say nothing by it unless one of them requires a gradient.
    is_plain = [
        not (module_classes(leaf_tensor) or isinstance(leaf_tensor, torch.nn.Parameter))
        for leaf_tensor in leaf_tensors
    ]
    says_nothing = not any(
        t.requires_grad and plain for t, plain in zip(leaf_tensors, is_plain, strict=True)
    )
    leaves: list[Leaf] = []
    for leaf_tensor, use_paths, plain in zip(
        leaf_tensors, tensor_uses.values(), is_plain, strict=True
    ):
        trains_anyway = plain and says_nothing and is_continuous(leaf_tensor)
        leaves.append(
            Leaf(
                len(leaves),
                tuple(use_paths),
                tuple(leaf_tensor.shape),
                dtype_name(leaf_tensor.dtype),
                leaf_tensor.requires_grad or trains_anyway,
            )
        )
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
                names.update(
                    dict.fromkeys(path_prefix + state_name for state_name in state_names)
                )
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
        remedy = (
            module_remedy(leaf, "params") or "move it out of params, or make it a tensor"
        )
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


# --- the units that own the leaves ----------------------------------------------------------------


def plan_units(
    structure: tree.Structure,
    leaves: Sequence[Leaf],
    paths: Mapping[str, tuple[str, ...]],
    options: Mapping[str, Mapping[str, Any]],
    axes: Axes,
    mesh_axes: Mapping[str, int],
) -> tuple[UnitPlan, ...]:
    """Lay the units out, and cut their buffers into shards."""
    shards = mesh_axes["shard"]
    unit_plans = []
    unit_layouts = _laid_out(structure, tuple(leaves), tuple(paths.items()))
    for unit_name, members, unit_structure, buffers in unit_layouts:
        unit_options = decided_options(unit_name, options[unit_name], shards)
        # Layouts hold buffers of one shard, because plans for other meshes share them.
        if shards > 1 and unit_options["strategy"] != "no_shard":
            # Why not all: each rank of the shard axis has values of its own in a local one.
            buffers = tuple(
                [
                    buffer if "shard" in buffer.local else replace(buffer, shards=shards)
                    for buffer in buffers
                ]
            )
        unit_plans.append(
            UnitPlan(
                name=unit_name,
                mesh_shape=(mesh_axes["replicate"], shards),
                structure=unit_structure,
                buffers=buffers,
                members=members,
                axes=axes,
                **unit_options,
            )
        )
    return tuple(unit_plans)


# Why few: this holds every leaf of its model.
# Why a cache: plans for other meshes and strategies share a layout, so a sweep works it out once.
@functools.lru_cache(maxsize=4)
def _laid_out(
    structure: tree.Structure,
    leaves: tuple[Leaf, ...],
    named_paths: tuple[tuple[str, tuple[str, ...]], ...],
) -> tuple[tuple[str, tuple[str, ...], tree.Structure, tuple[BufferPlan, ...]], ...]:
    """Return the leaves of each unit that owns one.

    Returns:
        For each of them its name, the paths of a group or ``()``, the structure of its part of the
        tree, and its flat buffers, which aren't cut into shards.
    """
    paths = dict(named_paths)
    path_owners = owners_of(paths)
    unit_leaves: dict[str, list[Leaf]] = {unit_name: [] for unit_name in paths}
    for leaf in leaves:
        units_around = [
            path_owners[node] for node in tree.upwards(leaf.paths[0]) if node in path_owners
        ]
        # A tied leaf belongs to the innermost unit that holds all of its uses. The root does.
        unit_owner = next(
            unit_name
            for unit_name in units_around
            if all(tree.is_under_any(path, paths[unit_name]) for path in leaf.paths[1:])
        )
        unit_leaves[unit_owner].append(leaf)
    nodes_at = nodes_by_path(structure, path_owners)
    unit_layouts = []
    for unit_name, owned_leaves in unit_leaves.items():
        if not owned_leaves:
            continue
        buffers = _buffers(owned_leaves)
        order = [leaf.index for buffer in buffers for leaf in buffer.leaves]
        # A unit numbers its leaves buffer by buffer, in the order of its own flat buffers.
        positions = {index: position for position, index in enumerate(order)}
        member_paths: tuple[str, ...] = ()
        # A group may have one path, if its other modules have become units of full precision.
        if paths[unit_name] == (unit_name,):
            unit_structure = cut_out(nodes_at, unit_name, positions)
        else:
            # Why only some: a group enters a module for the leaves that it owns there.
            owned_nodes = {
                node
                for leaf in owned_leaves
                for leaf_path in leaf.paths
                for node in tree.upwards(leaf_path)
            }
            member_paths = tuple(
                leaf_path for leaf_path in paths[unit_name] if leaf_path in owned_nodes
            )
            # Note: a path that only has tied leaves may be none of the tree.
            parts = {
                path: cut_out(nodes_at, path, positions)
                for path in sorted(member_paths)
                if path in nodes_at
            }
            unit_structure = ("dict", tuple(parts), tuple(parts.values()))
        unit_layouts.append((unit_name, member_paths, unit_structure, buffers))
    return tuple(unit_layouts)


def _buffers(leaves: Sequence[Leaf]) -> tuple[BufferPlan, ...]:
    """Return the flat buffers of a unit's leaves, which aren't cut into shards."""
    leaf_groups: dict[tuple[tuple[str, ...], bool, str, str], list[Leaf]] = {}
    for leaf in leaves:
        packing_name = f".{leaf.packing.name}_{leaf.packing.block}" if leaf.packing else ""
        group_key = leaf.local, not leaf.trainable, leaf.dtype, packing_name
        leaf_groups.setdefault(group_key, []).append(leaf)
    buffers = []
    # Why sorted: the order of buffers must not depend on that of leaves. Shared leaves come first,
    # and trainable ones before frozen ones.
    for group_key in sorted(leaf_groups):
        local, frozen, dtype, packing_name = group_key
        packing = leaf_groups[group_key][0].packing
        leaf_specs: list[LeafSpec] = []
        offset = 0
        for leaf in leaf_groups[group_key]:
            leaf_shape = leaf.shape
            if packing is not None:
                leaf_shape = (packing.bytes_of(math.prod(leaf.shape)),)
            leaf_spec = LeafSpec(
                path=leaf.paths[0],
                shape=leaf_shape,
                offset=offset,
                index=leaf.leaf_index,
                aliases=leaf.paths[1:],
                cuts=leaf.cuts,
                placements=leaf.placements,
                unpacked=leaf.shape if packing else None,
            )
            leaf_specs.append(leaf_spec)
            offset += leaf_spec.numel
        local_name = ".local" if local == AXES else f".local_{'_'.join(local)}"
        buffer = BufferPlan(
            # Note: plans on disk hold these keys, and fingerprints depend on them, so they may not
            # change.
            key=f"{dtype}{'.frozen' * frozen}{local_name * bool(local)}{packing_name}",
            dtype=dtype if packing is None else "uint8",
            trainable=not frozen,
            leaves=tuple(leaf_specs),
            shards=1,
            local=local,
            packing=packing,
        )
        buffers.append(buffer)
    return tuple(buffers)


# --- the structure of a unit ----------------------------------------------------------------------


def nodes_by_path(
    structure: tree.Structure, paths: Iterable[str]
) -> dict[str, list[tree.Structure]]:
    """Return the nodes at some paths: several if keys have dots, or are one text, as 1 and "1"."""
    # Why only these: a tree has far more nodes than units.
    paths_above = {
        node for path in paths for node in tree.upwards(path.rpartition(".")[0]) if path
    }
    nodes_at: dict[str, list[tree.Structure]] = {}
    paths_and_nodes = [("", structure)]
    for node_path, node in paths_and_nodes:
        nodes_at.setdefault(node_path, []).append(node)
        if node_path not in paths_above or not isinstance(node, tuple):
            continue
        kind, meta, children = node
        keys = meta if kind in _DICTS else range(len(children))
        if kind == "custom":
            keys = tree.entries_of(node)
        for key, child in zip(map(str, keys), children, strict=True):
            # A key with dots is a path of nested dictionaries, each of which has one key.
            first_key, dot, later_keys = key.partition(".")
            inner_node = ("dict", (later_keys,), (child,)) if dot else child
            paths_and_nodes.append(
                (f"{node_path}.{first_key}".removeprefix("."), inner_node)
            )
    return nodes_at


def cut_out(
    nodes_at: Mapping[str, Sequence[tree.Structure]], path: str, keep: Mapping[int, int]
) -> tree.Structure:
    """Return the part of a structure under a path.

    Arguments:
        nodes_at: the nodes of the structure by path.
        path: the path.
        keep: numbers of leaves in the part by those in the whole tree. Other leaves become
            ``None``, or their keys with dots are left out.
    """
    containers = [node for node in nodes_at.get(path, ()) if node is not None]
    # The usual case: one node, which is taken as it is.
    if len(containers) < 2:
        return _prune(containers[0] if containers else None, keep)
    if not all(isinstance(node, tuple) and node[0] in _DICTS for node in containers):
        raise ValueError(
            "a tree that mixes nested containers and dotted keys under one path can be cut there "
            f"only if all of them are dictionaries; found another node at {path!r}: nest the whole "
            "tree, or flatten it"
        )
    all_keys = [key for _, meta, _ in containers for key in meta]
    all_children = [child for *_, children in containers for child in children]
    return _prune(("dict", tuple(all_keys), tuple(all_children)), keep)


def _prune(structure: tree.Structure, keep: Mapping[int, int]) -> tree.Structure:
    """Renumber the leaves in ``keep`` and remove all others."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return keep.get(structure)
    node_kind, meta, children = structure
    pruned_children = []
    for (
        child
    ) in children:  # a comprehension would take a second frame of Python's bounded stack
        pruned_children.append(_prune(child, keep))
    if node_kind in _DICTS and any("." in str(key) for key in meta):
        pairs = zip(meta, pruned_children, strict=True)
        kept_children = {key: child for key, child in pairs if child is not None}
        meta, pruned_children = tuple(kept_children), list(kept_children.values())
    return (node_kind, meta, tuple(pruned_children))
