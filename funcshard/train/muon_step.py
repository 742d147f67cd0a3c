"""``muon``: Muon on flat shards, without gathering any matrix on every rank.

Momentum, weight decay and the final update are elementwise, so they run on the shards. Only the
orthogonalisation needs whole matrices. Each matrix has an owner (see ``muon_assignment``). An
all-to-all brings the owners the parts of the update that they do not hold; each owner
orthogonalises its matrices; and a second all-to-all brings every rank the parts that it holds. If
ranks along a model axis hold slices of a matrix, two further all-to-alls join them at one of their
owners and return them. All carry bfloat16, so the bits are those of ``torch.optim.Muon`` on the
whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from funcshard._utils import DONATED_STATE, check_not_donated, donate, tree
from funcshard.comm import Mesh, current_recording, in_graph
from funcshard.core import check_fits, check_shards
from funcshard.plan import Event, Plan, emit, recording
from funcshard.train.learning_rate import plain_number
from funcshard.train.muon_assignment import (
    AllToAll,
    Join,
    Matrix,
    MatrixPart,
    Owners,
    assign_owners,
)
from funcshard.train.optimizer_pair import TorchOptimizer
from funcshard.train.optimizers import Schedule, TorchStep, grouped_step, schedules_in
from funcshard.train.param_groups import ParamGroupLayout, trainable_buffers
from funcshard.train.state_checks import REMEDY, check_names, check_values


def muon(
    plan: Plan,
    mesh: Mesh,
    *,
    matrices: Iterable[str] | None = None,
    adamw: Mapping[str, Any] | None = None,
    **options: Any,
) -> TorchOptimizer:
    """Return a pair ``(init, step)`` that updates matrices with Muon and other leaves with AdamW.

    One rank computes the update of each matrix, its owner; see ``assign_owners``. The assignment is
    ``optimizer.step.owners``, and ``optimizer.step.owners.events`` lists the collectives of one
    step: two all-to-alls along the shard axis, and two along each axis along which ranks hold
    slices of matrices (``local={"up": {"tensor": 0}}``). Ranks along other axes do the same work.

    The state is ``{"steps", "momentum", "adamw"}``. ``momentum`` has one flat tensor for each
    shard, as long as the parts of matrices in that shard; ``adamw`` is AdamW's state of all other
    leaves. The step donates parameters and state, as in ``torch_optimizer``. While it runs, a rank
    also holds the updates of all matrices that it owns: about as many elements as its shards, in
    bfloat16.

    Arguments:
        plan: the plan of the shards.
        mesh: the ranks.
        matrices: paths or globs of nodes; Muon updates the trainable leaves of two dimensions under
            these nodes. By default it updates every trainable leaf of two dimensions, though
            embeddings and output layers are better left to AdamW.
        adamw: options of ``torch.optim.AdamW``, and ``"groups"`` as ``torch_optimizer`` takes them.
        options: options of ``torch.optim.Muon`` (``lr``, ``momentum``, ``weight_decay`` and so on),
            with its defaults. An option may be a function of the number of steps taken.

    Returns:
        The pair ``(init, step)``, for ``make_train_step`` or to be called by hand.

    Raises:
        ValueError: a path or glob of ``matrices`` matches nothing, the nodes that they match hold
            no matrix, ``torch.optim.Muon`` refuses the value of an option, or the mesh has another
            shape than the plan. In ``step``: the state is one of another optimizer or plan, as far
            as its names and sizes tell.
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
            f'adamw must be a dictionary of options of torch.optim.AdamW, as {{"lr": 3e-4}}; found {type(adamw).__name__}'
        )
    check_names(torch.optim.Muon, (options,))
    check_names(
        torch.optim.AdamW,
        ({key: value for key, value in (adamw or {}).items() if key != "groups"},),
    )
    owners = assign_owners(plan, matrices)
    options_now = {
        key: plain_number(value(0)) if callable(value) else value for key, value in options.items()
    }
    check_values(options_now, "")
    _with_defaults(options_now)
    me = mesh.shard.rank
    layout = ParamGroupLayout({matrix.leaf.path: 0 for matrix in owners.matrices}, 1, me)
    others = dict(adamw or {})
    rest_step = grouped_step(
        torch.optim.AdamW, others, others.pop("groups", ()), plan, mesh, left_out=layout.group_of
    )
    numels = {
        (unit.name, buffer.key): sum(leaf_range.numel for leaf_range in layout.ranges(buffer))
        for unit, buffer in trainable_buffers(plan)
    }
    step = MuonStep(
        options, plan, mesh, owners, layout, rest_step, numels, _local_parts(owners, me), owners.to_owners(me),
        owners.from_owners(me), tuple(owners.join(axis, mesh.position) for axis in owners.join_axes),
    )  # fmt: skip
    return TorchOptimizer(step.init, step)


class LocalPart(NamedTuple):
    """The elements of one matrix that lie in this rank's shard.

    Attributes:
        in_shard: where they lie in the shard.
        in_momentum: where they lie in the momentum of the shard, which holds matrices only.
    """

    in_shard: slice
    in_momentum: slice


def _local_parts(owners: Owners, rank: int) -> dict[str, LocalPart]:
    """Return the part of each matrix that lies in the shard of ``rank``, by path."""
    parts_by_path: dict[str, LocalPart] = {}
    momentum_numel: dict[tuple[str, str], int] = {}
    for matrix in sorted(owners.matrices, key=lambda matrix: matrix.leaf.offset):
        part = matrix.buffer.part(matrix.leaf, rank)
        if part.numel:
            begin = momentum_numel.get((matrix.unit, matrix.buffer.key), 0)
            end = begin + part.numel
            parts_by_path[matrix.leaf.path] = LocalPart(part.in_shard, slice(begin, end))
            momentum_numel[matrix.unit, matrix.buffer.key] = end
    return parts_by_path


@dataclass(frozen=True, slots=True, eq=False)
class MuonStep:
    """The step of Muon; made by ``muon``.

    Attributes:
        options: Muon's options.
        plan: the plan of the shards.
        mesh: the ranks.
        owners: which rank computes the update of which matrix.
        layout: the ranges of this rank's shards that matrices occupy.
        adamw: the step of all other leaves.
        numels: number of elements of the momentum of each shard, by unit and buffer key.
        local_parts: the part of each matrix that lies in this rank's shards, by path.
        to_owners: the all-to-all that brings the updates to the owners.
        from_owners: the all-to-all that brings the orthogonalised updates back.
        joins: the all-to-alls that join slices of matrices, in this order.
    """

    options: Mapping[str, Any]
    plan: Plan
    mesh: Mesh
    owners: Owners
    layout: ParamGroupLayout
    adamw: TorchStep
    numels: Mapping[tuple[str, str], int]
    local_parts: Mapping[str, LocalPart]
    to_owners: AllToAll
    from_owners: AllToAll
    joins: tuple[Join, ...] = ()

    def init(self, params: Any) -> Any:
        """Return the state before the first step."""
        check_shards(self.plan, params)
        momentum: dict[str, dict[str, torch.Tensor]] = {name: {} for name in params}
        rest_states: dict[str, dict[str, Any]] = {name: {} for name in params}
        for unit, buffer in trainable_buffers(self.plan):
            shard = params[unit.name][buffer.key]
            numel = self.numels[unit.name, buffer.key]
            momentum[unit.name][buffer.key] = torch.zeros(
                numel, dtype=shard.dtype, device=shard.device
            )
            rest_states[unit.name][buffer.key] = {}
        return {"steps": 0, "momentum": momentum, "adamw": {"steps": 0, "leaves": rest_states}}

    def __call__(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Update ``params`` and ``state``, which are donated, by one step, and return them."""
        check_shards(self.plan, params)
        self._check_state(state)
        given_params = params
        options = self._options_at(state["steps"])
        params, adamw_state = self.adamw(grads, state["adamw"], params)
        local = self._update_momentum(grads, state["momentum"], options)
        # The parts of the updates go to their matrices' owners.
        received = self._run(
            self.to_owners, [local[part.matrix.leaf.path] for part in self.to_owners.sent]
        )
        whole_updates = self._joined(_whole_updates(received))
        whole_updates = {
            path: _orthogonalise(update, options) for path, update in whole_updates.items()
        }
        whole_updates = {
            path: update.reshape(-1) for path, update in self._handed_back(whole_updates).items()
        }
        # The parts of the orthogonalised updates come back to the ranks that hold them.
        returned = [
            whole_updates[part.matrix.leaf.path][_slice(part.elements)]
            for part in self.from_owners.sent
        ]
        for (matrix, _), update in self._run(self.from_owners, returned):
            if grads[matrix.unit][matrix.buffer.key] is None:
                continue  # as torch.optim.Muon leaves such a parameter as it is
            target = params[matrix.unit][matrix.buffer.key][
                self.local_parts[matrix.leaf.path].in_shard
            ]
            target.mul_(1 - options["lr"] * options["weight_decay"])
            target.add_(
                update.to(target.device),
                alpha=-_adjusted_lr(
                    options["lr"], options["adjust_lr_fn"], matrix.leaf.whole_shape
                ),
            )
        if params is given_params:  # AdamW has no leaf to update
            leaves, unflatten = tree.flatten(params)
            params = unflatten(donate(leaves))
        momentum, state["momentum"] = state["momentum"], DONATED_STATE
        return params, {"steps": state["steps"] + 1, "momentum": momentum, "adamw": adamw_state}

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The options that are functions of the number of steps; AdamW's begin with ``adamw.``."""
        return schedules_in(self.options) | {
            f"adamw.{name}": schedule for name, schedule in self.adamw.schedules.items()
        }

    def param_groups(self, steps: int) -> list[dict[str, Any]]:
        """Return Muon's options as ``torch.optim`` writes them, with the paths of the matrices."""
        return (
            [{**self._options_at(steps), "params": list(self.owners.of)}]
            if self.owners.matrices
            else []
        )

    def _options_at(self, steps: int) -> dict[str, Any]:
        recording = current_recording()
        # Why not now: a graph that fs.trace records asks the schedules each time it runs.
        at = steps if recording is None else 0
        options_now = {
            key: plain_number(value(at)) if callable(value) else value
            for key, value in self.options.items()
        }
        check_values(options_now, f" at step {at}")
        options = _with_defaults(options_now)
        if recording is not None:
            options |= {
                key: recording.number(schedule, steps)
                for key, schedule in schedules_in(self.options).items()
            }
        return {
            key: value.item() if isinstance(value, torch.Tensor) else value
            for key, value in options.items()
        }

    def _check_state(self, state: Any) -> None:
        """Raise ``ValueError`` unless ``state`` is one of this optimizer."""
        if not isinstance(state, Mapping) or not {"steps", "momentum", "adamw"} <= state.keys():
            found_state = (
                sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            )
            raise ValueError(
                f"a state of muon must hold 'steps', 'momentum' and 'adamw'; found {found_state}, of "
                f"another optimizer: {REMEDY}"
            )
        check_not_donated(state["momentum"])
        for (unit, key), numel in self.numels.items():
            found_state = state["momentum"].get(unit, {}).get(key)
            if not isinstance(found_state, torch.Tensor) or found_state.shape != (numel,):
                held = "nothing" if found_state is None else found_state
                if isinstance(found_state, torch.Tensor):
                    held = tuple(found_state.shape)
                raise ValueError(
                    f"muon's momentum of buffer {key!r} of unit {unit or '(root)'!r} must have "
                    f"shape ({numel},), the elements of matrices in this shard; found {held}, of "
                    f"another plan, number of ranks or choice of matrices: {REMEDY}"
                )

    def _update_momentum(
        self, grads: Any, momentum: Any, options: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Update momentum in place; return this rank's part of each matrix's update, by path."""
        updates: dict[tuple[str, str], torch.Tensor] = {}
        for unit, buffer in trainable_buffers(self.plan):
            unit_momentum = momentum[unit.name][buffer.key]
            if not unit_momentum.numel():
                continue
            if grads[unit.name][buffer.key] is None:
                # Why zeros are sent: every step runs the same collectives.
                updates[unit.name, buffer.key] = unit_momentum.new_zeros(
                    unit_momentum.shape, dtype=torch.bfloat16, device=self.mesh.device
                )
                continue
            grad = self.layout.pick(grads[unit.name][buffer.key], buffer).to(unit_momentum.dtype)
            unit_momentum.lerp_(grad, 1 - options["momentum"])
            update = (
                grad.lerp(unit_momentum, options["momentum"])
                if options["nesterov"]
                else unit_momentum
            )
            updates[unit.name, buffer.key] = update.to(self.mesh.device, torch.bfloat16)
        return {
            matrix.leaf.path: updates[matrix.unit, matrix.buffer.key][
                self.local_parts[matrix.leaf.path].in_momentum
            ]
            for matrix in self.owners.matrices
            if matrix.leaf.path in self.local_parts
        }

    def _run(
        self, exchange: AllToAll, sent: list[torch.Tensor]
    ) -> list[tuple[MatrixPart, torch.Tensor]]:
        """Run an all-to-all; return the parts that this rank receives, each with its tensor.

        ``sent`` holds one flat tensor for each part of ``exchange.sent``.
        """
        out = self._all_to_all(
            "shard", sent, exchange.send_sizes, exchange.receive_sizes, exchange.event
        )
        return list(
            zip(
                exchange.received,
                out.split([len(part.elements) for part in exchange.received]),
                strict=True,
            )
        )

    def _all_to_all(
        self,
        axis: str,
        sent: list[torch.Tensor],
        sizes: Sequence[int],
        out_sizes: Sequence[int],
        event: Event | None,
    ) -> torch.Tensor:
        """Send slices of the concatenation of ``sent`` along an axis; return what is received."""
        full = (
            torch.cat(sent)
            if sent
            else torch.empty(0, dtype=torch.bfloat16, device=self.mesh.device)
        )
        if event is None:
            return full  # every rank sends to itself only
        out = full.new_empty(sum(out_sizes))
        if recording():
            emit(event)
        in_graph(self.mesh.groups[axis], axis).all_to_all(
            out, full, out_sizes, sizes, label="matrices"
        ).wait()
        return out

    def _joined(self, updates: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the updates of the whole matrices that this rank owns, joined from slices."""
        for join in self.joins:
            sent = [updates.pop(matrix.leaf.path).reshape(-1) for matrix in join.sent]
            out = self._all_to_all(join.axis, sent, join.sizes, join.joined_sizes, join.event)
            # Each rank along the axis sends one slice of each of these matrices.
            shapes = [matrix.joined_shape(join.axis) for matrix in join.joined]
            rows = [
                row.split([math.prod(shape) for shape in shapes])
                for row in out.split(join.joined_sizes)
            ]
            for matrix_index, (matrix, shape) in enumerate(zip(join.joined, shapes, strict=True)):
                slices = [row[matrix_index].view(shape) for row in rows]
                updates[matrix.leaf.path] = torch.cat(slices, _dim(matrix, join.axis))
        return updates

    def _handed_back(self, updates: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's slices of the matrices; the inverse of ``_joined``."""
        for join in reversed(self.joins):
            size = self.mesh.groups[join.axis].size
            cut = [
                updates.pop(matrix.leaf.path).chunk(size, _dim(matrix, join.axis))
                for matrix in join.joined
            ]
            sent = [slices[rank].reshape(-1) for rank in range(size) for slices in cut]
            out = self._all_to_all(join.axis, sent, join.joined_sizes, join.sizes, join.event)
            shapes = [matrix.joined_shape(join.axis) for matrix in join.sent]
            for matrix, shape, part in zip(
                join.sent, shapes, out.split([math.prod(s) for s in shapes]), strict=True
            ):
                updates[matrix.leaf.path] = part.view(shape)
        return updates


def _dim(matrix: Matrix, axis: str) -> int:
    """Return the dimension of a matrix that is cut along ``axis``."""
    return next(cut.dim for cut in matrix.leaf.cuts if cut.axis == axis)


def _whole_updates(received: list[tuple[MatrixPart, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return the whole update of each matrix that this rank owns, by path."""
    parts: dict[str, list[torch.Tensor]] = {}
    shapes = {}
    for (matrix, _), part in received:  # in the order of ranks, hence in the order of elements
        parts.setdefault(matrix.leaf.path, []).append(part)
        shapes[matrix.leaf.path] = matrix.leaf.shape
    return {path: torch.cat(leaf_parts).view(shapes[path]) for path, leaf_parts in parts.items()}


def _slice(elements: range) -> slice:
    return slice(elements.start, elements.stop)


def _with_defaults(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return Muon's options with its defaults; ``torch.optim.Muon`` checks them."""
    (group,) = torch.optim.Muon(
        [torch.nn.Parameter(torch.empty(1, 1, dtype=torch.float32, device="cpu"))], **options
    ).param_groups
    return {key: value for key, value in group.items() if key != "params"}


def _orthogonalise(update: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor:
    """Return a matrix like ``update`` with singular values near one, as ``torch.optim.Muon`` does.

    The iteration is Newton–Schulz; ``options`` holds its coefficients and number of iterations.
    """
    a, b, c = options["ns_coefficients"]
    tall = update.size(0) > update.size(1)
    x = update.T if tall else update
    x = x / x.norm().clamp(min=options["eps"])
    for _ in range(options["ns_steps"]):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def _adjusted_lr(lr: float, rule: str | None, shape: tuple[int, ...]) -> float:
    """Return the learning rate for a matrix of ``shape``, adjusted as ``torch.optim.Muon`` does."""
    rows, columns = shape
    if rule == "match_rms_adamw":
        return lr * 0.2 * math.sqrt(max(rows, columns))
    return lr * math.sqrt(max(1, rows / columns))
