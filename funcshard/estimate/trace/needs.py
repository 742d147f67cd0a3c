"""``Needs``: which units backward gathers, and why, in the order of the runtime.

A freed unit is gathered again when backward first asks for a tensor that its forward saved: a leaf,
or a tensor that a checkpoint around the unit recomputes. That checkpoint runs the forwards of all
units inside it. The outermost of them lends its leaves to backward, the others are gathered twice.

Forward teaches the runtime the order in which to gather ahead. Checkpoints don't change it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from funcshard._utils import tree


class Owners:
    """Which unit a module belongs to, from the paths of each unit.

    Attributes:
        of_path: the unit whose module a path is.
        members: the paths of each unit.
    """

    def __init__(self, paths: Mapping[str, Sequence[str]]) -> None:
        self.of_path = {path: name for name, nodes in paths.items() for path in nodes}
        self.members = {name: frozenset(nodes) for name, nodes in paths.items()}
        self._known: dict[str, str] = {}

    def of_param(self, path: str) -> str:
        return self.owner(path.rpartition(".")[0])

    def owner(self, path: str) -> str:
        """Return the innermost unit around a module, at least the root ``""``."""
        if path not in self._known:
            units_around = (self.of_path.get(node) for node in tree.upwards(path))
            self._known[path] = next(
                (unit for unit in units_around if unit is not None), ""
            )
        return self._known[path]


class Needs:
    """Follow a trace, and say what the runtime gathers in backward.

    Arguments:
        owners: the units.
        resharded: the units that are freed after forward.

    Attributes:
        used: the units that save leaves in forward.
    """

    def __init__(self, owners: Owners, resharded: Collection[str]) -> None:
        self.used: set[str] = set()
        self._owners = owners
        self._resharded = resharded
        self._held: set[str] = set()  # the outermost modules inside checkpoints
        self._gathered: set[str] = set()
        self._lent: set[str] = (
            set()
        )  # units that lend their leaves to a forward that runs again
        # The units that run again, and whether they are gathered for that.
        self._again: list[tuple[str, bool]] = []
        self._moments: list[tuple[str, str]] = []  # the moments of forward, as (kind, unit)
        # Of each call of a unit: the moment of its last use, or -1.
        self._last: list[tuple[str, int]] = []
        self._calls: dict[
            str, int
        ] = {}  # position of the last call of each unit in ``_last``
        self._left = Counter[str]()  # calls of each unit whose gradients are not complete

    # --- forward ----------------------------------------------------------------------------------

    def enter(self, path: str, *, held: bool) -> None:
        if held:
            self._held.add(path)

    def call(self, unit: str) -> None:
        # Note: autograd runs in the opposite order, so the node that forward makes first, when it
        # calls the unit, reduces it last.
        self._moments.append(("reduce", unit))
        self._calls[unit] = len(self._last)
        self._left[unit] += 1
        self._last.append((unit, -1))

    def save(self, unit: str, path: str) -> None:
        if self._sees(unit, path):
            self.used.add(unit)
            # Note: backward needs a unit first where forward saved its leaves last.
            self._last[self._calls[unit]] = unit, len(self._moments)
            self._moments.append(("", unit))

    def position(self, unit: str) -> int:
        return self._calls.get(unit, -1)

    def order(self) -> tuple[tuple[str, str], ...]:
        """Return the order that forward teaches the runtime, as ``Schedule.backward``."""
        moments = list(self._moments)
        for unit, last in self._last:
            if last >= 0:
                moments[last] = "gather", unit
        return tuple(moment for moment in reversed(moments) if moment[0])

    # --- backward ---------------------------------------------------------------------------------

    def use(self, unit: str, path: str) -> Iterator[tuple[str, str]]:
        """Backward, or a forward that runs again, uses a leaf."""
        is_known = (
            any(name == unit for name, _ in self._again)
            if self._again
            else not self._sees(unit, path)
        )
        if not is_known:
            yield from self._need(unit)

    def ask(self, path: str) -> Iterator[tuple[str, str]]:
        """Backward of a module asks the checkpoint around it for a tensor."""
        # Note: that checkpoint may ask the one around it for its inputs, and so on outwards.
        asked_units = [
            [unit for unit in units if unit in self._resharded]
            for units in self._checkpoints(path)
        ]
        # Note: the outermost unit of a checkpoint is gathered before its forward runs again, and
        # stays for the backward that follows.
        self._lent = {units[-1] for units in asked_units if units}
        first_unit = next((units[0] for units in asked_units if units), None)
        if first_unit in self.used:
            yield from self._need(first_unit)

    def enter_again(self, unit: str) -> Iterator[tuple[str, str]]:
        """A checkpoint calls a unit again, or a module of none (``""``)."""
        is_lent = unit in self._lent
        self._again.append((unit, bool(unit) and not is_lent))
        if unit:
            yield from self._need(unit) if is_lent else [("again", unit)]

    def exit_again(self) -> Iterator[tuple[str, str]]:
        unit, own_units = self._again.pop()
        if own_units:
            yield "free", unit

    def reduce(self, unit: str) -> None:
        self._left[unit] -= 1
        # Why not at the last: a norm may ask for its input after it has made its weight's gradient.
        if self._left[unit] > 0:
            self._gathered.discard(unit)

    def leave(self, unit: str) -> None:
        self._gathered.discard(unit)

    def _need(self, unit: str) -> Iterator[tuple[str, str]]:
        if unit not in self._gathered:
            self._gathered.add(unit)
            yield "need", unit

    def _checkpoints(self, path: str) -> Iterator[list[str]]:
        """Yield the units inside each checkpoint around a module, innermost first."""
        units_inside: list[str] = []
        for node_path in tree.upwards(path):
            unit = self._owners.of_path.get(node_path)
            if unit is not None:
                units_inside.append(unit)
            if node_path in self._held:
                yield units_inside
                units_inside = []

    def _sees(self, unit: str, path: str) -> bool:
        """Return whether no checkpoint inside a unit hides what a module saves."""
        for node_path in tree.upwards(path):
            is_own = self._owners.of_path.get(node_path) == unit
            if is_own or node_path in self._held:
                return is_own
        return True
