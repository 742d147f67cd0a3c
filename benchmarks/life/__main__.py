"""Race all that a job does besides its steps: ``python -m benchmarks.life``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.life.racing import FILES, HEADER, cases_of, race
from benchmarks.step import listed


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run the races of the command line, print the table, and return everything measured, row by row."""
    known = {name: (file, case) for file in FILES for name, case in cases_of(file).items()}
    parser = argparse.ArgumentParser(prog="python -m benchmarks.life", description=__doc__)
    parser.add_argument("--rows", default="", help=f"of {', '.join(known)}, with commas between (default: all)")
    parser.add_argument("--ranks", default="", help="numbers of ranks, of those that the rows name (default: all of them)")
    parser.add_argument("--rounds", type=int, default=8, help="turns of both sides (default %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="run tiny variants, to see that they run")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    asked = [int(ranks) for ranks in options.ranks.split(",") if ranks]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks
    measured, rows = [], []
    shared: dict[int, Any] = {}
    try:
        for name in listed(options.rows, known, "--rows") or known:
            file, case = known[name]
            for ranks in (each for each in case.ranks if not asked or each in asked):
                print(f"{case.title}, {ranks} ranks …", file=sys.stderr, flush=True)
                result = race(file, case, ranks, rounds=max(options.rounds, 1), tiny=options.tiny, shared=shared)
                if result.error:
                    print(result.error, file=sys.stderr, flush=True)
                measured.append(result.as_json())
                rows.append(result.row())
                print("    " + " · ".join(rows[-1][3:]), file=sys.stderr, flush=True)
    finally:
        for group in shared.values():
            group.close()
    title = f"Everything but the step; {options.rounds} rounds{', tiny' if options.tiny else ''}"
    table = results.Table(title, HEADER, rows)
    table.show()
    if options.json:
        options.json.write_text(json.dumps({"machine": results.machine(), "rows": measured}, indent=1))
    if options.markdown:
        options.markdown.write_text(f"Measured on {results.about()}.\n\n{table.page()}")
    return measured


if __name__ == "__main__":
    sys.exit(int(any(row["error"] for row in main())))
