"""What a person sees: text with a little colour and a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

__all__ = ["Show", "progress", "say", "show_cursor"]

Show = Callable[[int, str], None]  # (how many are done, a few words beside the bar)

EVERY = 5.0  # seconds between two lines
BRIEF = 2.0  # what takes less long gets no lines


def say(text: str = "", style: str = "") -> None:
    """Print ``text``; in a terminal in a style of rich's, such as ``"bold"``."""
    console = _console() if style else None
    if console is None:
        print(text, flush=True)
    else:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(title: str, total: int, *, quiet: bool = False, keep: bool = False) -> Iterator[Show]:
    """Show how far a loop of ``total`` turns is; yields ``show(done, words)``.

    Arguments:
        title: what is being done.
        total: number of turns.
        quiet: show nothing, as on every rank but the first.
        keep: leave the bar standing at the end.
    """
    bar = None if quiet or total < 1 else _bar(title, total, keep)
    if quiet or total < 1:
        yield lambda done, words: None
    elif bar is None:
        yield _lines(title, total)
    else:
        with bar as show:
            yield show


def show_cursor() -> None:
    """Bring back the cursor that a bar hid, after the process that drew the bar was killed."""
    if sys.stdout.isatty():
        print("\x1b[?25h", flush=True)


def _lines(title: str, total: int) -> Show:
    start = last = time.monotonic()

    def show(done: int, words: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= EVERY or (done >= total and now - start >= BRIEF):
            last = now
            print(f"{title}  {done}/{total}  {words}".rstrip(), flush=True)

    return show


def _console() -> Any:
    """Rich's console where there is a terminal to draw in, ``None`` where there is none, or no rich."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console()
    return console if console.is_terminal and not console.is_dumb_terminal else None


def _bar(title: str, total: int, keep: bool) -> AbstractContextManager[Show] | None:
    console = _console()
    if console is None:
        return None
    from rich import progress as bars

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(bar_width=None),
        bars.MofNCompleteColumn(),
        bars.TextColumn("[cyan]{task.fields[words]}[/cyan]"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("[dim]left[/dim]"),
        bars.TimeRemainingColumn(),
    )

    @contextmanager
    def drawn() -> Iterator[Show]:
        with bars.Progress(*columns, console=console, expand=True, transient=not keep) as drawing:
            task = drawing.add_task(title, total=total, words="")
            yield lambda done, words: drawing.update(task, completed=done, words=words)

    return drawn()
