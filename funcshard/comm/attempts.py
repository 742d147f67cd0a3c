"""Attempts: a rank whose step fails issues the rest of the step's collectives with zeros.

If one rank raises in the middle of a step, the others wait for it in a collective. Gloo and NCCL
cannot take a collective back, and groups whose connections were cut are of no use afterwards. So
the failed rank catches up: it learns which collectives the others issue, and issues them too, with
zeros in place of its data. The other ranks compute on with wrong numbers, and reach the end of
their step, where all ranks agree that it has failed. All groups then count the same collectives, as
after any other step.

During an attempt each process keeps an ``AttemptLog`` of the collectives that it issues. All ranks
issue the same ones in the same order, so the failed rank issues what follows the end of its log in
the log of any other rank. It reads these in the job's store, where a rank writes its log only once
it finds that another one has failed. The thread of its ``Watch`` looks for that every tenth of a
second, so it costs a short step nothing. Simulated ranks need no log (``simulation``).

A large all-reduce has a second phase, which begins where a rank waits for it. So waiting for an
all-reduce is an entry of the log too.
"""

from __future__ import annotations

import bisect
import contextlib
import contextvars
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from funcshard._utils.tensors import dtype_name, dtype_of
from funcshard.comm.group import DeferredWork, Op, Work, exchange_part
from funcshard.comm.watch import LostError, SilentStoreError, Wait, Watch, write_text

Result = TypeVar("Result")

# The label of the exchange at the end of an attempt.
AGREEMENT = "whether an attempt has failed"

# What to call if the attempt that runs fails, to undo what this rank remembers of it: a rank that
# has failed does not remember it. ``None`` outside of attempts.
# Note: the step may be called again with the same state, so training steps in it donate none.
UNDO: contextvars.ContextVar[list[Callable[[], Any]] | None] = contextvars.ContextVar(
    "funcshard_undo", default=None
)

# Seconds between two looks whether another rank has failed, and between two at a log that grows.
_LOOK, _NEXT_LOOK = 0.1, 0.002

# Seconds between two looks for ranks that are lost.
_LOST = 1.0


class Entry(NamedTuple):
    """A collective that a rank has issued, or a wait for one, without any data.

    Attributes:
        group: number of the group among those that this rank has made.
        op: the collective, with forms in place of tensors. A wait has the kind ``"finish"``, and
            its source is the position of its collective in the log.
    """

    group: int
    op: Op


def _form_of(data: Any) -> Any:
    """Return dtype and shape in the place of a tensor, or of parts as one; a text stays."""
    if data is None or isinstance(data, str):
        return data
    if isinstance(data, torch.Tensor):
        return {"dtype": dtype_name(data.dtype), "shape": [*data.shape]}
    return [{**_form_of(data[0]), "shape": [sum(part.numel() for part in data)]}]


def _zeros_of(form: Any, device: str) -> Any:
    """Return what ``_form_of`` was given, with zeros for tensors."""
    if isinstance(form, dict):
        return torch.zeros(form["shape"], dtype=dtype_of(form["dtype"]), device=device)
    # Why a text stays: a text of this rank's own would be a difference.
    return [_zeros_of(part, device) for part in form] if isinstance(form, list) else form


class AttemptLog:
    """The collectives that this rank issues in an attempt, and a view of those of the others.

    Arguments:
        place: name of this attempt in the store.
        ranks: global numbers of the ranks of the attempt.
        watch: that of this process.
        give_up: seconds without a sign of life after which a rank is lost.

    Attributes:
        entries: the log.
        inside: whether this rank is inside a call of a group that the log has.
    """

    def __init__(
        self, place: str, ranks: Sequence[int], watch: Watch, give_up: float
    ) -> None:
        self._place, self._ranks, self._watch, self._give_up_after = (
            place,
            ranks,
            watch,
            give_up,
        )
        self.entries: list[Entry] = []
        self.inside = self._half_done = False
        # The all-reduces that were not waited for, by position in the log.
        self._unfinished: dict[int, Work] = {}
        self._failed = self._silent = False  # whether this rank has failed, and has said so
        self._published, self._keys = 0, list[str]()
        pulse = watch.pulse
        # Why last: from here on the watch's thread may call ``look`` at any moment.
        pulse.attempt = self
        if pulse.look_every == math.inf:  # the first attempt wakes the thread
            pulse.look_every = _LOOK
            pulse.questions.put(None)

    @property
    def position(self) -> int:
        """How many entries the log has."""
        return len(self.entries)

    # --- what this rank does ----------------------------------------------------------------------

    def start(self, group: Any, op: Op) -> Work:
        """Return ``group.start(op)``, with an entry in the log."""
        index = len(self.entries)
        work: Work = self._note(group.number, op, lambda: group.start(op))
        if op.kind != "all_reduce":
            return work
        self._unfinished[index] = work
        return DeferredWork(lambda: self._finish(group.number, index))

    def _note(self, group: int, op: Op, call: Callable[[], Result]) -> Result:
        """Return ``call()``, which issues what ``op`` says."""
        # Why first: ``call`` may wait for the other ranks.
        op = op._replace(out=_form_of(op.out), data=_form_of(op.data))
        self.entries.append(Entry(group, op))
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
        return self._note(group, Op("finish", "", None, src=index), work.wait)

    def check_usable(self, error: Exception) -> None:
        """Raise unless this rank can take part in further collectives after an error of its step.

        Raises:
            RuntimeError: the step failed inside a collective.
            Exception: ``error``, if communication itself failed.
        """
        if self._watch.is_broken():
            self._give_up(str(error))
            raise error
        if self._half_done:
            why = (
                "a step failed inside a collective, which other ranks wait for, so it cannot be "
                f"attempted again: {type(error).__name__}: {error}; start the job again from its "
                "last checkpoint"
            )
            self._give_up(why)
            raise RuntimeError(why) from error

    def join_rest(self) -> None:
        """Issue what the other ranks issue after the end of this log, up to the agreement.

        Raises:
            RuntimeError: a rank is lost, or this one cannot follow the others.
        """
        self._failed = True
        # Why: the watch's thread wakes, and tells the other ranks without delay.
        self._watch.pulse.questions.put(None)
        try:
            while (entry := self._entry(index := len(self.entries))) is not None:
                if entry.op.label == AGREEMENT:
                    return
                if entry.op.kind == "finish":
                    self._finish(entry.group, entry.op.src)
                    continue
                group = self._watch.groups[entry.group]
                work = group.start(self._op_of(entry, index, group))
                # Why now: no rank needs more of this one to begin the same collective. Only the
                # second phase of an all-reduce comes later.
                if entry.op.kind != "all_reduce":
                    work.wait()
        except LostError as error:
            self._give_up(str(error))
            raise
        except Exception as error:
            self._give_up(f"a rank could not catch up after its step had failed: {error}")
            raise

    def _op_of(self, entry: Entry, index: int, group: Any) -> Op:
        """Return this rank's part of a collective of other ranks, which is zeros."""
        if entry.op.kind != "all_to_all":
            return entry.op
        parts = {}
        for position, rank in enumerate(group.ranks):
            # Why of each rank: what it expects of this one, and sends to it.
            if rank != self._watch.rank and (rank_entry := self._entry(index, rank)):
                parts[position] = rank_entry.op
        return exchange_part(group.rank, parts)

    # --- the job's store --------------------------------------------------------------------------

    def look(self, store: Any) -> None:
        """Write this rank's log if a rank has failed; the thread of the watch calls this."""
        if self._silent or not (self._failed or store.check([self._key("failed")])):
            return
        new = range(self._published, len(self.entries))

        def is_missing(index: int) -> bool:
            return not store.check([self._key(index)])

        # Why searched: any rank may have written some of what all have, and one copy is enough.
        # Note: entries are written in order, so the first one that is missing ends them.
        missing = new[bisect.bisect_left(new, True, key=is_missing) :]
        for index in new:
            entry_text = json.dumps(self.entries[index])
            if index in missing:
                self._write(store, index, entry_text)
            if (
                self.entries[index].op.kind == "all_to_all"
            ):  # its sizes differ between ranks
                self._write(store, f"{index}/{self._watch.rank}", entry_text)
        self._published = new.stop
        self._watch.pulse.look_every = _NEXT_LOOK
        if self._failed:
            self._write(store, f"failed/{self._watch.rank}", "")
            self._write(store, "failed", "")
            # Why no more: what this rank issues from here on it has from others' logs.
            self._silent = True

    def _key(self, name: object) -> str:
        return f"funcshard/{self._place}/{name}"

    def _write(self, store: Any, name: object, text: str) -> None:
        self._keys.append(self._key(name))
        write_text(store, self._keys[-1], text)

    def close(self) -> None:
        """End the attempt on this rank."""
        self._watch.pulse.attempt = None

    def forget(self) -> None:
        """Delete what this rank has shown, after the agreement, when no rank reads it any more."""
        with contextlib.suppress(RuntimeError):
            # Why by the thread: it alone writes these keys, and none after ``close``.
            self._watch.ask(self._delete)

    def _delete(self, store: Any) -> None:
        self._watch.pulse.look_every = _LOOK
        for key in self._keys:
            store.delete_key(key)

    def _entry(self, index: int, rank: int | None = None) -> Entry | None:
        """Wait for entry number ``index`` of any rank, or of one with this global number.

        Returns:
            The entry; ``None`` if these ranks have failed before it.

        Raises:
            LostError: a rank is lost, or cannot communicate any more.
        """
        ranks, name = (
            (self._ranks, str(index)) if rank is None else ([rank], f"{index}/{rank}")
        )
        watch, failed_keys = self._watch, [self._key(f"failed/{other}") for other in ranks]
        next_look = time.monotonic() + _LOST
        while True:
            with contextlib.suppress(SilentStoreError):
                # Why in this order: a rank writes its entries before it says that it has failed.
                all_failed = watch.check(failed_keys)
                entry_text = watch.get(self._key(name))
                if entry_text is not None:
                    group, op = json.loads(entry_text)
                    return Entry(group, Op(*_zeros_of(op, watch.groups[group].device)))
                if all_failed:
                    return None
            if time.monotonic() > next_look:
                if why := watch.why(Wait(ranks=self._ranks), self._give_up_after):
                    raise LostError(why)
                next_look = time.monotonic() + _LOST
            time.sleep(_NEXT_LOOK)

    def _give_up(self, why: str) -> None:
        """End the communication of this rank, so that all others raise."""
        self._watch.show(why=why)
        self._watch.close_connections()
