"""The stored figures are those that the command draws, and can be read on a phone."""

import pytest

from website.figures import FIGURES, PICTURES


@pytest.mark.parametrize("name", FIGURES)
def test_a_stored_figure_is_drawn_by_the_command(name):
    assert (PICTURES / f"{name}.svg").read_text() == FIGURES[name]().svg(), "run python -m website.figures"
