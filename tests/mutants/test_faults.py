"""Planted faults are data, and have their places in the library's code."""

from __future__ import annotations

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tests.mutants.__main__ import FAULTS, REVERTS, ROOT, has_gone
from tests.mutants.covering import unreached
from tests.mutants.faults import Fault, load, places, planted, with_fault
from tests.mutants.planting import draw, redraw
from tests.mutants.running import Copy, Result

_CODE = """class A:
    def f(self, x: int) -> int:
        y = x + 1  # é
        if y > 1 and x > 1:
            self.y = y
            print(y)
        return x + 1
"""


def _fault(before: str, after: str, number: int = 0) -> Fault:
    return Fault(file="a.py", function="A.f", kind="", before=before, after=after, number=number)


@pytest.mark.slow  # all files of the library are parsed
def test_every_fault_has_its_place_in_the_library_and_changes_it() -> None:
    by_file: defaultdict[str, list[Fault]] = defaultdict(list)
    for fault in (*load(FAULTS), *load(REVERTS)):
        by_file[fault.file].append(fault)
    gone = []
    for file, faults in by_file.items():
        text = (ROOT / file).read_text() if (ROOT / file).exists() else ""
        found = places(text, faults)
        gone += [fault.title for fault in faults if fault not in found]
        for fault, site in found.items():
            changed, _ = with_fault(text, fault, site)
            assert changed != text, fault.title
            compile(changed, file, "exec", dont_inherit=True)
    assert not gone, f"their code has changed: `python -m tests.mutants draw --missing` draws others; edit {REVERTS.name}"


@pytest.mark.nightly  # it starts pytest
def test_a_test_that_was_renamed_since_the_coverage_catches_nothing(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.py").write_text(_CODE)
    (root / "test_a.py").write_text("import a\n\n\ndef test_new():\n    assert a.A().f(0) > -2\n")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "."], cwd=root, check=True)
    copy, tests = Copy(root, tmp_path / "copy"), ["test_a.py::test_old[1]", "test_gone.py::test_old", "test_a.py::test_new"]
    assert copy.run(_fault("x + 1", "x - 1", 1), tests, 60).outcome == "survived"
    assert copy.run(_fault("x + 1", "x - 9", 1), tests, 60)[:2] == ("caught", "test_a.py::test_new")
    copy.close()


def test_no_two_faults_are_the_same() -> None:
    faults = [*load(FAULTS), *load(REVERTS)]
    assert len({*faults}) == len(faults)


CHANGES = {
    "the first of equal texts": (_fault("x + 1", "x - 1"), "y = x + 1", "y = x - 1"),
    "another one": (_fault("x + 1", "x - 1", 1), "return x + 1", "return x - 1"),
    "several lines": (
        _fault("print(y)", "for _ in range(2):\n    print(y)"), "print(y)",
        "for _ in range(2):\n                print(y)",
    ),
    "a number that is not there": (_fault("x + 1", "x - 1", 2), "", ""),
    "a text that is not there": (_fault("x + 2", "x - 2"), "", ""),
}  # fmt: skip


@pytest.mark.parametrize(("fault", "before", "after"), CHANGES.values(), ids=CHANGES)
def test_a_fault_changes_its_text_unless_its_place_has_gone(fault: Fault, before: str, after: str) -> None:
    found = planted(_CODE, fault)
    if not before:
        assert found is None
        return
    changed, lines = found or ("", range(0))
    assert changed == _CODE.replace(before, after)
    assert before in _CODE.splitlines()[lines[0] - 1]
    ast.parse(changed)


def _library(root: Path) -> Path:
    for wing in ("core", "plan"):
        (root / "funcshard" / wing).mkdir(parents=True)
        (root / "funcshard" / wing / "a.py").write_text(_CODE)
    return root


def test_only_faults_whose_place_has_gone_are_drawn_again(tmp_path) -> None:
    root = _library(tmp_path)
    faults = draw(root, 8, seed=3)
    assert faults == draw(root, 8, seed=3) != draw(root, 8, seed=4)
    assert redraw(root, faults, seed=5) == faults
    (root / "funcshard" / "core" / "a.py").write_text(_CODE.replace("def f", "def g"))
    again = redraw(root, faults, seed=5)
    assert again == redraw(root, faults, seed=5)
    for before, after in zip(faults, again, strict=True):
        assert (after == before) == before.file.startswith("funcshard/plan/")
        assert (after.file, after.kind) == (before.file, before.kind)
        assert planted((root / after.file).read_text(), after) is not None
    assert len({*again}) == len(again)


def test_errors_with_a_text_that_no_test_raises_are_told(tmp_path: Path) -> None:
    coverage = pytest.importorskip("coverage")
    path = tmp_path / "funcshard" / "a.py"
    path.parent.mkdir()
    path.write_text('raise ValueError(\n    "a")\nraise TypeError("b")\nraise KeyError\nraise\n')
    data = coverage.CoverageData(basename=str(tmp_path / "coverage.sqlite"))
    data.add_lines({str(path): [2]})
    data.write()
    assert list(unreached(tmp_path, tmp_path)) == ["funcshard/a.py:3: raise TypeError('b')"]


@pytest.mark.parametrize(
    ("result", "gone"),
    [
        pytest.param(Result("caught", "tests/a.py::test_x[1", 1.0, 1), False, id="its name was cut at a hyphen"),
        pytest.param(Result("caught", "tests/a.py::test_z", 1.0, 1), True, id="its test is not there"),
        pytest.param(Result("caught", "the limit of 60 s", 1.0, 1), False, id="no test is named"),
        pytest.param(Result("survived", "", 1.0, 1), False, id="survived"),
    ],
)
def test_a_fault_runs_again_if_the_test_that_caught_it_has_gone(result: Result, gone: bool) -> None:
    assert has_gone(result, {"tests/a.py::test_x[1 - 2]", "tests/a.py::test_y"}) == gone
