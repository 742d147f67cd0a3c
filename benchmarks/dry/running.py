"""``run_case``: run one case dry, under both checks, and return what they found as data."""

from __future__ import annotations

import time
import traceback
from typing import Any

import funcshard as fs
from benchmarks.dry.cases import CASES
from benchmarks.dry.faults import FAULTS
from benchmarks.dry.mode import dry_cuda
from benchmarks.dry.steps import dry_mesh
from benchmarks.dry.stream_order import StreamOrder
from funcshard._utils.torch_private import recording_tensors

__all__ = ["run_all", "run_case"]


def run_case(name: str, mesh: fs.Mesh, fault: str = "") -> dict[str, Any]:
    """Run a case, with a planted fault or without.

    Arguments:
        name: a case of ``CASES``.
        mesh: the mesh of its shape.
        fault: a fault of ``FAULTS``; ``""`` for none.

    Returns:
        ``{"found": [...], "accesses": number, "seconds": processor time, "waits": [...]}``:
        the mistakes found, in words; accesses of storages that were checked; the waits of the host
        that are allowed.
    """
    order = StreamOrder(**(FAULTS[fault].order if fault else {}))
    found, begin = [], time.process_time()
    # Why other tensors for graphs: numbers of the ones that a recording makes are symbols.
    fake = recording_tensors() if CASES[name].records else None
    with dry_cuda(fake=fake) as mode, order:
        try:
            if fault:
                with FAULTS[fault].plant(order):
                    CASES[name].run(mesh)
            else:
                CASES[name].run(mesh)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            first = str(error).partition("\n")[0]
            found.append(f"{type(error).__name__}: {first} ({place.filename}:{place.lineno})")
    found += dict.fromkeys(f"the host waits: {wait.what} in {wait.site}" for wait in mode.forbidden)
    found += dict.fromkeys(map(str, order.unordered))
    waits = [*dict.fromkeys(f"{wait.what} in {wait.site}: {wait.why}" for wait in mode.waits if wait.why)]
    return {"found": found, "accesses": order.accesses, "seconds": time.process_time() - begin, "waits": waits}


def run_all(cases: list[str], faults: list[str]) -> dict[str, dict[str, Any]]:
    """Run cases and faults; return their results by name, those of faults as ``"fault: name"``."""
    runs = [(name, name, "") for name in cases] + [(f"fault: {name}", FAULTS[name].case, name) for name in faults]
    meshes: dict[str, fs.Mesh] = {}
    results = {}
    for title, case, fault in runs:
        shape = CASES[case].shape
        key = str(shape)
        if key not in meshes:
            meshes[key] = dry_mesh(shape)
        results[title] = run_case(case, meshes[key], fault)
    return results
