"""Commands for tests, forked from the process that the ranks of ``run_ranks`` are forked from.

A command in a new interpreter imports torch, Dynamo and this library, for three seconds. A forked
one has its own session, environment, output and signal handlers all the same.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.ranks import forking

__all__ = ["Command"]

_NAMES = ("out", "err")


class Command:
    """A running ``python -m funcshard ...`` or ``python -c ...``; the used part of ``subprocess.Popen``.

    Arguments:
        words: the words after ``python``.
        env: the environment of the command.
    """

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        paths = [str(Path(self._folder.name, name)) for name in _NAMES]
        for path in paths:
            os.mkfifo(path)
        self._process: Any = forking().Process(target=_run, args=(list(words), dict(env), paths))
        self._process.start()
        self.pid: int = self._process.pid
        # Each waits until the command opens the other end.
        self.stdout, self.stderr = (open(path) for path in paths)  # noqa: SIM115  # communicate closes them

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return the rest of both outputs when the command has ended."""
        found = dict.fromkeys(_NAMES, "")

        def read(name: str, file: IO[str]) -> None:
            with file:
                found[name] = file.read()

        readers = [
            threading.Thread(target=read, args=each, daemon=True)
            for each in zip(_NAMES, (self.stdout, self.stderr), strict=True)
        ]
        for reader in readers:
            reader.start()
        for each in (*readers, self._process):
            each.join(timeout)
            if each.is_alive():
                raise subprocess.TimeoutExpired("the command", timeout or 0.0)
        self._folder.cleanup()
        return found["out"], found["err"]


def _run(words: list[str], env: dict[str, str], paths: list[str]) -> None:
    os.setsid()
    for number, path in enumerate([os.devnull, *paths]):
        file = os.open(path, os.O_WRONLY if number else os.O_RDONLY)
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
