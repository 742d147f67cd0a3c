"""Whether a job fits into this machine: a typing error should not take it down."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

# The memory that a rank takes for itself, besides the pages of torch that ranks share. Measured on
# three ranks: 12 MiB before the first step, and 124 MiB after two steps of the default GPT.
PROCESS_BYTES = 80 * 2**20


def check_fits(ranks: int, parameters: int = 0, activations: int = 0) -> None:
    """Raise ``ValueError`` unless this machine has the memory for a job.

    Arguments:
        ranks: number of processes.
        parameters: number of parameters. Each rank draws all of them; then ranks share parameters,
            gradients and the two moments of Adam.
        activations: number of elements of one tensor of activations of every block. A block keeps
            at least eight.
    """
    elements = parameters * (ranks + 4) + 8 * activations * ranks
    needed, available = PROCESS_BYTES * ranks + 4 * elements, _available_bytes()
    if available is not None and needed > available:
        raise ValueError(
            f"{ranks:,} ranks and a model of {parameters:,} parameters need about "
            f"{needed / 2**30:,.1f} GiB, and this machine has {available / 2**30:,.1f} GiB: choose "
            "fewer --ranks, or a smaller model; python -m funcshard plan takes any number of both"
        )


def _available_bytes() -> int | None:
    """Return the memory that new processes can have: the machine's, or less in a container."""
    try:
        free = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:  # no Linux
        return None
    limits = [int(free[1]) * 1024] if free else []
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or the text "max"
            limits.append(int(Path(limit).read_text()))
    return min(limits, default=None)
