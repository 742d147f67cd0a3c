"""Check that options and a state fit an optimizer, before a step changes anything; donate a state.

The entries that a class of ``torch.optim`` keeps of a leaf depend on the class and on a few
options. When the optimizer is made, ``learn_entries`` steps one small parameter to see their names;
each step then compares names and sizes only. Adam, AdamW and RAdam keep the same names, so a state
cannot tell them apart.

A step updates tensors in place, and returns new tensor objects over the same memory. The old
objects would silently show the new values, so ``donate`` makes each of them a ``_DonatedTensor``,
which raises whenever you use it.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_number, outline

# Why only these classes: a flat shard keeps nothing of its leaves' shapes. Each of these classes
# updates an element from that element's own gradient and state, so a flat shard gets the same
# numbers as the leaves would.
ELEMENTWISE_NAMES = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"
ELEMENTWISE = tuple(getattr(torch.optim, name) for name in ELEMENTWISE_NAMES.split())

# What to do about a state that does not fit.
NEW_STATE = (
    "make a new one with optimizer.init(shards), or keep the optimizer, plan and mesh that this "
    "one was made with"
)
_PASS_NUMBER = "pass a number, or change the schedule"

# Only the kernel, or the size of the update, depends on these; where it computes does not matter.
_IGNORED = ("capturable", "differentiable", "foreach", "fused", "lr", "weight_decay")
# The options of torch.optim's classes on which the names depend.
_DECISIVE = ("amsgrad", "centered", "momentum")


def check_options(cls: type[torch.optim.Optimizer], options: Sequence[Mapping[str, Any]]) -> None:
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
        schedule_names = {name for name, value in merged_options.items() if callable(value)}
        try:
            signature.bind(None, **merged_options)
            # A class checks the values of schedules in each step.
            if cls in ELEMENTWISE and schedule_names <= {"lr", "weight_decay"}:
                cls(
                    [_tiny()],
                    **{
                        name: merged_options[name]
                        for name in merged_options.keys() - schedule_names
                    },
                )
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{cls.__name__} does not take the options{where}: {error}; "
                f"it takes {', '.join(signature.parameters)}"
            ) from None


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
            if "lr" in merged:
                first_options["lr"] = 0.0
            # Two elements: an entry of this shape has a value for each element of a leaf.
            parameter = _tiny()
            # A class may draw random numbers, and the caller's must not change.
            with (
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(),
                with_plain_factories(),
            ):
                warnings.simplefilter("ignore")
                optimizer: Any = cls([parameter], **first_options)
                optimizer.step()
            for name, value in optimizer.state.get(parameter, {}).items():
                if value is not None:
                    is_flat[name] = getattr(value, "shape", None) == parameter.shape
    except Exception:  # such as a class that computes on CUDA only
        return None
    return is_flat if members else None


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


def check_entries(
    step: Any,
    states: Sequence[Any],
    sizes: Sequence[Any],
    groups: int | None,
    params: Any,
) -> None:
    """Raise ``ValueError`` unless each leaf's state has the entries and sizes that it must have.

    Arguments:
        step: the ``TorchStep``.
        states: the state of each leaf, in order.
        sizes: the shape of each leaf's flat entries.
        groups: number of parameter groups; ``None`` without groups.
        params: the parameters, for the paths of leaves in the error.
    """
    for leaf_index, (leaf_state, size) in enumerate(zip(states, sizes, strict=True)):
        if step.known is None or not leaf_state:
            continue
        fault = _fault(step.known, step.is_exact, leaf_state, tuple(size), groups or 1)
        if fault:
            raise ValueError(
                f"the state of leaf {tree.paths(params)[leaf_index]!r} is not one of {step.title}: "
                f"{fault}; {NEW_STATE}"
            )
        # Why only the first: the class itself raises for tensors of another size. With groups it
        # would get a slice of them.
        if groups is None:
            return


def _fault(
    known: Mapping[str, bool],
    is_exact: bool,
    leaf_state: Mapping[str, Any],
    size: tuple[int, ...],
    groups: int,
) -> str:
    held = {name: value for name, value in leaf_state.items() if value is not None}
    # Note: a class that is not torch's may have more entries than after its first step.
    if held and (known.keys() - held.keys() or (is_exact and held.keys() - known.keys())):
        return f"it must hold {sorted(known) or 'nothing'}; found {sorted(held)}"
    for name, value in held.items():
        if known.get(name):
            shape = getattr(value, "shape", value)
            if shape != size:
                return (
                    f"its {name!r} must have shape {size}; found {outline(value)}, of another plan "
                    "or number of ranks"
                )
        elif is_exact and (len(value) if type(value) is tuple else 1) != groups:
            return f"its {name!r} must have a value for each of {groups} groups; found {value!r}"
    return ""


def _tiny() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    return parameter


def with_plain_factories() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which tensors that name no device are made on the CPU.

    Example:
        >>> import torch
        >>> with torch.device("meta"), with_plain_factories():
        ...     torch.zeros(1).device
        device(type='cpu')
    """
    # Why: under ``torch.device("meta")`` the counters of torch's optimizers would have no values.
    if torch.get_default_device().type == "cpu":
        return contextlib.nullcontext()  # torch's context costs time for each operation
    return torch.device("cpu")


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
