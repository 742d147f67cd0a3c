"""The stored figures are those that the command draws, and can be read on a phone."""

import re
from xml.etree import ElementTree

import pytest

from website.figures import FIGURES, PICTURES, WIDTH


@pytest.mark.parametrize("name", FIGURES)
def test_a_stored_figure_is_drawn_by_the_command(name):
    assert (PICTURES / f"{name}.svg").read_text() == FIGURES[name]().svg(), "run python -m website.figures"


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_lies_within_its_frame_with_large_text(name):
    drawing = FIGURES[name]()
    text = drawing.svg()
    ElementTree.fromstring(text)
    assert all(int(size) >= 14 for size in re.findall(r"(\d+)px", text))
    for x, y, width, height in re.findall(r'<rect x="(\S+)" y="(\S+)" width="(\S+)" height="(\S+)"', text):
        assert float(x) >= 0
        assert float(y) >= 0
        assert float(x) + float(width) <= WIDTH
        assert float(y) + float(height) <= drawing.height
    for x, words in re.findall(r'<text x="(\S+)" y="\S+" class="[^"]*">([^<]*)<', text):
        assert 0 <= float(x) <= WIDTH, words
