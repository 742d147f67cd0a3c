"""Tables as text and as HTML, the format of numbers in them, and objects that show themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest

from funcshard._utils import table
from funcshard._utils.table import Bullets, Part, Shown, Table

FRUIT = Table("Fruit", ["kind", "n"], [["fig", "2"]], ["all", "2"])
LIST = Bullets("Sorts", ["a <b>", "c"])


@dataclass(frozen=True, slots=True, repr=False)
class Show(Shown):
    parts: tuple[Part, ...]

    def _parts(self) -> Iterable[Part]:
        return self.parts


def test_numbers_are_aligned_right_and_words_left_without_blanks_at_the_end() -> None:
    rows = [["a", "1", "word"], ["long", "1,234", ""]]
    text = str(Table("Title", ["name", "n", "more"], rows, total=["total", "1,235", ""]))
    rule = "─" * 18
    words = ["name       n  more", rule, "a          1  word", "long   1,234", rule, "total  1,235"]
    assert text.splitlines() == ["Title", rule, *words]
    text = str(Table("t", ["a", "by"], [["x", "+10 B"], ["y", "−1 B"], ["z", "-"]]))
    assert text.splitlines()[4:7] == ["x  +10 B", "y   −1 B", "z      -"]


WRITTEN = {
    "sizes": (
        table.size,
        {
            0: "0 B", 1023: "1023 B", 1024: "1.0 KiB", 1536: "1.5 KiB", 1024**2: "1.0 MiB", 3 * 1024**4: "3.0 TiB",
            2048 * 1024**4: "2048.0 TiB",
        },
    ),
    "durations": (
        table.duration,
        {
            0.0: "0.0 ms", 4.52e-5: "45.2 µs", 0.00099949: "999.5 µs", 0.0009996: "1.0 ms", 0.9994: "999.4 ms",
            0.9996: "1.00 s", 1234.5: "1,234.50 s",
        },
    ),
    "counts": (table.count, {0: "0", 999: "999", 1234567: "1,234,567"}),
    "differences": (lambda n: table.signed(n, table.size), {1536: "+1.5 KiB", -1536: "−1.5 KiB", 0: "-"}),
    "shares": (lambda whole: table.share(1, whole), {8: "12.5 %", 0: "-"}),
}  # fmt: skip


@pytest.mark.parametrize(("write", "expected"), WRITTEN.values(), ids=WRITTEN)
def test_numbers_are_written_in_the_unit_that_keeps_them_short(write: Any, expected: dict[float, str]) -> None:
    assert {number: write(number) for number in expected} == expected


@pytest.mark.parametrize(("parts", "beside"), [((FRUIT,), 0), ((FRUIT, "x"), 0), ((FRUIT, FRUIT, LIST), 2)])
def test_parts_are_apart_in_text_and_several_tables_side_by_side_in_html(parts: tuple[Part, ...], beside: int) -> None:
    shown = Show((*parts, "1 < 2"))
    assert str(shown) == repr(shown) == "\n\n".join([*map(str, parts), "1 < 2"])
    html = shown._repr_html_()
    assert html.count("inline-block") == beside
    assert "1 &lt; 2" in html
    assert (LIST in parts) == ("<li>a &lt;b&gt;</li>" in html)
    assert html.count("<table") == sum(isinstance(part, Table) for part in parts)
    assert html.count("<tfoot>") == html.count("<table")
