"""An optimizer as a pair of functions: a ``TorchOptimizer``, or ``(init, update)`` as in optax.

``torch_optimizer`` makes such a pair of a class of ``torch.optim``.

The class computes on views of this rank's flat shards.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_flag, outline, with_remedies
from funcshard._utils.torch_private import address
from funcshard.comm import Mesh
from funcshard.core import check_fits, check_shards
from funcshard.plan import Plan, current_recording, trainable_buffers
from funcshard.train.param_groups import (
    GroupRange,
    ParamGroupLayout,
    group_leaves,
)
from funcshard.train.state_checks import (
    DONATED_STATE,
    ELEMENTWISE,
    ELEMENTWISE_NAMES,
    NEW_STATE,
    check_entries,
    check_form,
    check_options,
    check_value,
    donate,
    learn_entries,
    subtrees,
    with_plain_factories,
)

_PASS_GRADIENTS = "pass the gradients that value_and_grad returned for these shards"
_REMEDIES = {
    "zero_grad": "leave it out; value_and_grad returns new gradients each time",
    "state_dict": "the state is state.opt_state: call fs.optimizer_to_state_dict, or fs.save",
    "param_groups": "pass options that change as functions of the step, as in lr=lambda step: ...",
}


@with_remedies("an optimizer of torch_optimizer or muon", _REMEDIES)
class TorchOptimizer(NamedTuple):
    """An optimizer as a pair of functions; made by ``torch_optimizer`` or ``muon``.

    Attributes:
        init: ``init(params) -> state``.
        step: ``step(grads, state, params) -> (params, state)``. It donates ``state`` and
            ``params``: it updates their tensors in place, and the old ones raise an error if you
            use them.
    """

    init: Callable[[Any], Any]
    step: Callable[[Any, Any, Any], tuple[Any, Any]]

    def __repr__(self) -> str:
        return getattr(self.step, "title", f"TorchOptimizer({self.init!r}, {self.step!r})")


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
    (``exp_avg``, ``step`` and so on) in place of each parameter, empty until the first step.

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
        options: arguments of the class (``lr``, ``weight_decay``, ``fused`` and so on). You can
            pass a function of the number of steps taken for an option, such as one of optax or
            ``torch_schedule``.

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
        return TorchOptimizer(_init, TorchStep(cls, (options,), learn_entries(cls, [options], [0])))
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


@dataclass(frozen=True, slots=True)
class TorchStep:
    """The step of a ``torch.optim`` class: its options and parameter groups, without any state.

    Attributes:
        cls: the class.
        options: the options of all leaves, then those that each further group overrides.
        known: the entries that the class keeps of each leaf, if known; see ``learn_entries``.
        groups: the groups as they were passed.
        plan: the plan of the shards; ``None`` without groups, for any pytree.
        layout: the groups of leaves; ``None`` without groups.
        ranges: the ranges of each shard that groups occupy, a tree like the shards.
        title: name of the optimizer in messages.
        is_exact: whether the class keeps no other entries than those of ``known``.
    """

    cls: type[torch.optim.Optimizer]
    options: tuple[Mapping[str, Any], ...]
    known: Mapping[str, bool] | None
    groups: Sequence[Mapping[str, Any]] = ()
    plan: Plan | None = None
    layout: ParamGroupLayout | None = None
    ranges: Any = None
    title: str = field(init=False, compare=False)
    is_exact: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "title", f"torch_optimizer({self.cls.__name__})")
        object.__setattr__(self, "is_exact", self.cls in ELEMENTWISE)

    def __call__(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Update ``params`` and ``state``, which are donated, by one step."""
        check_form(state, {"steps", "leaves"}, self.title)
        leaves, unflatten = tree.flatten(params)
        leaf_states = subtrees(params, state["leaves"], f"a state of {self.title}", NEW_STATE)
        all_views = self._views(grads, leaves, params)
        num_groups: int | None = None
        state_sizes: list[tuple[int, ...]] = [leaf.shape for leaf in leaves]
        if self.layout is not None:
            num_groups = self.layout.count
            # The entries of a leaf leave out its elements of no group.
            state_sizes = [
                (sum(view.parameter.numel() for view in leaf_views),) for leaf_views in all_views
            ]
        check_entries(self, leaf_states, state_sizes, num_groups, params)
        group_members: list[list[torch.nn.Parameter]] = [[] for _ in self.options]
        for leaf_views in all_views:
            for view in leaf_views:
                group_members[view.group].append(view.parameter)
        optimizer = self._optimizer(group_members, state["steps"])
        # Note: the class looks its state up by parameter, so that of the old views moves to these.
        for leaf_views, leaf_state in zip(all_views, leaf_states, strict=True):
            view_states = [dict(leaf_state)]
            if num_groups is not None:
                view_states = _split_state(leaf_state, leaf_views)
            for view, view_state in zip(leaf_views, view_states, strict=True):
                if view_state:  # a class may have made the state of the first step already
                    optimizer.state[view.parameter] = view_state
        with with_plain_factories():
            optimizer.step()
        new_states = []
        for leaf_views, leaf_state in zip(all_views, leaf_states, strict=True):
            view_states = [optimizer.state.pop(view.parameter, {}) for view in leaf_views]
            new_state = view_states[0]
            if num_groups is not None:
                new_state = _merge_state(leaf_state, leaf_views, view_states, num_groups)
            new_states.append(new_state)
        # Whoever uses the old state gets an error, and no tensors that a step has changed.
        state["leaves"] = DONATED_STATE
        state_after = {"steps": state["steps"] + 1, "leaves": unflatten(new_states)}
        return unflatten(donate(leaves)), state_after

    @property
    def rate(self) -> Any:
        """The learning rate of the leaves for which no group has another one."""
        return self.schedules.get("lr") or rate_in(self.options[0], self.cls)

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The options that are functions of the number of steps, such as ``"groups[0].lr"``."""
        option_schedules = schedules_in(self.options[0])
        for group_index, options in enumerate(self.options[1:]):
            for name, schedule in schedules_in(options).items():
                option_schedules[f"groups[{group_index}].{name}"] = schedule
        return option_schedules

    def param_groups(self, steps: int, paths: Sequence[str]) -> list[dict[str, Any]]:
        """Return the options of each group as ``torch.optim`` writes them, with the group's paths.

        Arguments:
            steps: number of steps taken, which schedules depend on.
            paths: the trainable leaves, in the order to list them.
        """
        # The class fills in its defaults, for which it needs parameters of some kind.
        no_elements = torch.empty(0, dtype=torch.float32, device="cpu")
        group_members = [[torch.nn.Parameter(no_elements)] for _ in self.options]
        group_of = dict.fromkeys(paths, 0) if self.layout is None else self.layout.group_of
        return [
            {**options, "params": [path for path in paths if group_of.get(path) == group_index]}
            for group_index, options in enumerate(
                self._optimizer(group_members, steps).param_groups
            )
        ]

    def _views(self, grads: Any, leaves: Sequence[torch.Tensor], params: Any) -> list[list[_View]]:
        leaf_grads = subtrees(params, grads, "the gradient", _PASS_GRADIENTS)
        # Without groups each leaf is one view of itself, whatever its shape.
        leaf_ranges: list[Any] = [None] * len(leaves)
        if self.plan is not None:
            check_shards(self.plan, params)
            for unit, buffer in trainable_buffers(self.plan):
                shard = params[unit.name][buffer.key]
                if shard.shape != (buffer.shard_numel,):
                    raise ValueError(
                        f"shard {buffer.key!r} of unit {unit.title!r} must have shape "
                        f"({buffer.shard_numel},), as in the optimizer's plan; found "
                        f"{outline(shard)}: make the optimizer with the plan of these shards"
                    )
            leaf_ranges = tree.leaves_up_to(params, self.ranges)
        all_views = []
        for leaf, grad, ranges in zip(leaves, leaf_grads, leaf_ranges, strict=True):
            if grad is not None:
                if getattr(grad, "shape", None) != leaf.shape:
                    raise ValueError(
                        f"a gradient must have the shape of its leaf, {tuple(leaf.shape)}; found "
                        f"{outline(grad)}: {_PASS_GRADIENTS}"
                    )
                grad = grad.to(leaf.dtype)  # it may be of lower precision
            if ranges is not None:
                all_views.append(_views_of_groups(leaf.detach(), grad, ranges))
                continue
            parameter = torch.nn.Parameter(leaf.detach())
            parameter.grad = grad
            all_views.append([_View(parameter, 0, slice(None))])
        return all_views

    def _optimizer(
        self, members: Sequence[Sequence[torch.nn.Parameter]], steps: int
    ) -> torch.optim.Optimizer:
        """Return an instance of the class over each group's members, with this step's options."""
        common_options, *overrides = [options_at(options, steps) for options in self.options]
        param_groups: Any = [
            {"params": group_members, **group_options}
            for group_members, group_options in zip(members, [{}, *overrides], strict=True)
        ]
        if not overrides and members[0]:
            param_groups = members[0]  # what a class without groups of its own expects
        optimizer = self.cls(param_groups, **common_options)
        graph_recording = current_recording()
        if graph_recording is not None:
            for group, group_options in zip(optimizer.param_groups, self.options, strict=True):
                for name, schedule in schedules_in({**self.options[0], **group_options}).items():
                    # Why a tensor: the fused kernels take lr as one, or as a constant.
                    is_fused = name == "lr" and bool(group.get("fused"))
                    group[name] = graph_recording.number(schedule, steps, tensor=is_fused)
        return optimizer


@dataclass(frozen=True, slots=True)
class Schedule:
    """An option that is a function of the number of steps, with a check of its values.

    Attributes:
        name: name of the option.
        function: the function.
    """

    name: str
    function: Callable[[int], Any]

    def __call__(self, steps: int) -> Any:
        # Note: a schedule of NumPy or of optax returns a scalar of its own class.
        value = _plain_number(self.function(steps))
        check_value(self.name, value, f" at step {steps}")
        return value


def schedules_in(options: Mapping[str, Any]) -> dict[str, Schedule]:
    """Return the options that are functions of the number of steps."""
    return {name: Schedule(name, value) for name, value in options.items() if callable(value)}


def rate_in(options: Mapping[str, Any], cls: type) -> Any:
    """Return the learning rate in the options of a class, or its default, if any."""
    if "lr" in options:
        return _plain_number(options["lr"])
    return getattr(inspect.signature(cls).parameters.get("lr"), "default", None)


def _plain_number(value: Any) -> Any:
    """Return a scalar of another library as a ``float``, and anything else unchanged."""
    is_plain = isinstance(value, float | int | torch.Tensor) or not hasattr(value, "__float__")
    return value if is_plain else float(value)


def options_at(options: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return options with the values that schedules have after so many steps."""
    if current_recording() is not None:
        steps = 0  # a graph that fs.trace records asks the schedules each time it runs
    option_values = dict(options)
    for name, value in options.items():
        if callable(value):
            option_values[name] = Schedule(name, value)(steps)
        else:
            option_values[name] = _plain_number(value)
    return option_values


class _View(NamedTuple):
    """A view of a leaf as a parameter, all of one group.

    Attributes:
        parameter: the view, with its part of the gradient.
        group: number of its group.
        in_state: the place of its elements in the flat tensors of the leaf's state.
    """

    parameter: torch.nn.Parameter
    group: int
    in_state: slice


def _views_of_groups(
    leaf: torch.Tensor, grad: torch.Tensor | None, ranges: Sequence[GroupRange]
) -> list[_View]:
    views, stop_in_state = [], 0
    for group, start, stop in ranges:
        parameter = torch.nn.Parameter(leaf[start:stop])
        if grad is not None:
            parameter.grad = grad[start:stop]
        start_in_state, stop_in_state = stop_in_state, stop_in_state + stop - start
        views.append(_View(parameter, group, slice(start_in_state, stop_in_state)))
    return views


def _split_state(leaf_state: Mapping[str, Any], views: Sequence[_View]) -> list[dict[str, Any]]:
    """Return the state of each view, given its leaf's state; inverse of ``_merge_state``."""
    view_states: list[dict[str, Any]] = [{} for _ in views]
    fresh_states: list[dict[str, Any]] = []
    for name, value in leaf_state.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            for state, view in zip(view_states, views, strict=True):
                state[name] = value[view.in_state]
            continue
        scalars = value if isinstance(value, tuple) else (value,)
        has_begun = any(scalar is not None for scalar in scalars)
        for group, scalar in enumerate(scalars):
            group_states = [
                state for state, view in zip(view_states, views, strict=True) if view.group == group
            ]
            # Note: a group without a scalar that another group has begins from scratch.
            if scalar is None and has_begun:
                fresh_states += group_states
                continue
            copies = [scalar] * len(group_states)
            if isinstance(scalar, torch.Tensor) and len(group_states) > 1:
                # The class counts steps in place, once for each view, so two views cannot share a
                # scalar.
                copies[:-1] = scalar.expand(len(group_states) - 1).clone().unbind()
            for state, scalar_copy in zip(group_states, copies, strict=True):
                state[name] = scalar_copy
    for state in fresh_states:
        state.clear()
    return view_states


def _merge_state(
    leaf_state: Mapping[str, Any],
    views: Sequence[_View],
    states: list[dict[str, Any]],
    num_groups: int,
) -> dict[str, Any]:
    """Return the state of a leaf in the flat tensors of ``leaf_state``, given that of its views."""
    merged_state: dict[str, Any] = {}
    # In the order in which the class made the entries, which is the same on all ranks.
    for name in dict.fromkeys(name for state in states for name in state):
        view_values = [state.pop(name, None) for state in states]
        first_value = next((value for value in view_values if value is not None), None)
        if not isinstance(first_value, torch.Tensor) or not first_value.ndim:
            # The last view of a group has the scalar itself, the others have copies.
            scalar_of = {view.group: value for view, value in zip(views, view_values, strict=True)}
            scalars = tuple(scalar_of.get(group) for group in range(num_groups))
            merged_state[name] = scalars if num_groups > 1 else scalars[0]
            continue
        flat_entry = leaf_state.get(name)
        if flat_entry is None:
            flat_entry = first_value.new_zeros(views[-1].in_state.stop)
        for view, value in zip(views, view_values, strict=True):
            flat_slice = flat_entry[view.in_state]
            # A class that made a new tensor, in place of updating the old one, is copied.
            if value is not None and address(value) != address(flat_slice):
                flat_slice.copy_(value)
        merged_state[name] = flat_entry
    return merged_state


def apply_optimizer(optimizer: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Return ``(params, state)`` after one update by an optimizer of either kind."""
    if isinstance(optimizer, TorchOptimizer):
        return optimizer.step(grads, state, params)
    _, update = optimizer
    # TorchOpt and optax name the parameters differently, and TorchOpt has further options.
    accepted = inspect.signature(update).parameters
    keywords: dict[str, Any] = {}
    if "inplace" in accepted:  # TorchOpt's would write into the gradients
        keywords["inplace"] = False
    if "params" in accepted:
        updates, state = update(grads, state, params=params, **keywords)
    else:
        updates, state = update(grads, state, params, **keywords)
    return tree.map(lambda leaf, change: leaf + change.to(leaf.dtype), params, updates), state


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
        remedy = "choose one of these; elementwise=True would compute something else on shards"
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
        own_buffers, buffers = (
            [(unit.name, unit.buffers) for unit in unit_plans.unit_list]
            for unit_plans in (own_plan, plan)
        )
        if own_buffers != buffers:
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
