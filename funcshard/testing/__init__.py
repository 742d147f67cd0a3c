"""Tests of sharded programs: the same numbers on every mesh, and collectives that are slow.

- ``slow_collectives``: ``delayed``, a mesh on which code that doesn't wait computes NaN.
- ``returned_values``: the values that a program returns, by path, with shards put together.
- ``relations``: how the values of several ranks make up that of one rank.
- ``operations``: the first operation whose result differs from that of one rank, and why.
- ``mesh_comparison``: ``same_on_every_mesh``, which compares a program's results on many meshes.

Example:
    >>> import torch, funcshard as fs
    >>> params = {"w": torch.tensor([3.0, 4.0])}
    >>> def main(mesh):
    ...     plan = fs.make_plan(params, mesh)
    ...     return fs.norm(fs.shard(params, plan, mesh), plan, mesh)
    >>> bool(fs.testing.same_on_every_mesh(main, [1, 2]))
    True
"""

from __future__ import annotations

from funcshard.testing.mesh_comparison import Comparison, Difference, same_on_every_mesh
from funcshard.testing.slow_collectives import KINDS, DelayedGroup, delayed

__all__ = [
    "KINDS",
    "Comparison",
    "DelayedGroup",
    "Difference",
    "delayed",
    "same_on_every_mesh",
]
