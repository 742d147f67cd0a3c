"""Tables and lists as text or as HTML, and formats of numbers."""

from __future__ import annotations

import abc
import html
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

_STYLE = "border-collapse:collapse;font-variant-numeric:tabular-nums"
_CELL = "padding:2px 10px;border-bottom:1px solid rgba(128,128,128,.25)"
_CAPTION = "caption-side:top;text-align:left;padding:4px 10px"
_BESIDE = "display:inline-block;vertical-align:top;margin:0 24px 12px 0"


class Table(NamedTuple):
    """A table, with columns of numbers aligned right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: Sequence[str] | None = None

    def __str__(self) -> str:
        last_rows = [self.total] if self.total else []
        # A column is as wide as its widest cell.
        columns = [*zip(self.header, *self.rows, *last_rows, strict=True)]
        widths = [max(map(len, column)) for column in columns]
        aligns = [str.rjust if is_numeric else str.ljust for is_numeric in self._numeric()]

        def line(row: Sequence[str]) -> str:
            aligned_cells = zip(aligns, row, widths, strict=True)
            return "  ".join(
                align(cell, width) for align, cell, width in aligned_cells
            ).rstrip()

        rule_line = "─" * (sum(widths) + 2 * (len(widths) - 1))
        body = [*map(line, self.rows), rule_line, *map(line, last_rows)]
        return "\n".join([self.title, rule_line, line(self.header), rule_line, *body])

    def _repr_html_(self) -> str:
        aligns = ["right" if is_numeric else "left" for is_numeric in self._numeric()]

        def line(row: Sequence[str], tag: str, weight: str) -> str:
            style = f"{_CELL};font-weight:{weight};text-align"
            cells = [
                f'<{tag} style="{style}:{align}">{html.escape(cell)}</{tag}>'
                for cell, align in zip(row, aligns, strict=True)
            ]
            return f"<tr>{''.join(cells)}</tr>"

        caption = f'<caption style="{_CAPTION}">{html.escape(self.title)}</caption>'
        head = f"<thead>{line(self.header, 'th', '600')}</thead>"
        rows = "".join(line(row, "td", "normal") for row in self.rows)
        body = f"<tbody>{rows}</tbody>"
        if self.total:
            body += f"<tfoot>{line(self.total, 'td', '600')}</tfoot>"
        return f'<table style="{_STYLE}">{caption}{head}{body}</table>'

    def _numeric(self) -> list[bool]:
        """Return whether each column holds numbers, empty cells or dashes."""
        if not self.rows:
            return [False] * len(self.header)
        # The first column holds names, also if they are numbers.
        _, *columns = zip(*self.rows, strict=True)
        return [False] + [
            all(cell.lstrip("+−")[:1].isdigit() or cell in ("", "-") for cell in column)
            for column in columns
        ]


class Bullets(NamedTuple):
    """A list of lines under a heading."""

    heading: str
    lines: Sequence[str]

    def __str__(self) -> str:
        return "\n".join([self.heading, *(f"  - {line}" for line in self.lines)])

    def _repr_html_(self) -> str:
        items = "".join(f"<li>{html.escape(line)}</li>" for line in self.lines)
        return f"<p><b>{html.escape(self.heading)}</b></p><ul>{items}</ul>"


Part = Table | Bullets | str


class Shown(abc.ABC):
    """Base of classes that print as tables, lists and sentences, and show as HTML in a notebook."""

    __slots__ = ()

    @abc.abstractmethod
    def _parts(self) -> Iterable[Part]:
        """Return the parts in order."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self._parts()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = list(self._parts())
        # A table by itself takes the whole width.
        has_tables = sum(isinstance(part, Table) for part in parts) > 1
        page = ""
        for part in parts:
            if isinstance(part, str):
                page += f"<p>{html.escape(part)}</p>"
            elif isinstance(part, Table) and has_tables:
                page += f'<div style="{_BESIDE}">{part._repr_html_()}</div>'
            else:
                page += part._repr_html_()
        return page


def count(number: int) -> str:
    """Return a number with thousands separated: ``1,234,567``."""
    return f"{number:,}"


def size(number: int) -> str:
    """Return bytes in the largest unit that fits: ``1.5 MiB``."""
    unit_bytes, unit = unit_of(number)
    return f"{number} B" if unit == "B" else f"{number / unit_bytes:.1f} {unit}"


def unit_of(number: int) -> tuple[int, str]:
    """Return the largest unit of bytes that fits, and its name."""
    unit_bytes, unit = 1, "B"
    for larger_unit in ("KiB", "MiB", "GiB", "TiB"):
        if number < 1024 * unit_bytes:
            break
        unit_bytes, unit = 1024 * unit_bytes, larger_unit
    return unit_bytes, unit


def duration(seconds: float) -> str:
    """Return seconds in the unit that keeps them short: ``12.5 ms``, ``3.20 s``."""
    length = abs(seconds)
    # The bounds are where rounding would show a number of four digits.
    if length >= 0.9995:
        return f"{seconds:,.2f} s"
    if length >= 0.9995e-3 or length == 0:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.1f} µs"


def share(part: float, whole: float) -> str:
    """Return a part of a whole as ``12.5 %``, or a dash if the whole is zero."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def signed(number: float, text: Callable[[Any], str]) -> str:
    """Return a difference with its sign, such as ``+1.5 MiB``, or a dash."""
    if number == 0:
        return "-"
    return f"{'+' if number > 0 else '−'}{text(abs(number))}"
