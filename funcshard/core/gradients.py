"""Gradients of a loss function of shards, averaged over the data-parallel world.

``value_and_grad`` and ``accumulate`` are one thing: a loss and its gradient, of one or of several
micro-batches. Both call ``evaluate``. It activates a ``GradReducer`` and runs forward and backward
of one micro-batch after another. The units that the loss function calls pass their gradients to the
reducer, which adds them up over ranks and over micro-batches. ``evaluate`` then divides each sum
by the number of ranks, or by the sum of the weights. (Without weights, the loss of each of several
micro-batches is divided by their number before its backward.)

Why the reductions do not divide: a sum is the exact adjoint of an all-gather, so gradients of
gradients stay right.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from funcshard._utils import (
    Warned,
    is_dtensor,
    transforms_active,
    tree,
    untraced,
    untraced_with_warning,
)
from funcshard.comm import Mesh, current_recording, ranks_of_job
from funcshard.core.collectives import psum_world
from funcshard.core.grad_hooks import OnGrads, OnReduceScattered, gradient_hook, scattered_hook
from funcshard.core.grad_reducer import GradReducer, LeafGradient, activate, note_collective
from funcshard.core.gradient_options import GradientOptions
from funcshard.core.plain_collectives import all_reduce_flat
from funcshard.plan import AXES


def value_and_grad(
    loss_fn: Callable[..., Any],
    has_aux: bool = False,
    *,
    mesh: Mesh | None = None,
    weighted: bool = False,
    on_grads: OnGrads | None = None,
    on_reduce_scattered: OnReduceScattered | None = None,
    divisor: float | None = None,
    allow_constant: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """Turn a loss function of shards into one that also returns the gradient, averaged over ranks.

    The objective is the mean, over all ranks of the mesh, of the losses that ``loss_fn`` returns on
    them. The collectives inside ``loss_fn`` add their gradients over ranks, and the returned
    function divides the sums by the number of ranks, or by the sum of the ranks' weights. So if
    each rank's loss is the mean over its part of the batch, the gradient is that of the mean over
    the whole batch.

    Arguments:
        loss_fn: ``loss_fn(shards, *rest, **kwargs)`` -> the loss of this rank, a floating-point
            scalar. With ``has_aux`` it returns ``(loss, aux)``, with ``weighted``
            ``(loss, weight)``, and with both ``(loss, weight, aux)``.
        has_aux: whether ``loss_fn`` also returns an ``aux``, which may be anything.
        mesh: the ranks that the mean runs over, which check that their options are the same. By
            default, those of the collectives inside ``loss_fn``: gathers of units, ``psum`` and
            ``pmean``. ``fs.Mesh()`` takes the gradient of this rank's own loss, which has none of
            these. A tensor that is no shard is a separate variable on each rank, also if all
            ranks hold the same values.
        weighted: whether ``loss_fn`` also returns the weight of this rank's loss in the mean, which
            is the number of samples or tokens that the loss is the mean of. A weight is finite and
            not negative. A rank without data calls the function with any batch of the right shape,
            and returns weight zero: then its loss and its gradients have no effect, even if they
            are infinite or NaN.
        on_grads: ``on_grads(unit, grads)``, called before each reduction of one of the unit's flat
            buffers. ``grads`` maps the path of each leaf to this rank's gradient before the
            reduction, multiplied by the weight of the loss. The gradients are views of the buffer.
            The function may change them in place, or return ``{path: gradient}`` with those to
            replace.
        on_reduce_scattered: ``on_reduce_scattered(unit, buffer_key, partial)``, called between the
            two stages of a reduction: after the reduce-scatter over the shard axis, and before the
            all-reduces along other axes. ``partial`` is this rank's slice of the sum over the shard
            axis, 1-D and in ``reduce_dtype``. The function may change it in place, or return a
            tensor of the same shape. For a buffer that is repeated along no axis it is called with
            the whole sum. For one that is not cut over the shard axis it is called with the
            unreduced gradient.
        divisor: the number by which the sum of the ranks' gradients is divided. By default it is
            the number of ranks, or the sum of the weights. ``divisor=1`` gives the sum. It holds
            for every leaf, also for leaves that are local to some ranks, and changes no loss.
        allow_constant: whether a loss that depends on no trainable shard gives zeros. By default it
            is an error.

    Returns:
        ``f(shards, *rest, **kwargs)`` -> ``(loss, grads)``, or ``((loss, aux), grads)`` with
        ``has_aux``. ``loss`` is that of this rank, and tensors in ``aux`` are detached. With
        ``weighted`` it returns ``((loss, weight), grads)`` or ``((loss, weight, aux), grads)``;
        ``loss`` is then the weighted mean over the world, and ``weight`` the sum over the world. If
        that sum is zero, loss and gradients are zero.

        ``grads`` is a pytree like ``shards``. It holds zeros for a shard that the loss does not
        depend on, and ``None`` for a frozen shard or a shard of integers.

    Raises:
        TypeError: ``loss_fn`` did not return the values described above.
        ValueError: the units inside ``loss_fn`` belong to meshes of other sizes than each other or
            than ``mesh``. Without ``mesh``: the collectives run over different numbers of ranks, or
            there are none on a job of several ranks. The loss depends on no trainable shard; a
            weight requires a gradient, is negative or not finite; ``on_grads`` returned a leaf that
            the unit does not have, or a gradient of another shape; ``on_reduce_scattered`` returned
            a tensor of another shape; gradients would pass one of these two by, because a transform
            of shards or a backward inside backward computes them; ``divisor`` is not positive and
            finite.
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
        allow_constant=allow_constant,
    )
    options.compare("value_and_grad", ["has_aux", "weighted", "divisor"])
    return gradient_function(loss_fn, options)


def check_callable(caller: str, loss_fn: Any) -> None:
    """Raise ``TypeError`` unless ``loss_fn`` is a function, and no module, which has no shards."""
    rule = f"{caller} takes a function loss_fn(shards, ...) that returns a loss"
    if isinstance(loss_fn, nn.Module) and next(loss_fn.parameters(), None) is not None:
        raise TypeError(
            f"{rule}; found a module with parameters of its own, {type(loss_fn).__name__}, which "
            "are no shards: call the function of fully_shard inside loss_fn"
        )
    if not callable(loss_fn):
        remedy = "pass a function"
        if isinstance(loss_fn, torch.Tensor):
            remedy = "pass the function that computes the loss, not its result"
        raise TypeError(f"{rule}; found {type(loss_fn).__name__}: {remedy}")


def gradient_function(loss_fn: Callable[..., Any], options: GradientOptions) -> GradientFunction:
    """Return what ``value_and_grad`` does, for options that ranks have compared."""

    def run(shards: Any, /, *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = lambda local: loss_fn(local, *rest, **kwargs)  # noqa: E731
        result, grads = evaluate(shards, [call], options)
        return result.value(result.aux[0] if options.has_aux else None, options), grads

    return GradientFunction(run, loss_fn, options)


@dataclass(slots=True, eq=False, repr=False)
class GradientFunction:
    """The function that ``value_and_grad`` or ``accumulate`` returns.

    Attributes:
        run: what it does.
        loss_fn: the loss function.
        options: how its gradients are computed.
        micro_batches: the number of micro-batches; ``None`` if a batch is not split.
        warned: whether it has said that Dynamo compiles nothing of it.
    """

    run: Callable[..., tuple[Any, Any]]
    loss_fn: Callable[..., Any]
    options: GradientOptions
    micro_batches: int | None = None
    warned: Warned = field(default_factory=Warned)

    @untraced_with_warning(
        "torch.compile compiles nothing of a function of value_and_grad or accumulate, which "
        "calls backward and starts collectives between graphs: compile units with "
        "fully_shard(compiler=torch.compile), or whole steps with fs.trace(step, state, "
        "batch).compile()"
    )
    def __call__(self, shards: Any, /, *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        return self.run(shards, *rest, **kwargs)


# --- forward, backward, and the mean --------------------------------------------------------------


class Result(NamedTuple):
    """The values that ``evaluate`` returns besides the gradients.

    Attributes:
        loss: the loss of the only micro-batch, or the mean over this rank's micro-batches, in
            float32 or wider; with weights, the weighted mean over the world.
        weight: the sum of the weights over the world; ``None`` without weights.
        aux: the aux of each micro-batch.
    """

    loss: torch.Tensor
    weight: torch.Tensor | None
    aux: list[Any]

    def value(self, aux: Any, options: GradientOptions) -> Any:
        """Return the loss, or a tuple of loss, weight and ``aux``, as far as they are asked for."""
        values = (
            self.loss,
            *([self.weight] if options.weighted else []),
            *([aux] if options.has_aux else []),
        )
        return values if len(values) > 1 else self.loss


@untraced
def evaluate(
    shards: Any, calls: Sequence[Callable[[Any], Any]], options: GradientOptions
) -> tuple[Result, Any]:
    """Return the mean loss of several micro-batches, which run one after another, and its gradient.

    Arguments:
        shards: the pytree to differentiate with respect to.
        calls: for each micro-batch, a function from the shards to the values that ``loss_fn``
            returns.
        options: the options of ``value_and_grad`` or ``accumulate``.
    """
    if transforms_active():
        raise RuntimeError(
            "value_and_grad uses torch.autograd.grad, and cannot run inside a torch.func "
            "transform; use torch.func.grad there, which adds gradients over ranks, and divide "
            "them by mesh.world_size"
        )
    leaves, unflatten = tree.flatten(shards)
    local = [leaf.detach().requires_grad_(_differentiable(leaf)) for leaf in leaves]
    direct: list[torch.Tensor | None] = [None] * len(local)
    # total: the sum of this rank's losses times their factors; own: the sum of its weights.
    auxes, total, own_weight = [], torch.zeros((), dtype=torch.float32, device="cpu"), 0.0
    weighted, hook, hook_between = options.weighted, options.on_grads, options.on_reduce_scattered
    on_grad = None if hook is None else gradient_hook(hook)
    on_scattered = None if hook_between is None else scattered_hook(hook_between)
    reducer = GradReducer(
        local, on_grad=on_grad, on_scattered=on_scattered, reduce=options.reduce, mesh=options.mesh
    )
    with activate(reducer), torch.enable_grad():
        for i, call in enumerate(calls):
            loss, weight, aux = _check_result(call(unflatten(local)), options.has_aux, weighted)
            factor = weight if weighted else 1 / len(calls)
            zero_weight = factor == 0
            reducer.pre_backward(accumulating=i + 1 < len(calls), zero_weight=zero_weight)
            reached = _backward(
                loss if factor == 1 else loss * factor, local, reducer, direct, zero_weight
            )
            if not reached and not options.allow_constant:
                raise ValueError(_CONSTANT)
            # Why not in the loss's dtype: a mean over micro-batches would be rounded at each sum.
            averaged = weighted or len(calls) > 1
            value = loss_value(loss) if averaged else loss.detach().reshape(())
            value = value if factor == 1 else _clean(value * factor, zero_weight)
            total, own_weight = value if i == 0 else total + value, own_weight + weight
            auxes.append(tree.map(detached, aux))
            del loss  # frees the graph before the next forward
    mesh = _world(reducer)
    # A value_and_grad around this one differentiates a loss that is computed from this gradient.
    note_collective(mesh)
    divisor: float | torch.Tensor = mesh.world_size
    world_weight = None
    if weighted:
        sums = psum_world(
            torch.stack([total.double(), total.new_full((), own_weight, dtype=torch.float64)]), mesh
        )
        divisor = torch.where(sums[1] > 0, sums[1], 1.0)
        total, world_weight = (sums[0] / divisor).to(total.dtype), sums[1]
    if options.divisor is not None:
        divisor = options.divisor
    divisors: dict[Any, float | torch.Tensor] = {}
    if options.divisor is None:
        # Why sorted: the sums of weights are all-reduces, which every rank has to start in the same
        # order.
        local_axes = {leaf.local_axes for leaf in reducer.leaves if leaf.local_axes is not None}
        for key in sorted(local_axes, key=lambda key: ([*key[0].shape.items()], key[1])):
            divisors[key] = _local_divisor(*key, own_weight if weighted else None, total.device)

    # Why a cache: shards of offloaded units lie on the CPU, and the host waits for each copy of a
    # divisor from the device.
    @functools.cache
    def divisor_on(device: torch.device, key: Any) -> float | torch.Tensor:
        value = divisors.get(key, divisor)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    grads = [
        _gradient(shard, leaf, straight, divisor_on(shard.device, leaf.local_axes))
        for shard, leaf, straight in zip(local, reducer.leaves, direct, strict=True)
    ]
    return Result(total, world_weight, auxes), unflatten(grads)


def _backward(
    loss: torch.Tensor,
    local: Sequence[torch.Tensor],
    reducer: GradReducer,
    direct: list[torch.Tensor | None],
    zero_weight: bool,
) -> bool:
    """Run backward; add gradients of gathered shards to ``reducer``, all others to ``direct``.

    Returns:
        Whether a gradient reached any leaf, or there is none that one could reach.
    """
    reached = False
    wanted_numbers = [leaf_index for leaf_index, leaf in enumerate(local) if leaf.requires_grad]
    if wanted_numbers and loss.requires_grad:
        # Why a view: it has an autograd node of its own, whose hook runs before hooks on the loss
        # itself.
        loss = loss.view_as(loss)
        # Why a hook: code inside this backward may run another backward, and only a hook knows
        # which one this is.
        begun = loss.register_hook(reducer.enter_backward)
        try:
            # Why single-threaded, also on CUDA: only so does backward see context variables, such
            # as the event log.
            with torch.autograd.set_multithreading_enabled(False):
                computed_grads = torch.autograd.grad(
                    loss, [local[leaf_index] for leaf_index in wanted_numbers], allow_unused=True
                )
        except RuntimeError as error:
            if "backward through the graph a second time" in str(error):
                error.add_note(
                    "If loss_fn calls loss.backward(), leave that out: value_and_grad computes "
                    "the gradients of the loss that loss_fn returns"
                )
            raise
        finally:
            begun.remove()
        for leaf_index, grad in zip(wanted_numbers, computed_grads, strict=True):
            if grad is not None:
                reached = True
                direct_grad, grad = direct[leaf_index], _clean(grad, zero_weight)
                direct[leaf_index] = grad if direct_grad is None else direct_grad + grad
    reducer.post_backward()
    return reached or reducer.received or not wanted_numbers


_CONSTANT = (
    "loss_fn must return a loss that depends on a trainable shard of its argument; found a loss "
    "that no gradient leaves: it was computed under no_grad, from detached tensors, from frozen "
    "leaves only, or from a module or shards that are not in the argument; compute it from the "
    "shards that loss_fn is called with, or pass allow_constant=True for zeros"
)


def _gradient(
    shard: torch.Tensor,
    leaf: LeafGradient,
    direct: torch.Tensor | None,
    divisor: float | torch.Tensor,
) -> torch.Tensor | None:
    """Return a leaf's gradient: its summed reductions plus ``direct``, divided by ``divisor``.

    ``direct`` is the gradient that reached the leaf without an all-gather, such as that of a
    penalty on the shard itself.
    """
    # Why take: the graph of an output that the caller keeps refers to what the reducer knows.
    reduced, divisor_before = leaf.take_total(), leaf.divisor
    is_frozen = leaf.buffer is not None and not leaf.buffer.trainable
    if is_frozen or not shard.requires_grad:
        return None
    if direct is None and reduced is None:
        return torch.zeros_like(shard, requires_grad=False)
    if divisor_before != 1 and direct is None:
        divisor = divisor / divisor_before
    elif divisor_before != 1 and reduced is not None:
        reduced = reduced * divisor_before
    undivided = isinstance(divisor, float | int) and divisor == 1
    if direct is not None:
        total = direct if reduced is None else reduced + direct
        return total if undivided else total / divisor
    assert reduced is not None
    return reduced if undivided else reduced.div_(divisor)


def _world(reducer: GradReducer) -> Mesh:
    """Return the mesh that the mean runs over."""
    sizes = set(reducer.worlds)
    if reducer.mesh is not None:
        sizes.add(reducer.mesh.world_size)
    if len(sizes) > 1:
        meshes = "meshes" if reducer.mesh is None else "units of other meshes than mesh=,"
        raise ValueError(
            "value_and_grad takes the mean over one mesh, to which the units inside loss_fn "
            f"belong; found {meshes} of {sorted(sizes)} ranks: run the units of another mesh outside "
            "loss_fn and pass their results in, or, if only psum or pmean runs over a part of the "
            "ranks, pass mesh="
        )
    if reducer.mesh is not None:
        return reducer.mesh
    ranks = ranks_of_job()
    if not sizes and ranks > 1:
        raise ValueError(
            "value_and_grad takes the mean over a mesh, but loss_fn ran no unit and no collective "
            f"that tells which, and this is a job of {ranks} ranks: if these are copies of one "
            "model, shard them, with strategy='no_shard' for copies; pass mesh=mesh if each "
            "rank's tensors are variables of their own, mesh=fs.Mesh() for this rank alone"
        )
    return next(iter(reducer.worlds.values()), Mesh())


def _local_divisor(
    mesh: Mesh, local: tuple[str, ...], own_weight: float | None, device: torch.device
) -> float | torch.Tensor:
    """Return the divisor for leaves that are local along the axes ``local``.

    The gradient of such a leaf is the mean over the ranks that share its values. Ranks along a
    model axis share one model, and all count.
    """
    if own_weight is None:
        return math.prod(
            group.size for name, group in mesh.axes if name not in local or name not in AXES
        )
    weight = torch.full((), own_weight, dtype=torch.float64, device=device)
    weight = all_reduce_flat(weight, mesh, local=tuple(axis for axis in local if axis in AXES))
    return torch.where(weight > 0, weight, 1.0)


# --- the values that loss_fn returns --------------------------------------------------------------


def _check_result(result: Any, has_aux: bool, weighted: bool) -> tuple[torch.Tensor, float, Any]:
    """Return the loss, the weight and the aux of a ``loss_fn`` result; raise if one is missing."""
    names = ["loss", *["weight"] * weighted, *["aux"] * has_aux]
    if len(names) > 1 and not (isinstance(result, tuple) and len(result) == len(names)):
        flags = " and ".join([*["has_aux=True"] * has_aux, *["weighted=True"] * weighted])
        count = "pair" if len(names) == 2 else "triple"
        result_text = (
            f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        )
        raise TypeError(
            f"with {flags} loss_fn must return a {count} ({', '.join(names)}); found {result_text}"
        )
    values = dict(zip(names, result if len(names) > 1 else (result,), strict=True))
    loss = values["loss"]
    if is_dtensor(loss):
        loss = loss.full_tensor()
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        result_text = _found_as_loss(loss, alone=len(names) == 1)
        raise TypeError(
            "loss_fn must return a floating-point scalar, the mean over this rank's batch; found "
            f"{result_text}"
        )
    return loss, check_weight(values["weight"]) if weighted else 1.0, values.get("aux")


def _found_as_loss(loss: Any, alone: bool) -> str:
    """Return what was found in place of a loss, and what to do if it is known."""
    kind = type(loss).__name__
    if isinstance(loss, torch.Tensor):
        return f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}: return its mean as a float"
    if loss is None:
        return "None: end loss_fn with return loss"
    if isinstance(loss, float | int):
        return f"{loss}, a number without a gradient: return the tensor, without .item()"
    if isinstance(getattr(loss, "loss", None), torch.Tensor):
        return f"{kind}: return its .loss"
    if alone and isinstance(loss, Mapping):
        return f"{kind}: return the loss alone, or (loss, aux) with has_aux=True"
    if alone and isinstance(loss, tuple):
        return f"{kind}: for (loss, aux) pass has_aux=True"
    return kind


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
    if isinstance(weight, torch.SymInt | torch.SymFloat):  # fs.trace records, and sizes are symbols
        return torch.sym_float(weight)
    try:
        weight_value = float(weight)
    except (TypeError, ValueError, RuntimeError):
        weight_value = math.nan
    if not 0 <= weight_value < math.inf:
        raise ValueError(
            "a weight must be one number, finite and not negative: zero for no data; found "
            f"{weight!r}"
        )
    return weight_value


def loss_value(loss: torch.Tensor) -> torch.Tensor:
    """Return the one element of a loss as a scalar without a graph, in float32 or wider."""
    value = loss.detach().to(torch.promote_types(loss.dtype, torch.float32))
    return value if value.ndim == 0 else value.reshape(())


def detached(x: Any) -> Any:
    """Return ``x`` without its autograd graph if it is a tensor, and ``x`` itself if not."""
    return x.detach() if isinstance(x, torch.Tensor) else x


def _clean(x: torch.Tensor, zero_weight: bool) -> torch.Tensor:
    # Why: infinity times zero is NaN, and a loss with weight zero must have no effect.
    return x.nan_to_num(0.0, 0.0, 0.0) if zero_weight else x


def _differentiable(leaf: torch.Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()
