"""Race all that a job does besides its steps: ``python -m benchmarks.life``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.life.racing import race
from benchmarks.life.report import HEADER, as_json, row
from benchmarks.life.rows import cases
from benchmarks.results import markdown
from benchmarks.show import show
from benchmarks.step import machine

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the races of the command line, print the table, and return everything measured."""
    known = cases()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.life", description=__doc__)
    parser.add_argument("--rows", default="", help=f"of {', '.join(known)}, with commas between (default: all)")
    parser.add_argument("--ranks", default="", help="numbers of ranks, of those that the rows name (default: all of them)")
    parser.add_argument("--rounds", type=int, default=8, help="turns of both sides (default %(default)s)")
    parser.add_argument("--tiny", action="store_true", help="run tiny variants, to see that they run")
    parser.add_argument("--json", type=Path, help="file for everything measured")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args(arguments)
    names = [name for name in options.rows.split(",") if name] or list(known)
    for name in names:
        if name not in known:
            parser.error(f"there is no row {name!r}; there are {', '.join(known)}")
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1; found {options.rounds}")
    asked = [int(each) for each in options.ranks.split(",") if each]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the ranks
    results, rows = [], []
    shared: dict[int, Any] = {}
    try:
        for name in names:
            file, case = known[name]
            for ranks in (each for each in case.ranks if not asked or each in asked):
                print(f"{case.title}, {ranks} ranks …", file=sys.stderr, flush=True)
                result = race(file, case, ranks, rounds=options.rounds, tiny=options.tiny, shared=shared)
                if result.error:
                    print(result.error, file=sys.stderr, flush=True)
                results.append(as_json(result))
                rows.append(row(result))
                print("    " + " · ".join(rows[-1][3:]), file=sys.stderr, flush=True)
    finally:
        for group in shared.values():
            group.close()
    title = f"Everything but the step; {options.rounds} rounds{', tiny' if options.tiny else ''}"
    show(title, HEADER, rows)
    found = {"machine": machine(), "rows": results, "table": {"title": title, "header": HEADER, "rows": rows}}
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    if options.markdown:
        about = ", ".join(f"{key} {value}" for key, value in machine().items())
        options.markdown.write_text(f"Measured on {about}.\n\n**{title}**\n\n{markdown(HEADER, rows)}\n")
    return found


if __name__ == "__main__":
    sys.exit(int(any(each["error"] for each in main()["rows"])))
