"""A process that has imported torch, and forks one that runs pytest for each line that it reads.

A line is JSON: a folder, the arguments of pytest, the file of its output, and how many seconds it may take.
The answer is the exit code, or ``null`` if the time was over. Importing takes ten times as long as the tests.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence

# Neither the library, which differs from fork to fork, nor what pytest rewrites.
_IMPORTED = ("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "transformers", "pytest")


def run(folder: str, arguments: Sequence[str], output: str) -> int:
    """Run pytest in this process as a new interpreter in ``folder`` would."""
    os.setsid()
    os.chdir(folder)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), *[os.open(output, os.O_WRONLY | os.O_CREAT)] * 2)):
        os.dup2(file, number)
    os.truncate(output, 0)
    os.environ["PYTHONPATH"] = folder
    sys.path.insert(0, folder)
    sys.argv, sys.dont_write_bytecode = ["pytest", *arguments], True
    return int(importlib.import_module("pytest").main(["-W", "ignore::pytest.PytestAssertRewriteWarning", *arguments]))


def main() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        folder, arguments, output, limit = json.loads(line)
        pid, code, end = os.fork(), None, time.monotonic() + limit
        if not pid:
            exit_code = 3
            try:
                exit_code = run(folder, arguments, output)
            finally:
                sys.stdout.flush()
                os._exit(exit_code)
        while code is None and time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if done else None
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # and what it has started
        if code is None:
            os.waitpid(pid, 0)
        print(json.dumps(code), flush=True)


if __name__ == "__main__":
    main()
