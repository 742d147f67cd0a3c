"""``fully_shard``: a module's function run unit by unit through ``unshard`` and ``reshard``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from funcshard._utils import callers_level, sequence_number, tensors_in, transforms_active, tree, untraced
from funcshard.comm import Mesh, check_same
from funcshard.core import (
    Flight,
    Link,
    Reshard,
    Shards,
    Unshard,
    cast_inputs,
    check_mesh,
    check_shards,
    current_step,
    hooks_work,
    joined,
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
from funcshard.plan import ChooseCast, Plan, Schedule, UnitPlan, buckets_to_run, gather_buckets, make_schedule

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
    runs = {unit.name: _Run.of(unit, apply.skeleton, mesh, cast) for unit in units}
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
    joint = buckets_to_run(units, plan.buckets, cast)
    for names in joint:
        for name, links in joined({name: runs[name].f.links for name in names}).items():
            runs[name] = runs[name].over(links)
    if compiler is not None:
        numbers = {name: run.number for name, run in runs.items()}
        for name, forward in compile_units(apply, numbers, precision.full_precision, compiler).items():
            runs[name] = dataclasses.replace(runs[name], compiled=forward)
            if name == "":  # the only unit, so that no other needs this class
                root = apply.skeleton.specs[0].cls
                classes[root] = with_method(root, apply.method_name, forward)
    order = _Order(schedule or make_schedule(plan), schedule is not None, joint)
    return FullyShard(apply, plan, mesh, runs, classes, outside, precision, again, order)


@dataclass(frozen=True, slots=True, eq=False)
class FullyShard:
    """``fully_shard(apply, plan, mesh)``: calling it runs the module on shards.

    Between calls it keeps one thing, the order in which first calls came to the units, unless a schedule gave it: a hint of
    what to gather ahead, which changes when values travel and never which.
    """

    apply: Functional
    plan: Plan
    mesh: Mesh
    runs: dict[str, _Run]
    classes: UnitClasses
    outside: dict[str, torch.Tensor]
    precision: CallPrecision
    remat: frozenset[str]
    _order: _Order

    @property
    def schedule(self) -> Schedule:
        """When units are gathered ahead; its orders are the real ones after the first call with gradients."""
        return self._order.schedule

    @untraced
    def __call__(self, shards: Shards, buffers: Mapping[str, torch.Tensor], /, *args: Any, **kwargs: Any) -> Any:
        check_shards(self.plan, shards)
        apply = self.apply
        own = self.precision.cast_buffers(apply.copies(buffers))
        modules = apply.skeleton.instantiate(self.outside, own, training=apply.training)
        flight = None
        if not transforms_active():
            flight = Flight(
                self._order.schedule,
                lambda names: start_gathers([self.runs[name].f.sources(shards[name]) for name in names]),
                known=self._order.known,
                runs=self._order.runs,
            )
        held = _Held(dict(shards))
        for name, run in self.runs.items():
            if name != "":
                enter = self._enter_again if name in self.remat else self._enter
                self._prepare(modules[run.number], functools.partial(enter, flight, run, held), run.compiled)
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
                out = self._enter(flight, root, held, modules[0], forward, args, kwargs)
        finally:
            if flight is not None:
                flight.land()
        if flight is not None:
            if not self._order.known:
                check_same(self.mesh, f"no unit at position {len(flight.ran)}", "the order of units")
            self._order.learn(flight.ran)
            self._order.learn_backward(flight)
            _begin_with(out, flight)
        return (out[0], self.precision.restore_buffers(out[1], buffers)) if apply.mutable else out

    @untraced
    def _enter(
        self,
        flight: Flight | None,
        run: _Run,
        held: _Held,
        module: nn.Module,
        forward: Callable[[Any, Any], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one unit of a call."""
        shard = held.shards[run.f.unit.name]
        started = None
        if transforms_active():
            flight = None  # a transform inside the call: it has to see the gathering, which then is its own
        if flight is not None:
            if not self._order.known:
                check_same(self.mesh, f"unit {run.f.unit.title!r} at position {len(flight.ran)}", "the order of units")
            started = flight.enter(run.f.unit.name, stays=run.resharded is None)
        if run.resharded is not None:
            return run.resharded.run(flight, started, shard, module, forward, args, kwargs)
        return run.f.stay(shard, started, module, forward, args, kwargs)

    @untraced
    def _enter_again(
        self,
        flight: Flight | None,
        run: _Run,
        held: _Held,
        module: nn.Module,
        forward: Callable[[Any, Any], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run one unit of a call so that backward runs it again, as a function of all that it is differentiated by."""

        # under transforms the call's copies of buffers are theirs, so they have to be arguments and results
        places = [] if hooks_work() else [(each, name) for each in module.modules() for name in each._buffers]

        def unit(shards: dict[str, Any], buffers: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            before = held.shards
            held.shards = {**before, **shards}
            own = {id(buffer): buffer if buffer is None else buffer.clone() for buffer in buffers}
            try:
                _put(places, [own[id(buffer)] for buffer in buffers])
                out = self._enter(flight, run, held, module, forward, args, kwargs)
                return out, _buffers(places)
            finally:
                held.shards = before

        below = {name: shard for name, shard in held.shards.items() if tree.is_under(name, run.f.unit.name)}
        out, buffers = rematerialised(unit)(below, _buffers(places), args, kwargs)
        _put(places, buffers)
        return out

    def _prepare(self, module: nn.Module, enter: Callable[..., Any], forward: Callable[..., Any] | None = None) -> None:
        """Make the forward of a call's own ``module``, or that compiled, run through ``enter``."""
        state = module.__dict__
        if "forward" in state:  # set on the object by its user; it would hide the class's
            state["_funcshard_forward"] = state.pop("forward")
        elif forward is not None:
            state["_funcshard_compiled"] = forward
        state["_funcshard_run"] = enter
        module.__class__ = self.classes[type(module)]


def _begin_with(out: Any, flight: Flight) -> None:
    """Let the flight's part of backward begin when the gradient of what the call computed last is there."""
    now = current_step()
    computed = [tensor for tensor in tensors_in(out) if tensor.grad_fn is not None]
    if now is None or not flight.saved or not computed:
        return

    def begin(_: torch.Tensor) -> None:
        if now.reducing:
            flight.begin()

    # of another output the gradient may come when units have been passed, or be all that is wanted, without the last units
    last = max(computed, key=lambda tensor: sequence_number(tensor.grad_fn))
    last.register_hook(begin)


def _buffers(places: list[tuple[nn.Module, str]]) -> list[Any]:
    return [module._buffers[name] for module, name in places]


def _put(places: list[tuple[nn.Module, str]], buffers: list[Any]) -> None:
    for (module, name), buffer in zip(places, buffers, strict=True):
        module._buffers[name] = buffer


@dataclass(slots=True, eq=False)
class _Held:
    """The shards that a call's units read."""

    shards: dict[str, Mapping[str, torch.Tensor]]


class _Order:
    """The schedule of a sharded function, whose order its first call may learn: a cache, which changes no result."""

    def __init__(self, schedule: Schedule, known: bool, joint: Sequence[tuple[str, ...]] = ()) -> None:
        self.schedule = schedule
        self.runs = gather_buckets(joint, schedule)
        self._joint = joint
        self.known = known
        self._warned = False
        self._seen = schedule.backward is not None

    def learn_backward(self, flight: Flight) -> None:
        """Take note of what the backward of the first call with gradients will come to."""
        if not self._seen and flight.saved:
            self._seen = True
            self.schedule = dataclasses.replace(self.schedule, backward=flight.backward())

    def learn(self, ran: list[str]) -> None:
        """Take note of the order in which a call ran the units."""
        if not self.known:
            self.schedule = dataclasses.replace(self.schedule, order=tuple(ran))
            self.runs = gather_buckets(self._joint, self.schedule)
            self.known = True
        elif not self._warned and self.schedule.forward_prefetch and tuple(ran) != self.schedule.order:
            self._warned = True
            position = next(
                i for i, pair in enumerate(itertools.zip_longest(ran, self.schedule.order)) if pair[0] != pair[1]
            )
            warnings.warn(
                f"units ran in another order than the schedule's, from position {position} on: forward gathered the rest of "
                f"that call on demand, which is correct but not ahead; this is said once",
                stacklevel=callers_level(),
            )


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """How one unit runs inside a call: which module it is, and its forward through the combinators."""

    number: int
    f: Unshard
    resharded: Reshard | None
    compiled: Callable[..., Any] | None = None

    @classmethod
    def of(cls, unit: UnitPlan, skeleton: Skeleton, mesh: Mesh, cast: ChooseCast | None) -> _Run:
        number = skeleton.find(unit.name)
        own = None if number is None else skeleton.specs[number].cls
        if number is None or own is None or (unit.name and own.forward is nn.Module.forward):
            what = "no module of this model" if own is None else f"a {own.__name__}, which has no forward of its own"
            raise ValueError(
                f"unit {unit.title!r} is {what}; a unit's parameters are gathered when its forward is called: choose the "
                f"modules that are called, such as its children"
            )
        f = unshard(functools.partial(forward_with_leaves, table_entries(unit, skeleton)), unit.listed(), mesh, cast=cast)
        return cls(number, f, reshard(f) if unit.reshard_after_forward else None)

    def over(self, links: tuple[Link, ...]) -> _Run:
        """The same, with other links."""
        f = dataclasses.replace(self.f, links=links)
        return dataclasses.replace(self, f=f, resharded=None if self.resharded is None else reshard(f))


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
