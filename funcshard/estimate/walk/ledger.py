"""The memory of a rank by category, at every moment, and the band of what an allocator reserves.

torch's allocator on GPUs keeps freed blocks in a pool for each stream. How much it *reserves*
depends on the order and sizes of all blocks, so the band comes from published or measured runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from funcshard._utils.options import check_count
from funcshard.estimate.trace import Run

# The uses of memory, in the order of tables and pictures.
CATEGORIES = (
    "shards", "optimizer", "buffers", "inputs", "communicators", "gathered", "activations", "temporaries", "loss",
    "gradients", "reduction", "gradient shards",
)  # fmt: skip

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


_INDEX = {category: position for position, category in enumerate(CATEGORIES)}
_OF_TAPE = tuple(_INDEX[name] for name in ("activations", "temporaries", "loss", "gradients"))
assert (*range(_OF_TAPE[0], _OF_TAPE[-1] + 1),) == _OF_TAPE, (
    "the categories of a tape lie side by side"
)
_TAPE = slice(_OF_TAPE[0], _OF_TAPE[-1] + 1)


class Ledger:
    """Add up the memory of one rank by category, and keep its moments.

    Attributes:
        moments: the moments so far, as rows.
        highest: position of the first such moment.
    """

    __slots__ = ("_now", "_tape", "highest", "moments", "peak", "total")

    def __init__(self) -> None:
        self.moments: list[Row] = []
        self.total = 0
        self.peak = -1
        self.highest = -1
        self._now = [0] * len(CATEGORIES)
        self._tape = 0  # bytes of the categories that the tape knows

    def add(self, category: str, size: int) -> None:
        self._now[_INDEX[category]] += size
        self.total += size

    def free(self, category: str, size: int) -> None:
        self._now[_INDEX[category]] -= size
        self.total -= size

    def run(self, run: Run, begin: float, end: float) -> None:
        """Keep two moments of a run: its highest memory, at ``begin``, and its end, in seconds."""
        # Why not note: a step of a large model has hundreds of runs.
        current_sizes, moments = self._now, self.moments
        other_bytes = self.total - self._tape
        # Note: a run's highest memory is somewhere inside it; its beginning is as good a place.
        current_sizes[_TAPE] = run.highest
        total_bytes = other_bytes + sum(run.highest)
        if total_bytes > self.peak:
            self.peak, self.highest = total_bytes, len(moments)
        moments.append((begin, run.what, run.unit, tuple(current_sizes)))
        current_sizes[_TAPE] = run.end
        self._tape = sum(run.end)
        self.total = total_bytes = other_bytes + self._tape
        if total_bytes > self.peak:
            self.peak, self.highest = total_bytes, len(moments)
        moments.append((end, run.what, run.unit, tuple(current_sizes)))

    def clear_tape(self) -> None:
        """Free all bytes of the categories that the tape knows."""
        self._now[_TAPE] = (0, 0, 0, 0)
        self.total -= self._tape
        self._tape = 0

    def note(self, seconds: float, what: str, unit: str) -> None:
        if self.total > self.peak:
            self.peak, self.highest = self.total, len(self.moments)
        self.moments.append((seconds, what, unit, tuple(self._now)))

    def pools(self, *, streams: bool) -> int:
        """Return the bytes of an allocator that reserves nothing.

        Arguments:
            streams: whether gathered units and reduced gradients have their own pools.
        """
        # Note: with one pool, memory that one use frees serves the next one.
        if not streams:
            return self.peak
        gathered_index, reduced_index = _INDEX["gathered"], _INDEX["gradient shards"]
        moment_sizes = [row[3] for row in self.moments]
        # Note: each pool is as large as its own peak, whenever that is.
        rest_bytes = max(
            sum(pool_sizes) - pool_sizes[gathered_index] - pool_sizes[reduced_index]
            for pool_sizes in moment_sizes
        )
        return (
            rest_bytes
            + max(pool_sizes[gathered_index] for pool_sizes in moment_sizes)
            + max(pool_sizes[reduced_index] for pool_sizes in moment_sizes)
        )

    def timeline(self) -> Timeline:
        return Timeline(self.moments, self.highest)


# --- reserved memory ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReservedRun:
    """One run whose reserved memory is known.

    Attributes:
        what: the model, the runtime and the checkpoints.
        pools: the sum of the pools' simulated peaks, in bytes.
    """

    what: str
    reserved: int
    pools: int
    source: str

    @property
    def factor(self) -> float:
        """Reserved memory for each byte of the pools."""
        return self.reserved / self.pools


_TITAN = "https://github.com/pytorch/torchtitan/pull/165"

_MEASURED = "benchmarks/measured_h100.json"

# Why these four of TorchTitan: their memory in use is published too, and it agrees with the
# simulated one. benchmarks/published_cases.py computes the pools. The last two are the least and
# the most of nineteen runs on one H100.
RESERVED_RUNS = (
    ReservedRun("Llama 2 7B, FSDP1, full checkpoints", 34_512_631_387, 28_943_208_456, _TITAN),
    ReservedRun("Llama 2 7B, FSDP1, selective checkpoints", 68_606_866_001, 57_732_911_112, _TITAN),
    ReservedRun("Llama 2 7B, FSDP2, full checkpoints", 33_308_465_064, 28_556_779_528, _TITAN),
    ReservedRun("Llama 2 7B, FSDP2, selective checkpoints", 63_790_200_709, 57_346_482_184, _TITAN),
    ReservedRun("Llama 8B, bfloat16, recomputed", 68_581_064_704, 66_343_480_832, _MEASURED),
    ReservedRun("Llama 3B, mixed, recomputed", 79_391_883_264, 52_781_827_584, _MEASURED),
)


_GPU = "h100"  # the GPU of all these runs


def reserved_how(hardware: str) -> str:
    """Return how far you can trust the band on some hardware, one of ``SOURCES``."""
    return "calibrated" if hardware.startswith(_GPU) else "extrapolated"


def reserved_band(pools: int, memory: int | None = None) -> tuple[int, int, str]:
    """Return the least and the most reserved memory, and the source of the band.

    Arguments:
        pools: bytes in use at the peak, summed over the allocator's pools.
        memory: bytes of the device, which bound the band.

    Returns:
        Bytes, bytes, and a sentence.

    Raises:
        TypeError: a number isn't a whole number.
        ValueError: a number is negative.

    Example:
        >>> from funcshard.estimate import reserved_band
        >>> low, high, source = reserved_band(1_000_000)
        >>> 1_000_000 < low < high < 1_600_000
        True

    Source: the runs in ``RESERVED_RUNS``.
    """
    pools = check_count("pools", pools, 0, of="bytes")
    factors = [reserved_run.factor for reserved_run in RESERVED_RUNS]
    least_factor, most_factor = min(factors), max(factors)
    source_text = (
        f"{least_factor:.2f} to {most_factor:.2f} times the allocator's pools, the least and the most of "
        f"{len(RESERVED_RUNS)} runs in {_TITAN} and {_MEASURED}"
    )
    least, most_bytes = int(pools * least_factor), int(pools * most_factor)
    # Note: a full allocator gives unused blocks back, so it never reserves more than the device
    # has.
    if memory is not None:
        # Why max: a step whose pools don't fit needs more than the device has.
        bound = max(pools, check_count("memory", memory, 0, of="bytes"))
        least, most_bytes = min(least, bound), min(most_bytes, bound)
    return least, most_bytes, source_text
