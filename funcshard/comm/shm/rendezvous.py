"""The rendezvous of the ranks of one machine: a socket between every pair of them.

No rank waits for a socket:

1. Each rank listens at an abstract address, and draws a token. The ranks tell each other both,
   through the group that they have already.
2. Each rank connects to all lower ranks, and sends its number and the token of the called rank.
3. Once all ranks have called, each of them takes the calls that wait at its address.

If anything failed on one rank, no rank is connected. Every process of the machine can find an
abstract address, but only ranks know the tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_TOKEN = 32  # bytes of a token
_QUEUE = 1024  # calls of strangers that may wait at an address besides those of ranks


def connect(
    rank: int,
    size: int,
    all_gather_text: Callable[[str], list[str]],
    *,
    wanted: bool = True,
) -> dict[int, socket.socket]:
    """Connect every pair of ranks; every rank has to call this; ``close`` is the inverse.

    Arguments:
        rank: this process's rank.
        size: number of ranks.
        all_gather_text: returns every rank's text, in order of ranks.
        wanted: whether this rank wants to be connected.

    Returns:
        A socket to each other rank, by rank; none on every rank if the ranks are not all on one
        machine, one does not want to be connected, or the system does not let them.
    """
    machine, name, own_token = (
        "",
        f"funcshard-{secrets.token_hex(16)}",
        secrets.token_hex(_TOKEN),
    )
    listener: socket.socket | None = None
    sockets: dict[int, socket.socket] = {}
    is_connected = False

    def all_worked(has_worked: bool) -> bool:
        return all(json.loads(text) for text in all_gather_text(json.dumps(has_worked)))

    try:
        with contextlib.suppress(OSError):  # the system does not let this rank
            if wanted:
                listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                listener.bind(f"\0{name}")  # the abstract namespace leaves no file behind
                listener.listen(size + _QUEUE)
                machine = _machine()
        rank_facts = [
            json.loads(text)
            for text in all_gather_text(json.dumps([machine, name, own_token]))
        ]
        is_apart = any(other_machine != machine for other_machine, _, _ in rank_facts)
        if listener is None or not machine or is_apart:
            return {}
        # Why two exchanges: after the first one, the calls of all ranks wait to be taken.
        is_connected = all_worked(_call(rank, rank_facts[:rank], sockets)) and all_worked(
            _take_calls(listener, own_token, range(rank + 1, size), sockets)
        )
        return sockets if is_connected else {}
    finally:
        if listener is not None:
            listener.close()
        if not is_connected:
            close(sockets)


def close(sockets: Mapping[int, socket.socket]) -> None:
    """Close the sockets that ``connect`` returned."""
    for peer_socket in sockets.values():
        peer_socket.close()


def _hello(rank: int, token: str) -> bytes:
    """Return the only message of a call: who calls, and the token of the called rank."""
    return struct.pack("<q", rank) + bytes.fromhex(token)


def _call(
    rank: int,
    lower_ranks: Sequence[tuple[str, str, str]],
    sockets: dict[int, socket.socket],
) -> bool:
    """Call all lower ranks, and keep their sockets; return whether that worked."""
    try:
        for lower_rank, (_, name, token) in enumerate(lower_ranks):
            connection = sockets[lower_rank] = socket.socket(
                socket.AF_UNIX, socket.SOCK_SEQPACKET
            )
            # Why: a queue that strangers have filled is an error then, and no wait.
            connection.setblocking(False)
            connection.connect(f"\0{name}")
            connection.send(_hello(rank, token))
    except OSError:
        return False
    return True


def _take_calls(
    listener: socket.socket, token: str, callers: range, sockets: dict[int, socket.socket]
) -> bool:
    """Keep the sockets of all ``callers``, whose calls wait here; return whether all were there."""
    expected = {_hello(caller, token): caller for caller in callers}
    listener.setblocking(False)
    with contextlib.suppress(OSError):  # no call waits any more, or too many files are open
        while expected:
            connection, _ = listener.accept()
            connection.setblocking(False)
            # Note: a rank has sent its message by now, so only a stranger's can be missing.
            message = b""
            with contextlib.suppress(OSError):  # it has sent nothing
                message = connection.recv(2 * _TOKEN)
            caller = expected.pop(message, None)
            if caller is None:
                connection.close()
            else:
                sockets[caller] = connection
    return not expected


def _machine() -> str:
    """Return a name for the machine, namespaces and user of this process.

    Processes with one name can reach each other's abstract addresses and map each other's files. It
    is ``""`` if this process cannot share memory.

    Raises:
        OSError: the system does not let it.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return ""
    import resource  # Unix only

    # Why a limit to the size of files counts: it holds for files in memory too. A block beyond it
    # would fail on one rank in the middle of a collective.
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return ""
    # Why made for nothing: a sandbox may forbid it, and no rank must find that out later.
    os.close(os.memfd_create("funcshard"))
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("net", "user")]
    return f"{boot_id} {' '.join(spaces)} {os.geteuid()}"
