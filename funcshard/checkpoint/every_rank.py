"""Errors of one rank, which every rank has to raise: the others would wait for ever."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from funcshard.comm import Mesh
from funcshard.core import LeafChecksums, raise_on_every_rank


@contextlib.contextmanager
def on_every_rank(mesh: Mesh, checksums: LeafChecksums | None = None) -> Iterator[None]:
    """Run the body of ``with`` on each rank; if one raises, all do.

    The body must not communicate, because ranks with an error don't.

    Arguments:
        checksums: checksums to compare at the end of the body.
    """
    fault: Exception | None = None
    try:
        yield
    except Exception as error:  # of any kind, because other ranks wait
        fault = error
    if checksums is None:
        raise_on_every_rank(mesh, fault)
    else:
        checksums.compare(fault)
