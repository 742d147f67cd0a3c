"""``Mesh``: the position of this rank among all ranks, and its groups along each axis."""

from __future__ import annotations

import contextvars
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from funcshard._utils.options import absent, check_device, check_flag, check_number
from funcshard.comm.agreement import all_gather_texts, first_difference
from funcshard.comm.group import Group, LocalGroup
from funcshard.comm.job import (
    check_gpu,
    device_mesh_of,
    device_of,
    is_started,
    launched_ranks,
    lines_through,
    meet_for_mesh,
    start,
)
from funcshard.comm.torch_group import TorchGroup, give_back
from funcshard.comm.watch import GIVE_UP, Limits
from funcshard.plan import AXES, Cast, axes_text, mesh_axes_of

_ALL = "mesh.world_size is the number of all ranks"
_AXES = "mesh.shape is a dictionary of axes and their sizes"
_POSITION = "mesh.position is a dictionary of this rank's index along each axis"
# Names that a mesh has in other libraries, with their remedies.
_REMEDIES = {
    **dict.fromkeys(("size", "get_world_size"), f"{_ALL}, and {_AXES}"),
    **dict.fromkeys(("mesh_dim_names", "axis_names", "ndim"), _AXES),
    **dict.fromkeys(("get_rank", "global_rank"), "this rank's number is mesh.rank"),
    **dict.fromkeys(("local_rank", "get_local_rank", "get_coordinate"), _POSITION),
    **dict.fromkeys(("device_type", "devices"), "this rank's device is mesh.device"),
}


@dataclass(frozen=True, slots=True, repr=False)
class Mesh:
    """The ranks of a job as a grid whose axes have names, and this rank's groups along the axes.

    ``replicate`` and ``shard`` are the *data axes*. Each flat buffer is cut into one shard per rank
    along the shard axis, and repeated along the replicate axis; with both, this is hybrid sharding.
    Ranks are numbered row by row, so in a mesh of shape ``{"replicate": 2, "shard": 4}`` they lie
    like this::

                         shard 0   shard 1   shard 2   shard 3
        replicate 0      rank 0    rank 1    rank 2    rank 3
        replicate 1      rank 4    rank 5    rank 6    rank 7

    All-gathers and reduce-scatters run along the rows, and all-reduces of gradients along the
    columns. Neighbours along the last axis have neighbouring numbers, so let the last axis carry
    most of the traffic: it lies inside a machine.

    Every other axis is a *model axis*, of any name. Your model communicates along it, with
    ``fs.psum`` and the like, and leaves are repeated along it unless ``make_plan(local=...)`` says
    that they differ.

    You get a mesh from ``fs.init_mesh`` under torchrun and from ``fs.simulate``; ``fs.Mesh()`` is a
    single local rank.

    Attributes:
        groups: the group of this rank along each axis, in the order of ranks.
        device: the device of this rank's tensors.
        device_mesh: the DeviceMesh over the same ranks, for modules with DTensors; ``None`` for
            simulated ranks and for one rank alone.
        device_axes: our name of each axis, by that in ``device_mesh``.
        shard, replicate: the groups along the data axes.
        axes: name and group of each axis with more than one rank, the last axis first.
        world_size: number of ranks in the grid.
        memo: what the ranks have done together and need not do again, such as the texts that they
            have found to be equal; meshes that are made from one share it.

    Example:
        >>> import funcshard as fs
        >>> mesh = fs.Mesh()  # one local rank, no process group
        >>> mesh.rank, mesh.world_size, mesh.shape
        (0, 1, {'replicate': 1, 'shard': 1})
        >>> def main(mesh):
        ...     return mesh.rank, mesh.position, mesh["tensor"].shape
        >>> fs.simulate(main, {"shard": 2, "tensor": 2})[1]
        (1, {'replicate': 0, 'shard': 0, 'tensor': 1}, {'replicate': 1, 'shard': 1, 'tensor': 2})
    """

    groups: Mapping[str, Group] = field(default_factory=dict, hash=False)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    device_mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)
    device_axes: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    shard: Group = field(init=False, compare=False)
    replicate: Group = field(init=False, compare=False)
    axes: tuple[tuple[str, Group], ...] = field(init=False, repr=False)
    world_size: int = field(init=False, repr=False)
    memo: dict[Any, Any] = field(
        default_factory=dict, repr=False, compare=False, kw_only=True
    )

    def __post_init__(self) -> None:
        groups = self.groups
        for axis, group in (
            groups.items() if isinstance(groups, Mapping) else ((None, groups),)
        ):
            if axis is None or not hasattr(group, "start"):
                raise TypeError(
                    f"Mesh takes the group of this rank along each axis, {{axis: group}}; found "
                    f"{group!r} for {axis!r}: init_mesh() makes the mesh of a process, simulate "
                    "passes one to each rank, and fs.Mesh() is one rank alone"
                )
        axis_sizes = mesh_axes_of(
            {axis: group.size for axis, group in groups.items()} or {"shard": 1}
        )
        groups = {
            axis: groups[axis] if axis in groups else LocalGroup() for axis in axis_sizes
        }
        device = check_device(self.device)
        # Units compare the devices of tensors with that of the mesh.
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = device_of(
                "cuda"
            )  # tensors are on "cuda:0", which is not equal to "cuda"
        larger_axes = [
            (axis, group) for axis, group in reversed(groups.items()) if group.size > 1
        ]
        fields = {
            "groups": groups,
            "device": device,
            "shard": groups["shard"],
            "replicate": groups["replicate"],
            "axes": tuple(larger_axes),
            # Why here: every unit asks for it in every call.
            "world_size": math.prod(axis_sizes.values()),
        }
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def rank(self) -> int:
        """Number of this rank in the grid, counted row by row, the last axis fastest."""
        rank = 0
        for group in self.groups.values():
            rank = rank * group.size + group.rank
        return rank

    @property
    def shape(self) -> dict[str, int]:
        """Size of each axis, in the order of ranks: ``{"replicate": R, "shard": S}`` and others."""
        return {axis: group.size for axis, group in self.groups.items()}

    @property
    def position(self) -> dict[str, int]:
        """Index of this rank along each axis."""
        return {axis: group.rank for axis, group in self.groups.items()}

    def __repr__(self) -> str:
        return f"Mesh(rank={self.rank}, shape={self.shape}, device={str(self.device)!r})"

    def __reduce__(self) -> Any:
        raise TypeError(
            "a mesh cannot be pickled, because it holds this rank's connections: call "
            "fs.init_mesh() in the other process, and leave the mesh out of what you save"
        )

    def __copy__(self) -> Mesh:
        return self  # the connections have no copy; so a module that keeps its mesh can be copied

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self

    if not TYPE_CHECKING:  # which then still knows what this class lacks

        def __getattr__(self, name: str) -> Any:
            raise absent("a mesh", name, _REMEDIES)

    def __getitem__(self, axes: str | tuple[str, ...]) -> Mesh:
        """Return the mesh of this rank's neighbours along some axes, as in ``mesh["shard"]``.

        Arguments:
            axes: a name, or several, as in ``mesh["shard", "tensor"]``.

        Raises:
            ValueError: the mesh has no such axis.
        """
        axis_names = self.names(axes)
        return remade(
            self, {axis: group for axis, group in self.groups.items() if axis in axis_names}
        )

    def names(self, axes: str | Sequence[str]) -> tuple[str, ...]:
        """Return one or several names of axes as a tuple, in your order.

        Raises:
            ValueError: the mesh has no such axis, a name comes twice, or none does.
        """
        axis_names: tuple[Any, ...] = ()
        if isinstance(axes, str):
            axis_names = (axes,)
        elif isinstance(axes, tuple | list):
            axis_names = tuple(axes)
        are_known = all(
            isinstance(name, str) and name in self.groups for name in axis_names
        )
        if not axis_names or not are_known or len(set(axis_names)) < len(axis_names):
            raise ValueError(
                "axis must name one axis of the mesh, or several different ones in a tuple; found "
                f"{axes!r}: the mesh has {', '.join(map(repr, self.groups))}; name others in "
                f"init_mesh({{...}})"
            )
        return axis_names

    def reshaped(self, shape: Mapping[str, int]) -> Mesh:
        """Return a mesh of another shape over the same ranks, in the same order.

        Use it to shard the parts of your model over different meshes, each with its plan;
        ``value_and_grad`` takes the mean over all ranks for every part. Every rank has to call this
        with the same shape.

        Arguments:
            shape: the size of each axis, such as ``{"replicate": R, "shard": S}``.

        Raises:
            ValueError: the sizes do not multiply to the number of ranks.

        Example:
            >>> import funcshard as fs
            >>> def main(mesh):
            ...     grid = mesh.reshaped({"replicate": 2, "shard": 2})
            ...     return grid.rank, grid.replicate.rank, grid.shard.rank
            >>> fs.simulate(main, world_size=4)
            [(0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1)]
        """
        axis_sizes = _sizes(shape, self.world_size)
        if list(axis_sizes.items()) == list(self.shape.items()):
            return self
        if self.world_size == 1:
            return Mesh(dict.fromkeys(axis_sizes, LocalGroup()), self.device)
        group = self.axes[0][1]  # any of them makes groups of the job's ranks
        facts = {"the shape of Mesh.reshaped": axes_text(axis_sizes)}
        own_row = json.dumps([group.global_rank, facts])
        rows = [
            json.loads(text) for text in all_gather_texts(self, own_row, "Mesh.reshaped")
        ]
        if difference := first_difference([facts for _, facts in rows], range(len(rows))):
            raise ValueError(difference)
        groups: dict[str, Group] = {}
        for axis, line_ranks in lines_through(self.rank, axis_sizes).items():
            groups[axis] = LocalGroup()
            if len(line_ranks) > 1:
                groups[axis] = group.subgroup([rows[i][0] for i in line_ranks], axis)
        # Why a new memo: the old one has parts of the old shard axis, of other ranks.
        return Mesh(groups, self.device)

    @classmethod
    def from_device_mesh(
        cls,
        device_mesh: DeviceMesh,
        *,
        names: Mapping[str, str] | None = None,
        patience: float = 5.0,
        shared_memory: bool = True,
        give_up: float = GIVE_UP,
    ) -> Mesh:
        """Return the mesh over the process groups of a ``torch.distributed`` ``DeviceMesh``.

        Every rank of the device mesh has to call this.

        Arguments:
            device_mesh: a device mesh with names of its axes. ``"replicate"`` and ``"shard"``, or
                ``"dp_replicate"`` and ``"dp_shard"``, are the data axes; every other axis keeps its
                name. A single axis becomes the shard axis, and two without names become the data
                axes.
            names: your names for axes, by the names that they have, such as ``{"dp": "shard"}``.
            patience, shared_memory, give_up: see ``init_mesh``.

        Raises:
            ValueError: ``names`` has an axis that the device mesh has not, two axes have one name,
                three have none, or none of several is a data axis.

        Example:
            >>> import funcshard as fs
            >>> from torch.distributed.device_mesh import init_device_mesh
            >>> def main():  # under torchrun
            ...     names = ("dp", "tp")
            ...     device_mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=names)
            ...     return fs.Mesh.from_device_mesh(
            ...         device_mesh, names={"dp": "shard", "tp": "tensor"}
            ...     )
        """
        limits = _limits(patience, shared_memory, give_up)
        if not isinstance(device_mesh, DeviceMesh):
            raise TypeError(
                "device_mesh must be a torch.distributed DeviceMesh; found "
                f"{type(device_mesh).__name__}: make one with init_device_mesh, or call "
                "init_mesh() without one"
            )
        axis_names = _names_of(device_mesh, names)
        axis_sizes = dict(zip(axis_names, device_mesh.shape, strict=True))
        mesh_ranks = device_mesh.mesh.flatten().tolist()
        meet_for_mesh(
            mesh_ranks, axis_sizes, device_mesh.device_type, "Mesh.from_device_mesh", limits
        )
        return _over(device_mesh, axis_names, limits, shared_memory, ours=False)


def neighbours(mesh: Mesh, ranks: int) -> Mesh:
    """Return the mesh of the part of this rank's row that holds the rank, with one axis, ``shard``.

    Every rank of ``mesh`` has to call this. The first call for a size makes groups.

    Arguments:
        mesh: the ranks.
        ranks: number of ranks of a part; it divides that of the shard axis.
    """
    # Why the size of the axis too: in a mesh of other axes alone, this rank is the whole row.
    known_parts, part_key = mesh.memo, ("part", mesh.shard.size, ranks)
    if part_key not in known_parts:
        label = f"the parts of {ranks} ranks"
        rank_texts = mesh.shard.all_gather_text(str(mesh.shard.global_rank), label=label)
        # Parts are neighbours: the first ``ranks`` ranks of the row, the next ones, and so on.
        first_rank = mesh.shard.rank // ranks * ranks
        part_ranks = [*map(int, rank_texts[first_rank : first_rank + ranks])]
        # Why plain: meshes that share this memo may have other collectives.
        plain_group = mesh.shard.subgroup(part_ranks, "shard").plain
        known_parts[part_key] = Mesh({"shard": plain_group}, mesh.device)
    plain_part: Mesh = known_parts[part_key]
    group = mesh.shard.around(plain_part.shard)
    return plain_part if group is plain_part.shard else remade(plain_part, {"shard": group})


def remade(mesh: Mesh, groups: Mapping[str, Group]) -> Mesh:
    """Return a mesh with other groups of the same ranks, along all or some axes of ``mesh``."""
    # Why only these: a module's DTensors may lie on axes that the new mesh does not have.
    known_axes = {name: axis for name, axis in mesh.device_axes.items() if axis in groups}
    device_mesh = (
        mesh.device_mesh if known_axes or len(groups) == len(mesh.groups) else None
    )
    # Why one memo: some ranks alone may use the new mesh, and must not make or compare anything
    # again.
    return Mesh(groups, mesh.device, device_mesh, known_axes, memo=mesh.memo)


@dataclass(frozen=True, slots=True)
class Topology:
    """Along which mesh axes a flat buffer is cut, and along which it is repeated.

    Where it is cut, each rank holds a slice; where it is repeated, a copy. Repeated copies are one
    value: to gather them is the identity, and its adjoint adds up their gradients, in an
    all-reduce.

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
            axis
            for axis in groups.items()
            if axis[1].size > 1 and axis[0] not in self.local
        ]
        object.__setattr__(self, "cut", is_cut)
        object.__setattr__(
            self,
            "repeated",
            tuple(
                axis
                for axis in communicated_axes
                if not (self.sharded and axis[0] == "shard")
            ),
        )

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


def init_mesh(
    shape: Mapping[str, int] | None = None,
    *,
    device: str | torch.device | None = None,
    timeout: float = 600.0,
    patience: float = 5.0,
    shared_memory: bool = True,
    give_up: float = GIVE_UP,
) -> Mesh:
    """Return this process's mesh over all processes of the job.

    - Inside ``fs.simulate`` you get the simulated rank's mesh; of the arguments only ``shape``
      applies.
    - If ``torch.distributed`` is initialised, the mesh covers its default process group.
    - Otherwise, under torchrun, the call initialises it, with NCCL for CUDA and gloo for the CPU,
      and makes the process's GPU the current CUDA device.
    - Otherwise the mesh is one local rank, so your script also runs without torchrun.

    Call it in every process with the same arguments.

    Arguments:
        shape: the size of each axis, such as ``{"replicate": R, "shard": S, "tensor": T}``; the
            last axis joins neighbouring processes. By default all ranks lie on the shard axis.
        device: type of the device; by default CUDA if it is available, else the CPU.
        timeout: seconds after which a collective fails because a rank has not joined it, if this
            call initialises ``torch.distributed``.
        patience: seconds that a wait on the CPU may take before the rank compares its latest
            collectives with the other ranks'. A slow rank is no error. If they differ, or if ranks
            wait for each other on different axes, every waiting rank raises an error that names the
            difference.
        shared_memory: whether ranks on the CPUs of one machine communicate through its memory, if
            your system lets them. That is faster than gloo, with the same bits.
        give_up: seconds after which a rank that waits gives up one that has shown no sign of life,
            because it is suspended or its machine hangs; every rank that waits then raises an error
            that names it. A rank that computes, compiles, or sits at a breakpoint gives signs. A
            process that was killed on this machine is noticed after ``patience``. Pass more if your
            scheduler suspends single ranks for longer; pauses of the whole job do not count. See
            docs/hanging.md.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks, or this machine has no such
            device.

    Example:
        >>> import funcshard as fs
        >>> fs.init_mesh().world_size  # without torchrun: one local rank, no process group
        1
        >>> def main():  # under torchrun --nproc-per-node=4 on two machines
        ...     return fs.init_mesh({"replicate": 2, "shard": 4})
    """
    limits = _limits(patience, shared_memory, give_up)
    # Why so many: timedelta, which torch takes, holds a billion days.
    check_number(
        "timeout",
        timeout,
        above=0,
        below=1e9,
        remedy="pass a number of seconds, such as 600.0",
    )
    simulated_mesh = SIMULATED.get()
    if simulated_mesh is not None:
        return simulated_mesh if shape is None else simulated_mesh.reshaped(shape)
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    # Each process chooses the GPU by its own number, so the index of ``device`` does not count.
    device_kind = check_device(device).type
    started = is_started()
    check_gpu(device_kind)
    launched_world = None if started else launched_ranks()
    world = dist.get_world_size() if started else launched_world or 1
    axis_sizes = _sizes({"shard": world} if shape is None else shape, world)
    if launched_world is not None:
        start(device_kind, world, timeout, limits)
    elif not started:
        return Mesh(dict.fromkeys(axis_sizes, LocalGroup()), device_of(device_kind))
    meet_for_mesh(range(world), axis_sizes, device_kind, "init_mesh", limits)
    # Why without a replicate axis of one rank: it would need a process group for each rank.
    named_sizes = {
        axis: size
        for axis, size in axis_sizes.items()
        if axis != "replicate" or size > 1 or axis in (shape or ())
    }
    device_mesh = device_mesh_of(device_kind, named_sizes, limits)
    return _over(device_mesh, list(named_sizes), limits, shared_memory, ours=True)


def _over(
    device_mesh: DeviceMesh,
    names: Sequence[str],
    limits: Limits,
    shared_memory: bool,
    *,
    ours: bool,
) -> Mesh:
    """Return the mesh over the groups of a device mesh, whose axes have ``names`` here.

    ``ours`` says whether this library has made these groups, and so destroys them.
    """
    groups: dict[str, Group] = {}
    device_kind = device_mesh.device_type
    for dim, axis_name in enumerate(names):
        group = device_mesh.get_group(dim)
        group_users: list[Any] = [device_mesh]  # DTensors may hold it for longer
        groups[axis_name] = LocalGroup()
        if dist.get_world_size(group) > 1:
            groups[axis_name] = torch_group = TorchGroup.of(
                group, axis_name, device_kind, limits=limits, shared_memory=shared_memory
            )
            group_users += [torch_group.desync]
        if ours:
            give_back(group, *group_users)
    device_names = device_mesh.mesh_dim_names or ()
    return Mesh(
        groups,
        device_of(device_kind),
        device_mesh,
        dict(zip(device_names, names, strict=False)),
    )


# The mesh of the simulated rank that runs in this context.
SIMULATED: contextvars.ContextVar[Mesh | None] = contextvars.ContextVar(
    "funcshard_simulated", default=None
)


def find_lost_rank(mesh: Mesh) -> str:
    """Return an error message if a rank is suspended or gone; ``""`` if none is known to be.

    This is for waits outside of collectives, which look by themselves.
    """
    for _, axis_group in mesh.axes:
        plain_group = axis_group.plain
        if isinstance(plain_group, TorchGroup) and (
            lost_text := plain_group.desync.find_lost()
        ):
            return lost_text
    return ""


def ranks_of_job() -> int:
    """Return the number of ranks that run this code, simulated ones or processes."""
    simulated_mesh = SIMULATED.get()
    if simulated_mesh is not None:
        return simulated_mesh.world_size
    return dist.get_world_size() if is_started() else 1


def _sizes(shape: Mapping[str, int], world: int) -> dict[str, int]:
    if not isinstance(shape, Mapping):
        remedy = "name each axis, or leave it out for one axis"
        if isinstance(shape, int):
            remedy = "leave it out for one axis"
        elif isinstance(shape, str | torch.device):
            remedy = f"pass the device by keyword, as in init_mesh(device={str(shape)!r})"
        raise TypeError(
            f'a mesh shape must be {{"replicate": R, "shard": S}}, for {world} ranks in all; '
            f"found {shape!r}: {remedy}"
        )
    axis_sizes = mesh_axes_of(shape or {"shard": 1}, "a mesh shape:")
    if math.prod(axis_sizes.values()) != world:
        raise ValueError(
            f"mesh shape {dict(shape)} must have as many ranks as the world: {world}; found "
            f"{axes_text(axis_sizes)}: pass whole numbers whose product is {world}, or no shape "
            "for one axis"
        )
    return axis_sizes


def _names_of(device_mesh: DeviceMesh, names: Mapping[str, str] | None) -> list[str]:
    device_names: Any = device_mesh.mesh_dim_names or (
        AXES[-device_mesh.ndim :] if device_mesh.ndim <= 2 else ()
    )
    given_names = dict(names or {})
    # Why: "dp_shard" and "dp_replicate" are what torchtitan and others call the data axes.
    data_names = {f"dp_{axis}": axis for axis in AXES}
    axis_names = [
        given_names.get(name, data_names.get(name, name)) for name in device_names
    ]
    if len(device_names) == 1 and not given_names:
        axis_names = ["shard"]
    rule = ""
    if unknown_names := sorted(given_names.keys() - set(device_names)):
        rule = f"names must be of its axes; found {unknown_names[0]!r} in names"
    elif not device_names:
        rule = "three axes or more need names"
    elif len(set(axis_names)) < len(axis_names):
        rule = f"no two axes may have one name; found {axis_names}"
    elif len(axis_names) > 1 and not set(axis_names) & set(AXES):
        rule = f"one of several axes must be 'shard' or 'replicate'; found {axis_names}"
    if rule:
        raise ValueError(
            f"device_mesh has {device_mesh.ndim} axes named {device_mesh.mesh_dim_names}: {rule}; "
            "pass init_device_mesh(mesh_dim_names=...), or say which is which, as in "
            f"names={{'dp': 'shard', 'tp': 'tensor'}}"
        )
    return axis_names


def _limits(patience: float, shared_memory: bool, give_up: float) -> Limits:
    check_number(
        "give_up", give_up, above=0, remedy="pass a number of seconds, such as 120.0"
    )
    check_number(
        "patience", patience, above=0, remedy="pass a number of seconds, such as 5.0"
    )
    check_flag("shared_memory", shared_memory)
    return Limits(patience, give_up)
