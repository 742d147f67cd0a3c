"""States of whole matrices by parameter name, as ``per_matrix`` keeps them on their owners.

The names of a leaf's entries are paths in the state of its matrix; those of a stack begin with the
number of the matrix.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from funcshard._utils import tree
from funcshard.checkpoint.pieces import Piece, as_pieces
from funcshard.checkpoint.state_dict import kept_copy
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core import broadcast
from funcshard.plan import dtype_name, dtype_of, own_axes, rank_at, slice_offsets
from funcshard.train import Matrix, PerMatrixStep


def matrix_states_by_path(
    states: Mapping[str, Any],
    step: PerMatrixStep,
    mesh: Mesh,
    *,
    rank0_only: bool,
    offload: bool,
    sharded: bool,
) -> dict[str, dict[str, Any]]:
    """Return the states of all matrices by leaf and name; every rank has to call it.

    Arguments:
        states: the states of the matrices that this rank owns, by path.
        step: the optimizer's step.
        mesh: the ranks.
        rank0_only: as in ``to_state_dict``.
        offload: the same.
        sharded: the same.
    """
    own_values = {path: _named(state) for path, state in states.items()}
    own_facts = {
        path: [(name, _facts(value, path)) for name, value in values.items()]
        for path, values in own_values.items()
    }
    # Note: only owners know what their states consist of.
    rank_facts = [json.loads(text) for text in all_gather_texts(mesh, json.dumps(own_facts))]
    by_path: dict[str, dict[str, Any]] = {m.holder.path: {} for m in step.owners.matrices}
    for matrix, place, prefix in _every_matrix(step):
        own = own_axes(matrix.buffer.local, matrix.holder.cuts)
        source_position = {
            axis: place.get(axis, index if axis in own else 0)
            for axis, index in mesh.position.items()
        }
        source = rank_at(source_position, mesh.shape)
        is_owner = place.items() <= mesh.position.items()
        copy_axes = {axis: size for axis, size in mesh.shape.items() if axis not in (*place, *own)}
        for name, facts in rank_facts[source][matrix.leaf.path]:
            if not isinstance(facts, list):
                by_path[matrix.holder.path][prefix + name] = facts
                continue
            dtype, shape = dtype_of(facts[0]), tuple(facts[1])
            value = torch.empty(0, dtype=dtype, device=mesh.device)
            if is_owner:
                value = own_values[matrix.leaf.path][name].detach().to(mesh.device).contiguous()
            if sharded:
                piece = Piece(value.reshape(-1), 0, shape, rank_at(mesh.position, copy_axes))
                by_path[matrix.holder.path][prefix + name] = piece
                continue
            if not is_owner:
                value = value.new_empty(shape)
            if axes := [axis for axis in mesh.groups if axis not in own]:
                broadcast(value, source, mesh, axes, label="optimizer state")
            if not (rank0_only and mesh.rank):
                by_path[matrix.holder.path][prefix + name] = kept_copy(value, offload)
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
    owned = [
        (matrix, prefix)
        for matrix, place, prefix in _every_matrix(step)
        if place.items() <= mesh.position.items()
    ]
    values = {path: dict(leaf_values) for path, leaf_values in by_path.items()}
    if src is not None:
        prefixes = {(matrix.holder.path, prefix) for matrix, prefix in owned}
        for path, leaf_values in values.items():
            for name, value in leaf_values.items():
                if not isinstance(value, torch.Tensor) or not value.ndim:
                    continue  # its text has the value
                whole = torch.empty(value.shape, dtype=value.dtype, device=mesh.device)
                if mesh.rank == src:
                    whole.copy_(value)
                broadcast(whole, src, mesh, label="optimizer state")
                is_needed = any((path, prefix) in prefixes for prefix in ("", _prefix(name)))
                leaf_values[name] = whole if is_needed else None
    states = {}
    for matrix, prefix in owned:
        # Note: init tells the form of the state, as for every pair of functions.
        zeros = torch.zeros(matrix.shape(), dtype=dtype_of(matrix.buffer.dtype), device=mesh.device)
        structure, initial_leaves, paths = tree.describe(step.init_matrix(zeros))
        loaded = {
            name.removeprefix(prefix): value
            for name, value in values.get(matrix.holder.path, {}).items()
            if name.startswith(prefix)
        }
        names = [path or "state" for path in paths]
        if loaded.keys() != set(names) and (loaded or (strict and by_path)):
            raise ValueError(
                f"the optimizer's state dict must hold {names} of matrix {matrix.leaf.path!r}, as "
                f"init makes them; found {list(loaded)}: it is of another optimizer, or update "
                "returned a state of another form than init"
            )
        leaves = [
            _loaded(loaded.get(name, initial), initial, f"{name!r} of {matrix.leaf.path!r}")
            for name, initial in zip(names, initial_leaves, strict=True)
        ]
        states[matrix.leaf.path] = tree.build(structure, leaves)
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


def _prefix(name: str) -> str:
    return name[: name.find(".") + 1]


def _named(state: Any) -> dict[str, Any]:
    """Return the leaves of a matrix's state by path."""
    _, leaves, paths = tree.describe(state)
    # Note: a state that is one tensor has no path.
    return {path or "state": leaf for path, leaf in zip(paths, leaves, strict=True)}


def _facts(value: Any, path: str) -> Any:
    """Return dtype and shape of a tensor, or the value itself, as JSON."""
    if isinstance(value, torch.Tensor):
        return [dtype_name(value.dtype), list(value.shape)]
    if type(value) in (int, float, bool, str):
        return value
    raise TypeError(
        f"the state of matrix {path!r} must consist of tensors, numbers and strings; found "
        f"{type(value).__name__}: convert it in init and update"
    )


def _loaded(value: Any, initial: Any, where: str) -> Any:
    """Return a loaded entry on the device of the initial one, as a copy."""
    pieces = as_pieces(value)
    shape = tuple(pieces[0].shape) if pieces else getattr(value, "shape", None)
    if shape != getattr(initial, "shape", None):
        raise ValueError(
            f"{where} in the optimizer's state dict must have shape "
            f"{getattr(initial, 'shape', 'of a number')}; found {shape}: it is of another optimizer"
        )
    if pieces:
        filled = next((piece.tensor for piece in pieces if piece.tensor.numel()), None)
        if filled is None or filled.numel() != initial.numel():
            raise ValueError(
                f"no piece of {where} has its elements on this rank, which owns the matrix: pass "
                "the pieces of all ranks, as in {name: [pieces of each rank]}"
            )
        value = filled.view(initial.shape)
    if isinstance(value, torch.Tensor):
        return value.detach().to(initial.device, copy=True)
    return value
