"""``Mesh``: the position of this rank among all data-parallel ranks, and its groups.

``init_mesh`` makes the mesh of a process. ``check_same`` and ``all_gather_texts`` exchange text
over a mesh, so that all ranks can check their arguments together before they move any data.
"""

from __future__ import annotations

import contextlib
import contextvars
import datetime
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from numbers import Integral

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from funcshard._utils import check_flag, check_number, unseen
from funcshard.comm.group import Group, LocalGroup
from funcshard.comm.torch_group import TorchGroup
from funcshard.plan import AXES

__all__ = ["Mesh", "all_gather_texts", "check_same", "in_simulation", "init_mesh", "ranks_of_job"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """The data-parallel ranks, as a grid with the axes ``replicate`` and ``shard``.

    Each flat buffer is cut into one shard per rank along the shard axis, and repeated along the
    replicate axis. By default all ranks lie on the shard axis. With both axes this is hybrid
    sharding. In a mesh of shape ``{"replicate": 2, "shard": 4}`` the ranks lie like this::

                         shard 0   shard 1   shard 2   shard 3
        replicate 0      rank 0    rank 1    rank 2    rank 3
        replicate 1      rank 4    rank 5    rank 6    rank 7

    Ranks of one row hold the four different shards of a buffer, and ranks of one column hold the
    same shard. All-gathers and reduce-scatters run along the rows, and all-reduces of gradients
    along the columns. Rows carry most of the traffic, so a row is best placed inside one machine.

    ``fs.init_mesh`` makes the mesh of a process under torchrun, ``fs.simulate`` passes a mesh to
    each simulated rank, and ``fs.Mesh()`` is a single local rank without a process group.

    Attributes:
        shard: the group of this rank's row.
        replicate: the group of this rank's column.
        device: the device of this rank's tensors.

    Example:
        >>> import funcshard as fs
        >>> mesh = fs.Mesh()  # one local rank, no process group
        >>> mesh.rank, mesh.world_size, mesh.shape
        (0, 1, {'replicate': 1, 'shard': 1})
    """

    shard: Group = field(default_factory=LocalGroup)
    replicate: Group = field(default_factory=LocalGroup)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        for axis, group in (("shard", self.shard), ("replicate", self.replicate)):
            if not hasattr(group, "all_gather"):
                raise TypeError(
                    f"Mesh takes the group of this rank along the axis {axis!r}; found {group!r}: init_mesh() makes the "
                    f"mesh of a process, simulate passes one to each rank, and fs.Mesh() is one rank alone"
                )
        object.__setattr__(self, "device", torch.device(self.device))

    @property
    def rank(self) -> int:
        """Number of this rank in the grid, counted along the shard axis first."""
        return self.replicate.rank * self.shard.size + self.shard.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the grid."""
        return self.replicate.size * self.shard.size

    @property
    def shape(self) -> dict[str, int]:
        """Sizes of the axes: ``{"replicate": R, "shard": S}``."""
        return {"replicate": self.replicate.size, "shard": self.shard.size}

    @property
    def axes(self) -> tuple[tuple[str, Group], ...]:
        """Name and group of each axis with more than one rank, the shard axis first."""
        both = (("shard", self.shard), ("replicate", self.replicate))
        return tuple((name, group) for name, group in both if group.size > 1)

    def reshaped(self, shape: Mapping[str, int]) -> Mesh:
        """Return a mesh of another shape over the same ranks, in the same order.

        This is for models whose parts are sharded over different meshes, each with a plan of its
        own. ``value_and_grad`` takes the mean over all ranks for every part. Every rank has to call
        this with the same shape.

        Arguments:
            shape: ``{"replicate": R, "shard": S}``; an axis that is left out has one rank.

        Raises:
            ValueError: the sizes do not multiply to the number of ranks, or an axis has another
                name.

        Example:
            >>> import funcshard as fs
            >>> def main(mesh):
            ...     grid = mesh.reshaped({"replicate": 2, "shard": 2})
            ...     return grid.rank, grid.replicate.rank, grid.shard.rank
            >>> fs.simulate(main, world_size=4)
            [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
        """
        replicate, shard = _sizes(shape, self.world_size)
        if (replicate, shard) == tuple(self.shape.values()):
            return self
        group = self.axes[0][1]
        ranks = [int(text) for text in all_gather_texts(self, str(group.global_rank))]
        row, column = divmod(self.rank, shard)
        along = {"shard": ranks[row * shard : (row + 1) * shard], "replicate": ranks[column::shard]}
        groups = {axis: group.subgroup(line, axis) if len(line) > 1 else LocalGroup() for axis, line in along.items()}
        return Mesh(**groups, device=self.device)

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh, *, patience: float = 5.0, shared_memory: bool = True) -> Mesh:
        """Return the mesh over the process groups of a ``torch.distributed`` ``DeviceMesh``.

        Every rank of the device mesh has to call this.

        Arguments:
            device_mesh: a device mesh of one or two axes. A single axis, of any name, becomes the
                shard axis. Two axes are named ``"replicate"`` and ``"shard"``, or, as in other
                programs, ``"dp_replicate"`` and ``"dp_shard"``. They may come in any order, and
                ``mesh.rank`` counts along the shard axis first. Without names the first axis is the
                replicate axis.
            patience, shared_memory: see ``init_mesh``.

        Raises:
            ValueError: the device mesh has more than two axes, or two with other names. An axis of
                another kind of parallelism is not of this mesh: slice it off.

        Example:
            >>> import funcshard as fs
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> def main():  # under torchrun
            ...     names = ("replicate", "shard")
            ...     device_mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
            ...     return fs.Mesh.from_device_mesh(device_mesh)
        """
        _check_options(patience, shared_memory)
        found = device_mesh.mesh_dim_names
        names = ("shard",) if device_mesh.ndim == 1 else tuple(name.removeprefix("dp_") for name in found or AXES)
        if device_mesh.ndim > 2 or set(names) - set(AXES) or len(set(names)) < len(names):
            raise ValueError(
                f"device_mesh must have one axis, or two axes named {AXES} or ('dp_replicate', 'dp_shard'); found "
                f"{device_mesh.ndim} axes named {found}: slice the data-parallel axes out of it, as in "
                f"device_mesh['dp_shard'], or give them these names in init_device_mesh(mesh_dim_names=...)"
            )
        groups: dict[str, Group] = {}
        kind = device_mesh.device_type
        for dim, name in enumerate(names):
            group = device_mesh.get_group(dim)
            if dist.get_world_size(group) == 1:
                groups[name] = LocalGroup()
            else:
                groups[name] = TorchGroup.of(group, name, kind, patience=patience, shared_memory=shared_memory)
        return cls(**groups, device=_device(kind))


def init_mesh(
    shape: Mapping[str, int] | None = None,
    *,
    device: str | torch.device | None = None,
    timeout: float = 600.0,
    patience: float = 5.0,
    shared_memory: bool = True,
) -> Mesh:
    """Return this process's mesh over all processes of the job.

    - Inside ``fs.simulate`` the mesh is that of the simulated rank. It keeps the simulation's
      device; the arguments below do not apply, except ``shape``.
    - If ``torch.distributed`` is initialised, the mesh covers its default process group.
    - Otherwise, under torchrun, the call initialises ``torch.distributed``, with NCCL for CUDA and
      gloo for the CPU. It also makes the process's GPU the current CUDA device.
    - Otherwise the mesh is one local rank without a process group, so a script also runs without
      torchrun.

    Every process has to call this with the same arguments.

    Arguments:
        shape: ``{"replicate": R, "shard": S}``; an axis that is left out has one rank. By default
            all ranks lie on the shard axis.
        device: type of the device; by default CUDA if it is available, else the CPU.
        timeout: seconds after which a collective fails because a rank has not joined it. It applies
            only if this call initialises ``torch.distributed``.
        patience: seconds that a wait on the CPU may take before the waiting rank compares its
            latest collectives with the other ranks'. If they agree, the wait goes on, because a
            slow rank is no error. If they differ, every waiting rank raises an error that names the
            difference.
        shared_memory: whether ranks on the CPUs of one machine communicate through its memory, if
            the system lets them. That is faster than gloo, and gives the same numbers to the bit.
            ``False`` for gloo only.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks, or an axis has another name.

    Example:
        >>> import funcshard as fs
        >>> fs.init_mesh().world_size  # without torchrun: one local rank, no process group
        1
        >>> def main():  # under torchrun --nproc-per-node=4 on two machines
        ...     return fs.init_mesh({"replicate": 2, "shard": 4})
    """
    _check_options(patience, shared_memory)
    # Why so many: timedelta, which torch takes, holds a billion days.
    check_number("timeout", timeout, above=0, below=1e9, remedy="pass a number of seconds, such as 600.0")
    simulated = _simulated.get()
    if simulated is not None:
        return simulated if shape is None else simulated.reshaped(shape)
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    started = dist.is_available() and dist.is_initialized()
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world = dist.get_world_size() if started else int(os.environ["WORLD_SIZE"]) if launched else 1
    replicate, shard = _sizes({"shard": world} if shape is None else shape, world)
    if not started and launched:
        if kind == "cuda":
            torch.cuda.set_device(_device(kind))
        limit, backend = datetime.timedelta(seconds=timeout), "nccl" if kind == "cuda" else "gloo"
        store = _store_of_restart(limit)
        rank, size = (-1, -1) if store is None else (int(os.environ["RANK"]), world)
        dist.init_process_group(backend, store=store, timeout=limit, rank=rank, world_size=size)
    elif not started:
        return Mesh(device=_device(kind))
    device_mesh = init_device_mesh(kind, (replicate, shard), mesh_dim_names=AXES)
    return Mesh.from_device_mesh(device_mesh, patience=patience, shared_memory=shared_memory)


# The mesh of the simulated rank that runs in this context.
_simulated: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar("funcshard_simulated", default=None)


@contextlib.contextmanager
def in_simulation(mesh: Mesh) -> Iterator[None]:
    """Make ``mesh`` the mesh of ``init_mesh`` for the ``with`` block, in which a rank runs."""
    token = _simulated.set(mesh)
    try:
        yield
    finally:
        _simulated.reset(token)


def ranks_of_job() -> int:
    """Return the number of ranks that run this code: those of the simulation, or the processes."""
    simulated = _simulated.get()
    if simulated is not None:
        return simulated.world_size
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def check_same(mesh: Mesh, text: str, what: str) -> None:
    """Raise ``ValueError`` on every rank unless all ranks of ``mesh`` pass the same ``text``.

    Arguments:
        mesh: the ranks; each of them has to call this.
        text: the text to compare.
        what: a name for the text, for the error.
    """
    # Why every rank first reads every text: a rank that raised before the last collective would
    # leave the ranks that wait in it.
    texts = all_gather_texts(mesh, text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise ValueError(
                f"{what} must be the same on every rank; rank 0 has {texts[0]} and rank {rank} has {other}: build it from "
                f"the same arguments everywhere"
            )


@unseen
def all_gather_texts(mesh: Mesh, text: str) -> list[str]:
    """Return every rank's ``text``, in order of ranks; each rank of ``mesh`` has to call this."""
    texts = [text]
    for _, group in mesh.axes:  # the shard axis first, which gives the order of ranks
        texts = [each for part in group.all_gather_text(json.dumps(texts)) for each in json.loads(part)]
    return texts


def _sizes(shape: Mapping[str, int], world: int) -> tuple[int, int]:
    if not isinstance(shape, Mapping):
        raise TypeError(f'a mesh shape must be {{"replicate": R, "shard": S}}, for {world} ranks in all; found {shape!r}')
    replicate, shard = shape.get("replicate", 1), shape.get("shard", 1)
    whole = all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 1 for n in (replicate, shard))
    if set(shape) - set(AXES) or not whole or replicate * shard != world:
        raise ValueError(
            f"mesh shape {dict(shape)} must name 'replicate' and 'shard' and have as many ranks as the world: {world}; "
            f"found {replicate!r} × {shard!r}: pass whole numbers whose product is {world}, or no shape for one axis"
        )
    return int(replicate), int(shard)


def _check_options(patience: float, shared_memory: bool) -> None:
    check_number("patience", patience, above=0, remedy="pass a number of seconds, such as 5.0")
    check_flag("shared_memory", shared_memory)


def _store_of_restart(timeout: datetime.timedelta) -> dist.Store | None:
    """Return a store for ranks that torchrun has restarted, or ``None`` for torch's own choice."""
    # Why: torchrun keeps one store for all attempts, in which torch would find the addresses of the
    # previous attempt's ranks. On a single node every rank has the same number of the attempt,
    # which serves as a prefix. On several nodes the numbers may differ.
    attempt, local_size = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("LOCAL_WORLD_SIZE")
    if attempt == "0" or local_size != os.environ["WORLD_SIZE"] or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(f"attempt {attempt}", dist.TCPStore(address, port, is_master=False, timeout=timeout))


def _device(kind: str) -> torch.device:
    if kind != "cuda":
        return torch.device(kind)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
