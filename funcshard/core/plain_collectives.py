"""Collectives on plain tensors, without autograd, and slices of whole tensors.

An ``AxisComm`` or ``SumComm`` is a linear map of the tensors of all ranks, with its ``adjoint``.
Every collective but a sum runs along one axis and over dim 0, so the last dimensions may be
anything, such as the one that ``vmap`` adds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from funcshard._utils.torch_private import BasisLoop
from funcshard.comm import Group, Mesh, Op, all_gather_private
from funcshard.core.buffer_comm import BufferComm, recorded_group, start_reduce
from funcshard.core.grad_reducer import note_collective
from funcshard.plan import Box, LeafSpec, position_of, slice_offsets

_ADJOINTS = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}


@dataclass(frozen=True, slots=True)
class AxisComm:
    """A collective along one mesh axis.

    Attributes:
        kind: ``"all_gather"`` stacks the ranks' ``[...]`` to ``[ranks, ...]``; ``"reduce_scatter"``
            adds the ranks' ``[ranks, ...]``, and returns this rank's ``[...]`` of the sum;
            ``"all_to_all"`` and ``"ppermute"`` send rows of ``[n, ...]``, and return the received
            rows.
        mesh: the ranks.
        axis: the mesh axis.
        name: what it is for, in errors; the same on every rank.
        send, receive: how many rows an exchange sends to each rank, and receives from it.
        busiest: the most rows that one rank sends to others in an exchange, or receives.
        loops: loops over unit vectors that the collective is part of; see ``basis``.
    """

    kind: str
    mesh: Mesh
    axis: str
    name: str
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    busiest: int = 0
    loops: Mapping[int, BasisLoop] = field(default_factory=dict, compare=False)
    unit: ClassVar[None] = None  # as in ``BufferComm``: it is the collective of no unit
    buffer: ClassVar[str] = ""

    @property
    def adjoint(self) -> AxisComm:
        """The adjoint map."""
        adjoint_kind = _ADJOINTS.get(self.kind, self.kind)
        return dataclasses.replace(
            self, kind=adjoint_kind, send=self.receive, receive=self.send
        )

    @property
    def ranks(self) -> int:
        """Number of ranks that take part."""
        return self.mesh.groups[self.axis].size

    @property
    def title(self) -> str:
        """The collective as errors name it."""
        return f"{self.name} along {self.axis!r}"

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the result of this rank; always a new tensor."""
        # Groups send memory as it lies.
        tensor = tensor.contiguous()
        group, row_numel = self._group(tensor), tensor.shape[1:].numel()
        if self.kind == "all_gather":
            return all_gather_private(group, tensor.unsqueeze(0), label=self.title).wait()
        if self.kind == "reduce_scatter":
            out = torch.empty_like(tensor[0])
            op = Op("reduce_scatter", self.title, out.view(-1), [tensor.view(-1)])
            group.start(op).wait()
            return out
        out = tensor.new_empty((sum(self.receive), *tensor.shape[1:]))
        row_sizes = [
            [row_count * row_numel for row_count in counts]
            for counts in (self.receive, self.send)
        ]
        op = Op("all_to_all", self.title, out.view(-1), tensor.view(-1), 0, *row_sizes)
        group.start(op).wait()
        return out

    def _group(self, tensor: torch.Tensor) -> Group:
        # Note: nothing travels, so it is no event.
        if self.ranks == 1:
            return self.mesh.groups[self.axis]
        moved_numel = tensor.numel()
        if self.kind == "all_gather":
            moved_numel *= self.ranks
        elif self.kind != "reduce_scatter":
            # Why the busiest rank's rows: every rank of the axis records the same event.
            moved_numel = self.busiest * tensor.shape[1:].numel()
        return recorded_group(self.kind, self, self.axis, tensor, moved_numel)


class SumComm(BufferComm):
    """The sum along all axes on which data of no unit is repeated."""

    __slots__ = ()

    @property
    def adjoint(self) -> SumComm:
        """The map itself."""
        # Note: the tensor of each rank is a term of the sum on each rank, so the matrix is
        # symmetric.
        return self

    @property
    def ranks(self) -> int:
        """Number of ranks that take part."""
        return math.prod(group.size for _, group in self.topology.repeated)

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum; always a new tensor."""
        summed_tensor = start_reduce(tensor, self).finish()
        if summed_tensor is tensor:  # there is one rank
            return tensor.clone()
        return summed_tensor


# --- slices of whole tensors ----------------------------------------------------------------------


def join_slices(
    leaf: torch.Tensor, spec: LeafSpec, mesh: Mesh, *, first_only: bool = False
) -> torch.Tensor | None:
    """Return the whole tensor of a leaf, joined from the slices of all ranks, without autograd.

    The ranks along the axes of the cuts have to call. A leaf without cuts is its own whole tensor.

    Arguments:
        leaf: this rank's slice.
        spec: the leaf's entry in the plan.
        mesh: the ranks.
        first_only: whether only the first of these ranks gets it, and others ``None``.
    """
    joined_leaf = leaf.detach()
    for cut in reversed(spec.cuts):  # the innermost slices first
        if cut.ranks == 1:
            continue
        note_collective(mesh)
        with torch.no_grad():
            leaf_slices = AxisComm(
                "all_gather", mesh, cut.axis, f"join leaf {spec.path!r}"
            ).run(joined_leaf.to(mesh.device))
            # The other ranks have sent their slices, and are done.
            if first_only and mesh.groups[cut.axis].rank:
                return None
            joined_leaf = torch.cat(leaf_slices.unbind(), cut.dim)
    return joined_leaf


def slice_from_rank(
    src: int, whole: torch.Tensor, spec: LeafSpec, mesh: Mesh
) -> torch.Tensor:
    """Return this rank's slice of the whole tensor that rank ``src`` has; every rank has to call.

    Arguments:
        src: the rank.
        whole: the whole tensor on rank ``src``; elsewhere any tensor of its dtype.
        spec: the leaf's entry in the plan.
        mesh: the ranks.
    """
    leaf_cuts = [cut for cut in spec.cuts if cut.ranks > 1]
    if not leaf_cuts:
        return whole
    source_position, cut_axes = (
        position_of(src, mesh.shape),
        [cut.axis for cut in leaf_cuts],
    )
    if any(
        group.rank != source_position[axis]
        for axis, group in mesh.groups.items()
        if axis not in cut_axes
    ):
        # Why no values: only the ranks with the index of ``src`` along all other axes send them on.
        return torch.empty(spec.shape, dtype=whole.dtype, device="meta")
    with torch.no_grad():
        whole_copy = torch.empty(spec.whole_shape, dtype=whole.dtype, device=mesh.device)
        if mesh.rank == src:
            whole_copy.copy_(whole)
        broadcast(whole_copy, src, mesh, cut_axes)
        return whole_copy[
            Box(slice_offsets(spec.shape, leaf_cuts, mesh.position), spec.shape).slices
        ].clone()


def broadcast(
    tensor: torch.Tensor,
    src: int,
    mesh: Mesh,
    axes: list[str] | None = None,
    *,
    label: str = "",
) -> None:
    """Replace ``tensor`` by that of rank ``src`` on the ranks along ``axes``, by default on all.

    Arguments:
        tensor: a contiguous tensor, of the same shape and dtype on every rank.
        src: the rank.
        mesh: the ranks.
        axes: the axes; along others every calling rank has the index of ``src``.
        label: a name for the tensor, for errors.
    """
    source_position = position_of(src, mesh.shape)
    later_axes = list(axes or mesh.groups)
    while later_axes:
        axis = later_axes.pop(0)
        # Note: this rank holds the values, or gets them along this axis, once its later indices are
        # those of ``src``.
        if all(
            mesh.groups[axis_name].rank == source_position[axis_name]
            for axis_name in later_axes
        ):
            op = Op("broadcast", label, tensor, src=source_position[axis])
            mesh.groups[axis].start(op).wait()
