"""Connect ranks on a thread, and look meanwhile whether one of them is lost.

torch's calls that connect ranks return when all have connected, or after their timeout. If a rank
is killed while it connects, gloo takes five timeouts, because it tries to reach that rank again. So
a thread makes the call, and the rank itself looks at the signs of life of the ranks that it waits
for. If one is lost, the rank raises and leaves the thread to its call.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

from funcshard.comm.liveness import Heart

T = TypeVar("T")


class LostError(RuntimeError):
    """A rank is lost before it has connected."""


def watched(
    connect: Callable[[], T], heart: Heart, ranks: Sequence[int], *, patience: float, give_up: float
) -> T:
    """Return ``connect()``, called on a thread.

    Arguments:
        connect: connects this rank to others. It must not use the store of the heart, which may be
            locked while it waits.
        heart: the signs of life of this process.
        ranks: the global ranks that connect.
        patience: seconds after which this rank looks at the signs of life of the others.
        give_up: seconds without a sign of life after which a rank is lost.

    Raises:
        LostError: a rank is lost.
        Exception: ``connect`` raised it.
    """
    answers: queue.SimpleQueue[tuple[bool, object]] = queue.SimpleQueue()

    def call() -> None:
        try:
            answers.put((True, connect()))
        except BaseException as error:
            answers.put((False, error))

    # Why a daemon: a call that waits in vain must not keep the process from ending.
    threading.Thread(target=call, name="funcshard connecting", daemon=True).start()
    wait = patience
    while True:
        with contextlib.suppress(queue.Empty):
            worked, call_result = answers.get(timeout=wait)
            break
        if lost := heart.find_lost(ranks, give_up):
            raise LostError(lost)
        wait = patience / 8
    if isinstance(call_result, BaseException) and not worked:
        raise call_result
    return call_result  # type: ignore[return-value]
