"""One rank's part in saving a checkpoint, in a thread that issues no collective.

Ranks meet through files, because a collective of this thread could come between two of training.
When rank 0 has found the table of every rank, it writes the index, which publishes the checkpoint.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from funcshard.checkpoint.contents import read_contents, save_at, time_after, write_index
from funcshard.checkpoint.folders import (
    delete,
    folders,
    locked,
    publish,
    remove_files,
    remove_unfinished,
)
from funcshard.checkpoint.rank_files import files_of, table_file, tensor_file, write_rank
from funcshard.checkpoint.stored_state import FlatState, Plans, Tensors
from funcshard.comm import Mesh, find_lost_rank

_log = logging.getLogger("funcshard.checkpoint")

# Of a thread that saves while training goes on: on a core that training keeps busy it gets 6 % of
# the time. More than that slows training; at 19 it would get 1 %, and while it holds Python's lock
# on such a core, training would wait for it six times as long.
NICENESS = 12

# Seconds between two looks for ranks that are suspended or gone.
_LOOK = 1.0


@dataclass(kw_only=True, eq=False, repr=False)
class Writer(threading.Thread):
    """The thread of one rank: it writes its part, and rank 0 publishes the checkpoint.

    Attributes:
        tensors: the tensors of ``flat``, or copies of them.
        in_background: whether other threads have precedence.
        timeout: seconds that rank 0 waits for other ranks; ``Saving.wait`` may change it.
        error: why the writer failed, or ``""``; read it after ``join``.
    """

    path: Path
    save: str
    plans: Plans
    flat: FlatState
    tensors: Tensors
    mesh: Mesh
    keep: int | None
    lock: FileLock | None
    in_background: bool
    timeout: float = 600.0
    error: str = ""

    def __post_init__(self) -> None:
        super().__init__(name=f"save {self.path} as rank {self.mesh.rank}")

    def started(self) -> bool:
        """Start the thread, or set ``error``; return whether it runs."""
        _UNTOLD.add(self)
        try:
            self.start()
        except RuntimeError as error:
            self.fail(error)
            return False
        return True

    def told(self) -> str:
        """Wait for the thread to end, and return ``error``."""
        if self.ident is not None:  # it could be started
            self.join()
        _UNTOLD.discard(self)
        return self.error

    def run(self) -> None:
        if (
            self.in_background and sys.platform == "linux"
        ):  # where priorities are those of threads
            thread_id = threading.get_native_id()
            priority = max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread_id))
            os.setpriority(os.PRIO_PROCESS, thread_id, priority)
        try:
            if (
                self.mesh.rank == 0
            ):  # first, so that files of killed saves do not fill the disk
                self.remove_leftovers()
            self.write()
            if self.mesh.rank == 0:
                self.wait_for_all()
                self.finish()
        except Exception as error:  # Saving.wait raises it, on every rank
            self.fail(error)
        else:
            _UNTOLD.discard(self)
        finally:
            # Note: a Saving keeps this object, and the copied state should go now.
            self.tensors, self.flat = {}, FlatState(None)
            if self.lock is not None:
                self.lock.release()

    def fail(self, error: Exception) -> None:
        """Note an error, and leave a mark for rank 0, even on a full disk."""
        # Note: our own OSErrors are sentences; those of the system need their type.
        speaks_for_itself = isinstance(error, OSError) and not error.errno
        self.error = str(error) if speaks_for_itself else f"{type(error).__name__}: {error}"
        failed_mark = self.path / f"{self.save}-{self.mesh.rank}.failed"
        with contextlib.suppress(OSError):
            failed_mark.touch()
            return
        # A new name needs no space, and no file can be made before another one goes.
        for name in (tensor_file(self.save, self.mesh.rank), f"{self.save}.part"):
            with contextlib.suppress(OSError):
                (self.path / name).rename(failed_mark)
                return

    def write(self) -> None:
        write_rank(self.path, self.save, self.mesh.rank, self.flat, self.tensors)

    def wait_for_all(self) -> None:
        """Wait for the tables of all ranks.

        Raises:
            OSError: a rank failed, is suspended or gone, or took too long.
        """
        first_look = last_look = time.monotonic()
        while True:
            # Note: one list of the folder in place of a look for each rank's file.
            file_names = set(os.listdir(self.path))
            missing_ranks = [
                rank
                for rank in range(self.mesh.world_size)
                if table_file(self.save, rank) not in file_names
            ]
            if not missing_ranks:
                return
            # Note: a rank with an error leaves a mark, so that rank 0 need not wait longer.
            if failed_ranks := [
                r for r in missing_ranks if f"{self.save}-{r}.failed" in file_names
            ]:
                raise OSError(f"rank {failed_ranks[0]} could not write its part")
            current_time = time.monotonic()
            # Note: once a second is soon enough to tell a rank that is suspended.
            if current_time > last_look + _LOOK:
                last_look = current_time
                if lost_text := find_lost_rank(self.mesh):
                    raise OSError(lost_text)
            if current_time > first_look + self.timeout:
                raise OSError(
                    f"rank {missing_ranks[0]} has not written its part within {self.timeout:g} s"
                )
            time.sleep(0.005)

    def finish(self) -> None:
        """Write the index, publish the checkpoint, and remove older ones."""
        names = files_of(self.save, self.mesh.world_size)
        total_bytes = sum((self.path / name).stat().st_size for name in names)
        # Note: later than any other checkpoint in the folder, though clocks of hosts differ.
        saved_time = time_after(self.path.parent)
        write_index(self.path, self.plans, self.flat, self.save, saved_time, total_bytes)
        publish(self.path, self.save)
        if self.keep is not None:
            self.remove_oldest(self.keep)

    def remove_leftovers(self) -> None:
        """Delete what killed saves left."""
        # Note: files of the checkpoint that this save replaces stay until it is published.
        current_save = save_at(self.path)
        remove_files(self.path, lambda save: save not in (self.save, current_save))
        for folder in self.path.parent.iterdir() if self.keep is not None else ():
            if folder != self.path:
                remove_unfinished(folder)

    def remove_oldest(self, keep: int) -> None:
        """Remove all but the last ``keep`` checkpoints around ``path``."""
        complete_saves = []
        for folder in folders(self.path.parent):
            with contextlib.suppress(OSError, ValueError):
                complete_saves.append((read_contents(folder), folder))
        for contents, folder in sorted(complete_saves, key=lambda each: each[0].saved)[
            :-keep
        ]:
            if folder == self.path or folder.is_symlink():
                continue
            # The checkpoint is complete, and the next save removes what is left.
            try:
                # Note: another job may be saving there, and may have replaced it meanwhile.
                with locked(folder):
                    if save_at(folder) == contents.save:
                        delete(folder)
            except (TimeoutError, FileNotFoundError):
                continue  # another process saves there, or has deleted it
            except OSError as error:  # such as one of another user
                _log.warning(
                    "checkpoint %s is complete, but %s cannot be deleted: %s",
                    self.path,
                    folder,
                    error,
                )


# The threads of this process that run, or failed without anybody having heard of it.
_UNTOLD: set[Writer] = set()


@atexit.register
def _tell_at_exit() -> None:
    """End the process with an error if a checkpoint isn't saved and no ``wait()`` said so."""
    if failed_threads := [thread for thread in _UNTOLD if thread.error]:
        for thread in failed_threads:
            print(f"checkpoint {thread.path} is not saved: {thread.error}", file=sys.stderr)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        # Why: nothing else changes the exit code here, after Python has waited for the threads, and
        # a launcher needs it.
        os._exit(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_UNTOLD.clear)
