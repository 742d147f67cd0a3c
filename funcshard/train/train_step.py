"""``make_train_step``: loss function and optimizer to one function from state to state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcshard._utils import tree, untraced
from funcshard.comm import Mesh
from funcshard.core import OnGrads, Shards, check_shards, detached, pmean, psum, value_and_grad
from funcshard.core import accumulate as accumulated
from funcshard.plan import Plan, check_reduce
from funcshard.train.clipping import clip_by_global_norm
from funcshard.train.optimizers import TorchOptimizer, apply_optimizer
from funcshard.train.scaler import GradScaler, ScalerState

__all__ = ["TrainState", "TrainStep", "make_train_step"]


class TrainState(NamedTuple):
    """Everything that training carries from one step to the next, as a pytree.

    Attributes:
        shards: this rank's parameters.
        buffers: the module's buffers.
        opt_state: the optimizer's state, of the trainable shards.
        step: number of steps taken.
        scaler: the state of the loss scaling, if there is one.

    Example:
        >>> import torch, funcshard as fs
        >>> state = fs.TrainState({"": {"float32": torch.ones(3)}}, {}, opt_state={}, step=0)
        >>> state._replace(step=1).step
        1
    """

    shards: Shards
    buffers: dict[str, torch.Tensor]
    opt_state: Any
    step: int
    scaler: ScalerState | None = None


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    plan: Plan,
    mesh: Mesh,
    *,
    has_aux: bool = False,
    mutable: bool = False,
    max_norm: float | None = None,
    accumulate: int = 1,
    reduce: str = "each",
    weighted: bool = False,
    on_grads: OnGrads | None = None,
    scaler: GradScaler | None = None,
) -> TrainStep:
    """Make the function ``step(state, batch) -> (state, metrics)`` of a loss and an optimizer.

    With ``torch_optimizer`` the state is donated: ``step`` updates its tensors in place and returns them in the new
    state, and the old state must not be used again. A pair of TorchOpt's makes new tensors.

    Arguments:
        loss_fn: ``loss_fn(shards, buffers, batch)`` -> this rank's loss; with ``has_aux`` ``(loss, aux)``; with
            ``mutable`` ``(loss, new_buffers)``; with ``weighted`` ``(loss, weight)``; with all three
            ``(loss, weight, new_buffers, aux)``.
        optimizer: what ``torch_optimizer`` returned, or a pair ``(init, update)`` in TorchOpt's style.
        plan: the plan of the shards.
        mesh: the ranks.
        has_aux: whether ``loss_fn`` returns something besides, which goes to ``metrics["aux"]``, each rank's its own.
        mutable: whether ``loss_fn`` returns new buffers. Every rank takes rank 0's, as DistributedDataParallel does; with
            ``weighted``, those of the first rank whose weight is not zero. A micro-batch takes those of the one before;
            one of weight zero changes none.
        max_norm: clip the gradient to this global norm; its norm before is ``metrics["grad_norm"]``.
        accumulate: number of micro-batches that the batch is split into along dim 0; see ``accumulate``. With more than
            one, ``metrics["aux"]`` is a list, one of each.
        reduce: ``"each"`` or ``"once"``; see ``accumulate``.
        weighted: whether ``loss_fn`` returns this rank's weight in the mean; see ``value_and_grad``. The world's is
            ``metrics["weight"]``; where it is zero no rank had data, and the state is returned as it was.
        on_grads: see ``value_and_grad``; where there is a ``scaler``, gradients are scaled there.
        scaler: scales the loss, and leaves out steps whose gradients have infinities or NaN on any rank: shards, optimizer
            state and ``step`` stay as they were, buffers do not. ``metrics["scale"]`` is the scale that was used,
            ``metrics["found_inf"]`` whether the step was left out.

    Returns:
        The step. ``step.init(shards, buffers)`` makes the first state; ``metrics["loss"]`` is the mean over the world.

    Raises:
        TypeError: ``optimizer`` is of neither kind.
        ValueError: ``accumulate`` or ``reduce`` is not of the values above.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(3, 1))
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     sharded = fs.fully_shard(apply, plan, mesh)
        ...     loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()
        ...     step = fs.make_train_step(loss_fn, fs.torch_optimizer(torch.optim.SGD, lr=0.1), plan, mesh)
        ...     state = step.init(fs.shard(params, plan, mesh), buffers)
        ...     losses = []
        ...     for _ in range(3):
        ...         state, metrics = step(state, torch.ones(2, 3))
        ...         losses.append(metrics["loss"])
        ...     return losses[2] < losses[0]
        >>> [bool(fell) for fell in fs.simulate(main, world_size=2)]
        [True, True]
    """
    if not isinstance(optimizer, TorchOptimizer) and not (isinstance(optimizer, tuple) and len(optimizer) == 2):
        raise TypeError(
            f"optimizer must be a pair (init, update), as TorchOpt's are, or torch_optimizer(torch.optim.AdamW, lr=...); "
            f"found {type(optimizer).__name__}"
        )

    check_reduce(accumulate, reduce)

    def evaluate(
        shards: Shards, buffers: dict[str, torch.Tensor], batch: Any, scaling: ScalerState | None
    ) -> tuple[tuple[Any, ...], Shards]:
        """Return ``(loss, weight, own weight, buffers, aux)`` and the gradient, both scaled."""
        now, own = buffers, 0.0

        def loss_and_rest(shards: Shards, batch: Any) -> Any:
            nonlocal now, own
            parts = _parts(loss_fn(shards, now, batch), has_aux, mutable, weighted)
            if not weighted or float(parts["weight"]) > 0:  # what is no data leaves no trace in statistics either
                now = tree.map(detached, parts.get("new_buffers", now))
            if scaler is not None and scaling is not None:
                parts["loss"] = scaler.scale(parts["loss"], scaling)
            if not weighted:
                return parts["loss"], parts.get("aux")
            own += float(parts["weight"])
            return parts["loss"], parts["weight"], parts.get("aux")

        options: Any = {"weighted": weighted, "on_grads": on_grads}
        if accumulate > 1:
            run = accumulated(loss_and_rest, accumulate, True, reduce=reduce, **options)
        else:
            run = value_and_grad(loss_and_rest, True, **options)
        result, grads = run(shards, batch)
        loss, weight, aux = result if weighted else (result[0], None, result[1])
        return (loss, weight, own, now, aux), grads

    return TrainStep(evaluate, optimizer, plan, mesh, has_aux, mutable, max_norm, scaler)


def _parts(result: Any, has_aux: bool, mutable: bool, weighted: bool) -> dict[str, Any]:
    """What a loss function returned, by name."""
    names = ["loss", *["weight"] * weighted, *["new_buffers"] * mutable, *["aux"] * has_aux]
    if len(names) == 1 and not isinstance(result, tuple):
        return {"loss": result}
    if not isinstance(result, tuple) or len(result) != len(names):
        wanted = names[0] if len(names) == 1 else f"({', '.join(names)})"
        found = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise TypeError(
            f"with has_aux={has_aux} and mutable={mutable}{' and weighted=True' if weighted else ''} loss_fn must return "
            f"{wanted}; found {found}: for (loss, aux) pass has_aux=True, for (loss, new_buffers) mutable=True, for "
            f"(loss, weight) weighted=True"
        )
    return dict(zip(names, result, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class TrainStep:
    """A training step; made by ``make_train_step``."""

    evaluate: Callable[..., tuple[Any, Any]]
    optimizer: Any
    plan: Plan
    mesh: Mesh
    has_aux: bool
    mutable: bool
    max_norm: float | None
    scaler: GradScaler | None

    def init(self, shards: Shards, buffers: dict[str, torch.Tensor]) -> TrainState:
        """Return the state before the first step."""
        check_shards(self.plan, shards)
        scaling = None if self.scaler is None else self.scaler.init(self.mesh)
        return TrainState(shards, buffers, self.optimizer[0](_trainable(shards, self.plan)), 0, scaling)

    @untraced
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one step on this rank's ``batch``; return the new state and the metrics."""
        plan, mesh = self.plan, self.mesh
        scaler, scaling = self.scaler, state.scaler
        (loss, weight, own, buffers, aux), grads = self.evaluate(state.shards, state.buffers, batch, scaling)
        metrics: dict[str, Any] = {}
        if scaler is not None and scaling is not None:
            loss = loss / scaling.scale.to(loss.device)
            grads, metrics["found_inf"] = scaler.unscale(grads, scaling, mesh)
            metrics["scale"] = scaling.scale
            scaling = scaler.update(scaling, metrics["found_inf"])
        metrics |= {"loss": pmean(loss, mesh)} if weight is None else {"loss": loss, "weight": weight}
        if self.max_norm is not None:
            grads, metrics["grad_norm"] = clip_by_global_norm(grads, plan, mesh, self.max_norm)
        if self.has_aux:
            metrics["aux"] = aux
        if weight is not None and not weight > 0:  # the same on every rank
            return state, metrics
        if self.mutable:
            buffers = _broadcast(buffers, mesh, 0 if weight is None else _first_with(own, mesh))
        if metrics.get("found_inf", False):
            return state._replace(buffers=buffers, scaler=scaling), metrics
        with torch.no_grad():
            mine = _trainable(state.shards, plan)
            new, opt_state = apply_optimizer(self.optimizer, _trainable(grads, plan), state.opt_state, mine)
        shards = {name: {**state.shards[name], **new.get(name, {})} for name in state.shards}
        return TrainState(shards, buffers, opt_state, state.step + 1, scaling), metrics


def _trainable(shards: Shards, plan: Plan) -> Shards:
    """The part of a tree of shards that has gradients."""
    return {
        unit.name: {buffer.key: shards[unit.name][buffer.key] for buffer in unit.buffers if buffer.trainable}
        for unit in plan.unit_list
    }


def _first_with(weight: float, mesh: Mesh) -> int:
    """The first rank whose weight is not zero; some rank's is not."""
    counts = torch.zeros(mesh.world_size, device=mesh.device)
    counts[mesh.rank] = float(weight > 0)
    return int(psum(counts, mesh).argmax())


def _broadcast(buffers: dict[str, torch.Tensor], mesh: Mesh, rank: int) -> dict[str, torch.Tensor]:
    """Give every rank the buffers of one."""
    flat, unflatten = tree.flatten(buffers)
    copies = [buffer.contiguous().clone() for buffer in flat]
    src = {"shard": rank % mesh.shard.size, "replicate": rank // mesh.shard.size}
    for name, group in mesh.axes:
        for work in [group.broadcast(copy, src[name]) for copy in copies]:
            work.wait()
    return unflatten(copies)
