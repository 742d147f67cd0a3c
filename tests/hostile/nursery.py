"""Processes that are ranks: forked, bounded in time, and looked after when they have ended.

A campaign's round runs in a *nursery*: a process forked from one that has imported torch. All
processes that a round starts stay its descendants, also when their parents have been killed. So the
nursery can tell that none is left, and its end ends all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.comm.stores import until
from tests.hostile.blame import fault_of
from tests.hostile.campaign import slowness
from tests.ranks import forking, is_whole_dump

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="the campaign reads /proc and uses prctl")

_PR_SET_CHILD_SUBREAPER = 36


def in_nursery(fn: Callable[..., Any], *args: Any, limit: float) -> Any:
    """Return ``fn(*args)``, called in a new process whose descendants end with it.

    If it has not returned after ``limit`` seconds, this raises ``TimeoutError``, and if it raised,
    ``AssertionError`` with its traceback. Everything is pickled.
    """
    own, theirs = forking().Pipe()
    process: Any = forking().Process(target=_nurse, args=(theirs, fn, args))
    process.start()
    theirs.close()
    try:
        if not own.poll(limit * slowness()):
            raise TimeoutError(f"{fn.__qualname__} has not returned within {limit:g} s")
        kind, value = own.recv()
    except EOFError:
        process.join()
        raise AssertionError(f"the process of {fn.__qualname__} ended with exit code {process.exitcode}") from None
    finally:
        with contextlib.suppress(OSError):
            os.kill(process.pid, signal.SIGSTOP)  # it starts no process while its descendants are ended
        end_all(process.pid)
        process.kill()
        process.join()
        own.close()
    if kind == "skipped":
        pytest.skip(value)
    assert kind == "returned", value
    return value


def _nurse(connection: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.setsid()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        answer = ("returned", fn(*args))
    except pytest.skip.Exception as skipped:
        answer = ("skipped", str(skipped))
    except BaseException as error:
        answer = ("raised", "".join(traceback.format_exception(error)))
    connection.send(answer)


@dataclass(frozen=True, slots=True)
class Rank:
    """A process that ``spawn`` started."""

    pid: int
    log: Path  # of its output
    phases: int  # reads one byte for each call of ``enter`` in the process

    def wait_for_phase(self, seconds: float) -> bool:
        """Wait until the process has called ``enter`` once more; return whether it did."""
        if not select.select([self.phases], [], [], seconds * slowness())[0]:
            return False
        return bool(os.read(self.phases, 1))


@dataclass(frozen=True, slots=True)
class Ended:
    """How a rank has ended."""

    code: int  # the exit code, or minus the signal
    error: str  # the error that it raised, as ``Type: message``, or ""
    fault: str  # why that is no error of this library, or ""
    output: str  # what it printed


def spawn(fn: Callable[..., Any], *args: Any, log: Path, leave: Callable[[int], None] = os._exit) -> Rank:
    """Fork a process that calls ``fn(enter, *args)``; ``enter()`` tells that a phase begins.

    Its output goes to ``log``, and its error to a file beside it. ``leave`` ends it with an exit code.
    """
    reads, writes = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writes)
        return Rank(pid, log, reads)
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(reads)
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(file, number)
        os.close(file)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, 2, all_threads=True)

        def enter() -> None:
            with contextlib.suppress(BrokenPipeError):
                os.write(writes, b".")

        code = fn(enter, *args) or 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        traceback.print_exc()
        report = {"error": f"{type(error).__name__}: {error}", "fault": fault_of(error)}
        with contextlib.suppress(OSError):
            log.with_suffix(".error").write_text(json.dumps(report))
    leave(code)
    raise AssertionError("a process outlived its end")


def wait_all(ranks: Sequence[Rank], seconds: float) -> list[Ended]:
    """Wait until all ranks have ended, and return how; if some still run, raise with their stacks."""
    codes: dict[int, int] = {}
    end = time.monotonic() + seconds * slowness()
    while len(codes) < len(ranks) and time.monotonic() < end:
        for each in ranks:
            if each.pid not in codes:
                pid, status = os.waitpid(each.pid, os.WNOHANG)
                if pid:
                    codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    late = [number for number, each in enumerate(ranks) if each.pid not in codes]
    if late:
        for number in late:
            os.kill(ranks[number].pid, signal.SIGUSR1)
        until(lambda: all(is_whole_dump(ranks[number].log) for number in late), 5.0 * slowness())  # not of a stopped rank
        stacks = "\n".join(f"rank {number}:\n{ranks[number].log.read_text()[-3000:]}" for number in late)
        for number in late:
            os.kill(ranks[number].pid, signal.SIGKILL)
            os.waitpid(ranks[number].pid, 0)
        raise AssertionError(f"rank {late} hang: they have not ended within {seconds:g} s\n{stacks}")
    for each in ranks:
        os.close(each.phases)
    return [_ended(each, codes[each.pid]) for each in ranks]


def _ended(rank: Rank, code: int) -> Ended:
    output = rank.log.read_text(errors="replace") if rank.log.exists() else ""
    file = rank.log.with_suffix(".error")
    report = json.loads(file.read_text()) if file.exists() else {"error": "", "fault": ""}
    file.unlink(missing_ok=True)
    return Ended(code, report["error"], report["fault"], output)


def descendants(pid: int) -> list[int]:
    """Return the processes below ``pid``, children first."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found + [below for child in found for below in descendants(child)]


def end_all(pid: int) -> None:
    """Kill the descendants of a process."""
    for _ in range(20):  # a process may start another while this walks
        found = descendants(pid)
        for each in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        if pid == os.getpid():
            for each in found:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(each, 0)
        if not [each for each in found if _runs(each)]:
            return
        time.sleep(0.01)


def check_nothing_left(files_before: Sequence[str], meant: Sequence[int] = (), *, seconds: float = 5.0) -> None:
    """Raise unless this process has no child, and no other open file than before.

    Children that the round left on purpose, ``meant``, are ended here; others get ``seconds`` to end.
    """
    for pid in meant:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = [pid for pid in descendants(os.getpid()) if pid not in meant]
        if not left or time.monotonic() > end:
            break
        time.sleep(0.01)
    assert not left, f"processes are left: {[_command(pid) for pid in left]}"
    new = sorted(set(open_files()) - set(files_before))
    assert not new, f"files are left open: {new}"


def open_files() -> list[str]:
    """Return ``number target`` of each open file of this process."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode()[:200]}"
    return str(pid)
