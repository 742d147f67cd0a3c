"""What a unit is given is only to be read: on one machine all ranks have the same memory, and it is let go of anyway.

The two combinators: ``unshard`` gathers a unit around a function, ``reshard`` frees it again until backward.

Both are pure: what a call needs lives in that call and in the autograd graph it leaves behind, so calls may overlap,
repeat and fail as they like.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from funcshard._utils import map_tensors, storage_id, transforms_active, tree, untraced, version
from funcshard.comm import Mesh
from funcshard.core.buffer_comm import Link, Source, UnderWay
from funcshard.core.flat_buffer import Places, Unflatten, gather_leaves, places
from funcshard.core.grad_reducer import current_step
from funcshard.core.mixed_precision import cast_inputs, run_in_full_precision
from funcshard.core.prefetcher import Flight, Saved, asked, hooks_work, running
from funcshard.plan import ChooseCast, UnitPlan, dtype_of

__all__ = ["Reshard", "Unshard", "check_shard", "check_unchanged", "kept_apart", "reshard", "unshard", "versions"]

Gathered = Sequence[Sequence[torch.Tensor]]  # the leaves of each buffer


def versions(gathered: Gathered) -> list[int]:
    """Return what torch counts up whenever a buffer's leaves are written to; zeros in inference mode, where they are own."""
    inference = torch.is_inference_mode_enabled()
    return [0 if inference or leaves[0].is_inference() else version(leaves[0]) for leaves in gathered]


def check_unchanged(before: Sequence[int], gathered: Gathered, unit: UnitPlan) -> None:
    """Raise if leaves have been written to since ``versions`` was ``before``."""
    for old, new, buffer in zip(before, versions(gathered), unit.buffers, strict=True):
        if new != old:
            paths = ", ".join([repr(leaf.path) for leaf in buffer.leaves[:3]] + ["…"] * (len(buffer.leaves) > 3))
            raise RuntimeError(
                f"the forward of unit {unit.title!r} modified a leaf in place, one of buffer {buffer.key!r} ({paths}); "
                f"gathered leaves are only to be read, because other ranks may have the same memory, and the change would "
                f"be lost: modify a copy, keep what changes in a module's buffer, or change the shards between steps"
            )


def kept_apart(result: Any, gathered: Gathered) -> Any:
    """Return a unit's result with copies of the leaves that it returns as they are, as far as ``map_tensors`` looks into it.

    Whoever gets them may write to them, and keeps nothing else alive.
    """
    if transforms_active():  # what is gathered there has no storage to look at
        return result
    storages = {storage_id(leaves[0]) for leaves in gathered}

    def own(value: torch.Tensor) -> torch.Tensor:
        inside = value.layout is torch.strided and storage_id(value) in storages
        return value.clone() if inside else value

    return map_tensors(own, result)


UnitShard = Mapping[str, torch.Tensor]


Form = tuple[str, tuple[int, ...], torch.dtype, str]  # of one shard: key, shape, dtype, type of device


def unshard(apply: Callable[..., Any], unit: UnitPlan, mesh: Mesh, *, cast: ChooseCast | None = None) -> Unshard:
    """Turn a function of a unit's leaves into a function of this rank's shard of them.

    Forward all-gathers the shard and hands the leaves to ``apply`` as views of the gathered buffer; backward
    reduce-scatters their gradients, adding over ranks. Where the mesh has a replicate axis, or the unit's strategy is
    ``no_shard``, the copies' gradients are added by an all-reduce. The gathered leaves stay alive as long as the graph
    does; ``reshard`` changes that. Where the unit has a precision, the shard is cast before it is gathered, inputs as it
    says, and gradients are reduced in its dtype.

    Arguments:
        apply: ``apply(leaves, *args, **kwargs)``; ``leaves`` is the part of the parameter tree under the unit's path,
            without what inner units own.
        unit: the unit, ``plan.units[name]``.
        mesh: the ranks, of the shape that the plan was made for.
        cast: ``cast(unit, buffer)`` -> what is done to the buffer's shard before it is gathered and to what was gathered,
            in place of the cast to ``param_dtype``, or ``None`` for that; see ``Cast``.

    Returns:
        ``f(shard, *args, **kwargs)``, where ``shard`` is ``shards[unit.name]``.

    Raises:
        ValueError: the mesh is not of the plan's shape; from ``f``, the shard is not one of this unit.

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
    if tuple(mesh.shape.values()) != unit.mesh_shape:
        replicate, shard = unit.mesh_shape
        raise ValueError(
            f"unit {unit.title!r} was planned for a mesh of {replicate} replicate × {shard} shard ranks; found "
            f"{mesh.shape}: make the plan with make_plan(params, mesh)"
        )
    links = tuple(Link.of(mesh, unit, buffer, cast and cast(unit, buffer)) for buffer in unit.buffers)
    return Unshard(apply, unit, mesh, links, tuple(places(buffer) for buffer in unit.buffers), _forms(unit, mesh))


def reshard(f: Unshard) -> Reshard:
    """Free a unit's gathered leaves when its forward returns, and gather them again when backward asks for them.

    What autograd saved of the gathered buffer is kept as shape and place only, and rebuilt as views of the buffer that
    the first of them gathers again. Under ``torch.func`` transforms, which refuse saved-tensor hooks, and where nothing
    is gathered, ``reshard(f)`` is ``f``.

    Arguments:
        f: what ``unshard`` returned.

    Returns:
        A function of the same arguments and results.

    Raises:
        TypeError: ``f`` did not come from ``unshard``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.ones(3, 2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.reshard(fs.unshard(lambda leaves, x: (x @ leaves["w"]).sum(), plan.units[""], mesh))
        ...     shards = fs.shard(params, plan, mesh)
        ...     loss, grads = fs.value_and_grad(lambda s: f(s[""], torch.ones(1, 3)))(shards)
        ...     return loss.item(), grads[""]["float32"].tolist()
        >>> fs.simulate(main, world_size=2)
        [(6.0, [1.0, 1.0, 1.0]), (6.0, [1.0, 1.0, 1.0])]
    """
    if not isinstance(f, Unshard):
        raise TypeError(f"reshard takes what unshard returned; found {f!r}: write reshard(unshard(apply, unit, mesh))")
    return Reshard(f)


@dataclass(frozen=True, slots=True)
class Unshard:
    """``unshard(apply, unit, mesh)``, as data: calling it is ``run(gather(shard), *args, **kwargs)``."""

    apply: Callable[..., Any]
    unit: UnitPlan
    mesh: Mesh
    links: tuple[Link, ...]
    places: tuple[Places, ...]
    forms: tuple[Form, ...]

    @untraced
    def __call__(self, shard: UnitShard, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.gather(shard), *args, **kwargs)

    def check(self, shard: UnitShard) -> None:
        """Raise unless ``shard`` is this rank's shard of the unit; what ``check_shard`` does, fast where all is well."""
        if isinstance(shard, Mapping) and len(shard) == len(self.forms):
            for key, shape, dtype, device in self.forms:
                local = shard.get(key)
                if local is None or local.shape != shape or local.dtype is not dtype or local.device.type != device:
                    break
            else:
                return
        check_shard(self.unit, shard, self.mesh)

    def sources(self, shard: UnitShard) -> list[Source]:
        """What ``start_gathers`` takes to gather the unit's buffers, ahead of the ``gather`` that takes these."""
        self.check(shard)
        return [(shard[link.buffer].detach(), link) if link.copied else None for link in self.links]

    def gather(
        self,
        shard: UnitShard,
        started: Sequence[UnderWay | None] | None = None,
        released: Callable[[], None] | None = None,
    ) -> tuple[tuple[torch.Tensor, ...], ...]:
        """Gather the unit's buffers, differentiably, and return the leaves of each.

        Arguments:
            shard: this rank's shard of the unit.
            started: what ``start_gathers`` returned for this shard, if the gathering is under way.
            released: called when backward has come back to the gathered buffers.
        """
        if started is None:
            self.check(shard)
        now = current_step()
        gathered = []
        for i, (buffer, link) in enumerate(zip(self.unit.buffers, self.links, strict=True)):
            local = shard[buffer.key]
            if now is not None:
                now.meet(local, self.mesh, self.unit.name, buffer)
                before = now.gathered(local)
                if before is not None:
                    gathered.append(Unflatten.apply(before, buffer))
                    continue
            under_way = None if started is None else started[i]
            local = local if buffer.trainable else local.detach()
            gathered.append(gather_leaves(local, link, buffer, self.places[i], released, under_way))
        return tuple(gathered)

    def stay(self, shard: UnitShard, started: Sequence[UnderWay | None] | None, /, *args: Any, **kwargs: Any) -> Any:
        """Run the unit, which stays gathered as long as its graph; who computes a part of it again gathers it again."""
        saved = Saved(self.unit, self.links, shard, None) if torch.is_grad_enabled() and hooks_work() else None
        token = running.set(saved)
        try:
            gathered = self.gather(shard, started, None if saved is None else saved.released())
            result = self.run(gathered, *args, **kwargs)
            return result if started is None else kept_apart(result, gathered)
        finally:
            running.reset(token)

    def run(self, gathered: tuple[tuple[torch.Tensor, ...], ...], /, *args: Any, **kwargs: Any) -> Any:
        """Apply the function to the leaves that ``gather`` returned."""
        params = tree.build(self.unit.structure, [leaf for leaves in gathered for leaf in leaves])
        before = versions(gathered)
        if self.unit.full_precision:
            result = run_in_full_precision(self.dtype, functools.partial(self.apply, params), args, kwargs)
        else:
            args, kwargs = cast_inputs(self.unit.precision, self.unit.name == "", args, kwargs)
            result = self.apply(params, *args, **kwargs)
        check_unchanged(before, gathered, self.unit)
        return result

    @property
    def dtype(self) -> torch.dtype:
        """The widest floating-point dtype of the unit's leaves."""
        own = [dtype_of(buffer.dtype) for buffer in self.unit.buffers]
        return max((dtype for dtype in own if dtype.is_floating_point), key=lambda dtype: dtype.itemsize, default=own[0])


@dataclass(frozen=True, slots=True)
class Reshard:
    """``reshard(f)``, as data."""

    f: Unshard

    @untraced
    def __call__(self, shard: UnitShard, /, *args: Any, **kwargs: Any) -> Any:
        return self.run(None, None, shard, *args, **kwargs)

    def run(self, flight: Flight | None, started: Any, shard: UnitShard, /, *args: Any, **kwargs: Any) -> Any:
        """Run the unit as part of a flight, which may have started to gather it."""
        f = self.f
        nothing_to_free = not f.unit.sharded or not any(link.copied for link in f.links)
        if nothing_to_free or not torch.is_grad_enabled() or not hooks_work():
            return f.stay(shard, started, *args, **kwargs)
        before = asked() if started is None else None
        if before is not None:
            started = before.share(f.unit, shard)
        saved = Saved(f.unit, f.links, shard, flight)
        gathered = f.gather(shard, started, saved.released())
        saved.watch(gathered)
        token = running.set(saved)
        try:
            with saved_tensors_hooks(*saved.hooks()):
                result = f.run(gathered, *args, **kwargs)
            return result if started is None else kept_apart(result, gathered)
        finally:
            running.reset(token)


def _forms(unit: UnitPlan, mesh: Mesh) -> tuple[Form, ...]:
    device = "cpu" if unit.offload else mesh.device.type
    return tuple((buffer.key, (buffer.shard_numel,), dtype_of(buffer.dtype), device) for buffer in unit.buffers)


def check_shard(unit: UnitPlan, shard: Any, mesh: Mesh) -> None:
    """Raise unless ``shard`` is this rank's shard of ``unit``: its buffers, their sizes, dtypes and device."""
    if not isinstance(shard, Mapping) or shard.keys() != {buffer.key for buffer in unit.buffers}:
        held = list(shard) if isinstance(shard, Mapping) else type(shard).__name__
        raise ValueError(
            f"the shard of unit {unit.title!r} must hold the buffers {[b.key for b in unit.buffers]}; found {held}: pass "
            f"shards[{unit.name!r}] of shards made with this plan"
        )
    for buffer in unit.buffers:
        local = shard[buffer.key]
        if not isinstance(local, torch.Tensor):
            raise ValueError(
                f"shard {buffer.key!r} of unit {unit.title!r} must be a tensor; found {type(local).__name__}: a tree of "
                f"gradients holds None for what is frozen; put zeros there to gather it"
            )
        wanted, found = (buffer.shard_numel,), tuple(local.shape)
        if wanted != found:
            raise ValueError(
                f"shard {buffer.key!r} of unit {unit.title!r} must have shape {wanted}, one of {buffer.shards} shards; "
                f"found {found}: it was made with another plan or for another number of ranks; make it with "
                f"shard(params, plan, mesh)"
            )
        if local.dtype != dtype_of(buffer.dtype):
            raise ValueError(
                f"shard {buffer.key!r} of unit {unit.title!r} must have dtype {buffer.dtype}; found {local.dtype}: a plan "
                f"fixes the dtypes of its leaves; make a new plan for other dtypes"
            )
        if unit.offload and local.device.type != "cpu":
            raise ValueError(
                f"shard {buffer.key!r} of unit {unit.title!r} must be on the CPU, because the plan offloads the unit; found "
                f"{local.device}: make it with shard(params, plan, mesh), or make a plan without offload"
            )
        if not unit.offload and local.device.type != mesh.device.type:
            raise ValueError(
                f"shard {buffer.key!r} of unit {unit.title!r} must be on the mesh's device, {mesh.device}; found "
                f"{local.device}: move the shards with .to(mesh.device), or build the mesh on that device"
            )
