"""The table of misuse: each row has its outcome, and a row with another outcome fails."""

import importlib
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import funcshard as fs
from funcshard.plan import wrap
from tests import misuse
from tests.misuse import Case, Error, Table, check, error, right, untold
from tests.misuse.page import PAGE, page

FILES = sorted(
    path.stem for path in Path(misuse.__file__).parent.glob("*.py") if path.stem not in ("__init__", "__main__", "page")
)
TABLES = {name: importlib.import_module(f"tests.misuse.{name}") for name in FILES}
CASES = [case for table in TABLES.values() for case in table.CASES.cases]
NAMES = [
    *fs.__all__,
    *(f"wrap.{name}" for name in wrap.__all__),
    *(f"linalg.{name}" for name in fs.linalg.__all__),
    *(f"passes.{name}" for name in fs.passes.__all__),
    "testing.delayed",
    "testing.same_on_every_mesh",
]


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


def test_rows_are_named_once_for_public_names_only():
    assert {name: number for name, number in Counter(map(str, CASES)).items() if number > 1} == {}
    assert {name for case in CASES for name in case.of} <= set(NAMES)


def test_the_page_lists_the_documented_rows():
    text = PAGE.read_text()
    assert text == page(text), "docs/mistakes.md is stale: run python -m tests.misuse"
    documented = TABLES["documented"].CASES.cases
    assert all(case.section and case.cure for case in documented)
    assert len({case.outcome.words for case in documented}) == len(documented) >= 80  # as the changelog says


SENTENCE = "docs/mistakes.md", "A shard is a plain 1-D tensor."


def fails(mesh):
    raise ValueError(f"on rank {mesh.rank}: choose another path")


@pytest.mark.parametrize(
    ("outcome", "program", "words"),
    [
        (right(1), lambda mesh: 2, "found 2, meant 1"),
        (right(1), fails, "ValueError: on rank 0"),
        (right(torch.ones(2)), lambda mesh: torch.ones(2) + 1e-3 * mesh.rank, "{1: "),
        (error(ValueError, "another path"), lambda: 1, "rank 0 raised nothing"),
        (error(ValueError, "another path"), lambda mesh: fails(mesh) if mesh.rank == 0 else 1, "rank 1 raised nothing"),
        (error(ValueError, "another plan"), fails, "rank 0 raised ValueError: on rank 0: choose another path"),
        (error(ValueError, "path…another"), fails, "rank 0 raised ValueError: on rank 0: choose another path"),
        (error(TypeError, "choose…path"), fails, "rank 0 raised ValueError"),
        (untold(*SENTENCE, meant=1), fails, "ValueError: on rank 0"),
        (untold(*SENTENCE, meant=1), lambda mesh: 1, "the result is right, so this is no mistake"),
        (untold("docs/mistakes.md", "A shard knows all.", meant=1), lambda mesh: 2, "does not say: A shard knows all."),
    ],
)
def test_a_row_with_another_outcome_fails(outcome, program, words):
    with pytest.raises(AssertionError) as raised:
        check(Case(("shard",), "a mistake", outcome, program, worlds=(2,)))
    assert words in str(raised.value)


def test_a_row_says_where_it_runs():
    table = Table()
    table += [
        ("shard", "a", ValueError("x"), lambda s: 0),
        ("shard", "b", right(0), lambda s: 0, (3,)),
        ("shard", "c", right(0), lambda: 0),
    ]
    assert [case.worlds for case in table.cases] == [misuse.PAIR, (3,), (1,)]
    assert table.cases[0].outcome == Error(ValueError, ("x",))
