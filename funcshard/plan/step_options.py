"""The options of a step that name units: ``reduce`` and ``remat``.

``reduce`` says when gradients of micro-batches are reduced: one value for all units, or values by
globs of unit names. ``remat`` names the modules that backward computes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from funcshard._utils.options import check_choice, check_count
from funcshard.plan.globs import matches, some
from funcshard.plan.plan import Plan
from funcshard.plan.small_units import ends_of

# One of _MODES for all units, or by globs of unit names.
Reduce = str | Mapping[str, str]

_MODES = ("each", "once", "shard_each")


def check_reduce(micro_batches: Any, reduce: Any, name: str = "micro_batches") -> int:
    """Return the number of micro-batches; raise unless it and ``reduce`` are valid."""
    if isinstance(reduce, Mapping):
        for glob, reduce_mode in reduce.items():
            if not isinstance(glob, str):
                raise TypeError(
                    f"reduce must map names or globs of units to {', '.join(map(repr, _MODES))}; "
                    f"found the key {glob!r}: write {{'blocks.*': 'once'}}, with '' for the root"
                )
            check_choice(f"reduce[{glob!r}]", reduce_mode, _MODES)
    else:
        check_choice("reduce", reduce, _MODES)
    remedy = "pass 1 for the whole batch at once"
    return check_count(name, micro_batches, of="micro-batches", remedy=remedy)


def check_reduce_units(reduce: Reduce, units: Iterable[str]) -> None:
    """Raise ``ValueError`` unless every glob of ``reduce`` matches a unit."""
    if isinstance(reduce, str):
        return
    unit_names = list(units)
    for glob in reduce:
        if not any(_chooses(glob, unit_name) for unit_name in unit_names):
            raise ValueError(
                f"reduce must name units; found {glob!r}, which matches none of "
                f"{some(unit_names)}: write the names of units, or globs of them"
            )


def unit_mode(reduce: Reduce, unit: str) -> str:
    """Return the value for a unit, ``"each"`` by default; a name counts before the last glob."""
    if isinstance(reduce, str):
        return reduce
    # A name that is written out counts before all globs.
    if unit in reduce:
        return reduce[unit]
    for glob in reversed(list(reduce)):
        if _chooses(glob, unit):
            return reduce[glob]
    return "each"


def buffer_mode(mode: str, *, cut: bool, repeated: bool) -> str:
    """Return when a buffer's gradient is reduced; a run and its prediction both ask here.

    Arguments:
        mode: the value for the unit.
        cut: whether the reduction begins with a reduce-scatter.
        repeated: whether all-reduces follow.
    """
    # Why: "shard_each" only makes the all-reduces wait. A buffer that is not cut has nothing else,
    # and one that is not repeated has none.
    if mode != "shard_each" or (cut and repeated):
        return mode
    return "each" if cut else "once"


def _chooses(glob: str, unit: str) -> bool:
    # Why: "*" is one component of a path, and the path of the root has none.
    if unit == "":
        return glob in ("", "**")
    # A group of small units is named after the first and the last of them.
    return matches(glob, unit) or all(matches(glob, end) for end in ends_of(unit))


def read_remat(remat: Iterable[str] | bool) -> tuple[str, ...] | bool:
    """Return the names and globs of ``remat`` as a tuple, and a flag unchanged."""
    if isinstance(remat, bool):
        return remat
    unit_names: tuple[Any, ...] = (None,)
    if isinstance(remat, Iterable) and not isinstance(remat, str):
        unit_names = tuple(remat)
    if not all(isinstance(unit_name, str) for unit_name in unit_names):
        remedy = [remat] if isinstance(remat, str) else True
        raise TypeError(
            f"remat must be a list of names or globs of units, True or False; found {remat!r}: "
            f"write {remedy!r}"
        )
    return unit_names


def recomputed_modules(plan: Plan, remat: Iterable[str] | bool) -> list[str]:
    """Return the paths of the modules that ``remat`` names, in plan order.

    Arguments:
        plan: the plan.
        remat: names or globs of units, or of modules of groups; ``True`` for all but the root.

    Raises:
        TypeError: ``remat`` is neither a list of texts nor a flag.
        ValueError: a name or glob matches no unit, or names the root.
    """
    unit_names = read_remat(remat)
    # Why without the root: to compute it again is to run all of forward again.
    units = {unit.name: unit for unit in plan.unit_list if unit.name}
    paths = [module_path for unit in units.values() for module_path in unit.paths]
    if isinstance(unit_names, bool):
        return paths * unit_names
    chosen_paths: set[str] = set()
    for unit_name in unit_names:
        module_paths = [module_path for module_path in paths if matches(unit_name, module_path)]
        if unit_name in units:
            module_paths = list(units[unit_name].paths)
        if not module_paths:
            raise ValueError(
                f"remat must name units of the plan, not the root; found {unit_name!r}; its units "
                f"are {list(units)[:6]}: write names or globs of these, or remat=True for all"
            )
        chosen_paths.update(module_paths)
    return [module_path for module_path in paths if module_path in chosen_paths]
