"""``make_train_step``: one function from state and batch to the new state and metrics.

A step evaluates the loss and its gradient, unscales and clips the gradient, and runs the optimizer.
Each of these is its own function in this wing or in ``funcshard.core``.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

import torch

from funcshard._utils import (
    Warned,
    absent,
    check_flag,
    check_number,
    is_dtensor,
    local_part,
    outline,
    tree,
    untraced_with_warning,
)
from funcshard.comm import Mesh, at_own_rank, check_all_same, current_recording, in_graph, text_of
from funcshard.core import (
    GradientFunction,
    GradientOptions,
    OnGrads,
    OnReduceScattered,
    Shards,
    accumulating_function,
    all_reduce_flat,
    check_cut,
    check_fits,
    check_weight,
    detached,
    gradient_function,
    loss_value,
)
from funcshard.plan import AXES, Plan, Reduce, check_reduce, check_reduce_units, position_of
from funcshard.train.choice import choose_tree, same_form
from funcshard.train.clipping import clip_by_global_norm, global_norm
from funcshard.train.optimizer_pair import TorchOptimizer, check_optimizer
from funcshard.train.optimizers import apply_optimizer
from funcshard.train.scaler import GradScaler, ScalerState
from funcshard.train.step_checks import (
    check_loss_fn,
    check_scaler,
    found_as_state,
    texts_of_optimizer,
)
from funcshard.train.train_state import TrainState, copy

_log = logging.getLogger("funcshard.train")

T = TypeVar("T")

_REMEDIES = {
    "zero_grad": "leave it out; each call computes new gradients",
    "backward": "leave it out; step(state, batch) runs forward, backward and the optimizer",
    "step": "call it: state, metrics = step(state, batch)",
    "state_dict": "save its state with fs.save(path, state, plan, mesh)",
    "load_state_dict": "state = fs.restore(path, plan, mesh) is the state that the step takes",
    "eval": "call the function of fully_shard(apply.eval(), plan, mesh) to evaluate",
    "train": "the mode is that of apply: make the step from fully_shard(apply.train(), plan, mesh)",
}


class GradientKeywords(TypedDict, total=False):
    """Options of ``accumulate`` that ``make_train_step`` takes too."""

    has_aux: bool
    weighted: bool
    accumulate: int
    reduce: Reduce
    on_grads: OnGrads | None
    on_reduce_scattered: OnReduceScattered | None
    divisor: float | None


def make_train_step(
    loss_fn: Callable[..., Any],
    optimizer: Any,
    plan: Plan,
    mesh: Mesh,
    *,
    mutable: bool = False,
    max_norm: float | None = None,
    scaler: GradScaler | None = None,
    donate: bool = True,
    **gradient: Unpack[GradientKeywords],
) -> TrainStep:
    """Return a training step of loss and optimizer: ``step(state, batch) -> (state, metrics)``.

    Start with ``state = step.init(shards, buffers)``, a ``TrainState``. Every rank calls ``step``
    with its own part of the batch. The step averages the gradient over the world, and the optimizer
    updates this rank's shards with it.

    With ``torch_optimizer`` or ``muon`` the state is donated: ``step`` updates its tensors in place
    and returns them in the new state. To use the old state or its shards afterwards is an error. To
    keep a state, call ``fs.copy(state)`` before the step, or pass ``donate=False``. A pair in the
    style of TorchOpt or optax makes new tensors, and leaves the old state as it was.

    Arguments:
        loss_fn: ``loss_fn(shards, buffers, batch)`` returns this rank's loss, the mean over its
            part of the batch. Options add further results. With ``has_aux`` it returns
            ``(loss, aux)``, with ``mutable`` ``(loss, new_buffers)``, with ``weighted``
            ``(loss, weight)``, and with all three ``(loss, weight, new_buffers, aux)``.
            ``value_and_grad`` or ``accumulate`` of such a function is also a ``loss_fn``, with the
            options that it has: ``make_train_step(fs.accumulate(loss_fn, 4, weighted=True), ...)``.
        optimizer: the pair that ``torch_optimizer`` or ``muon`` returned, or a pair
            ``(init, update)`` in the style of TorchOpt and optax.
        plan: the plan of the shards.
        mesh: the ranks. Every rank must call ``make_train_step`` with the same optimizer and
            options, which is checked; functions are compared by their names.
        mutable: whether ``loss_fn`` returns new buffers, such as running statistics. After the step
            every rank has the buffers of rank 0, as in DistributedDataParallel; with ``weighted``,
            those of the first rank whose weight is not zero. That holds along the data axes: ranks
            that differ along a model axis keep their own. Each micro-batch gets the buffers that
            the one before it returned. The buffers from a micro-batch of weight zero are dropped.
        max_norm: clip the gradient to this global norm; ``metrics["grad_norm"]`` is the norm before
            clipping. ``math.inf`` for the norm without clipping, ``None`` for neither.
        scaler: scales the loss, and skips a step whose gradients have infinities or NaN on any
            rank. A skipped step leaves shards, optimizer state and ``state.step`` unchanged, but
            updates buffers. ``metrics["scale"]`` is the scale that was used, and
            ``metrics["found_inf"]`` tells whether the step was skipped.
        donate: whether the step may update the state in place. With ``False`` it copies the
            trainable shards and the optimizer's state first, and the old state stays as it was.
        gradient: options of ``accumulate`` for a plain ``loss_fn``: ``has_aux``, ``weighted``,
            ``reduce``, ``on_grads``, ``on_reduce_scattered``, ``divisor``; and ``accumulate``, its
            number of micro-batches.

            An aux becomes ``metrics["aux"]``, which is a list if the batch is split, and is not
            reduced. ``metrics["weight"]`` is the sum of the weights over the world. If it is zero,
            no rank had data, and the step returns the state unchanged. With a ``scaler``, hooks see
            scaled gradients.

    Returns:
        The step. ``step.init(shards, buffers)`` returns the first state. ``step(state, batch)``
        returns the new state and the metrics, a dictionary. ``metrics["loss"]`` is the mean over
        the world, the same on every rank. ``metrics["local_loss"]`` is the mean over this rank's
        own batch, zero if that has no weight. Both are in float32, or in the loss's own dtype if
        that is wider. ``metrics["lr"]`` is the learning rate of the step,
        if the optimizer comes from ``torch_optimizer`` or ``muon``; with groups, that of the leaves
        of no group. ``make_meter`` makes a log of all this.

    Raises:
        TypeError: ``optimizer`` is neither kind of pair, or an option is of another type. When the
            step runs: ``loss_fn`` returns something else than the options say.
        ValueError: the plan has no trainable leaf; ``accumulate`` is not a whole number of at least
            1, ``reduce`` is another value or names no unit of the plan, ``max_norm`` is not
            positive, or ``divisor`` not positive and finite; ``mesh`` does not have the plan's
            shape, the optimizer was made with another plan, or the ranks' arguments differ. In
            ``step.init``: the shards are those of another plan. When the step runs: the errors of
            ``value_and_grad``; only one of step and state has a scaler.
        RuntimeError: when the step runs: the state was donated to an earlier step.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(3, 1))
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     sharded = fs.fully_shard(apply, plan, mesh)
        ...     loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()
        ...     optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        ...     step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
        ...     state = step.init(fs.shard(params, plan, mesh), buffers)
        ...     losses = []
        ...     for _ in range(3):
        ...         state, metrics = step(state, torch.ones(2, 3))
        ...         losses.append(metrics["loss"])
        ...     return losses[2] < losses[0]
        >>> [bool(fell) for fell in fs.simulate(main, world_size=2)]
        [True, True]
    """
    check_fits(plan, mesh)
    function = _gradient_function(loss_fn, mesh, gradient)
    check_loss_fn(function.loss_fn)
    check_optimizer(optimizer, plan)
    options, micro_batches = function.options, function.micro_batches
    has_aux, weighted = options.has_aux, options.weighted
    check_scaler(scaler)
    check_reduce_units(options.reduce, plan.units)
    for name, flag in {"mutable": mutable, "donate": donate}.items():
        check_flag(name, flag)
    if max_norm is not None:
        remedy = "pass math.inf for the norm alone"
        check_number(
            "max_norm", max_norm, above=0, infinite=True, none="for no clipping", remedy=remedy
        )
    if not any(buffer.trainable for unit in plan.unit_list for buffer in unit.buffers):
        raise ValueError(
            "a training step needs a trainable leaf; found none in the plan: set requires_grad on "
            "the module's parameters before make_functional, or on its params before make_plan"
        )
    compared = {
        "has_aux": has_aux, "mutable": mutable, "max_norm": max_norm, "accumulate": micro_batches or 1,
        "reduce": options.reduce, "weighted": weighted, "divisor": options.divisor, "scaler": scaler, "donate": donate,
    }  # fmt: skip
    texts = texts_of_optimizer(optimizer) | {
        name: text_of(value) for name, value in compared.items()
    }
    check_all_same(mesh, {"the plan": plan.fingerprint(), **texts}, "make_train_step")
    inner = dataclasses.replace(options, mesh=mesh, has_aux=True)

    def evaluate(
        shards: Shards, buffers: dict[str, torch.Tensor], batch: Any, scaling: ScalerState | None
    ) -> tuple[tuple[Any, ...], Shards]:
        """Return losses, weights, buffers and aux, and the gradient; losses and gradient scaled."""
        current_buffers = buffers
        own_weight = 0.0
        own_total: Any = 0.0

        def loss_and_rest(shards: Shards, batch: Any) -> Any:
            nonlocal current_buffers, own_weight, own_total
            results = _named_results(
                function.loss_fn(shards, current_buffers, batch), has_aux, mutable, weighted
            )
            # A batch of weight zero is no data, so running statistics must not see it either.
            weight = check_weight(results["weight"]) if weighted else 1.0
            if mutable and weight > 0:
                _check_names(results["new_buffers"], current_buffers)
                current_buffers = tree.map(detached, results["new_buffers"])
            if scaler is not None and scaling is not None:
                results["loss"] = scaler.scale(results["loss"], scaling)
            if not weighted:
                return results["loss"], results.get("aux")
            own_weight += weight
            if weight > 0:  # a loss of weight zero may be NaN
                own_total = own_total + loss_value(results["loss"]) * weight
            return results["loss"], weight, results.get("aux")

        if micro_batches is None:
            run = gradient_function(loss_and_rest, inner)
        else:
            run = accumulating_function(loss_and_rest, micro_batches, inner)
        result, grads = run(shards, batch)
        loss, weight, aux = result if weighted else (result[0], None, result[1])
        own_loss = loss
        if weighted:
            own_loss = own_total / own_weight if own_weight > 0 else torch.zeros_like(loss)
        return (loss, own_loss, weight, own_weight, current_buffers, aux), grads

    hooked = options.on_grads is not None or options.on_reduce_scattered is not None
    owns_grads = options.divisor is None and not hooked and _divides_all_gradients(plan)
    parts = has_aux, mutable, max_norm, scaler, donate, owns_grads
    return TrainStep(evaluate, optimizer, plan, mesh, *parts, getattr(optimizer[1], "rate", None))


def _gradient_function(loss_fn: Any, mesh: Mesh, keywords: GradientKeywords) -> GradientFunction:
    """Return a loss function with the options of its gradient."""
    if isinstance(loss_fn, GradientFunction):
        if keywords:
            raise TypeError(
                "make_train_step takes options of the gradient in one place; found "
                f"{min(keywords)!r} beside a function of value_and_grad or accumulate: pass it "
                "there"
            )
        given_mesh = loss_fn.options.mesh
        if given_mesh is not None and given_mesh.shape != mesh.shape:
            raise ValueError(
                f"the loss function and the step must have one mesh; found {given_mesh.shape} and "
                f"{mesh.shape}: leave mesh= out of value_and_grad or accumulate"
            )
        return loss_fn
    own_options = {name: value for name, value in keywords.items() if name != "accumulate"}
    options = GradientOptions(mesh=mesh, **own_options)  # type: ignore[arg-type]
    count = check_reduce(keywords.get("accumulate", 1), options.reduce, "accumulate")
    if count == 1:
        return gradient_function(loss_fn, options)
    return accumulating_function(loss_fn, count, options)


def _check_names(new_buffers: Any, buffers: Any) -> None:
    """Raise unless the new buffers are a dictionary with the names of the old ones."""
    if isinstance(buffers, Mapping) and (
        not isinstance(new_buffers, Mapping) or new_buffers.keys() != buffers.keys()
    ):
        raise TypeError(
            "with mutable=True loss_fn must return the new buffers, under the names "
            f"{sorted(buffers)[:4]}; found {outline(new_buffers)}: the order of its results is "
            "(loss, weight, new_buffers, aux)"
        )


def _named_results(result: Any, has_aux: bool, mutable: bool, weighted: bool) -> dict[str, Any]:
    """Return the results of a loss function by name."""
    names = ["loss", *["weight"] * weighted, *["new_buffers"] * mutable, *["aux"] * has_aux]
    if len(names) == 1 and not isinstance(result, tuple):
        return {"loss": result}
    if not isinstance(result, tuple) or len(result) != len(names):
        found_text = f"a tuple of {len(result)}" if isinstance(result, tuple) else outline(result)
        raise TypeError(
            f"with has_aux={has_aux}, mutable={mutable} and weighted={weighted} loss_fn must return "
            f"({', '.join(names)}); found {found_text}: for (loss, aux) pass has_aux=True, for "
            "(loss, new_buffers) mutable=True, for (loss, weight) weighted=True"
        )
    return dict(zip(names, result, strict=True))


def _divides_all_gradients(plan: Plan) -> bool:
    """Return whether the mean over ranks divides every gradient, which gives it its own memory.

    Autograd returns an undivided gradient, which can share memory with a tensor of the user.
    """
    local = {axis for unit in plan.unit_list for buffer in unit.buffers for axis in buffer.local}
    return plan.world_size > 1 and not local.intersection(AXES)


@dataclass(frozen=True, slots=True, eq=False)
class TrainStep:
    """A training step; made by ``make_train_step``.

    Attributes:
        evaluate: ``evaluate(shards, buffers, batch, scaling)``, the loss function's results and the
            gradient.
        optimizer: the pair of functions.
        plan: the plan of the shards.
        mesh: the ranks.
        has_aux: whether the loss function returns an aux.
        mutable: whether the loss function returns new buffers.
        max_norm: the bound of the gradient's norm; ``math.inf`` for the norm alone, ``None`` for
            neither.
        scaler: the loss scaling; ``None`` without.
        donate: whether the state may be updated in place.
        owns_grads: whether no one else can hold the memory of the gradients, so that they may be
            unscaled and clipped in place.
        rate: the learning rate, a number or a function of the step; ``None`` if it is not known.
        warned: whether the step has said that ``torch.compile`` compiles nothing of it.
    """

    evaluate: Callable[..., tuple[Any, Any]]
    optimizer: Any
    plan: Plan
    mesh: Mesh
    has_aux: bool
    mutable: bool
    max_norm: float | None
    scaler: GradScaler | None
    donate: bool
    owns_grads: bool
    rate: Any = None
    warned: Warned = field(default_factory=Warned)

    def __repr__(self) -> str:
        return f"<make_train_step of {self.optimizer!r}, plan {self.plan.fingerprint()}, {self.mesh!r}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> TrainStep:
        return self  # as for a Python function: its results do not depend on what it keeps

    def __reduce__(self) -> Any:
        raise TypeError(
            "a training step cannot be pickled, because it holds functions and the connections of "
            "its mesh: save its state with fs.save(path, state, plan, mesh), and make the step "
            "anew in the other process"
        )

    if not TYPE_CHECKING:  # which then still knows what this class lacks

        def __getattr__(self, name: str) -> Any:
            raise absent("a training step", name, _REMEDIES)

    def init(self, shards: Shards, buffers: dict[str, torch.Tensor]) -> TrainState:
        """Return the state before the first step."""
        check_cut(self.plan, shards)
        scaling = None if self.scaler is None else self.scaler.init(self.mesh)
        return TrainState(
            shards, buffers, self.optimizer[0](_trainable(shards, self.plan)), 0, scaling
        )

    @property
    def schedules(self) -> dict[str, Callable[[int], Any]]:
        """The optimizer's options that are functions of the number of steps, by name."""
        return dict(getattr(self.optimizer[1], "schedules", {}))

    def _check(self, state: Any) -> None:
        """Raise unless ``state`` is a training state, with a state of loss scaling if need be."""
        if not isinstance(state, TrainState):
            raise TypeError(
                "a step takes (state, batch) and returns (state, metrics); the state must be the "
                f"TrainState of step.init, or of the step before; found {found_as_state(state)}"
            )
        if (state.scaler is None) != (self.scaler is None):
            scaling = "None" if self.scaler is None else "scaler.init(mesh)"
            raise ValueError(
                "step and state must both have a scaler, or neither; found one of them alone: set "
                f"it with state._replace(scaler={scaling})"
            )

    @untraced_with_warning(
        "torch.compile compiles nothing of a training step, whose collectives run between graphs: "
        "compile the whole step with fs.trace(step, state, batch).compile(), or its units with "
        "fully_shard(compiler=torch.compile)"
    )
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one step on this rank's ``batch``; return the new state and the metrics."""
        self._check(state)
        _log.debug("step %d begins", state.step + 1)
        plan, mesh = self.plan, self.mesh
        scaler, scaling = self.scaler, state.scaler
        results, grads = self.evaluate(state.shards, state.buffers, batch, scaling)
        loss, own_loss, weight, own_weight, buffers, aux = results
        loss, own_loss = loss_value(loss), loss_value(own_loss)
        recording = current_recording()
        if recording is not None:
            recording.updates = True
        metrics: dict[str, Any] = {}
        if self.rate is not None:
            metrics["lr"] = self.rate
        if callable(self.rate):
            steps = state.opt_state["steps"]
            # Why by name: a file of graphs has the names of schedules.
            metrics["lr"] = (
                self.rate(steps) if recording is None else recording.number(self.rate, steps)
            )
        if scaler is not None and scaling is not None:
            loss, own_loss = (each / scaling.scale.to(each.device) for each in (loss, own_loss))
            grads, metrics["found_inf"] = scaler.unscale(
                grads, scaling, mesh, donate=self.owns_grads, plan=plan
            )
            metrics["scale"] = scaling.scale
            scaling = scaler.update(scaling, metrics["found_inf"])
        metrics |= (
            {"loss": all_reduce_flat(loss.detach().clone(), mesh) / mesh.world_size}
            if weight is None
            else {"loss": loss, "weight": weight}
        )
        metrics["local_loss"] = own_loss
        if self.max_norm is not None:
            if not isinstance(self.max_norm, torch.Tensor) and math.isinf(self.max_norm):
                metrics["grad_norm"] = global_norm(grads, plan, mesh)
            else:
                # Unscaled gradients have memory of their own.
                grads, metrics["grad_norm"] = clip_by_global_norm(
                    grads, plan, mesh, self.max_norm, donate=scaler is not None
                )
        if self.has_aux:
            metrics["aux"] = aux
        recorded = recording is not None
        # The weight is the world's sum, so every rank returns here.
        if weight is not None and not recorded and not _has_data(weight):
            return state, metrics
        if self.mutable:
            buffers = _broadcast(
                buffers, mesh, 0 if weight is None else _first_rank_with(own_weight, mesh)
            )
        if not recorded and metrics.get("found_inf", False):
            return state._replace(buffers=buffers, scaler=scaling), metrics
        skips = recorded and (weight is not None or scaler is not None)
        with torch.no_grad():
            trainable, opt_state = _trainable(state.shards, plan), state.opt_state
            if (skips or not self.donate) and isinstance(self.optimizer, TorchOptimizer):
                trainable, opt_state = copy((trainable, opt_state))
            new, opt_state = apply_optimizer(
                self.optimizer, _trainable(grads, plan), opt_state, trainable
            )
        _log.debug("step %d ends", state.step + 1)
        shards = {name: {**state.shards[name], **new.get(name, {})} for name in state.shards}
        state_after = TrainState(shards, buffers, opt_state, state.step + 1, scaling)
        if skips:
            state_after = self._chosen(state, state_after, weight, metrics.get("found_inf"))
        return state_after, metrics

    def _chosen(
        self,
        before: TrainState,
        after: TrainState,
        weight: torch.Tensor | None,
        found_inf: torch.Tensor | None,
    ) -> TrainState:
        """Return one of two states, for a graph, in which Python cannot branch.

        Arguments:
            before: the state before a step that may be skipped.
            after: the state after it, if it is not skipped.
            weight: the sum of all weights, which skips the whole step if it is zero.
            found_inf: whether to skip the update.
        """
        recording = current_recording()
        assert recording is not None, "a step that runs returns early"
        # The optimizer made its state, and a skipped step has none.
        if not same_form(before, after):
            recording.replayable = False
            return after
        if found_inf is not None:
            kept = choose_tree(found_inf, before, after)
            after = kept._replace(buffers=after.buffers, scaler=after.scaler)
        return after if weight is None else choose_tree(weight <= 0, before, after)


def _trainable(shards: Shards, plan: Plan) -> Shards:
    """Return the shards of a tree that have gradients."""
    return {
        unit.name: {
            buffer.key: shards[unit.name][buffer.key] for buffer in unit.buffers if buffer.trainable
        }
        for unit in plan.unit_list
    }


def _has_data(weight: torch.Tensor) -> bool:
    """Return whether the sum of all weights is not zero; the host waits for it."""
    return bool(weight > 0)


def _first_rank_with(weight: float, mesh: Mesh) -> int:
    """Return the first rank whose ``weight`` is not zero; at least one rank's must not be."""
    has_data = at_own_rank(
        torch.full((), 1.0 if weight > 0 else 0.0, dtype=torch.float32, device=mesh.device), mesh
    )
    first: int = all_reduce_flat(has_data, mesh).argmax().item()  # type: ignore[assignment]
    return first


def _broadcast(buffers: dict[str, torch.Tensor], mesh: Mesh, rank: int) -> dict[str, torch.Tensor]:
    """Return copies of the buffers of ``rank``, on every rank along the data axes.

    Along a model axis each rank keeps its own, because buffers may be parts of a whole there, such
    as the statistics of slices, or of other experts.
    """
    flat, unflatten = tree.flatten(buffers)
    copies = [buffer.contiguous().clone() for buffer in flat]
    src = position_of(rank, mesh.shape)
    for axis in ("shard", "replicate"):
        if mesh.groups[axis].size > 1:
            group = in_graph(mesh.groups[axis], axis)
            for work in [group.broadcast(_part(buffer), src[axis]) for buffer in copies]:
                work.wait()
    return unflatten(copies)


def _part(buffer: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, and any other tensor itself."""
    return local_part(buffer) if is_dtensor(buffer) else buffer
