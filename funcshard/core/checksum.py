"""Checksums of full leaves, by which ranks find out that they hold different values.

A function that cuts shards out of full leaves takes the leaves that each rank passes. If ranks
built their models from different random numbers, the shards would belong to different models, and
no collective would notice. So such a function feeds a ``LeafChecksums`` with every leaf. Ranks then
compare a hash of a few numbers, in a message that does not grow with the number of ranks. They
exchange the checksum of each leaf only if these numbers differ, or if a rank has a fault. Only
numbers of leaves that are local along an axis are gathered, because ranks may hold others there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils import tree
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core.checks import raise_on_every_rank
from funcshard.plan import AXES, LeafSpec, position_of

# A block of 8-byte words is a matrix of this shape. Its rows are added up, and only their sum is
# multiplied by weights: torch adds integers at the speed of memory, and multiplies them at half of
# it. Why a prime number of columns: rows of a leaf that change places then stand in other columns.
_ROWS, _COLUMNS = 16, 2039

# Number of blocks that are read, or copied into new memory, at a time.
_PIECE = 16


@dataclass(frozen=True, slots=True)
class LeafChecksums:
    """The checksums of the full leaves that this rank passes to one function.

    Attributes:
        mesh: the ranks. If there is only one, nothing is computed.
        what: a name for the tree of leaves, for the error.
        remedy: what to do for leaves that differ, for the error.
        found: the local axes and the checksum of each leaf that ranks share, by name.
        weights: the weights of checksums, by device.
    """

    mesh: Mesh
    what: str
    remedy: str
    found: dict[str, tuple[tuple[str, ...], torch.Tensor]] = field(default_factory=dict)
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
            self.found[name] = (local, checksum(values, self.weights[values.device]))

    def start(self, fault: Exception | None = None) -> Comparison:
        """Start to compute what ranks compare; every rank has to call this, and then ``finish``.

        Arguments:
            fault: the error of this rank, if it has one. ``finish`` then raises on every rank.
        """
        # Why not meta: checksums have values even on a mesh that stands for an accelerator.
        device = torch.device("cpu") if self.mesh.device.type == "meta" else self.mesh.device
        if self.mesh.world_size == 1:
            return Comparison(self, fault, torch.empty(0, dtype=torch.float32, device="cpu"))
        numbers = [torch.tensor(int(fault is not None), device=device)]
        for axes in self.classes:
            device_sums = [
                value.to(device)
                for _, (local, value) in sorted(self.found.items())
                if local == axes
            ]
            numbers.append(
                checksum(torch.stack(device_sums))
                if device_sums
                else torch.zeros((), dtype=torch.int64, device=device)
            )
        return Comparison(self, fault, torch.stack(numbers))

    @property
    def classes(self) -> list[tuple[str, ...]]:
        """The axes along which a compared leaf may be local: some of the mesh's, but not all."""
        axes = [axis for axis, _ in self.mesh.axes]
        return [
            chosen for count in range(len(axes)) for chosen in itertools.combinations(axes, count)
        ]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A comparison of checksums that has been started.

    Attributes:
        checksums: the checksums of this rank.
        fault: the error of this rank, if it has one.
        message: whether there is a fault, and one checksum for each class of leaves.
    """

    checksums: LeafChecksums
    fault: Exception | None
    message: torch.Tensor

    def finish(self) -> None:
        """Wait for the other ranks.

        Raises:
            ValueError: ranks hold different values of a leaf that they share. Every rank raises.
            Exception: the fault that was passed to ``start``. If only other ranks have a fault,
                this rank raises the first of those.
        """
        mesh = self.checksums.mesh
        if mesh.world_size == 1:
            raise_on_every_rank(mesh, self.fault)
            return
        own_sums = list(map(int, self.message))
        texts = all_gather_texts(mesh, json.dumps(own_sums), "checksums")
        if len(set(texts)) == 1 and not own_sums[0]:
            return
        # Every rank has the same texts, so from here on every rank does the same.
        faulty, *columns = zip(*map(json.loads, texts), strict=True)
        if any(faulty):
            raise_on_every_rank(mesh, self.fault)
        sums = dict(zip(self.checksums.classes, columns, strict=True))
        if any(
            len({axis_sums[rank] for rank in ranks}) > 1
            for axes, axis_sums in sums.items()
            for ranks in _sharing(axes, mesh)
        ):
            _raise_difference(self.checksums)


def _raise_difference(checksums: LeafChecksums) -> None:
    """Exchange the checksum of every leaf, and raise an error that names the first difference."""
    mesh = checksums.mesh
    own_checksums = {
        name: [local, value.item()] for name, (local, value) in checksums.found.items()
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
    memory does not count. Memory is read once, and no copy of the whole tensor is made.

    Arguments:
        values: a tensor of any dtype, shape, stride and device.
        weights: ``checksum_weights(values.device)``, for callers with many tensors.
    """
    weights = checksum_weights(values.device) if weights is None else weights
    sums = [
        block_sum for words in _words(values.detach()) for block_sum in _block_sums(words, weights)
    ]
    while sum(map(len, sums)) > 1:
        sums = _block_sums(_folded(torch.cat(sums)), weights)
    return sums[0][0] if sums else torch.zeros((), dtype=torch.int64, device=values.device)


def _words(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the bits of a tensor, element by element, as 1-D tensors of 8-byte words.

    All but the last one consist of whole blocks.
    """
    flat, itemsize = _flat(values), values.dtype.itemsize
    step = _PIECE * _ROWS * _COLUMNS * 8 // itemsize
    for low in range(0, values.numel(), step):
        high = min(low + step, values.numel())
        if flat is not None and (high - low) * itemsize % 8 == 0:
            words = flat[low:high].view(torch.int64)
        else:
            words = torch.zeros(
                -(-(high - low) * itemsize // 8), dtype=torch.int64, device=values.device
            )
            _copy_range(
                words.view(torch.uint8)[: (high - low) * itemsize].view(values.dtype),
                values,
                low,
                high,
            )
        # Why wide elements are folded: the sum is taken modulo 2**64, so the upper bits of a word
        # count for little. Of several narrow elements in a word, the lower ones count in full.
        yield _folded(words) if itemsize >= 8 else words


def _flat(values: torch.Tensor) -> torch.Tensor | None:
    """Return a 1-D view of a tensor, if its memory can be read as 8-byte words."""
    if not values.is_contiguous() or values.is_conj() or values.is_neg():
        return None
    flat = values.view(-1)
    aligned = flat.storage_offset() * flat.dtype.itemsize % 8 == 0 and flat.data_ptr() % 8 == 0
    return flat if aligned and flat.stride(0) == 1 else None


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


def _copy_range(out: torch.Tensor, values: torch.Tensor, begin: int, end: int) -> None:
    """Copy elements ``begin : end`` of a raveled tensor, of any strides, into the 1-D ``out``."""
    if values.is_contiguous():
        out.copy_(values.view(-1)[begin:end])
        return
    if values.ndim == 1:
        out.copy_(values[begin:end])
        return
    row = values[0].numel()
    while begin < end:
        index, low = divmod(begin, row)
        rows = (end - begin) // row if low == 0 else 0
        if rows:
            out[: rows * row].view(rows, *values.shape[1:]).copy_(values[index : index + rows])
            done = rows * row
        else:
            done = min(row - low, end - begin)
            _copy_range(out[:done], values[index], low, low + done)
        begin, out = begin + done, out[done:]


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
