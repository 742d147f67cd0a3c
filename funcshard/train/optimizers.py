"""An optimizer as a pair of functions: a ``TorchOptimizer``, or ``(init, update)`` as in optax.

``torch_optimizer`` makes such a pair of a class of ``torch.optim``. It checks the options, and
``learn_entries`` steps one small parameter to see which entries the class keeps of a leaf.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_flag
from funcshard.comm import Mesh
from funcshard.core import check_fits
from funcshard.plan import Plan, trainable_buffers
from funcshard.train.optimizer_step import (
    ELEMENTWISE,
    ELEMENTWISE_NAMES,
    TorchOptimizer,
    TorchStep,
    check_value,
    step_with_groups,
)
from funcshard.train.param_groups import GroupRange, ParamGroupLayout, group_leaves

# Only the kernel, or the size of the update, depends on these; where it computes does not matter.
_IGNORED = ("capturable", "differentiable", "foreach", "fused", "lr", "weight_decay")
# The options of torch.optim's classes on which the names depend.
_DECISIVE = ("amsgrad", "centered", "momentum")


def torch_optimizer(
    cls: type[torch.optim.Optimizer],
    /,
    *,
    elementwise: bool | None = None,
    groups: Sequence[Mapping[str, Any]] = (),
    plan: Plan | None = None,
    mesh: Mesh | None = None,
    **options: Any,
) -> TorchOptimizer:
    """Return a ``torch.optim`` class as a pair of functions ``(init, step)``.

    The class does the computing, so ``fused`` and ``foreach`` work as usual. The state is
    ``{"steps": number of steps taken, "leaves": tree}``, with a dictionary of the class's own state
    (``exp_avg``, ``step`` and so on) in place of each parameter, empty until the first step. What
    the class changes in its groups is there as ``group.NAME``.

    ``step(grads, state, params) -> (params, state)`` *donates* ``params`` and ``state``: it updates
    their tensors in place, and you can't use the old ones after the call. Call ``fs.copy`` before
    to keep them.

    Arguments:
        cls: an optimizer class that updates each element by itself: SGD, Adam, AdamW, NAdam, RAdam,
            Adamax, Adadelta, Adagrad, RMSprop, Rprop, ASGD, or a subclass of one of these.
        elementwise: ``True`` accepts any other class, on your word that it updates each element by
            itself; ``False`` is an error, even for one of the above.
        groups: parameter groups, ``{"paths": [paths or globs of nodes], "weight_decay": 0.0}``
            each, whose options override ``options`` for the leaves under these paths. Groups cost
            no communication. With them, a scalar of the state (``step``) is a tuple with one value
            for each group.
        plan: the plan of the shards; needed with ``groups``.
        mesh: the ranks; needed with ``groups``.
        options: arguments of the class (``lr``, ``weight_decay`` and so on). Each may be a function
            of the number of steps, such as one of optax or ``torch_schedule``.

    Returns:
        The pair ``(init, step)``, for ``make_train_step`` or your own loop.

    Raises:
        TypeError: the class has no such option.
        ValueError: the class is not known to be elementwise; an option has no valid value; or
            groups overlap, match no leaf, or come without plan and mesh. In ``step``: the state is
            one of another optimizer or plan, as far as its names and sizes tell, or a schedule
            returns no valid rate.

    Example:
        >>> import torch, funcshard as fs
        >>> optimizer = fs.torch_optimizer(torch.optim.SGD, lr=lambda step: 0.5 / (1 + step))
        >>> params = {"w": torch.ones(2)}
        >>> params, state = optimizer.step({"w": torch.ones(2)}, optimizer.init(params), params)
        >>> params["w"]
        tensor([0.5000, 0.5000])
        >>> tree = {"layer": {"weight": torch.ones(2, 2), "bias": torch.ones(2)}}
        >>> plan, mesh = fs.make_plan(tree, 1), fs.Mesh()
        >>> no_decay = {"paths": ["**.bias"], "weight_decay": 0.0}
        >>> optimizer = fs.torch_optimizer(
        ...     torch.optim.AdamW, weight_decay=0.1, groups=[no_decay], plan=plan, mesh=mesh
        ... )
    """
    if elementwise is not None:
        check_flag("elementwise", elementwise)
    else:
        elementwise = isinstance(cls, type) and issubclass(cls, ELEMENTWISE)
    if not elementwise:
        raise _refusal(cls)
    if not groups:
        check_options(cls, [options])
        return TorchOptimizer(
            _init, TorchStep(cls, (options,), learn_entries(cls, [options], [0]))
        )
    if plan is None or mesh is None:
        raise ValueError(
            "groups= needs the plan and the mesh, which say which elements of each group lie in "
            "this rank's shards; found groups without both: pass plan=plan and mesh=mesh"
        )
    return TorchOptimizer(_init, grouped_step(cls, options, groups, plan, mesh))


def _init(params: Any) -> Any:
    return {"steps": 0, "leaves": tree.map(lambda _: {}, params)}


def grouped_step(
    cls: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    plan: Plan,
    mesh: Mesh,
    left_out: Iterable[str] = (),
) -> TorchStep:
    """Return the step of a class with parameter groups, without the leaves ``left_out``."""
    check_fits(plan, mesh)
    # Group 0 has no options of its own: all leaves have ``options``, and a group overrides them.
    group_of, group_options = group_leaves(plan, groups, left_out)
    all_options = (dict(options), *group_options[1:])
    group_layout = ParamGroupLayout(group_of, len(all_options), mesh.shard.rank)
    check_options(cls, all_options)
    used_groups = {*group_of.values()}
    ranges_by_unit: Any = {unit.name: {} for unit in plan.unit_list}
    for unit, buffer in trainable_buffers(plan):
        group_ranges = group_layout.ranges(buffer)
        # Why empty ranges: a group without elements in this shard still counts its steps. Its
        # scalars are the same as on other ranks, and the state has one form on every rank.
        absent_groups = used_groups - {group_range.group for group_range in group_ranges}
        empty_ranges = [GroupRange(group, 0, 0) for group in sorted(absent_groups)]
        ranges_by_unit[unit.name][buffer.key] = (*group_ranges, *empty_ranges)
    return TorchStep(
        cls=cls,
        options=all_options,
        known=learn_entries(cls, all_options, used_groups),
        groups=groups,
        plan=plan,
        layout=group_layout,
        ranges=ranges_by_unit,
    )


# --- the options of a class -----------------------------------------------------------------------


def check_options(
    cls: type[torch.optim.Optimizer], options: Sequence[Mapping[str, Any]]
) -> None:
    """Raise unless a class takes the options of all leaves, and those that each group overrides."""
    try:
        signature = inspect.signature(cls)
    except (TypeError, ValueError):  # a class that does not say what it takes
        signature = None
    # Group 0 has the options of all leaves, so they are checked first.
    for group_index, group_options in enumerate(options):
        where = f" of group {group_index}" if group_index else ""
        # Why here: ``torch.optim`` does not check the options of groups, and takes unknown ones.
        merged_options = {**options[0], **group_options}
        for name, value in merged_options.items():
            if hasattr(value, "get_last_lr"):
                scheduler = getattr(value, "__name__", type(value).__name__)
                raise TypeError(
                    f"{name} must be a number, or a function of the number of steps; found "
                    f"{scheduler} of torch, which changes an optimizer of torch: pass "
                    f"{name}=fs.torch_schedule({scheduler}, lr=..., ...)"
                )
            if not callable(value):
                check_value(name, value, where)
        if signature is None:
            continue
        fixed = {
            name: value for name, value in merged_options.items() if not callable(value)
        }
        try:
            signature.bind(None, **merged_options)
            # A class checks the values of schedules in each step.
            if cls in ELEMENTWISE and merged_options.keys() - fixed <= {
                "lr",
                "weight_decay",
            }:
                cls([_tiny()], **fixed)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{cls.__name__} does not take the options{where}: {error}; "
                f"it takes {', '.join(signature.parameters)}"
            ) from None


def learn_entries(
    cls: type[torch.optim.Optimizer],
    options: Sequence[Mapping[str, Any]],
    members: Collection[int],
) -> dict[str, bool] | None:
    """Return whether an entry that a class keeps of a leaf has a value for each of its elements.

    Arguments:
        cls: the class.
        options: the options of all leaves, then those that each further group overrides.
        members: the groups that have leaves.

    Returns:
        A flag by the name of each entry; ``None`` if that cannot be learned here.
    """
    is_flat: dict[str, bool] = {}
    shared_names: set[Any] = set()
    try:
        for group in sorted(members):
            merged = {**options[0], **options[group]}
            if any(callable(merged.get(name)) for name in _DECISIVE):
                return None
            first_options = {
                name: value(0) if callable(value) else value
                for name, value in merged.items()
                if name not in _IGNORED
            }
            # Why: a class may ask for a rate, though no entry depends on it.
            if "lr" in merged:
                first_options["lr"] = 0.0
            # Two elements: an entry of this shape has a value for each element of a leaf.
            parameter = _tiny()
            # A class may draw random numbers, and the caller's must not change.
            with (
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(),
                torch.device("cpu"),
            ):
                warnings.simplefilter("ignore")
                optimizer: Any = cls([parameter], **first_options)
                step_with_groups(optimizer, ())
            shared_names |= optimizer.state.keys() - {parameter}
            for name, value in optimizer.state.get(parameter, {}).items():
                if value is not None:
                    is_flat[name] = getattr(value, "shape", None) == parameter.shape
    except Exception:  # such as a class that computes on CUDA only
        return None
    if shared_names:
        raise ValueError(
            f"{cls.__name__} keeps {sorted(map(str, shared_names))} in its state for all parameters "
            "together, which each step would start over: keep it in state[p] of each parameter"
        )
    return is_flat if members else None


def _tiny() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    return parameter


# --- checks ---------------------------------------------------------------------------------------


def _refusal(cls: Any) -> Exception:
    """Return the error for what isn't a class of elementwise optimizers."""
    remedy = "pass elementwise=True if it is one too"
    if isinstance(cls, torch.optim.Optimizer):
        remedy = f"pass torch_optimizer(torch.optim.{type(cls).__name__}, lr=...)"
    elif not callable(cls):
        remedy = "pass the class, as in torch_optimizer(torch.optim.AdamW, lr=...)"
    elif cls is getattr(torch.optim, "Muon", None):
        remedy = "call fs.muon(plan, mesh, lr=...), which updates whole matrices"
    elif cls is torch.optim.LBFGS:
        remedy = "call fs.lbfgs(loss_fn, shards, plan, mesh), which minimises a loss"
    elif isinstance(cls, functools.partial):
        remedy = "pass the class itself, and its options by name"
    elif cls.__module__.startswith("torch.optim"):
        remedy = (
            "choose one of these; elementwise=True would compute something else on shards"
        )
    error_type = ValueError if callable(cls) else TypeError
    return error_type(
        "torch_optimizer takes a class of optimizers that updates each element by itself, because "
        f"it works on flat shards; found {_title(cls)}, known are {', '.join(ELEMENTWISE_NAMES.split())}: "
        f"{remedy}"
    )


def check_optimizer(optimizer: Any, plan: Plan) -> None:
    """Raise unless ``optimizer`` is a pair of functions, for shards that ``plan`` cuts."""
    is_pair = isinstance(optimizer, tuple) and len(optimizer) == 2
    # The second function of a plain pair returns updates, and not parameters.
    is_opened = is_pair and hasattr(optimizer[1], "param_groups")
    if isinstance(optimizer, TorchOptimizer):
        own_plan: Plan = getattr(optimizer.step, "plan", None) or plan
        # Note: the plans may differ in what concerns no shard, such as precision.
        own_units, units = own_plan.unit_list, plan.unit_list
        if [(u.name, u.buffers) for u in own_units] != [(u.name, u.buffers) for u in units]:
            raise ValueError(
                "the optimizer's groups or matrices lie elsewhere in these shards: it was made "
                f"with plan {own_plan.fingerprint()}; found plan {plan.fingerprint()} here: make "
                "the optimizer and the step with one plan"
            )
    elif is_opened or not is_pair:
        cls = optimizer if isinstance(optimizer, type) else type(optimizer)
        remedy = "pass one of these"
        if issubclass(cls, torch.optim.Optimizer):
            remedy = f"pass fs.torch_optimizer(torch.optim.{cls.__name__}, lr=...)"
        elif is_opened:
            remedy = "pass the pair itself, and not a tuple of its functions"
        elif callable(optimizer):
            remedy = "call the function that returns a pair, and pass its result"
        raise TypeError(
            "optimizer must be a pair (init, update), as TorchOpt's are, or "
            f"torch_optimizer(torch.optim.AdamW, lr=...); found {_title(optimizer)}: {remedy}"
        )


def _title(value: Any) -> str:
    if isinstance(value, torch.optim.Optimizer):
        return f"an instance of {type(value).__name__}"
    return repr(getattr(value, "__name__", value))
