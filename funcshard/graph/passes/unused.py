"""``drop_unused``: operations without users are taken out."""

from __future__ import annotations

from funcshard.graph.passes.applying import applied
from funcshard.graph.traced import Traced


def drop_unused(traced: Traced) -> Traced:
    """Take out operations whose results no operation reads.

    Operations that write to memory, draw random numbers or communicate stay. Recordings and the
    results of all other passes hold no such operations; those of your own changes may.

    Arguments:
        traced: the step, which does not change.

    Returns:
        The changed step, with the bits and the collectives of ``traced``.

    Raises:
        TypeError: ``traced`` is no traced step.

    Example:
        >>> import torch, funcshard as fs
        >>> apply, params, buffers = fs.make_functional(torch.nn.Linear(3, 1))
        >>> def add_cosine(step_graph):
        ...     new = step_graph.copy()
        ...     first, *_, output = new.graph.nodes
        ...     with new.graph.inserting_before(output):
        ...         cosine = new.graph.call_function(torch.ops.aten.cos.default, (first,))
        ...     cosine.meta["val"] = first.meta["val"].cos()
        ...     return new
        >>> def main(mesh):
        ...     plan = fs.make_plan(params, mesh)
        ...     sharded = fs.fully_shard(apply, plan, mesh)
        ...     loss_fn = lambda shards, buffers, x: sharded(shards, buffers, x).square().mean()
        ...     optimizer = fs.torch_optimizer(torch.optim.SGD, lr=0.1)
        ...     step = fs.make_train_step(loss_fn, optimizer, plan, mesh)
        ...     state = step.init(fs.shard(params, plan, mesh), buffers)
        ...     more = fs.trace(step, state, torch.ones(2, 3)).changed(add_cosine)
        ...     return "cos" in str(more), "cos" in str(fs.passes.drop_unused(more))
        >>> fs.simulate(main, world_size=2)[0]
        (True, False)

    Source: dead code elimination.
    """
    return applied(traced, lambda step_graph: None, "drop_unused")
