"""Race all that a job does besides its steps: ``python -m benchmarks.life``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from benchmarks import results
from benchmarks.life.racing import FILES, HEADER, Result, cases_of, race
from benchmarks.rank_processes import RankProcesses
from benchmarks.step import listed


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Run the races of the command line, print the table, and return the results, row by row."""
    known = {name: (file, case) for file in FILES for name, case in cases_of(file).items()}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.life", description=__doc__)
    parser.add_argument("--rows", default="", help=f"of {', '.join(known)}, with commas between (default: all)")
    parser.add_argument("--ranks", default="", help="numbers of ranks, of those that the rows name (default: all of them)")
    parser.add_argument("--rounds", type=int, default=8, help="turns of both sides (default %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="run tiny variants, to see that they run")
    options = parser.parse_args(arguments)
    asked = [int(ranks) for ranks in options.ranks.split(",") if ranks]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks
    measured: list[Result] = []
    shared: dict[int, RankProcesses] = {}
    try:
        for name in listed(options.rows, known, "--rows") or known:
            file, case = known[name]
            for ranks in (each for each in case.ranks if not asked or each in asked):
                print(f"{case.title}, {ranks} ranks …", file=sys.stderr, flush=True)
                result = race(file, case, ranks, rounds=max(options.rounds, 1), tiny=options.tiny, shared=shared)
                if result.error:
                    print(result.error, file=sys.stderr, flush=True)
                measured.append(result)
                print("    " + " · ".join(result.row()[3:]), file=sys.stderr, flush=True)
    finally:
        for group in shared.values():
            group.close()
    title = f"Everything but the step; {options.rounds} rounds{', tiny' if options.tiny else ''}"
    print(f"\n{results.about()}")
    results.Table(title, HEADER, [result.row() for result in measured]).show()
    return measured


if __name__ == "__main__":
    sys.exit(int(any(result.error for result in main())))
