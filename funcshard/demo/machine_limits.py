"""Whether a job fits into this machine."""

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
        activations: elements of one tensor of activations of every block.
    """
    # Note: each rank draws all parameters; then ranks share parameters, gradients and Adam's two
    # moments. A block keeps at least eight tensors of activations.
    elements = parameters * (ranks + 4) + 8 * activations * ranks
    needed_bytes, available_bytes = PROCESS_BYTES * ranks + 4 * elements, _available_bytes()
    if available_bytes is not None and needed_bytes > available_bytes:
        raise ValueError(
            f"{ranks:,} ranks and a model of {parameters:,} parameters need about "
            f"{needed_bytes / 2**30:,.1f} GiB, and this machine has {available_bytes / 2**30:,.1f} "
            "GiB: choose fewer --ranks, or a smaller model; python -m funcshard plan takes any "
            "number of both"
        )


def _available_bytes() -> int | None:
    try:
        free_match = re.search(r"MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:  # no Linux
        return None
    byte_limits = [int(free_match[1]) * 1024] if free_match else []
    for limit_file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # no such file, or the text "max"
            byte_limits.append(int(Path(limit_file).read_text()))
    # A container may have less than the machine.
    return min(byte_limits, default=None)
