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
from typing import Any

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
from funcshard.comm import DONE
from funcshard.core.buffer_comm import (
    AllGatherHandle,
    GatherSource,
    start_gathers,
)
from funcshard.core.dtensor_leaves import as_dtensors, through_dtensors
from funcshard.core.flat_buffer import views
from funcshard.core.grad_reducer import current_reducer
from funcshard.core.slices import slice_of
from funcshard.plan import BackwardOrder, ForwardOrder, Schedule, UnitPlan

_log = logging.getLogger("funcshard.core")

# The all-gathers of the buffers of one unit; None for a buffer that needs none.
Handles = Sequence[AllGatherHandle | None]


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
        returned: whether the call's forward has returned.
        sources: what backward may gather units from, by use: one use is one ``SavedUnit``. ``None``
            once backward has left it for good.
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
        self.returned = False
        # Moments count what forward does: the calls of units, and the uses
        # of their leaves that backward needs. Backward reaches them in the opposite order, so
        # ``BackwardOrder`` gets negated moments.
        self._now = 0
        self._called: list[int] = []  # moment of each call of a unit
        self.sources: list[UnitSource | None] = []
        self._units: list[str] = []  # by use, as the next two
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
        if self.returned:
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
            self._handles[name] = handles = [handle and handle.share() for handle in handles]
        self._now += 1
        self._called.append(self._now)
        for ahead in self._forward.prefetch():
            self._handles[ahead] = self._start(ahead)
        return handles

    def save(self, source: UnitSource) -> int:
        """Number what backward gathers a unit from."""
        self.sources.append(source)
        self._units.append(self.ran[-1] if self.ran else "")
        self._now += 1
        self._began.append(self._now)
        self._last.append(0)
        return len(self.sources) - 1

    def note_use(self, use: int) -> None:
        """Note when forward uses a leaf that backward needs; backward reaches the latest first."""
        if not self.returned:
            self._now += 1
            self._last[use] = self._now

    def post_forward(self) -> None:
        """End forward: wait for the all-gathers of units that were never called, and drop them."""
        self.returned = True
        for handles in self._handles.values():
            wait_all(handles)
        self._handles.clear()
        for use, name in enumerate(self._units):
            if name in self._inside and not self._last[use]:
                self._last[use] = self._began[use]
        self._backward.expect(sorted((-last, use) for use, last in enumerate(self._last) if last))

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
        if source.nodes:
            self._by_shards = source.in_backward
        if use not in self._ahead:
            if self.sources[use] is not None:
                self._backward.gather(use)
            self._ahead[use] = start_gathers(source.sources())
        handles = self._ahead.pop(use)
        _wait_comm(handles)  # first, as in forward
        self._backward.reach(use)
        if source.slice_comms:  # so that the slices are free as soon as backward has used them
            self.sources[use] = None
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
            wait_all(self._ahead.pop(use))
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
            source = self.sources[use]
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
        source = self.sources[use]
        if source is None or source.changed:
            return False
        # Why ask: a backward by inputs alone reaches units of which it computes no gradient.
        return not self._by_shards or source.in_backward


def wait_all(handles: Handles) -> None:
    """Wait for the data of all-gathers."""
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
current_unit: contextvars.ContextVar[SavedUnit | None] = contextvars.ContextVar(
    "funcshard_current_unit", default=None
)


def recomputing_unit() -> SavedUnit | None:
    """Return the saved unit whose backward asked to recompute forward, if there is one."""
    return _recomputing.get()


def hooks_allowed() -> bool:
    """Return whether hooks may be used: not in ``torch.func``, nor while ``remat`` recomputes."""
    return saved_tensors_hooks_allowed() and not transforms_active()


class UnitSource:
    """What backward gathers a unit from, if it reaches the unit again.

    That is this rank's shard. For a unit with ``reshard_after_forward=n`` it is the slices of the
    gathered buffers that this rank holds, and the shard of each buffer that is not cut.

    Arguments:
        f: the ``Unshard`` of the unit.
        shard: this rank's shard, by buffer key.

    Attributes:
        shards: the shard of each buffer.
        nodes: the autograd nodes of the buffers' gathers; a frozen buffer has none.
        slice_comms: the communication of the slices; ``()`` for a unit without.
        slices: the slices, once forward has cut them.
    """

    __slots__ = ("_comms", "_unit", "_versions", "nodes", "shards", "slice_comms", "slices")

    def __init__(self, f: Any, shard: Mapping[str, torch.Tensor]) -> None:
        self._unit, self._comms = f.unit, f.comms
        self.shards = [shard[buffer.key].detach() for buffer in f.unit.buffers]
        self._versions = [version(local) for local in self.shards]
        self.nodes: list[weakref.ref[Any]] = []
        # A forward that backward computes again is followed by its backward at once.
        self.slice_comms = f.slices if graph_task_id() == -1 else ()
        self.slices: list[torch.Tensor | None] = []

    def cut(self, gathered: Sequence[Sequence[torch.Tensor]]) -> None:
        """Copy this rank's slices of the gathered buffers, whose leaves are ``gathered``."""
        buffers = zip(gathered, self._unit.buffers, self.slice_comms, strict=True)
        self.slices = [
            None if comm is None else slice_of(leaves[0], buffer.padded_numel, comm)
            for leaves, buffer, comm in buffers
        ]

    @property
    def in_backward(self) -> bool:
        """Whether the backward that runs computes gradients of the unit; yes if it has no nodes."""
        if not self.nodes or graph_task_id() == -1:
            return True
        return any(runs_in_backward(node) for ref in self.nodes if (node := ref()) is not None)

    @property
    def changed(self) -> list[str]:
        """The shards that were written to since forward, unless only slices are gathered."""
        if self.slices and None not in self.slices:
            return []
        shards = zip(self._unit.buffers, self.shards, self._versions, strict=True)
        return [buffer.key for buffer, local, before in shards if version(local) != before]

    def sources(self) -> list[GatherSource]:
        """Return the sources of the unit's all-gather; raise if they changed after forward's."""
        changed_keys = self.changed
        if changed_keys:
            raise RuntimeError(
                f"the shard {changed_keys[0]!r} of unit {self._unit.title!r} was modified in place "
                "between forward and backward, which would gather other values than forward used; "
                "update shards after backward"
            )
        sources: list[GatherSource] = list(zip(self.shards, self._comms, strict=True))
        for i, local_slice in enumerate(self.slices):
            if local_slice is not None:
                sources[i] = local_slice, self.slice_comms[i]
        return sources


class SavedUnit:
    """The state that one forward of a unit keeps for backward, without the gathered buffers.

    Packed tensors refer to this object, and this object holds the buffers that backward has
    gathered again. They are free when backward has used the last packed tensor of the unit, or when
    the function that ``post_backward`` returned is called.

    Arguments:
        f: the ``Unshard`` of the unit.
        shard: this rank's shard, by buffer key.
        prefetcher: that of the call; ``None`` for a unit that gathers itself again in backward.

    Attributes:
        source: what backward gathers the unit from.
        needed: whether backward needs any of the gathered buffers.
        kept: returns the handles of the buffers while the unit stays gathered, and ``None`` after.
    """

    __slots__ = (
        "__weakref__", "_buffer_of", "_comms", "_dtensors", "_forms", "_full", "_leaf_views", "_node_of", "_prefetcher",
        "_unit", "_use", "kept", "needed", "source",
    )  # fmt: skip

    def __init__(
        self, f: Any, shard: Mapping[str, torch.Tensor], prefetcher: Prefetcher | None
    ) -> None:
        self.needed = False
        self.kept: Callable[[], Handles | None] | None = None
        self._unit, self._comms, self._dtensors = f.unit, f.comms, f.dtensors
        self.source = UnitSource(f, shard)
        self._buffer_of: dict[int, int] = {}
        self._node_of: dict[int, int] = {}
        self._leaf_views = f.leaf_views
        # Of each gathered buffer: where it begins in its storage, its device and its dtype.
        self._forms: list[tuple[int, torch.device, torch.dtype]] = []
        self._full: list[torch.Tensor] | None = None
        self._prefetcher = prefetcher
        self._use = -1 if prefetcher is None else prefetcher.save(self.source)

    def watch(self, gathered: tuple[tuple[torch.Tensor, ...], ...]) -> None:
        """Set the leaves of each gathered buffer, so that ``pack`` knows views of them."""
        self._buffer_of = {storage_id(leaves[0]): i for i, leaves in enumerate(gathered)}
        # Why the id: a saved unit that held the node would keep the graph of the shards alive.
        self._node_of = {
            id(leaves[0].grad_fn): i
            for i, leaves in enumerate(gathered)
            if leaves[0].grad_fn is not None
        }
        self._forms = [
            (leaves[0].storage_offset() - where[0][2], leaves[0].device, leaves[0].dtype)
            for leaves, where in zip(gathered, self._leaf_views, strict=True)
        ]
        nodes: list[Any] = [leaves[0].grad_fn for leaves in gathered]
        self.source.nodes = [
            weakref.ref(node) for node in nodes if isinstance(node, BackwardCFunction)
        ]

    def release(self) -> None:
        """Free the buffers that backward has gathered."""
        self._full = None

    def post_backward(self) -> Callable[[], None]:
        """Return the function to call when the unit's gradients are complete."""
        return functools.partial(_post_backward, weakref.ref(self), self._prefetcher, self._use)

    def handles_for(
        self, unit: UnitPlan, shard: Mapping[str, torch.Tensor]
    ) -> list[AllGatherHandle | None] | None:
        """Return finished handles of its buffers, if gathering ``shard`` would give the same."""
        same = unit is self._unit and all(
            address(shard[buffer.key]) == address(local)
            for buffer, local in zip(unit.buffers, self.source.shards, strict=True)
        )
        if not same:
            return None
        return [
            AllGatherHandle(DONE, comm, buffer.padded_numel, shared=True, full=self._buffer(i))
            if comm.copied
            else None
            for i, (buffer, comm) in enumerate(zip(unit.buffers, self._comms, strict=True))
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
        if self._dtensors is None:
            return leaf_tensors
        return unseen(as_dtensors)(leaf_tensors, self._dtensors)

    def _buffer(self, buffer_index: int) -> torch.Tensor:
        # Why the whole unit, whichever buffer is asked for: a plan can predict this order.
        full = self._gather_all() if self._full is None else self._full
        return full[buffer_index]

    def _gather_all(self) -> list[torch.Tensor]:
        if dispatch_modes() and in_selective_checkpoint():
            return unseen(self._gather_all)()
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("pre_backward of unit %r", self._unit.title)
        if self._prefetcher is not None:
            handles = self._prefetcher.pre_backward(self._use, self.source)
        else:  # a unit that is called by itself, or stays gathered
            sources = self.source.sources()
            handles = (self.kept and self.kept()) or start_gathers(sources)
            _wait_comm(handles)
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
        view = self._packed_view(tensor)
        if view is not None:
            self.note_needed()
            return view
        if outer:
            return _PackedByOuter(outer[1], outer[0](tensor))
        # Why detach: an operation that saves its own result would keep its graph alive for ever.
        return _PackedTensor(tensor.detach(), version(tensor))

    def note_needed(self) -> None:
        """Note that backward needs the gathered buffers."""
        self.needed = True
        if self._prefetcher is not None:
            self._prefetcher.note_use(self._use)

    def _packed_view(self, tensor: torch.Tensor) -> _PackedView | None:
        """Return the position of a view of a gathered buffer, or of a view of a cast of a leaf.

        Autocast casts each weight where an operation uses it, and backward needs the cast. Casting
        the leaf again gives the same bits, so the cast is freed with the buffer.
        """
        buffer_index = self._buffer_of.get(storage_id(tensor))
        is_view = buffer_index is not None and tensor.dtype == self._forms[buffer_index][2]
        if buffer_index is not None and is_view and not tensor.is_conj():
            return _PackedView(self, buffer_index, _view_at(tensor))
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
        begin, device, _ = self._forms[buffer_index]
        if not same or cast.storage_offset() or cast.device != device:
            return None
        leaf_view = size, stride, begin + offset
        return _PackedView(self, buffer_index, leaf_view, (tensor.dtype, _view_at(tensor)))

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that ``pack`` replaced."""
        if isinstance(packed, _PackedView):
            leaf_or_view = self._buffer(packed.buffer_index).as_strided(*packed.view)
            if packed.cast is None:
                return leaf_or_view
            dtype, cast_view = packed.cast
            return leaf_or_view.to(dtype).as_strided(*cast_view)
        if isinstance(packed, _PackedTensor):
            # Why here: autograd checks versions itself only for tensors that no hook packed.
            if version(packed.tensor) != packed.version:
                raise RuntimeError(
                    f"a tensor of shape {tuple(packed.tensor.shape)} that unit "
                    f"{self._unit.title!r} needs for its gradients was modified in place after "
                    "forward had saved it; modify a copy"
                )
            return packed.tensor
        if self.needed and recomputing_unit() is None and packed.leaves_units:
            # Why now: the outer hooks may compute something again, and a plan predicts this order.
            self._buffer(0)
        token = _recomputing.set(self)
        try:
            return packed.unpack(packed.packed)
        finally:
            _recomputing.reset(token)


def _post_backward(
    saved_ref: weakref.ref[SavedUnit], prefetcher: Prefetcher | None, use: int
) -> None:
    saved = saved_ref()  # weak: autograd may have freed all that it saved
    if saved is not None:
        saved.release()
    if prefetcher is not None:
        prefetcher.post_backward(use)


# Size, stride and storage offset.
ViewAt = tuple[Sequence[int], Sequence[int], Any]


def _view_at(tensor: torch.Tensor) -> ViewAt:
    return tensor.shape, tensor.stride(), tensor.storage_offset()


@dataclass(frozen=True, slots=True)
class _PackedView:
    """The position of a saved tensor in a gathered buffer; keeps the saved unit alive.

    Attributes:
        saved: the saved unit.
        buffer_index: the buffer.
        view: the position in the buffer.
        cast: the dtype, and the position in the cast of that view, if the saved tensor lies in a
            cast, such as one that autocast made.
    """

    saved: SavedUnit
    buffer_index: int
    view: ViewAt
    cast: tuple[torch.dtype, ViewAt] | None = None


@dataclass(frozen=True, slots=True)
class _PackedTensor:
    """A saved tensor of no gathered buffer, and how often it had been written to."""

    tensor: torch.Tensor
    version: int


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
        return not isinstance(packed, (_PackedView, _PackedTensor))
