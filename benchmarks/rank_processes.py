"""Rank processes that run one call at a time, so that the sides of a race can take turns.

``RankProcesses.call`` sends the name of a method and its arguments to every rank, and waits for the
answers. Between calls the ranks sleep, and so a side's turn does not disturb that of another side.
This file imports torch alone, because the code that a fresh rank has imported is measured too.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist


class FailedError(RuntimeError):
    """A rank raised, ended or did not answer."""


class RankProcesses:
    """Processes that form one gloo group; a context manager.

    Arguments:
        size: number of ranks.
        make: called with rank and size in each process; ``call`` calls the methods of the result.
        preload: modules that are imported before the ranks start. ``None`` starts fresh processes.
        timeout: seconds for one call.
        connect: whether the ranks form a group.
    """

    def __init__(
        self,
        size: int,
        make: Callable[[int, int], Any],
        *,
        preload: Sequence[str] | None,
        timeout: float,
        connect: bool = True,
    ) -> None:
        context: Any = multiprocessing.get_context("spawn" if preload is None else "forkserver")
        if preload is not None:  # ranks are forked from a process that has only imported modules
            context.set_forkserver_preload(list(preload))
        self.timeout = timeout
        self._directory = tempfile.TemporaryDirectory(prefix="race-ranks-")
        store = self._directory.name + "/store" if connect else ""
        self._connections: list[Any] = []
        self._processes: list[Any] = []
        for rank in range(size):
            here, there = context.Pipe()
            # Why no daemons: ranks may start processes, such as those of an asynchronous save.
            process = context.Process(target=_work, args=(there, make, rank, size, store, timeout))
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the processes, and those that they have started."""
        for process in self._processes:
            process.kill()  # it may lead no group yet
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.join()
        self._directory.cleanup()

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method on every rank and return the answers in the order of ranks, or raise ``FailedError``."""
        answers: dict[Any, Any] = {}
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):
                connection.send((method, args))
        end = time.monotonic() + self.timeout
        while len(answers) < len(self._connections):
            waiting = [each for each in self._connections if each not in answers]
            ready: list[Any] = multiprocessing.connection.wait(waiting, max(end - time.monotonic(), 0))
            if not ready:
                rank = self._connections.index(waiting[0])
                raise FailedError(f"rank {rank} did not answer {method} within {self.timeout:.0f} s")
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    good, answers[connection] = connection.recv()
                except EOFError:
                    raise FailedError(f"rank {rank} ended during {method}: out of memory?") from None
                if not good:
                    raise FailedError(f"rank {rank} failed in {method}:\n{answers[connection]}")
        return [answers[connection] for connection in self._connections]


def _work(connection: Any, make: Callable[[int, int], Any], rank: int, size: int, file: str, timeout: float) -> None:
    os.setsid()  # a group that can be killed
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the parent
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if file:
        options = {"rank": rank, "world_size": size, "timeout": datetime.timedelta(seconds=timeout)}
        dist.init_process_group("gloo", store=dist.FileStore(file, size), **options)
        dist.barrier()
    here = make(rank, size)
    while True:
        try:
            method, args = connection.recv()
        except EOFError:  # the calling process has ended
            return
        try:
            connection.send((True, getattr(here, method)(*args)))
        except Exception:
            connection.send((False, traceback.format_exc()))
