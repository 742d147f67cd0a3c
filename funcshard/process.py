"""Groups over real process groups of torch.distributed.

gloo's own all-gather and reduce-scatter are rings that take two to three times as long as the two used here: one
broadcast a rank into the output's slices, and an all-to-all with a local sum. (Small shards are gathered by an all-to-all
too, one operation whatever the number of ranks.) The sum runs in order of ranks, which also makes the result independent of
the ring's cut. None of these lets gloo add, so a dtype that it has no name for (float8, int16) travels as its bytes.

Other backends (NCCL) use their own collectives. Reductions have a communicator, and with it a stream, of their own, so that
a gathering which starts after a reduction does not queue behind it. The host waits for none of them: ``wait`` makes the
current stream wait, and until then the work itself keeps its tensors alive, so that no stream has to be recorded on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from funcshard.group import Done, Work, add_in_order
from funcshard.journal import Journal

__all__ = ["ProcessGroup"]

# torch 2.13 renames the two; 2.11 has the old names only
_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Bytes of a gathered buffer up to which starting operations costs more than copying: gloo gathers it by an all-to-all.
_SMALL = 1 << 16

# those of gloo's own; torch.distributed itself shows it complex numbers as pairs
_GLOO = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
         torch.bool, torch.complex64, torch.complex128}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The ranks of one ``torch.distributed`` process group.

    Attributes:
        group: the process group.
        rank: this process's rank in it.
        size: its number of ranks.
        native: whether the backend's own collectives are used (everything but gloo).
        reductions: the process group that reductions run on: ``group`` itself, or another of the same ranks.
        device: type of the tensors' device.
        journal: what has been issued, and whether the others issue the same.
    """

    group: Any
    rank: int
    size: int
    native: bool
    reductions: Any
    device: str
    journal: Journal = field(compare=False)

    @classmethod
    def of(
        cls, group: Any, axis: str = "shard", device: str = "cpu", *, patience: float = 5.0, apart: bool | None = None
    ) -> ProcessGroup:
        """Wrap a process group that this process is a member of; every member has to call this.

        Arguments:
            group: the process group.
            axis: the mesh axis it lies on, for errors.
            device: type of the tensors' device, where the group has a backend for each type.
            patience: seconds that a wait on gloo may take before this rank asks what the others are doing.
            apart: whether reductions get a process group of their own; by default on every backend but gloo.
        """
        backend = str(dist.get_backend(group)).lower()
        if ":" in backend:  # such as cpu:gloo,cuda:nccl
            backend = dict(pair.split(":") for pair in backend.split(","))[device]
        native, rank, ranks = "gloo" not in backend, dist.get_rank(group), dist.get_process_group_ranks(group)
        if backend == "fake":  # torch's stand-in without other processes: there is nobody to agree with
            return cls(group, rank, len(ranks), native, group, device, Journal(axis, ranks, rank))
        control = _another(group, ranks, "gloo")
        store = dist.PrefixStore(f"funcshard/{control.group_name}", dist.distributed_c10d._get_default_store())
        reductions = _another(group, ranks, backend) if (native if apart is None else apart) else group
        on_gloo = [control] if native else [group, reductions, control]
        journal = Journal(axis, ranks, rank, control, store, patience, on_gloo)
        return cls(group, rank, len(ranks), native, reductions, device, journal)

    @property
    def member(self) -> int:
        return dist.get_rank()

    def regroup(self, members: Sequence[int], axis: str) -> ProcessGroup:
        # only the members meet, so that the ranks of a part of the processes can do this
        group = _another(self.group, list(members), str(dist.get_backend(self.group)))
        apart = self.reductions is not self.group
        return ProcessGroup.of(group, axis, self.device, patience=self.journal.patience, apart=apart)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Work:
        if not out.numel():
            return Done()
        number = self.journal.note("all_gather", label, out)
        if self.native:
            return _Queued(_gather_single(out, shard, group=self.group, async_op=True))
        if out.numel() * out.element_size() <= _SMALL:
            copies = shard.detach().repeat(self.size, *[1] * (shard.dim() - 1))
            return _Waits(
                self.journal, number, [dist.all_to_all_single(_known(out), _known(copies), group=self.group, async_op=True)]
            )
        slices = out.chunk(self.size)
        slices[self.rank].copy_(shard)
        return _Waits(self.journal, number, [self._send(part, src, self.group) for src, part in enumerate(slices)])

    def reduce_scatter(self, out: torch.Tensor, full: torch.Tensor, *, label: str = "") -> Work:
        if not full.numel():
            return Done()
        number = self.journal.note("reduce_scatter", label, full)
        if self.native:
            return _Queued(_scatter_single(out, full, group=self.reductions, async_op=True))
        # the first and the last rank's own slice lies at an end, so that they need not send it to themselves
        ends = (slice(len(out), None), slice(None, -len(out)))
        others = full[ends[self.rank > 0]] if self.rank in (0, self.size - 1) else full
        sizes = [len(out)] * self.size
        sizes[self.rank] -= len(full) - len(others)
        received = torch.empty_like(others)
        rows = _known(full).shape[0] // full.shape[0]  # as gloo counts them
        sent = [rows * size for size in sizes]
        work = dist.all_to_all_single(_known(received), _known(others), sent, sent, group=self.reductions, async_op=True)

        def finish() -> None:
            self.journal.wait([work], number)
            parts = list(received.split(sizes))
            if others is not full:
                parts[self.rank] = full[-len(out) :] if self.rank else full[: len(out)]
            add_in_order(out, parts)

        return Done(finish)

    def all_reduce(self, tensor: torch.Tensor, *, label: str = "") -> Work:
        if not tensor.numel():
            return Done()
        number = self.journal.note("all_reduce", label, tensor)
        if self.native:
            return _Queued(dist.all_reduce(tensor, group=self.reductions, async_op=True))
        flat = tensor.view(-1)
        parts = flat.tensor_split(self.size)  # sizes may differ by one, or be zero
        mine = parts[self.rank]
        received = flat.new_empty(self.size * mine.numel())
        sizes, own = [_known(part).numel() for part in parts], [_known(mine).numel()] * self.size
        scatter = dist.all_to_all_single(_known(received), _known(flat), own, sizes, group=self.reductions, async_op=True)

        def finish() -> None:
            self.journal.wait([scatter], number)
            if mine.numel():
                add_in_order(mine, received.chunk(self.size))
            works = [self._send(part, src, self.reductions) for src, part in enumerate(parts) if part.numel()]
            self.journal.wait(works, number)

        return Done(finish)

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> Work:
        if not tensor.numel():
            return Done()
        number = self.journal.note(f"broadcast from rank {src}", label, tensor)
        work = self._send(tensor, src, self.group)
        return _Queued(work) if self.native else _Waits(self.journal, number, [work])

    def all_to_all(
        self, out: torch.Tensor, full: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int], *, label: str = ""
    ) -> Work:
        # every rank has to call, also one that neither sends nor receives; sizes differ, so they are no part of the journal
        number = self.journal.note("all_to_all", label, out[:0])
        work = dist.all_to_all_single(out, full, list(out_sizes), list(sizes), group=self.group, async_op=True)
        return _Queued(work) if self.native else _Waits(self.journal, number, [work])

    def all_gather_text(self, text: str) -> list[str]:
        return self.journal.texts(text)

    def _send(self, tensor: torch.Tensor, src: int, group: Any) -> Any:
        sent = tensor if self.native else _known(tensor)
        return dist.broadcast(sent, group=group, group_src=src, async_op=True)


def _known(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as gloo knows it: itself, or its bytes."""
    return tensor if tensor.dtype in _GLOO else tensor.view(-1).view(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Waits:
    journal: Journal
    number: int
    works: list[Any]

    def wait(self) -> None:
        self.journal.wait(self.works, self.number)


@dataclass(frozen=True, slots=True)
class _Queued:
    work: Any

    def wait(self) -> None:
        self.work.wait()  # of the current stream, for its end; the host goes on


def _another(group: Any, ranks: list[int], backend: str) -> Any:
    """A new process group of the same ranks in the same order, with the same timeout."""
    options: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    own = group._get_backend(group._device_types[0])
    return dist.new_group(ranks, timeout=own.options._timeout, backend=backend, use_local_synchronization=True, **options)
