"""``fully_shard``: a module's function of shards; its units run in ``unshard`` and ``reshard``."""

from __future__ import annotations

import functools
import logging
import types
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from funcshard._utils import tree
from funcshard._utils.options import module_remedy, other_names
from funcshard._utils.process_state import without_collection
from funcshard._utils.torch_private import (
    callers_level,
    sequence_number,
    untraced_with_warning,
)
from funcshard._utils.tree import tensors_in
from funcshard.comm import Mesh, text_of
from funcshard.core import (
    Prefetcher,
    ScheduleLearner,
    Shards,
    cast_inputs,
    cast_outputs,
    check_mesh,
    check_shards,
    current_reducer,
    unit_comms,
)
from funcshard.module.copying import NamedTensors, Tensors
from funcshard.module.functional import Functional, Skeleton, absent_attribute
from funcshard.module.unit_forward import (
    UnitCall,
    UnitEntry,
    UnitMethods,
    UnitModule,
    check_order,
    placeholder,
    unit_modules,
)
from funcshard.module.unit_setup import (
    CallPrecision,
    Compiler,
    call_precision,
    check_compiler,
    effective_unit,
    entering_methods,
    forward_in_full_precision,
    leave_fast_path,
    read_methods,
    take_ignored,
    without_fast_path,
)
from funcshard.plan import (
    ChooseCast,
    Plan,
    Schedule,
    check_schedule,
    last_match,
    list_of_globs,
    make_schedule,
    read_remat,
    recomputed_modules,
    trainable_buffers,
)

_log = logging.getLogger("funcshard.module")


def fully_shard(
    apply: Functional,
    plan: Plan,
    mesh: Mesh,
    *,
    schedule: Schedule | None = None,
    cast: ChooseCast | None = None,
    remat: Iterable[str] | bool = (),
    compiler: Compiler | None = None,
    ignored_params: Iterable[str] = (),
    methods: Mapping[str, Iterable[str]] | None = None,
) -> FullyShard:
    """Turn the function of your module into a function of this rank's shards.

    Each unit is a module: the model itself or one inside it. When the model calls a unit, its
    forward runs through ``unshard``, and also through ``reshard`` if the plan reshards it after
    forward. Your model may call units in any order and any number of times.

    The modules of a group share what the first of them gathers, until all of them have run. Inside
    a ``torch.func`` transform that the model itself uses, each of them gathers the group for
    itself.

    Arguments:
        apply: the function that ``make_functional`` returned.
        plan: the plan for the params of ``make_functional``. Each unit must be a module with a
            forward, or with a method that ``methods`` names.
        mesh: the ranks, in the plan's shape. Pass the same arguments on every rank, which is
            checked.
        schedule: which units are gathered ahead of their use, and when; by default
            ``make_schedule(plan)``, in the order of the first call.
        cast: as in ``unshard``.
        remat: names or globs of units, or of modules of a group, whose forward is computed again in
            backward, as ``fs.remat`` does; ``True`` for all but the root. Under ``torch.func``
            transforms, only these units are freed between forward and backward. See
            docs/activation-checkpointing.md.
        compiler: ``torch.compile``, or with options
            ``functools.partial(torch.compile, fullgraph=True)``. It compiles the forward of each
            unit that contains no other unit or full-precision module. Under ``torch.func``
            transforms units run uncompiled. See docs/compiling.md.
        ignored_params: paths or globs of parameters that the plan lacks, because each rank has its
            own. Pass them to each call among the ``buffers``, under their names; they are neither
            gathered, nor cast, nor reduced. A glob may match nothing, and ranks may name different
            ones.
        methods: the methods besides ``forward`` that gather a unit when you call them, by paths or
            globs of units: ``{"encoder": ["encode"]}``. They run uncompiled and without the hooks
            of the module. For another method of the whole model, pass ``apply.method(name)``.

    Returns:
        ``sharded(shards, buffers, *args, **kwargs)``, which you call like ``apply``.

    Raises:
        TypeError: ``apply`` did not come from ``make_functional``, or ``compiler`` is not a
            function.
        RuntimeError: you compile on simulated ranks, and torch is older than 2.13.
        ValueError: the plan was made for another module; a unit is not a module with a forward; a
            tied parameter is used outside the unit that owns it; ``remat`` or ``methods`` names an
            unknown unit or method; ``ignored_params`` match a leaf of the plan; or the arguments
            of the ranks differ.

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
    if not isinstance(apply, Functional):
        raise TypeError(
            f"fully_shard takes the apply that make_functional returned; found {_misfit(apply)}"
        )
    if compiler is not None:
        check_compiler(compiler)
    if isinstance(remat, str):
        remat = [remat]
    with without_collection():
        remat_names = read_remat(remat)
        option_texts = {
            "the schedule": str(schedule),
            "remat": text_of(remat_names if isinstance(remat_names, bool) else sorted(remat_names)),
            "cast": text_of(cast),
            "compiler": text_of(compiler),
            "methods": text_of(methods or {}),
        }
        # Why before anything else: ranks with other options would wait for each other.
        check_mesh(plan, mesh, option_texts, "fully_shard")
        skeleton = apply.skeleton
        shapes = skeleton.shapes
        ignored_globs = list_of_globs(ignored_params, "ignored_params")
        ignored = {
            name: shape
            for name, shape in shapes.items()
            if ignored_globs and last_match(ignored_globs, [*tree.upwards(name)]) is not None
        }
        _check_plan(skeleton, plan, ignored)
        if apply.late_changes is not None:
            apply.late_changes.look()
        recomputed_paths = frozenset(recomputed_modules(plan, remat_names))
        if schedule is not None:
            check_schedule(schedule, plan)
        # Note: a path at which there is no module is refused below, by unit_modules.
        module_indices = {
            path: skeleton.indices[path]
            for unit in plan.unit_list
            for path in unit.paths
            if path in skeleton.indices
        }
        method_names: dict[int, tuple[str, ...]] = {}
        if methods is not None:
            method_names = read_methods(methods, skeleton, module_indices)
        precision = call_precision(plan, apply)
        units: dict[str, tuple[UnitModule, ...]] = {}
        outside_tensors: Tensors = {}
        for planned_unit in plan.unit_list:
            unit = effective_unit(planned_unit, apply)
            buffer_comms = unit_comms(unit, mesh, cast)
            units[unit.name] = unit_modules(
                unit, skeleton, mesh, buffer_comms, remat=recomputed_paths, methods=method_names
            )
            for buffer in unit.buffers:
                for leaf in buffer.leaves:
                    outside_tensors[leaf.path] = placeholder(leaf, buffer, unit, mesh.device)
        return FullyShard(
            apply=apply,
            plan=plan,
            mesh=mesh,
            units=units,
            methods=entering_methods(
                apply, module_indices, precision.full_precision, method_names, compiler
            ),
            outside=outside_tensors,
            ignored=ignored,
            precision=precision,
            slow_path=without_fast_path(skeleton, module_indices),
            _learner=ScheduleLearner(schedule or make_schedule(plan), schedule is not None),
            compiles_units=compiler is not None,
        )


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
    def __call__(self, shards: Shards, buffers: NamedTensors, /, *args: Any, **kwargs: Any) -> Any:
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
        modules = apply.skeleton.instantiate(outside_tensors, call_buffers, training=apply.training)
        unit_call = UnitCall(self.units, shards, learner, self.mesh)
        entry_functions: dict[int, Callable[..., Any]] = {
            member.index: functools.partial(
                unit_call.enter_recomputed if member.remat else unit_call.enter, member
            )
            for name, members in self.units.items()
            for member in members
            if name != ""  # the call enters the root itself, below
        }
        entry_functions |= dict.fromkeys(self.precision.full_precision, forward_in_full_precision)
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
        forward, root_precision = functools.partial(apply.run, modules[0]), self.precision.root
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
        apply.discarded.look(apply, modules, call_buffers, buffers)
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


def _run_inside(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    # Note: the call has entered the root's unit already.
    return forward(args, kwargs)


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


def _misfit(apply: Any) -> str:
    if isinstance(apply, FullyShard):
        return "a function that is sharded already: pass make_functional's apply itself"
    if hasattr(apply, "_torchdynamo_orig_callable"):
        return "a compiled function: pass apply itself, and compiler=torch.compile"
    if isinstance(apply, nn.Module):
        return f"a module, {type(apply).__name__}: {module_remedy(apply, 'apply')}"
    if isinstance(apply, tuple) and apply and isinstance(apply[0], Functional):
        return (
            "all that it returned, a tuple: write apply, params, buffers = "
            "fs.make_functional(module), and pass apply"
        )
    if isinstance(getattr(apply, "__self__", None), Functional):
        return f"the method {apply.__name__}: call it, as in apply.{apply.__name__}()"
    return (
        f"{getattr(apply, '__qualname__', type(apply).__name__)}: for a function written by hand, "
        "use unshard and reshard around its units"
    )


def _check_buffers_on_meta(buffers: NamedTensors, shards: Shards) -> None:
    if all(shard.is_meta for shard in tensors_in(shards)):
        return
    buffer_name = next(name for name, value in buffers.items() if value.is_meta)
    raise ValueError(
        f"buffers must have values, as the shards do; found {buffer_name!r} on the meta device: "
        "compute the buffers with init_buffers(module, mesh), or take those that init_module or "
        "from_pretrained returns"
    )


def _check_plan(skeleton: Skeleton, plan: Plan, ignored: Mapping[str, Any]) -> None:
    """Raise unless the plan is for these parameters; warn if it trains all, also frozen ones."""
    planned_names = {name for leaf in plan.leaves for name in leaf.names}
    common_name = next((name for name in ignored if name in planned_names), None)
    if common_name is not None:
        raise ValueError(
            f"ignored_params match {common_name!r}, which is a leaf of the plan; make the plan "
            "from the params without those that are ignored, or do not ignore it"
        )
    planned_leaves = {leaf.path: (unit, leaf) for unit in plan.unit_list for leaf in unit.leaves}
    check_plan_names(skeleton.shapes.keys() - ignored.keys(), planned_leaves)
    for path in filter(planned_leaves.get, skeleton.shapes):
        unit, leaf = planned_leaves[path]
        module_shape = skeleton.shapes[path]
        planned_shape = leaf.shape_in_module
        if planned_shape != module_shape:
            raise ValueError(
                f"the plan was made for another module: parameter {path!r} has shape "
                f"{planned_shape} in the plan and {module_shape} in the module; make the plan from "
                "the params of this module's make_functional"
            )
        for tied_name in skeleton.parameters[path][1:]:
            if not tree.is_under_any(tied_name, unit.paths):
                raise ValueError(
                    f"parameter {path!r} is tied to {tied_name!r}, which lies outside unit "
                    f"{unit.title!r} that owns it: pass make_plan the params that make_functional "
                    "returned"
                )
    trained_names = {leaf.path for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves}
    frozen_names = sorted(skeleton.frozen & trained_names)
    # Note: a plan that freezes others was made on purpose.
    if frozen_names and trained_names == skeleton.shapes.keys():
        warnings.warn(
            f"the plan trains every parameter, but {len(frozen_names)} of them, such as "
            f"{frozen_names[0]!r}, required no gradient in make_functional, and .to(dtype) and "
            ".detach() lose that: cast the module before make_functional, or call "
            "module.requires_grad_() to train all",
            stacklevel=callers_level(),
        )


def check_plan_names(parameters: Collection[str], planned: Collection[str]) -> None:
    """Raise ``ValueError`` unless the plan holds the parameters of the module, and no others."""
    if difference := other_names(parameters, planned):
        raise ValueError(
            f"the plan was made for another module, with other parameters than this one's; "
            f"{difference}: make the plan from the params of this module's make_functional, or name "
            "parameters that it should lack in ignored_params"
        )
