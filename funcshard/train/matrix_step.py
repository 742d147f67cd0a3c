"""``per_matrix``: an optimizer written for one whole matrix, on flat shards.

``MatrixTransport`` brings parts of flat shards to the owners of whole matrices, and results back.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.options import outline
from funcshard.comm import Mesh, Op, in_graph
from funcshard.core import check_fits, check_shards
from funcshard.plan import Plan, dtype_of, emit, trainable_buffers
from funcshard.train.matrix_owners import AllToAll, Matrix, Owners, assigned, times
from funcshard.train.optimizer_step import (
    DONATED_STATE,
    NEW_STATE,
    Schedule,
    TorchOptimizer,
    TorchStep,
    apply_update,
    check_form,
    donate,
)
from funcshard.train.optimizers import check_optimizer, grouped_step
from funcshard.train.param_groups import ParamGroupLayout, group_leaves


def per_matrix(
    init: Callable[[torch.Tensor], Any],
    update: Callable[..., tuple[torch.Tensor, Any]],
    plan: Plan,
    mesh: Mesh,
    *,
    others: Any = None,
    matrices: Iterable[str] | None = None,
) -> TorchOptimizer:
    """Return a pair ``(init, step)`` that updates matrices by your functions of one whole matrix.

    One rank calls your functions for a matrix, its owner: ``optimizer.step.owners``, as from
    ``assign_owners``. In a step all owners get their gradients in one all-to-all and return the
    updates in another one; ``optimizer.step.owners.events`` lists them. A leaf of three dimensions
    is a stack of matrices, and each of them has an owner, e.g. each expert's.

    The state is ``{"matrices": {path: state of a matrix that this rank owns}, "others": ...}``. The
    step donates parameters and state, as in ``torch_optimizer``.

    Arguments:
        init: ``init(matrix) -> state``, any pytree of tensors, numbers and strings.
        update: ``update(gradient, state, matrix) -> (update, state)``; the update is added to the
            matrix. A function ``update(gradient, state)`` saves sending the matrix. It may change
            its arguments in place.
        plan: the plan of the shards.
        mesh: the ranks.
        others: the optimizer of all other leaves: ``torch_optimizer``, or a pair
            ``(init, update)`` of elementwise functions in the style of TorchOpt and optax. You can
            leave it out if there are none.
        matrices: paths or globs of nodes, whose trainable leaves of two or three dimensions are
            matrices or stacks; by default all such leaves.

    Returns:
        The pair ``(init, step)``, for ``make_train_step`` or your own loop.

    Raises:
        ValueError: ``matrices`` match nothing or no matrix, there are other leaves and no
            ``others``, or the mesh does not have the plan's shape. In ``step``: the state is one of
            another optimizer or plan, or an update does not have the shape of its matrix.
        TypeError: a function takes other arguments, or ``others`` isn't an optimizer.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.eye(4), "b": torch.ones(4)}
        >>> def shampoo(gradient, state):
        ...     left, right = state[0] + gradient @ gradient.T, state[1] + gradient.T @ gradient
        ...     root = lambda x: torch.linalg.matrix_power(torch.linalg.inv(x), 1)
        ...     return -0.1 * root(left) @ gradient @ root(right), (left, right)
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     adamw = fs.torch_optimizer(torch.optim.AdamW, lr=0.1)
        ...     eyes = lambda matrix: tuple(torch.eye(size) for size in matrix.shape)
        ...     optimizer = fs.per_matrix(eyes, shampoo, plan, mesh, others=adamw)
        ...     shards = fs.shard(params, plan, mesh)
        ...     shards, state = optimizer.step(fs.copy(shards), optimizer.init(shards), shards)
        ...     return fs.gather(shards, plan, mesh)["w"].diagonal()
        >>> fs.simulate(main, world_size=2)[1]
        tensor([0.9750, 0.9750, 0.9750, 0.9750])
    """
    check_fits(plan, mesh)
    if not callable(init) or not callable(update):
        raise TypeError(
            "per_matrix takes two functions, init(matrix) and update(gradient, state, matrix); found "
            f"{outline(init)} and {outline(update)}: pass them before plan and mesh"
        )
    gathered = 2 if _takes(update, 3) else 1
    if gathered == 1 and not _takes(update, 2):
        raise TypeError(
            "update must take (gradient, state, matrix), or (gradient, state); found "
            f"{inspect.signature(update)}: bind further arguments with functools.partial"
        )
    owners = assigned(plan, matrices, stacks=True, gathered=gathered)
    matrix_paths = {matrix.holder.path for matrix in owners.matrices}
    step = PerMatrixStep(
        init_matrix=init,
        update=update,
        plan=plan,
        transport=transport_of(owners, mesh),
        others=_others(others, matrix_paths, plan, mesh),
    )
    return TorchOptimizer(step.init, step)


def _takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether you can call a function with so many arguments."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a function that does not say what it takes
        return True
    return True


@dataclass(frozen=True, slots=True, eq=False)
class PerMatrixStep:
    """The step of an optimizer of whole matrices; made by ``per_matrix``.

    Attributes:
        init_matrix: from a matrix to its state.
        update: from a gradient and a state to an update and a state.
        plan: the plan of the shards.
        transport: the way of gradients to the owners of matrices, and of updates back.
        others: the optimizer of all other leaves; ``None`` without such leaves.
    """

    init_matrix: Callable[[torch.Tensor], Any]
    update: Callable[..., tuple[torch.Tensor, Any]]
    plan: Plan
    transport: MatrixTransport
    others: TorchOptimizer | None

    @property
    def owners(self) -> Owners:
        """Which rank computes the update of which matrix."""
        return self.transport.owners

    @property
    def schedules(self) -> dict[str, Schedule]:
        """The options of other leaves that are functions of the number of steps."""
        other_schedules = getattr(self.others and self.others.step, "schedules", {})
        return {f"others.{name}": schedule for name, schedule in other_schedules.items()}

    @torch.no_grad()
    def init(self, params: Any) -> Any:
        """Return the state before the first step; every rank has to call it."""
        check_shards(self.plan, params)
        matrices = self.transport.bring(self._parts(params), 1)
        states = {}
        for matrix in self.transport.owned:
            whole = matrices.pop(matrix.leaf.path)[0].to(matrix.buffer.shard_dtype)
            states[matrix.leaf.path] = self.init_matrix(whole)
        others = None if self.others is None else self.others.init(params)
        return {"matrices": states, "others": others}

    @torch.no_grad()
    def __call__(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Update ``params`` and ``state``, which are donated, by one step."""
        check_shards(self.plan, params)
        self.check_state(state)
        if self.others is None:
            leaves, unflatten = tree.flatten(params)
            params, others_state = unflatten(donate(leaves)), None
        else:
            # These first: they donate the shards, and the matrices' updates go into the new ones.
            params, others_state = self.others.step(grads, state["others"], params)
        states, state["matrices"] = state["matrices"], DONATED_STATE

        def update(matrix: Matrix, whole: torch.Tensor) -> torch.Tensor:
            path, dtype = matrix.leaf.path, matrix.buffer.shard_dtype
            if grads[matrix.unit][matrix.buffer.key] is None:
                return whole[0]  # no rank reads it
            change, states[path] = self.update(
                whole[0].to(dtype), states[path], *whole[1:].to(dtype)
            )
            if getattr(change, "shape", None) != whole[0].shape:
                raise ValueError(
                    f"update must return (update, state), with an update of shape {matrix.shape()} "
                    f"for matrix {path!r}; found {outline(change)}: return what is added to the matrix"
                )
            return change.to(dtype)

        sent = (grads,) if self.owners.gathered == 1 else (grads, params)
        parts = self._parts(*sent)
        for _, param_slice, change in self.transport.updates(update, parts, grads, params):
            param_slice.add_(change.to(param_slice.dtype))
        return params, {"matrices": states, "others": others_state}

    def _parts(self, *trees: Any) -> dict[str, torch.Tensor]:
        """Return this rank's part of each matrix in some trees of shards, for the transport."""
        parts: dict[str, torch.Tensor] = {}
        device, dtype = self.transport.mesh.device, self.transport.dtype
        for matrix in self.owners.matrices:
            in_shard = self.transport.slices.get(matrix.leaf.path)
            if in_shard is None:
                continue
            stack = torch.zeros(
                len(trees), in_shard.stop - in_shard.start, dtype=dtype, device=device
            )
            for row, shards in zip(stack, trees, strict=True):
                # Why zeros without a gradient: every step runs the same collectives.
                if (shard := shards[matrix.unit][matrix.buffer.key]) is not None:
                    row.copy_(shard[in_shard])
            parts[matrix.leaf.path] = stack
        return parts

    def check_state(self, state: Any) -> None:
        """Raise unless ``state`` is one of this optimizer, with the matrices that the rank owns."""
        check_form(state, {"matrices", "others"}, "per_matrix")
        owned_paths = {matrix.leaf.path for matrix in self.transport.owned}
        if state["matrices"].keys() != owned_paths:
            raise ValueError(
                f"a state of per_matrix must hold the matrices that this rank owns, "
                f"{sorted(owned_paths)[:4]}; found {sorted(state['matrices'])[:4]}, of another plan, "
                f"number of ranks or choice of matrices: {NEW_STATE}"
            )


def _others(
    others: Any, matrix_paths: set[str], plan: Plan, mesh: Mesh
) -> TorchOptimizer | None:
    other_paths = group_leaves(plan, (), matrix_paths)[0]
    if others is None:
        if other_paths:
            raise ValueError(
                "others must be the optimizer of the leaves that are no matrices, such as "
                f"{next(iter(other_paths))!r}; found None: pass "
                "others=fs.torch_optimizer(torch.optim.AdamW, lr=...)"
            )
        return None
    check_optimizer(others, plan)
    if not isinstance(others, TorchOptimizer):
        pair_step = PairStep(
            others, plan, ParamGroupLayout(other_paths, 1, mesh.shard.rank)
        )
        return TorchOptimizer(pair_step.init, pair_step)
    if not isinstance(others.step, TorchStep):
        raise TypeError(
            "others must be an optimizer that updates each element by itself; found "
            f"{type(others.step).__name__}, which has owners too: pass torch_optimizer(...)"
        )
    step = others.step
    return TorchOptimizer(
        others.init,
        grouped_step(step.cls, step.options[0], step.groups, plan, mesh, matrix_paths),
    )


@dataclass(frozen=True, slots=True, eq=False)
class PairStep:
    """The step of an elementwise pair ``(init, update)`` on some of the leaves.

    Attributes:
        pair: the pair. It gets trees like the shards, with the elements of these leaves alone.
        plan: the plan of the shards.
        layout: the ranges of this rank's shards that these leaves occupy.
    """

    pair: Any
    plan: Plan
    layout: ParamGroupLayout

    def init(self, params: Any) -> Any:
        """Return the state before the first step."""
        return self.pair[0](self._pick(params))

    def __call__(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Update ``params``, which are donated, and return them with the new state."""
        picked, state = apply_update(
            self.pair[1], self._pick(grads), state, self._pick(params)
        )
        leaves, unflatten = tree.flatten(params)
        params = unflatten(donate(leaves))
        for unit, buffer in trainable_buffers(self.plan):
            self.layout.put(
                picked[unit.name][buffer.key], params[unit.name][buffer.key], buffer
            )
        return params, state

    def _pick(self, shards: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        picked: dict[str, dict[str, Any]] = {unit.name: {} for unit in self.plan.unit_list}
        for unit, buffer in trainable_buffers(self.plan):
            shard = shards[unit.name][buffer.key]
            picked[unit.name][buffer.key] = (
                None if shard is None else self.layout.pick(shard, buffer)
            )
        return picked


# --- whole matrices on their owners ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class MatrixTransport:
    """The way of matrices between this rank's shards and their owners; made by ``transport_of``.

    Attributes:
        owners: which rank owns which matrix.
        mesh: the ranks.
        owned: the matrices of this rank.
        slices: where the part of each matrix lies in this rank's shard, by path.
        there: the all-to-alls that bring parts to the owners, in order.
        back: the all-to-alls that bring results back, in order.
    """

    owners: Owners
    mesh: Mesh
    owned: Sequence[Matrix]
    slices: Mapping[str, slice]
    there: Sequence[AllToAll]
    back: Sequence[AllToAll]

    def updates(
        self,
        function: Callable[[Matrix, torch.Tensor], torch.Tensor],
        parts: dict[str, torch.Tensor],
        grads: Any,
        params: Any,
    ) -> Iterator[tuple[Matrix, torch.Tensor, torch.Tensor]]:
        """Yield each matrix that has a gradient, this rank's part of it, and of its update.

        Arguments:
            function: called on the owner, with the matrix and a stack of whole tensors. It returns
                the update of the whole matrix.
            parts: this rank's part of each matrix, by path: a stack of ``owners.gathered`` flat
                tensors. They're taken out.
            grads: this rank's shards of the gradient.
            params: this rank's shards of the parameters.
        """
        results = self.bring(parts, self.owners.gathered)
        for matrix in self.owned:
            path = matrix.leaf.path
            results[path] = function(matrix, results.pop(path)).to(self.dtype).unsqueeze(0)
        results = self._bring_back(results)
        for matrix in self.owners.matrices:
            path, unit, key = matrix.leaf.path, matrix.unit, matrix.buffer.key
            # Note: a matrix without a gradient stays as it is, as with torch.optim.
            if path in results and grads[unit][key] is not None:
                param_slice = params[unit][key][self.slices[path]]
                yield matrix, param_slice, results[path].reshape(-1).to(param_slice.device)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which parts are sent."""
        return dtype_of(self.owners.dtype)

    def bring(self, parts: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
        """Return stacks of ``count`` whole tensors that this rank owns, given this rank's parts."""
        for stage in self.there:
            sent_parts = [parts.pop(part.path) for part in stage.sent]
            received_parts = self._exchange(stage, sent_parts, count)
            # Note: parts come in the order of the ranks that send them, which is their order in
            # the matrix.
            parts_by_matrix: dict[tuple[str, int], list[torch.Tensor]] = {}
            for part, tensor in zip(stage.received, received_parts, strict=True):
                parts_by_matrix.setdefault((part.path, part.dim), []).append(tensor)
            for (path, dim), matrix_parts in parts_by_matrix.items():
                parts[path] = torch.cat(matrix_parts, dim + 1)
        for matrix in self.owned:
            parts[matrix.leaf.path] = parts[matrix.leaf.path].view(count, *matrix.shape())
        return parts

    def _bring_back(self, results: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parts in this rank's shards, given the results that it owns."""
        for stage in self.back:
            sent_parts = []
            for part in stage.sent:
                result = results[part.path]
                if len(part.shape) == 1:  # elements of a flat shard
                    result = result.reshape(1, -1)
                sent_parts.append(
                    result.narrow(part.dim + 1, part.begin, part.shape[part.dim])
                )
            # The owner keeps its own part only; it comes back with the others.
            for path in {part.path for part in stage.sent}:
                del results[path]
            received_parts = self._exchange(stage, sent_parts, 1)
            for part, tensor in zip(stage.received, received_parts, strict=True):
                results[part.path] = tensor
        return results

    def _exchange(
        self, stage: AllToAll, sent: list[torch.Tensor], count: int
    ) -> Sequence[torch.Tensor]:
        """Run one all-to-all of ``count`` tensors for each part; return the parts received."""
        flat_parts = [part.reshape(-1) for part in sent]
        if stage.event is not None:
            # A rank without matrices takes part all the same.
            nothing = torch.empty(0, dtype=self.dtype, device=self.mesh.device)
            send_buffer = torch.cat(flat_parts or [nothing])
            receive_sizes = [size * count for size in stage.receive_sizes]
            send_sizes = [size * count for size in stage.send_sizes]
            receive_buffer = send_buffer.new_empty(sum(receive_sizes))
            emit(times(stage.event, count))
            sizes = receive_sizes, send_sizes
            op = Op("all_to_all", "matrices", receive_buffer, send_buffer, 0, *sizes)
            in_graph(self.mesh.groups[stage.axis], stage.axis).start(op).wait()
            flat_parts = receive_buffer.split(
                [part.numel * count for part in stage.received]
            )
        # Without an event every rank sends to itself only.
        return [
            tensor.view(count, *part.shape)
            for tensor, part in zip(flat_parts, stage.received, strict=True)
        ]


def transport_of(owners: Owners, mesh: Mesh) -> MatrixTransport:
    """Return the way of matrices to their owners, and back, for this rank."""
    position, stages = mesh.position, owners.stages
    shard_parts = {
        m.leaf.path: m.buffer.part(m.leaf, mesh.shard.rank) for m in owners.matrices
    }
    return MatrixTransport(
        owners=owners,
        mesh=mesh,
        # The owners are the ranks at the place where all stages of a matrix have met.
        owned=[m for m in owners.matrices if m.place().items() <= position.items()],
        slices={
            path: part.in_shard
            for path, part in shard_parts.items()
            if part.end > part.begin
        },
        there=[owners.all_to_all(stage, position, back=False) for stage in stages],
        back=[owners.all_to_all(stage, position, back=True) for stage in reversed(stages)],
    )
