"""Checksums of full leaves, by which ranks find out that they hold different values.

If ranks built their models from different random numbers, their shards would belong to different
models, and no collective would notice. So a function that cuts shards out of full leaves feeds a
``LeafChecksums`` with every leaf, and ranks compare a hash of a few numbers. They exchange the
checksums of leaves only if these differ.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.options import some
from funcshard._utils.tensors import byte_view
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core.checks import raise_on_every_rank
from funcshard.plan import AXES, LeafSpec, position_of

# A block of 8-byte words has this shape. Its rows are added up, and only their sum is multiplied by
# weights: torch adds integers at the speed of memory, and multiplies them at half of it. Why a
# prime number of columns: rows of a leaf that change places then land in other columns.
_ROWS, _COLUMNS = 64, 2039


@dataclass(frozen=True, slots=True)
class LeafChecksums:
    """The checksums of the full leaves that this rank passes to a function.

    Attributes:
        mesh: the ranks.
        what: a name for the tree of leaves, for the error.
        remedy: what to do about leaves that differ, for the error.
        leaf_sums: local axes and checksum of each leaf that ranks share, by name.
    """

    mesh: Mesh
    what: str
    remedy: str
    leaf_sums: dict[str, tuple[tuple[str, ...], torch.Tensor]] = field(default_factory=dict)

    def add(self, name: str, values: torch.Tensor, local: tuple[str, ...] = ()) -> None:
        """Add, or replace, the checksum of one leaf.

        Arguments:
            name: path of the leaf.
            values: the leaf, of any dtype and stride.
            local: mesh axes along which ranks may hold different values.
        """
        local = tuple(axis for axis, _ in self.mesh.axes if axis in local)
        if len(local) < len(self.mesh.axes):
            self.leaf_sums[name] = (local, checksum(values))

    def compare(self, fault: Exception | None = None) -> None:
        """Compare the checksums of all ranks; every rank has to call this.

        Arguments:
            fault: the error of this rank, if it has one.

        Raises:
            ValueError: ranks hold different values of a leaf that they share. Every rank raises.
            Exception: ``fault``, or else that of another rank.
        """
        mesh = self.mesh
        raise_on_every_rank(mesh, fault)
        if mesh.world_size == 1:
            return
        # Why not meta: checksums have values even on a mesh that stands for an accelerator.
        device = torch.device("cpu") if mesh.device.type == "meta" else mesh.device
        values_by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
        for _, (local, value) in sorted(self.leaf_sums.items()):
            values_by_axes.setdefault(local, []).append(value.to(device))
        # Why one sum for each set of axes: ranks may hold other values of leaves that are local
        # along them, and the message stays short for any number of ranks and leaves.
        sums_by_axes: dict[str, tuple[Sequence[str], int]] = {}
        for axes, values in values_by_axes.items():
            sums_by_axes[" ".join(axes)] = axes, int(checksum(torch.stack(values)))
        # Every rank finds the same differences, so every rank does the same.
        if _differences(sums_by_axes, mesh):
            own_sums = {
                name: (axes, int(value)) for name, (axes, value) in self.leaf_sums.items()
            }
            leaf_differences = _differences(own_sums, mesh)
            if leaf_differences:
                self._raise_first(leaf_differences)

    def _raise_first(self, differences: _Differences) -> None:
        leaf_name = min(differences, key=tree.natural_key)
        local_axes, sharing_group, equal_groups = differences[leaf_name]
        sharing_ranks = "every rank"
        if len(sharing_group) < self.mesh.world_size:
            sharing_ranks = f"{_named(sharing_group)}, which share it"
        ranks_text = "; ".join(
            [*map(_named, equal_groups[:4]), *["…"] * (len(equal_groups) > 4)]
        )
        remedy = self.remedy
        for axis, _ in self.mesh.axes:
            if axis not in (*AXES, *local_axes):
                remedy += f", or make_plan(local={{{leaf_name!r}: {axis!r}}}) if it differs along {axis!r}"
                break
        raise ValueError(
            f"leaf {leaf_name!r} of {self.what} must have the same values on {sharing_ranks}; "
            f"found {len(equal_groups)} different ones, on {ranks_text} ({len(differences)} of "
            f"{len(self.leaf_sums)} leaves differ): {remedy}"
        )


@contextlib.contextmanager
def on_every_rank(mesh: Mesh, checksums: LeafChecksums | None = None) -> Iterator[None]:
    """Run the body of ``with`` on each rank; if one raises, all do.

    The body must not communicate, because ranks with an error don't.

    Arguments:
        checksums: checksums to compare at the end of the body.
    """
    fault: Exception | None = None
    try:
        yield
    except Exception as error:  # of any kind, because other ranks wait
        fault = error
    if checksums is None:
        raise_on_every_rank(mesh, fault)
    else:
        checksums.compare(fault)


# The local axes and the checksum of each leaf, or of all leaves with the same local axes, by name.
_Sums = Mapping[str, tuple[Sequence[str], int]]

# What differs between ranks that share it, by name: its local axes, the first set of ranks that
# should hold the same values, and the parts of the set that do.
_Differences = dict[str, tuple[Sequence[str], list[int], list[list[int]]]]


def _differences(own_sums: _Sums, mesh: Mesh) -> _Differences:
    """Return what differs between the ranks that share it, given what this rank has."""
    own_text = json.dumps(own_sums, sort_keys=True)
    rank_texts = all_gather_texts(mesh, own_text, "checksums")
    leaf_differences: _Differences = {}
    if len(set(rank_texts)) == 1:
        return leaf_differences
    rank_sums = [json.loads(text) for text in rank_texts]
    local_axes = {
        leaf_name: local for sums in rank_sums for leaf_name, (local, _) in sums.items()
    }
    for leaf_name, local in local_axes.items():
        sharing_ranks: dict[tuple[int, ...], list[int]] = {}
        for rank in range(mesh.world_size):
            position = position_of(rank, mesh.shape)
            sharing_ranks.setdefault(tuple(position[axis] for axis in local), []).append(
                rank
            )
        for ranks in sharing_ranks.values():
            # Ranks that hold the same values are one group.
            ranks_by_value: dict[int, list[int]] = {}
            for rank in ranks:
                # Note: a rank that lacks the name may have pieces of the leaf, and is not compared.
                if leaf_name in rank_sums[rank]:
                    ranks_by_value.setdefault(rank_sums[rank][leaf_name][1], []).append(
                        rank
                    )
            if len(ranks_by_value) > 1:
                leaf_differences.setdefault(
                    leaf_name, (local, ranks, list(ranks_by_value.values()))
                )
    return leaf_differences


def check_tie(spec: LeafSpec, by_path: Mapping[str, Any], where: str) -> None:
    """Raise ``ValueError`` if a tied leaf has different values under several of its paths.

    Arguments:
        spec: the leaf's entry in the plan.
        by_path: full leaves by path; other entries are not compared.
        where: a name for the tree that holds the leaves, for the error.
    """
    first_path, first = "", None  # type: tuple[str, torch.Tensor | None]
    for path in spec.names:
        value = by_path.get(path)
        # Why hasattr: it tells a DTensor without importing torch.distributed.tensor.
        is_full = isinstance(value, torch.Tensor) and not hasattr(value, "full_tensor")
        if value is None or not is_full or value.is_meta:
            continue
        if first is None:
            first_path, first = path, value
        elif (first.shape, first.dtype) != (value.shape, value.dtype) or not torch.equal(
            byte_view(first), byte_view(value)
        ):
            raise ValueError(
                f"{first_path!r} and {path!r} of {where} are one leaf under the plan, because they "
                "were tied when it was made; found different values under them: tie them, or make "
                "a new plan"
            )


def checksum(values: torch.Tensor) -> torch.Tensor:
    """Return an int64 that depends on all bits of a tensor and on the order of its elements.

    NaN equals NaN, 0.0 differs from -0.0, and neither strides nor the device count.
    """
    weights, row_bytes = _weights(_COLUMNS, values.device), 8 * _COLUMNS
    block_sums = []
    for block in byte_view(values).split(row_bytes * _ROWS):
        # Note: the copy ends in zeros, and begins where words may begin.
        if len(block) % row_bytes or block.data_ptr() % 8 or block.storage_offset() % 8:
            block = torch.nn.functional.pad(block, (0, -len(block) % row_bytes))
        words = block.view(torch.int64).view(len(block) // row_bytes, _COLUMNS)
        # Why wide elements are folded: the sum is taken modulo 2**64, so the upper bits of a word
        # count for little. Of several narrow elements in a word, the lower ones count in full.
        if values.dtype.itemsize >= 8:
            words = words ^ (words >> 32)
        block_sums.append((words.sum(0) * weights).sum())
    weights, words = _weights(len(block_sums), values.device), torch.stack(block_sums)
    return ((words ^ (words >> 32)) * weights).sum()


def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return odd numbers without a pattern."""
    words = torch.arange(1, count + 1, device=device) * -7046029254386353131
    words = (words ^ (words >> 29)) * -4658895280553007687
    # Why odd: a change of one word then always changes the sum, modulo 2**64.
    return (words ^ (words >> 32)) | 1


def _named(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {some(ranks)}"
