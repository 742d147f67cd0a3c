"""Import the library, construct the model of a job, and take the first step.

Each side imports its library inside its functions: a fresh rank loads no other.
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.life.case import Case, Place, Turn

__all__ = ["CASES"]

_IMPORT = """
import torch, time
start, worked = time.perf_counter(), time.process_time()
{}
print(time.perf_counter() - start, time.process_time() - worked)
"""


def _importing(statement: str, place: Place) -> Turn:
    """Return a turn that imports a library in a new interpreter that has imported torch."""

    def turn() -> None:
        if place.tiny:
            with place.timed():
                exec(statement, {})
        elif place.rank == 0:
            command = [sys.executable, "-c", _IMPORT.format(statement)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds, processor = map(float, done.stdout.split())
            place.record(seconds, processor)

    return turn


def _our_import(place: Place) -> Turn:
    return _importing("import funcshard", place)


def _their_import(place: Place) -> Turn:
    return _importing("from torch.distributed.fsdp import fully_shard", place)


CASES = (Case("import", "import the library, after torch", "FSDP2", 1.0, _our_import, _their_import, ranks=(1,)),)
