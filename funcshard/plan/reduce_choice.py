"""``reduce``: when gradients are reduced, if a batch is split into micro-batches.

The choice is one value for all units, or a mapping from globs of unit names to values. The gradient
reducer of ``core`` and ``predict_events`` both ask ``buffer_mode``, so a run and its prediction
follow one rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from funcshard._utils import check_choice, check_count
from funcshard.plan.globs import matches, some
from funcshard.plan.small_units import ends_of

# One of _MODES for all units, or by globs of unit names.
Reduce = str | Mapping[str, str]

_MODES = ("each", "once", "shard_each")


def check_reduce(micro_batches: Any, reduce: Any, name: str = "micro_batches") -> int:
    """Return the number of micro-batches; raise unless it and ``reduce`` are valid.

    ``name`` is that of the option which holds the number.
    """
    if isinstance(reduce, Mapping):
        for glob, mode in reduce.items():
            if not isinstance(glob, str):
                raise TypeError(
                    f"reduce must map names or globs of units to {', '.join(map(repr, _MODES))}; "
                    f"found the key {glob!r}: write {{'blocks.*': 'once'}}, with '' for the root"
                )
            check_choice(f"reduce[{glob!r}]", mode, _MODES)
    else:
        check_choice("reduce", reduce, _MODES)
    return check_count(
        name, micro_batches, of="micro-batches", remedy="pass 1 for the whole batch at once"
    )


def check_reduce_units(reduce: Reduce, units: Iterable[str]) -> None:
    """Raise ``ValueError`` unless every glob of ``reduce`` matches one of the units."""
    names = list(units)
    for glob in reduce if isinstance(reduce, Mapping) else ():
        if not any(_chooses(glob, name) for name in names):
            raise ValueError(
                f"reduce must name units; found {glob!r}, which matches none of {some(names)}: "
                "write the names of units, or globs of them"
            )


def unit_mode(reduce: Reduce, unit: str) -> str:
    """Return the value for a unit, ``"each"`` by default; a name counts before the last glob."""
    if not isinstance(reduce, Mapping):
        return reduce
    if unit in reduce:
        return reduce[unit]
    return next(
        (mode for glob, mode in reversed([*reduce.items()]) if _chooses(glob, unit)), "each"
    )


def buffer_mode(mode: str, *, cut: bool, repeated: bool) -> str:
    """Return when a buffer's gradient is reduced, given the value for its unit.

    ``"shard_each"`` lets the reductions over the axes wait along which the buffer is repeated. A
    buffer that is not cut has no other reductions, and one that is not repeated has none of these.

    Arguments:
        mode: the value for the unit.
        cut: whether the buffer's reduction begins with a reduce-scatter.
        repeated: whether all-reduces follow it.
    """
    if mode != "shard_each" or (cut and repeated):
        return mode
    return "each" if cut else "once"


def _chooses(glob: str, unit: str) -> bool:
    # Why: "*" is one component of a path, and the path of the root has none.
    if unit == "":
        return glob in ("", "**")
    # A group of small units is named after the first and the last of them.
    return matches(glob, unit) or all(matches(glob, end) for end in ends_of(unit))
