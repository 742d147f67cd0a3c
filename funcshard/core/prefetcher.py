"""One call of a fully sharded function: what it gathers ahead, in forward and in the backward that may follow.

A flight belongs to one call. Forward keeps it until the call returns; after that only the autograd graph of the call
does, and takes it along when it goes.

What autograd keeps of a unit between forward and backward, without the gathered buffers.
"""

from __future__ import annotations

import bisect
import contextvars
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from funcshard._utils import (
    graph_task_id,
    outer_saved_tensors_hooks,
    saved_tensors_hooks_allowed,
    storage_id,
    transforms_active,
    version,
)
from funcshard.core.buffer_comm import CommonGathering, Gathering, Link, Source, UnderWay, start_gathers
from funcshard.core.flat_buffer import views
from funcshard.plan import Schedule, UnitPlan

__all__ = ["Again", "Flight", "Saved", "asked", "hooks_work", "running"]

# what is gathered of the buffers of one unit
Started = Sequence[UnderWay | None]


class _Saved(Protocol):
    @property
    def needed(self) -> bool: ...
    @property
    def waiting(self) -> bool: ...
    @property
    def gathered(self) -> bool: ...
    def start(self) -> None: ...


class Flight:
    """The units of one call, in the order in which they ran.

    Arguments:
        schedule: when units are gathered ahead.
        start: starts to gather units, in one collective where they are several.
        known: whether the schedule's order is that of the call, as far as anybody knows.
        runs: names of units that are gathered in one collective, by the name of each.

    Attributes:
        ran: names of the units that forward has entered so far.
    """

    def __init__(
        self,
        schedule: Schedule,
        start: Callable[[Sequence[str]], Sequence[Started]],
        *,
        known: bool,
        runs: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.ran: list[str] = []
        self._schedule = schedule
        self._start = start
        self._runs = runs or {}
        self._ahead: dict[str, Started] = {}  # not entered yet, or to stay for the next time
        self._begun: set[str] = set()
        self._as_known = known
        self._landed = False
        self._saved: list[weakref.ref[_Saved]] = []
        self._now = 0  # counts what forward does: units that it enters, and uses of their leaves that backward needs
        self._entered: list[int] = []
        self._names: list[str] = []
        self._began: list[int] = []
        self._used: list[int] = []
        self._uses: list[tuple[int, int]] = []

    def enter(self, name: str, *, stays: bool = False) -> Started | None:
        """Start to gather a unit that forward enters, unless that is under way, and those that come next.

        Arguments:
            name: the unit.
            stays: whether it stays gathered after forward, and so until forward enters it the next time.

        Returns:
            What was started; ``None`` after the call, when backward computes a unit again, which gathers for itself.
        """
        if self._landed:
            return None
        if name not in self._ahead:
            self._begin(name)
        started = self._ahead.pop(name)
        for under_way in started:  # first, so that a rank that is ahead takes no more memory before the others have come
            if under_way is not None:
                under_way.settle()
        position, order = len(self.ran), self._schedule.order
        self._as_known = self._as_known and order[position : position + 1] == (name,)
        # where nobody knows what comes, what comes the second time may come a third
        if stays and name in (order[position + 1 :] if self._as_known else self.ran):
            self._ahead[name] = started = [each and _common(each) for each in started]
        self.ran.append(name)
        self._entered.append(self._tick())
        if self._as_known and self._schedule.forward_prefetch:
            for following in order[position + 1 : position + 1 + self._schedule.limit]:
                if following not in self._ahead and following not in self._schedule.on_demand:
                    self._begin(following)
        return started

    def _begin(self, name: str) -> None:
        """Start to gather a unit in forward, and with it those of its run that forward has not begun."""
        names = [other for other in self._runs.get(name, (name,)) if other == name or other not in self._begun]
        self._ahead.update(zip(names, self._start(names), strict=True))
        self._begun.update(names)

    def land(self) -> None:
        """End forward: what was gathered ahead for a unit that was never entered is waited for and dropped."""
        self._landed = True
        for started in self._ahead.values():
            for under_way in started:
                if under_way is not None:
                    under_way.work.wait()
        self._ahead.clear()
        self._uses = sorted((used, place) for place, used in enumerate(self._used) if used)

    def register(self, saved: _Saved) -> int | None:
        """Take note of what a unit saved in forward; return its place in the order of forward."""
        if self._landed:
            return None
        self._saved.append(weakref.ref(saved))
        self._names.append(self.ran[-1] if self.ran else "")
        self._began.append(self._tick())
        self._used.append(0)
        return len(self._saved) - 1

    def used(self, place: int) -> None:
        """Forward has used a leaf of a unit in a way that backward needs: it will come to the last such use first."""
        if not self._landed:
            self._used[place] = self._tick()

    def backward(self) -> tuple[tuple[str, str], ...] | None:
        """What backward comes to, in order, as ``Schedule.backward`` says it; ``None`` if the order of units says it all."""
        moments = [(used, "gather", self._names[place]) for used, place in self._uses]
        moments += [(entered, "reduce", name) for entered, name in zip(self._entered, self.ran, strict=True)]
        found = tuple((what, name) for _, what, name in sorted(moments, reverse=True))
        saved = set(self._names)
        flat = [
            (what, name) for name in self.ran[::-1] for what in ("gather", "reduce") if what == "reduce" or name in saved
        ]
        return None if found == tuple(flat) else found

    def begin(self) -> None:
        """Backward has come to what the call returned: gather the unit that it comes to first, before all else."""
        if self._schedule.backward_prefetch == "pre" and self._uses:
            self._gather_before(self._now + 1, most=1)

    def reached(self, place: int) -> None:
        """Backward has come to a unit, and has not computed its gradients."""
        if self._schedule.backward_prefetch == "pre":
            self._gather_before(self._used[place])

    def passed(self, place: int) -> None:
        """Backward has computed a unit's gradients."""
        if self._schedule.backward_prefetch == "post":
            self._gather_before(self._began[place])

    def together(self, place: int) -> list[_Saved]:
        """What backward gathers in one collective when it gathers a unit: of its run, those that it comes to later."""
        names = self._runs.get(self._names[place], ())
        found = {self._names[place]: self._saved[place]()}
        earlier = self._uses[: bisect.bisect_left(self._uses, (self._used[place], 0))] if names else []
        for _, other in reversed(earlier):
            name = self._names[other]
            if name in names and name not in found:
                saved = self._saved[other]()
                found[name] = None if saved is None or saved.gathered or saved.waiting else saved
                if len(found) == len(names):
                    break
        return [saved for name in names or found if (saved := found.get(name)) is not None]

    @property
    def saved(self) -> bool:
        """Whether a backward may gather again what units of this call let go of."""
        return bool(self._saved)

    def _tick(self) -> int:
        self._now += 1
        return self._now

    def _gather_before(self, moment: int, most: int | None = None) -> None:
        """Gather the units whose last use in forward came before a moment of it, the latest first; ``most`` so many."""
        most = self._schedule.limit if most is None else most
        ahead = 0
        for _, place in reversed(self._uses[: bisect.bisect_left(self._uses, (moment, 0))]):
            saved = self._saved[place]()
            if saved is None or not saved.needed or saved.gathered:  # backward needs nothing of this unit, or has it
                continue
            if not saved.waiting and self._names[place] not in self._schedule.on_demand:
                saved.start()
            ahead += 1
            if ahead == most:
                return


def _common(started: UnderWay) -> CommonGathering:
    return started if isinstance(started, CommonGathering) else CommonGathering(started)


# Whose saved tensors the hooks around are asked for now: if they compute them again, what it has gathered will do.
_asked: contextvars.ContextVar[Saved | None] = contextvars.ContextVar("funcshard_asked", default=None)


# The unit whose forward runs, so that what it leaves in its module can find what it saved.
running: contextvars.ContextVar[Saved | None] = contextvars.ContextVar("funcshard_running", default=None)


def asked() -> Saved | None:
    """What a unit saved in the forward that is being computed again, if backward of that unit asked for it."""
    return _asked.get()


def hooks_work() -> bool:
    """Whether saved-tensor hooks are allowed here: ``torch.func`` refuses them, and ``remat`` where it computes again."""
    allowed = saved_tensors_hooks_allowed()
    return allowed and not transforms_active()


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
        self._versions = [version(local) for local in self._shards]
        self._places: dict[int, int] = {}
        self._dtypes: list[torch.dtype] = []
        self._started: list[Gathering | None] | None = None
        self._full: list[torch.Tensor] | None = None
        self._needed = False
        self._flight = flight
        self._place = None if flight is None else flight.register(self)

    def watch(self, gathered: tuple[tuple[torch.Tensor, ...], ...]) -> None:
        self._places = {storage_id(leaves[0]): i for i, leaves in enumerate(gathered)}
        self._dtypes = [leaves[0].dtype for leaves in gathered]

    def share(self, unit: UnitPlan, shard: Mapping[str, torch.Tensor]) -> list[CommonGathering | None] | None:
        """What has been gathered again, if it is what ``shard`` would be gathered to, as if it had just been started."""
        same = unit is self._unit and all(
            shard[buffer.key].data_ptr() == local.data_ptr()
            for buffer, local in zip(unit.buffers, self._shards, strict=True)
        )
        if not same:
            return None
        return [CommonGathering(None, self._again(i)) if link.copied else None for i, link in enumerate(self._links)]

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
        """Start to gather the whole unit again, in the order of its buffers, ahead of its use.

        Where the unit shares its collective, the others that backward needs are started as well.
        """
        together: Sequence[Any] = [self]
        if self._flight is not None and self._place is not None:
            together = self._flight.together(self._place)
        for saved, started in zip(together, start_gathers([saved.sources() for saved in together]), strict=True):
            saved._started = started

    def released(self) -> Callable[[], None]:
        """What to call when the unit's gradients are there: it frees what backward has gathered."""
        return _Released(weakref.ref(self), self._flight, self._place)

    def hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """The pair of functions for ``saved_tensors_hooks``, inside the hooks that are around now."""
        # only the innermost hooks are called, so what is not ours is handed on to those around us (checkpoint, offload);
        # they may hold the module of the call, which holds this object, so this object must not hold them
        outer = outer_saved_tensors_hooks()
        return functools.partial(self.pack, outer=outer), self.unpack

    def leaves(self) -> list[torch.Tensor]:
        """The unit's leaves, gathered again, without a graph of their own: for who computes a part of forward again."""
        return [
            leaf.requires_grad_(buffer.trainable and leaf.is_floating_point())
            for i, buffer in enumerate(self._unit.buffers)
            for leaf in views(self._again(i).detach(), buffer)
        ]

    def pack(self, tensor: torch.Tensor, outer: Any = None) -> Any:
        number = self._places.get(storage_id(tensor))
        if number is not None and tensor.dtype == self._dtypes[number] and not tensor.is_conj():
            self._needed = True
            if self._flight is not None and self._place is not None:
                self._flight.used(self._place)
            return _Place(self, number, tensor.shape, tensor.stride(), tensor.storage_offset())
        if outer:
            return _Handed(outer[1], outer[0](tensor))
        # detached, because an operation that saves its own result would otherwise keep its own graph alive for ever
        return _Kept(tensor.detach(), version(tensor))

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Place):
            return self._again(packed.number).as_strided(packed.size, packed.stride, packed.offset)
        if isinstance(packed, _Kept):
            return packed.checked(self._unit.title)
        if self._needed and asked() is None and packed.leaves_units:
            self._again(0)  # before the hooks around compute anything again, so that a plan can say in which order
        token = _asked.set(self)
        try:
            return packed.unpack(packed.packed)
        finally:
            _asked.reset(token)

    def _again(self, number: int) -> torch.Tensor:
        if self._full is None:
            # the whole unit at once, whichever buffer is asked for first, so that a plan can say what happens
            if self._started is None:
                self.start()
            started, self._started = self._started or [], None
            for gathering in started:  # as in forward, before others are gathered
                if gathering is not None:
                    gathering.settle()
            if self._flight is not None and self._place is not None:
                self._flight.reached(self._place)
            self._full = [gathering.finish() for gathering in started if gathering is not None]
        return self._full[number]

    def sources(self) -> list[Source]:
        """What is gathered again; raise if that is not what forward gathered."""
        unit = self._unit
        for local, before, buffer in zip(self._shards, self._versions, unit.buffers, strict=True):
            if version(local) != before:
                raise RuntimeError(
                    f"the shard {buffer.key!r} of unit {unit.title!r} was modified in place between forward and "
                    f"backward, which would gather other values than forward used; update shards after backward"
                )
        return list(zip(self._shards, self._links, strict=True))


class Again(dict[str, Any]):
    """A module's parameters after the forward of their unit: placeholders, but the leaves for who computes it again.

    ``torch.utils.checkpoint`` inside a unit calls parts of its forward from backward, where the unit is gathered for them.
    """

    __slots__ = ("numbers", "saved")

    def __init__(self, table: Mapping[str, Any], saved: Saved, numbers: dict[str, int]) -> None:
        super().__init__(table)
        self.saved = saved
        self.numbers = numbers

    def __getitem__(self, name: str) -> Any:
        number = self.numbers.get(name)
        if number is None or graph_task_id() == -1:
            return super().__getitem__(name)
        return self.saved.leaves()[number]


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
        if version(self.tensor) != self.version:  # autograd leaves this check to hooks where there are hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that unit {unit!r} needs for its gradients was modified in "
                f"place after forward had saved it; modify a copy"
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _Handed:
    unpack: Callable[[Any], torch.Tensor]
    packed: Any

    @property
    def leaves_units(self) -> bool:
        """Whether others than units have it, who may compute it again."""
        packed: Any = self
        while isinstance(packed, _Handed):
            packed = packed.packed
        return not isinstance(packed, (_Place, _Kept))
