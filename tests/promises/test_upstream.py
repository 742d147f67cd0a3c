"""docs/dev/upstream.md lists every upstream test, and the tests of this library that it names exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "dev" / "upstream.md").read_text()

# How many tests upstream's files have.
UPSTREAM = {
    "test_fsdp_core.py": 14,
    "test_fsdp_backward_prefetch.py": 1,
    "test_wrap.py": 21,
    "test_fsdp_mixed_precision.py": 22,
    "test_dynamo_distributed.py": 34,
}


def rows_of(page):
    """Return ``{upstream file: [(upstream test, text of the second column)]}``."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    row = re.compile(r"^\| `(\w+)` \| (.*) \|$", re.MULTILINE)
    return {section.split()[0]: row.findall(section) for section in sections}


ROWS = rows_of(PAGE)
NAMED = sorted(set(re.findall(r"`((?:\w+/)*test_\w+\.py)::(\w+)`", PAGE)))


def names_in(file):
    """Return the names of the tests of a file, without running the file."""
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_each_upstream_test_has_one_row():
    for file, number in UPSTREAM.items():
        assert len(dict(ROWS[file])) == len(ROWS[file]) == number


def test_a_row_names_tests_that_exist_or_is_open_with_what_is_missing():
    beside = {name: text for rows in ROWS.values() for name, text in rows}
    assert [name for name, text in beside.items() if "::" not in text and "**open**: " not in text] == []
    defined = {file: names_in(ROOT / "tests" / file) for file in dict(NAMED)}
    assert [f"{file}::{name}" for file, name in NAMED if name not in defined[file]] == []
