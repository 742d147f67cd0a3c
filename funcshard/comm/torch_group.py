"""``TorchGroup``: a group over a ``torch.distributed`` process group.

It passes each collective to one of three backends: ``shm``, shared memory, for ranks on the CPUs of
one machine; ``Gloo``, for other ranks on gloo, and for every all-to-all there; ``Native``, for NCCL
and all other backends.
"""

from __future__ import annotations

import atexit
import datetime
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from funcshard._utils.torch_groups import default_store, group_timeout, new_group
from funcshard.comm.attempts import AttemptLog
from funcshard.comm.desync import DesyncDetector
from funcshard.comm.group import DONE, DeferredWork, Group, Op, Work, concatenate
from funcshard.comm.process_groups import Gloo, Native
from funcshard.comm.shm import Exchange, Pool, SharedMemoryBackend, connect, private_block
from funcshard.comm.watch import LIMITS, Limits, LostError, Watch, name_of, watched

_log = logging.getLogger("funcshard.comm")

# Smallest tensor, in bytes, that is taken from a pool or gathered into shared memory. From this
# size on, the C library asks the system for memory, which the system first fills with zeros.
_POOLED = 1 << 16

# Seconds that the end of a process may wait for comparisons with ranks that are slower.
_LAST = 5.0


@dataclass(frozen=True, slots=True, weakref_slot=True)
class TorchGroup(Group):
    """The ranks of one ``torch.distributed`` process group.

    Attributes:
        group: the process group.
        rank: position of this process in it.
        size: its number of ranks.
        backend: the collectives over the process group.
        shm: the collectives through shared memory, if there is any.
        device: type of the tensors' device.
        desync: records what this rank issues, and finds ranks that issue something else.
        shared_memory: whether the caller allowed shared memory.
        pool: private memory for data to communicate on the CPU.
        number: of this group among those that the process has made.
    """

    group: Any
    rank: int
    size: int
    backend: Gloo | Native
    shm: SharedMemoryBackend | None
    device: str
    desync: DesyncDetector = field(compare=False)
    shared_memory: bool = True
    pool: Pool = field(default_factory=lambda: Pool(private_block), compare=False)
    number: int = field(default=0, compare=False)

    @classmethod
    def of(
        cls,
        group: Any,
        axis: str = "shard",
        device: str = "cpu",
        *,
        limits: Limits = LIMITS,
        shared_memory: bool = True,
    ) -> TorchGroup:
        """Wrap a process group that contains this process; each of its processes has to call this.

        Arguments:
            group: the process group.
            axis: the mesh axis that the group lies on, for errors.
            device: type of the tensors' device; it selects the backend if the group has several.
            limits: when a rank that waits looks at the others, and gives one up.
            shared_memory: as in ``init_mesh``.
        """
        backend_name = str(dist.get_backend(group)).lower()
        if ":" in backend_name:  # such as cpu:gloo,cuda:nccl
            backend_name = dict(pair.split(":") for pair in backend_name.split(","))[device]
        is_native = "gloo" not in backend_name
        rank = dist.get_rank(group)
        global_ranks = dist.get_process_group_ranks(group)
        detector = functools.partial(DesyncDetector, axis, global_ranks, rank)
        if (
            backend_name == "fake"
        ):  # torch's stand-in for a backend: the other ranks do not exist
            native_only = Native(group, group)
            return cls(
                group, rank, len(global_ranks), native_only, None, device, detector(group)
            )
        timeout, axis_text = group_timeout(group), f"mesh axis {axis!r}"
        watch = watch_of_job()
        # Why a group for comparisons alone: they must not queue behind data, and go past a
        # collective that hangs.
        control = connected(global_ranks, "gloo", timeout, axis_text, limits)
        gloo_groups, native_groups = [group, control], list[Any]()
        if is_native:
            reductions = connected(global_ranks, backend_name, timeout, axis_text, limits)
            gloo_groups, native_groups = [control], [group, reductions]
        detector = functools.partial(detector, control, watch, limits, gloo_groups)
        sockets = {}
        if not is_native and device == "cpu":
            # Why a detector for the rendezvous alone: one that counts collectives without messages
            # through shared memory.
            rendezvous = detector(name=f"{control.group_name} rendezvous")
            sockets = connect(
                rank, len(global_ranks), rendezvous.all_gather_text, wanted=shared_memory
            )
        desync = detector(connections=tuple(sockets.values()), aborted=native_groups)
        backend: Gloo | Native = (
            Native(*native_groups)
            if is_native
            else Gloo(rank, len(global_ranks), group, desync)
        )
        shm, way_text = None, backend_name
        if sockets:
            shm = SharedMemoryBackend(
                Exchange(rank, sockets, desync, timeout.total_seconds())
            )
            way_text = f"{backend_name}, through shared memory"
        _log.debug(
            "mesh axis %r of ranks %s: this is rank %d, over %s",
            axis,
            global_ranks,
            dist.get_rank(),
            way_text,
        )
        torch_group = cls(
            group, rank, len(global_ranks), backend, shm, device, desync, shared_memory,
            # Note: an attempt's ranks know groups by it, so they make them in one order.
            number=watch.count("groups"),
        )  # fmt: skip
        watch.groups[torch_group.number] = torch_group
        return torch_group

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    def subgroup(self, global_ranks: Sequence[int], axis: str) -> TorchGroup:
        # Only the ranks of the new group synchronise, so some of a job's processes can do this
        # alone.
        backend_name, timeout = str(dist.get_backend(self.group)), group_timeout(self.group)
        limits, axis_text = self.desync.limits, f"mesh axis {axis!r}"
        sub_group = TorchGroup.of(
            connected(list(global_ranks), backend_name, timeout, axis_text, limits),
            axis,
            self.device,
            limits=limits,
            shared_memory=self.shared_memory,
        )
        # Device meshes know nothing of this group, so the detector is its only user.
        give_back(sub_group.group, sub_group.desync)
        return sub_group

    def empty(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        if like.device.type != "cpu" or numel * like.itemsize < _POOLED:
            return like.new_empty(numel)
        return self.pool.tensor(numel, like.dtype)

    @property
    def ranks(self) -> Sequence[int]:
        """The global numbers of the ranks."""
        return self.desync.ranks

    def open_attempt(self, ranks: Sequence[int]) -> AttemptLog:
        """Begin an attempt of some ranks of the job, by their global numbers."""
        watch, attempt_name = watch_of_job(), name_of("attempt", ranks)
        # Why numbered: a slow rank may still delete the keys of the attempt before.
        place = f"attempts/{attempt_name}/{watch.count(attempt_name)}"
        return AttemptLog(place, ranks, watch, self.desync.limits.give_up)

    def shares(self, shard: torch.Tensor) -> bool:
        # The choice depends only on facts that are the same on every rank, such as sizes.
        is_on_cpu = self.shm is not None and shard.device.type == "cpu"
        return is_on_cpu and shard.nbytes * self.size >= _POOLED

    def start(self, op: Op) -> Work:
        kind, out = op.kind, op.out
        # Why before the log: if this memory is lacking, the collective has not begun.
        # A single part is sent as it is, and not copied.
        if kind == "reduce_scatter" and self.shm is None and len(op.data) > 1:
            full_tensor = concatenate(op.data, self.empty(self.size * out.numel(), out))
            op = op._replace(data=[full_tensor])
        watch = self.desync.watch
        # Why not inside: the log calls this again, to run the collective that it has noted.
        if (
            watch is not None
            and (log := watch.pulse.attempt) is not None
            and not log.inside
        ):
            return log.start(self, op)
        if kind == "all_gather_text":
            return DeferredWork(result=self.desync.all_gather_text(op.data, op.label))
        # Shared memory does all but the all-to-all.
        carrier: Gloo | Native | SharedMemoryBackend = self.shm or self.backend
        # What is recorded is the whole buffer.
        sized_tensor, factor, needed_ranks = out, 1, None
        if kind == "all_to_all":
            # A rank that neither sends nor receives has to call this too. Sizes differ between
            # ranks, so they are not recorded.
            carrier, factor = self.backend, 0
            if not all(op.out_sizes):
                needed_ranks = [rank for rank, size in enumerate(op.out_sizes) if size]
        elif kind == "all_gather_shared":
            kind, sized_tensor, factor = "all_gather", op.data, self.size
        elif not out.numel():
            return DONE
        elif kind == "broadcast":
            kind = f"broadcast from rank {op.src}"
            needed_ranks = [op.src] if self.shm is None else None
        elif kind == "reduce_scatter":
            factor = self.size
        number = self.desync.record(
            kind,
            op.label,
            sized_tensor.dtype,
            sized_tensor.numel() * factor,
            self_checking=carrier is self.shm,
            needs=needed_ranks,
        )
        start: Callable[[Op, int], Work] = getattr(carrier, op.kind)
        return start(op, number)


# Why this dictionary: torch's groups take no attributes. It holds one watch for the default group
# of the process, and loses it with that group.
WATCHES: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


@atexit.register
def _finish() -> None:
    for watch in [*WATCHES.values()]:
        watch.finish(_LAST)


def watch_of_job() -> Watch:
    """Return the watch of this process, which all of its meshes share."""
    job = dist.group.WORLD
    if job not in WATCHES:
        WATCHES[job] = Watch(dist.get_rank(), default_store())
    return WATCHES[job]


def give_back(group: Any, *users: Any) -> None:
    """Destroy a process group from ``connected``, some time after all ``users`` are gone."""
    # Why groups of NCCL stay: the ranks would have to destroy them together.
    if str(dist.get_backend(group)) != "gloo" or group is dist.group.WORLD:
        return
    unused_groups = watch_of_job().unused
    users_left = [*range(len(users))]

    def gone() -> None:
        users_left.pop()
        if not users_left:
            unused_groups.append((group, None))

    for user in users:
        weakref.finalize(user, gone).atexit = False


def connected(
    ranks: Sequence[int],
    backend: str,
    timeout: datetime.timedelta,
    where: str,
    limits: Limits,
) -> Any:
    """Return a new process group; each of its ranks, and no other one, has to call this.

    Arguments:
        ranks: the global ranks, in the order of the group.
        backend: name of the backend.
        timeout: of the group's collectives, and of connecting its ranks.
        where: the purpose of the group, for errors.
        limits: see ``watched``.

    Raises:
        RuntimeError: a rank cannot be reached.
    """
    watch, action_name = watch_of_job(), name_of("group", ranks)
    # Why here: Python collects garbage on any thread and in the middle of torch's code, where a
    # group cannot be destroyed. A rank that makes a group has met the other ranks just now, so
    # they have left the collectives of a mesh that is gone here.
    watch.destroy_unused()
    group_name = f"funcshard {action_name} {watch.count(action_name)}"
    connect = functools.partial(new_group, ranks, backend, timeout, group_name)
    try:
        if backend != "gloo":  # the current GPU is one of the thread
            return connect()
        return watched(connect, watch, ranks, limits)
    except LostError as lost:
        raise RuntimeError(str(lost)) from None
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {watch.rank} cannot connect to the ranks {[*ranks]} of {where} over {backend} "
            f"within {timeout.total_seconds():g} s: one of them has ended, or cannot be reached. "
            "Read the log of the rank that failed first, or set GLOO_SOCKET_IFNAME. Communication "
            f"ended with: {error}"
        ) from error
