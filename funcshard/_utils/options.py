"""Errors of public functions: checks of options, and advice for habits of other libraries.

A value of the wrong type is a ``TypeError``, any other wrong value a ``ValueError``. Numbers may be
Python's, NumPy's, or tensors without dimensions, but no bools.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from funcshard._utils.torch_private import is_transformed

T = TypeVar("T")

_UNITS = {
    f"{prefix}{ending}": base**power
    for ending, base in (("B", 1000), ("IB", 1024))
    for power, prefix in enumerate("KMGT", 1)
}


def check_count(
    name: str, value: Any, least: int = 1, *, of: str = "", none: str = "", remedy: str = ""
) -> int:
    """Return ``value`` as an ``int``, a whole number of at least ``least``; raise if it's none.

    Arguments:
        of: what the option counts, such as ``"steps"``.
        none: the meaning of ``None``, if the option may be ``None``.
        remedy: what to pass instead of a number that's too small.
    """
    count_value = _number(value)
    if isinstance(count_value, int) and count_value >= least:
        return count_value
    rule = f"a whole number{of and f' of {of}'}, at least {least}{none and f', or None {none}'}"
    # A float, as 1e6 is: say which whole number to pass.
    if (
        isinstance(count_value, float)
        and count_value >= least
        and math.isfinite(count_value)
    ):
        remedy = f"pass {int(count_value)}" if count_value.is_integer() else "round it"
    raise _error(name, rule, value, count_value, remedy or f"pass at least {least}")


def check_bytes(name: str, value: Any, *, example: str = "5GB") -> int:
    """Return bytes from a number or from text: ``"5GB"`` is 5 · 10⁹, ``"1KiB"`` 1024."""
    if not isinstance(value, str):
        return check_count(
            name,
            value,
            of="bytes",
            remedy=f"pass text such as {example!r} for the usual size",
        )
    size_match = re.fullmatch(r"(\d+) *([KMGT]I?B)", value.strip().upper())
    if size_match is None or not int(size_match[1]):
        raise ValueError(
            f"{name} must be a number of bytes, or text such as '500MB' or {example!r}; found "
            f"{value!r}: write a whole number and KB, MB, GB, TB, KiB, MiB, GiB or TiB"
        )
    return int(size_match[1]) * _UNITS[size_match[2]]


def check_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    infinite: bool = False,
    none: str = "",
    remedy: str = "",
) -> None:
    """Raise unless ``value`` is a finite number, or infinite if ``infinite``, within bounds.

    It has to exceed ``above``, reach ``least`` and stay below ``below``. ``none`` and ``remedy``
    are as in ``check_count``.
    """
    number = _number(value)
    if number is None and isinstance(value, torch.Tensor) and is_transformed(value):
        return  # a transform hides the value
    limits = (
        (" above", above, operator.gt),
        (", at least", least, operator.ge),
        (" below", below, operator.lt),
    )
    # NaN is within no bound, and not equal to itself.
    bounds = {
        f"{words} {limit:g}": holds(math.nan if number is None else number, limit)
        for words, limit, holds in limits
        if limit is not None
    }
    is_valid = number is not None and (
        math.isfinite(number) or (infinite and number == number)
    )
    if is_valid and all(bounds.values()):
        return
    rule = f"a finite number{' and'.join(bounds)}"
    if infinite:
        rule = f"a number{' and'.join(bounds)}, or math.inf"
    rule += none and f", or None {none}"
    raise _error(name, rule, value, number, remedy or "pass a number within these bounds")


def check_flag(name: str, value: Any, remedy: str = "") -> None:
    """Raise ``TypeError`` unless ``value`` is ``True`` or ``False``."""
    # Why so strict: the text "no" is true, and so is every tensor that is not zero.
    if not isinstance(value, bool):
        raise TypeError(
            f"{name} must be True or False; found {value!r}: {remedy or 'pass one of the two'}"
        )


def check_device(value: Any) -> torch.device:
    """Return a device by its name or number, or raise."""
    rule = "device must be a device of torch, such as 'cpu' or 'cuda'"
    if isinstance(value, bool) or not isinstance(value, str | int | torch.device):
        raise TypeError(f"{rule}; found {value!r}: pass its name")
    try:
        return torch.device(value)
    except (
        RuntimeError,
        ValueError,
        OverflowError,
    ) as error:  # the last two for large numbers
        raise ValueError(
            f"{rule}; found {value!r}: pass one that this torch has, {str(error).splitlines()[0]}"
        ) from None


def check_path(name: str, value: Any) -> Path:
    """Return a path, or raise."""
    try:
        return Path(value)
    except TypeError:
        # Note: the text of a state or a model would fill the screen.
        raise TypeError(
            f"{name} must be a path, as text or a pathlib.Path; found {type(value).__name__}: pass "
            "its name"
        ) from None


def check_choice(
    name: str,
    value: Any,
    choices: Sequence[str | None],
    usual: Mapping[str, str] | None = None,
) -> None:
    """Raise unless ``value`` is one of ``choices``.

    Arguments:
        usual: advice for names of other libraries, in small letters.
    """
    if isinstance(value, str | None) and value in choices:
        return
    usual_name = str(getattr(value, "name", value)).lower()
    rule = f"{', '.join(map(repr, choices[:-1]))} or {choices[-1]!r}"
    remedy = "pass one of these"
    if usual and usual_name in usual:
        raise ValueError(f"{name} must be {rule}; found {value!r}: {usual[usual_name]}")
    if isinstance(value, str):
        remedy = did_you_mean(
            value, [choice for choice in choices if choice is not None], otherwise=remedy
        )
    error_type = ValueError if isinstance(value, str | None) else TypeError
    raise error_type(f"{name} must be {rule}; found {value!r}: {remedy}")


def did_you_mean(value: str, names: Iterable[str], *, otherwise: str) -> str:
    """Return the end of an error: a name in ``names`` like ``value``, or ``otherwise``."""
    # Names of other libraries often differ in capitals only.
    by_lower_case = {name.lower(): name for name in names}
    close_matches = difflib.get_close_matches(value.lower(), by_lower_case, n=1)
    return (
        f"did you mean {by_lower_case[close_matches[0]]!r}?" if close_matches else otherwise
    )


def absent(title: str, name: str, remedies: Mapping[str, str]) -> AttributeError:
    """Return the error for an attribute that an object lacks, with advice if there is any.

    Arguments:
        remedies: what to do, by attribute of torch's own object.
    """
    remedy = remedies.get(name)
    return AttributeError(
        f"{title} has no attribute {name!r}{f': {remedy}' if remedy else ''}", name=name
    )


def with_remedies(title: str, remedies: Mapping[str, str]) -> Callable[[type[T]], type[T]]:
    """Return a decorator of classes whose missing attributes are errors with advice.

    Why a decorator: a method of the class would tell type checkers that it has every attribute.
    """

    def decorate(cls: type[T]) -> type[T]:
        def missing(_: Any, name: str) -> Any:
            raise absent(title, name, remedies)

        cls.__getattr__ = missing  # type: ignore[attr-defined]
        return cls

    return decorate


def outline(value: Any) -> str:
    """Return a dictionary's first names, a shape, or a class, for an error."""
    if isinstance(value, Mapping):
        return str(list(value)[:4])
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return type(value).__name__


def some(names: Sequence[str | int]) -> str:
    """Return the first few names or numbers and the number of the rest, for a message."""
    shown_names = ", ".join(map(repr, names[:4]))
    if len(names) > 4:
        shown_names += f" and {len(names) - 4} more"
    return shown_names


def other_names(expected: Collection[str], found: Collection[str]) -> str:
    """Return which names are missing and which are too many, for an error; ``""`` for none."""
    missing = sorted({*expected} - {*found})[:3]
    unexpected = sorted({*found} - {*expected})[:3]
    if not missing and not unexpected:
        return ""
    return f"missing: {missing or 'nothing'}, unexpected: {unexpected or 'nothing'}"


def module_remedy(value: Any, result: str) -> str:
    """Return the end of an error for a module, or nothing for other values.

    Arguments:
        result: what to pass of ``make_functional``'s results, such as ``"apply"``.
    """
    if not isinstance(value, nn.Module):
        return ""
    return f"call apply, params, buffers = fs.make_functional(module) first, and pass {result} instead of the module"


def is_tree_of_shards(tree: Any) -> bool:
    """Return whether a dictionary has the form of shards."""
    return (
        isinstance(tree, Mapping)
        and bool(tree)
        and all(isinstance(entry, Mapping) for entry in tree.values())
    )


def _number(value: Any) -> int | float | None:
    """Return a value as a number of Python; ``None`` for bools and other types."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return value
    if isinstance(value, torch.Tensor):
        is_number = value.ndim == 0 and not value.is_complex() and value.dtype != torch.bool
        if is_number and not value.is_meta and not is_transformed(value):
            return value.item()
    elif isinstance(value, numbers.Integral):
        return int(value)
    elif isinstance(value, numbers.Real):
        return float(value)
    return None


def _error(
    name: str, rule: str, value: Any, number: float | None, remedy: str
) -> Exception:
    if number is not None:
        return ValueError(f"{name} must be {rule}; found {value!r}: {remedy}")
    remedy = "pass the number itself" if isinstance(value, str) else "pass a number"
    return TypeError(f"{name} must be {rule}; found {value!r}: {remedy}")
