"""Objects that show themselves: the text and the HTML have the same parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from funcshard._utils import Bullets, Part, Shown, Table

FRUIT = Table("Fruit", ["kind", "n"], [["fig", "2"]], ["all", "2"])
LIST = Bullets("Sorts", ["a <b>", "c"])


@dataclass(frozen=True, slots=True, repr=False)
class Show(Shown):
    parts: tuple[Part, ...]

    def _parts(self) -> Iterable[Part]:
        return self.parts


def test_an_empty_line_is_between_the_parts_of_the_text() -> None:
    shown = Show(("Few.", FRUIT, LIST))
    assert str(shown) == repr(shown)
    first, table, bullets = str(shown).split("\n\n")
    assert first == "Few."
    assert table.splitlines()[0] == "Fruit"
    assert table.splitlines()[-1].split() == ["all", "2"]
    assert bullets.splitlines() == ["Sorts", "  - a <b>", "  - c"]


@pytest.mark.parametrize(("parts", "beside"), [((FRUIT,), 0), ((FRUIT, "x"), 0), ((FRUIT, FRUIT, LIST), 2)])
def test_tables_stand_side_by_side_in_html_if_there_are_several(parts: tuple[Part, ...], beside: int) -> None:
    html = Show(parts)._repr_html_()
    assert html.count("inline-block") == beside
    assert html.count("<table") == sum(isinstance(part, Table) for part in parts)
    assert html.count("<tfoot>") == html.count("<table")


def test_html_is_escaped_in_sentences_and_lists() -> None:
    html = Show(("1 < 2", LIST))._repr_html_()
    assert html == "<p>1 &lt; 2</p><p><b>Sorts</b></p><ul><li>a &lt;b&gt;</li><li>c</li></ul>"
