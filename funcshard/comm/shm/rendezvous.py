"""The rendezvous of the ranks of one machine: a socket between every pair of them.

``connect`` gives a rank one socket to every other rank of its group, if all of these ranks run on
one machine; ``close`` closes the sockets. It takes four steps:

1. Each rank listens at an abstract address. The ranks tell each other their addresses, and rank 0
   draws a secret and tells it too, through the group that they have already.
2. Each rank connects to all lower ranks, and introduces itself.
3. The two ends of a connection prove to each other that they know the secret.
4. The ranks tell each other whether all of this worked. If one rank failed, no rank is connected.

Every process of the machine can find an abstract address. So a rank may be called by processes that
are no ranks: by silent ones, by ones that send anything, and by very many. A call counts once it
has proven itself; all others are hung up, and the rank never waits for a single one of them.

The proof is a challenge in both directions. Each end sends a number that it has drawn for this
connection, and its far end answers with a keyed hash (HMAC) of both numbers, both ranks and the
side that it's on. So an answer is worth nothing in another connection or direction, and the
secret itself is never sent over a socket. A call has four messages: the caller's rank and number,
the called rank's number and proof, the caller's proof, and the called rank's word that it holds.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import secrets
import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_NUMBER, _HASH = 16, 32  # bytes of a drawn number, and of a keyed hash
_HELLO = struct.Struct(f"<q{_NUMBER}s")  # the rank that calls, and its number
_WELCOME = b"welcome"  # the last message of a call

_TIMEOUT = 20.0  # seconds for a step of ranks that are known to be alive
_MOST_CALLS = 128  # calls that have not proven themselves
_QUEUE = 1024  # calls that wait to be taken: a rank takes none before all ranks have called


def connect(
    rank: int, size: int, all_gather_text: Callable[[str], list[str]], *, wanted: bool = True
) -> dict[int, socket.socket]:
    """Connect every pair of ranks; every rank has to call this; ``close`` is the inverse.

    Arguments:
        rank: this process's rank.
        size: number of ranks.
        all_gather_text: returns every rank's text, in order of ranks.
        wanted: whether this rank wants to be connected.

    Returns:
        A socket to each other rank, by rank. The dictionary is empty on every rank if the ranks are
        not all on one machine, if one rank does not want to be connected, or if the system refuses.
    """
    machine, name = _machine() if wanted else "", f"funcshard-{secrets.token_hex(16)}"
    listener = _listen(name, size + _QUEUE) if machine else None
    machine = machine if listener is not None else ""
    secret = secrets.token_hex(_HASH) if rank == 0 else ""
    answers = None
    try:
        answers = [
            json.loads(answer_text)
            for answer_text in all_gather_text(json.dumps([machine, name, secret]))
        ]
        if listener is None or any(other_machine != machine for other_machine, _, _ in answers):
            return {}
        meeting = _Meeting(
            rank, listener, bytes.fromhex(answers[0][2]), [address for _, address, _ in answers]
        )
        try:
            # Why two exchanges: a rank that fails to call would be waited for in the next step.
            for step in (meeting.call, meeting.prove):
                worked = step(time.monotonic() + _TIMEOUT)
                if not all(
                    json.loads(answer_text) for answer_text in all_gather_text(json.dumps(worked))
                ):
                    close(meeting.proven)
                    return {}
        except BaseException:
            close(meeting.proven)
            raise
        finally:
            meeting.hang_up()
        return meeting.proven
    finally:
        if listener is not None:
            listener.close()


def close(sockets: Mapping[int, socket.socket]) -> None:
    """Close the sockets that ``connect`` returned; ``connect`` is the inverse."""
    for peer_socket in sockets.values():
        peer_socket.close()


@dataclass(slots=True, eq=False)
class _Call:
    """A connection whose far end has not proven yet that it is a rank.

    Attributes:
        connection: the socket.
        caller: the rank that calls; ``None`` if it has not introduced itself.
        theirs, own: the numbers that the caller and the called rank have drawn.
    """

    connection: socket.socket
    caller: int | None = None
    theirs: bytes = b""
    own: bytes = b""


class _Meeting:
    """The sockets of one rank until all ranks are connected.

    Arguments:
        rank: this process's rank.
        listener: the socket at which this rank is called.
        secret: the secret of the ranks.
        addresses: the address of each rank.

    Attributes:
        proven: a socket to each other rank that has proven itself, by rank.
    """

    def __init__(
        self, rank: int, listener: socket.socket, secret: bytes, addresses: list[str]
    ) -> None:
        self.proven: dict[int, socket.socket] = {}
        self._rank, self._secret, self._addresses = rank, secret, addresses
        self._listener = listener
        self._called: dict[int, _Call] = {}  # lower ranks that this rank has called, by rank
        self._calls: dict[int, _Call] = {}  # calls from others by file, the oldest first
        # Lower ranks that have hung up, as one does that strangers flood.
        self._lost: list[int] = []
        listener.setblocking(False)

    def call(self, end: float) -> bool:
        """Call every lower rank; return whether all were reached before ``end``."""
        return all(self._call(peer_rank, end) for peer_rank in range(self._rank))

    def prove(self, end: float) -> bool:
        """Prove and check all connections; return whether all ranks were there before ``end``."""
        while len(self.proven) < len(self._addresses) - 1:
            seconds_left = end - time.monotonic()
            if seconds_left <= 0 or (self._lost and not self._call(self._lost.pop(), end)):
                return False
            if not self._lost:
                self._step(seconds_left)
        return True

    def hang_up(self) -> None:
        """Close all connections that are not proven."""
        for call in (*self._called.values(), *self._calls.values()):
            call.connection.close()
        self._called.clear()
        self._calls.clear()

    def _call(self, other: int, end: float) -> bool:
        """Call a lower rank and introduce this one; return whether it was reached in time."""
        random_bytes = secrets.token_bytes(_NUMBER)
        connection = None
        while time.monotonic() < end:
            try:
                connection = connection or socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                connection.setblocking(False)
                connection.connect(f"\0{self._addresses[other]}")
                connection.send(_HELLO.pack(self._rank, random_bytes))
            except BlockingIOError:  # its queue is full of calls, perhaps of strangers
                self._step(0.01)
                continue
            except OSError:
                break
            self._called[other] = _Call(connection, self._rank, random_bytes)
            return True
        if connection is not None:
            connection.close()
        return False

    def _step(self, seconds: float) -> None:
        """Wait at most ``seconds`` until something comes, and handle all that has come."""
        poll = select.poll()
        called = {call.connection.fileno(): peer_rank for peer_rank, call in self._called.items()}
        for file in (self._listener.fileno(), *called, *self._calls):
            poll.register(file, select.POLLIN)
        for file, _ in poll.poll(seconds * 1000):
            if file in called:
                self._hear_called(called[file])
            elif file in self._calls:
                self._hear_caller(file)
            elif file == self._listener.fileno():
                self._accept()

    def _accept(self) -> None:
        """Take the calls in the queue; of too many, hang up the oldest."""
        for _ in range(_MOST_CALLS):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # the caller has gone, or this process cannot open more files
                if error.errno in (errno.EMFILE, errno.ENFILE) and not self._hang_up_one():
                    time.sleep(0.01)
                return
            if _user(connection) != os.geteuid():
                connection.close()
                continue
            connection.setblocking(False)
            if len(self._calls) >= _MOST_CALLS:
                self._hang_up_one()
            self._calls[connection.fileno()] = _Call(connection)
            # Why at once: a rank introduces itself as it calls, so it is not among those without a
            # word.
            self._hear_caller(connection.fileno(), at_once=True)

    def _hang_up_one(self) -> bool:
        """Hang up one call that is not proven; return whether there was one."""
        file = next(
            (file for file, call in self._calls.items() if call.caller is None),
            next(iter(self._calls), None),
        )
        if file is not None:
            self._calls.pop(file).connection.close()
        return file is not None

    def _hear_caller(self, file: int, *, at_once: bool = False) -> None:
        """Read one message of a caller: its introduction, or then its proof."""
        call = self._calls[file]
        try:
            data = call.connection.recv(_HELLO.size + _HASH)
            if call.caller is None and len(data) == _HELLO.size:
                caller, call.theirs = _HELLO.unpack(data)
                if self._rank < caller < len(self._addresses):
                    call.caller, call.own = caller, secrets.token_bytes(_NUMBER)
                    call.connection.send(call.own + self._proof("called", caller, self._rank, call))
                    return
            elif call.caller is not None and hmac.compare_digest(
                data, self._proof("caller", call.caller, self._rank, call)
            ):
                call.connection.send(_WELCOME)
                proven_caller = self.proven.pop(call.caller, None)
                if (
                    proven_caller is not None
                ):  # an earlier call of the same rank, which it has given up
                    proven_caller.close()
                self.proven[call.caller] = self._calls.pop(file).connection
                return
        except BlockingIOError:
            if at_once:
                return
        except OSError:
            pass
        self._calls.pop(file).connection.close()

    def _hear_called(self, other: int) -> None:
        """Read one message of a rank that was called: its proof, or then its welcome."""
        call = self._called[other]
        try:
            data = call.connection.recv(_NUMBER + _HASH + 1)
            if call.own and data == _WELCOME:
                self.proven[other] = self._called.pop(other).connection
                return
            call.own, proof = data[:_NUMBER], data[_NUMBER:]
            if hmac.compare_digest(proof, self._proof("called", self._rank, other, call)):
                call.connection.send(self._proof("caller", self._rank, other, call))
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        self._called.pop(other).connection.close()
        self._lost.append(other)

    def _proof(self, side: str, caller: int, called: int, call: _Call) -> bytes:
        """Return the keyed hash by which one side of a call proves that it knows the secret."""
        message = b"".join(
            [struct.pack("<8s2q", side.encode(), caller, called), call.theirs, call.own]
        )
        return hmac.digest(self._secret, message, "sha256")


def _machine() -> str:
    """Return a name for the machine, namespaces and user of this process.

    Two processes with the same name can reach each other's abstract addresses and map each other's
    files. The name is ``""`` if this process cannot share memory.
    """
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return ""
    import resource  # Unix only

    # Why a limit to the size of files counts: it holds for files in memory too. A block beyond it
    # would fail on one rank in the middle of a collective.
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return ""
    try:
        os.close(os.memfd_create("funcshard"))
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("net", "user")]
        return " ".join(
            [
                Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
                *spaces,
                str(os.geteuid()),
            ]
        )
    except OSError:
        return ""


def _listen(name: str, queue: int) -> socket.socket | None:
    """Return a socket that listens at an abstract address; ``None`` if the system refuses."""
    listener = None
    try:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(f"\0{name}")  # the abstract namespace leaves no file behind
        listener.listen(queue)
    except OSError:
        if listener is not None:
            listener.close()
        return None
    return listener


def _user(connection: socket.socket) -> int:
    """Return the user whose process is at the far end of a connection."""
    _, user, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return int(user)
