"""``reserved_band``: the memory that a caching allocator holds, from the memory in use.

torch's allocator on GPUs keeps freed blocks in a pool for each stream. How much it *reserves*
depends on the order and sizes of all blocks, so the band comes from published or measured runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from funcshard._utils.options import check_count


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
        TypeError: a number is no whole number.
        ValueError: a number is negative.

    Example:
        >>> from funcshard.estimate.machine import reserved_band
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
