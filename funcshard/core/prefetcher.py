"""The prefetcher: when a call gathers which units, and the state that it keeps for backward.

One ``Prefetcher`` belongs to one call of a sharded function, and issues all of its all-gathers, in
forward and backward. Its phases have FSDP's names, ``pre_forward`` to ``post_backward``.
``ForwardOrder`` and ``BackwardOrder`` of ``plan`` decide; the prefetcher keeps the handles, those
for backward in a ``Use``. Only the autograd graph refers to it after forward, and frees it.

A ``Gathered`` is one gather of a unit, and what autograd keeps of it between forward and backward.
``Gathered.pack`` replaces each saved view of a gathered buffer by the position of the view, so the
buffer is free as soon as forward returns. When backward asks for the first of them, it asks the
prefetcher.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import itertools
import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils.tensors import is_dtensor
from funcshard._utils.torch_private import (
    address,
    callers_level,
    cast_of,
    graph_task_id,
    local_part,
    runs_in_backward,
    storage_id,
    unseen,
    version,
)
from funcshard.comm import DONE, UNDO, CommDtypes, Mesh, Topology, neighbours, own_row
from funcshard.core.buffer_comm import (
    AllGatherHandle,
    BufferComm,
    Handles,
    Leaves,
    UnitShard,
    start_gather,
    wait_comm,
)
from funcshard.core.dtensor_leaves import DTensorForm, as_dtensors
from funcshard.core.flat_buffer import decoded_views
from funcshard.core.grad_reducer import current_reducer
from funcshard.plan import BackwardOrder, ForwardOrder, Schedule, UnitPlan

_log = logging.getLogger("funcshard.core")

# The communication of the slices of each buffer; None for a buffer that is not cut.
SliceComms = tuple[BufferComm | None, ...]


@dataclass(eq=False)
class ScheduleLearner:
    """A sharded function's schedule, whose order the first call may teach.

    Attributes:
        schedule: the schedule; at first, that to begin with.
        known: whether its order was given, or learned.
        inside: the units that checkpoints inside them gathered in backward, as far as is known.
        warned: whether a call has left the order.
        learned_with: how many units were inside when backward's order was learned; -1 before.
    """

    schedule: Schedule
    known: bool
    inside: set[str] = field(default_factory=set)
    warned: bool = False
    learned_with: int = -1

    def learn(self, prefetcher: Prefetcher) -> None:
        """Take the order of a returned call: of forward, and of the backward that may follow."""
        ran_order = tuple(prefetcher.ran)
        undo = UNDO.get()
        # Why undone: a rank that has failed learned nothing, and all ranks need one order.
        if undo is not None:
            before = {**vars(self), "inside": {*self.inside}}
            undo.append(functools.partial(vars(self).update, before))
        if not self.known:
            self.schedule = dataclasses.replace(self.schedule, order=ran_order)
            self.known = True
        elif (
            not self.warned
            and self.schedule.forward_prefetch
            and ran_order != self.schedule.order
        ):
            self.warned = True
            pairs = itertools.zip_longest(ran_order, self.schedule.order)
            first_difference = next(
                i for i, (real, planned) in enumerate(pairs) if real != planned
            )
            warnings.warn(
                f"units ran in another order than the schedule's, from position {first_difference} "
                "on: forward gathered the rest of that call on demand, which is correct but not "
                "ahead; this is said once",
                stacklevel=callers_level(),
            )
        # Why by the number: the first call does not know what checkpoints inside units need, and
        # later calls only add to it.
        is_given = self.learned_with < 0 and self.schedule.backward is not None
        if prefetcher.uses and not is_given and self.learned_with != len(self.inside):
            self.learned_with = len(self.inside)
            self.schedule = dataclasses.replace(
                self.schedule, backward=prefetcher.backward_order()
            )


class Prefetcher:
    """Issue the all-gathers of one call, in forward and in the backward that may follow.

    Arguments:
        learner: when units are gathered ahead, and what earlier backwards needed.
        start: starts the all-gathers of a unit.

    Attributes:
        ran: names of the units that forward has called so far.
        returned: whether the call's forward has returned.
        uses: what backward may gather again, one for each ``Gathered``, in the order of forward.
        now: the moment that forward is at. Moments count the calls of units, and the uses of their
            leaves that backward needs. Backward reaches them in the opposite order, so
            ``BackwardOrder`` gets negated moments.
    """

    def __init__(self, learner: ScheduleLearner, start: Callable[[str], Handles]) -> None:
        self._learner, self._schedule = learner, learner.schedule
        self._start = start
        self._forward = ForwardOrder(self._schedule, learner.known)
        self.ran = self._forward.ran
        self._handles: dict[str, Handles] = {}
        self.returned = False
        self.now = 0
        self._called: list[int] = []  # moment of each call of a unit
        self.uses: list[Use] = []
        self._by_shards = (
            True  # whether the backward that runs computes gradients by shards
        )
        self._backward = BackwardOrder(self._schedule)

    # Why unseen: a selective checkpoint counts operations, and a recomputation gathers at other
    # moments.
    @unseen
    def pre_forward(self, name: str, *, stays: bool = False) -> Handles | None:
        """Gather a unit that forward calls, if its gather has not started; prefetch the next units.

        Returns:
            The handles of the unit; ``None`` after the call, when a recomputed unit gathers for
            itself.
        """
        if self.returned:
            return None
        gathers, keeps, ahead_names = self._forward.call(name, stays=stays)
        handles = self._start(name) if gathers else self._handles.pop(name)
        # Why before prefetching: a fast rank must not take memory for the next units while slow
        # ranks have not sent this one.
        wait_comm(handles)
        if keeps:  # The next call of this unit takes the same handles.
            self._handles[name] = [handle.share() for handle in handles]
        self.now += 1
        self._called.append(self.now)
        for next_name in ahead_names:
            self._handles[next_name] = self._start(next_name)
        return handles

    def post_forward(self) -> None:
        """End forward: drop the gathers of units that were never called."""
        self.returned = True
        # Why wait: as in ``end_backward``, the memory has to outlive the collective.
        for handle in itertools.chain(*self._handles.values()):
            handle.work.wait()
        self._handles.clear()
        for use in self.uses:
            # Earlier backwards needed the unit, though forward cannot see it: a checkpoint hides
            # the use.
            if use.name in self._learner.inside and not use.last:
                use.last = use.began
        # Backward reaches the latest use first.
        self._backward.uses = sorted(
            (-use.last, use.index, use.name) for use in self.uses if use.last
        )

    def begin_backward(self, _: torch.Tensor) -> None:
        """Gather the unit that backward reaches first; a hook of the last output."""
        reducer = current_reducer.get()
        # Why ask: a backward inside the loss function, as for a gradient penalty, is another one.
        is_own = reducer is not None and reducer.in_backward
        if is_own and self._schedule.backward_prefetch == "pre":
            # Note: this moment lies before that of every use.
            self._prefetch(-self.now - 1, most=1)

    def pre_backward(self, use: Use, source: UnitSource) -> Handles:
        """Gather a use that backward reaches, if its gather has not started; prefetch the next."""
        # Note: forward saw no use of a leaf, so a checkpoint hid it. Later calls know.
        if not use.last:
            self._learner.inside.add(use.name)
        # A frozen unit has no nodes, and tells nothing about the backward that runs.
        if source.nodes:
            self._by_shards = source.in_backward
        handles, use.ahead = use.ahead or source.start(), None
        wait_comm(handles)  # first, as in forward
        self._backward.reach(use.index)
        if source.slice_comms:
            use.source = None  # frees the slices as soon as backward has used them
        if self._schedule.backward_prefetch == "pre":
            self._prefetch(-use.last)
        return handles

    def post_backward(self, use: Use) -> None:
        """Note that backward has computed a unit's gradients."""
        self._backward.gathered.discard(use.index)
        if self._schedule.backward_prefetch == "post":
            self._prefetch(-use.began)

    def end_backward(self) -> None:
        """Drop the gathers that backward did not need after all."""
        for use in self.uses:
            handles, use.ahead = use.ahead, None
            for handle in handles or ():
                # Why wait: a collective writes to memory that must not be free before.
                handle.work.wait()
            if handles is not None:
                self._backward.reach(use.index)
                self._backward.gathered.discard(use.index)

    def backward_order(self) -> tuple[tuple[str, str], ...] | None:
        """Return the order for ``Schedule.backward``; ``None`` if ``Schedule.order`` implies it."""
        reduce_moments = zip(
            self._called, itertools.repeat("reduce"), self.ran, strict=False
        )
        gather_moments = [(use.last, "gather", use.name) for use in self.uses]
        # A use without a moment is one that backward does not gather.
        all_moments = sorted(
            [entry for entry in (*gather_moments, *reduce_moments) if entry[0]],
            reverse=True,
        )
        learned_order = [(kind, unit) for _, kind, unit in all_moments]
        used_units = {use.name for use in self.uses}
        implied_order = [
            (kind, unit)
            for unit in reversed(self.ran)
            for kind in ("gather", "reduce")
            if kind == "reduce" or unit in used_units
        ]
        return None if learned_order == implied_order else tuple(learned_order)

    def _prefetch(self, moment: int, *, most: int | None = None) -> None:
        # Why not a function that the order keeps: a cycle would keep shards in memory until Python
        # looks for garbage.
        ahead_uses = self._backward.prefetch(moment, most=most, reaches=self._reaches)
        for use_index in ahead_uses:
            source = self.uses[use_index].source
            assert source is not None, (
                "_reaches leaves out uses that backward has left for good"
            )
            self.uses[use_index].ahead = source.start()
        # Outside of value_and_grad nobody says when backward ends, so nothing is dropped early.
        if ahead_uses and (reducer := current_reducer.get()) is not None:
            reducer.at_end[self.end_backward] = None

    def _reaches(self, use_index: int) -> bool:
        """Return whether the backward that runs may reach a use, the same on every rank."""
        # Why not whether autograd still holds what the unit saved: a rank that keeps an output of
        # which the loss is no function holds more than the others.
        source = self.uses[use_index].source
        if source is None or source.changed:
            return False
        # Why ask: a backward by inputs alone reaches units of which it computes no gradient.
        return not self._by_shards or source.in_backward


@dataclass(slots=True, eq=False)
class Use:
    """One call of a unit whose leaves backward may need, as the prefetcher knows it.

    Attributes:
        index: its number among the uses of the call.
        name: the unit.
        source: what backward gathers the unit from; ``None`` once backward has left it for good.
        began: the moment at which the unit's forward began.
        last: the moment of the last time that forward used a leaf; 0 for never.
        ahead: the handles of a gather for backward that backward has not reached.
    """

    index: int
    name: str
    source: UnitSource | None
    began: int
    last: int = 0
    ahead: Handles | None = None


# --- the state of a unit between forward and backward ---------------------------------------------

# The unit whose saved tensors the hooks around it are asked for now. If the hooks compute forward
# again to answer, as a checkpoint does, that computation uses this unit's gathered buffers.
recomputing_unit: contextvars.ContextVar[Gathered | None] = contextvars.ContextVar(
    "funcshard_recomputing", default=None
)


class UnitSource:
    """What backward gathers a unit from: this rank's shard, or its slices of the gathered buffers.

    With ``reshard_after_forward=n``, ``n`` neighbours on the shard axis, such as the ranks of one
    machine, hold a slice each of the buffers after forward, in the dtype to compute in.

    Arguments:
        comms: the communication of each buffer.
        slice_comms: the communication of the slices; ``()`` for a unit without.
        shard: this rank's shard, by buffer key.

    Attributes:
        shards: the shard of each buffer.
        nodes: the autograd nodes of the buffers' gathers; a frozen buffer has none.
    """

    __slots__ = ("_sources", "_versions", "nodes", "shards", "slice_comms")

    def __init__(
        self,
        comms: Sequence[BufferComm],
        slice_comms: SliceComms,
        shard: UnitShard,
    ) -> None:
        self.shards = [shard[comm.buffer].detach() for comm in comms]
        self.nodes: list[weakref.ref[Any]] = []
        # A forward that backward computes again is followed by its backward at once.
        self.slice_comms = slice_comms if graph_task_id() == -1 else ()
        self._sources = list(zip(self.shards, comms, strict=True))
        self._versions = [version(local) for local in self.shards]

    @unseen
    def cut(self, gathered: Leaves) -> None:
        """Copy this rank's slices of the gathered buffers, whose leaves are ``gathered``."""
        for buffer_index, comm in enumerate(self.slice_comms):
            # A buffer that is not cut is gathered from its shard, as before.
            if comm is not None:
                group, first_leaf = comm.mesh.shard, gathered[buffer_index][0].detach()
                slice_numel = comm.plan.padded_numel // group.size
                # Note: the first leaf begins where the buffer does.
                buffer_begin = first_leaf.storage_offset()
                all_slices = first_leaf.as_strided(
                    (group.size, slice_numel), (slice_numel, 1), buffer_begin
                )
                # A copy, so that the gathered buffer is free.
                local_slice = own_row(all_slices, group, "shard")
                self._sources[buffer_index] = local_slice, comm
                self._versions[buffer_index] = version(local_slice)

    @property
    def in_backward(self) -> bool:
        """Whether the backward that runs computes gradients of the unit; yes without nodes."""
        if not self.nodes or graph_task_id() == -1:
            return True
        # A node that is gone belongs to a graph that was freed.
        return any(
            runs_in_backward(node) for ref in self.nodes if (node := ref()) is not None
        )

    @property
    def changed(self) -> bool:
        """Whether a source was written to since forward."""
        return [version(local) for local, _ in self._sources] != self._versions

    def start(self) -> Handles:
        """Start to gather the unit again; raise if its sources have changed."""
        if self.changed:
            raise RuntimeError(
                f"a shard of unit {self._sources[0][1].unit or '(root)'!r} was modified in place "
                "between forward and backward, which would gather other values than forward used; "
                "update shards after backward"
            )
        return [start_gather(*source, read_only=True) for source in self._sources]


def slice_comms(unit: UnitPlan, mesh: Mesh, comms: Sequence[BufferComm]) -> SliceComms:
    """Return the communication of the slices of a unit with ``post_forward_ranks``.

    Every rank has to call it, because the first call makes process groups.
    """
    assert unit.post_forward_ranks is not None, "other units keep no slices"
    topology = Topology(neighbours(mesh, unit.post_forward_ranks), sharded=True)

    def slice_comm(comm: BufferComm) -> BufferComm | None:
        # Why no slices of packed leaves: decoded, they would take more memory than the shards.
        if not comm.topology.cut or comm.plan.packing is not None:
            return None
        # Why no dtypes, and no user's functions: the slices have been cast and gathered before.
        return dataclasses.replace(
            comm,
            topology=topology,
            dtypes=CommDtypes(),
            offload=False,
            label=f"slices of {comm.label}",
            own=False,
        )

    return tuple(map(slice_comm, comms))


class Gathered:
    """One gather of a unit, from its first use in forward to its last use in backward.

    The modules of a group share a gather: one autograd node, whose backward runs once. After
    forward this object holds no buffers. Packed tensors refer to it, and it holds the buffers that
    backward has gathered again, until their last use or ``post_backward``.

    Arguments:
        f: the ``Unshard`` of the unit.
        leaves: the leaves of each buffer.
        shared: see the attribute.
        source: see the attribute.
        kept: see the attribute.
        prefetcher: that of the call; ``None`` for a unit that gathers itself again.

    Attributes:
        unit: the unit.
        leaves: the leaves of each buffer during forward; ``None`` after it.
        shared: whether other code or ranks hold the buffers too, so that outputs must not lie in
            them.
        source: what backward gathers the unit from; ``None`` if backward will not ask.
        kept: returns the handles of the buffers while the unit stays gathered.
        needed: whether backward needs any of the gathered buffers.
        runs: how many modules of a group run with it now.
        full: the buffers that backward has gathered again, while they are in memory.
    """

    __slots__ = (
        "__weakref__", "_buffer_of", "_comms", "_dtensors", "_use", "full", "kept", "leaves", "needed",
        "runs", "shared", "source", "unit",
    )  # fmt: skip

    def __init__(
        self,
        f: Any,
        leaves: Leaves,
        *,
        shared: bool,
        source: UnitSource | None,
        kept: Callable[[], Handles | None] | None,
        prefetcher: Prefetcher | None,
    ) -> None:
        # Why not f itself: the user's function may hold results, and so the graph that holds this.
        self.unit, self._comms, self._dtensors = f.unit, f.comms, f.dtensors
        self.leaves: Leaves | None = leaves
        self.shared, self.source, self.kept = shared, source, kept
        self.needed, self.runs = False, 0
        # The index of each buffer by the identity of its storage, and of its autograd node.
        # Note: nobody asks once the leaves are gone, so these ids are of no other object.
        self._buffer_of: dict[int, int] = {}
        self.full: list[torch.Tensor] | None = None
        self._use: tuple[Prefetcher, Use] | None = None
        if source is None:
            return
        if prefetcher is not None:
            prefetcher.now += 1
            use = Use(
                len(prefetcher.uses), prefetcher.ran[-1], source, began=prefetcher.now
            )
            prefetcher.uses.append(use)
            self._use = prefetcher, use
        post_backward = functools.partial(_post_backward, weakref.ref(self), self._use)
        for buffer_index, (first_leaf, *_) in enumerate(leaves):
            gather_node: Any = first_leaf.grad_fn
            self._buffer_of[storage_id(first_leaf)] = buffer_index
            if gather_node is not None:
                self._buffer_of[id(gather_node)] = buffer_index
            # Why asked: per_sample_grad gathers by other nodes.
            if hasattr(gather_node, "post_backward"):
                gather_node.post_backward = post_backward
                # Why weak: the node would keep the graph of the shards alive.
                source.nodes.append(weakref.ref(gather_node))

    # --- forward ----------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor, outer: Any = None) -> Packed:
        """Replace a saved tensor: a view of a gathered buffer by its position.

        Arguments:
            tensor: what autograd saves.
            outer: the pair of hooks around the unit, if any.
        """
        if self._dtensors is not None and is_dtensor(tensor):
            form, local = DTensorForm.of(tensor), self.pack(local_part(tensor), outer)
            return Packed(lambda: form.whole(local.unpack()), by_units=False)
        view_again = self._view_again(tensor)
        if view_again is not None:
            self.note_needed()
            return Packed(view_again)
        if outer:
            # Why: autograd calls the innermost hooks only, so these pass all other tensors to the
            # hooks around them (checkpoint, offload).
            packed = outer[0](tensor)
            by_units = isinstance(packed, Packed) and packed.by_units
            unpack_outer = functools.partial(self._unpack_outer, outer[1], packed, by_units)
            return Packed(unpack_outer, by_units)
        # Why detach: an operation that saves its own result would keep its graph alive for ever.
        return Packed(functools.partial(self._unchanged, tensor.detach(), version(tensor)))

    def note_needed(self) -> None:
        """Note that backward needs the gathered buffers."""
        self.needed = True
        if self._use is not None:
            prefetcher, use = self._use
            if not prefetcher.returned:
                prefetcher.now += 1
                use.last = prefetcher.now

    def _view_again(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """Return what makes a view of a gathered buffer again; ``None`` for another tensor."""
        assert self.leaves is not None, "autograd saves in forward"
        buffer_index = self._buffer_of.get(storage_id(tensor))
        # A view in another dtype, such as view_as_real, has other strides.
        if (
            buffer_index is not None
            and tensor.dtype == self.leaves[buffer_index][0].dtype
            and not tensor.is_conj()
        ):
            # Why from the buffer's begin: backward's buffer may begin elsewhere in its storage,
            # if a user's function makes one of the two.
            offset = tensor.storage_offset() - self.leaves[buffer_index][0].storage_offset()
            view: ViewAt = tensor.shape, tensor.stride(), offset
            return functools.partial(self._view, buffer_index, view)
        # Autocast made a copy, which autograd would keep until backward.
        # Why: casting the leaf again gives the same bits, so that copy can go with the buffer.
        cast_source = cast_of(tensor)
        if cast_source is None:
            return None
        cast_tensor, source_node, leaf_index, is_transposed = cast_source
        buffer_index = self._buffer_of.get(id(source_node))
        if buffer_index is None:
            return None
        size, stride, offset = self._comms[buffer_index].leaf_views[leaf_index]
        first_leaf = self.leaves[buffer_index][0]
        if is_transposed:
            size, stride = size[::-1], stride[::-1]
        # Why strides: a cast to another memory format moves elements, and so does a permutation
        # that is no transpose.
        same_layout = (
            cast_tensor.shape == size
            and cast_tensor.stride() == stride
            and not cast_tensor.storage_offset()
        )
        if (
            not same_layout
            or (is_transposed and len(size) != 2)
            or cast_tensor.device != first_leaf.device
        ):
            return None
        cast_view: ViewAt = tensor.shape, tensor.stride(), tensor.storage_offset()
        leaf_view: ViewAt = size, stride, offset
        return functools.partial(
            self._view, buffer_index, leaf_view, tensor.dtype, cast_view
        )

    def close(self) -> None:
        """End the unit's forward, unless a module runs: keep no more than slices for backward."""
        if self.runs or self.leaves is None:
            return
        leaves, self.leaves = self.leaves, None
        if self.needed and self.source is not None and self.source.slice_comms:
            self.source.cut(leaves)

    # --- backward ---------------------------------------------------------------------------------

    @unseen
    def buffers(self) -> list[torch.Tensor]:
        """Return the gathered buffers; gather them again if they are free."""
        if self.full is not None:
            return self.full
        assert self.source is not None, "backward asks for what it may ask for"
        if _log.isEnabledFor(logging.DEBUG):
            _log.debug("pre_backward of unit %r", self.unit.title)
        if self._use is not None:
            prefetcher, use = self._use
            handles = prefetcher.pre_backward(use, self.source)
        else:  # a unit that is called by itself, or stays gathered
            handles = (self.kept and self.kept()) or self.source.start()
            wait_comm(handles)
        # Why all buffers, whichever is asked for: a plan can predict this order.
        self.full = [handle.finish() for handle in handles]
        return self.full

    def _view(
        self,
        buffer_index: int,
        view: ViewAt,
        cast_dtype: torch.dtype | None = None,
        cast_view: ViewAt = ((), (), 0),
    ) -> torch.Tensor:
        """Return a saved view of a gathered buffer, or of the cast of such a view."""
        # as_strided copies nothing, and the version counter is that of the new buffer.
        full_buffer, (size, stride, offset) = self.buffers()[buffer_index], view
        leaf_or_view = full_buffer.as_strided(
            size, stride, full_buffer.storage_offset() + offset
        )
        if cast_dtype is None:
            return leaf_or_view
        return leaf_or_view.to(cast_dtype).as_strided(*cast_view)

    def _unchanged(self, tensor: torch.Tensor, saved_version: int) -> torch.Tensor:
        """Return a saved tensor that lies in no gathered buffer."""
        # Why here: autograd checks versions itself only for tensors that no hook packed.
        if version(tensor) != saved_version:
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that unit {self.unit.title!r} needs for "
                "its gradients was modified in place after forward had saved it; modify a copy"
            )
        return tensor

    def _unpack_outer(
        self, unpack: Callable[[Any], torch.Tensor], packed: Any, by_units: bool
    ) -> torch.Tensor:
        """Return a saved tensor that the hooks around the unit packed."""
        if self.needed and recomputing_unit.get() is None and not by_units:
            # Why now: the outer hooks may compute something again, and a plan predicts this order.
            self.buffers()
        # Units that the outer hooks call again find this one gathered.
        context_token = recomputing_unit.set(self)
        try:
            return unpack(packed)
        finally:
            recomputing_unit.reset(context_token)

    # --- a part of forward that backward computes again -------------------------------------------

    def handles_for(self, unit: UnitPlan, shard: UnitShard) -> Handles | None:
        """Return finished handles, if gathering ``shard`` would give the same."""
        assert self.source is not None
        shard_pairs = list(zip(self._comms, self.source.shards, strict=True))
        same_data = all(
            address(shard[comm.buffer]) == address(local) for comm, local in shard_pairs
        )
        if unit is not self.unit or not same_data:
            return None
        return [
            AllGatherHandle(DONE, comm, shared=True, full=full)
            for comm, full in zip(self._comms, self.buffers(), strict=True)
        ]

    @unseen
    def leaves_again(self) -> list[torch.Tensor]:
        """Return the leaves as the model uses them, gathered again, without a graph."""
        # Why requires_grad: else a checkpoint's second run would save fewer tensors than
        # its first. No gradient reaches these leaves.
        leaf_tensors = [
            leaf.requires_grad_(comm.plan.trainable)
            for comm, full_buffer in zip(self._comms, self.buffers(), strict=True)
            for leaf in decoded_views(full_buffer.detach(), comm.plan)
        ]
        if self._dtensors is None:
            return leaf_tensors
        return as_dtensors(leaf_tensors, self._dtensors)


def _post_backward(
    gathered_ref: weakref.ref[Gathered], planned_use: tuple[Prefetcher, Use] | None
) -> None:
    gathered = gathered_ref()  # weak: autograd may have freed all that it saved
    if gathered is not None:
        gathered.full = None
    if planned_use is not None:
        prefetcher, use = planned_use
        prefetcher.post_backward(use)


# Size, stride and offset: in the gathered buffer, or in the storage of a cast.
ViewAt = tuple[Sequence[int], Sequence[int], Any]


@dataclass(frozen=True, slots=True)
class Packed:
    """What autograd keeps in place of a saved tensor.

    Attributes:
        unpack: returns the tensor.
        by_units: whether no hooks but those of units packed it. Others may compute it again.
    """

    unpack: Callable[[], torch.Tensor]
    by_units: bool = True
