"""The tables of misuse: every public name is misused, and a case of a wrong outcome fails."""

import importlib
from collections import Counter
from pathlib import Path

import pytest
import torch

import funcshard as fs
from funcshard.plan import wrap
from tests.misuse import Case, check, error, right, untold

TABLES = sorted(path.stem for path in Path(__file__).parent.glob("test_misuse_*.py"))
CASES = [case for table in TABLES for case in importlib.import_module(f"tests.promises.{table}").CASES.cases]
MISUSED = Counter(name for case in CASES for name in case.of)

# Why fewer than three mistakes can be made with these names.
FEWER = {
    "Event": "the values that record_events and predict_events return; nothing takes one",
    "Owners": "the value that assign_owners returns; nothing takes one",
    "passes": "a module, whose passes are names of their own",
    "wrap": "a module, whose policies are names of their own",
    "wrap.Policy": "a type, for annotations",
}
NAMES = [
    *fs.__all__,
    *(f"wrap.{name}" for name in wrap.__all__),
    *(f"passes.{name}" for name in fs.passes.__all__),
    "testing.delayed",
]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in FEWER])
def test_each_public_name_is_misused_in_three_ways(name):
    assert MISUSED[name] >= 3, [str(case) for case in CASES if name in case.of]


def test_cases_are_many_and_named_once_for_public_names_only():
    assert len(CASES) >= 120
    assert {name: number for name, number in Counter(map(str, CASES)).items() if number > 1} == {}
    assert MISUSED.keys() <= set(NAMES)
    assert FEWER.keys() <= set(NAMES)


SENTENCE = "docs/mistakes.md", "A shard is a plain 1-D tensor."


def fails(mesh):
    raise ValueError(f"on rank {mesh.rank}: choose another path")


@pytest.mark.parametrize(
    ("outcome", "program", "words"),
    [
        (right(1), lambda mesh: 2, "found 2, meant 1"),
        (right(1), fails, "ValueError: on rank 0"),
        (right(torch.ones(2)), lambda mesh: torch.ones(2) + 1e-3 * mesh.rank, "{1: "),
        (error(ValueError, "another path"), lambda mesh: 1, "rank 0 raised nothing"),
        (error(ValueError, "another path"), lambda mesh: fails(mesh) if mesh.rank == 0 else 1, "rank 1 raised nothing"),
        (error(ValueError, "another plan"), fails, "rank 0 raised ValueError: on rank 0: choose another path"),
        (error(TypeError, "another path"), fails, "rank 0 raised ValueError"),
        (untold(*SENTENCE, meant=1), fails, "ValueError: on rank 0"),
        (untold(*SENTENCE, meant=1), lambda mesh: 1, "the result is right, so this is no mistake"),
        (untold("docs/mistakes.md", "A shard knows all.", meant=1), lambda mesh: 2, "does not say: A shard knows all."),
    ],
)
def test_a_case_with_another_outcome_fails(outcome, program, words):
    with pytest.raises(AssertionError) as raised:
        check(Case(("shard",), "a mistake", outcome, program, worlds=(2,)))
    assert words in str(raised.value)
