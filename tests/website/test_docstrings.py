"""Docstrings of ours in the words of griffe."""

import pytest

griffe = pytest.importorskip("griffe")
from website.docstrings import as_markdown  # noqa: E402


@pytest.mark.parametrize(
    ("text", "read"),
    [
        pytest.param("Example:\n    >>> 1\n    1", "Examples:\n    >>> 1\n    1", id="an example"),
        pytest.param("like this::\n\n    a", "like this:\n\n    a", id="a block"),
        pytest.param("Source: ``torch``.", "*Source:* ``torch``.", id="a source"),
        pytest.param("Returns:\n    ``(a, b)``: two", "Returns:\n    (a, b): two", id="a result"),
        pytest.param("Returns:\n    A ``{a: b}``: one", "Returns:\n    : A ``{a: b}``: one", id="a result in words"),
        pytest.param("Returns:\n    ``{a: b}``. One", "Returns:\n    : ``{a: b}``. One", id="a result with a colon"),
        pytest.param("    one, two: words", "    one: words\n    two: words", id="attributes that share a line"),
        pytest.param("    a, b, c: x: y", "    a: x: y\n    b: x: y\n    c: x: y", id="three of them"),
        pytest.param("Return one, two: three.", "Return one, two: three.", id="a sentence"),
    ],
)
def test_a_docstring_is_read(text, read):
    assert as_markdown(text) == read
