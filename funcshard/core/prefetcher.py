"""The prefetcher: when a call gathers which units, and the state that it keeps for backward.

One ``Prefetcher`` belongs to one call of a sharded function, and it alone issues the all-gathers of
the call and its backward. (A recomputed unit gathers itself.) Its phases carry FSDP's names:

- ``pre_forward(unit)``: start the unit's all-gather unless it has started, wait for its data, and
  start those of the units that come next.
- ``post_forward()``: the call's forward has returned; from here on backward may come.
- ``pre_backward(use)``: the same in backward, for a unit whose leaves backward needs.
- ``post_backward(use)``: backward has computed a unit's gradients, and its buffers are free.

``ForwardOrder`` and ``BackwardOrder`` of ``plan`` decide which units are gathered, and in which
order. The prefetcher follows them, and keeps the handles.

A ``SavedUnit`` is the state that autograd keeps of a unit between forward and backward. Its hooks
replace each saved tensor that is a view of a gathered buffer by the position of that view, so the
buffer is free as soon as forward returns. When backward asks for the first of them, the saved unit
asks the prefetcher. Forward refers to the prefetcher until the call returns; after that only the
autograd graph does, and frees it with itself.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.autograd.function import BackwardCFunction

from funcshard._utils import (
    address,
    cast_of,
    dispatch_modes,
    graph_task_id,
    hide_from_selective_checkpoints,
    in_selective_checkpoint,
    outer_saved_tensors_hooks,
    runs_in_backward,
    saved_tensors_hooks_allowed,
    storage_id,
    transforms_active,
    unseen,
    version,
)
from funcshard.core.buffer_comm import (
    AnyGatherHandle,
    GatherSource,
    SharedGatherHandle,
    start_gathers,
)
from funcshard.core.dtensor_leaves import as_dtensors, through_dtensors
from funcshard.core.flat_buffer import views
from funcshard.core.grad_reducer import current_reducer
from funcshard.plan import BackwardOrder, ForwardOrder, Schedule, UnitPlan

_log = logging.getLogger("funcshard.core")

# The all-gathers of the buffers of one unit; None for a buffer that needs none.
Handles = Sequence[AnyGatherHandle | None]


class Prefetcher:
    """Issue the all-gathers of one call, in forward and in the backward that may follow.

    Arguments:
        schedule: when units are gathered ahead.
        start: starts the all-gathers of a unit.
        known: whether the schedule's order is that of the call, as far as is known.
        inside: the units whose leaves checkpoints inside them asked for, in backwards of earlier
            calls; gets those of this call too. Forward itself cannot see them.

    Attributes:
        ran: names of the units that forward has called so far.
    """

    def __init__(
        self,
        schedule: Schedule,
        start: Callable[[str], Handles],
        *,
        known: bool,
        inside: set[str] | None = None,
    ) -> None:
        self._inside: set[str] = set() if inside is None else inside
        self._schedule = schedule
        self._start = start
        self._forward = ForwardOrder(schedule, known=known)
        self.ran = self._forward.ran
        self._handles: dict[str, Handles] = {}
        self._returned = False
        # A use is one SavedUnit. Moments count what forward does: the calls of units, and the uses
        # of their leaves that backward needs. Backward reaches them in the opposite order, so
        # ``BackwardOrder`` gets negated moments.
        self._now = 0
        self._called: list[int] = []  # moment of each call of a unit
        self._sources: list[UnitSource | None] = []  # by use, as the next three
        self._units: list[str] = []
        self._began: list[int] = []  # moment at which the unit's forward began
        self._last: list[int] = []  # moment of the last time that forward used a leaf, 0 for never
        self._ahead: dict[int, Handles] = {}  # by use; gathered for backward, and not used yet
        self._ends = False  # whether end_backward will be called
        self._by_shards = True  # whether the backward that runs computes gradients by shards
        # Why weak: a cycle would keep shards in memory until Python looks for garbage.
        call = weakref.ref(self)
        self._backward = BackwardOrder(
            schedule,
            self._units,
            lambda use: (prefetcher := call()) is not None and prefetcher.reaches(use),
        )

    def pre_forward(self, name: str, *, stays: bool = False) -> Handles | None:
        """Gather a unit that forward calls, if its gather has not started; prefetch the next units.

        Arguments:
            name: the unit.
            stays: whether the unit stays gathered after forward.

        Returns:
            The handles of the unit; ``None`` after the call, when backward computes a unit again,
            which then gathers for itself.
        """
        if self._returned:
            return None
        if dispatch_modes() and in_selective_checkpoint():
            return unseen(self.pre_forward)(name, stays=stays)
        if self._forward.gather(name):
            self._handles[name] = self._start(name)
        handles = self._handles.pop(name)
        # Why before prefetching: a fast rank must not take memory for the next units while slow
        # ranks have not sent this one.
        _wait_comm(handles)
        if self._forward.call(name, stays=stays):
            self._handles[name] = handles = [
                handle and SharedGatherHandle.of(handle) for handle in handles
            ]
        self._now += 1
        self._called.append(self._now)
        for ahead in self._forward.prefetch():
            self._handles[ahead] = self._start(ahead)
        return handles

    @property
    def returned(self) -> bool:
        """Whether the call's forward has returned."""
        return self._returned

    def save(self, source: UnitSource) -> int | None:
        """Number what backward gathers a unit from; return ``None`` after the call."""
        if self._returned:
            return None
        self._sources.append(source)
        self._units.append(self.ran[-1] if self.ran else "")
        self._now += 1
        self._began.append(self._now)
        self._last.append(0)
        return len(self._sources) - 1

    def note_use(self, use: int) -> None:
        """Note when forward uses a leaf that backward needs; backward reaches the latest first."""
        if not self._returned:
            self._now += 1
            self._last[use] = self._now

    def post_forward(self) -> None:
        """End forward: wait for the all-gathers of units that were never called, and drop them."""
        self._returned = True
        for handles in self._handles.values():
            _wait(handles)
        self._handles.clear()
        for use, name in enumerate(self._units):
            if name in self._inside and not self._last[use]:
                self._last[use] = self._began[use]
        self._backward.expect(sorted((-last, use) for use, last in enumerate(self._last) if last))

    @property
    def has_saved(self) -> bool:
        """Whether backward may gather units of this call again."""
        return bool(self._sources)

    def begin_backward(self) -> None:
        """Gather the unit that backward reaches first, as soon as backward begins."""
        if self._schedule.backward_prefetch == "pre":
            self._prefetch(-self._now - 1, most=1)

    def pre_backward(self, use: int, source: UnitSource) -> Handles:
        """Gather a use that backward reaches, if its gather has not started; prefetch the next.

        Arguments:
            use: the number of the use.
            source: what it is gathered from.

        Returns:
            The handles of the unit.
        """
        if not self._last[use]:
            self._inside.add(self._units[use])
        if source.has_nodes:
            self._by_shards = source.in_backward
        if use not in self._ahead:
            if self._sources[use] is not None:
                self._backward.gather(use)
            self._ahead[use] = start_gathers(source.sources())
        handles = self._ahead.pop(use)
        _wait_comm(handles)  # first, as in forward
        self._backward.reach(use)
        if not source.repeats:
            self._sources[use] = None
        if self._schedule.backward_prefetch == "pre":
            self._prefetch(-self._last[use])
        return handles

    def post_backward(self, use: int) -> None:
        """Note that backward has computed a unit's gradients; prefetch if the schedule says so."""
        self._backward.release(use)
        if self._schedule.backward_prefetch == "post":
            self._prefetch(-self._began[use])

    def end_backward(self) -> None:
        """Wait for the all-gathers that backward did not need after all, and drop them."""
        self._ends = False
        for use in [*self._ahead]:
            _wait(self._ahead.pop(use))
            self._backward.reach(use)
            self._backward.release(use)

    def backward_order(self) -> tuple[tuple[str, str], ...] | None:
        """Return the order for ``Schedule.backward``; ``None`` if ``Schedule.order`` implies it."""
        moments = [
            (last, "gather", unit)
            for last, unit in zip(self._last, self._units, strict=True)
            if last
        ]
        moments += [
            (called, "reduce", unit) for called, unit in zip(self._called, self.ran, strict=True)
        ]
        backward_moments = tuple(
            (moment_kind, unit) for _, moment_kind, unit in sorted(moments, reverse=True)
        )
        saved = set(self._units)
        plain = [
            (moment_kind, unit)
            for unit in self.ran[::-1]
            for moment_kind in ("gather", "reduce")
            if moment_kind == "reduce" or unit in saved
        ]
        return None if backward_moments == tuple(plain) else backward_moments

    def _prefetch(self, moment: int, *, most: int | None = None) -> None:
        for use in self._backward.prefetch(moment, most=most):
            source = self._sources[use]
            assert source is not None, "reaches() leaves out uses that backward has left for good"
            self._ahead[use] = start_gathers(source.sources())
        reducer = None if self._ends or not self._ahead else current_reducer()
        if reducer is not None:
            self._ends = True
            reducer.at_end.append(self.end_backward)

    def reaches(self, use: int) -> bool:
        """Return whether the backward that runs may reach a use, the same on every rank."""
        # Why not whether autograd still holds what the unit saved: a rank that keeps an output of
        # which the loss is no function holds more than the others.
        source = self._sources[use]
        if source is None or source.changed:
            return False
        # Why ask: a backward by inputs alone reaches units of which it computes no gradient.
        return not self._by_shards or source.in_backward


def _wait(handles: Handles) -> None:
    for handle in handles:
        if handle is not None:
            handle.work.wait()


def _wait_comm(handles: Handles) -> None:
    for handle in handles:
        if handle is not None:
            handle.wait_comm()


# --- the state of a unit between forward and backward ---------------------------------------------

# The unit whose saved tensors the hooks around it are asked for now. If the hooks compute forward
# again to answer, as a checkpoint does, that computation uses this unit's gathered buffers.
_recomputing: contextvars.ContextVar[SavedUnit | None] = contextvars.ContextVar(
    "funcshard_recomputing", default=None
)

# The unit whose forward runs, for the parameter tables that its module keeps.
current_unit: contextvars.ContextVar[HasLeaves | None] = contextvars.ContextVar(
    "funcshard_current_unit", default=None
)


class HasLeaves(Protocol):
    """A unit whose leaves a checkpoint inside it may ask for; ``SavedUnit`` is one."""

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaves, gathered again if need be."""


def recomputing_unit() -> SavedUnit | None:
    """Return the saved unit whose backward asked to recompute forward, if there is one."""
    return _recomputing.get()


def hooks_allowed() -> bool:
    """Return whether hooks may be used: not in ``torch.func``, nor while ``remat`` recomputes."""
    return saved_tensors_hooks_allowed() and not transforms_active()


class UnitSource:
    """What backward gathers a unit from, if it reaches the unit again: this rank's shard.

    Arguments:
        f: the ``Unshard`` of the unit.
        shard: this rank's shard, by buffer key.
        versions: how often each shard had been written to in forward; by default, until now.

    Attributes:
        shards: the shard of each buffer.
        repeats: whether it may be gathered ahead in several backwards.
    """

    __slots__ = ("_comms", "_nodes", "_unit", "_versions", "shards")

    repeats = True

    def __init__(
        self, f: Any, shard: Mapping[str, torch.Tensor], versions: list[int] | None = None
    ) -> None:
        self._unit, self._comms = f.unit, f.comms
        self.shards = [shard[buffer.key].detach() for buffer in f.unit.buffers]
        self._versions = [version(local) for local in self.shards] if versions is None else versions
        self._nodes: list[weakref.ref[Any]] = []

    def watch(self, nodes: Sequence[Any]) -> None:
        """Set the autograd nodes of the buffers' gathers; a frozen buffer has none."""
        self._nodes = [weakref.ref(node) for node in nodes if isinstance(node, BackwardCFunction)]

    @property
    def has_nodes(self) -> bool:
        """Whether any buffer's gather has an autograd node."""
        return bool(self._nodes)

    @property
    def in_backward(self) -> bool:
        """Whether the backward that runs computes gradients of the unit; yes if it has no nodes."""
        if not self._nodes or graph_task_id() == -1:
            return True
        return any(runs_in_backward(node) for ref in self._nodes if (node := ref()) is not None)

    @property
    def changed(self) -> bool:
        """Whether a shard has been written to since forward gathered it."""
        return [version(local) for local in self.shards] != self._versions

    def sources(self) -> list[GatherSource]:
        """Return the sources of the unit's all-gather; raise if they changed after forward's."""
        if self.changed:
            changed = zip(self.shards, self._versions, self._unit.buffers, strict=True)
            key = next(
                buffer.key
                for local, version_before, buffer in changed
                if version(local) != version_before
            )
            raise RuntimeError(
                f"the shard {key!r} of unit {self._unit.title!r} was modified in place between "
                "forward and backward, which would gather other values than forward used; update "
                "shards after backward"
            )
        return list(zip(self.shards, self._comms, strict=True))


class SavedUnit:
    """The state that one forward of a unit keeps for backward, without the gathered buffers.

    Packed tensors refer to this object, and this object holds the buffers that backward has
    gathered again. They are free when backward has used the last packed tensor of the unit, or when
    the function that ``post_backward`` returned is called.

    Arguments:
        f: the ``Unshard`` of the unit.
        shard: this rank's shard, by buffer key.
        prefetcher: that of the call; ``None`` for a unit that is called by itself.
        source: what backward gathers the unit from; by default the shard.

    Attributes:
        needed: whether backward needs any of the gathered buffers.
        kept: returns the handles of the buffers while the unit stays gathered, and ``None`` after.
    """

    __slots__ = (
        "__weakref__", "_begins", "_buffer_of", "_comms", "_devices", "_dtensors", "_dtypes", "_full",
        "_handles", "_leaf_views", "_node_of", "_prefetcher", "_source", "_unit", "_use", "kept", "needed",
    )  # fmt: skip

    def __init__(
        self,
        f: Any,
        shard: Mapping[str, torch.Tensor],
        prefetcher: Prefetcher | None,
        source: UnitSource | None = None,
    ) -> None:
        self.needed = False
        self.kept: Callable[[], Handles | None] | None = None
        self._unit, self._comms, self._dtensors = f.unit, f.comms, f.dtensors
        self._source = source or UnitSource(f, shard)
        self._buffer_of: dict[int, int] = {}
        self._node_of: dict[int, int] = {}
        self._leaf_views = f.leaf_views
        self._begins: list[int] = []
        self._devices: list[torch.device] = []
        self._dtypes: list[torch.dtype] = []
        self._handles: Handles | None = None
        self._full: list[torch.Tensor] | None = None
        self._prefetcher = prefetcher
        self._use = None if prefetcher is None else prefetcher.save(self._source)

    def watch(self, gathered: tuple[tuple[torch.Tensor, ...], ...]) -> None:
        """Set the leaves of each gathered buffer, so that ``pack`` knows views of them."""
        self._buffer_of = {storage_id(leaves[0]): i for i, leaves in enumerate(gathered)}
        # Why the id: a saved unit that held the node would keep the graph of the shards alive.
        self._node_of = {
            id(leaves[0].grad_fn): i
            for i, leaves in enumerate(gathered)
            if leaves[0].grad_fn is not None
        }
        self._begins = [
            leaves[0].storage_offset() - at[0][2]
            for leaves, at in zip(gathered, self._leaf_views, strict=True)
        ]
        self._devices = [leaves[0].device for leaves in gathered]
        self._dtypes = [leaves[0].dtype for leaves in gathered]
        self._source.watch([leaves[0].grad_fn for leaves in gathered])

    @property
    def started(self) -> bool:
        """Whether its all-gather has started, and backward does not use the buffers yet."""
        return self._handles is not None

    @property
    def gathered(self) -> bool:
        """Whether backward uses its gathered buffers now."""
        return self._full is not None

    def sources(self) -> list[GatherSource]:
        """Return the sources of its all-gather; raise if they changed after forward's gather."""
        return self._source.sources()

    def receive(self, handles: Handles) -> None:
        """Take the handles of its all-gather."""
        self._handles = handles

    def release(self) -> None:
        """Free the buffers that backward has gathered."""
        self._full = None

    def post_backward(self) -> Callable[[], None]:
        """Return the function to call when the unit's gradients are complete."""
        return _PostBackward(weakref.ref(self), self._prefetcher, self._use)

    def handles_for(
        self, unit: UnitPlan, shard: Mapping[str, torch.Tensor]
    ) -> list[SharedGatherHandle | None] | None:
        """Return finished handles of its buffers, if gathering ``shard`` would give the same."""
        same = unit is self._unit and all(
            address(shard[buffer.key]) == address(local)
            for buffer, local in zip(unit.buffers, self._source.shards, strict=True)
        )
        if not same:
            return None
        return [
            SharedGatherHandle(None, self._buffer(i)) if comm.copied else None
            for i, comm in enumerate(self._comms)
        ]

    @unseen
    def gathered_again(self) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Return the leaves of each buffer, gathered again, without a graph."""
        return tuple(
            tuple(
                leaf.requires_grad_(buffer.trainable and leaf.is_floating_point())
                for leaf in views(self._buffer(i).detach(), buffer)
            )
            for i, buffer in enumerate(self._unit.buffers)
        )

    def leaves(self) -> list[torch.Tensor]:
        """Return the leaves, gathered again, without a graph, to recompute a part of forward."""
        leaf_tensors = [leaf for leaves in self.gathered_again() for leaf in leaves]
        return (
            leaf_tensors
            if self._dtensors is None
            else unseen(as_dtensors)(leaf_tensors, self._dtensors)
        )

    def _buffer(self, number: int) -> torch.Tensor:
        # Why the whole unit, whichever buffer is asked for: a plan can predict this order.
        full = self._gather_all() if self._full is None else self._full
        return full[number]

    def _gather_all(self) -> list[torch.Tensor]:
        if dispatch_modes() and in_selective_checkpoint():
            return unseen(self._gather_all)()
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("pre_backward of unit %r", self._unit.title)
        if self._prefetcher is not None and self._use is not None:
            self._handles = self._prefetcher.pre_backward(self._use, self._source)
        elif self._handles is None:  # a unit that is called by itself, or stays gathered
            sources = self.sources()
            self._handles = (self.kept and self.kept()) or start_gathers(sources)
            _wait_comm(self._handles)
        handles, self._handles = self._handles or [], None
        self._full = [handle.finish() for handle in handles if handle is not None]
        return self._full

    def hooks(self) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
        """Return the two functions for ``saved_tensors_hooks``, inside the hooks that are active.

        Why outer: autograd calls the innermost hooks only, so these pass all other tensors to the
        hooks around them (checkpoint, offload). Those may hold the module of the call, which holds
        this object; stored here, they would make a cycle.
        """
        outer = outer_saved_tensors_hooks()
        hooks: tuple[Any, Any] = functools.partial(self.pack, outer=outer), self.unpack
        if self._dtensors is not None:
            hooks = through_dtensors(*hooks)
        hide_from_selective_checkpoints(hooks[0], outer)
        return hooks

    def pack(self, tensor: torch.Tensor, outer: Any = None) -> Any:
        """Replace a saved view of a gathered buffer by the position of that view."""
        buffer_index = self._buffer_of.get(storage_id(tensor))
        if (
            buffer_index is not None
            and tensor.dtype == self._dtypes[buffer_index]
            and not tensor.is_conj()
        ):
            self.note_needed()
            return _PackedView(
                self, buffer_index, tensor.shape, tensor.stride(), tensor.storage_offset()
            )
        source = self._source_of_cast(tensor)
        if source is not None:
            self.note_needed()
            return _PackedCast(
                source, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
            )
        if outer:
            return _PackedByOuter(outer[1], outer[0](tensor))
        # Why detach: an operation that saves its own result would keep its graph alive for ever.
        return _PackedTensor(tensor.detach(), version(tensor))

    def note_needed(self) -> None:
        """Note that backward needs the gathered buffers."""
        self.needed = True
        if self._prefetcher is not None and self._use is not None:
            self._prefetcher.note_use(self._use)

    def _source_of_cast(self, tensor: torch.Tensor) -> _PackedView | None:
        """Return the position of the leaf that ``tensor`` is a cast of, or a view of a cast.

        Autocast casts each weight where an operation uses it, and backward needs the cast. Casting
        the leaf again gives the same bits, so the cast is freed with the buffer.
        """
        cast_source = cast_of(tensor)
        buffer_index = None if cast_source is None else self._node_of.get(id(cast_source[1]))
        if cast_source is None or buffer_index is None:
            return None
        cast, _, output, transposed = cast_source
        size, stride, offset = self._leaf_views[buffer_index][output]
        if transposed:
            size, stride = size[::-1], stride[::-1]
        # Why strides: a cast to another memory format moves elements, and so does a permutation
        # that is no transpose.
        same = (len(size) == 2 or not transposed) and cast.shape == size and cast.stride() == stride
        if not same or cast.storage_offset() or cast.device != self._devices[buffer_index]:
            return None
        return _PackedView(self, buffer_index, size, stride, self._begins[buffer_index] + offset)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that ``pack`` replaced."""
        if isinstance(packed, _PackedView):
            return self._buffer(packed.number).as_strided(packed.size, packed.stride, packed.offset)
        if isinstance(packed, _PackedCast):
            cast = self.unpack(packed.source).to(packed.dtype)
            return cast.as_strided(packed.size, packed.stride, packed.offset)
        if isinstance(packed, _PackedTensor):
            return packed.checked(self._unit.title)
        if self.needed and recomputing_unit() is None and packed.leaves_units:
            # Why now: the outer hooks may compute something again, and a plan predicts this order.
            self._buffer(0)
        token = _recomputing.set(self)
        try:
            return packed.unpack(packed.packed)
        finally:
            _recomputing.reset(token)


@dataclass(frozen=True, slots=True)
class _PostBackward:
    saved: weakref.ref[SavedUnit]  # weak: autograd may have freed all that it saved
    prefetcher: Prefetcher | None
    use: int | None

    def __call__(self) -> None:
        saved = self.saved()
        if saved is not None:
            saved.release()
        if self.prefetcher is not None and self.use is not None:
            self.prefetcher.post_backward(self.use)


@dataclass(frozen=True, slots=True)
class _PackedView:
    """The position of a saved tensor in a gathered buffer; keeps the saved unit alive."""

    saved: SavedUnit
    number: int
    size: Sequence[int]
    stride: Sequence[int]
    offset: Any


@dataclass(frozen=True, slots=True)
class _PackedCast:
    """The position of a saved tensor in a cast of a leaf, such as one that autocast made."""

    source: _PackedView
    dtype: torch.dtype
    size: Sequence[int]
    stride: Sequence[int]
    offset: Any


@dataclass(frozen=True, slots=True)
class _PackedTensor:
    """A saved tensor of no gathered buffer, and how often it had been written to."""

    tensor: torch.Tensor
    version: int

    def checked(self, unit: str) -> torch.Tensor:
        # Why here: autograd checks versions itself only for tensors that no hook packed.
        if version(self.tensor) != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that unit {unit!r} needs for its "
                "gradients was modified in place after forward had saved it; modify a copy"
            )
        return self.tensor


@dataclass(frozen=True, slots=True)
class _PackedByOuter:
    """A saved tensor that the hooks around the unit packed."""

    unpack: Callable[[Any], torch.Tensor]
    packed: Any

    @property
    def leaves_units(self) -> bool:
        """Whether hooks that are no unit's packed it, which may compute it again."""
        packed: Any = self
        while isinstance(packed, _PackedByOuter):
            packed = packed.packed
        return not isinstance(packed, (_PackedView, _PackedCast, _PackedTensor))
