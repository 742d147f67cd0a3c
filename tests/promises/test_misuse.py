"""The table of misuse: each row raises its error, and a row with another outcome fails."""

import importlib
import shutil
from pathlib import Path

import pytest

from tests import misuse
from tests.misuse import Case, check

FILES = sorted(path.stem for path in Path(misuse.__file__).parent.glob("*.py") if path.stem != "__init__")
TABLES = {name: importlib.import_module(f"tests.misuse.{name}") for name in FILES}
CASES = [Case(*row) for table in TABLES.values() for row in table.CASES]


def is_slow(case):
    """Return whether a case records a graph, or computes on four ranks."""
    return "trace" in case.of or "passes" in case.of or case.worlds == misuse.EVERYWHERE


@pytest.fixture(scope="module", autouse=True)
def _folder():
    yield
    shutil.rmtree(TABLES["checkpoints"].FOLDER, ignore_errors=True)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * is_slow(case)) for case in CASES], ids=str)
def test_outcome(case):
    check(case)


def test_each_message_of_the_page_has_a_program_that_raises_it():
    documented = TABLES["documented"]
    messages = [words for _, words in documented.MESSAGES]
    assert messages == [*documented.PROGRAMS]
    assert len(messages) >= 80  # as the changelog says


def fails(mesh):
    raise ValueError(f"on rank {mesh.rank}: choose another path")


@pytest.mark.parametrize(
    ("error", "program", "words"),
    [
        (None, fails, "on rank 0: choose another path"),
        (ValueError("another path"), lambda: 1, "it raised nothing"),
        (ValueError("another path"), lambda mesh: fails(mesh) if mesh.rank == 0 else 1, "rank 1 raised nothing"),
        (ValueError("another plan"), fails, "rank 0 raised ValueError: on rank 0: choose another path"),
        (ValueError("path…another"), fails, "rank 0 raised ValueError: on rank 0: choose another path"),
        (TypeError("choose…path"), fails, "rank 0 raised ValueError"),
    ],
)
def test_a_row_with_another_outcome_fails(error, program, words):
    with pytest.raises(AssertionError) as raised:
        check(Case("shard", "a mistake", error, program))
    assert words in str(raised.value)
