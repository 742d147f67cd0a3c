"""The modules that backward computes again, as the ``remat`` option names them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from funcshard.plan.globs import matches
from funcshard.plan.plan import Plan


def read_remat(remat: Iterable[str] | bool) -> tuple[str, ...] | bool:
    """Return the names and globs of ``remat`` as a tuple, and a flag unchanged.

    Raises:
        TypeError: ``remat`` is neither a list of texts nor a flag.
    """
    if isinstance(remat, bool):
        return remat
    names: tuple[Any, ...] = (
        tuple(remat) if isinstance(remat, Iterable) and not isinstance(remat, str) else (None,)
    )
    if not all(isinstance(name, str) for name in names):
        raise TypeError(
            f"remat must be a list of names or globs of units, True or False; found {remat!r}: "
            f"write {[remat] if isinstance(remat, str) else True!r}"
        )
    return names


def recomputed_modules(plan: Plan, remat: Iterable[str] | bool) -> list[str]:
    """Return the paths of the modules that ``remat`` names, in plan order.

    Arguments:
        plan: the plan.
        remat: names or globs of units, or of modules of groups; ``True`` for all, ``False`` for
            none. The root is not among those that ``True`` and globs represent.

    Raises:
        TypeError: ``remat`` is neither a list of texts nor a flag.
        ValueError: a name or glob matches no unit, or names the root.
    """
    names = read_remat(remat)
    units = [unit for unit in plan.unit_list if unit.name]
    paths = [path for unit in units for path in unit.paths]
    if isinstance(names, bool):
        return paths if names else []
    groups = {unit.name: unit.members for unit in units if unit.members}
    chosen: set[str] = set()
    for name in names:
        matched = groups.get(name) or [path for path in paths if matches(name, path)]
        if not matched:
            raise ValueError(
                f"remat must name units of the plan, not the root; found {name!r}; its units are "
                f"{[unit.name for unit in units][:6]}: write names or globs of these, or "
                "remat=True for all"
            )
        chosen.update(matched)
    return [path for path in paths if path in chosen]
