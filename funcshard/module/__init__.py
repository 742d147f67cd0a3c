"""An ``nn.Module`` as a pure function of its parameters, or of their shards.

Read in this order:

- ``functional``: a module as a function, whose calls each get their own copies of the modules;
  changes of a module or its parameters that the function cannot keep.
- ``splitting``: ``make_functional``, which makes such a function; modules that cannot be one.
  ``copying``: copies of module trees.
- ``sharded_call``: that function as one of shards; how its units run during a call.
- ``fully_sharded``, ``unit_setup``: ``fully_shard``, which makes it of a function of a module; the
  tensor that a module holds for a parameter outside its unit's forward.
- ``block_draws``: random numbers in blocks, of which a rank draws those that it keeps.
- ``init``, ``resets``: initial values of all parameters; of buffers, and of what a file lacks.
"""

from __future__ import annotations

from funcshard.module.fully_sharded import fully_shard
from funcshard.module.functional import Functional
from funcshard.module.init import init_module, init_shards
from funcshard.module.resets import init_buffers, init_missing
from funcshard.module.splitting import make_functional

__all__ = [
    "Functional", "fully_shard", "init_buffers", "init_missing", "init_module", "init_shards", "make_functional"
]  # fmt: skip
