"""State dicts, checkpoints and safetensors files, all independent of units, shards and ranks.

Read the files in this order:

- ``state_dict``: ``to_state_dict``, ``from_state_dict`` and ``iter_params``, parameters by name.
- ``optimizer_state``: ``optimizer_to_state_dict``, optimizer state by name.
- ``matrix_states``: the states that owners keep of whole matrices, by name, and how all other
  ranks get one rank's values.
- ``optimizer_loading``: its inverse, ``optimizer_from_state_dict``.
- ``save_restore``: ``save``, ``Saving`` and ``restore``, which call the files below.
- ``stored_state``: the parts of a flattened state, as plain data; ``PerRank``.
- ``flatten_state``: from any state to these parts.
- ``resharding``: which elements of a leaf lie in which rank's shard, and copies between them;
  ``Piece``, such elements for you.
- ``unflatten_state``: from these parts to a state under any plan; ``replan``, both in memory.
- ``folders``: a checkpoint's folder, its lock, and how a save becomes the checkpoint.
- ``rank_files``: the tensors of each rank, and their table.
- ``contents``: the index of a checkpoint; ``Contents``, ``latest`` and ``read_values``.
- ``writer``: the thread that writes one rank's part.
- ``dcp_import``: ``import_dcp``, checkpoints of FSDP2 and DDP to shards.
- ``conversion``: ``export_dcp``, and safetensors files without a mesh.
- ``safetensors``: ``export_safetensors`` and ``import_safetensors``.
- ``hugging_face``: Hugging Face's models on meta, and their names in files, also under adapters.
- ``pretrained``: ``from_pretrained`` and ``save_pretrained``.
"""

from __future__ import annotations

from funcshard.checkpoint.contents import Contents, latest, read_values
from funcshard.checkpoint.conversion import export_dcp, export_parameters, write_dcp
from funcshard.checkpoint.dcp_import import import_dcp
from funcshard.checkpoint.hugging_face import (
    default_units,
    is_hugging_face,
    module_of_config,
)
from funcshard.checkpoint.optimizer_loading import optimizer_from_state_dict
from funcshard.checkpoint.optimizer_state import (
    flatten_optimizer_state_dict,
    optimizer_to_state_dict,
)
from funcshard.checkpoint.pretrained import Pretrained, from_pretrained, save_pretrained
from funcshard.checkpoint.resharding import Piece
from funcshard.checkpoint.safetensors import export_safetensors, import_safetensors
from funcshard.checkpoint.save_restore import Saving, restore, save
from funcshard.checkpoint.state_dict import from_state_dict, iter_params, to_state_dict
from funcshard.checkpoint.stored_state import PerRank
from funcshard.checkpoint.unflatten_state import replan

__all__ = [
    "Contents",
    "PerRank",
    "Piece",
    "Pretrained",
    "Saving",
    "default_units",
    "export_dcp",
    "export_parameters",
    "export_safetensors",
    "flatten_optimizer_state_dict",
    "from_pretrained",
    "from_state_dict",
    "import_dcp",
    "import_safetensors",
    "is_hugging_face",
    "iter_params",
    "latest",
    "module_of_config",
    "optimizer_from_state_dict",
    "optimizer_to_state_dict",
    "read_values",
    "replan",
    "restore",
    "save",
    "save_pretrained",
    "to_state_dict",
    "write_dcp",
]
