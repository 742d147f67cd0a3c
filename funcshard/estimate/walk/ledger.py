"""The memory of a rank by category, at every moment, and the band of what an allocator reserves.

torch's allocator on GPUs keeps freed blocks in a pool for each stream. How much it *reserves*
depends on the order and sizes of all blocks, so the band comes from published or measured runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from funcshard._utils.options import check_count
from funcshard.estimate.trace import Run

# The uses of memory, in the order of tables and pictures.
CATEGORIES = (
    "shards", "optimizer", "buffers", "inputs", "communicators", "gathered", "activations", "temporaries", "loss",
    "gradients", "reduction", "gradient shards",
)  # fmt: skip


class Moment(NamedTuple):
    """The memory of one rank at one moment of the step.

    Attributes:
        seconds: time since the start of the step.
        what: the rank's activity, such as ``"forward"`` or ``"optimizer"``.
        unit: name of the unit; ``""`` is the root.
        sizes: bytes of each of ``CATEGORIES``.
    """

    seconds: float
    what: str
    unit: str
    sizes: tuple[int, ...]

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by category, without zeros."""
        return {
            name: size for name, size in zip(CATEGORIES, self.sizes, strict=True) if size
        }

    @property
    def total(self) -> int:
        return sum(self.sizes)

    def __repr__(self) -> str:
        return f"Moment(seconds={self.seconds}, what={self.what!r}, unit={self.unit!r}, memory={self.memory})"


_INDEX = {category: position for position, category in enumerate(CATEGORIES)}
# The categories that the tape knows lie side by side.
_TAPE = slice(_INDEX["activations"], _INDEX["gradients"] + 1)


class Ledger:
    """Add up the memory of one rank by category, and keep its moments.

    Attributes:
        moments: the moments so far, as rows.
        highest: position of the first such moment.
    """

    __slots__ = ("_now", "_tape", "highest", "moments", "peak", "total")

    def __init__(self) -> None:
        # Why no moments yet: a step of a large model has thousands, and a search reads the peak.
        self.moments: list[tuple[float, str, str, tuple[int, ...]]] = []
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
        # Note: a run's highest memory is somewhere inside it; its beginning is as good a place.
        for seconds, sizes in ((begin, run.highest), (end, run.end)):
            taken_bytes = sum(sizes)
            self._now[_TAPE] = sizes
            self.total += taken_bytes - self._tape
            self._tape = taken_bytes
            self.note(seconds, run.what, run.unit)

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
        pool_sizes = [
            (
                sizes[gathered_index],
                sizes[reduced_index],
                sum(sizes) - sizes[gathered_index] - sizes[reduced_index],
            )
            for *_, sizes in self.moments
        ]
        # Note: each pool is as large as its own peak, whenever that is.
        return sum(map(max, zip(*pool_sizes, strict=True)))

    def timeline(self) -> tuple[Moment, ...]:
        return tuple(map(Moment._make, self.moments))


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
# simulated one. benchmarks/published.py computes the pools. The last two are the least and
# the most of nineteen runs on one H100.
RESERVED_RUNS = (
    ReservedRun(
        "Llama 2 7B, FSDP1, full checkpoints", 34_512_631_387, 28_943_208_456, _TITAN
    ),
    ReservedRun(
        "Llama 2 7B, FSDP1, selective checkpoints", 68_606_866_001, 57_732_911_112, _TITAN
    ),
    ReservedRun(
        "Llama 2 7B, FSDP2, full checkpoints", 33_308_465_064, 28_556_779_528, _TITAN
    ),
    ReservedRun(
        "Llama 2 7B, FSDP2, selective checkpoints", 63_790_200_709, 57_346_482_184, _TITAN
    ),
    ReservedRun(
        "Llama 8B, bfloat16, recomputed", 68_581_064_704, 66_343_480_832, _MEASURED
    ),
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
