"""Collectives between the ranks of one machine, through shared memory.

- ``pool``: memory that is used again.
- ``transport``: sockets and messages between ranks.
- ``backend``: the collectives.
"""

from __future__ import annotations

from funcshard.comm.shm.backend import Shared
from funcshard.comm.shm.pool import Pool, private
from funcshard.comm.shm.transport import connect

__all__ = ["Pool", "Shared", "connect", "private"]
