"""Over which ranks a flat buffer is communicated, and in which dtypes: data without tensors.

A buffer is cut along a mesh axis, each rank holding a slice, or repeated along it, each rank
holding a copy. Repeated copies are one value: to gather them is the identity, and its adjoint adds
up their gradients, in an all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from funcshard.comm.group import Group
from funcshard.comm.mesh import Mesh
from funcshard.plan import BufferPlan, Cast, UnitPlan


@dataclass(frozen=True, slots=True)
class Topology:
    """Along which mesh axes a buffer is cut, and along which it is repeated.

    Attributes:
        mesh: the ranks.
        sharded: whether the buffer is cut along the shard axis (``False``: repeated along it).
        local: mesh axes along which each rank has its own buffer.
        cut: whether there is anything to gather.
        repeated: the axes of several ranks along which the buffer is repeated.
    """

    mesh: Mesh
    sharded: bool
    local: tuple[str, ...] = ()
    cut: bool = field(init=False, compare=False)
    repeated: tuple[tuple[str, Group], ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Why here: every collective asks for these several times.
        mesh = self.mesh
        is_cut = self.sharded and "shard" not in self.local and mesh.shard.size > 1
        # The shard axis comes first, as in predictions, then the replicate axis, then the others.
        groups = {"shard": mesh.shard, "replicate": mesh.replicate, **mesh.groups}
        communicated_axes = [
            axis for axis in groups.items() if axis[1].size > 1 and axis[0] not in self.local
        ]
        object.__setattr__(self, "cut", is_cut)
        object.__setattr__(
            self,
            "repeated",
            tuple(axis for axis in communicated_axes if not (self.sharded and axis[0] == "shard")),
        )

    @classmethod
    def of(cls, buffer: BufferPlan, unit: UnitPlan, mesh: Mesh) -> Topology:
        return cls(mesh, unit.sharded, buffer.local)

    @property
    def copy(self) -> int:
        """Number of this rank's copy among the ranks that hold the same elements."""
        copy_index = 0
        for _, group in reversed(self.repeated):
            copy_index = copy_index * group.size + group.rank
        return copy_index


@dataclass(frozen=True, slots=True)
class CommDtypes:
    """The dtypes of a buffer's collectives; a dtype that is ``None`` stays as it is.

    Attributes:
        shard: the dtype of shards.
        gathered: the dtype that shards are cast to before they are gathered.
        reduced: the dtype that gradients are reduced in.
        grads: the dtype of reduced gradients.
        cast: a pair of functions in place of the cast to ``gathered``.
        divided: whether gradients are divided before they are reduced.
    """

    shard: torch.dtype | None = None
    gathered: torch.dtype | None = None
    reduced: torch.dtype | None = None
    grads: torch.dtype | None = None
    cast: Cast | None = None
    divided: bool = False
