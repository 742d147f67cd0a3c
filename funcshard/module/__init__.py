"""An `nn.Module` as a function of its parameters.

- ``skeleton``: a module without its tensors.
- ``functional``: ``make_functional``.
- ``placeholder``: stands for a parameter outside its unit's forward.
- ``unit_forward``: a unit's module while it runs.
- ``fully_sharded``: ``fully_shard``.
- ``init``: ``init_shards``, ``init_module``.
"""

from __future__ import annotations

from funcshard.module.fully_sharded import fully_shard
from funcshard.module.functional import make_functional
from funcshard.module.init import init_module, init_shards

__all__ = ["fully_shard", "init_module", "init_shards", "make_functional"]
