"""The best plan under a memory budget, or the reason if nothing fits.

In reading order:

- ``space``: the plans that a search tries, in ladders.
- ``scoring``: the time and the memory of a plan, and lower bounds of both.
- ``best_plan``: ``auto_plan``, the search.
- ``infeasible``: the reason if nothing fits, and the price of each change.
"""

from __future__ import annotations

from funcshard.estimate.search.best_plan import Best, Point, auto_plan
from funcshard.estimate.search.infeasible import Change, Infeasible, changes_to_fit
from funcshard.estimate.search.space import Space

__all__ = ["Best", "Change", "Infeasible", "Point", "Space", "auto_plan", "changes_to_fit"]
