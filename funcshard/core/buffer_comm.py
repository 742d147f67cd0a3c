"""What travels for one flat buffer, and how: gatherings and reductions on plain tensors, started and finished; no autograd.

Everything runs over a ``Link``: which axes a buffer is cut along and repeated along. A buffer that is repeated along an
axis is one value with several copies: handing it out costs nothing, and the adjoint of handing out copies is to add up
what comes back, so there gathering is the identity and reducing is an all-reduce.

Collectives that several units share: one buffer of each travels as one, and is taken apart again on arrival.

Small collectives take as long as their start. Only what travels is put together: each unit keeps a shard, and gets a
gathered buffer and a gradient, of its own. Sums are taken element by element, on most backends in the order of ranks, so
that sharing a collective changes no bit there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils import is_legacy_batched, recording_graph
from funcshard.comm import DONE, AllGatherWork, Group, Mesh, PrivateAllGatherWork, Work, all_gather_private, concatenate
from funcshard.plan import BufferPlan, Cast, Event, UnitPlan, dtype_name, dtype_of, emit, recording

__all__ = [
    "CommonGathering",
    "Gathering",
    "Joint",
    "Link",
    "Pending",
    "Reduction",
    "Source",
    "UnderWay",
    "joined",
    "start_gather",
    "start_gathers",
    "start_reduce",
    "start_reduce_parts",
    "to_host",
]


@dataclass(frozen=True, slots=True)
class Link:
    """What a buffer's collectives run over, and the name under which they are recorded.

    Attributes:
        mesh: the ranks.
        unit: name of the unit, ``None`` for none.
        buffer: key of the unit's buffer.
        sharded: whether the buffer is cut along the shard axis (``False``: repeated along it).
        local: the mesh axes along which ranks have buffers of their own, which the others do not know.
        offload: whether shards live on the CPU, and what is gathered on the mesh's device.
        dtype: the dtype of shards; it and the next two may be ``None``, where nothing is cast.
        gathered: the dtype that shards are cast to before they are gathered.
        reduced: the dtype that gradients are reduced in.
        keeps: whether reduced gradients stay in that dtype.
        cast: what stands in place of the cast to ``gathered``.
        label: what the buffer's collectives are called in errors; by default after the buffer and the unit.
        joint: what the buffer's collectives may share with those of other units.
        cut: whether there is anything to gather.
        copied: whether what is gathered takes memory of its own, besides the shard's.
        repeated: the axes along which the buffer is repeated on more than one rank.
    """

    mesh: Mesh
    unit: str | None
    buffer: str
    sharded: bool
    local: tuple[str, ...] = ()
    offload: bool = False
    dtype: torch.dtype | None = None
    gathered: torch.dtype | None = None
    reduced: torch.dtype | None = None
    keeps: bool = False
    cast: Cast | None = None
    label: str = field(default="", compare=False)
    joint: Joint | None = field(default=None, compare=False)
    cut: bool = field(init=False, compare=False)
    copied: bool = field(init=False, compare=False)
    repeated: tuple[tuple[str, Group], ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # asked for several times a collective, so worked out once
        cut = self.sharded and "shard" not in self.local and self.mesh.shard.size > 1
        axes = [(name, group) for name, group in self.mesh.axes if name not in self.local]
        if not self.label and self.unit is not None:
            object.__setattr__(self, "label", f"buffer {self.buffer!r} of unit {self.unit or '(root)'!r}")
        object.__setattr__(self, "cut", cut)
        object.__setattr__(self, "copied", cut or self.moved or self.gathered != self.dtype or self.cast is not None)
        object.__setattr__(self, "repeated", tuple(axis for axis in axes if not (self.sharded and axis[0] == "shard")))

    @classmethod
    def of(cls, mesh: Mesh, unit: UnitPlan, buffer: BufferPlan, cast: Cast | None = None) -> Link:
        """The link of one buffer of a unit."""
        keeps = unit.precision is not None and unit.precision.keep_low_precision_grads
        dtypes = (dtype_of(buffer.dtype), unit.gathered_dtype(buffer), unit.reduced_dtype(buffer))
        return cls(mesh, unit.name, buffer.key, unit.sharded, buffer.local, unit.offload, *dtypes, keeps, cast)

    @property
    def moved(self) -> bool:
        """Whether shards and what is gathered of them are on different devices."""
        return self.offload and self.mesh.device.type != "cpu"

    @property
    def plain(self) -> Link:
        """The link for what is not the parameters themselves, such as their tangents."""
        return self if self.cast is None else dataclasses.replace(self, cast=None)


@dataclass(frozen=True, slots=True)
class Gathering:
    """A gathering under way; ``finish`` waits and returns the whole buffer, in the dtype to compute in.

    Attributes:
        work: the collective.
        link: what it runs over.
        numel: number of elements of the whole buffer.
    """

    work: AllGatherWork
    link: Link
    numel: int

    def settle(self) -> None:
        """Wait for what travels, if that is this process's to wait for; on a stream it would hold up what comes next."""
        if self.link.mesh.device.type == "cpu":
            self.work.wait()

    def finish(self) -> torch.Tensor:
        """Wait for what travels, and undo what was done to it before it left."""
        out, cast = self.work.wait(), self.link.cast
        if cast is None:
            return out
        ranks = self.link.mesh.shard.size if self.link.cut else 1
        full = cast.post_all_gather(out.view(ranks, -1))
        if full.ndim != 1 or full.numel() < self.numel or full.dtype != self.link.gathered:
            raise ValueError(
                f"the cast of buffer {self.link.buffer!r} of unit {self.link.unit or '(root)'!r} must return, after "
                f"gathering, a 1-D tensor of {self.numel} elements and {self.link.gathered}, its param_dtype; found "
                f"{tuple(full.shape)} and {full.dtype}"
            )
        return full[: self.numel]


@dataclass(slots=True, eq=False)
class CommonGathering:
    """A gathering for several uses, which have its result in common: each ``finish`` returns a tensor of its own over it.

    In inference mode each has memory of its own, because nobody would notice there that one writes to it.

    Attributes:
        gathering: the gathering, as long as there is something of it to wait for.
        full: its result, where it is here.
    """

    gathering: Gathering | None
    full: torch.Tensor | None = None

    @property
    def work(self) -> Work | AllGatherWork:
        """What is still to be waited for."""
        return DONE if self.gathering is None else self.gathering.work

    def settle(self) -> None:
        """As ``Gathering.settle``."""
        if self.gathering is not None:
            self.gathering.settle()

    def finish(self) -> torch.Tensor:
        """As ``Gathering.finish``; waits each time, because each may be on a stream of its own."""
        if self.full is None:
            assert self.gathering is not None, "what has no result yet is under way"
            self.full = self.gathering.finish()
            if self.gathering.link.cast is not None:
                self.gathering = None  # and with it what travelled
        else:
            self.work.wait()
        apart = self.full.is_inference() or torch.is_inference_mode_enabled()
        return self.full.clone() if apart else self.full.detach()


UnderWay = Gathering | CommonGathering


def start_gather(shard: torch.Tensor, link: Link, *, read_only: bool = False) -> Gathering:
    """Start to gather ``shard``, ``[n, ...]``, into a new ``[n * ranks, ...]``; no autograd.

    Arguments:
        shard: this rank's part.
        link: what it is gathered over.
        read_only: whether nobody will write into what is gathered, which other ranks may have in common.
    """
    sent = shard
    if link.cast is not None:
        sent = link.cast.pre_all_gather(shard)
        if not isinstance(sent, torch.Tensor) or sent.ndim != 1:
            found = tuple(sent.shape) if isinstance(sent, torch.Tensor) else type(sent).__name__
            raise ValueError(
                f"the cast of buffer {link.buffer!r} of unit {link.unit or '(root)'!r} must return, before gathering, a 1-D "
                f"tensor, what travels; found {found}"
            )
    elif link.gathered is not link.dtype:
        sent = shard.to(link.gathered)
    if link.moved:
        sent = sent.to(link.mesh.device)  # waits, because the optimizer may write into the shard as soon as we return
    if not link.cut:
        return Gathering(PrivateAllGatherWork(sent), link, shard.shape[0])
    _refuse_unseen(sent, link)
    group, sent = link.mesh.shard, sent.contiguous()
    _record("all_gather", link, sent, "shard", group, group.size)
    if read_only and sent.ndim == 1 and link.cast is None:
        work = group.all_gather_shared(sent, label=link.label)
    else:
        work = all_gather_private(group, sent, label=link.label)
    return Gathering(work, link, shard.shape[0] * group.size)


@dataclass(frozen=True, slots=True)
class Pending:
    """A reduction under way; ``finish`` waits and returns this rank's slice of the sum, in the dtype of the shard."""

    out: torch.Tensor
    work: Work
    link: Link

    def settle(self) -> None:
        """Wait for the reduction over the first axis, as ``Gathering.settle`` does; only the result has memory then."""
        if self.link.mesh.device.type == "cpu":
            self.work.wait()

    def finish(self) -> torch.Tensor:
        """Wait for the reduction over the first axis, run those over the others, and return the result."""
        self.work.wait()
        for name, group in self.link.repeated[0 if self.link.cut else 1 :]:
            _record("all_reduce", self.link, self.out, name, group)
            group.all_reduce(self.out, label=self.link.label).wait()
        out = to_host(self.out) if self.link.moved else self.out
        return out if self.link.keeps or self.link.dtype is None else out.to(self.link.dtype)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` on the CPU, in pinned memory if it comes from CUDA; waits for the copy."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda).copy_(tensor)


def start_reduce(full: torch.Tensor, link: Link, *, donated: bool = False) -> Pending:
    """Start to add up every rank's ``full``, ``[n * ranks, ...]``, each rank receiving its ``[n, ...]``; no autograd.

    Arguments:
        full: what this rank contributes.
        link: what it is reduced over.
        donated: whether ``full`` may be overwritten.
    """
    if link.reduced is not None and full.dtype != link.reduced:
        full, donated = full.to(link.reduced), True
    full = full.contiguous()
    if link.cut or link.repeated:
        _refuse_unseen(full, link)
    if link.cut:
        return _start_scatter([full.view(-1)], (full.shape[0] // link.mesh.shard.size, *full.shape[1:]), link)
    if not link.repeated:
        return Pending(full, DONE, link)
    name, group = link.repeated[0]
    out = full if donated else full.clone()
    _record("all_reduce", link, out, name, group)
    return Pending(out, group.all_reduce(out, label=link.label), link)


def start_reduce_parts(parts: Sequence[torch.Tensor], link: Link) -> Pending:
    """As ``start_reduce`` of what 1-D ``parts`` are side by side; one that is alone is donated, several stay as they are."""
    if not link.cut or len(parts) == 1:
        return start_reduce(concatenate(parts), link, donated=True)
    _refuse_unseen(parts[0], link)
    return _start_scatter(parts, (sum(part.numel() for part in parts) // link.mesh.shard.size,), link)


def _start_scatter(parts: Sequence[torch.Tensor], shape: tuple[int, ...], link: Link) -> Pending:
    """Start to add up parts, of which this rank receives a slice of some shape."""
    group = link.mesh.shard
    out = parts[0].new_empty(shape, dtype=link.reduced or parts[0].dtype)
    _record("reduce_scatter", link, out, "shard", group, group.size)
    return Pending(out, group.reduce_scatter(out, parts, label=link.label), link)


def _refuse_unseen(tensor: torch.Tensor, link: Link) -> None:
    """Raise where what runs is not the collective: while operations are recorded, or batched by torch's older ``vmap``."""
    # the graph would hold the memory that a collective writes into, and not the collective
    if recording_graph():
        raise RuntimeError(
            f"make_fx, which torch.func.linearize uses, records tensor operations only, and would leave out {_what(link)}: "
            f"call torch.func.jvp(f, primals, tangents) for each tangent instead"
        )
    if is_legacy_batched(tensor):
        raise RuntimeError(
            f"is_grads_batched=True, which torch.autograd.functional uses for vectorize=True, cannot batch {_what(link)}: "
            f"use torch.vmap over the cotangents of torch.func.vjp, or torch.func.jacrev"
        )


def _what(link: Link) -> str:
    name = "psum" if link.unit is None else f"the collectives of unit {link.unit or '(root)'!r}"
    return f"{name} on {link.mesh.world_size} ranks"


def _record(kind: str, link: Link, whole: torch.Tensor, axis: str, group: Group, times: int = 1) -> None:
    if recording() and whole.numel():
        size = whole.numel() * whole.element_size() * times
        emit(Event(kind, link.unit, link.buffer, dtype_name(whole.dtype), size, axis, group.size))


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
    """One unit's part of a joint gathering, as ``AllGatherWork``."""

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
