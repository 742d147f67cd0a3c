"""Compare estimates with the memory and the throughput that others have published.

    python -m benchmarks.published --markdown docs/estimates.md
    python -m benchmarks.published --fit

The published runs stand in ``published_cases``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import published_fit, published_table

__all__ = ["main", "put"]

START, END = "<!-- published -->", "<!-- end of published -->"


def main(arguments: Sequence[str] | None = None) -> str:
    """Fit or compare, as the command line says; return the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fit", action="store_true", help="fit the efficiencies and write them into the descriptions")
    parser.add_argument("--markdown", type=Path, help="a page with markers for the tables")
    options = parser.parse_args(arguments)
    if options.fit:
        found = {kind: published_fit.fit(kind) for kind in published_fit.KINDS}
        for kind, each in found.items():
            print(published_fit.write(kind, each))
        return ""
    text = published_table.page(lambda part: print(part, file=sys.stderr))
    print(text)
    if options.markdown:
        put(options.markdown, text)
    return text


def put(file: Path, text: str) -> None:
    """Write the tables between the markers of a page."""
    before, start, rest = file.read_text(encoding="utf-8").partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"{file} must have the lines {START} and {END}, between which the tables go: add them")
    file.write_text(f"{before}{start}\n\n{text}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
