"""Gradients of a loss function of shards, averaged over the data-parallel world.

Both ``value_and_grad`` and ``accumulate`` return a ``GradientFunction``, which calls ``evaluate``.
It activates a ``GradReducer``, runs forward and backward of one micro-batch after another, and
divides the sums that the reducer brings by the number of ranks, or by the sum of the weights.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from funcshard._utils import tree
from funcshard._utils.options import check_flag, check_number, outline
from funcshard._utils.torch_private import (
    transforms_active,
    untraced,
    untraced_with_warning,
)
from funcshard.comm import Mesh, check_once, ranks_of_job, text_of
from funcshard.core.buffer_comm import BufferComm
from funcshard.core.collectives import psum_world
from funcshard.core.flat_buffer import all_reduce_flat, views
from funcshard.core.grad_reducer import (
    GradReducer,
    LeafGradient,
    ShardUse,
    activate,
    note_collective,
)
from funcshard.core.replaced_kernels import check_derivatives
from funcshard.plan import (
    AXES,
    BufferPlan,
    Reduce,
    check_reduce,
    check_reduce_units,
    current_recording,
)

# on_grads(unit, {path: gradient}) -> {path: gradient} of those to replace, or None.
OnGrads = Callable[[str, dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | None]
# on_reduce_scattered(unit, buffer key, sum) -> the tensor to reduce in its place, or None.
OnReduceScattered = Callable[[str, str, torch.Tensor], torch.Tensor | None]


class GradientKeywords(TypedDict, total=False):
    """The options of ``value_and_grad`` that ``accumulate`` and ``make_train_step`` take too."""

    weighted: bool
    on_grads: OnGrads | None
    on_reduce_scattered: OnReduceScattered | None
    divisor: float | None


UNGATHERED = torch.zeros((), device="cpu", dtype=torch.float32, requires_grad=True)
"""All placeholders are functions of it, so that backward by it reaches them."""


def value_and_grad(
    loss_fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    mesh: Mesh | None = None,
    weighted: bool = False,
    on_grads: OnGrads | None = None,
    on_reduce_scattered: OnReduceScattered | None = None,
    divisor: float | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Turn a loss function of shards into one that also returns the gradient, averaged over ranks.

    The objective is the mean, over all ranks of the mesh, of the losses that your ``loss_fn``
    returns on them. So if each rank's loss is the mean over its part of the batch, you get the
    gradient of the mean over the whole batch. docs/gradients.md has the rule.

    Arguments:
        loss_fn: your ``loss_fn(shards, *rest, **kwargs)`` -> the loss of this rank, a
            floating-point scalar. With ``has_aux`` return ``(loss, aux)``, with ``weighted``
            ``(loss, weight)``, and with both ``(loss, weight, aux)``.
        has_aux: whether ``loss_fn`` also returns an ``aux``, which may be anything.
        mesh: the ranks that the mean runs over, which check that their options are the same. By
            default, those of the collectives inside ``loss_fn``; pass ``fs.Mesh()`` for a loss of
            this rank alone, without collectives. A tensor that isn't a shard is a separate variable
            on each rank.
        weighted: whether ``loss_fn`` also returns the weight of this rank's loss in the mean,
            usually the number of samples or tokens: finite and not negative. If a rank has no data,
            pass any batch of the right shape and return weight zero: its loss and gradients then
            have no effect, even if they are infinite or NaN.
        on_grads: your ``on_grads(unit, grads)``, called before each reduction of a flat buffer.
            ``grads`` maps the path of each leaf to this rank's gradient, multiplied by the weight
            of the loss. Change these views in place, or return ``{path: gradient}`` with those to
            replace.
        on_reduce_scattered: your ``on_reduce_scattered(unit, buffer_key, partial)``, called after
            the reduce-scatter over the shard axis, and before the all-reduces along other axes.
            ``partial`` is this rank's slice of the sum over the shard axis, 1-D and in
            ``reduce_dtype``; of a buffer that is not cut, it is the unreduced gradient. Change it
            in place, or return a tensor of the same shape.
        divisor: the number by which the sum of the ranks' gradients is divided, in place of the
            number of ranks or the sum of the weights. ``divisor=1`` gives the sum. It counts for
            local leaves too, and changes no loss.

    Returns:
        ``f(shards, *rest, **kwargs)`` -> ``(loss, grads)``, or ``((loss, aux), grads)`` with
        ``has_aux``. ``loss`` is that of this rank, and tensors in ``aux`` are detached. With
        ``weighted`` you get ``((loss, weight), grads)`` or ``((loss, weight, aux), grads)``, with
        the weighted mean and the sum of the weights over the world. If that sum is zero, loss and
        gradients are zero.

        ``grads`` is a pytree like ``shards``. It holds zeros for a shard that the loss does not
        depend on, and ``None`` for a frozen shard or a shard of integers.

    Raises:
        TypeError: ``loss_fn`` did not return the values described above.
        ValueError: the units inside ``loss_fn`` belong to meshes of different sizes; without
            ``mesh``, there is no collective on a job of several ranks; the loss depends on no
            trainable shard; a weight requires a gradient, is negative or not finite; a hook
            returned a leaf or shape that the unit does not have, or would miss gradients, because a
            transform of shards or a backward inside backward computes them; ``divisor`` is not
            positive and finite.
        RuntimeError: the function runs inside a ``torch.func`` transform.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: (leaves["w"] * x).sum(), plan.units[""], mesh)
        ...     loss_fn = lambda shards, x: f(shards[""], x)
        ...     shards = fs.shard(params, plan, mesh)
        ...     loss, grads = fs.value_and_grad(loss_fn)(shards, float(mesh.rank))
        ...     return loss.item(), grads[""]["float32"].item()
        >>> fs.simulate(main, world_size=2)
        [(0.0, 0.5), (3.0, 0.5)]

    Source: ``jax.value_and_grad``; the mean is that of DistributedDataParallel.
    """
    check_callable("value_and_grad", loss_fn)
    options = GradientOptions(
        mesh=mesh,
        has_aux=has_aux,
        weighted=weighted,
        on_grads=on_grads,
        on_reduce_scattered=on_reduce_scattered,
        divisor=divisor,
    )
    options.compare("value_and_grad")
    return GradientFunction(loss_fn, options)


def accumulate(
    loss_fn: Callable[..., Any],
    micro_batches: int,
    has_aux: bool = False,
    *,
    mesh: Mesh | None = None,
    reduce: Reduce = "each",
    **gradient: Unpack[GradientKeywords],
) -> Callable[..., tuple[Any, Any]]:
    """Turn your loss function into one that returns loss and gradient of several micro-batches.

    The activations of only one micro-batch exist at a time. Loss and gradient are means over the
    micro-batches, weighted if ``loss_fn`` returns weights. Except for rounding you get those of the
    whole batch, if the loss of each micro-batch is the mean over its samples and the samples do not
    influence each other.

    Arguments:
        loss_fn: as in ``value_and_grad``, called once for each micro-batch. The last positional
            argument is the batch: a pytree of tensors whose dim 0 counts samples; or an iterator
            over micro-batches, such as ``iter(loader)``.
        micro_batches: number of equal parts that the batch is split into along dim 0, or that one
            call takes from an iterator, one before each forward; the same on every rank.
        has_aux: as in ``value_and_grad``; the function returns a list with the ``aux`` of each
            micro-batch.
        mesh: as in ``value_and_grad``.
        reduce: when gradients are reduced, for all units or by names or globs of units. A unit
            without an entry has ``"each"``.

            - ``"each"`` reduces the gradients of each micro-batch, and adds up the shards.
            - ``"once"`` adds up this rank's gradients, and reduces each unit once, in the last
              backward. That takes memory for the unit's full gradient.
            - ``"shard_each"`` reduce-scatters each micro-batch over the shard axis, and all-reduces
              the sums along the other axes in the last backward. A unit that is not cut is reduced
              as with ``"once"``.
        gradient: options of ``value_and_grad``. Each micro-batch has its own weight. ``on_grads``
            gets gradients of the loss divided by the number of micro-batches, and with ``"once"``
            their sums; with ``"shard_each"``, ``on_reduce_scattered`` gets the sums too. Without
            weights, the loss of each micro-batch is divided by their number beside ``divisor``.

    Returns:
        ``f(shards, *rest, batch, **kwargs)``, which returns what that of ``value_and_grad`` does.

    Raises:
        ValueError: ``micro_batches`` is not a positive whole number, ``reduce`` is another value or
            names no unit of the shards, the batch cannot be split, or an iterator ends early, on
            the rank where it does; and the errors of ``value_and_grad``.
        TypeError: ``reduce`` is neither text nor a mapping from names or globs.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: (x @ leaves["w"]).mean(), plan.units[""], mesh)
        ...     loss_fn = lambda shards, x: f(shards[""], x)
        ...     evaluate = fs.accumulate(loss_fn, micro_batches=2, reduce="once")
        ...     loss, grads = evaluate(fs.shard(params, plan, mesh), torch.eye(2))
        ...     return loss.item(), grads[""]["float32"].item()
        >>> fs.simulate(main, world_size=2)
        [(1.5, 0.5), (1.5, 0.5)]

    Source: ``optax.MultiSteps``; ``"once"`` is ``no_sync`` of DistributedDataParallel and FSDP, and
    ``"shard_each"`` is ``set_requires_all_reduce(False)`` of FSDP2.
    """
    check_callable("accumulate", loss_fn)
    micro_batches = check_reduce(micro_batches, reduce)
    options = GradientOptions(mesh=mesh, has_aux=has_aux, reduce=reduce, **gradient)
    options.compare("accumulate", micro_batches=micro_batches)
    return GradientFunction(loss_fn, options, micro_batches)


def check_callable(
    caller: str, loss_fn: Any, form: str = "loss_fn(shards, ...) that returns a loss"
) -> None:
    """Raise ``TypeError`` unless ``loss_fn`` is a function, and no module."""
    call_rule = f"{caller} takes a function {form}"
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise TypeError(
            f"{call_rule}; found a module with its own parameters, {type(loss_fn).__name__}, "
            "which aren't shards: call the function of fully_shard inside loss_fn"
        )
    if not callable(loss_fn):
        remedy = "pass a function"
        if isinstance(loss_fn, torch.Tensor):
            remedy = "pass the function that computes the loss, not its result"
        raise TypeError(f"{call_rule}; found {type(loss_fn).__name__}: {remedy}")


_HOOKS = {
    "on_grads": "a unit's name and its gradients",
    "on_reduce_scattered": "a unit's name, the key of a buffer and a 1-D tensor",
}

# Options that decide what a rank sends. Functions and flags for errors may differ.
_COMPARED = ("has_aux", "weighted", "reduce", "divisor")


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientOptions:
    """How a loss and its gradient are computed.

    Attributes:
        mesh: the ranks that the mean runs over, if they are given.
        has_aux: whether the loss function returns ``aux`` too.
        weighted: whether it returns a weight.
        reduce: when the gradients of micro-batches are reduced; see ``accumulate``.
        on_grads: called before each reduction.
        on_reduce_scattered: called between the stages of each reduction.
        divisor: the divisor of all gradients, in place of the number of ranks or the weights.
    """

    mesh: Mesh | None = None
    has_aux: bool = False
    weighted: bool = False
    reduce: Reduce = "each"
    on_grads: OnGrads | None = None
    on_reduce_scattered: OnReduceScattered | None = None
    divisor: float | None = None

    def __post_init__(self) -> None:
        if self.mesh is not None and not isinstance(self.mesh, Mesh):
            raise TypeError(
                f"mesh must be a Mesh, or None; found {type(self.mesh).__name__}: pass the result "
                "of init_mesh, by name"
            )
        for option_name in ("has_aux", "weighted"):
            check_flag(option_name, getattr(self, option_name))
        for option_name, parameters in _HOOKS.items():
            hook = getattr(self, option_name)
            if hook is not None and not callable(hook):
                raise TypeError(
                    f"{option_name} must be a function of {parameters}, or None; found {hook!r}"
                )
        if self.divisor is not None:
            check_number(
                "divisor",
                self.divisor,
                above=0,
                none="for the number of ranks",
                remedy="pass 1 for the sum over ranks",
            )
            object.__setattr__(self, "divisor", float(self.divisor))

    def compare(self, called: str, **others: Any) -> None:
        """Raise if ranks differ in these options, or in ``others`` of the function ``called``."""
        if self.mesh is not None:
            own_options = {name: getattr(self, name) for name in _COMPARED}
            texts = {
                name: text_of(value) for name, value in {**others, **own_options}.items()
            }
            check_once(self.mesh, texts, called)


@dataclass(slots=True, eq=False, repr=False)
class GradientFunction:
    """The function that ``value_and_grad`` or ``accumulate`` returns.

    Attributes:
        loss_fn: the loss function.
        options: how its gradients are computed.
        micro_batches: their number; ``None`` if a batch is not split.
    """

    loss_fn: Callable[..., Any]
    options: GradientOptions
    micro_batches: int | None = None

    @untraced_with_warning(
        "torch.compile compiles nothing of a function of value_and_grad or accumulate, which calls "
        "backward: compile units with fully_shard(compiler=torch.compile), or whole steps with "
        "fs.trace(step, state, batch).compile()"
    )
    def __call__(self, shards: Any, /, *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        options = self.options

        def named_loss(*args: Any, **kwargs: Any) -> dict[str, Any]:
            result = self.loss_fn(*args, **kwargs)
            return named_results(result, weighted=options.weighted, has_aux=options.has_aux)

        loss, weight, aux, grads = evaluate(self, named_loss, shards, *rest, **kwargs)
        values = [loss, *[weight] * options.weighted, *[aux] * options.has_aux]
        return tuple(values) if len(values) > 1 else loss, grads


# --- micro-batches: equal parts of one batch, or batches that an iterator gives -------------------


def _calls(
    micro_batches: int,
    reduce: Reduce,
    loss_fn: Callable[..., Any],
    shards: Any,
    rest: Any,
    kwargs: Any,
) -> list[Callable[[Any], Any]]:
    """Return, for each micro-batch, a function of shards that calls ``loss_fn``."""
    if not rest:
        raise TypeError(
            "the function takes (shards, *rest, batch), the batch as its last positional argument"
        )
    *first_args, batch = rest
    next_micro_batch = _stream(batch, micro_batches)
    if isinstance(reduce, Mapping):
        check_reduce_units(reduce, _unit_names(shards))

    # Why one function for all: each call takes the next micro-batch, just before its forward.
    def call(local: Any) -> Any:
        return loss_fn(local, *first_args, next_micro_batch(), **kwargs)

    return [call] * micro_batches


def _unit_names(shards: Any) -> list[str]:
    """Return the names of the units in a tree that may hold the shards of several models."""
    if isinstance(shards, Mapping):
        unit_names = [
            str(name)
            for name, inner_shards in shards.items()
            if isinstance(inner_shards, Mapping)
        ]
        return unit_names + [
            name for inner_shards in shards.values() for name in _unit_names(inner_shards)
        ]
    if isinstance(shards, list | tuple):
        return [name for inner_shards in shards for name in _unit_names(inner_shards)]
    return []


def _remedy(leaves: Sequence[Any]) -> str:
    # Why one: a batch of a class that is no pytree is one leaf.
    if len(leaves) == 1 and isinstance(leaves[0], Mapping):
        return "pass dict(batch)"
    if len(leaves) == 1 and not isinstance(leaves[0], torch.Tensor):
        return "pass one batch as a tensor, or as a tuple or dictionary of tensors"
    return "pass what is not to be split before the batch, or by keyword"


def _stream(batches: Any, micro_batches: int) -> Callable[[], Any]:
    """Return a function that takes the next micro-batch of a batch, or from an iterator."""
    if not isinstance(batches, Iterator):
        return iter(_split(batches, micro_batches)).__next__
    if current_recording() is not None:
        raise ValueError(
            "trace records a step on one batch, and its graph cannot ask an iterator for "
            "micro-batches; found an iterator: pass the whole batch, which accumulate splits"
        )
    taken_count = itertools.count()

    def take() -> Any:
        # For the error: how many the iterator gave.
        batch_index = next(taken_count)
        try:
            return next(batches)
        except StopIteration:
            raise ValueError(
                f"an iterator must hold the {micro_batches} micro-batches of every call, on every "
                f"rank; found {batch_index}: leave out the incomplete rest of an epoch, or "
                "continue with batches of weight zero (weighted=True)"
            ) from None

    return take


def _split(batch: Any, micro_batches: int) -> list[Any]:
    """Split a pytree of tensors into equal parts along dim 0, as views."""
    batch_leaves, unflatten = tree.flatten(batch)
    leaf_sizes = [
        leaf.shape[0]
        if isinstance(leaf, torch.Tensor) and leaf.ndim
        else type(leaf).__name__
        for leaf in batch_leaves
    ]
    # Why no set: while fs.trace records, a size may be a symbol, which has no hash.
    if not leaf_sizes or any(
        isinstance(leaf_size, str) or leaf_size != leaf_sizes[0] for leaf_size in leaf_sizes
    ):
        raise ValueError(
            "the batch must be a pytree of tensors with one size of dim 0, along which it is "
            f"split into micro-batches; found {sorted({*map(str, leaf_sizes)}) or 'no leaves'}: "
            f"{_remedy(batch_leaves)}"
        )
    batch_size: Any = leaf_sizes[0]
    if batch_size == 0 or batch_size % micro_batches:
        raise ValueError(
            f"dim 0 of the batch must be a multiple of the {micro_batches} micro-batches; found "
            f"{batch_size}: choose a divisor, or pad the batch and weigh the samples "
            "(weighted=True)"
        )
    split_leaves = [
        leaf.split([batch_size // micro_batches] * micro_batches) for leaf in batch_leaves
    ]
    return [unflatten(list(leaf_parts)) for leaf_parts in zip(*split_leaves, strict=True)]


# --- forward, backward, and the mean --------------------------------------------------------------


@untraced
def evaluate(
    function: GradientFunction,
    loss_fn: Callable[..., Any],
    shards: Any,
    /,
    *rest: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None, Any, Any]:
    """Return the mean loss of several micro-batches, which run one after another, and its gradient.

    Arguments:
        function: the options, and the number of micro-batches.
        loss_fn: the loss function; it returns its results by name, as ``named_results`` does.
        shards: the pytree to differentiate with respect to.
        rest: further arguments; the last one is the batch, if there are micro-batches.
        kwargs: arguments by name.

    Returns:
        The loss: of the only micro-batch, or the mean over this rank's, in float32 or wider; with
        weights, the weighted mean over the world. The sum of the weights over the world, ``None``
        without weights; the aux, in a list if the batch is split; and the gradient.
    """
    if transforms_active():
        raise RuntimeError(
            "value_and_grad uses torch.autograd.grad, and cannot run inside a torch.func "
            "transform; use fs.grad there, which returns the same gradient"
        )
    options = function.options
    calls = [lambda local: loss_fn(local, *rest, **kwargs)]
    if function.micro_batches is not None:
        calls = _calls(
            function.micro_batches, options.reduce, loss_fn, shards, rest, kwargs
        )
    shard_leaves, unflatten = tree.flatten(shards)
    # Note: frozen shards too. Only a unit knows which are: it detaches them when it
    # gathers, and ``_gradient`` returns None for them.
    local_leaves = [
        leaf.detach().requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        for leaf in shard_leaves
    ]
    reducer = GradReducer(
        local_leaves,
        on_grad=options.on_grads and functools.partial(_change_grads, options.on_grads),
        on_scattered=options.on_reduce_scattered
        and functools.partial(_change_sum, options.on_reduce_scattered),
        reduce=options.reduce,
        mesh=options.mesh,
    )
    weighted = options.weighted
    # The sums of this rank's losses, multiplied by their factors, and of its weights.
    total_loss: Any = None
    aux_values, own_weight = [], 0.0
    with activate(reducer), torch.enable_grad():
        for batch_index, call in enumerate(calls):
            result = call(unflatten(local_leaves))
            loss, factor = check_loss(result["loss"]), 1 / len(calls)
            # The loss is multiplied, and not the gradient, so that hooks see the weighted gradient.
            if weighted:
                factor = check_weight(result["weight"])
            reducer.accumulating = batch_index + 1 < len(calls)
            reducer.zero_weight, reducer.received = factor == 0, False
            reached = _backward(
                loss if factor == 1 else loss * factor, local_leaves, reducer
            )
            # Zeros would hide that the loss uses other tensors than the shards.
            if not reached:
                raise ValueError(CONSTANT)
            loss_term = loss.detach().reshape(())
            # Why not in the loss's dtype: a mean over micro-batches would be rounded at each sum.
            if weighted or len(calls) > 1:
                loss_term = loss_value(loss)
            if factor != 1:
                loss_term = _clean(loss_term * factor, reducer)
            total_loss = loss_term if total_loss is None else total_loss + loss_term
            own_weight += factor
            aux_values.append(tree.map(detached, result.get("aux")))
            del loss, result  # frees the graph before the next forward
    mesh = world_of(reducer.use)
    # A value_and_grad around this one differentiates a loss that is computed from this gradient.
    note_collective(mesh)
    # Why here, and not in the reductions: a sum is the exact adjoint of an all-gather, so gradients
    # of gradients stay right.
    divisor: float | torch.Tensor = mesh.world_size
    world_weight = None
    if weighted:
        own_total = total_loss.new_full((), own_weight, dtype=torch.float64)
        world_loss, world_weight = psum_world(
            torch.stack([total_loss.double(), own_total]), mesh
        )
        # No rank has data: the loss and the gradients are zero.
        divisor = torch.where(world_weight > 0, world_weight, 1.0)
        total_loss = (world_loss / divisor).to(total_loss.dtype)
    # The divisor by the axes of a mesh along which each rank has values of its own, and by device.
    # Why by device: shards of offloaded units lie on the CPU, and the host waits for each copy.
    divisors: dict[Any, Any] = {
        None: divisor if options.divisor is None else options.divisor
    }
    grads = []
    for shard, leaf in zip(local_leaves, reducer.leaves, strict=True):
        comm, axes = leaf.comm or reducer.use.comm(shard), None
        if comm is not None and comm.plan.local and options.divisor is None:
            axes = comm.mesh, comm.plan.local
            # Note: the sums of weights are all-reduces; the order of leaves is that of every rank.
            if axes not in divisors:
                own_term = own_weight if weighted else None
                divisors[axes] = local_divisor(*axes, own_term, total_loss.device)
        leaf_divisor = divisors[axes]
        if isinstance(leaf_divisor, torch.Tensor):
            place = axes, shard.device
            leaf_divisor = divisors[place] = divisors.get(place, leaf_divisor).to(
                shard.device
            )
        grads.append(_gradient(shard, leaf, comm, leaf_divisor))
    aux = aux_values[0] if function.micro_batches is None else aux_values
    return total_loss, world_weight, aux, unflatten(grads)


def _backward(
    loss: torch.Tensor, local: Sequence[torch.Tensor], reducer: GradReducer
) -> bool:
    """Run backward; return whether a gradient reached any leaf that it could reach."""
    reached = False
    trained_pairs = [
        (shard, leaf)
        for shard, leaf in zip(local, reducer.leaves, strict=True)
        if shard.requires_grad
    ]
    if trained_pairs and loss.requires_grad:
        # Why a view: it has an autograd node of its own, whose hook runs before hooks on the loss
        # itself.
        loss = loss.view_as(loss)
        # Why a hook: code inside this backward may run another backward, and only a hook knows
        # which one this is.
        begin_hook = loss.register_hook(reducer.enter_backward)
        try:
            # Why single-threaded, also on CUDA: only so does backward see context variables, such
            # as the event log.
            with torch.autograd.set_multithreading_enabled(False):
                # Why UNGATHERED too: then a placeholder in the loss raises in its backward.
                *direct_grads, _ = torch.autograd.grad(
                    loss,
                    [*(shard for shard, _ in trained_pairs), UNGATHERED],
                    allow_unused=True,
                )
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                error.add_note(
                    "If loss_fn calls loss.backward(), leave that out: value_and_grad computes "
                    "the gradients of the loss that loss_fn returns"
                )
            check_derivatives(error)
            raise
        finally:
            begin_hook.remove()
        # Note: gradients of gathers went to the reducer; these reached a shard without a gather.
        for (_, leaf), grad in zip(trained_pairs, direct_grads, strict=True):
            if grad is not None:
                reached = True
                grad = _clean(grad, reducer)
                if leaf.direct is not None:
                    grad = leaf.direct + grad
                leaf.direct = grad
    reducer.post_backward()
    return reached or reducer.received or not trained_pairs


CONSTANT = (
    "loss_fn must return a loss that depends on a trainable shard of its argument; found one "
    "without a gradient, e.g. under no_grad, of detached tensors, frozen leaves or other shards: "
    "compute it from the shards that loss_fn is called with"
)


def _gradient(
    shard: torch.Tensor,
    leaf: LeafGradient,
    comm: BufferComm | None,
    divisor: float | torch.Tensor,
) -> torch.Tensor | None:
    """Return a leaf's gradient: its reduced and its direct one, divided by ``divisor``."""
    reduced_grad, direct_grad = leaf.total, leaf.direct
    # Why: the graph of an output that the caller keeps refers to what the reducer knows.
    leaf.total = leaf.direct = None
    if not shard.requires_grad or (comm is not None and not comm.plan.trainable):
        return None
    if direct_grad is None and reduced_grad is None:
        return torch.zeros_like(shard, requires_grad=False)
    if leaf.divisor != 1 and direct_grad is None:
        # The unit divided before its reduction, so the rest of the divisor is left.
        divisor = divisor / leaf.divisor
    elif leaf.divisor != 1 and reduced_grad is not None:
        # The direct gradient was not divided, so the reduced one is made like it.
        reduced_grad = reduced_grad * leaf.divisor
    if direct_grad is not None and reduced_grad is not None:
        direct_grad = reduced_grad + direct_grad
    grad = reduced_grad if direct_grad is None else direct_grad
    assert grad is not None
    if isinstance(divisor, float | int) and divisor == 1:
        return grad
    # The reducer made the reduced gradient, so nobody else sees that it changes.
    return grad.div_(divisor) if direct_grad is None else grad / divisor


def world_of(use: ShardUse, caller: str = "value_and_grad") -> Mesh:
    """Return the mesh over which ``caller`` takes the mean of a loss function."""
    mesh, world_sizes, mesh_text = use.mesh, {*use.worlds}, "meshes"
    if mesh is not None:
        world_sizes.add(mesh.world_size)
        mesh_text = "units of other meshes than mesh=,"
    if len(world_sizes) > 1:
        raise ValueError(
            f"{caller} takes the mean over one mesh, that of the units inside loss_fn; found "
            f"{mesh_text} of {sorted(world_sizes)} ranks: run the units of another mesh outside "
            "loss_fn, or pass mesh= if only psum or pmean runs over a part of the ranks"
        )
    if mesh is not None:
        return mesh
    # Without a collective the ranks may be unrelated, or copies of one model: only the user knows.
    job_ranks = ranks_of_job()
    if not world_sizes and job_ranks > 1:
        raise ValueError(
            f"{caller} takes the mean over a mesh, but loss_fn ran no unit and no collective that "
            f"tells which of the {job_ranks} ranks: shard copies of one model, with "
            "strategy='no_shard'. For each rank's own variables pass mesh=mesh, for this rank "
            "alone mesh=fs.Mesh()"
        )
    return next(iter(use.worlds.values()), Mesh())


def local_divisor(
    mesh: Mesh, local: tuple[str, ...], own_weight: float | None, device: torch.device
) -> float | torch.Tensor:
    """Return the divisor for leaves that are local along the axes ``local``."""
    # Note: the gradient is the mean over the ranks that share the values. Ranks along a model axis
    # share one model, and all count.
    if own_weight is None:
        return math.prod(
            group.size for name, group in mesh.axes if name not in local or name not in AXES
        )
    world_weight = torch.full((), own_weight, dtype=torch.float64, device=device)
    world_weight = all_reduce_flat(
        world_weight, mesh, local=tuple(axis for axis in local if axis in AXES)
    )
    return torch.where(world_weight > 0, world_weight, 1.0)


# --- what functions of the user return ------------------------------------------------------------

# What a loss function returns after the loss, by option, in this order.
_RESULTS = {"weighted": "weight", "mutable": "new_buffers", "has_aux": "aux"}


def named_results(result: Any, **options: bool) -> dict[str, Any]:
    """Return the results of a loss function by name, as the options say."""
    result_names = [
        "loss",
        *[name for option, name in _RESULTS.items() if options.get(option)],
    ]
    values = result if isinstance(result, tuple) else (result,)
    if len(values) != len(result_names):
        options_text = ", ".join(f"{option}={value}" for option, value in options.items())
        remedies = [
            f"for (loss, {_RESULTS[option]}) pass {option}=True" for option in options
        ]
        result_text = outline(result)
        if isinstance(result, tuple):
            result_text = f"a tuple of {len(result)}"
        raise TypeError(
            f"with {options_text} loss_fn must return ({', '.join(result_names)}); found "
            f"{result_text}: {', '.join(remedies)}"
        )
    return dict(zip(result_names, values, strict=True))


def check_loss(loss: Any) -> torch.Tensor:
    """Return a loss as a tensor of this rank, or raise."""
    if hasattr(loss, "full_tensor"):
        # Tensor parallelism may leave the loss as a DTensor, equal on all ranks.
        loss = loss.full_tensor()
    if (
        not isinstance(loss, torch.Tensor)
        or loss.numel() != 1
        or not loss.is_floating_point()
    ):
        raise TypeError(
            "loss_fn must return a floating-point scalar, the mean over this rank's batch; found "
            f"{_found_as_loss(loss)}"
        )
    return loss


def _found_as_loss(loss: Any) -> str:
    class_name = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        return f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}: return its mean as a float"
    if loss is None:
        return "None: end loss_fn with return loss"
    if isinstance(loss, float | int):
        return f"{loss}, a number without a gradient: return the tensor, without .item()"
    if isinstance(getattr(loss, "loss", None), torch.Tensor):
        return f"{class_name}: return its .loss"
    if isinstance(loss, Mapping):
        return f"{class_name}: return the loss alone, or (loss, aux) with has_aux=True"
    return class_name


def check_weight(weight: Any) -> float:
    """Return a weight as a number, or raise."""
    if isinstance(weight, torch.Tensor) and current_recording() is not None:
        raise RuntimeError(
            "trace takes a weight that is a number of Python, such as the length of the batch; "
            "found a tensor, which has no value while a step is recorded: return a number, or run "
            "the step itself"
        )
    if isinstance(weight, torch.Tensor) and weight.requires_grad:
        raise ValueError(
            "a weight must be a constant; found a tensor that requires a gradient: return "
            "weight.detach()"
        )
    if isinstance(
        weight, torch.SymInt | torch.SymFloat
    ):  # fs.trace records, and sizes are symbols
        return torch.sym_float(weight)
    try:
        weight_value = float(weight)
    except (TypeError, ValueError, RuntimeError):
        # Which the next check refuses.
        weight_value = math.nan
    if not 0 <= weight_value < math.inf:
        raise ValueError(
            "a weight must be one number, finite and not negative: zero for no data; found "
            f"{weight!r}"
        )
    return weight_value


def loss_value(loss: torch.Tensor) -> torch.Tensor:
    """Return a loss as a scalar without a graph, in float32 or wider."""
    return loss.detach().to(torch.promote_types(loss.dtype, torch.float32)).reshape(())


def detached(x: Any) -> Any:
    """Return ``x`` without its graph if it is a tensor, else ``x``."""
    return x.detach() if isinstance(x, torch.Tensor) else x


def _clean(x: torch.Tensor, reducer: GradReducer) -> torch.Tensor:
    # Why: infinity times zero is NaN, and a loss with weight zero must have no effect.
    return x.nan_to_num(0.0, 0.0, 0.0) if reducer.zero_weight else x


@torch.no_grad()
def _change_grads(
    on_grads: OnGrads, unit: str, buffer: BufferPlan, full: torch.Tensor
) -> None:
    """Call ``on_grads`` with the views of an unreduced gradient, for a ``GradReducer``."""
    leaf_paths = [leaf.path for leaf in buffer.leaves]
    grad_views = dict(zip(leaf_paths, views(full, buffer), strict=True))
    replaced_grads = on_grads(unit, dict(grad_views))
    if replaced_grads is None:
        return
    unit_title = unit or "(root)"
    unknown_paths: Any = outline(replaced_grads)
    if isinstance(replaced_grads, Mapping):
        unknown_paths = sorted(replaced_grads.keys() - grad_views.keys())
    if unknown_paths:
        raise ValueError(
            f"on_grads must return None, or a dictionary from paths of unit {unit_title!r} to "
            f"gradients; found {unknown_paths}, the paths are {leaf_paths[:6]}"
        )
    for path, grad in replaced_grads.items():
        if grad.shape != grad_views[path].shape:
            raise ValueError(
                f"on_grads must return gradients of their leaves' shapes; for {path!r} of unit "
                f"{unit_title!r} found {tuple(grad.shape)} instead of "
                f"{tuple(grad_views[path].shape)}"
            )
        if grad is not grad_views[path]:
            grad_views[path].copy_(grad)


@torch.no_grad()
def _change_sum(
    on_reduce_scattered: OnReduceScattered,
    unit: str,
    buffer: BufferPlan,
    partial: torch.Tensor,
) -> None:
    """Call ``on_reduce_scattered`` with a sum, for a ``GradReducer``."""
    replaced_sum = on_reduce_scattered(unit, buffer.key, partial)
    if replaced_sum is None or replaced_sum is partial:
        return
    if not isinstance(replaced_sum, torch.Tensor) or replaced_sum.shape != partial.shape:
        raise ValueError(
            "on_reduce_scattered must return None, or a tensor of the shape that it got; for "
            f"buffer {buffer.key!r} of unit {unit or '(root)'!r} found {outline(replaced_sum)} "
            f"instead of {tuple(partial.shape)}"
        )
    partial.copy_(replaced_sum)
