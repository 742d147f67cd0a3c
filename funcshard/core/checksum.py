"""Checksums of full leaves, by which ranks find out that they hold different values.

A function that cuts shards out of full leaves takes the leaves that each rank passes. If ranks
built their models from different random numbers, the shards would belong to different models, and
no collective would notice. So such a function feeds a ``LeafChecksums`` with every leaf. Ranks then
compare a hash of a few numbers, in a message that does not grow with the number of ranks. They
exchange the checksum of each leaf only if these numbers differ, or if a rank has a fault. Only
numbers of leaves that are local along an axis are gathered, because ranks may hold others there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils import tree
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core.checks import raise_on_every_rank
from funcshard.plan import AXES, LeafSpec, position_of

# A block of 8-byte words is a matrix of this shape. Its rows are added up, and only their sum is
# multiplied by weights: torch adds integers at the speed of memory, and multiplies them at half of
# it. Why a prime number of columns: rows of a leaf that change places then land in other columns.
_ROWS, _COLUMNS = 16, 2039

_PIECE = 16  # blocks whose words take new memory at a time


@dataclass(frozen=True, slots=True)
class LeafChecksums:
    """The checksums of the full leaves that this rank passes to one function.

    Attributes:
        mesh: the ranks. If there is only one, nothing is computed.
        what: a name for the tree of leaves, for the error.
        remedy: what to do for leaves that differ, for the error.
        leaf_sums: the local axes and the checksum of each leaf that ranks share, by name.
        weights: the weights of checksums, by device.
    """

    mesh: Mesh
    what: str
    remedy: str
    leaf_sums: dict[str, tuple[tuple[str, ...], torch.Tensor]] = field(default_factory=dict)
    weights: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, values: torch.Tensor, local: tuple[str, ...] = ()) -> None:
        """Add the checksum of one leaf.

        Arguments:
            name: path of the leaf; a leaf that was added under this name is replaced.
            values: the leaf, of any dtype and stride.
            local: mesh axes along which ranks may hold different values. A leaf that is local
                along all axes is not compared.
        """
        local = tuple(axis for axis, _ in self.mesh.axes if axis in local)
        if len(local) < len(self.mesh.axes):
            if values.device not in self.weights:
                self.weights[values.device] = checksum_weights(values.device)
            self.leaf_sums[name] = (local, checksum(values, self.weights[values.device]))

    def compare(self, fault: Exception | None = None) -> None:
        """Compare the checksums of all ranks; every rank has to call this.

        Arguments:
            fault: the error of this rank, if it has one.

        Raises:
            ValueError: ranks hold different values of a leaf that they share. Every rank raises.
            Exception: ``fault``. If only other ranks have one, this rank raises the first of those.
        """
        if self.mesh.world_size == 1:
            raise_on_every_rank(self.mesh, fault)
            return
        # Why not meta: checksums have values even on a mesh that stands for an accelerator.
        device = torch.device("cpu") if self.mesh.device.type == "meta" else self.mesh.device
        by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
        for _, (local, value) in sorted(self.leaf_sums.items()):
            by_axes.setdefault(local, []).append(value.to(device))
        axes_sums = {axes: checksum(torch.stack(values)) for axes, values in by_axes.items()}
        own_text = json.dumps([fault is not None, sorted(axes_sums.items())], default=int)
        texts = all_gather_texts(self.mesh, own_text, "checksums")
        if len(set(texts)) == 1 and fault is None:
            return
        # Every rank has the same texts, so from here on every rank does the same.
        faulty, rank_sums = zip(*map(json.loads, texts), strict=True)
        if any(faulty):
            raise_on_every_rank(self.mesh, fault)
        by_rank = [{tuple(axes): value for axes, value in sums} for sums in rank_sums]
        if any(
            len({by_rank[rank].get(axes) for rank in ranks}) > 1
            for axes in set().union(*by_rank)
            for ranks in _sharing(axes, self.mesh)
        ):
            _raise_difference(self)


def _raise_difference(checksums: LeafChecksums) -> None:
    """Exchange the checksum of every leaf, and raise an error that names the first difference."""
    mesh = checksums.mesh
    own_checksums = {
        name: [local, value.item()] for name, (local, value) in checksums.leaf_sums.items()
    }
    everyone = [
        json.loads(checksums_text)
        for checksums_text in all_gather_texts(
            mesh, json.dumps(own_checksums), "checksums of leaves"
        )
    ]
    local_axes = {
        name: local for rank_checksums in everyone for name, (local, _) in rank_checksums.items()
    }
    differing = []
    for name, local in sorted(local_axes.items(), key=lambda item: tree.natural_key(item[0])):
        for ranks in _sharing(local, mesh):
            by_value: dict[int, list[int]] = {}
            for rank in ranks:
                if name in everyone[rank]:  # another rank may have passed pieces of the leaf
                    by_value.setdefault(everyone[rank][name][1], []).append(rank)
            if len(by_value) > 1:
                differing.append((name, ranks, list(by_value.values())))
    if not differing:
        return
    name, ranks, groups = differing[0]
    sharing = "every rank" if len(ranks) == mesh.world_size else f"{_named(ranks)}, which share it"
    ranks_text = "; ".join(map(_named, groups[:4])) + ("; …" if len(groups) > 4 else "")
    cut = [axis for axis, _ in mesh.axes if axis not in (*AXES, *local_axes[name])]
    local_remedy = (
        f", or make_plan(local={{{name!r}: {cut[0]!r}}}) if it differs along {cut[0]!r}"
        if cut
        else ""
    )
    raise ValueError(
        f"leaf {name!r} of {checksums.what} must have the same values on {sharing}; found "
        f"{len(groups)} different ones, on {ranks_text} ({len({differing_sum for differing_sum, *_ in differing})} of "
        f"{len(local_axes)} leaves differ): {checksums.remedy}{local_remedy}"
    )


def check_tie(spec: LeafSpec, by_path: Mapping[str, Any], where: str) -> None:
    """Raise ``ValueError`` if a tied leaf is under several of its paths with different values.

    Arguments:
        spec: the leaf's entry in the plan.
        by_path: full leaves by path; entries that are no full tensors are not compared.
        where: a name for the tree that holds the leaves, for the error.
    """
    # Why hasattr: it tells a DTensor without importing torch.distributed.tensor.
    full = [
        (path, value)
        for path in (spec.path, *spec.aliases)
        if isinstance(value := by_path.get(path), torch.Tensor)
        and not value.is_meta
        and not hasattr(value, "full_tensor")
    ]
    for path, value in full[1:]:
        first, second_path = full[0]
        one_memory = (value.data_ptr(), value.shape, value.stride()) == (
            second_path.data_ptr(),
            second_path.shape,
            second_path.stride(),
        )
        if (value.shape, value.dtype) == (second_path.shape, second_path.dtype) and (
            one_memory or bool(checksum(value) == checksum(second_path))
        ):
            continue
        raise ValueError(
            f"{first!r} and {path!r} of {where} are one leaf under the plan, because they were "
            "tied when it was made; found different values under them: tie them, or make a new "
            "plan"
        )


def checksum_weights(device: torch.device) -> torch.Tensor:
    """Return a weight for each word of a block: odd numbers without a pattern."""
    # Why odd: a change of one word then always changes the sum. Why no pattern: changes of several
    # words then do not cancel out.
    words = torch.arange(1, _ROWS * _COLUMNS + 1, device=device) * -7046029254386353131
    words = (words ^ (words >> 29)) * -4658895280553007687
    return (words ^ (words >> 32)) | 1


def checksum(values: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Return an int64 that depends on all bits of a tensor and on the order of its elements.

    The bits are read as integers, so NaN equals NaN, and 0.0 differs from -0.0. The layout in
    memory does not count. A tensor that is not contiguous is copied first.

    Arguments:
        values: a tensor of any dtype, shape, stride and device.
        weights: ``checksum_weights(values.device)``, for callers with many tensors.
    """
    weights = checksum_weights(values.device) if weights is None else weights
    flat = values.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    offset = flat.storage_offset() * flat.dtype.itemsize
    if flat.stride(0) != 1 or flat.data_ptr() % 8 or offset % 8:
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw = flat.view(torch.uint8)
    whole_bytes = len(raw) // 8 * 8
    last_word = torch.nn.functional.pad(raw[whole_bytes:], (0, -len(raw) % 8)).view(torch.int64)
    sums = []
    for words in (*raw[:whole_bytes].view(torch.int64).split(_PIECE * len(weights)), last_word):
        # Why wide elements are folded: the sum is taken modulo 2**64, so the upper bits of a word
        # count for little. Of several narrow elements in a word, the lower ones count in full.
        sums += _block_sums(_folded(words) if values.dtype.itemsize >= 8 else words, weights)
    while sum(map(len, sums)) > 1:
        sums = _block_sums(_folded(torch.cat(sums)), weights)
    return sums[0][0] if sums else torch.zeros((), dtype=torch.int64, device=values.device)


def _folded(words: torch.Tensor) -> torch.Tensor:
    """Return words whose lower halves depend on the upper halves too."""
    return words ^ (words >> 32)


def _block_sums(words: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
    """Return a number for each block of words, and one for the rest, in 1-D tensors."""
    whole_words = len(words) // len(weights) * len(weights)
    sums = []
    if whole_words:
        columns = words[:whole_words].view(-1, _ROWS, _COLUMNS).sum(1)
        sums.append(_weighted(columns, weights[:_COLUMNS]))
    if whole_words < len(words):
        sums.append(_weighted(words[whole_words:].view(1, -1), weights[: len(words) - whole_words]))
    return sums


def _weighted(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    # Why two ways: a product in memory is slower, but CUDA has no matrix product of integers.
    return torch.mv(rows, weights) if rows.device.type == "cpu" else (rows * weights).sum(1)


def _sharing(local: Iterable[str], mesh: Mesh) -> list[list[int]]:
    """Return the sets of ranks that share a leaf which is local along the axes ``local``."""
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        index = position_of(rank, mesh.shape)
        sets.setdefault(tuple(index[axis] for axis in local), []).append(rank)
    return list(sets.values())


def _named(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (
        f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    )
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
