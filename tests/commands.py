"""Commands for tests, forked from the process that the ranks of ``run_ranks`` are forked from.

A command in a new interpreter imports torch, Dynamo and this library, for three seconds. A forked
one has its own session, environment, output and signal handlers all the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ranks import forking

__all__ = ["Command"]


class Command:
    """A running ``python -m funcshard ...`` or ``python -c ...``; ``out`` and ``err`` are the files of its outputs.

    Arguments:
        words: the words after ``python``.
        env: the environment of the command.
    """

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        self.out, self.err = (Path(self._folder.name, name) for name in ("out", "err"))
        for file in (self.out, self.err):
            file.touch()
        self._process: Any = forking().Process(target=_run, args=(list(words), dict(env), [self.out, self.err]))
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return both outputs when the command has ended."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("the command", timeout or 0.0)
        outputs = self.out.read_text(), self.err.read_text()
        self._folder.cleanup()
        return outputs


def _run(words: list[str], env: dict[str, str], files: list[Path]) -> None:
    os.setsid()
    for number, path in enumerate([os.devnull, *files]):
        file = os.open(path, os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY)
        os.dup2(file, number)
        os.close(file)
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(env)
    warnings.resetwarnings()
    if words[0] == "-c":
        exec(words[1], {"__name__": "__main__"})
    else:
        assert words[:2] == ["-m", "funcshard"], "other modules need an interpreter of their own"
        from funcshard.__main__ import main

        sys.exit(main(words[2:]))
