"""Refuse torch's loops over unit vectors where a collective would add results of different ones.

``torch.func.jacrev``, ``jacfwd`` and ``hessian`` take as many derivatives as this rank's tensors
have elements. Every rank does so at the same time. So where a tangent or a cotangent crosses ranks,
a collective adds the derivatives along the k-th unit vector of every rank, and these unit vectors
are of different elements. The result has the shape of a Jacobian, and is none.

The autograd Functions of ``flat_buffer`` and ``collectives`` call ``noted`` when autograd records
them, and one of the ``refuse`` functions before they communicate a derivative. ``BufferComm.loops``
carries the loops from forward to backward, because on CUDA torch runs backward in another thread,
which does not see the caller. A recomputation opens its own transforms; ``acting_for`` says for
which loop.

All other results are true objects, which docs/transforms.md lists. A sum of the ranks' gradients is
one, so ``jacrev`` may reduce them: row i is the sum over ranks of the gradients of output i.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from funcshard._utils import BasisLoop, basis_loops, transform_level, unwrapped_bytes
from funcshard.comm import all_gather_texts
from funcshard.core.axis_comm import AxisComm, SumComm
from funcshard.core.buffer_comm import BufferComm

T = TypeVar("T")
Comm = TypeVar("Comm", BufferComm, AxisComm, SumComm)

Loops = Mapping[int, BasisLoop]  # by the level of the loop's transform

# The loops that a recomputation is part of, and that its own frames do not show.
_known: contextvars.ContextVar[Loops] = contextvars.ContextVar("funcshard_basis_loops", default={})  # noqa: B039  # never written to


_REMEDY = (
    "take torch.func.jvp(torch.func.grad(loss), ...), or torch.func.jvp(f, ...), along a basis of "
    "the whole parameters, as docs/transforms.md, 'Columns', does"
)


def current_loops() -> Loops:
    """Return the loops that run here."""
    return {**_known.get(), **basis_loops(below_transforms.__code__)}


@contextlib.contextmanager
def within(loops: Loops) -> Iterator[None]:
    """Take ``loops`` as running here, besides those of the frames."""
    token = _known.set(loops)
    try:
        yield
    finally:
        _known.reset(token)


def below_transforms(f: Callable[..., T], *args: Any) -> T:
    """Return ``f(*args)``, computed below all transforms of the callers, with levels from 0."""
    with within({level: loop for level, loop in _known.get().items() if level == 0}):
        return f(*args)


@contextlib.contextmanager
def acting_for(loop: BasisLoop | None, level: int) -> Iterator[None]:
    """Take the transform that will run at ``level`` as part of ``loop``, or of no loop."""
    loops = {
        level_index: basis_loop
        for level_index, basis_loop in _known.get().items()
        if level_index < level
    }
    with within(loops if loop is None else {**loops, level: loop}):
        yield


def noted(comm: Comm) -> tuple[Comm, BasisLoop | None]:
    """Return ``comm`` with the loops that run here, and the one at the level of this transform."""
    loops = {**comm.loops, **current_loops()}
    return dataclasses.replace(comm, loops=loops) if loops else comm, loops.get(transform_level())


def noted_outer(comm: BufferComm) -> BufferComm:
    """Return ``comm`` with the loops that the gradient of a gather is part of, outside transforms.

    That gradient is taken by the innermost loop. So only the loops around that one differentiate
    it.
    """
    loops = basis_loops(outer=True)
    return dataclasses.replace(comm, loops=loops) if loops else comm


def refuse_cut(comm: BufferComm, loop: BasisLoop | None, vector: str) -> None:
    """Raise if an all-gather of derivatives would add unit vectors of all ranks' slices.

    ``vector`` is ``"column"`` for tangents of shards, and ``"row"`` for cotangents of gradients.
    """
    if loop is None or not comm.topology.cut:
        return
    place, index = _unit(comm), "k"
    if vector == "row":
        place, index = f"the gradient of {_unit(comm)}", "i"
    raise RuntimeError(
        f"{_caller(loop)} would mix {vector}s at {place}, cut over {comm.mesh.shard.size} ranks: "
        "every rank takes the unit vectors of its own slice at the same time, so "
        f"{vector} {index} would be the sum of {vector} {index} of every rank's slice; {_REMEDY}"
    )


def refuse_mixed_sum(comm: BufferComm, loop: BasisLoop | None) -> None:
    """Raise if a reduction of tangents would add derivatives by different quantities.

    They are by the same ones if all ranks differentiate by the same tensors, such as shards that
    are not cut. So all ranks compare these tensors.
    """
    if loop is None or comm.mesh.world_size == 1:
        return
    digest = hashlib.sha256()
    for tensor in loop.arguments:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + unwrapped_bytes(tensor))
    texts = all_gather_texts(comm.mesh, digest.hexdigest(), "the tensors of a basis")
    if comm.topology.cut or any(rank_text != texts[0] for rank_text in texts):
        raise RuntimeError(
            f"{_caller(loop)} would mix columns at the gradient of {_unit(comm)}: the "
            f"{comm.mesh.world_size} ranks differentiate by tensors of their own at the same time, "
            "and the reduction would add column k of every rank; call torch.func.jvp along a "
            "tangent of your own, which is zero on all ranks but one"
        )


def refuse_mixed_ranks(comm: AxisComm | SumComm, loop: BasisLoop | None) -> None:
    """Raise if ``psum`` or the like would mix derivatives along unit vectors of several ranks."""
    if loop is None or comm.ranks == 1:
        return
    name = "psum" if isinstance(comm, SumComm) else comm.title
    column_kind, of, call = (
        ("columns", "arguments", "jvp") if loop.arguments else ("rows", "outputs", "vjp")
    )
    raise RuntimeError(
        f"{_caller(loop)} would mix {column_kind} at {comm.title} on {comm.ranks} ranks: every rank takes "
        f"the unit vectors of its own {of} at the same time, and {name} would "
        f"{'add' if name == 'psum' else 'mix'} the derivatives along them; take "
        f"{name if name == 'psum' else 'it'} of the transform's result, call torch.func.grad if "
        f"the function returns one number, or torch.func.{call} with vectors of your own"
    )


def _caller(loop: BasisLoop) -> str:
    return f"{loop.name}, which hessian uses too,"


def _unit(comm: BufferComm) -> str:
    return f"unit {comm.unit or '(root)'!r}"
