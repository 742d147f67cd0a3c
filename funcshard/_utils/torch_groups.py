"""Process groups of torch."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist


def default_store() -> dist.Store:
    """Return the key-value store of the default process group."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def store_for_thread(store: Any) -> Any:
    """Return a store for a thread that runs while another one waits for an answer."""
    # Why not a clone of a file: threads can share it, and the end of a clone keeps all threads of
    # the process waiting for minutes if somebody deletes the file's folder in that moment.
    if _file_of(store):
        return store
    return store.clone()


def store_is_gone(store: Any) -> bool:
    """Return whether a store is a deleted file, for which every call waits minutes."""
    file = _file_of(store)
    return file is not None and not os.path.exists(file)


def reconnected(store: Any) -> Any:
    """Return a store after one of its calls has failed, with a new connection if it has one.

    Raises:
        ConnectionRefusedError: the process that holds it has ended.
        OSError, RuntimeError: it can't be reached now.
    """
    server = _without_prefix(store)
    if not isinstance(server, dist.TCPStore):
        return store
    # Why first: torch's store tries to reach one that has ended for as long as its timeout.
    socket.create_connection((server.host, server.port), timeout=1.0).close()
    return store.clone()


def _without_prefix(store: Any) -> Any:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _file_of(store: Any) -> str | None:
    # Only a FileStore has a path.
    path: str | None = getattr(_without_prefix(store), "path", None)
    return path


def group_timeout(group: Any) -> datetime.timedelta:
    """Return the timeout of a process group."""
    default_timeout: datetime.timedelta = group._get_backend(
        group._device_types[0]
    ).options._timeout
    return default_timeout


def has_ended(work: Any) -> bool:
    """Return whether a work of gloo or of shared memory has ended, well or not."""
    future = getattr(work, "get_future", None)
    # Why not ``is_completed()`` of gloo: it waits for the work's lock and holds Python's meanwhile.
    # In a profiled step gloo's thread holds the work's lock when it ends the work, and waits for
    # Python's to copy hooks of saved tensors: a deadlock.
    return bool(work.is_completed() if future is None else future().done())


def new_group(
    ranks: Sequence[int], backend: str, timeout: datetime.timedelta, name: str
) -> Any:
    """Return a new process group. Exactly its ranks have to call this.

    Arguments:
        name: a text that no other group has, the same on all ranks.
    """
    default_group = dist.group.WORLD
    # A backend with ``new_group`` makes groups by itself.
    if backend == "fake" or callable(getattr(default_group, "new_group", None)):
        return dist.new_group(
            list(ranks), timeout, backend, use_local_synchronization=True, sort_ranks=False
        )
    # Why not ``dist.new_group``: it names a group by the number of groups in this process, so ranks
    # that have made other groups before would wait under different names. Why a hash: torch makes
    # names of files and of graph nodes of it.
    hashed_name: Any = hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest()
    # The index in the group, not in the job.
    own_index = list(ranks).index(dist.get_rank())
    make_group, torch_world = (
        dist.distributed_c10d._new_process_group_helper,
        dist.distributed_c10d._world,
    )
    new_process_group, _ = make_group(
        len(ranks),
        own_index,
        list(ranks),
        dist.Backend(backend),
        default_store(),
        hashed_name,
        timeout=timeout,
    )
    torch_world.pg_group_ranks[new_process_group] = {
        rank: position for position, rank in enumerate(ranks)
    }
    return new_process_group


def abort_group(group: Any) -> None:
    """End the collectives of a process group, if torch and its backend can."""
    abort_function = getattr(group, "abort", None)
    with contextlib.suppress(RuntimeError):  # it has ended already, or the backend cannot
        if abort_function is not None:
            abort_function()


def destroy_group(group: Any) -> None:
    """Close a process group's connections and forget it, unless torch has done so."""
    if group is not None:  # which would be all groups
        # ValueError: torch has forgotten it. RuntimeError: its connections are closed already.
        with contextlib.suppress(ValueError, RuntimeError):
            dist.destroy_process_group(group)
