"""Whole matrices on their owners: parts of flat shards go there, and the results come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from funcshard.comm import Mesh, in_graph
from funcshard.plan import dtype_of, emit, recording
from funcshard.train.matrix_owners import AllToAll, Matrix, Owners, times


@dataclass(frozen=True, slots=True, eq=False)
class MatrixTransport:
    """The way of matrices between this rank's shards and their owners; made by ``transport_of``.

    Attributes:
        owners: which rank owns which matrix.
        mesh: the ranks.
        owned: the matrices of this rank.
        slices: where the part of each matrix lies in this rank's shard, by path.
        there: the all-to-alls that bring parts to the owners, in order.
        back: the all-to-alls that bring results back, in order.
    """

    owners: Owners
    mesh: Mesh
    owned: Sequence[Matrix]
    slices: Mapping[str, slice]
    there: Sequence[AllToAll]
    back: Sequence[AllToAll]

    def on_owners(
        self,
        function: Callable[[Matrix, torch.Tensor], torch.Tensor],
        parts: dict[str, torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """Return this rank's parts of a function of each whole matrix, by path.

        Arguments:
            function: called on the owner, with the matrix and a stack of whole tensors. It returns
                one whole tensor.
            parts: this rank's part of each matrix, by path: a stack of ``owners.gathered`` flat
                tensors. They're taken out.
        """
        results = self.bring(parts, self.owners.gathered)
        for matrix in self.owned:
            path = matrix.leaf.path
            results[path] = function(matrix, results.pop(path)).to(self.dtype).unsqueeze(0)
        return self._bring_back(results)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which parts are sent."""
        return dtype_of(self.owners.dtype)

    def bring(self, parts: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
        """Return stacks of ``count`` whole tensors that this rank owns, given this rank's parts."""
        for stage in self.there:
            sent_parts = [parts.pop(part.path) for part in stage.sent]
            received_parts = self._exchange(stage, sent_parts, count)
            # Note: parts come in the order of the ranks that send them, which is their order in
            # the matrix.
            parts_by_matrix: dict[tuple[str, int], list[torch.Tensor]] = {}
            for part, tensor in zip(stage.received, received_parts, strict=True):
                parts_by_matrix.setdefault((part.path, part.dim), []).append(tensor)
            for (path, dim), matrix_parts in parts_by_matrix.items():
                parts[path] = torch.cat(matrix_parts, dim + 1)
        for matrix in self.owned:
            parts[matrix.leaf.path] = parts[matrix.leaf.path].view(count, *matrix.shape())
        return parts

    def _bring_back(self, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parts in this rank's shards, given the results that it owns."""
        for stage in self.back:
            sent_parts = []
            for part in stage.sent:
                result = results[part.path]
                if len(part.shape) == 1:  # elements of a flat shard
                    result = result.reshape(1, -1)
                sent_parts.append(result.narrow(part.dim + 1, part.begin, part.shape[part.dim]))
            # The owner keeps its own part only; it comes back with the others.
            for path in {part.path for part in stage.sent}:
                del results[path]
            received_parts = self._exchange(stage, sent_parts, 1)
            for part, tensor in zip(stage.received, received_parts, strict=True):
                results[part.path] = tensor
        return results

    def _exchange(
        self, stage: AllToAll, sent: list[torch.Tensor], count: int
    ) -> Sequence[torch.Tensor]:
        """Run one all-to-all of ``count`` tensors for each part; return the parts received."""
        flat_parts = [part.reshape(-1) for part in sent]
        if stage.event is not None:
            # A rank without matrices takes part all the same.
            nothing = torch.empty(0, dtype=self.dtype, device=self.mesh.device)
            send_buffer = torch.cat(flat_parts or [nothing])
            receive_sizes = [size * count for size in stage.receive_sizes]
            send_sizes = [size * count for size in stage.send_sizes]
            receive_buffer = send_buffer.new_empty(sum(receive_sizes))
            if recording():
                emit(times(stage.event, count))
            in_graph(self.mesh.groups[stage.axis], stage.axis).all_to_all(
                receive_buffer, send_buffer, receive_sizes, send_sizes, label="matrices"
            ).wait()
            flat_parts = receive_buffer.split([part.numel * count for part in stage.received])
        # Without an event every rank sends to itself only.
        return [
            tensor.view(count, *part.shape)
            for tensor, part in zip(flat_parts, stage.received, strict=True)
        ]


def transport_of(owners: Owners, mesh: Mesh) -> MatrixTransport:
    """Return the way of matrices to their owners, and back, for this rank."""
    position, stages = mesh.position, owners.stages
    shard_parts = {m.leaf.path: m.buffer.part(m.leaf, mesh.shard.rank) for m in owners.matrices}
    return MatrixTransport(
        owners=owners,
        mesh=mesh,
        # The owners are the ranks at the place where all stages of a matrix have met.
        owned=[m for m in owners.matrices if m.place().items() <= position.items()],
        slices={path: part.in_shard for path, part in shard_parts.items() if part.numel},
        there=[owners.all_to_all(stage, position, back=False) for stage in stages],
        back=[owners.all_to_all(stage, position, back=True) for stage in reversed(stages)],
    )
