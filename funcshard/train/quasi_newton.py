"""``lbfgs``: ``torch.optim.LBFGS``, whose vectors are the shards of all ranks.

The algorithm is torch's. It sees the trainable shards of a rank as one flat vector, of a class
whose inner products and norms are those of the whole tree. So every rank takes the same decisions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from funcshard._utils.torch_private import untraced
from funcshard.comm import Mesh
from funcshard.core import Shards, check_cut, check_fits, pmean, value_and_grad, vdot
from funcshard.plan import Plan, trainable_buffers
from funcshard.train.clipping import global_norm


@untraced
def lbfgs(
    loss_fn: Callable[[Shards], torch.Tensor],
    shards: Shards,
    plan: Plan,
    mesh: Mesh,
    **options: Any,
) -> tuple[Shards, dict[str, int]]:
    """Minimise the mean of the ranks' losses by L-BFGS, starting from these shards.

    L-BFGS compares losses, so ``loss_fn`` has to be of a fixed batch. It keeps
    ``2 * history_size + 6`` vectors like the shards.

    Arguments:
        loss_fn: ``loss_fn(shards)`` -> the loss of this rank.
        shards: where to start.
        plan: the plan of the shards.
        mesh: the ranks.
        options: those of ``torch.optim.LBFGS``, such as ``max_iter``, by default 20,
            ``tolerance_grad`` and ``history_size``. The line search is ``"strong_wolfe"`` unless
            you pass ``line_search_fn=None``.

    Returns:
        ``(shards, info)``: the new shards, and the number of steps (``"n_iter"``) and of gradients
        (``"func_evals"``) that they took.

    Raises:
        TypeError, ValueError: see ``value_and_grad`` and ``torch.optim.LBFGS``; or ``shards`` or
            ``mesh`` does not fit the plan.

    Example:
        >>> import torch, funcshard as fs
        >>> params = {"w": torch.tensor([3.0, -2.0])}
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     f = fs.unshard(lambda w: (w["w"] - 1).square().sum(), plan.units[""], mesh)
        ...     shards = fs.shard(params, plan, mesh)
        ...     shards, info = fs.lbfgs(lambda s: f(s[""]), shards, plan, mesh)
        ...     return fs.gather(shards, plan, mesh)["w"].round(decimals=4).tolist()
        >>> fs.simulate(main, world_size=2)
        [[1.0, 1.0], [1.0, 1.0]]

    Source: ``torch.optim.LBFGS``; Nocedal and Wright, "Numerical optimization", 2006, chapter 7.
    """
    check_fits(plan, mesh)
    check_cut(plan, shards)
    differentiate = value_and_grad(loss_fn, mesh=mesh)
    keys = [(unit.name, buffer.key) for unit, buffer in trainable_buffers(plan)]
    likes = [shards[unit_name][key] for unit_name, key in keys]
    nothing = {
        unit_name: dict.fromkeys(unit_shards) for unit_name, unit_shards in shards.items()
    }

    def as_tree(vector: torch.Tensor, others: Any = nothing) -> Any:
        # Why plain: the functions that get these compute numbers, which ``Vector`` refuses.
        parts = (
            vector.detach()
            .as_subclass(torch.Tensor)
            .split([like.numel() for like in likes])
        )
        tree = {unit_name: dict(unit_shards) for unit_name, unit_shards in others.items()}
        for (unit_name, key), part, like in zip(keys, parts, likes, strict=True):
            tree[unit_name][key] = part.to(like.dtype)
        return tree

    def as_vector(tree: Shards) -> torch.Tensor:
        parts = [tree[unit_name][key].detach() for unit_name, key in keys]
        return torch.cat(parts).as_subclass(Vector)

    class Vector(torch.Tensor):
        """A rank's trainable shards. Torch takes ``max`` and ``sum`` of absolute values only."""

        def dot(self, other: torch.Tensor) -> torch.Tensor:
            return vdot(as_tree(self), as_tree(other), plan, mesh)

        def max(self) -> Any:  # type: ignore[override]
            return global_norm(as_tree(self), plan, mesh, math.inf)

        def sum(self) -> torch.Tensor:  # type: ignore[override]
            return global_norm(as_tree(self), plan, mesh, 1.0)

        @classmethod
        def __torch_function__(cls, func: Any, *args: Any) -> Any:
            result = super().__torch_function__(func, *args)
            is_number = isinstance(result, torch.Tensor) and result.ndim == 0
            assert not is_number, f"LBFGS calls {func}, which sees this rank's shards only"
            return result

    point = as_vector(shards)

    def closure() -> torch.Tensor:
        loss, grads = differentiate(as_tree(point, shards))
        point.grad = as_vector(grads)
        return pmean(loss.detach(), mesh)

    optimizer = torch.optim.LBFGS([point], **{"line_search_fn": "strong_wolfe", **options})
    optimizer.step(closure)
    # Why a copy: the parts of the vector share memory.
    best = as_tree(point, shards)
    for unit_name, key in keys:
        best[unit_name][key] = best[unit_name][key].clone()
    state = optimizer.state[point]
    return best, {name: state[name] for name in ("n_iter", "func_evals")}
