"""All-gathers and reductions of one flat buffer, as plain tensors without autograd."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from funcshard._utils.torch_private import BasisLoop, is_legacy_batched, recording_graph
from funcshard.comm import (
    DONE,
    CommDtypes,
    CustomGroup,
    Group,
    Mesh,
    Op,
    PrivateAllGatherWork,
    Topology,
    Work,
    in_graph,
)
from funcshard.plan import (
    BufferPlan,
    Cast,
    Event,
    LeafView,
    Packing,
    UnitPlan,
    current_recorders,
    current_recording,
    dtype_name,
    emit,
)

_log = logging.getLogger("funcshard.comm")

UnitShard = Mapping[str, torch.Tensor]  # this rank's shard of each buffer, by key
Leaves = Sequence[Sequence[torch.Tensor]]  # of each buffer

_AS_IS = CommDtypes()
_NO_LEAVES = BufferPlan("", "float32", False, (), 1)


@dataclass(frozen=True, slots=True)
class BufferComm:
    """How the data of one flat buffer is communicated.

    Attributes:
        topology: the ranks that the collectives run over.
        unit: name of the unit, if any.
        buffer: key of the buffer.
        dtypes: the dtypes of the data on its way.
        offload: whether shards live on the CPU, and gathered buffers on the mesh's device.
        label: the buffer's name in errors; by default made of buffer and unit.
        own: whether functions of ``with_collectives`` carry the data.
        plan: the leaves in the buffer; none for data of no unit.
        loops: loops over unit vectors that the collectives are part of; see ``basis``.
        mesh: the ranks.
        moved: whether shards and gathered buffers are on different devices.
        copied: whether a gathered buffer takes memory besides the shard's.
        leaf_views: the place of each leaf in the gathered buffer.
    """

    topology: Topology
    unit: str | None = None
    buffer: str = ""
    dtypes: CommDtypes = _AS_IS
    offload: bool = False
    # Note: whether one gather serves two functions, a comparison of comms tells. What is
    # left out of it changes no byte that travels.
    label: str = field(default="", compare=False)
    own: bool = False
    plan: BufferPlan = field(default=_NO_LEAVES, compare=False)
    loops: Mapping[int, BasisLoop] = field(default_factory=dict, compare=False)
    mesh: Mesh = field(init=False, compare=False, repr=False)
    moved: bool = field(init=False, compare=False)
    copied: bool = field(init=False, compare=False)
    leaf_views: tuple[LeafView, ...] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # Why here: every gather asks for these.
        buffer_label, dtypes = self.label, self.dtypes
        if self.unit is not None:
            buffer_label = (
                buffer_label or f"buffer {self.buffer!r} of unit {self.unit or '(root)'!r}"
            )
        # With a mesh on the CPU, offloading has nothing to move.
        mesh = self.topology.mesh
        is_moved = self.offload and mesh.device.type != "cpu"
        is_cast = dtypes.gathered != dtypes.shard or dtypes.cast is not None
        object.__setattr__(self, "label", buffer_label)
        object.__setattr__(self, "mesh", mesh)
        object.__setattr__(self, "moved", is_moved)
        object.__setattr__(self, "copied", self.topology.cut or is_moved or is_cast)
        # The views do not change from gather to gather, unlike the memory that they are in.
        object.__setattr__(self, "leaf_views", self.plan.leaf_views)

    @classmethod
    def of(
        cls, mesh: Mesh, unit: UnitPlan, buffer: BufferPlan, cast: Cast | None = None
    ) -> BufferComm:
        # Integer leaves travel as they are; the unit says so for each buffer.
        _, computed_dtype, reduced_dtype, grad_dtype = unit.dtypes(buffer)
        precision = unit.precision
        if buffer.packing is not None:
            cast = _decoding(buffer.packing, computed_dtype)
        dtypes = CommDtypes(
            shard=buffer.shard_dtype,
            gathered=computed_dtype,
            reduced=reduced_dtype,
            grads=grad_dtype,
            cast=cast,
            divided=precision is not None and precision.divide_before_reduce,
        )
        return cls(
            Topology(mesh, unit.sharded, buffer.local),
            unit=unit.name,
            buffer=buffer.key,
            dtypes=dtypes,
            offload=unit.offload,
            own=any(isinstance(group, CustomGroup) for _, group in mesh.axes),
            plan=buffer,
        )

    @property
    def title(self) -> str:
        """The collectives of the buffer as errors name them."""
        if self.unit is None:
            return "psum or pmean"
        return f"the collectives of unit {self.unit or '(root)'!r}"

    @property
    def plain(self) -> BufferComm:
        """The same without functions of the user's: for tangents, which aren't parameters."""
        # The usual case keeps the object, and so costs nothing.
        if self.dtypes.cast is None and not self.own:
            return self
        # Why: a tangent is no parameter, so the user's cast of parameters has no say in it.
        return dataclasses.replace(
            self, dtypes=dataclasses.replace(self.dtypes, cast=None), own=False
        )


def _decoding(packing: Packing, dtype: torch.dtype) -> Cast:
    """Return the pair that sends packed leaves as they are, and decodes what it receives."""
    return Cast(lambda shard: shard, lambda rows: packing.unpack(rows.view(-1), dtype))


# --- offload --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _HostCopy:
    """A copy between the CPU and CUDA that has started; ``wait`` makes the host wait for it."""

    end: Any

    def wait(self) -> None:
        self.end.synchronize()


def _to_device(tensor: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Work]:
    """Start to copy a tensor to the device, ready for the current stream."""
    if device.type != "cuda" or recording_graph():  # a graph replays no events
        return tensor.to(device), DONE
    # Pinned memory makes the copy asynchronous; the event tells when the host may reuse it.
    return tensor.to(device, non_blocking=True), _HostCopy(
        torch.cuda.current_stream(device).record_event()
    )


def _to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Work]:
    """Start to copy a tensor, which must live until the copy has ended, to pinned memory."""
    if tensor.device.type == "cpu":
        return tensor, DONE
    host_copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    if not tensor.is_cuda or recording_graph():
        return host_copy.copy_(tensor), DONE
    # Why another stream: the next shards travel the other way meanwhile, on the current one.
    copy_stream = torch.cuda.Stream(tensor.device)
    copy_stream.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(copy_stream):
        host_copy.copy_(tensor, non_blocking=True)
    return host_copy, _HostCopy(copy_stream.record_event())


# --- all-gather -----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class AllGatherHandle:
    """An all-gather that has started; ``finish`` waits and returns the whole buffer.

    Attributes:
        work: the collective.
        comm: the communication of the buffer.
        copied: the copy of an offloaded shard to the device.
        shared: whether there are several uses, whose tensors share memory.
        full: the result that they share, once there is one.
    """

    work: Any
    comm: BufferComm
    copied: Work = DONE
    shared: bool = False
    full: torch.Tensor | None = None

    def share(self) -> AllGatherHandle:
        """Return the handle, for several uses from here on."""
        self.shared = True
        return self

    def finish(self) -> torch.Tensor:
        """Wait for the data, and return the buffer in the dtype to compute in."""
        # A later use: the buffer is there, and only its stream may have to wait.
        # Why wait again: each use may have its own stream.
        if self.full is not None:
            self.work.wait()
        else:
            # Why the host too: when a step returns, the optimizer may write to the shard.
            self.copied.wait()
            full_buffer, cast = self.work.wait(), self.comm.dtypes.cast
            if cast is not None:
                full_buffer = self._cast(full_buffer, cast)
            # Why not an uncopied one: it is the shard itself, which nobody may write to anyway.
            if not self.shared or not self.comm.copied:
                return full_buffer
            self.full = full_buffer
            if cast is not None:
                self.work = DONE  # frees the data as it was sent
        # Why clone: in inference mode no version counter shows that a use writes to shared memory.
        is_private = self.full.is_inference() or torch.is_inference_mode_enabled()
        if is_private:
            return self.full.clone()
        return self.full.detach()

    def _cast(self, sent: torch.Tensor, cast: Cast) -> torch.Tensor:
        comm, gathered_dtype = self.comm, self.comm.dtypes.gathered
        numel = comm.plan.model_numel
        full_buffer = cast.post_all_gather(sent.view(comm.plan.shards, -1))
        if (
            full_buffer.ndim != 1
            or full_buffer.numel() < numel
            or full_buffer.dtype != gathered_dtype
        ):
            raise ValueError(
                f"the cast of {comm.label} must return, after gathering, a 1-D tensor of "
                f"{numel} elements and {gathered_dtype}, its param_dtype; found "
                f"{tuple(full_buffer.shape)} and {full_buffer.dtype}"
            )
        return full_buffer[:numel]


def start_gather(
    shard: torch.Tensor, comm: BufferComm, *, read_only: bool = False
) -> AllGatherHandle:
    """Start to gather ``shard``, ``[*batch, n]``, into a new ``[*batch, n * ranks]``.

    Arguments:
        shard: this rank's slice.
        comm: the communication of the buffer.
        read_only: whether the gathered buffer is only read, so that ranks may share its memory.
    """
    dtypes = comm.dtypes
    sent_data, device_copy = shard, DONE  # type: tuple[torch.Tensor, Work]
    if dtypes.cast is not None:
        sent_data = dtypes.cast.pre_all_gather(shard)
        if not isinstance(sent_data, torch.Tensor) or sent_data.ndim != 1:
            shape_text = getattr(sent_data, "shape", type(sent_data).__name__)
            raise ValueError(
                f"the cast of {comm.label} must return, before gathering, a 1-D tensor, the data "
                f"to send; found {shape_text}"
            )
    # Why before the conversion: the shard is in pinned memory, and the device is faster.
    if comm.moved:
        sent_data, device_copy = _to_device(sent_data, comm.mesh.device)
    if dtypes.cast is None and dtypes.gathered is not dtypes.shard:
        sent_data = sent_data.to(dtypes.gathered)
    if not comm.topology.cut:
        return AllGatherHandle(PrivateAllGatherWork(sent_data), comm, device_copy)
    rank_count = comm.mesh.shard.size
    group = recorded_group(
        "all_gather", comm, "shard", sent_data, sent_data.numel() * rank_count
    )
    # A gradient of a gradient may have any layout; shards are contiguous already.
    sent_data = sent_data.contiguous()
    # Why 1-D: functions of with_collectives take such tensors, and vmap adds dims.
    is_own = comm.own and sent_data.ndim == 1
    if is_own and isinstance(group, CustomGroup) and "all_gather" in group.functions:
        work: Work = group.start_own(Op("all_gather", comm.label, None, sent_data))
    else:
        # One block of shared memory serves all ranks of a machine.
        # Why not with a user's pair: it may write to what it gets.
        is_shared = read_only and (dtypes.cast is None or comm.plan.packing is not None)
        # vmap puts its dims first, so ranks lie side by side in the last dim.
        work = group.all_gather_last(sent_data, shared=is_shared, label=comm.label)
    return AllGatherHandle(work, comm, device_copy)


Handles = Sequence[AllGatherHandle]  # of the buffers of one unit


# --- reduce-scatter and all-reduce ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReduceHandle:
    """A reduction that has started; ``finish`` waits and returns this rank's slice of the sum.

    Attributes:
        out: memory for the sum over the first axis.
        work: the collective over the first axis.
        comm: the communication of the buffer.
        copied: the sum on the CPU and its copy, if that has started already.
    """

    out: torch.Tensor
    work: Work
    comm: BufferComm
    copied: tuple[torch.Tensor, Work] | None = None

    def finish(self) -> torch.Tensor:
        """Wait for the first axis, reduce over the rest; return the sum in the shard's dtype."""
        self.work.wait()
        comm = self.comm
        # Without a reduce-scatter, the first of these axes is the one that was reduced already.
        for axis, _ in comm.topology.repeated[not comm.topology.cut :]:
            _start(
                Op("all_reduce", comm.label, self.out), comm, axis, self.out.numel()
            ).wait()
        shard_sum = self.out.to(comm.dtypes.grads or self.out.dtype)
        if not comm.moved:
            return shard_sum
        # Without a communication the copy has started with the handle.
        on_host, copy_work = self.copied or _to_host(shard_sum)
        copy_work.wait()  # while ``out`` lives
        return on_host


def wait_comm(handles: Iterable[AllGatherHandle | ReduceHandle]) -> None:
    """On CPU, wait for the data; on CUDA, do nothing: ``finish`` makes the stream wait.

    From then on only the results of reductions take memory.
    """
    for handle in handles:
        if handle.comm.mesh.device.type == "cpu":
            handle.work.wait()


def start_reduce(
    full: torch.Tensor, comm: BufferComm, *, donated: bool = False
) -> ReduceHandle:
    """Start to sum every rank's ``full``, ``[n * ranks, ...]``; each rank gets its ``[n, ...]``.

    Arguments:
        full: this rank's addend.
        comm: the communication of the buffer.
        donated: whether ``full`` may be overwritten.
    """
    topology, reduce_dtype = comm.topology, comm.dtypes.reduced
    # A converted copy belongs to us, whoever owns the addend.
    if reduce_dtype is not None and full.dtype != reduce_dtype:
        full, donated = full.to(reduce_dtype), True
    full = full.contiguous()
    if topology.cut:
        return start_scatter(
            [full.view(-1)], (full.shape[0] // comm.mesh.shard.size, *full.shape[1:]), comm
        )
    # One rank holds the buffer alone, so its addend is the sum.
    if not topology.repeated:
        if not comm.moved:
            return ReduceHandle(full, DONE, comm)
        full = full.to(comm.dtypes.grads or full.dtype)
        return ReduceHandle(full, DONE, comm, _to_host(full))
    if not donated:
        full = full.clone()
    axis, _ = topology.repeated[0]
    op = Op("all_reduce", comm.label, full)
    return ReduceHandle(full, _start(op, comm, axis, full.numel()), comm)


def start_scatter(
    parts: Sequence[torch.Tensor], shape: tuple[int, ...], comm: BufferComm
) -> ReduceHandle:
    """Start to sum the concatenation of 1-D ``parts``; each rank gets its slice, of ``shape``."""
    # The result is new memory, because the parts are only read.
    shard_sum = parts[0].new_empty(shape, dtype=comm.dtypes.reduced or parts[0].dtype)
    full_numel = shard_sum.numel() * comm.mesh.shard.size
    op = Op("reduce_scatter", comm.label, shard_sum, parts)
    return ReduceHandle(shard_sum, _start(op, comm, "shard", full_numel), comm)


def _start(op: Op, comm: BufferComm, axis: str, numel: int) -> Work:
    """Start and record a reduction along an axis, whose event counts ``numel`` elements."""
    group = recorded_group(op.kind, comm, axis, op.out, numel)
    if comm.own and isinstance(group, CustomGroup) and op.out.ndim == 1:
        return group.start_own(op)
    return group.start(op)


# --- records and refusals -------------------------------------------------------------------------


def recorded_group(
    kind: str, comm: Any, axis: str, tensor: torch.Tensor, numel: int
) -> Group:
    """Return the ranks that run a collective now, and record it.

    Arguments:
        kind: the collective, as events name it.
        comm: the ``BufferComm`` or ``AxisComm``.
        axis: name of the axis.
        tensor: the data, or memory for the result.
        numel: number of elements that the event counts.

    Raises:
        RuntimeError: make_fx records here without ``fs.trace``, or the old ``vmap`` batches;
            neither sees a collective.
    """
    group: Group = comm.mesh.groups[axis]
    if recording_graph():
        # Why: the graph would hold the memory that a collective writes into, without the
        # collective.
        if current_recording() is None:
            raise RuntimeError(
                "make_fx, which torch.func.linearize uses, records tensor operations only, and "
                f"would leave out {comm.title} on {comm.mesh.world_size} ranks: call "
                "torch.func.jvp(f, primals, tangents) for each tangent instead"
            )
        group = in_graph(group, axis, comm.unit, comm.buffer)
    elif is_legacy_batched(tensor):
        raise RuntimeError(
            "is_grads_batched=True, which torch.autograd.functional uses for vectorize=True, "
            f"cannot batch {comm.title} on {comm.mesh.world_size} ranks: use torch.vmap over the "
            "cotangents of torch.func.vjp; see docs/transforms.md, 'Columns'"
        )
    # An empty buffer sends nothing. Why asked first: few steps are recorded or logged.
    if numel and (current_recorders() or _log.isEnabledFor(logging.DEBUG)):
        sent_bytes, dtype = numel * tensor.element_size(), dtype_name(tensor.dtype)
        emit(Event(kind, comm.unit, comm.buffer, dtype, sent_bytes, axis, group.size))
    return group
