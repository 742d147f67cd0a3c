"""Check that an optimizer's state is one of this optimizer, before a step changes anything.

The entries that a class of ``torch.optim`` keeps of a leaf depend on the class and on a few
options: AdamW keeps ``exp_avg``, ``exp_avg_sq`` and ``step``, SGD ``momentum_buffer`` or nothing.
When the optimizer is made, ``learn_entries`` steps one small parameter to see the names. Each step
then compares names and sizes only. Adam, AdamW and RAdam keep the same names, so a state cannot
tell them apart.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import check_number, did_you_mean, tree, with_plain_factories
from funcshard.plan import BufferPlan, UnitPlan
from funcshard.train.learning_rate import check_no_scheduler

# The remedy of every error about a state.
REMEDY = "start anew with optimizer.init(shards), or go on with the optimizer, plan and mesh that the state was made with"

# Only the kernel, or the size of the update, depends on these; where it computes does not matter.
_IGNORED = ("capturable", "differentiable", "foreach", "fused", "lr", "weight_decay")
# The options of torch.optim's classes on which the names depend.
_DECISIVE = ("amsgrad", "centered", "momentum")


@dataclass(frozen=True, slots=True)
class KnownEntries:
    """The entries that a class keeps of each leaf after a step.

    Attributes:
        flat: whether the entry has a value for each element of the leaf, by name.
        exact: whether a leaf can have no other entries. That is so for torch's own classes, if no
            schedule decides on the names. Any other class may add entries in later steps.
    """

    flat: Mapping[str, bool]
    exact: bool

    def fit(self, names: Collection[str]) -> bool:
        """Return whether a leaf's state may have these entries; none is the state before a step."""
        names = set(names)
        return not names or (names == self.flat.keys() if self.exact else names >= self.flat.keys())


def check_names(cls: type, options: Iterable[Mapping[str, Any]]) -> None:
    """Raise ``TypeError`` unless a class of optimizers takes options of these names.

    Why here: a class of the user's own is otherwise made in the first step only.

    Arguments:
        cls: the class.
        options: the options of all leaves, then those of each group, which also hold its paths.
    """
    try:
        parameters = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # a class that does not say what it takes
        return
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    names = list(parameters)[1:]  # the first one is for the parameters
    for group_index, group_options in enumerate(options):
        for name, value in group_options.items():
            check_no_scheduler(name, value)
        wrong = [
            name
            for name in group_options
            if name not in names and not (group_index and name == "paths")
        ]
        if wrong and not (group_index and "paths" not in group_options):
            where = (
                f"group {group_index} has options that {cls.__name__} does not take"
                if group_index
                else f"{cls.__name__} has no"
            )
            remedy = _USUAL.get(wrong[0]) or did_you_mean(
                wrong[0], names, otherwise=f"it takes {', '.join(names)}"
            )
            raise TypeError(f"{where}{':' if group_index else ''} option {wrong[0]!r}: {remedy}")


# The names that options have in other libraries, and an argument that torch's class takes itself.
_USUAL = {"params": "leave it out, and give the shards to step.init(shards, buffers)"} | {
    name: f"did you mean {right!r}?"
    for right, wrong in {
        "lr": ("learning_rate", "lr_rate", "rate", "step_size"),
        "weight_decay": ("wd", "decay", "l2"),
        "betas": ("beta", "beta1", "beta2", "b1", "b2"),
        "eps": ("epsilon",),
    }.items()
    for name in wrong
}


def check_options(cls: type[torch.optim.Optimizer], options: Sequence[Mapping[str, Any]]) -> None:
    """Let a class of torch check the options of all leaves, and those of each group.

    Why here: ``torch.optim`` does not check the options of groups, and takes unknown ones.

    Arguments:
        cls: the class.
        options: the options of all leaves, then the options that each further group overrides.
    """
    for group_index, group_options in enumerate(options):
        merged = {**options[0], **group_options}
        where = f" of group {group_index}" if group_index else ""
        check_values({name: value for name, value in merged.items() if not callable(value)}, where)
        if any(
            callable(value) for name, value in merged.items() if name not in ("lr", "weight_decay")
        ):
            continue  # the class checks the values of a schedule in each step
        try:
            cls([_tiny()], **{name: value for name, value in merged.items() if not callable(value)})
        except (TypeError, ValueError) as error:
            if not group_index:
                raise
            raise type(error)(
                f"group {group_index} has options that {cls.__name__} does not take: {error}"
            ) from error


def check_values(options: Mapping[str, Any], when: str) -> None:
    """Raise unless no option is NaN, and ``lr`` and ``weight_decay`` are finite and not negative.

    Why here: SGD takes NaN, every class takes infinity, and no class checks the options of groups.

    Arguments:
        options: values by name, those of schedules included.
        when: ``""``, or the step for which schedules gave their values, for the error.
    """
    for name, value in options.items():
        if name not in ("lr", "weight_decay"):
            if isinstance(value, float) and value != value:
                check_number(
                    f"{name}{when}",
                    value,
                    infinite=True,
                    remedy="pass a number, or mend the schedule",
                )
        elif type(value) is not float or not 0.0 <= value < float("inf"):  # the usual case, quickly
            if isinstance(value, torch.Tensor):
                if value.numel() != 1:
                    raise ValueError(
                        f"{name}{when} must be one number; found a tensor of shape "
                        f"{tuple(value.shape)}: pass one of its elements, or options of groups"
                    )
                if value.device.type != "cpu":
                    continue  # reading the value would wait for the device
                value = value.reshape(())
            check_number(
                f"{name}{when}",
                value,
                least=0,
                remedy="pass 0.0 for no effect, or mend the schedule",
            )


def learn_entries(
    cls: type[torch.optim.Optimizer],
    options: Sequence[Mapping[str, Any]],
    members: Collection[int],
    own_class: bool,
) -> KnownEntries | None:
    """Return what a class keeps of a leaf; ``None`` if that cannot be learned here.

    Arguments:
        cls: the class.
        options: the options of all leaves, then the options that each further group overrides.
        members: the groups that have leaves.
        own_class: whether the class is one of torch's own.
    """
    flat: dict[str, bool] = {}
    exact = own_class
    try:
        for group in sorted(members):
            merged = {**options[0], **options[group]}
            exact = exact and not any(callable(merged.get(name)) for name in _DECISIVE)
            options_now = {
                name: v(0) if callable(v) else v
                for name, v in merged.items()
                if name not in _IGNORED
            }
            parameter = _tiny()
            rate: dict[str, Any] = {"lr": 0.0} if "lr" in merged else {}
            # A class may draw random numbers, and the caller's must not change.
            with (
                torch.random.fork_rng(devices=[]),
                warnings.catch_warnings(),
                with_plain_factories(),
            ):
                warnings.simplefilter("ignore")
                optimizer: Any = cls([parameter], **options_now, **rate)
                optimizer.step()
            for name, value in optimizer.state.get(parameter, {}).items():
                flat[name] = isinstance(value, torch.Tensor) and value.shape == parameter.shape
    except Exception:  # such as a class that computes on CUDA only
        return None
    return KnownEntries(flat, exact) if members else None


def check_trees(grads: Any, state: Any, params: Any, title: str) -> None:
    """Raise ``ValueError`` unless gradients and state are trees like the parameters.

    ``title`` names the optimizer in the error.
    """
    if not isinstance(state, Mapping) or not {"steps", "leaves"} <= state.keys():
        found_keys = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ValueError(
            f"a state of {title} must hold 'steps' and 'leaves'; found {found_keys}, of another "
            f"optimizer: {REMEDY}"
        )
    if not _same_structure(params, state["leaves"]):
        raise ValueError(
            f"a state of {title} must have the units and buffers of the shards; found "
            f"{_difference(params, state['leaves'])}: it was made under another plan; {REMEDY}"
        )
    if not _same_structure(params, grads):
        raise ValueError(
            "the gradients must be a tree like the parameters; found "
            f"{_difference(params, grads)}: pass the gradients that value_and_grad returned for "
            "these shards"
        )


def _same_structure(params: Any, deeper: Any) -> bool:
    try:
        tree.leaves_up_to(params, deeper)
    except (TypeError, ValueError):
        return False
    return True


def check_gradients(grads: Sequence[Any], leaves: Sequence[torch.Tensor], params: Any) -> None:
    """Raise ``ValueError`` unless each gradient is ``None`` or has the shape of its leaf."""
    for leaf_index, (leaf, grad) in enumerate(zip(leaves, grads, strict=True)):
        if grad is not None and (not isinstance(grad, torch.Tensor) or grad.shape != leaf.shape):
            path = tree.describe(params)[2][leaf_index]
            shape = tuple(grad.shape) if isinstance(grad, torch.Tensor) else type(grad).__name__
            raise ValueError(
                f"the gradient of leaf {path!r} must have its shape, {tuple(leaf.shape)}; found "
                f"{shape}: pass the gradients that value_and_grad returned for these shards"
            )


def check_dtypes(leaves: Sequence[torch.Tensor], params: Any, title: str) -> None:
    """Raise ``TypeError`` if a leaf has a dtype that optimizers of torch cannot compute in."""
    for leaf_index, leaf in enumerate(leaves):
        if leaf.dtype.itemsize < 2 or not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
            path = tree.describe(params)[2][leaf_index]
            raise TypeError(
                f"{title} cannot update leaf {path!r} of {leaf.dtype}: freeze such leaves with "
                "requires_grad_(False), or keep them in float32 and let a precision or a cast "
                "make them narrower"
            )


def check_size(shard: Any, buffer: BufferPlan, unit: UnitPlan) -> None:
    """Raise ``ValueError`` unless a shard has the size for which parameter groups were laid out."""
    found_shape = tuple(shard.shape) if isinstance(shard, torch.Tensor) else shard
    if found_shape != (buffer.shard_numel,):
        raise ValueError(
            f"shard {buffer.key!r} of unit {unit.title!r} must have shape ({buffer.shard_numel},), "
            f"under the plan that the optimizer was made with; found {found_shape}: make the optimizer "
            "with the plan of these shards"
        )


def check_entries(
    known: KnownEntries | None,
    states: Sequence[Any],
    sizes: Sequence[Any],
    groups: int,
    params: Any,
    title: str,
) -> None:
    """Raise ``ValueError`` unless each leaf's state has the entries and sizes that it must have.

    Arguments:
        known: the entries that the class keeps of a leaf; ``None`` checks nothing.
        states: the state of each leaf, in order.
        sizes: the shape of each leaf's flat entries.
        groups: number of parameter groups.
        params: the parameters, for the paths of leaves in the error.
        title: names the optimizer in the error.
    """
    for leaf_index, (state, size) in enumerate(zip(states, sizes, strict=True)):
        fault = _fault(known, state, size, groups) if state and known is not None else None
        if fault is not None:
            path = tree.describe(params)[2][leaf_index]
            raise ValueError(f"the state of leaf {path!r} is not one of {title}: {fault}; {REMEDY}")


def _fault(known: KnownEntries, state: Mapping[str, Any], size: Any, groups: int) -> str | None:
    """Return what is wrong with the state of a leaf, if anything."""
    if state.keys() != known.flat.keys():
        names = [name for name, value in state.items() if value is not None]
        if not known.fit(names):
            return f"it must hold {sorted(known.flat) or 'nothing'}; found {sorted(names)}"
    for name, value in state.items():
        if known.flat.get(name):
            if value is not None and (not isinstance(value, torch.Tensor) or value.shape != size):
                found_value = tuple(value.shape) if isinstance(value, torch.Tensor) else value
                return f"its {name!r} must have shape {tuple(size)}; found {found_value}, of another plan or number of ranks"
        elif known.exact and value is not None and _values(value) != groups:
            return f"its {name!r} must have a value for each of {groups} groups; found {value!r}"
    return None


def _difference(wanted: Any, found: Any, where: str = "") -> str:
    """Return where a tree first differs from the one that is wanted."""
    if not isinstance(wanted, Mapping) or not isinstance(found, Mapping):
        return f"{type(found).__name__}{where}"
    if wanted.keys() == found.keys():
        inner = ((wanted[key], found[key], f" at {key!r}") for key in wanted)
        return next(
            (
                _difference(*inner_pair)
                for inner_pair in inner
                if not _alike(inner_pair[0], inner_pair[1])
            ),
            "another structure",
        )
    missing_names, unexpected = (
        sorted(map(str, a.keys() - b.keys()))[:3] for a, b in ((wanted, found), (found, wanted))
    )
    return f"a tree without {missing_names or 'nothing'} and with {unexpected or 'nothing'} more{where}"


def _alike(wanted: Any, found: Any) -> bool:
    if not isinstance(wanted, Mapping):
        return True
    return isinstance(found, Mapping) and wanted.keys() == found.keys()


def _values(scalar: Any) -> int:
    """Return for how many groups a scalar entry has values."""
    return len(scalar) if type(scalar) is tuple else 1


def _tiny() -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.float32, device="cpu"))
    parameter.grad = torch.zeros_like(parameter)
    return parameter
