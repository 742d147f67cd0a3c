"""Show tables and progress in a terminal, with rich if it is installed, or as plain text."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from funcshard._utils.table import Table as TextTable

__all__ = ["progress", "show"]

T = TypeVar("T")
RICH = importlib.util.find_spec("rich") is not None


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print one table."""
    if not (RICH and sys.stdout.isatty()):
        print(f"\n{TextTable(title, header, rows)}")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row, style="bold" if row[0].startswith("funcshard") else None)
    Console().print(table)


def progress(items: Iterable[T], what: str) -> Iterator[T]:
    """Yield ``items`` and show the progress on the standard error."""
    every = list(items)
    if RICH and sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(every, what, console=Console(stderr=True))
        return
    print(f"{what} …", file=sys.stderr, flush=True)
    yield from every
