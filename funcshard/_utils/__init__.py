"""What every wing stands on; skip it.

- ``tree``: pytrees, dotted paths, structures as plain data; the only file that knows optree.
- ``table``: aligned text and HTML tables.
- ``tensors``: tensors anywhere in a Python structure.
- ``closures``: follow what a Python object leads to.
- ``random_state``: take the random state, and put it back.
- ``torch_private``: everything that touches torch's private API.
"""

from __future__ import annotations

from funcshard._utils import table, tree
from funcshard._utils.closures import captured, reachable
from funcshard._utils.random_state import RandomState
from funcshard._utils.tensors import cast_tree, map_tensors, tensors_in
from funcshard._utils.torch_private import (
    belongs_to_transform_above,
    callers_level,
    cuda_sleep,
    default_store,
    graph_task_id,
    group_timeout,
    is_compiled_in_place,
    is_legacy_batched,
    is_transformed,
    no_torch_function,
    one_forward_level,
    outer_saved_tensors_hooks,
    recording_graph,
    recording_or_transforming,
    saved_tensors_hooks_allowed,
    sequence_number,
    signed,
    storage_id,
    transforms_active,
    untraced,
    version,
    wrapper_subclass,
)

__all__ = [
    "RandomState",
    "belongs_to_transform_above",
    "callers_level",
    "captured",
    "cast_tree",
    "cuda_sleep",
    "default_store",
    "graph_task_id",
    "group_timeout",
    "is_compiled_in_place",
    "is_legacy_batched",
    "is_transformed",
    "map_tensors",
    "no_torch_function",
    "one_forward_level",
    "outer_saved_tensors_hooks",
    "reachable",
    "recording_graph",
    "recording_or_transforming",
    "saved_tensors_hooks_allowed",
    "sequence_number",
    "signed",
    "storage_id",
    "table",
    "tensors_in",
    "transforms_active",
    "tree",
    "untraced",
    "version",
    "wrapper_subclass",
]
