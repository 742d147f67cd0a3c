"""States of whole matrices by parameter name, as ``per_matrix`` keeps them on their owners.

The names of a leaf's entries are paths in the state of its matrix; those of a stack begin with the
number of the matrix.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.tensors import byte_view
from funcshard.checkpoint.resharding import Piece, as_pieces
from funcshard.checkpoint.state_dict import Delivery, is_full, kept_copy
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core import broadcast
from funcshard.plan import dtype_name, dtype_of, rank_at, slice_offsets
from funcshard.train import Matrix, PerMatrixStep


def matrix_states_by_path(
    states: Mapping[str, Any], step: PerMatrixStep, delivery: Delivery
) -> dict[str, dict[str, Any]]:
    """Return the states of all matrices by leaf and name; every rank has to call it.

    ``states`` are those of the matrices that this rank owns, by path.
    """
    mesh = delivery.mesh
    own_values = {path: _named(state) for path, state in states.items()}
    # Note: only owners know what their states consist of.
    rank_texts = all_gather_texts(mesh, to_text(own_values))
    rank_values = [from_text(text, mesh.device) for text in rank_texts]
    by_path: dict[str, dict[str, Any]] = {m.holder.path: {} for m in step.owners.matrices}
    for matrix, place, prefix in _every_matrix(step):
        own = matrix.buffer.own_axes(matrix.holder)
        own_position = {axis: mesh.position[axis] for axis in own}
        source = rank_at({**own_position, **place}, mesh.shape)
        for name, value in rank_values[source][matrix.leaf.path].items():
            if isinstance(value, torch.Tensor) and value.is_meta:  # else the text has it
                is_owner = place.items() <= mesh.position.items()
                if is_owner:
                    value = own_values[matrix.leaf.path][name].detach()
                if delivery.sharded:
                    elements = torch.empty(0, dtype=value.dtype, device=mesh.device)
                    if is_owner:
                        elements = value.reshape(-1).to(mesh.device)
                    copies = {
                        a: n for a, n in mesh.shape.items() if a not in (*place, *own)
                    }
                    copy = rank_at(mesh.position, copies)
                    value = Piece(elements, 0, tuple(value.shape), copy)
                else:
                    axes = [axis for axis in mesh.groups if axis not in own]
                    value = _from_rank(source, value, mesh, axes)
                    # Why not earlier: every rank takes part in the broadcast.
                    if delivery.rank0_only and mesh.rank:
                        continue
                    value = kept_copy(value, delivery.offload)
            by_path[matrix.holder.path][prefix + name] = value
    return by_path


def load_matrix_states(
    by_path: Mapping[str, Mapping[str, Any]],
    step: PerMatrixStep,
    mesh: Mesh,
    *,
    src: int | None,
    strict: bool,
) -> dict[str, Any]:
    """Return the states of the matrices that this rank owns; every rank has to call it with src.

    Arguments:
        by_path: the states of all matrices by leaf and name.
        step: the optimizer's step.
        mesh: the ranks.
        src: the rank that has the full tensors; ``None`` if every rank does.
        strict: whether a matrix must have a state.
    """
    states = {}
    for matrix, place, prefix in _every_matrix(step):
        loaded = {
            name.removeprefix(prefix): value
            if src is None
            else _from_rank(src, value, mesh)
            for name, value in by_path.get(matrix.holder.path, {}).items()
            if name.startswith(prefix)
        }
        # Why not earlier: every rank takes part in the broadcasts of all matrices.
        if not place.items() <= mesh.position.items():
            continue
        # Note: init tells the form of the state, as for every pair of functions.
        zeros = torch.zeros(
            matrix.shape(), dtype=matrix.buffer.shard_dtype, device=mesh.device
        )
        initial_state = step.init_matrix(zeros)
        initial_values = _named(initial_state)
        if loaded.keys() != initial_values.keys() and (loaded or (strict and by_path)):
            raise ValueError(
                f"the optimizer's state dict must hold {list(initial_values)} of matrix "
                f"{matrix.leaf.path!r}, as init makes them; found {list(loaded)}: it is of another "
                "optimizer, or update returned a state of another form than init"
            )
        values = [
            _loaded(loaded.get(name, initial), initial, f"{name!r} of {matrix.leaf.path!r}")
            for name, initial in initial_values.items()
        ]
        states[matrix.leaf.path] = tree.flatten(initial_state)[1](values)
    return states


def _every_matrix(step: PerMatrixStep) -> Iterator[tuple[Matrix, dict[str, int], str]]:
    """Yield each matrix of the whole model, where its owners are, and its names' prefix."""
    for matrix in step.owners.matrices:
        if matrix.item is None:
            yield matrix, matrix.place(), ""
            continue
        holder = matrix.holder
        # Along these axes, ranks hold other matrices of the stack.
        axes = {cut.axis: cut.ranks for cut in holder.cuts if cut.dim == 0}
        for indices in itertools.product(*map(range, axes.values())):
            place = dict(zip(axes, indices, strict=True))
            first_item = slice_offsets(holder.shape, holder.cuts, place)[0]
            yield matrix, {**place, **matrix.place()}, f"{first_item + matrix.item}."


def _named(state: Any) -> dict[str, Any]:
    """Return the leaves of a matrix's state by path."""
    _, leaves, paths = tree.describe(state)
    # Note: a state that is one tensor has no path.
    return {path or "state": leaf for path, leaf in zip(paths, leaves, strict=True)}


def _from_rank(src: int, value: Any, mesh: Mesh, axes: list[str] | None = None) -> Any:
    """Return the value of rank ``src`` on the ranks along ``axes``, by default on all."""
    if not isinstance(value, torch.Tensor) or not value.ndim:
        return value  # the text has it
    whole_value = torch.empty(value.shape, dtype=value.dtype, device=mesh.device)
    if not value.is_meta:
        whole_value.copy_(value)
    if axes != []:
        broadcast(whole_value, src, mesh, axes, label="optimizer state")
    return whole_value


def _loaded(value: Any, initial: Any, where: str) -> Any:
    """Return a loaded entry on the device of the initial one, as a copy."""
    if pieces := as_pieces(value):
        whole_pieces = [p for p in pieces if p.tensor.numel() == math.prod(p.shape)]
        if not whole_pieces:
            raise ValueError(
                f"no piece of {where} has its elements on this rank, which owns the matrix: pass "
                "the pieces of all ranks, as in {name: [pieces of each rank]}"
            )
        value = whole_pieces[0].tensor.view(whole_pieces[0].shape)
    shape, initial_shape = getattr(value, "shape", None), getattr(initial, "shape", None)
    if shape != initial_shape:
        raise ValueError(
            f"{where} in the optimizer's state dict must have shape {initial_shape}; found "
            f"{shape}: it is of another optimizer"
        )
    if isinstance(value, torch.Tensor):
        return value.detach().to(initial.device, copy=True)
    return value


# --- values of one rank as a text for all others ------------------------------------------------

_TENSOR = "<tensor>"  # the key of a tensor's facts, which is no name of an entry


def to_text(values: Any, *, with_elements: bool = False) -> str:
    """Return nested dictionaries as JSON; of a tensor its dtype and shape.

    A tensor of one element, or ``with_elements`` any, comes with its elements.
    """

    def encode(value: Any) -> dict[str, Any]:
        if not is_full(value):
            raise TypeError(
                "a rank can send full tensors, numbers and strings to others; found a "
                f"{type(value).__name__}: convert it"
            )
        elements = None
        if with_elements or value.numel() == 1:
            # Why bytes: they are exact for every dtype.
            elements = byte_view(value.cpu()).tolist()
        on_cpu = value.device.type == "cpu"
        return {_TENSOR: [dtype_name(value.dtype), list(value.shape), elements, on_cpu]}

    return json.dumps(values, default=encode)


def from_text(text: str, device: torch.device) -> Any:
    """Return what ``to_text`` wrote; a tensor without elements is on the meta device."""

    def decode(data: dict[str, Any]) -> Any:
        if _TENSOR not in data:
            return data
        dtype_text, shape, elements, on_cpu = data[_TENSOR]
        dtype = dtype_of(dtype_text)
        if elements is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        element_bytes = torch.tensor(elements, dtype=torch.uint8, device="cpu")
        value = element_bytes.view(dtype).reshape(shape)
        return value if on_cpu else value.to(device)

    return json.loads(text, object_hook=decode)


def broadcast_text(text: str, src: int, mesh: Mesh) -> str:
    """Return the text of rank ``src``; every rank has to call it."""
    # Why not meta: the text has values also on a mesh that stands for an accelerator.
    device = torch.device("cpu") if mesh.device.type == "meta" else mesh.device
    text_bytes = torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)
    text_size = torch.tensor([text_bytes.numel()], device=device)
    # Why two broadcasts, and no gather of texts: a gather brings every rank the texts of all.
    broadcast(text_size, src, mesh, label="optimizer state")
    if mesh.rank != src:
        text_bytes = torch.empty(int(text_size), dtype=torch.uint8, device=device)
    broadcast(text_bytes, src, mesh, label="optimizer state")
    return bytes(text_bytes.tolist()).decode()
