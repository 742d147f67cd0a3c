"""One unit: ``unshard`` gathers it for a function, ``reshard`` frees it until backward.

Both return an ``Unshard``, a pure function; its ``open`` makes a ``Gathered``, and ``run`` computes
with it. All state of a call lives in that call and in the autograd graph that it returns, so calls
may overlap, repeat, and fail at any point.

A unit's forward must not write to its gathered leaves: ranks of one machine may share their memory,
and the changes would be lost. ``Unshard.run`` raises for a forward that writes; if one returns
a gathered leaf itself, ``copy_aliased_outputs`` returns a copy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from funcshard._utils import tree
from funcshard._utils.options import module_remedy, outline, some
from funcshard._utils.tensors import byte_view
from funcshard._utils.torch_private import (
    TorchDispatchMode,
    dispatch_modes,
    graph_task_id,
    hooks_allowed,
    in_selective_checkpoint,
    inside_hooks,
    recording_or_transforming,
    storage_id,
    stored_parts,
    transforms_active,
    unseen,
    untraced,
    unwrapped,
    version,
)
from funcshard._utils.tree import cast_tree, map_tensors, tensors_in
from funcshard.comm import Mesh
from funcshard.core.buffer_comm import (
    BufferComm,
    Handles,
    Leaves,
    UnitShard,
    start_gather,
)
from funcshard.core.checks import same_axes
from funcshard.core.dtensor_leaves import DTensorForm, as_dtensors, dtensor_forms
from funcshard.core.flat_buffer import ShardToLeaves
from funcshard.core.grad_reducer import GradReducer, current_reducer, shard_uses
from funcshard.core.prefetcher import (
    Gathered,
    Prefetcher,
    SliceComms,
    UnitSource,
    recomputing_unit,
    slice_comms,
)
from funcshard.plan import (
    BufferPlan,
    ChooseCast,
    MixedPrecision,
    Plan,
    UnitPlan,
    axes_text,
    cast_of,
)

_log = logging.getLogger("funcshard.core")


def unshard(
    apply: Callable[..., Any], unit: UnitPlan, mesh: Mesh, *, cast: ChooseCast | None = None
) -> Unshard:
    """Turn a function of a unit's leaves into a function of this rank's shard of the unit.

    Forward all-gathers the shard, and calls ``apply`` with the leaves as views of the gathered
    buffer. Backward reduce-scatters the leaves' gradients; if the unit is repeated along an axis,
    all-reduces add up those of the copies.

    The gathered leaves stay in memory as long as the autograd graph does, unless you ``reshard``.

    Arguments:
        apply: your ``apply(leaves, *args, **kwargs)``. ``leaves`` is the part of the parameter tree
            at the unit's path, without the leaves of units inside this one.
        unit: the unit, ``plan.units[name]``.
        mesh: the ranks, in the plan's shape.
        cast: ``cast(unit, buffer)`` -> the ``Cast`` that replaces the cast to ``param_dtype`` for
            that buffer, or ``None`` to keep it.

    Returns:
        ``f(shard, *args, **kwargs)``, which returns the result of ``apply``; ``shard`` is
        ``shards[unit.name]``. ``handle = f.start(shard)`` starts the gather early, for
        ``f(handle, *args, **kwargs)``.

    Raises:
        ValueError: the mesh does not have the plan's shape, or has no DeviceMesh for a leaf that is
            a DTensor; or, when ``f`` is called, ``shard`` is not this rank's shard of the unit.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(3, 2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     f = fs.unshard(lambda leaves, x: x @ leaves["w"], plan.units[""], mesh)
        ...     return f(shards[""], torch.ones(1, 3)).tolist()
        >>> fs.simulate(main, world_size=2)
        [[[3.0, 3.0]], [[3.0, 3.0]]]
    """
    if isinstance(apply, nn.Module) and next(apply.parameters(), None) is not None:
        raise TypeError(
            "unshard takes a function of leaves; found a module with its own parameters, "
            f"{type(apply).__name__}: {module_remedy(apply, 'apply')}"
        )
    if not callable(apply) or not isinstance(unit, UnitPlan) or not isinstance(mesh, Mesh):
        raise TypeError(
            f"unshard takes a function of leaves, a unit and a mesh; found {type(apply).__name__}, "
            f"{type(unit).__name__} and {type(mesh).__name__}: a unit is plan.units[name], and its "
            "name for the root is ''"
        )
    if not same_axes(unit.mesh_axes, mesh):
        raise ValueError(
            f"unit {unit.title!r} was planned for a mesh of {axes_text(unit.mesh_axes)} ranks; "
            f"found {mesh.shape}: make the plan with make_plan(params, mesh)"
        )
    return Unshard(apply, unit, mesh, unit_comms(unit, mesh, cast))


def unit_comms(
    unit: UnitPlan, mesh: Mesh, cast: ChooseCast | None
) -> tuple[BufferComm, ...]:
    """Return the communication of each buffer of a unit."""
    casts = [
        None if cast is None else cast_of(cast, unit, buffer) for buffer in unit.buffers
    ]
    buffer_casts = zip(unit.buffers, casts, strict=True)
    return tuple([BufferComm.of(mesh, unit, *buffer_cast) for buffer_cast in buffer_casts])


def reshard(f: Unshard) -> Unshard:
    """Turn a function from ``unshard`` into one that frees the leaves from forward to backward.

    The gathered leaves are freed when forward returns, and gathered again when backward needs the
    first of them. In between, autograd keeps the shape and the position of each view of the
    gathered buffer, and not its data.

    If the plan lets a number of ranks hold the unit after forward, every rank of the mesh has to
    call ``reshard``. Under ``torch.func`` transforms, which allow no saved-tensor hooks, the leaves
    stay gathered; use ``remat`` there.

    Arguments:
        f: a function that ``unshard`` returned.

    Returns:
        A function of the same arguments and results.

    Raises:
        TypeError: ``f`` did not come from ``unshard``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(3, 2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     apply = lambda leaves, x: (x @ leaves["w"]).sum()
        ...     f = fs.reshard(fs.unshard(apply, plan.units[""], mesh))
        ...     shards = fs.shard(params, plan, mesh)
        ...     loss, grads = fs.value_and_grad(lambda s: f(s[""], torch.ones(1, 3)))(shards)
        ...     return loss.item(), grads[""]["float32"].tolist()
        >>> fs.simulate(main, world_size=2)
        [(6.0, [1.0, 1.0, 1.0]), (6.0, [1.0, 1.0, 1.0])]
    """
    if not isinstance(f, Unshard) or f.freed:
        raise TypeError(
            f"reshard takes what unshard returned; found {f!r}: write reshard(unshard(apply, unit, "
            "mesh))"
        )
    slices: SliceComms = ()
    if f.unit.post_forward_ranks is not None:
        slices = slice_comms(f.unit, f.mesh, f.comms)
    return dataclasses.replace(f, freed=True, slices=slices)


@dataclass(slots=True, eq=False)
class FirstLook:
    """Finds leaves that a function wrote to through ``.data``, which no version of theirs counts.

    It compares a sample of each leaf's values before and after the first call.

    Attributes:
        pending: whether no call has been compared that left the leaves alone.
    """

    pending: bool = True

    def begin(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return samples to compare with, or ``None`` if there is nothing to compare."""
        # Note: the values of tensors cannot be read there, and those of subclasses may communicate.
        # In inference mode, a forward may write to its leaves.
        in_inference = torch.is_inference_mode_enabled()
        if (
            in_inference
            or recording_or_transforming()
            or not all(map(_is_readable, leaves))
        ):
            return None
        return list(map(_sample, leaves))

    def end(self, leaves: Sequence[torch.Tensor], before: list[torch.Tensor]) -> int | None:
        """Return the index of the first leaf that has other values now, or ``None``."""
        for index, (leaf, sample) in enumerate(zip(leaves, before, strict=True)):
            if not torch.equal(_sample(leaf), sample):
                return index
        self.pending = False
        return None


def _is_readable(leaf: torch.Tensor) -> bool:
    return type(leaf) in (torch.Tensor, nn.Parameter) and not leaf.is_meta


def _sample(leaf: torch.Tensor) -> torch.Tensor:
    stride = 1 + leaf.numel() // 64
    return byte_view(leaf.detach().reshape(-1)[::stride].clone())


@dataclass(frozen=True, slots=True)
class Unshard:
    """The function that ``unshard`` or ``reshard`` returns: gather a unit, then run ``apply``.

    Attributes:
        apply: the function of the unit's leaves.
        unit: the unit.
        mesh: the ranks.
        comms: the communication of each buffer.
        listed: whether ``apply`` takes the leaves as a list, in the unit's order, and then the
            ``Gathered``.
        freed: whether the leaves are freed between forward and backward.
        slices: the communication of the slices that ranks hold in between, if any.
        frees: whether that frees memory: the gathered leaves take some besides the shard's.
        trainable: whether any leaf gets a gradient.
        dtensors: the form of each leaf that is a DTensor; ``None`` if there is none.
        first_look: finds writes through ``.data`` in the first call.
    """

    apply: Callable[..., Any]
    unit: UnitPlan
    mesh: Mesh
    comms: tuple[BufferComm, ...]
    listed: bool = False
    freed: bool = False
    slices: SliceComms = ()
    frees: bool = field(init=False, compare=False)
    trainable: bool = field(init=False, compare=False)
    dtensors: tuple[DTensorForm | None, ...] | None = field(
        init=False, compare=False, default=None
    )
    first_look: FirstLook = field(init=False, compare=False, default_factory=FirstLook)

    def __post_init__(self) -> None:
        # Why here: every call asks for these.
        is_copied = self.unit.sharded and any(comm.copied for comm in self.comms)
        object.__setattr__(self, "frees", self.freed and is_copied)
        object.__setattr__(
            self, "trainable", any(buffer.trainable for buffer in self.unit.buffers)
        )
        if any(leaf.placements for leaf in self.unit.leaves):
            object.__setattr__(self, "dtensors", dtensor_forms(self.unit.leaves, self.mesh))

    @untraced
    def __call__(
        self, shard: UnitShard | UnshardHandle, /, *args: Any, **kwargs: Any
    ) -> Any:
        handles = None
        if isinstance(shard, UnshardHandle):
            shard, handles = shard.take(self)
        gathered = self.open(shard, handles)
        try:
            return self.run(gathered, args, kwargs)
        finally:
            gathered.close()

    @untraced
    def start(self, shard: UnitShard) -> UnshardHandle:
        """Start to gather the unit for a later call; pass the result there in place of the shard.

        A function from ``unshard`` takes the handle any number of times, and the gathered leaves
        stay in memory as long as you keep it; one from ``reshard`` takes it once. Every rank has to
        start the same gathers in the same order. Under ``torch.func`` transforms the gather starts
        with the call.
        """
        check_shard(self.unit, shard, self.mesh)
        # Why None under a transform: it has to see the all-gather.
        handles: Handles | None = None
        if not transforms_active():
            handles = [
                start_gather(shard[comm.buffer].detach(), comm).share()
                for comm in self.comms
            ]
        return UnshardHandle(
            unit=self.unit,
            shard=shard,
            _comms=self.comms,
            _handles=handles,
            _versions=[version(local) for local in shard.values()],
            _reducer=current_reducer.get(),
        )

    @unseen
    def open(
        self,
        shard: UnitShard,
        handles: Handles | None = None,
        prefetcher: Prefetcher | None = None,
    ) -> Gathered:
        """Gather the unit, differentiably, for one or more runs of its modules.

        Arguments:
            shard: this rank's shard of the unit.
            handles: the handles of the unit's all-gathers, if these have started.
            prefetcher: that of the call of a sharded function; ``None`` outside of one.
        """
        has_started = handles is not None
        if not has_started:
            check_shard(self.unit, shard, self.mesh)
        saves = torch.is_grad_enabled() and hooks_allowed()
        # A checkpoint around the unit calls it again in backward, where its buffers are gathered.
        recomputing = recomputing_unit.get()
        if saves and self.frees and not has_started and recomputing is not None:
            handles = recomputing.handles_for(self.unit, shard)
        reducer, gathered_leaves = current_reducer.get(), []
        # Without handles, the Function starts each gather itself, so that transforms see it.
        for comm, handle in zip(
            self.comms, handles or itertools.repeat(None), strict=False
        ):
            local_shard = shard[comm.buffer]
            for use in shard_uses.get():
                use.note(local_shard, comm)
            leaf = None if reducer is None else reducer.note_gather(local_shard, comm)
            # per_sample_grad differentiates by leaves that it gathered itself.
            leaves: Any = leaf and leaf.gathered
            if leaves is None:
                # A frozen buffer has no autograd node, so that backward does not reduce it.
                if not comm.plan.trainable:
                    local_shard = local_shard.detach()
                # Note: a gather that starts here shares memory under transforms alone.
                # Elsewhere outputs may lie in it; see ``shared`` below.
                leaves = ShardToLeaves.apply(local_shard, comm, handle, transforms_active())
                # Why look at the gathered leaf: a Function under no_grad is not told so.
                # Why not in backward: a recomputation's gathers bring it no gradient.
                if leaf is not None and reducer is not None and reducer.task is None:
                    first_leaf = leaves[0]
                    leaf.awaited += (
                        first_leaf.requires_grad or unwrapped(first_leaf).requires_grad
                    )
            gathered_leaves.append(tuple(leaves))
        source = kept = None
        if saves:
            source = UnitSource(self.comms, self.slices, shard)
            # The unit stays gathered, so a recomputation in backward may find the same buffers.
            if has_started and not self.frees and reducer is not None:
                kept = functools.partial(reducer.find_kept, self.comms, shard)
        return Gathered(
            self,
            gathered_leaves,
            shared=handles is not None or bool(transforms_active()),
            source=source,
            kept=kept,
            # Why not without a started gather: the prefetcher does not know a unit that gathered
            # for itself.
            prefetcher=prefetcher if self.frees and has_started else None,
        )

    def run(self, gathered: Gathered, args: Any, kwargs: Any) -> Any:
        """Call ``apply`` with the leaves of an open gather; cast as the precision says."""
        leaves = gathered.leaves
        assert leaves is not None, "the gather is open"
        first_leaves = [buffer_leaves[0] for buffer_leaves in leaves]
        hooks: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        hidden_views = hooks
        if self.frees and gathered.source is not None:
            # Autograd calls these for each tensor that it saves while the forward runs.
            hooks = saved_tensors_hooks(inside_hooks(gathered.pack), _unpack)
        if dispatch_modes() and in_selective_checkpoint() and not transforms_active():
            hidden_views = UnseenViews(
                {storage_id(first_leaf) for first_leaf in first_leaves}
            )
        leaf_tensors = [leaf for buffer_leaves in leaves for leaf in buffer_leaves]
        if self.dtensors is not None:
            leaf_tensors = as_dtensors(leaf_tensors, self.dtensors)
        # Why a list if possible: building the tree takes a part of a small unit's time.
        if self.listed:
            apply = functools.partial(self.apply, leaf_tensors, gathered)
        else:
            apply = functools.partial(
                self.apply, tree.build(self.unit.structure, leaf_tensors)
            )
        versions_before, samples_before = _versions(first_leaves), None
        if self.first_look.pending:
            samples_before = self.first_look.begin(leaf_tensors)
        is_logging = _log.isEnabledFor(logging.DEBUG)
        if is_logging:
            _log.debug("pre_forward of unit %r", self.unit.title)
        try:
            with hooks, hidden_views:
                precision = self.unit.precision
                if self.unit.full_precision:
                    leaf_dtypes = [buffer.model_dtype for buffer in self.unit.buffers]
                    result = run_in_full_precision(leaf_dtypes, apply, args, kwargs)
                elif precision is None:
                    result = apply(*args, **kwargs)
                else:
                    args, kwargs = cast_inputs(
                        precision, self.unit.name == "", args, kwargs
                    )
                    result = cast_outputs(precision, apply(*args, **kwargs))
        except RuntimeError as error:
            # Note: after a write that torch did not prevent, it also raises, for the nodes.
            if _versions(first_leaves) == versions_before:
                if _is_refused_write(str(error), leaves):
                    raise RuntimeError(
                        f"the forward of unit {self.unit.title!r} modified a leaf in place; "
                        f"{_READ_ONLY}"
                    ) from error
                raise
        for buffer_index, new_version in enumerate(_versions(first_leaves)):
            if new_version != versions_before[buffer_index]:
                raise modified_leaf(self.unit.title, self.unit.buffers[buffer_index])
        if samples_before is not None:
            written_index = self.first_look.end(leaf_tensors, samples_before)
            if written_index is not None:
                raise RuntimeError(
                    f"the forward of unit {self.unit.title!r} wrote to "
                    f"{self.unit.leaves[written_index].path!r} through .data; {_READ_ONLY}"
                )
        if is_logging:
            _log.debug("post_forward of unit %r", self.unit.title)
        return copy_aliased_outputs(result, leaves) if gathered.shared else result


@dataclass(slots=True, eq=False)
class UnshardHandle:
    """The result of ``f.start(shard)``, which ``f`` takes in place of the shard.

    Attributes:
        unit: the unit.
        shard: this rank's shard of the unit.
    """

    unit: UnitPlan
    shard: UnitShard
    _comms: Sequence[BufferComm]
    _handles: Handles | None
    _versions: list[int]
    _reducer: GradReducer | None
    _used: bool = False

    def wait(self) -> None:
        """Wait for the data; call it if you don't pass the handle to ``f`` after all."""
        for handle in self._handles or ():
            handle.work.wait()

    def take(self, f: Unshard) -> tuple[UnitShard, Handles | None]:
        """Return the shard and the handles of the all-gathers, for one call of ``f``.

        Raises:
            ValueError: the handle is of another unit, was used up, or was started outside of the
                ``value_and_grad`` that needs its gradient.
            RuntimeError: the shard was modified in place after the gather had started.
        """
        handle_title, started_handles = (
            f"the handle of unit {self.unit.title!r}",
            self._handles,
        )
        if f.unit != self.unit or f.comms != self._comms:
            raise ValueError(
                f"{handle_title} was passed to a function of unit {f.unit.title!r}; pass it to the "
                "function whose start made it"
            )
        if not transforms_active():
            if torch.is_grad_enabled() and current_reducer.get() is not self._reducer:
                raise ValueError(
                    f"{handle_title} was started outside of this call of value_and_grad, which "
                    "would lose the gradient of its shard; call start inside loss_fn, on the "
                    "shards that loss_fn is called with"
                )
            if [version(local) for local in self.shard.values()] != self._versions:
                raise RuntimeError(
                    f"a shard of unit {self.unit.title!r} was modified in place after its gather "
                    "had started; call start after the change"
                )
        if not f.freed:
            return self.shard, started_handles
        # A checkpoint that runs the call again in backward gathers for itself, and a transform has
        # to see the all-gather.
        if transforms_active() or graph_task_id() != -1:
            return self.shard, None
        if self._used:
            raise ValueError(
                f"{handle_title} was used before, and a function from reshard frees the leaves "
                "after each call; call start for each call, or use the function from unshard to "
                "keep the leaves"
            )
        self._handles, self._used = None, True
        return self.shard, started_handles


def start_unit(f: Unshard, shard: UnitShard) -> Handles:
    """Start the all-gathers of a unit, unless the running call keeps it gathered."""
    reducer, kept_handles = current_reducer.get(), None
    if reducer is not None and not f.freed:
        kept_handles = reducer.find_kept(f.comms, shard)
    return kept_handles or [
        start_gather(shard[comm.buffer].detach(), comm, read_only=True) for comm in f.comms
    ]


def cast_inputs(
    precision: MixedPrecision | None, root: bool, args: Any, kwargs: Any
) -> tuple[Any, Any]:
    """Return a unit's args and kwargs, cast to ``param_dtype`` if its precision says so.

    Arguments:
        precision: that of the unit; ``None`` casts nothing.
        root: whether these are the inputs of the whole model.
        args: the positional inputs.
        kwargs: the keyword inputs.
    """
    if precision is None or precision.param_dtype is None:
        return args, kwargs
    # The root has an option of its own, because its inputs are those of the whole model.
    if not (precision.cast_forward_inputs or (root and precision.cast_root_forward_inputs)):
        return args, kwargs
    return cast_tree((args, kwargs), precision.param_dtype)


def cast_outputs(precision: MixedPrecision | None, out: Any) -> Any:
    """Return the outputs of a unit or of a model, cast to ``output_dtype`` if there is one."""
    if precision is None or precision.output_dtype is None:
        return out
    return cast_tree(out, precision.output_dtype)


def run_in_full_precision(
    dtypes: Sequence[torch.dtype], run: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """Return ``run`` of inputs in the widest of ``dtypes``, with outputs as the first input."""
    float_dtypes = [dtype for dtype in dtypes if dtype.is_floating_point]
    dtype = max(float_dtypes, key=lambda dtype: dtype.itemsize, default=torch.float32)
    # The caller should not notice that a module inside computes in another dtype.
    first_dtype = next(
        (x.dtype for x in tensors_in((args, kwargs)) if x.is_floating_point()), None
    )
    args, kwargs = cast_tree((args, kwargs), dtype)
    output_tree = run(*args, **kwargs)
    if first_dtype is None:
        return output_tree
    return cast_tree(output_tree, first_dtype)


_READ_ONLY = (
    "gathered leaves are read-only, because ranks may share their memory and the change would be "
    "lost: modify a copy, keep values that change in a buffer of the module, or change the shards "
    "between steps; call a module that initialises itself once before make_functional"
)


_unpack = operator.methodcaller("unpack")


def _versions(first_leaves: list[torch.Tensor]) -> list[int]:
    """Return how often each gathered buffer has been written to; zeros in inference mode."""
    if transforms_active():
        # Why unwrapped: a write counts in the version of the wrapped tensor alone, and the tensors
        # that vmap wraps do not share theirs.
        first_leaves = [unwrapped(first) for first in first_leaves]
    elif torch.is_inference_mode_enabled():
        return [0] * len(first_leaves)
    # Note: a leaf that inference mode made does not count writes.
    return [0 if leaf.is_inference() else version(leaf) for leaf in first_leaves]


def _is_refused_write(error_text: str, gathered: Leaves) -> bool:
    reducer = current_reducer.get()
    if "a leaf Variable that requires grad" in error_text:
        # Under per_sample_grad, leaves are the arguments of a gradient.
        return reducer is not None and reducer.has_gathered
    # Note: torch's message does not name the leaf, but the node that made it.
    gather_nodes = [leaves[0].grad_fn for leaves in gathered]
    node_names = [
        node.name().removesuffix("Backward") for node in gather_nodes if node is not None
    ]
    return "inplace" in error_text and any(name in error_text for name in node_names)


def modified_leaf(unit: str, buffer: BufferPlan) -> RuntimeError:
    """Return the error for a unit's forward that wrote to a leaf."""
    return RuntimeError(
        f"the forward of unit {unit or '(root)'!r} modified a leaf in place, one of buffer "
        f"{buffer.key!r} ({some([leaf.path for leaf in buffer.leaves])}); {_READ_ONLY}"
    )


class UnseenViews(TorchDispatchMode):
    """While it is active, no selective checkpoint sees views of gathered leaves being taken.

    A selective checkpoint keeps the results of some operations, and counts operations to find a
    result again when backward computes forward a second time. That computation gathers units at
    other moments, so gathers run unseen, and so do views of gathered leaves:

    - A view that is kept would keep the whole gathered buffer in memory until backward.
    - ``Gathered.pack`` would not know a view of the buffer of the first gather, and backward would
      get other tensors than it needs.

    Arguments:
        storages: the identities of the storages.
    """

    supports_higher_order_operators = True

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self._storages = storages

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return what torch's modes of selective checkpoints return."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        viewed = args[0] if getattr(func, "is_view", False) and args else None
        if isinstance(viewed, torch.Tensor) and storage_id(viewed) in self._storages:
            return _call_unseen(func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_call_unseen = unseen(operator.call)


def copy_aliased_outputs(result: Any, gathered: Leaves) -> Any:
    """Return a unit's result, with a copy of each tensor that is a view of a gathered buffer."""
    # Most units return one plain tensor.
    is_plain = type(result) is torch.Tensor and result.layout is torch.strided
    if is_plain and len(gathered) == 1 and not transforms_active():  # only for speed
        return (
            _clone(result) if storage_id(result) == storage_id(gathered[0][0]) else result
        )
    # Why a copy: the caller may write to it, and it does not keep the gathered buffer in memory.
    leaf_storages = {storage_id(unwrapped(leaves[0])) for leaves in gathered}

    def unaliased(value: torch.Tensor) -> torch.Tensor:
        parts = stored_parts(unwrapped(value))
        return (
            _clone(value)
            if any(storage_id(part) in leaf_storages for part in parts)
            else value
        )

    return map_tensors(unaliased, result)


_clone = unseen(
    torch.clone
)  # unseen because a unit that a checkpoint computes again may not copy


# --- shards that do not fit -----------------------------------------------------------------------


def check_shards(
    plan: Plan, shards: Any, mesh: Mesh | None = None, *, gradients: bool = False
) -> None:
    """Raise ``ValueError`` unless ``shards`` has the plan's units, and with a mesh their shards.

    See ``check_shard`` for ``gradients``.
    """
    unit_names = [unit.name for unit in plan.unit_list]
    if not isinstance(shards, Mapping) or shards.keys() != set(unit_names):
        raise ValueError(
            f"shards must hold the units of the plan, {unit_names[:6]}; found {outline(shards)}: "
            f"{_cause(plan, shards)}"
        )
    if mesh is not None:
        for unit in plan.unit_list:
            check_shard(unit, shards[unit.name], mesh, gradients=gradients)


def check_cut(plan: Plan, shards: Any) -> None:
    """Raise unless ``shards`` has the plan's sizes; it may hold ``None``, and stacks of shards."""
    check_shards(plan, shards)
    for unit in plan.unit_list:
        check_shard(unit, shards[unit.name], None)


def check_shard(
    unit: UnitPlan, shard: Any, mesh: Mesh | None, *, gradients: bool = False
) -> None:
    """Raise unless ``shard`` has the buffers, shapes, dtypes and devices of ``unit``.

    With ``gradients``, that of a frozen buffer may be ``None``, and others in the gradients' dtype.
    Without ``mesh`` every one may, and shards may be stacked, of any dtype and device.
    """
    buffer_keys = [buffer.key for buffer in unit.buffers]
    if not isinstance(shard, Mapping) or shard.keys() != set(buffer_keys):
        raise ValueError(
            f"the shard of unit {unit.title!r} must hold the buffers {buffer_keys}; found "
            f"{outline(shard)}: pass shards[{unit.name!r}] of shards made with this plan"
        )
    for buffer in unit.buffers:
        local = shard[buffer.key]
        may_be_none = mesh is None or (gradients and not buffer.trainable)
        # Stacks of shards have more dims, of which the last is the shard's.
        fits_stack = mesh is None and getattr(local, "shape", ())[-1:] == (
            buffer.shard_numel,
        )
        if fits_stack or (local is None and may_be_none):
            continue
        if not isinstance(local, torch.Tensor):
            rule = f"be a tensor; found {type(local).__name__}"
            remedy = (
                "a tree of gradients holds None for frozen shards alone; put zeros there to "
                "compute with it"
            )
        elif mesh is None or local.shape != (buffer.shard_numel,):
            rule = (
                f"have shape {(buffer.shard_numel,)}, one of {buffer.shards} shards; found "
                f"{tuple(local.shape)}"
            )
            # A step empties the tensors that it was given.
            donated_text = "donated to a training step, or " * (tuple(local.shape) == (0,))
            remedy = (
                f"it was {donated_text}cut by another plan, for another number of ranks, or not at "
                "all; make it with shard(params, plan, mesh)"
            )
        elif local.dtype != buffer.shard_dtype and not (
            gradients and local.dtype == unit.dtypes(buffer).grads
        ):
            rule = f"have dtype {buffer.dtype}; found {local.dtype}"
            remedy = "a plan fixes the dtypes of its leaves; make a new plan from params of other dtypes"
        elif local.device.type == ("cpu" if unit.offload else mesh.device.type):
            continue
        elif unit.offload:
            rule = (
                f"be on the CPU, because the plan offloads the unit; found {local.device}"
            )
            remedy = (
                "make it with shard(params, plan, mesh), or make a plan without offload"
            )
        else:
            rule = f"be on the mesh's device, {mesh.device}; found {local.device}"
            remedy = (
                "move the shards with .to(mesh.device), or build the mesh on that device"
            )
        raise ValueError(
            f"shard {buffer.key!r} of unit {unit.title!r} must {rule}: {remedy}"
        )


def _cause(plan: Plan, misfit: Any) -> str:
    """Return what was passed in place of shards, as far as its form tells."""
    if isinstance(misfit, torch.nn.Module):
        return module_remedy(misfit, "shards = fs.shard(params, plan, mesh)")
    # A TrainState, or anything that has its shards in an attribute.
    if hasattr(misfit, "shards"):
        return "this is a state, whose shards are an entry of it: pass state.shards"
    if isinstance(misfit, torch.Tensor):
        return (
            "this is one tensor; value_and_grad returns (loss, grads), and a step "
            "(state, metrics), in this order"
        )
    values = list(misfit.values()) if isinstance(misfit, Mapping) else []
    if not values or not all(isinstance(value, torch.Tensor) for value in values):
        return "they were made with another plan; make them with shard(params, plan, mesh)"
    if any(
        misfit.keys() == {buffer.key for buffer in unit.buffers} for unit in plan.unit_list
    ):
        return "this is the shard of one unit; pass the dictionary with the shards of all units"
    return "these are whole parameters; cut them first with shards = fs.shard(params, plan, mesh)"
