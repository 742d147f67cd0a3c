"""What autograd keeps of a unit between forward and backward, without the gathered buffers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard.collectives import Gathering, Link, start_gather
from funcshard.flight import Flight
from funcshard.plan import UnitPlan

__all__ = ["Saved"]


class Saved:
    """What one unit's forward saved of its gathered buffers, without the buffers.

    Packed tensors hold this object, and it holds the buffers that backward has gathered again; when backward has used
    the last packed tensor of the unit, or what ``released`` returned is called, they are free.
    """

    __slots__ = (
        "__weakref__",
        "_dtypes",
        "_flight",
        "_full",
        "_links",
        "_needed",
        "_outer",
        "_place",
        "_places",
        "_shards",
        "_started",
        "_unit",
        "_versions",
    )

    def __init__(
        self, unit: UnitPlan, links: Sequence[Link], shard: Mapping[str, torch.Tensor], flight: Flight | None
    ) -> None:
        self._unit = unit
        self._links = links
        self._shards = [shard[buffer.key].detach() for buffer in unit.buffers]
        self._versions = [local._version for local in self._shards]
        self._places: dict[int, int] = {}
        self._dtypes: list[torch.dtype] = []
        self._started: list[Gathering] | None = None
        self._full: list[torch.Tensor] | None = None
        self._needed = False
        self._flight = flight
        self._place = None if flight is None else flight.register(self)
        # only the innermost hooks are called, so what is not ours is handed on to those around us (checkpoint, offload)
        self._outer = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def watch(self, gathered: tuple[torch.Tensor, ...]) -> None:
        self._places = {full.untyped_storage()._cdata: i for i, full in enumerate(gathered)}
        self._dtypes = [full.dtype for full in gathered]

    @property
    def needed(self) -> bool:
        """Whether backward needs any of the gathered buffers."""
        return self._needed

    @property
    def waiting(self) -> bool:
        """Whether it has been gathered ahead, and is not in use yet."""
        return self._started is not None

    @property
    def gathered(self) -> bool:
        """Whether backward uses the gathered buffers now."""
        return self._full is not None

    def start(self) -> None:
        """Start to gather the whole unit again, in the order of its buffers, ahead of its use."""
        self._started = [self._start(i) for i in range(len(self._shards))]

    def released(self) -> Callable[[], None]:
        """What to call when the unit's gradients are there: it frees what backward has gathered."""
        return _Released(weakref.ref(self), self._flight, self._place)

    def pack(self, tensor: torch.Tensor) -> Any:
        number = self._places.get(tensor.untyped_storage()._cdata)
        if number is not None and tensor.dtype == self._dtypes[number] and not tensor.is_conj():
            self._needed = True
            if self._flight is not None and self._place is not None:
                self._flight.used(self._place)
            return _Place(self, number, tensor.shape, tensor.stride(), tensor.storage_offset())
        if self._outer:
            return _Handed(self._outer[1], self._outer[0](tensor))
        # detached, because an operation that saves its own result would otherwise keep its own graph alive for ever
        return _Kept(tensor.detach(), tensor._version)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Place):
            return self._again(packed.number).as_strided(packed.size, packed.stride, packed.offset)
        return packed.unpack(packed.packed) if isinstance(packed, _Handed) else packed.checked(self._unit.title)

    def _again(self, number: int) -> torch.Tensor:
        if self._full is None:
            # the whole unit at once, whichever buffer is asked for first, so that a plan can say what happens
            if self._started is None:
                self.start()
            started, self._started = self._started or [], None
            if self._flight is not None and self._place is not None:
                self._flight.reached(self._place)
            self._full = [gathering.finish() for gathering in started]
        return self._full[number]

    def _start(self, number: int) -> Gathering:
        local = self._shards[number]
        if local._version != self._versions[number]:
            unit = self._unit
            raise RuntimeError(
                f"the shard {unit.buffers[number].key!r} of unit {unit.title!r} was modified in place between forward and "
                f"backward, which would gather other values than forward used; update shards after backward"
            )
        return start_gather(local, self._links[number])


@dataclass(frozen=True, slots=True)
class _Released:
    saved: weakref.ref[Saved]  # gone already, where autograd let go of all it had saved
    flight: Flight | None
    place: int | None

    def __call__(self) -> None:
        saved = self.saved()
        if saved is not None:
            saved._full = None
        if self.flight is not None and self.place is not None:
            self.flight.passed(self.place)


@dataclass(frozen=True, slots=True)
class _Place:
    saved: Saved  # keeps it, and what it gathers, alive as long as somebody may ask
    number: int
    size: Sequence[int]
    stride: Sequence[int]
    offset: Any


@dataclass(frozen=True, slots=True)
class _Kept:
    tensor: torch.Tensor
    version: int

    def checked(self, unit: str) -> torch.Tensor:
        if self.tensor._version != self.version:  # autograd leaves this check to hooks where there are hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that unit {unit!r} needs for its gradients was modified in "
                f"place after forward had saved it; modify a copy"
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Handed:
    unpack: Callable[[Any], torch.Tensor]
    packed: Any
