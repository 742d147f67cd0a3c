"""Print progress: a bar in a terminal with rich, plain lines otherwise."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

Show = Callable[[int, str], None]  # (number of turns done, a few words beside the bar)

EVERY = 5.0  # seconds between two lines
BRIEF = 2.0  # loops of fewer seconds print no lines


say = functools.partial(print, flush=True)


@contextmanager
def progress(
    title: str, total: int, *, quiet: bool = False, keep: bool = False
) -> Iterator[Show]:
    """Show the progress of a loop of ``total`` turns; yield ``show(done, words)``.

    Arguments:
        keep: whether the bar stays at the end.
    """
    if quiet or total < 1:
        yield lambda done, words: None
        return
    console = _console()
    if console is None:
        yield _lines(title, total)
        return
    from rich import progress as bars

    bar_columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=None),
        bars.MofNCompleteColumn(),
        bars.TextColumn("[cyan]{task.fields[words]}[/cyan]"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("[dim]left[/dim]"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(
        *bar_columns, console=console, expand=True, transient=not keep
    ) as drawing:
        task = drawing.add_task(title, total=total, words="")
        # Note: rich draws in a thread of its own, ten times a second.
        yield lambda done, words: drawing.update(task, completed=done, words=words)


@contextmanager
def mebibytes(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress of a work on bytes; yield ``watch(done, total)``."""
    with ExitStack() as stack:
        show: Show | None = None

        def watch(done: int, total: int) -> None:
            nonlocal show
            if show is None:  # the total is known now
                show = stack.enter_context(progress(title, -(-total // 2**20)))
            show(-(-done // 2**20), "MiB")

        yield watch


def show_cursor() -> None:
    """Show the cursor, which a bar hid if its process was killed."""
    if sys.stdout.isatty():
        print("\x1b[?25h", flush=True)


def _lines(title: str, total: int) -> Show:
    start_time = last_time = time.monotonic()

    def show(done: int, words: str) -> None:
        nonlocal last_time
        current_time = time.monotonic()
        is_end = done >= total and current_time - start_time >= BRIEF
        if is_end or current_time - last_time >= EVERY:
            last_time = current_time
            print(f"{title}  {done}/{total}  {words}".rstrip(), flush=True)

    return show


def _console() -> Any:
    try:
        from rich.console import Console
    except ImportError:
        return None
    rich_console = Console()
    if rich_console.is_terminal and not rich_console.is_dumb_terminal:
        return rich_console
    return None
