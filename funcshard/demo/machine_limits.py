"""How many processes of a job fit into this machine: a typing error should not take it down."""

from __future__ import annotations

import os
from pathlib import Path

from funcshard.demo.arguments import BadInputError

# The memory that a rank takes for itself, besides the pages of torch that ranks share. Measured on
# three ranks: 12 MiB before the first step, and 124 MiB after two steps of the default GPT.
PROCESS_BYTES = 80 * 2**20


def check_ranks_fit(ranks: int) -> None:
    """Raise unless this machine can hold so many processes of a job."""
    most_ranks_here = most_ranks(_available_bytes(), _process_limit())
    if ranks > most_ranks_here:
        raise BadInputError(
            f"--ranks must be at most {most_ranks_here:,} here, because each rank is a process of about "
            f"{PROCESS_BYTES // 2**20} MiB; found {ranks:,}: python -m funcshard plan takes any "
            "number of ranks"
        )


def check_model_fits(
    parameters: int, activations: int, ranks: int, available: int | None = None
) -> None:
    """Raise unless this machine can hold a model on so many ranks.

    Arguments:
        parameters: number of parameters. Each rank draws all of them; then ranks share parameters,
            gradients and the two moments of Adam.
        activations: number of elements of one tensor of activations of every block. A block keeps
            at least eight.
        ranks: number of ranks.
        available: bytes of memory that can be had; by default those of this machine.
    """
    available = _available_bytes() if available is None else available
    needed = 4 * (parameters * (ranks + 4) + 8 * activations * ranks)
    if available is not None and needed > available:
        raise BadInputError(
            f"a model of {parameters:,} parameters needs about {needed / 2**30:,.1f} GiB on "
            f"{ranks} ranks, and this machine has {available / 2**30:,.1f} GiB: choose a smaller "
            "--width, --layers, --context or --batch, or fewer --ranks"
        )


def most_ranks(available: int | None, processes: int | None) -> int:
    """Return the largest number of ranks; at least two.

    Arguments:
        available: bytes of memory that can be had; ``None`` if the system does not tell.
        processes: number of processes that a user may have; ``None`` if there is no limit.
    """
    by_memory = 1024 if available is None else available // PROCESS_BYTES
    # Why a half: each process has a few threads, which count too.
    return max(2, min(by_memory, by_memory if processes is None else processes // 2))


def _available_bytes() -> int | None:
    """Return the memory that new processes can have: the machine's, or less in a container."""
    memory_limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        memory_limits += [
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")
        ]
    except OSError:  # no Linux
        if "SC_PHYS_PAGES" in getattr(os, "sysconf_names", {}):
            memory_limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            memory_limits.append(int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such file, or the text "max"
            continue
    return min(memory_limits, default=None)


def _process_limit() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    return None if soft == resource.RLIM_INFINITY else soft
