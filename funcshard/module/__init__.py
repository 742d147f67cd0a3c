"""An ``nn.Module`` as a pure function of its parameters, or of their shards.

Read in this order:

- ``checks``: modules that cannot be functions, and functions that are taken for modules.
- ``copying``: copies of module trees, and of what their attributes refer to.
- ``skeleton``: a module tree without its tensors, of which every call gets its own copy.
- ``changes``: changes of a module or its parameters that its function cannot keep.
- ``functional``: ``make_functional``, which turns a module into a function.
- ``placeholder``: the tensor that a module holds for a parameter outside its unit's forward.
- ``unit_forward``: how a unit's module runs during a call.
- ``call_precision``: the dtypes of units, of other modules and of buffers in a call.
- ``unit_setup``: the options ``methods=``, ``compiler=`` and ``ignored_params=``.
- ``fully_sharded``: ``fully_shard``, which turns that function into one of shards.
- ``block_draws``: random numbers in blocks, of which a rank draws those that it keeps.
- ``resets``: blank tensors, and which of them a reset wrote.
- ``init``: ``init_shards`` and ``init_module``, which never hold all parameters.
- ``partial_init``: ``init_buffers``, and ``init_missing`` for parameters that a file lacks.
"""

from __future__ import annotations

from funcshard.module.fully_sharded import fully_shard
from funcshard.module.functional import Functional, make_functional
from funcshard.module.init import init_module, init_shards
from funcshard.module.partial_init import init_buffers, init_missing

__all__ = [
    "Functional", "fully_shard", "init_buffers", "init_missing", "init_module", "init_shards", "make_functional"
]  # fmt: skip
