"""Collectives of the user's own, for the parameters and gradients of units.

All methods of a ``CustomGroup`` run the plain collectives. Only where ``core`` gathers parameters
or reduces gradients does it ask for the user's functions (``start_own``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from funcshard.comm.group import (
    DeferredWork,
    Group,
    LocalGroup,
    Op,
    Work,
    WrappedGroup,
    all_gather_private,
    concatenate,
)
from funcshard.comm.group import PrivateAllGatherWork as Pending
from funcshard.comm.mesh import Mesh, remade


@dataclass(frozen=True, slots=True)
class Collectives:
    """The plain collectives of one mesh axis, for the functions of ``with_collectives``.

    Every method starts a collective and returns an object whose ``wait()`` returns the result.
    Start the same ones in the same order on all ranks.

    Attributes:
        group: the ranks along the axis.
        label: the buffer that is communicated, for errors.
    """

    group: Group
    label: str = ""

    @property
    def rank(self) -> int:
        """Position of this rank on the axis."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Number of ranks on the axis."""
        return self.group.size

    def all_gather(self, tensor: torch.Tensor) -> Pending:
        """Start to concatenate every rank's ``tensor`` along dim 0, in order of ranks."""
        return all_gather_private(self.group, tensor.contiguous(), label=self.label)

    def reduce_scatter(self, tensor: torch.Tensor) -> Pending:
        """Start to add up every rank's ``tensor``; this rank gets its part of dim 0."""
        flat_tensor, own_rows = tensor.contiguous().view(-1), self._rows(tensor)
        out = tensor.new_empty(own_rows, *tensor.shape[1:])
        op = Op("reduce_scatter", self.label, out.view(-1), [flat_tensor])
        return Pending(out, self.group.start(op))

    def all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Start to add up every rank's ``tensor``; each rank gets the whole sum."""
        out = tensor.clone(memory_format=torch.contiguous_format)
        return Pending(out, self.group.start(Op("all_reduce", self.label, out)))

    def all_to_all(self, tensor: torch.Tensor) -> Pending:
        """Start to send the i-th part of ``tensor`` along dim 0 to rank i.

        The result has the parts that this rank receives, in order of ranks.
        """
        part_sizes = [self._rows(tensor) * tensor[:1].numel()] * self.size
        tensor = tensor.contiguous()
        out = torch.empty_like(tensor)
        flat_tensors = out.view(-1), tensor.view(-1)
        op = Op("all_to_all", self.label, *flat_tensors, 0, part_sizes, part_sizes)
        return Pending(out, self.group.start(op))

    def _rows(self, tensor: torch.Tensor) -> int:
        if tensor.ndim == 0 or tensor.shape[0] % self.size:
            raise ValueError(
                f"dim 0 of the tensor must have a part for each of {self.size} ranks; found shape "
                f"{tuple(tensor.shape)}: pad it to a multiple of {self.size}"
            )
        return tensor.shape[0] // self.size


# A function that starts a collective, and returns the function that waits for its result.
Start = Callable[[torch.Tensor, Collectives], Callable[[], torch.Tensor]]


def with_collectives(
    mesh: Mesh,
    axis: str,
    *,
    all_gather: Start | None = None,
    reduce_scatter: Start | None = None,
    all_reduce: Start | None = None,
) -> Mesh:
    """Return a mesh on which units use your functions to communicate along one axis.

    They carry the parameters and gradients of units. Everything else uses the plain collectives;
    see docs/precision.md.

    Your ``start(tensor, collectives)`` gets a 1-D tensor, starts the communication, and returns a
    function without arguments that waits and returns the result:

    - ``all_gather``: from this rank's shard ``[n]`` to ``[ranks * n]``, in order of ranks;
    - ``reduce_scatter``: from this rank's gradient ``[ranks * n]`` to its part of the sum, ``[n]``;
    - ``all_reduce``: from this rank's gradient ``[n]`` to the sum ``[n]``.

    The result has the dtype of the tensor, which you must not write to. ``collectives`` is a
    ``Collectives``: it has the plain ``all_gather``, ``reduce_scatter``, ``all_reduce`` and
    ``all_to_all`` of a tensor, each returning an object whose ``wait()`` returns the result, and
    ``rank`` and ``size`` of the axis.

    Arguments:
        mesh: the ranks.
        axis: the mesh axis, such as ``"shard"``.
        all_gather: starts an all-gather along ``"shard"``; ``None`` for the plain one.
        reduce_scatter: starts a reduce-scatter; likewise.
        all_reduce: starts an all-reduce, along axes along which a buffer is repeated, such as
            ``"replicate"``.

    Returns:
        A mesh of the same ranks, for ``unshard``, ``fully_shard`` and the training step. Use the
        same functions on every rank.

    Raises:
        ValueError: the mesh has no such axis; units never run such a collective along it; or, in
            forward or backward, a result has another shape or dtype.
        TypeError: a function is none; or, in forward or backward, it does not return a function.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
        >>> def in_bfloat16(shard, collectives):
        ...     pending = collectives.all_gather(shard.bfloat16())
        ...     return lambda: pending.wait().to(shard.dtype)
        >>> def main(mesh):
        ...     mesh = fs.with_collectives(mesh, "shard", all_gather=in_bfloat16)
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves: leaves["w"] * 1, plan.units[""], mesh)
        ...     return f(fs.shard(params, plan, mesh)[""]).tolist()
        >>> fs.simulate(main, world_size=2)[0]
        [1.0, 2.0, 3.0, 4.0]

    Source: ``FSDPModule.set_custom_all_gather`` and ``set_custom_reduce_scatter``.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"with_collectives takes a mesh; found {type(mesh).__name__}: pass that of init_mesh "
            "or simulate"
        )
    if not isinstance(axis, str) or axis not in mesh.groups:
        raise ValueError(
            f"axis must be an axis of the mesh, one of {list(mesh.groups)}; found {axis!r}"
        )
    user_functions = {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
    }
    for collective_kind, start in user_functions.items():
        if start is not None and not callable(start):
            raise TypeError(
                f"{collective_kind} must be a function start(tensor, collectives), or None for the "
                f"plain collective; found {start!r}"
            )
        if start is not None and axis != "shard" and collective_kind != "all_reduce":
            raise ValueError(
                "units run all_gather and reduce_scatter along 'shard' only; found "
                f"{collective_kind} for {axis!r}: pass all_reduce for this axis"
            )
    axis_group = mesh.groups[axis]
    if isinstance(axis_group, LocalGroup):
        return mesh  # one rank has nothing to communicate
    if not isinstance(axis_group, CustomGroup):
        axis_group = CustomGroup(axis_group, axis, {})
    functions = {kind: start for kind, start in user_functions.items() if start is not None}
    custom_group = dataclasses.replace(
        axis_group, functions={**axis_group.functions, **functions}
    )
    return remade(mesh, {**mesh.groups, axis: custom_group})


def without_collectives(mesh: Mesh) -> Mesh:
    """Return the mesh with the plain collectives on every axis."""
    for axis, group in mesh.groups.items():
        if isinstance(group, CustomGroup):
            mesh = remade(mesh, {**mesh.groups, axis: group.inner})
    return mesh


@dataclass(frozen=True, slots=True)
class CustomGroup(WrappedGroup):
    """The ranks along one axis, with the user's functions beside the plain collectives.

    Attributes:
        axis: name of the axis, for errors.
        functions: those of ``with_collectives``, by kind.
    """

    axis: str
    functions: Mapping[str, Start] = field(hash=False)

    def start_own(self, op: Op) -> Work:
        """Start a collective of 1-D tensors for a unit, with the user's function if there is one.

        ``wait`` returns the result of an all-gather.
        """
        start, out, tensor = self.functions.get(op.kind), op.out, op.data
        if start is None:
            return self.inner.start(op)
        if op.kind == "reduce_scatter":
            tensor = concatenate([part.to(out.dtype) for part in op.data])
        elif op.kind == "all_reduce":
            tensor = out
        numel, dtype = self.size * len(tensor) if out is None else len(out), tensor.dtype
        call_text = f"{op.kind} of with_collectives along {self.axis!r}, for {op.label or 'a tensor'},"
        with torch.no_grad():
            # The unit's autograd Function has the gradient, so none is recorded here.
            user_wait = start(tensor, Collectives(self.inner, op.label))
        if not callable(user_wait):
            raise TypeError(
                f"{call_text} must return a function that waits and returns the result; found "
                f"{type(user_wait).__name__}: return lambda: result"
            )

        @torch.no_grad()
        def finish() -> torch.Tensor:
            wait_result = user_wait()
            if (
                not isinstance(wait_result, torch.Tensor)
                or wait_result.shape != (numel,)
                or wait_result.dtype != dtype
            ):
                result_text = type(wait_result).__name__
                if isinstance(wait_result, torch.Tensor):
                    result_text = f"{tuple(wait_result.shape)} and {wait_result.dtype}"
                raise ValueError(
                    f"{call_text} must give a tensor of shape ({numel},) and {dtype}; found "
                    f"{result_text}: cast it back"
                )
            return wait_result if out is None else out.view(-1).copy_(wait_result)

        return DeferredWork(finish)
