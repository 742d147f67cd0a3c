"""Collectives that several units share: one buffer of each travels as one, and is taken apart again on arrival.

Small collectives take as long as their start. Only what travels is put together: each unit keeps a shard, and gets a
gathered buffer and a gradient, of its own. Sums are taken element by element, on most backends in the order of ranks, so
that sharing a collective changes no bit there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard.transfer import Gathering, Link, Pending, start_gather, start_reduce

__all__ = ["Joint", "Reduction", "Source", "joined", "start_gathers"]

_MOST = 64  # links to keep

# What is gathered of one buffer of a unit: this rank's shard, and its link; None where there is nothing to do.
Source = tuple[torch.Tensor, Link] | None


class Joint:
    """One buffer of several units, whose collectives may be one.

    Arguments:
        links: those of the buffer in each unit, in the order of units; they are alike but for the unit.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._link = links[0]
        self._order = {str(link.unit): position for position, link in enumerate(links)}
        self._links: dict[tuple[str, ...], Link] = {}

    def link(self, units: Sequence[str]) -> Link:
        """The link of what travels for some of the units."""
        key = tuple(units)
        if key not in self._links:
            if len(self._links) >= _MOST:  # a model that uses other units in every call
                self._links.clear()
            label = f"buffer {self._link.buffer!r} of units {' + '.join(map(repr, key))}"
            self._links[key] = dataclasses.replace(self._link, unit=" + ".join(key), label=label, joint=None)
        return self._links[key]

    def start_gather(self, shards: Sequence[tuple[str, torch.Tensor]]) -> list[Gathering]:
        """Start to gather ``(unit, shard [n])`` of several units in one collective."""
        link = self.link([unit for unit, _ in shards])
        whole = start_gather(torch.cat([shard for _, shard in shards]), link, read_only=True)
        sizes = [shard.numel() for _, shard in shards]
        together = _Together(whole, sizes)
        ranks = link.mesh.shard.size
        return [Gathering(_Own(together, number), link, ranks * numel) for number, numel in enumerate(sizes)]

    def start_reduce(self, fulls: Sequence[tuple[str, torch.Tensor]]) -> Reduction:
        """Start to add up ``(unit, full [n * ranks])`` of several units over ranks, in one collective."""
        # in the order of units, whichever came first
        order = sorted(range(len(fulls)), key=lambda i: self._order[fulls[i][0]])
        link = self.link([fulls[i][0] for i in order])
        ranks = link.mesh.shard.size if link.cut else 1
        rows = [fulls[i][1].view(ranks, -1) for i in order]
        # rank by rank, so that what a rank receives is its slice of each
        whole = torch.cat(rows, dim=1).view(-1)
        return Reduction(start_reduce(whole, link, donated=True), order, [row.shape[1] for row in rows])


class _Together:
    """A joint gathering under way, and what it is taken apart into: a buffer for each unit, in memory of its own."""

    def __init__(self, whole: Gathering, sizes: list[int]) -> None:
        self._whole: Gathering | None = whole
        self._sizes = sizes
        self._buffers: list[torch.Tensor | None] = []

    def take(self, number: int) -> torch.Tensor:
        """Wait, and hand over one unit's buffer."""
        if self._whole is not None:
            group = self._whole.link.mesh.shard
            rows = self._whole.finish().view(group.size, -1)
            with torch.inference_mode(False):  # the others' may be taken in another mode than this one
                buffers = [group.empty(group.size * numel, rows) for numel in self._sizes]
                parts = [buffer.view(group.size, numel) for buffer, numel in zip(buffers, self._sizes, strict=True)]
                torch.split_with_sizes_copy(rows, self._sizes, dim=1, out=parts)
            self._buffers = [*buffers]
            self._whole = None
        found, self._buffers[number] = self._buffers[number], None
        assert found is not None, f"buffer {number} of a joint gathering was taken twice"
        return found


@dataclass(slots=True, eq=False)
class _Own:
    """One unit's part of a joint gathering, as ``Gathered``."""

    together: _Together
    number: int
    out: torch.Tensor | None = None

    def wait(self) -> torch.Tensor:
        if self.out is None:
            self.out = self.together.take(self.number)
        return self.out


@dataclass(frozen=True, slots=True)
class Reduction:
    """A joint reduction under way; ``finish`` waits and returns this rank's slice of each sum, in the order given."""

    pending: Pending
    order: list[int]
    sizes: list[int]

    def settle(self) -> None:
        """Wait for what travels first."""
        self.pending.settle()

    def finish(self) -> list[torch.Tensor]:
        """Wait, and take the slices apart, into memory of their own."""
        parts: Any = torch.split_with_sizes_copy(self.pending.finish(), self.sizes)  # type: ignore[func-returns-value]
        given = dict(zip(self.order, parts, strict=True))
        return [given[i] for i in range(len(given))]


def start_gathers(units: Sequence[Sequence[Source]]) -> list[list[Gathering | None]]:
    """Start to gather all buffers of one or several units, those of several buffer by buffer in shared collectives.

    What is gathered is only to be read.

    Arguments:
        units: the sources of each unit's buffers; units that are given together are of one run.
    """
    columns = [_start_column(sources) for sources in zip(*units, strict=True)]
    return [list(row) for row in zip(*columns, strict=True)]


def _start_column(sources: Sequence[Source]) -> list[Gathering | None]:
    found = [source for source in sources if source is not None]
    joint = found[0][1].joint if len(found) > 1 and found[0][1].cut else None
    if isinstance(joint, Joint):
        return [*joint.start_gather([(str(link.unit), shard) for shard, link in found])]
    return [source and start_gather(*source, read_only=True) for source in sources]


def joined(links: Mapping[str, Sequence[Link]]) -> dict[str, tuple[Link, ...]]:
    """Return the links of a run of units so that they share their collectives, where there are any."""
    shared: dict[str, list[Link]] = {unit: [] for unit in links}
    for column in zip(*links.values(), strict=True):
        joint = Joint(column) if column[0].cut or column[0].repeated else None
        for own, link in zip(shared.values(), column, strict=True):
            own.append(dataclasses.replace(link, joint=joint))
    return {unit: tuple(own) for unit, own in shared.items()}
