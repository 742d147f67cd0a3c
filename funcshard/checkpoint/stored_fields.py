"""The parts of a checkpoint's text files from the data of their JSON, each checked before its use.

A checksum tells a damaged file. It does not tell a file that was made to do harm, or one of another
program, so the types, the ranges and the sizes of all parts are checked as well. Each function
raises a ``ValueError`` that names the part, and its caller adds the file.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from funcshard._utils import decode, file_data, tree
from funcshard.checkpoint.dcp_files import Region
from funcshard.checkpoint.metadata import Plans, TensorMetadata, TreeSpec, by_entry, local_axes
from funcshard.plan import LeafCut, check_cuts, dtype_of

_FORMS = ("every unit", "some units", "list", "tuple")
_NO_CONTAINERS = ("value", "tensor", "rank", "shards")
_KINDS = ("sharded", "whole", "rank", "local")
_LONGEST_SHAPE = 64  # torch's kernels take no more dimensions


def items_from(
    data: Any, axes: Mapping[str, int], rank: int | None = None
) -> dict[str, TensorMetadata]:
    """Return the metadata of tensors by name.

    Arguments:
        data: the data, of any version of the library.
        axes: size of each axis of the mesh that saved them.
        rank: the rank that alone holds these tensors; ``None`` for the tensors of the index.
    """
    return {
        name: _item_from(name, fields, axes, rank)
        for name, fields in file_data.table("items", data).items()
    }


def _item_from(name: str, data: Any, axes: Mapping[str, int], rank: int | None) -> TensorMetadata:
    fields = file_data.listed("a tensor", data)
    shape, dtype, tensor_kind, on_mesh, label, cuts = (
        fields if len(fields) == 6 else [*file_data.listed("a tensor", data, 5), []]
    )
    sizes = file_data.numbers(f"the shape of {name!r}", shape)
    if len(sizes) > _LONGEST_SHAPE:
        raise ValueError(
            f"the shape of {name!r} must have at most {_LONGEST_SHAPE} dimensions; found "
            f"{len(sizes)}"
        )
    word, *along = file_data.text(f"the kind of {name!r}", tensor_kind).split(" ")
    is_known = (
        word in _KINDS
        and {*along} <= axes.keys()
        and len({*along}) == len(along)
        and (word == "local" or not along)
    )
    if not is_known or (rank is not None and word != "rank"):
        raise ValueError(
            f"the kind of {name!r} must be {', '.join(_KINDS)} along axes; found "
            f"{file_data.shown(tensor_kind)}"
        )
    if word == "rank":  # the tensors of one rank are stored as name@rank
        owner_text = name.rpartition("@")[2]
        owner = int(owner_text) if owner_text.isdecimal() and len(owner_text) < 12 else -1
        if owner != rank if rank is not None else not 0 <= owner < math.prod(axes.values()):
            raise ValueError(
                f"a tensor of one rank must be named after it, as in 'name@0'; found {name!r}"
            )
    dtype_of(file_data.text(f"the dtype of {name!r}", dtype))
    own_axes = dict.fromkeys(local_axes(tensor_kind))
    leaf_cuts = decode(tuple[LeafCut, ...], cuts, f"the cuts of {name!r}")
    check_cuts(leaf_cuts, sizes, {axis: size for axis, size in axes.items() if axis in own_axes})
    return TensorMetadata(
        sizes,
        dtype,
        tensor_kind,
        file_data.flag(f"the place of {name!r}", on_mesh),
        file_data.text(f"the label of {name!r}", label),
        leaf_cuts,
    )


def regions_from(
    data: Any, file: str, size: int, items: Mapping[str, TensorMetadata]
) -> dict[str, list[Region]]:
    """Return the boxes in a rank's file, by name of the tensor.

    Arguments:
        data: the data: for each box its name, its begin, offsets, sizes, offset, length, checksum.
        file: the name of the file.
        size: bytes of the file.
        items: metadata of the tensors of all ranks and of this one, by name.
    """
    regions_by_name: dict[str, list[Region]] = {}
    for fields in file_data.listed("regions", data):
        name, *region_fields = file_data.listed("a region", fields, 7)
        region = _region_from(name, region_fields, file, size, items)
        regions_by_name.setdefault(name, []).append(region)
    return regions_by_name


def old_region_from(
    data: Any, files: Mapping[str, int], items: Mapping[str, TensorMetadata]
) -> Region:
    """Return a box of the index of a checkpoint of the first versions, which has the file too."""
    name, begin, offsets, sizes, file, *region_fields = file_data.listed("a region", data, 8)
    if file_data.text("the file of a region", file) not in files:
        raise ValueError(
            f"it says that {name!r} lies in {file!r}, which is not one of the checkpoint's files"
        )
    return _region_from(name, [begin, offsets, sizes, *region_fields], file, files[file], items)


def _region_from(
    name: Any, data: list[Any], file: str, size: int, items: Mapping[str, TensorMetadata]
) -> Region:
    stored = items.get(file_data.text("the name of a region", name)) or items.get(
        name.rpartition("@")[0]
    )
    if stored is None:
        raise ValueError(
            f"a region must be of a tensor of the checkpoint; found {file_data.shown(name)}"
        )
    begin, offsets, sizes, offset, length, checksum = data
    where = f"a region of {name!r}"
    low, extent = file_data.numbers(where, offsets), file_data.numbers(where, sizes)
    region = Region(
        name, file_data.whole(where, begin), low, extent, file,
        file_data.whole(where, offset, 0, size), file_data.whole(where, length),
        file_data.whole(where, checksum, 0, 2**32 - 1),
    )  # fmt: skip
    inside = len(low) == len(extent) == len(stored.shape) and all(
        first + count <= dim_size
        for first, count, dim_size in zip(low, extent, stored.shape, strict=True)
    )
    if not inside or begin + region.numel > stored.numel or begin != _place(low, stored.shape):
        raise ValueError(
            f"{where} must lie inside of its shape {stored.shape}; found {region.numel} elements "
            f"at {begin}, the box of sizes {extent} at {low}"
        )
    if offset + length > size or region.numel * dtype_of(stored.dtype).itemsize > length:
        raise ValueError(
            f"{where} must lie inside of {file}, which has {size} bytes; found {length} bytes at "
            f"{offset} for {region.numel} elements of {stored.dtype}"
        )
    return region


def _place(offsets: tuple[int, ...], shape: tuple[int, ...]) -> int:
    """Return the index of an element in the raveled tensor."""
    return sum(offset * math.prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


def sizes_from(data: Any) -> dict[str, int]:
    """Return the size of each file by name."""
    files = file_data.table("files", data)
    return {name: file_data.whole(f"the size of {name!r}", size) for name, size in files.items()}


def check_outline(
    spec: TreeSpec,
    items: Mapping[str, TensorMetadata],
    plans: Plans | None,
    per_rank: int | None = None,
) -> None:
    """Raise ``ValueError`` unless data is the tree of a state, or of a ``PerRank`` value.

    Arguments:
        spec: the data.
        items: metadata of the tensors that the tree may name.
        plans: the plans of the state; ``None`` for a ``PerRank`` value.
        per_rank: the number of the ``PerRank`` value that the tree is; it may hold earlier ones.
    """
    kind_outside = "whole" if per_rank is None else "rank"
    most_number = file_data.MOST if per_rank is None else per_rank - 1
    nodes: list[tuple[Any, bool, Collection[str]]] = [(spec, False, ())]
    if isinstance(plans, Mapping):
        _children(*_kind_and_parts(spec))  # because by_entry takes a tree
    if plans is not None:
        nodes = [
            (node, False, {leaf.path for leaf in plan.leaves})
            for _, node, plan in by_entry(spec, plans)
        ]
    while nodes:
        node, in_shards, leaves = nodes.pop()
        if node is None:
            continue
        node_kind, parts = _kind_and_parts(node)
        if node_kind == "value" and len(parts) == 1:
            if type(parts[0]) not in (int, float, bool, str) and not (
                in_shards and parts[0] is None
            ):
                raise ValueError(
                    "a value of the state must be a number or a text; found "
                    f"{file_data.shown(parts[0])}"
                )
        elif node_kind == "tensor" and len(parts) == 1:
            stored = items.get(file_data.text("the name of a tensor", parts[0]))
            if stored is None or not (in_shards or stored.kind == kind_outside):
                raise ValueError(
                    "the state must name tensors of the checkpoint; found "
                    f"{file_data.shown(parts[0])}"
                )
        elif node_kind == "rank" and len(parts) == 1:
            file_data.whole("the number of a PerRank", parts[0], 0, most_number)
        elif node_kind == "shards" and len(parts) == 2 and not in_shards and per_rank is None:
            if parts[0] not in _FORMS:
                raise ValueError(
                    f"a tree of shards must be one of {', '.join(_FORMS)}; found "
                    f"{file_data.shown(parts[0])}"
                )
            for pair in file_data.listed("a tree of shards", parts[1]):
                path, below = file_data.listed("a leaf of shards", pair, 2)
                if file_data.text("the path of a leaf", path) not in leaves:
                    raise ValueError(
                        "a tree of shards must name leaves of the plan; found "
                        f"{file_data.shown(path)}"
                    )
                nodes.append((below, True, ()))
        else:
            nodes += [(child, in_shards, leaves) for child in _children(node_kind, parts)]


def check_held(
    folder: Path,
    items: Mapping[str, TensorMetadata],
    regions: Mapping[str, Sequence[Region]],
    kind: str,
) -> None:
    """Raise ``ValueError`` unless boxes hold every element of the tensors of a kind.

    Call it before memory is taken for them: the sizes of files bound those of boxes.
    """
    for name, stored in items.items():
        if (
            stored.kind == kind
            and (held_numel := sum([region.numel for region in regions.get(name, ())]))
            != stored.numel
        ):
            raise ValueError(
                f"{folder} holds {held_numel} of {stored.numel} needed elements of {name!r}"
            )


def _kind_and_parts(node: Any) -> tuple[Any, list[Any]]:
    node_kind, *parts = file_data.listed("a node of the state", node) or [None]
    return node_kind, parts


def _children(kind: Any, parts: list[Any]) -> list[Any]:
    """Return the children of a container, of any kind, after a look at its keys."""
    if len(parts) != 3 or type(kind) is not str or kind in _NO_CONTAINERS:
        raise ValueError(
            "a node of the state must be a value, a tensor or a container; found "
            f"{file_data.shown(kind)}"
        )
    fields, meta, children = parts
    try:
        hash(tree.freeze(meta))
    except TypeError:
        raise ValueError(
            f"the keys or the data of a {kind} must be texts, numbers or lists; found an object"
        ) from None
    children = file_data.listed(f"the children of a {kind}", children)
    if fields is not None and len(file_data.texts(f"the fields of a {kind}", fields)) != len(
        children
    ):
        raise ValueError(
            f"a {kind} must have a field for each of its {len(children)} children; found "
            f"{len(fields)}"
        )
    if kind in ("dict", "ordered_dict"):
        keys = file_data.listed("the keys of a dictionary", meta, len(children))
        if not all(type(key) in (str, int) for key in keys) or len({*keys}) < len(keys):
            raise ValueError(
                "the keys of a dictionary must be different texts and numbers; found "
                f"{file_data.shown(keys)}"
            )
    if kind == "namedtuple" and (type(meta) is not str or fields is None):
        raise ValueError(
            f"a namedtuple must have a class and fields; found {file_data.shown(meta)}"
        )
    if kind == "custom" and not (type(meta) is list and len(meta) == 2 and type(meta[0]) is str):
        raise ValueError(
            f"a custom node must have a class and its data; found {file_data.shown(meta)}"
        )
    return children
