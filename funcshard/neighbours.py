"""Sockets between the processes of one machine: where the ranks of a group all run on one, each gets one to every other."""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["close", "connect"]

_RANK = struct.Struct("<q")
_SECONDS = 60.0  # for what a process that has answered a moment ago still has to do


def connect(rank: int, size: int, texts: Callable[[str], list[str]], *, wanted: bool = True) -> dict[int, socket.socket]:
    """Connect every pair of ranks; every rank has to call this; ``close`` is the inverse.

    Arguments:
        rank: this process's rank.
        size: number of ranks.
        texts: gives every rank's text, in order of ranks.
        wanted: whether this rank wants to be connected.

    Returns:
        A socket to each other rank, which keeps the bounds of messages and ends with its process. None at all, on every
        rank, if the ranks are not all on one machine, one does not want to, or the system does not let them.
    """
    listener, place, name = None, _place() if wanted else "", f"funcshard-{secrets.token_hex(16)}"
    if place:
        listener = _listener(name, size)
        place = place if listener is not None else ""
    found: dict[int, socket.socket] = {}
    try:
        answers = [json.loads(text) for text in texts(json.dumps([place, name]))]
        if listener is None or any(other != place for other, _ in answers):
            return {}
        # a connection stands once it is in the listener's queue, so that nobody waits for anybody here
        reached = True
        for other in range(rank):
            try:
                found[other] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                found[other].settimeout(_SECONDS)
                found[other].connect(f"\0{answers[other][1]}")
                found[other].send(_RANK.pack(rank))
            except OSError:
                reached = False
        if not all(json.loads(text) for text in texts(json.dumps(reached))):
            close(found)
            return {}
        listener.settimeout(_SECONDS)
        while len(found) < size - 1:
            other_end, _ = listener.accept()
            if _user(other_end) != os.getuid():
                other_end.close()
                continue
            other_end.settimeout(_SECONDS)
            (other,) = _RANK.unpack(other_end.recv(_RANK.size))
            found[other] = other_end
    except BaseException:
        close(found)
        raise
    finally:
        if listener is not None:
            listener.close()
    return found


def close(sockets: Mapping[int, socket.socket]) -> None:
    """Close what ``connect`` gave; ``connect`` is the inverse."""
    for each in sockets.values():
        each.close()


def _place() -> str:
    """What processes have in common that can reach each other's abstract addresses; ``""`` where there are none."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return ""
    import resource  # Unix only

    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return ""  # files in memory are files too, and one too large would fail on one rank in the middle of a collective
    try:
        os.close(os.memfd_create("funcshard"))
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "user")]
        return " ".join([Path("/proc/sys/kernel/random/boot_id").read_text().strip(), *spaces, str(os.getuid())])
    except OSError:
        return ""


def _listener(name: str, size: int) -> socket.socket | None:
    """Where the others can connect; ``None`` where the system does not let us."""
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{name}")  # an address in the abstract namespace, which leaves no file behind
        listener.listen(size)
    except OSError:
        if listener is not None:
            listener.close()
        return None
    return listener


def _user(other_end: socket.socket) -> int:
    _, user, _ = struct.unpack("3i", other_end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(user)
