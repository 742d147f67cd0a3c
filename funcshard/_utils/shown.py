"""``Shown``: objects that show themselves, as text when printed and as HTML in a notebook.

Such an object is a list of parts: tables, lists and sentences. It names them once, and both forms
follow from them.
"""

from __future__ import annotations

import abc
import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from funcshard._utils import table

_BESIDE = '<div style="display:inline-block;vertical-align:top;margin:0 24px 12px 0">{}</div>'


class Table(NamedTuple):
    """A table.

    Attributes:
        title: the line above it.
        header: the names of the columns.
        rows: the rows, each with one string a column.
        total: a last row, separated from the rest by a line.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    total: Sequence[str] | None = None


class Bullets(NamedTuple):
    """A list of lines under a heading."""

    heading: str
    lines: Sequence[str]


Part = Table | Bullets | str


class Shown(abc.ABC):
    """Base of classes that show themselves; ``_parts`` returns the tables, lists and sentences.

    Example:
        >>> from funcshard._utils import Shown, Table
        >>> class Fruit(Shown):
        ...     def _parts(self):
        ...         return [Table("Fruit", ["kind", "n"], [["apple", "2"]]), "One kind."]
        >>> print(Fruit())
        Fruit
        ────────
        kind   n
        ────────
        apple  2
        ────────
        <BLANKLINE>
        One kind.
    """

    __slots__ = ()

    @abc.abstractmethod
    def _parts(self) -> Iterable[Part]:
        """Return the parts in order."""

    def __str__(self) -> str:
        return text_of(self._parts())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_of(self._parts())


def text_of(parts: Iterable[Part]) -> str:
    """Return parts as text, with an empty line between two of them."""
    return "\n\n".join(map(_text, parts))


def html_of(parts: Iterable[Part]) -> str:
    """Return parts as escaped HTML; several tables are side by side if they fit."""
    parts = list(parts)
    has_tables = sum(isinstance(part, Table) for part in parts) > 1
    return "".join(
        _BESIDE.format(_html(part)) if has_tables and isinstance(part, Table) else _html(part)
        for part in parts
    )


def _text(part: Part) -> str:
    if isinstance(part, Table):
        return table.as_text(*part)
    if isinstance(part, Bullets):
        return "\n".join([part.heading, *(f"  - {line}" for line in part.lines)])
    return part


def _html(part: Part) -> str:
    if isinstance(part, Table):
        return table.as_html(*part)
    if isinstance(part, Bullets):
        items = "".join(f"<li>{html.escape(line)}</li>" for line in part.lines)
        return f"<p><b>{html.escape(part.heading)}</b></p><ul>{items}</ul>"
    return f"<p>{html.escape(part)}</p>"
