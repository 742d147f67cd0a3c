"""Run a job on several ranks.

A rank that stops alone leaves the others waiting in a collective. So a signal only sets
``Stop.requested``, and the ranks agree on it between steps (``Stop.agreed``).

Why not torch's ``elastic_launch``: it has one time limit for ranks that outlive a failed one, which
have to end at once, and for ranks that finish their step and save after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
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
# The exit code that multiprocessing gives a process whose fork server is gone, though it may live.
_LOST = 255


@dataclass(slots=True)
class Stop:
    """The request to stop a job before its end."""

    requested: bool = False
    happened: bool = False

    def agreed(self, mesh: fs.Mesh) -> bool:
        """Return whether any rank got a signal; a collective."""
        flag = torch.tensor(float(self.requested), device=mesh.device)
        self.happened = self.happened or bool(fs.psum(flag, mesh) > 0)
        return self.happened

    @property
    def exit_code(self) -> int:
        return STOPPED if self.requested or self.happened else 0


def launch(
    job: Callable[..., None],
    args: tuple[Any, ...] = (),
    *,
    ranks: int = 2,
    replicate: int = 1,
) -> int:
    """Run ``job(mesh, stop, *args)`` on every rank and return the command's exit code.

    Under torchrun, this process is one rank. Otherwise it starts ``ranks`` processes, or runs the
    job itself if there's one. If a rank fails, all end, and you see its error.

    Arguments:
        job: an importable function.
        args: further arguments, picklable.

    Returns:
        0, 1 if a rank failed, or 130 if a signal stopped the job.
    """
    shape = {"replicate": replicate, "shard": world_size(ranks) // replicate}
    if _under_torchrun() or ranks == 1:
        return _here(job, args, shape)
    return _spawn(job, args, shape)


def world_size(ranks: int) -> int:
    """Return torchrun's world size, or ``ranks``."""
    return int(os.environ["WORLD_SIZE"]) if _under_torchrun() else ranks


def _under_torchrun() -> bool:
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def _here(job: Callable[..., None], args: tuple[Any, ...], shape: Mapping[str, int]) -> int:
    is_torchrun = _under_torchrun()
    # Why not under torchrun: it passes a signal on to ranks that may already have got it from the
    # terminal.
    with _on_signal(twice_ends=not is_torchrun) as stop:
        try:
            if (
                is_torchrun
                and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
            ):
                _use_loopback()
            job(fs.init_mesh(shape), stop, *args)
            if dist.is_initialized():
                dist.destroy_process_group()
        except KeyboardInterrupt:
            return STOPPED
        except Exception as error:
            print(
                _failure(int(os.environ.get("RANK", "0")), error),
                file=sys.stderr,
                flush=True,
            )
            return 1
    return stop.exit_code


def _spawn(
    job: Callable[..., None], args: tuple[Any, ...], shape: Mapping[str, int]
) -> int:
    world = math.prod(shape.values())
    say(f"Starting {world} processes …")
    processes: list[Any] = []
    with (
        tempfile.TemporaryDirectory(prefix="funcshard-") as failure_folder,
        _on_signal(processes, twice_ends=True) as stop,
    ):
        try:
            start_method = _start_method(job)
            with _masked():
                processes += torch.multiprocessing.start_processes(
                    _rank, (shape, failure_folder, job, args), world,
                    join=False, daemon=True, start_method=start_method,
                ).processes  # fmt: skip
            if stop.requested:  # the signal came before there were ranks
                _request_stop(processes)
            failure = _wait(processes, Path(failure_folder))
        except KeyboardInterrupt:
            show_cursor()
            return STOPPED
        finally:
            for process in processes:
                process.kill()
                if process.exitcode == _LOST:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process.pid, signal.SIGKILL)
                process.join()
    if failure:
        show_cursor()
        print(failure, file=sys.stderr, flush=True)
        return 1
    stop.happened = any(process.exitcode == STOPPED for process in processes)
    return stop.exit_code


def _request_stop(processes: Sequence[Any]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()


@contextmanager
def _masked() -> Iterator[None]:
    """Block signals, also in processes that start now."""
    resource_tracker.ensure_running()  # before the mask, because it unblocks signals when it starts
    # Why: a rank that gets a signal before it has set its handlers would end at once.
    mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask_before)


def _start_method(job: Callable[..., None]) -> str:
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
    """Wait until the parent has ended, then request this rank to stop."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    # Why a signal: its handler lets the ranks end together after a step, as after Ctrl-C.
    os.kill(os.getpid(), signal.SIGTERM)


def _rank(
    rank: int,
    shape: Mapping[str, int],
    folder: str,
    job: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    with _on_signal() as stop:
        # Note: they were blocked when this process began, until it had its handlers.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        threading.Thread(target=_stop_with_parent, daemon=True).start()
        try:
            world = math.prod(shape.values())
            # Ranks that share cores slow each other down with more threads than cores.
            if "OMP_NUM_THREADS" not in os.environ:
                torch.set_num_threads(max(1, torch.get_num_threads() // world))
            _use_loopback()
            # A file, because a port may be taken by another program.
            store = dist.FileStore(str(Path(folder, "store")), world)
            group_timeout = datetime.timedelta(minutes=10)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=group_timeout
            )
            job(fs.init_mesh(shape, device="cpu"), stop, *args)
            dist.destroy_process_group()
        except BaseException as error:
            # Why the file first: the end of this process makes other ranks fail too, and the
            # earliest file shows the cause. Why os._exit: a clean-up could wait for the other
            # ranks.
            part_file = Path(folder, f"{time.time_ns()}-{rank}.part")
            part_file.write_text(_failure(rank, error))
            # Why renamed: the parent may look at any moment, and must not read half a text.
            part_file.rename(part_file.with_suffix(".failure"))
            os._exit(1)
        sys.exit(stop.exit_code)


def _wait(processes: list[Any], folder: Path) -> str:
    """Wait until all ranks have ended, or one has failed; return its failure."""
    while True:
        exit_codes = [process.exitcode for process in processes]
        failed_ranks = {
            r: code for r, code in enumerate(exit_codes) if code not in (None, 0, STOPPED)
        }
        if failed_ranks or None not in exit_codes:
            break
        multiprocessing.connection.wait(
            [p.sentinel for p in processes if p.exitcode is None]
        )
    for rank, code in failed_ranks.items():
        if code < 0:  # a killed rank writes no file, and ranks that fail because of it do
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            name = signal.Signals(-code).name
            return f"funcshard: rank {rank} failed: it was ended by signal {name}{hint}"
    # The names of the files begin with the time, so the first failure comes first.
    failure_texts = [path.read_text() for path in sorted(folder.glob("*.failure"))]
    failure_texts += [
        f"funcshard: rank {rank} failed with exit code {code}"
        for rank, code in failed_ranks.items()
    ]
    return failure_texts[0] if failed_ranks else ""


def _failure(rank: int, error: BaseException) -> str:
    """Return what you read of an error on a rank."""
    trace_lines = traceback.format_exception(error)
    if not os.environ.get("FUNCSHARD_TRACEBACK"):
        trace_lines = ["FUNCSHARD_TRACEBACK=1 in the environment shows the traceback"]
    last_frame = traceback.extract_tb(error.__traceback__)[-1]
    error_place = (
        f"{Path(last_frame.filename).name}:{last_frame.lineno}, in {last_frame.name}"
    )
    title = (
        f"funcshard: rank {rank} failed: {type(error).__name__}: {error} ({error_place})"
    )
    return "\n".join([title, *trace_lines])


@contextmanager
def _on_signal(
    processes: Sequence[Any] = (), *, twice_ends: bool = False
) -> Iterator[Stop]:
    """Yield what SIGINT and SIGTERM request, of ``processes`` too.

    With ``twice_ends``, you are told so, and the second signal raises ``KeyboardInterrupt``.
    """
    stop = Stop()

    def handler(number: int, frame: Any) -> None:
        if twice_ends and stop.requested:
            raise KeyboardInterrupt
        stop.requested = True
        _request_stop(processes)
        if twice_ends:
            # Why not print: the signal may have interrupted a print.
            os.write(2, b"\nStopping after this step; Ctrl-C again ends it at once.\n")

    # The caller, such as a test, gets its own handlers back.
    handlers_before = [signal.signal(number, handler) for number in SIGNALS]
    try:
        yield stop
    finally:
        for number, handler_before in zip(SIGNALS, handlers_before, strict=True):
            signal.signal(number, handler_before)


def _use_loopback() -> None:
    """Make gloo use the loopback interface, unless the user chose one."""
    # Why: gloo looks up the host's name otherwise, which many machines can't resolve.
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
