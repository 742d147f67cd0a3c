"""``fully_shard``: a module's function run unit by unit through ``unshard`` and ``reshard``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from funcshard._utils import sequence_number, tensors_in, tree, untraced
from funcshard.comm import Mesh, check_same
from funcshard.core import (
    Prefetcher,
    ScheduleLearner,
    Shards,
    bucketed,
    cast_inputs,
    check_mesh,
    check_shards,
    current_reducer,
)
from funcshard.module.functional import Functional
from funcshard.module.placeholder import placeholder
from funcshard.module.skeleton import Skeleton
from funcshard.module.unit_forward import (
    CallPrecision,
    UnitCall,
    UnitClasses,
    UnitRun,
    forward_in_full_precision,
    unit_class,
    with_method,
)
from funcshard.module.unit_setup import (
    Compiler,
    call_precision,
    check_compiler,
    compile_units,
    effective_unit,
)
from funcshard.plan import ChooseCast, Plan, Schedule, buckets_to_run, make_schedule

__all__ = ["FullyShard", "fully_shard"]


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
        apply.skeleton.specs[number].cls for number in {*precision.full_precision, *(run.index for run in runs.values())}
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
        numbers = {name: run.index for name, run in runs.items()}
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
                self._prepare(modules[run.index], functools.partial(run.enter, call), run.compiled)
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
