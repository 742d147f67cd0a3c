"""Run cases dry, under both checks, and tell what they found: ``python -m benchmarks.dry [--quick] [CASE ...]``."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
import traceback
from typing import Any

import torch

import funcshard as fs
from benchmarks.dry.cases import CASES, QUICK
from benchmarks.dry.device import missing, prepare
from benchmarks.dry.faults import FAULTS
from benchmarks.dry.mode import dry_cuda
from benchmarks.dry.steps import dry_mesh
from benchmarks.dry.stream_order import StreamOrder
from funcshard._utils.torch_private import recording_tensors


def run_case(name: str, mesh: fs.Mesh, fault: str = "") -> dict[str, Any]:
    """Run a case of ``CASES``, with a planted fault of ``FAULTS`` or without.

    Returns:
        ``{"found": [...], "accesses": number, "seconds": processor time, "waits": [...]}``:
        the mistakes found, in words; accesses of storages that were checked; the waits of the host
        that are allowed.
    """
    order = StreamOrder()
    found, begin = [], time.process_time()
    # Why other tensors for graphs: numbers of the ones that a recording makes are symbols.
    fake = recording_tensors() if CASES[name].records else None
    with dry_cuda(fake) as mode, order:
        try:
            with FAULTS[fault].plant(order) if fault else contextlib.nullcontext():
                CASES[name].run(mesh)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            first = str(error).partition("\n")[0]
            found.append(f"{type(error).__name__}: {first} ({place.filename}:{place.lineno})")
    found += dict.fromkeys(f"the host waits: {wait.what} in {wait.site}" for wait in mode.forbidden)
    found += dict.fromkeys(order.unordered)
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


def main() -> int:
    """Run the cases that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dry", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names of cases; all by default, and planted faults")
    parser.add_argument("--quick", action="store_true", help="only the cases that the tests run")
    options = parser.parse_args()
    if unknown := [name for name in options.cases if name not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    if lacking := missing():
        sys.exit(lacking)
    prepare()
    torch.set_num_threads(1)
    cases = options.cases or list(QUICK if options.quick else CASES)
    faults = [name for name, fault in FAULTS.items() if not options.cases and (fault.quick or not options.quick)]
    wrong = 0
    for name, result in run_all(cases, faults).items():
        words = FAULTS[name.removeprefix("fault: ")].words if name.startswith("fault: ") else None
        good = not result["found"] if words is None else any(words in each for each in result["found"])
        wrong += not good
        print(f"{'ok  ' if good else 'BAD '} {result['seconds']:5.2f} s  {result['accesses']:6d} accesses  {name}")
        print("".join(f"         {each}\n" for each in result["found"][: 1 if good else None]), end="")
    print(f"{wrong} runs are wrong" if wrong else "all runs are as they should be")
    return min(wrong, 1)
