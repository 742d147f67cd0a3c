"""``value_and_grad``: this rank's loss, and the gradient averaged over the data-parallel world.

``accumulate``: one gradient of several micro-batches, reduced each time or once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from funcshard._utils import transforms_active, tree, untraced
from funcshard.comm import Mesh
from funcshard.core.buffer_comm import all_reduce
from funcshard.core.collectives import psum
from funcshard.core.flat_buffer import views
from funcshard.core.grad_reducer import GradReducer, activate
from funcshard.plan import BufferPlan, check_reduce

__all__ = ["OnGrads", "Result", "accumulate", "detached", "evaluate", "split", "value_and_grad"]

OnGrads = Callable[[str, dict[str, torch.Tensor]], Mapping[str, torch.Tensor] | None]


def value_and_grad(
    loss_fn: Callable[..., Any], has_aux: bool = False, *, weighted: bool = False, on_grads: OnGrads | None = None
) -> Callable[..., tuple[Any, Any]]:
    """Turn a loss of shards into a function that returns the loss and its gradient, averaged over ranks.

    Collectives, and the units that stand on them, add over ranks; here the sum is divided by the number of ranks of the
    world that the units inside ``loss_fn`` are sharded over, or by the sum of the ranks' weights. So if every rank's loss
    is the mean over its part of the batch, the gradient is that of the mean over the whole batch.

    Arguments:
        loss_fn: ``loss_fn(shards, *rest, **kwargs)`` -> this rank's loss, a floating-point scalar; with ``weighted``
            ``(loss, weight)``; with ``has_aux`` ``(loss, aux)``, aux being anything; with both ``(loss, weight, aux)``.
        has_aux: whether ``loss_fn`` returns an aux.
        weighted: whether ``loss_fn`` returns this rank's weight in the mean, a number that is not negative: how many
            samples or tokens its loss is the mean of. A rank without data takes part with any batch of the right shape
            and weight zero; infinities and NaN of its loss and gradients count nothing either.
        on_grads: ``on_grads(unit, grads)``, called before each reduction of one of the unit's flat buffers with views of
            it, ``{path: gradient}`` of this rank, unreduced (times its weight). It may change them in place, or return
            ``{path: gradient}`` of those to replace.

    Returns:
        ``f(shards, *rest, **kwargs)`` -> ``(loss, grads)``, or ``((loss, aux), grads)``. ``loss`` is this rank's; tensors
        in ``aux`` are detached. With ``weighted`` ``((loss, weight), grads)``, or ``((loss, weight, aux), grads)``: the
        weighted mean over the world, and the sum of its weights; where that is zero, loss and gradients are too.
        ``grads`` is a pytree like ``shards``; it holds zeros where the loss does not depend on a shard, and ``None``
        for frozen shards, and for integers.

    Raises:
        TypeError: ``loss_fn`` did not return what is asked of it.
        ValueError: the units inside ``loss_fn`` belong to worlds of different sizes; a weight is negative or not finite;
            ``on_grads`` returned a leaf that the unit does not have, or of another shape.
        RuntimeError: a ``torch.func`` transform is around it.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: (leaves["w"] * x).sum(), plan.units[""], mesh)
        ...     loss_fn = lambda shards, x: f(shards[""], x)
        ...     loss, grads = fs.value_and_grad(loss_fn)(fs.shard(params, plan, mesh), float(mesh.rank))
        ...     return loss.item(), grads[""]["float32"].item()
        >>> fs.simulate(main, world_size=2)
        [(0.0, 0.5), (3.0, 0.5)]

    Source: ``jax.value_and_grad``; the mean is that of DistributedDataParallel.
    """

    def run(shards: Any, /, *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = lambda local: loss_fn(local, *rest, **kwargs)  # noqa: E731
        result, grads = evaluate(shards, [call], has_aux, weighted=weighted, on_grads=on_grads)
        return result.value(result.aux[0] if has_aux else None, has_aux, weighted), grads

    return run


class Result(NamedTuple):
    """What ``evaluate`` found besides gradients.

    Attributes:
        loss: this rank's mean over the calls; where weights are given, the world's weighted mean.
        weight: the sum of the world's weights, ``None`` where there are none.
        own: this rank's weight.
        aux: each call's aux.
    """

    loss: torch.Tensor
    weight: torch.Tensor | None
    own: float
    aux: list[Any]

    def value(self, aux: Any, has_aux: bool, weighted: bool) -> Any:
        """Return the loss, with what is asked for besides."""
        parts = (self.loss, *([self.weight] if weighted else []), *([aux] if has_aux else []))
        return parts if len(parts) > 1 else self.loss


@untraced
def evaluate(
    shards: Any,
    calls: Sequence[Callable[[Any], Any]],
    has_aux: bool,
    *,
    weighted: bool = False,
    once: bool = False,
    on_grads: OnGrads | None = None,
) -> tuple[Result, Any]:
    """Return the mean loss of several calls, one after another, and its gradient.

    Arguments:
        shards: what they are differentiated with respect to.
        calls: functions of the shards, each with a loss of its own.
        has_aux: see ``value_and_grad``.
        weighted: see ``value_and_grad``.
        once: whether the calls' unreduced gradients are added up and reduced once; otherwise each call's are reduced.
        on_grads: see ``value_and_grad``.
    """
    if transforms_active():
        raise RuntimeError(
            "value_and_grad stands on torch.autograd.grad, and cannot run inside a torch.func transform; use "
            "torch.func.grad there, which adds over ranks, and divide by their number, mesh.world_size"
        )
    leaves, unflatten = tree.flatten(shards)
    local = [leaf.detach().requires_grad_(_differentiable(leaf)) for leaf in leaves]
    direct: list[torch.Tensor | None] = [None] * len(local)
    auxes, total, own = [], torch.zeros(()), 0.0
    on_grad = None if on_grads is None else functools.partial(_show, on_grads)
    reducer = (GradReducer.reduce_once if once else GradReducer.reduce_each)(local, on_grad)
    with activate(reducer), torch.enable_grad():
        for i, call in enumerate(calls):
            loss, weight, aux = _split(call(unflatten(local)), has_aux, weighted)
            factor = weight if weighted else 1 / len(calls)
            zero_weight = factor == 0
            reducer.pre_backward(accumulating=i + 1 < len(calls), zero_weight=zero_weight)
            _backward(loss if factor == 1 else loss * factor, reducer, direct, zero_weight)
            value = loss.detach() if factor == 1 else _clean(loss.detach() * factor, zero_weight)
            total, own = value if i == 0 else total + value, own + weight
            auxes.append(tree.map(detached, aux))
            del loss  # frees the graph before the next forward
    mesh = _world(reducer)
    divisor: float | torch.Tensor = mesh.world_size
    world_weight = None
    if weighted:
        sums = psum(torch.stack([total.double(), total.new_tensor(own, dtype=torch.float64)]), mesh)
        divisor = torch.where(sums[1] > 0, sums[1], 1.0)
        total, world_weight = (sums[0] / divisor).to(total.dtype), sums[1]
    # A local leaf counts in the losses of the ranks that share its values only. Why sorted: every rank
    # has to add up these weights in the same order.
    sharing = {
        key: _weight_of(own, *key, total.device) if weighted else _ranks_of(*key)
        for key in sorted(set(reducer.local.values()), key=lambda key: (*key[0].shape.values(), key[1]))
    }
    divisors = {number: sharing[key] for number, key in reducer.local.items()}
    grads = [
        _gradient(number, leaf, direct[number], reducer, divisors.get(number, divisor))
        for number, leaf in enumerate(reducer.leaves)
    ]
    return Result(total, world_weight, own, auxes), unflatten(grads)


def _ranks_of(mesh: Mesh, local: tuple[str, ...]) -> int:
    """Number of ranks that share what is local along some axes."""
    return math.prod(group.size for name, group in mesh.axes if name not in local)


def _weight_of(own: float, mesh: Mesh, local: tuple[str, ...], device: torch.device) -> torch.Tensor:
    """Sum of the weights of the ranks that share what is local along some axes; 1 where that is zero."""
    weight = torch.tensor(own, dtype=torch.float64, device=device)
    weight = all_reduce(weight, mesh, local=local)
    return torch.where(weight > 0, weight, 1.0)


def _backward(loss: torch.Tensor, reducer: GradReducer, direct: list[torch.Tensor | None], zero_weight: bool) -> None:
    """Run backward; gradients of gathered shards go to the reducer, all others are added to ``direct``."""
    wanted = [number for number, leaf in enumerate(reducer.leaves) if leaf.requires_grad]
    if wanted and loss.requires_grad:
        loss = loss.view_as(loss)  # a node of its own, whose hook runs before those on the result of loss_fn
        # Why a hook: code inside this backward may run a backward of its own, so the reducer has to know its own one.
        begun = loss.register_hook(lambda _: reducer.enter_backward())
        try:
            # Why single-threaded, also on CUDA: context variables, such as the event log, hold in backward too.
            with torch.autograd.set_multithreading_enabled(False):
                found = torch.autograd.grad(loss, [reducer.leaves[number] for number in wanted], allow_unused=True)
        finally:
            begun.remove()
        for number, grad in zip(wanted, found, strict=True):
            if grad is not None:
                before, grad = direct[number], _clean(grad, zero_weight)
                direct[number] = grad if before is None else before + grad
    reducer.post_backward()


def _gradient(
    number: int, leaf: torch.Tensor, direct: torch.Tensor | None, reducer: GradReducer, divisor: float | torch.Tensor
) -> torch.Tensor | None:
    """Return the mean gradient of a leaf: its reductions, and ``direct``, which reached it without being gathered."""
    if number in reducer.frozen or not leaf.requires_grad:
        return None
    reduced = reducer.sums.get(number)
    if isinstance(divisor, torch.Tensor):
        divisor = divisor.to(leaf.device)  # the CPU where the leaf is offloaded
    if direct is None and reduced is None:
        return torch.zeros_like(leaf, requires_grad=False)
    whole = isinstance(divisor, float | int) and divisor == 1
    if direct is not None:
        total = direct if reduced is None else reduced + direct
        return total if whole else total / divisor
    assert reduced is not None
    return reduced if whole else reduced.div_(divisor)


def _show(on_grads: OnGrads, unit: str, buffer: BufferPlan, full: torch.Tensor) -> None:
    """Call ``on_grads`` with the leaves' gradients in ``full``, and write the replaced ones back."""
    title = unit or "(root)"
    grads = {leaf.path: view for leaf, view in zip(buffer.leaves, views(full, buffer), strict=True)}
    with torch.no_grad():
        replaced = on_grads(unit, dict(grads))
        if replaced is None:
            return
        if not isinstance(replaced, Mapping) or not replaced.keys() <= grads.keys():
            found = sorted(replaced.keys() - grads.keys()) if isinstance(replaced, Mapping) else type(replaced).__name__
            raise ValueError(
                f"on_grads must return None, or a dictionary from paths of unit {title!r} to gradients; found {found}, the "
                f"paths are {list(grads)[:6]}"
            )
        for path, grad in replaced.items():
            if grad is grads[path]:
                continue
            if grad.shape != grads[path].shape:
                raise ValueError(
                    f"on_grads must return gradients of their leaves' shapes; for {path!r} of unit {title!r} found "
                    f"{tuple(grad.shape)} instead of {tuple(grads[path].shape)}"
                )
            grads[path].copy_(grad)


def _world(reducer: GradReducer) -> Mesh:
    if len(reducer.worlds) > 1:
        raise ValueError(
            f"the units inside loss_fn must belong to worlds of one size, so that it is clear what the mean is over; "
            f"found sizes {sorted(reducer.worlds)}: run what is on another mesh outside, and pass its results in"
        )
    return next(iter(reducer.worlds.values()), Mesh())


def detached(x: Any) -> Any:
    """Return ``x`` without its graph, if it is a tensor."""
    return x.detach() if isinstance(x, torch.Tensor) else x


def _clean(x: torch.Tensor, zero_weight: bool) -> torch.Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0) if zero_weight else x


def _differentiable(leaf: torch.Tensor) -> bool:
    return leaf.is_floating_point() or leaf.is_complex()


def _split(result: Any, has_aux: bool, weighted: bool) -> tuple[torch.Tensor, float, Any]:
    """Take apart and check what ``loss_fn`` returned: loss, weight, aux."""
    names = ["loss", *["weight"] * weighted, *["aux"] * has_aux]
    if len(names) > 1 and not (isinstance(result, tuple) and len(result) == len(names)):
        flags = " and ".join([*["has_aux=True"] * has_aux, *["weighted=True"] * weighted])
        what = "pair" if len(names) == 2 else "triple"
        raise TypeError(f"with {flags} loss_fn must return a {what} ({', '.join(names)}); found {_found(result)}")
    parts = dict(zip(names, result if len(names) > 1 else (result,), strict=True))
    loss = parts["loss"]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}" if isinstance(loss, torch.Tensor) else repr(loss)
        hint = "" if len(names) > 1 or not isinstance(loss, tuple) else "; for (loss, aux) pass has_aux=True"
        raise TypeError(f"loss_fn must return a floating-point scalar, the mean over this rank's batch; found {found}{hint}")
    return loss, _weight(parts["weight"]) if weighted else 1.0, parts.get("aux")


def _found(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__


def _weight(weight: Any) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"a weight must be one number, finite and not negative: zero for no data; found {weight!r}")
    return number


def accumulate(
    loss_fn: Callable[..., Any],
    micro_batches: int,
    has_aux: bool = False,
    *,
    reduce: str = "each",
    weighted: bool = False,
    on_grads: OnGrads | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Do what ``value_and_grad`` does, one micro-batch after another, so that only one's activations exist at a time.

    The result is the mean over the micro-batches, weighted where weights are given: the loss and gradient of the whole
    batch, to rounding, if each micro-batch's loss is the mean over its samples and these are independent of each other.

    Arguments:
        loss_fn: as ``value_and_grad`` takes it, of shards, anything, and, as its last positional argument, the batch:
            a pytree of tensors whose dim 0 counts samples. It is called once for each micro-batch.
        micro_batches: into how many equal parts the batch is split along dim 0.
        has_aux: see ``value_and_grad``; aux becomes a list, one of each micro-batch.
        reduce: ``"each"`` reduces the gradients of each micro-batch, and adds up shards. ``"once"`` adds up this rank's
            unreduced gradients, which takes the memory of the full gradient of every unit, and reduces each unit once,
            during the last backward.
        weighted: see ``value_and_grad``; each micro-batch has its own weight.
        on_grads: see ``value_and_grad``; with ``"once"`` it sees the sum over micro-batches.

    Returns:
        ``f(shards, *rest, batch, **kwargs)``, with the results of ``value_and_grad``'s.

    Raises:
        ValueError: an argument that does not exist, or a batch that cannot be split. See also ``value_and_grad``.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([1.0, 2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda leaves, x: (x @ leaves["w"]).mean(), plan.units[""], mesh)
        ...     evaluate = fs.accumulate(lambda shards, x: f(shards[""], x), micro_batches=2, reduce="once")
        ...     loss, grads = evaluate(fs.shard(params, plan, mesh), torch.eye(2))
        ...     return loss.item(), grads[""]["float32"].item()
        >>> fs.simulate(main, world_size=2)
        [(1.5, 0.5), (1.5, 0.5)]

    Source: ``optax.MultiSteps``; ``"once"`` is ``no_sync`` of DistributedDataParallel and FSDP.
    """
    check_reduce(micro_batches, reduce)

    def run(shards: Any, /, *rest: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not rest:
            raise TypeError("the function takes (shards, *rest, batch), the batch as its last positional argument")
        *first, batch = rest
        calls = [
            functools.partial(lambda micro, local: loss_fn(local, *first, micro, **kwargs), micro)
            for micro in split(batch, micro_batches)
        ]
        once = reduce == "once"
        result, grads = evaluate(shards, calls, has_aux, weighted=weighted, once=once, on_grads=on_grads)
        return result.value(result.aux, has_aux, weighted), grads

    return run


def split(batch: Any, parts: int) -> list[Any]:
    """Split a pytree of tensors into equal parts along dim 0, as views."""
    leaves, unflatten = tree.flatten(batch)
    sizes = {leaf.shape[0] if isinstance(leaf, torch.Tensor) and leaf.ndim else type(leaf).__name__ for leaf in leaves}
    size = next(iter(sizes), None)
    if len(sizes) != 1 or not isinstance(size, int):
        raise ValueError(
            f"the batch must be a pytree of tensors with one size of dim 0, along which it is split into micro-batches; "
            f"found {sorted(map(str, sizes)) or 'no leaves'}: pass what is not to be split before the batch, or by keyword"
        )
    if size == 0 or size % parts:
        raise ValueError(
            f"dim 0 of the batch must be a multiple of the {parts} micro-batches; found {size}: choose a divisor, or pad "
            f"the batch and weigh the samples (weighted=True)"
        )
    pieces = [leaf.split(size // parts) for leaf in leaves]
    return [unflatten(list(piece)) for piece in zip(*pieces, strict=True)]
