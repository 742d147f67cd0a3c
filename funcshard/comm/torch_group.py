"""Groups over real process groups of torch.distributed, and what carries their collectives.

- Ranks of one machine, on the CPU: shared memory (`shared.py`).
- Other ranks on gloo: gloo (`gloo.py`), which also carries what is rare everywhere, an all-to-all.
- Every other backend, NCCL above all: its own collectives (`native.py`).

The numbers are the same to the bit on the first two, which add in the order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from funcshard._utils import default_store, group_timeout
from funcshard.comm.desync import DesyncDetector
from funcshard.comm.gloo import Gloo
from funcshard.comm.group import AllGatherWork, DeferredWork, Work, all_gather_private, concatenate
from funcshard.comm.native import Native
from funcshard.comm.shm import Pool, Shared, connect, private

__all__ = ["TorchGroup"]

# Bytes of a tensor for which the C library asks the system for memory; less is not gathered into common memory either.
_LEAST = 1 << 16


@dataclass(frozen=True, slots=True)
class TorchGroup:
    """The ranks of one ``torch.distributed`` process group.

    Attributes:
        group: the process group.
        rank: this process's rank in it.
        size: its number of ranks.
        backend: what carries collectives from one process to another.
        shared: what carries them, all but an all-to-all, between the ranks of one machine, where they are that.
        device: type of the tensors' device.
        desync: what has been issued, and whether the others issue the same.
        shared_memory: whether ranks of one machine were to use shared memory.
        pool: memory for what travels on the CPU, where that is not shared.
    """

    group: Any
    rank: int
    size: int
    backend: Gloo | Native
    shared: Shared | None
    device: str
    desync: DesyncDetector = field(compare=False)
    shared_memory: bool = True
    pool: Pool = field(default_factory=lambda: Pool(private), compare=False)

    @classmethod
    def of(
        cls,
        group: Any,
        axis: str = "shard",
        device: str = "cpu",
        *,
        patience: float = 5.0,
        shared_memory: bool = True,
        apart: bool | None = None,
    ) -> TorchGroup:
        """Wrap a process group that this process is a member of; every member has to call this.

        Arguments:
            group: the process group.
            axis: the mesh axis it lies on, for errors.
            device: type of the tensors' device, where the group has a backend for each type.
            patience: seconds that a wait on the CPU may take before this rank asks what the others are doing.
            shared_memory: whether ranks on the CPUs of one machine communicate through its memory, where the system lets
                them.
            apart: whether reductions get a process group of their own; by default on every backend but gloo.
        """
        name = str(dist.get_backend(group)).lower()
        if ":" in name:  # such as cpu:gloo,cuda:nccl
            name = dict(pair.split(":") for pair in name.split(","))[device]
        native, rank, ranks = "gloo" not in name, dist.get_rank(group), dist.get_process_group_ranks(group)
        if name == "fake":  # torch's stand-in without other processes: there is nobody to agree with
            return cls(group, rank, len(ranks), Native(group, group), None, device, DesyncDetector(axis, ranks, rank))
        control = _another(group, ranks, "gloo")
        store = dist.PrefixStore(f"funcshard/{control.group_name}", default_store())
        reductions = _another(group, ranks, name) if (native if apart is None else apart) else group
        on_gloo = [control] if native else [group, reductions, control]
        options = (axis, ranks, rank, control, store, patience, on_gloo)
        near = {}
        if not native and device == "cpu":
            # with a desync of its own, which would differ from the other's where somebody still reads it
            meeting = DesyncDetector(axis, ranks, rank, control, dist.PrefixStore("meeting", store), patience, on_gloo)
            near = connect(rank, len(ranks), meeting.all_gather_text, wanted=shared_memory)
        desync = DesyncDetector(*options, tuple(near.values()))
        backend = Native(group, reductions) if native else Gloo(rank, len(ranks), group, reductions, desync)
        shared = Shared(rank, near, desync, group_timeout(group).total_seconds()) if near else None
        return cls(group, rank, len(ranks), backend, shared, device, desync, shared_memory)

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    def subgroup(self, members: Sequence[int], axis: str) -> TorchGroup:
        # only the members meet, so that the ranks of a part of the processes can do this
        group = _another(self.group, list(members), str(dist.get_backend(self.group)))
        apart = self.backend.reductions is not self.group
        patience, shared_memory = self.desync.patience, self.shared_memory
        return TorchGroup.of(group, axis, self.device, patience=patience, shared_memory=shared_memory, apart=apart)

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        if like.device.type != "cpu" or numel * like.itemsize < _LEAST:
            return like.new_empty(numel)
        return self.pool.tensor(numel, like.dtype)

    def all_gather(self, out: torch.Tensor, shard: torch.Tensor, *, label: str = "") -> Work:
        if not out.numel():
            return DeferredWork()
        return self._carrier.all_gather(out, shard, self._note("all_gather", label, out))

    def all_gather_shared(self, shard: torch.Tensor, *, label: str = "") -> AllGatherWork:
        # by what every rank sees alike, and not by modes of this one
        if self.shared is None or shard.device.type != "cpu" or shard.nbytes * self.size < _LEAST:
            return all_gather_private(self, shard, label=label)
        return self.shared.all_gather_shared(
            shard, self._note("all_gather", label, shard.reshape(1, -1).expand(self.size, -1))
        )

    def reduce_scatter(self, out: torch.Tensor, parts: Sequence[torch.Tensor], *, label: str = "") -> Work:
        if not out.numel():
            return DeferredWork()
        number = self._note("reduce_scatter", label, out.reshape(1, -1).expand(self.size, -1))
        if self.shared is not None:
            return self.shared.reduce_scatter(out, parts, number)
        full = parts[0] if len(parts) == 1 else concatenate(parts, self.empty(self.size * out.numel(), out))
        return self.backend.reduce_scatter(out.view(-1), full, number)

    def all_reduce(self, tensor: torch.Tensor, *, label: str = "") -> Work:
        if not tensor.numel():
            return DeferredWork()
        return self._carrier.all_reduce(tensor, self._note("all_reduce", label, tensor))

    def broadcast(self, tensor: torch.Tensor, src: int, *, label: str = "") -> Work:
        if not tensor.numel():
            return DeferredWork()
        return self._carrier.broadcast(tensor, src, self._note(f"broadcast from rank {src}", label, tensor))

    def all_to_all(
        self, out: torch.Tensor, full: torch.Tensor, out_sizes: Sequence[int], sizes: Sequence[int], *, label: str = ""
    ) -> Work:
        # every rank has to call, also one that neither sends nor receives; sizes differ, so they are no part of the desync
        number = self.desync.record("all_to_all", label, out[:0])
        return self.backend.all_to_all(out, full, out_sizes, sizes, number)

    def all_gather_text(self, text: str) -> list[str]:
        return self.desync.all_gather_text(text)

    @property
    def _carrier(self) -> Gloo | Native | Shared:
        return self.shared or self.backend

    def _note(self, kind: str, label: str, tensor: torch.Tensor) -> int:
        return self.desync.record(kind, label, tensor, self_checking=self.shared is not None)


def _another(group: Any, ranks: list[int], backend: str) -> Any:
    """A new process group of the same ranks in the same order, with the same timeout."""
    options: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    return dist.new_group(ranks, timeout=group_timeout(group), backend=backend, use_local_synchronization=True, **options)
