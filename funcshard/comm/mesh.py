"""The mesh: where this rank stands in the data-parallel world, and the groups it communicates in."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from funcshard.comm.group import Group, LocalGroup
from funcshard.comm.torch_group import TorchGroup
from funcshard.plan import AXES

__all__ = ["Mesh", "check_same", "all_gather_texts", "init_mesh"]


@dataclass(frozen=True, slots=True)
class Mesh:
    """A 2-D arrangement of ranks: buffers are cut along ``shard`` and repeated along ``replicate``.

    Attributes:
        shard: the group of ranks that hold the slices of one buffer.
        replicate: the group of ranks that hold the same slice.
        device: where this rank's tensors live.

    Example:
        >>> import funcshard as fs
        >>> mesh = fs.Mesh()  # one local rank, no process group
        >>> mesh.rank, mesh.world_size, mesh.shape
        (0, 1, {'replicate': 1, 'shard': 1})
    """

    shard: Group = field(default_factory=LocalGroup)
    replicate: Group = field(default_factory=LocalGroup)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def rank(self) -> int:
        """Position in the data-parallel world, counted along the shard axis first."""
        return self.replicate.rank * self.shard.size + self.shard.rank

    @property
    def world_size(self) -> int:
        """Number of ranks of the data-parallel world."""
        return self.replicate.size * self.shard.size

    @property
    def shape(self) -> dict[str, int]:
        """Sizes of the axes: ``{"replicate": R, "shard": S}``."""
        return {"replicate": self.replicate.size, "shard": self.shard.size}

    @property
    def axes(self) -> tuple[tuple[str, Group], ...]:
        """The axes that more than one rank lies on, the inner one first."""
        both = (("shard", self.shard), ("replicate", self.replicate))
        return tuple((name, group) for name, group in both if group.size > 1)

    def reshaped(self, shape: Mapping[str, int]) -> Mesh:
        """Return a mesh of the same ranks, in the same order, that are arranged otherwise; every rank has to call this.

        A model whose parts are sharded over different meshes has a plan for each: see ``value_and_grad``, which takes the
        mean over all ranks of either.

        Arguments:
            shape: ``{"replicate": R, "shard": S}``.

        Raises:
            ValueError: the shape does not multiply out to the number of ranks, or names other axes.

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
        members = [int(text) for text in all_gather_texts(self, str(group.global_rank))]
        outer, inner = divmod(self.rank, shard)
        along = {"shard": members[outer * shard : (outer + 1) * shard], "replicate": members[inner::shard]}
        groups = {axis: group.subgroup(those, axis) if len(those) > 1 else LocalGroup() for axis, those in along.items()}
        return Mesh(**groups, device=self.device)

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh, *, patience: float = 5.0, shared_memory: bool = True) -> Mesh:
        """Return the mesh over the process groups of a ``torch.distributed`` DeviceMesh; every rank has to call this.

        Arguments:
            device_mesh: one axis, which is sharded over, or two; two are ``("replicate", "shard")`` in this order
                unless their names say otherwise.
            patience, shared_memory: see ``init_mesh``.

        Raises:
            ValueError: more than two axes, or two whose names are others.

        Example:
            >>> import funcshard as fs
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> def main():  # under torchrun
            ...     return fs.Mesh.from_device_mesh(init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")))
        """
        names = device_mesh.mesh_dim_names
        if device_mesh.ndim == 1:
            names = ("shard",)
        elif device_mesh.ndim == 2:
            names = names or AXES
        if names is None or device_mesh.ndim > 2 or set(names) - set(AXES):
            raise ValueError(
                f"device_mesh must have one axis or the two axes {AXES}; found {device_mesh.ndim} axes named "
                f"{device_mesh.mesh_dim_names}: slice it first, as in device_mesh['replicate', 'shard']"
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
    """Return the mesh of this process's world: torchrun's, an initialised ``torch.distributed``'s, or one local rank.

    Arguments:
        shape: ``{"replicate": R, "shard": S}``; by default every rank shards.
        device: type of device; by default CUDA where it is available, else the CPU.
        timeout: seconds after which a collective that a rank did not join is an error, where this call starts
            ``torch.distributed``.
        patience: seconds that a wait on the CPU may take before ranks compare what they have issued: if it is the same, the
            wait goes on, because a slow rank is no error; if not, every rank that waits ends with an error.
        shared_memory: whether ranks on the CPUs of one machine communicate through its memory, where the system lets them,
            which is faster than gloo and gives the same numbers to the bit; ``False`` for gloo.

    Raises:
        ValueError: the shape does not multiply out to the number of ranks, or names other axes.

    Example:
        >>> import funcshard as fs
        >>> fs.init_mesh().world_size  # not under torchrun: one local rank, no process group
        1
    """
    kind = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    started = dist.is_available() and dist.is_initialized()
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world = dist.get_world_size() if started else int(os.environ["WORLD_SIZE"]) if launched else 1
    sizes = dict(shape) if shape is not None else {"shard": world}
    replicate, shard = _sizes(sizes, world)
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


def check_same(mesh: Mesh, text: str, what: str) -> None:
    """Raise ``ValueError`` on every rank, naming the ranks, unless ``text`` is the same on every rank of ``mesh``."""
    # every rank learns everything before any decides: one that left early would leave others waiting
    texts = all_gather_texts(mesh, text)
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise ValueError(
                f"{what} must be the same on every rank; rank 0 has {texts[0]} and rank {rank} has {other}: build it from "
                f"the same arguments everywhere"
            )


def all_gather_texts(mesh: Mesh, text: str) -> list[str]:
    """Every rank's text, in order of ranks."""
    texts = [text]
    for _, group in mesh.axes:  # the inner axis first, which leaves them in the order of ranks
        texts = [each for part in group.all_gather_text(json.dumps(texts)) for each in json.loads(part)]
    return texts


def _sizes(shape: Mapping[str, int], world: int) -> tuple[int, int]:
    replicate, shard = shape.get("replicate", 1), shape.get("shard", 1)
    if set(shape) - set(AXES) or replicate * shard != world:
        raise ValueError(
            f"mesh shape {dict(shape)} must name 'replicate' and 'shard' and have as many ranks as the world: {world}"
        )
    return replicate, shard


def _store_of_restart(timeout: datetime.timedelta) -> dist.Store | None:
    """Where ranks that torchrun started again meet, or ``None`` for torch's own choice.

    torchrun keeps one store for all its attempts, and there torch finds the addresses of the ranks that died before. On one
    node the number of the attempt is the same everywhere and keeps them apart; on several it is not.
    """
    attempt, alone = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"), os.environ.get("LOCAL_WORLD_SIZE")
    if attempt == "0" or alone != os.environ["WORLD_SIZE"] or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.PrefixStore(f"attempt {attempt}", dist.TCPStore(address, port, is_master=False, timeout=timeout))


def _device(kind: str) -> torch.device:
    if kind != "cuda":
        return torch.device(kind)
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", torch.cuda.current_device())))
