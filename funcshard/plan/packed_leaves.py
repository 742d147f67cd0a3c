"""Frozen leaves that are stored packed: the option ``storage`` of ``make_plan``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from funcshard._utils import tree
from funcshard._utils.tensors import dtype_of
from funcshard.plan.globs import last_match
from funcshard.plan.leaves import Leaf
from funcshard.plan.storage import Encode, Packing, Storage, built_in

StorageByGlob = Mapping[str, Storage | tuple[Encode, Any] | None]


def with_packing(leaves: list[Leaf], storage: Any) -> list[Leaf]:
    """Return the leaves with the packing of those that ``storage`` matches.

    Raises:
        TypeError: ``storage`` maps no globs to pairs of functions.
        ValueError: an entry matches no frozen floating-point leaf, a leaf is a slice of a larger
            tensor, or two pairs have one name.
    """
    storages = read_storages(storage)
    if not storages:
        return leaves
    packings: dict[tuple[Storage, str], Packing] = {}
    packed_leaves, used_globs = [], set()
    for leaf in leaves:
        is_frozen = not leaf.trainable and dtype_of(leaf.dtype).is_floating_point
        leaf_nodes = {node for path in leaf.paths for node in tree.upwards(path)}
        glob = last_match(storages, leaf_nodes) if is_frozen else None
        leaf_storage = storages.get(glob or "")
        if leaf_storage is None:
            packed_leaves.append(leaf)
            continue
        if leaf.cuts or leaf.placements:
            raise ValueError(
                f"leaf {leaf.paths[0]!r} is a slice of a larger tensor, whose blocks would not be "
                f"those of the slices; found storage {glob!r}: leave it out, as in {{..., "
                f"{leaf.paths[0]!r}: None}}"
            )
        used_globs.add(glob)
        packing_key = leaf_storage, leaf.dtype
        if packing_key not in packings:
            packings[packing_key] = Packing.of(*packing_key)
        packed_leaves.append(leaf._replace(packing=packings[packing_key]))
    for glob, glob_storage in storages.items():
        if glob_storage is not None and glob not in used_globs:
            raise ValueError(
                f"storage {glob!r} must match frozen floating-point leaves that no other entry "
                "takes; found none: call requires_grad_(False) on the module before "
                "make_functional, or leave the entry out"
            )
    return packed_leaves


def read_storages(storage: Any) -> dict[str, Storage | None]:
    """Return the option ``storage`` with a ``Storage`` for each pair."""
    if storage is None:
        return {}
    if not isinstance(storage, Mapping):
        raise TypeError(
            "storage must map paths or globs to pairs of functions, as in {'base': fs.nf4()}; "
            f"found {storage!r}"
        )
    storages = {glob: _read_storage(glob, value) for glob, value in storage.items()}
    by_name: dict[tuple[str, int], Storage] = {}
    for glob_storage in filter(None, storages.values()):
        other = by_name.setdefault((glob_storage.name, glob_storage.block), glob_storage)
        if other != glob_storage:
            raise ValueError(
                f"two pairs of storage have the name {other.name!r} and blocks of {other.block} "
                "elements, and plans tell them apart by these: pass fs.Storage(..., name=...)"
            )
    return storages


def _read_storage(glob: Any, value: Any) -> Storage | None:
    if value is None:
        return None
    if isinstance(value, tuple) and len(value) == 2:
        value = Storage(*value)
    if not isinstance(value, Storage):
        raise TypeError(
            f"storage[{glob!r}] must be a pair (encode, decode) of functions, an fs.Storage, or "
            f"None; found {value!r}: pass fs.nf4(), for example"
        )
    if value.name in built_in and value != built_in[value.name](value.block):
        raise ValueError(
            f"storage[{glob!r}] has the name {value.name!r} of a storage of the library; found "
            "other functions: pass another name, as in fs.Storage(..., name=...)"
        )
    return value


def storages_by_name(storage: Any) -> dict[tuple[str, int], Storage]:
    """Return the pairs of the option ``storage`` by name and block, as plans name them."""
    pairs: Iterable[Storage] = filter(None, read_storages(storage).values())
    return {(pair.name, pair.block): pair for pair in pairs}
