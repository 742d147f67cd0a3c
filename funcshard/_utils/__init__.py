"""What every wing stands on; skip it.

- ``tree``: pytrees, dotted paths, structures as plain data; the only file that knows optree.
- ``table``: aligned text and HTML tables.
- ``tensors``: tensors anywhere in a Python structure.
- ``torch_private``: everything that touches torch's private API.
"""

from __future__ import annotations

from funcshard._utils import table, tree
from funcshard._utils.tensors import cast_tree, map_tensors, tensors_in
from funcshard._utils.torch_private import callers_level, signed, untraced

__all__ = ["callers_level", "cast_tree", "map_tensors", "signed", "table", "tensors_in", "tree", "untraced"]
