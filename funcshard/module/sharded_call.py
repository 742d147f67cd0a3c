"""How a function of ``fully_shard`` runs: ``FullyShard``, and the units of one call.

During a call, attributes of a unit's module object hide ``forward`` and the methods of
``methods=``, and enter the unit (``UnitEntry``); the object's class stays as it is.
``UnitCall.enter`` asks the prefetcher of the call for the unit's all-gathers, and runs the forward
through ``unshard`` and ``reshard``. These call ``forward_with_leaves``, which puts the gathered
leaves into the parameter tables of the unit's modules.
"""

from __future__ import annotations

import collections
import functools
import logging
import operator
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from funcshard._utils import tree
from funcshard._utils.torch_modules import forget_parametrized, late_copy
from funcshard._utils.torch_private import (
    address,
    dispatch_modes,
    graph_task_id,
    hooks_allowed,
    in_grad,
    is_transformed,
    no_transforms,
    outer_saved_tensors_hooks,
    recording_or_transforming,
    sequence_number,
    transform_level,
    transforms_active,
    untraced,
    untraced_with_warning,
    unwrapped,
    version,
)
from funcshard._utils.tree import tensors_in
from funcshard.comm import Mesh, check_all_same
from funcshard.core import (
    UNGATHERED,
    Gathered,
    Prefetcher,
    ScheduleLearner,
    Shards,
    Unshard,
    any_order,
    any_order_active,
    cast_inputs,
    cast_outputs,
    check_shards,
    current_reducer,
    start_unit,
)
from funcshard.core import remat as rematerialised
from funcshard.module.copying import NamedTensors, Tensors
from funcshard.module.functional import Functional, absent_attribute
from funcshard.module.unit_setup import (
    CallPrecision,
    Method,
    forward_in_full_precision,
    leave_fast_path,
    take_ignored,
)
from funcshard.plan import Plan, Schedule, UnitPlan

_log = logging.getLogger("funcshard.module")

Forward = Callable[[Any, Any], Any]  # of args and kwargs
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Inputs = tuple[nn.Module, Forward, Args, Kwargs]  # what runs in a unit
UnitMethods = Mapping[str, Method]  # name -> the method that runs through the unit

# Where a unit's leaves are put: path of a module below the unit's module, key in the module's
# parameter table -> index of the leaf in the unit, and names of attributes that refer to leaves.
TableEntries = tuple[tuple[tuple[str, ...], dict[str, int], list[str]], ...]


@dataclass(frozen=True, slots=True, eq=False)
class UnitModule:
    """How the module of a unit runs, or one of those of a group.

    Attributes:
        f: ``unshard`` or ``reshard`` of the module's forward.
        remat: whether backward computes the forward again.
    """

    path: str
    index: int
    f: Unshard
    remat: bool


@dataclass(frozen=True, slots=True, eq=False)
class FullyShard:
    """The function that ``fully_shard`` returns: it runs the module on this rank's shards.

    Between calls it keeps only the order in which the first call ran the units, a hint for the
    prefetcher.

    Attributes:
        apply: the function that ``make_functional`` returned.
        plan: the plan.
        mesh: the ranks.
        units: how the modules of each unit run, by its name.
        methods: the methods that run through a unit or in full precision, by index of the module.
        outside: the placeholder of each parameter, for code outside of the forward of its unit.
        ignored: name and shape of each parameter that is no part of the plan.
        precision: the casts of a call besides those of the units.
        slow_path: the modules whose fast path in evaluation mode would read placeholders.
        compiles_units: whether units run compiled.
    """

    apply: Functional
    plan: Plan
    mesh: Mesh
    units: dict[str, tuple[UnitModule, ...]]
    methods: dict[int, UnitMethods]
    outside: Tensors
    ignored: dict[str, tuple[int, ...]]
    precision: CallPrecision
    slow_path: tuple[int, ...]
    _learner: ScheduleLearner
    compiles_units: bool

    @property
    def schedule(self) -> Schedule:
        """The schedule; after the first call with gradients, in the orders in which units ran."""
        return self._learner.schedule

    @untraced_with_warning(
        "torch.compile compiles nothing of a function of fully_shard, whose collectives run "
        "between graphs: compile its units with fully_shard(compiler=torch.compile), or whole "
        "steps with fs.trace(step, state, batch).compile()"
    )
    def __call__(
        self, shards: Shards, buffers: NamedTensors, /, *args: Any, **kwargs: Any
    ) -> Any:
        check_shards(self.plan, shards, self.mesh)
        apply, learner, outside_tensors = self.apply, self._learner, self.outside
        if self.ignored and isinstance(buffers, Mapping):
            outside_tensors, buffers = take_ignored(self.ignored, buffers, outside_tensors)
        call_buffers = apply.copies(buffers)  # which the call may write to
        if self.mesh.device.type != "meta" and any(
            value.is_meta for value in call_buffers.values()
        ):
            _check_buffers_on_meta(call_buffers, shards)
        if self.precision.buffer_dtypes:
            call_buffers = self.precision.cast_buffers(call_buffers)
        # Note: outside of their units, modules hold placeholders for parameters.
        modules = apply.skeleton.instantiate(
            outside_tensors, call_buffers, training=apply.training
        )
        unit_call = UnitCall(
            self.units, shards, learner, self.mesh, compiled=self.compiles_units
        )
        entry_functions: dict[int, Callable[..., Any]] = {
            member.index: functools.partial(
                unit_call.enter_recomputed if member.remat else unit_call.enter, member
            )
            for name, members in self.units.items()
            for member in members
            if name != ""  # the call enters the root itself, below
        }
        entry_functions |= dict.fromkeys(
            self.precision.full_precision, forward_in_full_precision
        )
        if 0 in self.methods:
            entry_functions[0] = _run_inside
        entered_modules = []
        for index, enter in entry_functions.items():
            module, methods = modules[index], self.methods[index]
            bound_methods = {
                name: types.MethodType(method, module) for name, method in methods.items()
            }
            entry = UnitEntry(enter, methods, bound_methods)
            entry.exchange(module.__dict__)
            entered_modules.append((module, entry))
        for layer_index in self.slow_path:
            leave_fast_path(modules[layer_index])
        forward, root_precision = (
            functools.partial(apply.run, modules[0]),
            self.precision.root,
        )
        _log.debug("root pre_forward")
        try:
            if "" in self.units:
                out = unit_call.enter(self.units[""][0], modules[0], forward, args, kwargs)
            else:
                if root_precision is not None:
                    args, kwargs = cast_inputs(root_precision, True, args, kwargs)
                out = forward(args, kwargs)
        finally:
            # Why also after an error: modules that refer to themselves would wait for gc.
            for module, entry in entered_modules:
                entry.end(module)
            # Why: of these groups, a module was not called.
            while unit_call.groups:
                unit_call.groups.popitem()[1].gathered.close()
            if unit_call.prefetcher is not None:
                unit_call.prefetcher.post_forward()
        _log.debug("root post_forward")
        # Note: what the check computes has no place in a graph that is recorded.
        is_first = unit_call.prefetcher is None or not learner.known
        if is_first and torch.is_grad_enabled() and not dispatch_modes():
            _check_gathered(out)
        # Note: new buffers keep the dtypes of the caller's buffers, whatever the outputs get.
        new_buffers: Tensors = {}
        if apply.mutable:
            out, new_buffers = out
        if root_precision is not None:
            out = cast_outputs(root_precision, out)
        if unit_call.prefetcher is not None:
            # Why after the last unit too: another rank may have more units to come.
            if not learner.known:
                check_order(self.mesh, "no unit", unit_call.prefetcher)
            learner.learn(unit_call.prefetcher)
            _begin_backward_with(out, unit_call.prefetcher)
        apply.discarded.look(apply, modules, outside_tensors, call_buffers, buffers)
        if apply.mutable:
            return out, self.precision.restore_buffers(new_buffers, buffers)
        return out

    def __repr__(self) -> str:
        title = type(self.apply.skeleton.template).__name__
        return f"<fully_shard of {title}, plan {self.plan.fingerprint()}, {self.mesh!r}>"

    if not TYPE_CHECKING:  # which then still knows what this class lacks

        def __getattr__(self, name: str) -> Any:
            cls = None if name in self.__slots__ else type(self.apply.skeleton.template)
            raise absent_attribute("fully_shard", name, cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShard:
        return self  # as for a Python function: its results do not depend on what it keeps

    def __copy__(self) -> FullyShard:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a function that fully_shard returned cannot be pickled, because it holds the "
            "connections of its mesh: save training state with fs.save, or pickle the function of "
            "make_functional and the plan, and call fully_shard in the other process"
        )


def _run_inside(
    module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    # Note: the call has entered the root's unit already.
    return forward(args, kwargs)


def _check_gathered(out: Any) -> None:
    """Raise if outputs are functions of placeholders."""
    for tensor in map(unwrapped, tensors_in(out)):
        # Note: by UNGATHERED, backward visits only what leads to placeholders, which raise.
        if tensor.requires_grad and tensor.layout is torch.strided and not tensor.is_nested:
            with no_transforms():
                # Why a number: given a gradient, torch imports sympy, which makes each later step
                # slower. Why a sum: the tensor may be empty. No hook of the tensor runs.
                first = tensor[(slice(1),) * tensor.ndim].sum().real
                torch.autograd.grad(first, UNGATHERED, retain_graph=True, allow_unused=True)


def _begin_backward_with(out: Any, prefetcher: Prefetcher) -> None:
    """Let the prefetcher begin as soon as backward has the gradient of the last output."""
    reducer = current_reducer.get()
    computed_outputs = [tensor for tensor in tensors_in(out) if tensor.grad_fn is not None]
    if reducer is None or not prefetcher.uses or not computed_outputs:
        return
    # Why the last: backward may compute the gradient of another output only after those of some
    # units; and if the loss depends on that output alone, backward does not reach the last units.
    last_output = max(computed_outputs, key=lambda tensor: sequence_number(tensor.grad_fn))
    last_output.register_hook(prefetcher.begin_backward)


def _check_buffers_on_meta(buffers: NamedTensors, shards: Shards) -> None:
    if all(shard.is_meta for shard in tensors_in(shards)):
        return
    buffer_name = next(name for name, value in buffers.items() if value.is_meta)
    raise ValueError(
        f"buffers must have values, as the shards do; found {buffer_name!r} on the meta device: "
        "compute the buffers with init_buffers(module, mesh), or take those that init_module or "
        "from_pretrained returns"
    )


# --- the units of a call --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class OpenGroup:
    """A group that is gathered, until all of its modules have run.

    Attributes:
        waiting_modules: the indices of the modules that have not run.
        mode: whether gradients and inference mode were on.
    """

    gathered: Gathered
    waiting_modules: set[int]
    mode: tuple[bool, bool]


class UnitCall:
    """The part of one call that its units share.

    Attributes:
        prefetcher: gathers the units; ``None`` under a transform.
        mesh: the ranks, while they still compare the order of units.
        level: the number of ``torch.func`` transforms around the call.
        used: version and address of each shard that forward used, by unit.
        groups: the groups that are gathered, by name.
        compiled: whether units may run compiled.
    """

    def __init__(
        self,
        units: Mapping[str, Sequence[UnitModule]],
        shards: Shards,
        learner: ScheduleLearner,
        mesh: Mesh,
        *,
        compiled: bool,
    ) -> None:
        self.compiled = compiled
        self.units = units
        self.shards = dict(shards)
        self.mesh = None if learner.known else mesh
        self.used: dict[str, list[tuple[int, Any]]] = {}
        self.groups: dict[str, OpenGroup] = {}
        self.prefetcher, self.level = None, 0
        if transforms_active():
            self.level = transform_level()
        else:
            self.prefetcher = Prefetcher(
                learner,
                # Note: not of self, which would be a cycle.
                lambda name: start_unit(units[name][0].f, shards[name]),
            )

    @untraced
    def enter(
        self,
        member: UnitModule,
        module: nn.Module,
        forward: Forward,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Run one module of a unit as part of the call."""
        # Note: backward may enter too, from a checkpoint, after the call has returned.
        group, prefetcher = self.units[member.f.unit.name], self.prefetcher
        if (
            prefetcher is not None
            and prefetcher.returned
            and member.f.trainable
            and in_grad()
        ):
            _check_second_run(member.f.unit)
        if prefetcher is not None and transforms_active() and not any_order_active():
            with (
                any_order()
            ):  # as around a call inside a transform; this one is inside the model
                return self.enter(member, module, forward, args, kwargs)
        inputs = module, forward, args, kwargs
        # Note: a module that backward computes again, or that runs in a transform that the call is
        # not in, gathers its group for itself.
        shares_gather = len(group) > 1
        if shares_gather and prefetcher is None:
            shares_gather = not member.remat and transform_level() == self.level
        elif shares_gather and prefetcher is not None:
            shares_gather = not prefetcher.returned and hooks_allowed()
        needs_leaves = torch.is_grad_enabled() and (
            member.f.trainable
            or any(tensor.requires_grad for tensor in tensors_in((args, kwargs)))
        )
        if shares_gather:
            again = member.remat and needs_leaves
            out = self._run_in_group(group, member, inputs, again=again)
        else:
            gathered = self._gather(member.f, needed=needs_leaves)
            try:
                out = member.f.run(gathered, inputs, {})
            finally:
                gathered.close()
        if self.compiled and needs_leaves and prefetcher is not None:
            _note_second_derivatives(out, self.shards[member.f.unit.name])
        return out

    def _run_in_group(
        self,
        group: Sequence[UnitModule],
        member: UnitModule,
        inputs: Inputs,
        *,
        again: bool,
    ) -> Any:
        """Run one module of a group, which backward may run ``again``."""
        unit_name = member.f.unit.name
        mode = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        open_group = self.groups.get(unit_name)
        # Why by the mode: leaves that were gathered without gradients have no node for backward.
        if open_group is None or open_group.mode != mode:
            waiting_modules = {m.index for m in group}
            if open_group is not None:
                open_group.gathered.close()
                waiting_modules = open_group.waiting_modules
            # Why not by the inputs: they are those of the first module alone.
            gathered = self._gather(member.f, needed=torch.is_grad_enabled())
            open_group = self.groups[unit_name] = OpenGroup(gathered, waiting_modules, mode)
        gathered = open_group.gathered
        if again:
            gathered.note_needed()
        gathered.runs += 1
        try:
            return member.f.run(gathered, inputs, {})
        finally:
            gathered.runs -= 1
            open_group.waiting_modules.discard(member.index)
            # Note: the module may have called others of the group, which closed it, or gathered it
            # again.
            last_group = self.groups.get(unit_name)
            if last_group is not None and not last_group.waiting_modules:
                self.groups.pop(unit_name).gathered.close()
            if last_group is None or last_group.gathered is not gathered:
                gathered.close()

    def _gather(self, f: Unshard, *, needed: bool) -> Gathered:
        unit, shard, prefetcher = f.unit, self.shards[f.unit.name], self.prefetcher
        # A transform inside the call has to see the all-gather, which the unit then starts itself.
        if prefetcher is None or transforms_active():
            return f.open(shard)
        if self.mesh is not None:
            check_order(self.mesh, f"unit {unit.title!r}", prefetcher)
        handles = prefetcher.pre_forward(unit.name, stays=not f.freed)
        if not f.freed:  # a unit that is gathered again in backward compares for itself
            self._note_used(unit, shard, again=handles is None)
            reducer = current_reducer.get()
            if reducer is not None:
                handles = reducer.keep(unit, f.comms, shard, handles, needed=needed)
        return f.open(shard, handles, prefetcher)

    def _note_used(self, unit: UnitPlan, shard: NamedTensors, *, again: bool) -> None:
        """Note which data forward uses; raise if backward would compute again from other data."""
        if not torch.is_grad_enabled():  # in inference mode tensors have no version
            return
        if any(map(is_transformed, shard.values())):
            raise ValueError(
                f"a shard of unit {unit.title!r} belongs to a torch.func transform that has ended: "
                "it left the transform, or torch.utils.checkpoint computes again outside of it; "
                "use fs.remat, which computes again inside"
            )
        shard_state = [(version(local), address(local)) for local in shard.values()]
        if not again:
            self.used[unit.name] = shard_state
        elif self.used.get(unit.name, shard_state) != shard_state:
            raise RuntimeError(
                f"a shard of unit {unit.title!r} was modified in place, or got other data, between "
                "forward and backward, which computes a part of forward again, with other values; "
                "update shards after backward"
            )

    @untraced
    def enter_recomputed(
        self,
        member: UnitModule,
        module: nn.Module,
        forward: Forward,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        """Run one module of a unit as ``enter`` does, such that backward runs it again."""
        prefetcher = self.prefetcher
        if (
            prefetcher is not None
            and prefetcher.returned
            and member.f.trainable
            and in_grad()
        ):
            _check_second_run(member.f.unit)
        # Why tensors apart: backward needs the values that forward began with. Under a transform,
        # the call's copies belong to the transform, so they have to be arguments and results.
        modules = list(module.modules())
        in_transform = bool(transforms_active())
        tables, places, tensors_before = _get_state(modules)
        copy = torch.clone if recording_or_transforming() else late_copy
        # Why in a namespace: ``remat`` refuses a function that captured tensors in dictionaries.
        began = types.SimpleNamespace(
            tables=tables, places=places, contents=_get_contents(tables)
        )
        began.ran = False

        def run(
            shards: dict[str, Any], tensors: list[torch.Tensor], args: Args, kwargs: Kwargs
        ) -> Any:
            shards_before = self.shards
            self.shards = {**shards_before, **shards}
            contents_after = _get_contents(began.tables) if began.ran else []
            if began.ran:
                _put_contents(began.contents)
            began.ran = True
            try:
                # Why by id: a tied buffer stays tied.
                copies = {id(t): copy(t) for t in tensors}
                _put_tensors(began.places, [copies[id(t)] for t in tensors])
                out = self.enter(member, module, forward, args, kwargs)
                # Note: a tensor that forward adds has to be a result.
                return out, _get_state(modules)[2] if in_transform else []
            finally:
                self.shards = shards_before
                _put_contents(contents_after)
                # They have no graph in forward, and another one in backward.
                forget_parametrized(module)

        shards_below = {
            name: shard
            for name, shard in self.shards.items()
            if any(tree.is_under(inner.path, member.path) for inner in self.units[name])
        }
        out, tensors = rematerialised(run)(shards_below, tensors_before, args, kwargs)
        if in_transform:
            _put_tensors(_get_state(modules)[1], tensors)
        return out


class _DependOn(torch.autograd.Function):
    """Return a gradient such that it depends on other tensors, too."""

    @staticmethod
    def forward(ctx: Any, grad: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        ctx.count = len(others)
        # Why contiguous: torch fails to copy one that isn't, if it requires a gradient.
        return grad.contiguous().view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return *grads, *[None] * ctx.count


def _note_second_derivatives(out: Any, shard: NamedTensors) -> None:
    """Let second derivatives through a compiled unit raise torch's error.

    A compiled backward has no derivative. torch raises an error for that if what goes into it
    depends on what is differentiated, and would take the second derivative for zero otherwise.
    """
    trainable_shards = [local for local in shard.values() if local.requires_grad]

    def depend(grad: torch.Tensor) -> torch.Tensor | None:
        # Note: only with ``create_graph``.
        return _DependOn.apply(grad, *trainable_shards) if torch.is_grad_enabled() else None

    for tensor in tensors_in(out):
        if tensor.grad_fn is not None:
            tensor.register_hook(depend)


# Dictionaries and lists that hold the state of modules: their attributes, submodules, buffers,
# hooks, and what their attributes refer to.
Table = Any
Contents = list[tuple[Table, Table]]  # each table, and a copy
_HOLDERS = frozenset((list, dict, collections.OrderedDict, collections.defaultdict))
_OF_UNITS = ("_parameters", "_flat_weights")  # keys of what holds the units' leaves


def _get_state(
    modules: Sequence[nn.Module],
) -> tuple[list[Table], list[tuple[Table, Any]], list[torch.Tensor]]:
    """Return the tables, the places of tensors in them, and the tensors."""
    tables: list[Table] = [module.__dict__ for module in modules]
    seen_ids = {id(module.__dict__.get(key)) for module in modules for key in _OF_UNITS}
    places: list[tuple[Table, Any]] = []
    for table in tables:  # Note: it grows.
        for key, value in table.items() if isinstance(table, dict) else enumerate(table):
            if type(value) in _HOLDERS:
                if id(value) not in seen_ids:
                    seen_ids.add(id(value))
                    tables.append(value)
            elif isinstance(value, torch.Tensor) and not hasattr(
                value, "funcshard_placeholder"
            ):
                places.append((table, key))
    return tables, places, [table[key] for table, key in places]


def _put_tensors(
    places: Sequence[tuple[Table, Any]], tensors: Sequence[torch.Tensor]
) -> None:
    for (table, key), tensor in zip(places, tensors, strict=True):
        table[key] = tensor


def _get_contents(tables: Sequence[Table]) -> Contents:
    contents = [(table, table.copy()) for table in tables]
    for _, copy in contents:
        if type(copy) is dict and "_parameters" in copy:
            # Why not these: a copy would keep leaves alive.
            copy.update((key, None) for key in _OF_UNITS if key in copy)
    return contents


def _put_contents(contents: Contents) -> None:
    """Give tables the contents of their copies, except for what holds the units' leaves."""
    for table, copy in contents:
        if not isinstance(table, dict):
            table[:] = copy
        elif table or copy:
            wanted = {**copy, **{key: table[key] for key in _OF_UNITS if key in table}}
            # Note: a table that is read now mustn't be emptied.
            pairs = ((wanted, table), (wanted.values(), table.values()))
            if len(wanted) != len(table) or not all(
                all(map(operator.is_, *x)) for x in pairs
            ):
                table.clear()
                table.update(wanted)


def check_order(mesh: Mesh, reached: str, prefetcher: Prefetcher) -> None:
    """Raise on every rank unless all come to the same unit as this one, ``reached``."""
    remedy = (
        "let every rank call the same units in one order, equally often; end loops by fs.agree, "
        "and ask generate() for equally many tokens"
    )
    position = len(prefetcher.ran)
    order_text = f"{reached} at position {position}"
    check_all_same(mesh, {"the order of units": order_text}, remedy=remedy)


# --- entering a unit ------------------------------------------------------------------------------


_ENTRY = "_funcshard_entry"  # the key of the entry in the module's __dict__


@dataclass(frozen=True, slots=True, eq=False)
class UnitEntry:
    """How a module of one call enters its unit.

    Attributes:
        enter: function of module, method, args and kwargs that runs the method in the unit.
        hidden: outside the unit, what the user set on the object in place of these; inside, and at
            first, the methods.
    """

    enter: Method
    methods: UnitMethods
    hidden: dict[str, Any]

    def exchange(self, state: dict[str, Any]) -> UnitEntry:
        """Exchange what the object has for what is hidden; return the entry that takes it back."""
        # Why another entry: a checkpoint may run the unit again inside its forward, for which the
        # object has its first state.
        visible = {name: state.pop(name) for name in self.methods if name in state}
        state.update(self.hidden)
        entry = UnitEntry(self.enter, self.methods, visible)
        # Note: inside the unit the key is gone, so ``through_unit`` does not enter again.
        if state.pop(_ENTRY, None) is None:
            state[_ENTRY] = entry
        return entry

    def end(self, module: nn.Module) -> None:
        """Let the methods refer to ``module`` weakly, so that it is freed without ``gc``."""
        state = module.__dict__
        for name, method in self.methods.items():
            if getattr(state.get(name), "__func__", None) is method:
                # Why only now: a checkpoint may keep a unit's forward for backward, and nothing
                # else of it.
                state[name] = types.MethodType(method, weakref.ref(module))


def through_unit(cls: type[nn.Module], name: str, compiled: Method | None = None) -> Method:
    """Return a method that runs a method of ``cls`` through the unit of the module.

    Arguments:
        compiled: what runs in place of the class's method, if anything.
    """

    @functools.wraps(getattr(cls, name))
    def run(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        module: Any = self() if type(self) is weakref.ref else self

        # Why around the method: backward may run it again, without entering the unit here.
        def inside(args: Any, kwargs: Any) -> Any:
            state = module.__dict__
            # Why: a method that calls another one of this module must not gather the unit again,
            # and neither may a checkpoint inside the method, which calls it again from backward.
            entry = state.get(_ENTRY)
            if entry is not None:  # or else the object is as the user made it already
                entry = entry.exchange(state)
            try:
                if compiled is None or name in state:
                    return getattr(module, name)(*args, **kwargs)
                return compiled(module, *args, **kwargs)
            finally:
                if entry is not None:
                    entry.exchange(state)

        entry = module.__dict__.get(_ENTRY)
        if entry is None:
            return inside(args, kwargs)
        return entry.enter(module, inside, args, kwargs)

    return run


# --- parameters -----------------------------------------------------------------------------------


class _RecomputeParams(dict[str, Any]):
    """A module's parameters after its unit's forward: placeholders, or leaves in a recomputation.

    Attributes:
        gathered: the unit.
        numbers: the number of each leaf of the unit, by name.
    """

    __slots__ = ("gathered", "numbers")  # Why no ``__init__``: it takes half of the time.

    gathered: Gathered
    numbers: dict[str, int]

    # Note: nn.Module finds attributes by this; whoever lists parameters gets placeholders.
    def __getitem__(self, name: str) -> Any:
        value, leaf_index = super().__getitem__(name), self.numbers.get(name)
        # Outside of a backward, user code has to meet the placeholder.
        in_backward = graph_task_id() != -1
        if (
            leaf_index is None
            or not in_backward
            or not hasattr(value, "funcshard_placeholder")
        ):
            return value
        # Note: ``torch.utils.checkpoint`` inside the unit calls a part of its forward again, from
        # backward.
        leaf: Any = self.gathered.leaves_again()[leaf_index]
        if leaf.requires_grad:
            _check_second_run(self.gathered.unit)
        leaf.funcshard_outside = value
        return leaf

    def __setitem__(self, name: str, value: Any) -> None:
        # Note: ``functional_call`` puts back what it read.
        super().__setitem__(name, getattr(value, "funcshard_outside", value))


def _check_second_run(unit: UnitPlan) -> None:
    """Raise if backward computes with gradients here, but a checkpoint doesn't compute again.

    A checkpoint only needs values. Other code differentiates by the leaves that forward read, as
    torchdiffeq's adjoint method does, and these aren't the leaves that it reads now.
    """
    if torch.is_grad_enabled() and hooks_allowed() and outer_saved_tensors_hooks() is None:
        raise ValueError(
            f"backward calls a part of unit {unit.title!r} again, in no torch.utils.checkpoint, "
            "and its parameters would get no gradient: in place of odeint_adjoint use odeint or "
            "docs/recipes.md, in place of reversible layers fully_shard(remat=True)"
        )


def _check_leaves(
    table: Mapping[str, Any],
    entries: Mapping[str, int],
    leaves: list[torch.Tensor],
    unit: UnitPlan,
) -> None:
    """Raise if forward has put other tensors in the place of leaves that need gradients."""
    for key, leaf_index in entries.items():
        if leaves[leaf_index].requires_grad and table.get(key) is not leaves[leaf_index]:
            raise _replaced(unit, leaf_index)


def _replaced(unit: UnitPlan, leaf_index: int) -> RuntimeError:
    return RuntimeError(
        f"forward put another tensor in place of parameter {unit.leaves[leaf_index].path!r} of unit "
        f"{unit.title!r}, which would get no gradient: compute with a tensor under another name; "
        "make a unit that contains every torch.func.functional_call of its module"
    )


def forward_with_leaves(
    tables: TableEntries,
    leaves: list[torch.Tensor],
    gathered: Gathered,
    module: nn.Module,
    forward: Callable[[Any, Any], Any],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Run ``forward`` while the tables below ``module`` hold the gathered ``leaves``."""
    recomputes = torch.is_grad_enabled() and gathered.source is not None
    # The owner's attributes, its table before and after forward, the table during forward, what
    # that was filled with, and which leaves these are.
    filled_tables: list[
        tuple[dict[str, Any], Any, Any, tuple[Any, ...], dict[str, int]]
    ] = []
    referring: list[tuple[dict[str, Any], str]] = []
    leaves_by_id: dict[int, Any] = {}
    placeholders_by_id: dict[int, Any] = {}
    try:
        for path, entries, aliases in tables:
            owner = module
            for name in path:
                owner = owner._modules[name]  # type: ignore[assignment]
            state = owner.__dict__
            referring += [(state, alias) for alias in aliases]
            outer_table = state["_parameters"]
            # Why another table afterwards: a checkpoint inside the unit runs parts of this forward
            # again from backward, and then has to read the leaves, gathered again. All other code
            # has to read the placeholders. Why another one during forward: the table that is there
            # may be such a one, which would answer in backward with leaves that it gathers itself.
            table = dict(outer_table)
            for key, leaf_index in entries.items():
                before, leaf = table.get(key), leaves[leaf_index]
                # Note: a module at two paths holds its leaves already, and so does one that a
                # checkpoint runs again while it runs, for a ``torch.autograd.grad`` inside it.
                if (
                    not hasattr(before, "funcshard_placeholder")
                    and before is not leaf
                    and graph_task_id() == -1
                ):
                    raise _replaced(gathered.unit, leaf_index)
                table[key] = leaf
            if recomputes:
                outer_table = _RecomputeParams(outer_table)
                outer_table.gathered, outer_table.numbers = gathered, entries
            filled_tables.append(
                (state, outer_table, table, tuple(table.values()), entries)
            )
            state["_parameters"] = table
        if referring:
            for _, outer_table, table, _, entries in filled_tables:
                for key in entries:
                    leaves_by_id.setdefault(id(outer_table.get(key)), table[key])
                    placeholders_by_id.setdefault(id(table[key]), outer_table.get(key))
            _exchange(referring, leaves_by_id)
        out = forward(args, kwargs)
        for *_, table, values, entries in filled_tables:
            if not all(map(operator.is_, table.values(), values)):
                _check_leaves(table, entries, leaves, gathered.unit)
        return out
    finally:
        # Why reversed: a module at two paths is filled twice, the second time over its leaves.
        for state, outer_table, *_ in reversed(filled_tables):
            state["_parameters"] = outer_table
        if referring:
            _exchange(referring, placeholders_by_id)


def _exchange(
    places: Sequence[tuple[dict[str, Any], str]], tensors: Mapping[int, Any]
) -> None:
    """Exchange tensors in attributes, e.g. in an RNN's second list of its weights, by their ids."""
    for state, key in places:
        if key in state:
            state[key] = tree.map_tensors(lambda t: tensors.get(id(t), t), state[key])
