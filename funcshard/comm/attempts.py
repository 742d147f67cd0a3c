"""Attempts: a rank whose step fails issues the rest of the step's collectives with zeros.

If one rank raises in the middle of a step, the others wait for it in a collective. Gloo and NCCL
cannot take a collective back, and groups whose connections were cut are of no use afterwards. So
the failed rank catches up: it learns which collectives the others issue, and issues them too, with
zeros in place of its data. The other ranks compute on with wrong numbers, and reach the end of
their step, where all ranks agree that it has failed. All groups then count the same collectives, as
after any other step.

During an attempt each rank keeps an ``AttemptLog`` of the collectives that it issues. All ranks
issue the same ones in the same order, so the failed rank issues what follows the end of its log in
the log of any other rank. In a simulation it reads these logs where they lie, and between processes
(``StoreAttempt``) through the job's store. A rank writes its log there only once it finds that
another one has failed. A thread looks for that after the first fifth of a second, so it costs a
short step nothing but the thread.

A large all-reduce has a second phase, which begins where a rank waits for it. So waiting for an
all-reduce is an entry of the log too.
"""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import json
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from funcshard.comm.group import DeferredWork, Op, Work
from funcshard.comm.watch import LostError, SilentStoreError, Watch

Result = TypeVar("Result")

# The label of the exchange at the end of an attempt.
AGREEMENT = "whether an attempt has failed"

# What to call if the attempt that runs fails, to undo what this rank remembers of it: a rank that
# has failed does not remember it. ``None`` outside of attempts.
# Note: the step may be called again with the same state, so training steps in it donate none.
UNDO: contextvars.ContextVar[list[Callable[[], Any]] | None] = contextvars.ContextVar(
    "funcshard_undo", default=None
)

# Seconds after which a rank first looks whether another one has failed, and between two looks at a
# log that grows.
_FIRST_LOOK, _NEXT_LOOK = 0.1, 0.002

# Seconds between two looks for ranks that are lost.
_LOST = 1.0

_TEXT, _FINISH = "all_gather_text", "finish"


class Entry(NamedTuple):
    """A collective that a rank has issued, or a wait for one, without any data.

    Attributes:
        group: number of the group among those that this rank has made.
        kind, label, src, out_sizes, sizes: as in ``Op``; ``"finish"`` is a wait.
        dtype: of the tensors.
        out_shape, data_shape: of the tensors; ``None`` for no tensor.
        text: of an ``all_gather_text``.
        started: of a wait, the position of its collective in the log.
    """

    group: int
    kind: str
    label: str = ""
    dtype: str = ""
    out_shape: Sequence[int] | None = None
    data_shape: Sequence[int] | None = None
    src: int = 0
    out_sizes: Sequence[int] = ()
    sizes: Sequence[int] = ()
    text: str = ""
    started: int = 0

    @classmethod
    def of(cls, group: int, op: Op) -> Entry:
        """Return the entry of a collective."""
        if op.kind == _TEXT:
            return cls(group, op.kind, op.label, text=op.data)
        data_shape = None
        if isinstance(op.data, torch.Tensor):
            data_shape = tuple(op.data.shape)
        elif op.data is not None:
            data_shape = (sum(part.numel() for part in op.data),)
        dtype = str(op.out.dtype).removeprefix("torch.")
        sizes = tuple(op.out_sizes), tuple(op.sizes)
        return cls(group, op.kind, op.label, dtype, tuple(op.out.shape), data_shape, op.src, *sizes)


class AttemptLog(ABC):
    """The collectives that this rank issues in an attempt, and a view of those of the others.

    Arguments:
        ranks: global numbers of the ranks of the attempt.
        rank: that of this rank.
        group_of: returns this rank's group of a number.

    Attributes:
        ranks, rank: see above.
        entries: the log.
        inside: whether this rank is inside a call of a group that the log has.
    """

    def __init__(self, ranks: Sequence[int], rank: int, group_of: Callable[[int], Any]) -> None:
        self.ranks, self.rank, self._group_of = ranks, rank, group_of
        self.entries: list[Entry] = []
        self.inside = self._half_done = False
        # The all-reduces that were not waited for, by position in the log.
        self._unfinished: dict[int, Work] = {}

    @abstractmethod
    def fail(self) -> None:
        """Tell the other ranks that this one has failed, after its entries so far."""

    @abstractmethod
    def entry(self, index: int, rank: int | None = None) -> Entry | None:
        """Wait for entry number ``index`` of any rank, or of one with this global number.

        Returns:
            The entry; ``None`` if these ranks have failed before it.

        Raises:
            LostError: a rank is lost, or cannot communicate any more.
        """

    @abstractmethod
    def forget(self) -> None:
        """Delete what this rank has shown, after the agreement, when no rank reads it any more."""

    @abstractmethod
    def is_broken(self) -> bool:
        """Return whether a group has failed, so that it cannot be used any more."""

    @abstractmethod
    def give_up(self, why: str) -> None:
        """End the communication of this rank, so that all others raise."""

    def start(self, group: Any, op: Op) -> Work:
        """Return ``group.start(op)``, with an entry in the log."""
        index = len(self.entries)
        work: Work = self.note(Entry.of(group.number, op), lambda: group.start(op))
        if op.kind != "all_reduce":
            return work
        self._unfinished[index] = work
        return DeferredWork(lambda: self._finish(group.number, index))

    def note(self, entry: Entry, call: Callable[[], Result]) -> Result:
        """Return ``call()``, which issues what ``entry`` says."""
        # Why first: ``call`` may wait for the other ranks.
        self.entries.append(entry)
        self.inside = True
        try:
            return call()
        except BaseException:
            self._half_done = True
            raise
        finally:
            self.inside = False

    def _finish(self, group: int, index: int) -> Any:
        work = self._unfinished.pop(index)
        return self.note(Entry(group, _FINISH, started=index), work.wait)

    def check_usable(self, error: Exception) -> None:
        """Raise unless this rank can take part in further collectives after an error of its step.

        Raises:
            RuntimeError: the step failed inside a collective.
            Exception: ``error``, if communication itself failed.
        """
        if self.is_broken():
            self.give_up(str(error))
            raise error
        if self._half_done:
            why = (
                "a step failed inside a collective, which other ranks wait for, so it cannot be "
                f"attempted again: {type(error).__name__}: {error}; start the job again from its "
                "last checkpoint"
            )
            self.give_up(why)
            raise RuntimeError(why) from error

    def join_rest(self, device: torch.device) -> None:
        """Issue what the other ranks issue after the end of this log, up to the agreement.

        Raises:
            RuntimeError: a rank is lost, or this one cannot follow the others.
        """
        try:
            self._join_rest(device)
        except LostError as error:
            self.give_up(str(error))
            raise
        except Exception as error:
            self.give_up(f"a rank could not catch up after its step had failed: {error}")
            raise

    def _join_rest(self, device: torch.device) -> None:
        self.fail()
        while True:
            index = len(self.entries)
            entry = self.entry(index)
            if entry is None or (entry.kind, entry.label) == (_TEXT, AGREEMENT):
                return
            group = self._group_of(entry.group)
            if entry.kind == _FINISH:
                self._finish(entry.group, entry.started)
            elif entry.kind == _TEXT:
                # Why the text of another rank: a text of its own would be a difference.
                group.start(Op(_TEXT, entry.label, None, entry.text)).wait()
            elif entry.kind == "all_gather_shared":
                group.all_gather_shared(
                    _zeros(entry.data_shape, entry, device), label=entry.label
                ).wait()
            else:
                work = group.start(self._op_of(entry, index, group, device))
                # Why now: no rank needs more of this one to begin the same collective. Only the
                # second phase of an all-reduce comes later.
                if entry.kind != "all_reduce":
                    work.wait()

    def _op_of(self, entry: Entry, index: int, group: Any, device: torch.device) -> Op:
        if entry.kind == "all_to_all":
            # Why of each rank: what it expects of this one, and sends to it.
            rank_entries = [
                None if rank == self.rank else self.entry(index, rank) for rank in group.ranks
            ]
            sent_sizes = [0 if x is None else x.out_sizes[group.rank] for x in rank_entries]
            received_sizes = [0 if x is None else x.sizes[group.rank] for x in rank_entries]
            entry = entry._replace(
                out_shape=[sum(received_sizes)],
                data_shape=[sum(sent_sizes)],
                out_sizes=received_sizes,
                sizes=sent_sizes,
            )
        out, data = (
            None if shape is None else _zeros(shape, entry, device)
            for shape in (entry.out_shape, entry.data_shape)
        )
        assert out is not None, "every collective has an output"
        sent: Any = [data] if entry.kind == "reduce_scatter" else data
        return Op(entry.kind, entry.label, out, sent, entry.src, entry.out_sizes, entry.sizes)


def _zeros(shape: Any, entry: Entry, device: torch.device) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=getattr(torch, entry.dtype), device=device)


class StoreAttempt(AttemptLog):
    """The log of a process, which shows it to others through the job's store.

    Arguments:
        place: name of this attempt in the store.
        ranks: global numbers of the ranks of the attempt.
        watch: that of this process.
        find_lost: returns an error message if a rank is lost.
    """

    def __init__(
        self,
        place: str,
        ranks: Sequence[int],
        watch: Watch,
        find_lost: Callable[[], str],
    ) -> None:
        super().__init__(ranks, watch.rank, watch.groups.__getitem__)
        self._place, self._watch, self._find_lost = place, watch, find_lost
        self._published, self._silent = 0, False
        self._keys: list[str] = []
        self._lock = threading.Lock()  # between the thread that looks, and that of the step

    def look(self) -> bool:
        """Write this rank's log if another one has failed, and return whether one has."""
        with self._lock:
            if self._silent or not self._watch.check([self._key("failed")]):
                return False
            self._publish()
            return True

    def fail(self) -> None:
        with self._lock:
            self._silent = True
            self._publish()
            self._write(f"failed/{self.rank}", "")
            self._write("failed", "")

    def _publish(self) -> None:
        new = range(self._published, len(self.entries))
        # Why searched: any rank may have written some of what all have, and one copy is enough.
        # Note: entries are written in order, so the first one that is missing ends them.
        missing = new[bisect.bisect_left(new, True, key=self._lacks) :]
        for index in new:
            entry = self.entries[index]
            if index in missing:
                self._write(index, json.dumps(entry))
            if entry.kind == "all_to_all":  # its sizes differ between ranks
                self._write(f"{index}/{self.rank}", json.dumps(entry))
        self._published = new.stop

    def _lacks(self, index: int) -> bool:
        return not self._watch.check([self._key(index)])

    def _key(self, name: object) -> str:
        return f"{self._place}/{name}"

    def _write(self, name: object, text: str) -> None:
        self._keys.append(self._key(name))
        self._watch.set(self._keys[-1], text)

    def forget(self) -> None:
        with self._lock, contextlib.suppress(RuntimeError):
            self._silent = True
            for key in self._keys:
                self._watch.delete(key)

    def entry(self, index: int, rank: int | None = None) -> Entry | None:
        ranks, name = (self.ranks, str(index)) if rank is None else ([rank], f"{index}/{rank}")
        failed_keys = [self._key(f"failed/{other_rank}") for other_rank in ranks]
        next_look = time.monotonic() + _LOST
        while True:
            with contextlib.suppress(SilentStoreError):
                # Why in this order: a rank writes its entries before it says that it has failed.
                all_failed = self._watch.check(failed_keys)
                entry_text = self._watch.get(self._key(name))
                if entry_text is not None:
                    return Entry(*json.loads(entry_text))
                if all_failed:
                    return None
            if time.monotonic() > next_look:
                broken_text = self._watch.get(self._key("broken")) or b""
                if lost_text := broken_text.decode() or self._find_lost():
                    raise LostError(lost_text)
                next_look = time.monotonic() + _LOST
            time.sleep(_NEXT_LOOK)

    def is_broken(self) -> bool:
        return self._watch.is_broken()

    def give_up(self, why: str) -> None:
        self._watch.set(self._key("broken"), why)
        self._watch.close_connections()


def look_for_failures(watch: Watch) -> None:
    """Let a thread write the log of each attempt of ``watch`` once another rank has failed."""
    # Why one thread for all attempts: to start one takes as long as an agreement.
    if watch.watcher is None:
        watch.watcher = threading.Thread(
            target=_look, args=(weakref.ref(watch),), name="funcshard attempts", daemon=True
        )
        watch.watcher.start()


def _look(reference: weakref.ref[Watch]) -> None:
    latest_log: StoreAttempt | None = None
    seconds = _FIRST_LOOK
    while True:
        time.sleep(seconds)
        watch, seconds = reference(), _FIRST_LOOK
        if watch is None:
            return
        log = watch.attempt
        # Why only the second time: most attempts have ended by then.
        if latest_log is not None and log is latest_log:
            # Why suppressed: the store is silent, or its process has ended, which other waits see.
            with contextlib.suppress(RuntimeError):
                if latest_log.look():
                    seconds = _NEXT_LOOK
        latest_log = log
        del watch, log
