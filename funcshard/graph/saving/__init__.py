"""Graphs in files: JSON without pickles, the same for all ranks.

- ``values``: arguments of operations as JSON. ``operators``: the operations that a file may name.
- ``forms``: forms of trees and signatures as JSON.
- ``recordings``: a whole ``StepGraph`` as JSON.
- ``graph_file``: the file: checksum, facts and graphs.
- ``agreement``: one file for all ranks.
"""

from __future__ import annotations

from funcshard.graph.saving.agreement import save_together
from funcshard.graph.saving.graph_file import FileContents, read_file, recordings_text, text_digest
from funcshard.graph.saving.recordings import graph_from, graph_to

__all__ = [
    "FileContents",
    "graph_from",
    "graph_to",
    "read_file",
    "recordings_text",
    "save_together",
    "text_digest",
]
