"""Passes: pure functions from a traced step to a traced step, as ``fs.passes``.

In reading order:

- ``applying``: how a pass changes each recording, and checks the result.
- ``gathers``: where gathered buffers come from, and which operations use them.
- ``keeping``: ``keep_gathered``. ``gathering_again``: ``gather_again``, its inverse.
- ``timeline``: the memory while operations move. ``moving``: ``gather_earlier``, ``wait_later``.
- ``bucketing``: ``bucket``. ``updating``: ``update_early``. ``unused``: ``drop_unused``.
"""

from __future__ import annotations

from funcshard.graph.passes.bucketing import bucket
from funcshard.graph.passes.gathering_again import gather_again
from funcshard.graph.passes.keeping import keep_gathered
from funcshard.graph.passes.moving import gather_earlier, wait_later
from funcshard.graph.passes.unused import drop_unused
from funcshard.graph.passes.updating import update_early

__all__ = [
    "bucket", "drop_unused", "gather_again", "gather_earlier", "keep_gathered", "update_early", "wait_later",
]  # fmt: skip
