"""``per_sample_grad``, the mean of clipped gradients of single samples, and ``per_sample_norms``.

Each rank clips and adds up its samples' gradients before anything is reduced: afterwards a gradient
is a sum over ranks, from which no sample's can be told. ``SampleWalk`` takes the gradients with
respect to gathered leaves, with ``vmap``. They stay apart by leaf: to put each sample's into a flat
buffer would copy all of them once more.

For norms alone, a gradient exists one leaf at a time. The loss of a sample gets its leaves through
``_Norm``, an identity whose backward sees the whole gradient of a leaf: it adds up the squares, and
drops the gradient. ``_SeenLeaves`` makes these where a unit is used.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_count, check_number
from funcshard._utils.torch_private import signed, untraced, version
from funcshard.comm import Mesh, all_gather_texts
from funcshard.core import (
    CONSTANT,
    BufferComm,
    GradReducer,
    Shards,
    activate,
    check_callable,
    check_mesh,
    check_shards,
    decoded_views,
    modified_leaf,
    psum,
    randn_like,
    start_gather,
    start_reduce,
    unit_comms,
)
from funcshard.plan import AXES, Plan, position_of
from funcshard.train.clipping import norm_of_rows

OnSampleGrads = Callable[[str, dict[str, torch.Tensor]], None]
Grads = list[torch.Tensor]  # ``[samples, *shape]`` of each leaf of a buffer

_vjp: Any = torch.func.vjp  # torch's annotations do not know the options of the pullback


def per_sample_grad(
    loss_fn: Callable[..., torch.Tensor],
    plan: Plan,
    mesh: Mesh,
    *,
    max_norm: float | None = None,
    noise_multiplier: float = 0.0,
    generator: torch.Generator | None = None,
    batch_size: float | None = None,
    chunk_size: int | None = None,
    on_grads: OnSampleGrads | None = None,
) -> Callable[..., tuple[tuple[torch.Tensor, torch.Tensor], Shards]]:
    """Return a function that computes the mean of the samples' clipped gradients, plus noise.

    This is the gradient of differentially private training: ``(Σ_i g_i · min(1, max_norm / |g_i|) +
    noise) / batch_size``, where ``g_i`` is the gradient of sample i of the whole world's batch.

    A call gathers each unit once and reduces it once, and your ranks may have different numbers of
    samples, or none. A rank holds the gathered units, a sum of gradients of that size, and the
    gradients of ``chunk_size`` samples.

    Ranks along model axes, such as ``tensor``, work on the same samples; see docs/transforms.md.

    Arguments:
        loss_fn: your ``loss_fn(shards, *rest, sample)`` returns the loss of one sample, a scalar.
            It runs under ``torch.vmap``, and may communicate by gathering units of ``plan`` and
            along model axes only. Dropout draws different numbers for each sample.
        plan: the plan of the shards.
        mesh: the ranks.
        max_norm: the largest norm of a sample's gradient; ``None`` for no clipping.
        noise_multiplier: standard deviation of the Gaussian noise that is added to the sum, in
            units of ``max_norm``. The noise, that of ``randn_like``, is the same on every mesh.
        generator: the generator of the noise, in the same state on every rank, which each call
            checks.
        batch_size: the number that the sum is divided by, such as the expected size of a batch
            whose samples are drawn at random; by default the number of samples of all ranks.
        chunk_size: the number of samples whose gradients exist at a time; by default all of this
            rank's.
        on_grads: ``on_grads(unit, grads)``, called for each chunk and unit with this rank's
            gradients before clipping, ``{path: [samples, *shape]}``, which you may change in place.

    Returns:
        ``f(shards, *rest, batch, **kwargs)``, which returns ``((losses, norms), grads)``. ``batch``
        is a pytree of tensors whose dim 0 counts this rank's samples. ``losses`` and ``norms``,
        before clipping, are this rank's, of shape ``[samples]``. ``grads`` is a tree like
        ``shards``, with ``None`` for frozen leaves.

    Raises:
        ValueError: an argument is out of range or needs another one; generators differ between
            ranks; the batch is not a pytree of tensors with one size of dim 0; trainable leaves are
            local along a data axis; ranks along a model axis pass different numbers of samples; a
            loss depends on no trainable shard; or a gradient reaches a shard other than by
            gathering its unit.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.zeros(2)}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: leaves["w"] @ x, plan.units[""], mesh)
        ...     loss_fn = lambda shards, x: f(shards[""], x)
        ...     evaluate = fs.per_sample_grad(loss_fn, plan, mesh, max_norm=1.0)
        ...     batch = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        ...     (losses, norms), grads = evaluate(fs.shard(params, plan, mesh), batch)
        ...     return norms.tolist(), round(grads[""]["float32"].item(), 4)
        >>> fs.simulate(main, world_size=2)
        [([5.0, 1.0], 0.3), ([5.0, 1.0], 0.9)]

    Source: Abadi et al., "Deep learning with differential privacy", 2016, algorithm 1.
    """
    check_callable("per_sample_grad", loss_fn)
    _check_options(max_norm, noise_multiplier, generator, batch_size, chunk_size)
    check_mesh(plan, mesh)
    for unit in plan.unit_list:
        for buffer in unit.buffers:
            if buffer.trainable and any(axis in AXES for axis in buffer.local):
                raise ValueError(
                    f"per_sample_grad adds up the samples of all ranks; unit {unit.title!r} has "
                    f"trainable leaves that are local to a rank, {buffer.leaves[0].path!r} first: "
                    "freeze them, or make the plan without local, or local along model axes only"
                )

    @untraced
    def run(
        shards: Shards, /, *rest: Any, **kwargs: Any
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], Shards]:
        walk = SampleWalk(
            "per_sample_grad", loss_fn, plan, mesh, chunk_size, shards, rest, kwargs
        )
        # The sums have the dtype of the shards, also in a unit that computes in a narrower dtype.
        sums = [
            torch.zeros_like(entry.whole, dtype=entry.shard.dtype) for entry in walk.trained
        ]

        def gradient(sample: Any) -> Any:
            leaves = [entry.leaves for entry in walk.trained]
            return torch.func.grad_and_value(walk.loss)(leaves, sample)

        def add(grads: list[Grads]) -> torch.Tensor:
            """Add one chunk's gradients to the sums, each sample's clipped; return their norms."""
            by_unit: dict[str, dict[str, torch.Tensor]] = {}
            for i, entry in enumerate(walk.trained):
                grads[i] = _whole_grads(grads[i], entry.comm)
                paths = [leaf.path for leaf in entry.comm.plan.leaves]
                by_unit.setdefault(entry.unit, {}).update(zip(paths, grads[i], strict=True))
            if on_grads is not None:
                with torch.no_grad():
                    for unit_name, by_path in by_unit.items():
                        on_grads(unit_name, by_path)
            rows = [
                (buffer_sum, entry.comm, leaf, grad.reshape(len(grad), leaf.numel))
                for buffer_sum, entry, buffer_grads in zip(
                    sums, walk.trained, grads, strict=True
                )
                for leaf, grad in zip(entry.comm.plan.leaves, buffer_grads, strict=True)
            ]
            squares = walk.zero
            for _, comm, _, leaf_rows in rows:
                squares = squares + _square_of(leaf_rows, comm, walk.zero)
            norms = walk.norms(squares)
            weights = torch.ones_like(norms)
            if max_norm is not None:
                # Note: the infinite factor of a zero gradient becomes 1.
                weights = (max_norm / norms).clamp(max=1.0)
            for buffer_sum, _, leaf, leaf_rows in rows:
                # Why a product: it clips and adds in one pass, without a copy of the clipped
                # gradients.
                buffer_sum.narrow(0, leaf.offset, leaf.numel).addmv_(
                    leaf_rows.t().to(buffer_sum.dtype), weights.to(buffer_sum)
                )
            return norms

        losses, norms = walk.chunks(gradient, add)
        pending = []
        for entry in walk.trained:
            # Note: ranks along model axes have agreed on the sum, so it counts as local there.
            topology = entry.comm.topology
            all_local = tuple(dict.fromkeys((*topology.local, *_model_axes(mesh))))
            over_data = dataclasses.replace(
                entry.comm, topology=dataclasses.replace(topology, local=all_local)
            )
            # Note: popped, so that each sum is freed once it is reduced.
            pending.append(start_reduce(sums.pop(0), over_data, donated=True))
        # Note: with samples that are drawn at random, privacy needs the expected number here.
        divisor = batch_size
        if divisor is None:
            count = torch.full((), len(losses), dtype=torch.float32, device=mesh.device)
            divisor = max(psum(count, mesh).item(), 1.0)
        noise_scale = noise_multiplier * (max_norm or 0.0)
        noise = randn_like(shards, plan, mesh, generator=generator) if noise_scale else {}
        result: Any = tree.map(lambda _: None, walk.shards)
        for entry in walk.trained:
            grad, key = pending.pop(0).finish(), entry.comm.buffer
            if noise:
                grad.add_(noise[entry.unit][key].to(grad.device), alpha=noise_scale)
            result[entry.unit][key] = grad.div_(divisor)
        return (losses, norms), result

    return run


def per_sample_norms(
    loss_fn: Callable[..., torch.Tensor],
    plan: Plan,
    mesh: Mesh,
    *,
    chunk_size: int | None = None,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that computes the norm of every sample's gradient, without the gradients.

    The norms are those of ``per_sample_grad``. Instead of the gradients of a chunk's samples by all
    leaves, only those by one leaf exist at a time: backward adds up their squares and drops them. A
    call gathers each unit once and reduces nothing. Two passes clip single samples so: the norms,
    and then ``value_and_grad`` of the loss in which each sample has its factor.

    Arguments:
        loss_fn: ``loss_fn(shards, *rest, sample)`` returns the loss of one sample, a scalar; see
            ``per_sample_grad``.
        plan: the plan of the shards.
        mesh: the ranks.
        chunk_size: the number of samples that run at one time. By default it is the number of this
            rank's samples.

    Returns:
        ``f(shards, *rest, batch, **kwargs)``, which returns ``(losses, norms)`` of this rank's
        samples, of shape ``[samples]``; the norms are in float32 or wider. ``batch`` is a pytree of
        tensors whose dim 0 counts samples.

    Raises:
        ValueError: see ``per_sample_grad``.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, _ = fs.make_functional(torch.nn.Linear(2, 1, bias=False))
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     run, shards = fs.fully_shard(apply, plan, mesh), fs.shard(params, plan, mesh)
        ...     evaluate = fs.per_sample_norms(lambda s, x: run(s, {}, x).sum(), plan, mesh)
        ...     return evaluate(shards, torch.tensor([[3.0, 4.0], [0.0, 1.0]]))[1].tolist()
        >>> fs.simulate(main, world_size=2)
        [[5.0, 1.0], [5.0, 1.0]]

    Source: Li et al., "Large language models can be strong differentially private learners", 2022,
    whose "ghost clipping" has formulas for the norms of some layers.
    """
    check_callable("per_sample_norms", loss_fn)
    _check_chunks(chunk_size)
    check_mesh(plan, mesh)

    @untraced
    def run(
        shards: Shards, /, *rest: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        walk = SampleWalk(
            "per_sample_norms", loss_fn, plan, mesh, chunk_size, shards, rest, kwargs
        )

        def squares_of(sample: list[torch.Tensor]) -> Any:
            def loss_of(squares: torch.Tensor) -> torch.Tensor:
                leaves = [_SeenLeaves(entry, squares) for entry in walk.trained]
                return walk.loss(leaves, sample).reshape(())

            loss, pull = _vjp(loss_of, walk.zero)
            # Why not torch.func.grad: it would record backward, and keep what that computes.
            return pull(torch.ones_like(loss), retain_graph=False, create_graph=False)[
                0
            ], loss

        return walk.chunks(squares_of, walk.norms)

    return run


def _check_options(
    max_norm: float | None,
    noise_multiplier: float,
    generator: torch.Generator | None,
    batch_size: float | None,
    chunk_size: int | None,
) -> None:
    if max_norm is not None:
        check_number("max_norm", max_norm, above=0, none="for no clipping")
    check_number("noise_multiplier", noise_multiplier, least=0)
    if noise_multiplier and max_norm is None:
        raise ValueError(
            "noise_multiplier is in units of max_norm; found max_norm=None, so one sample's part "
            "is unbounded; pass max_norm"
        )
    if noise_multiplier and generator is None:
        raise ValueError(
            "noise needs a generator in the same state on every rank; pass "
            "generator=torch.Generator().manual_seed(seed)"
        )
    if batch_size is not None:
        check_number("batch_size", batch_size, above=0, none="for the number of samples")
    _check_chunks(chunk_size)


def _check_chunks(chunk_size: int | None) -> None:
    if chunk_size is not None:
        check_count("chunk_size", chunk_size, of="samples", none="for all")


# --- the gradients of single samples --------------------------------------------------------------


class GatheredBuffer(NamedTuple):
    """A buffer that was gathered for one call.

    Attributes:
        unit: name of its unit.
        comm: its communication.
        shard: its shard in the tree that the loss function gets.
        whole: the gathered buffer.
        leaves: the leaves in it.
        writes: its version when it came.
    """

    unit: str
    comm: BufferComm
    shard: torch.Tensor
    whole: torch.Tensor
    leaves: list[torch.Tensor]
    writes: int


class SampleWalk:
    """One call of a function of single samples: their losses, in chunks, on gathered units.

    Attributes:
        gathered: all buffers of the plan.
        trained: the trainable ones.
        shards: the shards that the loss function gets.
        zero: a zero of the dtype of norms.
    """

    def __init__(
        self,
        caller: str,
        loss_fn: Callable[..., torch.Tensor],
        plan: Plan,
        mesh: Mesh,
        chunk_size: int | None,
        shards: Shards,
        rest: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> None:
        check_shards(plan, shards, mesh)
        if not rest:
            raise TypeError(
                "the function takes (shards, *rest, batch), the batch as its last positional "
                "argument"
            )
        *self._arguments, batch = rest
        self._caller, self._loss_fn, self._kwargs, self._mesh = (
            caller,
            loss_fn,
            kwargs,
            mesh,
        )
        self._samples, self._unflatten = tree.flatten(batch)
        self._count = _sample_count(self._samples, chunk_size, mesh)
        self._chunk_size = chunk_size or max(self._count, 1)
        self.gathered: list[GatheredBuffer] = []
        self.shards: dict[str, dict[str, torch.Tensor]] = {}
        for unit in plan.unit_list:
            self.shards[unit.name] = {}
            for comm in unit_comms(unit, mesh, None):
                shard = shards[unit.name][comm.buffer].detach()
                whole = start_gather(shard, comm, read_only=True).finish()
                # No gradient reaches a shard that is only gathered, because its unit gets gathered
                # leaves. A loss that requires a gradient outside of torch.func.grad uses it in
                # another way.
                shard = shard.detach().requires_grad_(comm.plan.trainable)
                leaves = decoded_views(whole, comm.plan)
                self.gathered.append(
                    GatheredBuffer(unit.name, comm, shard, whole, leaves, version(whole))
                )
                self.shards[unit.name][comm.buffer] = shard
        self.trained = [entry for entry in self.gathered if entry.comm.plan.trainable]
        dtypes = [entry.shard.dtype.to_real() for entry in self.trained]
        norm_dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
        self.zero = torch.zeros((), dtype=norm_dtype, device=mesh.device)
        self._depends = not self.trained  # whether a gradient leaves the loss

    def loss(
        self, trained_leaves: Sequence[Any], sample: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return the loss of one sample, given the leaves of each trainable buffer."""
        remaining_leaves = iter(trained_leaves)
        leaves = [
            next(remaining_leaves) if entry.comm.plan.trainable else entry.leaves
            for entry in self.gathered
        ]
        with activate(
            GradReducer([entry.shard for entry in self.gathered], gathered=leaves)
        ):
            loss = self._loss_fn(
                self.shards, *self._arguments, self._unflatten(sample), **self._kwargs
            )
        # Inside a transform a loss requires a gradient if one reaches the leaves.
        self._depends = self._depends or getattr(loss, "requires_grad", False)
        return loss

    def chunks(
        self, derive: Callable[[Any], Any], norms_of: Callable[[Any], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the losses and norms of this rank's samples.

        Arguments:
            derive: ``derive(sample)`` returns derivatives of ``loss``, and the loss.
            norms_of: called with the derivatives of a chunk of samples; returns their norms.
        """
        # Note: each sample draws its own dropout.
        of_samples = torch.vmap(derive, randomness="different")
        # A rank may have no samples.
        nothing = torch.zeros(0, device=self._mesh.device, dtype=torch.float32)
        losses, norms = [], []
        for begin in range(0, self._count, self._chunk_size):
            chunk = [sample[begin : begin + self._chunk_size] for sample in self._samples]
            with torch.enable_grad():
                derivatives, chunk_losses = of_samples(chunk)
            self._check(chunk_losses)
            losses.append(chunk_losses.detach())
            norms.append(norms_of(derivatives).expand_as(chunk_losses))
            del derivatives  # so that the gradients of only one chunk exist at a time
        return torch.cat(losses or [nothing]), torch.cat(norms or [nothing])

    def norms(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the norms of samples, given this rank's squares; see ``_square_of``."""
        squares, axes = squares.detach(), _model_axes(self._mesh)
        return (psum(squares, self._mesh, axis=axes) if axes else squares).sqrt()

    def _check(self, losses: torch.Tensor) -> None:
        """Raise if the loss wrote to gathered leaves, depends on none, or on shards directly."""
        for entry in self.gathered:
            # No gradient would tell.
            if version(entry.whole) != entry.writes:
                raise modified_leaf(entry.unit, entry.comm.plan)
        direct_grads: Sequence[Any] = ()
        if losses.requires_grad:
            direct_grads = torch.autograd.grad(
                losses,
                [entry.shard for entry in self.trained],
                torch.ones_like(losses),
                allow_unused=True,
                retain_graph=True,
            )
        for entry, grad in zip(self.trained, direct_grads, strict=False):
            if grad is not None and grad.any():
                raise ValueError(
                    f"{self._caller} differentiates gathered units only; a gradient reached "
                    f"{entry.comm.label} by another way, such as a penalty on the shard itself or "
                    "remat around the unit: leave these out of loss_fn, and add a "
                    "penalty's gradient to the result"
                )
        if not self._depends:
            raise ValueError(CONSTANT)


def _model_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes, of more than one rank, along which ranks work on the same samples."""
    return tuple(axis for axis, _ in mesh.axes if axis not in AXES)


def _shared_axes(comm: BufferComm) -> tuple[str, ...]:
    """Return the model axes along which ranks have the same leaves."""
    return tuple(axis for axis in _model_axes(comm.mesh) if axis not in comm.plan.local)


def _square_of(rows: torch.Tensor, comm: BufferComm, zero: torch.Tensor) -> torch.Tensor:
    """Return the part of ranks' sum of squares over the last dimension that a leaf has on one."""
    wide_dtype = torch.promote_types(rows.dtype, torch.float32)
    square = norm_of_rows(rows, 2.0, wide_dtype).to(zero.dtype).square()
    # Ranks along these axes have the same gradient, and all of them add it.
    return square / math.prod(comm.mesh.shape[axis] for axis in _shared_axes(comm))


def _over_model_axes(grad: torch.Tensor, comm: BufferComm) -> torch.Tensor:
    """Return the gradient of a sample's loss by a leaf, from that of this rank's loss."""
    if shared_axes := _shared_axes(comm):
        grad = psum(grad, comm.mesh, axis=shared_axes)
    for axis in _model_axes(comm.mesh):
        grad = grad / comm.mesh.shape[axis]
    return grad


def _whole_grads(grads: Grads, comm: BufferComm) -> Grads:
    """Return the gradients of samples, contiguous, by ``_over_model_axes`` all at once."""
    grads = [grad.detach().contiguous() for grad in grads]
    if not _model_axes(comm.mesh):
        return grads
    sizes = [leaf.numel for leaf in comm.plan.leaves]
    rows = [
        grad.reshape(len(grad), numel) for grad, numel in zip(grads, sizes, strict=True)
    ]
    parts = _over_model_axes(torch.cat(rows, 1), comm).split(sizes, 1)
    return [part.reshape(grad.shape) for part, grad in zip(parts, grads, strict=True)]


def _sample_count(samples: list[Any], chunk_size: int | None, mesh: Mesh) -> int:
    """Return the number of samples, the one size of dim 0 of the batch's tensors.

    Raise on every rank unless ranks along model axes pass equally many.
    """
    sizes: set[Any] = {
        sample.shape[0]
        if isinstance(sample, torch.Tensor) and sample.ndim
        else type(sample).__name__
        for sample in samples
    }
    count, *others = sizes or [None]
    if others or not isinstance(count, int):
        raise ValueError(
            "the batch must be a pytree of tensors with one size of dim 0, which counts samples; "
            f"found {sorted(map(str, sizes)) or 'no leaves'}: pass what all samples share before "
            "the batch, or by keyword"
        )
    if axes := _model_axes(mesh):
        count_text = f"{count} in chunks of {chunk_size}" if chunk_size else str(count)
        first_counts: dict[tuple[int, ...], tuple[int, str]] = {}
        for rank, rank_count in enumerate(all_gather_texts(mesh, count_text, "samples")):
            position = position_of(rank, mesh.shape)
            place = tuple(position[axis] for axis in AXES)
            peer, peer_count = first_counts.setdefault(place, (rank, rank_count))
            if rank_count != peer_count:
                raise ValueError(
                    f"ranks along {' and '.join(map(repr, axes))} must pass the same samples, "
                    f"whose losses they compute together; found {peer_count} on rank {peer} and "
                    f"{rank_count} on rank {rank}: split the batch along the data axes only"
                )
    return count


# --- norms without gradients ----------------------------------------------------------------------


class _SeenLeaves:
    """The leaves of a buffer, each through ``_Norm``, from their first use on.

    Why not before: backward runs nodes in the opposite order of forward. A node that comes before
    all units would run after all of them, and their gradients would wait for it.
    """

    def __init__(self, entry: GatheredBuffer, squares: torch.Tensor) -> None:
        self.entry, self.squares = entry, squares

    @functools.cached_property
    def leaves(self) -> list[torch.Tensor]:
        """The leaves."""
        comm = self.entry.comm
        return [_Norm.apply(leaf, self.squares, comm) for leaf in self.entry.leaves]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.leaves)


class _Norm(torch.autograd.Function):
    """``_Norm.apply(leaf, squares, comm)``: the leaf.

    Backward adds the squares of the leaf's whole gradient to the gradient of ``squares``, and
    passes none on to the leaf.
    """

    @staticmethod
    @signed
    def forward(leaf: torch.Tensor, squares: torch.Tensor, comm: BufferComm) -> Any:
        return leaf.view_as(leaf)  # a Function must not return its input itself

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.squares, ctx.comm = inputs

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        rows = _over_model_axes(grad, ctx.comm).flatten()
        return None, _square_of(rows, ctx.comm, ctx.squares), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, leaf: torch.Tensor, squares: Any, comm: Any) -> Any:
        return _Norm.apply(leaf, squares, comm), in_dims[
            0
        ]  # a map of the caller over models
