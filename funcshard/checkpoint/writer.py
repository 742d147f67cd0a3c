"""One rank's part in saving a checkpoint, in a thread that issues no collective.

Ranks write into a folder that they agreed on, ``.NAME.TOKEN.part``. Each rank writes its slices
there, and then a table that names its regions. When rank 0 has found the table of every rank, it
writes the index and renames the folder to ``NAME``, which publishes the checkpoint.

Why ranks meet through files: a collective of this thread could come between two of training.
"""

from __future__ import annotations

import atexit
import contextlib
import glob
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from funcshard.checkpoint.dcp_files import write_metadata, write_slices
from funcshard.checkpoint.folders import delete, folders, publish, remove_leftovers, set_aside, sync
from funcshard.checkpoint.manifest import read_contents, time_after, write_index
from funcshard.checkpoint.metadata import FlatState, Plans, TensorMetadata, TensorSlice, any_plan
from funcshard.checkpoint.path_lock import PathLock, take
from funcshard.checkpoint.rank_tables import file_of, read_table, table_of, write_sizes, write_table

_log = logging.getLogger("funcshard.checkpoint")

# Of a thread that saves while training goes on: on a core that training keeps busy it gets 6 % of
# the time. More than that slows training; at 19 it would get 1 %, and while it holds Python's lock
# on such a core, training would wait for it six times as long.
NICENESS = 12

# Seconds between two looks for ranks that are suspended or gone.
_LOOK = 1.0

# Number of boxes (tensors × ranks) up to which other programs get a list of all of them.
MOST_LISTED = 1_000_000


class WriterThread(threading.Thread):
    """The thread that runs a ``Writer``.

    Arguments:
        writer: the writer.
        in_background: whether other threads have precedence, where the system can do that.

    Attributes:
        error: the reason why the writer failed, or ``""``; read it after ``join``.
        path: the path of the checkpoint.
    """

    def __init__(self, writer: Writer, *, in_background: bool = False) -> None:
        # Thread.run drops its reference to the target, and so to the copied state, when it is done.
        super().__init__(target=writer.run, name=thread_name(writer.path, writer.rank))
        self.error, self.path, self.in_background = "", writer.path, in_background
        self._give_up = writer.say_that_it_failed

    def started(self) -> bool:
        """Start the thread, or set ``error`` if the system has none; return whether it runs."""
        _UNTOLD.add(self)
        try:
            self.start()
        except RuntimeError as error:
            self._give_up()
            self.error = f"{type(error).__name__}: {error}"
            return False
        return True

    def run(self) -> None:
        if self.in_background and sys.platform == "linux":  # where priorities are those of threads
            thread = threading.get_native_id()
            os.setpriority(
                os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread))
            )
        try:
            super().run()
        except Exception as error:  # Saving.wait raises it, on every rank
            speaks_for_itself = isinstance(error, OSError) and not error.errno
            self.error = str(error) if speaks_for_itself else f"{type(error).__name__}: {error}"
        else:
            _UNTOLD.discard(self)

    def told(self) -> str:
        """Wait for the thread to end, and return ``error``, which the caller raises."""
        if self.ident is not None:  # it could be started
            self.join()
        _UNTOLD.discard(self)
        return self.error


# The threads of this process that run, or failed without anybody having heard of it.
_UNTOLD: set[WriterThread] = set()


@atexit.register
def _tell_at_exit() -> None:
    """End the process with an error if a checkpoint is not saved and no ``wait()`` said so.

    Python waits for the threads before it calls this. It has no other way to change the exit code,
    which tells a launcher that the job has failed.
    """
    if lost := [thread for thread in _UNTOLD if thread.error]:
        for thread in lost:
            print(f"checkpoint {thread.path} is not saved: {thread.error}", file=sys.stderr)
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_UNTOLD.clear)


def thread_name(path: Path, rank: int) -> str:
    """Return the name of the thread that saves a checkpoint to ``path`` as one rank."""
    return f"save {path} as rank {rank}"


@dataclass(frozen=True, slots=True)
class Writer:
    """The work of one rank: it writes its part, and rank 0 publishes the checkpoint.

    Attributes:
        path: the final path of the checkpoint.
        part: the folder that ranks write into.
        plans: the plans to store.
        flat: this rank's state.
        slices: the slices of ``flat``, or copies of them that training cannot change.
        rank: this rank.
        world_size: number of ranks.
        keep: number of checkpoints to keep beside ``path``, this one included; ``None`` keeps all.
        timeout: number of seconds that rank 0 waits for the reports of all ranks.
        lock: the lock of ``path``, on rank 0; the writer gives it back.
        lost: returns an error message if a rank is suspended or gone, and ``""`` if none is.
    """

    path: Path
    part: Path
    plans: Plans
    flat: FlatState
    slices: Sequence[TensorSlice]
    rank: int
    world_size: int
    keep: int | None
    timeout: float
    lock: PathLock | None
    lost: Callable[[], str]

    def run(self) -> None:
        """Write this rank's part and, as rank 0, publish the checkpoint."""
        try:
            if self.lock is not None:  # first, so that old folders do not fill the disk
                remove_leftovers(self.path, self.lock, own=self.token, others=self.keep is not None)
            self.write()
            if self.rank == 0:
                self.wait_for_all()
                self.finish()
        except Exception as error:
            self.say_that_it_failed()
            if not self.part.exists() and (rank := self.renamed_by()) not in ("", str(self.rank)):
                raise OSError(f"rank {rank} could not write its part") from error
            raise
        finally:
            if self.lock is not None:
                self.lock.release()

    def say_that_it_failed(self) -> None:
        """Leave a mark for rank 0, in some way that a full disk allows."""
        mark = self.part / f"failed.{self.rank}"
        with contextlib.suppress(OSError):
            mark.touch()
            return
        with contextlib.suppress(OSError):  # no file can be made before another one goes
            (self.part / file_of(self.rank)).unlink()
            mark.touch()
            return
        with contextlib.suppress(OSError):  # a new name needs no space
            self.part.rename(
                self.part.with_name(f".{self.path.name}.{self.token}-{self.rank}.part")
            )

    def write(self) -> None:
        """Write this rank's slices, and the table of the regions that hold them."""
        regions = write_slices(self.part, self.rank, self.slices, self.flat.tensors)
        write_table(self.part, self.rank, self.flat, regions, self.token)

    def wait_for_all(self) -> None:
        """Wait for the tables of all ranks.

        Raises:
            OSError: a rank failed, is suspended or gone, or did not write its table in time.
        """
        looked = time.monotonic()
        end = looked + self.timeout
        while True:
            names = set(os.listdir(self.part))
            missing_ranks = [rank for rank in range(self.world_size) if table_of(rank) not in names]
            if not missing_ranks:
                return
            if failed := [rank for rank in missing_ranks if f"failed.{rank}" in names]:
                raise OSError(f"rank {failed[0]} could not write its part")
            current_time = time.monotonic()
            if current_time > looked + _LOOK:
                looked = current_time
                if lost_text := self.lost():
                    raise OSError(lost_text)
            if current_time > end:
                raise OSError(
                    f"rank {missing_ranks[0]} has not written its part within {self.timeout:g} s"
                )
            time.sleep(0.005)

    def finish(self) -> None:
        """Write the index, publish the checkpoint, and remove folders that are no longer needed."""
        shared = {
            name: metadata
            for name, metadata in self.flat.tensors.items()
            if metadata.kind != "rank"
        }
        if len(shared) * self.world_size <= MOST_LISTED:
            self.list_for_dcp(shared)
        else:
            _log.info(
                "checkpoint %s has no .metadata, because it would list more than %d boxes",
                self.path,
                MOST_LISTED,
            )
        write_sizes(self.part, self.world_size, self.token)
        write_index(
            self.part, self.plans, self.flat.spec, shared, self.token, time_after(self.path.parent)
        )
        publish(self.part, self.path)
        # Leftovers of a checkpoint that was being replaced when its process was killed.
        if self.lock is not None:
            remove_leftovers(self.path, self.lock, own=self.token, others=False)
        if self.keep is not None:
            try:
                self.remove_oldest(self.keep)
            # The checkpoint is complete, and the next save removes what is left.
            except OSError as error:
                _log.warning(
                    "checkpoint %s is complete, but older ones cannot be deleted: %s",
                    self.path,
                    error,
                )

    def list_for_dcp(self, shared: Mapping[str, TensorMetadata]) -> None:
        """Write the list of all boxes for other programs, which grows with the number of ranks."""
        tensors, regions, mesh_axes = dict(shared), [], any_plan(self.plans).mesh_axes
        for rank in range(self.world_size):
            table = read_table(self.part, rank, self.token, mesh_axes, shared)
            tensors |= table.items
            regions += [
                region for name_regions in table.regions.values() for region in name_regions
            ]
        write_metadata(self.part, regions, tensors, mesh_axes)

    @property
    def token(self) -> str:
        """The token of this save: ``.NAME.TOKEN.part`` -> ``TOKEN``."""
        return self.part.name.rsplit(".", 2)[1]

    def renamed_by(self) -> str:
        """Return the rank that renamed the folder because it could make no file, or ``""``."""
        marked_folders = self.path.parent.glob(f"{glob.escape(self.part.stem)}-*.part")
        return next((folder.stem.rpartition("-")[2] for folder in marked_folders), "")

    def remove_oldest(self, keep: int) -> None:
        """Remove all but the last ``keep`` checkpoints of the folder around ``path``."""
        complete = []
        for folder in folders(self.path.parent):
            with contextlib.suppress(OSError, ValueError):
                complete.append((read_contents(folder), folder))
        surplus = []
        for contents, folder in sorted(complete, key=lambda each: each[0].saved)[:-keep]:
            if folder == self.path or folder.is_symlink():
                continue
            try:
                if (lock := take(folder)) is None:
                    continue  # another process saves there
                try:
                    if read_contents(folder, whole=False).digest == contents.digest:
                        surplus.append(set_aside(contents.path))
                finally:
                    lock.release()
            except FileNotFoundError:
                continue  # another process has deleted it
            except (OSError, ValueError) as error:  # such as one of another user
                _log.warning("checkpoint %s cannot be deleted: %s", folder, error)
        sync(self.path.parent)
        for aside in surplus:
            delete(aside)
