"""The optimizer state of one rank as a text for all others: names, dtypes, shapes, and scalars.

The elements of leaves follow as broadcasts of flat tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from funcshard._utils.tensors import byte_view
from funcshard.checkpoint.optimizer_state import LeafState
from funcshard.checkpoint.state_dict import is_full
from funcshard.comm import Mesh
from funcshard.core import broadcast
from funcshard.plan import Plan, dtype_name, dtype_of


def encode_state(by_path: Mapping[str, LeafState], others: Mapping[str, Any], plan: Plan) -> str:
    """Return the state of each leaf, and further values, as a text.

    Raises:
        ValueError: a value is neither a full tensor nor a number.
    """
    leaf_shapes = {leaf.path: leaf.whole_shape for leaf in plan.leaves}
    state = {
        path: {
            name: _encode(value, f"{name!r} of leaf {path!r}", leaf_shapes[path])
            for name, value in leaf_state.items()
        }
        for path, leaf_state in by_path.items()
    }
    return json.dumps(
        [state, {name: _encode(value, repr(name), None) for name, value in others.items()}]
    )


def decode_state(text: str, device: torch.device) -> tuple[dict[str, LeafState], dict[str, Any]]:
    """Return what ``encode_state`` wrote, with tensors of leaves on the meta device."""
    state, others = json.loads(text)
    by_path = {
        path: {name: _decode(value, device) for name, value in leaf_state.items()}
        for path, leaf_state in state.items()
    }
    return by_path, {name: _decode(value, device) for name, value in others.items()}


def _encode(value: Any, what: str, shape: tuple[int, ...] | None) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if not is_full(value):
        raise ValueError(
            "with src the optimizer's state dict must hold full tensors and numbers; found "
            f"{type(value).__name__} for {what}: leave src out, and pass every rank's state dict"
        )
    # Why bytes: they are exact for every dtype. All tensors of a leaf without dimensions are sent,
    # because nothing tells their scalars from values of elements.
    scalar_bytes = None
    if shape is None or shape == () or not value.ndim:
        scalar_bytes = byte_view(value.reshape(-1).cpu()).tolist()
    return [dtype_name(value.dtype), list(value.shape), scalar_bytes, value.device.type == "cpu"]


def _decode(encoded: Any, device: torch.device) -> Any:
    if not isinstance(encoded, list):
        return encoded
    dtype, shape, scalar_bytes, on_cpu = dtype_of(encoded[0]), *encoded[1:]
    if scalar_bytes is None:
        # Note: its rank broadcasts the elements, buffer after buffer; here the shape is enough.
        return torch.empty(shape, dtype=dtype, device="meta")
    device = torch.device("cpu") if on_cpu else device
    return torch.tensor(scalar_bytes, dtype=torch.uint8, device=device).view(dtype).reshape(shape)


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
