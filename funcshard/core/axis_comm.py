"""One collective along mesh axes, on plain tensors, without autograd.

An ``AxisComm`` or ``SumComm`` maps a tensor to another one, linearly in the tensors of all ranks;
``adjoint`` is the adjoint map. A sum runs along several axes. Every other collective runs along one
axis and over dim 0, so the last dimensions may be anything, such as the one that ``vmap`` adds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from funcshard._utils import BasisLoop
from funcshard.comm import Group, Mesh, all_gather_private
from funcshard.core.buffer_comm import BufferComm, live_group, record_event, start_reduce
from funcshard.plan import recording


@dataclass(frozen=True, slots=True)
class AxisComm:
    """A collective along one mesh axis.

    Attributes:
        kind: ``"all_gather"`` stacks the ranks' ``[...]`` to ``[ranks, ...]``; ``"reduce_scatter"``
            adds the ranks' ``[ranks, ...]``, and returns this rank's ``[...]`` of the sum;
            ``"exchange"`` sends rows of ``[n, ...]`` to the ranks, and returns the received rows.
        mesh: the ranks.
        axis: the mesh axis.
        name: the public function, for errors and events.
        send, receive: how many rows an exchange sends to each rank, and receives from it.
        busiest: the most rows that one rank of the axis sends to others in an exchange, or receives
            from them.
        detail: further words about the collective, for errors. Every rank has to have the same.
        loops: torch's loops over unit vectors that the collective is part of; see ``basis``.
    """

    kind: str
    mesh: Mesh
    axis: str
    name: str
    send: tuple[int, ...] = ()
    receive: tuple[int, ...] = ()
    busiest: int = 0
    detail: str = ""
    loops: Mapping[int, BasisLoop] = field(default_factory=dict, compare=False)
    unit: ClassVar[None] = None  # as in ``BufferComm``: it is the collective of no unit
    buffer: ClassVar[str] = ""

    @property
    def adjoint(self) -> AxisComm:
        """The adjoint map."""
        adjoint_kind = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}.get(
            self.kind, self.kind
        )
        return dataclasses.replace(self, kind=adjoint_kind, send=self.receive, receive=self.send)

    @property
    def group(self) -> Group:
        """The ranks along the axis."""
        return self.mesh.groups[self.axis]

    @property
    def ranks(self) -> int:
        """Number of ranks that take part."""
        return self.group.size

    @property
    def title(self) -> str:
        """The collective as errors name it."""
        return f"{self.name}{self.detail} along {self.axis!r}"

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the result of this rank; always a new tensor."""
        group = self.group
        if group.size > 1:
            group = live_group(group, self.axis, tensor, self)
        tensor = tensor.contiguous()
        if self.kind == "all_gather":
            self._record("all_gather", tensor, group.size)
            return all_gather_private(group, tensor.unsqueeze(0), label=self.title).wait()
        if self.kind == "reduce_scatter":
            self._record("reduce_scatter", tensor)
            out = torch.empty_like(tensor[0])
            group.reduce_scatter(out.view(-1), [tensor.view(-1)], label=self.title).wait()
            return out
        self._record("ppermute" if self.name == "ppermute" else "all_to_all", tensor)
        out = tensor.new_empty((sum(self.receive), *tensor.shape[1:]))
        row = tensor.shape[1:].numel()
        sizes = [[rows * row for rows in counts] for counts in (self.receive, self.send)]
        group.all_to_all(out.view(-1), tensor.view(-1), *sizes, label=self.title).wait()
        return out

    def _record(self, kind: str, tensor: torch.Tensor, times: int = 1) -> None:
        if not recording() or self.group.size == 1:
            return
        # Why the busiest rank's rows: every rank of the axis records the same event.
        numel = (
            self.busiest * tensor.shape[1:].numel()
            if self.kind == "exchange"
            else tensor.numel() * times
        )
        record_event(kind, self, tensor, numel, self.axis, self.group)


@dataclass(frozen=True, slots=True)
class SumComm:
    """The sum along all axes on which a buffer is repeated.

    Attributes:
        comm: these axes; its label names the tensor in errors, the same on every rank.
        loops: as in ``AxisComm``.
    """

    comm: BufferComm
    loops: Mapping[int, BasisLoop] = field(default_factory=dict, compare=False)

    @property
    def adjoint(self) -> SumComm:
        """The map itself: the tensor of each rank is a term of the sum on each rank."""
        return self

    @property
    def ranks(self) -> int:
        """Number of ranks that take part."""
        return math.prod(group.size for _, group in self.comm.topology.repeated)

    @property
    def title(self) -> str:
        """The collective as errors name it."""
        return "psum or pmean"

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum; always a new tensor."""
        out = start_reduce(tensor, self.comm).finish()
        return tensor.clone() if out is tensor else out
