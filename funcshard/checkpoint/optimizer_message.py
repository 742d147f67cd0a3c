"""Values of one rank as a text for all others: numbers, strings, and the form of tensors.

The elements of tensors follow as broadcasts.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from funcshard._utils.tensors import byte_view
from funcshard.checkpoint.state_dict import is_full
from funcshard.comm import Mesh
from funcshard.core import broadcast
from funcshard.plan import dtype_name, dtype_of

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
