"""docs/dev/upstream.md lists every upstream test, and the tests of this library that it names exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "dev" / "upstream.md").read_text()

# Of each file of PyTorch's tests whose every test has a row: the number of rows.
COUNTS = {
    "test_fsdp_core.py": 14,
    "test_fsdp_backward_prefetch.py": 1,
    "test_wrap.py": 21,
    "test_fsdp_mixed_precision.py": 22,
    "test_dynamo_distributed.py": 34,
}


def rows_of(page):
    """Return ``{upstream file: {upstream test: text of the second column}}``."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    row = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)
    return {section.split()[0]: dict(row.findall(section)) for section in sections}


def names_in(file):
    """Return the names of the tests of a file, without running the file."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_upstream_test_has_a_row_with_a_test_or_is_open_with_what_is_missing():
    rows = rows_of(PAGE)
    assert {file: len(rows[file]) for file in COUNTS} == COUNTS
    texts = {name: text for of_file in rows.values() for name, text in of_file.items()}
    assert [name for name, text in texts.items() if "::" not in text and "**open**: " not in text] == []


def test_the_tests_that_rows_name_exist():
    named = set(re.findall(r"`((?:\w+/)*test_\w+\.py)::(\w+)`", PAGE))
    known = {file: names_in(ROOT / "tests" / file) for file, _ in named}
    assert sorted((file, name) for file, name in named if name not in known[file]) == []


def test_a_row_is_read_with_its_name_and_the_text_beside_it():
    page = "## a.py\n\n| upstream | here |\n|---|---|\n| `test_x` | `test_y.py::test_z`; **open**: w |\n"
    assert rows_of(page) == {"a.py": {"test_x": "`test_y.py::test_z`; **open**: w"}}
