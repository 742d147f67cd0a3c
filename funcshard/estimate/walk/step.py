"""``Step``: the memory, the time and the traffic of one training step, as data.

``Report`` adds its tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from funcshard.plan import Event, Plan, Schedule

# The uses of memory, in the order of tables and pictures.
CATEGORIES = (
    "shards", "optimizer", "buffers", "inputs", "communicators", "gathered", "activations", "temporaries", "loss",
    "gradients", "reduction", "gradient shards",
)  # fmt: skip

LANES = ("compute", "gather", "reduce")

# A moment in the walk: seconds, activity, unit, and bytes by position in CATEGORIES.
Row = tuple[float, str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory of one rank at one moment of the step.

    Attributes:
        seconds: time since the start of the step.
        what: the rank's activity then, such as ``"forward"``, ``"backward"`` or ``"optimizer"``.
        unit: name of the unit that it does it for; ``""`` is the root.
        memory: bytes by category; categories without bytes are left out.
    """

    seconds: float
    what: str
    unit: str
    memory: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(self.memory.values())


class Timeline(Sequence[Moment]):
    """The moments of a step, in order; equal to a tuple of them.

    A step of a large model has thousands of moments, and most readers want the highest one. So each
    ``Moment`` is made when it is read.

    Arguments:
        rows: the moments as rows.
        highest: position of the first moment with the most bytes.
    """

    __slots__ = ("_highest", "_rows")

    def __init__(self, rows: Sequence[Row], highest: int) -> None:
        self._rows = rows
        self._highest = highest

    @property
    def highest(self) -> Moment:
        """The moment at which the rank holds the most memory; the first of them."""
        return _moment(self._rows[self._highest])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Moment]:
        return map(_moment, self._rows)

    def __getitem__(self, index: Any) -> Any:
        rows = self._rows[index]
        return tuple(map(_moment, rows)) if isinstance(index, slice) else _moment(rows)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Timeline | tuple) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # a moment holds a dictionary

    def __repr__(self) -> str:
        return repr(tuple(self))


def _moment(row: Row) -> Moment:
    seconds, moment_kind, unit_name, category_sizes = row
    return Moment(
        seconds,
        moment_kind,
        unit_name,
        {name: size for name, size in zip(CATEGORIES, category_sizes, strict=True) if size},
    )


class Span(NamedTuple):
    """One computation or collective, and when it runs.

    Attributes:
        lane: ``"compute"``, ``"gather"`` or ``"reduce"``.
        what: the kind of work: ``"forward"``, ``"backward"``, ``"loss"``, ``"optimizer"``, or the
            kind of collective.
        unit: name of the unit; ``""`` is the root.
        begin: seconds since the start of the step.
        seconds: duration.
        bytes: bytes that a computation reads and writes, or size of the collective's whole buffer.
        flops: floating-point operations.
        source: source of the duration.
    """

    lane: str
    what: str
    unit: str
    begin: float
    seconds: float
    bytes: int
    flops: int
    source: str

    @property
    def end(self) -> float:
        """Seconds from the start of the step to the end of the span."""
        return self.begin + self.seconds


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """The memory, the time and the traffic of one training step.

    Attributes:
        plan: the plan.
        schedule: the schedule, in the order in which the trace ran the units.
        hardware: name of the hardware.
        timeline: the memory of the heaviest rank, moment by moment.
        spans: the computations and collectives of that rank, and when they run.
        events: its collectives, in order; equal to ``record_events`` around the step.
        rank: the heaviest rank: the one with the highest peak.
        step_time: seconds of one step.
        exposed: seconds of the step in which the rank waits for a collective.
        tokens: tokens of a rank's batch in one step; 0 if the inputs are not tokens.
        flops: floating-point operations of the model by the convention of ``mfu``.
        peak_flops: floating-point operations that the hardware can do in one second.
        reserved: the least and the most memory that a caching allocator holds at such a peak;
            zeros on a CPU, whose allocator keeps no pools.
        reserved_source: where the two factors come from.
        budget: bytes that the rank may use: the memory of the hardware, or less.
        unit_memory: bytes at the peak by unit, of categories that belong to units.
        sources: source of each number, by name.
        options: the options of ``estimate`` that are not in the plan, such as the remat set.
    """

    plan: Plan
    schedule: Schedule
    hardware: str
    timeline: Sequence[Moment]
    spans: tuple[Span, ...]
    events: tuple[Event, ...]
    rank: int
    step_time: float
    exposed: float
    tokens: int = 0
    flops: int = 0
    peak_flops: float = 0.0
    reserved: tuple[int, int] = (0, 0)
    reserved_source: str = ""
    budget: int | None = None
    unit_memory: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.timeline, "a step has at least one moment"

    @property
    def peak_moment(self) -> Moment:
        """The moment at which the rank holds the most memory; the first of them."""
        # Note: the ledger knows the highest moment; a timeline made by hand is searched.
        if isinstance(self.timeline, Timeline):
            return self.timeline.highest
        return max(self.timeline, key=lambda moment: moment.total)

    @property
    def peak(self) -> int:
        """Most bytes that the rank holds at any moment of the step."""
        return self.peak_moment.total

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes by category at the peak, in the order of ``CATEGORIES``."""
        memory = self.peak_moment.memory
        return {category: memory[category] for category in CATEGORIES if memory.get(category)}

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes that the rank sends in one step, by mesh axis."""
        traffic_by_axis: dict[str, int] = {}
        for event in self.events:
            traffic_by_axis[event.axis] = traffic_by_axis.get(event.axis, 0) + event.traffic
        return traffic_by_axis

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one rank in one second."""
        return self.tokens / self.step_time if self.step_time else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: FLOPs of the model in a second ÷ the hardware's peak."""
        return (
            self.flops / (self.step_time * self.peak_flops)
            if self.step_time and self.peak_flops
            else 0.0
        )

    @property
    def fits(self) -> bool:
        """Whether the peak is within the budget; ``True`` without a budget."""
        return self.budget is None or self.peak <= self.budget
