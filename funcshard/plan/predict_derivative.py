"""Predict the collectives of an operator such as ``hvp``, which differentiates by shards.

Under transforms of ``torch.func`` nothing is gathered ahead, and units stay gathered. So an
operator is a few sweeps over the units, and ``SWEEPS`` lists what each of them communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from funcshard.plan.events import Event

Transform = Literal["grad", "vjp", "jvp", "hvp", "gnvp", "linearize"]

# What is gathered before a unit computes: its values, their tangents, or each buffer's values and
# then its tangents.
_Gather = Literal["values", "tangents", "duals"]
# What is reduced after it: one gradient of each buffer, or also the gradient's tangent.
_Reduce = Literal["gradients", "dual gradients"]


class _Sweep(NamedTuple):
    """One pass over all units.

    Attributes:
        backward: whether it runs from the last unit to the first.
        plain: what a unit communicates when the pass is at it.
        recomputed: the same of a checkpoint. ``remat`` knows one transform at a time, so what it
            differentiates in forward mode it computes without tangents too.
    """

    backward: bool
    plain: tuple[_Gather | _Reduce, ...]
    recomputed: tuple[_Gather | _Reduce, ...]


_VALUES = _Sweep(False, ("values",), ("values",))
_DUALS = _Sweep(False, ("duals",), ("values", "duals"))
_PULLBACK = _Sweep(True, ("gradients",), ("values", "gradients"))
_DUAL_PULLBACK = _Sweep(
    True, ("dual gradients",), ("values", "gradients", "duals", "dual gradients")
)
# The pullback of a pullback, which is linear: it needs no values but those that a checkpoint freed.
_PUSH = _Sweep(False, ("tangents",), ("values", "gradients", "tangents"))

SWEEPS: Mapping[Transform, tuple[_Sweep, ...]] = {
    "grad": (_VALUES, _PULLBACK),
    "vjp": (_VALUES, _PULLBACK),
    "jvp": (_DUALS,),
    "hvp": (_DUALS, _DUAL_PULLBACK),
    "gnvp": (_DUALS, _PULLBACK),
    "linearize": (_VALUES, _PULLBACK, _PUSH),
}


class Stretch(NamedTuple):
    """A unit, or the units that a checkpoint computes together, in the order of forward."""

    units: Sequence[str]
    recomputed: bool


def derivative_events(
    transform: Transform,
    stretches: Sequence[Stretch],
    gathers: Callable[[str], Sequence[tuple[Event, Sequence[Event]]]],
    reductions: Callable[[str], Sequence[Sequence[Event]]],
) -> Iterator[Event]:
    """Yield the events of an operator, in order.

    Arguments:
        transform: the operator.
        stretches: the units, in the order of forward.
        gathers: of a unit, the gather of each buffer, and the one of its tangents if it has any.
        reductions: of a unit, the reductions of each buffer along all axes.
    """
    for sweep in SWEEPS[transform]:
        for stretch in reversed(stretches) if sweep.backward else stretches:
            for item in sweep.recomputed if stretch.recomputed else sweep.plain:
                if item in ("gradients", "dual gradients"):
                    copies = 2 if item == "dual gradients" else 1
                    for unit_name in reversed(stretch.units):
                        for buffer_events in reductions(unit_name):
                            yield from [*buffer_events] * copies
                    continue
                for unit_name in stretch.units:
                    for values, tangents in gathers(unit_name):
                        if item != "tangents":
                            yield values
                        if item != "values":
                            yield from tangents
