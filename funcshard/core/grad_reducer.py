"""Gradients of one call of ``value_and_grad``, from backward through reductions to their sums.

``value_and_grad`` activates a ``GradReducer`` around the user's loss function, and the units find
it in a context variable. In backward a unit passes its unreduced gradient to the reducer, and
autograd continues while the reduction runs.

A call may run several forwards and backwards, one for each micro-batch. ``reduce`` says what adds
up over them: the reduced gradients, the unreduced ones, or the sums over the shard axis.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from funcshard._utils.torch_private import graph_task_id, storage_id, unwrapped, version
from funcshard.comm import DONE, Mesh, concatenate
from funcshard.core.buffer_comm import (
    BufferComm,
    Handles,
    Leaves,
    ReduceHandle,
    UnitShard,
    start_reduce,
    start_scatter,
    wait_comm,
)
from funcshard.plan import BufferPlan, Reduce, UnitPlan, buffer_mode, unit_mode

_log = logging.getLogger("funcshard.core")

# Reductions that run at a time. One more waits for the oldest, so that few full gradients exist.
_MOST_RUNNING = 1

# on_grad(unit, buffer, 1-D gradient), which may write to the gradient.
OnGrad = Callable[[str, BufferPlan, torch.Tensor], None]


@dataclass(slots=True, eq=False)
class ShardUse:
    """The units and collectives of the functions that run inside ``noting``.

    The mean over ranks needs to know over which ranks a function communicates, and by which units
    it gathers each shard. ``GradReducer`` finds its leaves by ``id``. A transform wraps them, and
    ``remat`` takes them out again, so a ``ShardUse`` finds them by the memory below all that.

    Attributes:
        mesh: the mesh over whose ranks the caller takes the mean; ``None`` for that of the
            collectives that are met.
        worlds: the meshes of the units met, by world size; without ``mesh``, those of all other
            collectives too.
        comms: the communication of the shards that units gathered, by their memory.
    """

    mesh: Mesh | None = None
    worlds: dict[int, Mesh] = field(default_factory=dict)
    comms: dict[tuple[int, int], BufferComm] = field(default_factory=dict)

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note what happens in the ``with`` block; so do all blocks around it."""
        context_token = shard_uses.set((*shard_uses.get(), self))
        try:
            yield
        finally:
            shard_uses.reset(context_token)

    def note(self, shard: torch.Tensor, comm: BufferComm) -> None:
        """Note that a unit gathers a shard."""
        self.worlds[comm.mesh.world_size] = comm.mesh
        self.comms[_memory(shard)] = comm

    def comm(self, shard: torch.Tensor) -> BufferComm | None:
        """Return the communication of a shard's buffer; ``None`` if no unit has gathered it."""
        return self.comms.get(_memory(shard))


@dataclass(slots=True, eq=False)
class LeafGradient:
    """One leaf that a call differentiates with respect to, and its gradient on the way.

    Attributes:
        shape: its shape, ``[*batch, shard_numel]`` with the dims of vmap.
        gathered: the leaves of its buffer, if the shard is gathered already.
        comm: the communication of its buffer; ``None`` if no unit has gathered the leaf.
        mode: when its gradients are reduced; ``""`` if all are reduced at once.
        awaited: how many gradients the coming backward will still compute.
        held: the sum of the unreduced gradients of earlier micro-batches.
        partial: the sum over the shard axis, if its all-reduces wait for the last micro-batch.
        kept: its unit, if that stays gathered.
        total: the sum of the reduced gradients.
        direct: the sum of the gradients that came without an all-gather, as from a penalty on the
            shard itself.
        divisor: the number by which its gradients were divided before they were reduced.
    """

    # Note: no field holds the leaf itself, because the graph of an output that the user keeps
    # refers to this object.
    shape: torch.Size
    gathered: Sequence[torch.Tensor] | None = None
    comm: BufferComm | None = None
    mode: str = ""
    awaited: int = 0
    held: torch.Tensor | None = None
    partial: torch.Tensor | None = None
    kept: KeptUnit | None = None
    total: torch.Tensor | None = None
    direct: torch.Tensor | None = None
    divisor: int = 1


class KeptUnit(NamedTuple):
    """The gathered buffers of a unit that stays gathered within one call of ``value_and_grad``.

    A second forward finds them here, and so does the recomputation of a checkpoint. The unit is
    dropped when the gradients of all of its uses have come, or else at the end of backward.

    Attributes:
        unit: the unit.
        leaves: what is known of its shards.
        shard_states: identity and version of each shard when it was gathered.
        handles: the handles of its all-gathers.
    """

    unit: UnitPlan
    leaves: Sequence[LeafGradient]
    shard_states: list[tuple[int, int]]
    handles: Handles


def _states(shards: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    # Why not the shards: their ids are those of the leaves, which live as long as the reducer.
    return [(id(shard), version(shard)) for shard in shards]


class GradReducer:
    """The leaves that one call differentiates with respect to, and their gradients on the way.

    Arguments:
        leaves: the tensors to differentiate with respect to.
        on_grad: called with each unreduced gradient, before its reduction.
        on_scattered: called with each sum over the shard axis, before it is reduced along other
            axes; with the unreduced gradient, if its buffer is not cut.
        reduce: when the gradients of several backwards are reduced.
        gathered: the gathered parts of each leaf, if units are to gather nothing.
        mesh: the mesh over whose ranks the caller takes the mean, if known.

    Attributes:
        leaves: the leaves, and their gradients.
        leaf_by_id: the same by the identity of the tensor.
        use: what the loss function communicates over, and the shards that units gathered and that
            aren't leaves, such as leaves that a transform inside the loss has wrapped.
        accumulating: whether another micro-batch follows the one that runs.
        zero_weight: whether the micro-batch that runs counts nothing, infinities and NaN included.
        received: whether a gradient of the micro-batch that runs has arrived.
        has_gathered: whether units gather nothing.
        at_end: functions to call once at the end of the backward that runs.
        task: autograd's number of the reducer's backward, while that runs.
        running: the reductions that have started.
    """

    def __init__(
        self,
        leaves: Sequence[torch.Tensor],
        *,
        on_grad: OnGrad | None = None,
        on_scattered: OnGrad | None = None,
        reduce: Reduce = "each",
        gathered: Leaves = (),
        mesh: Mesh | None = None,
    ) -> None:
        self.leaves = [LeafGradient(shard.shape) for shard in leaves]
        self.use = ShardUse(mesh)
        self.received = False
        self.has_gathered = bool(gathered)
        self.at_end: dict[Callable[[], None], None] = {}
        # Why by id: the tree may hold the shards of several models, so unit and buffer name no
        # leaf; and a shard that ``loss_fn`` computes from a leaf has the leaf's unit and buffer,
        # and is another.
        self.leaf_by_id = {
            id(shard): leaf for shard, leaf in zip(leaves, self.leaves, strict=True)
        }
        self._on_grad, self._on_scattered, self._reduce = on_grad, on_scattered, reduce
        self._hook = ""  # Errors name the one that is in use.
        if on_scattered is not None:
            self._hook = "on_reduce_scattered"
        if on_grad is not None:
            self._hook = "on_grads"
        self.task: int | None = None
        self.accumulating = False
        self.zero_weight = False
        self.running: list[tuple[LeafGradient, ReduceHandle]] = []
        for leaf, gathered_leaves in zip(self.leaves, gathered, strict=False):
            leaf.gathered = gathered_leaves

    # --- forward ----------------------------------------------------------------------------------

    def note_gather(self, shard: torch.Tensor, comm: BufferComm) -> LeafGradient | None:
        """Note that a unit gathers a shard; return what is known of it, if it is a leaf."""
        mesh = comm.mesh
        # The mean is over these ranks; evaluate raises if there are several numbers of them.
        self.use.worlds[mesh.world_size] = mesh
        leaf = self.leaf_by_id.get(id(shard))
        if leaf is None:
            self._check_computed(shard, comm)
            self.use.note(shard, comm)
            return None
        leaf.comm = leaf.comm or comm
        return leaf

    def _check_computed(self, shard: torch.Tensor, comm: BufferComm) -> None:
        """Raise if a shard that ``loss_fn`` computed from others needs to be a leaf."""
        unit_name = comm.unit or ""
        feature_name = self._hook
        if not feature_name and (mode := unit_mode(self._reduce, unit_name)) != "each":
            feature_name = f"reduce={mode!r}"
        # Why unwrapped: inside torch.func.jvp a shard does not say that it requires a gradient.
        has_grad = shard.requires_grad or (self._hook and unwrapped(shard).requires_grad)
        if feature_name and comm.plan.trainable and has_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{feature_name} needs shards that are gathered as they are; loss_fn computed the "
                f"shard {comm.buffer!r} of unit {unit_name or '(root)'!r}, by arithmetic, a "
                "torch.func transform or remat under one: leave this out, or compute the shard "
                "before"
            )

    def find_kept(self, comms: Sequence[BufferComm], shard: UnitShard) -> Handles | None:
        """Return the handles of a unit that stays gathered, if shard and ``comms`` are the same."""
        unit_shards = [shard[comm.buffer] for comm in comms]
        # Note: all shards of a unit are kept and dropped together, so the first one tells.
        first_leaf = self.leaf_by_id.get(id(unit_shards[0])) if unit_shards else None
        if first_leaf is None or first_leaf.kept is None:
            return None
        kept_unit = first_leaf.kept
        same_comms = [handle.comm for handle in kept_unit.handles] == list(comms)
        same_shards = _states(unit_shards) == kept_unit.shard_states
        return kept_unit.handles if same_comms and same_shards else None

    def keep(
        self,
        unit: UnitPlan,
        comms: Sequence[BufferComm],
        shard: UnitShard,
        handles: Handles | None,
        *,
        needed: bool,
    ) -> Handles | None:
        """Keep a unit gathered until its backward; return its handles, or else ``handles``.

        Arguments:
            unit: the unit.
            comms: the communication of its buffers.
            shard: this rank's shard of the unit.
            handles: the handles of its all-gathers, if they have started.
            needed: whether backward may need the leaves.
        """
        kept_handles = self.find_kept(comms, shard)
        if kept_handles is not None or handles is None or not needed:
            return kept_handles or handles
        unit_shards = [shard[comm.buffer] for comm in comms]
        leaf_gradients = [
            leaf
            for local in unit_shards
            if (leaf := self.leaf_by_id.get(id(local))) is not None
        ]
        # A shard that is computed from others has no gradient here that could end its stay.
        if len(leaf_gradients) == len(unit_shards) and any(comm.copied for comm in comms):
            for handle in handles:
                handle.share()
            kept_unit = KeptUnit(
                unit=unit,
                leaves=leaf_gradients,
                shard_states=_states(unit_shards),
                handles=handles,
            )
            for leaf in leaf_gradients:
                leaf.kept = kept_unit
        return handles

    # --- backward ---------------------------------------------------------------------------------

    @property
    def in_backward(self) -> bool:
        """Whether the reducer's own backward runs, not one inside it, such as a checkpoint's."""
        return self.task is not None and self.task == graph_task_id()

    def check_hooks(self) -> None:
        """Raise if a hook is to see gradients that a backward inside the reducer's own computes."""
        if self._hook and self.task is not None:
            raise ValueError(
                f"{self._hook} sees the gradients that the backward of value_and_grad computes; "
                "found a backward inside it that reduces gradients of shards, as in "
                f"torchdiffeq.odeint_adjoint: leave {self._hook} out, and change the gradients that "
                "you get"
            )

    def enter_backward(self, _: torch.Tensor) -> None:
        """Take the backward that runs as the reducer's; a hook of the loss."""
        self.task = graph_task_id()

    def add(self, leaf: LeafGradient, parts: list[torch.Tensor], comm: BufferComm) -> None:
        """Take the unreduced gradient of a leaf: the concatenation of 1-D ``parts``."""
        self.received = True
        leaf.comm = comm
        leaf.awaited -= 1
        more_awaited = leaf.awaited > 0
        # The last gradient of the unit has come, so no forward or recomputation needs it.
        if not more_awaited and leaf.kept is not None:
            self._drop_kept(leaf.kept)
        # Looked up once for each leaf: globs are slow.
        if self._reduce != "each" and not leaf.mode:
            chosen_mode, topology = unit_mode(self._reduce, comm.unit or ""), comm.topology
            leaf.mode = buffer_mode(
                chosen_mode, cut=topology.cut, repeated=bool(topology.repeated)
            )
        is_held = leaf.mode == "once"
        if self.zero_weight or is_held or self._hook:
            # Why cat: of one part it makes a copy, too, which is held or written to.
            whole_gradient = torch.cat(parts)
            if comm.dtypes.reduced is not None:
                whole_gradient = whole_gradient.to(comm.dtypes.reduced)
            parts = [whole_gradient]
        # Infinity times zero is NaN, and this micro-batch must count nothing.
        if self.zero_weight:
            parts[0].nan_to_num_(0.0, 0.0, 0.0)
        # Earlier micro-batches come first in the sum, as in one process.
        if leaf.held is not None:
            parts, leaf.held = [leaf.held.add_(parts[0])], None
        # More gradients of the leaf come before its only reduction.
        if is_held and (self.accumulating or more_awaited):
            leaf.held = parts[0]
        else:
            self._start(leaf, parts, comm)

    def post_backward(self) -> None:
        """End this backward: wait for every reduction."""
        self.task = None
        # The prefetcher drops what it gathered for nothing.
        while self.at_end:
            self.at_end.popitem()[0]()
        for leaf in self.leaves:
            leaf.awaited = 0
            if leaf.held is not None and leaf.comm is not None and not self.accumulating:
                grad_parts, leaf.held = [leaf.held], None
                self._start(leaf, grad_parts, leaf.comm)
        while self.running:
            self._finish_oldest()
        for leaf in self.leaves:
            if leaf.kept is not None:
                self._drop_kept(leaf.kept)
            if leaf.partial is not None and leaf.comm is not None and not self.accumulating:
                # The last backward did not reach the leaf.
                partial_sum, leaf.partial = leaf.partial, None
                self.running.append((leaf, ReduceHandle(partial_sum, DONE, leaf.comm)))
                self._finish_oldest()
        _log.debug("root post_backward")

    def _drop_kept(self, kept: KeptUnit) -> None:
        # The next micro-batch uses the same gathered buffers.
        # Why a rule, and not whether the memory is still in use: all ranks have to gather the same.
        if self.accumulating and not kept.unit.reshard_after_backward:
            return
        # Why all its buffers: see ``ShardToLeaves.backward``.
        for leaf in kept.leaves:
            leaf.kept = None

    def _start(
        self, leaf: LeafGradient, parts: list[torch.Tensor], comm: BufferComm
    ) -> None:
        # Note: with a hook, ``add`` has made one part of all, to which the hook may write.
        if self._on_grad is not None:
            self._on_grad(comm.unit or "", comm.plan, parts[0])
        if comm.dtypes.divided:
            parts = _divided(leaf, parts, comm)
        # Without a reduce-scatter, the hook comes before the only stage.
        if self._on_scattered is not None and not comm.topology.cut:
            self._on_scattered(comm.unit or "", comm.plan, parts[0])
        # Why now: their memory is free before the next one takes more.
        wait_comm([running_handle for _, running_handle in self.running])
        if comm.topology.cut:
            reduce_handle = start_scatter(parts, leaf.shape, comm)
        else:
            reduce_handle = start_reduce(
                concatenate(parts).view(leaf.shape), comm, donated=True
            )
        self.running.append((leaf, reduce_handle))
        while len(self.running) > _MOST_RUNNING:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        leaf, reduce_handle = self.running.pop(0)
        comm = reduce_handle.comm
        awaits_more = leaf.mode == "shard_each" and self.accumulating
        # Only these look at the sum between reduce-scatter and all-reduce.
        has_stages = (
            awaits_more or leaf.partial is not None or self._on_scattered is not None
        )
        if has_stages and comm.topology.cut:
            # Note: only the first stage; ``finish`` below would run the all-reduces too.
            reduce_handle.work.wait()
            if leaf.partial is not None:
                reduce_handle.out.add_(leaf.partial)
                leaf.partial = None
            if awaits_more:
                leaf.partial = reduce_handle.out
                return
            if self._on_scattered is not None:
                self._on_scattered(comm.unit or "", comm.plan, reduce_handle.out)
        reduced_grad = reduce_handle.finish()
        # A shard that is gathered twice in one call has two reductions, which add up in the order
        # of backward.
        leaf.total = reduced_grad if leaf.total is None else leaf.total.add_(reduced_grad)


def _divided(
    leaf: LeafGradient, parts: list[torch.Tensor], comm: BufferComm
) -> list[torch.Tensor]:
    rank_count = comm.plan.shards * math.prod(
        group.size for _, group in comm.topology.repeated
    )
    # A power of two near the square root of the ranks divides float16 without rounding.
    divisor = 1
    while divisor * divisor < rank_count:
        divisor *= 2
    if divisor == 1:
        return parts
    leaf.divisor = divisor
    # Note: a single part may be written to, as ``_parts`` returns no leaf's memory alone.
    whole_gradient = parts[0] if len(parts) == 1 else torch.cat(parts)
    return [whole_gradient.div_(divisor)]


# The active reducer, if any.
current_reducer: contextvars.ContextVar[GradReducer | None] = contextvars.ContextVar(
    "funcshard_reducer", default=None
)
# Those of all functions of torch.func around the code that runs.
shard_uses: contextvars.ContextVar[tuple[ShardUse, ...]] = contextvars.ContextVar(
    "funcshard_shard_uses", default=()
)


@contextlib.contextmanager
def activate(reducer: GradReducer) -> Iterator[GradReducer]:
    """Let units find ``reducer`` in the ``with`` block."""
    context_token = current_reducer.set(reducer)
    try:
        yield reducer
    finally:
        current_reducer.reset(context_token)
        # Why: after an error the traceback keeps the reducer alive, which should hold nothing.
        reducer.task = None
        reducer.at_end.clear()
        reducer.running.clear()
        for leaf in reducer.leaves:
            leaf.held = leaf.partial = leaf.kept = None


def note_collective(mesh: Mesh) -> None:
    """Tell active functions that take a mean that their loss communicates over ``mesh``."""
    uses, reducer = shard_uses.get(), current_reducer.get()
    if reducer is not None:
        uses = (*uses, reducer.use)
    for use in uses:
        if use.mesh is None:
            use.worlds[mesh.world_size] = mesh


def _memory(shard: torch.Tensor) -> tuple[int, int]:
    shard = unwrapped(shard)
    return storage_id(shard), int(shard.storage_offset())
