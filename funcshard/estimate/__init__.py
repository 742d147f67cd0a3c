"""What a step will take before it runs: its memory, its time, its traffic, and the best plan.

- ``report``: ``Report``, the result, as data.
"""

from funcshard.estimate.report import CATEGORIES, LANES, SOURCES, Moment, Report, Span

__all__ = ["CATEGORIES", "LANES", "SOURCES", "Moment", "Report", "Span"]
