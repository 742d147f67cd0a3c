"""Run the tests that can catch a fault, in a copy of the repository that has the fault."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutants.faults import Fault, planted

__all__ = ["Copy", "Result"]

_LONGEST_TEST = 60.0  # seconds; a fault may make a test hang
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - |$)", re.MULTILINE)
_NOT_FOUND = re.compile(r"^ERROR: (?:file or directory )?not found: (\S.*)$", re.MULTILINE)


class Result(NamedTuple):
    """What became of a fault.

    Attributes:
        outcome: ``"caught"``, ``"survived"``, or ``"gone"`` if its place is not there.
        test: the test that caught it; the end of the output if no test can be named.
        seconds: how long it took.
        tests: how many tests could run.
    """

    outcome: str
    test: str
    seconds: float
    tests: int


class Copy:
    """A copy of the library for one worker, in which faults are planted one after another.

    Arguments:
        root: the root of the repository.
        folder: where the copy lies.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        files = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=True).stdout.decode()
        for name in filter(None, files.split("\0")):
            if (root / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        self.folder, self._moment = folder, time.time()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"}
        self._warm = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("warm.py"))],
            cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, fault: Fault, tests: Sequence[str], limit: float) -> Result:
        """Plant a fault, run tests until one fails, and take the fault out again.

        Arguments:
            fault: the fault.
            tests: the tests.
            limit: seconds for all tests together; a fault that takes longer is caught.
        """
        path = self.folder / fault.file
        original = path.read_text()
        changed = planted(original, fault)
        if changed is None:
            return Result("gone", "", 0.0, 0)
        began = time.monotonic()
        self._write(path, changed[0])
        try:
            outcome, test = self._pytest(tests, limit)
        finally:
            self._write(path, original)
        return Result(outcome, test, round(time.monotonic() - began, 1), len(tests))

    def close(self) -> None:
        """End the process that runs the tests."""
        self._warm.communicate()

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # Why: Python tells whether its compiled file is old by seconds and size, and both may be equal.
        self._moment += 1
        os.utime(path, (self._moment, self._moment))

    def _pytest(self, tests: Sequence[str], limit: float) -> tuple[str, str]:
        listed, output_file = self.folder / "tests-to-run.txt", self.folder / "output.txt"
        listed.write_text("\n".join(tests))
        options = ["-q", "-x", "-p", "no:cacheprovider", "--timeout", str(_LONGEST_TEST), "--no-header", "--tb=no"]
        request = [str(self.folder), [*options, f"@{listed}"], str(output_file), limit]
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.write(json.dumps(request) + "\n")
        self._warm.stdin.flush()
        code = json.loads(self._warm.stdout.readline())
        if code is None:
            return "caught", f"the limit of {limit:.0f} s"
        if code == 0:
            return "survived", ""
        output = output_file.read_text()
        # Of a test that was renamed since the coverage was measured: it catches nothing.
        renamed = {name.removeprefix(f"{self.folder}/").partition("[")[0] for name in _NOT_FOUND.findall(output)}
        left = [test for test in tests if test.partition("[")[0] not in renamed]
        if len(left) < len(tests):
            return self._pytest(left, limit) if left else ("survived", "")
        match = _FAILED.search(output)
        return "caught", match[1] if match else output[-300:]
