"""``Step``, the result of a walk, as data."""

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
        what: the rank's activity, such as ``"forward"`` or ``"optimizer"``.
        unit: name of the unit; ``""`` is the root.
        memory: bytes by category, without zeros.
    """

    seconds: float
    what: str
    unit: str
    memory: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.memory.values())


class Timeline(Sequence[Moment]):
    """The moments of a step, in order; equal to a tuple of them.

    Arguments:
        highest: position of the first moment with the most bytes.
    """

    __slots__ = ("_highest", "_rows")

    def __init__(self, rows: Sequence[Row], highest: int) -> None:
        self._rows = rows
        self._highest = highest

    @property
    def highest(self) -> Moment:
        """The first moment with the most memory."""
        return _moment(self._rows[self._highest])

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Moment]:
        # Why only now: a large step has thousands of moments, and most readers want the highest
        # one.
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
        what: ``"forward"``, ``"backward"``, ``"loss"``, ``"optimizer"``, or the kind of collective.
        unit: name of the unit; ``""`` is the root.
        begin: seconds since the start of the step.
        bytes: bytes that a computation moves, or of the collective's whole buffer.
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
        return self.begin + self.seconds


@dataclass(frozen=True, slots=True, repr=False)
class Step:
    """The memory, the time and the traffic of one training step.

    Attributes:
        schedule: the schedule, in the order in which the trace ran the units.
        timeline: the memory of the rank, moment by moment.
        spans: its computations and collectives, and when they run.
        events: its collectives, in order; equal to ``record_events`` around the step.
        rank: 0, because all ranks hold equally much up to padding.
        exposed: seconds in which the rank waits for a collective.
        tokens: tokens of a rank in a step; 0 if the inputs aren't tokens.
        flops: the model's FLOPs, as ``mfu`` counts them.
        reserved: the least and the most bytes of a caching allocator; zeros on a CPU.
        reserved_source: where the two factors come from.
        unit_memory: bytes at the peak by unit and category.
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
        # Note: the ledger knows the highest moment; a timeline made by hand is searched.
        if isinstance(self.timeline, Timeline):
            return self.timeline.highest
        return max(self.timeline, key=lambda moment: moment.total)

    @property
    def peak(self) -> int:
        """Most bytes that the rank holds at any moment."""
        return self.peak_moment.total

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes by category at the peak."""
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
