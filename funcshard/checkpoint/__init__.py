"""State dicts and files.

- ``state_dict``: parameters by name.
- ``optimizer_state``: optimizer state by name.
- ``flatten_state``: any state to named tensors.
- ``unflatten_state``: named tensors to a state.
- ``replanning``: ``replan``.
- ``dcp_files``: tensors in torch.distributed.checkpoint's files.
- ``manifest``: what a checkpoint says about itself.
- ``save_restore``: ``save``, ``restore``.
- ``safetensors``: files for other libraries.
"""

from __future__ import annotations

from funcshard.checkpoint.flatten_state import PerRank
from funcshard.checkpoint.manifest import Contents, latest
from funcshard.checkpoint.optimizer_state import optimizer_from_state_dict, optimizer_to_state_dict
from funcshard.checkpoint.replanning import replan
from funcshard.checkpoint.safetensors import export_safetensors, import_safetensors
from funcshard.checkpoint.save_restore import Saving, restore, save
from funcshard.checkpoint.state_dict import Piece, from_state_dict, to_state_dict

__all__ = [
    "Contents",
    "PerRank",
    "Piece",
    "Saving",
    "export_safetensors",
    "from_state_dict",
    "import_safetensors",
    "latest",
    "optimizer_from_state_dict",
    "optimizer_to_state_dict",
    "replan",
    "restore",
    "save",
    "to_state_dict",
]
