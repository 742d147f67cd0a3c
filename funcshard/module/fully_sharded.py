"""``fully_shard``: a module's function run unit by unit through ``unshard`` and ``reshard``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from funcshard._utils import sequence_number, tensors_in, transforms_active, tree, untraced
from funcshard.comm import Mesh, check_same
from funcshard.core import (
    BufferComm,
    Prefetcher,
    Reshard,
    ScheduleLearner,
    Shards,
    Unshard,
    bucketed,
    cast_inputs,
    check_mesh,
    check_shards,
    current_reducer,
    hooks_allowed,
    reshard,
    start_gathers,
    unshard,
)
from funcshard.core import remat as rematerialised
from funcshard.module.functional import Functional
from funcshard.module.placeholder import placeholder
from funcshard.module.skeleton import Skeleton
from funcshard.module.unit_forward import (
    CallPrecision,
    Compiler,
    UnitClasses,
    call_precision,
    check_compiler,
    compile_units,
    effective_unit,
    forward_in_full_precision,
    forward_with_leaves,
    table_entries,
    unit_class,
    with_method,
)
from funcshard.plan import ChooseCast, Plan, Schedule, UnitPlan, buckets_to_run, make_schedule

__all__ = ["FullyShard", "fully_shard"]

Forward = Callable[[Any, Any], Any]  # of args and kwargs


def fully_shard(
    apply: Functional,
    plan: Plan,
    mesh: Mesh,
    *,
    schedule: Schedule | None = None,
    cast: ChooseCast | None = None,
    remat: Iterable[str] = (),
    compiler: Compiler | None = None,
) -> FullyShard:
    """Turn a module's function of full parameters into one of this rank's shards.

    Each unit's forward runs as ``unshard`` of it, and as ``reshard`` of that where the plan reshards after forward: its
    parameters exist only while it runs. Units are modules; when one is called inside the model, its parameters are
    gathered, whatever calls it and however often. Where the plan joins units, the first of a run brings the others along.

    Arguments:
        apply: what ``make_functional`` returned.
        plan: the plan of its params; every unit has to be a module with a forward.
        mesh: the ranks, of the plan's shape. Every rank has to call this with the same plan and schedule, which is checked.
        schedule: when units are gathered ahead of their use. By default ``make_schedule(plan)``, with the order in which
            the first call runs the units.
        cast: what is done to shards before they are gathered, and after; see ``unshard``.
        remat: names of units, not the root, whose forward is run again in backward, as ``fs.remat`` does: of what they
            compute, only their inputs and outputs are kept. Under ``torch.func`` transforms, where no unit can be
            resharded, these are.
        compiler: ``torch.compile``, or it with options (``functools.partial(torch.compile, fullgraph=True)``): compiles the
            forward of each unit that has no other unit inside, and no module in full precision beside its own. Collectives
            stay outside of what is compiled. Under ``torch.func`` transforms, and where ``forward`` was set on the object,
            units run as they are.

    Returns:
        ``sharded(shards, buffers, *args, **kwargs)``, of the same results as ``apply``.

    Raises:
        TypeError: ``apply`` is not what ``make_functional`` returned; ``compiler`` is no function.
        RuntimeError: a ``compiler`` on simulated ranks, with torch before 2.13.
        ValueError: the plan is of another module, a unit is no module with a forward, a tied parameter is used outside
            the unit that owns it, or the ranks' plans differ.

    Example:
        >>> import torch, funcshard as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
        >>> apply, params, buffers = fs.make_functional(net)
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh, units=fs.wrap.by_class(torch.nn.Linear)(net))
        ...     sharded = fs.fully_shard(apply, plan, mesh)
        ...     return sharded(fs.shard(params, plan, mesh), buffers, torch.ones(1, 2))
        >>> first, second = fs.simulate(main, world_size=2)
        >>> torch.equal(first, second) and torch.allclose(first, net(torch.ones(1, 2)))
        True

    Source: ``torch.distributed.fsdp.fully_shard``.
    """
    if isinstance(apply, FullyShard):
        raise TypeError("fully_shard was given a function that is sharded already; pass make_functional's apply itself")
    if not isinstance(apply, Functional):
        hint = "a function written by hand is sharded with unshard and reshard around its units"
        if hasattr(apply, "_torchdynamo_orig_callable"):
            hint = "it is compiled; pass apply itself, and compiler=torch.compile, which compiles what units compute"
        raise TypeError(f"fully_shard takes the apply that make_functional returned; found {apply!r}: {hint}")
    if compiler is not None:
        check_compiler(compiler)
    check_mesh(plan, mesh)
    _check_plan(apply.skeleton, plan)
    again = frozenset((remat,) if isinstance(remat, str) else remat)
    unknown = sorted(again - (plan.units.keys() - {""}))
    if unknown:
        raise ValueError(
            f"remat must name units of the plan, not the root; found {unknown[0]!r}; its units are "
            f"{[name for name in plan.units if name][:6]}"
        )
    if schedule is not None:
        check_same(mesh, str(schedule), "the schedule")
    precision = call_precision(plan, apply)
    units = [effective_unit(unit, apply) for unit in plan.unit_list]
    runs = {unit.name: UnitRun.of(unit, apply.skeleton, mesh, cast, remat=unit.name in again) for unit in units}
    entered = {
        apply.skeleton.specs[number].cls for number in {*precision.full_precision, *(run.number for run in runs.values())}
    }
    classes = {cls: unit_class(cls) for cls in entered}
    outside: dict[str, torch.Tensor] = {
        leaf.path: placeholder(leaf, buffer, unit, mesh.device)
        for unit in units
        for buffer in unit.buffers
        for leaf in buffer.leaves
    }
    buckets = buckets_to_run(units, plan.buckets, cast)
    for names in buckets:
        for name, comms in bucketed({name: runs[name].f.comms for name in names}).items():
            runs[name] = runs[name].over(comms)
    if compiler is not None:
        numbers = {name: run.number for name, run in runs.items()}
        for name, forward in compile_units(apply, numbers, precision.full_precision, compiler).items():
            runs[name] = dataclasses.replace(runs[name], compiled=forward)
            if name == "":  # the only unit, so that no other needs this class
                root = apply.skeleton.specs[0].cls
                classes[root] = with_method(root, apply.method_name, forward)
    learner = ScheduleLearner(schedule or make_schedule(plan), schedule is not None, buckets)
    return FullyShard(apply, plan, mesh, runs, classes, outside, precision, learner)


@dataclass(frozen=True, slots=True, eq=False)
class FullyShard:
    """``fully_shard(apply, plan, mesh)``: to call it runs the module on this rank's shards.

    Between calls it keeps the order in which the first call ran the units, unless a schedule gave it. The
    order is a hint for the prefetcher: it changes when data is gathered, and never which.

    Attributes:
        apply: the function of full parameters.
        plan: the plan.
        mesh: the ranks.
        runs: how each unit runs, by name.
        classes: for each class of a module that runs through the call, its subclass that does so.
        outside: the placeholder of each parameter, for code outside its unit's forward.
        precision: the casts of a call besides those of the units.
    """

    apply: Functional
    plan: Plan
    mesh: Mesh
    runs: dict[str, UnitRun]
    classes: UnitClasses
    outside: dict[str, torch.Tensor]
    precision: CallPrecision
    _learner: ScheduleLearner

    @property
    def schedule(self) -> Schedule:
        """When units are gathered ahead; after the first call with gradients its orders are the real ones."""
        return self._learner.schedule

    @untraced
    def __call__(self, shards: Shards, buffers: Mapping[str, torch.Tensor], /, *args: Any, **kwargs: Any) -> Any:
        check_shards(self.plan, shards)
        apply, learner = self.apply, self._learner
        own = self.precision.cast_buffers(apply.copies(buffers))
        modules = apply.skeleton.instantiate(self.outside, own, training=apply.training)
        call = UnitCall.start(self.runs, shards, learner, self.mesh)
        for name, run in self.runs.items():
            if name != "":
                self._prepare(modules[run.number], functools.partial(run.enter, call), run.compiled)
        for number in self.precision.full_precision:
            self._prepare(modules[number], forward_in_full_precision)
        root = self.runs.get("")
        if root is not None and root.compiled is not None:
            modules[0].__class__ = self.classes[type(modules[0])]
        forward = functools.partial(apply.run, modules[0])
        try:
            if root is None:
                out = forward(*cast_inputs(self.precision.root_inputs, True, args, kwargs))
            else:
                out = root.enter(call, modules[0], forward, args, kwargs)
        finally:
            if call.prefetcher is not None:
                call.prefetcher.post_forward()
        if call.prefetcher is not None:
            if not learner.known:
                check_same(self.mesh, f"no unit at position {len(call.prefetcher.ran)}", "the order of units")
            learner.learn(call.prefetcher)
            _begin_backward_with(out, call.prefetcher)
        return (out[0], self.precision.restore_buffers(out[1], buffers)) if apply.mutable else out

    def _prepare(self, module: nn.Module, enter: Callable[..., Any], forward: Callable[..., Any] | None = None) -> None:
        """Make the forward of a call's own ``module``, or the compiled ``forward``, run through ``enter``."""
        state = module.__dict__
        if "forward" in state:  # the user set it on the object, where it would hide that of the class
            state["_funcshard_forward"] = state.pop("forward")
        elif forward is not None:
            state["_funcshard_compiled"] = forward
        state["_funcshard_run"] = enter
        module.__class__ = self.classes[type(module)]


def _begin_backward_with(out: Any, prefetcher: Prefetcher) -> None:
    """Let the prefetcher begin when backward has the gradient of the output that the call computed last."""
    reducer = current_reducer()
    computed = [tensor for tensor in tensors_in(out) if tensor.grad_fn is not None]
    if reducer is None or not prefetcher.has_saved or not computed:
        return

    def begin(_: torch.Tensor) -> None:
        if reducer.in_backward:
            prefetcher.begin_backward()

    # Why the last: the gradient of another output may come after that of some units, or be the only one
    # that is wanted, and then backward does not reach the last units.
    last = max(computed, key=lambda tensor: sequence_number(tensor.grad_fn))
    last.register_hook(begin)


# --- one unit of a call ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class UnitCall:
    """The part of one call that its units share.

    Attributes:
        shards: the shards that the units read.
        prefetcher: gathers the units; ``None`` under a transform, where each unit gathers itself.
        mesh: the ranks, while they still compare the order of units.
    """

    shards: dict[str, Mapping[str, torch.Tensor]]
    prefetcher: Prefetcher | None
    mesh: Mesh | None

    @classmethod
    def start(cls, runs: Mapping[str, UnitRun], shards: Shards, learner: ScheduleLearner, mesh: Mesh) -> UnitCall:
        """Return the shared part of a new call."""
        prefetcher = None
        if not transforms_active():
            prefetcher = Prefetcher(
                learner.schedule,
                lambda names: start_gathers([runs[name].f.sources(shards[name]) for name in names]),
                known=learner.known,
                buckets=learner.gather_buckets,
            )
        return cls(dict(shards), prefetcher, None if learner.known else mesh)


@dataclass(frozen=True, slots=True, eq=False)
class UnitRun:
    """How one unit runs inside a call: which module it is, and its forward through the combinators.

    Attributes:
        number: number of the module in the skeleton.
        f: ``unshard`` of the module's forward.
        resharded: ``reshard`` of it, if the unit is resharded after forward.
        remat: whether backward computes the forward again.
        compiled: the compiled forward, if there is one.
    """

    number: int
    f: Unshard
    resharded: Reshard | None
    remat: bool
    compiled: Callable[..., Any] | None = None

    @classmethod
    def of(cls, unit: UnitPlan, skeleton: Skeleton, mesh: Mesh, cast: ChooseCast | None, *, remat: bool) -> UnitRun:
        """Return how a unit runs.

        Raises:
            ValueError: the unit is not a module with a forward.
        """
        number = skeleton.find(unit.name)
        own = None if number is None else skeleton.specs[number].cls
        if number is None or own is None or (unit.name and own.forward is nn.Module.forward):
            what = "no module of this model" if own is None else f"a {own.__name__}, which has no forward of its own"
            raise ValueError(
                f"unit {unit.title!r} is {what}; a unit's parameters are gathered when its forward is called: choose the "
                f"modules that are called, such as its children"
            )
        f = unshard(functools.partial(forward_with_leaves, table_entries(unit, skeleton)), unit.listed(), mesh, cast=cast)
        return cls(number, f, reshard(f) if unit.reshard_after_forward else None, remat)

    def over(self, comms: tuple[BufferComm, ...]) -> UnitRun:
        """Return the same with another communication of the buffers."""
        f = dataclasses.replace(self.f, comms=comms)
        return dataclasses.replace(self, f=f, resharded=None if self.resharded is None else reshard(f))

    @untraced
    def enter(
        self,
        call: UnitCall,
        module: nn.Module,
        forward: Callable[[Any, Any], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the unit as part of a call."""
        if self.remat:
            return self._run_recomputed(call, module, forward, args, kwargs)
        return self._run(call, module, forward, args, kwargs)

    def _run(
        self,
        call: UnitCall,
        module: nn.Module,
        forward: Callable[[Any, Any], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        name = self.f.unit.name
        shard, handles, prefetcher = call.shards[name], None, call.prefetcher
        if transforms_active():
            prefetcher = None  # a transform inside the call has to see the all-gather, which the unit then starts itself
        if prefetcher is not None:
            if call.mesh is not None:
                check_same(call.mesh, f"unit {self.f.unit.title!r} at position {len(prefetcher.ran)}", "the order of units")
            handles = prefetcher.pre_forward(name, stays=self.resharded is None)
        if self.resharded is not None:
            return self.resharded.run(prefetcher, handles, shard, module, forward, args, kwargs)
        return self.f.run_gathered(shard, handles, module, forward, args, kwargs)

    def _run_recomputed(
        self,
        call: UnitCall,
        module: nn.Module,
        forward: Callable[[Any, Any], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run the unit under ``remat``, as a function of every tensor that it is differentiated by."""
        # Why buffers: under a transform the call's copies of buffers belong to the transform, so they
        # have to be arguments and results.
        entries = [] if hooks_allowed() else [(each, name) for each in module.modules() for name in each._buffers]

        def unit(shards: dict[str, Any], buffers: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before = call.shards
            call.shards = {**before, **shards}
            own = {id(buffer): buffer if buffer is None else buffer.clone() for buffer in buffers}
            try:
                _set_buffers(entries, [own[id(buffer)] for buffer in buffers])
                out = self._run(call, module, forward, args, kwargs)
                return out, _get_buffers(entries)
            finally:
                call.shards = before

        below = {name: shard for name, shard in call.shards.items() if tree.is_under(name, self.f.unit.name)}
        out, buffers = rematerialised(unit)(below, _get_buffers(entries), args, kwargs)
        _set_buffers(entries, buffers)
        return out


def _get_buffers(entries: list[tuple[nn.Module, str]]) -> list[Any]:
    return [module._buffers[name] for module, name in entries]


def _set_buffers(entries: list[tuple[nn.Module, str]], buffers: list[Any]) -> None:
    for (module, name), buffer in zip(entries, buffers, strict=True):
        module._buffers[name] = buffer


def _check_plan(skeleton: Skeleton, plan: Plan) -> None:
    planned = {leaf.path: leaf for leaf in plan.leaves}
    missing, unexpected = sorted(skeleton.shapes.keys() - planned.keys()), sorted(planned.keys() - skeleton.shapes.keys())
    if missing or unexpected:
        raise ValueError(
            f"the plan was made for another module; it lacks {missing[:3] or 'nothing'} of this one's parameters and has "
            f"{unexpected[:3] or 'nothing'} besides: make the plan from the params of this make_functional"
        )
    for path, shape in skeleton.shapes.items():
        if planned[path].shape != shape:
            raise ValueError(
                f"the plan was made for another module: parameter {path!r} has shape {planned[path].shape} in the plan and "
                f"{shape} in the module; make the plan from the params of this make_functional"
            )
    for unit in plan.unit_list:
        for leaf in unit.leaves:
            outside = [name for name in skeleton.parameters[leaf.path] if not tree.is_under(name, unit.name)]
            if outside:
                raise ValueError(
                    f"parameter {leaf.path!r} is tied to {outside[0]!r}, which lies outside unit {unit.title!r} that owns "
                    f"it: pass make_plan the params of make_functional as they are, or ties=apply.ties"
                )
