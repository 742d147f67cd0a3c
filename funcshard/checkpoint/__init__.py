"""State dicts, checkpoints and safetensors files, all independent of units, shards and ranks.

Read the files in this order:

- ``state_dict``: ``to_state_dict`` and ``from_state_dict``, parameters by name.
- ``pieces``: ``Piece``, the part of a leaf that one rank holds.
- ``optimizer_state``: ``optimizer_to_state_dict``, optimizer state by name.
- ``optimizer_loading``: its inverse, ``optimizer_from_state_dict``.
- ``optimizer_message``: the state dict of one rank, described to all other ranks.
- ``optimizer_checks``: whether such a state is one of this optimizer, and the same on all ranks.
- ``functional_optimizer``: the state of an ``(init, update)`` pair, as TorchOpt and Optax make it.
- ``save_restore``: ``save``, ``Saving`` and ``restore``, which call the files below.
- ``metadata``: the parts of a flattened state, as plain data; ``PerRank``.
- ``flatten_state``: from any state to these parts.
- ``read_items``: which elements of stored tensors a rank reads.
- ``unflatten_state``: the inverse, under the same plan or another.
- ``replanning``: ``replan``, flatten and unflatten in memory.
- ``block_files``: files that are written and read past the page cache.
- ``archives``: the bytes around a tensor in a file.
- ``dcp_files``: tensors in the files of ``torch.distributed.checkpoint``.
- ``dcp_metadata``: the index of checkpoints of FSDP2 and DDP, read without running code.
- ``dcp_import``: ``import_dcp``, such checkpoints to shards.
- ``rank_tables``: the table of each rank's file, with the boxes in it.
- ``stored_fields``: the parts of these text files, each checked before its use.
- ``holders``: the ranks that hold the elements that a rank reads.
- ``manifest``: the index of a checkpoint; ``Contents``, ``latest`` and ``read_values``.
- ``folders``: checkpoints as folders that are complete or absent.
- ``path_lock``: one process at a time writes to a path.
- ``open_folder``: a reader sees one checkpoint.
- ``foreign_folders``: which other library wrote a folder, and how to read it.
- ``writer``: the thread that writes one rank's part.
- ``other_files``: folders that hold no safetensors, and what to do for each.
- ``safetensors``: ``export_safetensors`` and ``import_safetensors``.
- ``adapters``: the names of a model under peft's adapters, and their initial values.
- ``hugging_face``: Hugging Face's models on meta, and their names in files.
- ``pretrained``: ``from_pretrained`` and ``save_pretrained``, which call it.
"""

from __future__ import annotations

from funcshard.checkpoint.dcp_import import import_dcp
from funcshard.checkpoint.manifest import Contents, latest, read_values
from funcshard.checkpoint.metadata import PerRank
from funcshard.checkpoint.optimizer_loading import optimizer_from_state_dict
from funcshard.checkpoint.optimizer_state import optimizer_to_state_dict
from funcshard.checkpoint.pieces import Piece
from funcshard.checkpoint.pretrained import Pretrained, from_pretrained, save_pretrained
from funcshard.checkpoint.replanning import replan
from funcshard.checkpoint.safetensors import export_safetensors, import_safetensors
from funcshard.checkpoint.save_restore import Saving, restore, save
from funcshard.checkpoint.state_dict import from_state_dict, to_state_dict

__all__ = [
    "Contents",
    "PerRank",
    "Piece",
    "Pretrained",
    "Saving",
    "export_safetensors",
    "from_pretrained",
    "from_state_dict",
    "import_dcp",
    "import_safetensors",
    "latest",
    "optimizer_from_state_dict",
    "optimizer_to_state_dict",
    "read_values",
    "replan",
    "restore",
    "save",
    "save_pretrained",
    "to_state_dict",
]
