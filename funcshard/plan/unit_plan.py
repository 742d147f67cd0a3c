"""The plan of one unit: its leaves, its flat buffers, and how both are sharded.

Each flat buffer holds leaves of one dtype, raveled one after another, with padding at its end only.
A leaf may be a slice: state dicts and checkpoints hold the *whole tensor* of a leaf that is cut
along mesh axes.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.tensors import dtype_of
from funcshard.plan.mesh_axes import AXES, Axes
from funcshard.plan.precision import MixedPrecision
from funcshard.plan.storage import Packing

STRATEGIES = ("full_shard", "shard_grad_op", "no_shard")


class LeafCut(NamedTuple):
    """One cut of a whole tensor into equal slices, one for each index along a mesh axis.

    Attributes:
        axis: the mesh axis.
        dim: the tensor dimension that is cut.
        ranks: number of ranks along the axis, and so of slices.
    """

    axis: str
    dim: int
    ranks: int


def whole_shape_of(shape: Sequence[int], cuts: Iterable[LeafCut]) -> tuple[int, ...]:
    """Return the shape of the tensor of which ``cuts`` make slices of ``shape``."""
    whole_shape = list(shape)
    for cut in cuts:
        whole_shape[cut.dim] *= cut.ranks
    return tuple(whole_shape)


Placements = tuple[
    tuple[str, int | None], ...
]  # mesh axis, and the dim that it cuts, if any


@dataclass(frozen=True, slots=True)
class LeafSpec:
    """One leaf: its path, its shape and its position in a flat buffer.

    Attributes:
        path: dotted path in the whole tree.
        shape: shape as each rank holds it.
        offset: index of its first element in the flat buffer.
        index: its number in the whole tree's order of leaves.
        aliases: other paths at which the same tensor is used (tied parameters).
        cuts: how it is a slice of a larger tensor, outermost cut first.
        placements: for a DTensor, each axis of its device mesh, in order, with the dimension that
            the axis cuts, or ``None``; ``()`` for other leaves.
        unpacked: for a leaf that is stored packed, as bytes, the shape that the model sees.
        numel: number of elements.
    """

    path: str
    shape: tuple[int, ...]
    offset: int
    index: int
    aliases: tuple[str, ...] = ()
    cuts: tuple[LeafCut, ...] = field(default=(), metadata={"later": True})
    placements: Placements = field(default=(), metadata={"later": True})
    unpacked: tuple[int, ...] | None = field(default=None, metadata={"later": True})
    numel: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numel", math.prod(self.shape))

    @property
    def names(self) -> tuple[str, ...]:
        """Its path and its aliases: every name of the parameter."""
        return (self.path, *self.aliases)

    @property
    def model_numel(self) -> int:
        """Number of elements that the model sees, packed or not."""
        return self.numel if self.unpacked is None else math.prod(self.unpacked)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the tensor of which the leaf is a slice; its own shape without cuts."""
        return whole_shape_of(self.shape, self.cuts)

    @property
    def model_shape(self) -> tuple[int, ...]:
        """``whole_shape`` of the leaf that the model sees, packed or not."""
        return self.whole_shape if self.unpacked is None else self.unpacked

    @property
    def shape_in_module(self) -> tuple[int, ...]:
        """Shape of the module's parameter, which is whole if it is a DTensor."""
        if self.placements or self.unpacked is not None:
            return self.model_shape
        return self.shape


# Size, stride and offset of a leaf in its gathered buffer.
LeafView = tuple[tuple[int, ...], tuple[int, ...], int]


class LeafPart(NamedTuple):
    """The elements of one leaf that lie in one rank's shard, maybe none.

    Attributes:
        begin: index of the first of them in the raveled leaf.
        end: index after the last of them in the raveled leaf.
        in_shard: indices of the elements in the shard.
    """

    begin: int
    end: int
    in_shard: slice

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class BufferPlan:
    """One flat buffer of a unit: leaves of one dtype, all trainable or all frozen.

    Attributes:
        key: name of the buffer in its unit: the dtype, then ``.frozen`` for frozen leaves, then
            ``.local`` for leaves that are local along both data axes, or ``.local_`` with the names
            of axes, as in ``.local_tensor``; for packed leaves also the storage and its block, as
            in ``.nf4_64``.
        dtype: name of the dtype of the leaves; of packed ones ``"uint8"``.
        trainable: whether the leaves get gradients.
        leaves: the leaves in the order of their offsets.
        shards: number of shards; 1 if the buffer is not sharded.
        local: mesh axes along which the values differ, data axes first. Along these the library
            neither gathers nor reduces.
        packing: what the bytes of packed leaves mean; ``None`` for other leaves.
        numel: number of elements of the leaves, without padding.
        shard_numel: number of elements of one rank's shard, including padding.
        padded_numel: number of elements of the gathered buffer, including padding.
        shard_dtype: the dtype of that name.
        itemsize: bytes of one element.
        model_dtype: dtype of the leaves that the model sees, packed or not.
    """

    key: str
    dtype: str
    trainable: bool
    leaves: tuple[LeafSpec, ...]
    shards: int
    local: tuple[str, ...] = ()
    packing: Packing | None = field(default=None, metadata={"later": True})
    numel: int = field(init=False, compare=False, repr=False)
    shard_numel: int = field(init=False, compare=False, repr=False)
    padded_numel: int = field(init=False, compare=False, repr=False)
    shard_dtype: torch.dtype = field(init=False, compare=False, repr=False)
    itemsize: int = field(init=False, compare=False, repr=False)
    model_dtype: torch.dtype = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Why here: every step and every estimate asks for these.
        shard_dtype = model_dtype = dtype_of(self.dtype)
        if self.packing is not None:
            model_dtype = dtype_of(self.packing.dtype)
        object.__setattr__(self, "model_dtype", model_dtype)
        object.__setattr__(self, "shard_dtype", shard_dtype)
        object.__setattr__(self, "itemsize", shard_dtype.itemsize)
        numel = self.leaves[-1].offset + self.leaves[-1].numel if self.leaves else 0
        # Why whole records: a rank packs and unpacks its own part.
        record = 1 if self.packing is None else self.packing.record
        shard_numel = -(-numel // (self.shards * record)) * record
        object.__setattr__(self, "numel", numel)
        object.__setattr__(self, "shard_numel", shard_numel)
        object.__setattr__(self, "padded_numel", shard_numel * self.shards)

    def own_axes(self, leaf: LeafSpec) -> tuple[str, ...]:
        """Return the axes along which a leaf differs without being a slice of a whole tensor."""
        cut_axes = {cut.axis for cut in leaf.cuts}
        return tuple(axis for axis in self.local if axis not in cut_axes)

    def filled(self, rank: int) -> int:
        """Return how many elements lie before the padding in the shard at index ``rank``."""
        if self.shards == 1:
            return self.numel
        return min(max(self.numel - rank * self.shard_numel, 0), self.shard_numel)

    @property
    def model_numel(self) -> int:
        """Number of elements of the gathered buffer in which the model's leaves lie."""
        if self.packing is None:
            return self.padded_numel
        return self.packing.numel_of(self.padded_numel)

    @property
    def leaf_views(self) -> tuple[LeafView, ...]:
        """The place of each leaf in the gathered buffer of ``model_numel`` elements."""
        leaf_views: list[LeafView] = []
        for leaf in self.leaves:
            offset, shape = leaf.offset, leaf.shape
            if self.packing is not None:
                offset, shape = self.packing.numel_of(offset), leaf.unpacked or ()
            strides = [1]
            for dim_size in reversed(shape[1:]):
                # Why at least 1: torch gives empty tensors such strides.
                strides.append(strides[-1] * max(dim_size, 1))
            leaf_views.append((shape, tuple(reversed(strides[: len(shape)])), offset))
        return tuple(leaf_views)

    def part(self, leaf: LeafSpec, rank: int) -> LeafPart:
        """Return the part of ``leaf`` in the shard at index ``rank`` of the shard axis."""
        if self.shards == 1:
            return LeafPart(0, leaf.numel, slice(leaf.offset, leaf.offset + leaf.numel))
        # The shard's first and last element as indices into the leaf, cut to those that it has.
        first_element = rank * self.shard_numel - leaf.offset
        begin = min(max(first_element, 0), leaf.numel)
        end = max(min(first_element + self.shard_numel, leaf.numel), begin)
        # Note: the slice is empty, and negative, in a shard that holds nothing but padding.
        return LeafPart(begin, end, slice(begin - first_element, end - first_element))


class UnitDtypes(NamedTuple):
    """The dtypes of a buffer on its way through a step.

    Attributes:
        gathered: that in which it is gathered.
        computed: that in which the model computes with its leaves.
        reduced: that in which its gradient is reduced.
        grads: that of the reduced gradient.
    """

    gathered: torch.dtype
    computed: torch.dtype
    reduced: torch.dtype
    grads: torch.dtype


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """Leaves that are gathered together: those under its path that no nested unit owns.

    A *group* is a unit of several paths, with one flat buffer of each kind for all of them.

    Attributes:
        name: path of the unit; ``""`` is the root. The name of a group joins its paths or globs
            with ``+``.
        strategy: ``"full_shard"``, ``"shard_grad_op"`` or ``"no_shard"``.
        reshard_after_forward: whether the gathered leaves are freed between forward and backward. A
            number ``n`` frees all but a slice of ``1 / n``: ``n`` neighbours on the shard axis hold
            the unit together.
        mesh_shape: sizes of the data axes ``(replicate, shard)`` that the unit was planned for.
        structure: structure of the unit's part of the tree, which numbers the leaves in the order
            of ``leaves``.
        buffers: the unit's flat buffers.
        offload: whether shards, gradients and optimizer state live on the CPU.
        precision: dtypes in which the unit computes and communicates; ``None``: those of its
            leaves.
        full_precision: whether the unit is a module of ``ignored_classes``, whose inputs are cast
            to the dtype of its leaves, and whose outputs are cast back.
        reshard_after_backward: whether the unit is freed after every micro-batch, and not only
            after the last.
        members: the paths of a group; ``()`` for a unit of one path.
        axes: all mesh axes in the order of ranks; ``()`` represents ``replicate`` and ``shard``.
        title: name for tables and messages: ``(root)`` for the root unit.
        paths: the paths whose leaves the unit owns: its name, or those of a group.
        sharded: whether each rank holds a shard of a buffer, and not the whole buffer.
        leaves: leaves of all buffers, as ``structure`` numbers them.
        post_forward_ranks: number of ranks that hold the unit together after forward; ``None``:
            all, or one.
    """

    name: str
    strategy: str
    reshard_after_forward: bool | int
    mesh_shape: tuple[int, int]
    structure: tree.Structure
    buffers: tuple[BufferPlan, ...]
    offload: bool = False
    precision: MixedPrecision | None = None
    # Note: the name that plans on disk have; see ``_FORMAT`` in ``plan``.
    full_precision: bool = field(default=False, metadata={"key": "island"})
    reshard_after_backward: bool = field(default=True, metadata={"later": True})
    members: tuple[str, ...] = field(default=(), metadata={"later": True})
    axes: Axes = field(default=(), metadata={"later": True})
    title: str = field(init=False, compare=False, repr=False)
    paths: tuple[str, ...] = field(init=False, compare=False, repr=False)
    sharded: bool = field(init=False, compare=False, repr=False)
    leaves: tuple[LeafSpec, ...] = field(init=False, compare=False, repr=False)
    post_forward_ranks: int | None = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # Most units have one buffer, and share its tuple.
        leaves = self.buffers[0].leaves if self.buffers else ()
        if len(self.buffers) > 1:
            leaves = tuple([leaf for buffer in self.buffers for leaf in buffer.leaves])
        # Why by class: 1 == True, and a plan from JSON keeps the difference.
        is_flag = isinstance(self.reshard_after_forward, bool)
        object.__setattr__(self, "title", self.name or "(root)")
        object.__setattr__(self, "paths", self.members or (self.name,))
        object.__setattr__(self, "sharded", self.strategy != "no_shard")
        object.__setattr__(self, "leaves", leaves)
        object.__setattr__(
            self, "post_forward_ranks", None if is_flag else self.reshard_after_forward
        )

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Size of each mesh axis, in the order of ranks."""
        return dict(self.axes or zip(AXES, self.mesh_shape, strict=True))

    def dtypes(self, buffer: BufferPlan) -> UnitDtypes:
        """Return the dtypes of a buffer on its way through a step."""
        leaf_dtype, computed, precision = (
            buffer.shard_dtype,
            buffer.model_dtype,
            self.precision,
        )
        if precision is None:
            return UnitDtypes(leaf_dtype, computed, leaf_dtype, leaf_dtype)
        gathered = reduced = leaf_dtype
        if leaf_dtype.is_floating_point:
            gathered = precision.param_dtype or leaf_dtype
            reduced = precision.reduce_dtype or gathered
        if buffer.packing is None:
            computed = gathered
        elif precision.param_dtype is not None:
            computed = precision.param_dtype
        grads = reduced if precision.keep_low_precision_grads else leaf_dtype
        return UnitDtypes(gathered, computed, reduced, grads)

    def in_full_precision(self) -> UnitPlan:
        """Return the unit without a precision; see ``Plan.in_full_precision``."""
        return dataclasses.replace(self, precision=None)


def innermost_in(units: Mapping[str, Sequence[str]]) -> Callable[[str], str | None]:
    """Return a function from a node to the innermost unit that holds it, or ``None``.

    Arguments:
        units: the paths of each unit, by its name.
    """
    known_owners: dict[str, str | None] = {**owners_of(units)}

    # Why no call of itself: it would refer to itself, and stay until Python looks for garbage.
    def find(path: str) -> str | None:
        if path not in known_owners:
            known_names = (
                known_owners[node] for node in tree.upwards(path) if node in known_owners
            )
            known_owners[path] = next(known_names, None)
        return known_owners[path]

    return find


def owners_of(units: Mapping[str, Sequence[str]]) -> dict[str, str]:
    # Why reversed: of two units with one path, the first one counts.
    """Return the name of the unit that has each path."""
    owner_pairs = [(node, name) for name, nodes in units.items() for node in nodes]
    return dict(reversed(owner_pairs))


# --- functions in place of the casts of parameters ------------------------------------------------


class Cast(NamedTuple):
    """A pair of pure functions around the all-gather of a flat buffer.

    The pair replaces the cast to ``param_dtype``, of parameters only: tangents use the plain cast.

    Gradients ignore the pair: they are gradients by the gathered values, reduced in
    ``reduce_dtype``. If your pair rounds, they are straight-through estimates.

    Attributes:
        pre_all_gather: your function from this rank's 1-D shard to the data sent: a 1-D tensor of
            any dtype, of the same size on every rank. Backward may gather again, so within a step
            return the same data for the same shard.
        post_all_gather: your function from the data received, of shape ``[ranks, size]``, to the
            flat buffer in the dtype to compute in: a 1-D tensor of at least
            ``ranks * shard.numel()`` elements. Further elements are ignored.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0, 3.0, 4.0])}
        >>> truncate = fs.Cast(
        ...     lambda shard: shard.to(torch.int8), lambda rows: rows.flatten().float()
        ... )
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     apply = lambda leaves: leaves["w"] * 1
        ...     f = fs.unshard(apply, plan.units[""], mesh, cast=lambda unit, buffer: truncate)
        ...     with fs.record_events() as events:
        ...         out = f(fs.shard(params, plan, mesh)[""])
        ...     return out.tolist(), events[0].dtype, events[0].bytes
        >>> fs.simulate(main, world_size=2)[0]
        ([1.0, 2.0, 3.0, 4.0], 'int8', 4)

    Source: quantised weight communication is that of Wang et al., "ZeRO++" (2023),
    https://arxiv.org/abs/2306.10209
    """

    pre_all_gather: Callable[[torch.Tensor], torch.Tensor]
    post_all_gather: Callable[[torch.Tensor], torch.Tensor]


# A function that returns the pair for a buffer of a unit, or None for the plain cast to
# param_dtype.
ChooseCast = Callable[[UnitPlan, BufferPlan], Cast | None]


def cast_of(choose: ChooseCast | None, unit: UnitPlan, buffer: BufferPlan) -> Cast | None:
    """Return the pair that ``choose`` gives a buffer; ``None`` for the plain cast."""
    # What packed leaves are sent as, their storage decides.
    if choose is None or buffer.packing is not None:
        return None
    chosen_cast: object = choose
    if callable(choose) and not isinstance(choose, Cast | type | torch.nn.Module):
        chosen_cast = choose(unit, buffer)
        if chosen_cast is None or isinstance(chosen_cast, Cast):
            return chosen_cast
    # The pair itself, a class or a module in place of the function, or what it returned.
    raise TypeError(
        "cast must be a function cast(unit, buffer) that returns a funcshard.Cast or None; found "
        f"{chosen_cast!r}: for one pair everywhere write cast=lambda unit, buffer: pair"
    )


# --- slices of whole tensors ----------------------------------------------------------------------


class Box(NamedTuple):
    """A box of a tensor.

    Attributes:
        offsets: index of its first element in each dimension.
        sizes: its length in each dimension.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index that takes the box out of the tensor."""
        return tuple(
            slice(begin, begin + size)
            for begin, size in zip(self.offsets, self.sizes, strict=True)
        )

    def moved(self, by: Sequence[int]) -> Box:
        """Return the box at offsets that are larger by ``by``."""
        return Box(tuple(map(operator.add, self.offsets, by)), self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """Return the box of the elements that lie in both boxes, if there are any."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, map(operator.add, *self), map(operator.add, *other))
        sizes = tuple(map(operator.sub, ends, offsets))
        # A scalar has no dimension that could be empty.
        return Box(offsets, sizes) if min(sizes, default=1) > 0 else None


def slice_offsets(
    shape: Sequence[int], cuts: Sequence[LeafCut], position: Mapping[str, int]
) -> tuple[int, ...]:
    """Return where a slice begins in the whole tensor, in each dimension.

    Arguments:
        shape: shape of the slice.
        cuts: the cuts that made it, outermost first.
        position: index of the rank along each mesh axis; 0 along axes that are left out.

    Example:
        >>> cuts = LeafCut("expert", 0, 2), LeafCut("tensor", 0, 3)
        >>> slice_offsets((4, 5), cuts, {"expert": 1, "tensor": 2})
        (20, 0)
    """
    offsets = [0 for _ in shape]
    sizes = list(shape)
    for cut in reversed(cuts):  # the innermost cut first
        offsets[cut.dim] += position.get(cut.axis, 0) * sizes[cut.dim]
        sizes[cut.dim] *= cut.ranks
    return tuple(offsets)


def boxes(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Split the elements ``begin : end`` of a raveled tensor into boxes, in order.

    Example:
        >>> [tuple(box) for box in boxes((3, 4), 2, 9)]
        [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if not shape:
        return [Box((), ())] * (end - begin)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    run_boxes = []
    while begin < end:
        # The outermost dimension of which a whole row begins here, and as many rows as there are.
        dim = next(
            dim
            for dim, stride in enumerate(strides)
            if begin % stride == 0 and begin + stride <= end
        )
        offsets = [
            begin // stride % size for stride, size in zip(strides, shape, strict=True)
        ]
        rows = min((end - begin) // strides[dim], shape[dim] - offsets[dim])
        sizes = (*[1] * dim, rows, *shape[dim + 1 :])
        run_boxes.append(Box(tuple(offsets), sizes))
        begin += rows * strides[dim]
    return run_boxes
