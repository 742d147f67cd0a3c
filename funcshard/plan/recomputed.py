"""The units that backward computes again, as the ``remat`` option names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from funcshard.plan.leaves import matches
from funcshard.plan.plan import Plan

__all__ = ["read_remat", "recomputed_units"]


def read_remat(remat: Iterable[str] | bool) -> tuple[str, ...] | bool:
    """Return the names and globs of ``remat`` as a tuple, and a flag unchanged.

    Raises:
        TypeError: ``remat`` is neither a list of texts nor a flag.
    """
    if isinstance(remat, bool):
        return remat
    given: tuple[Any, ...] = tuple(remat) if isinstance(remat, Iterable) and not isinstance(remat, str) else (None,)
    if not all(isinstance(each, str) for each in given):
        raise TypeError(
            f"remat must be a list of names or globs of units, True or False; found {remat!r}: write "
            f"{[remat] if isinstance(remat, str) else True!r}"
        )
    return given


def recomputed_units(plan: Plan, remat: Iterable[str] | bool) -> list[str]:
    """Return the names of the units that ``remat`` names, in plan order.

    Arguments:
        plan: the plan.
        remat: names or globs of units; or ``True`` for all, ``False`` for none. The root and groups
            are not among those that ``True`` and globs stand for.

    Raises:
        TypeError: ``remat`` is neither a list of texts nor a flag.
        ValueError: a name or glob matches no unit, or names the root or a group.
    """
    given = read_remat(remat)
    names = [unit.name for unit in plan.unit_list if unit.name]
    single = [unit.name for unit in plan.unit_list if unit.name and not unit.members]
    if isinstance(given, bool):
        return single if given else []
    found: set[str] = set()
    for each in given:
        own = [name for name in single if matches(each, name)] if "*" in each else [each] if each in names else []
        if not own:
            raise ValueError(
                f"remat must name units of the plan, not the root; found {each!r}; its units are {names[:6]}: write names "
                f"or globs of these, or remat=True for all"
            )
        if plan.units[own[0]].members:
            raise ValueError(
                f"remat cannot name the group {own[0]!r}, whose modules run at different times, so that backward cannot "
                f"compute them again as one; make its modules {list(plan.units[own[0]].members)} units of their own"
            )
        found.update(own)
    return [name for name in names if name in found]
