"""Collectives between the ranks of one machine, through shared memory.

The rest of the library uses ``SharedMemoryBackend`` alone, so skip this wing at first. In reading
order:

- ``pool``: blocks of memory, private or shared, that are used again.
- ``rendezvous``: sockets between the processes of one machine, which show tokens to prove that they
  are ranks.
- ``exchange``: the protocol: the messages through these sockets, the order of writes, messages and
  reads, and the reuse of memory.
- ``backend``: the collectives.
"""

from __future__ import annotations

from funcshard.comm.shm.backend import SharedMemoryBackend
from funcshard.comm.shm.exchange import Exchange
from funcshard.comm.shm.pool import Pool, private_block
from funcshard.comm.shm.rendezvous import connect

__all__ = ["Exchange", "Pool", "SharedMemoryBackend", "connect", "private_block"]
