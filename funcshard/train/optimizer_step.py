"""One update by an optimizer: ``TorchStep``, a ``torch.optim`` class on views of flat shards.

Before it changes anything, a step checks that the state is one of its optimizer: it compares names
and sizes of the entries that the class keeps of each leaf. Adam, AdamW and RAdam keep the same
names, so a state cannot tell them apart.

A step updates tensors in place, and returns new tensor objects over the same memory. The old
objects would silently show the new values, so ``donate`` makes each of them a ``_DonatedTensor``,
which raises whenever you use it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_number, outline, with_remedies
from funcshard._utils.torch_private import address
from funcshard.core import check_shards
from funcshard.plan import Plan, current_recording, trainable_buffers
from funcshard.train.param_groups import GroupRange, ParamGroupLayout

# Why only these classes: a flat shard keeps nothing of its leaves' shapes. Each of these classes
# updates an element from that element's own gradient and state, so a flat shard gets the same
# numbers as the leaves would.
ELEMENTWISE_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
ELEMENTWISE = tuple(getattr(torch.optim, name) for name in ELEMENTWISE_NAMES.split())

# Begins the names of what a class has changed in the group of a leaf, in the leaf's state.
_GROUP = "group."

# What to do about a state that does not fit.
NEW_STATE = (
    "make a new one with optimizer.init(shards), or keep the optimizer, plan and mesh that this "
    "one was made with"
)
_PASS_NUMBER = "pass a number, or change the schedule"
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
        # Why no repr of the step: that of muon has its plan and its owners, on some pages.
        return getattr(self.step, "title", f"<optimizer of {type(self.step).__name__}>")


def apply_update(update: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Return ``(params, state)`` after one update by a plain pair ``(init, update)``."""
    # TorchOpt and optax name the parameters differently, and TorchOpt has further options.
    accepted = inspect.signature(update).parameters
    keywords: dict[str, Any] = {}
    if "inplace" in accepted:  # TorchOpt's would write into the gradients
        keywords["inplace"] = False
    if "params" in accepted:
        updates, state = update(grads, state, params=params, **keywords)
    else:
        updates, state = update(grads, state, params, **keywords)
    return tree.map(
        lambda leaf, change: leaf + change.to(leaf.dtype), params, updates
    ), state


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
        leaf_states = subtrees(
            params, state["leaves"], f"a state of {self.title}", NEW_STATE
        )
        all_views = self._views(grads, leaves, params)
        self._check_entries(leaf_states, all_views, params)
        group_members: list[list[torch.nn.Parameter]] = [[] for _ in self.options]
        for leaf_views in all_views:
            for view in leaf_views:
                group_members[view.group].append(view.parameter)
        optimizer = self._optimizer(group_members, state["steps"])
        # Note: the class looks its state up by parameter, so that of the old views moves to these.
        for leaf_views, leaf_state in zip(all_views, leaf_states, strict=True):
            view_states = [dict(leaf_state)]
            if self.layout is not None:
                view_states = _split_state(leaf_state, leaf_views)
            for view, view_state in zip(leaf_views, view_states, strict=True):
                if view_state:  # a class may have made the state of the first step already
                    optimizer.state[view.parameter] = view_state
        # Why: under ``torch.device("meta")`` the counters of torch's optimizers would be empty.
        # Why asked: torch's context takes time for each operation.
        run_step: Any = optimizer.step
        if not self.is_exact:
            scheduled = {name for options in self.options for name in schedules_in(options)}
            run_step = functools.partial(step_with_groups, optimizer, scheduled)
        if torch.get_default_device().type == "cpu":
            run_step()
        else:
            with torch.device("cpu"):
                run_step()
        new_states = []
        for leaf_views, leaf_state in zip(all_views, leaf_states, strict=True):
            view_states = [optimizer.state.pop(view.parameter, {}) for view in leaf_views]
            if self.layout is not None:
                merged_state = _merge_state(
                    leaf_state, leaf_views, view_states, self.layout.count
                )
                view_states = [merged_state]
            new_states += view_states
        # Whoever uses the old state gets an error, and no tensors that a step has changed.
        state["leaves"] = DONATED_STATE
        state_after = {"steps": state["steps"] + 1, "leaves": unflatten(new_states)}
        return unflatten(donate(leaves)), state_after

    def _check_entries(
        self, leaf_states: Sequence[Any], all_views: Sequence[Sequence[_View]], params: Any
    ) -> None:
        """Raise ``ValueError`` unless the states have the entries and sizes that they must have."""
        if self.known is None:
            return
        group_count = len(self.options)
        for leaf_index, (leaf_state, views) in enumerate(
            zip(leaf_states, all_views, strict=True)
        ):
            # The entries of a leaf leave out its elements of no group.
            size: tuple[int, ...] = (sum(view.parameter.numel() for view in views),)
            if self.layout is None:
                size = tuple(views[0].parameter.shape)
            held = {name: value for name, value in leaf_state.items() if value is not None}
            unknown_names = held.keys() - self.known.keys()
            fault = ""
            # Note: a class that is not torch's may have more entries than after its first step.
            if held and (
                self.known.keys() - held.keys() or (self.is_exact and unknown_names)
            ):
                fault = (
                    f"it must hold {sorted(self.known) or 'nothing'}; found {sorted(held)}"
                )
            for name, value in held.items():
                if self.known.get(name):
                    if getattr(value, "shape", value) != size:
                        fault = fault or (
                            f"its {name!r} must have shape {size}; found {outline(value)}, of "
                            "another plan or number of ranks"
                        )
                elif (
                    self.is_exact
                    and (len(value) if type(value) is tuple else 1) != group_count
                ):
                    fault = fault or (
                        f"its {name!r} must have a value for each of {group_count} groups; found "
                        f"{value!r}"
                    )
            if fault:
                raise ValueError(
                    f"the state of leaf {tree.paths(params)[leaf_index]!r} is not one of "
                    f"{self.title}: {fault}; {NEW_STATE}"
                )
            # Why only the first: the class itself raises for tensors of another size. With groups
            # it would get a slice of them.
            if self.layout is None and leaf_state:
                return

    @property
    def rate(self) -> Any:
        """The learning rate of the leaves for which no group has another one."""
        return rate_in(self.options[0], self.cls)

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The options that are functions of the number of steps, such as ``"groups[0].lr"``."""
        return {
            f"groups[{group_index - 1}].{name}" if group_index else name: schedule
            for group_index, options in enumerate(self.options)
            for name, schedule in schedules_in(options).items()
        }

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
            {
                **options,
                "params": [path for path in paths if group_of.get(path) == group_index],
            }
            for group_index, options in enumerate(
                self._optimizer(group_members, steps).param_groups
            )
        ]

    def _views(
        self, grads: Any, leaves: Sequence[torch.Tensor], params: Any
    ) -> list[list[_View]]:
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
        common_options, *overrides = [
            options_at(options, steps) for options in self.options
        ]
        param_groups: Any = [
            {"params": group_members, **group_options}
            for group_members, group_options in zip(members, [{}, *overrides], strict=True)
        ]
        if not overrides and members[0]:
            param_groups = members[0]  # what a class without groups of its own expects
        optimizer = self.cls(param_groups, **common_options)
        graph_recording = current_recording()
        if graph_recording is not None:
            for group, group_options in zip(
                optimizer.param_groups, self.options, strict=True
            ):
                for name, schedule in schedules_in(
                    {**self.options[0], **group_options}
                ).items():
                    # Why a tensor: the fused kernels take lr as one, or as a constant.
                    is_fused = name == "lr" and bool(group.get("fused"))
                    group[name] = graph_recording.number(schedule, steps, tensor=is_fused)
        return optimizer


def step_with_groups(optimizer: Any, scheduled: Collection[str]) -> None:
    """Run a step, and keep what it writes to groups, but for ``scheduled``, and counts itself."""
    attributes = vars(optimizer)
    fresh_counts = {name: value for name, value in attributes.items() if type(value) is int}
    fresh_groups = [dict(group) for group in optimizer.param_groups]
    for group, fresh_group in zip(optimizer.param_groups, fresh_groups, strict=True):
        for parameter in group["params"]:
            leaf_state = optimizer.state.get(parameter, {})
            for entry in [entry for entry in leaf_state if entry.startswith(_GROUP)]:
                name = entry.removeprefix(_GROUP)
                group[name] = leaf_state.pop(entry)
                fresh_group.pop(
                    name, None
                )  # what was kept once is kept, whatever its value
        attributes.update(
            (name, group[f"self.{name}"])
            for name in fresh_counts
            if f"self.{name}" in group
        )
    optimizer.step()
    for group, fresh_group in zip(optimizer.param_groups, fresh_groups, strict=True):
        # Why counts alone: other attributes may be this rank's, such as a norm for the log.
        for name, fresh_count in fresh_counts.items():
            if f"self.{name}" in group or attributes[name] != fresh_count:
                group[f"self.{name}"] = attributes[name]
        changes = {
            f"{_GROUP}{name}": value
            for name, value in group.items()
            if name not in scheduled and value is not fresh_group.get(name)
        }
        for parameter in group["params"]:
            if parameter.grad is not None:
                optimizer.state.setdefault(parameter, {}).update(changes)


# --- options --------------------------------------------------------------------------------------


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
    return {
        name: Schedule(name, value) for name, value in options.items() if callable(value)
    }


def rate_in(options: Mapping[str, Any], cls: type) -> Any:
    """Return the learning rate in the options of a class, or its default, if any."""
    if "lr" not in options:
        return getattr(inspect.signature(cls).parameters.get("lr"), "default", None)
    return schedules_in(options).get("lr") or _plain_number(options["lr"])


def _plain_number(value: Any) -> Any:
    """Return a scalar of another library as a ``float``, and anything else unchanged."""
    is_plain = isinstance(value, float | int | torch.Tensor) or not hasattr(
        value, "__float__"
    )
    return value if is_plain else float(value)


def options_at(options: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return options with the values that schedules have after so many steps."""
    if current_recording() is not None:
        steps = 0  # a graph that fs.trace records asks the schedules each time it runs
    return {
        name: Schedule(name, value)(steps) if callable(value) else _plain_number(value)
        for name, value in options.items()
    }


def check_value(name: str, value: Any, when: str) -> None:
    """Raise if an option is NaN, or if ``lr`` or ``weight_decay`` is infinite or negative.

    Arguments:
        name: the option.
        value: its value, that of a schedule included.
        when: the group or the step of the value, for the error; ``""`` without.
    """
    # Why here: SGD takes NaN, every class takes infinity, and no class checks the options of
    # groups.
    if name not in ("lr", "weight_decay"):
        if isinstance(value, float) and value != value:
            check_number(f"{name}{when}", value, infinite=True, remedy=_PASS_NUMBER)
        return
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{name}{when} must be one number; found a tensor of shape {tuple(value.shape)}: "
                "pass one of its elements, or options of groups"
            )
        if value.device.type != "cpu":
            return  # reading the value would wait for the device
        value = value.reshape(())
    check_number(f"{name}{when}", value, least=0, remedy=_PASS_NUMBER)


# --- views of leaves ------------------------------------------------------------------------------


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


def _split_state(
    leaf_state: Mapping[str, Any], views: Sequence[_View]
) -> list[dict[str, Any]]:
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
                state
                for state, view in zip(view_states, views, strict=True)
                if view.group == group
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
            scalar_of = {
                view.group: value for view, value in zip(views, view_values, strict=True)
            }
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


# --- checks of a state ----------------------------------------------------------------------------


def check_form(state: Any, names: set[str], title: str) -> None:
    """Raise unless a state has the entries of the optimizer ``title``, and was not donated."""
    if not isinstance(state, Mapping) or not names <= state.keys():
        raise ValueError(
            f"step takes (grads, state, params), and a state of {title} holds {sorted(names)}; "
            f"found {outline(state)}: {NEW_STATE}"
        )
    if any(state[name] is DONATED_STATE for name in names):
        raise RuntimeError(_DONATED_ERROR)


def subtrees(params: Any, deeper: Any, title: str, remedy: str) -> list[Any]:
    """Return the subtrees of ``deeper`` at the positions of the parameters.

    Arguments:
        params: the parameters.
        deeper: a tree like the parameters, with a subtree in place of each leaf.
        title: names the tree in the error.
        remedy: what to do.
    """
    try:
        return tree.leaves_up_to(params, deeper)
    except (TypeError, ValueError) as error:
        # optree's message goes on with both trees.
        reason, _, _ = str(error).partition("; dict: {")  # without the tensors
        raise ValueError(
            f"{title} must be a tree like the parameters: {reason:.200}; {remedy}"
        ) from None


# --- donation -------------------------------------------------------------------------------------

_DONATED = (
    "use the state that the step returned, keep fs.copy(state) from before the step, or pass "
    "donate=False to make_train_step"
)


class _DonatedTensor(torch.Tensor):
    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise RuntimeError(
            f"this tensor was donated to a training step, which updated it in place: {_DONATED}"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "<tensor that was donated to a training step>"


class _DonatedState:
    """Replaces the tensors of an optimizer's state that were donated to a step."""

    def __repr__(self) -> str:
        return "<optimizer state that was donated to a step>"


DONATED_STATE = _DonatedState()

_DONATED_ERROR = (
    f"this optimizer state was donated to a step, which updated it in place: {_DONATED}"
)


def donate(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return new tensor objects over the memory of ``leaves``; the old ones can't be used again."""
    new_leaves = [leaf.detach() for leaf in leaves]
    empty_tensors: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
    for old_leaf, new_leaf in zip(leaves, new_leaves, strict=True):
        if isinstance(old_leaf, _DonatedTensor):  # a tree that holds one tensor twice
            continue
        memory_kind = new_leaf.dtype, new_leaf.device
        if memory_kind not in empty_tensors:
            empty_tensors[memory_kind] = new_leaf.new_empty(0)
        # Note: both are needed. A transform looks through the class, and finds no memory.
        old_leaf.data = empty_tensors[memory_kind]
        old_leaf.__class__ = _DonatedTensor
    return new_leaves


def is_donated(leaf: Any) -> bool:
    """Return whether a tensor, or an optimizer's state, was donated to a step."""
    return leaf is DONATED_STATE or isinstance(leaf, _DonatedTensor)


def check_not_donated(state: Any) -> None:
    """Raise ``RuntimeError`` if ``state``, part of an optimizer's state, was donated."""
    if state is DONATED_STATE:
        raise RuntimeError(_DONATED_ERROR)
