"""``per_matrix``: an optimizer written for one whole matrix, on flat shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from funcshard._utils import tree
from funcshard._utils.donation import DONATED_STATE, check_not_donated, donate
from funcshard._utils.options import outline
from funcshard.comm import Mesh
from funcshard.core import check_fits, check_shards
from funcshard.plan import Plan, dtype_of
from funcshard.train.matrix_owners import Matrix, Owners, assigned
from funcshard.train.matrix_transport import MatrixTransport, transport_of
from funcshard.train.optimizer_pair import TorchOptimizer, check_optimizer
from funcshard.train.optimizers import Schedule, TorchStep, apply_optimizer, without_leaves
from funcshard.train.param_groups import ParamGroupLayout, group_leaves, trainable_buffers
from funcshard.train.state_checks import NEW_STATE, check_form


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
        TypeError: a function takes other arguments, or ``others`` is no optimizer.

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
            whole = matrices.pop(matrix.leaf.path)[0].to(dtype_of(matrix.buffer.dtype))
            states[matrix.leaf.path] = self.init_matrix(whole)
        others = None if self.others is None else self.others.init(params)
        return {"matrices": states, "others": others}

    @torch.no_grad()
    def __call__(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Update ``params`` and ``state``, which are donated, by one step."""
        check_shards(self.plan, params)
        self._check_state(state)
        if self.others is None:
            leaves, unflatten = tree.flatten(params)
            params, others_state = unflatten(donate(leaves)), None
        else:
            # These first: they donate the shards, and the matrices' updates go into the new ones.
            params, others_state = self.others.step(grads, state["others"], params)
        states, state["matrices"] = state["matrices"], DONATED_STATE

        def update(matrix: Matrix, whole: torch.Tensor) -> torch.Tensor:
            path, dtype = matrix.leaf.path, dtype_of(matrix.buffer.dtype)
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
        updates = self.transport.on_owners(update, self._parts(*sent))
        for matrix in self.owners.matrices:
            path, key = matrix.leaf.path, matrix.buffer.key
            if path in updates and grads[matrix.unit][key] is not None:
                param_slice = params[matrix.unit][key][self.transport.slices[path]]
                param_slice.add_(updates[path].reshape(-1).to(param_slice))
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

    def _check_state(self, state: Any) -> None:
        check_form(state, {"matrices", "others"}, "per_matrix")
        check_not_donated(state["matrices"])
        owned_paths = {matrix.leaf.path for matrix in self.transport.owned}
        if state["matrices"].keys() != owned_paths:
            raise ValueError(
                f"a state of per_matrix must hold the matrices that this rank owns, "
                f"{sorted(owned_paths)[:4]}; found {sorted(state['matrices'])[:4]}, of another plan, "
                f"number of ranks or choice of matrices: {NEW_STATE}"
            )


# --- other leaves ---------------------------------------------------------------------------------


def _others(others: Any, matrix_paths: set[str], plan: Plan, mesh: Mesh) -> TorchOptimizer | None:
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
        step = PairStep(others, plan, ParamGroupLayout(other_paths, 1, mesh.shard.rank))
        return TorchOptimizer(step.init, step)
    if not isinstance(others.step, TorchStep):
        raise TypeError(
            "others must be an optimizer that updates each element by itself; found "
            f"{type(others.step).__name__}, which has owners too: pass torch_optimizer(...)"
        )
    return TorchOptimizer(others.init, without_leaves(others.step, matrix_paths, plan, mesh))


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
        picked, state = apply_optimizer(self.pair, self._pick(grads), state, self._pick(params))
        leaves, unflatten = tree.flatten(params)
        params = unflatten(donate(leaves))
        for unit, buffer in trainable_buffers(self.plan):
            ranges = self.layout.ranges(buffer)
            parts = picked[unit.name][buffer.key].split([part.numel for part in ranges])
            for (_, start, stop), part in zip(ranges, parts, strict=True):
                params[unit.name][buffer.key][start:stop] = part
        return params, state

    def _pick(self, shards: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
        picked: dict[str, dict[str, Any]] = {unit.name: {} for unit in self.plan.unit_list}
        for unit, buffer in trainable_buffers(self.plan):
            shard = shards[unit.name][buffer.key]
            picked[unit.name][buffer.key] = (
                None if shard is None else self.layout.pick(shard, buffer)
            )
        return picked
