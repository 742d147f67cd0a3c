"""Cells of tables break between words and parts of names, and not before a unit."""

import pytest

pytest.importorskip("mkdocs")
from website.hooks import on_page_content


@pytest.mark.parametrize(
    ("html", "shown"),
    [
        pytest.param("<td><code>fs.make_plan</code></td>", "<td><code>fs.<wbr>make_<wbr>plan</code></td>", id="a name"),
        pytest.param("<td><code>f(x, y=1)</code></td>", "<td><code>f(<wbr>x, y=<wbr>1)</code></td>", id="a call"),
        pytest.param("<td>1.2 MiB</td>", "<td>1.2\N{NO-BREAK SPACE}MiB</td>", id="a unit"),
        pytest.param("<td>4.3 (2.9) %</td>", "<td>4.3 (2.9) %</td>", id="no number"),
        pytest.param("<td>2 steps</td>", "<td>2 steps</td>", id="no unit"),
        pytest.param("<p><code>a.b</code> 2 s</p>", "<p><code>a.b</code> 2 s</p>", id="outside tables"),
    ],
)
def test_cells_break_where_one_can_read_on(html, shown):
    assert on_page_content(html) == shown
