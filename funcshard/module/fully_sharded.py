"""``fully_shard``: a module's function of shards; its units run in ``unshard`` and ``reshard``."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from funcshard._utils import tree
from funcshard._utils.options import module_remedy, other_names
from funcshard._utils.process_state import without_collection
from funcshard._utils.torch_private import (
    callers_level,
    graph_task_id,
    no_torch_function,
    no_transforms,
    wrapper_subclass,
)
from funcshard.comm import Mesh, text_of
from funcshard.core import (
    UNGATHERED,
    BufferComm,
    ScheduleLearner,
    Unshard,
    check_mesh,
    slice_comms,
    unit_comms,
)
from funcshard.module.copying import Tensors
from funcshard.module.functional import Functional, Skeleton
from funcshard.module.sharded_call import (
    FullyShard,
    TableEntries,
    UnitMethods,
    UnitModule,
    forward_with_leaves,
    through_unit,
)
from funcshard.module.unit_setup import (
    Compiler,
    call_precision,
    check_compiler,
    compile_units,
    effective_unit,
    read_methods,
    with_dense_gradients,
    without_fast_path,
)
from funcshard.plan import (
    BufferPlan,
    ChooseCast,
    LeafSpec,
    Plan,
    Schedule,
    UnitPlan,
    check_schedule,
    last_match,
    list_of_globs,
    make_schedule,
    read_remat,
    recomputed_modules,
    trainable_buffers,
)


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
            "remat": text_of(
                remat_names if isinstance(remat_names, bool) else sorted(remat_names)
            ),
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
            if ignored_globs
            and last_match(ignored_globs, [*tree.upwards(name)]) is not None
        }
        _check_plan(skeleton, plan, ignored)
        if apply.late_changes is not None:
            apply.late_changes.look()
        recomputed_paths = frozenset(
            recomputed_modules(plan, remat_names) if remat_names else ()
        )
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
            unit = planned_unit
            if unit.precision is not None:
                unit = effective_unit(unit, unit.precision, apply)
            buffer_comms = unit_comms(unit, mesh, cast)
            units[unit.name] = unit_modules(
                unit,
                skeleton,
                mesh,
                buffer_comms,
                remat=recomputed_paths,
                methods=method_names,
            )
            for buffer in unit.buffers:
                for leaf in buffer.leaves:
                    outside_tensors[leaf.path] = placeholder(
                        leaf, buffer, unit, mesh.device
                    )
        trained_names = [
            b_leaf.path for _, b in trainable_buffers(plan) for b_leaf in b.leaves
        ]
        # Why these: placeholders outlive the modes and transforms in which you make them.
        with no_transforms(), torch.inference_mode(False), torch.enable_grad():
            trained_tensors = _Ungathered.apply(
                UNGATHERED, [outside_tensors[name] for name in trained_names]
            )
        outside_tensors.update(zip(trained_names, trained_tensors, strict=True))
        return FullyShard(
            apply=with_dense_gradients(apply, ignored),
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


# --- units, and the methods that enter them -------------------------------------------------------


def unit_modules(
    unit: UnitPlan,
    skeleton: Skeleton,
    mesh: Mesh,
    comms: tuple[BufferComm, ...],
    *,
    remat: Collection[str],
    methods: Mapping[int, Sequence[str]],
) -> tuple[UnitModule, ...]:
    """Return how the modules of a unit run.

    Arguments:
        remat: the paths of the modules that backward computes again.
        methods: the methods besides ``forward`` that enter units, by index of the module.
    """
    slices = () if unit.post_forward_ranks is None else slice_comms(unit, mesh, comms)
    modules = []
    for path, tables in table_entries(unit, skeleton).items():
        module_index, fault = skeleton.indices.get(path), "no module of this model"
        if module_index is not None:
            cls = skeleton.specs[module_index].cls
            fault = f"a {cls.__name__}, which has no forward of its own"
            if (
                not path
                or cls.forward is not nn.Module.forward
                or methods.get(module_index)
            ):
                fault = ""
        if module_index is None or fault:
            unit_title = repr(unit.title)
            if unit.members:
                unit_title += f", its module {path!r},"
            raise ValueError(
                f"unit {unit_title} is {fault}; a unit's parameters are gathered when its forward "
                "is called: choose the modules that are called, such as its children, or name its "
                "methods in fully_shard(methods=...)"
            )
        f = Unshard(
            apply=functools.partial(forward_with_leaves, tables),
            unit=unit,
            mesh=mesh,
            comms=comms,
            listed=True,
            freed=bool(unit.reshard_after_forward),
            slices=slices,
        )
        modules.append(UnitModule(path, module_index, f, remat=path in remat))
    return tuple(modules)


def table_entries(unit: UnitPlan, skeleton: Skeleton) -> dict[str, TableEntries]:
    """Return the entries at and below each module of ``unit`` that hold its leaves."""
    unit_tables: dict[str, dict[tuple[str, ...], tuple[dict[str, int], list[str]]]] = {
        path: {} for path in unit.paths
    }
    # Note: a tied leaf is in the tables of all of its names, so a unit gathers it once.
    places: list[tuple[str, int | None]] = [
        (name, leaf_index)
        for leaf_index, leaf in enumerate(unit.leaves)
        for name in skeleton.parameters[leaf.path]
    ]
    for name, leaf_index in places + [(alias, None) for alias in skeleton.aliases]:
        for path in filter(unit_tables.__contains__, tree.upwards(name)):
            *modules, key = name.removeprefix(f"{path}.").split(".")
            entries, aliases = unit_tables[path].setdefault(tuple(modules), ({}, []))
            if leaf_index is None:
                aliases.append(key)
            else:
                entries[key] = leaf_index
    return {
        path: tuple((place, *entries) for place, entries in tables.items())
        for path, tables in unit_tables.items()
    }


def entering_methods(
    apply: Functional,
    units: Mapping[str, int],
    full_precision: Collection[int],
    methods: Mapping[int, Sequence[str]],
    compiler: Compiler | None,
) -> dict[int, UnitMethods]:
    """Return the methods that enter units or run in full precision, by index of the module.

    Arguments:
        apply: the function of the whole model, whose method the root unit runs.
        units: index of each module of a unit, by path.
        full_precision: indices of modules that run in full precision without a unit.
        methods: the methods besides ``forward`` that enter units, by index of the module.
        compiler: the function that compiles a forward, if any.
    """
    specs, compiled_forwards = apply.skeleton.specs, {}
    if compiler is not None:
        compiled_forwards = compile_units(apply, units, full_precision, compiler)
    methods_by_index: dict[int, UnitMethods] = {
        index: {
            "forward": through_unit(
                specs[index].cls, "forward", compiled_forwards.get(index)
            ),
            **{
                name: through_unit(specs[index].cls, name)
                for name in methods.get(index, ())
            },
        }
        for index in {*full_precision, *units.values()} - {0}
    }
    # Note: the call itself enters the root, so its method is hidden only if it is compiled.
    if 0 in compiled_forwards:
        assert isinstance(apply.method_name, str), (
            "compile_units compiles methods of classes"
        )
        method = through_unit(specs[0].cls, apply.method_name, compiled_forwards[0])
        methods_by_index[0] = {apply.method_name: method}
    return methods_by_index


# --- the tensor outside of the unit ---------------------------------------------------------------


def placeholder(
    leaf: LeafSpec, buffer: BufferPlan, unit: UnitPlan, device: torch.device
) -> torch.Tensor:
    """Return a tensor with the shape, dtype and device of the gathered leaf, but without values.

    Code that computes with it gets an error with the parameter's path and its unit.
    """
    tensor: Any = wrapper_subclass(
        _Placeholder,
        leaf.shape_in_module,
        dtype=unit.dtypes(buffer).computed,
        device=device,
    )
    tensor.leaf, tensor.unit = leaf.path, unit.title
    return tensor


class _Placeholder(torch.Tensor):
    leaf: str
    unit: str
    funcshard_placeholder = True  # a plan may be made from placeholders

    # Note: torch's fast paths ask for it, and are taken only if it's this one.
    __torch_function__ = no_torch_function

    def register_hook(self, hook: Any) -> Any:
        raise _without_gradient(self.leaf, self.unit)

    register_post_accumulate_grad_hook = register_hook

    def requires_grad_(self, requires_grad: bool = True) -> torch.Tensor:
        if requires_grad == self.requires_grad:
            return self
        raise ValueError(
            f"forward set requires_grad={requires_grad} of parameter {self.leaf!r}, and the plan "
            "decides which parameters are trained: freeze it before make_functional, or use its "
            "detach() in forward"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"placeholder of {self.leaf!r} in unit {self.unit!r}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Why an error: the alternatives are to compute with garbage, or to gather the unit in a
        # collective that the plan does not predict.
        tensor = next(x for x in tree.leaves((args, kwargs)) if isinstance(x, cls))
        if graph_task_id() != -1:
            raise ValueError(
                f"parameter {tensor.leaf!r} was read (by {func}) outside the forward of unit "
                f"{tensor.unit!r}, in backward: torch.utils.checkpoint inside a unit works with "
                "use_reentrant=False, outside of torch.func transforms. Or pass fully_shard(..., "
                "remat=True)"
            )
        raise ValueError(
            f"parameter {tensor.leaf!r} was read (by {func}) outside the forward of unit "
            f"{tensor.unit!r}, which owns it; hooks run outside too. Call the unit's module, make a "
            "unit that contains every use, or name the method in fully_shard(..., "
            f"methods={{unit: [name]}})"
        )


def _without_gradient(leaf: str, unit: str) -> ValueError:
    return ValueError(
        f"code outside the forward of unit {unit!r} asks for the gradient of its parameter "
        f"{leaf!r}, which has none there: make a unit that contains this code; in place of "
        "odeint_adjoint use odeint or docs/recipes.md"
    )


class _Ungathered(torch.autograd.Function):
    """Make placeholders functions of ``UNGATHERED``."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, placeholders: Sequence[Any]) -> tuple[Any, ...]:
        ctx.leaves = [(tensor.leaf, tensor.unit) for tensor in placeholders]
        ctx.set_materialize_grads(False)
        # Why in a list: autograd takes what is inside for new results, and not for inputs.
        return tuple(placeholders)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        for grad, leaf in zip(grads, ctx.leaves, strict=True):
            if grad is not None:
                raise _without_gradient(*leaf)
        return None, None


# --- checks ---------------------------------------------------------------------------------------


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


def _check_plan(skeleton: Skeleton, plan: Plan, ignored: Mapping[str, Any]) -> None:
    """Raise unless the plan is for these parameters; warn if it trains all, also frozen ones."""
    if ignored:
        planned_names = {name for leaf in plan.leaves for name in leaf.names}
        common_name = next((name for name in ignored if name in planned_names), None)
        if common_name is not None:
            raise ValueError(
                f"ignored_params match {common_name!r}, which is a leaf of the plan; make the plan "
                "from the params without those that are ignored, or do not ignore it"
            )
    planned_leaves = {
        leaf.path: (unit, leaf) for unit in plan.unit_list for leaf in unit.leaves
    }
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
    trained_names = {
        leaf.path for _, buffer in trainable_buffers(plan) for leaf in buffer.leaves
    }
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
