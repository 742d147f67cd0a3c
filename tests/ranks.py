"""Ranks for tests: ``run_ranks`` uses gloo processes, ``run_simulated`` simulated ranks.

Both functions take the same arguments, so one test body can run on both.

Importing torch takes seconds. So the processes are forked from one that has imported it, and a pool
keeps them from call to call. Every call makes a new process group, and leaves nothing in a process
but imported modules. The ranks of a group meet through a file in a directory of their own, so any
number of pools and test suites can run side by side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import functools
import inspect
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import funcshard as fs
from tests.comm.stores import until

__all__ = [
    "COLLECTED_AFTER", "SLOW_TESTS", "Pool", "close_pool", "forking", "is_whole_dump", "on_ranks", "one_thread", "run_ranks",
    "run_simulated", "suspend",
]  # fmt: skip

# Ten times the new objects of Python's default: collections took 6 % of the time of tests that record.
COLLECTED_AFTER = (7_000, 10, 10)
SLOW_TESTS = "FUNCSHARD_SLOW_TESTS"  # set in the environment if the session runs slow tests too
_GRACE = 10.0  # seconds in which the remaining ranks may end once a rank has failed
_LEAVING = 20.0  # seconds in which a process may leave the group of its last call


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    shape: Mapping[str, int] | None = None,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Run ``fn(mesh, *args)`` on gloo processes of one thread each, and return each rank's result.

    Arguments:
        fn: a function at the top level of a module. Every rank starts with the same random state,
            and turns warnings into errors.
        world_size: number of processes, at most 4.
        args: further arguments of ``fn``; pickled, as results are.
        timeout: seconds after which the call fails with every rank's stack, not counting the start
            of the processes.
        shape: the shape of the mesh; by default every rank shards.
        may_die: ranks whose process may end; if it does, the result is ``None``.

    Raises:
        TimeoutError: a rank did not return in time; the message holds every rank's stack.
        RuntimeError: a process ended.
        Exception: the error of the first rank that failed, with its rank and traceback as a note.
    """
    return _default_pool().run(fn, world_size, *args, timeout=timeout, shape=shape, may_die=may_die)


def run_simulated(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    shape: Mapping[str, int] | None = None,
) -> list[Any]:
    """Run ``fn(mesh, *args)`` as simulated ranks, on one thread as in ``run_ranks``."""
    assert shape is None or math.prod(shape.values()) == world_size
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return fs.simulate(lambda mesh: fn(mesh, *args), shape or world_size)


def on_ranks(world: int | Mapping[str, int] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let every simulated rank run a test, whose first argument is the mesh.

    Arguments:
        world: the ranks, or the shape of the mesh; by default the test's argument ``world``.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            ranks = arguments["world"] if world is None else world
            size, shape = (ranks, None) if isinstance(ranks, int) else (math.prod(ranks.values()), ranks)
            run_simulated(lambda mesh: test(mesh, **arguments), size, shape=shape)

        signature = inspect.signature(test)
        functools.update_wrapper(run, test)
        run.__signature__ = signature.replace(parameters=[*signature.parameters.values()][1:])  # type: ignore[attr-defined]
        return run

    return decorate


def close_pool() -> None:
    """End the processes of ``run_ranks``; the next call starts new ones."""
    _default_pool().close()


def forking() -> Any:
    """Return the context of ``multiprocessing`` whose processes are forked from one with slow imports done."""
    # torch.optim uses Dynamo, and files of tests import pytest.
    context = multiprocessing.get_context("forkserver")
    slow = ["tests.imports"] if os.environ.get(SLOW_TESTS) else []
    context.set_forkserver_preload(["tests.ranks", "tests.models", "torch._dynamo", "pytest", *slow, "tests.frozen"])
    return context


class Pool:
    """Up to four worker processes, which become the ranks of a new process group in each call."""

    limit = 4

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._directories: list[tempfile.TemporaryDirectory[str]] = []  # of all calls of these processes
        self._lock = threading.Lock()

    def run(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout: float = 60.0,
        shape: Mapping[str, int] | None = None,
        may_die: Collection[int] = (),
    ) -> list[Any]:
        """See ``run_ranks``."""
        if not 1 <= world_size <= self.limit:
            raise ValueError(f"world_size must be between 1 and {self.limit}; found {world_size}")
        with self._lock:
            workers = self._start(world_size)
            # Why not deleted before the processes end: what is left of a process group still opens
            # the store's file when Python collects it, and then waits for its directory.
            self._directories.append(tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True))
            directory = self._directories[-1].name
            for rank, worker in enumerate(workers):
                job = _Job(fn, args, rank, world_size, dict(shape) if shape else None, directory, timeout)
                worker.connection.send_bytes(pickle.dumps(job))
            call = _Call(fn, workers, frozenset(may_die), Path(directory), timeout)
            try:
                return call.results()
            except BaseException:
                if call.pending or call.died:  # some process still runs, or has ended
                    self._kill()
                raise

    def close(self) -> None:
        """End the processes, for good or until the next call."""
        with self._lock:
            self._kill()

    def _start(self, world_size: int) -> list[_Worker]:
        self._workers = [worker for worker in self._workers if worker.process.is_alive() and worker.left()]
        new = [_Worker.start() for _ in range(world_size - len(self._workers))]
        self._workers += new
        for worker in new:
            worker.connection.recv_bytes()  # "ready": the process has imported its modules
        for worker in self._workers[:world_size]:
            worker.busy[0] = True
        return self._workers[:world_size]

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.connection.close()
        self._workers = []
        while self._directories:
            self._directories.pop().cleanup()


@dataclasses.dataclass(frozen=True)
class _Worker:
    """A process of a pool, seen from the parent.

    Attributes:
        process: the process.
        connection: sends jobs to the process, and receives answers.
        busy: whether the process has a job, or has not said since that it left the job's group.
    """

    process: Any
    connection: Connection
    busy: list[bool] = dataclasses.field(default_factory=lambda: [False])

    def left(self) -> bool:
        """Return whether the process has left the group of its last job, after waiting for that.

        A process that takes too long is killed, so that the pool replaces it.
        """
        if not self.busy[0]:
            return True
        try:
            if self.connection.poll(_LEAVING):
                self.busy[0] = False
                return self.connection.recv_bytes() == b"ready"
        except (EOFError, OSError):  # the process has ended
            return False
        print("a process of run_ranks did not leave the group of its last call, and is replaced", file=sys.stderr)
        self.process.kill()
        self.process.join()
        return False

    @classmethod
    def start(cls) -> _Worker:
        context = forking()
        own_end, worker_end = context.Pipe()
        process = context.Process(target=_work, args=(worker_end,), daemon=True)
        process.start()
        worker_end.close()
        return cls(process, own_end)


@dataclasses.dataclass(frozen=True)
class _Job:
    """A call of a function on one rank, sent to its process."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    world_size: int
    shape: dict[str, int] | None
    directory: str
    timeout: float


@dataclasses.dataclass(frozen=True)
class _Failure:
    """The error of a rank, its traceback as text, and the time when it was raised."""

    error: BaseException
    text: str
    when: float


class _Call:
    """One call of a pool, seen from the parent, with the state of each rank."""

    def __init__(
        self, fn: Callable[..., Any], workers: list[_Worker], may_die: frozenset[int], directory: Path, timeout: float
    ) -> None:
        self.name = getattr(fn, "__qualname__", repr(fn))
        self.workers, self.may_die, self.directory, self.timeout = workers, may_die, directory, timeout
        self.pending = set(range(len(workers)))
        self.failed: dict[int, _Failure] = {}
        self.died: set[int] = set()
        self.returned: dict[int, Any] = {}

    def results(self) -> list[Any]:
        self._collect(self.timeout)
        if self.failed or self.died - self.may_die:
            self._collect(_GRACE, to_the_end=True)
            self._raise()
        if self.pending:
            raise TimeoutError(
                f"{self.name} did not return on rank {_names(self.pending)} of {len(self.workers)} within "
                f"{self.timeout:g} s\n\n{self._stacks()}"
            )
        return [self.returned.get(rank) for rank in range(len(self.workers))]

    def _collect(self, seconds: float, *, to_the_end: bool = False) -> None:
        """Receive answers, for at most ``seconds``; stop at a failure unless ``to_the_end``."""
        end = time.monotonic() + seconds
        while self.pending and (to_the_end or not (self.failed or self.died - self.may_die)):
            ranks = {self.workers[rank].connection: rank for rank in self.pending}
            ready = wait(list(ranks), max(0.0, end - time.monotonic()))
            if not ready:
                return
            for connection in ready:
                self._receive(ranks[connection])  # type: ignore[index]

    def _receive(self, rank: int) -> None:
        self.pending.discard(rank)
        try:
            answer = pickle.loads(self.workers[rank].connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.workers[rank].process.join()
            self.died.add(rank)
            return
        if isinstance(answer, _Failure):
            self.failed[rank] = answer
        else:
            self.returned[rank] = answer

    def _raise(self) -> None:
        size = len(self.workers)
        died = self.died - self.may_die
        if died:
            codes = ", ".join(f"rank {rank} with exit code {self.workers[rank].process.exitcode}" for rank in sorted(died))
            raise RuntimeError(f"{self.name}: a process ended without a result: {codes}, of {size} ranks")
        first = min(self.failed, key=lambda rank: self.failed[rank].when)
        others = sorted(self.failed.keys() - {first})
        error = self.failed[first].error
        error.add_note(f"raised by {self.name} on rank {first} of {size}:\n{self.failed[first].text}")
        if others:
            error.add_note(f"raised on rank {_names(others)} after that: {[str(self.failed[r].error) for r in others]}")
        if self.pending:
            error.add_note(f"killed, because still running {_GRACE:g} s later: rank {_names(self.pending)}")
        raise error

    def _stacks(self) -> str:
        files = {rank: self.directory / f"stack.{rank}" for rank in range(len(self.workers))}
        for worker in self.workers:
            if worker.process.is_alive():
                os.kill(worker.process.pid, signal.SIGUSR1)
        until(lambda: all(map(is_whole_dump, files.values())), 20.0)
        lines = []
        for rank, file in files.items():
            state = "still running" if rank in self.pending else "has returned"
            stack = file.read_text() if file.exists() else ""
            lines.append(f"rank {rank} ({state}):\n{stack or 'no stack: its process does not answer'}")
        return "\n".join(lines)


def is_whole_dump(stack: Path) -> bool:
    """Return whether all lines of a dump are there; it ends with the first frame of the main thread."""
    return stack.exists() and stack.read_text(errors="replace").endswith(" in <module>\n")


def _work(connection: Connection) -> None:
    """Run jobs in a worker process until its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    connection.send_bytes(b"ready")
    with contextlib.suppress(EOFError):
        while True:
            _answer(connection, connection.recv_bytes())
            connection.send_bytes(b"ready")  # this process has left the group


def _answer(connection: Connection, message: bytes) -> None:
    stack = None
    try:
        job = pickle.loads(message)
        stack = open(Path(job.directory) / f"stack.{job.rank}", "w")  # noqa: SIM115  # closed below
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
        try:
            answer = pickle.dumps(_run(job))
        except Exception as error:
            answer = pickle.dumps(_failure(error))
        # Why before the group is destroyed: a rank that fails because this rank has left then fails
        # later than this rank.
        connection.send_bytes(answer)
    except Exception as error:
        connection.send_bytes(pickle.dumps(_failure(error)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        if stack is not None:
            faulthandler.unregister(signal.SIGUSR1)
            stack.close()


def _run(job: _Job) -> Any:
    store = dist.FileStore(str(Path(job.directory) / "store"), job.world_size)
    # Why longer than the parent waits: a hang must end in the parent, with every rank's stack.
    timeout = datetime.timedelta(seconds=job.timeout + 60)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world_size, timeout=timeout)
    mesh = fs.init_mesh(job.shape, device="cpu")
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "Guards may run slower on Python 3.13.0", RuntimeWarning)
        warnings.filterwarnings("ignore", r"`torch.jit.\w+` is deprecated")  # torch's own, in forward mode
        return job.fn(mesh, *job.args)


def _failure(error: BaseException) -> _Failure:
    """Return an error for the parent, as a ``RuntimeError`` if it cannot be pickled."""
    text = "".join(traceback.format_exception(error))
    when = time.monotonic()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    return _Failure(error.with_traceback(None), text, when)


def _end_with_parent() -> None:
    """Wait for the end of the parent process, then end this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread inside the ``with`` block, as the processes of ``run_ranks`` do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def suspend(mesh: fs.Mesh) -> None:
    """Suspend this process just after its watch has beaten.

    Why then: the watch locks the store's file while it beats, and a process that is suspended with
    the lock keeps all others from the store. They then say that the store does not answer.
    """
    watch: Any = mesh.axes[0][1].desync.watch  # type: ignore[attr-defined]
    before = watch.get(f"funcshard/{mesh.rank}")
    until(lambda: watch.get(f"funcshard/{mesh.rank}") != before)
    os.kill(os.getpid(), signal.SIGSTOP)


def _names(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


_pool: list[Pool] = []


def _default_pool() -> Pool:
    if not _pool:
        _pool.append(Pool())
    return _pool[0]
