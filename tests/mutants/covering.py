"""Which tests run which lines, and which errors none raises: the suite runs once under ``coverage``."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from tests.mutants.faults import Fault

__all__ = ["Covering", "cover", "present_tests", "unreached"]

_DATA, _SECONDS = "coverage.sqlite", "seconds.json"


def cover(root: Path, folder: Path, arguments: Iterable[str]) -> int:
    """Run the suite under coverage, and write to ``folder`` what ``Covering`` reads.

    Arguments:
        root: the root of the repository.
        folder: the folder of all that is measured.
        arguments: further arguments of pytest.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "coveragerc").write_text("[run]\nbranch = true\nsource = funcshard\nconcurrency = thread\n")
    environment = os.environ | {
        "COVERAGE_FILE": str(folder / _DATA),
        "FUNCSHARD_TEST_SECONDS": str(folder / _SECONDS),
    }
    coverage = ["--cov=funcshard", f"--cov-config={folder / 'coveragerc'}", "--cov-context=test", "--cov-report=term"]
    plugins = ["-p", "tests.mutants.timing", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal", *plugins, *coverage, *arguments]
    return subprocess.run(command, cwd=root, env=environment, check=False).returncode


def present_tests(root: Path) -> set[str]:
    """Return the names of all tests that the suite has now."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


class Covering:
    """The tests that run a line, and how long they take.

    Tests that came after the coverage was measured count as tests of their wing that take a second.

    Arguments:
        root: the root of the repository.
        folder: the folder that ``cover`` wrote to.
        present: the tests that the suite has now.
    """

    def __init__(self, root: Path, folder: Path, present: Set[str]) -> None:
        import coverage

        self._root, self._data = root, coverage.CoverageData(basename=str(folder / _DATA))
        self._data.read()
        measured = json.loads((folder / _SECONDS).read_text())
        self.seconds: dict[str, float] = dict.fromkeys(present, 1.0) | measured["seconds"]
        self._present, self._new = present, present - measured["seconds"].keys()
        self.slow = set(measured["slow"])

    def tests_of(self, fault: Fault, lines: Iterable[int], budget: float, *, fast: bool) -> list[str]:
        """Return the tests that run some lines: those of the file first, then of the wing, by time.

        Tests whose lines run in other processes leave no context. So lines without a test have all
        tests of their wing.

        Arguments:
            fault: the fault.
            lines: the lines that it changes.
            budget: how many seconds the tests may take together.
            fast: whether to leave out the tests that are marked slow.
        """
        by_line = self._data.contexts_by_lineno(str(self._root / fault.file))
        contexts = {context.partition("|")[0] for line in lines for context in by_line.get(line, ())} - {""}
        wing = f"tests/{fault.file.split('/')[1]}/"
        known = self._present - (self.slow if fast else set())
        tests = [*contexts & known] or [test for test in known - self._new if test.startswith(wing)]
        tests += [test for test in self._new if test.startswith(wing)]
        stem = f"{wing}test_{Path(fault.file).stem}"  # test files share the stem of the file that they test
        tests.sort(key=lambda test: (not test.startswith(stem), not test.startswith(wing), self.seconds[test]))
        chosen = [test for test in known if fault.first_test and test.startswith(fault.first_test)]
        total = sum(self.seconds[test] for test in chosen)
        for test in (test for test in tests if test not in chosen):
            total += self.seconds[test]
            if chosen and total > budget:
                break
            chosen.append(test)
        return chosen


def unreached(root: Path, folder: Path) -> Iterator[str]:
    """Yield each ``raise`` of an error with a text that no test runs: file, line and statement.

    Lines that run in other processes leave no trace, so a few of these have a test after all.

    Arguments:
        root: the root of the repository.
        folder: the folder that ``cover`` wrote to.
    """
    import coverage

    data = coverage.CoverageData(basename=str(folder / _DATA))
    data.read()
    for path in sorted((root / "funcshard").rglob("*.py")):
        reached = set(data.lines(str(path)) or ())
        for node in ast.walk(ast.parse(path.read_text())):
            has_text = isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args
            if has_text and reached.isdisjoint(range(node.lineno, (node.end_lineno or node.lineno) + 1)):
                yield f"{path.relative_to(root)}:{node.lineno}: {ast.unparse(node)}"
