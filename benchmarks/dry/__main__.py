"""Run the library on fake CUDA tensors: ``python -m benchmarks.dry [--quick] [--json FILE] [CASE ...]``."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks.dry.cases import CASES, QUICK
from benchmarks.dry.device import missing, prepare
from benchmarks.dry.faults import FAULTS
from benchmarks.dry.running import run_all


def main() -> int:
    """Run the cases that the command line names; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dry", description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names of cases; all by default")
    parser.add_argument("--quick", action="store_true", help="only the cases that the tests run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here")
    options = parser.parse_args()
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    lacking = missing()
    if lacking:
        sys.exit(lacking)
    prepare()
    torch.set_num_threads(1)
    cases = options.cases or list(QUICK if options.quick else CASES)
    faults = [name for name, fault in FAULTS.items() if not options.cases and (fault.quick or not options.quick)]
    results = run_all(cases, faults)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    wrong = 0
    for name, result in results.items():
        fault = FAULTS.get(name.removeprefix("fault: ")) if name.startswith("fault: ") else None
        good = not result["found"] if fault is None else any(fault.words in each for each in result["found"])
        wrong += not good
        print(f"{'ok  ' if good else 'BAD '} {result['seconds']:5.2f} s  {result['accesses']:6d} accesses  {name}")
        for each in result["found"][: None if fault is None or not good else 1]:
            print(f"         {each}")
    print(f"{len(results)} runs, {wrong} wrong" if wrong else f"{len(results)} runs, all as they should be")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
