"""``make_train_step``: one function from state and batch to the new state and metrics."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from funcshard._utils import tree
from funcshard._utils.options import check_flag, check_number, outline, with_remedies
from funcshard._utils.tensors import is_dtensor
from funcshard._utils.torch_private import local_part, untraced_with_warning
from funcshard.comm import (
    UNDO,
    Mesh,
    Op,
    Topology,
    at_own_rank,
    check_all_same,
    in_graph,
    text_of,
)
from funcshard.core import (
    BufferComm,
    GradientFunction,
    GradientKeywords,
    GradientOptions,
    Shards,
    all_reduce_flat,
    check_cut,
    check_fits,
    check_weight,
    detached,
    evaluate,
    loss_value,
    named_results,
    start_reduce,
)
from funcshard.plan import (
    AXES,
    Plan,
    Reduce,
    check_reduce,
    check_reduce_units,
    current_recording,
    position_of,
    trainable_buffers,
)
from funcshard.train.clipping import clip_by_global_norm, global_norm
from funcshard.train.matrix_step import PairStep, PerMatrixStep
from funcshard.train.muon_step import MuonStep
from funcshard.train.optimizer_step import TorchOptimizer, TorchStep, apply_update
from funcshard.train.optimizers import check_optimizer
from funcshard.train.scaler import GradScaler
from funcshard.train.train_state import TrainState, choose_tree, copy, same_form

_log = logging.getLogger("funcshard.train")

_REMEDY = "leave it out; step(state, batch) runs forward, backward and the optimizer"


class StepKeywords(GradientKeywords, total=False):
    """Options of ``accumulate`` that ``make_train_step`` takes too."""

    has_aux: bool
    accumulate: int
    reduce: Reduce


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
    **gradient: Unpack[StepKeywords],
) -> TrainStep:
    """Return a training step of loss and optimizer: ``step(state, batch) -> (state, metrics)``.

    Start with ``state = step.init(shards, buffers)``, a ``TrainState``. Call ``step`` on every rank
    with its own part of your batch. The step averages the gradient over the world, and the
    optimizer updates this rank's shards.

    With ``torch_optimizer``, ``muon`` or ``per_matrix`` the state is donated: ``step`` updates its
    tensors in place, and you can't use the old state or its shards afterwards. To keep a state,
    call ``fs.copy(state)`` before the step, or pass ``donate=False``.

    Arguments:
        loss_fn: your ``loss_fn(shards, buffers, batch)`` returns this rank's loss, the mean over
            its part of the batch. Options add further results. With ``has_aux`` return
            ``(loss, aux)``, with ``mutable`` ``(loss, new_buffers)``, with ``weighted``
            ``(loss, weight)``, and with all three ``(loss, weight, new_buffers, aux)``. You can
            also pass ``value_and_grad`` or ``accumulate`` of such a function, with their options:
            ``make_train_step(fs.accumulate(loss_fn, 4, weighted=True), ...)``.
        optimizer: the pair of ``torch_optimizer``, ``muon`` or ``per_matrix``, or a pair
            ``(init, update)`` in the style of TorchOpt and optax.
        plan: the plan of the shards.
        mesh: the ranks. Pass the same optimizer and options on every rank, which is checked.
        mutable: whether ``loss_fn`` returns new buffers, such as running statistics. After the step
            every rank along the data axes has the buffers of rank 0, as in DistributedDataParallel;
            with ``weighted``, those of the first rank with a weight. Each micro-batch gets the
            buffers of the one before it; those from a weight of zero are dropped.
        max_norm: the global norm to clip the gradient to; ``metrics["grad_norm"]`` is the norm
            before. ``math.inf`` for the norm without clipping, ``None`` for neither.
        scaler: scales the loss, and skips a step whose gradients have infinities or NaN on any
            rank. A skipped step leaves shards, optimizer state and ``state.step`` unchanged, but
            updates buffers. ``metrics["scale"]`` is the scale that was used, and
            ``metrics["found_inf"]`` tells you whether the step was skipped.
        donate: whether the step may update the state in place. With ``False`` it copies the
            trainable shards and the optimizer's state first.
        gradient: options of ``accumulate`` for a plain ``loss_fn``: ``has_aux``, ``weighted``,
            ``reduce``, ``on_grads``, ``on_reduce_scattered``, ``divisor``; and ``accumulate``, its
            number of micro-batches.

            An aux becomes ``metrics["aux"]``, a list if the batch is split. ``metrics["weight"]``
            is the sum of the weights over the world; if it is zero, the step returns the state
            unchanged. With a ``scaler``, hooks see scaled gradients.

    Returns:
        The step. ``metrics`` is a dictionary: ``metrics["loss"]`` is the mean over the world, and
        ``metrics["local_loss"]`` that over this rank's batch, both in float32 or wider.
        ``metrics["lr"]`` is the learning rate, if the optimizer comes from ``torch_optimizer`` or
        ``muon``; with groups, that of the leaves of no group. ``make_meter`` makes a log of all
        this.

    Raises:
        TypeError: ``optimizer`` is neither kind of pair, or an option is of another type. When the
            step runs: ``loss_fn`` returns something else than the options say.
        ValueError: the plan has no trainable leaf; an option is out of range, or names no unit of
            the plan; ``mesh``, optimizer or shards are those of another plan; or the ranks'
            arguments differ. When the step runs: the errors of ``value_and_grad``; only one of step
            and state has a scaler.
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
    options = function.options
    _check_loss_fn(function.loss_fn)
    check_optimizer(optimizer, plan)
    if scaler is not None and not isinstance(scaler, GradScaler):
        title = outline(scaler)
        if isinstance(scaler, torch.amp.GradScaler):
            title = "torch's GradScaler, which keeps its scale to itself"
        raise TypeError(
            f"scaler must be a funcshard.GradScaler, or None; found {title}: pass "
            "scaler=fs.GradScaler()"
        )
    if isinstance(options.reduce, Mapping):
        check_reduce_units(options.reduce, plan.units)
    check_flag("mutable", mutable)
    check_flag("donate", donate)
    if max_norm is not None:
        remedy = "pass math.inf for the norm alone"
        check_number(
            "max_norm",
            max_norm,
            above=0,
            infinite=True,
            none="for no clipping",
            remedy=remedy,
        )
    local_axes = {buffer.local for _, buffer in trainable_buffers(plan)}
    if not local_axes:
        raise ValueError(
            "a training step needs a trainable leaf; found none in the plan: set requires_grad on "
            "the module's parameters before make_functional, or on its params before make_plan"
        )
    # Note: ranks that differ in one of these would wait for each other, or train on different
    # models, so all of them are compared once.
    compared_options = {
        "has_aux": options.has_aux, "mutable": mutable, "max_norm": max_norm,
        "accumulate": function.micro_batches or 1, "reduce": options.reduce,
        "weighted": options.weighted, "divisor": options.divisor, "scaler": scaler, "donate": donate,
    }  # fmt: skip
    compared_texts = {"the plan": plan.fingerprint(), **_texts_of_optimizer(optimizer)}
    compared_texts |= {name: text_of(value) for name, value in compared_options.items()}
    check_all_same(mesh, compared_texts, "make_train_step")
    # Note: a hook may keep the gradients that it gets, and then they cannot be written to.
    hooks = (options.on_grads, options.on_reduce_scattered)
    # Why: a division makes new memory, whereas autograd may return a gradient that shares memory
    # with a tensor of the user.
    divides_all = mesh.world_size > 1 and not {*AXES}.intersection(*local_axes)
    return TrainStep(
        function=dataclasses.replace(
            function, options=dataclasses.replace(options, mesh=mesh)
        ),
        optimizer=optimizer,
        plan=plan,
        mesh=mesh,
        mutable=mutable,
        max_norm=max_norm,
        scaler=scaler,
        donate=donate,
        world_sum=BufferComm(Topology(mesh, False)),
        owns_grads=hooks == (None, None) and options.divisor is None and divides_all,
        rate=getattr(optimizer[1], "rate", None),
    )


def _gradient_function(
    loss_fn: Any, mesh: Mesh, keywords: StepKeywords
) -> GradientFunction:
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
    gradient_options = {
        name: value for name, value in keywords.items() if name != "accumulate"
    }
    options = GradientOptions(mesh=mesh, **gradient_options)  # type: ignore[arg-type]
    micro_batches = check_reduce(
        keywords.get("accumulate", 1), options.reduce, "accumulate"
    )
    return GradientFunction(loss_fn, options, None if micro_batches == 1 else micro_batches)


def _check_names(new_buffers: Any, buffers: Any) -> None:
    if isinstance(buffers, Mapping) and (
        not isinstance(new_buffers, Mapping) or new_buffers.keys() != buffers.keys()
    ):
        raise TypeError(
            "with mutable=True loss_fn must return the new buffers, under the names "
            f"{sorted(buffers)[:4]}; found {outline(new_buffers)}: the order of its results is "
            "(loss, weight, new_buffers, aux)"
        )


@with_remedies("a training step", {"backward": _REMEDY})
@dataclass(frozen=True, slots=True, eq=False)
class TrainStep:
    """A training step; made by ``make_train_step``.

    Attributes:
        function: the loss function, its micro-batches, and how its gradients are computed.
        optimizer: the pair of functions.
        plan: the plan of the shards.
        mesh: the ranks.
        mutable: whether the loss function returns new buffers.
        max_norm: the bound of the gradient's norm; ``math.inf`` for the norm alone, ``None`` for
            neither.
        scaler: the loss scaling; ``None`` without.
        donate: whether the state may be updated in place.
        world_sum: how losses are added up over the world.
        owns_grads: whether the gradients may be unscaled in place, because no one else holds their
            memory.
        rate: the learning rate, a number or a function of the step, if it is known.
    """

    function: GradientFunction
    optimizer: Any
    plan: Plan
    mesh: Mesh
    mutable: bool
    max_norm: float | None
    scaler: GradScaler | None
    donate: bool
    world_sum: BufferComm
    owns_grads: bool
    rate: Any = None

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

    def init(self, shards: Shards, buffers: dict[str, torch.Tensor]) -> TrainState:
        """Return the state before the first step."""
        check_cut(self.plan, shards)
        opt_state = self.optimizer[0](_trainable(shards, self.plan))
        state = TrainState(shards, buffers, opt_state, step=0)
        if self.scaler is not None:
            state = state._replace(scaler=self.scaler.init(self.mesh))
        return state

    @property
    def schedules(self) -> dict[str, Callable[[int], Any]]:
        """The optimizer's options that are functions of the number of steps."""
        return dict(getattr(self.optimizer[1], "schedules", {}))

    def _evaluate(self, state: TrainState, batch: Any) -> tuple[tuple[Any, ...], Shards]:
        """Return losses (scaled), weights, buffers and aux, and the scaled gradient."""
        function, options = self.function, self.function.options
        buffers = state.buffers
        local_weight = 0.0
        local_total: Any = 0.0

        # Note: each micro-batch begins with the buffers that the one before has left.
        def loss_and_rest(shards: Shards, batch: Any) -> Any:
            nonlocal buffers, local_weight, local_total
            result = named_results(
                function.loss_fn(shards, buffers, batch),
                weighted=options.weighted,
                mutable=self.mutable,
                has_aux=options.has_aux,
            )
            weight = 1.0
            if options.weighted:
                weight = result["weight"] = check_weight(result["weight"])
            # A batch of weight zero is no data, so running statistics must not see it either.
            new_buffers = result.pop("new_buffers", None)
            if self.mutable and weight > 0:
                _check_names(new_buffers, buffers)
                buffers = tree.map(detached, new_buffers)
            if self.scaler is not None and state.scaler is not None:
                result["loss"] = self.scaler.scale(result["loss"], state.scaler)
            # The loss of value_and_grad is the mean over the world; this rank's is kept here.
            if options.weighted:
                local_weight += weight
            if options.weighted and weight > 0:  # a loss of weight zero may be NaN
                local_total = local_total + loss_value(result["loss"]) * weight
            return result

        loss, weight, aux, grads = evaluate(function, loss_and_rest, state.shards, batch)
        local_loss = loss
        if options.weighted:
            local_loss = (
                local_total / local_weight if local_weight > 0 else torch.zeros_like(loss)
            )
        return (loss, local_loss, weight, local_weight, buffers, aux), grads

    @untraced_with_warning(
        "torch.compile compiles nothing of a training step, whose collectives run between graphs: "
        "compile the whole step with fs.trace(step, state, batch).compile(), or its units with "
        "fully_shard(compiler=torch.compile)"
    )
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, Any]]:
        """Take one step on this rank's ``batch``."""
        if not isinstance(state, TrainState) or (state.scaler is None) != (
            self.scaler is None
        ):
            raise _state_error(state)
        _log.debug("step %d begins", state.step + 1)
        plan, mesh = self.plan, self.mesh
        scaler, scaling = self.scaler, state.scaler
        results, grads = self._evaluate(state, batch)
        loss, local_loss, weight, local_weight, buffers, aux = results
        loss, local_loss = loss_value(loss), loss_value(local_loss)
        graph_recording = current_recording()
        if graph_recording is not None:
            graph_recording.updates = True
        metrics: dict[str, Any] = {}
        if self.rate is not None:
            metrics["lr"] = self.rate
        if callable(self.rate):
            steps = state.opt_state["steps"]
            if graph_recording is None:
                metrics["lr"] = self.rate(steps)
            else:  # by name: a file of graphs has the names of schedules
                metrics["lr"] = graph_recording.number(self.rate, steps)
        if scaler is not None and scaling is not None:
            # The losses that users see have no scale.
            loss = loss / scaling.scale.to(loss.device)
            local_loss = local_loss / scaling.scale.to(local_loss.device)
            grads, metrics["found_inf"] = scaler.unscale(
                grads, scaling, mesh, donate=self.owns_grads, plan=plan
            )
            metrics["scale"] = scaling.scale
            scaling = scaler.update(scaling, metrics["found_inf"])
        if weight is not None:
            metrics |= {"loss": loss, "weight": weight}
        else:
            total = start_reduce(
                loss.detach().clone(), self.world_sum, donated=True
            ).finish()
            metrics["loss"] = total / mesh.world_size
        metrics["local_loss"] = local_loss
        if self.max_norm is not None:
            if not isinstance(self.max_norm, torch.Tensor) and math.isinf(self.max_norm):
                metrics["grad_norm"] = global_norm(grads, plan, mesh)
            else:
                # Unscaled gradients have memory of their own.
                grads, metrics["grad_norm"] = clip_by_global_norm(
                    grads, plan, mesh, self.max_norm, donate=scaler is not None
                )
        if self.function.options.has_aux:
            metrics["aux"] = aux
        # The weight is the world's sum, so every rank returns here.
        if weight is not None and graph_recording is None and not weight > 0:
            return state, metrics
        if self.mutable:
            source_rank = 0
            if weight is not None:
                source_rank = _first_rank_with(local_weight, mesh)
            buffers = _broadcast(buffers, mesh, source_rank)
        if graph_recording is None and metrics.get("found_inf", False):
            return state._replace(buffers=buffers, scaler=scaling), metrics
        # Note: in a graph the step is always taken, and ``_chosen`` keeps the old state if need be.
        may_skip = graph_recording is not None and (
            weight is not None or scaler is not None
        )
        with torch.no_grad():
            params, opt_state = _trainable(state.shards, plan), state.opt_state
            grads, update = _trainable(grads, plan), self.optimizer[1]
            if isinstance(self.optimizer, TorchOptimizer):
                # Note: a graph that is recorded in an attempt also runs outside.
                in_attempt = graph_recording is None and UNDO.get() is not None
                if may_skip or in_attempt or not self.donate:
                    params, opt_state = copy((params, opt_state))
                params, opt_state = update(grads, opt_state, params)
            else:
                params, opt_state = apply_update(update, grads, opt_state, params)
        _log.debug("step %d ends", state.step + 1)
        # Frozen shards stay, the trainable ones are replaced.
        shards = {
            name: {**state.shards[name], **params.get(name, {})} for name in state.shards
        }
        state_after = TrainState(shards, buffers, opt_state, state.step + 1, scaling)
        if may_skip:
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
            after: the state after it.
            weight: the sum of all weights, which skips the whole step if it is zero.
            found_inf: whether to skip the update.
        """
        graph_recording = current_recording()
        assert graph_recording is not None, "a step that runs returns early"
        if not same_form(before, after):
            # The optimizer made its state in this step, and a skipped step would have none.
            graph_recording.replayable = False
            return after
        # A step with infinities keeps all but the buffers and the scale, as one that runs does.
        if found_inf is not None:
            chosen = choose_tree(found_inf, before, after)
            after = chosen._replace(buffers=after.buffers, scaler=after.scaler)
        if weight is not None:
            after = choose_tree(weight <= 0, before, after)
        return after


def _trainable(shards: Shards, plan: Plan) -> Shards:
    return {
        unit.name: {
            buffer.key: shards[unit.name][buffer.key]
            for buffer in unit.buffers
            if buffer.trainable
        }
        for unit in plan.unit_list
    }


def _first_rank_with(weight: float, mesh: Mesh) -> int:
    """Return the first rank whose ``weight`` is not zero, of which there has to be one."""
    # Note: a recorded weight has no value, so its comparison can be a condition but no number.
    has_data = torch.full(
        (), 1.0 if weight > 0 else 0.0, dtype=torch.float32, device=mesh.device
    )
    # One element for each rank, so that the sum holds what an all-gather would.
    data_by_rank = all_reduce_flat(at_own_rank(has_data, mesh), mesh)
    # Note: no int(...), because a graph that is recorded has a symbol here.
    first_rank: int = data_by_rank.argmax().item()  # type: ignore[assignment]
    return first_rank


def _broadcast(
    buffers: dict[str, torch.Tensor], mesh: Mesh, rank: int
) -> dict[str, torch.Tensor]:
    """Return copies of the buffers of ``rank``, on every rank along the data axes."""
    flat, unflatten = tree.flatten(buffers)
    # Copies, because a broadcast writes into its argument, and the loss function owns these.
    buffer_copies = [buffer.contiguous().clone() for buffer in flat]
    local_parts = [
        local_part(buffer) if is_dtensor(buffer) else buffer for buffer in buffer_copies
    ]
    source_place = position_of(rank, mesh.shape)
    # Why no model axes: buffers may be parts of a whole there, such as statistics of slices or
    # experts.
    for axis in ("shard", "replicate"):
        if mesh.groups[axis].size > 1:
            group = in_graph(mesh.groups[axis], axis)
            # All are started before the first is waited for.
            ops = [
                Op("broadcast", "", part, src=source_place[axis]) for part in local_parts
            ]
            for work in [group.start(op) for op in ops]:
                work.wait()
    return unflatten(buffer_copies)


# --- checks --------------------------------------------------------------------------------------


def _texts_of_optimizer(optimizer: Any) -> dict[str, str]:
    """Return the settings of an optimizer by name, as texts for ranks to compare."""
    _, step = optimizer
    if isinstance(step, PerMatrixStep | MuonStep):
        others: Any = (None, None)
        if isinstance(step, MuonStep):
            title, settings, others = "muon", step.options, (None, step.adamw)
        else:
            title, others = "per_matrix", step.others or others
            settings = {"init": step.init_matrix, "update": step.update}
        setting_texts = {"the tensors that update takes": str(step.owners.gathered)}
        for name, value in sorted(settings.items()):
            setting_texts[f"{name} of {title}"] = text_of(value)
        for path in step.owners.of:
            setting_texts[f"the optimizer of matrix {path!r}"] = title
        for name, text in _texts_of_optimizer(others).items():
            setting_texts[f"{name}, for other leaves"] = text
        return setting_texts
    if isinstance(step, PairStep):
        step = step.pair[1]
    if not isinstance(step, TorchStep):
        return {"the optimizer": text_of(step)}
    setting_texts = {"the optimizer": text_of(step.cls)}
    for group_index, options in enumerate(step.options):
        where = f" of group {group_index}" if group_index else ""
        for name, value in options.items():
            setting_texts[f"{name}{where} of the optimizer"] = text_of(value)
    if step.layout is not None:
        for path, group in sorted(step.layout.group_of.items()):
            setting_texts[f"the group of leaf {path!r}"] = str(group)
    return setting_texts


def _check_loss_fn(loss_fn: Any) -> None:
    """Raise ``TypeError`` unless ``loss_fn`` takes shards, buffers and batch."""
    rule = "loss_fn must be a function loss_fn(shards, buffers, batch)"
    is_module = isinstance(loss_fn, torch.nn.Module) and any(
        True for _ in loss_fn.parameters()
    )
    if is_module or not callable(loss_fn):
        raise TypeError(
            f"{rule}; found {outline(loss_fn)}: pass a function that calls the function of "
            "fully_shard and returns the loss, and after it the optimizer"
        )
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # a function that does not say what it takes
        return
    try:
        # What the arguments are does not matter, only how many.
        signature.bind(None, None, None)
    except TypeError as error:
        remedy = (
            "write lambda shards, buffers, batch: ..., also if the model has no buffers"
        )
        raise TypeError(f"{rule}; found one of {signature}, {error}: {remedy}") from None


def _state_error(value: Any) -> Exception:
    """Return the error for what was passed in place of a state of the step."""
    if isinstance(value, TrainState):
        return ValueError(
            "step and state must both have a scaler, or neither; found one of them alone: set "
            "it with state._replace(scaler=scaler.init(mesh)), or remove it with scaler=None"
        )
    value_text = outline(value)
    if isinstance(value, tuple) and value and isinstance(value[0], TrainState):
        value_text = "tuple: write state, metrics = step(state, batch)"
    elif isinstance(value, Mapping):
        value_text = "dict: make the state with step.init(shards, buffers)"
        for name, entry in value.items():
            if isinstance(entry, TrainState):
                value_text = f"dict: pass its entry {name!r}"
    return TypeError(
        "a step takes (state, batch) and returns (state, metrics); the state must be the "
        f"TrainState of step.init, or of the step before; found {value_text}"
    )
