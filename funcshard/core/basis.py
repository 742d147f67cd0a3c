"""Raise for torch's loops over unit vectors where a collective would add results of different ones.

``torch.func.jacrev``, ``jacfwd`` and ``hessian`` loop over the elements of this rank's tensors, on
every rank at the same time. Where a derivative crosses ranks, a collective adds those along the
k-th unit vector of every rank, which are by different elements: the result has the shape of a
Jacobian, and is none. docs/transforms.md, "Columns", lists the results that are right.

Autograd Functions call ``noted`` when autograd records them, and one of the ``refuse`` functions
before they communicate a derivative.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from funcshard._utils.torch_private import (
    BasisLoop,
    basis_loops,
    transform_level,
    unwrapped_bytes,
)
from funcshard.comm import all_gather_texts
from funcshard.core.buffer_comm import BufferComm

T = TypeVar("T")

Loops = Mapping[int, BasisLoop]  # by the level of the loop's transform

# The loops that a recomputation is part of, and that its own frames do not show.
_known: contextvars.ContextVar[Loops] = contextvars.ContextVar(
    "funcshard_basis_loops",
    default={},  # noqa: B039  # never written to
)


_REMEDY = (
    "take torch.func.jvp(torch.func.grad(loss), ...), or torch.func.jvp(f, ...), along a basis of "
    "the whole parameters, as docs/transforms.md, 'Columns', does"
)


def current_loops() -> Loops:
    """Return the loops that run here."""
    return {**_known.get(), **basis_loops(below_transforms.__code__)}


@contextlib.contextmanager
def within(loops: Loops) -> Iterator[None]:
    """Take ``loops`` as running here too."""
    context_token = _known.set(loops)
    try:
        yield
    finally:
        _known.reset(context_token)


def below_transforms(f: Callable[..., T], *args: Any) -> T:
    """Return ``f(*args)``, computed below all transforms of the callers."""
    with within(below(_known.get(), 1)):
        return f(*args)


def below(loops: Loops, level: int) -> Loops:
    """Return the loops around the transform at ``level``."""
    return {loop_level: loop for loop_level, loop in loops.items() if loop_level < level}


@contextlib.contextmanager
def acting_for(loop: BasisLoop | None, level: int) -> Iterator[None]:
    """Take the transform that will run at ``level`` as part of ``loop``, or of no loop."""
    loops = dict(below(_known.get(), level))
    if loop is not None:
        loops[level] = loop
    with within(loops):
        yield


def noted(comm: Any) -> tuple[Any, BasisLoop | None]:
    """Return ``comm`` with the loops that run here, and the loop at the level of this transform."""
    active_loops = {**comm.loops, **current_loops()}
    if not active_loops:
        return comm, None
    # Why carried along: on CUDA torch runs backward in another thread, which does not see the
    # caller's frames.
    return dataclasses.replace(comm, loops=active_loops), active_loops.get(
        transform_level()
    )


def noted_outer(comm: BufferComm) -> BufferComm:
    """Return ``comm`` with the loops around the one that takes the gradient of a gather."""
    # Why outer: the innermost loop takes that gradient, and only those around it differentiate it.
    outer_loops = basis_loops(outer=True)
    if not outer_loops:
        return comm
    return dataclasses.replace(comm, loops=outer_loops)


def refuse_cut(comm: BufferComm, loop: BasisLoop | None, vector: str) -> None:
    """Raise if an all-gather of derivatives would add unit vectors of all ranks' slices.

    Arguments:
        comm: the communication of the buffer.
        loop: the loop that runs, if any.
        vector: ``"column"`` for tangents of shards, ``"row"`` for cotangents of gradients.
    """
    if loop is None or not comm.topology.cut:
        return
    place, vector_index = _unit(comm), "k"
    if vector == "row":
        place, vector_index = f"the gradient of {place}", "i"
    raise RuntimeError(
        f"{_caller(loop)} would mix {vector}s at {place}, cut over {comm.mesh.shard.size} ranks: "
        f"every rank takes unit vectors of its own slice, so {vector} {vector_index} would be the "
        f"sum over all slices; {_REMEDY}"
    )


def refuse_mixed_sum(comm: BufferComm, loop: BasisLoop | None) -> None:
    """Raise if a reduction of tangents would add derivatives by different quantities."""
    if loop is None or comm.mesh.world_size == 1:
        return
    # Why compared: the quantities are the same if all ranks differentiate by the same tensors, such
    # as shards that are not cut.
    digest = hashlib.sha256()
    for tensor in loop.arguments:
        digest.update(
            f"{tuple(tensor.shape)} {tensor.dtype}".encode() + unwrapped_bytes(tensor)
        )
    rank_digests = all_gather_texts(comm.mesh, digest.hexdigest(), "the tensors of a basis")
    if comm.topology.cut or any(rank_text != rank_digests[0] for rank_text in rank_digests):
        raise RuntimeError(
            f"{_caller(loop)} would mix columns at the gradient of {_unit(comm)}: the "
            f"{comm.mesh.world_size} ranks differentiate by different tensors, and the reduction "
            "would add column k of every rank. Call torch.func.jvp along a tangent that is zero on "
            "all ranks but one"
        )


def refuse_mixed_ranks(comm: Any, loop: BasisLoop | None) -> None:
    """Raise if ``psum`` or the like would mix derivatives along unit vectors of several ranks."""
    if loop is None or comm.ranks == 1:
        return
    vector_kind, vector_source, product_name = "rows", "outputs", "vjp"
    if loop.arguments:
        vector_kind, vector_source, product_name = "columns", "arguments", "jvp"
    raise RuntimeError(
        f"{_caller(loop)} would mix {vector_kind} at {comm.title} on {comm.ranks} ranks: every rank "
        f"takes unit vectors of its own {vector_source}. Take the collective of the result, "
        f"torch.func.grad of one number, or torch.func.{product_name} with vectors of your own"
    )


def _caller(loop: BasisLoop) -> str:
    return f"{loop.name}, which hessian uses too,"


def _unit(comm: BufferComm) -> str:
    return f"unit {comm.unit or '(root)'!r}"
