"""Run a job on several ranks: in new processes, in torchrun's processes, or in this process alone.

All ranks must stop after the same step: a rank that stops alone leaves the rest waiting in a
collective. So a signal such as Ctrl-C only sets a flag on its rank (``Stop.requested``), and
between steps the ranks agree whether one of them has it (``Stop.agreed``).
"""

from __future__ import annotations

import datetime
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import funcshard as fs
from funcshard.demo.display import say, show_cursor

STOPPED = 130  # the exit code of shells after Ctrl-C
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(slots=True)
class Stop:
    """The request to stop a job before its end.

    Attributes:
        requested: whether this process got a signal.
        happened: whether the ranks have agreed to stop.
    """

    requested: bool = False
    happened: bool = False

    def agreed(self, mesh: fs.Mesh) -> bool:
        """Return whether any rank got a signal, which is the same on every rank; a collective."""
        flag = torch.tensor(float(self.requested), device=mesh.device)
        self.happened = self.happened or bool(fs.psum(flag, mesh) > 0)
        return self.happened


def launch(
    job: Callable[..., None], args: tuple[Any, ...] = (), *, ranks: int = 2, replicate: int = 1
) -> int:
    """Run ``job(mesh, stop, *args)`` on every rank and return the command's exit code.

    Under torchrun, this process is one rank of torchrun's world. Otherwise ``launch`` starts
    ``ranks`` processes, or runs the job in this process if ``ranks`` is 1. If a rank fails,
    ``launch`` ends all ranks and prints the error of that rank.

    Arguments:
        job: an importable function.
        args: further arguments of the job; they must be picklable.
        ranks: number of ranks without torchrun.
        replicate: size of the mesh's replicate axis.

    Returns:
        0, or 1 if a rank failed, or 130 if a signal stopped the job before its end.
    """
    if _under_torchrun() or ranks == 1:
        return _here(job, args, _shape(world_size(ranks), replicate))
    return _spawn(job, args, _shape(ranks, replicate))


def world_size(ranks: int) -> int:
    """Return the number of ranks that ``launch`` will run: torchrun's world size, or ``ranks``."""
    return int(os.environ["WORLD_SIZE"]) if _under_torchrun() else ranks


def _under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _shape(world: int, replicate: int) -> dict[str, int]:
    return {"replicate": replicate, "shard": world // replicate}


def _here(job: Callable[..., None], args: tuple[Any, ...], shape: Mapping[str, int]) -> int:
    stop = Stop()
    # Why not announced under torchrun: torchrun passes a signal on to ranks that may already have
    # got it from the terminal.
    torchrun = _under_torchrun()
    with _on_signal(lambda again: _request(stop, again, alone=not torchrun)):
        try:
            if torchrun and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
                _use_loopback()
            job(fs.init_mesh(shape), stop, *args)
            if dist.is_initialized():
                dist.destroy_process_group()
        except KeyboardInterrupt:
            return STOPPED
        except Exception as error:
            _print_failure(_failure(int(os.environ.get("RANK", "0")), error))
            return 1
    return STOPPED if stop.requested or stop.happened else 0


def _request(stop: Stop, again: bool, *, alone: bool) -> None:
    stop.requested = True
    if alone:
        _announce(again)


def _spawn(job: Callable[..., None], args: tuple[Any, ...], shape: Mapping[str, int]) -> int:
    say(f"Starting {math.prod(shape.values())} processes …")
    processes: list[Any] = []
    requested = False

    def on_signal(again: bool) -> None:
        nonlocal requested
        requested = True
        for process in processes:
            if process.is_alive():
                process.terminate()  # a rank handles SIGTERM as a request to stop
        _announce(again)

    with tempfile.TemporaryDirectory(prefix="funcshard-") as folder, _on_signal(on_signal):
        try:
            method = _start_method(job)
            with _masked():
                processes += torch.multiprocessing.start_processes(
                    _rank,
                    (shape, folder, job, args),
                    math.prod(shape.values()),
                    join=False,
                    daemon=True,
                    start_method=method,
                ).processes
            if requested:  # the signal came before there were ranks
                for process in processes:
                    process.terminate()
            failure = _wait(processes, Path(folder))
        except KeyboardInterrupt:
            show_cursor()
            return STOPPED
        finally:
            for process in processes:
                process.kill()
                process.join()
        if failure:
            show_cursor()
            _print_failure(failure)
            return 1
    return STOPPED if requested or any(process.exitcode == STOPPED for process in processes) else 0


@contextmanager
def _masked() -> Iterator[None]:
    """Block signals, also in processes that start: none ends before it has set its handlers."""
    resource_tracker.ensure_running()  # before the mask, because it unblocks signals when it starts
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _start_method(job: Callable[..., None]) -> str:
    """Return how to start ranks: on Linux, forked from one process that imports torch for all."""
    if sys.platform != "linux":
        return "spawn"
    # Why Dynamo: torch.optim imports it, which takes about as long as importing torch.
    multiprocessing.set_forkserver_preload([__name__, job.__module__, "torch._dynamo"])
    with _masked():
        forkserver.ensure_running()
    # Why a process that does nothing: it starts after the imports, and signals are not blocked
    # until then.
    multiprocessing.get_context("forkserver").Process(target=int, daemon=True).start()
    return "forkserver"


def _stop_with_parent() -> None:
    """Wait until the process that ``launch`` runs in has ended, then request this rank to stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)


def _rank(
    rank: int,
    shape: Mapping[str, int],
    folder: str,
    job: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    """Run one rank in a process that ``_spawn`` started."""
    stop = Stop()
    with _on_signal(lambda again: _request(stop, again, alone=False)):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        try:
            world = shape["replicate"] * shape["shard"]
            if "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(max(1, _cores() // world))
            _use_loopback()
            store = dist.FileStore(str(Path(folder, "store")), world)
            wait = datetime.timedelta(minutes=10)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=wait)
            job(fs.init_mesh(shape, device="cpu"), stop, *args)
            dist.destroy_process_group()
        except BaseException as error:
            # Why the file first: the end of this process makes other ranks fail too, and the
            # earliest file shows the cause. Why os._exit: a clean-up could wait for the other
            # ranks.
            failure = json.dumps(_failure(rank, error))
            Path(folder, f"rank{rank}.part").write_text(failure)
            Path(folder, f"rank{rank}.part").rename(Path(folder, f"rank{rank}.json"))
            os._exit(1)
        sys.exit(STOPPED if stop.requested or stop.happened else 0)


def _wait(processes: list[Any], folder: Path) -> dict[str, Any] | None:
    """Wait until all ranks have ended, or one has failed; return the report of the failure."""
    while alive := [process.sentinel for process in processes if process.is_alive()]:
        multiprocessing.connection.wait(alive)
        if any(process.exitcode not in (None, 0, STOPPED) for process in processes):
            break
    failed = [
        (rank, process.exitcode)
        for rank, process in enumerate(processes)
        if process.exitcode not in (None, 0, STOPPED)
    ]
    for rank, code in failed:
        if code < 0:  # a killed rank writes no file, and ranks that fail because of it do
            why = f"it was ended by signal {signal.Signals(-code).name}"
            return {
                "rank": rank,
                "why": why + (" (out of memory?)" if -code == signal.SIGKILL else ""),
            }
    reports = [json.loads(path.read_text()) for path in folder.glob("rank*.json")]
    if failed and not reports:
        return {"rank": failed[0][0], "why": f"it ended with exit code {failed[0][1]}"}
    return min(reports, key=lambda report: report["time"], default=None)


def _failure(rank: int, error: BaseException) -> dict[str, Any]:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}"
    failure_text = "".join(traceback.format_exception(error))
    return {
        "time": time.time_ns(),
        "rank": rank,
        "why": f"{type(error).__name__}: {error} ({where})",
        "traceback": failure_text,
    }


def _print_failure(failure: Mapping[str, Any]) -> None:
    if os.environ.get("FUNCSHARD_TRACEBACK") and "traceback" in failure:
        print(failure["traceback"], file=sys.stderr)
    hint = (
        ""
        if "traceback" not in failure
        else "\nFUNCSHARD_TRACEBACK=1 in the environment shows the traceback"
    )
    print(
        f"funcshard: rank {failure['rank']} failed: {failure['why']}{hint}",
        file=sys.stderr,
        flush=True,
    )


def _announce(again: bool) -> None:
    """Print that the job will stop; at the second signal, end it at once."""
    if again:
        raise KeyboardInterrupt
    # Why not print: the signal may have interrupted a print.
    os.write(2, b"\nStopping after this step; Ctrl-C again ends it at once.\n")


@contextmanager
def _on_signal(function: Callable[[bool], None]) -> Iterator[None]:
    """Call ``function(again)`` on SIGINT and SIGTERM; ``again`` is false for the first signal."""
    count = 0

    def handler(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        function(count > 1)

    handlers_before = {
        signal_number: signal.signal(signal_number, handler) for signal_number in SIGNALS
    }
    try:
        yield
    finally:
        for signal_number, old in handlers_before.items():
            signal.signal(signal_number, old)


def _use_loopback() -> None:
    """Make gloo use the loopback interface, which needs no host name, unless the user chose one."""
    if sys.platform == "linux" and "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
