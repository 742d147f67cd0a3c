"""A stored notebook becomes a page with its outputs."""

import base64
import json

from website.notebooks import notebook_page

CELLS = [
    {"cell_type": "markdown", "source": ["# A title\n", "See [plans](../docs/design.md)."]},
    {
        "cell_type": "code",
        "source": "print('<b>')",
        "outputs": [
            {"output_type": "stream", "text": ["\x1b[31m<b>\x1b[0m\n", "\n", "two\n"]},
            {"output_type": "stream", "text": "three\n"},
            {"output_type": "display_data", "data": {"image/png": base64.b64encode(b"png").decode()}},
            {"output_type": "execute_result", "data": {"text/html": "<table>\n  <tr>\n</table>", "text/plain": "no"}},
        ],
    },
]


def test_cells_and_outputs_stand_in_order(tmp_path):
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": CELLS}))
    page, pictures = notebook_page(tmp_path / "one.ipynb", "pictures")
    assert page.startswith("# A title\n\n*This page shows stored outputs.")
    assert "[download the notebook](one.ipynb)" in page
    assert "See [plans](../design.md).\n\n```python\nprint('<b>')\n```\n\n" in page
    assert '<pre class="cell-output">&lt;b&gt;&#10;&#10;two&#10;three</pre>' in page
    assert "![output of the cell above](pictures/one-0.png)" in page
    assert '<div class="cell-output"><table> <tr> </table></div>' in page
    assert pictures == {"one-0.png": b"png"}


def test_columns_do_not_wrap(tmp_path):
    cells = [{"cell_type": "code", "source": "", "outputs": [{"output_type": "stream", "text": "a    1\nb    2\n"}]}]
    (tmp_path / "one.ipynb").write_text(json.dumps({"cells": [CELLS[0], *cells]}))
    assert '<pre class="cell-output columns">a    1&#10;b    2</pre>' in notebook_page(tmp_path / "one.ipynb", "")[0]


def test_a_wide_picture_scrolls_by_itself(tmp_path):
    pngs = [b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + width.to_bytes(4, "big") for width in (720, 721)]
    outputs = [{"output_type": "display_data", "data": {"image/png": base64.b64encode(png).decode()}} for png in pngs]
    (tmp_path / "one.ipynb").write_text(
        json.dumps({"cells": [CELLS[0], {"cell_type": "code", "source": "", "outputs": outputs}]})
    )
    narrow, wide = (f"![output of the cell above](pictures/one-{number}.png)" for number in range(2))
    page, _ = notebook_page(tmp_path / "one.ipynb", "pictures")
    assert f'{narrow}\n\n<div class="wide" markdown>\n\n{wide}\n\n</div>\n' in page
