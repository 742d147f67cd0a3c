"""Optimizers as pairs of pure functions: ``torch_optimizer`` for the classes of ``torch.optim``.

The class computes on views of this rank's flat shards, one for each parameter group.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcshard._utils import (
    DONATED_STATE,
    address,
    check_flag,
    check_not_donated,
    donate,
    tree,
    with_plain_factories,
)
from funcshard.comm import Mesh, current_recording
from funcshard.core import check_fits, check_shards
from funcshard.plan import Plan
from funcshard.train.learning_rate import plain_number
from funcshard.train.optimizer_pair import ELEMENTWISE, TorchOptimizer, refusal
from funcshard.train.param_groups import (
    GroupRange,
    ParamGroupLayout,
    check_groups,
    group_leaves,
    trainable_buffers,
)
from funcshard.train.state_checks import (
    KnownEntries,
    check_dtypes,
    check_entries,
    check_gradients,
    check_names,
    check_options,
    check_size,
    check_trees,
    check_values,
    learn_entries,
)


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

    The class does the computing, so its ``fused`` and ``foreach`` kernels work as usual. The state
    is ``{"steps": number of steps taken, "leaves": tree}``. The tree is like the parameters, with a
    dictionary of the class's own state (``exp_avg``, ``step`` and so on) in place of each leaf. The
    dictionaries are empty until the first step, as in ``torch.optim``.

    ``step(grads, state, params) -> (params, state)`` *donates* ``params`` and ``state``: it updates
    their tensors in place and returns them, so that no second copy ever exists. To use the old
    ``params`` or ``state`` after the call is an error; ``fs.copy`` makes a copy before it.

    Arguments:
        cls: an optimizer class that updates each element by itself: SGD, Adam, AdamW, NAdam, RAdam,
            Adamax, Adadelta, Adagrad, RMSprop, Rprop, ASGD, or a subclass of one of these.
        elementwise: ``True`` accepts any other class, on your word that it updates each element by
            itself. ``False`` refuses the class, even if it inherits from one of the above.
        groups: parameter groups, ``{"paths": [paths or globs of nodes], "weight_decay": 0.0}``
            each. A group's options override ``options`` for the leaves under its paths; all other
            leaves have ``options``. Groups cost no communication: the class updates views of each
            shard. With groups, a scalar of the state (``step``) is a tuple with one value for each
            group.
        plan: the plan of the shards; needed with ``groups``.
        mesh: the ranks; needed with ``groups``.
        options: arguments of the class (``lr``, ``weight_decay``, ``fused`` and so on). An option
            may be a function of the number of steps taken, which makes it a schedule, as those of
            optax are; ``torch_schedule`` makes one of a scheduler of torch.

    Returns:
        The pair ``(init, step)``, for ``make_train_step`` or to be called by hand.

    Raises:
        TypeError: the class has no such option.
        ValueError: the class is not known to be elementwise, and would silently compute something
            else on flat shards; the class refuses the value of an option; or groups overlap, match
            no leaf, or come without plan and mesh. In ``step``: the state is one of another
            optimizer or plan, as far as its names and sizes tell, or a schedule returns a learning
            rate that is negative or not finite.

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
        check_flag(
            "elementwise", elementwise, "pass one of the two, or None if torch's own class says it"
        )
    is_known = isinstance(cls, type) and issubclass(cls, ELEMENTWISE)
    if not (is_known if elementwise is None else elementwise):
        raise refusal(cls)
    check_names(
        cls, (options, *(group for group in check_groups(groups) if isinstance(group, Mapping)))
    )
    if not groups:
        return TorchOptimizer(_init, _torch_step(cls, (options,), None, None, [0]))
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
    """Return the step of a class with parameter groups; it leaves the leaves ``left_out`` alone."""
    check_fits(plan, mesh)
    group_of, group_options = group_leaves(plan, groups, left_out)
    layout = ParamGroupLayout(group_of, len(group_options), mesh.shard.rank)
    return _torch_step(cls, (dict(options), *group_options[1:]), plan, layout, {*group_of.values()})


def _torch_step(
    cls: type[torch.optim.Optimizer],
    options: tuple[Mapping[str, Any], ...],
    plan: Plan | None,
    layout: ParamGroupLayout | None,
    members: Collection[int],
) -> TorchStep:
    """Return the step of a class, after checks of its options.

    ``members`` are the numbers of the groups that have leaves.
    """
    if cls in ELEMENTWISE:
        check_options(cls, options)
    return TorchStep(
        cls, options, plan, layout, learn_entries(cls, options, members, cls in ELEMENTWISE)
    )


@dataclass(frozen=True, slots=True)
class TorchStep:
    """The step of a ``torch.optim`` class: its options and parameter groups, without any state.

    Attributes:
        cls: the class.
        options: the options of all leaves, then the options that each further group overrides.
        plan: the plan of the shards; ``None`` without groups, and then parameters may be any
            pytree.
        layout: the ranges of the shards that each group occupies; ``None`` without groups.
        known: the entries that the class keeps of each leaf; ``None`` if these are not known.
    """

    cls: type[torch.optim.Optimizer]
    options: tuple[Mapping[str, Any], ...]
    plan: Plan | None
    layout: ParamGroupLayout | None
    known: KnownEntries | None = None

    def __call__(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Update ``params`` and ``state``, which are donated, by one step, and return them."""
        if not isinstance(state, dict) or not state.keys() & {"leaves", "steps"}:
            found_keys = list(state)[:4] if isinstance(state, Mapping) else type(state).__name__
            raise TypeError(
                "an optimizer's step takes (grads, state, params) and returns (params, state), "
                f"and the state comes from init or from the step before; found {found_keys} as state"
            )
        leaves, unflatten = tree.flatten(params)
        try:
            check_not_donated(state["leaves"])
            leaf_states = tree.leaves_up_to(params, state["leaves"])
            leaf_grads = tree.leaves_up_to(params, grads)
        except (KeyError, TypeError, ValueError):
            check_trees(grads, state, params, self.title)
            raise
        views = self._views(params, leaves, leaf_grads)
        if not self._fits(leaf_states, leaves, views):
            sizes = [
                leaf.shape if self.layout is None else _size(own)
                for leaf, own in zip(leaves, views, strict=True)
            ]
            groups = 1 if self.layout is None else self.layout.count
            check_entries(self.known, leaf_states, sizes, groups, params, self.title)
        if not any(views):  # another optimizer updates every leaf
            return params, {**state, "steps": state["steps"] + 1}
        optimizer = self._optimizer([view for each in views for view in each], state["steps"])
        for leaf_views, leaf_state in zip(views, leaf_states, strict=True):
            for view, view_state in zip(
                leaf_views, _split_state(leaf_state, leaf_views, self.layout), strict=True
            ):
                if view_state:  # a class may have made the state of the first step already
                    optimizer.state[view.parameter] = view_state
        with with_plain_factories():
            try:
                optimizer.step()
            # Torch's kernels raise it for a dtype that they lack, without the leaf's path.
            except RuntimeError:
                check_dtypes(leaves, params, self.title)
                raise
        new = [
            _merge_state(
                leaf_state,
                leaf_views,
                [optimizer.state.pop(v.parameter, {}) for v in leaf_views],
                self.layout,
            )
            for leaf_views, leaf_state in zip(views, leaf_states, strict=True)
        ]
        state["leaves"] = DONATED_STATE
        return unflatten(donate(leaves)), {"steps": state["steps"] + 1, "leaves": unflatten(new)}

    @property
    def title(self) -> str:
        """Name of the optimizer in messages."""
        return f"torch_optimizer({self.cls.__name__})"

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The options that are functions of the number of steps, such as ``"groups[0].lr"``."""
        rate_schedules = schedules_in(self.options[0])
        for group_index, options in enumerate(self.options[1:]):
            rate_schedules |= schedules_in(options, f"groups[{group_index}].")
        return rate_schedules

    def param_groups(self, steps: int, paths: Sequence[str]) -> list[dict[str, Any]]:
        """Return the options of each group as ``torch.optim`` writes them, with the group's paths.

        Arguments:
            steps: number of steps taken, which schedules depend on.
            paths: the trainable leaves, in the order in which the groups shall list them.
        """
        empty = [
            _View(
                torch.nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu")), group, 0, 0
            )
            for group in range(len(self.options))
        ]
        group_of = dict.fromkeys(paths, 0) if self.layout is None else self.layout.group_of
        return [
            {**options, "params": [path for path in paths if group_of.get(path) == group_index]}
            for group_index, options in enumerate(self._optimizer(empty, steps).param_groups)
        ]

    def _views(
        self, params: Any, leaves: list[torch.Tensor], grads: list[Any]
    ) -> list[list[_View]]:
        """Return the views of each leaf of ``params`` that the class shall update."""
        if self.plan is None or self.layout is None:
            try:
                return [
                    [_whole_view(leaf.detach(), grad)]
                    for leaf, grad in zip(leaves, grads, strict=True)
                ]
            except (AttributeError, RuntimeError, TypeError):
                check_gradients(grads, leaves, params)  # names the leaf
                raise
        check_gradients(grads, leaves, params)
        check_shards(self.plan, params)
        ranges: dict[str, dict[str, Any]] = {name: {} for name in params}
        for unit, buffer in trainable_buffers(self.plan):
            check_size(params[unit.name].get(buffer.key), buffer, unit)
            ranges[unit.name][buffer.key] = self.layout.ranges(buffer)
        groups = frozenset(self.layout.group_of.values())
        return [
            _range_views(leaf.detach(), grad, leaf_ranges, groups)
            for leaf, grad, leaf_ranges in zip(
                leaves, grads, tree.leaves_up_to(params, ranges), strict=True
            )
        ]

    def _fits(
        self,
        leaf_states: Sequence[Any],
        leaves: Sequence[torch.Tensor],
        views: Sequence[Sequence[_View]],
    ) -> bool:
        """Return whether the state is one of this class, as far as a look at each leaf tells.

        ``check_entries`` looks closer. Without groups, the first leaf that has a state speaks for
        all, because the class itself refuses tensors of another size. With groups the class would
        get a slice of them.
        """
        if self.known is None:
            return True
        entries = self.known.flat
        flat = next((name for name, is_flat in entries.items() if is_flat), None)
        scalar = next((name for name, is_flat in entries.items() if not is_flat), None)
        for leaf_state, leaf, leaf_views in zip(leaf_states, leaves, views, strict=True):
            if not leaf_state:
                continue
            size, groups = (
                (leaf.shape, 1) if self.layout is None else (_size(leaf_views), self.layout.count)
            )
            fits = (
                leaf_state.keys() == entries.keys()
                and (flat is None or getattr(leaf_state[flat], "shape", None) == size)
                and (
                    scalar is None
                    or (len(leaf_state[scalar]) if type(leaf_state[scalar]) is tuple else 1)
                    == groups
                )
            )
            if not fits or self.layout is None:
                return fits
        return True

    def _optimizer(self, views: Sequence[_View], steps: int) -> torch.optim.Optimizer:
        """Return an instance of the class over the views, with the options of this step."""
        recording = current_recording()
        # Why not now: a graph that fs.trace records asks the schedules each time it runs.
        at = steps if recording is None else 0
        options_now = [
            {k: plain_number(v(at)) if callable(v) else v for k, v in o.items()}
            for o in self.options
        ]
        for options in options_now:
            rates = options.get("lr", 0.0), options.get("weight_decay", 0.0)
            bad_rate = any(type(v) is not float or not 0.0 <= v < math.inf for v in rates)
            if bad_rate or any(isinstance(v, float) and v != v for v in options.values()):
                check_values(options, f" at step {at}")
        members = [
            [view.parameter for view in views if view.group == group]
            for group in range(len(options_now))
        ]
        if len(options_now) == 1:
            optimizer = self.cls(members[0], **options_now[0])
        else:
            further = zip(members, [{}, *options_now[1:]], strict=True)
            optimizer = self.cls(
                [{"params": group_views, **more_options} for group_views, more_options in further],
                **options_now[0],
            )
        if recording is not None:
            for group, group_options in zip(optimizer.param_groups, self.options, strict=True):
                for name, value in {**self.options[0], **group_options}.items():
                    if callable(value):
                        # Why a tensor: the fused kernels take lr as one, or as a constant.
                        fused = name == "lr" and bool(group.get("fused"))
                        group[name] = recording.number(Schedule(name, value), steps, tensor=fused)
        return optimizer


@dataclass(frozen=True, slots=True)
class Schedule:
    """An option that is a function of the number of steps, and raises for a forbidden value.

    Attributes:
        name: name of the option.
        function: the function.
    """

    name: str
    function: Callable[[int], Any]

    def __call__(self, steps: int) -> Any:
        """Return the value of the option after a number of steps."""
        value = plain_number(self.function(steps))
        check_values({self.name: value}, f" at step {steps}")
        return value


def schedules_in(options: Mapping[str, Any], prefix: str = "") -> dict[str, Schedule]:
    """Return the options that are functions of the number of steps, by name with a prefix."""
    return {
        f"{prefix}{name}": Schedule(name, value)
        for name, value in options.items()
        if callable(value)
    }


class _View(NamedTuple):
    """A view of a leaf as a parameter, all of one group.

    Attributes:
        parameter: the view, with its part of the gradient.
        group: number of its group.
        start: index of its first element in the flat tensors of the leaf's state.
        stop: index after its last element there.
    """

    parameter: torch.nn.Parameter
    group: int
    start: int
    stop: int


def _whole_view(leaf: torch.Tensor, grad: torch.Tensor | None) -> _View:
    parameter = torch.nn.Parameter(leaf)
    parameter.grad = None if grad is None else grad.to(leaf.dtype)  # it may be of lower precision
    return _View(parameter, 0, 0, leaf.numel())


def _range_views(
    leaf: torch.Tensor,
    grad: torch.Tensor | None,
    ranges: tuple[GroupRange, ...],
    groups: frozenset[int],
) -> list[_View]:
    grad = None if grad is None else grad.to(leaf.dtype)  # it may be of lower precision
    # Why empty views: a group without elements in this shard still counts its steps. Its scalars
    # are the same as on other ranks, and the state has one form on every rank.
    absent = groups - {leaf_range.group for leaf_range in ranges}
    views, done = [], 0
    for group, start, stop in (*ranges, *(GroupRange(group, 0, 0) for group in sorted(absent))):
        parameter = torch.nn.Parameter(leaf[start:stop])
        parameter.grad = None if grad is None else grad[start:stop]
        views.append(_View(parameter, group, done, done := done + stop - start))
    return views


def _size(views: Sequence[_View]) -> torch.Size:
    """Return the shape of the flat tensors in the state of a leaf that has these views."""
    return torch.Size([views[-1].stop if views else 0])


def _split_state(
    leaf_state: Mapping[str, Any], views: Sequence[_View], layout: ParamGroupLayout | None
) -> list[dict[str, Any]]:
    """Return the state of each view, given its leaf's state; ``_merge_state`` is the inverse.

    A group without a scalar that another group has begins from scratch, as its views have no state.
    """
    if layout is None:
        return [dict(leaf_state)]
    states: list[dict[str, Any]] = [{} for _ in views]
    anew: list[dict[str, Any]] = []
    for name, value in leaf_state.items():
        if isinstance(value, torch.Tensor) and value.ndim:
            for state, view in zip(states, views, strict=True):
                state[name] = value[view.start : view.stop]
            continue
        for group, scalar in enumerate(value if isinstance(value, tuple) else (value,)):
            members = [
                state for state, view in zip(states, views, strict=True) if view.group == group
            ]
            if not members:
                continue  # no leaf belongs to this group
            if (
                scalar is None
                and isinstance(value, tuple)
                and any(buffer_state is not None for buffer_state in value)
            ):
                anew += members
                continue
            # The class counts steps in place, once for each view, so two views cannot share a
            # scalar.
            further = len(members) - 1
            copies = (
                scalar.expand(further).clone().unbind()
                if isinstance(scalar, torch.Tensor)
                else [scalar] * further
            )
            for state, copy in zip(members, [scalar, *copies], strict=True):
                state[name] = copy
    for state in anew:
        state.clear()
    return states


def _merge_state(
    leaf_state: Mapping[str, Any],
    views: Sequence[_View],
    states: list[dict[str, Any]],
    layout: ParamGroupLayout | None,
) -> dict[str, Any]:
    """Return the state of a leaf, given the states of its views after the step.

    The flat tensors of ``leaf_state``, which the step has updated in place, are reused.
    """
    if layout is None:
        return states[0]
    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        values = [state.pop(name, None) for state in states]
        first = next((value for value in values if value is not None), None)
        if not isinstance(first, torch.Tensor) or not first.ndim:
            of_group = {
                view.group: value for view, value in reversed(list(zip(views, values, strict=True)))
            }
            scalars = tuple(of_group.get(group) for group in range(layout.count))
            merged[name] = scalars if layout.count > 1 else scalars[0]
            continue
        flat = leaf_state[name] if name in leaf_state else first.new_zeros(views[-1].stop)
        for view, value in zip(views, values, strict=True):
            target = flat[view.start : view.stop]
            if value is not None and address(value) != address(target):
                target.copy_(value)
        merged[name] = flat
    return merged


def apply_optimizer(optimizer: Any, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Return ``(params, state)`` after one update by an optimizer of either kind.

    Arguments:
        optimizer: the pair that ``torch_optimizer`` or ``muon`` returned, or a pair
            ``(init, update)`` as TorchOpt and optax write it: ``update(grads, state, params)``
            returns ``(updates, state)``, and the updates are added to the parameters.
        grads: a tree like ``params``.
        state: the optimizer's state.
        params: the tree to update.
    """
    if isinstance(optimizer, TorchOptimizer):
        return optimizer.step(grads, state, params)
    _, update = optimizer
    accepted = inspect.signature(update).parameters
    by_keyword = "params" in accepted and accepted["params"].kind is inspect.Parameter.KEYWORD_ONLY
    extra: dict[str, Any] = {"inplace": False} if "inplace" in accepted else {}
    updates, state = (
        update(grads, state, params=params, **extra)
        if by_keyword
        else update(grads, state, params, **extra)
    )
    return tree.map(lambda leaf, change: leaf + change.to(leaf.dtype), params, updates), state
