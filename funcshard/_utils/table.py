"""Tables of strings as aligned text or as HTML, and the format of the numbers in them."""

from __future__ import annotations

import html as _html
from collections.abc import Callable, Sequence
from typing import Any

_STYLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"
_CELL = "padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.25)"


def as_text(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
) -> str:
    """Return an aligned text table.

    Columns of numbers are aligned right, all other columns and the first column left.

    Arguments:
        title: the line above the table.
        header: the names of the columns.
        rows: the rows, each with one string a column.
        total: a last row, separated from the rest by a line.

    Example:
        >>> from funcshard._utils import table
        >>> print(table.as_text("Fruit", ["kind", "n"], [["apple", "2"], ["fig", "10"]]))
        Fruit
        ─────────
        kind    n
        ─────────
        apple   2
        fig    10
        ─────────
    """
    body = [list(row) for row in rows] + ([list(total)] if total else [])
    right = _numeric(header, rows)
    widths = [max(len(row[i]) for row in [list(header), *body]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (
            c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)
        )
        return "  ".join(cells).rstrip()

    rule = "─" * (sum(widths) + 2 * (len(widths) - 1))
    lines = [title, rule, line(header), rule, *(line(row) for row in rows), rule]
    if total:
        lines.append(line(total))
    return "\n".join(lines)


def as_html(
    title: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    total: Sequence[str] | None = None,
) -> str:
    """Return the table of ``as_text`` as escaped HTML with inline styles, for a notebook."""
    right = _numeric(header, rows)

    def line(row: Sequence[str], tag: str, weight: str = "normal") -> str:
        cells = (
            f'<{tag} style="{_CELL};text-align:{"right" if r else "left"};font-weight:{weight}">{_html.escape(c)}</{tag}>'
            for c, r in zip(row, right, strict=True)
        )
        return f"<tr>{''.join(cells)}</tr>"

    body = "".join(line(row, "td") for row in rows)
    foot = f"<tfoot>{line(total, 'td', '600')}</tfoot>" if total else ""
    caption = f'<caption style="caption-side:top;text-align:left;padding:4px 10px">{_html.escape(title)}</caption>'
    head = f"<thead>{line(header, 'th', '600')}</thead>"
    return f'<table style="{_STYLE}">{caption}{head}<tbody>{body}</tbody>{foot}</table>'


def count(number: int) -> str:
    """Return a number of things as text with thousands separated: ``1,234,567``."""
    return f"{number:,}"


def size(number: int) -> str:
    """Return a number of bytes as text in the largest unit that fits: ``1.5 MiB``."""
    value, unit = float(number), "B"
    for bigger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{number} B" if unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """Return a duration as text in the unit that keeps it short: ``12.5 ms``, ``3.20 s``."""
    value = abs(seconds)
    if value >= 0.9995:
        return f"{seconds:,.2f} s"
    return (
        f"{seconds * 1e3:.1f} ms" if value >= 0.9995e-3 or value == 0 else f"{seconds * 1e6:.1f} µs"
    )


def share(part: float, whole: float) -> str:
    """Return a part of a whole as text, such as ``12.5 %``; a dash if the whole is zero."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def signed(number: float, text: Callable[[Any], str]) -> str:
    """Return a difference as text with its sign, such as ``+1.5 MiB``; a dash for none."""
    return "-" if number == 0 else f"{'+' if number > 0 else '−'}{text(abs(number))}"


def _numeric(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Return, for each column, whether it holds numbers; an empty cell or a dash counts as one."""

    def numbers(i: int) -> bool:
        return bool(rows) and all(
            row[i].lstrip("+−")[:1].isdigit() or row[i] in ("", "-") for row in rows
        )

    return [i > 0 and numbers(i) for i in range(len(header))]
