"""Graphs in files: JSON without pickles, the same for all ranks.

What a file can't hold is a ``ValueError``.

- ``recordings``: a whole ``StepGraph``, and the operations that a file may name.
- ``graph_file``: the file for all ranks: checksum, facts and graphs.
"""

from __future__ import annotations

from funcshard.graph.saving.graph_file import (
    read_file,
    recordings_text,
    save_together,
    text_digest,
)
from funcshard.graph.saving.recordings import graph_from, graph_to

__all__ = [
    "graph_from",
    "graph_to",
    "read_file",
    "recordings_text",
    "save_together",
    "text_digest",
]
