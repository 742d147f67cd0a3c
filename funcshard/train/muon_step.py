"""``muon``: Muon on flat shards, without gathering any matrix on every rank.

Momentum, weight decay and the final update are elementwise, so they run on the shards. All-to-alls
bring the updates to the owners of matrices, which orthogonalise them, and back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.options import outline
from funcshard._utils.torch_private import adjusted_rate, orthogonalise
from funcshard.comm import Mesh
from funcshard.core import check_fits, check_shards
from funcshard.plan import Plan, current_recording, trainable_buffers
from funcshard.train.matrix_owners import Owners, assign_owners
from funcshard.train.matrix_step import MatrixTransport, transport_of
from funcshard.train.optimizer_step import (
    DONATED_STATE,
    NEW_STATE,
    Schedule,
    TorchOptimizer,
    TorchStep,
    check_form,
    options_at,
    rate_in,
    schedules_in,
)
from funcshard.train.optimizers import check_options, grouped_step
from funcshard.train.param_groups import ParamGroupLayout

_ITERATION = ("ns_coefficients", "ns_steps", "eps")  # as orthogonalise takes them


def muon(
    plan: Plan,
    mesh: Mesh,
    *,
    matrices: Iterable[str] | None = None,
    adamw: Mapping[str, Any] | None = None,
    **options: Any,
) -> TorchOptimizer:
    """Return a pair ``(init, step)`` that updates matrices with Muon and other leaves with AdamW.

    One rank computes the update of each matrix, its owner: ``optimizer.step.owners``, from
    ``assign_owners``. ``optimizer.step.owners.events`` lists the collectives of one step: two
    all-to-alls along the shard axis, and two along each axis that cuts matrices
    (``local={"up": {"tensor": 0}}``). The bits are those of ``torch.optim.Muon`` on the whole
    model.

    The state is ``{"steps", "momentum", "adamw"}``: one flat momentum for the parts of matrices in
    each shard, and AdamW's state of all other leaves. The step donates parameters and state, as in
    ``torch_optimizer``.

    Arguments:
        plan: the plan of the shards.
        mesh: the ranks.
        matrices: paths or globs of nodes, whose trainable leaves of two dimensions Muon updates; by
            default all such leaves, though you'd better leave embeddings and output layers to
            AdamW.
        adamw: options of ``torch.optim.AdamW``, and ``"groups"`` as in ``torch_optimizer``.
        options: options of ``torch.optim.Muon`` (``lr``, ``momentum``, ``weight_decay`` and so on),
            with its defaults. You can pass a function of the number of steps taken for an option.

    Returns:
        The pair ``(init, step)``, for ``make_train_step`` or your own loop.

    Raises:
        ValueError: ``matrices`` match nothing or no matrix, an option has no valid value, or the
            mesh does not have the plan's shape. In ``step``: the state is one of another optimizer
            or plan, as far as its names and sizes tell.
        TypeError: ``torch.optim.Muon`` has no such option.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"blocks": [{"w": torch.ones(4, 4), "b": torch.ones(4)} for _ in range(2)]}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh, units=["blocks.*"])
        ...     optimizer = fs.muon(plan, mesh, lr=0.02, adamw={"lr": 3e-4})
        ...     shards = fs.shard(params, plan, mesh)
        ...     state = optimizer.init(shards)
        ...     shards, state = optimizer.step(fs.shard(params, plan, mesh), state, shards)
        ...     return optimizer.step.owners.of
        >>> fs.simulate(main, world_size=2)[0]
        {'blocks.0.w': 0, 'blocks.1.w': 1}

    Source: ``torch.optim.Muon``; K. Jordan et al., "Muon: an optimizer for hidden layers in neural
    networks" (2024), https://kellerjordan.github.io/posts/muon/
    """
    check_fits(plan, mesh)
    if adamw is not None and not isinstance(adamw, Mapping):
        raise TypeError(
            'adamw must be a dictionary of options of torch.optim.AdamW, as {"lr": 3e-4}; found '
            f"{type(adamw).__name__}"
        )
    check_options(torch.optim.Muon, [options])
    # Both raise for values that torch.optim.Muon refuses, and the second one only in a step, of
    # which other ranks would wait for the update.
    first_options = _with_defaults(options_at(options, 0))
    no_update = torch.zeros(1, 1, dtype=torch.bfloat16, device="cpu")
    orthogonalise(no_update, *(first_options[name] for name in _ITERATION))
    owners = assign_owners(plan, matrices)
    matrix_layout = ParamGroupLayout(dict.fromkeys(owners.of, 0), 1, mesh.shard.rank)
    adamw_options = dict(adamw or {})
    adamw_groups = adamw_options.pop("groups", ())
    step = MuonStep(
        options=options,
        plan=plan,
        mesh=mesh,
        transport=transport_of(owners, mesh),
        layout=matrix_layout,
        adamw=grouped_step(
            torch.optim.AdamW, adamw_options, adamw_groups, plan, mesh, left_out=owners.of
        ),
        numels={
            (unit.name, buffer.key): matrix_layout.numel(buffer)
            for unit, buffer in trainable_buffers(plan)
        },
    )
    return TorchOptimizer(step.init, step)


@dataclass(frozen=True, slots=True, eq=False)
class MuonStep:
    """The step of Muon; made by ``muon``.

    Attributes:
        options: Muon's options.
        plan: the plan of the shards.
        mesh: the ranks.
        transport: the way of updates to the owners of matrices, and back.
        layout: the ranges of this rank's shards that matrices occupy.
        adamw: the step of all other leaves.
        numels: number of elements of the momentum of each shard, by unit and buffer key.
    """

    options: Mapping[str, Any]
    plan: Plan
    mesh: Mesh
    transport: MatrixTransport
    layout: ParamGroupLayout
    adamw: TorchStep
    numels: Mapping[tuple[str, str], int]

    @property
    def owners(self) -> Owners:
        """Which rank computes the update of which matrix."""
        return self.transport.owners

    def init(self, params: Any) -> Any:
        """Return the state before the first step."""
        check_shards(self.plan, params)
        momentum: dict[str, dict[str, torch.Tensor]] = {name: {} for name in params}
        for (unit_name, key), numel in self.numels.items():
            momentum[unit_name][key] = params[unit_name][key].new_zeros(numel)
        leaf_states = tree.map(lambda _: {}, momentum)
        return {
            "steps": 0,
            "momentum": momentum,
            "adamw": {"steps": 0, "leaves": leaf_states},
        }

    def __call__(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Update ``params`` and ``state``, which are donated, by one step."""
        check_shards(self.plan, params)
        self._check_state(state)
        options = self._options_at(state["steps"])
        # AdamW first: it donates the shards, and Muon then writes into the new ones.
        params, adamw_state = self.adamw(grads, state["adamw"], params)
        parts = self._update_momentum(grads, state["momentum"], options)
        numbers = [options[name] for name in _ITERATION]
        for matrix, param_slice, update in self.transport.updates(
            lambda _, whole: orthogonalise(whole[0], *numbers), parts, grads, params
        ):
            param_slice.mul_(1 - options["lr"] * options["weight_decay"])
            rate = adjusted_rate(
                options["lr"], options["adjust_lr_fn"], matrix.leaf.whole_shape
            )
            param_slice.add_(update, alpha=-rate)
        momentum, state["momentum"] = state["momentum"], DONATED_STATE
        return params, {
            "steps": state["steps"] + 1,
            "momentum": momentum,
            "adamw": adamw_state,
        }

    @property
    def rate(self) -> Any:
        """The learning rate of the matrices."""
        return rate_in(self.options, torch.optim.Muon)

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The options that are functions of the number of steps; AdamW's with ``adamw.`` before."""
        return schedules_in(self.options) | {
            f"adamw.{name}": schedule for name, schedule in self.adamw.schedules.items()
        }

    def param_groups(self, steps: int) -> list[dict[str, Any]]:
        """Return Muon's options as ``torch.optim`` writes them, with the matrices' paths."""
        paths = list(self.owners.of)
        return [{**self._options_at(steps), "params": paths}] if paths else []

    def _options_at(self, steps: int) -> dict[str, Any]:
        options = _with_defaults(options_at(self.options, steps))
        graph_recording = current_recording()
        if graph_recording is not None:
            for name, schedule in schedules_in(self.options).items():
                options[name] = graph_recording.number(schedule, steps)
        for name, value in options.items():
            if isinstance(value, torch.Tensor):
                options[name] = value.item()
        return options

    def _check_state(self, state: Any) -> None:
        check_form(state, {"steps", "momentum", "adamw"}, "muon")
        for (unit_name, key), numel in self.numels.items():
            unit_momentum = state["momentum"].get(unit_name, {}).get(key)
            if getattr(unit_momentum, "shape", None) != (numel,):
                raise ValueError(
                    f"muon's momentum of buffer {key!r} of unit {unit_name or '(root)'!r} must "
                    f"have shape ({numel},), the elements of matrices in this shard; found "
                    f"{outline(unit_momentum)}, of another plan, number of ranks or choice of "
                    f"matrices: {NEW_STATE}"
                )

    def _update_momentum(
        self, grads: Any, momentum: Any, options: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Update momentum; return this rank's part of each matrix's update."""
        updates: dict[str, torch.Tensor] = {}
        for unit, buffer in trainable_buffers(self.plan):
            momentum_shard, grad = (
                momentum[unit.name][buffer.key],
                grads[unit.name][buffer.key],
            )
            if not momentum_shard.numel():
                continue
            if grad is None:
                # Why zeros are sent: every step runs the same collectives.
                update = torch.zeros_like(momentum_shard)
            else:
                grad = self.layout.pick(grad, buffer).to(momentum_shard.dtype)
                momentum_shard.lerp_(grad, 1 - options["momentum"])
                update = momentum_shard
                if options["nesterov"]:
                    update = grad.lerp(momentum_shard, options["momentum"])
            # Momentum may be on the CPU, of an offloaded unit; the products run on the device.
            # Why a copy of momentum itself: orthogonalise writes into its argument.
            is_kept = update is momentum_shard
            update = update.to(self.mesh.device, torch.bfloat16, copy=is_kept).unsqueeze(0)
            end = 0
            for leaf in buffer.leaves:
                if leaf.path in self.transport.slices:
                    in_shard = self.transport.slices[leaf.path]
                    begin, end = end, end + in_shard.stop - in_shard.start
                    updates[leaf.path] = update[:, begin:end]
        return updates


def _with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    # The class checks the options and fills in the defaults for any matrix.
    matrix = torch.nn.Parameter(torch.empty(1, 1, dtype=torch.float32, device="cpu"))
    (group,) = torch.optim.Muon([matrix], **options).param_groups
    del group["params"]
    return group
