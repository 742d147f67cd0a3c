"""What a plan's precision means for a module in training or evaluation, which may be in full precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from funcshard import tree
from funcshard.functional import Functional
from funcshard.plan import Plan, UnitPlan
from funcshard.precision import MixedPrecision, is_one_of

__all__ = ["Modes", "in_mode", "modes_of"]


@dataclass(frozen=True, slots=True, eq=False)
class Modes:
    """What is cast around a call besides parameters.

    Attributes:
        precision: what says how the inputs of the whole model are cast, where the root owns nothing that would.
        buffers: names of the buffers that are cast, and to what.
        islands: numbers of modules that compute in full precision and are no units, because they have no parameters, or
            units inside them have all.
    """

    precision: MixedPrecision | None
    buffers: dict[str, torch.dtype]
    islands: frozenset[int]

    def cast(self, buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a call's own buffers in the dtypes that it computes in; ``restore`` is the inverse."""
        meant = {name: dtype for name, dtype in self.buffers.items() if buffers[name].is_floating_point()}
        return {name: b.to(meant[name]) if name in meant else b for name, b in buffers.items()}

    def restore(self, buffers: dict[str, torch.Tensor], given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the buffers that a call left behind in the dtypes of those that it was given."""
        return {name: b.to(given[name].dtype) if name in self.buffers else b for name, b in buffers.items()}


def in_mode(unit: UnitPlan, apply: Functional) -> UnitPlan:
    """The unit as it runs: in full precision where its module is in evaluation mode and its precision says so."""
    number = apply.skeleton.find(unit.name)
    return unit if _holds(unit.precision, number or 0, apply) is unit.precision else unit.in_full_precision()


def modes_of(plan: Plan, apply: Functional) -> Modes:
    """Return what is cast around a call of ``apply``, planned by ``plan``.

    Raises:
        ValueError: a module that should compute in full precision has its parameters in a unit that does not.
    """
    skeleton = apply.skeleton
    units = plan.units
    islands: list[int] = []
    full: list[str] = [unit.name for unit in plan.unit_list if unit.island]
    buffers: dict[str, torch.dtype] = {}
    exact = {leaf.path for unit in plan.unit_list if unit.precision is None for leaf in unit.leaves}
    lower = [place for leaf, places in skeleton.parameters.items() if leaf not in exact for place in places]
    for path, number in skeleton.paths().items():
        owner = max((name for name in ("", *units) if tree.is_under(path, name)), key=len)
        precision = units[owner].precision if owner in units else plan.precision
        if precision is None or any(tree.is_under(path, outer) for outer in full):
            continue
        part = skeleton.parts[number]
        if is_one_of(part.cls, precision.ignored_classes) and path:
            held = [place for place in lower if tree.is_under(place, path)]
            if held:
                raise ValueError(
                    f"module {path!r} is a {part.cls.__name__}, which ignored_classes wants in full precision, but its "
                    f"parameter {held[0]!r} is in unit {owner or '(root)'!r}, of lower precision: pass make_plan the params "
                    f"of make_functional as they are, or name the module among the units, with a precision of None"
                )
            full.append(path)
            islands.append(number)
        elif precision.buffer_dtype is not None and _holds(precision, number, apply) is not None:
            buffers.update({name: precision.buffer_dtype for name in part.buffers.values() if name is not None})
    return Modes(_holds(plan.precision, 0, apply), buffers, frozenset(islands))


def _holds(precision: MixedPrecision | None, number: int, apply: Functional) -> MixedPrecision | None:
    """The precision of a module in its mode."""
    training = apply.skeleton.parts[number].state["training"] if apply.training is None else apply.training
    return None if precision is None or (precision.full_precision_in_eval and not training) else precision
